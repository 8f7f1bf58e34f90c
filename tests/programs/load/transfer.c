// Many bytes both ways at once, each checked, and a hash of each stream for the record.
#include "load.h"

struct direction {
    int fd;
    uint64_t seed, n, hash;
};

enum { CHUNK = 1 << 17 };

static uint64_t hash(uint64_t h, const void *buf, size_t n) {
    const unsigned char *p = buf;
    uint64_t word;
    for (; n >= 8; p += 8, n -= 8) {
        memcpy(&word, p, 8);
        h = (h ^ word) * 0x9fb21c651e98df25u;
        h ^= h >> 32;
    }
    for (; n > 0; p++, n--)
        h = (h ^ *p) * 0x9fb21c651e98df25u;
    return h;
}

// The hash is over whole chunks, so that it does not depend on how the bytes arrive.
static void *send_direction(void *arg) {
    struct direction *d = arg;
    char *buf = malloc(CHUNK);
    CHECK(buf);
    for (uint64_t at = 0; at < d->n;) {
        size_t want = d->n - at < CHUNK ? d->n - at : CHUNK;
        pattern(d->seed, at, buf, want);
        d->hash = hash(d->hash, buf, want);
        for (size_t sent = 0; sent < want;)
            sent += OK(send(d->fd, buf + sent, want - sent, 0));
        at += want;
    }
    OK(shutdown(d->fd, SHUT_WR));
    free(buf);
    return NULL;
}

static void recv_direction(struct direction *d) {
    char *buf = malloc(CHUNK);
    CHECK(buf);
    for (uint64_t at = 0; at < d->n;) {
        size_t want = d->n - at < CHUNK ? d->n - at : CHUNK, got = 0;
        while (got < want) {
            ssize_t r = OK(recv(d->fd, buf + got, want - got, 0));
            CHECK(r > 0);
            got += r;
        }
        check_pattern(d->seed, at, buf, want);
        d->hash = hash(d->hash, buf, want);
        at += want;
    }
    EQ(recv(d->fd, buf, 1, 0), 0);
    free(buf);
}

static void both_ways(int fd, uint64_t n, uint64_t out_seed, uint64_t in_seed) {
    struct direction out = {fd, out_seed, n, 0}, in = {fd, in_seed, n, 0};
    pthread_t sender;
    EQ(pthread_create(&sender, NULL, send_direction, &out), 0);
    recv_direction(&in);
    EQ(pthread_join(sender, NULL), 0);
    close(fd);
    printf("sent %016llx\nreceived %016llx\n", (unsigned long long)out.hash,
        (unsigned long long)in.hash);
}

void sink(uint16_t port) {
    int listener = OK(socket(AF_INET, SOCK_STREAM, 0));
    set_option(listener, SOL_SOCKET, SO_REUSEADDR, 1);
    listen_at(listener, "127.0.0.1", &port);
    printf("port %d\n", port);
    int fd = OK(accept(listener, NULL, NULL));
    close(listener);
    uint64_t n;
    EQ(recv(fd, &n, sizeof n, MSG_WAITALL), sizeof n);
    both_ways(fd, n, 2, 1);
}

void source(uint16_t port, uint64_t n) {
    int fd = connect_to(port);
    printf("connected\n");
    EQ(send(fd, &n, sizeof n, 0), sizeof n);
    both_ways(fd, n, 1, 2);
}
