// A sender without room, and what its epoll set tells once the peer has made some, whatever else came before.
#include "peer.h"

enum between {
    NOTHING,
    BYTES_READ, // the peer sends some, and they are read up to EAGAIN
    BYTES_LEFT, // they are left unread
    SHUTDOWN,   // the peer sends no more
    URGENT,     // an urgent byte
    BETWEENS
};

struct table {
    uint32_t events; // what is asked for
    uint32_t how;    // EPOLLET, EPOLLONESHOT or neither
    enum between between;
    bool before;   // registered before the connection was full
    bool tries;    // the sender tries to send each time that it is told of something
    bool in_parts; // the peer drains half at first
    uint32_t nested; // waits are on a set around the set: asked for by these events; 0: they are not
};

// What a wait tells, in a set around it if there is one.
static uint32_t told(int outer, int ep, int timeout) {
    struct epoll_event event;
    if (outer >= 0 && OK(epoll_wait(outer, &event, 1, timeout)) == 0)
        return 0;
    return OK(epoll_wait(ep, &event, 1, outer >= 0 ? 0 : timeout)) ? event.events : 0;
}

static void read_all(int fd) {
    char buf[64];
    while (recv(fd, buf, sizeof buf, MSG_DONTWAIT) > 0) {
    }
    EQ(errno, EAGAIN);
}

static void play(struct table t) {
    struct pair p = pair_open();
    set_option(p.fd, SOL_SOCKET, SO_SNDBUF, 65536);
    int ep = OK(epoll_create1(EPOLL_CLOEXEC)), outer = -1;
    struct epoll_event event = {t.events | t.how, {.u64 = 7}};
    uint64_t at = 0;
    bool spent = false;
    if (t.nested) {
        outer = OK(epoll_create1(EPOLL_CLOEXEC));
        struct epoll_event inner = {t.nested, {.u64 = 8}};
        OK(epoll_ctl(outer, EPOLL_CTL_ADD, ep, &inner));
    }
    if (t.before) {
        OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
        if (t.events & EPOLLOUT) {
            CHECK(told(outer, ep, 10000) & EPOLLOUT);
            if (t.how & EPOLLONESHOT)
                OK(epoll_ctl(ep, EPOLL_CTL_MOD, p.fd, &event));
        }
    }
    at += fill(p.fd, 1, at);
    if (!t.before)
        OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
    if (t.before && t.how & EPOLLONESHOT && t.events & EPOLLOUT) {
        // Asked for again while there was room.
        spent = told(outer, ep, 0) != 0;
        CHECK(!spent);
    } else {
        EQ(told(outer, ep, 0) & EPOLLOUT, 0);
    }

    uint32_t expected = 0;
    switch (t.between) {
    case BYTES_READ:
    case BYTES_LEFT:
        peer_says(p.peer, "abc");
        expected = EPOLLIN;
        break;
    case SHUTDOWN:
        OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
        expected = EPOLLIN | EPOLLRDHUP;
        break;
    case URGENT:
        EQ(peer_send(p.peer, "!", 1, MSG_OOB), 1);
        expected = EPOLLPRI;
        break;
    default:
        break;
    }
    expected &= t.events;
    if (expected) {
        EQ(told(outer, ep, 10000), expected);
        spent = t.how & EPOLLONESHOT;
    }
    if (t.between == BYTES_READ) {
        wait_readable(p.fd, 3);
        read_all(p.fd);
        expected = 0;
    }
    if (t.tries)
        at += fill(p.fd, 1, at);

    if (t.in_parts) {
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, at / 2), 0);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at / 2, at - at / 2), 0);
    } else {
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, at), 0);
    }
    if (t.events & EPOLLOUT && !spent) {
        expected |= EPOLLOUT;
        uint32_t got = 0;
        // Urgent data and the end may have been told of apart from it.
        for (double until = now() + 10; !(got & EPOLLOUT) && now() < until;)
            got = told(outer, ep, 1000);
        // What lasts is told with it.
        EQ(got & ~EPOLLPRI, expected & ~EPOLLPRI);
    } else {
        EQ(told(outer, ep, 0) & EPOLLOUT, 0);
    }
    close(ep);
    if (outer >= 0)
        close(outer);
    pair_close(p);
}

static void play_all(uint32_t how) {
    static const uint32_t events[] = {
        EPOLLIN | EPOLLOUT, EPOLLOUT, EPOLLIN, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLPRI};
    for (int e = 0; e < 4; e++)
        for (int between = NOTHING; between < BETWEENS; between++) {
            // Each choice with each of the others, and not all with all: a full TCP connection takes a fifth of a second.
            int choice = (e + between) % 3;
            play((struct table){events[e], how, between, choice == 0, choice == 1, choice == 2, 0});
        }
}

PAIR_CASE(room_is_told_whatever_came_before) {
    play_all(0);
}

PAIR_CASE(room_is_told_by_edges_whatever_came_before) {
    play_all(EPOLLET);
}

PAIR_CASE(room_is_told_once_whatever_came_before) {
    play_all(EPOLLONESHOT);
}

PAIR_CASE(room_is_told_by_one_edge_whatever_came_before) {
    play_all(EPOLLET | EPOLLONESHOT);
}

// The sets are both asked for by levels, both by edges, or one each.
PAIR_CASE(room_is_told_through_another_set_whatever_came_before) {
    for (int choice = 0; choice < 4; choice++)
        for (int between = NOTHING; between < SHUTDOWN; between++)
            play((struct table){EPOLLIN | EPOLLOUT, choice & 1 ? EPOLLET : 0, between, choice >> 1 != between % 2,
                false, false, EPOLLIN | (choice & 2 ? EPOLLET : 0)});
}

static int unread(int fd) {
    int count;
    OK(ioctl(fd, FIONREAD, &count));
    return count;
}

// nginx' way of reading by edges: it asks once how much there is, and counts on being told again of what comes on top, but
// behind the end nothing can come.
static uint64_t read_as_nginx(int fd, int ep) {
    uint64_t got = 0;
    for (;;) {
        struct epoll_event event;
        EQ(epoll_wait(ep, &event, 1, 10000), 1);
        bool ends = event.events & EPOLLRDHUP, ready = true;
        int left = -1;
        while (ready) {
            unsigned char bytes[4096];
            ssize_t n = recv(fd, bytes, sizeof bytes, 0);
            if (n < 0) {
                EQ(errno, EAGAIN);
                CHECK(!ends);
                break;
            }
            if (n == 0)
                return got;
            check_pattern(2, got, bytes, n);
            got += n;
            if (left >= 0) {
                left -= n;
                CHECK(left >= 0 || !ends);
                if (left <= 0)
                    ready = ends && left == 0;
            } else if (n == sizeof bytes) {
                left = unread(fd);
            }
            if (n < (ssize_t)sizeof bytes) {
                ready = ends;
                left = 0;
            }
        }
    }
}

static void end_behind(ssize_t in_ring) {
    struct pair p = pair_open();
    set_option(p.fd, SOL_SOCKET, SO_RCVBUF, 10000);
    nonblocking(p.fd, true);
    int ep = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {EPOLLIN | EPOLLRDHUP | EPOLLET, {.u64 = 7}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
    // More than fits into our buffer: the rest is in the peer's when the connection changes over.
    unsigned char bytes[5000];
    uint64_t all = 0;
    for (ssize_t n = 1; n > 0 && all < 400000; all += n > 0 ? n : 0) {
        pattern(2, all, bytes, sizeof bytes);
        n = peer_send(p.peer, bytes, sizeof bytes, MSG_DONTWAIT);
    }
    for (int i = 0; i < 200; i++) {
        send_all(p.fd, 1, i, 1);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i, 1), 0);
    }
    // It asks for room, and so do its sends.
    OK(peer_call(P_POLL, p.peer, POLLOUT, 0, 0));
    if (in_ring) {
        pattern(2, all, bytes, in_ring);
        EQ(peer_send(p.peer, bytes, in_ring, MSG_DONTWAIT), in_ring);
        all += in_ring;
    }
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    struct pollfd asked = {p.fd, POLLIN | POLLRDHUP, 0};
    EQ(poll(&asked, 1, 0), 1);
    if (asked.revents & POLLRDHUP)
        EQ(unread(p.fd), all);
    EQ(read_as_nginx(p.fd, ep), all);
    close(ep);
    pair_close(p);
}

PAIR_CASE(end_is_told_where_all_is_there) {
    end_behind(0);
    // A ring is full by now.
    if (!variant.warm)
        end_behind(10);
}

struct last_word {
    int fd;
    pthread_barrier_t *barrier;
};

static void *says_its_last_word(void *arg) {
    struct last_word *last = arg;
    pthread_barrier_wait(last->barrier);
    send_all(last->fd, 3, 0, 100);
    OK(shutdown(last->fd, SHUT_WR));
    return NULL;
}

// An end that comes in the very moment in which the bytes before it are told of is told of, too.
CASE(end_right_behind_bytes_is_an_edge) {
    pthread_barrier_t barrier;
    EQ(pthread_barrier_init(&barrier, NULL, 2), 0);
    for (int i = 0; i < 3000; i++) {
        int ends[2];
        both_ends(ends, i % 2, 20);
        nonblocking(ends[0], true);
        int ep = OK(epoll_create1(EPOLL_CLOEXEC));
        struct epoll_event event = {EPOLLIN | EPOLLRDHUP | EPOLLET, {.u64 = 7}};
        OK(epoll_ctl(ep, EPOLL_CTL_ADD, ends[0], &event));
        EQ(epoll_wait(ep, &event, 1, 0), 0);
        struct last_word last = {ends[1], &barrier};
        pthread_t thread;
        EQ(pthread_create(&thread, NULL, says_its_last_word, &last), 0);
        pthread_barrier_wait(&barrier);
        do
            EQ(epoll_wait(ep, &event, 1, 5000), 1);
        while (!(event.events & EPOLLRDHUP));
        recv_to_eof(ends[0], 3, 0, 100);
        EQ(pthread_join(thread, NULL), 0);
        close(ep);
        close(ends[0]);
        close(ends[1]);
    }
    pthread_barrier_destroy(&barrier);
}
