// Setting connections up: blocking, not blocking, refused, short, to oneself.
#include "peer.h"

static struct sockaddr_in loopback(uint16_t port) {
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
}

// A port nobody listens at.
static uint16_t closed_port(void) {
    uint16_t port;
    close(listen_here(&port));
    return port;
}

PAIR_CASE(names_of_both_ends_agree) {
    struct pair p = pair_open();
    struct sockaddr_in own, other;
    socklen_t len = sizeof own;
    OK(getsockname(p.fd, (struct sockaddr *)&own, &len));
    EQ(len, sizeof own);
    OK(getpeername(p.fd, (struct sockaddr *)&other, &len));
    EQ(len, sizeof other);
    EQ(own.sin_addr.s_addr, htonl(INADDR_LOOPBACK));
    EQ(other.sin_addr.s_addr, htonl(INADDR_LOOPBACK));
    CHECK(own.sin_port != other.sin_port);
    // A short buffer is cut, and the length says how long it would be.
    len = 4;
    OK(getpeername(p.fd, (struct sockaddr *)&other, &len));
    EQ(len, sizeof other);
    pair_close(p);
}

CASE(accept_tells_the_clients_address) {
    uint16_t port;
    int listener = listen_here(&port), client = connect_to(port);
    struct sockaddr_in from;
    socklen_t len = sizeof from;
    int server = OK(accept(listener, (struct sockaddr *)&from, &len));
    EQ(len, sizeof from);
    EQ(ntohs(from.sin_port), local_port(client));
    EQ(peer_port(server), local_port(client));
    EQ(local_port(server), port);
    warm_here(client, server);
    len = sizeof from;
    OK(getpeername(server, (struct sockaddr *)&from, &len));
    EQ(ntohs(from.sin_port), local_port(client));
}

CASE(accept4_sets_flags_and_accept_inherits_none) {
    uint16_t port;
    int listener = listen_here(&port);
    nonblocking(listener, true);
    FAILS(accept(listener, NULL, NULL), EAGAIN);
    FAILS(accept4(listener, NULL, NULL, 0), EAGAIN);
    FAILS(accept4(listener, NULL, NULL, 0x1), EINVAL);
    int a = connect_to(port);
    wait_events(listener, POLLIN, POLLIN);
    int plain = OK(accept(listener, NULL, NULL));
    CHECK(!(OK(fcntl(plain, F_GETFL)) & O_NONBLOCK));
    CHECK(!(OK(fcntl(plain, F_GETFD)) & FD_CLOEXEC));
    int b = connect_to(port);
    wait_events(listener, POLLIN, POLLIN);
    int both = OK(accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
    CHECK(OK(fcntl(both, F_GETFL)) & O_NONBLOCK);
    CHECK(OK(fcntl(both, F_GETFD)) & FD_CLOEXEC);
    char c;
    FAILS(recv(both, &c, 1, 0), EAGAIN);
    close(a);
    close(b);
    // No flag was lost when the connection changed over.
    a = connect_to(port);
    wait_events(listener, POLLIN, POLLIN);
    both = OK(accept4(listener, NULL, NULL, SOCK_NONBLOCK));
    for (int i = 0; i < 16; i++) {
        EQ(send(a, "x", 1, 0), 1);
        wait_events(both, POLLIN, POLLIN);
        EQ(recv(both, &c, 1, 0), 1);
        FAILS(recv(both, &c, 1, 0), EAGAIN);
        EQ(send(both, "x", 1, 0), 1);
        EQ(recv(a, &c, 1, 0), 1);
    }
    assert_smcd(a);
}

CASE(nonblocking_connect_then_poll_then_so_error) {
    uint16_t port;
    int listener = listen_here(&port);
    struct sockaddr_in to = loopback(port);
    int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    FAILS(connect(fd, (struct sockaddr *)&to, sizeof to), EINPROGRESS);
    wait_events(fd, POLLOUT | POLLIN, POLLOUT);
    EQ(option(fd, SOL_SOCKET, SO_ERROR), 0);
    // Once more is either done or already connected, as on TCP.
    int again = connect(fd, (struct sockaddr *)&to, sizeof to);
    CHECK(again == 0 || errno == EISCONN);
    FAILS(connect(fd, (struct sockaddr *)&to, sizeof to), EISCONN);
    int server = OK(accept(listener, NULL, NULL));
    nonblocking(fd, false);
    warm_here(fd, server);
}

CASE(nonblocking_connect_and_epoll) {
    uint16_t port;
    int listener = listen_here(&port), ep = OK(epoll_create1(0));
    struct sockaddr_in to = loopback(port);
    int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    struct epoll_event event = {EPOLLOUT | EPOLLIN | EPOLLET, {.u64 = 0x1122334455667788}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event));
    FAILS(connect(fd, (struct sockaddr *)&to, sizeof to), EINPROGRESS);
    for (double until = now() + 10;;) {
        EQ(epoll_wait(ep, &event, 1, 10000), 1);
        EQ(event.data.u64, 0x1122334455667788);
        // Before connect(2) the socket was "writable and hung up"; that edge may come first.
        if (!(event.events & EPOLLHUP))
            break;
        CHECK(now() < until);
    }
    EQ(event.events, EPOLLOUT);
    EQ(option(fd, SOL_SOCKET, SO_ERROR), 0);
    int server = OK(accept(listener, NULL, NULL));
    EQ(send(fd, "hello", 5, 0), 5);
    char buf[8];
    EQ(recv(server, buf, 8, 0), 5);
    EQ(send(server, "world", 5, 0), 5);
    EQ(epoll_wait(ep, &event, 1, 10000), 1);
    EQ(event.events, EPOLLIN | EPOLLOUT);
    EQ(recv(fd, buf, 8, 0), 5);
}

CASE(refused_blocking) {
    struct sockaddr_in to = loopback(closed_port());
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    FAILS(connect(fd, (struct sockaddr *)&to, sizeof to), ECONNREFUSED);
    EQ(option(fd, SOL_SOCKET, SO_ERROR), 0);
    // The same socket may try again elsewhere.
    uint16_t port;
    int listener = listen_here(&port);
    to = loopback(port);
    OK(connect(fd, (struct sockaddr *)&to, sizeof to));
    warm_here(fd, OK(accept(listener, NULL, NULL)));
}

CASE(refused_nonblocking) {
    struct sockaddr_in to = loopback(closed_port());
    int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    FAILS(connect(fd, (struct sockaddr *)&to, sizeof to), EINPROGRESS);
    wait_events(fd, POLLOUT, POLLOUT | POLLERR | POLLHUP);
    EQ(option(fd, SOL_SOCKET, SO_ERROR), ECONNREFUSED);
    EQ(option(fd, SOL_SOCKET, SO_ERROR), 0);
}

// A second attempt owes nothing to what was seen of the first. `by_epoll`: also by a wait on a set.
static void refused_then_connected(bool by_epoll) {
    uint16_t port = closed_port();
    struct sockaddr_in to = loopback(port);
    int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)), ep = OK(epoll_create1(0));
    FAILS(connect(fd, (struct sockaddr *)&to, sizeof to), EINPROGRESS);
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event));
    wait_events(fd, POLLIN | POLLOUT | POLLRDHUP, POLLIN | POLLOUT | POLLRDHUP | POLLERR | POLLHUP);
    if (by_epoll) {
        EQ(epoll_wait(ep, &event, 1, 10000), 1);
        EQ(event.events, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLERR | EPOLLHUP);
    }
    EQ(option(fd, SOL_SOCKET, SO_ERROR), ECONNREFUSED);
    FAILS(connect(fd, (struct sockaddr *)&to, sizeof to), ECONNABORTED);
    int listener = listen_here(&port);
    to = loopback(port);
    nonblocking(fd, false);
    OK(connect(fd, (struct sockaddr *)&to, sizeof to));
    int server = OK(accept(listener, NULL, NULL));
    EQ(events_now(fd, POLLIN | POLLOUT | POLLRDHUP), POLLOUT);
    warm_here(fd, server);
    EQ(events_now(fd, POLLIN | POLLOUT | POLLRDHUP), POLLOUT);
    send_all(fd, 1, 0, 1000);
    char c;
    FAILS(recv(fd, &c, 1, MSG_DONTWAIT), EAGAIN);
    OK(close(server));
    FAILS(recv(fd, &c, 1, 0), ECONNRESET);
    close(ep);
    close(fd);
}

CASE(connected_after_a_refusal) {
    refused_then_connected(false);
    refused_then_connected(true);
}

static void bind_again(int fd, uint16_t port) {
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    struct sockaddr_in name = loopback(port);
    OK(bind(fd, (struct sockaddr *)&name, sizeof name));
}

// Once a connection was reset, another one may have its names while the program has the old one still.
CASE(names_of_a_connection_that_was_reset) {
    uint16_t port, own = closed_port();
    int listener = listen_here(&port);
    struct sockaddr_in to = loopback(port);
    int old = OK(socket(AF_INET, SOCK_STREAM, 0));
    bind_again(old, own);
    OK(connect(old, (struct sockaddr *)&to, sizeof to));
    int old_server = OK(accept(listener, NULL, NULL));
    char c;
    for (int i = 0; i < 10; i++)
        FAILS(recv(old_server, &c, 1, MSG_DONTWAIT), EAGAIN);
    struct linger none = {1, 0};
    OK(setsockopt(old, SOL_SOCKET, SO_LINGER, &none, sizeof none));
    OK(close(old));
    wait_events(old_server, POLLIN, POLLIN | POLLERR | POLLHUP);
    int client = OK(socket(AF_INET, SOCK_STREAM, 0));
    bind_again(client, own);
    OK(connect(client, (struct sockaddr *)&to, sizeof to));
    int server = OK(accept(listener, NULL, NULL));
    for (int i = 0; i < 8; i++)
        send_all(client, 1, i, 1);
    for (int i = 0; i < 40; i++)
        EQ(events_now(old_server, POLLIN), POLLIN | POLLERR | POLLHUP);
    recv_all(server, 1, 0, 8);
    FAILS(recv(old_server, &c, 1, 0), ECONNRESET);
    EQ(recv(old_server, &c, 1, 0), 0);
    OK(close(old_server));
    warm_here(client, server);
    send_all(client, 1, 0, 1000);
    recv_all(server, 1, 0, 1000);
    OK(close(client));
    EQ(recv(server, &c, 1, 0), 0);
    close(server);
    close(listener);
}

CASE(refused_where_a_listener_was) {
    uint16_t port;
    int listener = listen_here(&port);
    int client = connect_to(port), server = OK(accept(listener, NULL, NULL));
    warm_here(client, server);
    close(listener);
    struct sockaddr_in to = loopback(port);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    FAILS(connect(fd, (struct sockaddr *)&to, sizeof to), ECONNREFUSED);
    // The open connection is not concerned.
    send_all(client, 1, 0, 1000);
    recv_all(server, 1, 0, 1000);
}

CASE(unconnected_socket_says_so) {
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    char c = 0;
    signal(SIGPIPE, SIG_IGN);
    FAILS(send(fd, &c, 1, 0), EPIPE);
    FAILS(write(fd, &c, 1), EPIPE);
    FAILS(recv(fd, &c, 1, 0), ENOTCONN);
    FAILS(read(fd, &c, 1), ENOTCONN);
    FAILS(shutdown(fd, SHUT_WR), ENOTCONN);
    FAILS(getpeername(fd, (struct sockaddr *)&(struct sockaddr_in){0}, &(socklen_t){16}), ENOTCONN);
    FAILS(accept(fd, NULL, NULL), EINVAL);
    EQ(events_now(fd, POLLIN | POLLOUT), POLLOUT | POLLHUP);
    uint16_t port;
    int listener = listen_here(&port);
    FAILS(recv(listener, &c, 1, 0), ENOTCONN);
    FAILS(send(listener, &c, 1, 0), EPIPE);
    FAILS(accept(0, NULL, NULL), ENOTSOCK);
}

CASE(one_thread_connects_to_itself) {
    for (int round = 0; round < 20; round++) {
        int client, server;
        connect_here(&client, &server);
        warm_here(client, server);
        // More than all buffers, in steps that never block.
        uint64_t sent[2] = {0}, got[2] = {0}, total = 2 << 20;
        int ends[2] = {client, server};
        char buf[8192];
        while (got[0] < total || got[1] < total)
            for (int i = 0; i < 2; i++) {
                size_t want = total - sent[i] < sizeof buf ? total - sent[i] : sizeof buf;
                pattern(i, sent[i], buf, want);
                ssize_t n = want ? send(ends[i], buf, want, MSG_DONTWAIT) : 0;
                CHECK(n >= 0 || errno == EAGAIN);
                sent[i] += n > 0 ? n : 0;
                n = recv(ends[!i], buf, sizeof buf, MSG_DONTWAIT);
                CHECK(n >= 0 || errno == EAGAIN);
                check_pattern(i, got[i], buf, n > 0 ? n : 0);
                got[i] += n > 0 ? n : 0;
            }
        close(client);
        close(server);
    }
}

CASE(socket_connected_to_its_own_address) {
    // TCP's simultaneous open with oneself: one socket, both ends.
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    struct sockaddr_in self = loopback(0);
    OK(bind(fd, (struct sockaddr *)&self, sizeof self));
    self.sin_port = htons(local_port(fd));
    OK(connect(fd, (struct sockaddr *)&self, sizeof self));
    EQ(peer_port(fd), local_port(fd));
    for (int i = 0; i < 20; i++) {
        send_all(fd, 5, i * 100, 100);
        recv_all(fd, 5, i * 100, 100);
    }
    OK(shutdown(fd, SHUT_WR));
    char c;
    EQ(recv(fd, &c, 1, 0), 0);
}

static void family(const char *listen_address, const char *connect_address, bool v6_client) {
    uint16_t port = 0;
    bool v6_server = strchr(listen_address, ':');
    int listener = OK(socket(v6_server ? AF_INET6 : AF_INET, SOCK_STREAM, 0));
    listen_at(listener, listen_address, &port);
    int client = OK(socket(v6_client ? AF_INET6 : AF_INET, SOCK_STREAM, 0));
    socklen_t len;
    struct sockaddr_storage to = address_of(connect_address, port, &len);
    OK(connect(client, (struct sockaddr *)&to, len));
    int server = OK(accept(listener, NULL, NULL));
    struct sockaddr_storage name;
    len = sizeof name;
    OK(getsockname(server, (struct sockaddr *)&name, &len));
    EQ(name.ss_family, v6_server ? AF_INET6 : AF_INET);
    len = sizeof name;
    OK(getpeername(client, (struct sockaddr *)&name, &len));
    EQ(name.ss_family, v6_client ? AF_INET6 : AF_INET);
    warm_here(client, server);
    send_all(server, 3, 0, 30000);
    recv_all(client, 3, 0, 30000);
    close(client);
    close(server);
    close(listener);
}

CASE(ipv4_and_ipv6_and_mapped) {
    family("127.0.0.1", "127.0.0.1", false);
    family("::1", "::1", true);
    family("::", "::1", true);
    family("::", "127.0.0.1", false);
    family("::", "::ffff:127.0.0.1", true);
    family("127.0.0.1", "::ffff:127.0.0.1", true);
    family("::ffff:127.0.0.1", "127.0.0.1", false);
    family("0.0.0.0", "127.0.0.2", false);
    family("0.0.0.0", "0.0.0.0", false);
    family("127.0.0.3", "127.0.0.3", false);
}

CASE(bytes_sent_before_accept_arrive_even_after_close) {
    uint16_t port;
    int listener = listen_here(&port);
    for (int i = 0; i < 50; i++) {
        int client = connect_to(port);
        send_all(client, i, 0, 5000);
        if (i % 2)
            OK(close(client));
        int server = OK(accept(listener, NULL, NULL));
        if (i % 2)
            recv_to_eof(server, i, 0, 5000);
        else
            recv_all(server, i, 0, 5000);
        close(server);
        if (i % 2 == 0)
            close(client);
    }
}

static void send_and_end(void *port) {
    int client = connect_to(*(uint16_t *)port);
    send_all(client, 9, 0, 5000);
    raise(SIGKILL);
}

CASE(bytes_of_a_client_that_was_killed_before_accept_arrive) {
    uint16_t port;
    int listener = listen_here(&port), status;
    for (int i = 0; i < 20; i++) {
        pid_t pid = child(send_and_end, &port);
        EQ(waitpid(pid, &status, 0), pid);
        EQ(status, SIGKILL);
        int server = OK(accept(listener, NULL, NULL));
        recv_to_eof(server, 9, 0, 5000);
        close(server);
    }
}

CASE(connection_reset_before_accept) {
    uint16_t port;
    int listener = listen_here(&port), client = connect_to(port);
    struct linger linger = {1, 0};
    OK(setsockopt(client, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    close(client);
    int server = OK(accept(listener, NULL, NULL));
    char c;
    FAILS(recv(server, &c, 1, 0), ECONNRESET);
    EQ(recv(server, &c, 1, 0), 0);
    // The next one is well.
    client = connect_to(port);
    warm_here(client, OK(accept(listener, NULL, NULL)));
}

CASE(hundred_clients_speak_before_the_first_accept) {
    uint16_t port;
    int listener = listen_here(&port), clients[100];
    for (int i = 0; i < 100; i++) {
        clients[i] = connect_to(port);
        send_all(clients[i], local_port(clients[i]), 0, 3000);
    }
    for (int i = 0; i < 100; i++) {
        int server = OK(accept(listener, NULL, NULL));
        recv_all(server, peer_port(server), 0, 3000);
        send_all(server, peer_port(server), 3000, 3000);
        OK(shutdown(server, SHUT_WR));
        close(server);
    }
    for (int i = 0; i < 100; i++)
        recv_to_eof(clients[i], local_port(clients[i]), 3000, 3000);
}

CASE(source_port_used_again_at_once) {
    // The same address pair again and again: what was left of the last connection must not matter.
    uint16_t port;
    int listener = listen_here(&port);
    struct sockaddr_in from = loopback(closed_port()), to = loopback(port);
    for (int i = 0; i < 100; i++) {
        int client = OK(socket(AF_INET, SOCK_STREAM, 0));
        set_option(client, SOL_SOCKET, SO_REUSEADDR, 1);
        OK(bind(client, (struct sockaddr *)&from, sizeof from));
        OK(connect(client, (struct sockaddr *)&to, sizeof to));
        send_all(client, i, 0, 100);
        int server = OK(accept(listener, NULL, NULL));
        recv_all(server, i, 0, 100);
        if (i % 4 == 3)
            warm_here(client, server);
        send_all(server, i, 100, 100);
        recv_all(client, i, 100, 100);
        // No TIME_WAIT stays behind.
        struct linger linger = {1, 0};
        OK(setsockopt(client, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
        close(client);
        close(server);
    }
}

CASE(disconnect_by_af_unspec_and_connect_again) {
    uint16_t port;
    int listener = listen_here(&port), fd = connect_to(port);
    int server = OK(accept(listener, NULL, NULL));
    warm_here(fd, server);
    struct sockaddr none = {.sa_family = AF_UNSPEC};
    OK(connect(fd, &none, sizeof none));
    char c;
    FAILS(recv(server, &c, 1, 0), ECONNRESET);
    FAILS(recv(fd, &c, 1, 0), ECONNRESET);
    FAILS(recv(fd, &c, 1, 0), ENOTCONN);
    struct sockaddr_in to = loopback(port);
    OK(connect(fd, (struct sockaddr *)&to, sizeof to));
    warm_here(fd, OK(accept(listener, NULL, NULL)));
}

PAIR_CASE(server_speaks_first) {
    struct pair p = pair_open();
    if (variant.client) {
        peer_says(p.peer, "220 hello\r\n");
        char buf[32];
        EQ(recv(p.fd, buf, sizeof buf, 0), 11);
        CHECK(!memcmp(buf, "220 hello\r\n", 11));
    } else {
        EQ(send(p.fd, "220 hello\r\n", 11, 0), 11);
        peer_hears(p.peer, "220 hello\r\n");
    }
    pair_close(p);
}

static void *short_clients(void *arg) {
    uint16_t port = *(uint16_t *)arg;
    for (int i = 0; i < 300; i++) {
        int fd = connect_to(port);
        if (i % 3 != 2) {
            send_all(fd, i, 0, 200);
            recv_all(fd, i, 200, 3000);
        }
        close(fd);
    }
    return NULL;
}

CASE(short_connections) {
    uint16_t port;
    int listener = listen_here(&port);
    pthread_t thread;
    EQ(pthread_create(&thread, NULL, short_clients, &port), 0);
    for (int i = 0; i < 300; i++) {
        int fd = OK(accept(listener, NULL, NULL));
        if (i % 3 != 2) {
            recv_all(fd, i, 0, 200);
            send_all(fd, i, 200, 3000);
        }
        char c;
        EQ(recv(fd, &c, 1, 0), 0);
        close(fd);
    }
    EQ(pthread_join(thread, NULL), 0);
}

// A server that listens for one connection each time, as FTP's: its listeners are gone when the connections turn out to
// last, and others have come: fewer than half of what a region has room for.
CASE(connections_of_listeners_that_left) {
    enum { PAIRS = 40, OTHERS = 10 };
    int ends[PAIRS][2];
    for (int i = 0; i < PAIRS; i++) {
        uint16_t port, other;
        int listener = listen_here(&port);
        ends[i][0] = connect_to(port);
        ends[i][1] = OK(accept(listener, NULL, NULL));
        close(listener);
        for (int k = 0; k < OTHERS; k++)
            close(listen_here(&other));
    }
    for (int i = 0; i < PAIRS; i++) {
        ends_talk(ends[i], 0, 8);
        assert_smcd(ends[i][0]);
        close(ends[i][0]);
        close(ends[i][1]);
    }
}

// An error that only a wait has seen is told once by a disconnected socket, and forgotten by the next attempt to connect.
PAIR_CASE(error_that_a_disconnect_leaves) {
    struct sockaddr none = {.sa_family = AF_UNSPEC};
    struct sockaddr_in nobody = loopback(closed_port());
    for (int again = 0; again < 2; again++) {
        struct pair p = pair_open();
        int ep = OK(epoll_create1(EPOLL_CLOEXEC));
        struct epoll_event event = {.events = EPOLLIN};
        OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
        peer_says(p.peer, "x");
        OK(peer_call(P_RESET, p.peer, 0, 0, 0));
        while (!(event.events & EPOLLERR))
            EQ(epoll_wait(ep, &event, 1, 10000), 1);
        OK(connect(p.fd, &none, sizeof none));
        if (again)
            FAILS(connect(p.fd, (struct sockaddr *)&nobody, sizeof nobody), ECONNREFUSED);
        else
            FAILS(send(p.fd, "x", 1, MSG_NOSIGNAL), ECONNRESET);
        FAILS(send(p.fd, "x", 1, MSG_NOSIGNAL), EPIPE);
        close(ep);
        close(p.fd);
    }
}

// A server that polls makes thousands of calls in the time in which its client makes one.
CASE(connection_of_a_server_that_polls) {
    uint16_t port;
    int listener = listen_here(&port), client = connect_to(port);
    int ends[2] = {client, OK(accept(listener, NULL, NULL))};
    char c;
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 20000; k++)
            FAILS(recv(ends[1], &c, 1, MSG_DONTWAIT), EAGAIN);
        EQ(send(client, "x", 1, 0), 1);
        EQ(recv(ends[1], &c, 1, 0), 1);
    }
    ends_talk(ends, 0, 200);
    assert_smcd(client);
    for (int i = 0; i < 2; i++)
        close(ends[i]);
    close(listener);
}

// With `change_over = "at-once"`, which the harness sets for this name: one message is enough.
CASE(connection_of_one_message_changes_over_at_once) {
    int client, server;
    for (int turn = 0; turn < 5; turn++) {
        connect_here(&client, &server);
        send_all(client, 1, 0, 10);
        recv_all(server, 1, 0, 10);
        send_all(server, 2, 0, 10);
        recv_all(client, 2, 0, 10);
        assert_smcd(client);
        close(client);
        recv_to_eof(server, 1, 10, 0);
        close(server);
    }
}

// The peer is another process: the memory is handed over at their first connection.
REMOTE_CASE(connection_of_few_messages_changes_over_at_once) {
    struct pair p = pair_open();
    pair_talk(p, 0, 3);
    assert_smcd(p.fd);
    pair_close(p);
}

enum { TALKS = 20, MESSAGES = 30 };

static void answers_talks(void *arg) {
    int listener = *(int *)arg;
    for (int i = 0; i < TALKS; i++) {
        int fd = OK(accept(listener, NULL, NULL));
        for (int at = 0; at < MESSAGES * 20; at += 20) {
            recv_all(fd, 1, at, 20);
            send_all(fd, 2, at, 20);
            EQ(option(fd, IPPROTO_TCP, TCP_NODELAY), 0);
        }
        close(fd);
    }
}

// What the library itself sends must not hold back what follows: TCP acknowledges it after 40 ms.
CASE(first_requests_wait_for_no_acknowledgement) {
    uint16_t port;
    int listener = listen_here(&port), late = 0;
    pid_t server = child(answers_talks, &listener);
    close(listener);
    for (int i = 0; i < TALKS; i++) {
        int fd = connect_to(port);
        double longest = 0;
        for (int at = 0; at < MESSAGES * 20; at += 20) {
            double start = now();
            send_all(fd, 1, at, 20);
            recv_all(fd, 2, at, 20);
            double took = now() - start;
            longest = took > longest ? took : longest;
            EQ(option(fd, IPPROTO_TCP, TCP_NODELAY), 0);
        }
        late += longest > 0.035;
        close(fd);
    }
    // A loaded machine may be late often, but an acknowledgement that is held back makes every talk late.
    CHECK(late < TALKS);
    child_succeeds(server);
}
