// Programs of virtual machines, which talk over addresses of the machines' network. What is sent is a pattern, and each byte is checked
// wherever it comes.
//
//   guests serve ADDRESS PORT HOW               an echo server: a thread for each connection (blocking), or an epoll set (epoll)
//   guests talk ADDRESS PORT HOW COUNT BYTES    so many connections at a time, so many bytes over each and back, in pieces of any length;
//                                               then prints `done`, and keeps them until SIGTERM. `stalls`: epoll, but that it
//                                               stands still now and then, having sent all that finds room
//   guests ping ADDRESS PORT COUNT              so many short messages, each with its answer; prints `done` then, and keeps the connection
//   guests sink ADDRESS PORT                    reads one stream to its end, prints `bytes N`, and says so to its sender
//   guests source ADDRESS PORT BYTES            its sender; prints `done` then, and keeps the connection until SIGTERM
//   guests serve ADDRESS PORT churn             an echo server whose clients may be gone at any moment
//   guests churn FILE SERVER...                 one stream after the other to one of these (ADDRESS:PORT), until SIGTERM; FILE has the
//                                               counts of the whole, of those that ended early, and of steps
#include "guests.h"

#include <sys/resource.h>

int main(int argc, char **argv) {
    struct rlimit limit;
    OK(getrlimit(RLIMIT_NOFILE, &limit));
    limit.rlim_cur = limit.rlim_max;
    OK(setrlimit(RLIMIT_NOFILE, &limit));
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc < 4)
        return 2;
    if (!strcmp(argv[1], "churn")) {
        churn(argv[2], argv + 3, argc - 3);
        return 0;
    }
    const char *role = argv[1], *address = argv[2], *how = argc > 4 ? argv[4] : "";
    uint16_t port = atoi(argv[3]);
    bool stalls = !strcmp(how, "stalls"), is_events = stalls || !strcmp(how, "epoll");
    if (!strcmp(role, "serve") && !strcmp(how, "churn")) {
        serve_churn(address, port);
    } else if (!strcmp(role, "serve")) {
        (is_events ? serve_events : serve_blocking)(address, port);
    } else if (!strcmp(role, "talk") && argc == 7) {
        int count = atoi(argv[5]);
        struct talk *all = calloc(count, sizeof *all);
        CHECK(all);
        for (int i = 0; i < count; i++) {
            all[i].seed = ((uint64_t)getpid() << 32) + i + 1;
            all[i].end = strtoull(argv[6], NULL, 10);
            all[i].fd = connection(address, port, all[i].seed);
        }
        if (is_events)
            talk_events(all, count, stalls);
        else
            talk_blocking(all, count);
        printf("done\n");
        rest();
    } else if (!strcmp(role, "ping")) {
        ping(address, port, strtoull(how, NULL, 10));
    } else if (!strcmp(role, "sink")) {
        sink(address, port);
    } else if (!strcmp(role, "source")) {
        source(address, port, strtoull(how, NULL, 10));
    } else {
        return 2;
    }
    return 0;
}

int listener_at(const char *address, uint16_t port) {
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    return listen_at(fd, address, &port);
}

int connection(const char *address, uint16_t port, uint64_t seed) {
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(connect_at(fd, address, port));
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    EQ(send(fd, &seed, sizeof seed, 0), sizeof seed);
    return fd;
}

size_t piece_of(uint64_t seed, uint64_t at, uint64_t end) {
    uint32_t drawn;
    pattern(seed + 1, at & ~7ull, &drawn, sizeof drawn);
    // Short ones and long ones.
    size_t n = 1 + (drawn >> 8) % (drawn & 3 ? 500 : PIECE);
    return n < end - at ? n : end - at;
}

void rest(void) {
    sigset_t set;
    int number;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    OK(sigprocmask(SIG_BLOCK, &set, NULL));
    EQ(sigwait(&set, &number), 0);
}
