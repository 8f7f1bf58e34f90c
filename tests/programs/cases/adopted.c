// Sockets that come from elsewhere, by exec or in a message.
#include "peer.h"

// The peer, as a server, has accepted what we connect to: over shared memory both ways.
static void is_served(struct pair p) {
    pair_talk(p, 0, 16);
    assert_smcd(p.fd);
    pair_close(p);
}

// The peer begins with its first request, and what is open by then crosses its exec.
static void connects_and_is_served(uint16_t port, enum op how, int listener) {
    peer_begin(how, listener, 0, 0, 0);
    struct pair p = {.fd = connect_to(port)};
    p.peer = OK(peer_end());
    is_served(p);
}

REMOTE_CASE(listener_that_crosses_exec_is_served) {
    uint16_t port;
    int listener = listen_here(&port);
    connects_and_is_served(port, P_ACCEPT, listener);
    connects_and_is_served(port, P_EPOLL_ACCEPT, listener);
    close(listener);
    nonblocking(listener = listen_here(&port), true);
    int there = peer_take(listener);
    close(listener);
    connects_and_is_served(port, P_EPOLL_ACCEPT, there);
}

// systemd's way: nobody else is left who has it.
REMOTE_CASE(listener_whose_first_owner_closed_it_is_served) {
    uint16_t port;
    int listener = listen_here(&port);
    EQ(peer_call(P_POLL, listener, POLLIN, 0, 0), 0);
    close(listener);
    for (int i = 0; i < 3; i++)
        connects_and_is_served(port, P_ACCEPT, listener);
}

PAIR_CASE(listener_in_a_message_is_served) {
    uint16_t port;
    int listener = listen_here(&port), there = peer_take(listener);
    close(listener);
    connects_and_is_served(port, P_ACCEPT, there);
    connects_and_is_served(port, P_EPOLL_ACCEPT, there);
}

// A privileged helper binds, the server listens.
PAIR_CASE(bound_socket_in_a_message_is_served) {
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    OK(bind(fd, (struct sockaddr *)&at, sizeof at));
    uint16_t port = local_port(fd);
    int there = peer_take(fd);
    close(fd);
    peer_begin(P_SERVE, there, 0, 0, 0);
    peer_asleep();
    struct pair p = {.fd = connect_to(port)};
    p.peer = OK(peer_end());
    is_served(p);
}

// Made before the fork; one listens, the other serves.
CASE(socket_that_another_process_made_listen_is_served) {
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0)), listens[2];
    OK(pipe(listens));
    uint16_t port = 0;
    pid_t pid = OK(fork());
    if (pid == 0) {
        listen_at(fd, "127.0.0.1", &port);
        CHECK(write(listens[1], &port, sizeof port) == sizeof port);
        int client = connect_to(port);
        for (int i = 0; i < 16; i++) {
            send_all(client, 1, i * 10, 10);
            recv_all(client, 2, i * 10, 10);
        }
        recv_to_eof(client, 2, 160, 0);
        _exit(0);
    }
    EQ(read(listens[0], &port, sizeof port), sizeof port);
    int server = OK(accept(fd, NULL, NULL));
    for (int i = 0; i < 16; i++) {
        recv_all(server, 1, i * 10, 10);
        send_all(server, 2, i * 10, 10);
    }
    assert_smcd(server);
    close(server);
    child_succeeds(pid);
}

// A socket made before a fork is in two hands, one of which does not learn of the connection that it becomes.
CASE(socket_of_two_processes_is_connected_by_one_and_read_by_the_other) {
    uint16_t port;
    int listener = listen_here(&port), fd = OK(socket(AF_INET, SOCK_STREAM, 0)), turns[2];
    OK(pipe(turns));
    pid_t pid = OK(fork());
    if (pid == 0) {
        char turn;
        CHECK(read(turns[0], &turn, 1) == 1);
        recv_all(fd, 2, 320, 1000);
        send_all(fd, 1, 320, 1000);
        _exit(0);
    }
    socklen_t len;
    struct sockaddr_storage at = address_of("127.0.0.1", port, &len);
    OK(connect(fd, (struct sockaddr *)&at, len));
    int server = OK(accept(listener, NULL, NULL));
    for (int i = 0; i < 32; i++) {
        send_all(fd, 1, i * 10, 10);
        recv_all(server, 1, i * 10, 10);
        send_all(server, 2, i * 10, 10);
        recv_all(fd, 2, i * 10, 10);
    }
    send_all(server, 2, 320, 1000);
    EQ(write(turns[1], "", 1), 1);
    recv_all(server, 1, 320, 1000);
    child_succeeds(pid);
    close(fd);
    recv_to_eof(server, 1, 1320, 0);
}

// From byte `at` on, our end and the peer's `handle` talk; in the end over shared memory.
static void goes_on(struct pair p, int at) {
    pair_talk(p, at, 64);
    assert_smcd(p.fd);
    pair_close(p);
}

REMOTE_CASE(connection_in_a_message_goes_on) {
    for (int i = 0; i < 6; i++) {
        int ends[2], rounds = (int[]){0, 2, 32}[i / 2];
        both_ends(ends, i % 2, rounds);
        int there = peer_take(ends[1]);
        close(ends[1]);
        goes_on((struct pair){ends[0], there}, rounds * 10);
    }
}

REMOTE_CASE(connection_in_a_message_takes_unread_bytes_along) {
    for (int i = 0; i < 2; i++) {
        int ends[2];
        both_ends(ends, i, 32);
        send_all(ends[0], 1, 320, 5000);
        send_all(ends[1], 2, 320, 3000);
        int there = peer_take(ends[1]);
        close(ends[1]);
        EQ(peer_call(P_RECV_PATTERN, there, 1, 320, 5000), 0);
        recv_all(ends[0], 2, 320, 3000);
        EQ(peer_call(P_SEND_PATTERN, there, 2, 3320, 2000), 0);
        recv_all(ends[0], 2, 3320, 2000);
        goes_on((struct pair){ends[0], there}, 5320);
    }
}

// Sent and received, and the sender has it still: two might use it.
REMOTE_CASE(connection_in_a_message_waits_for_its_sender) {
    int ends[2];
    both_ends(ends, true, 32);
    int there = peer_take(ends[1]);
    for (int i = 32; i < 64; i++) {
        send_all(ends[0], 1, i * 10, 10);
        if (i % 2)
            EQ(peer_call(P_RECV_PATTERN, there, 1, i * 10, 10), 0);
        else
            recv_all(ends[1], 1, i * 10, 10);
        EQ(peer_call(P_SEND_PATTERN, there, 2, i * 10, 10), 0);
        recv_all(ends[0], 2, i * 10, 10);
    }
    assert_tcp(ends[0]);
    close(ends[1]);
    goes_on((struct pair){ends[0], there}, 640);
}

static void send_fd_to(int channel, const struct sockaddr_un *to, socklen_t len, int fd) {
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {.header = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    struct iovec iov = {"x", 1};
    struct msghdr msg = {.msg_name = (void *)to, .msg_namelen = len, .msg_iov = &iov, .msg_iovlen = 1,
        .msg_control = &control, .msg_controllen = CMSG_SPACE(sizeof(int))};
    EQ(sendmsg(channel, &msg, 0), 1);
}

REMOTE_CASE(connection_in_a_datagram_to_a_name_goes_on) {
    int channel = OK(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    for (int i = 0; i < 4; i++) {
        int ends[2];
        struct sockaddr_un at;
        socklen_t len;
        both_ends(ends, i % 2, 32);
        int mailbox = peer_mailbox(i / 2, &at, &len);
        send_fd_to(channel, &at, len, ends[1]);
        peer_begin(P_TAKE, mailbox, 0, 0, 0);
        int there = OK(peer_end());
        close(ends[1]);
        goes_on((struct pair){ends[0], there}, 320);
        OK(peer_call(P_CLOSE, mailbox, 0, 0, 0));
    }
    close(channel);
}

// The peer is started by exec, with one end open.
REMOTE_CASE(connection_that_crosses_exec_goes_on) {
    for (int i = 0; i < 6; i++) {
        int ends[2], rounds = (int[]){0, 2, 32}[i / 2];
        both_ends(ends, i % 2, rounds);
        OK(fcntl(ends[1], F_SETFD, 0));
        EQ(peer_call(P_POLL, ends[1], 0, 0, 0), 0);
        close(ends[1]);
        goes_on((struct pair){ends[0], ends[1]}, rounds * 10);
        peer_end_all();
    }
}

// By two numbers.
REMOTE_CASE(connection_that_crosses_exec_twice_goes_on) {
    for (int i = 0; i < 2; i++) {
        int ends[2];
        both_ends(ends, i, 32);
        OK(fcntl(ends[1], F_SETFD, 0));
        int other = OK(dup(ends[1]));
        EQ(peer_call(P_POLL, ends[1], 0, 0, 0), 0);
        close(ends[1]);
        close(other);
        OK(peer_call(P_CLOSE, other, 0, 0, 0));
        goes_on((struct pair){ends[0], ends[1]}, 320);
        peer_end_all();
    }
}

struct passer {
    int channel[2];
    uint16_t port;
};

// Passes its end on, and keeps it, until it is killed.
static void passes(void *arg) {
    struct passer *passer = arg;
    int fd = connect_to(passer->port);
    for (int at = 0; at < 320; at += 10) {
        send_all(fd, 1, at, 10);
        recv_all(fd, 2, at, 10);
    }
    send_fd(passer->channel[1], fd);
    pause();
}

CASE(connection_whose_passer_was_killed_comes_back) {
    struct passer passer;
    int listener = listen_here(&passer.port), at = 0;
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, passer.channel));
    pid_t pid = child(passes, &passer);
    int ends[2] = {OK(accept(listener, NULL, NULL))};
    for (; at < 320; at += 10) {
        recv_all(ends[0], 1, at, 10);
        send_all(ends[0], 2, at, 10);
    }
    ends[1] = receive_fd(passer.channel[0]);
    OK(kill(pid, SIGKILL));
    EQ(waitpid(pid, NULL, 0), pid);
    ends_talk(ends, at, 96);
    assert_smcd(ends[0]);
    for (int i = 0; i < 2; i++) {
        close(ends[i]);
        close(passer.channel[i]);
    }
    close(listener);
}

// A command that has it open without a use for it.
PAIR_CASE(connection_comes_back_after_a_command) {
    struct pair p = pair_open();
    int at = 0;
    for (int i = 0; i < 3; i++) {
        pid_t pid = OK(fork());
        if (pid == 0) {
            execl("/bin/true", "true", (char *)NULL);
            _exit(1);
        }
        child_succeeds(pid);
        at = pair_talk(p, at, 64);
        if (variant.remote)
            assert_smcd(p.fd);
    }
    pair_close(p);
}

// A command without the library may have left it to anybody.
PAIR_CASE(connection_of_a_command_without_the_library_stays_tcp) {
    struct pair p = pair_open();
    pid_t pid = OK(fork());
    if (pid == 0) {
        execle("/bin/true", "true", (char *)NULL, (char *[]){NULL});
        _exit(1);
    }
    child_succeeds(pid);
    pair_talk(p, 0, 64);
    assert_tcp(p.fd);
    pair_close(p);
}

// Threads in calls of either direction while it goes to and fro.
CASE(streams_go_on_while_commands_come_and_go) {
    int ends[2];
    for (int round = 0; round < 4; round++) {
        both_ends(ends, round % 2, round < 2 ? 0 : 32);
        OK(fcntl(ends[round & 1], F_SETFD, 0));
        struct streams streams;
        streams_begin(&streams, ends, 3 << 20);
        for (int i = 0; i < 6; i++) {
            pid_t pid = OK(fork());
            if (pid == 0) {
                execl("/bin/true", "true", (char *)NULL);
                _exit(1);
            }
            child_succeeds(pid);
        }
        streams_end(&streams);
        close(ends[0]);
        close(ends[1]);
    }
}
