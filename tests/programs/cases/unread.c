// What nobody reads yet: TCP's buffers take megabytes of it, and programs count on that.
#include "peer.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/sendfile.h>

// So many bytes by sends of this size.
static void send_pieces(int fd, uint64_t seed, size_t at, size_t bytes, size_t piece) {
    for (size_t end = at + bytes; at < end; at += piece)
        send_all(fd, seed, at, piece < end - at ? piece : end - at);
}

static void both_send_first(size_t bytes, size_t piece) {
    struct pair p = pair_open();
    int at = pair_talk(p, 0, 40);
    peer_begin(P_SEND_PATTERN, p.peer, 2, at, (long)bytes);
    send_pieces(p.fd, 1, at, bytes, piece);
    EQ(peer_end(), 0);
    peer_begin(P_RECV_PATTERN, p.peer, 1, at, (long)bytes);
    recv_all(p.fd, 2, at, bytes);
    EQ(peer_end(), 0);
    pair_talk(p, at + (int)bytes, 100);
    pair_close(p);
}

PAIR_CASE(both_ends_send_before_they_read) { both_send_first(60 << 10, 1 << 10); }

PAIR_CASE(both_ends_send_more_than_rings_hold_before_they_read) { both_send_first(1000000, 1000); }

PAIR_CASE(both_ends_send_large_messages_before_they_read) { both_send_first(1 << 20, 1 << 20); }

// One thread has both ends.
static void one_thread(size_t bytes, size_t piece) {
    int ends[2];
    connect_here(&ends[0], &ends[1]);
    int at = ends_talk(ends, 0, 40);
    for (int from = 0; from < 2; from++)
        send_pieces(ends[from], 1 + from, at, bytes, piece);
    for (int from = 0; from < 2; from++)
        recv_all(ends[1 - from], 1 + from, at, bytes);
    ends_talk(ends, at + (int)bytes, 100);
    close(ends[0]);
    close(ends[1]);
}

CASE(one_thread_sends_before_it_reads) { one_thread(200000, 1000); }

CASE(one_thread_sends_more_than_a_ring_holds_before_it_reads) { one_thread(1500000, 3000); }

CASE(one_thread_sends_a_file_before_it_reads) {
    enum { BYTES = 1500000 };
    static char bytes[BYTES];
    int ends[2], file = OK(memfd_create("file", 0));
    connect_here(&ends[0], &ends[1]);
    int at = ends_talk(ends, 0, 40);
    pattern(1, at, bytes, BYTES);
    EQ(write(file, bytes, BYTES), BYTES);
    off_t from = 0;
    while (from < BYTES)
        CHECK(OK(sendfile(ends[0], file, &from, BYTES - from)) > 0);
    recv_all(ends[1], 1, at, BYTES);
    close(ends[0]);
    close(ends[1]);
    close(file);
}

// It waits in poll(2), as sockets with time limits do that a runtime keeps (Python's, Java's).
CASE(one_thread_polls_for_room_before_it_reads) {
    int ends[2];
    connect_here(&ends[0], &ends[1]);
    size_t start = ends_talk(ends, 0, 40), end = start + 1500000;
    nonblocking(ends[0], true);
    char piece[3000];
    for (size_t at = start; at < end;) {
        wait_events(ends[0], POLLOUT, POLLOUT);
        size_t most = end - at < sizeof piece ? end - at : sizeof piece;
        pattern(1, at, piece, most);
        at += OK(send(ends[0], piece, most, 0));
    }
    recv_all(ends[1], 1, start, end - start);
    close(ends[0]);
    close(ends[1]);
}

// An event loop that sends all of it before it reads anything.
static void loop_sends(int fd, uint64_t seed, size_t at, size_t bytes, uint32_t events) {
    int ep = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event e = {.events = events, .data.fd = fd};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e));
    nonblocking(fd, true);
    // Nothing happens for a while, but that there is room.
    for (int i = 0; i < 4; i++)
        CHECK(epoll_wait(ep, &e, 1, events & EPOLLET ? 1 : 0) >= 0);
    char piece[3000];
    for (size_t end = at + bytes; at < end;) {
        size_t most = end - at < sizeof piece ? end - at : sizeof piece;
        pattern(seed, at, piece, most);
        ssize_t n = send(fd, piece, most, 0);
        if (n < 0) {
            EQ(errno, EAGAIN);
            EQ(epoll_wait(ep, &e, 1, 20000), 1);
            continue;
        }
        at += n;
    }
    nonblocking(fd, false);
    close(ep);
}

struct loop {
    uint16_t port;
    uint32_t events;
    // Bytes of the talk before it.
    int start;
};

enum { LOOP_BYTES = 1500000 };

static void run_loop(int fd, uint64_t seed, const struct loop *l) {
    loop_sends(fd, seed, l->start, LOOP_BYTES, l->events);
    recv_all(fd, 3 - seed, l->start, LOOP_BYTES);
    // The other's answer says that it has read all.
    send_all(fd, seed, l->start + LOOP_BYTES, 10);
    recv_all(fd, 3 - seed, l->start + LOOP_BYTES, 10);
    close(fd);
}

static void connecting_loop(void *arg) {
    const struct loop *l = arg;
    int fd = connect_to(l->port);
    for (int at = 0; at < l->start; at += 10) {
        send_all(fd, 1, at, 10);
        recv_all(fd, 2, at, 10);
    }
    run_loop(fd, 1, l);
}

static void two_loops(uint32_t events, int start) {
    struct loop l = {.events = events, .start = start};
    int listener = listen_here(&l.port);
    pid_t other = child(connecting_loop, &l);
    int fd = OK(accept(listener, NULL, NULL));
    for (int at = 0; at < start; at += 10) {
        recv_all(fd, 1, at, 10);
        send_all(fd, 2, at, 10);
    }
    run_loop(fd, 2, &l);
    child_succeeds(other);
    close(listener);
}

CASE(two_loops_send_before_they_read) { two_loops(EPOLLOUT, 400); }

CASE(two_loops_of_edges_send_before_they_read) { two_loops(EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, 400); }

// Bytes of TCP are unread when the rings are full.
CASE(two_loops_begin_with_more_than_rings_hold) { two_loops(EPOLLIN | EPOLLOUT, 0); }

CASE(two_loops_of_edges_begin_with_more_than_rings_hold) { two_loops(EPOLLIN | EPOLLOUT | EPOLLET, 0); }

// The same by one thread, which has both ends.
static void one_loop(uint32_t events) {
    int ends[2];
    connect_here(&ends[0], &ends[1]);
    size_t at = ends_talk(ends, 0, 40);
    loop_sends(ends[0], 1, at, LOOP_BYTES, events);
    recv_all(ends[1], 1, at, LOOP_BYTES);
    close(ends[0]);
    close(ends[1]);
}

CASE(one_loop_sends_before_it_reads) { one_loop(EPOLLOUT); }

CASE(one_loop_of_edges_sends_before_it_reads) { one_loop(EPOLLIN | EPOLLOUT | EPOLLET); }

// It sleeps in poll(2) on its set.
CASE(polled_loop_sends_before_it_reads) {
    int ends[2];
    connect_here(&ends[0], &ends[1]);
    size_t at = ends_talk(ends, 0, 40);
    int ep = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event e = {.events = EPOLLOUT};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, ends[0], &e));
    size_t sent = fill(ends[0], 1, at);
    for (size_t most = LOOP_BYTES; sent < most;) {
        wait_events(ep, POLLIN, POLLIN);
        sent += fill(ends[0], 1, at + sent);
    }
    recv_all(ends[1], 1, at, sent);
    close(ep);
    close(ends[0]);
    close(ends[1]);
}

// The other end reads when all of it is sent, and not before.
PAIR_CASE(one_end_sends_before_the_other_reads) {
    struct pair p = pair_open();
    int at = pair_talk(p, 0, 40);
    send_pieces(p.fd, 1, at, LOOP_BYTES, 3000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at, LOOP_BYTES), 0);
    pair_close(p);
}

PAIR_CASE(one_loop_sends_before_the_other_end_reads) {
    for (int edges = 0; edges < 2; edges++) {
        struct pair p = pair_open();
        int at = pair_talk(p, 0, 40);
        loop_sends(p.fd, 1, at, LOOP_BYTES, edges ? EPOLLIN | EPOLLOUT | EPOLLET : EPOLLOUT);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at, LOOP_BYTES), 0);
        pair_close(p);
    }
}

// Each program of a ring of them sends to the next one before it reads what came from the one before.
enum { CHAIN = 3 };

struct chain {
    int me, listeners[CHAIN];
    uint16_t ports[CHAIN];
};

static void is_in_chain(void *arg) {
    const struct chain *c = arg;
    int next = connect_to(c->ports[(c->me + 1) % CHAIN]), before = OK(accept(c->listeners[c->me], NULL, NULL)), at = 0;
    for (; at < 400; at += 10) {
        send_all(next, 1, at, 10);
        recv_all(before, 1, at, 10);
        send_all(before, 2, at, 10);
        recv_all(next, 2, at, 10);
    }
    send_pieces(next, 1, at, LOOP_BYTES, 3000);
    recv_all(before, 1, at, LOOP_BYTES);
    send_all(before, 2, at, 10);
    recv_all(next, 2, at, 10);
}

CASE(programs_in_a_ring_send_before_they_read) {
    struct chain c;
    pid_t pids[CHAIN];
    for (int i = 0; i < CHAIN; i++)
        c.listeners[i] = listen_here(&c.ports[i]);
    for (c.me = 0; c.me < CHAIN; c.me++)
        pids[c.me] = child(is_in_chain, &c);
    for (int i = 0; i < CHAIN; i++)
        child_succeeds(pids[i]);
    for (int i = 0; i < CHAIN; i++)
        close(c.listeners[i]);
}

// What TCP's buffers take by default on all machines (2.7 MB on Linux 6.12); rings between or in 32-bit programs take less at
// once.
enum { MUCH = 5 << 19 };

// A sender that does not wait.
PAIR_CASE(much_fits_that_nobody_reads) {
    struct pair p = pair_open();
    int at = pair_talk(p, 0, 40);
    size_t sent = fill(p.fd, 1, at);
    CHECK(sent >= MUCH);
    EQ(events_now(p.fd, POLLOUT), 0);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at, (long)sent), 0);
    wait_events(p.fd, POLLOUT, POLLOUT);
    pair_close(p);
}

// More than the first window, less than TCP's first buffer.
PAIR_CASE(reader_may_wait_for_much_at_once) {
    enum { BYTES = 60000 };
    static char buf[BYTES];
    struct pair p = pair_open();
    size_t at = pair_talk(p, 0, 40);
    for (int peeks = 0; peeks < 2; peeks++, at += BYTES) {
        peer_begin(P_SEND_PATTERN, p.peer, 2, at, BYTES);
        if (peeks) {
            EQ(recv(p.fd, buf, BYTES, MSG_PEEK | MSG_WAITALL), BYTES);
        } else {
            set_option(p.fd, SOL_SOCKET, SO_RCVLOWAT, BYTES);
            wait_events(p.fd, POLLIN, POLLIN);
            EQ(recv(p.fd, buf, BYTES, MSG_DONTWAIT | MSG_PEEK), BYTES);
            set_option(p.fd, SOL_SOCKET, SO_RCVLOWAT, 1);
        }
        check_pattern(2, at, buf, BYTES);
        EQ(peer_end(), 0);
        recv_all(p.fd, 2, at, BYTES);
    }
    pair_close(p);
}

// TCP tells of less when its buffer is full.
PAIR_CASE(low_water_mark_may_be_more_than_a_ring_holds) {
    enum { BYTES = 1 << 20 };
    struct pair p = pair_open();
    int at = pair_talk(p, 0, 40);
    peer_begin(P_SEND_PATTERN, p.peer, 2, at, BYTES);
    set_option(p.fd, SOL_SOCKET, SO_RCVLOWAT, BYTES);
    EQ(option(p.fd, SOL_SOCKET, SO_RCVLOWAT), BYTES);
    wait_events(p.fd, POLLIN, POLLIN);
    set_option(p.fd, SOL_SOCKET, SO_RCVLOWAT, 1);
    recv_all(p.fd, 2, at, BYTES);
    EQ(peer_end(), 0);
    peer_begin(P_RECV_PATTERN, p.peer, 1, at, BYTES);
    send_all(p.fd, 1, at, BYTES);
    EQ(peer_end(), 0);
    pair_talk(p, at + BYTES, 100);
    pair_close(p);
}

// Nothing makes room but the reader.
PAIR_CASE(what_is_full_stays_full) {
    struct pair p = pair_open();
    int at = pair_talk(p, 0, 40), ep = OK(epoll_create1(EPOLL_CLOEXEC));
    size_t sent = fill(p.fd, 1, at);
    struct epoll_event e = {.events = EPOLLOUT};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &e));
    struct pollfd f = {.fd = p.fd, .events = POLLOUT};
    EQ(poll(&f, 1, 1200), 0);
    EQ(epoll_wait(ep, &e, 1, 0), 0);
    FAILS(send(p.fd, "", 1, MSG_DONTWAIT), EAGAIN);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at, (long)sent), 0);
    EQ(epoll_wait(ep, &e, 1, 20000), 1);
    EQ(e.events, EPOLLOUT);
    close(ep);
    pair_talk(p, at + (int)sent, 0);
    pair_close(p);
}

PAIR_CASE(send_with_a_time_limit_ends_by_it) {
    struct pair p = pair_open();
    int at = pair_talk(p, 0, 40);
    size_t sent = fill(p.fd, 1, at);
    struct timeval limit = {.tv_sec = 1, .tv_usec = 500000};
    OK(setsockopt(p.fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit));
    double start = now();
    FAILS(send(p.fd, "", 1, 0), EAGAIN);
    CHECK(now() - start > 1.4);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at, (long)sent), 0);
    pair_close(p);
}

enum way { BY_SEND, BY_POLL, BY_EPOLL, WAYS };

struct waiter {
    int fd;
    enum way way;
    pid_t tid;
};

static void *waits_for_room(void *arg) {
    struct waiter *w = arg;
    int ep = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event e = {.events = EPOLLOUT};
    struct pollfd f = {.fd = w->fd, .events = POLLOUT};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, w->fd, &e));
    __atomic_store_n(&w->tid, gettid(), __ATOMIC_RELEASE);
    if (w->way == BY_POLL)
        EQ(poll(&f, 1, 20000), 1);
    if (w->way == BY_EPOLL)
        EQ(epoll_wait(ep, &e, 1, 20000), 1);
    EQ(send(w->fd, "", 1, w->way == BY_SEND ? 0 : MSG_DONTWAIT), 1);
    close(ep);
    return NULL;
}

// A larger buffer is room at once, for who sleeps in a send, in poll(2) and in epoll_wait(2).
PAIR_CASE(larger_buffer_wakes_who_waits_for_room) {
    for (enum way way = 0; way < WAYS; way++) {
        struct pair p = pair_open();
        set_option(p.fd, SOL_SOCKET, SO_SNDBUF, 40000);
        int at = pair_talk(p, 0, 40);
        size_t sent = fill(p.fd, 1, at);
        CHECK(sent < 1 << 20);
        pthread_t sender;
        struct waiter w = {.fd = p.fd, .way = way};
        EQ(pthread_create(&sender, NULL, waits_for_room, &w), 0);
        while (!__atomic_load_n(&w.tid, __ATOMIC_ACQUIRE))
            sched_yield();
        wait_asleep(getpid(), w.tid);
        double start = now();
        set_option(p.fd, SOL_SOCKET, SO_SNDBUF, 200000);
        EQ(pthread_join(sender, NULL), 0);
        // A second is what it took before.
        CHECK(now() - start < 0.9);
        wait_events(p.fd, POLLOUT, POLLOUT);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at, (long)sent), 0);
        pair_close(p);
    }
}

// How much fits follows the sizes that both ends set.
PAIR_CASE(buffers_take_what_their_sizes_say) {
    static const struct {
        int snd, rcv;
        size_t least, most;
    } sizes[] = {
        {40000, 40000, 60000, 400 << 10},
        {100000, 40000, 100000, 800 << 10},
        {40000, 0, 40000, 800 << 10},
        {100000, 100000, 200000, 1 << 20},
        {0, 0, MUCH, 32 << 20},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct pair p = pair_open();
        if (sizes[i].rcv)
            EQ(peer_call(P_OPTION, p.peer, SOL_SOCKET, SO_RCVBUF, sizes[i].rcv), 0);
        if (sizes[i].snd)
            set_option(p.fd, SOL_SOCKET, SO_SNDBUF, sizes[i].snd);
        int at = pair_talk(p, 0, 40);
        size_t sent = fill(p.fd, 1, at);
        if (sent < sizes[i].least || sent > sizes[i].most)
            check_failed(__FILE__, __LINE__, "what fits", "line %zu: %zu bytes", i, sent);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at, (long)sent), 0);
        pair_close(p);
    }
}
