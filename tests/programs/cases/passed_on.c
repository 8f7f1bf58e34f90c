// Connections that go to somebody who knows nothing of the ring: they become TCP, and no byte is lost.
#include "peer.h"

#include <spawn.h>
#include <sys/un.h>

// A program without the library that sends back what it gets on `fd`, up to the end. The peer's end, where it is ours
// as well, is none of its business.
static pid_t start_echo(int fd, int peer) {
    pid_t pid = OK(fork());
    if (pid == 0) {
        if (!variant.remote)
            close(peer);
        dup2(fd, 0);
        dup2(fd, 1);
        close(fd);
        execle("/bin/cat", "cat", (char *)NULL, (char *[]){NULL});
        _exit(1);
    }
    return pid;
}

// The peer's end of an echo: what it sends comes back.
static void echoes(struct pair p, uint64_t at, size_t n) {
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, at, n), 0);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 2, at, n), 0);
}

static void ends(struct pair p, pid_t pid) {
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 2, 0, 0), 0);
    child_succeeds(pid);
    peer_call(P_CLOSE, p.peer, 0, 0, 0);
}

PAIR_CASE(command_without_the_library_takes_over) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 5000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 5000), 0);
    pid_t pid = start_echo(p.fd, p.peer);
    close(p.fd);
    for (int i = 0; i < 20; i++)
        echoes(p, i * 3000, 3000);
    ends(p, pid);
}

PAIR_CASE(spawned_command_without_the_library_takes_over) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 5000);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 4000), 0);
    posix_spawn_file_actions_t actions;
    EQ(posix_spawn_file_actions_init(&actions), 0);
    EQ(posix_spawn_file_actions_adddup2(&actions, p.fd, 0), 0);
    EQ(posix_spawn_file_actions_adddup2(&actions, p.fd, 1), 0);
    EQ(posix_spawn_file_actions_addclose(&actions, p.fd), 0);
    if (!variant.remote)
        EQ(posix_spawn_file_actions_addclose(&actions, p.peer), 0);
    pid_t pid;
    char *argv[] = {"cat", NULL}, *no_environment[] = {NULL};
    EQ(posix_spawn(&pid, "/bin/cat", &actions, NULL, argv, no_environment), 0);
    EQ(posix_spawn_file_actions_destroy(&actions), 0);
    close(p.fd);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 5000), 0);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 2, 0, 4000), 0);
    echoes(p, 4000, 5000);
    ends(p, pid);
}

// Unread bytes in both directions at the moment of the change.
PAIR_CASE(command_without_the_library_gets_what_was_unread) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 7000);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 9000), 0);
    wait_readable(p.fd, 9000);
    recv_all(p.fd, 2, 0, 1000);
    pid_t pid = start_echo(p.fd, p.peer);
    close(p.fd);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 7000), 0);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 2, 1000, 8000), 0);
    echoes(p, 9000, 5000);
    ends(p, pid);
}

// As much as the connection takes, and a peer that sleeps in a call.
PAIR_CASE(peer_asleep_in_a_receive_sends_the_unread_again) {
    struct pair p = pair_open();
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 50000), 0);
    wait_readable(p.fd, 50000);
    peer_begin(P_RECV_PATTERN, p.peer, 2, 0, 50000);
    peer_asleep();
    pid_t pid = start_echo(p.fd, p.peer);
    close(p.fd);
    EQ(peer_end(), 0);
    echoes(p, 50000, 5000);
    ends(p, pid);
}

PAIR_CASE(peer_asleep_in_poll_sends_the_unread_again) {
    struct pair p = pair_open();
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 50000), 0);
    wait_readable(p.fd, 50000);
    peer_begin(P_POLL, p.peer, POLLIN, 20000, 0);
    peer_asleep();
    pid_t pid = start_echo(p.fd, p.peer);
    close(p.fd);
    EQ(peer_end(), POLLIN);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 2, 0, 50000), 0);
    ends(p, pid);
}

PAIR_CASE(peer_asleep_in_a_send_goes_on_by_tcp) {
    struct pair p = pair_open();
    peer_begin(P_SEND_PATTERN, p.peer, 2, 0, 8 << 20);
    peer_asleep();
    recv_all(p.fd, 2, 0, 1000);
    int channel[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    send_fd(channel[0], p.fd);
    close(p.fd);
    int fd = receive_fd(channel[1]);
    recv_all(fd, 2, 1000, (8 << 20) - 1000);
    EQ(peer_end(), 0);
    close(fd);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
}

// Its program is elsewhere and never comes back; the bytes are there as they are over TCP.
PAIR_CASE(unread_bytes_of_an_idle_peer_are_there) {
    struct pair p = pair_open();
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 20000), 0);
    wait_readable(p.fd, 20000);
    recv_all(p.fd, 2, 0, 100);
    int channel[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    send_fd(channel[0], p.fd);
    close(p.fd);
    int fd = receive_fd(channel[1]);
    recv_all(fd, 2, 100, 19900);
    char c;
    FAILS(recv(fd, &c, 1, MSG_DONTWAIT), EAGAIN);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 20000, 2000), 0);
    recv_all(fd, 2, 20000, 2000);
    send_all(fd, 1, 0, 2000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 2000), 0);
    close(fd);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
}

static void echo_for(void *arg) {
    int fd = receive_fd(*(int *)arg);
    char buf[5000];
    for (ssize_t n; (n = OK(recv(fd, buf, sizeof buf, 0))) > 0;)
        for (ssize_t sent = 0; sent < n;)
            sent += OK(send(fd, buf + sent, n - sent, 0));
}

PAIR_CASE(message_to_another_process_takes_the_connection_along) {
    int channel[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    pid_t pid = child(echo_for, &channel[1]);
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 3000);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 20000), 0);
    send_fd(channel[0], p.fd);
    close(p.fd);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 3000), 0);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 2, 0, 20000), 0);
    for (int i = 0; i < 10; i++)
        echoes(p, 20000 + i * 3000, 3000);
    ends(p, pid);
}

// Who keeps its number goes on, too.
PAIR_CASE(message_in_vain_leaves_the_connection) {
    struct pair p = pair_open();
    int channel[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 20000), 0);
    recv_all(p.fd, 2, 0, 7000);
    send_fd(channel[0], p.fd);
    close(channel[0]);
    close(channel[1]);
    peer_begin(P_RECV_PATTERN, p.peer, 1, 0, 100000);
    send_all(p.fd, 1, 0, 100000);
    EQ(peer_end(), 0);
    recv_all(p.fd, 2, 7000, 13000);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 20000, 3000), 0);
    recv_all(p.fd, 2, 20000, 3000);
    pair_close(p);
}

static void give_away(void *arg) {
    struct pair *p = arg;
    int channel[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    send_fd(channel[0], p->fd);
    int fd = receive_fd(channel[1]);
    send_all(fd, 1, 3000, 3000);
    recv_all(fd, 2, 0, 4000);
}

// A forked child takes it back to TCP; the parent has to notice.
PAIR_CASE(parent_goes_on_after_its_child_went_back) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 3000);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 2000), 0);
    wait_readable(p.fd, 2000);
    pid_t pid = child(give_away, &p);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 6000), 0);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 2000, 6000), 0);
    child_succeeds(pid);
    recv_all(p.fd, 2, 4000, 4000);
    send_all(p.fd, 1, 6000, 3000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 6000, 3000), 0);
    pair_close(p);
}

PAIR_CASE(options_survive_the_way_back) {
    struct pair p = pair_open();
    set_option(p.fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(p.fd, SOL_SOCKET, SO_RCVLOWAT, 3);
    int channel[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    send_fd(channel[0], p.fd);
    close(p.fd);
    int fd = receive_fd(channel[1]);
    EQ(option(fd, IPPROTO_TCP, TCP_NODELAY), 1);
    EQ(option(fd, SOL_SOCKET, SO_RCVLOWAT), 3);
    set_option(fd, SOL_SOCKET, SO_RCVLOWAT, 1);
    send_all(fd, 1, 0, 10);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 10), 0);
    EQ(peer_call(P_GET_OPTION, p.peer, IPPROTO_TCP, TCP_NODELAY, 0), 0);
    close(fd);
    peer_call(P_CLOSE, p.peer, 0, 0, 0);
}

// What is left of the peer's 2000 bytes comes where the connection is passed to, or here; so do ours to the peer.
static void not_lost_by_a_pass(struct pair p, size_t received, size_t sent) {
    int channel[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    int from = p.fd;
    if (try_send_fd(channel[0], p.fd) == 1)
        from = receive_fd(channel[1]);
    else
        EQ(errno, EBUSY);
    recv_to_eof(from, 2, received, 2000 - received);
    send_all(from, 1, sent, 500);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, sent, 500), 0);
    close(channel[0]);
    close(channel[1]);
    close(from);
    if (from != p.fd)
        close(p.fd);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
}

// The peer ended its direction while we had not read it: what is left can still be read here, or nowhere.
PAIR_CASE(unread_bytes_of_a_peer_that_shut_down_are_not_lost) {
    struct pair p = pair_open();
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 2000), 0);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    wait_events(p.fd, POLLIN | POLLRDHUP, POLLIN | POLLRDHUP);
    not_lost_by_a_pass(p, 0, 0);
}

// A shell under the library: whether it finds this socket under the same number.
static void finds_the_same_socket(void *arg) {
    int fd = *(int *)arg;
    char link[64], name[64], command[256];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = OK(readlink(link, name, sizeof name - 1));
    name[n] = 0;
    snprintf(command, sizeof command, "test \"$(readlink %s)\" = '%s'", link, name);
    OK(fcntl(fd, F_SETFD, 0));
    OK(execl("/bin/sh", "sh", "-c", command, (char *)NULL));
}

// What only this process can read out of the ring, no other program is to look for in the stream.
PAIR_CASE(next_program_of_a_child_gets_no_connection_that_cannot_leave_the_ring) {
    struct pair p = pair_open();
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 2000), 0);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    wait_events(p.fd, POLLIN | POLLRDHUP, POLLIN | POLLRDHUP);
    int status;
    pid_t pid = child(finds_the_same_socket, &p.fd);
    EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    if (variant.warm)
        EQ(WEXITSTATUS(status), !is_plain());
    recv_to_eof(p.fd, 2, 0, 2000);
    send_all(p.fd, 1, 0, 500);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 500), 0);
    // An exec that fails leaves everything as it is.
    FAILS(execl("/etc/passwd", "passwd", (char *)NULL), EACCES);
    send_all(p.fd, 1, 500, 500);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 500, 500), 0);
    close(p.fd);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
}

struct waiter {
    int fd;
    volatile pid_t tid;
};

static void *wait_for_room(void *of) {
    struct waiter *waiter = of;
    struct pollfd f = {.fd = waiter->fd, .events = POLLOUT};
    __atomic_store_n(&waiter->tid, gettid(), __ATOMIC_RELEASE);
    EQ(poll(&f, 1, 20000), 1);
    EQ(f.revents, POLLOUT);
    return NULL;
}

// Half of what came by TCP is read, and a doorbell is behind it: the rest would have to be sent again, which a peer that
// has ended its direction cannot.
PAIR_CASE(bytes_before_a_doorbell_of_a_peer_that_shut_down_are_not_lost) {
    struct pair p = pair_open();
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 2000), 0);
    recv_all(p.fd, 2, 0, 10);
    size_t sent = 0;
    for (; sent < 100; sent += 10) {
        send_all(p.fd, 1, sent, 10);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, sent, 10), 0);
    }
    size_t full = fill(p.fd, 1, sent);
    struct waiter waiter = {.fd = p.fd};
    pthread_t thread;
    EQ(pthread_create(&thread, NULL, wait_for_room, &waiter), 0);
    while (__atomic_load_n(&waiter.tid, __ATOMIC_ACQUIRE) == 0)
        sched_yield();
    wait_asleep_for_room(waiter.tid);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, sent, full), 0);
    sent += full;
    EQ(pthread_join(thread, NULL), 0);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    wait_events(p.fd, POLLIN | POLLRDHUP, POLLIN | POLLRDHUP);
    not_lost_by_a_pass(p, 10, sent);
}

enum { MUCH = 24 << 20 };

static void *send_much(void *fd) {
    send_all(*(int *)fd, 1, 0, MUCH);
    return NULL;
}

struct sending {
    int fd;
    volatile int sent;
};

static void *send_in_pieces(void *of) {
    struct sending *sending = of;
    for (int i = 0; i < 40; i++) {
        send_all(sending->fd, 1, i * 1000, 1000);
        __atomic_store_n(&sending->sent, i + 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

// At the moment in which another thread's send offers it: it stays TCP altogether.
PAIR_CASE(passed_on_while_it_changes_over) {
    for (int i = 0; i < 60; i++) {
        struct pair p = pair_open();
        peer_begin(P_ECHO, p.peer, 0, 0, 0);
        int channel[2];
        OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
        struct sending sending = {.fd = p.fd};
        pthread_t sender;
        EQ(pthread_create(&sender, NULL, send_in_pieces, &sending), 0);
        while (__atomic_load_n(&sending.sent, __ATOMIC_ACQUIRE) < i % 10)
            continue;
        send_fd(channel[0], p.fd);
        int fd = receive_fd(channel[1]);
        recv_all(fd, 1, 0, 40000);
        EQ(pthread_join(sender, NULL), 0);
        OK(shutdown(fd, SHUT_WR));
        EQ(peer_end(), 40000);
        recv_to_eof(fd, 0, 0, 0);
        close(fd);
        close(channel[0]);
        close(channel[1]);
        close(p.fd);
    }
}

// In full flow in both directions, at some place: what comes back is what was sent.
PAIR_CASE(streams_go_on_while_they_change) {
    for (int i = 1; i < 4; i++) {
        struct pair p = pair_open();
        peer_begin(P_ECHO, p.peer, 0, 0, 0);
        pthread_t sender;
        EQ(pthread_create(&sender, NULL, send_much, &p.fd), 0);
        int channel[2];
        OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
        size_t at = 0;
        while (at < (size_t)MUCH / 4 * i) {
            recv_all(p.fd, 1, at, 10007);
            at += 10007;
        }
        // The sender may sleep for room just now.
        send_fd(channel[0], p.fd);
        int fd = receive_fd(channel[1]);
        recv_all(fd, 1, at, MUCH - at);
        EQ(pthread_join(sender, NULL), 0);
        OK(shutdown(fd, SHUT_WR));
        EQ(peer_end(), MUCH);
        recv_to_eof(fd, 0, 0, 0);
        close(fd);
        close(p.fd);
        close(channel[0]);
        close(channel[1]);
    }
}

// The peer has filled TCP, and the ring after that, before anybody reads: all of it is there for the next holder, though what is
// in the ring has to find room in TCP first.
PAIR_CASE(what_tcp_and_the_ring_hold_is_passed_on) {
    enum { PART = 60000, ROUNDS = 30 };
    static char part[PART];
    struct pair p = pair_open();
    OK(peer_call(P_NONBLOCK, p.peer, 1, 0, 0));
    size_t total = 0, mine = 0;
    for (int full = 0; full < ROUNDS;) {
        pattern(1, total, part, PART);
        ssize_t n = peer_send(p.peer, part, PART, 0);
        if (n > 0) {
            total += n;
            continue;
        }
        EQ(errno, EAGAIN);
        full++;
        // Both ends make the calls by which the connection changes over.
        pattern(2, mine, part, 1);
        EQ(send(p.fd, part, 1, 0), 1);
        mine++;
        struct pollfd f = {.fd = p.fd, .events = POLLIN};
        EQ(poll(&f, 1, 10000), 1);
    }
    OK(peer_call(P_NONBLOCK, p.peer, 0, 0, 0));
    EQ(peer_call(P_RECV_PATTERN, p.peer, 2, 0, mine), 0);
    // It sleeps, and sends again what is left to it.
    peer_begin(P_ECHO, p.peer, 0, 0, 0);
    int channel[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    send_fd(channel[0], p.fd);
    close(p.fd);
    int fd = receive_fd(channel[1]);
    recv_all(fd, 1, 0, total);
    OK(shutdown(fd, SHUT_WR));
    EQ(peer_end(), 0);
    recv_to_eof(fd, 0, 0, 0);
    close(fd);
    close(channel[0]);
    close(channel[1]);
}

// --- libc's own streams

PAIR_CASE(connection_as_standard_output_takes_printf) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 300);
    fflush(stdout);
    int terminal = OK(dup(1));
    OK(dup2(p.fd, 1));
    printf("hello %d\n", 7);
    fflush(stdout);
    OK(dup2(terminal, 1));
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 300), 0);
    peer_hears(p.peer, "hello 7\n");
    peer_says(p.peer, "ok");
    char buf[4];
    EQ(recv(p.fd, buf, sizeof buf, 0), 2);
    pair_close(p);
}

// --- urgent data

PAIR_CASE(urgent_byte_out_of_band) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 3000);
    EQ(send(p.fd, "!", 1, MSG_OOB), 1);
    send_all(p.fd, 1, 3000, 1000);
    EQ(peer_call(P_POLL, p.peer, POLLPRI, 20000, 0), POLLPRI);
    char c = 0;
    EQ(peer_recv(p.peer, &c, 1, MSG_OOB), 1);
    EQ(c, '!');
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 4000), 0);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 4000), 0);
    recv_all(p.fd, 2, 0, 4000);
    pair_close(p);
}

PAIR_CASE(urgent_byte_from_the_peer_interrupts_with_its_signal) {
    struct pair p = pair_open();
    sigset_t urgent;
    sigemptyset(&urgent);
    sigaddset(&urgent, SIGURG);
    pthread_sigmask(SIG_BLOCK, &urgent, NULL);
    OK(fcntl(p.fd, F_SETOWN, getpid()));
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 100), 0);
    EQ(peer_send(p.peer, "?", 1, MSG_OOB), 1);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 100, 50), 0);
    struct timespec limit = {20, 0};
    EQ(sigtimedwait(&urgent, NULL, &limit), SIGURG);
    wait_events(p.fd, POLLPRI, POLLPRI);
    int mark = -1;
    OK(ioctl(p.fd, SIOCATMARK, &mark));
    EQ(mark, 0);
    // A read stops at the mark.
    char buf[1000];
    size_t got = 0;
    while (got < 100)
        got += OK(recv(p.fd, buf + got, sizeof buf - got, 0));
    EQ(got, 100);
    check_pattern(2, 0, buf, 100);
    OK(ioctl(p.fd, SIOCATMARK, &mark));
    EQ(mark, 1);
    EQ(recv(p.fd, buf, 1, MSG_OOB), 1);
    EQ(buf[0], '?');
    recv_all(p.fd, 2, 100, 50);
    OK(ioctl(p.fd, SIOCATMARK, &mark));
    EQ(mark, 0);
    pair_close(p);
}

PAIR_CASE(urgent_byte_inline) {
    struct pair p = pair_open();
    set_option(p.fd, SOL_SOCKET, SO_OOBINLINE, 1);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 100), 0);
    EQ(peer_send(p.peer, "abc", 3, MSG_OOB), 3);
    recv_all(p.fd, 2, 0, 100);
    char buf[8];
    EQ(recv(p.fd, buf, sizeof buf, 0), 2);
    int mark = 0;
    OK(ioctl(p.fd, SIOCATMARK, &mark));
    EQ(mark, 1);
    EQ(recv(p.fd, buf + 2, sizeof buf - 2, 0), 1);
    CHECK(!memcmp(buf, "abc", 3));
    pair_close(p);
}

PAIR_CASE(urgent_byte_wakes_an_epoll_wait_for_it) {
    struct pair p = pair_open();
    int ep = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {.events = EPOLLPRI, .data.u32 = 7};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
    EQ(epoll_wait(ep, &event, 1, 0), 0);
    EQ(peer_send(p.peer, "!", 1, MSG_OOB), 1);
    EQ(epoll_wait(ep, &event, 1, 20000), 1);
    EQ(event.events, EPOLLPRI);
    EQ(event.data.u32, 7);
    char c;
    EQ(recv(p.fd, &c, 1, MSG_OOB), 1);
    EQ(epoll_wait(ep, &event, 1, 0), 0);
    close(ep);
    pair_close(p);
}

// What stands in TCP before the ring's first doorbell is not sent again behind what its sender has sent again already.
CASE(both_ends_leave_before_the_receiver_has_looked) {
    for (int k = 0; k < 200; k++) {
        int ends[2], at = 0, back = 0, rounds = k / 4;
        connect_here(&ends[0], &ends[1]);
        for (; at < rounds * 10; at += 10, back += 10) {
            send_all(ends[0], 1, at, 10);
            recv_all(ends[1], 1, at, 10);
            send_all(ends[1], 2, back, 10);
            recv_all(ends[0], 2, back, 10);
        }
        send_all(ends[0], 1, at, 100);
        for (int i = 0; i < k % 4; i++, back += 10) {
            send_all(ends[1], 2, back, 10);
            recv_all(ends[0], 2, back, 10);
        }
        // For some of these numbers through the ring, of which the receiver has not heard.
        send_all(ends[0], 1, at + 100, 1000);
        EQ(dup2(ends[0], 0), 0);
        send_all(ends[0], 1, at + 1100, 10);
        if (dup2(ends[1], 0) < 0) {
            EQ(errno, EBUSY);
            CHECK(!is_plain());
        }
        OK(shutdown(ends[0], SHUT_WR));
        recv_to_eof(ends[1], 1, at, 1110);
        close(ends[0]);
        close(ends[1]);
        close(0);
    }
}
