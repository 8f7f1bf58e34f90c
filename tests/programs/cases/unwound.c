// Calls that do not return: a handler that jumps out of them, a thread that ends or is cancelled inside.
#include "peer.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>

static int the_fd;

// --- calls that sleep

static void in_recv(int fd) {
    char buf[64];
    recv(fd, buf, sizeof buf, 0);
}

static void in_recv_all(int fd) {
    char buf[100];
    recv(fd, buf, sizeof buf, MSG_WAITALL);
}

static void in_recvmsg(int fd) {
    char buf[64];
    struct iovec iov = {buf, sizeof buf};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    recvmsg(fd, &msg, 0);
}

static void in_poll(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    poll(&p, 1, -1);
}

static void in_select(int fd) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    select(fd + 1, &set, NULL, NULL, NULL);
}

static int the_set;

static void in_epoll(int fd) {
    (void)fd;
    struct epoll_event event;
    epoll_wait(the_set, &event, 1, -1);
}

static int the_pipe[2];

static void in_splice(int fd) {
    splice(fd, NULL, the_pipe[1], NULL, 10, 0);
}

// Forever, once the connection is full.
static void in_send(int fd) {
    static char zeros[65536];
    for (;;)
        send(fd, zeros, sizeof zeros, 0);
}

static void in_writev(int fd) {
    static char zeros[65536];
    struct iovec iov[2] = {{zeros, sizeof zeros}, {zeros, sizeof zeros}};
    for (;;)
        writev(fd, iov, 2);
}

static void (*const receives[])(int) = {in_recv, in_recv_all, in_recvmsg, in_poll, in_select, in_epoll, in_splice};
#define RECEIVES (sizeof receives / sizeof *receives)
static void (*const sends[])(int) = {in_send, in_writev};

// --- who wakes the sleeper: a thread that waits until it sleeps, then signals or cancels it

struct sleeper {
    void (*call)(int);
    pthread_t thread;
    _Atomic pid_t tid;
    bool cancel;
};

static void *wake_when_asleep(void *arg) {
    struct sleeper *s = arg;
    for (double until = now() + 10; s->tid == 0;)
        CHECK(now() < until);
    wait_asleep(getpid(), s->tid);
    EQ(s->cancel ? pthread_cancel(s->thread) : pthread_kill(s->thread, SIGUSR1), 0);
    return NULL;
}

static sigjmp_buf back;

static void jump(int number) {
    (void)number;
    siglongjmp(back, 1);
}

static void end_thread(int number) {
    (void)number;
    pthread_exit((void *)7);
}

static void handle(void (*handler)(int)) {
    struct sigaction action = {.sa_handler = handler};
    OK(sigaction(SIGUSR1, &action, NULL));
}

static void *sleep_in(void *arg) {
    struct sleeper *s = arg;
    s->tid = gettid();
    s->call(the_fd);
    CHECK(!"the call ended");
}

// The ways out of a call.
static void by_jump(void (*call)(int)) {
    struct sleeper s = {call, pthread_self(), gettid(), false};
    pthread_t waker;
    handle(jump);
    EQ(pthread_create(&waker, NULL, wake_when_asleep, &s), 0);
    if (sigsetjmp(back, 1) == 0) {
        call(the_fd);
        CHECK(!"the call ended");
    }
    EQ(pthread_join(waker, NULL), 0);
}

static void by_thread(void (*call)(int), bool cancel) {
    static struct sleeper s;
    s = (struct sleeper){.call = call, .cancel = cancel};
    pthread_t waker;
    EQ(pthread_create(&s.thread, NULL, sleep_in, &s), 0);
    EQ(pthread_create(&waker, NULL, wake_when_asleep, &s), 0);
    void *value;
    EQ(pthread_join(s.thread, &value), 0);
    CHECK(value == (cancel ? PTHREAD_CANCELED : (void *)7));
    EQ(pthread_join(waker, NULL), 0);
}

static void by_exit(void (*call)(int)) {
    handle(end_thread);
    by_thread(call, false);
}

static void by_cancel(void (*call)(int)) {
    by_thread(call, true);
}

static int open_descriptors(void) {
    int n = 0;
    for (int fd = 0; fd < 2000; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

// The connection is whole after each of them, and ends when it is closed.
static void out_of_receives(void (*by)(void (*)(int))) {
    struct pair p = pair_open();
    the_fd = p.fd;
    the_set = OK(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN};
    OK(epoll_ctl(the_set, EPOLL_CTL_ADD, p.fd, &event));
    OK(pipe(the_pipe));
    int before = open_descriptors();
    for (size_t i = 0; i < RECEIVES; i++) {
        by(receives[i]);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 5000, 5000), 0);
        EQ(epoll_wait(the_set, &event, 1, 20000), 1);
        recv_all(p.fd, 2, i * 5000, 5000);
        EQ(events_now(p.fd, POLLIN), 0);
        send_all(p.fd, 1, i * 5000, 5000);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 5000, 5000), 0);
    }
    EQ(open_descriptors(), before);
    // Nothing that was left keeps a sleeper awake.
    timeout_option(p.fd, SO_RCVTIMEO, 0.3);
    struct timespec cpu[2];
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu[0]);
    char byte;
    FAILS(recv(p.fd, &byte, 1, 0), EAGAIN);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu[1]);
    CHECK((cpu[1].tv_sec - cpu[0].tv_sec) + (cpu[1].tv_nsec - cpu[0].tv_nsec) * 1e-9 < 0.1);
    OK(close(p.fd));
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}

PAIR_CASE(handler_jumps_out_of_receives) {
    out_of_receives(by_jump);
}

PAIR_CASE(handler_ends_the_thread_in_receives) {
    out_of_receives(by_exit);
}

PAIR_CASE(thread_is_cancelled_in_receives) {
    out_of_receives(by_cancel);
}

static void out_of_sends(void (*by)(void (*)(int))) {
    for (size_t i = 0; i < sizeof sends / sizeof *sends; i++) {
        struct pair p = pair_open();
        the_fd = p.fd;
        by(sends[i]);
        // What it had sent arrives, what is sent then behind it, and the end.
        OK(peer_call(P_NONBLOCK, p.peer, true, 0, 0));
        while (peer_recv(p.peer, NULL, 65536, 0) > 0) {
        }
        OK(peer_call(P_NONBLOCK, p.peer, false, 0, 0));
        wait_events(p.fd, POLLOUT, POLLOUT);
        EQ(send(p.fd, "!", 1, 0), 1);
        char buf[65536] = {0};
        for (long n = 1; buf[n - 1] != '!';)
            CHECK((n = OK(peer_recv(p.peer, buf, sizeof buf, 0))) > 0);
        peer_says(p.peer, "and back");
        EQ(recv(p.fd, buf, sizeof buf, 0), 8);
        OK(close(p.fd));
        EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
        OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    }
}

PAIR_CASE(handler_jumps_out_of_sends) {
    out_of_sends(by_jump);
}

PAIR_CASE(handler_ends_the_thread_in_sends) {
    out_of_sends(by_exit);
}

PAIR_CASE(thread_is_cancelled_in_sends) {
    out_of_sends(by_cancel);
}

// --- cancellation points that do not wait

static void do_recv(void) {
    char byte;
    recv(the_fd, &byte, 1, 0);
}

static void do_read(void) {
    char byte;
    CHECK(read(the_fd, &byte, 1) < 0);
}

static void do_readv(void) {
    char byte;
    struct iovec iov = {&byte, 1};
    CHECK(readv(the_fd, &iov, 1) < 0);
}

static void do_recvmsg(void) {
    char byte;
    struct iovec iov = {&byte, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    recvmsg(the_fd, &msg, 0);
}

static void do_recvmmsg(void) {
    char byte;
    struct iovec iov = {&byte, 1};
    struct mmsghdr msg = {.msg_hdr = {.msg_iov = &iov, .msg_iovlen = 1}};
    recvmmsg(the_fd, &msg, 1, 0, NULL);
}

static void do_dontwait(void) {
    char bytes[64];
    recvfrom(the_fd, bytes, sizeof bytes, MSG_DONTWAIT | MSG_PEEK, NULL, NULL);
}

static void do_send(void) {
    send(the_fd, "x", 1, 0);
}

static void do_write(void) {
    CHECK(write(the_fd, "x", 1) < 0);
}

static void do_writev(void) {
    struct iovec iov = {"x", 1};
    CHECK(writev(the_fd, &iov, 1) < 0);
}

static void do_sendmsg(void) {
    struct iovec iov = {"x", 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    sendmsg(the_fd, &msg, 0);
}

static void do_sendmmsg(void) {
    struct iovec iov = {"x", 1};
    struct mmsghdr msg = {.msg_hdr = {.msg_iov = &iov, .msg_iovlen = 1}};
    sendmmsg(the_fd, &msg, 1, 0);
}

static void do_poll(void) {
    struct pollfd p = {.fd = the_fd, .events = POLLIN};
    poll(&p, 1, -1);
}

static void do_ppoll(void) {
    struct pollfd p = {.fd = the_fd, .events = POLLIN};
    ppoll(&p, 1, NULL, NULL);
}

static void do_select(void) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(the_fd, &set);
    select(the_fd + 1, &set, NULL, NULL, NULL);
}

static void do_epoll_wait(void) {
    struct epoll_event event;
    epoll_wait(the_set, &event, 1, -1);
}

static void do_splice(void) {
    int ends[2];
    OK(pipe(ends));
    splice(the_fd, NULL, ends[1], NULL, 1, 0);
}

static void (*const points[])(void) = {do_recv, do_read, do_readv, do_recvmsg, do_recvmmsg, do_dontwait, do_send,
    do_write, do_writev, do_sendmsg, do_sendmmsg, do_poll, do_ppoll, do_select, do_epoll_wait, do_splice};

static void *act_cancelled(void *arg) {
    pthread_cancel(pthread_self());
    points[(intptr_t)arg]();
    return NULL;
}

PAIR_CASE(cancelled_thread_gets_no_byte_and_sends_none) {
    struct pair p = pair_open();
    the_fd = p.fd;
    the_set = OK(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN};
    OK(epoll_ctl(the_set, EPOLL_CTL_ADD, p.fd, &event));
    peer_says(p.peer, "here");
    wait_readable(p.fd, 4);
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        pthread_t thread;
        void *value;
        EQ(pthread_create(&thread, NULL, act_cancelled, (void *)(intptr_t)i), 0);
        EQ(pthread_join(thread, &value), 0);
        if (value != PTHREAD_CANCELED)
            check_failed(__FILE__, __LINE__, "cancelled", "call %zu", i);
    }
    EQ(send(p.fd, "only this", 9, 0), 9);
    peer_hears(p.peer, "only this");
    EQ(peer_call(P_POLL, p.peer, POLLIN, 0, 0), 0);
    char buf[8];
    EQ(recv(p.fd, buf, sizeof buf, 0), 4);
    pair_close(p);
}

// --- calls that are no cancellation points, and one that is at its beginning only

static void *sends_file_cancelled(void *arg) {
    int *fds = arg;
    pthread_cancel(pthread_self());
    EQ(sendfile(fds[0], fds[1], NULL, 100), 100);
    EQ(sendfile(fds[2], fds[0], NULL, 4), 4);
    return (void *)7;
}

PAIR_CASE(sendfile_is_no_cancellation_point) {
    struct pair p = pair_open();
    int file = OK(memfd_create("file", 0)), ends[2];
    OK(pipe(ends));
    char bytes[100];
    pattern(1, 0, bytes, sizeof bytes);
    EQ(pwrite(file, bytes, sizeof bytes, 0), sizeof bytes);
    peer_says(p.peer, "here");
    wait_readable(p.fd, 4);
    pthread_t thread;
    void *value;
    EQ(pthread_create(&thread, NULL, sends_file_cancelled, (int[]){p.fd, file, ends[1]}), 0);
    EQ(pthread_join(thread, &value), 0);
    CHECK(value == (void *)7);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 100), 0);
    EQ(read(ends[0], bytes, sizeof bytes), 4);
    CHECK(!memcmp(bytes, "here", 4));
    close(file);
    close(ends[0]);
    close(ends[1]);
    pair_close(p);
}

static void *closes_cancelled(void *arg) {
    pthread_cancel(pthread_self());
    close(*(int *)arg);
    return NULL;
}

PAIR_CASE(close_that_is_cancelled_closes_nothing) {
    struct pair p = pair_open();
    pthread_t thread;
    void *value;
    EQ(pthread_create(&thread, NULL, closes_cancelled, &p.fd), 0);
    EQ(pthread_join(thread, &value), 0);
    CHECK(value == PTHREAD_CANCELED);
    pair_talk(p, 0, 20);
    if (variant.warm)
        assert_smcd(p.fd);
    pair_close(p);
}

struct talker {
    int from, to;
};

static void *talk(void *arg) {
    struct talker *t = arg;
    char byte = 1;
    for (;;) {
        EQ(send(t->from, &byte, 1, 0), 1);
        EQ(recv(t->to, &byte, 1, 0), 1);
    }
    return NULL;
}

CASE(thread_that_never_waits_is_cancelled) {
    int client, server;
    connect_here(&client, &server);
    warm_here(client, server);
    struct talker t = {client, server};
    pthread_t thread;
    EQ(pthread_create(&thread, NULL, talk, &t), 0);
    EQ(pthread_cancel(thread), 0);
    void *value;
    EQ(pthread_join(thread, &value), 0);
    CHECK(value == PTHREAD_CANCELED);
    close(client);
    close(server);
}
