// Connections whose program turns to io_uring.
#include "peer.h"

#include <liburing.h>

static int result(struct io_uring *ring) {
    struct io_uring_cqe *cqe;
    EQ(io_uring_submit(ring), 1);
    EQ(io_uring_wait_cqe(ring, &cqe), 0);
    int value = cqe->res;
    io_uring_cqe_seen(ring, cqe);
    return value;
}

static void recv_by_uring(struct io_uring *ring, int fd, uint64_t seed, uint64_t at, size_t n) {
    char buf[4096];
    for (size_t got = 0; got < n;) {
        io_uring_prep_recv(io_uring_get_sqe(ring), fd, buf, n - got < sizeof buf ? n - got : sizeof buf, 0);
        int some = result(ring);
        CHECK(some > 0);
        check_pattern(seed, at + got, buf, some);
        got += some;
    }
}

static void send_by_uring(struct io_uring *ring, int fd, uint64_t seed, uint64_t at, size_t n) {
    char buf[4096];
    CHECK(n <= sizeof buf);
    pattern(seed, at, buf, n);
    io_uring_prep_send(io_uring_get_sqe(ring), fd, buf, n, 0);
    EQ(result(ring), n);
}

// A kernel may be told to refuse rings (kernel.io_uring_disabled, seccomp).
static bool is_allowed(void) {
    struct io_uring_params params = {0};
    // Not by libc's syscall: this program has not made a ring yet.
    long fd;
    __asm__ volatile("syscall"
                     : "=a"(fd)
                     : "a"(SYS_io_uring_setup), "D"(8), "S"(&params)
                     : "rcx", "r11", "memory");
    if (fd == -ENOSYS || fd == -EPERM) {
        fprintf(stderr, "io_uring is not allowed here\n");
        return false;
    }
    close(OK(fd));
    return true;
}

static void by_liburing(struct io_uring *ring) {
    EQ(io_uring_queue_init(8, ring, 0), 0);
}

static void by_number(struct io_uring *ring) {
    struct io_uring_params params = {0};
    int fd = OK(syscall(SYS_io_uring_setup, 8, &params));
    memset(ring, 0, sizeof *ring);
    EQ(io_uring_queue_mmap(fd, &params, ring), 0);
    for (unsigned i = 0; i < params.sq_entries; i++)
        ring->sq.array[i] = i;
}

// Unread bytes in both directions when the ring is made.
static void turns_to_uring(void (*make)(struct io_uring *)) {
    if (!is_allowed())
        return;
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 3000);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 5000), 0);
    wait_readable(p.fd, 5000);
    recv_all(p.fd, 2, 0, 1000);
    struct io_uring ring;
    make(&ring);
    recv_by_uring(&ring, p.fd, 2, 1000, 4000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 3000), 0);
    for (int i = 0; i < 20; i++) {
        send_by_uring(&ring, p.fd, 1, 3000 + i * 500, 500);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 3000 + i * 500, 500), 0);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 5000 + i * 700, 700), 0);
        recv_by_uring(&ring, p.fd, 2, 5000 + i * 700, 700);
    }
    pair_close(p);
    io_uring_queue_exit(&ring);
}

REMOTE_CASE(connection_of_a_program_that_makes_a_ring_by_liburing) {
    turns_to_uring(by_liburing);
}

REMOTE_CASE(connection_of_a_program_that_makes_a_ring_by_number) {
    turns_to_uring(by_number);
}

// It goes to the ring as any other, and back where the io_uring uses it.
static void made_after_the_ring(int family, int protocol) {
    if (!is_allowed())
        return;
    struct io_uring ring;
    by_liburing(&ring);
    variant.warm = false;
    EQ(peer_call(P_POLL, -1, 0, 0, 0), 0);
    struct pair p = pair_of(stream(family, protocol, 0), -1);
    for (int i = 0; i < 100; i++) {
        send_all(p.fd, 1, i * 100, 100);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 100, 100), 0);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 100, 100), 0);
        recv_all(p.fd, 2, i * 100, 100);
    }
    assert_smcd(p.fd);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 10000, 3000), 0);
    recv_by_uring(&ring, p.fd, 2, 10000, 3000);
    send_by_uring(&ring, p.fd, 1, 10000, 3000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 10000, 3000), 0);
    pair_talk(p, 20000, 4);
    assert_tcp(p.fd);
    pair_close(p);
    io_uring_queue_exit(&ring);
}

PAIR_CASE(connection_made_after_the_ring) {
    made_after_the_ring(AF_INET, 0);
}

PAIR_CASE(native_connection_made_after_the_ring) {
    made_after_the_ring(AF_SMC, SMCPROTO_SMC);
}
