// Waits for room towards a peer that has shut its own direction down: no byte of its kernel's TCP can wake the sender any more.
#include "pair.h"

#include <sys/resource.h>

// How long a wait lasts that nothing ends, and how often its thread may wake in that time.
enum { LIMIT_MS = 300, WAKES = 30 };
// How often a sender waits for room, and how often before that for a peer that can wake it. (By TCP, filling takes long.)
enum { ROUNDS = 30, FEW = 5 };

// The longest that all of these waits may take together, in seconds, where as many for a peer that can wake the sender took `usual`.
// Those that looked every tenth of a second would need more.
static double longest(double usual) {
    return 3 * usual + 1;
}

static long sleeps(void) {
    struct rusage usage;
    OK(getrusage(RUSAGE_THREAD, &usage));
    return usage.ru_nvcsw;
}

// The peer reads on, and will send nothing.
static struct pair half_closed(void) {
    struct pair p = pair_open();
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    recv_to_eof(p.fd, 2, 0, 0);
    return p;
}

// Waits for room in some way, for so many milliseconds; -1 = for ever. 1 where there is some, 0 where the time is over.
typedef int wait_fn(int fd, int ms);

static int by_poll(int fd, int ms) {
    struct pollfd f = {.fd = fd, .events = POLLOUT};
    return poll(&f, 1, ms);
}

static int by_select(int fd, int ms) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    struct timeval limit = {ms / 1000, ms % 1000 * 1000};
    return select(fd + 1, NULL, &set, NULL, ms < 0 ? NULL : &limit);
}

static int by_epoll_of(int fd, int ms, uint32_t events) {
    int set = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {.events = events, .data.u64 = 7};
    OK(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event));
    int n = epoll_wait(set, &event, 1, ms);
    if (n == 1)
        EQ(event.data.u64, 7);
    OK(close(set));
    return n;
}

static int by_epoll(int fd, int ms) {
    return by_epoll_of(fd, ms, EPOLLOUT);
}

static int by_edges(int fd, int ms) {
    return by_epoll_of(fd, ms, EPOLLOUT | EPOLLET);
}

// The set is in another one, which alone is waited for.
static int by_a_set_within(int fd, int ms) {
    int inner = OK(epoll_create1(EPOLL_CLOEXEC)), outer = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {.events = EPOLLOUT, .data.u64 = 7};
    OK(epoll_ctl(inner, EPOLL_CTL_ADD, fd, &event));
    event.events = EPOLLIN;
    OK(epoll_ctl(outer, EPOLL_CTL_ADD, inner, &event));
    int n = epoll_wait(outer, &event, 1, ms);
    OK(close(inner));
    OK(close(outer));
    return n;
}

static void sleeps_without_room(wait_fn *wait) {
    struct pair p = half_closed();
    size_t got = 0, sent = fill(p.fd, 1, 0);
    // The two processes may have to agree on how to wake the sender.
    EQ(wait(p.fd, LIMIT_MS), 0);
    keep_in_ring(p, &got, &sent);
    long before = sleeps();
    EQ(wait(p.fd, LIMIT_MS), 0);
    CHECK(sleeps() - before < WAKES);
    pair_close(p);
}

// How long a sender waits for room in this pair, which is used up.
static double waits_in(struct pair p, wait_fn *wait, int rounds) {
    uint64_t sent = 0, got = 0;
    double waited = 0;
    for (int round = 0; round < rounds; round++) {
        sent += fill(p.fd, 1, sent);
        peer_begin(P_RECV_PATTERN, p.peer, 1, got, sent - got);
        got = sent;
        double before = now();
        EQ(wait(p.fd, 10000), 1);
        waited += now() - before;
        EQ(peer_end(), 0);
    }
    pair_close(p);
    return waited;
}

static double usual_waits(wait_fn *wait) {
    return waits_in(pair_open(), wait, FEW) * ROUNDS / FEW;
}

static void wakes_for_room(wait_fn *wait) {
    double usual = usual_waits(wait);
    CHECK(waits_in(half_closed(), wait, ROUNDS) < longest(usual));
}

PAIR_CASE(poll_for_room_of_a_half_closed_peer_sleeps) {
    sleeps_without_room(by_poll);
}

PAIR_CASE(select_for_room_of_a_half_closed_peer_sleeps) {
    sleeps_without_room(by_select);
}

PAIR_CASE(epoll_for_room_of_a_half_closed_peer_sleeps) {
    sleeps_without_room(by_epoll);
}

PAIR_CASE(epoll_for_edges_of_room_of_a_half_closed_peer_sleeps) {
    sleeps_without_room(by_edges);
}

// The limit may be over at any point of the look before the sleep.
PAIR_CASE(poll_for_room_of_a_half_closed_peer_ends_by_its_limit) {
    struct pair p = half_closed();
    size_t got = 0, sent = fill(p.fd, 1, 0);
    for (int round = 0; round < 1000; round++) {
        if (round % 100 == 99)
            keep_in_ring(p, &got, &sent);
        struct timespec limit = {0, 20000 + 100 * round};
        struct pollfd f = {.fd = p.fd, .events = POLLOUT};
        EQ(ppoll(&f, 1, &limit, NULL), 0);
    }
    pair_close(p);
}

PAIR_CASE(poll_hears_of_room_of_a_half_closed_peer) {
    wakes_for_room(by_poll);
}

PAIR_CASE(select_hears_of_room_of_a_half_closed_peer) {
    wakes_for_room(by_select);
}

PAIR_CASE(epoll_hears_of_room_of_a_half_closed_peer) {
    wakes_for_room(by_epoll);
}

PAIR_CASE(edges_of_room_of_a_half_closed_peer_are_heard) {
    wakes_for_room(by_edges);
}

PAIR_CASE(set_within_a_set_hears_of_room_of_a_half_closed_peer) {
    wakes_for_room(by_a_set_within);
}

// One set, for as long as the connection lasts, as event loops have it.
PAIR_CASE(event_loop_serves_a_half_closed_peer) {
    double usual = usual_waits(by_edges);
    struct pair p = half_closed();
    int set = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.u64 = 7};
    OK(epoll_ctl(set, EPOLL_CTL_ADD, p.fd, &event));
    size_t sent = 0, got = 0;
    double waited = 0;
    for (int round = 0; round < ROUNDS; round++) {
        sent += fill(p.fd, 1, sent);
        // What was true before is told.
        while (epoll_wait(set, &event, 1, 0) == 1)
            ;
        if (round == ROUNDS / 2) {
            EQ(epoll_wait(set, &event, 1, LIMIT_MS), 0);
            keep_in_ring(p, &got, &sent);
            while (epoll_wait(set, &event, 1, 0) == 1)
                ;
            long before = sleeps();
            EQ(epoll_wait(set, &event, 1, LIMIT_MS), 0);
            CHECK(sleeps() - before < WAKES);
        }
        peer_begin(P_RECV_PATTERN, p.peer, 1, got, sent - got);
        got = sent;
        double before = now();
        EQ(epoll_wait(set, &event, 1, 10000), 1);
        waited += now() - before;
        EQ(event.data.u64, 7);
        CHECK(event.events & EPOLLOUT);
        EQ(peer_end(), 0);
    }
    CHECK(waited < longest(usual));
    // The set tells somebody else, too, from now on, and has nothing to tell.
    sent += fill(p.fd, 1, sent);
    while (epoll_wait(set, &event, 1, 0) == 1)
        ;
    struct pollfd f = {.fd = set, .events = POLLIN};
    EQ(poll(&f, 1, LIMIT_MS), 0);
    peer_begin(P_RECV_PATTERN, p.peer, 1, got, sent - got);
    EQ(poll(&f, 1, 10000), 1);
    EQ(peer_end(), 0);
    OK(close(set));
    pair_close(p);
}

PAIR_CASE(send_to_a_half_closed_peer_sleeps) {
    struct pair p = half_closed();
    struct timeval limit = {LIMIT_MS / 1000, LIMIT_MS % 1000 * 1000};
    size_t got = 0, sent = fill(p.fd, 1, 0);
    OK(setsockopt(p.fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit));
    char byte = 0;
    FAILS(send(p.fd, &byte, 1, 0), EAGAIN);
    keep_in_ring(p, &got, &sent);
    long before = sleeps();
    FAILS(send(p.fd, &byte, 1, 0), EAGAIN);
    CHECK(sleeps() - before < WAKES);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, got, sent - got), 0);
    pair_close(p);
}

// How long a sender that sleeps in its sends needs for this pair, which is used up.
static double sends_in(struct pair p) {
    uint64_t bytes = 64 << 20;
    peer_begin(P_RECV_PATTERN, p.peer, 1, 0, bytes);
    double before = now();
    send_all(p.fd, 1, 0, bytes);
    double took = now() - before;
    EQ(peer_end(), 0);
    pair_close(p);
    return took;
}

PAIR_CASE(send_hears_of_room_of_a_half_closed_peer) {
    double usual = sends_in(pair_open());
    // A ring of 4 MB, seen every tenth of a second, would need 1.6 s more.
    CHECK(sends_in(half_closed()) < longest(usual));
}
