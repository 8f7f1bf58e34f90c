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
    struct tellers t = {.ep = set_with(fd, 0, 0)};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        EQ(pthread_create(&threads[i], NULL, be_told, &t), 0);
    for (int round = 0; round < rounds; round++) {
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
    uint32_t how; // EPOLLONESHOT, and EPOLLET or not
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

static void serve_all(uint32_t how) {
    struct service s = {.ep = OK(epoll_create1(EPOLL_CLOEXEC)), .how = how | EPOLLONESHOT};
    struct asker askers[2];
    pthread_t threads[6];
    for (int i = 0; i < CONNECTIONS; i++) {
        pthread_mutex_init(&s.connections[i].lock, NULL);
        s.connections[i].fd = -1;
    }
    for (int i = 0; i < 3; i++)
        EQ(pthread_create(&threads[i], NULL, serve, &s), 0);
    EQ(pthread_create(&threads[3], NULL, meddle, &s), 0);
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

CASE(threads_serve_rings_and_tcp_that_are_rearmed) {
    serve_all(0);
}

CASE(threads_serve_edges_of_rings_and_tcp_that_are_rearmed) {
    serve_all(EPOLLET);
}
