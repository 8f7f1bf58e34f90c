// The calls that move bytes between descriptors without the program's memory.
#include "peer.h"

#include <sys/mman.h>
#include <sys/sendfile.h>

static int file_of(size_t n) {
    int fd = OK(memfd_create("file", 0));
    for (size_t at = 0; at < n;) {
        char buf[4096];
        size_t take = n - at < sizeof buf ? n - at : sizeof buf;
        pattern(1, at, buf, take);
        EQ(write(fd, buf, take), take);
        at += take;
    }
    OK(lseek(fd, 0, SEEK_SET));
    return fd;
}

PAIR_CASE(what_cannot_be_spliced) {
    struct pair p = pair_open(), q = pair_open();
    int file = file_of(1000), ends[2];
    OK(pipe(ends));
    peer_says(p.peer, "kept");
    wait_readable(p.fd, 4);
    loff_t at = 0;
    // No pipe, no splice; nothing is taken.
    FAILS(splice(p.fd, NULL, q.fd, NULL, 4, 0), EINVAL);
    FAILS(splice(p.fd, NULL, file, NULL, 4, 0), EINVAL);
    FAILS(splice(file, NULL, p.fd, NULL, 4, 0), EINVAL);
    // Neither has a position.
    FAILS(splice(p.fd, NULL, ends[1], &at, 4, 0), ESPIPE);
    FAILS(splice(p.fd, &at, ends[1], NULL, 4, 0), EINVAL);
    EQ(write(ends[1], "pipe", 4), 4);
    FAILS(splice(ends[0], &at, p.fd, NULL, 4, 0), ESPIPE);
    FAILS(splice(ends[0], NULL, p.fd, &at, 4, 0), EINVAL);
    FAILS(splice(ends[0], NULL, p.fd, NULL, 4, 0x1000), EINVAL);
    FAILS(splice(p.fd, NULL, ends[1], NULL, 4, 0x1000), EINVAL);
    // The wrong ends of the pipe.
    FAILS(splice(ends[1], NULL, p.fd, NULL, 4, 0), EBADF);
    FAILS(splice(p.fd, NULL, ends[0], NULL, 4, 0), EBADF);
    EQ(splice(p.fd, NULL, ends[1], NULL, 0, 0), 0);
    FAILS(splice(p.fd, NULL, 9999, NULL, 4, 0), EBADF);
    FAILS(splice(9999, NULL, p.fd, NULL, 4, 0), EBADF);
    // tee(2), vmsplice(2) and copy_file_range(2) know no sockets.
    FAILS(tee(p.fd, ends[1], 4, 0), EINVAL);
    FAILS(tee(ends[0], p.fd, 4, 0), EINVAL);
    struct iovec iov = {"text", 4};
    FAILS(vmsplice(p.fd, &iov, 1, 0), EBADF);
    FAILS(copy_file_range(p.fd, NULL, file, NULL, 4, 0), EINVAL);
    FAILS(copy_file_range(file, NULL, p.fd, NULL, 4, 0), EINVAL);
    char buf[8];
    EQ(recv(p.fd, buf, sizeof buf, 0), 4);
    CHECK(!memcmp(buf, "kept", 4));
    EQ(read(ends[0], buf, sizeof buf), 4);
    peer_begin(P_POLL, p.peer, POLLIN, 0, 0);
    EQ(peer_end(), 0);
    pair_close(p);
    pair_close(q);
}

PAIR_CASE(what_cannot_be_sent_as_a_file) {
    struct pair p = pair_open(), q = pair_open();
    int file = file_of(1000), ends[2];
    OK(pipe(ends));
    EQ(write(ends[1], "pipe", 4), 4);
    peer_says(p.peer, "kept");
    wait_readable(p.fd, 4);
    off_t at = 0;
    FAILS(sendfile(q.fd, p.fd, NULL, 4), EINVAL);
    FAILS(sendfile(q.fd, p.fd, &at, 4), ESPIPE);
    FAILS(sendfile(file, p.fd, NULL, 4), EINVAL);
    FAILS(sendfile(q.fd, ends[0], NULL, 4), EINVAL);
    FAILS(sendfile(q.fd, ends[0], &at, 4), ESPIPE);
    FAILS(sendfile(q.fd, 9999, NULL, 4), EBADF);
    FAILS(sendfile(q.fd, ends[1], NULL, 4), EBADF);
    EQ(sendfile(q.fd, file, NULL, 0), 0);
    at = -1;
    FAILS(sendfile(q.fd, file, &at, 4), EINVAL);
    EQ(at, -1);
    FAILS(sendfile(q.fd, file, (off_t *)8, 4), EFAULT);
    int directory = OK(open("/", O_RDONLY));
    FAILS(sendfile(q.fd, directory, NULL, 4), EINVAL);
    // At the end of the file nothing is sent.
    at = 1000;
    EQ(sendfile(q.fd, file, &at, 4), 0);
    EQ(at, 1000);
    at = 990;
    EQ(sendfile(q.fd, file, &at, 4000), 10);
    EQ(at, 1000);
    EQ(lseek(file, 0, SEEK_CUR), 0);
    EQ(peer_call(P_RECV_PATTERN, q.peer, 1, 990, 10), 0);
    int zero = OK(open("/dev/zero", O_RDONLY));
    EQ(sendfile(q.fd, zero, NULL, 3000), 3000);
    char zeros[3000], none[3000] = {0};
    EQ(peer_recv(q.peer, zeros, sizeof zeros, MSG_WAITALL), sizeof zeros);
    CHECK(!memcmp(zeros, none, sizeof zeros));
    char buf[8];
    EQ(recv(p.fd, buf, sizeof buf, 0), 4);
    pair_close(p);
    pair_close(q);
}

static volatile sig_atomic_t pipes_broken;

static void count_broken(int signal) {
    (void)signal;
    pipes_broken++;
}

PAIR_CASE(splice_to_a_pipe_that_nobody_reads) {
    struct pair p = pair_open();
    int ends[2];
    OK(pipe(ends));
    signal(SIGPIPE, count_broken);
    close(ends[0]);
    // Before it waits for data.
    FAILS(splice(p.fd, NULL, ends[1], NULL, 100, 0), EPIPE);
    EQ(pipes_broken, 1);
    peer_says(p.peer, "kept");
    wait_readable(p.fd, 4);
    FAILS(splice(p.fd, NULL, ends[1], NULL, 100, 0), EPIPE);
    FAILS(splice(p.fd, NULL, ends[1], NULL, 100, SPLICE_F_NONBLOCK), EPIPE);
    EQ(pipes_broken, 3);
    nonblocking(p.fd, true);
    FAILS(splice(p.fd, NULL, ends[1], NULL, 100, 0), EPIPE);
    EQ(pipes_broken, 4);
    char buf[8];
    EQ(recv(p.fd, buf, sizeof buf, 0), 4);
    CHECK(!memcmp(buf, "kept", 4));
    signal(SIGPIPE, SIG_DFL);
    close(ends[1]);
    pair_close(p);
}

PAIR_CASE(sendfile_to_a_pipe) {
    struct pair p = pair_open();
    int ends[2];
    OK(pipe(ends));
    nonblocking(p.fd, true);
    FAILS(sendfile(ends[1], p.fd, NULL, 100), EAGAIN);
    nonblocking(p.fd, false);
    off_t at = 0;
    FAILS(sendfile(ends[1], p.fd, &at, 100), ESPIPE);
    FAILS(sendfile(ends[0], p.fd, NULL, 100), EBADF);
    EQ(sendfile(ends[1], p.fd, NULL, 0), 0);
    peer_begin(P_SEND_PATTERN, p.peer, 1, 0, 300000);
    char buf[65536];
    for (size_t got = 0; got < 300000;) {
        long n = OK(sendfile(ends[1], p.fd, NULL, 300000 - got));
        CHECK(n > 0 && n <= 65536);
        EQ(read(ends[0], buf, n), n);
        check_pattern(1, got, buf, n);
        got += n;
    }
    EQ(peer_end(), 0);
    // A full pipe that does not wait.
    nonblocking(ends[1], true);
    while (write(ends[1], buf, sizeof buf) > 0)
        continue;
    peer_says(p.peer, "kept");
    wait_readable(p.fd, 4);
    FAILS(sendfile(ends[1], p.fd, NULL, 4), EAGAIN);
    close(ends[0]);
    signal(SIGPIPE, SIG_IGN);
    FAILS(sendfile(ends[1], p.fd, NULL, 4), EPIPE);
    EQ(recv(p.fd, buf, sizeof buf, 0), 4);
    CHECK(!memcmp(buf, "kept", 4));
    close(ends[1]);
    OK(pipe(ends));
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    EQ(sendfile(ends[1], p.fd, NULL, 100), 0);
    close(ends[0]);
    close(ends[1]);
    pair_close(p);
}

// Positions that take more than 31 bits.
PAIR_CASE(sendfile_of_what_lies_far_behind) {
    struct pair p = pair_open();
    int file = OK(memfd_create("file", 0));
    const off64_t places[] = {0x7ffffff0, 0x80000000, 0xfffffff0};
    for (int i = 0; i < 3; i++) {
        char buf[100];
        pattern(1, i * sizeof buf, buf, sizeof buf);
        EQ(pwrite64(file, buf, sizeof buf, places[i]), sizeof buf);
        EQ(lseek64(file, places[i], SEEK_SET), places[i]);
        EQ(sendfile(p.fd, file, NULL, sizeof buf), sizeof buf);
        EQ(lseek64(file, 0, SEEK_CUR), places[i] + sizeof buf);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * sizeof buf, sizeof buf), 0);
    }
    close(file);
    pair_close(p);
}

PAIR_CASE(pipes_fed_by_vmsplice_and_tee) {
    struct pair p = pair_open();
    int a[2], b[2];
    OK(pipe(a));
    OK(pipe(b));
    for (int i = 0; i < 50; i++) {
        char bytes[3000];
        pattern(1, i * 3000, bytes, sizeof bytes);
        struct iovec iov = {bytes, sizeof bytes};
        EQ(vmsplice(a[1], &iov, 1, 0), 3000);
        EQ(tee(a[0], b[1], 3000, 0), 3000);
        EQ(splice(a[0], NULL, p.fd, NULL, 3000, SPLICE_F_MORE), 3000);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 3000, 3000), 0);
        // The copy goes the other way round.
        EQ(splice(b[0], NULL, p.fd, NULL, 3000, SPLICE_F_MOVE), 3000);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 3000, 3000), 0);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 3000, 3000), 0);
        char got[3000];
        for (size_t n = 0; n < sizeof got;) {
            ssize_t moved = OK(splice(p.fd, NULL, a[1], NULL, sizeof got - n, 0));
            EQ(tee(a[0], b[1], moved, 0), moved);
            EQ(read(a[0], got + n, moved), moved);
            EQ(read(b[0], got + n, moved), moved);
            n += moved;
        }
        check_pattern(2, i * 3000, got, sizeof got);
    }
    if (variant.warm)
        assert_smcd(p.fd);
    pair_close(p);
}

// Moves `n` bytes from a socket to another by a pipe, as proxies do.
static void relay(int from, int to, size_t n) {
    int ends[2];
    OK(pipe(ends));
    while (n > 0) {
        ssize_t in = OK(splice(from, NULL, ends[1], NULL, n, SPLICE_F_MOVE));
        CHECK(in > 0);
        n -= in;
        while (in > 0) {
            ssize_t out = OK(splice(ends[0], NULL, to, NULL, in, SPLICE_F_MOVE | SPLICE_F_MORE));
            CHECK(out > 0);
            in -= out;
        }
    }
    close(ends[0]);
    close(ends[1]);
}

static void *recv_in_thread(void *arg) {
    struct pair *q = arg;
    recv_all(q->fd, 2, 0, 3 << 20);
    return NULL;
}

PAIR_CASE(proxy_of_two_connections) {
    // The peer sends by one, what comes is relayed into the other, whose far end is ours.
    struct pair p = pair_open();
    int out, in;
    connect_here(&out, &in);
    warm_here(out, in);
    pthread_t thread;
    struct pair q = {in, 0};
    EQ(pthread_create(&thread, NULL, recv_in_thread, &q), 0);
    peer_begin(P_SEND_PATTERN, p.peer, 2, 0, 3 << 20);
    relay(p.fd, out, 3 << 20);
    EQ(peer_end(), 0);
    EQ(pthread_join(thread, NULL), 0);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    int ends[2];
    OK(pipe(ends));
    EQ(splice(p.fd, NULL, ends[1], NULL, 100, 0), 0);
    close(out);
    close(in);
    pair_close(p);
}

PAIR_CASE(splice_into_a_full_pipe_and_from_a_closed_one) {
    struct pair p = pair_open();
    int ends[2];
    OK(pipe(ends));
    nonblocking(ends[1], true);
    char page[4096] = {0};
    while (write(ends[1], page, sizeof page) > 0) {
    }
    peer_says(p.peer, "kept");
    wait_readable(p.fd, 4);
    FAILS(splice(p.fd, NULL, ends[1], NULL, 4, SPLICE_F_NONBLOCK), EAGAIN);
    // The pipe's O_NONBLOCK counts as well.
    FAILS(splice(p.fd, NULL, ends[1], NULL, 4, 0), EAGAIN);
    close(ends[0]);
    signal(SIGPIPE, SIG_IGN);
    FAILS(splice(p.fd, NULL, ends[1], NULL, 4, 0), EPIPE);
    char buf[8];
    EQ(recv(p.fd, buf, sizeof buf, 0), 4);
    OK(pipe(ends));
    FAILS(splice(ends[0], NULL, p.fd, NULL, 4, SPLICE_F_NONBLOCK), EAGAIN);
    nonblocking(ends[0], true);
    FAILS(splice(ends[0], NULL, p.fd, NULL, 4, 0), EAGAIN);
    close(ends[1]);
    EQ(splice(ends[0], NULL, p.fd, NULL, 4, 0), 0);
    pair_close(p);
}

PAIR_CASE(file_sent_to_a_peer_that_is_gone) {
    struct pair p = pair_open();
    int file = file_of(100000), ends[2];
    OK(pipe(ends));
    signal(SIGPIPE, SIG_IGN);
    OK(peer_call(P_RESET, p.peer, 0, 0, 0));
    wait_events(p.fd, POLLIN, POLLIN | POLLERR | POLLHUP);
    EQ(write(ends[1], "x", 1), 1);
    FAILS(splice(ends[0], NULL, p.fd, NULL, 1, 0), ECONNRESET);
    FAILS(sendfile(p.fd, file, NULL, 100), EPIPE);
    FAILS(splice(ends[0], NULL, p.fd, NULL, 1, 0), EPIPE);
    EQ(splice(p.fd, NULL, ends[1], NULL, 100, 0), 0);
    close(p.fd);
}

PAIR_CASE(splice_waits_for_the_socket_as_the_socket_says) {
    struct pair p = pair_open();
    int ends[2];
    OK(pipe(ends));
    timeout_option(p.fd, SO_RCVTIMEO, 0.05);
    double start = now();
    // SPLICE_F_NONBLOCK is the pipe's.
    FAILS(splice(p.fd, NULL, ends[1], NULL, 10, SPLICE_F_NONBLOCK), EAGAIN);
    CHECK(now() - start >= 0.045);
    timeout_option(p.fd, SO_RCVTIMEO, 0);
    nonblocking(p.fd, true);
    FAILS(splice(p.fd, NULL, ends[1], NULL, 10, 0), EAGAIN);
    peer_says(p.peer, "x");
    wait_readable(p.fd, 1);
    EQ(splice(p.fd, NULL, ends[1], NULL, 10, 0), 1);
    pair_close(p);
}

PAIR_CASE(splice_takes_all_that_is_there) {
    struct pair p = pair_open();
    int ends[2];
    OK(pipe(ends));
    // Something is always left, so that it goes on round the ring, whose end is in the middle of a message.
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 1999), 0);
    for (int i = 0; i < 600; i++) {
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, (i + 1) * 1999, 1999), 0);
        wait_readable(p.fd, 2 * 1999);
        EQ(splice(p.fd, NULL, ends[1], NULL, 1999, 0), 1999);
        char got[1999];
        EQ(read(ends[0], got, sizeof got), sizeof got);
        check_pattern(2, i * 1999, got, sizeof got);
    }
    recv_all(p.fd, 2, 600 * 1999, 1999);
    close(ends[0]);
    close(ends[1]);
    pair_close(p);
}

// A pipe whose room another thread takes and gives back. What came out of it but zeros is checked against a stream.
struct contested {
    int ends[2];
    uint64_t got;
    volatile bool ends_now;
};

static void drain_contested(struct contested *c) {
    unsigned char page[4096], one;
    for (ssize_t n; (n = read(c->ends[0], page, sizeof page)) > 0;)
        for (ssize_t i = 0; i < n; i++)
            if (page[i] != 0) {
                pattern(2, c->got++, &one, 1);
                EQ(page[i], one == 0 ? 1 : one);
            }
}

static void *fills_and_drains(void *arg) {
    struct contested *c = arg;
    static const char zeros[4096];
    while (!c->ends_now) {
        while (write(c->ends[1], zeros, sizeof zeros) > 0)
            continue;
        drain_contested(c);
    }
    return NULL;
}

PAIR_CASE(splice_to_a_pipe_that_another_thread_fills) {
    // A ring takes less.
    const uint64_t all = variant.warm ? 8000 : 30000;
    struct pair p = pair_open();
    struct contested c = {0};
    OK(pipe2(c.ends, O_NONBLOCK));
    // They are in TCP's span still when the connection has changed over.
    for (uint64_t at = 0; at < all; at += 2000) {
        unsigned char bytes[2000];
        pattern(2, at, bytes, sizeof bytes);
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = bytes[i] == 0 ? 1 : bytes[i];
        EQ(peer_send(p.peer, bytes, sizeof bytes, 0), sizeof bytes);
    }
    for (int i = 0; i < 200; i++) {
        send_all(p.fd, 1, i, 1);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i, 1), 0);
    }
    pthread_t thread;
    EQ(pthread_create(&thread, NULL, fills_and_drains, &c), 0);
    uint64_t moved = 0;
    while (moved < all) {
        ssize_t n = splice(p.fd, NULL, c.ends[1], NULL, 3, SPLICE_F_NONBLOCK);
        if (n < 0)
            EQ(errno, EAGAIN);
        else
            moved += n;
    }
    c.ends_now = true;
    EQ(pthread_join(thread, NULL), 0);
    drain_contested(&c);
    // What splice took from the connection is in the pipe, all of it.
    EQ(c.got, all);
    close(c.ends[0]);
    close(c.ends[1]);
    pair_close(p);
}

PAIR_CASE(splice_behind_a_peer_that_went_back_to_tcp) {
    struct pair p = pair_open();
    int ends[2];
    OK(pipe(ends));
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 1000), 0);
    wait_readable(p.fd, 1000);
    // The kernel has to see its bytes from now on.
    EQ(peer_call(P_OPTION, p.peer, SOL_SOCKET, SO_TIMESTAMP, 1), 0);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 1000, 1000), 0);
    wait_readable(p.fd, 2000);
    for (size_t got = 0; got < 2000;) {
        char bytes[2000];
        ssize_t n = OK(splice(p.fd, NULL, ends[1], NULL, 700, 0));
        CHECK(n > 0);
        EQ(read(ends[0], bytes, n), n);
        check_pattern(2, got, bytes, n);
        got += n;
    }
    close(ends[0]);
    close(ends[1]);
    pair_close(p);
}
