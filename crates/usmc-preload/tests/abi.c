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
#include <sys/prctl.h>
#include <sys/sendfile.h>
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

#ifdef __i386__
/* Calls `function` with `count` arguments and says whether what lies behind them on the stack is still there: the
 * place of arguments that were not passed belongs to the caller. */
static int keeps_the_rest(void *function, int count, long a, long b, long c)
{
	long stack[16] = {a, b, c}, *from = stack;
	for (int i = count; i < 16; i++)
		stack[i] = 0x5a5a0000 + i;
	/* Copies the words to where arguments lie, calls, and copies them back. */
	__asm__ volatile("mov %%esp, %%ebx\n\t"
			 "sub $64, %%esp\n\t"
			 "and $-16, %%esp\n\t"
			 "mov %%esp, %%edi\n\t"
			 "mov $16, %%ecx\n\t"
			 "rep movsl\n\t"
			 "lea -64(%%esi), %%edi\n\t"
			 "call *%%eax\n\t"
			 "mov %%esp, %%esi\n\t"
			 "mov $16, %%ecx\n\t"
			 "rep movsl\n\t"
			 "mov %%ebx, %%esp"
			 : "+S"(from), "+a"(function)
			 :
			 : "ebx", "ecx", "edx", "edi", "memory", "cc");
	for (int i = count; i < 16; i++)
		if (stack[i] != 0x5a5a0000 + i)
			return 0;
	return 1;
}
#endif

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
	void **top = (void **)(stack + 65536) - 8;
#ifdef __i386__
	/* Below it lie the registers that syscall(2) has saved and takes back. */
	top[4] = child_elsewhere;
#else
	*top = child_elsewhere;
#endif
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
#ifdef SYS_mmap2
	char *map = (char *)syscall(SYS_mmap2, 0L, 4096L, (long)PROT_READ, (long)MAP_SHARED, (long)file, 1L);
#else
	char *map = (char *)syscall(SYS_mmap, 0L, 4096L, (long)PROT_READ, (long)MAP_SHARED, (long)file, 4096L);
#endif
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

#ifdef __i386__
	SAY("fcntl's caller keeps its stack", keeps_the_rest(fcntl, 2, s[1], F_GETFL, 0));
	SAY("ioctl's", keeps_the_rest(ioctl, 2, s[1], 0x1234, 0));
	SAY("open's", keeps_the_rest(open, 2, (long)"/", O_RDONLY, 0));
	SAY("openat's", keeps_the_rest(openat, 3, -1, (long)"/", O_RDONLY));
	SAY("prctl's", keeps_the_rest(prctl, 1, PR_GET_DUMPABLE, 0, 0));
	SAY("syscall's", keeps_the_rest(syscall, 1, SYS_getppid, 0, 0));
	SAY("syscall's of a call of ours", keeps_the_rest(syscall, 2, SYS_close, -1, 0));
	SAY("syscall's of a bad number", keeps_the_rest(syscall, 1, 9999, 0, 0));
	/* The ways of Linux 2.0. */
	long socketcall[6] = {s[0], (long)"abc", 3, 0, 0, 0};
	SAY("socketcall send", syscall(SYS_socketcall, 9, socketcall));
	socketcall[1] = (long)buf;
	socketcall[0] = s[1];
	SAY("socketcall recv", syscall(SYS_socketcall, 10, socketcall));
	SAY("socketcall, bad number", syscall(SYS_socketcall, 99, socketcall));
	SAY("socketcall, bad place", syscall(SYS_socketcall, 10, 8));
	struct { long sec, usec; } brief = {0, 0};
	long select[5] = {s[1] + 1, (long)&set, 0, 0, (long)&brief};
	SAY("old select", syscall(SYS_select, select));
	struct { long long sec, nsec; } long_time = {5, 0};
	pfd.events = POLLOUT;
	SAY("syscall ppoll_time64", syscall(414, &pfd, 1L, &long_time, &none, 8L));
	SAY("time left", long_time.sec == 4 && long_time.nsec > 0);
	SAY("syscall epoll_pwait2", syscall(SYS_epoll_pwait2, ep, &event, 1L, &long_time, &none, 8L));
	SAY("syscall fcntl64", syscall(SYS_fcntl64, s[1], F_GETFL) & O_RDWR);
	struct flock64 wide = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1LL << 40, .l_len = 1};
	SAY("fcntl64", fcntl64(file, F_SETLK64, &wide));
	SAY("fcntl64, open description", fcntl64(file, F_OFD_SETLK, &wide));
	loff_t far = 1LL << 33;
	int null = open("/dev/null", O_WRONLY), big = open64("abi-file", O_RDWR);
	SAY("large files are open64's", (fcntl(big, F_GETFL) & 0100000) != 0 && !(fcntl(file, F_GETFL) & 0100000));
	SAY("pwritev64", pwritev64(big, &iov, 1, far));
	SAY("syscall preadv", syscall(SYS_preadv, big, &iov, 1L, (long)far, (long)(far >> 32)));
	SAY("sendfile64", sendfile64(null, big, &far, 2));
	SAY("sendfile64's place", far - (1LL << 33));
	ftruncate(file, 8192);
	close(null);
	close(big);
#endif

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
