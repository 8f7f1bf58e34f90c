// epoll on one set and one thread: triggers, readiness, membership, waiting.
#include "peer.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/timerfd.h>

static int set_with(int fd, uint32_t events, uint64_t data) {
    int ep = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {events, {.u64 = data}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event));
    return ep;
}

static void modify(int ep, int fd, uint32_t events, uint64_t data) {
    struct epoll_event event = {events, {.u64 = data}};
    OK(epoll_ctl(ep, EPOLL_CTL_MOD, fd, &event));
}

static const uint64_t DATA = 0xdeadbeefcafef00d;

PAIR_CASE(level_trigger_repeats_until_drained) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN, DATA);
    char buf[16];
    no_event(ep);
    peer_says(p.peer, "abcdef");
    wait_readable(p.fd, 6);
    for (int i = 0; i < 3; i++)
        one_event(ep, EPOLLIN, DATA);
    EQ(recv(p.fd, buf, 4, 0), 4);
    one_event(ep, EPOLLIN, DATA);
    EQ(recv(p.fd, buf, 16, 0), 2);
    no_event(ep);
    no_event(ep);
    for (int i = 0; i < 100; i++) {
        peer_says(p.peer, "x");
        one_event(ep, EPOLLIN, DATA);
        EQ(recv(p.fd, buf, 16, 0), 1);
    }
    close(ep);
    pair_close(p);
}

PAIR_CASE(edge_trigger_once_per_arrival) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN | EPOLLET, DATA);
    char buf[16];
    no_event(ep);
    peer_says(p.peer, "abc");
    wait_readable(p.fd, 3);
    one_event(ep, EPOLLIN, DATA);
    no_event(ep);
    EQ(recv(p.fd, buf, 1, 0), 1);
    no_event(ep);
    // New bytes are a new edge although the old ones are not drained.
    peer_says(p.peer, "de");
    one_event(ep, EPOLLIN, DATA);
    no_event(ep);
    EQ(recv(p.fd, buf, 16, 0), 4);
    no_event(ep);
    peer_says(p.peer, "f");
    one_event(ep, EPOLLIN, DATA);
    EQ(recv(p.fd, buf, 16, 0), 1);
    FAILS(recv(p.fd, buf, 16, MSG_DONTWAIT), EAGAIN);
    no_event(ep);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    one_event(ep, EPOLLIN, DATA);
    no_event(ep);
    close(ep);
    pair_close(p);
}

// Reads `n` bytes as event loops do that spare calls: up to what FIONREAD has told or to a short read, and the set tells of
// what came since.
static void read_by_edges(int ep, int fd, size_t n, size_t chunk) {
    static char buf[1 << 20];
    CHECK(chunk <= sizeof buf);
    for (size_t at = 0; at < n;) {
        struct epoll_event event;
        EQ(epoll_wait(ep, &event, 1, 10000), 1);
        CHECK(event.events & EPOLLIN);
        int left = -1;
        bool is_whole = true;
        while (at < n && left != 0 && is_whole) {
            ssize_t got = OK(recv(fd, buf, chunk, 0));
            check_pattern(1, at, buf, got);
            at += got;
            is_whole = (size_t)got == chunk;
            if (left >= 0)
                left = left > got ? left - got : 0;
            else if (is_whole)
                OK(ioctl(fd, FIONREAD, &left));
        }
    }
    char c;
    FAILS(recv(fd, &c, 1, 0), EAGAIN);
}

// More is on its way by TCP than the reader's kernel has, when the connection changes over.
CASE(edges_of_a_full_connection_that_changes_over) {
    for (size_t chunk = 1000; chunk <= 1 << 20; chunk *= 4) {
        int client, server, ep = OK(epoll_create1(0));
        connect_here(&client, &server);
        nonblocking(client, true);
        struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET};
        OK(epoll_ctl(ep, EPOLL_CTL_ADD, client, &event));
        // The reader asks for the change-over, and makes it while it reads nothing.
        trickle(client, server, 2, 0, 4);
        size_t sent = fill(server, 1, 0);
        trickle(client, server, 2, 4, 40);
        sent += fill(server, 1, sent);
        assert_smcd(client);
        read_by_edges(ep, client, sent, chunk);
        close(ep);
        close(client);
        close(server);
    }
}

PAIR_CASE(edge_trigger_at_add_and_modify_of_what_is_ready) {
    struct pair p = pair_open();
    peer_says(p.peer, "abc");
    wait_readable(p.fd, 3);
    int ep = set_with(p.fd, EPOLLIN | EPOLLOUT | EPOLLET, DATA);
    one_event(ep, EPOLLIN | EPOLLOUT, DATA);
    no_event(ep);
    modify(ep, p.fd, EPOLLIN | EPOLLET, DATA + 1);
    one_event(ep, EPOLLIN, DATA + 1);
    no_event(ep);
    modify(ep, p.fd, EPOLLOUT | EPOLLET, DATA + 2);
    one_event(ep, EPOLLOUT, DATA + 2);
    no_event(ep);
    close(ep);
    pair_close(p);
}

PAIR_CASE(edge_trigger_of_room) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLOUT | EPOLLET, DATA);
    one_event(ep, EPOLLOUT, DATA);
    no_event(ep);
    uint64_t sent = fill(p.fd, 1, 0), got = 0;
    struct epoll_event event;
    // An edge may have come while the buffers gave way; now it is full.
    epoll_wait(ep, &event, 1, 0);
    no_event(ep);
    for (int i = 0; i < 3; i++) {
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, got, sent - got), 0);
        got = sent;
        one_event(ep, EPOLLOUT, DATA);
        sent += fill(p.fd, 1, sent);
        while (epoll_wait(ep, &event, 1, 0) == 1)
            sent += fill(p.fd, 1, sent);
    }
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, got, sent - got), 0);
    close(ep);
    pair_close(p);
}

PAIR_CASE(level_trigger_of_room) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLOUT, DATA);
    one_event(ep, EPOLLOUT, DATA);
    one_event(ep, EPOLLOUT, DATA);
    uint64_t sent = fill(p.fd, 1, 0);
    no_event(ep);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, sent), 0);
    one_event(ep, EPOLLOUT, DATA);
    one_event(ep, EPOLLOUT, DATA);
    close(ep);
    pair_close(p);
}

PAIR_CASE(oneshot_needs_rearming) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN | EPOLLONESHOT, DATA);
    char buf[16];
    for (int i = 0; i < 20; i++) {
        peer_says(p.peer, "x");
        one_event(ep, EPOLLIN, DATA + i);
        no_event(ep);
        peer_says(p.peer, "y");
        wait_readable(p.fd, 2);
        no_event(ep);
        if (i % 2) // rearmed with bytes waiting: at once
            modify(ep, p.fd, EPOLLIN | EPOLLONESHOT, 77), one_event(ep, EPOLLIN, 77);
        EQ(recv(p.fd, buf, 16, 0), 2);
        modify(ep, p.fd, EPOLLIN | EPOLLONESHOT, DATA + i + 1);
        no_event(ep);
    }
    // Disarmed, not even the end is told.
    peer_says(p.peer, "x");
    one_event(ep, EPOLLIN, DATA + 20);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    no_event(ep);
    modify(ep, p.fd, EPOLLIN | EPOLLRDHUP | EPOLLONESHOT, DATA);
    wait_events(p.fd, POLLRDHUP, POLLRDHUP);
    one_event(ep, EPOLLIN | EPOLLRDHUP, DATA);
    close(ep);
    pair_close(p);
}

PAIR_CASE(oneshot_and_edge_together) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN | EPOLLONESHOT | EPOLLET, DATA);
    char buf[16];
    for (int i = 0; i < 50; i++) {
        peer_says(p.peer, "xy");
        one_event(ep, EPOLLIN, DATA);
        no_event(ep);
        EQ(recv(p.fd, buf, 16, MSG_WAITALL | MSG_DONTWAIT), 2);
        modify(ep, p.fd, EPOLLIN | EPOLLONESHOT | EPOLLET, DATA);
    }
    close(ep);
    pair_close(p);
}

PAIR_CASE(rdhup_hup_and_err) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN | EPOLLRDHUP, DATA), quiet = set_with(p.fd, 0, 1);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    one_event(ep, EPOLLIN | EPOLLRDHUP, DATA);
    no_event(quiet);
    modify(ep, p.fd, EPOLLIN, DATA);
    one_event(ep, EPOLLIN, DATA);
    modify(ep, p.fd, EPOLLRDHUP, DATA);
    one_event(ep, EPOLLRDHUP, DATA);
    OK(shutdown(p.fd, SHUT_WR));
    one_event(quiet, EPOLLHUP, 1);
    one_event(ep, EPOLLRDHUP | EPOLLHUP, DATA);
    close(ep);
    close(quiet);
    pair_close(p);
}

PAIR_CASE(reset_is_reported_to_who_asked_for_nothing) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, 0, DATA), edge = set_with(p.fd, EPOLLIN | EPOLLRDHUP | EPOLLET, 2);
    no_event(ep);
    OK(peer_call(P_RESET, p.peer, 0, 0, 0));
    one_event(ep, EPOLLERR | EPOLLHUP, DATA);
    one_event(edge, EPOLLIN | EPOLLRDHUP | EPOLLERR | EPOLLHUP, 2);
    no_event(edge);
    EQ(option(p.fd, SOL_SOCKET, SO_ERROR), ECONNRESET);
    one_event(ep, EPOLLHUP, DATA);
    close(ep);
    close(edge);
    close(p.fd);
}

PAIR_CASE(membership_errors) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN, DATA), file = OK(memfd_create("f", 0));
    struct epoll_event event = {EPOLLIN, {.u64 = 1}};
    FAILS(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event), EEXIST);
    FAILS(epoll_ctl(ep, EPOLL_CTL_ADD, 9999, &event), EBADF);
    FAILS(epoll_ctl(9999, EPOLL_CTL_ADD, p.fd, &event), EBADF);
    FAILS(epoll_ctl(p.fd, EPOLL_CTL_ADD, ep, &event), EINVAL);
    FAILS(epoll_ctl(ep, EPOLL_CTL_ADD, ep, &event), EINVAL);
    FAILS(epoll_ctl(ep, EPOLL_CTL_ADD, file, &event), EPERM);
    FAILS(epoll_ctl(ep, 99, p.fd, &event), EINVAL);
    FAILS(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, (void *)8), EFAULT);
    OK(epoll_ctl(ep, EPOLL_CTL_DEL, p.fd, NULL));
    FAILS(epoll_ctl(ep, EPOLL_CTL_DEL, p.fd, NULL), ENOENT);
    FAILS(epoll_ctl(ep, EPOLL_CTL_MOD, p.fd, &event), ENOENT);
    FAILS(epoll_wait(ep, &event, 0, 0), EINVAL);
    FAILS(epoll_wait(ep, &event, -1, 0), EINVAL);
    FAILS(epoll_wait(p.fd, &event, 1, 0), EINVAL);
    FAILS(epoll_wait(9999, &event, 1, 0), EBADF);
    peer_says(p.peer, "x");
    wait_readable(p.fd, 1);
    no_event(ep);
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
    FAILS(epoll_wait(ep, (void *)8, 1, 0), EFAULT);
    one_event(ep, EPOLLIN, 1);
    FAILS(epoll_wait(ep, &event, INT_MAX / sizeof event + 1, 10000), EINVAL);
    FAILS(epoll_pwait(ep, &event, INT_MAX, -1, NULL), EINVAL);
    close(file);
    close(ep);
    pair_close(p);
}

PAIR_CASE(modify_changes_events_and_data) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN, 1);
    peer_says(p.peer, "x");
    one_event(ep, EPOLLIN, 1);
    modify(ep, p.fd, EPOLLOUT, 2);
    one_event(ep, EPOLLOUT, 2);
    modify(ep, p.fd, EPOLLIN | EPOLLOUT, 3);
    one_event(ep, EPOLLIN | EPOLLOUT, 3);
    modify(ep, p.fd, 0, 4);
    no_event(ep);
    modify(ep, p.fd, EPOLLIN, 5);
    one_event(ep, EPOLLIN, 5);
    close(ep);
    pair_close(p);
}

PAIR_CASE(close_leaves_the_set_and_a_new_socket_of_that_number_is_new) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN, 1);
    peer_says(p.peer, "x");
    one_event(ep, EPOLLIN, 1);
    close(p.fd);
    no_event(ep);
    int pipes[2];
    OK(pipe(pipes));
    CHECK(pipes[0] == p.fd || pipes[1] == p.fd);
    EQ(write(pipes[1], "x", 1), 1);
    no_event(ep);
    struct epoll_event event = {EPOLLIN, {.u64 = 2}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, pipes[0], &event));
    one_event(ep, EPOLLIN, 2);
    close(pipes[0]);
    close(pipes[1]);
    no_event(ep);
    struct pair q = pair_open();
    event.data.u64 = 3;
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, q.fd, &event));
    no_event(ep);
    peer_says(q.peer, "x");
    one_event(ep, EPOLLIN, 3);
    close(ep);
    pair_close(q);
}

PAIR_CASE(duplicate_keeps_the_registration_alive) {
    // The trap of epoll(7): closing the registered number does not end it while a duplicate lives.
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN, 1), other = OK(dup(p.fd));
    close(p.fd);
    peer_says(p.peer, "x");
    one_event(ep, EPOLLIN, 1);
    char c;
    EQ(recv(other, &c, 1, 0), 1);
    no_event(ep);
    peer_says(p.peer, "y");
    one_event(ep, EPOLLIN, 1);
    close(other);
    no_event(ep);
    close(ep);
}

PAIR_CASE(duplicate_is_a_member_of_its_own) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN, 1), other = OK(dup(p.fd));
    struct epoll_event event = {EPOLLIN | EPOLLOUT, {.u64 = 2}}, got[4];
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, other, &event));
    peer_says(p.peer, "x");
    wait_readable(p.fd, 1);
    EQ(epoll_wait(ep, got, 4, 10000), 2);
    uint64_t first = got[0].data.u64;
    CHECK(first == 1 || first == 2);
    EQ(got[1].data.u64, 3 - first);
    EQ(got[first == 1].events, EPOLLIN | EPOLLOUT);
    EQ(got[first == 2].events, EPOLLIN);
    OK(epoll_ctl(ep, EPOLL_CTL_DEL, p.fd, NULL));
    one_event(ep, EPOLLIN | EPOLLOUT, 2);
    close(ep);
    close(other);
    pair_close(p);
}

PAIR_CASE(one_socket_in_several_sets) {
    struct pair p = pair_open();
    int level = set_with(p.fd, EPOLLIN, 1), edge = set_with(p.fd, EPOLLIN | EPOLLET, 2);
    int room = set_with(p.fd, EPOLLOUT, 3);
    for (int i = 0; i < 10; i++) {
        char c;
        peer_says(p.peer, "x");
        one_event(edge, EPOLLIN, 2);
        one_event(level, EPOLLIN, 1);
        one_event(level, EPOLLIN, 1);
        no_event(edge);
        one_event(room, EPOLLOUT, 3);
        EQ(recv(p.fd, &c, 1, 0), 1);
        no_event(level);
    }
    close(level);
    peer_says(p.peer, "x");
    one_event(edge, EPOLLIN, 2);
    close(edge);
    close(room);
    pair_close(p);
}

PAIR_CASE(sets_of_sockets_pipes_timers_and_events) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN, 1), pipes[2], event = OK(eventfd(0, 0));
    int timer = OK(timerfd_create(CLOCK_MONOTONIC, 0));
    OK(pipe(pipes));
    int others[] = {pipes[0], event, timer};
    for (int i = 0; i < 3; i++)
        OK(epoll_ctl(ep, EPOLL_CTL_ADD, others[i], &(struct epoll_event){EPOLLIN, {.u64 = 2 + i}}));
    no_event(ep);
    char c;
    EQ(write(pipes[1], "x", 1), 1);
    one_event(ep, EPOLLIN, 2);
    EQ(read(pipes[0], &c, 1), 1);
    peer_says(p.peer, "x");
    one_event(ep, EPOLLIN, 1);
    OK(eventfd_write(event, 1));
    wait_readable(p.fd, 1);
    struct epoll_event got[4];
    // Two sources: under uSMC the kernel's may come a few waits later than a ring's.
    for (int seen = 0, i = 0; seen != (1 << 1 | 1 << 3); i++) {
        CHECK(i < 20);
        int n = OK(epoll_wait(ep, got, 4, 10000));
        for (int k = 0; k < n; k++)
            seen |= 1 << got[k].data.u64;
    }
    EQ(recv(p.fd, &c, 1, 0), 1);
    one_event(ep, EPOLLIN, 3);
    OK(eventfd_read(event, &(eventfd_t){0}));
    OK(timerfd_settime(timer, 0, &(struct itimerspec){.it_value = {0, 20000000}}, NULL));
    one_event(ep, EPOLLIN, 4);
    // A socket that is always ready does not hide the others.
    peer_says(p.peer, "y");
    wait_readable(p.fd, 1);
    EQ(write(pipes[1], "x", 1), 1);
    for (int seen = 0, i = 0; seen != (1 << 1 | 1 << 2 | 1 << 4); i++) {
        CHECK(i < 100);
        EQ(epoll_wait(ep, got, 1, 10000), 1);
        seen |= 1 << got[0].data.u64;
    }
    close(ep);
    pair_close(p);
}

PAIR_CASE(more_ready_than_room_in_the_answer_is_shared_fairly) {
    struct pair p[8];
    int ep = OK(epoll_create1(0));
    for (int i = 0; i < 8; i++) {
        p[i] = pair_open();
        struct epoll_event event = {EPOLLIN, {.u64 = i}};
        OK(epoll_ctl(ep, EPOLL_CTL_ADD, p[i].fd, &event));
        peer_says(p[i].peer, "x");
        wait_readable(p[i].fd, 1);
    }
    int seen = 0;
    struct epoll_event got[8];
    for (int i = 0; i < 4; i++) {
        EQ(epoll_wait(ep, got, 2, 10000), 2);
        seen |= 1 << got[0].data.u64 | 1 << got[1].data.u64;
    }
    EQ(seen, 0xff);
    EQ(epoll_wait(ep, got, 8, 10000), 8);
    close(ep);
    for (int i = 0; i < 8; i++)
        pair_close(p[i]);
}

PAIR_CASE(waiting_times) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN, 1);
    struct epoll_event event;
    double start = now();
    EQ(epoll_wait(ep, &event, 1, 50), 0);
    double took = now() - start;
    CHECK(took >= 0.049 && took < 5);
    struct timespec limit = {0, 20000000};
    start = now();
    EQ(epoll_pwait2(ep, &event, 1, &limit, NULL), 0);
    CHECK(now() - start >= 0.0199);
    start = now();
    EQ(epoll_pwait(ep, &event, 1, 20, NULL), 0);
    CHECK(now() - start >= 0.0199);
    peer_says(p.peer, "x");
    EQ(epoll_wait(ep, &event, 1, -1), 1);
    EQ(epoll_pwait(ep, &event, 1, -1, NULL), 1);
    EQ(epoll_pwait2(ep, &event, 1, NULL, NULL), 1);
    close(ep);
    pair_close(p);
}

// Whoever sent first is served first, whatever the order in which connections were made. That of number `plain`
// stays TCP.
static void expect_order(int plain) {
    enum { PAIRS = 7, ROUNDS = 40 };
    struct pair p[PAIRS];
    int ep = OK(epoll_create1(EPOLL_CLOEXEC)), one = 1;
    for (int i = 0; i < PAIRS; i++) {
        p[i] = pair_open();
        if (i == plain)
            OK(setsockopt(p[i].fd, SOL_SOCKET, SO_TIMESTAMP, &one, sizeof one));
        OK(peer_call(P_OPTION, p[i].peer, IPPROTO_TCP, TCP_NODELAY, 1));
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
        OK(epoll_ctl(ep, EPOLL_CTL_ADD, p[i].fd, &event));
    }
    struct epoll_event none[PAIRS + 1];
    EQ(epoll_wait(ep, none, PAIRS + 1, 0), 0);
    for (int round = 0; round < ROUNDS; round++) {
        int place = round;
        for (int i = 0; i < PAIRS; i++) {
            EQ(peer_send(p[place % PAIRS].peer, "x", 1, 0), 1);
            place += 1 + round % (PAIRS - 1);
        }
        for (int i = 0; i < PAIRS; i++)
            wait_readable(p[i].fd, 1);
        struct epoll_event got[PAIRS];
        place = round;
        EQ(epoll_wait(ep, got, PAIRS, 10000), PAIRS);
        for (int i = 0; i < PAIRS; i++) {
            EQ(got[i].data.u32, place % PAIRS);
            place += 1 + round % (PAIRS - 1);
            char c;
            EQ(recv(p[got[i].data.u32].fd, &c, 1, 0), 1);
        }
        no_event(ep);
        // Some wait for the next round as those that slept, some as those that are looked at.
        if (round % 3 == 0)
            EQ(epoll_wait(ep, got, PAIRS, 2), 0);
        // An answer, so that all become lasting connections in the same round.
        for (int i = 0; i < PAIRS; i++) {
            EQ(send(p[i].fd, "y", 1, 0), 1);
            peer_hears(p[i].peer, "y");
        }
    }
    if (plain >= 0)
        assert_tcp(p[plain].fd);
    for (int i = 0; i < PAIRS; i++)
        pair_close(p[i]);
    close(ep);
}

PAIR_CASE(events_come_in_the_order_of_the_sends) {
    expect_order(-1);
}

// Where the sender sends nothing else by TCP meanwhile, as our end would in its process.
REMOTE_CASE(events_of_tcp_and_of_rings_come_in_the_order_of_the_sends) {
    expect_order(5);
}

// A receiver that does something else for long, as a server in a slow script, finds the order of the sends all the same.
REMOTE_CASE(events_for_a_busy_receiver_come_in_the_order_of_the_sends) {
    struct pair p[2];
    int ep = OK(epoll_create1(EPOLL_CLOEXEC)), one = 1;
    for (int i = 0; i < 2; i++) {
        p[i] = pair_open();
        if (i == 1)
            OK(setsockopt(p[i].fd, SOL_SOCKET, SO_TIMESTAMP, &one, sizeof one));
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
        OK(epoll_ctl(ep, EPOLL_CTL_ADD, p[i].fd, &event));
    }
    struct epoll_event got[2];
    for (int round = 0; round < 8; round++) {
        for (int i = 0; i < 2; i++) {
            peer_says(p[i].peer, "x");
            EQ(epoll_wait(ep, got, 2, 10000), 1);
            char c;
            EQ(recv(p[i].fd, &c, 1, 0), 1);
            EQ(send(p[i].fd, "y", 1, 0), 1);
            peer_hears(p[i].peer, "y");
        }
    }
    assert_tcp(p[1].fd);
    EQ(peer_send(p[1].peer, "x", 1, 0), 1);
    // The time is what is tested.
    usleep(300000);
    EQ(peer_send(p[0].peer, "x", 1, 0), 1);
    for (int i = 0; i < 2; i++)
        wait_readable(p[i].fd, 1);
    EQ(epoll_wait(ep, got, 2, 10000), 2);
    EQ(got[0].data.u32, 1);
    EQ(got[1].data.u32, 0);
    for (int i = 0; i < 2; i++)
        pair_close(p[i]);
    close(ep);
}

// Talks with the server at `port` by two connections, an old one and one after the other new ones, which have been used
// up to three times: a byte by the new one, and at once one by the old one.
static void sends_by_young_and_old(void *arg) {
    int one = 1;
    char c;
    uint16_t port = *(uint16_t *)arg;
    int old = connect_to(port);
    OK(setsockopt(old, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    for (int i = 0; i < 50; i++) {
        EQ(send(old, "x", 1, 0), 1);
        EQ(recv(old, &c, 1, 0), 1);
    }
    for (int round = 0; round < 300; round++) {
        int young = connect_to(port);
        OK(setsockopt(young, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
        for (int i = 0; i <= round % 3; i++) {
            EQ(send(young, "x", 1, 0), 1);
            EQ(recv(young, &c, 1, 0), 1);
        }
        EQ(send(young, "1", 1, 0), 1);
        EQ(send(old, "2", 1, 0), 1);
        EQ(recv(young, &c, 1, 0), 1);
        EQ(recv(old, &c, 1, 0), 1);
        close(young);
    }
    close(old);
}

// The order in which one program sends by several connections does not depend on how their bytes go.
CASE(young_connections_keep_their_place) {
    uint16_t port;
    int listener = listen_here(&port);
    pid_t pid = child(sends_by_young_and_old, &port);
    int ep = set_with(listener, EPOLLIN, listener), open = 0, seen = 0, first = 0;
    do {
        struct epoll_event got[4];
        int n = OK(epoll_wait(ep, got, 4, 10000));
        CHECK(n > 0);
        for (int i = 0; i < n; i++) {
            int fd = got[i].data.fd;
            char c;
            if (fd == listener) {
                struct epoll_event event = {.events = EPOLLIN, .data.u64 = OK(accept(listener, NULL, NULL))};
                OK(epoll_ctl(ep, EPOLL_CTL_ADD, event.data.fd, &event));
                open++;
            } else if (OK(recv(fd, &c, 1, 0)) == 0) {
                close(fd);
                open--;
            } else {
                if (c == '1')
                    first++;
                seen += c == '2';
                CHECK(c != '2' || first == seen);
                EQ(send(fd, &c, 1, 0), 1);
            }
        }
    } while (open > 0);
    EQ(seen, 300);
    child_succeeds(pid);
    close(listener);
    close(ep);
}
