// The fortified variants that -D_FORTIFY_SOURCE=2 makes of calls whose buffer size is known.
#include "peer.h"

// A length the compiler cannot know.
static volatile size_t five = 5;

PAIR_CASE(fortified_read_recv_recvfrom) {
    struct pair p = pair_open();
    char buf[16];
    peer_says(p.peer, "12345abcde67890");
    EQ(read(p.fd, buf, five), 5);
    CHECK(!memcmp(buf, "12345", 5));
    EQ(recv(p.fd, buf, five, 0), 5);
    CHECK(!memcmp(buf, "abcde", 5));
    struct sockaddr_storage from;
    socklen_t len = sizeof from;
    EQ(recvfrom(p.fd, buf, five, 0, (struct sockaddr *)&from, &len), 5);
    CHECK(!memcmp(buf, "67890", 5));
    pair_close(p);
}

PAIR_CASE(fortified_poll_and_ppoll) {
    struct pair p = pair_open();
    struct pollfd fds[2] = {{.fd = p.fd, .events = POLLIN}, {.fd = -1}};
    volatile nfds_t two = 2;
    EQ(poll(fds, two, 0), 0);
    peer_says(p.peer, "x");
    EQ(poll(fds, two, 10000), 1);
    EQ(fds[0].revents, POLLIN);
    struct timespec limit = {10, 0};
    EQ(ppoll(fds, two, &limit, NULL), 1);
    EQ(fds[0].revents, POLLIN);
    pair_close(p);
}

PAIR_CASE(fortified_select_set) {
    struct pair p = pair_open();
    fd_set set;
    FD_ZERO(&set);
    volatile int fd = p.fd;
    FD_SET(fd, &set);
    peer_says(p.peer, "x");
    EQ(select(fd + 1, &set, NULL, NULL, NULL), 1);
    CHECK(FD_ISSET(fd, &set));
    pair_close(p);
}

CASE(fortified_overflow_is_still_caught) {
    // In a child, whose end by SIGABRT is the point.
    pid_t pid = OK(fork());
    if (pid == 0) {
        char buf[4];
        volatile size_t more = 64;
        int client, server;
        connect_here(&client, &server);
        EQ(send(server, "overflow", 8, 0), 8);
        close(2);
        ssize_t n = read(client, buf, more);
        _exit(n > 0 ? 3 : 4);
    }
    int status;
    EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

PAIR_CASE(fortified_dprintf) {
    struct pair p = pair_open();
    volatile int one = 1;
    for (int i = 0; i < 10; i++) {
        EQ(dprintf(p.fd, "%d %s %.1f %g %g %g|", one, "two", 3.5, 4.5, 5.5, 6.5), 22);
        peer_hears(p.peer, "1 two 3.5 4.5 5.5 6.5|");
        peer_says(p.peer, "ok");
        char got[2];
        EQ(recv(p.fd, got, 2, MSG_WAITALL), 2);
    }
    pair_close(p);
}
