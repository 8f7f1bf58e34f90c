// Socket options and what the kernel tells about a connection.
#include "peer.h"


PAIR_CASE(options_read_back_what_was_set) {
    struct pair p = pair_open();
    struct {
        int level, name, value;
    } options[] = {{IPPROTO_TCP, TCP_NODELAY, 1}, {IPPROTO_TCP, TCP_NODELAY, 0},
        {SOL_SOCKET, SO_KEEPALIVE, 1}, {IPPROTO_TCP, TCP_KEEPIDLE, 77}, {IPPROTO_TCP, TCP_KEEPINTVL, 7},
        {IPPROTO_TCP, TCP_KEEPCNT, 3}, {IPPROTO_TCP, TCP_USER_TIMEOUT, 12345},
        {SOL_SOCKET, SO_REUSEADDR, 1}, {SOL_SOCKET, SO_OOBINLINE, 1}, {SOL_SOCKET, SO_PRIORITY, 4},
        {SOL_SOCKET, SO_RCVLOWAT, 100}, {SOL_SOCKET, SO_RCVLOWAT, 1}, {IPPROTO_IP, IP_TOS, 0x10},
        {IPPROTO_TCP, TCP_NODELAY, 1}, {IPPROTO_TCP, TCP_CORK, 1}, {IPPROTO_TCP, TCP_CORK, 0},
        {IPPROTO_TCP, TCP_QUICKACK, 0}, {IPPROTO_TCP, TCP_QUICKACK, 1}};
    char byte = 'x', got;
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        set_option(p.fd, options[i].level, options[i].name, options[i].value);
        EQ(!!option(p.fd, options[i].level, options[i].name), !!options[i].value);
        if (options[i].value > 1)
            EQ(option(p.fd, options[i].level, options[i].name), options[i].value);
        // Nothing of it stands in the way of the bytes.
        if (options[i].name == SO_RCVLOWAT && options[i].value > 1)
            continue;
        EQ(send(p.fd, &byte, 1, 0), 1);
        if (options[i].name == TCP_CORK)
            continue;
        EQ(peer_recv(p.peer, &got, 1, 0), 1);
        EQ(peer_send(p.peer, &byte, 1, 0), 1);
        EQ(recv(p.fd, &got, 1, 0), 1);
    }
    close(p.fd);
}

PAIR_CASE(kind_of_the_socket) {
    struct pair p = pair_open();
    EQ(option(p.fd, SOL_SOCKET, SO_TYPE), SOCK_STREAM);
    EQ(option(p.fd, SOL_SOCKET, SO_DOMAIN), AF_INET);
    EQ(option(p.fd, SOL_SOCKET, SO_PROTOCOL), IPPROTO_TCP);
    EQ(option(p.fd, SOL_SOCKET, SO_ACCEPTCONN), 0);
    EQ(option(p.fd, SOL_SOCKET, SO_ERROR), 0);
    CHECK(option(p.fd, SOL_SOCKET, SO_SNDBUF) > 0);
    CHECK(option(p.fd, SOL_SOCKET, SO_RCVBUF) > 0);
    CHECK(option(p.fd, IPPROTO_TCP, TCP_MAXSEG) > 0);
    uint16_t port;
    EQ(option(listen_here(&port), SOL_SOCKET, SO_ACCEPTCONN), 1);
    pair_close(p);
}

PAIR_CASE(buffer_sizes_are_doubled_as_the_kernel_does) {
    struct pair p = pair_open();
    set_option(p.fd, SOL_SOCKET, SO_SNDBUF, 20000);
    set_option(p.fd, SOL_SOCKET, SO_RCVBUF, 30000);
    EQ(option(p.fd, SOL_SOCKET, SO_SNDBUF), 40000);
    EQ(option(p.fd, SOL_SOCKET, SO_RCVBUF), 60000);
    peer_begin(P_RECV_PATTERN, p.peer, 1, 0, 1 << 20);
    send_all(p.fd, 1, 0, 1 << 20);
    EQ(peer_end(), 0);
    peer_begin(P_SEND_PATTERN, p.peer, 2, 0, 1 << 20);
    recv_all(p.fd, 2, 0, 1 << 20);
    EQ(peer_end(), 0);
    pair_close(p);
}

PAIR_CASE(lengths_and_errors_of_option_calls) {
    struct pair p = pair_open();
    char small = -1;
    int value;
    socklen_t len = 1;
    OK(getsockopt(p.fd, SOL_SOCKET, SO_TYPE, &small, &len));
    EQ(len, 1);
    EQ(small, SOCK_STREAM);
    len = sizeof value;
    FAILS(getsockopt(p.fd, SOL_SOCKET, 9999, &value, &len), ENOPROTOOPT);
    FAILS(setsockopt(p.fd, SOL_SOCKET, 9999, &value, len), ENOPROTOOPT);
    FAILS(setsockopt(p.fd, SOL_SOCKET, SO_KEEPALIVE, &value, 1), EINVAL);
    FAILS(setsockopt(p.fd, SOL_SOCKET, SO_RCVLOWAT, (void *)8, 4), EFAULT);
    FAILS(getsockopt(p.fd, SOL_SOCKET, SO_RCVLOWAT, (void *)8, &len), EFAULT);
    FAILS(setsockopt(0, IPPROTO_TCP, TCP_NODELAY, &value, 4), ENOTSOCK);
    struct timeval bad = {0, 2000000};
    FAILS(setsockopt(p.fd, SOL_SOCKET, SO_RCVTIMEO, &bad, sizeof bad), EDOM);
    set_option(p.fd, SOL_SOCKET, SO_RCVLOWAT, 0);
    EQ(option(p.fd, SOL_SOCKET, SO_RCVLOWAT), 1);
    pair_close(p);
}

static struct tcp_info info(int fd) {
    struct tcp_info i = {0};
    socklen_t len = sizeof i;
    OK(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &i, &len));
    return i;
}

PAIR_CASE(tcp_info_tells_the_state) {
    struct pair p = pair_open();
    EQ(info(p.fd).tcpi_state, 1); // ESTABLISHED
    send_all(p.fd, 1, 0, 1000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 1000), 0);
    EQ(info(p.fd).tcpi_state, 1);
    OK(shutdown(p.fd, SHUT_WR));
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
    int state = info(p.fd).tcpi_state;
    CHECK(state == 4 || state == 5); // FIN_WAIT1 or 2
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    recv_to_eof(p.fd, 1, 0, 0);
    state = info(p.fd).tcpi_state;
    CHECK(state == 6 || state == 7); // TIME_WAIT is CLOSE for the socket
    close(p.fd);
}

PAIR_CASE(peer_closed_is_close_wait) {
    struct pair p = pair_open();
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    wait_events(p.fd, POLLRDHUP, POLLRDHUP);
    EQ(info(p.fd).tcpi_state, 8);
    pair_close(p);
}

CASE(options_of_a_listener_are_inherited) {
    uint16_t port;
    int listener = listen_here(&port);
    set_option(listener, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(listener, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(listener, SOL_SOCKET, SO_RCVLOWAT, 1);
    struct linger linger = {1, 5};
    OK(setsockopt(listener, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    int client = connect_to(port), server = OK(accept(listener, NULL, NULL));
    EQ(option(server, IPPROTO_TCP, TCP_NODELAY), 1);
    EQ(option(client, IPPROTO_TCP, TCP_NODELAY), 0);
    EQ(option(server, SOL_SOCKET, SO_KEEPALIVE), 1);
    warm_here(client, server);
    EQ(option(server, IPPROTO_TCP, TCP_NODELAY), 1);
    EQ(option(client, IPPROTO_TCP, TCP_NODELAY), 0);
    socklen_t len = sizeof linger;
    OK(getsockopt(server, SOL_SOCKET, SO_LINGER, &linger, &len));
    EQ(linger.l_linger, 5);
}

CASE(other_sockets_are_left_alone) {
    // UDP, UNIX stream and datagram, and TCP before it is connected.
    int udp = OK(socket(AF_INET, SOCK_DGRAM, 0)), pair[2];
    socklen_t len;
    struct sockaddr_storage to = address_of("127.0.0.1", 0, &len);
    OK(bind(udp, (struct sockaddr *)&to, len));
    OK(getsockname(udp, (struct sockaddr *)&to, &len));
    EQ(sendto(udp, "dgram", 5, 0, (struct sockaddr *)&to, len), 5);
    char buf[16];
    EQ(recv(udp, buf, 16, MSG_TRUNC), 5);
    OK(connect(udp, (struct sockaddr *)&to, len));
    EQ(send(udp, "again", 5, 0), 5);
    EQ(read(udp, buf, 16), 5);
    int types[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET};
    for (int i = 0; i < 3; i++) {
        OK(socketpair(AF_UNIX, types[i], 0, pair));
        EQ(write(pair[0], "hello", 5), 5);
        EQ(events_now(pair[1], POLLIN), POLLIN);
        EQ(read(pair[1], buf, 16), 5);
        close(pair[0]);
        EQ(recv(pair[1], buf, 16, MSG_DONTWAIT), types[i] == SOCK_DGRAM ? -1 : 0);
        close(pair[1]);
    }
}
