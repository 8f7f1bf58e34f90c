// epoll sets that are nested, shared by threads or processes, and sets with listeners in them.
#include "peer.h"

#include <netinet/tcp.h>
#include <sys/select.h>

static int set_with(int fd, uint32_t events, uint64_t data) {
    int ep = OK(epoll_create1(0));
    struct epoll_event event = {events, {.u64 = data}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event));
    return ep;
}

PAIR_CASE(nested_sets) {
    struct pair p = pair_open();
    int inner = set_with(p.fd, EPOLLIN, 1), middle = set_with(inner, EPOLLIN, 2);
    int outer = set_with(middle, EPOLLIN, 3);
    char c;
    for (int i = 0; i < 10; i++) {
        no_event(outer);
        EQ(events_now(inner, POLLIN), 0);
        peer_says(p.peer, "x");
        one_event(outer, EPOLLIN, 3);
        one_event(middle, EPOLLIN, 2);
        one_event(inner, EPOLLIN, 1);
        EQ(events_now(inner, POLLIN), POLLIN);
        EQ(events_now(outer, POLLIN), POLLIN);
        EQ(recv(p.fd, &c, 1, 0), 1);
    }
    close(inner);
    no_event(outer);
    close(middle);
    close(outer);
    pair_close(p);
}

PAIR_CASE(nested_edge_triggered_set) {
    struct pair p = pair_open();
    int inner = set_with(p.fd, EPOLLIN, 1), outer = set_with(inner, EPOLLIN | EPOLLET, 2);
    char c;
    for (int i = 0; i < 10; i++) {
        peer_says(p.peer, "x");
        one_event(outer, EPOLLIN, 2);
        no_event(outer);
        one_event(inner, EPOLLIN, 1);
        EQ(recv(p.fd, &c, 1, 0), 1);
        no_event(inner);
    }
    close(inner);
    close(outer);
    pair_close(p);
}

PAIR_CASE(poll_and_select_on_a_set) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN, 1);
    fd_set set;
    struct timeval none = {0, 0};
    FD_ZERO(&set);
    FD_SET(ep, &set);
    EQ(select(ep + 1, &set, NULL, NULL, &none), 0);
    peer_says(p.peer, "x");
    FD_SET(ep, &set);
    EQ(select(ep + 1, &set, NULL, NULL, NULL), 1);
    CHECK(FD_ISSET(ep, &set));
    wait_events(ep, POLLIN, POLLIN);
    one_event(ep, EPOLLIN, 1);
    close(ep);
    pair_close(p);
}

struct waiter {
    pthread_t thread;
    int ep;
    _Atomic pid_t tid;
    _Atomic int events;
    struct epoll_event event;
};

static void *wait_once(void *arg) {
    struct waiter *w = arg;
    w->tid = gettid();
    w->events = OK(epoll_wait(w->ep, &w->event, 1, 20000));
    return NULL;
}

// Starts a thread in epoll_wait and returns once it sleeps there.
static void start_waiter(struct waiter *w, int ep) {
    *w = (struct waiter){.ep = ep, .events = -1};
    EQ(pthread_create(&w->thread, NULL, wait_once, w), 0);
    while (!w->tid)
        sched_yield();
    wait_asleep(getpid(), w->tid);
}

static void join(struct waiter *w) {
    EQ(pthread_join(w->thread, NULL), 0);
}

PAIR_CASE(sleeping_waiter_is_woken_by_bytes) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN | EPOLLET, 7);
    struct waiter w;
    char c;
    for (int i = 0; i < 30; i++) {
        start_waiter(&w, ep);
        peer_says(p.peer, "x");
        join(&w);
        EQ(w.events, 1);
        EQ(w.event.events, EPOLLIN);
        EQ(w.event.data.u64, 7);
        EQ(recv(p.fd, &c, 1, 0), 1);
    }
    close(ep);
    pair_close(p);
}

PAIR_CASE(sleeping_waiter_is_woken_by_room) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLOUT, 7);
    struct waiter w;
    for (int i = 0; i < 3; i++) {
        size_t sent = fill(p.fd, i, 0);
        start_waiter(&w, ep);
        EQ(peer_call(P_RECV_PATTERN, p.peer, i, 0, sent), 0);
        join(&w);
        EQ(w.events, 1);
        EQ(w.event.events, EPOLLOUT);
    }
    close(ep);
    pair_close(p);
}

PAIR_CASE(sleeping_waiter_is_woken_by_the_end) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLRDHUP | EPOLLIN, 7);
    struct waiter w;
    start_waiter(&w, ep);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    join(&w);
    EQ(w.event.events, EPOLLIN | EPOLLRDHUP);
    struct epoll_event event = {0, {.u64 = 8}};
    OK(epoll_ctl(ep, EPOLL_CTL_MOD, p.fd, &event));
    start_waiter(&w, ep);
    OK(peer_call(P_RESET, p.peer, 0, 0, 0));
    join(&w);
    EQ(w.event.events, EPOLLERR | EPOLLHUP);
    close(ep);
    close(p.fd);
}

// A wait goes on when its set is closed, and has nothing to do with one that is made meanwhile.
PAIR_CASE(waiter_of_a_set_that_was_closed) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN, 7), pipes[2];
    struct epoll_event event = {EPOLLIN, {.u64 = 8}};
    struct waiter old, new;
    uint16_t port;
    OK(pipe(pipes));
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, pipes[0], &event));
    start_waiter(&old, ep);
    close(ep);
    ep = OK(epoll_create1(0));
    EQ(write(pipes[1], "x", 1), 1);
    join(&old);
    EQ(old.event.data.u64, 8);
    int listener = listen_here(&port), ends[2] = {connect_to(port)};
    ends[1] = OK(accept(listener, NULL, NULL));
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, ends[0], &event));
    start_waiter(&new, ep);
    event.events = EPOLLOUT;
    OK(epoll_ctl(ep, EPOLL_CTL_MOD, ends[0], &event));
    join(&new);
    EQ(new.events, 1);
    EQ(new.event.events, EPOLLOUT);
    for (int i = 0; i < 2; i++) {
        close(pipes[i]);
        close(ends[i]);
    }
    close(listener);
    close(ep);
    pair_close(p);
}

PAIR_CASE(sleeping_waiter_sees_what_is_added_or_modified) {
    struct pair p = pair_open();
    int ep = OK(epoll_create1(0)), other;
    struct waiter w;
    struct epoll_event event = {EPOLLIN, {.u64 = 5}};
    char c;
    start_waiter(&w, ep);
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
    wait_asleep(getpid(), w.tid);
    peer_says(p.peer, "x");
    join(&w);
    EQ(w.event.data.u64, 5);
    EQ(recv(p.fd, &c, 1, 0), 1);
    // Ready at once when it is added.
    peer_says(p.peer, "y");
    wait_readable(p.fd, 1);
    OK(epoll_ctl(ep, EPOLL_CTL_DEL, p.fd, NULL));
    start_waiter(&w, ep);
    event.data.u64 = 6;
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
    join(&w);
    EQ(w.event.data.u64, 6);
    // Ready at once when it is modified.
    event = (struct epoll_event){0, {.u64 = 0}};
    OK(epoll_ctl(ep, EPOLL_CTL_MOD, p.fd, &event));
    start_waiter(&w, ep);
    event = (struct epoll_event){EPOLLOUT, {.u64 = 9}};
    OK(epoll_ctl(ep, EPOLL_CTL_MOD, p.fd, &event));
    join(&w);
    EQ(w.event.data.u64, 9);
    EQ(w.event.events, EPOLLOUT);
    // A pipe among sockets wakes as well.
    int pipes[2];
    OK(pipe(pipes));
    event = (struct epoll_event){0, {.u64 = 0}};
    OK(epoll_ctl(ep, EPOLL_CTL_MOD, p.fd, &event));
    event = (struct epoll_event){EPOLLIN, {.u64 = 11}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, pipes[0], &event));
    start_waiter(&w, ep);
    EQ(write(pipes[1], "x", 1), 1);
    join(&w);
    EQ(w.event.data.u64, 11);
    other = pipes[1];
    close(other);
    close(pipes[0]);
    close(ep);
    pair_close(p);
}

PAIR_CASE(edge_wakes_one_of_several_threads) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN | EPOLLET, 7);
    struct waiter w[4];
    char c;
    for (int i = 0; i < 4; i++)
        start_waiter(&w[i], ep);
    // Each arrival wakes one thread and only one; the others go on sleeping.
    for (int i = 0; i < 4; i++) {
        peer_says(p.peer, "x");
        int awake;
        double until = now() + 10;
        do {
            awake = 0;
            for (int k = 0; k < 4; k++)
                awake += w[k].events != -1;
            CHECK(now() < until);
        } while (awake < i + 1);
        for (int k = 0; k < 4; k++)
            if (w[k].events == -1)
                wait_asleep(getpid(), w[k].tid);
        EQ(awake, i + 1);
        EQ(recv(p.fd, &c, 1, 0), 1);
    }
    for (int i = 0; i < 4; i++) {
        join(&w[i]);
        EQ(w[i].events, 1);
        EQ(w[i].event.events, EPOLLIN);
    }
    close(ep);
    pair_close(p);
}

// Threads that serve echo connections from one set, each event with EPOLLONESHOT.
struct pool {
    int ep;
    _Atomic long served;
    _Atomic bool done;
};

static void *serve_pool(void *arg) {
    struct pool *pool = arg;
    struct epoll_event event;
    char buf[4096];
    while (!pool->done) {
        if (OK(epoll_wait(pool->ep, &event, 1, 20)) == 0)
            continue;
        int fd = event.data.fd;
        ssize_t n = OK(recv(fd, buf, sizeof buf, MSG_DONTWAIT));
        if (n == 0) {
            close(fd);
            continue;
        }
        for (ssize_t sent = 0; sent < n;)
            sent += OK(send(fd, buf + sent, n - sent, 0));
        pool->served += n;
        event.events = EPOLLIN | EPOLLONESHOT;
        OK(epoll_ctl(pool->ep, EPOLL_CTL_MOD, fd, &event));
    }
    return NULL;
}

CASE(threads_serve_from_one_set_with_oneshot) {
    enum { CLIENTS = 20, ROUNDS = 100 };
    struct pool pool = {.ep = OK(epoll_create1(0))};
    pthread_t threads[4];
    int clients[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        int server;
        connect_here(&clients[i], &server);
        struct epoll_event event = {EPOLLIN | EPOLLONESHOT, {.fd = server}};
        OK(epoll_ctl(pool.ep, EPOLL_CTL_ADD, server, &event));
    }
    for (int i = 0; i < 4; i++)
        EQ(pthread_create(&threads[i], NULL, serve_pool, &pool), 0);
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < CLIENTS; i++)
            send_all(clients[i], i, round * 100, 100);
        for (int i = 0; i < CLIENTS; i++)
            recv_all(clients[i], i, round * 100, 100);
    }
    assert_smcd(clients[0]);
    assert_smcd(clients[CLIENTS - 1]);
    EQ(pool.served, CLIENTS * ROUNDS * 100);
    for (int i = 0; i < CLIENTS; i++)
        close(clients[i]);
    pool.done = true;
    for (int i = 0; i < 4; i++)
        EQ(pthread_join(threads[i], NULL), 0);
}

CASE(listener_in_a_set) {
    uint16_t port;
    int listener = listen_here(&port);
    nonblocking(listener, true);
    int level = set_with(listener, EPOLLIN, 1), edge = set_with(listener, EPOLLIN | EPOLLET, 2);
    no_event(level);
    for (int i = 0; i < 5; i++) {
        int client = connect_to(port);
        one_event(level, EPOLLIN, 1);
        one_event(edge, EPOLLIN, 2);
        one_event(level, EPOLLIN, 1);
        no_event(edge);
        int server = OK(accept(listener, NULL, NULL));
        no_event(level);
        FAILS(accept(listener, NULL, NULL), EAGAIN);
        send_all(client, 1, 0, 10);
        recv_all(server, 1, 0, 10);
        close(client);
        close(server);
    }
    struct waiter w;
    start_waiter(&w, level);
    int client = connect_to(port);
    join(&w);
    EQ(w.event.data.u64, 1);
    close(client);
}

// A worker that accepts from a shared listener through a set of its own, as nginx does.
static void exclusive_worker(void *arg) {
    int *in = arg, listener = in[0], end = in[1];
    int ep = set_with(listener, EPOLLIN | EPOLLEXCLUSIVE, 1);
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, end, &(struct epoll_event){EPOLLIN, {.u64 = 2}}));
    FAILS(epoll_ctl(ep, EPOLL_CTL_MOD, listener, &(struct epoll_event){EPOLLIN, {0}}), EINVAL);
    for (;;) {
        struct epoll_event event;
        EQ(epoll_wait(ep, &event, 1, 20000), 1);
        if (event.data.u64 == 2)
            return;
        if (event.data.u64 == 1) {
            int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
            if (fd < 0) {
                EQ(errno, EAGAIN);
                continue;
            }
            event = (struct epoll_event){EPOLLIN, {.u64 = 100 + fd}};
            OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event));
            continue;
        }
        int fd = event.data.u64 - 100;
        char buf[1000];
        ssize_t n = OK(recv(fd, buf, sizeof buf, 0));
        if (n == 0)
            close(fd);
        else
            EQ(send(fd, buf, n, 0), n);
    }
}

CASE(exclusive_listener_in_three_processes) {
    uint16_t port;
    int in[2], end[2], clients[60];
    in[0] = listen_here(&port);
    nonblocking(in[0], true);
    OK(pipe(end));
    in[1] = end[0];
    pid_t workers[3];
    for (int i = 0; i < 3; i++)
        workers[i] = child(exclusive_worker, in);
    for (int i = 0; i < 60; i++)
        clients[i] = connect_to(port);
    for (int round = 0; round < 20; round++)
        for (int i = 0; i < 60; i++) {
            send_all(clients[i], i, round * 50, 50);
            recv_all(clients[i], i, round * 50, 50);
        }
    assert_smcd(clients[0]);
    assert_smcd(clients[59]);
    for (int i = 0; i < 60; i++)
        close(clients[i]);
    // Nobody reads it, so every worker sees it.
    EQ(write(end[1], "x", 1), 1);
    for (int i = 0; i < 3; i++)
        child_succeeds(workers[i]);
}

PAIR_CASE(exclusive_rejects_what_the_kernel_rejects) {
    struct pair p = pair_open();
    int ep = OK(epoll_create1(0));
    struct epoll_event event = {EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT, {.u64 = 1}};
    FAILS(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event), EINVAL);
    event.events = EPOLLIN | EPOLLEXCLUSIVE | EPOLLRDHUP;
    FAILS(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event), EINVAL);
    event.events = EPOLLIN | EPOLLOUT | EPOLLET | EPOLLEXCLUSIVE;
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
    one_event(ep, EPOLLOUT, 1);
    peer_says(p.peer, "x");
    wait_readable(p.fd, 1);
    one_event(ep, EPOLLIN | EPOLLOUT, 1);
    FAILS(epoll_ctl(ep, EPOLL_CTL_MOD, p.fd, &event), EINVAL);
    OK(epoll_ctl(ep, EPOLL_CTL_DEL, p.fd, NULL));
    close(ep);
    pair_close(p);
}

struct inherited {
    int ep, fd;
};

static void wait_inherited(void *arg) {
    struct inherited *in = arg;
    one_event(in->ep, EPOLLIN, 7);
    char c;
    EQ(recv(in->fd, &c, 1, 0), 1);
    EQ(c, 'x');
}

PAIR_CASE(set_inherited_by_fork) {
    struct pair p = pair_open();
    struct inherited in = {set_with(p.fd, EPOLLIN, 7), p.fd};
    for (int i = 0; i < 5; i++) {
        pid_t pid = child(wait_inherited, &in);
        wait_asleep(pid, pid);
        peer_says(p.peer, "x");
        child_succeeds(pid);
        no_event(in.ep);
        peer_says(p.peer, "y");
        one_event(in.ep, EPOLLIN, 7);
        char c;
        EQ(recv(p.fd, &c, 1, 0), 1);
        EQ(c, 'y');
    }
    close(in.ep);
    pair_close(p);
}

PAIR_CASE(duplicate_of_a_set_is_the_set) {
    struct pair p = pair_open();
    int ep = set_with(p.fd, EPOLLIN | EPOLLONESHOT, 1), other = OK(dup(ep));
    peer_says(p.peer, "x");
    one_event(other, EPOLLIN, 1);
    no_event(ep);
    struct epoll_event event = {EPOLLIN, {.u64 = 2}};
    OK(epoll_ctl(other, EPOLL_CTL_MOD, p.fd, &event));
    close(other);
    one_event(ep, EPOLLIN, 2);
    other = OK(fcntl(ep, F_DUPFD_CLOEXEC, 100));
    close(ep);
    one_event(other, EPOLLIN, 2);
    close(other);
    pair_close(p);
}

// Whoever is woken again and again, and never has anything to wake the other for, is woken at once each time.
enum { WAKES = 100 };

struct woken {
    int fd, report;
    _Atomic int tid;
};

static void *sleeps_and_reads(void *arg) {
    struct woken *w = arg;
    w->tid = gettid();
    int ep = set_with(w->fd, EPOLLIN, 1);
    for (int i = 0; i < WAKES; i++) {
        char c;
        one_event(ep, EPOLLIN, 1);
        EQ(recv(w->fd, &c, 1, 0), 1);
        EQ(write(w->report, &c, 1), 1);
    }
    close(ep);
    return NULL;
}

CASE(wake_ups_one_way_are_acknowledged_without_spinning) {
    for (int client = 0; client < 2; client++) {
        int ends[2], report[2];
        both_ends(ends, client, 32);
        OK(pipe(report));
        struct woken w = {.fd = ends[1], .report = report[1]};
        pthread_t thread;
        EQ(pthread_create(&thread, NULL, sleeps_and_reads, &w), 0);
        while (!w.tid)
            sched_yield();
        for (int i = 0; i < WAKES; i++) {
            char c = 'w';
            struct tcp_info info;
            socklen_t len = sizeof info;
            wait_asleep(getpid(), w.tid);
            EQ(send(ends[0], &c, 1, 0), 1);
            EQ(read(report[0], &c, 1), 1);
            // More than these, and the congestion window is full: the next would wait for a delayed ACK.
            OK(getsockopt(ends[0], IPPROTO_TCP, TCP_INFO, &info, &len));
            CHECK(info.tcpi_unacked <= 4);
        }
        EQ(pthread_join(thread, NULL), 0);
        for (int i = 0; i < 2; i++) {
            close(ends[i]);
            close(report[i]);
        }
    }
}
