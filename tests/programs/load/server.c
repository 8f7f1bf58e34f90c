// An echo server on one epoll set, level-triggered, with back-pressure: it reads a connection only while it
// owes it nothing.
#include "load.h"

enum { LIMIT = 65536 };

struct connection {
    int fd;
    size_t owed, at;
    char bytes[4096];
};

static struct connection *connections[LIMIT];
static long served, resets, echoed, open_now;

static void set_events(int ep, int op, int fd, uint32_t events) {
    struct epoll_event event = {events, {.fd = fd}};
    OK(epoll_ctl(ep, op, fd, &event));
}

static void end(struct connection *c) {
    connections[c->fd] = NULL;
    close(c->fd);
    free(c);
    open_now--;
}

// The peer may die at any time; nothing else may go wrong.
static bool has_ended(ssize_t n) {
    if (n == 0)
        return true;
    if (n > 0 || errno == EAGAIN)
        return false;
    CHECK(errno == ECONNRESET || errno == EPIPE);
    resets++;
    return true;
}

static void echo(int ep, struct connection *c) {
    for (;;) {
        if (c->owed == 0) {
            ssize_t n = recv(c->fd, c->bytes, sizeof c->bytes, 0);
            if (has_ended(n))
                return end(c);
            if (n < 0)
                return set_events(ep, EPOLL_CTL_MOD, c->fd, EPOLLIN);
            c->owed = n;
            c->at = 0;
        }
        ssize_t n = send(c->fd, c->bytes + c->at, c->owed, 0);
        if (has_ended(n))
            return end(c);
        if (n < 0)
            return set_events(ep, EPOLL_CTL_MOD, c->fd, EPOLLOUT);
        c->at += n;
        c->owed -= n;
        echoed += n;
    }
}

static void accept_all(int ep, int listener) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        CHECK(fd < LIMIT && !connections[fd]);
        struct connection *c = calloc(1, sizeof *c);
        CHECK(c);
        c->fd = fd;
        connections[fd] = c;
        set_events(ep, EPOLL_CTL_ADD, fd, EPOLLIN);
        served++;
        open_now++;
    }
    CHECK(errno == EAGAIN || errno == ECONNABORTED);
}

void serve(uint16_t port, bool reuseport) {
    int listener = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)), ep = OK(epoll_create1(0));
    set_option(listener, SOL_SOCKET, SO_REUSEADDR, 1);
    if (reuseport)
        set_option(listener, SOL_SOCKET, SO_REUSEPORT, 1);
    listen_at(listener, "127.0.0.1", &port);
    set_events(ep, EPOLL_CTL_ADD, listener, EPOLLIN);
    set_events(ep, EPOLL_CTL_ADD, 0, EPOLLIN);
    printf("port %d\n", port);
    for (;;) {
        struct epoll_event events[64];
        // A process that was stopped and goes on finds its wait interrupted, even without a handler.
        int n = OK(TEMP_FAILURE_RETRY(epoll_wait(ep, events, 64, -1)));
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            char line[64];
            if (fd == 0) {
                if (OK(read(0, line, sizeof line)) == 0)
                    return;
                printf("stats served %ld open %ld resets %ld bytes %ld\n", served, open_now, resets,
                    echoed);
            } else if (fd == listener) {
                accept_all(ep, listener);
            } else if (connections[fd]) {
                echo(ep, connections[fd]);
            }
        }
    }
}
