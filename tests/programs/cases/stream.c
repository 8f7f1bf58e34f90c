// The byte stream: content, half-close, and the ways a connection ends.
#include "peer.h"

#include <sys/mman.h>

static const size_t SIZES[] = {1, 2, 3, 7, 8, 63, 64, 65, 1000, 1448, 4095, 4096, 4097, 16384, 65535,
    65536, 65537, 262143, 262144, 262145, 1000000};
#define SIZE_COUNT (sizeof SIZES / sizeof *SIZES)

PAIR_CASE(every_size_arrives_exactly_both_ways) {
    struct pair p = pair_open();
    uint64_t at = 0;
    for (size_t i = 0; i < SIZE_COUNT; i++) {
        peer_begin(P_RECV_PATTERN, p.peer, 1, at, SIZES[i]);
        send_all(p.fd, 1, at, SIZES[i]);
        EQ(peer_end(), 0);
        peer_begin(P_SEND_PATTERN, p.peer, 2, at, SIZES[i]);
        recv_all(p.fd, 2, at, SIZES[i]);
        EQ(peer_end(), 0);
        at += SIZES[i];
    }
    pair_close(p);
}

PAIR_CASE(small_reads_of_large_writes_and_the_reverse) {
    struct pair p = pair_open();
    char buf[1000];
    peer_begin(P_SEND_PATTERN, p.peer, 1, 0, 200000);
    for (size_t at = 0; at < 200000;) {
        ssize_t n = OK(recv(p.fd, buf, 1 + at % 997, 0));
        CHECK(n > 0);
        check_pattern(1, at, buf, n);
        at += n;
    }
    EQ(peer_end(), 0);
    peer_begin(P_RECV_PATTERN, p.peer, 2, 0, 200000);
    for (size_t at = 0; at < 200000;) {
        size_t n = 1 + at % 997;
        n = n < 200000 - at ? n : 200000 - at;
        pattern(2, at, buf, n);
        EQ(send(p.fd, buf, n, 0), n);
        at += n;
    }
    EQ(peer_end(), 0);
    pair_close(p);
}

PAIR_CASE(peer_half_closes) {
    struct pair p = pair_open();
    peer_begin(P_SEND_PATTERN, p.peer, 1, 0, 50000);
    recv_all(p.fd, 1, 0, 40000);
    EQ(peer_end(), 0);
    EQ(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0), 0);
    recv_to_eof(p.fd, 1, 40000, 10000);
    // Our direction is still open.
    wait_events(p.fd, POLLIN | POLLOUT | POLLRDHUP, POLLIN | POLLOUT | POLLRDHUP);
    for (int i = 0; i < 5; i++) {
        send_all(p.fd, 2, i * 1000, 1000);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 2, i * 1000, 1000), 0);
    }
    EQ(peer_send(p.peer, "x", 1, 0), -1);
    EQ(errno, EPIPE);
    OK(close(p.fd));
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 2, 0, 0), 0);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}

PAIR_CASE(we_half_close) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 50000);
    OK(shutdown(p.fd, SHUT_WR));
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 1, 0, 50000), 0);
    EQ(events_now(p.fd, POLLIN), 0);
    peer_begin(P_SEND_PATTERN, p.peer, 2, 0, 300000);
    recv_all(p.fd, 2, 0, 300000);
    EQ(peer_end(), 0);
    FAILS(send(p.fd, "x", 1, MSG_NOSIGNAL), EPIPE);
    OK(shutdown(p.fd, SHUT_WR));
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    recv_to_eof(p.fd, 2, 0, 0);
    OK(close(p.fd));
}

PAIR_CASE(eof_only_after_the_last_byte) {
    struct pair p = pair_open();
    EQ(peer_call(P_NONBLOCK, p.peer, 1, 0, 0), 0);
    char buf[60000];
    pattern(4, 0, buf, sizeof buf);
    long sent = peer_send(p.peer, buf, sizeof buf, 0);
    CHECK(sent > 0);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    wait_events(p.fd, POLLIN | POLLRDHUP, POLLIN | POLLRDHUP);
    recv_to_eof(p.fd, 4, 0, sent);
    OK(close(p.fd));
}

PAIR_CASE(eof_while_blocked_in_recv) {
    struct pair p = pair_open();
    peer_begin(P_RECV_TO_EOF, p.peer, 1, 0, 0);
    peer_asleep();
    OK(shutdown(p.fd, SHUT_WR));
    EQ(peer_end(), 0);
    peer_begin(P_SEND_PATTERN, p.peer, 1, 0, 10);
    recv_all(p.fd, 1, 0, 10);
    EQ(peer_end(), 0);
    peer_begin(P_RECV, p.peer, 10, 0, 0);
    EQ(peer_end(), 0);
    pair_close(p);
}

PAIR_CASE(close_with_unread_data_resets_the_peer) {
    struct pair p = pair_open();
    peer_says(p.peer, "never read");
    wait_events(p.fd, POLLIN, POLLIN);
    OK(close(p.fd));
    char c;
    EQ(peer_recv(p.peer, &c, 1, 0), -1);
    EQ(errno, ECONNRESET);
    EQ(peer_recv(p.peer, &c, 1, 0), 0);
    EQ(peer_send(p.peer, "x", 1, 0), -1);
    EQ(errno, EPIPE);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}

PAIR_CASE(peer_closes_with_unread_data) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 100);
    EQ(peer_call(P_POLL, p.peer, POLLIN, 10000, 0), POLLIN);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    wait_events(p.fd, POLLIN | POLLOUT | POLLRDHUP,
        POLLIN | POLLOUT | POLLRDHUP | POLLERR | POLLHUP);
    char c;
    FAILS(recv(p.fd, &c, 1, 0), ECONNRESET);
    EQ(recv(p.fd, &c, 1, 0), 0);
    FAILS(send(p.fd, &c, 1, MSG_NOSIGNAL), EPIPE);
    OK(close(p.fd));
}

PAIR_CASE(bytes_before_a_reset_are_still_read) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 100);
    EQ(peer_call(P_POLL, p.peer, POLLIN, 10000, 0), POLLIN);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 1000), 0);
    wait_readable(p.fd, 1000);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    wait_events(p.fd, POLLRDHUP, POLLRDHUP | POLLERR | POLLHUP);
    recv_all(p.fd, 2, 0, 1000);
    char c;
    FAILS(recv(p.fd, &c, 1, 0), ECONNRESET);
    EQ(recv(p.fd, &c, 1, 0), 0);
    OK(close(p.fd));
}

PAIR_CASE(so_error_takes_the_reset_away) {
    struct pair p = pair_open();
    OK(peer_call(P_RESET, p.peer, 0, 0, 0));
    wait_events(p.fd, 0, POLLERR | POLLHUP);
    EQ(option(p.fd, SOL_SOCKET, SO_ERROR), ECONNRESET);
    EQ(option(p.fd, SOL_SOCKET, SO_ERROR), 0);
    char c;
    EQ(recv(p.fd, &c, 1, 0), 0);
    OK(close(p.fd));
}

PAIR_CASE(linger_zero_resets) {
    struct pair p = pair_open();
    peer_says(p.peer, "hello");
    wait_readable(p.fd, 5);
    OK(peer_call(P_RESET, p.peer, 0, 0, 0));
    wait_events(p.fd, POLLRDHUP, POLLRDHUP | POLLERR | POLLHUP);
    char buf[8];
    EQ(recv(p.fd, buf, 8, 0), 5);
    FAILS(recv(p.fd, buf, 8, 0), ECONNRESET);
    FAILS(send(p.fd, buf, 8, MSG_NOSIGNAL), EPIPE);
    OK(close(p.fd));
}

PAIR_CASE(reset_wakes_a_blocked_reader) {
    struct pair p = pair_open();
    peer_begin(P_RECV, p.peer, 1, 0, 0);
    peer_asleep();
    struct linger linger = {1, 0};
    OK(setsockopt(p.fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    OK(close(p.fd));
    EQ(peer_end(), -1);
    EQ(errno, ECONNRESET);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}

PAIR_CASE(linger_with_time_waits_for_nothing_when_all_is_read) {
    struct pair p = pair_open();
    struct linger linger = {1, 20};
    OK(setsockopt(p.fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    send_all(p.fd, 1, 0, 10000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 10000), 0);
    double start = now();
    OK(close(p.fd));
    CHECK(now() - start < 5);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 1, 0, 0), 0);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}

static volatile sig_atomic_t pipes;
static void count_pipe(int s) {
    (void)s;
    pipes++;
}

PAIR_CASE(writing_to_a_closed_peer_gives_epipe_and_sigpipe) {
    struct pair p = pair_open();
    signal(SIGPIPE, count_pipe);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    char c;
    EQ(recv(p.fd, &c, 1, 0), 0);
    // The first write is taken: TCP learns only from its answer that nobody is there.
    EQ(send(p.fd, "x", 1, 0), 1);
    wait_events(p.fd, POLLRDHUP, POLLRDHUP | POLLERR | POLLHUP);
    EQ(pipes, 0);
    FAILS(send(p.fd, "x", 1, MSG_NOSIGNAL), EPIPE);
    EQ(pipes, 0);
    FAILS(send(p.fd, "x", 1, 0), EPIPE);
    EQ(pipes, 1);
    FAILS(write(p.fd, "x", 1), EPIPE);
    EQ(pipes, 2);
    struct iovec iov = {"x", 1};
    FAILS(writev(p.fd, &iov, 1), EPIPE);
    EQ(pipes, 3);
    EQ(recv(p.fd, &c, 1, 0), 0);
    OK(close(p.fd));
}

static void write_until_killed(void *arg) {
    struct pair *p = arg;
    OK(shutdown(p->fd, SHUT_WR));
    send(p->fd, "x", 1, 0);
}

PAIR_CASE(sigpipe_kills_by_default) {
    struct pair p = pair_open();
    int status;
    pid_t pid = child(write_until_killed, &p);
    EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGPIPE);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
    pair_close(p);
}

PAIR_CASE(shut_rd_ends_reading_but_what_arrives_is_not_lost) {
    struct pair p = pair_open();
    char buf[8];
    OK(shutdown(p.fd, SHUT_RD));
    EQ(recv(p.fd, buf, 8, 0), 0);
    CHECK(events_now(p.fd, POLLIN | POLLRDHUP) == (POLLIN | POLLRDHUP));
    // Linux takes the bytes all the same, and a later read gets them.
    peer_says(p.peer, "late");
    double until = now() + 10;
    ssize_t n;
    while ((n = OK(recv(p.fd, buf, 8, 0))) == 0)
        CHECK(now() < until);
    EQ(n, 4);
    EQ(send(p.fd, "on", 2, 0), 2);
    peer_hears(p.peer, "on");
    pair_close(p);
}

PAIR_CASE(shutdown_both_ways) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 500);
    OK(shutdown(p.fd, SHUT_RDWR));
    char c;
    EQ(recv(p.fd, &c, 1, 0), 0);
    FAILS(send(p.fd, "x", 1, MSG_NOSIGNAL), EPIPE);
    CHECK(events_now(p.fd, POLLIN | POLLOUT | POLLRDHUP) & POLLHUP);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 1, 0, 500), 0);
    pair_close(p);
}

PAIR_CASE(shutdown_rejects_nonsense) {
    struct pair p = pair_open();
    FAILS(shutdown(p.fd, 3), EINVAL);
    FAILS(shutdown(p.fd, -1), EINVAL);
    EQ(send(p.fd, "ok", 2, 0), 2);
    peer_hears(p.peer, "ok");
    pair_close(p);
}

PAIR_CASE(full_connection_takes_no_more_until_the_reader_reads) {
    struct pair p = pair_open();
    size_t sent = fill(p.fd, 1, 0);
    CHECK(sent >= 4096);
    EQ(events_now(p.fd, POLLOUT), 0);
    FAILS(send(p.fd, "x", 1, MSG_DONTWAIT), EAGAIN);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, sent), 0);
    wait_events(p.fd, POLLOUT, POLLOUT);
    // And the other way round, a second time round the ring.
    for (int i = 0; i < 4; i++) {
        size_t more = fill(p.fd, 1, sent);
        CHECK(more > 0);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, sent, more), 0);
        sent += more;
        wait_events(p.fd, POLLOUT, POLLOUT);
    }
    pair_close(p);
}

PAIR_CASE(blocking_writer_sleeps_until_there_is_room) {
    struct pair p = pair_open();
    peer_begin(P_SEND_PATTERN, p.peer, 1, 0, 32 << 20);
    peer_asleep();
    recv_all(p.fd, 1, 0, 32 << 20);
    EQ(peer_end(), 0);
    pair_close(p);
}

PAIR_CASE(blocked_writer_learns_of_the_end) {
    struct pair p = pair_open();
    size_t n = 1 << 20;
    char *buf = malloc(n);
    CHECK(buf);
    pattern(1, 0, buf, n);
    // A send that cannot end: nobody reads.
    size_t sent = fill(p.fd, 1, 0);
    CHECK(sent > 0);
    peer_begin(P_POLL, p.peer, 0, 0, 0);
    EQ(peer_end(), 0);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    signal(SIGPIPE, SIG_IGN);
    // Unread bytes make the close a reset; each further send fails once it is known.
    ssize_t r = 0;
    int first = 0;
    for (double until = now() + 10; r >= 0 || errno == EAGAIN;) {
        r = send(p.fd, buf, n, 0);
        first = errno;
        CHECK(now() < until);
    }
    CHECK(first == ECONNRESET || first == EPIPE);
    free(buf);
    OK(close(p.fd));
}

PAIR_CASE(partial_write_says_how_much) {
    struct pair p = pair_open();
    size_t n = 64 << 20;
    char *buf = malloc(n);
    CHECK(buf);
    pattern(1, 0, buf, n);
    ssize_t sent = OK(send(p.fd, buf, n, MSG_DONTWAIT));
    CHECK(sent > 0 && (size_t)sent < n);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, sent), 0);
    EQ(peer_call(P_FIONREAD, p.peer, 0, 0, 0), 0);
    free(buf);
    pair_close(p);
}

PAIR_CASE(zero_lengths) {
    struct pair p = pair_open();
    char c;
    EQ(send(p.fd, &c, 0, 0), 0);
    EQ(write(p.fd, &c, 0), 0);
    // read(2) of nothing returns at once, recv(2) of nothing waits for a byte to be there.
    EQ(read(p.fd, &c, 0), 0);
    FAILS(recv(p.fd, &c, 0, MSG_DONTWAIT), EAGAIN);
    peer_says(p.peer, "x");
    wait_events(p.fd, POLLIN, POLLIN);
    EQ(recv(p.fd, &c, 0, 0), 0);
    EQ(recv(p.fd, &c, 1, 0), 1);
    EQ(c, 'x');
    EQ(peer_call(P_FIONREAD, p.peer, 0, 0, 0), 0);
    pair_close(p);
}

PAIR_CASE(both_ways_at_once) {
    struct pair p = pair_open();
    size_t total = 8 << 20, sent = 0, got = 0;
    char buf[65536];
    peer_begin(P_ECHO, p.peer, 0, 0, 0);
    while (got < total) {
        struct pollfd f = {.fd = p.fd, .events = POLLIN | (sent < total ? POLLOUT : 0)};
        EQ(poll(&f, 1, 10000), 1);
        if (f.revents & POLLOUT) {
            size_t want = total - sent < sizeof buf ? total - sent : sizeof buf;
            pattern(1, sent, buf, want);
            ssize_t n = send(p.fd, buf, want, MSG_DONTWAIT);
            CHECK(n > 0 || errno == EAGAIN);
            sent += n > 0 ? n : 0;
        }
        if (f.revents & POLLIN) {
            ssize_t n = OK(recv(p.fd, buf, sizeof buf, MSG_DONTWAIT));
            CHECK(n > 0);
            check_pattern(1, got, buf, n);
            got += n;
        }
    }
    OK(shutdown(p.fd, SHUT_WR));
    recv_to_eof(p.fd, 1, total, 0);
    EQ(peer_end(), (long)total + 0);
    OK(close(p.fd));
}

REMOTE_CASE(peer_exits_without_closing) {
    struct pair p = pair_open();
    peer_says(p.peer, "last words");
    peer_call(P_EXIT, 0, 0, 0, 0);
    char buf[16];
    EQ(recv(p.fd, buf, 16, MSG_WAITALL), 10);
    CHECK(!memcmp(buf, "last words", 10));
    EQ(recv(p.fd, buf, 16, 0), 0);
    EQ(recv(p.fd, buf, 16, 0), 0);
    OK(close(p.fd));
}

REMOTE_CASE(peer_is_killed_after_writing) {
    struct pair p = pair_open();
    EQ(peer_call(P_NONBLOCK, p.peer, 1, 0, 0), 0);
    char buf[50000];
    pattern(1, 0, buf, sizeof buf);
    long sent = peer_send(p.peer, buf, sizeof buf, 0);
    CHECK(sent > 0);
    peer_call(P_KILL, 0, 0, 0, 0);
    recv_to_eof(p.fd, 1, 0, sent);
    EQ(send(p.fd, "x", 1, MSG_NOSIGNAL), 1);
    wait_events(p.fd, 0, POLLERR | POLLHUP);
    FAILS(send(p.fd, "x", 1, MSG_NOSIGNAL), EPIPE);
    OK(close(p.fd));
}

REMOTE_CASE(peer_is_killed_with_unread_bytes) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 1000);
    EQ(peer_call(P_POLL, p.peer, POLLIN, 10000, 0), POLLIN);
    peer_call(P_KILL, 0, 0, 0, 0);
    char c;
    FAILS(recv(p.fd, &c, 1, 0), ECONNRESET);
    EQ(recv(p.fd, &c, 1, 0), 0);
    OK(close(p.fd));
}

struct killer {
    pid_t victim, sleeper;
};
static void kill_when_asleep(void *arg) {
    struct killer *k = arg;
    wait_asleep(k->sleeper, k->sleeper);
    kill(k->victim, SIGKILL);
}

REMOTE_CASE(death_of_the_peer_wakes_a_blocked_reader) {
    struct pair p = pair_open();
    struct killer k = {peer_pid(), getpid()};
    pid_t pid = child(kill_when_asleep, &k);
    char c;
    EQ(recv(p.fd, &c, 1, 0), 0);
    child_succeeds(pid);
    OK(close(p.fd));
    peer_forget();
}

REMOTE_CASE(death_of_the_peer_wakes_a_blocked_writer) {
    struct pair p = pair_open();
    fill(p.fd, 1, 0);
    struct killer k = {peer_pid(), getpid()};
    pid_t pid = child(kill_when_asleep, &k);
    FAILS(send(p.fd, "x", 1, MSG_NOSIGNAL), ECONNRESET);
    child_succeeds(pid);
    OK(close(p.fd));
    peer_forget();
}

// Calls that find nothing are no use of the connection, however many.
CASE(connection_that_is_polled_busily_changes_over) {
    uint16_t port;
    int listener = listen_here(&port), client = connect_to(port);
    int server = OK(accept(listener, NULL, NULL));
    for (int i = 0; i < 40; i++) {
        send_all(client, 1, i * 10, 10);
        recv_all(server, 1, i * 10, 10);
        char c;
        for (int n = 0; i < 3 && n < 10000; n++)
            EQ(recv(server, &c, 1, MSG_DONTWAIT), -1);
        send_all(server, 2, i * 10, 10);
        recv_all(client, 2, i * 10, 10);
    }
    assert_smcd(server);
    assert_smcd(client);
    close(client);
    close(server);
    close(listener);
}

// --- more than the kernel takes in one call (MAX_RW_COUNT)

enum { MOST_AT_ONCE = 0x7ffff000 };

static void *take_all(void *arg) {
    int fd = *(int *)arg;
    static char buf[1 << 18];
    uint64_t all = 0;
    for (ssize_t n; (n = OK(recv(fd, buf, sizeof buf, 0))) > 0;)
        all += n;
    EQ(all, MOST_AT_ONCE);
    return NULL;
}

CASE(write_of_more_than_two_gigabytes_is_cut) {
    // 32-bit programs have no room for such a buffer.
    if (sizeof(size_t) < 8)
        return;
    size_t len = (size_t)MOST_AT_ONCE + (1 << 20);
    // Nothing of it is written, so that it takes no memory.
    void *zeros = mmap(NULL, len, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(zeros != MAP_FAILED);
    int client, server;
    connect_here(&client, &server);
    warm_here(client, server);
    pthread_t reader;
    EQ(pthread_create(&reader, NULL, take_all, &server), 0);
    EQ(write(client, zeros, len), MOST_AT_ONCE);
    OK(shutdown(client, SHUT_WR));
    EQ(pthread_join(reader, NULL), 0);
    close(client);
    close(server);
    OK(munmap(zeros, len));
}
