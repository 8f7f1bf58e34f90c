// Clients of the echo server. All of them check every byte that comes back.
#include "load.h"

#include <sys/select.h>

// --- cycle

static uint64_t state;

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

// Sends and checks one message; false when the server is gone.
static bool exchange(int fd, uint64_t seed, uint64_t at, size_t n) {
    char buf[20000];
    pattern(seed, at, buf, n);
    for (size_t sent = 0; sent < n;) {
        ssize_t r = send(fd, buf + sent, n - sent, 0);
        if (r < 0) {
            CHECK(errno == EPIPE || errno == ECONNRESET);
            return false;
        }
        sent += r;
    }
    for (size_t got = 0; got < n;) {
        ssize_t r = recv(fd, buf, n - got, 0);
        if (r == 0)
            return false;
        if (r < 0) {
            CHECK(errno == ECONNRESET);
            return false;
        }
        check_pattern(seed, at + got, buf, r);
        got += r;
    }
    return true;
}

static int try_connect(uint16_t port) {
    socklen_t len;
    struct sockaddr_storage to = address_of("127.0.0.1", port, &len);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    if (connect(fd, (struct sockaddr *)&to, len) == 0)
        return fd;
    CHECK(errno == ECONNREFUSED || errno == ECONNRESET);
    close(fd);
    return -1;
}

void cycle(uint16_t port, uint64_t seed, uint32_t most) {
    long done = 0, broken = 0;
    state = seed;
    nonblocking(0, true);
    printf("ready\n");
    for (;;) {
        char line[64];
        ssize_t asked = read(0, line, sizeof line);
        if (asked == 0)
            return;
        if (asked > 0)
            printf("cycles %ld broken %ld\n", done, broken);
        int fd = try_connect(port);
        if (fd < 0)
            continue;
        uint64_t stream = seed * 1000003 + done + broken, at = 0;
        uint32_t messages = draw(most);
        bool whole = true;
        for (uint32_t i = 0; whole && i < messages; i++) {
            size_t n = 1 + draw(draw(4) ? 200 : 20000);
            whole = exchange(fd, stream, at, n);
            at += n;
        }
        close(fd);
        done += whole;
        broken += !whole;
    }
}

// --- many

void many(uint16_t port, int count, size_t length, size_t taken) {
    int *fds = malloc(count * sizeof *fds);
    char *memory = malloc(taken + 1);
    CHECK(fds && memory);
    for (int i = 0; i < count; i++)
        fds[i] = connect_to(port);
    printf("connected\n");
    char line[64];
    for (uint64_t round = 0;; round++) {
        if (OK(read(0, line, sizeof line)) == 0)
            break;
        for (int i = 0; i < count; i++) {
            send_all(fds[i], i, round * length, length);
            if (round == 1 && i == count / 2)
                memset(memory, 1, taken);
        }
        for (int i = 0; i < count; i++)
            recv_all(fds[i], i, round * length, length);
        printf("round %d\n", (int)round);
    }
    for (int i = 0; i < count; i++)
        close(fds[i]);
}

// --- idle

void idle(uint16_t port, const char *call) {
    int fd = connect_to(port), ep = OK(epoll_create1(0));
    for (int i = 0; i < 16; i++) {
        send_all(fd, 1, i * 100, 100);
        recv_all(fd, 1, i * 100, 100);
    }
    struct pollfd f = {.fd = fd, .events = POLLIN};
    struct epoll_event event = {EPOLLIN, {.fd = fd}};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event));
    printf("idle\n");
    if (!strcmp(call, "poll"))
        OK(poll(&f, 1, -1));
    else if (!strcmp(call, "select"))
        OK(select(fd + 1, &set, NULL, NULL, NULL));
    else if (!strcmp(call, "epoll"))
        OK(epoll_wait(ep, &event, 1, -1));
    char c;
    EQ(recv(fd, &c, 1, 0), 0);
}
