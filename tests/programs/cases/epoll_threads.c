// One epoll set, or one in another, and several threads: what is re-armed, added or served beside those who wait.
#include "peer.h"

static int set_with(int fd, uint32_t events, uint64_t data) {
    int ep = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {events, {.u64 = data}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event));
    return ep;
}

static void change(int ep, int op, int fd, uint32_t events, uint64_t data) {
    struct epoll_event event = {events, {.u64 = data}};
    OK(epoll_ctl(ep, op, fd, &event));
}

// --- re-armed while another thread is being told

struct tellers {
    int ep;
    _Atomic bool done;
    _Atomic int with_room; // events that tell of room
};

static void *be_told(void *arg) {
    struct tellers *t = arg;
    struct epoll_event event;
    while (!t->done)
        if (OK(epoll_wait(t->ep, &event, 1, 10)) == 1 && event.events & EPOLLOUT)
            t->with_room++;
    return NULL;
}

// The kernel has told one thread of something to read when another asks for room, too: whoever is told first, room is told.
static void rearms(int fd, int rounds) {
    // As many as there is time for: on one busy core each waits for its turn.
    double late = now() + 5;
    struct tellers t = {.ep = set_with(fd, 0, 0)};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        EQ(pthread_create(&threads[i], NULL, be_told, &t), 0);
    for (int round = 0; round < rounds && (round < 100 || now() < late); round++) {
        int before = t.with_room;
        change(t.ep, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLONESHOT, 2 * round);
        for (volatile int pause = round * 367 % 30000; pause > 0;)
            pause--;
        change(t.ep, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLOUT | EPOLLONESHOT, 2 * round + 1);
        for (double until = now() + 10; t.with_room == before;) {
            CHECK(now() < until);
            sched_yield();
        }
        EQ(t.with_room, before + 1);
    }
    t.done = true;
    for (int i = 0; i < 2; i++)
        EQ(pthread_join(threads[i], NULL), 0);
    close(t.ep);
}

PAIR_CASE(oneshot_is_rearmed_beside_the_wait_that_tells_it) {
    struct pair p = pair_open();
    peer_says(p.peer, "x");
    wait_readable(p.fd, 1);
    rearms(p.fd, 40000);
    pair_close(p);
}

// --- threads that serve rings and TCP

enum { CONNECTIONS = 12, MESSAGES = 300 };

struct service {
    int ep;
    uint32_t how; // EPOLLONESHOT and EPOLLET, or not
    _Atomic bool done;
    struct {
        pthread_mutex_t lock;
        int fd;
    } connections[CONNECTIONS];
};

static uint64_t name_of(int number, int fd) {
    return (uint64_t)number << 32 | fd;
}

// Answers what is there, whoever else is told of it meanwhile.
static void answer(struct service *s, int number, int fd) {
    char buf[64];
    EQ(pthread_mutex_lock(&s->connections[number].lock), 0);
    if (s->connections[number].fd == fd) {
        ssize_t n;
        while ((n = recv(fd, buf, sizeof buf, MSG_DONTWAIT)) > 0)
            EQ(send(fd, buf, n, 0), n);
        if (n == 0) {
            s->connections[number].fd = -1;
            close(fd);
        } else {
            EQ(errno, EAGAIN);
            if (s->how & EPOLLONESHOT)
                change(s->ep, EPOLL_CTL_MOD, fd, EPOLLIN | s->how, name_of(number, fd));
        }
    }
    EQ(pthread_mutex_unlock(&s->connections[number].lock), 0);
}

static void *serve(void *arg) {
    struct service *s = arg;
    struct epoll_event got[2];
    for (int turn = 0; !s->done; turn++) {
        int n = OK(epoll_wait(s->ep, got, 1 + turn % 2, 20000));
        for (int i = 0; i < n; i++)
            if (got[i].data.u64 != UINT64_MAX)
                answer(s, got[i].data.u64 >> 32, (int)got[i].data.u64);
    }
    return NULL;
}

// Arms what is armed already, as a thread does that has something to send.
static void *meddle(void *arg) {
    struct service *s = arg;
    for (unsigned i = 0; !s->done; i++) {
        int number = i * 7 % CONNECTIONS;
        EQ(pthread_mutex_lock(&s->connections[number].lock), 0);
        int fd = s->connections[number].fd;
        if (fd >= 0)
            change(s->ep, EPOLL_CTL_MOD, fd, EPOLLIN | (i % 3 ? 0 : EPOLLOUT) | s->how, name_of(number, fd));
        EQ(pthread_mutex_unlock(&s->connections[number].lock), 0);
        for (volatile int pause = i % 5 * 1000; pause > 0;)
            pause--;
    }
    return NULL;
}

struct asker {
    struct service *service;
    uint16_t port;
    int listener, first;
};

// Every third connection stays TCP, every third lasts, and every third is a new one each few messages.
static void *ask(void *arg) {
    struct asker *a = arg;
    int fds[CONNECTIONS / 2], one = 1;
    for (int i = 0; i < CONNECTIONS / 2; i++)
        fds[i] = -1;
    for (int message = 0; message < MESSAGES; message++) {
        for (int i = 0; i < CONNECTIONS / 2; i++) {
            int number = a->first + i;
            if (fds[i] >= 0 && number % 3 == 2 && message % 5 == 0) {
                close(fds[i]);
                fds[i] = -1;
            }
            if (fds[i] < 0) {
                fds[i] = connect_to(a->port);
                int fd = OK(accept(a->listener, NULL, NULL));
                if (number % 3 == 1)
                    OK(setsockopt(fd, SOL_SOCKET, SO_TIMESTAMP, &one, sizeof one));
                timeout_option(fds[i], SO_RCVTIMEO, 10);
                // The end of the one before may not have been seen yet; this one is not told of to who serves that.
                for (bool is_free = false; !is_free; sched_yield()) {
                    EQ(pthread_mutex_lock(&a->service->connections[number].lock), 0);
                    is_free = a->service->connections[number].fd < 0;
                    if (is_free) {
                        a->service->connections[number].fd = fd;
                        change(a->service->ep, EPOLL_CTL_ADD, fd, EPOLLIN | a->service->how, name_of(number, fd));
                    }
                    EQ(pthread_mutex_unlock(&a->service->connections[number].lock), 0);
                }
            }
            send_all(fds[i], number, message * 8, 8);
            // Some are asked one by one, and some together.
            if (message % 2)
                recv_all(fds[i], number, message * 8, 8);
        }
        for (int i = 0; i < CONNECTIONS / 2 && message % 2 == 0; i++)
            recv_all(fds[i], a->first + i, message * 8, 8);
    }
    for (int i = 0; i < CONNECTIONS / 2; i++) {
        if (a->first + i == 0)
            assert_smcd(fds[i]);
        close(fds[i]);
    }
    return NULL;
}

static void serve_all(uint32_t how, bool meddles) {
    struct service s = {.ep = OK(epoll_create1(EPOLL_CLOEXEC)), .how = how};
    struct asker askers[2];
    pthread_t threads[6];
    for (int i = 0; i < CONNECTIONS; i++) {
        pthread_mutex_init(&s.connections[i].lock, NULL);
        s.connections[i].fd = -1;
    }
    for (int i = 0; i < 3; i++)
        EQ(pthread_create(&threads[i], NULL, serve, &s), 0);
    EQ(pthread_create(&threads[3], NULL, meddles ? meddle : serve, &s), 0);
    for (int i = 0; i < 2; i++) {
        askers[i] = (struct asker){.service = &s, .first = i * CONNECTIONS / 2};
        askers[i].listener = listen_here(&askers[i].port);
        EQ(pthread_create(&threads[4 + i], NULL, ask, &askers[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        EQ(pthread_join(threads[4 + i], NULL), 0);
        close(askers[i].listener);
    }
    s.done = true;
    int pipes[2];
    OK(pipe(pipes));
    EQ(write(pipes[1], "x", 1), 1);
    change(s.ep, EPOLL_CTL_ADD, pipes[0], EPOLLIN, UINT64_MAX);
    for (int i = 0; i < 4; i++)
        EQ(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < CONNECTIONS; i++)
        if (s.connections[i].fd >= 0)
            close(s.connections[i].fd);
    close(pipes[0]);
    close(pipes[1]);
    close(s.ep);
}

CASE(threads_serve_rings_and_tcp) {
    serve_all(0, false);
}

CASE(threads_serve_edges_of_rings_and_tcp) {
    serve_all(EPOLLET, false);
}

CASE(threads_serve_rings_and_tcp_once) {
    serve_all(EPOLLONESHOT, false);
}

CASE(threads_serve_edges_of_rings_and_tcp_once) {
    serve_all(EPOLLONESHOT | EPOLLET, false);
}

CASE(threads_serve_rings_and_tcp_that_are_rearmed) {
    serve_all(EPOLLONESHOT, true);
}

CASE(threads_serve_edges_of_rings_and_tcp_that_are_rearmed) {
    serve_all(EPOLLONESHOT | EPOLLET, true);
}

// --- sets in others

struct waiter {
    pthread_t thread;
    int ep;
    bool by_poll; // poll(2) on the set, not a wait in it
    _Atomic pid_t tid;
    int events;
    struct epoll_event event;
};

static void *wait_once(void *arg) {
    struct waiter *w = arg;
    struct pollfd poll_set = {.fd = w->ep, .events = POLLIN};
    w->tid = gettid();
    w->events = OK(w->by_poll ? poll(&poll_set, 1, 10000) : epoll_wait(w->ep, &w->event, 1, 10000));
    return NULL;
}

// Starts a thread that waits, and returns once it sleeps.
static void start_waiter(struct waiter *w, int ep, bool by_poll) {
    *w = (struct waiter){.ep = ep, .by_poll = by_poll, .events = -1};
    EQ(pthread_create(&w->thread, NULL, wait_once, w), 0);
    while (!w->tid)
        sched_yield();
    wait_asleep(getpid(), w->tid);
}

static void is_told(struct waiter *w, uint64_t data) {
    EQ(pthread_join(w->thread, NULL), 0);
    EQ(w->events, 1);
    if (!w->by_poll) {
        EQ(w->event.events, EPOLLIN);
        EQ(w->event.data.u64, data);
    }
}

// A set with this connection, which was active a moment ago: nobody sleeps, and no bell is asked for.
static int active_set(struct pair p) {
    int ep = set_with(p.fd, EPOLLIN, 1);
    char c;
    peer_says(p.peer, "a");
    one_event(ep, EPOLLIN, 1);
    EQ(recv(p.fd, &c, 1, 0), 1);
    no_event(ep);
    return ep;
}

PAIR_CASE(set_is_added_beside_a_sleeper) {
    struct pair p = pair_open();
    struct waiter w;
    char c;
    for (int way = 0; way < 12; way++) {
        bool is_ready = way & 1, by_poll = way & 2;
        // The sleeper waits for the set that it is added to, for one around that, or for one that has another set in it.
        int depth = way / 4, inner = active_set(p), quiet = OK(epoll_create1(0)), outer = OK(epoll_create1(0));
        int around = depth == 1 ? set_with(outer, EPOLLIN, 7) : outer;
        if (depth == 2)
            change(outer, EPOLL_CTL_ADD, quiet, EPOLLIN, 9);
        if (is_ready) {
            peer_says(p.peer, "x");
            wait_readable(p.fd, 1);
        }
        start_waiter(&w, around, by_poll);
        change(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 7);
        if (!is_ready) {
            wait_asleep(getpid(), w.tid);
            peer_says(p.peer, "x");
        }
        is_told(&w, 7);
        one_event(outer, EPOLLIN, 7);
        EQ(recv(p.fd, &c, 1, 0), 1);
        no_event(outer);
        if (around != outer)
            close(around);
        close(inner);
        close(outer);
        close(quiet);
    }
    pair_close(p);
}

PAIR_CASE(oneshot_set_is_rearmed_beside_a_sleeper) {
    struct pair p = pair_open();
    struct waiter w;
    char c;
    int inner = active_set(p), outer = set_with(inner, EPOLLIN | EPOLLONESHOT, 2);
    for (int i = 0; i < 10; i++) {
        peer_says(p.peer, "x");
        one_event(outer, EPOLLIN, 2);
        start_waiter(&w, outer, i % 2);
        change(outer, EPOLL_CTL_MOD, inner, EPOLLIN | EPOLLONESHOT, 2);
        is_told(&w, 2);
        EQ(recv(p.fd, &c, 1, 0), 1);
        change(outer, EPOLL_CTL_MOD, inner, EPOLLIN | EPOLLONESHOT, 2);
        no_event(outer);
    }
    close(inner);
    close(outer);
    pair_close(p);
}

// A thread that began to sleep before a set came in counts for nothing in it when it is awake: another sleeps there.
PAIR_CASE(set_is_added_beside_one_sleeper_and_served_by_another) {
    struct pair p = pair_open();
    struct waiter first, second;
    struct epoll_event event;
    char c;
    int inner = active_set(p), outer = OK(epoll_create1(0)), pipes[2];
    OK(pipe(pipes));
    change(outer, EPOLL_CTL_ADD, pipes[0], EPOLLIN, 3);
    start_waiter(&first, outer, false);
    start_waiter(&second, inner, false);
    change(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2);
    wait_asleep(getpid(), first.tid);
    EQ(write(pipes[1], "x", 1), 1);
    is_told(&first, 3);
    // Asks for bells as long as it sleeps, and no longer where nobody else does.
    EQ(epoll_wait(inner, &event, 1, 2), 0);
    peer_says(p.peer, "x");
    is_told(&second, 1);
    EQ(recv(p.fd, &c, 1, 0), 1);
    for (int i = 0; i < 2; i++)
        close(pipes[i]);
    close(inner);
    close(outer);
    pair_close(p);
}

// An edge of a set in another was told. Known: where a ring told of it, its bell may tell the same once more.
static void told_edge(int outer, uint64_t data) {
    struct epoll_event event;
    one_event(outer, EPOLLIN, data);
    if (!is_plain())
        epoll_wait(outer, &event, 1, 0);
    no_event(outer);
}

PAIR_CASE(edge_of_a_set_in_which_a_connection_falls_idle) {
    struct pair busy = pair_open(), idle = pair_open();
    int inner = set_with(busy.fd, EPOLLIN, 1), outer = OK(epoll_create1(0));
    struct epoll_event event;
    char c;
    change(inner, EPOLL_CTL_ADD, idle.fd, EPOLLIN, 2);
    peer_says(idle.peer, "x");
    one_event(inner, EPOLLIN, 2);
    EQ(recv(idle.fd, &c, 1, 0), 1);
    change(outer, EPOLL_CTL_ADD, inner, EPOLLIN | EPOLLET, 3);
    for (int i = 0; i < 3; i++) {
        peer_says(busy.peer, "x");
        told_edge(outer, 3);
        // In one of these sleeps it is let go.
        for (int sleep = 0; sleep < 4; sleep++)
            EQ(epoll_wait(outer, &event, 1, 2), 0);
        // Bytes of it are an edge all the same, with those of the other unread.
        peer_says(idle.peer, "y");
        told_edge(outer, 3);
        EQ(recv(idle.fd, &c, 1, 0), 1);
        EQ(recv(busy.fd, &c, 1, 0), 1);
        no_event(outer);
    }
    close(inner);
    close(outer);
    pair_close(busy);
    pair_close(idle);
}

// What is armed again in the inner set is an edge of the outer one, where there is something to tell.
PAIR_CASE(edge_of_a_set_in_which_a_connection_is_rearmed) {
    struct pair p = pair_open();
    int inner = set_with(p.fd, EPOLLIN | EPOLLONESHOT, 1), outer = set_with(inner, EPOLLIN | EPOLLET, 3);
    char c;
    peer_says(p.peer, "x");
    for (int i = 0; i < 5; i++) {
        told_edge(outer, 3);
        one_event(inner, EPOLLIN, 1);
        change(inner, EPOLL_CTL_MOD, p.fd, EPOLLIN | EPOLLONESHOT, 1);
    }
    EQ(recv(p.fd, &c, 1, 0), 1);
    no_event(outer);
    change(inner, EPOLL_CTL_MOD, p.fd, EPOLLIN | EPOLLONESHOT, 1);
    no_event(outer);
    close(inner);
    close(outer);
    pair_close(p);
}

PAIR_CASE(set_is_added_by_two_numbers) {
    struct pair p = pair_open();
    int inner = set_with(p.fd, EPOLLIN, 1), other = OK(dup(inner)), outer = set_with(inner, EPOLLIN, 2);
    struct epoll_event got[4] = {{EPOLLIN, {.u64 = 9}}};
    char c;
    change(outer, EPOLL_CTL_ADD, other, EPOLLIN, 3);
    FAILS(epoll_ctl(outer, EPOLL_CTL_ADD, other, got), EEXIST);
    FAILS(epoll_ctl(outer, EPOLL_CTL_ADD, inner, got), EEXIST);
    peer_says(p.peer, "x");
    wait_readable(p.fd, 1);
    EQ(epoll_wait(outer, got, 4, 10000), 2);
    EQ(got[0].data.u64 + got[1].data.u64, 5);
    change(outer, EPOLL_CTL_MOD, other, EPOLLIN, 4);
    EQ(epoll_wait(outer, got, 4, 10000), 2);
    EQ(got[0].data.u64 + got[1].data.u64, 6);
    change(outer, EPOLL_CTL_DEL, inner, 0, 0);
    one_event(outer, EPOLLIN, 4);
    FAILS(epoll_ctl(outer, EPOLL_CTL_MOD, inner, got), ENOENT);
    change(outer, EPOLL_CTL_ADD, inner, EPOLLIN | EPOLLET, 5);
    change(outer, EPOLL_CTL_DEL, other, 0, 0);
    told_edge(outer, 5);
    EQ(recv(p.fd, &c, 1, 0), 1);
    close(inner);
    close(other);
    close(outer);
    pair_close(p);
}
