/* Calls whose arguments do not fit one C signature, checked from C: what is printed must not depend on a
 * preload. Each check prints one line; a wrong value prints the value. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* The value first: the order in which arguments are evaluated is nobody's promise. */
#define SAY(name, value) \
	do { \
		errno = 0; \
		long long said = (long long)(value); \
		int left = errno; \
		printf("%s: %lld errno %d\n", name, said, left); \
	} while (0)

static int vprint(int fd, const char *format, ...)
{
	va_list list;
	va_start(list, format);
	int n = vdprintf(fd, format, list);
	va_end(list);
	return n;
}

static int child(void *arg)
{
	*(volatile int *)arg = 42;
	return 7;
}

static volatile int elsewhere;

/* Returned to, on its own stack: nothing may have been pushed there between. */
static void child_elsewhere(void)
{
	elsewhere = 43;
	_exit(6);
}

static void *reads_for_ever(void *fd)
{
	char byte;
	read((int)(intptr_t)fd, &byte, 1);
	return NULL;
}

static volatile sig_atomic_t caught;
static void handler(int number) { caught = number; }

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "overflow")) {
		/* What FORTIFY_SOURCE calls, made to fail. */
		ssize_t (*chk)(int, void *, size_t, size_t) =
			(ssize_t(*)(int, void *, size_t, size_t))dlsym(RTLD_DEFAULT, "__read_chk");
		char small[4];
		return (int)chk(0, small, 8, sizeof small);
	}
	setvbuf(stdout, NULL, _IONBF, 0);
	int p[2], s[2], status;
	char buf[256] = "";

	SAY("pipe", pipe(p));
	SAY("dprintf", dprintf(p[1], "%d %s %.3f %c %lld %g %g %g %g %g %g %g %g|", 1, "two", 3.5, '4', 5LL, .1, .2,
			       .3, .4, .5, .6, .7, .8));
	SAY("vdprintf", vprint(p[1], "%d %s %.3f %c %lld %g %g %g %g %g %g %g %g|", 1, "two", 3.5, '4', 5LL, .1, .2,
			       .3, .4, .5, .6, .7, .8));
	SAY("read", read(p[0], buf, sizeof buf - 1));
	puts(buf);

	SAY("fcntl without argument", fcntl(p[0], F_GETFD));
	SAY("fcntl with integer", fcntl(p[0], F_SETFL, O_NONBLOCK));
	SAY("fcntl flags", fcntl(p[0], F_GETFL) & O_NONBLOCK ? 1 : 0);
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	int file = open("abi-file", O_RDWR | O_CREAT | O_TRUNC, 0640);
	SAY("fcntl with pointer", fcntl(file, F_SETLK, &lock));
	SAY("umode", ({ int q = open("abi-file", O_RDONLY); close(q); q == file + 1; }));
	int n = -1;
	SAY("ioctl with pointer", ioctl(p[0], FIONREAD, &n));
	SAY("unread", n);
	SAY("read EAGAIN", read(p[0], buf, 1));
	SAY("close bad", close(-1));
	SAY("read bad", read(9999, buf, 1));

	char *stack = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int value = 0, tid = 0;
	int pid = clone(child, stack + 65536, CLONE_VM | CLONE_PARENT_SETTID | SIGCHLD, &value, &tid, NULL, NULL);
	waitpid(pid, &status, 0);
	SAY("clone", pid > 0 && tid == pid);
	SAY("clone's child", value * 100 + WEXITSTATUS(status));
	pid = vfork();
	if (pid == 0)
		_exit(9);
	waitpid(pid, &status, 0);
	SAY("vfork", WEXITSTATUS(status));
	pid = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (pid == 0)
		_exit(3);
	waitpid(pid, &status, 0);
	SAY("syscall clone", WEXITSTATUS(status));
	void **top = (void **)(stack + 65536) - 2;
	*top = child_elsewhere;
	pid = syscall(SYS_clone, (long)(CLONE_VM | CLONE_VFORK | SIGCHLD), top, NULL, NULL, NULL);
	waitpid(pid, &status, 0);
	SAY("syscall clone with a stack", elsewhere * 100 + WEXITSTATUS(status));
	struct clone_args args = {.exit_signal = SIGCHLD};
	pid = syscall(SYS_clone3, &args, sizeof args);
	if (pid == 0)
		_exit(4);
	waitpid(pid, &status, 0);
	SAY("syscall clone3", WEXITSTATUS(status));
	pid = _Fork();
	if (pid == 0)
		_exit(5);
	waitpid(pid, &status, 0);
	SAY("_Fork", WEXITSTATUS(status));

	/* Six arguments behind the number: the last one is on the stack. */
	ftruncate(file, 8192);
	pwrite(file, "mapped", 6, 4096);
	char *map = (char *)syscall(SYS_mmap, 0L, 4096L, (long)PROT_READ, (long)MAP_SHARED, (long)file, 4096L);
	SAY("syscall mmap", map != MAP_FAILED && !memcmp(map, "mapped", 6));
	SAY("syscall EBADF", syscall(SYS_close, -1));
	SAY("syscall gettid", syscall(SYS_gettid) == getpid());

	SAY("socketpair", socketpair(AF_UNIX, SOCK_STREAM, 0, s));
	SAY("syscall write", syscall(SYS_write, s[0], "0123456789", 10L));
	struct iovec iov = {buf, 4};
	SAY("syscall preadv2", syscall(SYS_preadv2, s[1], &iov, 1L, -1L, -1L, 0L));
	SAY("preadv2", preadv2(s[1], &iov, 1, -1, 0));
	SAY("preadv", preadv(s[1], &iov, 1, 0));
	struct pollfd pfd = {s[1], POLLIN, 0};
	sigset_t none;
	sigemptyset(&none);
	struct timespec limit = {5, 0};
	SAY("syscall ppoll", syscall(SYS_ppoll, &pfd, 1L, &limit, &none, 8L));
	SAY("time left", limit.tv_sec == 4 && limit.tv_nsec > 0);
	SAY("revents", pfd.revents);
	limit = (struct timespec){5, 0};
	SAY("ppoll", ppoll(&pfd, 1, &limit, &none));
	SAY("time untouched", limit.tv_sec);
	fd_set set;
	FD_ZERO(&set);
	FD_SET(s[1], &set);
	struct { const sigset_t *at; size_t size; } six = {&none, 8};
	SAY("syscall pselect6", syscall(SYS_pselect6, (long)s[1] + 1, &set, NULL, NULL, &limit, &six));
	int ep = syscall(SYS_epoll_create1, 0L);
	struct epoll_event event = {EPOLLIN, {.u64 = 0x1122334455667788}};
	SAY("epoll_ctl", syscall(SYS_epoll_ctl, ep, EPOLL_CTL_ADD, s[1], &event));
	memset(&event, 0, sizeof event);
	SAY("syscall epoll_pwait", syscall(SYS_epoll_pwait, ep, &event, 1L, 0L, &none, 8L));
	SAY("data", event.data.u64 == 0x1122334455667788);
	SAY("syscall epoll_pwait, bad set size", syscall(SYS_epoll_pwait, ep, &event, 1L, 0L, &none, 4L));

	struct sigaction action = {.sa_handler = handler};
	SAY("sigaction", sigaction(SIGUSR1, &action, NULL));
	raise(SIGUSR1);
	SAY("caught", caught);
	SAY("signal", signal(SIGUSR1, SIG_DFL) == handler);
	SAY("signal bad", (long)signal(999, SIG_DFL));

	/* A thread in read(2) can be cancelled. */
	int q[2];
	pthread_t thread;
	void *result = NULL;
	pipe(q);
	pthread_create(&thread, NULL, reads_for_ever, (void *)(intptr_t)q[0]);
	pthread_cancel(thread);
	pthread_join(thread, &result);
	SAY("cancelled", result == PTHREAD_CANCELED);

	FILE *stream = fdopen(s[1], "r");
	SAY("fdopen", stream && fgetc(stream) == '8');
	SAY("fdopen bad", fdopen(-1, "r") != NULL);
	SAY("dlerror", dlerror() != NULL);
	SAY("close_range", close_range(3, 1000, 0));
	SAY("closed", fcntl(s[0], F_GETFD));
	unlink("abi-file");
	return 0;
}
