// What is submitted by a ring is looked at: registrations with epoll sets, and connections that it uses.
#include "peer.h"
#include "rings.h"

// Where it went there first.
static void in_ring(int fd) {
    if (variant.warm)
        assert_smcd(fd);
}

// The other end follows at its next calls.
static void is_tcp(struct pair p) {
    pair_talk(p, 100000, 4);
    assert_tcp(p.fd);
}

// --- epoll_ctl

// As `one_event`. A ring's own work may end a wait that sleeps (EINTR), also over TCP.
static void event_comes(int ep, uint32_t events, uint64_t data) {
    struct epoll_event got[4];
    int n;
    do
        n = epoll_wait(ep, got, 4, 10000);
    while (n < 0 && errno == EINTR);
    EQ(n, 1);
    EQ(got[0].events, events);
    EQ(got[0].data.u64, data);
}

struct ctl {
    struct ring *ring;
    int ep;
    // The kernel reads them when it takes the entries.
    struct epoll_event events[64];
    unsigned next;
};

static struct io_uring_sqe *prepare(struct ctl *c, int op, int fd, uint32_t events, uint64_t data) {
    struct epoll_event *event = &c->events[c->next++ % 64];
    *event = (struct epoll_event){.events = events, .data.u64 = data};
    struct io_uring_sqe *sqe = entry(c->ring);
    io_uring_prep_epoll_ctl(sqe, c->ep, fd, op, event);
    return sqe;
}

static int ctl(struct ctl *c, int op, int fd, uint32_t events, uint64_t data) {
    prepare(c, op, fd, events, data)->user_data = data;
    return one_result(c->ring, data);
}

static void registrations(const struct way *way) {
    struct ring ring;
    if (!ring_open(&ring, way, 16, 0))
        return;
    struct pair p = pair_open();
    in_ring(p.fd);
    struct ctl c = {.ring = &ring, .ep = OK(epoll_create1(0))};
    EQ(ctl(&c, EPOLL_CTL_ADD, p.fd, EPOLLIN, 7), 0);
    no_event(c.ep);
    for (int round = 0; round < 20; round++) {
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, round * 100, 100), 0);
        event_comes(c.ep, EPOLLIN, 7);
        recv_all(p.fd, 2, round * 100, 100);
        no_event(c.ep);
    }
    EQ(ctl(&c, EPOLL_CTL_MOD, p.fd, EPOLLIN | EPOLLOUT, 1ull << 60), 0);
    event_comes(c.ep, EPOLLOUT, 1ull << 60);
    EQ(ctl(&c, EPOLL_CTL_MOD, p.fd, EPOLLIN | EPOLLONESHOT, 9), 0);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 2000, 100), 0);
    event_comes(c.ep, EPOLLIN, 9);
    no_event(c.ep);
    EQ(ctl(&c, EPOLL_CTL_MOD, p.fd, EPOLLIN, 10), 0);
    event_comes(c.ep, EPOLLIN, 10);
    EQ(ctl(&c, EPOLL_CTL_DEL, p.fd, 0, 11), 0);
    no_event(c.ep);
    EQ(ctl(&c, EPOLL_CTL_ADD, p.fd, EPOLLIN | EPOLLET, 12), 0);
    event_comes(c.ep, EPOLLIN, 12);
    no_event(c.ep);
    recv_all(p.fd, 2, 2000, 100);
    // A wait that sleeps is woken.
    peer_begin(P_SEND_PATTERN, p.peer, 2, 2100, 100);
    event_comes(c.ep, EPOLLIN, 12);
    EQ(peer_end(), 0);
    recv_all(p.fd, 2, 2100, 100);
    in_ring(p.fd);
    close(c.ep);
    pair_close(p);
    ring_close(&ring);
}

REMOTE_CASE(registrations_by_a_ring_made_by_number) {
    registrations(&BY_NUMBER);
}

REMOTE_CASE(registrations_by_a_ring_of_liburings) {
    registrations(&BY_LIBURING);
}

// Each entry's result is the system call's, with its user data.
static void results(const struct way *way) {
    struct ring ring;
    if (!ring_open(&ring, way, 32, 0))
        return;
    struct pair p = pair_open();
    struct ctl c = {.ring = &ring, .ep = OK(epoll_create1(0))};
    int pipes[2];
    OK(pipe(pipes));
    int file = OK(open("/proc/self/exe", O_RDONLY)), unused = OK(dup(file));
    EQ(close(unused), 0);
    prepare(&c, EPOLL_CTL_MOD, p.fd, EPOLLIN, 1)->user_data = 100;
    prepare(&c, EPOLL_CTL_DEL, p.fd, 0, 0)->user_data = 101;
    prepare(&c, EPOLL_CTL_ADD, p.fd, EPOLLIN, 2)->user_data = 102;
    prepare(&c, EPOLL_CTL_ADD, p.fd, EPOLLIN, 3)->user_data = 103;
    prepare(&c, EPOLL_CTL_ADD, unused, EPOLLIN, 4)->user_data = 104;
    prepare(&c, EPOLL_CTL_ADD, file, EPOLLIN, 5)->user_data = 105;
    prepare(&c, EPOLL_CTL_ADD, pipes[0], EPOLLIN, 6)->user_data = 106;
    prepare(&c, 77, p.fd, EPOLLIN, 7)->user_data = 107;
    prepare(&c, EPOLL_CTL_ADD, c.ep, EPOLLIN, 8)->user_data = 108;
    prepare(&c, EPOLL_CTL_MOD, p.fd, EPOLLOUT, 9)->user_data = 109;
    prepare(&c, EPOLL_CTL_DEL, p.fd, 0, 0)->user_data = 110;
    prepare(&c, EPOLL_CTL_MOD, p.fd, EPOLLIN, 10)->user_data = 111;
    prepare(&c, EPOLL_CTL_DEL, p.fd, 0, 0)->user_data = 112;
    prepare(&c, EPOLL_CTL_ADD, p.fd, EPOLLIN, 11)->user_data = 113;
    static const int expected[] = {-ENOENT, -ENOENT, 0, -EEXIST, -EBADF, -EPERM, 0, -EINVAL, -EINVAL, 0, 0,
        -ENOENT, -ENOENT, 0};
    const int n = sizeof expected / sizeof *expected;
    EQ(submit_and_wait(&ring, n), n);
    for (int i = 0; i < n; i++) {
        uint64_t data;
        EQ(next_result(&ring, &data), expected[i]);
        EQ(data, 100 + i);
    }
    EQ(no_result(&ring), true);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 10), 0);
    event_comes(c.ep, EPOLLIN, 11);
    // Where an event is to be read, and its address is none.
    io_uring_prep_epoll_ctl(entry(&ring), c.ep, p.fd, EPOLL_CTL_MOD, NULL);
    EQ(one_result(&ring, 0), -EFAULT);
    // A set that is none.
    io_uring_prep_epoll_ctl(entry(&ring), file, p.fd, EPOLL_CTL_ADD, &c.events[0]);
    EQ(one_result(&ring, 0), -EINVAL);
    in_ring(p.fd);
    close(file);
    close(pipes[0]);
    close(pipes[1]);
    close(c.ep);
    pair_close(p);
    ring_close(&ring);
}

REMOTE_CASE(results_of_registrations_by_number) {
    results(&BY_NUMBER);
}

REMOTE_CASE(results_of_registrations_by_liburing) {
    results(&BY_LIBURING);
}

// What follows a failed entry of a chain is cancelled, and not done.
REMOTE_CASE(linked_registrations) {
    struct ring ring;
    if (!ring_open(&ring, &BY_NUMBER, 32, 0))
        return;
    struct pair p = pair_open();
    struct ctl c = {.ring = &ring, .ep = OK(epoll_create1(0))};
    static const struct {
        int op;
        uint64_t data;
        unsigned flags;
    } entries[7] = {
        {EPOLL_CTL_ADD, 1, IOSQE_IO_LINK},
        {EPOLL_CTL_MOD, 2, IOSQE_IO_LINK},
        {EPOLL_CTL_ADD, 3, IOSQE_IO_LINK},
        {EPOLL_CTL_MOD, 4, IOSQE_IO_LINK},
        {EPOLL_CTL_DEL, 0, 0},
        // Another chain, whose entries follow failed ones all the same.
        {EPOLL_CTL_ADD, 5, IOSQE_IO_HARDLINK},
        {EPOLL_CTL_MOD, 6, 0},
    };
    for (int i = 0; i < 7; i++) {
        struct io_uring_sqe *sqe = prepare(&c, entries[i].op, p.fd, EPOLLOUT, entries[i].data);
        sqe->flags = entries[i].flags;
        sqe->user_data = i;
    }
    static const int expected[] = {0, 0, -EEXIST, -ECANCELED, -ECANCELED, -EEXIST, 0};
    EQ(submit_and_wait(&ring, 7), 7);
    // What is cancelled completes last.
    int got[7];
    for (int i = 0; i < 7; i++) {
        uint64_t number;
        int value = next_result(&ring, &number);
        CHECK(number < 7);
        got[number] = value;
    }
    for (int i = 0; i < 7; i++)
        EQ(got[i], expected[i]);
    event_comes(c.ep, EPOLLOUT, 6);
    in_ring(p.fd);
    close(c.ep);
    pair_close(p);
    ring_close(&ring);
}

// Some entries of what is prepared, then the others; successes that nobody wants to hear of.
REMOTE_CASE(registrations_submitted_in_parts) {
    struct ring ring;
    if (!ring_open(&ring, &BY_NUMBER, 16, 0))
        return;
    struct pair p = pair_open();
    struct ctl c = {.ring = &ring, .ep = OK(epoll_create1(0))};
    for (int round = 0; round < 50; round++) {
        prepare(&c, EPOLL_CTL_ADD, p.fd, EPOLLOUT, 1);
        prepare(&c, EPOLL_CTL_MOD, p.fd, EPOLLOUT, 2);
        prepare(&c, EPOLL_CTL_MOD, p.fd, EPOLLOUT, 3)->flags = IOSQE_CQE_SKIP_SUCCESS;
        prepare(&c, EPOLL_CTL_ADD, p.fd, EPOLLOUT, 4)->flags = IOSQE_CQE_SKIP_SUCCESS;
        prepare(&c, EPOLL_CTL_DEL, p.fd, 0, 0);
        EQ(submit_some(&ring, 1, 1), 1);
        EQ(next_result(&ring, NULL), 0);
        event_comes(c.ep, EPOLLOUT, 1);
        EQ(submit_some(&ring, 1, 1), 1);
        EQ(next_result(&ring, NULL), 0);
        event_comes(c.ep, EPOLLOUT, 2);
        EQ(submit_some(&ring, 2, 1), 2);
        EQ(next_result(&ring, NULL), -EEXIST);
        EQ(no_result(&ring), true);
        event_comes(c.ep, EPOLLOUT, 3);
        EQ(submit_some(&ring, 9, 1), 1);
        EQ(next_result(&ring, NULL), 0);
        no_event(c.ep);
    }
    in_ring(p.fd);
    close(c.ep);
    pair_close(p);
    ring_close(&ring);
}

// --- connections that a ring uses

// Reads and writes of one connection by the ring; another one stays where it is.
static void streams(const struct way *way, bool registered) {
    struct ring ring;
    if (!ring_open(&ring, way, 16, 0))
        return;
    struct pair p = pair_open(), other = pair_open();
    in_ring(p.fd);
    // Unread in both directions.
    send_all(p.fd, 1, 0, 3000);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 5000), 0);
    wait_events(p.fd, POLLIN, POLLIN);
    recv_all(p.fd, 2, 0, 1000);
    if (registered)
        EQ(register_files(&ring, &p.fd, 1), 0);
    int fd = registered ? 0 : p.fd, flags = registered ? IOSQE_FIXED_FILE : 0;
    char buf[4096];
    for (size_t at = 1000; at < 5000;) {
        struct io_uring_sqe *sqe = entry(&ring);
        io_uring_prep_recv(sqe, fd, buf, 5000 - at < sizeof buf ? 5000 - at : sizeof buf, 0);
        sqe->flags = flags;
        int n = one_result(&ring, sqe->user_data);
        CHECK(n > 0);
        check_pattern(2, at, buf, n);
        at += n;
    }
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 3000), 0);
    is_tcp(p);
    for (int i = 0; i < 20; i++) {
        pattern(1, 3000 + i * 500, buf, 500);
        struct io_uring_sqe *sqe = entry(&ring);
        io_uring_prep_send(sqe, fd, buf, 500, 0);
        sqe->flags = flags;
        EQ(one_result(&ring, sqe->user_data), 500);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 3000 + i * 500, 500), 0);
    }
    in_ring(other.fd);
    EQ(peer_call(P_SEND_PATTERN, other.peer, 2, 0, 100), 0);
    recv_all(other.fd, 2, 0, 100);
    pair_close(other);
    pair_close(p);
    ring_close(&ring);
}

REMOTE_CASE(connection_read_and_written_by_number) {
    streams(&BY_NUMBER, false);
}

REMOTE_CASE(connection_read_and_written_by_liburing) {
    streams(&BY_LIBURING, false);
}

REMOTE_CASE(connection_registered_by_number) {
    streams(&BY_NUMBER, true);
}

REMOTE_CASE(connection_registered_by_liburing) {
    streams(&BY_LIBURING, true);
}

REMOTE_CASE(connection_polled_by_a_ring) {
    struct ring ring;
    if (!ring_open(&ring, &BY_NUMBER, 16, 0))
        return;
    struct pair p = pair_open();
    in_ring(p.fd);
    io_uring_prep_poll_add(entry(&ring), p.fd, POLLIN);
    EQ(submit_some(&ring, 1, 0), 1);
    EQ(no_result(&ring), true);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 100), 0);
    EQ(submit_some(&ring, 0, 1), 0);
    EQ(next_result(&ring, NULL), POLLIN);
    recv_all(p.fd, 2, 0, 100);
    is_tcp(p);
    pair_close(p);
    ring_close(&ring);
}

// A message that passes a connection on, and a number closed by the ring.
REMOTE_CASE(connection_passed_on_and_closed_by_a_ring) {
    struct ring ring;
    if (!ring_open(&ring, &BY_NUMBER, 16, 0))
        return;
    struct pair p = pair_open();
    in_ring(p.fd);
    int channel[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    char byte = 'x';
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec iov = {&byte, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&msg);
    *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))};
    memcpy(CMSG_DATA(header), &p.fd, sizeof(int));
    io_uring_prep_sendmsg(entry(&ring), channel[0], &msg, 0);
    EQ(one_result(&ring, 0), 1);
    io_uring_prep_close(entry(&ring), p.fd);
    EQ(one_result(&ring, 0), 0);
    FAILS(fcntl(p.fd, F_GETFD), EBADF);
    int fd = receive_fd(channel[1]);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 100), 0);
    recv_all(fd, 2, 0, 100);
    io_uring_prep_close(entry(&ring), fd);
    EQ(one_result(&ring, 0), 0);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 1, 0, 0), 0);
    EQ(peer_call(P_CLOSE, p.peer, 0, 0, 0), 0);
    close(channel[0]);
    close(channel[1]);
    ring_close(&ring);
}

CASE(connection_accepted_by_a_ring) {
    struct ring ring;
    if (!ring_open(&ring, &BY_NUMBER, 16, 0))
        return;
    uint16_t port;
    int listener = listen_here(&port), client = connect_to(port);
    io_uring_prep_accept(entry(&ring), listener, NULL, NULL, 0);
    int server = OK(one_result(&ring, 0));
    for (int i = 0; i < 100; i++) {
        send_all(client, 1, i * 100, 100);
        recv_all(server, 1, i * 100, 100);
        send_all(server, 2, i * 100, 100);
        recv_all(client, 2, i * 100, 100);
    }
    close(client);
    recv_to_eof(server, 1, 10000, 0);
    close(server);
    close(listener);
    ring_close(&ring);
}

// --- rings themselves

// Its last number closed, nothing of the library's keeps a ring and what it holds alive.
static void is_gone(int number_of_names) {
    struct ring ring;
    if (!ring_open(&ring, &BY_NUMBER, 16, 0))
        return;
    int pipes[2], names[3];
    OK(pipe(pipes));
    EQ(register_files(&ring, &pipes[1], 1), 0);
    close(pipes[1]);
    io_uring_prep_nop(entry(&ring));
    EQ(one_result(&ring, 0), 0);
    for (int i = 0; i < number_of_names; i++)
        names[i] = OK(dup(ring.u.ring_fd));
    struct pollfd poll_in = {.fd = pipes[0], .events = POLLIN};
    ring_close(&ring);
    for (int i = 0; i < number_of_names; i++) {
        EQ(poll(&poll_in, 1, 0), 0);
        close(names[i]);
    }
    EQ(poll(&poll_in, 1, 10000), 1);
    EQ(poll_in.revents, POLLHUP);
    close(pipes[0]);
}

CASE(closed_ring_is_gone) {
    is_gone(0);
}

CASE(ring_of_several_numbers_is_gone) {
    is_gone(3);
}

// A thread of the kernel's takes the entries: nobody sees what they do.
REMOTE_CASE(ring_that_cannot_be_looked_into) {
    struct pair p = pair_open();
    in_ring(p.fd);
    struct ring ring;
    if (!ring_open(&ring, &BY_NUMBER, 16, IORING_SETUP_SQPOLL))
        return;
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 100), 0);
    recv_all(p.fd, 2, 0, 100);
    is_tcp(p);
    pair_close(p);
    ring_close(&ring);
}

// Files and timers are the kernel's: no connection leaves the ring for them.
REMOTE_CASE(files_and_timers_of_a_ring) {
    struct ring ring;
    if (!ring_open(&ring, &BY_LIBURING, 16, 0))
        return;
    struct pair p = pair_open();
    in_ring(p.fd);
    int file = OK(open("/proc/self/exe", O_RDONLY));
    unsigned char magic[4];
    io_uring_prep_read(entry(&ring), file, magic, 4, 0);
    EQ(one_result(&ring, 0), 4);
    CHECK(memcmp(magic, "\177ELF", 4) == 0);
    struct __kernel_timespec soon = {.tv_nsec = 1000};
    io_uring_prep_timeout(entry(&ring), &soon, 0, 0);
    EQ(one_result(&ring, 0), -ETIME);
    io_uring_prep_close(entry(&ring), file);
    EQ(one_result(&ring, 0), 0);
    EQ(pair_talk(p, 0, 100), 1000);
    assert_smcd(p.fd);
    pair_close(p);
    ring_close(&ring);
}

static void uses_inherited(void *arg) {
    struct ring *ring = arg;
    for (int i = 0; i < 10; i++) {
        io_uring_prep_nop(entry(ring));
        EQ(one_result(ring, 0), 0);
    }
    ring_close(ring);
    EQ(ring_open(ring, &BY_NUMBER, 8, 0), true);
    io_uring_prep_nop(entry(ring));
    EQ(one_result(ring, 0), 0);
}

// Parent and child have it, one after the other.
REMOTE_CASE(ring_and_a_fork) {
    struct ring ring;
    if (!ring_open(&ring, &BY_NUMBER, 16, 0))
        return;
    struct pair p = pair_open();
    struct ctl c = {.ring = &ring, .ep = OK(epoll_create1(0))};
    EQ(ctl(&c, EPOLL_CTL_ADD, p.fd, EPOLLIN, 1), 0);
    child_succeeds(child(uses_inherited, &ring));
    // What the child has used of it is used here, too.
    ring.u.sq.sqe_head = ring.u.sq.sqe_tail = *ring.u.sq.ktail;
    EQ(ctl(&c, EPOLL_CTL_MOD, p.fd, EPOLLOUT, 2), 0);
    event_comes(c.ep, EPOLLOUT, 2);
    close(c.ep);
    pair_close(p);
    ring_close(&ring);
}
