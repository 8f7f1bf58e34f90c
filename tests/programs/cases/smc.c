// Native SMC sockets: AF_SMC, and IPPROTO_SMC of AF_INET and AF_INET6. In a plain run they are the TCP sockets that
// stand for them, and what only an SMC socket says is not asked.
#include "peer.h"

#include <linux/sockios.h>
#include <sys/resource.h>

#define SOL_SMC 286
#define SMC_LIMIT_HS 1

static const struct sort {
    int family, protocol;
    bool v6;
} kinds[] = {
    {AF_INET, IPPROTO_TCP, false},
    {AF_SMC, SMCPROTO_SMC, false},
    {AF_INET, IPPROTO_SMC, false},
    {AF_INET6, IPPROTO_TCP, true},
    {AF_SMC, SMCPROTO_SMC6, true},
    {AF_INET6, IPPROTO_SMC, true},
};
#define KINDS (sizeof kinds / sizeof *kinds)

static int made(const struct sort *kind) {
    return stream(kind->family, kind->protocol, 0);
}

static bool is_native(const struct sort *kind) {
    return kind->protocol != IPPROTO_TCP;
}

// Whoever asks: `option` here, the peer there.
static void says(const struct sort *kind, int domain, int protocol) {
    EQ(domain, is_plain() && kind->family == AF_SMC ? kind->v6 ? AF_INET6 : AF_INET : kind->family);
    EQ(protocol, is_plain() ? IPPROTO_TCP : kind->protocol);
}

static void is_of(const struct sort *kind, int fd) {
    EQ(option(fd, SOL_SOCKET, SO_TYPE), SOCK_STREAM);
    says(kind, option(fd, SOL_SOCKET, SO_DOMAIN), option(fd, SOL_SOCKET, SO_PROTOCOL));
}

static void peers_is_of(const struct sort *kind, int handle) {
    int domain = peer_call(P_GET_OPTION, handle, SOL_SOCKET, SO_DOMAIN, 0);
    says(kind, domain, peer_call(P_GET_OPTION, handle, SOL_SOCKET, SO_PROTOCOL, 0));
}

static void echoes(struct pair p) {
    peer_begin(P_ECHO, p.peer, 0, 0, 0);
    for (int i = 0; i < 32; i++) {
        send_all(p.fd, 1, i * 1000, 1000);
        recv_all(p.fd, 1, i * 1000, 1000);
    }
    OK(shutdown(p.fd, SHUT_WR));
    recv_to_eof(p.fd, 1, 32000, 0);
    EQ(peer_end(), 32000);
    close(p.fd);
}

PAIR_CASE(native_and_other_sockets_meet_each_other) {
    for (size_t ours = 0; ours < KINDS; ours++)
        for (size_t theirs = 0; theirs < KINDS; theirs++) {
            if (kinds[ours].v6 != kinds[theirs].v6 || (!is_native(kinds + ours) && !is_native(kinds + theirs)))
                continue;
            // The peer's first: what is open when the first request starts it would cross its exec.
            int there = peer_call(P_SOCKET, -1, kinds[theirs].family, kinds[theirs].protocol, 0);
            struct pair p = pair_of(made(kinds + ours), OK(there));
            is_of(kinds + ours, p.fd);
            peers_is_of(kinds + theirs, p.peer);
            echoes(p);
        }
}

REMOTE_CASE(native_sockets_meet_a_program_without_the_library) {
    variant.warm = false;
    peer_is_plain = true;
    for (size_t i = 0; i < KINDS; i++) {
        int there = OK(peer_call(P_SOCKET, -1, kinds[i].v6 ? AF_INET6 : AF_INET, 0, 0));
        struct pair p = pair_of(made(kinds + i), there);
        is_of(kinds + i, p.fd);
        EQ(peer_call(P_GET_OPTION, p.peer, SOL_SOCKET, SO_PROTOCOL, 0), IPPROTO_TCP);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 100), 0);
        recv_all(p.fd, 2, 0, 100);
        echoes(p);
    }
}

// An IPv6 one reaches IPv4.
PAIR_CASE(native_sockets_of_both_versions_of_ip) {
    EQ(peer_call(P_POLL, -1, 0, 0, 0), 0);
    uint16_t port = 0;
    int any = made(kinds + 4);
    listen_at(any, "::", &port);
    struct pair p = {.peer = OK(peer_call(P_CONNECT, -1, port, 0, 0))};
    p.fd = OK(accept(any, NULL, NULL));
    is_of(kinds + 4, p.fd);
    echoes(p);
    int client = made(kinds + 5), server;
    OK(connect_at(client, "::ffff:127.0.0.1", port));
    server = OK(accept(any, NULL, NULL));
    warm_here(client, server);
}

CASE(native_sockets_say_what_they_are) {
    for (size_t i = 0; i < KINDS; i++) {
        int fd = made(kinds + i), copy = OK(dup(fd));
        is_of(kinds + i, fd);
        is_of(kinds + i, copy);
        uint16_t port = 0;
        close(fd);
        is_of(kinds + i, fd = OK(fcntl(copy, F_DUPFD, 100)));
        is_of(kinds + i, OK(dup2(fd, copy)));
        listen_at(fd, loopback_of(fd), &port);
        is_of(kinds + i, fd);
        EQ(option(fd, SOL_SOCKET, SO_ACCEPTCONN), 1);
        // Natives or not, it makes no difference to whom they talk.
        int client = made(kinds + (kinds[i].v6 ? 4 : 1));
        OK(connect_at(client, loopback_of(fd), port));
        struct sockaddr_storage from;
        socklen_t len = sizeof from;
        int server = OK(accept4(fd, (struct sockaddr *)&from, &len, SOCK_CLOEXEC | SOCK_NONBLOCK));
        EQ(from.ss_family, kinds[i].v6 ? AF_INET6 : AF_INET);
        EQ(len, kinds[i].v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in));
        EQ(fcntl(server, F_GETFD), FD_CLOEXEC);
        CHECK(fcntl(server, F_GETFL) & O_NONBLOCK);
        FAILS(recv(server, &from, 1, 0), EAGAIN);
        nonblocking(server, false);
        is_of(kinds + i, server);
        warm_here(client, server);
        is_of(kinds + i, server);
        OK(getpeername(server, (struct sockaddr *)&from, &len));
        EQ(from.ss_family, kinds[i].v6 ? AF_INET6 : AF_INET);
        // As short as is asked for.
        char first = -1;
        len = 1;
        OK(getsockopt(server, SOL_SOCKET, SO_DOMAIN, &first, &len));
        EQ(len, 1);
        EQ(first, option(server, SOL_SOCKET, SO_DOMAIN));
        for (int fds[] = {client, server, copy, fd}, n = 0; n < 4; n++)
            close(fds[n]);
    }
}

static void child_has(void *arg) {
    int *fds = arg;
    for (size_t i = 0; i < KINDS; i++)
        is_of(kinds + i, fds[i]);
    recv_all(fds[KINDS], 1, 0, 1000);
    send_all(fds[KINDS], 2, 0, 1000);
    is_of(kinds + 1, fds[KINDS]);
}

CASE(native_sockets_cross_a_fork) {
    int fds[KINDS + 1], client = made(kinds + 1), listener = made(kinds + 1);
    for (size_t i = 0; i < KINDS; i++)
        fds[i] = made(kinds + i);
    uint16_t port = 0;
    listen_at(listener, "127.0.0.1", &port);
    OK(connect_at(client, "127.0.0.1", port));
    fds[KINDS] = OK(accept(listener, NULL, NULL));
    warm_here(client, fds[KINDS]);
    pid_t pid = child(child_has, fds);
    send_all(client, 1, 0, 1000);
    recv_all(client, 2, 0, 1000);
    child_succeeds(pid);
}

REMOTE_CASE(native_sockets_cross_exec_and_messages) {
    // Open when the peer is started.
    int listener = made(kinds + 1), client = made(kinds + 2), fresh = made(kinds + 4);
    uint16_t port = 0;
    listen_at(listener, "127.0.0.1", &port);
    OK(connect_at(client, "127.0.0.1", port));
    int server = OK(accept(listener, NULL, NULL));
    peers_is_of(kinds + 1, listener);
    peers_is_of(kinds + 1, server);
    peers_is_of(kinds + 2, client);
    peers_is_of(kinds + 4, fresh);
    // What the peer accepts there is of the same kind, and leaves TCP.
    peer_begin(P_ACCEPT, listener, 0, 0, 0);
    struct pair p = {.fd = connect_to(port)};
    p.peer = OK(peer_end());
    peers_is_of(kinds + 1, p.peer);
    for (int i = 0; i < 16; i++) {
        send_all(p.fd, 1, i * 10, 10);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 10, 10), 0);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 10, 10), 0);
        recv_all(p.fd, 2, i * 10, 10);
    }
    assert_smcd(p.fd);
    peers_is_of(kinds + 5, peer_take(made(kinds + 5)));
}

static void refuses(int family, int kind, int protocol, int code) {
    int ends[2];
    FAILS(socket(family, kind, protocol), code);
    FAILS(syscall(SYS_socket, family, kind, protocol), code);
    FAILS(socketpair(family, kind, protocol, ends), code);
}

CASE(native_sockets_that_cannot_be_made) {
    // Told before anything about the family.
    refuses(AF_SMC, 11, 0, EINVAL);
    refuses(AF_SMC, SOCK_STREAM | 0x40, 0, EINVAL);
    refuses(AF_SMC, -1, 0, EINVAL);
    refuses(AF_INET, SOCK_STREAM | 0x40, IPPROTO_SMC, EINVAL);
    refuses(AF_INET, SOCK_DGRAM, IPPROTO_SMC, EPROTONOSUPPORT);
    refuses(AF_INET6, SOCK_DGRAM, IPPROTO_SMC, EPROTONOSUPPORT);
    refuses(AF_INET, SOCK_SEQPACKET, IPPROTO_SMC, ESOCKTNOSUPPORT);
    if (is_plain())
        return;
    int kinds_of_sockets[] = {0, SOCK_DGRAM, SOCK_RAW, SOCK_RDM, SOCK_SEQPACKET, SOCK_PACKET};
    for (int i = 0; i < 6; i++)
        for (int protocol = -1; protocol < 3; protocol++)
            refuses(AF_SMC, kinds_of_sockets[i], protocol, ESOCKTNOSUPPORT);
    int protocols[] = {-1, 2, IPPROTO_TCP, IPPROTO_SMC, INT_MAX};
    for (int i = 0; i < 5; i++)
        refuses(AF_SMC, SOCK_STREAM | SOCK_CLOEXEC, protocols[i], EPROTONOSUPPORT);
    int ends[2];
    FAILS(socketpair(AF_SMC, SOCK_STREAM, 0, ends), EOPNOTSUPP);
    FAILS(socketpair(AF_INET, SOCK_STREAM, IPPROTO_SMC, ends), EOPNOTSUPP);
    struct rlimit few = {3, 3};
    OK(setrlimit(RLIMIT_NOFILE, &few));
    FAILS(socket(AF_SMC, SOCK_STREAM, 0), EMFILE);
    FAILS(socket(AF_SMC, SOCK_DGRAM, 0), ESOCKTNOSUPPORT);
}

CASE(native_sockets_by_number_and_with_flags) {
    if (is_plain())
        return;
    int fd = OK(syscall(SYS_socket, AF_SMC, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, SMCPROTO_SMC6));
    is_of(kinds + 4, fd);
    EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
    CHECK(fcntl(fd, F_GETFL) & O_NONBLOCK);
    int value = -1;
    socklen_t len = sizeof value;
    OK(syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_DOMAIN, &value, &len));
    EQ(value, AF_SMC);
    errno = 77;
    fd = socket(AF_SMC, SOCK_STREAM, 0);
    EQ(errno, 77);
    EQ(fcntl(fd, F_GETFD), 0);
    CHECK(!(fcntl(fd, F_GETFL) & O_NONBLOCK));
    EQ(option(fd, SOL_SOCKET, SO_DOMAIN), AF_SMC);
    EQ(errno, 77);
}

CASE(options_of_native_sockets) {
    int value = 5, tcp = OK(socket(AF_INET, SOCK_STREAM, 0));
    socklen_t len = sizeof value;
    CHECK(getsockopt(tcp, SOL_SMC, SMC_LIMIT_HS, &value, &len) < 0);
    FAILS(setsockopt(tcp, SOL_SMC, SMC_LIMIT_HS, &value, len), ENOPROTOOPT);
    for (size_t i = 0; i < KINDS; i++) {
        int fd = made(kinds + i);
        set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
        EQ(option(fd, IPPROTO_TCP, TCP_NODELAY), 1);
        set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
        set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 33);
        EQ(option(fd, IPPROTO_TCP, TCP_KEEPIDLE), 33);
        CHECK(option(fd, IPPROTO_TCP, TCP_MAXSEG) > 0);
        if (kinds[i].v6)
            set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1);
        FAILS(setsockopt(fd, SOL_SOCKET, 9999, &value, len), ENOPROTOOPT);
        if (is_plain() || !is_native(kinds + i))
            continue;
        EQ(option(fd, SOL_SMC, SMC_LIMIT_HS), 0);
        value = 5;
        OK(setsockopt(fd, SOL_SMC, SMC_LIMIT_HS, &value, sizeof value));
        EQ(option(fd, SOL_SMC, SMC_LIMIT_HS), 1);
        is_of(kinds + i, fd);
        char byte = 9;
        len = 1;
        OK(getsockopt(fd, SOL_SMC, SMC_LIMIT_HS, &byte, &len));
        EQ(byte, 1);
        len = 100;
        OK(getsockopt(fd, SOL_SMC, SMC_LIMIT_HS, &value, &len));
        EQ(len, sizeof value);
        set_option(fd, SOL_SMC, SMC_LIMIT_HS, 0);
        EQ(option(fd, SOL_SMC, SMC_LIMIT_HS), 0);
        FAILS(setsockopt(fd, SOL_SMC, SMC_LIMIT_HS, &value, 3), EINVAL);
        FAILS(setsockopt(fd, SOL_SMC, SMC_LIMIT_HS, (void *)8, 4), EFAULT);
        FAILS(getsockopt(fd, SOL_SMC, SMC_LIMIT_HS, (void *)8, &len), EFAULT);
        FAILS(getsockopt(fd, SOL_SMC, SMC_LIMIT_HS, &value, (void *)8), EFAULT);
        len = -1;
        FAILS(getsockopt(fd, SOL_SMC, SMC_LIMIT_HS, &value, &len), EINVAL);
        len = sizeof value;
        FAILS(setsockopt(fd, SOL_SMC, 7, &value, len), EOPNOTSUPP);
        FAILS(getsockopt(fd, SOL_SMC, 7, &value, &len), EOPNOTSUPP);
    }
    close(tcp);
    FAILS(setsockopt(tcp, SOL_SMC, SMC_LIMIT_HS, &value, len), EBADF);
    FAILS(getsockopt(tcp, SOL_SMC, SMC_LIMIT_HS, &value, &len), EBADF);
}

CASE(addresses_of_native_sockets) {
    for (size_t i = 0; i < KINDS; i++) {
        int fd = made(kinds + i), other = made(kinds + (i + 3) % KINDS);
        uint16_t port = 0;
        socklen_t len, others_len;
        struct sockaddr_storage at = address_of(loopback_of(fd), 0, &len), odd = at;
        struct sockaddr_storage others = address_of(loopback_of(other), 0, &others_len);
        odd.ss_family = AF_SMC;
        FAILS(bind(fd, (struct sockaddr *)&odd, len), EAFNOSUPPORT);
        FAILS(connect(fd, (struct sockaddr *)&odd, len), EAFNOSUPPORT);
        FAILS(bind(fd, (struct sockaddr *)&at, 8), EINVAL);
        FAILS(connect(fd, (struct sockaddr *)&at, 1), EINVAL);
        // An address of the other version of IP: told by its length or by its family.
        FAILS(bind(fd, (struct sockaddr *)&others, others_len), kinds[i].v6 ? EINVAL : EAFNOSUPPORT);
        FAILS(getpeername(fd, (struct sockaddr *)&odd, &others_len), ENOTCONN);
        FAILS(accept(fd, NULL, NULL), EINVAL);
        FAILS(recv(fd, &odd, 1, 0), ENOTCONN);
        FAILS(send(fd, &odd, 1, MSG_NOSIGNAL), EPIPE);
        FAILS(shutdown(other, SHUT_RDWR), ENOTCONN);
        listen_at(fd, loopback_of(fd), &port);
        FAILS(bind(fd, (struct sockaddr *)&at, len), EINVAL);
        FAILS(recv(fd, &odd, 1, 0), ENOTCONN);
        int client = made(kinds + i);
        OK(connect_at(client, loopback_of(fd), port));
        EQ(peer_port(client), port);
        FAILS(connect_at(client, loopback_of(fd), port), EISCONN);
        FAILS(listen(client, 5), EINVAL);
        int server = OK(accept(fd, NULL, NULL));
        EQ(peer_port(server), local_port(client));
        // TCP's way out of a connection.
        struct sockaddr none = {.sa_family = AF_UNSPEC};
        OK(connect(client, &none, sizeof none));
        FAILS(recv(server, &odd, 1, 0), ECONNRESET);
        FAILS(recv(client, &odd, 1, 0), ECONNRESET);
        FAILS(recv(client, &odd, 1, 0), ENOTCONN);
        is_of(kinds + i, client);
        OK(connect_at(client, loopback_of(fd), port));
        close(server);
        server = OK(accept(fd, NULL, NULL));
        warm_here(client, server);
        close(fd);
        int refused = made(kinds + i);
        FAILS(connect_at(refused, loopback_of(refused), port), ECONNREFUSED);
        for (int fds[] = {client, server, other, refused}, n = 0; n < 4; n++)
            close(fds[n]);
    }
}

CASE(native_sockets_that_do_not_block) {
    for (size_t i = 0; i < KINDS; i++) {
        int listener = made(kinds + i), client = made(kinds + i), set = OK(epoll_create1(0));
        uint16_t port = 0;
        listen_at(listener, loopback_of(listener), &port);
        nonblocking(listener, true);
        FAILS(accept(listener, NULL, NULL), EAGAIN);
        nonblocking(client, true);
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.fd = client};
        FAILS(connect_at(client, loopback_of(client), port), EINPROGRESS);
        OK(epoll_ctl(set, EPOLL_CTL_ADD, client, &event));
        EQ(epoll_wait(set, &event, 1, 20000), 1);
        EQ(event.events, EPOLLOUT);
        EQ(option(client, SOL_SOCKET, SO_ERROR), 0);
        event = (struct epoll_event){.events = EPOLLIN, .data.fd = listener};
        OK(epoll_ctl(set, EPOLL_CTL_ADD, listener, &event));
        wait_events(listener, POLLIN, POLLIN);
        int server = OK(accept(listener, NULL, NULL));
        OK(epoll_ctl(set, EPOLL_CTL_DEL, listener, NULL));
        event = (struct epoll_event){.events = EPOLLIN, .data.fd = client};
        OK(epoll_ctl(set, EPOLL_CTL_MOD, client, &event));
        for (int turn = 0; turn < 50; turn++) {
            send_all(server, 1, turn * 10, 10);
            EQ(epoll_wait(set, &event, 1, 20000), 1);
            EQ(event.data.fd, client);
            recv_all(client, 1, turn * 10, 10);
            FAILS(recv(client, &event, 1, 0), EAGAIN);
            EQ(epoll_wait(set, &event, 1, 0), 0);
            send_all(client, 2, turn * 10, 10);
            recv_all(server, 2, turn * 10, 10);
        }
        assert_smcd(client);
        close(listener);
        int refused = made(kinds + i);
        nonblocking(refused, true);
        FAILS(connect_at(refused, loopback_of(refused), port), EINPROGRESS);
        wait_events(refused, POLLOUT, POLLOUT | POLLERR | POLLHUP);
        EQ(option(refused, SOL_SOCKET, SO_ERROR), ECONNREFUSED);
        for (int fds[] = {client, server, set, refused}, n = 0; n < 4; n++)
            close(fds[n]);
    }
}

static int asked(int fd, unsigned long request) {
    int value = -1;
    OK(ioctl(fd, request, &value));
    return value;
}

PAIR_CASE(queues_of_native_sockets) {
    // Started before our sockets are made: what another process inherits stays TCP.
    EQ(peer_call(P_POLL, -1, 0, 0, 0), 0);
    for (size_t i = 1; i < 3; i++) {
        struct pair p = pair_of(made(kinds + i), -1);
        int fresh = made(kinds + i), value;
        EQ(asked(fresh, SIOCINQ), 0);
        EQ(asked(fresh, SIOCOUTQ), 0);
        EQ(asked(fresh, SIOCOUTQNSD), 0);
        uint16_t port = 0;
        listen_at(fresh, "127.0.0.1", &port);
        unsigned long requests[] = {SIOCINQ, SIOCOUTQ, SIOCOUTQNSD};
        for (int n = 0; n < 3; n++)
            FAILS(ioctl(fresh, requests[n], &value), EINVAL);
        FAILS(ioctl(fresh, 0x12345, &value), ENOTTY);
        close(fresh);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 1, 0, 700), 0);
        wait_readable(p.fd, 700);
        EQ(asked(p.fd, SIOCINQ), 700);
        EQ(asked(p.fd, SIOCATMARK), 0);
        recv_all(p.fd, 1, 0, 700);
        EQ(asked(p.fd, SIOCINQ), 0);
        send_all(p.fd, 2, 0, 900);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 2, 0, 900), 0);
        for (double until = now() + 10; asked(p.fd, SIOCOUTQ) != 0;)
            CHECK(now() < until);
        EQ(asked(p.fd, SIOCOUTQNSD), 0);
        char flags[8];
        FAILS(recv(p.fd, flags, 1, MSG_DONTWAIT), EAGAIN);
        FAILS(recv(p.fd, flags, 1, MSG_OOB), EINVAL);
        peer_says(p.peer, "abcdef");
        wait_readable(p.fd, 6);
        EQ(recv(p.fd, flags, 4, MSG_PEEK), 4);
        CHECK(!memcmp(flags, "abcd", 4));
        EQ(recv(p.fd, flags, 2, MSG_TRUNC), 2);
        EQ(recv(p.fd, flags, 4, MSG_WAITALL), 4);
        CHECK(!memcmp(flags, "cdef", 4));
        EQ(send(p.fd, "more", 4, MSG_MORE), 4);
        EQ(send(p.fd, "end", 3, MSG_NOSIGNAL), 3);
        peer_hears(p.peer, "moreend");
        // Urgent data is TCP's business.
        EQ(peer_send(p.peer, "!", 1, MSG_OOB), 1);
        wait_events(p.fd, POLLPRI, POLLPRI);
        EQ(recv(p.fd, flags, 1, MSG_OOB), 1);
        EQ(flags[0], '!');
        OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
        recv_to_eof(p.fd, 1, 700, 0);
        OK(shutdown(p.fd, SHUT_WR));
        FAILS(send(p.fd, "x", 1, MSG_NOSIGNAL), EPIPE);
        pair_close(p);
    }
}
