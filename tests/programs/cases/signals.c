// Signals during calls, and processes that stop and go on.
#include "pair.h"

#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/select.h>
#include <sys/time.h>
#include <time.h>
#include <ucontext.h>

static volatile sig_atomic_t signals;

// Signals that a case wants to see, and transfers in which they have to come.
enum { MET = 10, MOST_TRIES = 100000 };

// Where the handler says that it ran.
static int ran[2] = {-1, -1};

static void count(int s) {
    (void)s;
    signals++;
    if (ran[1] >= 0 && write(ran[1], "x", 1) != 1)
        abort();
}

static void handle(int signal, int flags) {
    struct sigaction action = {.sa_handler = count, .sa_flags = flags};
    OK(sigaction(signal, &action, NULL));
}

static pid_t me;

// In a child: waits until the parent sleeps, then signals it.
static void signal_sleeper(void *arg) {
    wait_asleep(me, me);
    OK(kill(me, (int)(intptr_t)arg));
}

// In a child: signals the sleeper, each time seeing the handler run and the sleep go on, then with SIGUSR2.
static void signal_sleeper_often(void *arg) {
    char c;
    (void)arg;
    for (int i = 0; i < 3; i++) {
        wait_asleep(me, me);
        OK(kill(me, SIGUSR1));
        EQ(read(ran[0], &c, 1), 1);
    }
    wait_asleep(me, me);
    OK(kill(me, SIGUSR2));
}

// The call goes on after each SIGUSR1 and ends with SIGUSR2.
#define RESTARTED(call) \
    do { \
        OK(pipe(ran)); \
        handle(SIGUSR1, SA_RESTART); \
        handle(SIGUSR2, 0); \
        me = getpid(); \
        signals = 0; \
        pid_t pid_ = child(signal_sleeper_often, NULL); \
        FAILS(call, EINTR); \
        EQ(signals, 4); \
        child_succeeds(pid_); \
        close(ran[0]); \
        close(ran[1]); \
        ran[1] = -1; \
    } while (0)

// The call sleeps, is signalled, and fails with EINTR.
#define INTERRUPTED(call) \
    do { \
        me = getpid(); \
        int before_ = signals; \
        pid_t pid_ = child(signal_sleeper, (void *)(intptr_t)SIGUSR1); \
        FAILS(call, EINTR); \
        EQ(signals, before_ + 1); \
        child_succeeds(pid_); \
    } while (0)

// In a child: signals the parent, which sleeps again and again, behind so many beginnings and ends of system calls.
static int moment;

static void signal_at_moment(void *arg) {
    int status;
    wait_asleep(me, me);
    OK(ptrace(PTRACE_SEIZE, me, 0, PTRACE_O_TRACESYSGOOD));
    OK(ptrace(PTRACE_INTERRUPT, me, 0, 0));
    EQ(waitpid(me, &status, 0), me);
    for (int met = 0; met < moment; met += WSTOPSIG(status) == (SIGTRAP | 0x80)) {
        OK(ptrace(PTRACE_SYSCALL, me, 0, 0));
        EQ(waitpid(me, &status, 0), me);
        CHECK(WIFSTOPPED(status));
    }
    OK(kill(me, SIGUSR1));
    OK(ptrace(PTRACE_DETACH, me, 0, 0));
    if (arg) {
        char c;
        // It ran, and the call goes on.
        EQ(read(ran[0], &c, 1), 1);
        signal_sleeper(arg);
    }
}

// A call that nobody can wake looks every millisecond. Whatever it does when a signal comes, the handler ends it, or not, as it
// would end a sleep.
PAIR_CASE(signal_between_two_looks_is_one_in_a_sleep) {
    enum { MOMENTS = 40 };
    struct pair p = pair_open();
    char buf[2];
    me = getpid();
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    size_t read = 0, sent = fill(p.fd, 1, 0);
    // The kernel's calls sleep all the time.
    bool looks = variant.warm && !is_plain();
    handle(SIGUSR2, 0);
    for (moment = 1; moment <= MOMENTS; moment++) {
        signals = 0;
        handle(SIGUSR1, 0);
        pid_t pid = child(looks ? signal_at_moment : signal_sleeper, looks ? NULL : (void *)SIGUSR1);
        FAILS(send(p.fd, "x", 1, 0), EINTR);
        EQ(signals, 1);
        child_succeeds(pid);
        if (!looks)
            continue;
        keep_in_ring(p, &read, &sent);
        handle(SIGUSR1, SA_RESTART);
        OK(pipe(ran));
        pid = child(signal_at_moment, (void *)SIGUSR2);
        FAILS(send(p.fd, "x", 1, 0), EINTR);
        EQ(signals, 3);
        child_succeeds(pid);
        close(ran[0]);
        close(ran[1]);
        ran[1] = -1;
    }
    // It ends by any handler. (epoll_wait(2) ends by the tracer, too.)
    struct pollfd f = {.fd = p.fd, .events = POLLOUT};
    handle(SIGUSR1, SA_RESTART);
    for (moment = 1; moment <= MOMENTS; moment++) {
        signals = 0;
        keep_in_ring(p, &read, &sent);
        pid_t pid = child(looks ? signal_at_moment : signal_sleeper, looks ? NULL : (void *)SIGUSR1);
        FAILS(poll(&f, 1, -1), EINTR);
        EQ(signals, 1);
        child_succeeds(pid);
    }
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, read, sent - read), 0);
    pair_close(p);
    // One byte of two, which a peek waits for.
    p = pair_open();
    peer_says(p.peer, "p");
    wait_readable(p.fd, 1);
    handle(SIGUSR1, 0);
    for (moment = 1; moment <= MOMENTS; moment++) {
        signals = 0;
        pid_t pid = child(looks ? signal_at_moment : signal_sleeper, looks ? NULL : (void *)SIGUSR1);
        EQ(recv(p.fd, buf, 2, MSG_PEEK | MSG_WAITALL), 1);
        EQ(signals, 1);
        child_succeeds(pid);
    }
    pair_close(p);
}

PAIR_CASE(calls_are_interrupted_without_sa_restart) {
    struct pair p = pair_open();
    char c;
    struct iovec iov = {&c, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    struct pollfd f = {.fd = p.fd, .events = POLLIN};
    struct epoll_event event = {EPOLLIN, {.u64 = 1}};
    int ep = OK(epoll_create1(0));
    fd_set set;
    FD_ZERO(&set);
    FD_SET(p.fd, &set);
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
    handle(SIGUSR1, 0);
    INTERRUPTED(recv(p.fd, &c, 1, 0));
    INTERRUPTED(read(p.fd, &c, 1));
    INTERRUPTED(recv(p.fd, &c, 1, MSG_PEEK));
    INTERRUPTED(readv(p.fd, &iov, 1));
    INTERRUPTED(recvmsg(p.fd, &msg, 0));
    INTERRUPTED(poll(&f, 1, -1));
    INTERRUPTED(poll(&f, 1, 20000));
    INTERRUPTED(ppoll(&f, 1, NULL, NULL));
    INTERRUPTED(select(p.fd + 1, &set, NULL, NULL, NULL));
    INTERRUPTED(pselect(p.fd + 1, &set, NULL, NULL, NULL, NULL));
    INTERRUPTED(epoll_wait(ep, &event, 1, -1));
    INTERRUPTED(epoll_pwait(ep, &event, 1, 20000, NULL));
    // Interrupted after a part, a call says how much it did.
    peer_says(p.peer, "abc");
    wait_readable(p.fd, 3);
    char buf[8];
    me = getpid();
    pid_t pid = child(signal_sleeper, (void *)(intptr_t)SIGUSR1);
    EQ(recv(p.fd, buf, 8, MSG_WAITALL), 3);
    child_succeeds(pid);
    size_t got = 0, sent = fill(p.fd, 1, 0);
    INTERRUPTED(send(p.fd, &c, 1, 0));
    keep_in_ring(p, &got, &sent);
    INTERRUPTED(write(p.fd, &c, 1));
    keep_in_ring(p, &got, &sent);
    INTERRUPTED(sendmsg(p.fd, &msg, 0));
    close(ep);
    close(p.fd);
}

CASE(accept_is_interrupted_and_restarted) {
    uint16_t port;
    int listener = listen_here(&port);
    handle(SIGUSR1, 0);
    INTERRUPTED(accept(listener, NULL, NULL));
    INTERRUPTED(accept4(listener, NULL, NULL, SOCK_CLOEXEC));
    RESTARTED(accept(listener, NULL, NULL));
}

PAIR_CASE(receiving_and_sending_restart_with_sa_restart) {
    struct pair p = pair_open();
    char c;
    struct iovec iov = {&c, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    RESTARTED(recv(p.fd, &c, 1, 0));
    RESTARTED(read(p.fd, &c, 1));
    RESTARTED(recvmsg(p.fd, &msg, MSG_PEEK));
    size_t got = 0, sent = fill(p.fd, 1, 0);
    RESTARTED(send(p.fd, &c, 1, 0));
    keep_in_ring(p, &got, &sent);
    RESTARTED(writev(p.fd, &iov, 1));
    keep_in_ring(p, &got, &sent);
    // Which says nothing about sending.
    timeout_option(p.fd, SO_RCVTIMEO, 20);
    RESTARTED(send(p.fd, &c, 1, 0));
    close(p.fd);
}

PAIR_CASE(waits_never_restart) {
    struct pair p = pair_open();
    struct pollfd f = {.fd = p.fd, .events = POLLIN};
    struct epoll_event event = {EPOLLIN, {.u64 = 1}};
    int ep = OK(epoll_create1(0));
    fd_set set;
    FD_ZERO(&set);
    FD_SET(p.fd, &set);
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
    handle(SIGUSR1, SA_RESTART);
    INTERRUPTED(epoll_wait(ep, &event, 1, -1));
    INTERRUPTED(poll(&f, 1, -1));
    INTERRUPTED(select(p.fd + 1, &set, NULL, NULL, NULL));
    // Nor do calls with a time limit of their own.
    char c;
    timeout_option(p.fd, SO_RCVTIMEO, 20);
    INTERRUPTED(recv(p.fd, &c, 1, 0));
    close(ep);
    pair_close(p);
}

PAIR_CASE(signal_masks_of_waits) {
    struct pair p = pair_open();
    struct pollfd f = {.fd = p.fd, .events = POLLIN};
    struct epoll_event event = {EPOLLIN, {.u64 = 1}};
    int ep = OK(epoll_create1(0));
    fd_set set;
    FD_ZERO(&set);
    FD_SET(p.fd, &set);
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
    handle(SIGUSR1, 0);
    sigset_t blocked, none;
    sigemptyset(&none);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    EQ(sigprocmask(SIG_BLOCK, &blocked, NULL), 0);
    // Blocked outside, it waits; the mask of the call lets it in, and only during the call.
    struct timespec limit = {20, 0};
    for (int i = 0; i < 4; i++) {
        OK(kill(getpid(), SIGUSR1));
        EQ(signals, i);
        if (i == 0)
            FAILS(epoll_pwait(ep, &event, 1, 20000, &none), EINTR);
        if (i == 1)
            FAILS(ppoll(&f, 1, &limit, &none), EINTR);
        if (i == 2)
            FAILS(pselect(p.fd + 1, &set, NULL, NULL, &limit, &none), EINTR);
        if (i == 3)
            FAILS(epoll_pwait2(ep, &event, 1, &limit, &none), EINTR);
        EQ(signals, i + 1);
    }
    // With bytes there, the event wins or the signal does, but neither is lost.
    peer_says(p.peer, "x");
    wait_readable(p.fd, 1);
    OK(kill(getpid(), SIGUSR1));
    int n = epoll_pwait(ep, &event, 1, 20000, &none);
    CHECK(n == 1 || errno == EINTR);
    if (n != 1)
        EQ(epoll_wait(ep, &event, 1, 0), 1);
    // Blocked by the call's mask, it stays out.
    EQ(sigprocmask(SIG_UNBLOCK, &blocked, NULL), 0);
    int before = signals;
    char c;
    EQ(recv(p.fd, &c, 1, 0), 1);
    me = getpid();
    pid_t pid = child(signal_sleeper, (void *)(intptr_t)SIGUSR1);
    EQ(epoll_pwait(ep, &event, 1, 100, &blocked), 0);
    child_succeeds(pid);
    EQ(signals, before + 1);
    close(ep);
    pair_close(p);
}

static int handler_fd;

static void send_from_handler(int s) {
    int saved = errno;
    char c = 'h';
    (void)s;
    if (send(handler_fd, &c, 1, MSG_DONTWAIT) == 1)
        signals++;
    errno = saved;
}

PAIR_CASE(handler_uses_the_socket_the_call_sleeps_on) {
    struct pair p = pair_open();
    struct sigaction action = {.sa_handler = send_from_handler, .sa_flags = SA_RESTART};
    handler_fd = p.fd;
    OK(sigaction(SIGUSR1, &action, NULL));
    for (int i = 0; i < 10; i++) {
        peer_begin(P_RECV, p.peer, 1, 0, 0);
        peer_asleep();
        // The handler's byte ends the peer's call; the peer's answer ends ours.
        me = getpid();
        pid_t pid = child(signal_sleeper, (void *)(intptr_t)SIGUSR1);
        char c;
        timeout_option(p.fd, SO_RCVTIMEO, 0.2);
        recv(p.fd, &c, 1, 0);
        child_succeeds(pid);
        EQ(peer_end(), 1);
        EQ(signals, i + 1);
        timeout_option(p.fd, SO_RCVTIMEO, 0);
        peer_says(p.peer, "y");
        EQ(recv(p.fd, &c, 1, 0), 1);
    }
    pair_close(p);
}

static volatile sig_atomic_t alarms_go_on;
// The next alarm comes so long after the handler: however slow that is, what it interrupts goes on in between.
static const struct itimerval next_alarm = {.it_value = {0, 40}};

static void send_and_set_alarm(int s) {
    send_from_handler(s);
    // The last one may come when the timer has been stopped.
    if (alarms_go_on)
        OK(setitimer(ITIMER_REAL, &next_alarm, NULL));
}

// In the middle of whatever step of the change-over; what it sends arrives once, among the rest.
CASE(handler_sends_while_connections_change_over) {
    struct sigaction action = {.sa_handler = send_and_set_alarm, .sa_flags = SA_RESTART};
    struct itimerval never = {0};
    OK(sigaction(SIGALRM, &action, NULL));
    uint16_t port;
    int listener = listen_here(&port);
    for (int i = 0; i < 100; i++) {
        int client = connect_to(port), server = OK(accept(listener, NULL, NULL));
        int ends[2] = {i % 2 ? client : server, i % 2 ? server : client};
        handler_fd = ends[0];
        signals = 0;
        alarms_go_on = true;
        OK(setitimer(ITIMER_REAL, &next_alarm, NULL));
        for (int n = 0; n < 20; n++) {
            EQ(send(ends[0], "m", 1, 0), 1);
            EQ(send(ends[1], "n", 1, 0), 1);
            char c;
            EQ(recv(ends[0], &c, 1, 0), 1);
            EQ(c, 'n');
        }
        alarms_go_on = false;
        OK(setitimer(ITIMER_REAL, &never, NULL));
        OK(shutdown(ends[0], SHUT_WR));
        int of_main = 0, of_handler = 0;
        for (char c; OK(recv(ends[1], &c, 1, 0)) > 0;) {
            of_main += c == 'm';
            of_handler += c == 'h';
        }
        EQ(of_main, 20);
        EQ(of_handler, signals);
        close(client);
        close(server);
    }
    close(listener);
}

static void count_and_fail(int s) {
    count(s);
    errno = ECHILD;
}

// In a program without threads a handler ends a wait that spins for a ring's bytes, as one that sleeps, and its errno is not the wait's.
REMOTE_CASE(signals_end_waits_with_long_spins) {
    struct pair p = pair_open();
    const struct itimerval soon = {.it_value = {0, 50000}, .it_interval = {0, 500000}}, never = {0};
    struct epoll_event event = {EPOLLIN, {.fd = p.fd}};
    struct pollfd f = {.fd = p.fd, .events = POLLIN};
    fd_set fds;
    char c;
    int set = OK(epoll_create1(0));
    OK(epoll_ctl(set, EPOLL_CTL_ADD, p.fd, &event));
    struct sigaction action = {.sa_handler = count_and_fail};
    OK(sigaction(SIGALRM, &action, NULL));
    static char bytes[65536];
    for (int way = 0; way < 6; way++) {
        while (way == 5 && send(p.fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0) {}
        FD_ZERO(&fds);
        FD_SET(p.fd, &fds);
        signals = 0;
        errno = 0;
        double start = now();
        OK(setitimer(ITIMER_REAL, &soon, NULL));
        // The kernel's receive of no bytes says nothing of the handler that has ended it.
        EQ(way == 0     ? epoll_wait(set, &event, 1, -1)
               : way == 1 ? poll(&f, 1, -1)
               : way == 2 ? select(p.fd + 1, &fds, NULL, NULL, NULL)
               : way == 3 ? (int)recv(p.fd, &c, 1, 0)
               : way == 4 ? (int)recv(p.fd, &c, 0, 0) - 1
                          : (int)send(p.fd, bytes, 1, 0),
            -1);
        CHECK(way == 4 || errno == EINTR);
        EQ(signals, 1);
        CHECK(now() - start < 0.4);
        OK(setitimer(ITIMER_REAL, &never, NULL));
    }
    close(set);
    pair_close(p);
}

PAIR_CASE(storm_of_signals_during_a_transfer) {
    struct pair p = pair_open();
    struct itimerval often = {{0, 300}, {0, 300}}, never = {0};
    size_t n = 16 << 20;
    char *buf = malloc(n);
    CHECK(buf);
    handle(SIGALRM, SA_RESTART);
    signals = 0;
    OK(setitimer(ITIMER_REAL, &often, NULL));
    for (int i = 0; i == 0 || signals < MET; i++) {
        CHECK(i < MOST_TRIES);
        pattern(1, 0, buf, n);
        peer_begin(P_RECV_PATTERN, p.peer, 1, 0, n);
        for (size_t at = 0; at < n;)
            at += OK(send(p.fd, buf + at, n - at, 0));
        EQ(peer_end(), 0);
        peer_begin(P_SEND_PATTERN, p.peer, 2, 0, n);
        for (size_t at = 0; at < n;) {
            ssize_t r = OK(recv(p.fd, buf, n - at < 70000 ? n - at : 70000, MSG_WAITALL));
            check_pattern(2, at, buf, r);
            at += r;
        }
        EQ(peer_end(), 0);
    }
    OK(setitimer(ITIMER_REAL, &never, NULL));
    free(buf);
    pair_close(p);
}

REMOTE_CASE(stopped_peer_goes_on_where_it_was) {
    struct pair p = pair_open();
    peer_begin(P_ECHO, p.peer, 0, 0, 0);
    send_all(p.fd, 1, 0, 1000);
    recv_all(p.fd, 1, 0, 1000);
    for (int i = 1; i < 6; i++) {
        OK(kill(peer_pid(), SIGSTOP));
        send_all(p.fd, 1, i * 1000, 1000);
        // Nobody answers.
        timeout_option(p.fd, SO_RCVTIMEO, 0.05);
        FAILS(recv(p.fd, &(char){0}, 1, 0), EAGAIN);
        timeout_option(p.fd, SO_RCVTIMEO, 0);
        OK(kill(peer_pid(), SIGCONT));
        recv_all(p.fd, 1, i * 1000, 1000);
    }
    OK(shutdown(p.fd, SHUT_WR));
    EQ(peer_end(), 6000);
    close(p.fd);
}

REMOTE_CASE(stopped_peer_fills_the_connection_and_then_drains_it) {
    struct pair p = pair_open();
    OK(kill(peer_pid(), SIGSTOP));
    size_t sent = fill(p.fd, 1, 0);
    timeout_option(p.fd, SO_SNDTIMEO, 0.05);
    FAILS(send(p.fd, "x", 1, 0), EAGAIN);
    OK(kill(peer_pid(), SIGCONT));
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, sent), 0);
    pair_close(p);
}

static void *sends_a_byte(void *arg) {
    EQ(send((int)(intptr_t)arg, "x", 1, 0), 1);
    return NULL;
}

// It has taken the connection out of the ring, and what it left unread there finds no room.
REMOTE_CASE(peer_stopped_while_it_goes_back_to_tcp) {
    struct pair p = pair_open();
    handle(SIGUSR1, 0);
    // More than TCP takes once its buffer is small, and less than with a large one.
    static char buf[250000];
    pattern(1, 0, buf, sizeof buf);
    size_t sent = OK(send(p.fd, buf, sizeof buf, MSG_DONTWAIT));
    set_option(p.fd, SOL_SOCKET, SO_SNDBUF, 4096);
    sent += fill(p.fd, 1, sent);
    peer_begin(P_OPTION, p.peer, SOL_SOCKET, SO_TIMESTAMP, 1);
    if (variant.warm)
        peer_asleep();
    else
        EQ(peer_end(), 0);
    OK(kill(peer_pid(), SIGSTOP));
    int status;
    EQ(waitpid(peer_pid(), &status, WUNTRACED), peer_pid());
    CHECK(WIFSTOPPED(status));
    FAILS(send(p.fd, "x", 1, MSG_DONTWAIT), EAGAIN);
    double start = now();
    timeout_option(p.fd, SO_SNDTIMEO, 0.05);
    FAILS(send(p.fd, "x", 1, 0), EAGAIN);
    CHECK(now() - start >= 0.045);
    timeout_option(p.fd, SO_SNDTIMEO, 0);
    INTERRUPTED(send(p.fd, "x", 1, 0));
    pthread_t thread;
    EQ(pthread_create(&thread, NULL, sends_a_byte, (void *)(intptr_t)p.fd), 0);
    set_option(p.fd, SOL_SOCKET, SO_SNDBUF, 1 << 20);
    OK(kill(peer_pid(), SIGCONT));
    if (variant.warm)
        EQ(peer_end(), 0);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, sent), 0);
    EQ(pthread_join(thread, NULL), 0);
    peer_hears(p.peer, "x");
    pair_close(p);
}

// --- handlers that interrupt their own thread in the middle of a call on the same connection

static struct itimerval often = {{0, 500}, {0, 500}}, never = {0};
static volatile sig_atomic_t by_handler;

static void handle_alarm(void (*handler)(int)) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    OK(sigaction(SIGALRM, &action, NULL));
    signals = by_handler = 0;
}

// A thread that handles no alarm.
static pthread_t begin_beside(void *(*run)(void *), void *arg) {
    pthread_t thread;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGALRM);
    EQ(pthread_sigmask(SIG_BLOCK, &set, NULL), 0);
    EQ(pthread_create(&thread, NULL, run, arg), 0);
    EQ(pthread_sigmask(SIG_UNBLOCK, &set, NULL), 0);
    return thread;
}

// What a blocking call may say where it cannot wait.
static void waits_from_handler(int s) {
    int saved = errno;
    char c = 'h';
    (void)s;
    signals++;
    ssize_t n = send(handler_fd, &c, 1, MSG_NOSIGNAL);
    if (n == 1)
        by_handler++;
    else if (errno != EAGAIN)
        abort();
    errno = saved;
}

struct counted {
    int fd;
    long of_main, of_handler;
};

static void *count_bytes(void *arg) {
    struct counted *c = arg;
    static char buf[1 << 18];
    for (ssize_t n; (n = OK(recv(c->fd, buf, sizeof buf, 0))) > 0;)
        for (ssize_t i = 0; i < n; i++)
            *(buf[i] == 'h' ? &c->of_handler : &c->of_main) += 1;
    return NULL;
}

static void interrupted_pair(int ends[2], int round) {
    int client, server;
    connect_here(&client, &server);
    warm_here(client, server);
    ends[0] = round % 2 ? client : server;
    ends[1] = round % 2 ? server : client;
    handler_fd = ends[0];
}

CASE(blocking_sends_of_a_handler_in_the_middle_of_a_send) {
    int ends[2];
    for (int round = 0; round < 2; round++) {
        interrupted_pair(ends, round);
        handle_alarm(waits_from_handler);
        struct counted c = {ends[1], 0, 0};
        pthread_t thread = begin_beside(count_bytes, &c);
        size_t n = 1 << 20;
        char *buf = malloc(n);
        CHECK(buf);
        memset(buf, 'm', n);
        OK(setitimer(ITIMER_REAL, &often, NULL));
        long sent = 0;
        // However fast they are: until signals have met them.
        for (int i = 0; i < 60 || signals < MET; i++) {
            CHECK(i < MOST_TRIES);
            sent += OK(send(ends[0], buf, i % 2 ? n / 8 : n, 0));
        }
        OK(setitimer(ITIMER_REAL, &never, NULL));
        close(ends[0]);
        EQ(pthread_join(thread, NULL), 0);
        EQ(c.of_main, sent);
        EQ(c.of_handler, by_handler);
        free(buf);
        close(ends[1]);
    }
}

static void receives_in_handler(int s) {
    int saved = errno;
    char c;
    (void)s;
    signals++;
    ssize_t n = recv(handler_fd, &c, 1, 0);
    if (n == 1)
        by_handler++;
    else if (n < 0 && errno != EAGAIN)
        abort();
    errno = saved;
}

static void *send_many_blocks(void *arg) {
    struct counted *c = arg;
    static char buf[300000];
    memset(buf, 'm', sizeof buf);
    for (int i = 0; i < 300 || signals < MET; i++) {
        CHECK(i < MOST_TRIES);
        c->of_main += OK(send(c->fd, buf, i % 2 ? sizeof buf : 5000, 0));
    }
    OK(shutdown(c->fd, SHUT_WR));
    return NULL;
}

CASE(blocking_receives_of_a_handler_in_the_middle_of_a_receive) {
    int ends[2];
    for (int round = 0; round < 2; round++) {
        interrupted_pair(ends, round);
        handle_alarm(receives_in_handler);
        struct counted c = {ends[1], 0, 0};
        pthread_t thread = begin_beside(send_many_blocks, &c);
        static char buf[1 << 20];
        long got = 0;
        OK(setitimer(ITIMER_REAL, &often, NULL));
        for (ssize_t n; (n = OK(recv(ends[0], buf, sizeof buf, 0))) > 0; got += n)
            CHECK(buf[0] == 'm' && buf[n - 1] == 'm');
        OK(setitimer(ITIMER_REAL, &never, NULL));
        EQ(pthread_join(thread, NULL), 0);
        EQ(got + by_handler, c.of_main);
        close(ends[0]);
        close(ends[1]);
    }
}

static volatile sig_atomic_t ends_by_shutdown;
static int another_file;

static void ends_connection(int s) {
    int saved = errno;
    (void)s;
    // In the middle of a call, so far as that can be brought about.
    if (++signals < 3)
        return;
    if (handler_fd >= 0 && ends_by_shutdown) {
        OK(shutdown(handler_fd, SHUT_WR));
    } else if (handler_fd >= 0) {
        int fd = handler_fd;
        OK(close(fd));
        // The number is another file's.
        EQ(fcntl(another_file, F_DUPFD, fd), fd);
    }
    handler_fd = -1;
    errno = saved;
}

// What a send has said to be sent comes, and nothing else.
static void end_in_the_middle_of_a_send(bool by_shutdown) {
    size_t n = 1 << 20;
    char *buf = malloc(n);
    CHECK(buf);
    memset(buf, 'm', n);
    struct itimerval quick = {{0, 150}, {0, 150}};
    signal(SIGPIPE, SIG_IGN);
    another_file = OK(open("/dev/null", O_RDWR));
    for (int round = 0; round < 60; round++) {
        int ends[2];
        interrupted_pair(ends, round);
        handle_alarm(ends_connection);
        ends_by_shutdown = by_shutdown;
        struct counted c = {ends[1], 0, 0};
        pthread_t thread = begin_beside(count_bytes, &c);
        OK(setitimer(ITIMER_REAL, &quick, NULL));
        long sent = 0;
        for (;;) {
            ssize_t done = send(ends[0], buf, round % 3 ? n : 30000, 0);
            if (done < 0)
                break;
            sent += done;
        }
        int error = errno;
        OK(setitimer(ITIMER_REAL, &never, NULL));
        // It began before the number was closed, or afterwards.
        CHECK(by_shutdown ? error == EPIPE : error == EBADF || error == ENOTSOCK);
        EQ(handler_fd, -1);
        EQ(pthread_join(thread, NULL), 0);
        EQ(c.of_main, sent);
        close(ends[0]);
        close(ends[1]);
    }
    free(buf);
}

CASE(handler_closes_in_the_middle_of_a_send) {
    end_in_the_middle_of_a_send(false);
}

CASE(handler_shuts_down_in_the_middle_of_a_send) {
    end_in_the_middle_of_a_send(true);
}

#if defined(__x86_64__) || defined(__i386__)
#ifdef __x86_64__
#define READ_FLAGS __builtin_ia32_readeflags_u64
#define WRITE_FLAGS __builtin_ia32_writeeflags_u64
#else
#define READ_FLAGS __builtin_ia32_readeflags_u32
#define WRITE_FLAGS __builtin_ia32_writeeflags_u32
#endif

// The processor's trap flag: SIGTRAP behind each instruction, but for those of the handler.
enum { TRAP_FLAG = 0x100 };

static volatile sig_atomic_t steps, lends_at;
static int channel[2];

static void lends_connection(int s, siginfo_t *info, void *context) {
    (void)s;
    (void)info;
    if (++steps != lends_at)
        return;
    int saved = errno;
    // In the middle of a step it may be refused.
    by_handler = try_send_fd(channel[0], handler_fd) == 1;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
    errno = saved;
}

// Of a send that goes through the ring in two parts, as its window grows: however far it was when the connection went back
// to TCP, each byte comes once. The moments are instructions of the call, so that they do not depend on how fast it is.
CASE(connection_leaves_the_ring_in_the_middle_of_a_send) {
    // The window is 16 KiB at first. Parts of less than 2 KiB are copied in few instructions.
    enum { COUNTS = 5, MOMENTS = 120, FIRST = (16 << 10) - 1500, SIZE = 3000 };
    static unsigned char buf[SIZE];
    pattern(1, FIRST, buf, SIZE);
    struct sigaction action = {.sa_sigaction = lends_connection, .sa_flags = SA_SIGINFO | SA_RESTART};
    OK(sigaction(SIGTRAP, &action, NULL));
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    int lent = 0;
    for (int side = 0; side < 2; side++) {
        int all = INT_MAX, moments = 0;
        for (int round = 1 - COUNTS; round <= MOMENTS; round++) {
            int ends[2];
            interrupted_pair(ends, side);
            send_all(ends[0], 1, 0, FIRST);
            steps = by_handler = 0;
            // The first rounds count the instructions.
            lends_at = round > 0 ? all * round / MOMENTS : 0;
            WRITE_FLAGS(READ_FLAGS() | TRAP_FLAG);
            ssize_t sent = send(ends[0], buf, SIZE, MSG_DONTWAIT);
            WRITE_FLAGS(READ_FLAGS() & ~TRAP_FLAG);
            OK(sent);
            moments += round > 0 && steps == lends_at;
            if (round <= 0 && steps < all)
                all = steps;
            OK(shutdown(ends[0], SHUT_WR));
            recv_to_eof(ends[1], 1, 0, FIRST + sent);
            if (by_handler)
                close(receive_fd(channel[1]));
            lent += by_handler;
            close(ends[0]);
            close(ends[1]);
        }
        // A call may take a shorter way than the counted one.
        CHECK(moments > MOMENTS / 2);
    }
    // It is refused only while the call holds its locks.
    CHECK(lent > 0);
    close(channel[0]);
    close(channel[1]);
}
#endif

static void *send_until_it_ends(void *arg) {
    struct counted *c = arg;
    static char buf[300000];
    memset(buf, 'm', sizeof buf);
    while (send(c->fd, buf, sizeof buf, 0) > 0)
        continue;
    return NULL;
}

CASE(handler_closes_in_the_middle_of_a_receive) {
    static char buf[1 << 20];
    struct itimerval quick = {{0, 150}, {0, 150}};
    signal(SIGPIPE, SIG_IGN);
    ends_by_shutdown = false;
    another_file = OK(open("/dev/null", O_RDWR));
    for (int round = 0; round < 60; round++) {
        int ends[2];
        interrupted_pair(ends, round);
        handle_alarm(ends_connection);
        struct counted c = {ends[1], 0, 0};
        pthread_t thread = begin_beside(send_until_it_ends, &c);
        OK(setitimer(ITIMER_REAL, &quick, NULL));
        for (ssize_t n; (n = recv(ends[0], buf, sizeof buf, 0)) >= 0;)
            CHECK(n > 0 && buf[0] == 'm' && buf[n - 1] == 'm');
        int error = errno;
        OK(setitimer(ITIMER_REAL, &never, NULL));
        CHECK(error == EBADF || error == ENOTSOCK);
        EQ(handler_fd, -1);
        EQ(pthread_join(thread, NULL), 0);
        close(ends[0]);
        close(ends[1]);
    }
}
