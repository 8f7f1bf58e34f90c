// Both ends with calls that block.
#include "guests.h"

static void *echo(void *arg) {
    int fd = (int)(intptr_t)arg;
    char buf[PIECE];
    uint64_t seed, at = 0;
    EQ(recv(fd, &seed, sizeof seed, MSG_WAITALL), sizeof seed);
    ssize_t n;
    while ((n = OK(recv(fd, buf, sizeof buf, 0))) > 0) {
        check_pattern(seed, at, buf, n);
        for (ssize_t sent = 0; sent < n;)
            sent += OK(send(fd, buf + sent, n - sent, 0));
        at += n;
    }
    close(fd);
    return NULL;
}

void serve_by_threads(const char *address, uint16_t port, void *(*each)(void *)) {
    int listener = listener_at(address, port);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 128 << 10);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) {
            // Its client has gone by now (accept(2)).
            EQ(errno, ECONNABORTED);
            continue;
        }
        pthread_t thread;
        EQ(pthread_create(&thread, &attributes, each, (void *)(intptr_t)fd), 0);
    }
}

void serve_blocking(const char *address, uint16_t port) {
    serve_by_threads(address, port, echo);
}

void talk_blocking(struct talk *all, int count) {
    for (bool goes_on = true; goes_on;) {
        goes_on = false;
        for (struct talk *t = all; t < all + count; t++) {
            size_t n = piece_of(t->seed, t->got, t->end);
            send_all(t->fd, t->seed, t->sent, n);
            recv_all(t->fd, t->seed, t->got, n);
            t->sent = t->got += n;
            goes_on |= t->got < t->end;
        }
    }
}

void ping(const char *address, uint16_t port, uint64_t count) {
    enum { BYTES = 14 };
    uint64_t seed = 9;
    int fd = connection(address, port, seed);
    for (uint64_t at = 0; at < count * BYTES; at += BYTES) {
        send_all(fd, seed, at, BYTES);
        recv_all(fd, seed, at, BYTES);
    }
    printf("done\n");
    rest();
}

void sink(const char *address, uint16_t port) {
    static char buf[1 << 18];
    int listener = listener_at(address, port), fd = OK(accept(listener, NULL, NULL));
    uint64_t seed, at = 0;
    EQ(recv(fd, &seed, sizeof seed, MSG_WAITALL), sizeof seed);
    ssize_t n;
    for (bool first = true; (n = OK(recv(fd, buf, sizeof buf, 0))) > 0; first = false) {
        check_pattern(seed, at, buf, n);
        at += n;
        if (first)
            EQ(send(fd, buf, 1, 0), 1);
    }
    // A client looks for its listener once its connection lasts.
    close(listener);
    printf("bytes %llu\n", (unsigned long long)at);
    EQ(send(fd, &at, sizeof at, 0), sizeof at);
    EQ(recv(fd, buf, 1, 0), 0);
    rest();
}

void source(const char *address, uint16_t port, uint64_t n) {
    enum { LARGE = 1 << 18, FIRST = 100 };
    static char buf[LARGE];
    uint64_t seed = 7, got;
    int fd = connection(address, port, seed);
    for (uint64_t at = 0; at < n;) {
        // A message and an answer to begin with.
        size_t want = at == 0 ? FIRST : n - at < LARGE ? n - at : LARGE;
        pattern(seed, at, buf, want);
        for (size_t sent = 0; sent < want;)
            sent += OK(send(fd, buf + sent, want - sent, 0));
        if (at == 0)
            EQ(recv(fd, buf, 1, 0), 1);
        at += want;
    }
    OK(shutdown(fd, SHUT_WR));
    EQ(recv(fd, &got, sizeof got, MSG_WAITALL), sizeof got);
    EQ(got, n);
    printf("done\n");
    rest();
}
