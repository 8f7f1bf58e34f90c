// Listeners that share a port, and processes that accept from one listener in every way.
#include "peer.h"

#include <sys/prctl.h>
#include <sys/select.h>

enum { MEMBERS = 3, CLIENTS = 30 };

static uint16_t the_port;

static int member(void) {
    int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    set_option(fd, SOL_SOCKET, SO_REUSEPORT, 1);
    return listen_at(fd, "127.0.0.1", &the_port);
}

// Keeps a port for the group, without being a member.
static int hold_port(void) {
    int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    set_option(fd, SOL_SOCKET, SO_REUSEPORT, 1);
    socklen_t len;
    struct sockaddr_storage at = address_of("127.0.0.1", 0, &len);
    OK(bind(fd, (struct sockaddr *)&at, len));
    the_port = local_port(fd);
    return fd;
}

// Echoes until the client ends; then the next one. Dies with the test.
static void serve(int listener) {
    for (;;) {
        int fd = OK(accept(listener, NULL, NULL));
        char buf[4096];
        for (ssize_t n; (n = OK(recv(fd, buf, sizeof buf, 0))) > 0;)
            for (ssize_t sent = 0; sent < n;)
                sent += OK(send(fd, buf + sent, n - sent, 0));
        close(fd);
    }
}

static pid_t start_member(int ready) {
    pid_t pid = OK(fork());
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int listener = member();
        EQ(write(ready, "r", 1), 1);
        serve(listener);
    }
    return pid;
}

static void converse(int client, int rounds) {
    for (int i = 0; i < rounds; i++) {
        send_all(client, 1, i * 900, 900);
        recv_all(client, 1, i * 900, 900);
    }
}

static void ends(int client) {
    OK(shutdown(client, SHUT_WR));
    recv_to_eof(client, 0, 0, 0);
    close(client);
}

static void stop(pid_t pid) {
    int status;
    OK(kill(pid, SIGKILL));
    EQ(waitpid(pid, &status, 0), pid);
}

CASE(group_of_listeners_of_one_port) {
    int holder = hold_port(), ready[2];
    OK(pipe(ready));
    pid_t pids[MEMBERS];
    for (int i = 0; i < MEMBERS; i++) {
        pids[i] = start_member(ready[1]);
        char byte;
        EQ(read(ready[0], &byte, 1), 1);
    }
    close(holder);
    for (int i = 0; i < CLIENTS; i++) {
        int client = connect_to(the_port);
        converse(client, 20);
        assert_smcd(client);
        ends(client);
    }
    // One of them leaves, and the rest serves.
    stop(pids[0]);
    for (int i = 0; i < CLIENTS; i++) {
        int client = connect_to(the_port);
        converse(client, 20);
        assert_smcd(client);
        ends(client);
    }
    for (int i = 1; i < MEMBERS; i++)
        stop(pids[i]);
}

static pid_t start_stranger(void) {
    pid_t pid = OK(fork());
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        char path[PATH_MAX] = {0};
        OK(readlink("/proc/self/exe", path, sizeof path - 1));
        unsetenv("LD_PRELOAD");
        execl(path, path, "group_of_one", (char *)NULL);
        _exit(127);
    }
    return pid;
}

// Also what the next one starts without the library, as a member of its group.
CASE(group_of_one) {
    int ready[2];
    if (getenv("GROUP_PORT")) {
        the_port = atoi(getenv("GROUP_PORT"));
        int listener = member();
        EQ(write(atoi(getenv("GROUP_READY")), "r", 1), 1);
        serve(listener);
    }
    OK(pipe(ready));
    int holder = hold_port();
    pid_t pid = start_member(ready[1]);
    char byte;
    EQ(read(ready[0], &byte, 1), 1);
    close(holder);
    int client = connect_to(the_port);
    converse(client, 20);
    assert_smcd(client);
    ends(client);
    stop(pid);
}

CASE(group_with_a_member_that_is_without_the_library) {
    int holder = hold_port(), ready[2];
    OK(pipe(ready));
    char byte, text[16];
    snprintf(text, sizeof text, "%d", the_port);
    setenv("GROUP_PORT", text, 1);
    snprintf(text, sizeof text, "%d", ready[1]);
    setenv("GROUP_READY", text, 1);
    pid_t ours = start_member(ready[1]);
    EQ(read(ready[0], &byte, 1), 1);
    pid_t stranger = start_stranger();
    EQ(read(ready[0], &byte, 1), 1);
    close(holder);
    // Whoever gets a connection, its bytes are right.
    for (int i = 0; i < 2 * CLIENTS; i++) {
        int client = connect_to(the_port);
        converse(client, 20);
        ends(client);
    }
    stop(ours);
    for (int i = 0; i < CLIENTS; i++) {
        int client = connect_to(the_port);
        converse(client, 20);
        ends(client);
    }
    stop(stranger);
}

static int shared_listener;

static void accept_some(void *arg) {
    // Each in its own way.
    int way = (int)(intptr_t)arg;
    nonblocking(shared_listener, true);
    int set = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {.events = EPOLLIN};
    OK(epoll_ctl(set, EPOLL_CTL_ADD, shared_listener, &event));
    for (int served = 0; served < 5;) {
        struct pollfd p = {.fd = shared_listener, .events = POLLIN};
        if (way % 3 == 0)
            OK(poll(&p, 1, -1));
        if (way % 3 == 1)
            OK(epoll_wait(set, &event, 1, -1));
        if (way % 3 == 2) {
            fd_set in;
            FD_ZERO(&in);
            FD_SET(shared_listener, &in);
            OK(select(shared_listener + 1, &in, NULL, NULL, NULL));
        }
        int fd = accept4(shared_listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) {
            EQ(errno, EAGAIN);
            continue;
        }
        char buf[4096];
        for (ssize_t n; (n = OK(recv(fd, buf, sizeof buf, 0))) > 0;)
            for (ssize_t sent = 0; sent < n;)
                sent += OK(send(fd, buf + sent, n - sent, 0));
        close(fd);
        served++;
    }
}

CASE(processes_that_accept_in_different_ways) {
    uint16_t port;
    shared_listener = listen_here(&port);
    pid_t pids[6];
    for (int i = 0; i < 6; i++)
        pids[i] = child(accept_some, (void *)(intptr_t)i);
    close(shared_listener);
    for (int i = 0; i < 30; i++) {
        int client = connect_to(port);
        converse(client, 20);
        assert_smcd(client);
        // A listener that was closed is remembered for a second; ours has other holders.
        for (double until = now() + 1.2; i == 0 && now() < until;)
            converse(client, 20);
        ends(client);
    }
    for (int i = 0; i < 6; i++)
        child_succeeds(pids[i]);
}
