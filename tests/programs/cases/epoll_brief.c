// epoll sets whose connections have been short so far: served by one wait each, and closed. The kernel need not have heard
// of the next one when it is registered.
#include "peer.h"

#include <sys/select.h>

static void add(int ep, int fd, uint32_t events, uint64_t data) {
    struct epoll_event event = {events, {.u64 = data}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event));
}

// Whether the kernel's set has this number.
static bool kernel_knows(int ep, int fd) {
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", ep);
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    bool found = false;
    int number;
    while (fgets(line, sizeof line, file))
        found |= sscanf(line, "tfd: %d", &number) == 1 && number == fd;
    fclose(file);
    return found;
}

struct server {
    int listener, ep;
    uint16_t port;
};

// Both ends of a connection whose request is there.
struct guest {
    int client, fd;
};

static struct guest asks(struct server *s) {
    struct guest g = {.client = connect_to(s->port)};
    g.fd = OK(accept4(s->listener, NULL, NULL, SOCK_NONBLOCK));
    EQ(send(g.client, "ask", 3, 0), 3);
    wait_readable(g.fd, 3);
    return g;
}

static void answered(struct guest g) {
    char buf[8];
    EQ(recv(g.fd, buf, sizeof buf, 0), 3);
    EQ(send(g.fd, "answer", 6, 0), 6);
    close(g.fd);
    EQ(recv(g.client, buf, sizeof buf, 0), 6);
    EQ(recv(g.client, buf, sizeof buf, 0), 0);
    close(g.client);
}

// One that has served some short connections, registered for these events.
static struct server server_of(uint32_t events) {
    struct server s = {.ep = OK(epoll_create1(0))};
    s.listener = listen_here(&s.port);
    for (int i = 0; i < 20; i++) {
        struct guest g = asks(&s);
        add(s.ep, g.fd, events, i);
        one_event(s.ep, EPOLLIN, i);
        answered(g);
    }
    return s;
}

static struct server server(void) {
    return server_of(EPOLLIN);
}

static void end(struct server s) {
    close(s.ep);
    close(s.listener);
}

// The next connection, registered.
static struct guest registered(struct server *s, uint32_t events, uint64_t data) {
    struct guest g = asks(s);
    add(s->ep, g.fd, events, data);
    EQ(kernel_knows(s->ep, g.fd), is_plain() || events & EPOLLET);
    return g;
}

static void leave(struct guest g) {
    close(g.fd);
    close(g.client);
}

CASE(brief_connection_is_told_of_again_while_it_stays) {
    struct server s = server();
    struct guest g = registered(&s, EPOLLIN, 7);
    char buf[8];
    for (int i = 0; i < 3; i++)
        one_event(s.ep, EPOLLIN, 7);
    CHECK(kernel_knows(s.ep, g.fd));
    EQ(recv(g.fd, buf, 8, 0), 3);
    no_event(s.ep);
    EQ(send(g.client, "x", 1, 0), 1);
    one_event(s.ep, EPOLLIN, 7);
    leave(g);
    no_event(s.ep);
    end(s);
}

CASE(brief_connection_without_a_request_is_waited_for) {
    struct server s = server();
    struct guest g = registered(&s, EPOLLIN, 7);
    char buf[8];
    EQ(recv(g.fd, buf, 8, 0), 3);
    no_event(s.ep);
    CHECK(kernel_knows(s.ep, g.fd));
    EQ(send(g.client, "x", 1, 0), 1);
    one_event(s.ep, EPOLLIN, 7);
    leave(g);
    // A set whose connections last is not asked twice for each.
    g = asks(&s);
    add(s.ep, g.fd, EPOLLIN, 8);
    one_event(s.ep, EPOLLIN, 8);
    leave(g);
    end(s);
}

CASE(brief_connection_is_changed_and_taken_out) {
    struct server s = server();
    struct guest g = registered(&s, EPOLLIN, 7);
    struct epoll_event event = {EPOLLOUT, {.u64 = 8}};
    FAILS(epoll_ctl(s.ep, EPOLL_CTL_ADD, g.fd, &event), EEXIST);
    OK(epoll_ctl(s.ep, EPOLL_CTL_MOD, g.fd, &event));
    one_event(s.ep, EPOLLOUT, 8);
    event = (struct epoll_event){EPOLLIN, {.u64 = 9}};
    OK(epoll_ctl(s.ep, EPOLL_CTL_MOD, g.fd, &event));
    one_event(s.ep, EPOLLIN, 9);
    event = (struct epoll_event){0, {.u64 = 10}};
    OK(epoll_ctl(s.ep, EPOLL_CTL_MOD, g.fd, &event));
    no_event(s.ep);
    leave(g);
    g = registered(&s, EPOLLIN, 7);
    OK(epoll_ctl(s.ep, EPOLL_CTL_DEL, g.fd, NULL));
    FAILS(epoll_ctl(s.ep, EPOLL_CTL_DEL, g.fd, NULL), ENOENT);
    no_event(s.ep);
    add(s.ep, g.fd, EPOLLIN, 11);
    one_event(s.ep, EPOLLIN, 11);
    leave(g);
    end(s);
}

CASE(end_of_a_registration_is_seen_at_once) {
    struct server s = server();
    struct guest g = asks(&s);
    struct epoll_event event = {EPOLLIN, {.u64 = 8}};
    for (int i = 0; i < 3; i++) {
        add(s.ep, g.fd, EPOLLIN, 7);
        one_event(s.ep, EPOLLIN, 7);
        one_event(s.ep, EPOLLIN, 7);
        CHECK(kernel_knows(s.ep, g.fd));
        OK(epoll_ctl(s.ep, EPOLL_CTL_DEL, g.fd, NULL));
        FAILS(epoll_ctl(s.ep, EPOLL_CTL_DEL, g.fd, NULL), ENOENT);
        FAILS(epoll_ctl(s.ep, EPOLL_CTL_MOD, g.fd, &event), ENOENT);
        if (i == 1)
            EQ(events_now(s.ep, POLLIN), 0);
        no_event(s.ep);
        CHECK(!kernel_knows(s.ep, g.fd));
    }
    // And added again before anybody looks.
    add(s.ep, g.fd, EPOLLIN, 9);
    OK(epoll_ctl(s.ep, EPOLL_CTL_DEL, g.fd, NULL));
    no_event(s.ep);
    add(s.ep, g.fd, EPOLLIN, 9);
    one_event(s.ep, EPOLLIN, 9);
    one_event(s.ep, EPOLLIN, 9);
    OK(epoll_ctl(s.ep, EPOLL_CTL_DEL, g.fd, NULL));
    add(s.ep, g.fd, EPOLLIN | EPOLLET, 10);
    one_event(s.ep, EPOLLIN, 10);
    no_event(s.ep);
    OK(epoll_ctl(s.ep, EPOLL_CTL_DEL, g.fd, NULL));
    add(s.ep, g.fd, EPOLLOUT, 11);
    one_event(s.ep, EPOLLOUT, 11);
    one_event(s.ep, EPOLLOUT, 11);
    // The number is another's then.
    OK(epoll_ctl(s.ep, EPOLL_CTL_DEL, g.fd, NULL));
    struct guest next = asks(&s);
    OK(dup2(next.fd, g.fd));
    close(next.fd);
    no_event(s.ep);
    add(s.ep, g.fd, EPOLLIN, 12);
    one_event(s.ep, EPOLLIN, 12);
    // And another number of the same.
    one_event(s.ep, EPOLLIN, 12);
    OK(epoll_ctl(s.ep, EPOLL_CTL_DEL, g.fd, NULL));
    int other = OK(dup(g.fd));
    close(g.fd);
    no_event(s.ep);
    close(other);
    close(g.client);
    close(next.client);
    end(s);
}

CASE(exclusive_registration_is_made_anew) {
    struct server s = server();
    struct guest g = asks(&s);
    add(s.ep, g.fd, EPOLLIN | EPOLLEXCLUSIVE, 7);
    one_event(s.ep, EPOLLIN, 7);
    OK(epoll_ctl(s.ep, EPOLL_CTL_DEL, g.fd, NULL));
    add(s.ep, g.fd, EPOLLIN, 8);
    one_event(s.ep, EPOLLIN, 8);
    OK(epoll_ctl(s.ep, EPOLL_CTL_DEL, g.fd, NULL));
    no_event(s.ep);
    leave(g);
    end(s);
}

CASE(brief_connection_becomes_edge_triggered) {
    struct server s = server();
    struct guest g = registered(&s, EPOLLIN, 7);
    one_event(s.ep, EPOLLIN, 7);
    struct epoll_event event = {EPOLLIN | EPOLLET, {.u64 = 8}};
    OK(epoll_ctl(s.ep, EPOLL_CTL_MOD, g.fd, &event));
    one_event(s.ep, EPOLLIN, 8);
    no_event(s.ep);
    EQ(send(g.client, "x", 1, 0), 1);
    one_event(s.ep, EPOLLIN, 8);
    leave(g);
    g = registered(&s, EPOLLIN | EPOLLET, 9);
    one_event(s.ep, EPOLLIN, 9);
    no_event(s.ep);
    leave(g);
    end(s);
}

// A connection registered for edges, of which the kernel need not know, told of once.
static struct guest told_by_edge(struct server *s) {
    struct guest g = asks(s);
    add(s->ep, g.fd, EPOLLIN | EPOLLRDHUP | EPOLLET, 7);
    EQ(kernel_knows(s->ep, g.fd), is_plain());
    one_event(s->ep, EPOLLIN, 7);
    return g;
}

CASE(brief_connection_tells_no_edge_twice) {
    struct server s = server_of(EPOLLIN | EPOLLRDHUP | EPOLLET);
    char buf[8];
    // What is there is left there.
    struct guest g = told_by_edge(&s);
    no_event(s.ep);
    CHECK(kernel_knows(s.ep, g.fd));
    no_event(s.ep);
    EQ(send(g.client, "x", 1, 0), 1);
    wait_readable(g.fd, 4);
    one_event(s.ep, EPOLLIN, 7);
    no_event(s.ep);
    leave(g);
    // It is read, and more comes.
    for (int waits = 0; waits < 2; waits++) {
        struct server t = server_of(EPOLLIN | EPOLLRDHUP | EPOLLET);
        g = told_by_edge(&t);
        EQ(recv(g.fd, buf, 8, 0), 3);
        if (waits)
            no_event(t.ep);
        EQ(send(g.client, "xyz", 3, 0), 3);
        wait_readable(g.fd, 3);
        one_event(t.ep, EPOLLIN, 7);
        no_event(t.ep);
        struct epoll_event event = {EPOLLIN | EPOLLET, {.u64 = 8}};
        OK(epoll_ctl(t.ep, EPOLL_CTL_MOD, g.fd, &event));
        one_event(t.ep, EPOLLIN, 8);
        no_event(t.ep);
        leave(g);
        end(t);
    }
    end(s);
}

CASE(brief_connection_is_asked_for_anew) {
    struct server s = server_of(EPOLLIN | EPOLLRDHUP | EPOLLET);
    struct guest g = told_by_edge(&s);
    // What is unread is an edge for who asks again.
    struct epoll_event event = {EPOLLIN | EPOLLET, {.u64 = 8}};
    OK(epoll_ctl(s.ep, EPOLL_CTL_MOD, g.fd, &event));
    one_event(s.ep, EPOLLIN, 8);
    no_event(s.ep);
    leave(g);
    end(s);
}

CASE(brief_connection_tells_its_end_once) {
    for (int early = 0; early < 2; early++) {
        struct server s = server_of(EPOLLIN | EPOLLRDHUP | EPOLLET);
        struct guest g = asks(&s);
        if (early) {
            OK(shutdown(g.client, SHUT_WR));
            wait_events(g.fd, POLLIN | POLLRDHUP, POLLIN | POLLRDHUP);
        }
        add(s.ep, g.fd, EPOLLIN | EPOLLRDHUP | EPOLLET, 7);
        one_event(s.ep, EPOLLIN | (early ? EPOLLRDHUP : 0), 7);
        if (!early) {
            OK(shutdown(g.client, SHUT_WR));
            wait_events(g.fd, POLLIN | POLLRDHUP, POLLIN | POLLRDHUP);
            one_event(s.ep, EPOLLIN | EPOLLRDHUP, 7);
        }
        no_event(s.ep);
        no_event(s.ep);
        struct linger now = {1, 0};
        OK(setsockopt(g.client, SOL_SOCKET, SO_LINGER, &now, sizeof now));
        close(g.client);
        wait_events(g.fd, POLLIN, POLLIN | POLLERR | POLLHUP);
        one_event(s.ep, EPOLLIN | EPOLLRDHUP | EPOLLERR | EPOLLHUP, 7);
        close(g.fd);
        end(s);
    }
}

CASE(brief_connection_tells_of_its_own_shutdown) {
    struct server s = server_of(EPOLLIN | EPOLLRDHUP | EPOLLET);
    struct guest g = told_by_edge(&s);
    char buf[8];
    EQ(recv(g.fd, buf, 8, 0), 3);
    OK(shutdown(g.fd, SHUT_RD));
    one_event(s.ep, EPOLLIN | EPOLLRDHUP, 7);
    no_event(s.ep);
    leave(g);
    end(s);
}

CASE(brief_connection_lives_on_by_another_number) {
    struct server s = server();
    struct guest g = registered(&s, EPOLLIN, 7);
    int other = OK(dup(g.fd));
    close(g.fd);
    one_event(s.ep, EPOLLIN, 7);
    // The number may mean something else by then.
    struct guest next = asks(&s);
    one_event(s.ep, EPOLLIN, 7);
    close(other);
    no_event(s.ep);
    leave(next);
    close(g.client);
    end(s);
}

CASE(brief_connection_ends_before_the_wait) {
    struct server s = server();
    for (int i = 0; i < 100; i++) {
        struct guest g = registered(&s, EPOLLIN, i);
        leave(g);
    }
    no_event(s.ep);
    struct guest g = registered(&s, EPOLLIN | EPOLLRDHUP, 7);
    close(g.client);
    wait_events(g.fd, POLLIN | POLLRDHUP, POLLIN | POLLRDHUP);
    one_event(s.ep, EPOLLIN | EPOLLRDHUP, 7);
    one_event(s.ep, EPOLLIN | EPOLLRDHUP, 7);
    close(g.fd);
    end(s);
}

CASE(brief_connections_beside_other_descriptors) {
    struct server s = server();
    int pipes[2];
    OK(pipe(pipes));
    add(s.ep, pipes[0], EPOLLIN, 100);
    struct guest g = registered(&s, EPOLLIN, 7);
    EQ(write(pipes[1], "x", 1), 1);
    struct epoll_event got[4];
    EQ(epoll_wait(s.ep, got, 4, 10000), 2);
    EQ(got[0].data.u64 + got[1].data.u64, 107);
    EQ(epoll_wait(s.ep, got, 4, 10000), 2);
    leave(g);
    close(pipes[0]);
    close(pipes[1]);
    end(s);
}

CASE(more_brief_connections_than_a_wait_takes) {
    enum { ALL = 400 };
    struct server s = server();
    struct guest g[ALL];
    for (int i = 0; i < ALL; i++) {
        g[i] = asks(&s);
        add(s.ep, g[i].fd, EPOLLIN, i);
    }
    // Each is told of before any is told of again.
    bool told[ALL] = {false};
    for (int rest = ALL; rest > 0;) {
        struct epoll_event got[40];
        int n = OK(epoll_wait(s.ep, got, 40, 10000));
        CHECK(n > 0);
        for (int i = 0; i < n; i++) {
            CHECK(!told[got[i].data.u64]);
            told[got[i].data.u64] = true;
            answered(g[got[i].data.u64]);
            rest--;
        }
    }
    no_event(s.ep);
    end(s);
}

CASE(set_with_a_brief_connection_is_asked_from_outside) {
    struct server s = server();
    struct guest g = registered(&s, EPOLLIN, 7);
    EQ(events_now(s.ep, POLLIN), POLLIN);
    leave(g);
    EQ(events_now(s.ep, POLLIN), 0);
    g = asks(&s);
    add(s.ep, g.fd, EPOLLIN, 8);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(s.ep, &set);
    EQ(select(s.ep + 1, &set, NULL, NULL, NULL), 1);
    leave(g);
    end(s);

    s = server();
    g = registered(&s, EPOLLIN, 9);
    int outer = OK(epoll_create1(0));
    add(outer, s.ep, EPOLLIN, 1);
    one_event(outer, EPOLLIN, 1);
    one_event(s.ep, EPOLLIN, 9);
    leave(g);
    no_event(outer);
    // It is in another set now.
    g = asks(&s);
    add(s.ep, g.fd, EPOLLIN, 10);
    CHECK(kernel_knows(s.ep, g.fd));
    one_event(outer, EPOLLIN, 1);
    leave(g);
    close(outer);
    end(s);
}

struct waiter {
    int ep;
    _Atomic pid_t tid;
    struct epoll_event event;
};

// Starts a thread that is asleep then, or just about to be.
static pthread_t begin(void *(*run)(void *), struct waiter *w, bool asleep) {
    pthread_t thread;
    EQ(pthread_create(&thread, NULL, run, w), 0);
    while (!w->tid)
        sched_yield();
    if (asleep)
        wait_asleep(getpid(), w->tid);
    return thread;
}

static void *wait_once(void *arg) {
    struct waiter *w = arg;
    w->tid = gettid();
    EQ(epoll_wait(w->ep, &w->event, 1, 20000), 1);
    return NULL;
}

static void *poll_once(void *arg) {
    struct waiter *w = arg;
    struct pollfd p = {.fd = w->ep, .events = POLLIN};
    w->tid = gettid();
    EQ(poll(&p, 1, 20000), 1);
    EQ(epoll_wait(w->ep, &w->event, 1, 0), 1);
    return NULL;
}

static void added_beside(void *(*run)(void *)) {
    struct server s = server();
    for (int i = 0; i < 20; i++) {
        struct waiter w = {.ep = s.ep};
        pthread_t thread = begin(run, &w, i % 2);
        struct guest g = asks(&s);
        add(s.ep, g.fd, EPOLLIN, i);
        EQ(pthread_join(thread, NULL), 0);
        EQ(w.event.data.u64, i);
        answered(g);
    }
    end(s);
}

CASE(brief_connection_is_added_beside_a_poll_of_the_set) {
    added_beside(poll_once);
}

CASE(brief_connection_is_added_beside_a_sleeper) {
    added_beside(wait_once);
}

CASE(registration_ends_beside_a_sleeper) {
    struct server s = server();
    for (int i = 0; i < 20; i++) {
        struct guest g = asks(&s);
        add(s.ep, g.fd, EPOLLRDHUP, 1);
        no_event(s.ep);
        int pipes[2];
        OK(pipe(pipes));
        add(s.ep, pipes[0], EPOLLIN, 2);
        struct waiter w = {.ep = s.ep};
        pthread_t thread = begin(wait_once, &w, i % 2);
        OK(epoll_ctl(s.ep, EPOLL_CTL_DEL, g.fd, NULL));
        // Nobody is told of it any more.
        close(g.client);
        wait_events(g.fd, POLLRDHUP, POLLRDHUP);
        EQ(write(pipes[1], "x", 1), 1);
        EQ(pthread_join(thread, NULL), 0);
        EQ(w.event.data.u64, 2);
        close(pipes[0]);
        close(pipes[1]);
        close(g.fd);
    }
    end(s);
}

CASE(brief_connection_at_a_fork) {
    struct server s = server();
    struct guest g = registered(&s, EPOLLIN, 7), gone = asks(&s);
    int ended = OK(epoll_create1(0));
    add(ended, gone.fd, EPOLLIN, 8);
    one_event(ended, EPOLLIN, 8);
    OK(epoll_ctl(ended, EPOLL_CTL_DEL, gone.fd, NULL));
    pid_t pid = OK(fork());
    if (pid == 0)
        _exit(0);
    child_succeeds(pid);
    CHECK(kernel_knows(s.ep, g.fd) && !kernel_knows(ended, gone.fd));
    add(ended, gone.fd, EPOLLIN, 9);
    one_event(ended, EPOLLIN, 9);
    close(ended);
    leave(gone);
    one_event(s.ep, EPOLLIN, 7);
    answered(g);
    no_event(s.ep);
    end(s);
}

CASE(wait_beside_a_brief_connection_fails) {
    struct server s = server();
    struct guest g = registered(&s, EPOLLIN, 7);
    struct epoll_event event;
    FAILS(epoll_wait(s.ep, &event, 0, 0), EINVAL);
    struct epoll_event *nowhere = NULL;
    __asm__("" : "+r"(nowhere));
    FAILS(epoll_wait(s.ep, nowhere, 1, 0), EFAULT);
    one_event(s.ep, EPOLLIN, 7);
    leave(g);
    end(s);
}

CASE(brief_connection_lasts_and_goes_to_the_ring) {
    struct server s = server();
    struct guest g = registered(&s, EPOLLIN, 7);
    char buf[8];
    EQ(recv(g.fd, buf, 8, 0), 3);
    nonblocking(g.fd, false);
    warm_here(g.client, g.fd);
    no_event(s.ep);
    for (int i = 0; i < 20; i++) {
        EQ(send(g.client, "x", 1, 0), 1);
        one_event(s.ep, EPOLLIN, 7);
        EQ(recv(g.fd, buf, 8, 0), 1);
    }
    leave(g);
    end(s);
}
