// The slots of shared memory that connections use one after the other: given back when nobody has the connection
// any more, and not before.
#include "case.h"

#include <sys/prctl.h>

struct link {
    int client, server;
};

static int listener;
static uint16_t port;

static struct link connected(void) {
    struct link l = {.client = connect_to(port)};
    l.server = OK(accept(listener, NULL, NULL));
    return l;
}

// The client last: the slot is free at once.
static void both_close(struct link l) {
    close(l.server);
    close(l.client);
}

// Returns in a child once its parent says so.
static pid_t fork_and_wait(int *say) {
    int ends[2];
    OK(pipe(ends));
    pid_t pid = OK(fork());
    if (pid == 0) {
        char byte;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(ends[1]);
        EQ(read(ends[0], &byte, 1), 0);
        close(ends[0]);
    } else {
        close(ends[0]);
        *say = ends[1];
    }
    return pid;
}

// A connection that went back to TCP has a slot still, and each process that holds it has to say when it does not.
CASE(connection_passed_on_before_a_fork) {
    listener = listen_here(&port);
    struct link first = connected();
    warm_here(first.client, first.server);
    int channel[2], say;
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    send_fd(channel[0], first.client);
    close(receive_fd(channel[1]));
    send_all(first.client, 1, 0, 100);
    recv_all(first.server, 1, 0, 100);
    pid_t pid = fork_and_wait(&say);
    if (pid == 0) {
        both_close(first);
        _exit(0);
    }
    both_close(first);
    struct link second = connected();
    warm_here(second.client, second.server);
    close(say);
    child_succeeds(pid);
    // What this process closes, its child has.
    pid = fork_and_wait(&say);
    if (pid == 0) {
        close(second.server);
        send_all(second.client, 1, 0, 50000);
        _exit(0);
    }
    close(second.client);
    close(say);
    recv_to_eof(second.server, 1, 0, 50000);
    child_succeeds(pid);
    close(second.server);
}

// Bytes of all segments that are mapped here.
static long mapped(void) {
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps);
    char line[1024];
    long total = 0;
    while (fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        if (strstr(line, "/memfd:usmc-segment") && sscanf(line, "%lx-%lx", &from, &to) == 2)
            total += to - from;
    }
    fclose(maps);
    return total;
}

static void as_many_as_before(void (*one)(void)) {
    listener = listen_here(&port);
    for (int i = 0; i < 100; i++)
        one();
    long before = mapped();
    for (int i = 0; i < 1000; i++)
        one();
    CHECK(mapped() <= before);
}

static struct link talked(void) {
    struct link l = connected();
    for (int i = 0; i < 4; i++) {
        send_all(l.client, 1, i * 10, 10);
        recv_all(l.server, 1, i * 10, 10);
        send_all(l.server, 1, i * 10, 10);
        recv_all(l.client, 1, i * 10, 10);
    }
    return l;
}

static void child_closes_last(void) {
    int say;
    struct link l = talked();
    pid_t pid = fork_and_wait(&say);
    if (pid == 0) {
        both_close(l);
        _exit(0);
    }
    both_close(l);
    close(say);
    child_succeeds(pid);
}

CASE(slots_of_connections_that_a_child_closes_last) {
    as_many_as_before(child_closes_last);
}

static void child_is_killed(void) {
    int say;
    struct link l = talked();
    pid_t pid = fork_and_wait(&say);
    if (pid == 0)
        _exit(1);
    both_close(l);
    kill(pid, SIGKILL);
    close(say);
    EQ(TEMP_FAILURE_RETRY(waitpid(pid, NULL, 0)), pid);
}

CASE(slots_of_connections_whose_holder_is_killed) {
    as_many_as_before(child_is_killed);
}
