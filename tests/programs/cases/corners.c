// Corners of calls: flags that mean nothing, arguments that are refused, limits of time.
#include "peer.h"

#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>

PAIR_CASE(flags_of_preadv2_and_pwritev2) {
    static const int flags[] = {0, RWF_NOWAIT, RWF_HIPRI, RWF_DSYNC | RWF_SYNC, RWF_APPEND};
    struct pair p = pair_open();
    char c, sent[] = "abcde";
    struct iovec in = {&c, 1}, none = {&c, 0};
    for (int i = 0; i < 5; i++) {
        EQ(pwritev2(p.fd, &(struct iovec){sent + i, 1}, 1, -1, flags[i]), 1);
        peer_says(p.peer, (char[]){sent[i], 0});
        wait_readable(p.fd, 1);
        EQ(preadv2(p.fd, &in, 1, -1, flags[i]), 1);
        EQ(c, sent[i]);
        EQ(preadv2(p.fd, &none, 1, -1, flags[i]), 0);
        EQ(preadv2(p.fd, NULL, 0, -1, flags[i]), 0);
    }
    FAILS(preadv2(p.fd, &in, 1, -1, RWF_NOWAIT), EAGAIN);
    peer_hears(p.peer, sent);
    pair_close(p);
}

PAIR_CASE(refused_calls_leave_the_connection_alone) {
    struct pair p = pair_open();
    struct sockaddr_storage at[2] = {{.ss_family = AF_UNSPEC}};
    char buf[10];
    int other = OK(eventfd(0, 0));
    peer_says(p.peer, "0123456789");
    wait_readable(p.fd, 10);
    FAILS(syscall(SYS_close_range, p.fd, p.fd, 8), EINVAL);
    FAILS(close_range(p.fd, p.fd, 8), EINVAL);
    FAILS(dup3(other, p.fd, O_NONBLOCK), EINVAL);
    FAILS(connect(p.fd, (struct sockaddr *)at, sizeof at), EINVAL);
    EQ(recv(p.fd, buf, 10, 0), 10);
    EQ(send(p.fd, "x", 1, 0), 1);
    peer_hears(p.peer, "x");
    close(other);
    pair_close(p);
}

PAIR_CASE(bytes_thrown_away_into_nowhere) {
    struct pair p = pair_open();
    struct iovec nowhere = {NULL, 100};
    struct msghdr msg = {.msg_iov = &nowhere, .msg_iovlen = 1};
    peer_says(p.peer, "12345678");
    wait_readable(p.fd, 8);
    EQ(recvmsg(p.fd, &msg, MSG_TRUNC | MSG_DONTWAIT), 8);
    FAILS(recv(p.fd, NULL, 100, MSG_TRUNC | MSG_DONTWAIT), EAGAIN);
    pair_close(p);
}

PAIR_CASE(fast_open_of_what_is_open) {
    struct pair p = pair_open();
    EQ(send(p.fd, "x", 1, MSG_FASTOPEN), -1);
    CHECK(errno == EISCONN || errno == EOPNOTSUPP);
    EQ(send(p.fd, "y", 1, 0), 1);
    peer_hears(p.peer, "y");
    pair_close(p);
}

PAIR_CASE(recvmmsg_at_the_end_and_with_a_limit) {
    struct pair p = pair_open();
    char buf[3][4];
    struct iovec iov[3];
    struct mmsghdr msgs[3] = {0};
    for (int i = 0; i < 3; i++) {
        iov[i] = (struct iovec){buf[i], 4};
        msgs[i].msg_hdr = (struct msghdr){.msg_iov = &iov[i], .msg_iovlen = 1};
    }
    struct timespec limit = {5, 0};
    peer_says(p.peer, "abcd");
    wait_readable(p.fd, 4);
    EQ(recvmmsg(p.fd, msgs, 1, 0, &limit), 1);
    CHECK(limit.tv_sec < 5);
    limit.tv_nsec = 1000000000;
    FAILS(recvmmsg(p.fd, msgs, 1, 0, &limit), EINVAL);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    EQ(recvmmsg(p.fd, msgs, 3, 0, NULL), 3);
    for (int i = 0; i < 3; i++)
        EQ(msgs[i].msg_len, 0);
    pair_close(p);
}

static volatile bool stop;

static void *trickles(void *arg) {
    for (int i = 0; i < 20 && !stop; i++) {
        EQ(send(*(int *)arg, "x", 1, 0), 1);
        usleep(100000);
    }
    return NULL;
}

// The time limit is for the call as a whole.
CASE(limit_of_a_receive_that_gets_little_by_little) {
    int ends[2];
    char buf[100];
    pthread_t thread;
    both_ends(ends, true, 20);
    timeout_option(ends[0], SO_RCVTIMEO, 0.45);
    EQ(pthread_create(&thread, NULL, trickles, &ends[1]), 0);
    ssize_t n = recv(ends[0], buf, 100, MSG_WAITALL);
    CHECK(n > 0 && n < 20);
    stop = true;
    EQ(pthread_join(thread, NULL), 0);
    close(ends[0]);
    close(ends[1]);
}

struct later {
    int fd;
    pid_t sleeper;
};

static void *sends_later(void *arg) {
    struct later *l = arg;
    wait_asleep(getpid(), l->sleeper);
    EQ(send(l->fd, "56789", 5, 0), 5);
    return NULL;
}

CASE(peek_waits_for_as_much_as_is_wanted) {
    int ends[2];
    char buf[20];
    pthread_t thread;
    both_ends(ends, true, 20);
    struct later later = {ends[1], gettid()};
    for (int i = 0; i < 2; i++) {
        EQ(send(ends[1], "01234", 5, 0), 5);
        wait_readable(ends[0], 5);
        if (i == 0)
            set_option(ends[0], SOL_SOCKET, SO_RCVLOWAT, 10);
        else
            timeout_option(ends[0], SO_RCVTIMEO, 5);
        EQ(recv(ends[0], buf, 20, MSG_PEEK | MSG_DONTWAIT), 5);
        EQ(pthread_create(&thread, NULL, sends_later, &later), 0);
        EQ(recv(ends[0], buf, i ? 10 : 20, i ? MSG_PEEK | MSG_WAITALL : MSG_PEEK), 10);
        EQ(pthread_join(thread, NULL), 0);
        set_option(ends[0], SOL_SOCKET, SO_RCVLOWAT, 1);
        EQ(recv(ends[0], buf, 20, 0), 10);
    }
    close(ends[0]);
    close(ends[1]);
}

static volatile sig_atomic_t handled;

static void handle(int number) {
    (void)number;
    handled++;
}

static _Atomic pid_t sender;

static void *sends_much(void *arg) {
    sender = gettid();
    send_all(*(int *)arg, 3, 0, 8 << 20);
    return NULL;
}

// SO_RCVTIMEO makes receives end at any signal, and nothing else.
CASE(send_with_a_limit_for_receives_goes_on_after_a_signal) {
    int ends[2];
    pthread_t thread;
    struct sigaction act = {.sa_handler = handle, .sa_flags = SA_RESTART};
    OK(sigaction(SIGUSR1, &act, NULL));
    both_ends(ends, true, 20);
    timeout_option(ends[0], SO_RCVTIMEO, 10);
    EQ(pthread_create(&thread, NULL, sends_much, &ends[0]), 0);
    while (sender == 0)
        sched_yield();
    for (int i = 0; i < 5; i++) {
        wait_asleep(getpid(), sender);
        EQ(pthread_kill(thread, SIGUSR1), 0);
        while (handled <= i)
            sched_yield();
    }
    recv_all(ends[1], 3, 0, 8 << 20);
    EQ(pthread_join(thread, NULL), 0);
    close(ends[0]);
    close(ends[1]);
}

PAIR_CASE(mask_of_a_poll_that_does_not_wait) {
    struct pair p = pair_open();
    struct pollfd f = {.fd = p.fd, .events = POLLIN};
    struct sigaction act = {.sa_handler = handle};
    struct timespec zero = {0};
    sigset_t none, usr1;
    fd_set set;
    sigemptyset(&none);
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    OK(sigaction(SIGUSR1, &act, NULL));
    OK(sigprocmask(SIG_BLOCK, &usr1, NULL));
    OK(raise(SIGUSR1));
    FAILS(ppoll(&f, 1, &zero, &none), EINTR);
    EQ(handled, 1);
    OK(raise(SIGUSR1));
    FD_ZERO(&set);
    FD_SET(p.fd, &set);
    FAILS(pselect(p.fd + 1, &set, NULL, NULL, &zero, &none), EINTR);
    EQ(handled, 2);
    EQ(ppoll(&f, 1, &zero, &none), 0);
    // What is there goes first.
    OK(raise(SIGUSR1));
    peer_says(p.peer, "x");
    wait_readable(p.fd, 1);
    EQ(ppoll(&f, 1, &zero, &none), 1);
    EQ(handled, 2);
    pair_close(p);
}

// A set within another one, which is told of in the first wait of each.
CASE(set_in_one_set_after_the_other) {
    int inner = OK(epoll_create1(0)), event = OK(eventfd(1, 0));
    OK(epoll_ctl(inner, EPOLL_CTL_ADD, event, &(struct epoll_event){EPOLLIN, {.u64 = 1}}));
    for (int i = 0; i < 3; i++) {
        int outer = OK(epoll_create1(0));
        struct epoll_event in = {EPOLLIN | EPOLLET, {.u64 = i}};
        OK(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &in));
        one_event(outer, EPOLLIN, i);
        close(outer);
    }
    close(event);
    close(inner);
}

// What is always ready does not hide the rest, however little room there is.
PAIR_CASE(one_event_at_a_time) {
    struct pair p = pair_open();
    int ep = OK(epoll_create1(0)), event = OK(eventfd(1, 0)), told[2] = {0};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, event, &(struct epoll_event){EPOLLIN, {.u64 = 0}}));
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &(struct epoll_event){EPOLLIN, {.u64 = 1}}));
    peer_says(p.peer, "x");
    wait_readable(p.fd, 1);
    for (int i = 0; i < 100; i++) {
        struct epoll_event got;
        EQ(epoll_wait(ep, &got, 1, -1), 1);
        told[got.data.u64]++;
        usleep(200);
    }
    CHECK(told[0] >= 20 && told[1] >= 20);
    close(ep);
    close(event);
    pair_close(p);
}

PAIR_CASE(exclusive_registrations_do_not_change) {
    struct pair p = pair_open();
    int ep = OK(epoll_create1(0));
    struct epoll_event first = {EPOLLIN | EPOLLEXCLUSIVE, {.u64 = 1}}, other = {EPOLLIN, {.u64 = 2}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &first));
    for (int i = 0; i < 2; i++)
        FAILS(epoll_ctl(ep, EPOLL_CTL_MOD, p.fd, &other), EINVAL);
    peer_says(p.peer, "x");
    one_event(ep, EPOLLIN, 1);
    OK(epoll_ctl(ep, EPOLL_CTL_DEL, p.fd, NULL));
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &other));
    one_event(ep, EPOLLIN, 2);
    OK(epoll_ctl(ep, EPOLL_CTL_MOD, p.fd, &other));
    close(ep);
    pair_close(p);
}

// The connection leaves the ring, and its registration stays what it is.
PAIR_CASE(exclusive_registration_of_urgent_data) {
    struct pair p = pair_open();
    int ep = OK(epoll_create1(0));
    struct epoll_event event = {EPOLLIN | EPOLLOUT | EPOLLEXCLUSIVE, {.u64 = 1}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
    one_event(ep, EPOLLOUT, 1);
    EQ(peer_send(p.peer, "!", 1, MSG_OOB), 1);
    wait_events(p.fd, POLLPRI, POLLPRI);
    for (int i = 0; i < 3; i++)
        one_event(ep, EPOLLOUT, 1);
    close(ep);
    pair_close(p);
}

// A registration outlives its number where a duplicate lives on, and the number may be registered anew.
PAIR_CASE(number_registered_anew_beside_a_duplicate) {
    struct pair p = pair_open();
    int ep = OK(epoll_create1(0));
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &(struct epoll_event){EPOLLIN, {.u64 = 1}}));
    int copy = OK(dup(p.fd)), event = OK(eventfd(0, 0));
    OK(dup2(event, p.fd));
    close(event);
    event = p.fd;
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, event, &(struct epoll_event){EPOLLIN, {.u64 = 2}}));
    p.fd = copy;
    pair_talk(p, 0, 20);
    peer_says(p.peer, "x");
    one_event(ep, EPOLLIN, 1);
    char c;
    EQ(recv(p.fd, &c, 1, 0), 1);
    no_event(ep);
    for (int i = 0; i < 3; i++) {
        uint64_t value = 1;
        OK(eventfd_write(event, 1));
        one_event(ep, EPOLLIN, 2);
        one_event(ep, EPOLLIN, 2);
        OK(eventfd_read(event, &value));
        no_event(ep);
    }
    close(event);
    close(ep);
    pair_close(p);
}

struct poller {
    int ep;
    _Atomic pid_t tid;
};

static void *polls_set(void *arg) {
    struct poller *poller = arg;
    poller->tid = gettid();
    EQ(poll(&(struct pollfd){.fd = poller->ep, .events = POLLIN}, 1, 20000), 1);
    return NULL;
}

// A poll of a set sees what another thread adds.
PAIR_CASE(poll_of_a_set_in_which_nothing_was) {
    struct pair p = pair_open();
    struct poller poller = {.ep = OK(epoll_create1(0))};
    pthread_t thread;
    peer_says(p.peer, "x");
    wait_readable(p.fd, 1);
    EQ(pthread_create(&thread, NULL, polls_set, &poller), 0);
    while (poller.tid == 0)
        sched_yield();
    wait_asleep(getpid(), poller.tid);
    OK(epoll_ctl(poller.ep, EPOLL_CTL_ADD, p.fd, &(struct epoll_event){EPOLLIN, {.u64 = 1}}));
    EQ(pthread_join(thread, NULL), 0);
    close(poller.ep);
    pair_close(p);
}

static void *sends_most(void *arg) {
    send_all(*(int *)arg, 3, 0, 32 << 20);
    return NULL;
}

enum { SIP = 256 << 10, SIPS = 40 };

static _Atomic size_t sipped;

// The sender goes on each time, at a pace at which the waits in between are sleeps.
static void *sips(void *arg) {
    for (int i = 0; i < SIPS && !stop; i++, sipped += SIP) {
        recv_all(*(int *)arg, 3, sipped, SIP);
        OK(poll(NULL, 0, 50));
    }
    return NULL;
}

// Woken again and again by what wakes another thread's send.
CASE(limit_of_a_receive_beside_a_send_that_sleeps) {
    int ends[2];
    pthread_t sends, reads;
    both_ends(ends, true, 20);
    timeout_option(ends[0], SO_RCVTIMEO, 0.4);
    EQ(pthread_create(&sends, NULL, sends_most, &ends[0]), 0);
    EQ(pthread_create(&reads, NULL, sips, &ends[1]), 0);
    double start = now();
    FAILS(recv(ends[0], &(char){0}, 1, 0), EAGAIN);
    CHECK(now() - start > 0.39);
    // The other thread was not through with waking us.
    CHECK(sipped < SIPS * SIP);
    stop = true;
    EQ(pthread_join(reads, NULL), 0);
    recv_all(ends[1], 3, sipped, (32 << 20) - sipped);
    EQ(pthread_join(sends, NULL), 0);
    close(ends[0]);
    close(ends[1]);
}

// The shortest one of many counts, beside the shortest of the kernel's own: the machine may be busy.
static void lasts_a_part_of_a_millisecond(double *shortest, double start) {
    double took = now() - start;
    CHECK(took >= 0.0003);
    if (*shortest == 0 || took < *shortest)
        *shortest = took;
}

PAIR_CASE(waits_of_less_than_a_millisecond) {
    struct pair p = pair_open();
    struct pollfd f = {.fd = p.fd, .events = POLLIN};
    struct timespec limit = {0, 300000};
    enum { KERNELS = 3, WAITS };
    const double most = 0.0009;
    double shortest[WAITS] = {0};
    int short_ones = 0;
    for (int i = 0; i < 1000 && short_ones < WAITS; i++) {
        double start = now();
        EQ(ppoll(&f, 1, &limit, NULL), 0);
        lasts_a_part_of_a_millisecond(&shortest[0], start);
        fd_set set;
        FD_ZERO(&set);
        FD_SET(p.fd, &set);
        struct timeval left = {0, 300};
        start = now();
        EQ(select(p.fd + 1, &set, NULL, NULL, &left), 0);
        lasts_a_part_of_a_millisecond(&shortest[1], start);
        FD_SET(p.fd, &set);
        start = now();
        EQ(pselect(p.fd + 1, &set, NULL, NULL, &limit, NULL), 0);
        lasts_a_part_of_a_millisecond(&shortest[2], start);
        start = now();
        EQ(ppoll(NULL, 0, &limit, NULL), 0);
        lasts_a_part_of_a_millisecond(&shortest[KERNELS], start);
        short_ones = 0;
        for (int k = 0; k < WAITS; k++)
            short_ones += shortest[k] < most;
    }
    if (shortest[KERNELS] >= most)
        printf("no wait on this machine is shorter than a millisecond: nothing was compared\n");
    for (int i = 0; i < KERNELS; i++)
        CHECK(shortest[i] < most || shortest[KERNELS] >= most);
    pair_close(p);
}

struct splicing {
    int pipe, to;
    _Atomic pid_t thread;
};

static void *splices(void *arg) {
    struct splicing *s = arg;
    s->thread = gettid();
    EQ(splice(s->pipe, NULL, s->to, NULL, 1, 0), 1);
    return NULL;
}

// A program counts on the lowest number that is free, whatever its threads wait for.
PAIR_CASE(numbers_while_a_thread_waits) {
    struct pair p = pair_open();
    int ends[2];
    pthread_t thread;
    OK(pipe(ends));
    struct splicing splicing = {.pipe = ends[0], .to = p.fd};
    int next = OK(dup(ends[0]));
    close(next);
    EQ(pthread_create(&thread, NULL, splices, &splicing), 0);
    while (splicing.thread == 0)
        sched_yield();
    wait_asleep(getpid(), splicing.thread);
    int tries = 0, others = 0;
    for (double start = now(); now() < start + 0.2; tries++) {
        int fd = OK(dup(ends[0]));
        others += fd != next;
        close(fd);
    }
    CHECK(others * 4 < tries);
    EQ(write(ends[1], "x", 1), 1);
    EQ(pthread_join(thread, NULL), 0);
    peer_hears(p.peer, "x");
    close(ends[0]);
    close(ends[1]);
    pair_close(p);
}

// By itself it tells nothing: `lifecycle` runs it with USMC_LOG.
CASE(log_spares_a_number_that_is_the_programs) {
    int kept = OK(dup(2)), ends[2];
    struct stat of;
    close(2);
    int file = memfd_create("ours", 0);
    both_ends(ends, true, 20);
    OK(fstat(file, &of));
    OK(dup2(kept, 2));
    EQ(file, 2);
    EQ(of.st_size, 0);
    close(ends[0]);
    close(ends[1]);
}
