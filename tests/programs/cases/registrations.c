// What the kernel knows of a registration when a thread goes to sleep in its set, whatever was asked for before.
#include "peer.h"

#include <sys/eventfd.h>

static void change(int ep, int op, int fd, uint32_t events, uint64_t data) {
    struct epoll_event event = {events, {.u64 = data}};
    OK(epoll_ctl(ep, op, fd, &event));
}

struct sleeper {
    int ep;
    _Atomic pid_t tid;
    struct epoll_event got[4];
    int n;
};

static void *wait_for_events(void *arg) {
    struct sleeper *s = arg;
    s->tid = gettid();
    s->n = OK(epoll_wait(s->ep, s->got, 4, 20000));
    return NULL;
}

static pthread_t fall_asleep(struct sleeper *s) {
    pthread_t thread;
    s->tid = 0;
    EQ(pthread_create(&thread, NULL, wait_for_events, s), 0);
    while (s->tid == 0)
        sched_yield();
    wait_asleep(getpid(), s->tid);
    return thread;
}

// The thread wakes by an eventfd of the same set, having looked at all that the kernel had to tell.
static void wake(int alarm, struct sleeper *s, pthread_t thread) {
    uint64_t one = 1;
    EQ(write(alarm, &one, sizeof one), sizeof one);
    EQ(pthread_join(thread, NULL), 0);
    EQ(s->n, 1);
    EQ(s->got[0].data.u64, 0);
    EQ(read(alarm, &one, sizeof one), sizeof one);
}

// Nothing but `idle` is asked for while a thread sleeps, and something again while none does: what comes then is told.
static void asks_again(struct pair p, uint32_t idle, uint32_t again) {
    int ep = OK(epoll_create1(EPOLL_CLOEXEC)), alarm = OK(eventfd(0, EFD_CLOEXEC));
    change(ep, EPOLL_CTL_ADD, alarm, EPOLLIN, 0);
    change(ep, EPOLL_CTL_ADD, p.fd, EPOLLIN, 1);
    struct sleeper s = {.ep = ep};
    for (uint64_t round = 2; round < 12; round++) {
        pthread_t thread = fall_asleep(&s);
        if (round % 2)
            change(ep, EPOLL_CTL_DEL, p.fd, 0, 0);
        else
            change(ep, EPOLL_CTL_MOD, p.fd, idle, 1);
        wake(alarm, &s, thread);
        change(ep, round % 2 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, p.fd, again, round);
        thread = fall_asleep(&s);
        peer_says(p.peer, "x");
        EQ(pthread_join(thread, NULL), 0);
        EQ(s.n, 1);
        EQ(s.got[0].events, EPOLLIN);
        EQ(s.got[0].data.u64, round);
        char c;
        EQ(recv(p.fd, &c, 1, 0), 1);
        EQ(c, 'x');
    }
    close(alarm);
    close(ep);
}

PAIR_CASE(what_is_asked_for_again_after_nothing_is_told) {
    static const uint32_t idle[] = {0, EPOLLONESHOT, EPOLLET, EPOLLPRI, EPOLLRDHUP};
    static const uint32_t again[] = {EPOLLIN, EPOLLIN | EPOLLONESHOT, EPOLLIN | EPOLLET, EPOLLIN | EPOLLET | EPOLLONESHOT};
    struct pair p = pair_open();
    for (size_t i = 0; i < sizeof idle / sizeof *idle; i++)
        for (size_t k = 0; k < sizeof again / sizeof *again; k++)
            asks_again(p, idle[i], again[k]);
    pair_close(p);
}

// The set is polled, not waited on: the kernel alone tells, by what it was told.
PAIR_CASE(what_is_asked_for_again_after_nothing_makes_the_set_readable) {
    struct pair p = pair_open();
    int ep = OK(epoll_create1(EPOLL_CLOEXEC));
    change(ep, EPOLL_CTL_ADD, p.fd, EPOLLIN, 1);
    for (int round = 0; round < 10; round++) {
        EQ(events_now(ep, POLLIN), 0);
        change(ep, EPOLL_CTL_MOD, p.fd, round % 2 ? 0 : EPOLLONESHOT, 1);
        EQ(events_now(ep, POLLIN), 0);
        change(ep, EPOLL_CTL_MOD, p.fd, EPOLLIN | EPOLLONESHOT, 1);
        peer_says(p.peer, "x");
        wait_events(ep, POLLIN, POLLIN);
        one_event(ep, EPOLLIN, 1);
        EQ(events_now(ep, POLLIN), 0);
        char c;
        EQ(recv(p.fd, &c, 1, 0), 1);
    }
    close(ep);
    pair_close(p);
}

// --- the order of those that have room

enum { ENDS = 6 };

// Some in the ring and some not yet, asked for room one after the other, are told of in that order.
static void tells_in_order(const int fds[ENDS], int ep, const int order[ENDS], uint32_t before, uint32_t events) {
    for (int i = 0; i < ENDS; i++)
        change(ep, EPOLL_CTL_MOD, fds[i], before, i);
    // The kernel forgets the order of before where a wait finds nothing.
    no_event(ep);
    for (int i = 0; i < ENDS; i++)
        change(ep, EPOLL_CTL_MOD, fds[order[i]], events, order[i]);
    // What lasts is told again and again, in the same order.
    for (int turn = 0; turn < (events & (EPOLLONESHOT | EPOLLET) ? 1 : 3); turn++) {
        struct epoll_event got[ENDS + 1];
        EQ(epoll_wait(ep, got, ENDS + 1, 10000), ENDS);
        for (int i = 0; i < ENDS; i++) {
            EQ(got[i].data.u64, order[i]);
            EQ(got[i].events, EPOLLOUT);
        }
    }
}

CASE(room_is_told_in_the_order_in_which_it_was_asked_for) {
    static const int orders[][ENDS] = {
        {0, 1, 2, 3, 4, 5}, {5, 4, 3, 2, 1, 0}, {0, 2, 4, 1, 3, 5}, {1, 3, 5, 0, 2, 4}, {3, 0, 5, 2, 4, 1}, {1, 0, 2, 4, 5, 3}};
    int ends[ENDS][2], fds[ENDS], ep = OK(epoll_create1(EPOLL_CLOEXEC));
    for (int i = 0; i < ENDS; i++) {
        both_ends(ends[i], true, i % 2 ? 40 : 0);
        fds[i] = ends[i][0];
        if (i % 2)
            assert_smcd(fds[i]);
        change(ep, EPOLL_CTL_ADD, fds[i], EPOLLIN, i);
    }
    for (size_t o = 0; o < sizeof orders / sizeof *orders; o++) {
        tells_in_order(fds, ep, orders[o], EPOLLIN, EPOLLIN | EPOLLOUT);
        tells_in_order(fds, ep, orders[o], 0, EPOLLOUT);
        tells_in_order(fds, ep, orders[o], EPOLLIN, EPOLLIN | EPOLLOUT | EPOLLONESHOT);
        tells_in_order(fds, ep, orders[o], EPOLLIN, EPOLLIN | EPOLLOUT | EPOLLET);
    }
    for (int i = 0; i < ENDS; i++) {
        close(ends[i][0]);
        close(ends[i][1]);
    }
    close(ep);
}

// The same as they are added.
CASE(room_is_told_in_the_order_in_which_sockets_were_added) {
    int ends[ENDS][2], order[ENDS] = {3, 0, 5, 2, 4, 1}, ep = OK(epoll_create1(EPOLL_CLOEXEC));
    for (int i = 0; i < ENDS; i++)
        both_ends(ends[i], true, i % 2 ? 40 : 0);
    for (int i = 0; i < ENDS; i++)
        change(ep, EPOLL_CTL_ADD, ends[order[i]][0], EPOLLIN | EPOLLOUT, order[i]);
    struct epoll_event got[ENDS];
    EQ(epoll_wait(ep, got, ENDS, 10000), ENDS);
    for (int i = 0; i < ENDS; i++)
        EQ(got[i].data.u64, order[i]);
    for (int i = 0; i < ENDS; i++) {
        close(ends[i][0]);
        close(ends[i][1]);
    }
    close(ep);
}
