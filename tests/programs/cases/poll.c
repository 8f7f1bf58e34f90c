// poll, ppoll, select and pselect.
#include "peer.h"

#include <sys/resource.h>
#include <sys/select.h>
#include <sys/timerfd.h>

PAIR_CASE(poll_reports_what_is_there) {
    struct pair p = pair_open();
    EQ(events_now(p.fd, POLLIN | POLLPRI | POLLRDHUP), 0);
    EQ(events_now(p.fd, POLLOUT | POLLIN), POLLOUT);
    EQ(events_now(p.fd, POLLWRNORM | POLLRDNORM), POLLWRNORM);
    peer_says(p.peer, "x");
    wait_events(p.fd, POLLIN | POLLOUT, POLLIN | POLLOUT);
    EQ(events_now(p.fd, POLLRDNORM), POLLRDNORM);
    EQ(events_now(p.fd, POLLOUT), POLLOUT);
    EQ(events_now(p.fd, 0), 0);
    char c;
    EQ(recv(p.fd, &c, 1, 0), 1);
    EQ(events_now(p.fd, POLLIN), 0);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    wait_events(p.fd, POLLIN | POLLRDHUP, POLLIN | POLLRDHUP);
    EQ(events_now(p.fd, 0), 0);
    OK(shutdown(p.fd, SHUT_WR));
    wait_events(p.fd, 0, POLLHUP);
    EQ(events_now(p.fd, POLLIN | POLLOUT | POLLRDHUP), POLLIN | POLLOUT | POLLRDHUP | POLLHUP);
    pair_close(p);
}

PAIR_CASE(poll_of_many_kinds) {
    struct pair p = pair_open(), q = pair_open();
    int pipes[2];
    OK(pipe(pipes));
    struct pollfd f[] = {{.fd = p.fd, .events = POLLIN, .revents = -1}, {.fd = -1, .revents = -1},
        {.fd = pipes[0], .events = POLLIN, .revents = -1}, {.fd = 9999, .events = POLLIN},
        {.fd = q.fd, .events = POLLIN, .revents = -1}, {.fd = -p.fd, .events = POLLIN, .revents = -1},
        {.fd = p.fd, .events = POLLOUT, .revents = -1}};
    EQ(poll(f, 7, 0), 2);
    short want[] = {0, 0, 0, POLLNVAL, 0, 0, POLLOUT};
    for (int i = 0; i < 7; i++)
        EQ(f[i].revents, want[i]);
    peer_says(q.peer, "x");
    EQ(write(pipes[1], "x", 1), 1);
    wait_readable(q.fd, 1);
    EQ(poll(f, 7, 0), 4);
    want[2] = want[4] = POLLIN;
    for (int i = 0; i < 7; i++)
        EQ(f[i].revents, want[i]);
    FAILS(poll((void *)8, 1, 0), EFAULT);
    close(pipes[0]);
    close(pipes[1]);
    pair_close(p);
    pair_close(q);
}

PAIR_CASE(poll_times) {
    struct pair p = pair_open();
    struct pollfd f = {.fd = p.fd, .events = POLLIN};
    double start = now();
    EQ(poll(&f, 1, 50), 0);
    CHECK(now() - start >= 0.049 && now() - start < 5);
    EQ(poll(NULL, 0, 20), 0);
    struct timespec limit = {0, 30000000};
    start = now();
    EQ(ppoll(&f, 1, &limit, NULL), 0);
    CHECK(now() - start >= 0.0299);
    EQ(limit.tv_nsec, 30000000);
    limit.tv_nsec = 2000000000;
    FAILS(ppoll(&f, 1, &limit, NULL), EINVAL);
    peer_says(p.peer, "x");
    EQ(poll(&f, 1, -1), 1);
    EQ(ppoll(&f, 1, NULL, NULL), 1);
    pair_close(p);
}

PAIR_CASE(sleeping_poll_is_woken) {
    struct pair p = pair_open();
    for (int i = 0; i < 20; i++) {
        peer_begin(P_POLL, p.peer, POLLIN, 20000, 0);
        peer_asleep();
        EQ(send(p.fd, "x", 1, 0), 1);
        EQ(peer_end(), POLLIN);
        peer_hears(p.peer, "x");
    }
    peer_begin(P_POLL, p.peer, POLLRDHUP, 20000, 0);
    peer_asleep();
    OK(shutdown(p.fd, SHUT_WR));
    EQ(peer_end(), POLLRDHUP);
    peer_begin(P_POLL, p.peer, 0, 20000, 0);
    peer_asleep();
    struct linger linger = {1, 0};
    OK(setsockopt(p.fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    OK(close(p.fd));
    EQ(peer_end(), POLLERR | POLLHUP);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}

PAIR_CASE(sleeping_poll_is_woken_by_room) {
    struct pair p = pair_open();
    EQ(peer_call(P_NONBLOCK, p.peer, 1, 0, 0), 0);
    char chunk[65536];
    size_t sent = 0;
    for (;;) {
        pattern(1, sent, chunk, sizeof chunk);
        long n = peer_send(p.peer, chunk, sizeof chunk, 0);
        if (n > 0)
            sent += n;
        else if (peer_call(P_POLL, p.peer, POLLOUT, 0, 0) == 0)
            break;
    }
    peer_begin(P_POLL, p.peer, POLLOUT, 20000, 0);
    peer_asleep();
    recv_all(p.fd, 1, 0, sent);
    EQ(peer_end(), POLLOUT);
    pair_close(p);
}

PAIR_CASE(poll_of_one_socket_twice) {
    struct pair p = pair_open();
    int other = OK(dup(p.fd));
    struct pollfd f[] = {{.fd = p.fd, .events = POLLIN}, {.fd = other, .events = POLLIN | POLLOUT},
        {.fd = p.fd, .events = POLLIN}};
    EQ(poll(f, 3, 0), 1);
    peer_says(p.peer, "x");
    wait_readable(other, 1);
    EQ(poll(f, 3, 1000), 3);
    EQ(f[0].revents, POLLIN);
    EQ(f[1].revents, POLLIN | POLLOUT);
    EQ(f[2].revents, POLLIN);
    close(other);
    pair_close(p);
}

PAIR_CASE(select_reports_what_is_there) {
    struct pair p = pair_open(), q = pair_open();
    fd_set r, w, x;
    int top = (p.fd > q.fd ? p.fd : q.fd) + 1;
    struct timeval none = {0, 0};
#define SETS() \
    do { \
        FD_ZERO(&w); \
        FD_SET(p.fd, &w); \
        r = x = w; \
        FD_SET(q.fd, &r); \
    } while (0)
    SETS();
    EQ(select(top, &r, &w, &x, &none), 1);
    CHECK(!FD_ISSET(p.fd, &r) && FD_ISSET(p.fd, &w) && !FD_ISSET(p.fd, &x) && !FD_ISSET(q.fd, &r));
    peer_says(q.peer, "x");
    wait_readable(q.fd, 1);
    SETS();
    EQ(select(top, &r, &w, &x, NULL), 2);
    CHECK(!FD_ISSET(p.fd, &r) && FD_ISSET(p.fd, &w) && FD_ISSET(q.fd, &r));
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    wait_events(p.fd, POLLIN, POLLIN);
    SETS();
    EQ(select(top, &r, NULL, NULL, NULL), 2);
    CHECK(FD_ISSET(p.fd, &r) && FD_ISSET(q.fd, &r));
    // Only what is below the count is looked at.
    SETS();
    EQ(select(0, &r, &w, &x, &none), 0);
    FAILS(select(-1, &r, &w, &x, &none), EINVAL);
    int closed = OK(dup(p.fd));
    close(closed);
    FD_SET(closed, &r);
    FAILS(select(closed + 1, &r, NULL, NULL, &none), EBADF);
    pair_close(p);
    pair_close(q);
}

PAIR_CASE(select_counts_its_time_down) {
    struct pair p = pair_open();
    fd_set r;
    FD_ZERO(&r);
    FD_SET(p.fd, &r);
    struct timeval limit = {0, 50000};
    double start = now();
    EQ(select(p.fd + 1, &r, NULL, NULL, &limit), 0);
    CHECK(now() - start >= 0.049);
    CHECK(!FD_ISSET(p.fd, &r));
    EQ(limit.tv_sec, 0);
    EQ(limit.tv_usec, 0);
    limit = (struct timeval){20, 0};
    FD_SET(p.fd, &r);
    peer_says(p.peer, "x");
    EQ(select(p.fd + 1, &r, NULL, NULL, &limit), 1);
    // Linux says how much was left.
    CHECK(limit.tv_sec < 20 && limit.tv_sec >= 15);
    limit = (struct timeval){0, 20000};
    EQ(select(0, NULL, NULL, NULL, &limit), 0);
    struct timespec time = {20, 0};
    FD_SET(p.fd, &r);
    EQ(pselect(p.fd + 1, &r, NULL, NULL, &time, NULL), 1);
    EQ(time.tv_sec, 20);
    pair_close(p);
}

// Programs pass all that they may ever have open for the count, and sets of the usual size: the kernel looks at no more than
// the process' table of files has room for.
static void select_of_all(int fd, int peer) {
    struct {
        fd_set set, behind;
    } r, w;
    struct timeval none = {0, 0};
    struct timespec zero = {0, 0};
    for (int by_pselect = 0; by_pselect < 2; by_pselect++) {
        memset(&r, 0xff, sizeof r);
        memset(&w, 0xff, sizeof w);
        FD_ZERO(&r.set);
        FD_ZERO(&w.set);
        FD_SET(fd, &r.set);
        FD_SET(fd, &w.set);
        int n = by_pselect ? pselect(1 << 20, &r.set, &w.set, NULL, &zero, NULL)
                           : select(1 << 20, &r.set, &w.set, NULL, &none);
        EQ(n, peer >= 0 ? 1 : 2);
        EQ(!FD_ISSET(fd, &r.set), peer >= 0);
        CHECK(FD_ISSET(fd, &w.set));
        for (size_t i = 0; i < sizeof r.behind; i++)
            CHECK(((unsigned char *)&r.behind)[i] == 0xff && ((unsigned char *)&w.behind)[i] == 0xff);
    }
}

PAIR_CASE(select_of_more_than_there_is) {
    struct pair p = pair_open();
    select_of_all(p.fd, p.peer);
    pair_close(p);
    int null = OK(open("/dev/null", O_RDWR));
    select_of_all(null, -1);
    close(null);
}

static void poll_inherited(void *arg) {
    struct pair *p = arg;
    struct pollfd f = {.fd = p->fd, .events = POLLIN};
    EQ(poll(&f, 1, 20000), 1);
    EQ(f.revents, POLLIN);
}

PAIR_CASE(two_processes_poll_one_socket) {
    struct pair p = pair_open();
    pid_t pids[3];
    for (int i = 0; i < 3; i++)
        pids[i] = child(poll_inherited, &p);
    for (int i = 0; i < 3; i++)
        wait_asleep(pids[i], pids[i]);
    peer_says(p.peer, "x");
    for (int i = 0; i < 3; i++)
        child_succeeds(pids[i]);
    wait_events(p.fd, POLLIN, POLLIN);
    pair_close(p);
}

// Bytes that come while poll(2) is about to sleep, at any moment of that.
REMOTE_CASE(poll_hears_what_comes_as_it_falls_asleep_without_spinning) {
    struct pair p = pair_open();
    peer_begin(P_ECHO, p.peer, 0, 0, 0);
    for (int i = 0; i < 20000; i++) {
        char byte = i, got;
        EQ(send(p.fd, &byte, 1, 0), 1);
        struct pollfd f = {.fd = p.fd, .events = POLLIN};
        double before = now();
        // Long enough to see the sleep end by itself.
        EQ(poll(&f, 1, 3000), 1);
        CHECK(now() - before < 2.5);
        EQ(recv(p.fd, &got, 1, 0), 1);
        EQ(got, byte);
    }
    OK(shutdown(p.fd, SHUT_WR));
    EQ(peer_end(), 20000);
    close(p.fd);
}

// How often this thread went to sleep in a poll(2) of `events` that nothing ends for 300 ms.
static long sleeps_of_a_poll(int fd, short events) {
    struct rusage before, after;
    OK(getrusage(RUSAGE_THREAD, &before));
    struct pollfd f = {.fd = fd, .events = events};
    EQ(poll(&f, 1, 300), 0);
    OK(getrusage(RUSAGE_THREAD, &after));
    return after.ru_nvcsw - before.ru_nvcsw;
}

static void poll_beside_unread_bytes(void *arg) {
    poll_inherited(arg);
    int fd = ((struct pair *)arg)->fd;
    const short unasked[] = {0, POLLPRI, POLLRDHUP};
    for (int i = 0; i < 3; i++)
        CHECK(sleeps_of_a_poll(fd, unasked[i]) < 30);
}

// The doorbell that came with the bytes cannot be taken away before them.
PAIR_CASE(poll_beside_bytes_it_does_not_ask_for_sleeps) {
    struct pair p = pair_open();
    pid_t pid = child(poll_beside_unread_bytes, &p);
    wait_asleep(pid, pid);
    peer_says(p.peer, "x");
    child_succeeds(pid);
    pair_close(p);
}

// The peer has a byte unread and polls for something else.
static struct pair polled_beside_a_byte(short events) {
    struct pair p = pair_open();
    peer_begin(P_POLL, p.peer, POLLIN, 20000, 0);
    peer_asleep();
    EQ(send(p.fd, "x", 1, 0), 1);
    EQ(peer_end(), POLLIN);
    peer_begin(P_POLL, p.peer, events, 20000, 0);
    peer_asleep();
    return p;
}

PAIR_CASE(poll_beside_bytes_it_does_not_ask_for_is_woken) {
    struct pair p = polled_beside_a_byte(POLLRDHUP);
    OK(shutdown(p.fd, SHUT_WR));
    EQ(peer_end(), POLLRDHUP);
    pair_close(p);
    p = polled_beside_a_byte(POLLPRI);
    EQ(send(p.fd, "u", 1, MSG_OOB), 1);
    EQ(peer_end(), POLLPRI);
    pair_close(p);
    const short unasked[] = {0, POLLPRI};
    for (int i = 0; i < 2; i++) {
        p = polled_beside_a_byte(unasked[i]);
        struct linger linger = {1, 0};
        OK(setsockopt(p.fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
        OK(close(p.fd));
        EQ(peer_end(), POLLERR | POLLHUP);
        OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    }
}

// What the kernel alone knows of ends a wait that spins for a ring's bytes.
PAIR_CASE(poll_hears_a_timer_in_long_spins) {
    struct pair p = pair_open();
    int timer = OK(timerfd_create(CLOCK_MONOTONIC, 0));
    const struct itimerspec soon = {.it_value = {0, 20000000}};
    double start = now();
    OK(timerfd_settime(timer, 0, &soon, NULL));
    struct pollfd f[] = {{.fd = p.fd, .events = POLLIN}, {.fd = timer, .events = POLLIN}};
    EQ(poll(f, 2, 20000), 1);
    EQ(f[1].revents, POLLIN);
    CHECK(now() - start < 0.5);
    start = now();
    OK(timerfd_settime(timer, 0, &soon, NULL));
    fd_set set;
    FD_ZERO(&set);
    FD_SET(p.fd, &set);
    FD_SET(timer, &set);
    EQ(select((p.fd > timer ? p.fd : timer) + 1, &set, NULL, NULL, NULL), 1);
    CHECK(FD_ISSET(timer, &set));
    CHECK(now() - start < 0.5);
    close(timer);
    pair_close(p);
}

// Spins that find nothing become shorter.
PAIR_CASE(poll_in_vain_ends_long_spins) {
    struct pair p = pair_open();
    struct pollfd f = {.fd = p.fd, .events = POLLIN};
    struct rusage before, after;
    OK(getrusage(RUSAGE_SELF, &before));
    for (int i = 0; i < 50; i++)
        EQ(poll(&f, 1, 20), 0);
    OK(getrusage(RUSAGE_SELF, &after));
    double used = after.ru_utime.tv_sec - before.ru_utime.tv_sec + (after.ru_utime.tv_usec - before.ru_utime.tv_usec) / 1e6 +
        after.ru_stime.tv_sec - before.ru_stime.tv_sec + (after.ru_stime.tv_usec - before.ru_stime.tv_usec) / 1e6;
    CHECK(used < 0.5);
    pair_close(p);
}
