// Several threads on one connection, and a thread for each connection.
#include "peer.h"

#include <sys/mman.h>
#include <sys/sendfile.h>

static void *serve_echo(void *arg) {
    int fd = (int)(intptr_t)arg;
    char buf[8192];
    for (ssize_t n; (n = OK(recv(fd, buf, sizeof buf, 0))) > 0;)
        for (ssize_t sent = 0; sent < n;)
            sent += OK(send(fd, buf + sent, n - sent, 0));
    close(fd);
    return NULL;
}

struct server {
    int listener, count;
};

static void *serve_threads(void *arg) {
    struct server *s = arg;
    pthread_t threads[64];
    for (int i = 0; i < s->count; i++) {
        intptr_t fd = OK(accept(s->listener, NULL, NULL));
        EQ(pthread_create(&threads[i], NULL, serve_echo, (void *)fd), 0);
    }
    for (int i = 0; i < s->count; i++)
        EQ(pthread_join(threads[i], NULL), 0);
    return NULL;
}

struct client {
    uint16_t port;
    int number;
};

static void *be_client(void *arg) {
    struct client *c = arg;
    int fd = connect_to(c->port);
    for (int i = 0; i < 200; i++) {
        size_t n = 1 + (i * 37 + c->number) % 5000;
        send_all(fd, c->number, i * 5000, n);
        recv_all(fd, c->number, i * 5000, n);
    }
    if (c->number == 0)
        assert_smcd(fd);
    OK(shutdown(fd, SHUT_WR));
    recv_to_eof(fd, 0, 0, 0);
    close(fd);
    return NULL;
}

CASE(thread_per_connection) {
    struct server s = {.count = 32};
    uint16_t port;
    s.listener = listen_here(&port);
    pthread_t server, threads[32];
    struct client clients[32];
    EQ(pthread_create(&server, NULL, serve_threads, &s), 0);
    for (int i = 0; i < 32; i++) {
        clients[i] = (struct client){port, i};
        EQ(pthread_create(&threads[i], NULL, be_client, &clients[i]), 0);
    }
    for (int i = 0; i < 32; i++)
        EQ(pthread_join(threads[i], NULL), 0);
    EQ(pthread_join(server, NULL), 0);
}

enum { RECORDS = 40000 };

struct readers {
    int fd;
    _Atomic int total;
    _Atomic char seen[RECORDS];
};

// Reads four-byte records; TCP gives each byte to one reader, and short reads fall on record borders here.
static void *read_records(void *arg) {
    struct readers *r = arg;
    uint32_t record;
    for (ssize_t n; (n = OK(recv(r->fd, &record, sizeof record, MSG_WAITALL))) > 0;) {
        EQ(n, sizeof record);
        CHECK(record < RECORDS);
        EQ(r->seen[record]++, 0);
        r->total++;
    }
    return NULL;
}

PAIR_CASE(two_threads_read_one_connection) {
    static struct readers r;
    struct pair p = pair_open();
    r.fd = p.fd;
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        EQ(pthread_create(&threads[i], NULL, read_records, &r), 0);
    uint32_t records[RECORDS];
    for (int i = 0; i < RECORDS; i++)
        records[i] = i;
    for (size_t at = 0; at < sizeof records;) {
        EQ(peer_send(p.peer, (char *)records + at, 4000, 0), 4000);
        at += 4000;
    }
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    for (int i = 0; i < 2; i++)
        EQ(pthread_join(threads[i], NULL), 0);
    EQ(r.total, RECORDS);
    pair_close(p);
}

struct writer {
    int fd, number;
};

static void *write_records(void *arg) {
    struct writer *w = arg;
    unsigned char record[64];
    for (int i = 0; i < 200; i++) {
        memset(record, w->number * 64 + i % 64, sizeof record);
        EQ(send(w->fd, record, sizeof record, 0), sizeof record);
    }
    return NULL;
}

PAIR_CASE(records_of_two_writing_threads_stay_whole) {
    struct pair p = pair_open();
    pthread_t threads[3];
    struct writer w[3];
    for (int i = 0; i < 3; i++) {
        w[i] = (struct writer){p.fd, i};
        EQ(pthread_create(&threads[i], NULL, write_records, &w[i]), 0);
    }
    int next[3] = {0};
    for (int i = 0; i < 600; i++) {
        unsigned char record[64];
        EQ(peer_recv(p.peer, record, 64, MSG_WAITALL), 64);
        int number = record[0] / 64;
        CHECK(number < 3);
        for (int k = 0; k < 64; k++)
            EQ(record[k], number * 64 + next[number] % 64);
        next[number]++;
    }
    for (int i = 0; i < 3; i++)
        EQ(pthread_join(threads[i], NULL), 0);
    pair_close(p);
}

struct stream {
    int fd;
    uint64_t seed;
    size_t n;
};

static void *send_stream(void *arg) {
    struct stream *s = arg;
    send_all(s->fd, s->seed, 0, s->n);
    return NULL;
}

static void *recv_stream(void *arg) {
    struct stream *s = arg;
    recv_all(s->fd, s->seed, 0, s->n);
    return NULL;
}

CASE(one_thread_reads_while_another_writes) {
    int fds[2];
    connect_here(&fds[0], &fds[1]);
    warm_here(fds[0], fds[1]);
    pthread_t threads[4];
    struct stream s[2] = {{fds[0], 1, 32 << 20}, {fds[1], 2, 32 << 20}};
    struct stream r[2] = {{fds[1], 1, 32 << 20}, {fds[0], 2, 32 << 20}};
    for (int i = 0; i < 2; i++) {
        EQ(pthread_create(&threads[i], NULL, send_stream, &s[i]), 0);
        EQ(pthread_create(&threads[2 + i], NULL, recv_stream, &r[i]), 0);
    }
    for (int i = 0; i < 4; i++)
        EQ(pthread_join(threads[i], NULL), 0);
}

struct call {
    pthread_t thread;
    int fd;
    ssize_t (*run)(int fd);
    _Atomic pid_t tid;
    ssize_t value;
    int error;
};

static void *call_thread(void *arg) {
    struct call *c = arg;
    c->tid = gettid();
    c->value = c->run(c->fd);
    c->error = errno;
    return NULL;
}

static void begin(struct call *c, int fd, ssize_t (*run)(int)) {
    *c = (struct call){.fd = fd, .run = run};
    EQ(pthread_create(&c->thread, NULL, call_thread, c), 0);
    while (!c->tid)
        sched_yield();
}

// Starts a call in a thread and returns once it sleeps.
static void start_call(struct call *c, int fd, ssize_t (*run)(int)) {
    begin(c, fd, run);
    wait_asleep(getpid(), c->tid);
}

static void call_gives(struct call *c, ssize_t value, int error) {
    EQ(pthread_join(c->thread, NULL), 0);
    EQ(c->value, value);
    if (value < 0)
        EQ(c->error, error);
}

static ssize_t recv_hundred(int fd) {
    char buf[100];
    return recv(fd, buf, sizeof buf, 0);
}

static ssize_t send_one(int fd) {
    return send(fd, "x", 1, MSG_NOSIGNAL);
}

static ssize_t poll_in(int fd) {
    struct pollfd f = {.fd = fd, .events = POLLIN | POLLRDHUP};
    return poll(&f, 1, 20000) == 1 ? f.revents : -1;
}

static ssize_t accept_one(int fd) {
    return accept(fd, NULL, NULL);
}

static void *sends_bytes(void *arg) {
    for (int i = 0; i < 100; i++) {
        char c = i;
        EQ(send(*(int *)arg, &c, 1, 0), 1);
    }
    return NULL;
}

static void *receives_bytes(void *arg) {
    for (int i = 0; i < 100; i++) {
        char c;
        EQ(recv(*(int *)arg, &c, 1, 0), 1);
        EQ(c, i);
    }
    return NULL;
}

// A step that one thread makes in the middle of the other's call.
CASE(reading_and_writing_threads_during_the_change_over) {
    uint16_t port;
    int listener = listen_here(&port);
    for (int i = 0; i < 100; i++) {
        int ends[2] = {connect_to(port)};
        ends[1] = OK(accept(listener, NULL, NULL));
        pthread_t threads[4];
        for (int n = 0; n < 4; n++)
            EQ(pthread_create(&threads[n], NULL, n & 1 ? receives_bytes : sends_bytes, &ends[n / 2]), 0);
        for (int n = 0; n < 4; n++)
            EQ(pthread_join(threads[n], NULL), 0);
        close(ends[0]);
        close(ends[1]);
    }
    close(listener);
}

static ssize_t poll_for_data(int fd) {
    struct pollfd f = {.fd = fd, .events = POLLIN};
    return poll(&f, 1, -1) == 1 ? f.revents : -1;
}

PAIR_CASE(close_during_a_blocked_recv_lets_it_go_on) {
    // close(2) does not wake it: the call holds the socket until the peer speaks.
    struct pair p = pair_open();
    struct call c;
    start_call(&c, p.fd, recv_hundred);
    close(p.fd);
    FAILS(recv(p.fd, &(char){0}, 1, MSG_DONTWAIT), EBADF);
    wait_asleep(getpid(), c.tid);
    peer_says(p.peer, "late bytes");
    call_gives(&c, 10, 0);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
}

PAIR_CASE(shutdown_wakes_a_blocked_recv) {
    struct pair p = pair_open();
    struct call c;
    start_call(&c, p.fd, recv_hundred);
    OK(shutdown(p.fd, SHUT_RD));
    call_gives(&c, 0, 0);
    EQ(send(p.fd, "x", 1, 0), 1);
    peer_hears(p.peer, "x");
    pair_close(p);
}

PAIR_CASE(shutdown_wakes_a_poll) {
    struct pair p = pair_open();
    struct call c;
    start_call(&c, p.fd, poll_in);
    OK(shutdown(p.fd, SHUT_RDWR));
    call_gives(&c, POLLIN | POLLRDHUP | POLLHUP, 0);
    pair_close(p);
}

PAIR_CASE(shutdown_wakes_a_blocked_send) {
    struct pair p = pair_open();
    size_t sent = fill(p.fd, 1, 0);
    struct call c;
    start_call(&c, p.fd, send_one);
    OK(shutdown(p.fd, SHUT_WR));
    call_gives(&c, -1, EPIPE);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 1, 0, sent), 0);
    pair_close(p);
}

PAIR_CASE(shutdown_beside_a_blocked_send_leaves_the_other_direction) {
    struct pair p = pair_open();
    size_t sent = fill(p.fd, 1, 0);
    struct call c;
    start_call(&c, p.fd, send_one);
    OK(shutdown(p.fd, SHUT_WR));
    call_gives(&c, -1, EPIPE);
    for (int i = 0; i < 3; i++) {
        start_call(&c, p.fd, recv_hundred);
        peer_says(p.peer, "spoken");
        call_gives(&c, 6, 0);
    }
    struct pollfd f = {.fd = p.fd, .events = POLLIN};
    EQ(poll(&f, 1, 0), 0);
    start_call(&c, p.fd, poll_for_data);
    peer_says(p.peer, "heard");
    call_gives(&c, POLLIN, 0);
    EQ(recv_hundred(p.fd), 5);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 1, 0, sent), 0);
    peer_says(p.peer, "last");
    EQ(recv_hundred(p.fd), 4);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    EQ(recv_hundred(p.fd), 0);
    close(p.fd);
}

static ssize_t send_one_of_a_file(int fd) {
    int file = OK(memfd_create("file", MFD_CLOEXEC));
    EQ(write(file, "x", 1), 1);
    off_t at = 0;
    ssize_t n = sendfile(fd, file, &at, 1);
    int error = errno;
    close(file);
    errno = error;
    return n;
}

static ssize_t splice_one(int fd) {
    int ends[2];
    OK(pipe2(ends, O_CLOEXEC));
    EQ(write(ends[1], "x", 1), 1);
    ssize_t n = splice(ends[0], NULL, fd, NULL, 1, 0);
    int error = errno;
    close(ends[0]);
    close(ends[1]);
    errno = error;
    return n;
}

static ssize_t splice_hundred(int fd) {
    int ends[2];
    OK(pipe2(ends, O_CLOEXEC));
    ssize_t n = splice(fd, NULL, ends[1], NULL, 100, 0);
    int error = errno;
    close(ends[0]);
    close(ends[1]);
    errno = error;
    return n;
}

// The number of the call is closed, and means another socket, while the connection leaves the ring.
static void leaves_the_ring(struct call *c, int fd, int number) {
    wait_asleep(getpid(), c->tid);
    int other = OK(socket(AF_INET, SOCK_DGRAM, 0));
    EQ(dup2(other, number), number);
    set_option(fd, SOL_SOCKET, SO_TIMESTAMP, 1);
    close(other);
}

PAIR_CASE(closed_number_of_a_blocked_send_that_goes_on_by_tcp) {
    ssize_t (*const calls[])(int) = {send_one, send_one_of_a_file, splice_one};
    for (int i = 0; i < 3; i++) {
        struct pair p = pair_open();
        int number = OK(dup(p.fd));
        size_t sent = fill(p.fd, 1, 0);
        struct call c;
        start_call(&c, number, calls[i]);
        leaves_the_ring(&c, p.fd, number);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, sent), 0);
        call_gives(&c, 1, 0);
        peer_hears(p.peer, "x");
        close(number);
        pair_close(p);
    }
}

static size_t sent_before;

static ssize_t send_megabyte(int fd) {
    static char buf[1 << 20];
    pattern(1, sent_before, buf, sizeof buf);
    return send(fd, buf, sizeof buf, 0);
}

static ssize_t receive_twenty(int fd) {
    char buf[20];
    return recv(fd, buf, sizeof buf, MSG_WAITALL);
}

// A sleep with some bytes makes a duplicate, which the next one has to use, too: before the ring, while it begins, and in it.
CASE(closed_number_of_a_receive_that_sleeps_again) {
    const int before[] = {0, 1, 2, 4, 100};
    for (int i = 0; i < 5; i++) {
        int client, server, others[2], unread;
        struct call c;
        connect_here(&client, &server);
        trickle(client, server, 2, 0, before[i]);
        start_call(&c, client, receive_twenty);
        for (int part = 0; part < 2; part++) {
            wait_asleep(getpid(), c.tid);
            send_all(server, 3, 5 * part, 5);
            do
                OK(ioctl(client, FIONREAD, &unread));
            while (unread > 0);
        }
        wait_asleep(getpid(), c.tid);
        close(client);
        connect_here(&others[0], &others[1]);
        send_all(server, 3, 10, 5);
        OK(shutdown(server, SHUT_WR));
        call_gives(&c, 15, 0);
        close(server);
        close(others[0]);
        close(others[1]);
    }
}

// It was the kernel's from the beginning; the connection changes over meanwhile.
CASE(closed_number_of_a_send_that_began_before_the_ring) {
    for (int i = 0; i < 4; i++) {
        int client, server;
        struct call c;
        connect_here(&client, &server);
        trickle(client, server, 2, 0, 4);
        sent_before = fill(server, 1, 0);
        start_call(&c, server, send_megabyte);
        trickle(client, server, 2, 4, 20);
        close(server);
        // Whoever is next may get what the connection had.
        int others[2];
        connect_here(&others[0], &others[1]);
        warm_here(others[0], others[1]);
        wait_asleep(getpid(), c.tid);
        recv_to_eof(client, 1, 0, sent_before + (1 << 20));
        call_gives(&c, 1 << 20, 0);
        send_all(others[0], 3, 0, 10000 * (i % 2));
        recv_all(others[1], 3, 0, 10000 * (i % 2));
        close(client);
        close(others[0]);
        EQ(recv(others[1], &(char){0}, 1, 0), 0);
        close(others[1]);
    }
}

static ssize_t poll_for_room(int fd) {
    struct pollfd f = {.fd = fd, .events = POLLOUT};
    return poll(&f, 1, -1) == 1 ? f.revents : -1;
}

static ssize_t wait_for_room(int fd, uint32_t how) {
    int ep = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {.events = EPOLLOUT | how};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event));
    int n = epoll_wait(ep, &event, 1, -1);
    close(ep);
    return n == 1 ? (int)event.events : -1;
}

static ssize_t epoll_for_room(int fd) {
    return wait_for_room(fd, 0);
}

static ssize_t edge_of_room(int fd) {
    return wait_for_room(fd, EPOLLET);
}

// The other direction's TCP is full of what nobody reads when the connection changes over: nothing more can be told by it.
CASE(room_while_the_other_direction_is_full) {
    ssize_t (*const calls[])(int) = {send_megabyte, poll_for_room, epoll_for_room, edge_of_room};
    for (int i = 0; i < 4; i++) {
        int client, server;
        struct call c;
        connect_here(&client, &server);
        trickle(client, server, 1, 0, 4);
        size_t answered = fill(server, 2, 0);
        trickle(client, server, 1, 4, 20);
        answered += fill(server, 2, answered);
        assert_smcd(client);
        sent_before = 20 + fill(client, 1, 20);
        begin(&c, client, calls[i]);
        wait_asleep_for_room(c.tid);
        size_t all = sent_before + (i == 0 ? 1 << 20 : 0);
        recv_all(server, 1, 20, all - 20);
        call_gives(&c, i == 0 ? 1 << 20 : POLLOUT, 0);
        recv_all(client, 2, 0, answered);
        close(client);
        close(server);
    }
}

PAIR_CASE(closed_number_of_a_blocked_splice_that_goes_on_by_tcp) {
    struct pair p = pair_open();
    int number = OK(dup(p.fd));
    struct call c;
    start_call(&c, number, splice_hundred);
    leaves_the_ring(&c, p.fd, number);
    peer_says(p.peer, "late bytes");
    call_gives(&c, 10, 0);
    close(number);
    pair_close(p);
}

PAIR_CASE(dup2_over_the_fd_of_a_blocked_recv) {
    struct pair p = pair_open(), q = pair_open();
    struct call c;
    start_call(&c, p.fd, recv_hundred);
    EQ(dup2(q.fd, p.fd), p.fd);
    // The call stays with the connection it began on.
    peer_says(q.peer, "other");
    wait_readable(q.fd, 5);
    wait_asleep(getpid(), c.tid);
    peer_says(p.peer, "mine");
    call_gives(&c, 4, 0);
    char buf[8];
    EQ(recv(p.fd, buf, 8, 0), 5);
    CHECK(!memcmp(buf, "other", 5));
    pair_close(q);
}

PAIR_CASE(reading_and_writing_threads_do_not_hinder_each_other) {
    struct pair p = pair_open();
    struct call c;
    for (int i = 0; i < 20; i++) {
        start_call(&c, p.fd, recv_hundred);
        EQ(send(p.fd, "out", 3, 0), 3);
        peer_hears(p.peer, "out");
        EQ(events_now(p.fd, POLLIN | POLLOUT), POLLOUT);
        FAILS(recv(p.fd, &(char){0}, 1, MSG_DONTWAIT), EAGAIN);
        peer_says(p.peer, "in");
        call_gives(&c, 2, 0);
    }
    pair_close(p);
}

CASE(listener_shut_down_wakes_accept) {
    uint16_t port;
    int listener = listen_here(&port);
    struct call c;
    start_call(&c, listener, accept_one);
    OK(shutdown(listener, SHUT_RD));
    call_gives(&c, -1, EINVAL);
    close(listener);
}

CASE(several_threads_accept) {
    uint16_t port;
    int listener = listen_here(&port), clients[8];
    struct call c[8];
    for (int i = 0; i < 8; i++)
        start_call(&c[i], listener, accept_one);
    for (int i = 0; i < 8; i++)
        clients[i] = connect_to(port);
    for (int i = 0; i < 8; i++) {
        EQ(pthread_join(c[i].thread, NULL), 0);
        CHECK(c[i].value >= 0);
        send_all(c[i].value, 1, 0, 10);
    }
    for (int i = 0; i < 8; i++)
        recv_all(clients[i], 1, 0, 10);
}

PAIR_CASE(cancelled_thread_leaves_the_connection_whole) {
    struct pair p = pair_open();
    struct call c;
    for (int i = 0; i < 5; i++) {
        start_call(&c, p.fd, recv_hundred);
        EQ(pthread_cancel(c.thread), 0);
        void *value;
        EQ(pthread_join(c.thread, &value), 0);
        CHECK(value == PTHREAD_CANCELED);
        peer_says(p.peer, "still here");
        char buf[16];
        EQ(recv(p.fd, buf, 16, 0), 10);
        EQ(send(p.fd, "yes", 3, 0), 3);
        peer_hears(p.peer, "yes");
    }
    pair_close(p);
}

// A thread in one call, whose end it notes.
struct caller {
    int fd;
    bool sends;
    _Atomic pid_t tid;
    _Atomic long result;
};

static void *make_call(void *arg) {
    struct caller *c = arg;
    c->tid = gettid();
    char byte = 'x';
    long n = c->sends ? send(c->fd, &byte, 1, 0) : recv(c->fd, &byte, 1, 0);
    c->result = n < 0 ? -errno : n;
    return NULL;
}

static void begin_call(struct caller *c, pthread_t *thread, int fd, bool sends) {
    *c = (struct caller){.fd = fd, .sends = sends};
    EQ(pthread_create(thread, NULL, make_call, c), 0);
    while (c->tid == 0)
        sched_yield();
    wait_asleep(getpid(), c->tid);
}

// O_NONBLOCK counts where a call begins.
PAIR_CASE(nonblocking_is_set_while_calls_sleep) {
    struct pair p = pair_open();
    struct caller callers[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        begin_call(&callers[i], &threads[i], p.fd, false);
    nonblocking(p.fd, true);
    // It may wake both, of which one goes on sleeping.
    peer_says(p.peer, "a");
    while (callers[0].result == 0 && callers[1].result == 0)
        sched_yield();
    int other = callers[0].result != 0;
    EQ(callers[1 - other].result, 1);
    wait_asleep(getpid(), callers[other].tid);
    EQ(callers[other].result, 0);
    peer_says(p.peer, "b");
    for (int i = 0; i < 2; i++) {
        EQ(pthread_join(threads[i], NULL), 0);
        EQ(callers[i].result, 1);
    }
    FAILS(recv(p.fd, &(char){0}, 1, 0), EAGAIN);
    size_t sent = fill(p.fd, 1, 0);
    nonblocking(p.fd, false);
    begin_call(&callers[0], &threads[0], p.fd, true);
    nonblocking(p.fd, true);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, sent), 0);
    EQ(pthread_join(threads[0], NULL), 0);
    EQ(callers[0].result, 1);
    peer_hears(p.peer, "x");
    pair_close(p);
}

// A number that means a connection and a stranger's socket by turns, while a thread sends by it.
struct contested_number {
    int fd;
    _Atomic bool ends_now;
    int rounds;
};

static void *sends_by_number(void *arg) {
    struct contested_number *c = arg;
    while (!c->ends_now) {
        ssize_t n = send(c->fd, "mmm", 1 + c->rounds++ % 3, MSG_NOSIGNAL | MSG_DONTWAIT);
        CHECK(n > 0 || errno == EAGAIN);
    }
    return NULL;
}

static void *hears_only_m(void *arg) {
    char buf[4096];
    for (ssize_t n; (n = OK(recv((int)(intptr_t)arg, buf, sizeof buf, 0))) > 0;)
        for (ssize_t i = 0; i < n; i++)
            EQ(buf[i], 'm');
    return NULL;
}

// Whoever was asleep is woken through the connection, and nothing but what was sent comes to the stranger.
CASE(number_becomes_a_strangers_in_the_middle_of_sends_without_spinning) {
    int client, server, stranger[2];
    connect_here(&client, &server);
    warm_here(client, server);
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, stranger));
    struct contested_number c = {.fd = OK(dup(client))};
    pthread_t sender, hearers[2];
    EQ(pthread_create(&hearers[0], NULL, hears_only_m, (void *)(intptr_t)server), 0);
    EQ(pthread_create(&hearers[1], NULL, hears_only_m, (void *)(intptr_t)stranger[1]), 0);
    EQ(pthread_create(&sender, NULL, sends_by_number, &c), 0);
    for (int i = 0; i < 20000; i++)
        OK(dup2(i % 2 ? client : stranger[0], c.fd));
    c.ends_now = true;
    EQ(pthread_join(sender, NULL), 0);
    OK(close(c.fd));
    OK(shutdown(client, SHUT_WR));
    OK(close(stranger[0]));
    for (int i = 0; i < 2; i++)
        EQ(pthread_join(hearers[i], NULL), 0);
    close(client);
    close(server);
    close(stranger[1]);
}

// --- threads of real-time priority

struct contender {
    int fd;
    bool is_urgent;
    _Atomic bool *ends_now;
    long sent;
};

static void *contends(void *arg) {
    struct contender *c = arg;
    struct timespec moment = {0, 300000};
    static char large[1 << 18];
    cpu_set_t first;
    CPU_ZERO(&first);
    CPU_SET(0, &first);
    // Where there are no others they compete all the same.
    sched_setaffinity(0, sizeof first, &first);
    for (int i = 0; c->is_urgent ? i < 300 : !*c->ends_now; i++) {
        size_t n = c->is_urgent ? 1 : sizeof large;
        EQ(send(c->fd, large, n, 0), n);
        c->sent += n;
        if (c->is_urgent)
            OK(clock_nanosleep(CLOCK_MONOTONIC, 0, &moment, NULL));
    }
    return NULL;
}

static void *counts_to_eof(void *arg) {
    long total = 0;
    static char buf[1 << 18];
    for (ssize_t n; (n = OK(recv((int)(intptr_t)arg, buf, sizeof buf, 0))) > 0;)
        total += n;
    return (void *)total;
}

// Who waits for a thread of lower priority of the same CPU must let it run.
CASE(urgent_thread_beside_another_on_the_same_cpu) {
    int client, server;
    connect_here(&client, &server);
    warm_here(client, server);
    _Atomic bool ends_now = false;
    struct contender slow = {client, false, &ends_now, 0}, urgent = {client, true, &ends_now, 0};
    pthread_t threads[2], reader;
    pthread_attr_t attr;
    struct sched_param priority = {.sched_priority = 10};
    EQ(pthread_attr_init(&attr), 0);
    EQ(pthread_attr_setinheritsched(&attr, PTHREAD_EXPLICIT_SCHED), 0);
    EQ(pthread_attr_setschedpolicy(&attr, SCHED_FIFO), 0);
    EQ(pthread_attr_setschedparam(&attr, &priority), 0);
    EQ(pthread_create(&reader, NULL, counts_to_eof, (void *)(intptr_t)server), 0);
    EQ(pthread_create(&threads[0], NULL, contends, &slow), 0);
    int error = pthread_create(&threads[1], &attr, contends, &urgent);
    // Without permission it is a thread as any other.
    if (error == EPERM)
        error = pthread_create(&threads[1], NULL, contends, &urgent);
    EQ(error, 0);
    EQ(pthread_join(threads[1], NULL), 0);
    ends_now = true;
    EQ(pthread_join(threads[0], NULL), 0);
    OK(shutdown(client, SHUT_WR));
    void *total;
    EQ(pthread_join(reader, &total), 0);
    EQ((long)total, slow.sent + urgent.sent);
    close(client);
    close(server);
}

// --- threads that do not share their descriptors

static void *parts_with_files(void *arg) {
    struct pair *p = arg;
    OK(unshare(CLONE_FILES));
    // The same number is another file's here, and goes.
    OK(dup2(OK(open("/dev/null", O_RDWR)), p->fd));
    EQ(write(p->fd, "nowhere", 7), 7);
    OK(close(p->fd));
    return NULL;
}

PAIR_CASE(thread_with_descriptors_of_its_own) {
    struct pair p = pair_open();
    pthread_t thread;
    send_all(p.fd, 1, 0, 1000);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 1000), 0);
    // With both ends here one of them finds what the other has left behind in the ring (EBUSY).
    if (!variant.remote) {
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 1000), 0);
        recv_all(p.fd, 2, 0, 1000);
    }
    EQ(pthread_create(&thread, NULL, parts_with_files, &p), 0);
    EQ(pthread_join(thread, NULL), 0);
    if (variant.remote) {
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 1000), 0);
        recv_all(p.fd, 2, 0, 1000);
    }
    for (int i = 100; i < 130; i++) {
        send_all(p.fd, 1, i * 10, 10);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 10, 10), 0);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 10, 10), 0);
        recv_all(p.fd, 2, i * 10, 10);
    }
    assert_tcp(p.fd);
    EQ(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0), 0);
    recv_to_eof(p.fd, 0, 0, 0);
    pair_close(p);
}

// Sleeps on a connection that is TCP, for urgent data alone, and on one in the ring, until the latter has something.
static void *polls_both(void *arg) {
    struct call *c = arg;
    int *fds = (int *)(intptr_t)c->value;
    struct pollfd polled[] = {{.fd = fds[0], .events = POLLPRI}, {.fd = fds[1], .events = POLLIN}};
    c->tid = gettid();
    EQ(poll(polled, 2, 20000), 1);
    EQ(polled[1].revents, POLLIN);
    return NULL;
}

// A poll from before the ring does not count among its sleepers, and takes nobody else's place when it is over.
CASE(poll_from_before_the_ring_beside_a_sleeper_in_it) {
    for (int client = 0; client < 2; client++) {
        int ring[2], young[2];
        both_ends(ring, client, 32);
        both_ends(young, client, 1);
        int polled[] = {young[0], ring[0]};
        struct call poller = {.value = (intptr_t)polled}, reader;
        EQ(pthread_create(&poller.thread, NULL, polls_both, &poller), 0);
        while (!poller.tid)
            sched_yield();
        wait_asleep(getpid(), poller.tid);
        ends_talk(young, 10, 40);
        assert_smcd(young[0]);
        start_call(&reader, young[0], recv_hundred);
        EQ(send(ring[1], "x", 1, 0), 1);
        EQ(pthread_join(poller.thread, NULL), 0);
        // What asks for bells and then does not leaves them to who sleeps.
        struct epoll_event event = {.events = EPOLLIN};
        int ep = OK(epoll_create1(0));
        OK(epoll_ctl(ep, EPOLL_CTL_ADD, young[0], &event));
        EQ(epoll_wait(ep, &event, 1, 2), 0);
        EQ(send(young[1], "0123456789", 10, 0), 10);
        call_gives(&reader, 10, 0);
        close(ep);
        for (int i = 0; i < 2; i++) {
            close(ring[i]);
            close(young[i]);
        }
    }
}
