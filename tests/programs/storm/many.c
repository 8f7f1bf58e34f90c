// Many streams on one epoll set, by a server's worker or a client.
#include "storm.h"

enum { MOST = 1024, CLIENTS = 4 };

static struct end by_fd[MOST];
static bool used[MOST];
static int set, count;
static bool edge;

static bool is_connecting(const struct end *end) {
    return end->side == CLIENT && !end->stream;
}

static uint32_t interest(const struct end *end) {
    if (is_connecting(end))
        return EPOLLOUT;
    if (edge)
        return EPOLLIN | EPOLLOUT | EPOLLET;
    if (!end->stream)
        return EPOLLIN;
    return (wants_in(end) ? EPOLLIN : 0) | (allowed(end) ? EPOLLOUT : 0);
}

static void watch(int op, const struct end *end) {
    struct epoll_event event = {interest(end), {.fd = end->fd}};
    OK(epoll_ctl(set, op, end->fd, &event));
}

static void add(struct end end) {
    CHECK(end.fd < MOST && !used[end.fd]);
    by_fd[end.fd] = end;
    used[end.fd] = true;
    count++;
    me->busy++;
    watch(EPOLL_CTL_ADD, &end);
}

// A child that was just forked may have the connection open still, and the set would go on telling of it.
static void forget(int fd) {
    CHECK(used[fd]);
    OK(epoll_ctl(set, EPOLL_CTL_DEL, fd, NULL));
    used[fd] = false;
    count--;
    me->busy--;
}

// In a child that has only one of our streams.
static void alone(int keep) {
    for (int fd = 0; fd < MOST; fd++)
        if (used[fd] && fd != keep)
            close(fd);
    close(set);
    if (next.listener >= 0)
        close(next.listener);
    next.listener = -1;
}

static void begin(struct end *ends, int n) {
    set = OK(epoll_create1(EPOLL_CLOEXEC));
    edge = draw(2);
    for (int i = 0; i < n; i++)
        add(ends[i]);
    has_resumed();
}

static void replace_all(void) {
    struct end ends[MOST];
    int n = 0;
    for (int fd = 0; fd < MOST; fd++)
        if (used[fd])
            ends[n++] = by_fd[fd];
    replace(ends, n, next.role);
}

// The connection was made, or not.
static bool connected(struct end *end) {
    if (option(end->fd, SOL_SOCKET, SO_ERROR) != 0)
        return false;
    end->stream = new_stream(next.service);
    return say_name(end);
}

static void act(int fd) {
    struct end *end = &by_fd[fd];
    enum result result = AGAIN;
    if (is_connecting(end))
        result = connected(end) ? AGAIN : DONE;
    else if (!end->stream)
        hear_name(end, MSG_DONTWAIT, &result);
    if (result == AGAIN && end->stream)
        result = pump(end, edge);
    if (result == DONE) {
        forget(fd);
        close(fd);
        return;
    }
    enum kind kind = end->stream ? due(end) : NOTHING;
    if (kind == EXEC) {
        replace_all();
    } else if (kind != NOTHING) {
        // What waits for the child would keep the others waiting.
        forget(fd);
        hand_to_child(end, kind == CHILD_EXEC ? kind : TO_CHILD, alone);
        return;
    }
    watch(EPOLL_CTL_MOD, end);
}

static void accept_all(void) {
    int fd;
    while ((fd = accept4(next.listener, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
        if (draw(4) == 0)
            accept_by_child(fd, alone);
        else
            add((struct end){fd, NULL, SERVER, true, true});
    }
    CHECK(errno == EAGAIN || errno == ECONNABORTED);
}

static void look(int timeout) {
    struct epoll_event events[16];
    int n = epoll_pwait(set, events, 16, timeout, &wait_mask);
    CHECK(n >= 0 || errno == EINTR);
    for (int i = 0; i < n; i++) {
        int fd = events[i].data.fd;
        if (fd == next.listener)
            accept_all();
        else if (used[fd])
            act(fd);
    }
}

void serve_many(struct end *ends, int n) {
    begin(ends, n);
    struct epoll_event event = {EPOLLIN, {.fd = next.listener}};
    if (next.listener >= 0)
        OK(epoll_ctl(set, EPOLL_CTL_ADD, next.listener, &event));
    while (next.listener >= 0 || count > 0) {
        look(-1);
        if (stopping() && next.listener >= 0) {
            OK(epoll_ctl(set, EPOLL_CTL_DEL, next.listener, NULL));
            close(next.listener);
            next.listener = -1;
        }
    }
    end_well();
}

// False: nobody listens.
static bool start(void) {
    socklen_t len;
    struct sockaddr_storage to = address_of("127.0.0.1", next.port, &len);
    int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (connect(fd, (struct sockaddr *)&to, len) < 0 && errno != EINPROGRESS) {
        CHECK(errno == ECONNREFUSED || errno == ECONNRESET);
        close(fd);
        return false;
    }
    add((struct end){fd, NULL, CLIENT, true, true});
    return true;
}

void talk_many(struct end *ends, int n) {
    begin(ends, n);
    while (!table->stop || count > 0) {
        bool rests = table->pause || table->stop;
        while (!rests && count < CLIENTS && start())
            ;
        // Without a stream of its own, it looks for the end of the pause, or for the server.
        look(count > 0 ? -1 : 1);
    }
    end_well();
}
