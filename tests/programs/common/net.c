// Sockets of the test programs.
#include "check.h"

struct sockaddr_storage address_of(const char *text, uint16_t port, socklen_t *len) {
    struct sockaddr_storage storage = {0};
    struct sockaddr_in *v4 = (struct sockaddr_in *)&storage;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&storage;
    if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        *len = sizeof *v4;
    } else {
        EQ(inet_pton(AF_INET6, text, &v6->sin6_addr), 1);
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons(port);
        *len = sizeof *v6;
    }
    return storage;
}

int listen_at(int fd, const char *address, uint16_t *port) {
    socklen_t len;
    struct sockaddr_storage storage = address_of(address, *port, &len);
    OK(bind(fd, (struct sockaddr *)&storage, len));
    OK(listen(fd, 4096));
    *port = local_port(fd);
    return fd;
}

int listen_here(uint16_t *port) {
    *port = 0;
    return listen_at(OK(socket(AF_INET, SOCK_STREAM, 0)), "127.0.0.1", port);
}

int connect_at(int fd, const char *address, uint16_t port) {
    socklen_t len;
    struct sockaddr_storage storage = address_of(address, port, &len);
    return connect(fd, (struct sockaddr *)&storage, len);
}

int connect_to(uint16_t port) {
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(connect_at(fd, "127.0.0.1", port));
    return fd;
}

int stream(int family, int protocol, int flags) {
    if (is_plain() && family == AF_SMC) {
        family = protocol == SMCPROTO_SMC6 ? AF_INET6 : AF_INET;
        protocol = 0;
    } else if (is_plain() && protocol == IPPROTO_SMC) {
        protocol = 0;
    }
    return OK(socket(family, SOCK_STREAM | flags, protocol));
}

const char *loopback_of(int fd) {
    struct sockaddr_storage storage;
    socklen_t len = sizeof storage;
    OK(getsockname(fd, (struct sockaddr *)&storage, &len));
    return storage.ss_family == AF_INET ? "127.0.0.1" : "::1";
}

static uint16_t port_of(const struct sockaddr_storage *storage) {
    return storage->ss_family == AF_INET ? ntohs(((const struct sockaddr_in *)storage)->sin_port)
                                         : ntohs(((const struct sockaddr_in6 *)storage)->sin6_port);
}

uint16_t local_port(int fd) {
    struct sockaddr_storage storage;
    socklen_t len = sizeof storage;
    OK(getsockname(fd, (struct sockaddr *)&storage, &len));
    return port_of(&storage);
}

uint16_t peer_port(int fd) {
    struct sockaddr_storage storage;
    socklen_t len = sizeof storage;
    OK(getpeername(fd, (struct sockaddr *)&storage, &len));
    return port_of(&storage);
}

void connect_here(int *client, int *server) {
    uint16_t port;
    int listener = listen_here(&port);
    *client = connect_to(port);
    *server = OK(accept(listener, NULL, NULL));
    close(listener);
}

void warm_here(int client, int server) {
    for (int i = 0; i < 16; i++) {
        char sent = i, got = -1;
        EQ(send(client, &sent, 1, 0), 1);
        EQ(recv(server, &got, 1, 0), 1);
        EQ(got, sent);
        EQ(send(server, &sent, 1, 0), 1);
        EQ(recv(client, &got, 1, 0), 1);
        EQ(got, sent);
    }
    assert_smcd(client);
}

void assert_smcd(int fd) {
    tell_harness("@smcd %d %d", local_port(fd), peer_port(fd));
}

void assert_tcp(int fd) {
    tell_harness("@tcp %d %d", local_port(fd), peer_port(fd));
}

void send_all(int fd, uint64_t seed, uint64_t at, size_t n) {
    char buf[65536];
    while (n > 0) {
        size_t take = n < sizeof buf ? n : sizeof buf;
        pattern(seed, at, buf, take);
        ssize_t sent = OK(send(fd, buf, take, 0));
        CHECK(sent > 0 && (size_t)sent <= take);
        at += sent;
        n -= sent;
    }
}

void trickle(int from, int to, uint64_t seed, uint64_t at, uint64_t end) {
    for (; at < end; at++) {
        send_all(from, seed, at, 1);
        recv_all(to, seed, at, 1);
    }
}

void recv_all(int fd, uint64_t seed, uint64_t at, size_t n) {
    char buf[65536];
    while (n > 0) {
        size_t take = n < sizeof buf ? n : sizeof buf;
        ssize_t got = OK(recv(fd, buf, take, 0));
        if (got == 0)
            check_failed(__FILE__, __LINE__, "no early EOF", "%zu bytes are missing at byte %llu", n,
                (unsigned long long)at);
        CHECK((size_t)got <= take);
        check_pattern(seed, at, buf, got);
        at += got;
        n -= got;
    }
}

void recv_to_eof(int fd, uint64_t seed, uint64_t at, size_t n) {
    recv_all(fd, seed, at, n);
    char byte;
    EQ(recv(fd, &byte, 1, 0), 0);
    EQ(recv(fd, &byte, 1, 0), 0);
}

void nonblocking(int fd, bool on) {
    int flags = OK(fcntl(fd, F_GETFL));
    OK(fcntl(fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK));
}

int option(int fd, int level, int name) {
    int value = -1;
    socklen_t len = sizeof value;
    OK(getsockopt(fd, level, name, &value, &len));
    return value;
}

void set_option(int fd, int level, int name, int value) {
    OK(setsockopt(fd, level, name, &value, sizeof value));
}

void timeout_option(int fd, int name, double seconds) {
    struct timeval time = {(time_t)seconds, (suseconds_t)((seconds - (time_t)seconds) * 1e6)};
    OK(setsockopt(fd, SOL_SOCKET, name, &time, sizeof time));
}

short events_now(int fd, short events) {
    struct pollfd p = {.fd = fd, .events = events};
    OK(poll(&p, 1, 0));
    return p.revents;
}

void wait_events(int fd, short events, short expected) {
    double until = now() + 10;
    struct pollfd p = {.fd = fd, .events = events};
    do {
        OK(poll(&p, 1, 10));
    } while (p.revents != expected && now() < until);
    EQ(p.revents, expected);
}

void one_event(int ep, uint32_t events, uint64_t data) {
    struct epoll_event got[4];
    EQ(epoll_wait(ep, got, 4, 10000), 1);
    EQ(got[0].events, events);
    EQ(got[0].data.u64, data);
}

void no_event(int ep) {
    struct epoll_event event;
    EQ(epoll_wait(ep, &event, 1, 0), 0);
}

void wait_readable(int fd, int n) {
    int count = -1;
    for (double until = now() + 10; count < n;) {
        OK(ioctl(fd, FIONREAD, &count));
        CHECK(now() < until);
    }
    EQ(count, n);
}

ssize_t try_send_fd(int channel, int fd) {
    char byte = 'f', control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec iov = {&byte, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&msg);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    return sendmsg(channel, &msg, 0);
}

void send_fd(int channel, int fd) {
    EQ(try_send_fd(channel, fd), 1);
}

int receive_fd(int channel) {
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec iov = {&byte, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    EQ(recvmsg(channel, &msg, 0), 1);
    int fd;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof fd);
    return fd;
}

int fetch_fd(pid_t pid, int number) {
    int process = OK(syscall(SYS_pidfd_open, pid, 0));
    int fd = syscall(SYS_pidfd_getfd, process, number, 0), saved = errno;
    close(process);
    errno = saved;
    return fd;
}
