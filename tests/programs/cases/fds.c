// File descriptors: duplicates, closing, numbers that change hands, limits.
#include "peer.h"

#include <linux/close_range.h>
#include <sys/resource.h>
#include <sys/stat.h>

int close_range(unsigned first, unsigned last, int flags);
void closefrom(int first);

// Our end still works both ways.
static void works(struct pair p, int fd) {
    static uint64_t at;
    send_all(fd, 1, at, 100);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at, 100), 0);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, at, 100), 0);
    recv_all(fd, 2, at, 100);
    at += 100;
}

PAIR_CASE(duplicates_are_one_connection) {
    struct pair p = pair_open();
    int fds[] = {p.fd, OK(dup(p.fd)), OK(fcntl(p.fd, F_DUPFD, 50)), OK(fcntl(p.fd, F_DUPFD_CLOEXEC, 60)),
        OK(dup2(p.fd, 70)), OK(dup3(p.fd, 80, O_CLOEXEC))};
    int n = sizeof fds / sizeof *fds;
    CHECK(fds[2] >= 50 && fds[3] >= 60);
    EQ(fds[4], 70);
    EQ(fds[5], 80);
    CHECK(OK(fcntl(fds[3], F_GETFD)) & FD_CLOEXEC);
    CHECK(OK(fcntl(fds[5], F_GETFD)) & FD_CLOEXEC);
    CHECK(!(OK(fcntl(fds[4], F_GETFD)) & FD_CLOEXEC));
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < n; i++)
            works(p, fds[i]);
    // File flags are shared, fd flags are not.
    nonblocking(fds[1], true);
    char c;
    for (int i = 0; i < n; i++) {
        CHECK(OK(fcntl(fds[i], F_GETFL)) & O_NONBLOCK);
        FAILS(recv(fds[i], &c, 1, 0), EAGAIN);
    }
    nonblocking(fds[4], false);
    CHECK(!(OK(fcntl(fds[0], F_GETFL)) & O_NONBLOCK));
    // The connection lives as long as one of them.
    for (int i = 0; i < n - 1; i++) {
        close(fds[i]);
        FAILS(recv(fds[i], &c, 1, MSG_DONTWAIT), EBADF);
        works(p, fds[n - 1]);
        EQ(peer_call(P_POLL, p.peer, POLLRDHUP, 0, 0), 0);
    }
    close(fds[n - 1]);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
}

PAIR_CASE(shutdown_through_a_duplicate) {
    struct pair p = pair_open();
    int other = OK(dup(p.fd));
    send_all(p.fd, 1, 0, 100);
    OK(shutdown(other, SHUT_WR));
    FAILS(send(p.fd, "x", 1, MSG_NOSIGNAL), EPIPE);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 1, 0, 100), 0);
    close(other);
    pair_close(p);
}

PAIR_CASE(dup2_onto_a_connection_closes_it) {
    struct pair p = pair_open(), q = pair_open();
    EQ(dup2(q.fd, p.fd), p.fd);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
    works(q, p.fd);
    works(q, q.fd);
    // A file over it, too.
    int null = OK(open("/dev/null", O_RDWR));
    EQ(dup2(null, p.fd), p.fd);
    EQ(write(p.fd, "gone", 4), 4);
    works(q, q.fd);
    // And the reverse: the connection over a file.
    EQ(dup2(q.fd, null), null);
    works(q, null);
    EQ(dup2(q.fd, q.fd), q.fd);
    works(q, q.fd);
    FAILS(dup3(q.fd, q.fd, 0), EINVAL);
    FAILS(dup2(q.fd, -1), EBADF);
    FAILS(dup2(9999, q.fd), EBADF);
    works(q, q.fd);
    close(null);
    close(p.fd);
    pair_close(q);
}

PAIR_CASE(number_of_a_closed_connection_is_clean) {
    struct pair p = pair_open();
    // The lowest free number, so that it is given out again first.
    int number = OK(dup(p.fd)), pipes[2];
    close(p.fd);
    if (p.fd < number) {
        EQ(dup2(number, p.fd), p.fd);
        close(number);
        number = p.fd;
    }
    peer_says(p.peer, "unread");
    close(number);
    OK(pipe(pipes));
    EQ(pipes[0], number);
    EQ(write(pipes[1], "abc", 3), 3);
    char buf[8];
    EQ(read(pipes[0], buf, 8), 3);
    FAILS(recv(number, buf, 8, 0), ENOTSOCK);
    close(pipes[0]);
    close(pipes[1]);
    int file = OK(open("/dev/zero", O_RDONLY));
    EQ(file, number);
    EQ(read(file, buf, 8), 8);
    CHECK(!memcmp(buf, "\0\0\0\0\0\0\0\0", 8));
    close(file);
    int fresh = OK(socket(AF_INET, SOCK_STREAM, 0));
    EQ(fresh, number);
    FAILS(recv(fresh, buf, 8, 0), ENOTCONN);
    close(fresh);
    FAILS(close(fresh), EBADF);
    // A file that stdio or another part of libc opens takes the number without our seeing it.
    FILE *stream = fopen("/proc/self/status", "r");
    CHECK(stream && fileno(stream) == number);
    char line[100];
    CHECK(fgets(line, sizeof line, stream));
    EQ(fclose(stream), 0);
    struct pair q = pair_open();
    works(q, q.fd);
    pair_close(q);
}

PAIR_CASE(close_range_and_closefrom) {
    struct pair p = pair_open(), q = pair_open(), r = pair_open();
    int a = OK(dup2(p.fd, 200)), b = OK(dup2(q.fd, 201)), c = OK(dup2(r.fd, 202));
    close(p.fd);
    close(q.fd);
    close(r.fd);
    OK(close_range(201, 201, 0));
    EQ(peer_call(P_RECV_TO_EOF, q.peer, 0, 0, 0), 0);
    works(p, a);
    works(r, c);
    OK(close_range(200, 202, CLOSE_RANGE_CLOEXEC));
    CHECK(OK(fcntl(a, F_GETFD)) & FD_CLOEXEC);
    works(p, a);
    closefrom(202);
    EQ(peer_call(P_RECV_TO_EOF, r.peer, 0, 0, 0), 0);
    works(p, a);
    OK(close_range(200, ~0u, 0));
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
    FAILS(recv(a, &(char){0}, 1, 0), EBADF);
    (void)b;
    p = pair_open();
    works(p, p.fd);
    pair_close(p);
}

// Closes every fd from 3 up, one after the other, as old daemons do at their start.
static void close_everything(void) {
    for (int fd = 3; fd < 5000; fd++)
        close(fd);
}

CASE(program_closes_all_fds_before_its_first_socket) {
    close_everything();
    int client, server;
    connect_here(&client, &server);
    warm_here(client, server);
}

CASE(program_closes_all_fds_between_connections) {
    for (int i = 0; i < 3; i++) {
        int client, server;
        connect_here(&client, &server);
        warm_here(client, server);
        // Also those that the library opened for itself.
        close_everything();
        connect_here(&client, &server);
        send_all(client, 1, 0, 1000);
        recv_all(server, 1, 0, 1000);
        send_all(server, 1, 0, 1000);
        recv_all(client, 1, 0, 1000);
        OK(close_range(3, ~0u, 0));
    }
}

PAIR_CASE(connection_as_standard_output) {
    struct pair p = pair_open();
    int out = OK(dup(1));
    OK(dup2(p.fd, 1));
    EQ(write(1, "hello\n", 6), 6);
    peer_hears(p.peer, "hello\n");
    EQ(write(STDOUT_FILENO, "again\n", 6), 6);
    peer_hears(p.peer, "again\n");
    OK(dup2(out, 1));
    works(p, p.fd);
    close(out);
    pair_close(p);
}

CASE(fds_run_out) {
    struct rlimit limit = {64, 64};
    uint16_t port;
    int listener = listen_here(&port), clients[64], servers[64], n = 0, m = 0;
    OK(setrlimit(RLIMIT_NOFILE, &limit));
    for (; n < 64; n++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0) {
            EQ(errno, EMFILE);
            break;
        }
        socklen_t len;
        struct sockaddr_storage to = address_of("127.0.0.1", port, &len);
        OK(connect(clients[n] = fd, (struct sockaddr *)&to, len));
    }
    // The application gets all the fds its limit allows: 3 standard ones and the listener are taken.
    CHECK(n >= 50);
    FAILS(accept(listener, NULL, NULL), EMFILE);
    FAILS(dup(listener), EMFILE);
    for (int i = n / 2; i < n; i++)
        close(clients[i]);
    for (; m < n / 2; m++)
        servers[m] = OK(accept(listener, NULL, NULL));
    for (int i = 0; i < m; i++) {
        send_all(clients[i], i, 0, 1000);
        recv_all(servers[i], i, 0, 1000);
    }
}

// fork(2) copies the table of descriptors up to the highest.
CASE(no_descriptor_is_far_above_those_of_the_application) {
    struct rlimit limit;
    OK(getrlimit(RLIMIT_NOFILE, &limit));
    if (limit.rlim_max > 1 << 20)
        limit.rlim_max = 1 << 20;
    limit.rlim_cur = limit.rlim_max;
    OK(setrlimit(RLIMIT_NOFILE, &limit));
    int ends[2];
    connect_here(&ends[0], &ends[1]);
    ends_talk(ends, 0, 40);
    assert_smcd(ends[0]);
    // Counted in the kernel's own list, and not by a call that the library sees.
    int kept = 0, highest = 0;
    for (int fd = 0; fd < (int)limit.rlim_cur; fd++)
        if (unseen(SYS_fcntl, fd, F_GETFD, 0) >= 0)
            kept++, highest = fd;
    CHECK(kept >= 5);
    CHECK(highest < 5000);
}

CASE(fds_of_the_application_start_where_they_would) {
    // Programs count on the lowest free number.
    int first = OK(open("/dev/null", O_RDONLY));
    close(first);
    int listener = OK(socket(AF_INET, SOCK_STREAM, 0));
    EQ(listener, first);
    uint16_t port = 0;
    listen_at(listener, "127.0.0.1", &port);
    int client = connect_to(port);
    EQ(client, first + 1);
    int server = OK(accept(listener, NULL, NULL));
    EQ(server, first + 2);
    warm_here(client, server);
    int ep = OK(epoll_create1(0));
    EQ(ep, first + 3);
    struct epoll_event event = {EPOLLIN, {.u64 = 1}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, server, &event));
    EQ(epoll_wait(ep, &event, 1, 10), 0);
    int next = OK(dup(0));
    EQ(next, first + 4);
}

PAIR_CASE(stat_says_socket) {
    struct pair p = pair_open();
    struct stat facts;
    OK(fstat(p.fd, &facts));
    CHECK(S_ISSOCK(facts.st_mode));
    EQ(isatty(p.fd), 0);
    char path[64], target[64] = {0};
    snprintf(path, sizeof path, "/proc/self/fd/%d", p.fd);
    OK(readlink(path, target, sizeof target - 1));
    CHECK(!strncmp(target, "socket:", 7));
    pair_close(p);
}

static void pass(int over, int fd) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec iov = {"x", 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
        .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    *c = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET,
        .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    EQ(sendmsg(over, &msg, 0), 1);
}

static int receive(int over) {
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    char byte;
    struct iovec iov = {&byte, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
        .msg_controllen = sizeof control};
    EQ(recvmsg(over, &msg, 0), 1);
    int fd;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof fd);
    return fd;
}

static void echo_received(void *arg) {
    int fd = receive(*(int *)arg);
    char buf[256];
    for (ssize_t n; (n = OK(recv(fd, buf, sizeof buf, 0))) > 0;)
        EQ(send(fd, buf, n, 0), n);
}

CASE(fresh_connection_passed_to_another_process) {
    // The pattern of a dispatcher: accept, hand over, forget.
    uint16_t port;
    int listener = listen_here(&port), over[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, over));
    pid_t pid = child(echo_received, &over[1]);
    int client = connect_to(port), server = OK(accept(listener, NULL, NULL));
    pass(over[0], server);
    close(server);
    for (int i = 0; i < 50; i++) {
        send_all(client, 1, i * 100, 100);
        recv_all(client, 1, i * 100, 100);
    }
    close(client);
    child_succeeds(pid);
}

CASE(connection_passed_within_a_process_and_closed_on_its_way) {
    int client, server, over[2];
    connect_here(&client, &server);
    warm_here(client, server);
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, over));
    for (int i = 0; i < 5; i++) {
        pass(over[0], server);
        close(server);
        send_all(client, 1, i * 1000, 1000);
        EQ(events_now(client, POLLIN | POLLRDHUP), 0);
        server = receive(over[1]);
        recv_all(server, 1, i * 1000, 1000);
        send_all(server, 2, i * 1000, 1000);
        recv_all(client, 2, i * 1000, 1000);
    }
    // Sent in vain: the descriptor stays the only one.
    nonblocking(over[0], true);
    close(over[1]);
    signal(SIGPIPE, SIG_IGN);
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {.align = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET,
                     .cmsg_type = SCM_RIGHTS}};
    memcpy(CMSG_DATA(&control.align), &server, sizeof server);
    struct iovec iov = {"x", 1};
    struct mmsghdr msg = {.msg_hdr = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
                              .msg_controllen = sizeof control}};
    FAILS(sendmsg(over[0], &msg.msg_hdr, 0), EPIPE);
    FAILS(sendmmsg(over[0], &msg, 1, 0), EPIPE);
    FAILS(sendmmsg(over[0], NULL, 1, 0), EFAULT);
    close(server);
    recv_to_eof(client, 2, 0, 0);
}

CASE(connection_fetched_by_pidfd_getfd) {
    int client, server;
    connect_here(&client, &server);
    warm_here(client, server);
    int pidfd = OK(syscall(SYS_pidfd_open, getpid(), 0));
    int again = OK(syscall(SYS_pidfd_getfd, pidfd, server, 0));
    send_all(client, 1, 0, 1000);
    recv_all(again, 1, 0, 1000);
    close(server);
    send_all(again, 1, 0, 1000);
    recv_all(client, 1, 0, 1000);
    close(again);
    recv_to_eof(client, 1, 0, 0);
}

CASE(connection_passed_within_a_process) {
    int client, server, over[2];
    connect_here(&client, &server);
    warm_here(client, server);
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, over));
    pass(over[0], server);
    int again = receive(over[1]);
    CHECK(again != server);
    for (int i = 0; i < 10; i++) {
        send_all(client, 1, i * 100, 100);
        recv_all(i % 2 ? again : server, 1, i * 100, 100);
    }
    close(server);
    send_all(again, 2, 0, 1000);
    recv_all(client, 2, 0, 1000);
    close(again);
    recv_to_eof(client, 2, 0, 0);
}

CASE(epoll_set_passed_within_a_process) {
    int client, server, over[2], made = OK(epoll_create1(0));
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, over));
    pass(over[0], made);
    int ep = receive(over[1]);
    close(made);
    connect_here(&client, &server);
    struct epoll_event event = {EPOLLIN, {.u64 = 4}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, client, &event));
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, server, &event));
    char c;
    for (int i = 0; i < 20; i++) {
        EQ(epoll_wait(ep, &event, 1, 0), 0);
        EQ(send(i % 2 ? client : server, "x", 1, 0), 1);
        EQ(epoll_wait(ep, &event, 1, 10000), 1);
        EQ(event.data.u64, 4);
        EQ(recv(i % 2 ? server : client, &c, 1, 0), 1);
    }
    close(ep);
    close(client);
    close(server);
    close(over[0]);
    close(over[1]);
}
