// A client of HTTP servers over kept connections, which checks every byte of each answer.
//
//   http make DIR    the files that `get` asks for
//   http [-e] [-m MARKS] [-p PREFIX] PORT CONNECTIONS SECONDS get|post
//
// `get` asks for PREFIX/NUMBER, `post` expects back what it sends. Prints so many lines "mark" at equal distances of time, for
// whoever reloads the server meanwhile, then answers per second. Fails where an answer is wrong, incomplete (but for -e), or
// does not come within 20 seconds. Where a server closes a connection it has kept, the request that met this is sent again.
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { FILES = 100, LARGEST = 700000, PATIENCE = 20 };

struct connection {
    int fd;
    unsigned number;
    // Whether the server has answered on it before; whether an answer is due; whether it waits for room.
    bool kept, asking, full;
    double since;
    char head[300], *in;
    size_t head_length, sent, got;
};

static char bytes[FILES * 997 + LARGEST];
static bool post, excused;
static const char *prefix = "";
static int port, set;
static unsigned next;
static long answers, broken, met_close, connects;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static const char *content(unsigned number) {
    return bytes + number * 997;
}

static size_t length(unsigned number) {
    return number == 50 ? LARGEST : number % 25 == 9 ? 150000 : number * 37 % 3000;
}

static void fail(struct connection *c, const char *what) {
    fprintf(stderr, "number %u: %s, %zu bytes sent, %zu received: %.200s\n", c->number, what, c->sent, c->got, c->in);
    exit(1);
}

static void ask(struct connection *c);

static void watch(struct connection *c, int how) {
    struct epoll_event event = {.events = c->full ? EPOLLIN | EPOLLOUT : EPOLLIN, .data.ptr = c};
    if (epoll_ctl(set, how, c->fd, &event)) {
        perror("epoll_ctl");
        exit(1);
    }
}

static void make_connection(struct connection *c) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0 || (connect(c->fd, (struct sockaddr *)&to, sizeof to) && errno != EINPROGRESS)) {
        perror("connect");
        exit(1);
    }
    int on = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    c->kept = false;
    c->full = true;
    watch(c, EPOLL_CTL_ADD);
    connects++;
}

static void drop(struct connection *c) {
    close(c->fd);
    make_connection(c);
}

// The connection has ended where an answer was due.
static void lose(struct connection *c, const char *how) {
    if (c->kept && c->got == 0) {
        met_close++;
    } else {
        broken++;
        if (!excused)
            fail(c, how);
    }
    drop(c);
    c->sent = c->got = 0;
}

static void transmit(struct connection *c) {
    size_t body = post ? length(c->number) : 0;
    while (c->sent < c->head_length + body) {
        size_t head = c->sent < c->head_length ? c->head_length - c->sent : 0;
        size_t done = head ? 0 : c->sent - c->head_length;
        struct iovec parts[2] = {
            {c->head + c->sent, head},
            {(char *)content(c->number) + done, body - done},
        };
        ssize_t n = writev(c->fd, head ? parts : parts + 1, head && body ? 2 : 1);
        // A connection that fails tells so when it is read.
        if (n < 0)
            break;
        c->sent += n;
    }
    bool full = c->sent < c->head_length + body;
    if (full != c->full) {
        c->full = full;
        watch(c, EPOLL_CTL_MOD);
    }
}

// Whether the answer in `c->in` is whole; its body is put together there.
static bool whole(struct connection *c, char **body, size_t *size, bool *closes) {
    c->in[c->got] = 0;
    char *end = strstr(c->in, "\r\n\r\n");
    if (!end)
        return false;
    *size = 0;
    *closes = false;
    bool chunked = false, sized = false;
    for (char *line = strstr(c->in, "\r\n"); line < end; line = strstr(line + 2, "\r\n")) {
        char *name = line + 2;
        if (!strncasecmp(name, "content-length:", 15)) {
            *size = strtoul(name + 15, NULL, 10);
            sized = true;
        }
        chunked |= !strncasecmp(name, "transfer-encoding: chunked", 26);
        *closes |= !strncasecmp(name, "connection: close", 17);
    }
    if (strncmp(c->in, "HTTP/1.", 7) || strncmp(c->in + 8, " 200", 4)) {
        if (excused && !strncmp(c->in + 8, " 50", 3)) {
            broken++;
            *closes = true;
            return true;
        }
        fail(c, "another status");
    }
    *body = end + 4;
    size_t there = c->in + c->got - *body;
    if (!chunked) {
        if (!sized || there > *size)
            fail(c, sized ? "more than was announced" : "no length");
        return there == *size;
    }
    // Looked through from the beginning each time: it is in the cache.
    size_t at = 0;
    for (;;) {
        char *line = *body + at, *close = memchr(line, '\n', there - at);
        if (!close)
            return false;
        size_t piece = strtoul(line, NULL, 16), start = close + 1 - *body;
        if (start + piece + 2 > there)
            return false;
        at = start + piece + 2;
        if (piece == 0)
            break;
    }
    if (at != there)
        fail(c, "more than the chunks");
    for (at = 0;;) {
        char *line = *body + at, *close = memchr(line, '\n', there - at);
        size_t piece = strtoul(line, NULL, 16), start = close + 1 - *body;
        if (piece == 0)
            return true;
        memmove(*body + *size, *body + start, piece);
        *size += piece;
        at = start + piece + 2;
    }
}

static void check(struct connection *c, const char *body, size_t size) {
    const char *expected = content(c->number);
    size_t at = 0;
    if (size != length(c->number)) {
        fprintf(stderr, "%zu bytes, not %zu\n", size, length(c->number));
        fail(c, "another length");
    }
    while (at < size && body[at] == expected[at])
        at++;
    if (at < size) {
        fprintf(stderr, "from byte %zu of %zu on\n", at, size);
        fail(c, "other bytes");
    }
}

static void receive(struct connection *c, bool go_on) {
    for (;;) {
        ssize_t n = read(c->fd, c->in + c->got, LARGEST + 100000 - c->got);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n <= 0) {
            if (c->asking)
                lose(c, n ? strerror(errno) : "the end");
            else
                drop(c);
            return;
        }
        c->got += n;
        if (!c->asking)
            fail(c, "an answer that nobody asked for");
        char *body = NULL;
        size_t size;
        bool closes;
        if (!whole(c, &body, &size, &closes))
            continue;
        if (body)
            check(c, body, size), answers++;
        c->asking = false;
        c->kept = true;
        if (closes)
            drop(c);
        if (go_on)
            ask(c);
        return;
    }
}

static void ask(struct connection *c) {
    c->number = next++ % FILES;
    c->sent = c->got = 0;
    c->asking = true;
    c->since = now();
    if (post)
        c->head_length = snprintf(c->head, sizeof c->head, "POST %s/%u HTTP/1.1\r\nHost: zoo\r\nContent-Length: %zu\r\n\r\n", prefix,
                                  c->number, length(c->number));
    else
        c->head_length = snprintf(c->head, sizeof c->head, "GET %s/%u HTTP/1.1\r\nHost: zoo\r\n\r\n", prefix, c->number);
    transmit(c);
}

static int make(const char *dir) {
    for (unsigned number = 0; number < FILES; number++) {
        char name[4096];
        snprintf(name, sizeof name, "%s/%u", dir, number);
        FILE *file = fopen(name, "w");
        if (!file || fwrite(content(number), 1, length(number), file) != length(number) || fclose(file)) {
            perror(name);
            return 1;
        }
    }
    return 0;
}

int main(int argc, char **argv) {
    uint64_t state = 1;
    for (size_t i = 0; i < sizeof bytes; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        bytes[i] = state >> 56;
    }
    if (argc == 3 && !strcmp(argv[1], "make"))
        return make(argv[2]);
    int marks = 0;
    for (int option; (option = getopt(argc, argv, "em:p:")) != -1;) {
        switch (option) {
        case 'e': excused = true; break;
        case 'm': marks = atoi(optarg); break;
        case 'p': prefix = optarg; break;
        default: return 2;
        }
    }
    if (argc - optind != 4)
        return 2;
    port = atoi(argv[optind]);
    int count = atoi(argv[optind + 1]);
    double seconds = atof(argv[optind + 2]);
    post = !strcmp(argv[optind + 3], "post");
    signal(SIGPIPE, SIG_IGN);
    set = epoll_create1(EPOLL_CLOEXEC);
    struct connection *connections = calloc(count, sizeof *connections);
    for (int i = 0; i < count; i++) {
        connections[i].in = malloc(LARGEST + 100001);
        make_connection(&connections[i]);
        ask(&connections[i]);
    }
    double begin = now(), end = begin + seconds, time;
    int marked = 0, left = count;
    while ((time = now()) < end || left > 0) {
        if (marked < marks && time > begin + seconds * (marked + 1) / (marks + 1)) {
            marked++;
            printf("mark\n");
            fflush(stdout);
        }
        struct epoll_event events[64];
        int n = epoll_wait(set, events, 64, 50);
        for (int i = 0; i < n; i++) {
            struct connection *c = events[i].data.ptr;
            if (c->asking)
                transmit(c);
            receive(c, now() < end);
        }
        left = 0;
        for (int i = 0; i < count; i++) {
            struct connection *c = &connections[i];
            left += c->asking;
            if (c->asking && now() > c->since + PATIENCE)
                fail(c, "no answer");
        }
    }
    fprintf(stderr, "%ld answers, %ld broken, %ld met a close, %ld connections\n", answers, broken, met_close, connects);
    printf("%.0f\n", answers / seconds);
    return answers == 0;
}
