// Flags of send and receive, timeouts, low-water mark, ioctls.
#include "peer.h"

#include <linux/sockios.h>

PAIR_CASE(peek_takes_nothing_away) {
    struct pair p = pair_open();
    char buf[16] = {0};
    FAILS(recv(p.fd, buf, 16, MSG_PEEK | MSG_DONTWAIT), EAGAIN);
    peer_says(p.peer, "abcdef");
    wait_readable(p.fd, 6);
    for (int i = 0; i < 3; i++) {
        EQ(recv(p.fd, buf, 16, MSG_PEEK), 6);
        CHECK(!memcmp(buf, "abcdef", 6));
        EQ(recv(p.fd, buf, 2, MSG_PEEK), 2);
    }
    EQ(recv(p.fd, buf, 2, 0), 2);
    EQ(recv(p.fd, buf, 16, MSG_PEEK), 4);
    CHECK(!memcmp(buf, "cdef", 4));
    peer_says(p.peer, "ghij");
    wait_readable(p.fd, 8);
    EQ(recv(p.fd, buf, 16, MSG_PEEK), 8);
    CHECK(!memcmp(buf, "cdefghij", 8));
    EQ(recv(p.fd, buf, 16, 0), 8);
    CHECK(!memcmp(buf, "cdefghij", 8));
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    EQ(recv(p.fd, buf, 16, MSG_PEEK), 0);
    EQ(recv(p.fd, buf, 16, MSG_PEEK), 0);
    pair_close(p);
}

PAIR_CASE(peek_blocks_until_there_is_something) {
    struct pair p = pair_open();
    char c = 0;
    peer_begin(P_RECV, p.peer, 1, MSG_PEEK, 0);
    peer_asleep();
    EQ(send(p.fd, "z", 1, 0), 1);
    EQ(peer_end(), 1);
    EQ(peer_recv(p.peer, &c, 1, 0), 1);
    EQ(c, 'z');
    pair_close(p);
}

// However the first bytes fall between the steps of the call.
PAIR_CASE(peek_and_waitall) {
    struct pair p = pair_open();
    for (int i = 0; i < 300; i++) {
        peer_begin(P_RECV, p.peer, 8, MSG_PEEK | MSG_WAITALL, 0);
        for (volatile int spin = 0; spin < i % 100 * 20; spin++)
            ;
        EQ(send(p.fd, "1234", 4, 0), 4);
        peer_asleep();
        EQ(send(p.fd, "5678", 4, 0), 4);
        EQ(peer_end(), 8);
        peer_hears(p.peer, "12345678");
    }
    pair_close(p);
}

PAIR_CASE(waitall_waits_for_all) {
    struct pair p = pair_open();
    size_t n = 300000;
    char buf[20000];
    peer_begin(P_RECV, p.peer, n, MSG_WAITALL, 0);
    for (size_t at = 0; at < n; at += sizeof buf) {
        peer_asleep();
        pattern(1, at, buf, sizeof buf);
        for (size_t done = 0; done < sizeof buf;)
            done += OK(send(p.fd, buf + done, sizeof buf - done, 0));
    }
    EQ(peer_end(), n);
    pair_close(p);
}

PAIR_CASE(waitall_ends_short_at_eof) {
    struct pair p = pair_open();
    peer_begin(P_RECV, p.peer, 100, MSG_WAITALL, 0);
    EQ(send(p.fd, "only ten..", 10, 0), 10);
    OK(shutdown(p.fd, SHUT_WR));
    EQ(peer_end(), 10);
    char c;
    EQ(peer_recv(p.peer, &c, 1, MSG_WAITALL), 0);
    pair_close(p);
}

PAIR_CASE(waitall_does_not_wait_where_dontwait_is_said) {
    struct pair p = pair_open();
    char buf[100];
    FAILS(recv(p.fd, buf, 100, MSG_WAITALL | MSG_DONTWAIT), EAGAIN);
    peer_says(p.peer, "four");
    wait_readable(p.fd, 4);
    EQ(recv(p.fd, buf, 100, MSG_WAITALL | MSG_DONTWAIT), 4);
    nonblocking(p.fd, true);
    peer_says(p.peer, "five5");
    wait_readable(p.fd, 5);
    EQ(recv(p.fd, buf, 100, MSG_WAITALL), 5);
    pair_close(p);
}

PAIR_CASE(waitall_with_a_timeout_returns_what_came) {
    struct pair p = pair_open();
    char buf[100];
    timeout_option(p.fd, SO_RCVTIMEO, 0.05);
    peer_says(p.peer, "some");
    wait_readable(p.fd, 4);
    double start = now();
    EQ(recv(p.fd, buf, 100, MSG_WAITALL), 4);
    CHECK(now() - start >= 0.04);
    FAILS(recv(p.fd, buf, 100, MSG_WAITALL), EAGAIN);
    pair_close(p);
}

PAIR_CASE(nonblocking_by_every_means) {
    struct pair p = pair_open();
    char c;
    int on = 1, off = 0;
    FAILS(recv(p.fd, &c, 1, MSG_DONTWAIT), EAGAIN);
    OK(ioctl(p.fd, FIONBIO, &on));
    CHECK(OK(fcntl(p.fd, F_GETFL)) & O_NONBLOCK);
    FAILS(recv(p.fd, &c, 1, 0), EAGAIN);
    FAILS(read(p.fd, &c, 1), EAGAIN);
    struct iovec iov = {&c, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    FAILS(readv(p.fd, &iov, 1), EAGAIN);
    FAILS(recvmsg(p.fd, &msg, 0), EAGAIN);
    OK(ioctl(p.fd, FIONBIO, &off));
    CHECK(!(OK(fcntl(p.fd, F_GETFL)) & O_NONBLOCK));
    nonblocking(p.fd, true);
    FAILS(recv(p.fd, &c, 1, 0), EAGAIN);
    nonblocking(p.fd, false);
    // Blocking again: a receive begun before the byte is sent gets it.
    EQ(peer_call(P_NONBLOCK, p.peer, 1, 0, 0), 0);
    EQ(peer_recv(p.peer, &c, 1, 0), -1);
    EQ(errno, EAGAIN);
    EQ(peer_call(P_NONBLOCK, p.peer, 0, 0, 0), 0);
    peer_begin(P_RECV, p.peer, 1, 0, 0);
    peer_asleep();
    EQ(send(p.fd, "x", 1, 0), 1);
    EQ(peer_end(), 1);
    pair_close(p);
}

PAIR_CASE(trunc_discards_bytes) {
    struct pair p = pair_open();
    char buf[16];
    peer_says(p.peer, "discardKEEP");
    wait_readable(p.fd, 11);
    EQ(recv(p.fd, NULL, 7, MSG_TRUNC), 7);
    EQ(recv(p.fd, buf, 16, 0), 4);
    CHECK(!memcmp(buf, "KEEP", 4));
    pair_close(p);
}

PAIR_CASE(more_holds_back_only_for_a_while) {
    struct pair p = pair_open();
    EQ(send(p.fd, "head", 4, MSG_MORE), 4);
    EQ(send(p.fd, "body", 4, MSG_MORE), 4);
    EQ(send(p.fd, "tail", 4, 0), 4);
    peer_hears(p.peer, "headbodytail");
    // Without an end it goes out all the same, after 200 ms at most on TCP.
    EQ(send(p.fd, "alone", 5, MSG_MORE), 5);
    peer_hears(p.peer, "alone");
    pair_close(p);
}

PAIR_CASE(cork_holds_back_and_lets_go) {
    struct pair p = pair_open();
    set_option(p.fd, IPPROTO_TCP, TCP_CORK, 1);
    EQ(option(p.fd, IPPROTO_TCP, TCP_CORK), 1);
    EQ(send(p.fd, "head", 4, 0), 4);
    EQ(send(p.fd, "body", 4, 0), 4);
    set_option(p.fd, IPPROTO_TCP, TCP_CORK, 0);
    EQ(option(p.fd, IPPROTO_TCP, TCP_CORK), 0);
    peer_hears(p.peer, "headbody");
    pair_close(p);
}

PAIR_CASE(nosignal_raises_nothing) {
    struct pair p = pair_open();
    // SIGPIPE would kill us here.
    OK(shutdown(p.fd, SHUT_WR));
    FAILS(send(p.fd, "x", 1, MSG_NOSIGNAL), EPIPE);
    struct iovec iov = {"x", 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    FAILS(sendmsg(p.fd, &msg, MSG_NOSIGNAL), EPIPE);
    struct mmsghdr mmsg = {.msg_hdr = msg};
    FAILS(sendmmsg(p.fd, &mmsg, 1, MSG_NOSIGNAL), EPIPE);
    FAILS(sendto(p.fd, "x", 1, MSG_NOSIGNAL, NULL, 0), EPIPE);
    pair_close(p);
}

PAIR_CASE(receive_timeout) {
    struct pair p = pair_open();
    char c;
    for (int i = 1; i <= 3; i++) {
        timeout_option(p.fd, SO_RCVTIMEO, 0.03 * i);
        double start = now();
        FAILS(recv(p.fd, &c, 1, 0), EAGAIN);
        double took = now() - start;
        CHECK(took >= 0.03 * i - 0.005 && took < 5);
        start = now();
        FAILS(read(p.fd, &c, 1), EAGAIN);
        CHECK(now() - start >= 0.03 * i - 0.005);
    }
    // What comes in time is read.
    timeout_option(p.fd, SO_RCVTIMEO, 20);
    peer_says(p.peer, "x");
    EQ(recv(p.fd, &c, 1, 0), 1);
    struct timeval time;
    socklen_t len = sizeof time;
    OK(getsockopt(p.fd, SOL_SOCKET, SO_RCVTIMEO, &time, &len));
    EQ(time.tv_sec, 20);
    pair_close(p);
}

PAIR_CASE(send_timeout) {
    struct pair p = pair_open();
    size_t sent = fill(p.fd, 1, 0);
    timeout_option(p.fd, SO_SNDTIMEO, 0.05);
    double start = now();
    FAILS(send(p.fd, "x", 1, 0), EAGAIN);
    CHECK(now() - start >= 0.04 && now() - start < 5);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, sent), 0);
    wait_events(p.fd, POLLOUT, POLLOUT);
    // A long send that runs into its limit says how much was taken.
    size_t n = 64 << 20;
    char *buf = calloc(1, n);
    CHECK(buf);
    ssize_t part = OK(send(p.fd, buf, n, 0));
    CHECK(part > 0 && (size_t)part < n);
    free(buf);
    OK(close(p.fd));
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}

PAIR_CASE(low_water_mark) {
    struct pair p = pair_open();
    char buf[16];
    set_option(p.fd, SOL_SOCKET, SO_RCVLOWAT, 4);
    EQ(option(p.fd, SOL_SOCKET, SO_RCVLOWAT), 4);
    peer_says(p.peer, "abc");
    wait_readable(p.fd, 3);
    EQ(events_now(p.fd, POLLIN), 0);
    // One that does not block takes what there is.
    EQ(recv(p.fd, buf, 1, MSG_DONTWAIT), 1);
    peer_says(p.peer, "de");
    wait_events(p.fd, POLLIN, POLLIN);
    EQ(recv(p.fd, buf, 16, 0), 4);
    set_option(p.fd, SOL_SOCKET, SO_RCVLOWAT, 1);
    peer_says(p.peer, "f");
    EQ(recv(p.fd, buf, 16, 0), 1);
    pair_close(p);
}

PAIR_CASE(low_water_mark_of_a_blocked_reader) {
    struct pair p = pair_open();
    char c[2] = "12";
    EQ(peer_call(P_OPTION, p.peer, SOL_SOCKET, SO_RCVLOWAT, 5), 0);
    peer_begin(P_RECV, p.peer, 100, 0, 0);
    peer_asleep();
    EQ(send(p.fd, c, 2, 0), 2);
    peer_asleep();
    EQ(send(p.fd, c, 2, 0), 2);
    peer_asleep();
    EQ(send(p.fd, c, 2, 0), 2);
    EQ(peer_end(), 6);
    // EOF counts, too.
    peer_begin(P_RECV, p.peer, 100, 0, 0);
    EQ(send(p.fd, c, 2, 0), 2);
    OK(shutdown(p.fd, SHUT_WR));
    EQ(peer_end(), 2);
    pair_close(p);
}

PAIR_CASE(queue_sizes) {
    struct pair p = pair_open();
    int n = -1;
    OK(ioctl(p.fd, FIONREAD, &n));
    EQ(n, 0);
    for (int i = 1; i <= 10; i++) {
        peer_says(p.peer, "0123456789");
        wait_readable(p.fd, 10 * i);
    }
    char buf[100];
    EQ(recv(p.fd, buf, 33, 0), 33);
    OK(ioctl(p.fd, FIONREAD, &n));
    EQ(n, 67);
    EQ(recv(p.fd, buf, 100, 0), 67);
    OK(ioctl(p.fd, FIONREAD, &n));
    EQ(n, 0);
    size_t sent = fill(p.fd, 1, 0);
    OK(ioctl(p.fd, SIOCOUTQ, &n));
    CHECK(n > 0);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, sent), 0);
    double until = now() + 10;
    do {
        OK(ioctl(p.fd, SIOCOUTQ, &n));
        CHECK(now() < until);
    } while (n != 0);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    wait_events(p.fd, POLLIN, POLLIN);
    OK(ioctl(p.fd, FIONREAD, &n));
    CHECK(n == 0 || n == 1); // Linux counts the FIN until it is read
    pair_close(p);
}

PAIR_CASE(other_flags_mean_what_they_mean_on_tcp) {
    struct pair p = pair_open();
    char c;
    FAILS(recv(p.fd, &c, 1, MSG_ERRQUEUE), EAGAIN);
    FAILS(recv(p.fd, &c, 1, MSG_OOB), EINVAL);
    EQ(send(p.fd, "x", 1, MSG_DONTROUTE | MSG_EOR | MSG_CONFIRM), 1);
    peer_hears(p.peer, "x");
    peer_says(p.peer, "y");
    EQ(recv(p.fd, &c, 1, MSG_CMSG_CLOEXEC), 1);
    EQ(c, 'y');
    pair_close(p);
}

PAIR_CASE(addresses_in_sendto_and_recvfrom) {
    struct pair p = pair_open();
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(9)};
    // A connected TCP socket does not look at the address.
    EQ(sendto(p.fd, "x", 1, 0, (struct sockaddr *)&to, sizeof to), 1);
    peer_hears(p.peer, "x");
    peer_says(p.peer, "y");
    struct sockaddr_storage from = {.ss_family = 77};
    socklen_t len = sizeof from;
    char c;
    EQ(recvfrom(p.fd, &c, 1, 0, (struct sockaddr *)&from, &len), 1);
    EQ(len, 0);
    EQ(from.ss_family, 77);
    pair_close(p);
}
