// Both ends with an epoll set, edge-triggered, and sockets that do not block.
#include "guests.h"

enum { LIMIT = 4096 };

struct echo {
    uint64_t seed, at;
    size_t seed_bytes, owed, sent;
    char bytes[PIECE];
};

static struct echo *echoes[LIMIT];

static void watch(int ep, int fd) {
    struct epoll_event event = {EPOLLIN | EPOLLOUT | EPOLLET, {.fd = fd}};
    nonblocking(fd, true);
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event));
}

static void end(int fd) {
    free(echoes[fd]);
    echoes[fd] = NULL;
    close(fd);
}

static void echo(int fd) {
    struct echo *e = echoes[fd];
    for (;;) {
        ssize_t n;
        if (e->sent < e->owed) {
            n = send(fd, e->bytes + e->sent, e->owed - e->sent, 0);
            e->sent += n > 0 ? n : 0;
        } else if (e->seed_bytes < sizeof e->seed) {
            n = recv(fd, (char *)&e->seed + e->seed_bytes, sizeof e->seed - e->seed_bytes, 0);
            e->seed_bytes += n > 0 ? n : 0;
        } else {
            n = recv(fd, e->bytes, sizeof e->bytes, 0);
            e->owed = e->sent = 0;
            if (n > 0) {
                check_pattern(e->seed, e->at, e->bytes, n);
                e->at += n;
                e->owed = n;
            }
        }
        if (n == 0)
            return end(fd);
        if (n < 0) {
            EQ(errno, EAGAIN);
            return;
        }
    }
}

void serve_events(const char *address, uint16_t port) {
    int listener = listener_at(address, port), ep = OK(epoll_create1(0));
    watch(ep, listener);
    for (;;) {
        struct epoll_event events[64];
        int n = OK(TEMP_FAILURE_RETRY(epoll_wait(ep, events, 64, -1)));
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd != listener) {
                if (echoes[fd])
                    echo(fd);
                continue;
            }
            while ((fd = accept(listener, NULL, NULL)) >= 0) {
                CHECK(fd < LIMIT);
                echoes[fd] = calloc(1, sizeof *echoes[fd]);
                CHECK(echoes[fd]);
                watch(ep, fd);
            }
            EQ(errno, EAGAIN);
        }
    }
}

static void go_on(struct talk *t, bool fills) {
    char buf[PIECE];
    ssize_t n;
    for (bool moves = true; moves;) {
        moves = false;
        while ((n = recv(t->fd, buf, sizeof buf, 0)) > 0) {
            check_pattern(t->seed, t->got, buf, n);
            t->got += n;
            moves = true;
        }
        CHECK(n < 0 && errno == EAGAIN);
        // One piece at a time to begin with, then several: what is on its way finds room as an echo.
        uint64_t most = fills ? 4 * PIECE : 2 * PIECE;
        while (t->sent < t->end && (fills || t->sent - t->got <= t->got / 4) && t->sent - t->got < most) {
            size_t want = piece_of(t->seed, t->sent, t->end);
            pattern(t->seed, t->sent, buf, want);
            n = send(t->fd, buf, want, 0);
            if (n < 0) {
                EQ(errno, EAGAIN);
                break;
            }
            t->sent += n;
            moves = true;
        }
    }
}

// More than both rings hold, of which nothing is read for about as long as a sender waits with it.
static void stall(struct talk *all, int count) {
    char buf[PIECE];
    for (int round = 0; round < 4; round++) {
        for (struct talk *t = all; t < all + count; t++) {
            ssize_t n = 0;
            while (n >= 0 && t->sent < t->end && t->sent - t->got < 4 * PIECE) {
                size_t want = piece_of(t->seed, t->sent, t->end);
                pattern(t->seed, t->sent, buf, want);
                n = send(t->fd, buf, want, 0);
                t->sent += n > 0 ? n : 0;
            }
            CHECK(n >= 0 || errno == EAGAIN);
        }
        usleep(400);
    }
    usleep(15000 + rand() % 8000);
}

void talk_events(struct talk *all, int count, bool stalls) {
    int ep = OK(epoll_create1(0)), left = count;
    for (int i = 0; i < count; i++) {
        struct epoll_event event = {EPOLLIN | EPOLLOUT | EPOLLET, {.u32 = i}};
        nonblocking(all[i].fd, true);
        OK(epoll_ctl(ep, EPOLL_CTL_ADD, all[i].fd, &event));
    }
    while (left > 0) {
        struct epoll_event events[64];
        int n = OK(TEMP_FAILURE_RETRY(epoll_wait(ep, events, 64, -1)));
        if (stalls && rand() % 4 == 0)
            stall(all, count);
        for (int i = 0; i < n; i++) {
            struct talk *t = &all[events[i].data.u32];
            bool was_done = t->got == t->end;
            go_on(t, stalls);
            left -= !was_done && t->got == t->end;
        }
    }
}
