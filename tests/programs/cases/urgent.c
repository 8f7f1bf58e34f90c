// Urgent data, beyond what passed_on.c says of its way back to TCP.
#include "peer.h"

#include <sys/select.h>

PAIR_CASE(no_urgent_data_is_told_as_such) {
    struct pair p = pair_open();
    char byte;
    FAILS(recv(p.fd, &byte, 1, MSG_OOB), EINVAL);
    EQ(sockatmark(p.fd), 0);
    peer_says(p.peer, "text");
    wait_readable(p.fd, 4);
    EQ(sockatmark(p.fd), 0);
    FAILS(recv(p.fd, &byte, 1, MSG_OOB | MSG_DONTWAIT), EINVAL);
    char buf[8];
    EQ(recv(p.fd, buf, sizeof buf, 0), 4);
    EQ(sockatmark(p.fd), 0);
    FAILS(sockatmark(-1), EBADF);
    FAILS(sockatmark(0), ENOTTY);
    if (variant.warm)
        assert_smcd(p.fd);
    pair_close(p);
}

PAIR_CASE(mark_by_sockatmark) {
    struct pair p = pair_open();
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 100), 0);
    EQ(peer_send(p.peer, "!", 1, MSG_OOB), 1);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 100, 100), 0);
    wait_events(p.fd, POLLPRI, POLLPRI);
    EQ(sockatmark(p.fd), 0);
    recv_all(p.fd, 2, 0, 60);
    EQ(sockatmark(p.fd), 0);
    recv_all(p.fd, 2, 60, 40);
    EQ(sockatmark(p.fd), 1);
    // A read past the mark drops the byte that nobody fetched.
    recv_all(p.fd, 2, 100, 100);
    EQ(sockatmark(p.fd), 0);
    char byte;
    FAILS(recv(p.fd, &byte, 1, MSG_OOB), EINVAL);
    pair_close(p);
}

PAIR_CASE(select_for_exceptions) {
    struct pair p = pair_open();
    fd_set set;
    FD_ZERO(&set);
    FD_SET(p.fd, &set);
    struct timeval none = {0, 0}, long_time = {20, 0};
    EQ(select(p.fd + 1, NULL, NULL, &set, &none), 0);
    EQ(peer_send(p.peer, "ab", 2, MSG_OOB), 2);
    FD_SET(p.fd, &set);
    EQ(select(p.fd + 1, NULL, NULL, &set, &long_time), 1);
    CHECK(FD_ISSET(p.fd, &set));
    char byte;
    EQ(recv(p.fd, &byte, 1, MSG_OOB | MSG_PEEK), 1);
    EQ(byte, 'b');
    EQ(recv(p.fd, &byte, 1, MSG_OOB), 1);
    FAILS(recv(p.fd, &byte, 1, MSG_OOB), EINVAL);
    FD_SET(p.fd, &set);
    EQ(select(p.fd + 1, NULL, NULL, &set, &none), 0);
    EQ(recv(p.fd, &byte, 1, 0), 1);
    EQ(byte, 'a');
    pair_close(p);
}

static volatile sig_atomic_t urgent;

static void count(int number) {
    (void)number;
    urgent++;
}

PAIR_CASE(urgent_signal_during_a_blocked_receive) {
    struct pair p = pair_open();
    struct sigaction action = {.sa_handler = count};
    OK(sigaction(SIGURG, &action, NULL));
    OK(fcntl(p.fd, F_SETOWN, getpid()));
    // The peer waits for nothing of ours; who sleeps is told by the signal.
    EQ(peer_send(p.peer, "?", 1, MSG_OOB), 1);
    wait_events(p.fd, POLLPRI, POLLPRI);
    CHECK(urgent >= 1);
    char byte;
    EQ(recv(p.fd, &byte, 1, MSG_OOB), 1);
    EQ(byte, '?');
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 3000), 0);
    timeout_option(p.fd, SO_RCVTIMEO, 20);
    recv_all(p.fd, 2, 0, 3000);
    pair_close(p);
}

PAIR_CASE(urgent_data_both_ways_and_often) {
    struct pair p = pair_open();
    for (int i = 0; i < 10; i++) {
        char mine = 'a' + i, got;
        send_all(p.fd, 1, i * 50, 50);
        EQ(send(p.fd, &mine, 1, MSG_OOB), 1);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 70, 70), 0);
        EQ(peer_send(p.peer, &mine, 1, MSG_OOB), 1);
        wait_events(p.fd, POLLPRI, POLLPRI);
        EQ(peer_call(P_POLL, p.peer, POLLPRI, 20000, 0), POLLPRI);
        recv_all(p.fd, 2, i * 70, 70);
        EQ(recv(p.fd, &got, 1, MSG_OOB), 1);
        EQ(got, mine);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 50, 50), 0);
        EQ(peer_recv(p.peer, &got, 1, MSG_OOB), 1);
        EQ(got, mine);
    }
    pair_close(p);
}

PAIR_CASE(urgent_edge_in_a_set_that_wants_data_too) {
    struct pair p = pair_open();
    int set = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {.events = EPOLLIN | EPOLLPRI | EPOLLET, .data.u32 = 3};
    OK(epoll_ctl(set, EPOLL_CTL_ADD, p.fd, &event));
    EQ(epoll_wait(set, &event, 1, 0), 0);
    peer_says(p.peer, "data");
    EQ(epoll_wait(set, &event, 1, 20000), 1);
    EQ(event.events, EPOLLIN);
    char buf[8];
    EQ(recv(p.fd, buf, sizeof buf, 0), 4);
    EQ(peer_send(p.peer, "!", 1, MSG_OOB), 1);
    for (double until = now() + 20;;) {
        // The way back may add an edge without news.
        EQ(epoll_wait(set, &event, 1, 20000), 1);
        EQ(event.data.u32, 3);
        if (event.events & EPOLLPRI)
            break;
        CHECK(now() < until);
    }
    EQ(recv(p.fd, buf, 1, MSG_OOB), 1);
    close(set);
    pair_close(p);
}
