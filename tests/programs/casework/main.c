// The registry of cases and the main function of the programs made of them.
#include "peer.h"

#include <sys/prctl.h>

static struct test_case *cases;
struct variant variant;

void register_case(struct test_case *c) {
    c->next = cases;
    cases = c;
}

static const struct {
    const char *name;
    struct variant variant;
} variants[] = {
    {"remote_client_warm", {true, true, true}},
    {"remote_client_cold", {true, true, false}},
    {"remote_server_warm", {true, false, true}},
    {"remote_server_cold", {true, false, false}},
    {"local_client_warm", {false, true, true}},
    {"local_server_cold", {false, false, false}},
};
#define VARIANTS (sizeof variants / sizeof *variants)

// With a program that sends back what it gets, for as long as our standard input has lines.
static void talk(uint16_t port) {
    int fd = connect_to(port);
    uint64_t at = 0;
    for (int c = '\n'; c != EOF; c = getchar()) {
        for (int i = 0; i < 32; i++, at += 10) {
            send_all(fd, 1, at, 10);
            recv_all(fd, 1, at, 10);
        }
        printf("%d %d\n", local_port(fd), port);
        fflush(stdout);
    }
    send_all(fd, 1, at, 50000);
    OK(shutdown(fd, SHUT_WR));
    recv_to_eof(fd, 1, at, 50000);
    close(fd);
}

// The first connection of a listener that came by exec, perhaps in a child that outlives this process.
static void serve(int listener, bool as_daemon) {
    if (as_daemon)
        OK(daemon(1, 1));
    echo(OK(accept(listener, NULL, NULL)));
}

static void list(void) {
    for (struct test_case *c = cases; c; c = c->next) {
        if (c->kind == SINGLE)
            printf("%s\n", c->name);
        for (size_t i = 0; c->kind != SINGLE && i < VARIANTS; i++)
            if (c->kind == PAIR || variants[i].variant.remote)
                printf("%s %s\n", c->name, variants[i].name);
    }
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "--peer")) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        peer_serve(atoi(argv[2]));
        return 0;
    }
    if (argc == 3 && !strcmp(argv[1], "--echo")) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        echo(atoi(argv[2]));
        return 0;
    }
    if (argc == 3 && (!strcmp(argv[1], "--serve") || !strcmp(argv[1], "--daemon"))) {
        serve(atoi(argv[2]), !strcmp(argv[1], "--daemon"));
        return 0;
    }
    if (argc == 3 && !strcmp(argv[1], "--talk")) {
        talk(atoi(argv[2]));
        return 0;
    }
    if (argc == 2 && !strcmp(argv[1], "--list")) {
        list();
        return 0;
    }
    if (argc < 2) {
        fprintf(stderr, "usage: %s --list | CASE [VARIANT]\n", argv[0]);
        return 2;
    }
    for (size_t i = 0; argc > 2 && i < VARIANTS; i++)
        if (!strcmp(variants[i].name, argv[2]))
            variant = variants[i].variant;
    for (struct test_case *c = cases; c; c = c->next) {
        if (strcmp(c->name, argv[1]))
            continue;
        c->run();
        peer_end_all();
        return 0;
    }
    fprintf(stderr, "%s: no such case; --list names them\n", argv[1]);
    return 2;
}
