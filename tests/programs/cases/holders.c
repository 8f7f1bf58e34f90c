// Who else holds a connection: children that ended or became another program do not any more, and the parent's
// calls are as cheap as before.
#include "peer.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <ucontext.h>

extern char **environ;

#ifdef __x86_64__
static volatile int questions;

static void count(int number, siginfo_t *info, void *context) {
    (void)number;
    (void)info;
    questions++;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = O_RDWR | O_NONBLOCK;
}

// Counts fcntl(F_GETFL): what is asked of the kernel at each call while somebody else may change the flags. `unseen`: by
// the library, which takes connections back to TCP before a filter that it knows of.
static void count_questions(bool unseen) {
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fcntl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, F_GETFL, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof program / sizeof *program, program};
    struct sigaction act = {.sa_sigaction = count, .sa_flags = SA_SIGINFO};
    OK(sigaction(SIGSYS, &act, NULL));
    OK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    if (!unseen) {
        OK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0));
        return;
    }
    long result;
    __asm__ volatile("xor %%r10d, %%r10d\n\txor %%r8d, %%r8d\n\tsyscall"
                     : "=a"(result)
                     : "a"(SYS_prctl), "D"(PR_SET_SECCOMP), "S"(SECCOMP_MODE_FILTER), "d"(&filter)
                     : "rcx", "r11", "r8", "r10", "memory");
    EQ(result, 0);
}

static void by__exit(void) {
    _exit(0);
}

static void by__Exit(void) {
    _Exit(0);
}

static void by_exit(void) {
    exit(0);
}

static void by_execve(void) {
    char *argv[] = {"true", NULL};
    execve("/bin/true", argv, environ);
    _exit(1);
}

static void by_execvp(void) {
    char *argv[] = {"true", NULL};
    execvp("true", argv);
    _exit(1);
}

static void by_execl(void) {
    execl("/bin/sh", "sh", "-c", "test $# = 7 && test $7 = g", "name", "a", "b", "c", "d", "e", "f", "g",
        (char *)NULL);
    _exit(1);
}

static void by_execlp(void) {
    execlp("true", "true", (char *)NULL);
    _exit(1);
}

static void by_execle(void) {
    execle("/bin/sh", "sh", "-c", "test $VALUE = 1", (char *)NULL, (char *[]){"VALUE=1", NULL});
    _exit(1);
}

static void by_failed_execs(void) {
    char *argv[] = {"nothing", NULL};
    FAILS(execve("/nowhere/at/all", argv, environ), ENOENT);
    FAILS(execvp("no-such-program-anywhere", argv), ENOENT);
    FAILS(execl("/dev/null", "null", (char *)NULL), EACCES);
    _exit(0);
}

// A byte each way; our end does not wait.
static void exchange(struct pair p, char byte) {
    char got;
    EQ(peer_send(p.peer, &byte, 1, 0), 1);
    EQ(send(p.fd, &byte, 1, 0), 1);
    EQ(peer_recv(p.peer, &got, 1, 0), 1);
    while (recv(p.fd, &got, 1, 0) < 0)
        EQ(errno, EAGAIN);
    EQ(got, byte);
}

PAIR_CASE(children_that_are_gone_hold_nothing) {
    void (*ways[])(void) = {by__exit, by__Exit, by_exit, by_execve, by_execvp, by_execl, by_execlp, by_execle,
        by_failed_execs};
    struct pair p = pair_open();
    OK(fcntl(p.fd, F_SETFD, FD_CLOEXEC));
    nonblocking(p.fd, true);
    count_questions(false);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        pid_t pid = OK(fork());
        if (pid == 0)
            ways[i]();
        child_succeeds(pid);
        char got;
        exchange(p, i);
        for (int k = 0; k < 3; k++)
            FAILS(recv(p.fd, &got, 1, 0), EAGAIN);
        int before = questions;
        for (int k = 0; k < 10; k++)
            FAILS(recv(p.fd, &got, 1, 0), EAGAIN);
        if (questions != before)
            check_failed(__FILE__, __LINE__, "nothing is asked", "way %zu: %d", i, questions - before);
    }
    pair_close(p);
}

PAIR_CASE(failed_exec_leaves_the_connection) {
    struct pair p = pair_open();
    OK(fcntl(p.fd, F_SETFD, FD_CLOEXEC));
    pid_t pid = OK(fork());
    if (pid == 0) {
        char *argv[] = {"nothing", NULL};
        FAILS(execve("/nowhere", argv, environ), ENOENT);
        FAILS(execvp("no-such-program-anywhere", argv), ENOENT);
        send_all(p.fd, 1, 0, 1000);
        recv_all(p.fd, 1, 0, 1000);
        _exit(0);
    }
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 1000), 0);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 1, 0, 1000), 0);
    child_succeeds(pid);
    send_all(p.fd, 1, 0, 1000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 1000), 0);
    pair_close(p);
}

static int started[2];

static void pauses(void *arg) {
    (void)arg;
    EQ(write(started[1], "", 1), 1);
    for (;;)
        pause();
}

// A child that holds what we do, and has come back from its fork.
static pid_t holder(void) {
    char byte;
    OK(pipe(started));
    pid_t pid = child(pauses, NULL);
    EQ(read(started[0], &byte, 1), 1);
    return pid;
}

static void kill_child(pid_t pid) {
    int status;
    close(started[0]);
    close(started[1]);
    kill(pid, SIGKILL);
    EQ(waitpid(pid, &status, 0), pid);
    EQ(status, SIGKILL);
}

// Soon after the death of the other holder nothing is asked any more.
PAIR_CASE(killed_child_holds_nothing) {
    struct pair p = pair_open();
    nonblocking(p.fd, true);
    count_questions(true);
    for (int i = 0; i < 3; i++) {
        kill_child(holder());
        double until = now() + 10;
        for (int before = -1; before != questions;) {
            CHECK(now() < until);
            before = questions;
            char got;
            exchange(p, i);
            FAILS(recv(p.fd, &got, 1, 0), EAGAIN);
        }
    }
    pair_close(p);
}

// A connection that a killed process has had changes over once it is gone.
CASE(killed_child_does_not_keep_a_connection_in_tcp) {
    int ends[2];
    connect_here(&ends[0], &ends[1]);
    pid_t pid = holder();
    for (int i = 0; i < 10; i++) {
        send_all(ends[0], 1, i, 1);
        recv_all(ends[1], 1, i, 1);
        send_all(ends[1], 1, i, 1);
        recv_all(ends[0], 1, i, 1);
    }
    kill_child(pid);
    // For a moment it is believed to live.
    double until = now() + 0.1;
    for (int i = 0; now() < until; i++) {
        send_all(ends[0], 1, i, 1);
        recv_all(ends[1], 1, i, 1);
    }
    warm_here(ends[0], ends[1]);
    close(ends[0]);
    close(ends[1]);
}
#endif

static int begun[2];

static void reads_bit_by_bit(void *end) {
    char buf[100];
    EQ(write(begun[1], "", 1), 1);
    while (recv(*(int *)end, buf, sizeof buf, 0) > 0)
        ;
    _exit(0);
}

// Who reads on after a process that was killed in a receive misses what that took, and nothing else.
CASE(what_a_killed_receiver_took_is_all_that_is_missing) {
    enum { FIRST = 200000, REST = 10000, ALL = FIRST + REST };
    static char buf[ALL + 1];
    char byte;
    for (int i = 0; i < 60; i++) {
        int ends[2];
        connect_here(&ends[0], &ends[1]);
        // By TCP; then through the ring, as soon as both ends have looked.
        send_all(ends[0], 1, 0, FIRST);
        recv_all(ends[1], 1, 0, 10);
        for (int k = 0; k < 10; k++) {
            send_all(ends[1], 2, k * 10, 10);
            recv_all(ends[0], 2, k * 10, 10);
        }
        send_all(ends[0], 1, FIRST, REST);
        OK(shutdown(ends[0], SHUT_WR));
        OK(pipe(begun));
        pid_t pid = child(reads_bit_by_bit, &ends[1]);
        EQ(read(begun[0], &byte, 1), 1);
        for (double until = now() + (double)(rand() % 1000) / 1e6; now() < until;)
            ;
        kill(pid, SIGKILL);
        EQ(waitpid(pid, NULL, 0), pid);
        close(begun[0]);
        close(begun[1]);
        size_t n = 0;
        for (ssize_t got; (got = OK(recv(ends[1], buf + n, sizeof buf - n, 0))) > 0;)
            n += got;
        CHECK(n <= ALL - 10);
        check_pattern(1, ALL - n, buf, n);
        close(ends[0]);
        close(ends[1]);
    }
}

static void sends_for_ever(void *end) {
    static char buf[65536];
    for (;;)
        OK(send(*(int *)end, buf, sizeof buf, 0));
}

// Nobody waits any more for what it was asleep for, and the connection leaves the ring all the same.
PAIR_CASE(killed_child_was_asleep_in_a_send) {
    struct pair p = pair_open();
    pid_t pid = child(sends_for_ever, &p.fd);
    wait_asleep(pid, pid);
    kill(pid, SIGKILL);
    EQ(waitpid(pid, NULL, 0), pid);
    char byte = 0;
    EQ(peer_send(p.peer, &byte, 1, MSG_OOB), 1);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 1, 0, 1000), 0);
    recv_all(p.fd, 1, 0, 1000);
    pair_close(p);
}

static void sleeps_in_poll(void *end) {
    struct pollfd f = {.fd = *(int *)end, .events = POLLIN};
    poll(&f, 1, -1);
}

// As who is killed behind the system call that takes it: it is not looked for among the bytes that follow the ring.
PAIR_CASE(doorbell_that_nobody_counted_is_missed_by_nobody) {
    struct pair p = pair_open();
    pid_t pid = child(sleeps_in_poll, &p.fd);
    wait_asleep(pid, pid);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 1, 0, 1), 0);
    char byte;
    if (!is_plain() && variant.warm)
        EQ(unseen(SYS_read, p.fd, (long)&byte, 1), 1);
    kill(pid, SIGKILL);
    OK(waitpid(pid, NULL, 0));
    EQ(peer_call(P_SEND_PATTERN, p.peer, 1, 1, 999), 0);
    EQ(dup2(p.fd, 0), 0);
    recv_all(0, 1, 0, 1000);
    close(0);
    pair_close(p);
}

static int steps[2];

// Its own buffers are small; ours, through which the ring has grown meanwhile, are not.
static void sends_with_small_buffers(void *end) {
    int fd = *(int *)end;
    char byte;
    set_option(fd, SOL_SOCKET, SO_SNDBUF, 20000);
    send_all(fd, 1, 0, 10);
    EQ(write(begun[1], "", 1), 1);
    EQ(read(steps[0], &byte, 1), 1);
    send_all(fd, 1, 300010, 10);
}

PAIR_CASE(window_that_another_process_has_grown) {
    struct pair p = pair_open();
    char byte;
    EQ(peer_call(P_OPTION, p.peer, SOL_SOCKET, SO_RCVBUF, 20000), 0);
    OK(pipe(begun));
    OK(pipe(steps));
    pid_t pid = child(sends_with_small_buffers, &p.fd);
    EQ(read(begun[0], &byte, 1), 1);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 10), 0);
    peer_begin(P_RECV_PATTERN, p.peer, 1, 10, 300000);
    send_all(p.fd, 1, 10, 300000);
    EQ(peer_end(), 0);
    EQ(write(steps[1], "", 1), 1);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 300010, 10), 0);
    child_succeeds(pid);
    pair_close(p);
}
