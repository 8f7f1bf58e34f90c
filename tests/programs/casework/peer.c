// The obedient peer and how it is told what to do.
#include "peer.h"

#include <stddef.h>

#define LIMIT (1 << 20)

// The same for 32-bit and 64-bit programs, which may be each other's peers.
struct request {
    int32_t op, fd;
    int64_t a, b, c;
    uint64_t in;
};
struct reply {
    int64_t value, error;
    uint64_t out;
};

bool peer_is_plain;
static int control = -1;
static pid_t pid, tid;
static pthread_t thread;
static bool running;
static char *data;

static void put(int fd, const void *buf, size_t n) {
    for (const char *p = buf; n > 0;) {
        ssize_t r = OK(TEMP_FAILURE_RETRY(write(fd, p, n)));
        p += r;
        n -= r;
    }
}

// False at the end of the other side.
static bool get(int fd, void *buf, size_t n) {
    for (char *p = buf; n > 0;) {
        ssize_t r = OK(TEMP_FAILURE_RETRY(read(fd, p, n)));
        if (r == 0)
            return false;
        p += r;
        n -= r;
    }
    return true;
}

static void *serve_thread(void *arg) {
    // Signals of the process are for the case's own thread.
    sigset_t all;
    sigfillset(&all);
    EQ(pthread_sigmask(SIG_BLOCK, &all, NULL), 0);
    peer_serve((int)(intptr_t)arg);
    return NULL;
}

const char *own_path(void) {
    static char path[PATH_MAX];
    OK(readlink("/proc/self/exe", path, sizeof path - 1));
    return path;
}

static void start(void) {
    int ends[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
    if (variant.remote) {
        char number[16];
        // A peer of another class is another program.
        const char *other = getenv("USMC_TESTS_PEER"), *path = other ? other : own_path();
        snprintf(number, sizeof number, "%d", ends[1]);
        pid = OK(fork());
        if (pid == 0) {
            OK(fcntl(ends[1], F_SETFD, 0));
            if (peer_is_plain)
                OK(unsetenv("LD_PRELOAD"));
            execl(path, path, "--peer", number, (char *)NULL);
            _exit(127);
        }
        close(ends[1]);
    } else {
        pid = getpid();
        EQ(pthread_create(&thread, NULL, serve_thread, (void *)(intptr_t)ends[1]), 0);
    }
    control = ends[0];
    CHECK(data = malloc(LIMIT));
    CHECK(get(control, &tid, sizeof tid));
}

void peer_end_all(void) {
    if (control < 0)
        return;
    if (running)
        peer_end();
    close(control);
    control = -1;
    if (!variant.remote)
        EQ(pthread_join(thread, NULL), 0);
    else if (pid > 0)
        child_succeeds(pid);
}

void peer_forget(void) {
    int status;
    EQ(waitpid(pid, &status, 0), pid);
    EQ(status, SIGKILL);
    close(control);
    control = -1;
}

pid_t peer_pid(void) {
    return pid;
}

static void request(struct request *r, const void *in) {
    CHECK(!running && r->in <= LIMIT);
    if (control < 0)
        start();
    put(control, r, sizeof *r);
    put(control, in, r->in);
    char begun;
    CHECK(get(control, &begun, 1));
    running = true;
}

void peer_begin(enum op op, int fd, long a, long b, long c) {
    request(&(struct request){op, fd, a, b, c, 0}, NULL);
}

static long answer(void *out, size_t room) {
    struct reply reply;
    running = false;
    if (!get(control, &reply, sizeof reply))
        check_failed(__FILE__, __LINE__, "the peer answers", "it is gone");
    CHECK(get(control, data, reply.out));
    CHECK(reply.out <= room || !out);
    if (out)
        memcpy(out, data, reply.out);
    errno = reply.error;
    return reply.value;
}

long peer_end(void) {
    return answer(NULL, 0);
}

void peer_asleep(void) {
    CHECK(running);
    wait_asleep(pid, tid);
}

long peer_call(enum op op, int fd, long a, long b, long c) {
    peer_begin(op, fd, a, b, c);
    if (op == P_EXIT || op == P_KILL) {
        int status;
        running = false;
        EQ(waitpid(pid, &status, 0), pid);
        EQ(status, op == P_EXIT ? 0 : SIGKILL);
        close(control);
        control = -1;
        pid = -1;
        return 0;
    }
    return answer(NULL, 0);
}

long peer_send(int fd, const void *buf, size_t n, int flags) {
    request(&(struct request){P_SEND, fd, flags, 0, 0, n}, buf);
    return answer(NULL, 0);
}

int peer_mailbox(bool path, struct sockaddr_un *at, socklen_t *len) {
    peer_begin(P_MAILBOX, -1, path, 0, 0);
    int fd = OK(peer_end());
    memcpy(at, data, sizeof *at);
    *len = path ? offsetof(struct sockaddr_un, sun_path) + strlen(at->sun_path) + 1 : sizeof(sa_family_t) + 6;
    return fd;
}

long peer_recv(int fd, void *buf, size_t n, int flags) {
    request(&(struct request){P_RECV, fd, n, flags, 0, 0}, NULL);
    return answer(buf, n);
}

void peer_says(int fd, const char *text) {
    EQ(peer_send(fd, text, strlen(text), 0), strlen(text));
}

void peer_hears(int fd, const char *text) {
    char buf[4096];
    size_t n = strlen(text);
    CHECK(n < sizeof buf);
    EQ(peer_recv(fd, buf, n, MSG_WAITALL), n);
    CHECK(!memcmp(buf, text, n));
}

int peer_take(int fd) {
    peer_begin(P_TAKE, -1, 0, 0, 0);
    send_fd(control, fd);
    return OK(peer_end());
}

static void warm(struct pair p) {
    for (int i = 0; i < 16; i++) {
        char sent = i, got = -1;
        EQ(send(p.fd, &sent, 1, 0), 1);
        EQ(peer_recv(p.peer, &got, 1, 0), 1);
        EQ(got, sent);
        EQ(peer_send(p.peer, &sent, 1, 0), 1);
        EQ(recv(p.fd, &got, 1, 0), 1);
        EQ(got, sent);
    }
    assert_smcd(p.fd);
}

struct pair pair_open(void) {
    if (control < 0)
        start();
    return pair_of(OK(socket(AF_INET, SOCK_STREAM, 0)), -1);
}

struct pair pair_of(int fd, int peer) {
    struct pair p = {fd, peer};
    uint16_t port = 0;
    if (variant.client) {
        int listener = OK(peer_call(P_LISTEN, peer, 0, 0, 0));
        memcpy(&port, data, sizeof port);
        OK(connect_at(fd, loopback_of(fd), port));
        p.peer = OK(peer_call(P_ACCEPT, listener, 0, 0, 0));
        OK(peer_call(P_CLOSE, listener, 0, 0, 0));
    } else {
        listen_at(fd, loopback_of(fd), &port);
        p.peer = OK(peer_call(P_CONNECT, peer, port, 0, 0));
        p.fd = OK(accept(fd, NULL, NULL));
        close(fd);
    }
    if (variant.warm)
        warm(p);
    return p;
}

void pair_close(struct pair p) {
    OK(close(p.fd));
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}

int pair_talk(struct pair p, int at, int times) {
    for (int i = 0; i < times; i++, at += 10) {
        send_all(p.fd, 1, at, 10);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at, 10), 0);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, at, 10), 0);
        recv_all(p.fd, 2, at, 10);
    }
    return at;
}

int ends_talk(const int ends[2], int at, int times) {
    for (int i = 0; i < times; i++, at += 10) {
        for (int from = 0; from < 2; from++) {
            send_all(ends[from], 1 + from, at, 10);
            recv_all(ends[1 - from], 1 + from, at, 10);
        }
    }
    return at;
}

// --- the peer's side

long echo(int fd) {
    long total = 0;
    char buf[65536];
    for (ssize_t n; (n = OK(recv(fd, buf, sizeof buf, 0))) > 0; total += n)
        for (ssize_t sent = 0; sent < n;)
            sent += OK(send(fd, buf + sent, n - sent, 0));
    OK(close(fd));
    return total;
}

static long epoll_accept(int listener) {
    int ep = OK(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN};
    nonblocking(listener, true);
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, listener, &event));
    EQ(epoll_wait(ep, &event, 1, 20000), 1);
    int fd = OK(accept(listener, NULL, NULL));
    FAILS(accept(listener, NULL, NULL), EAGAIN);
    OK(epoll_ctl(ep, EPOLL_CTL_DEL, listener, NULL));
    close(ep);
    return fd;
}

// Where requests come from, on the peer's side.
static __thread int requests;

static long mailbox(bool path, struct sockaddr_un *at, size_t *out) {
    int fd = OK(socket(AF_UNIX, SOCK_DGRAM, 0));
    *at = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (path)
        snprintf(at->sun_path, sizeof at->sun_path, "mailbox.%d", fd);
    unlink(at->sun_path);
    // Without a path the kernel makes a name.
    OK(bind(fd, (struct sockaddr *)at, path ? sizeof *at : sizeof(sa_family_t)));
    socklen_t len = sizeof *at;
    OK(getsockname(fd, (struct sockaddr *)at, &len));
    *out = len;
    return fd;
}

static long reset(int fd) {
    struct linger linger = {1, 0};
    OK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    return close(fd);
}

long unseen(long number, long a, long b, long c) {
    long result;
#ifdef __x86_64__
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
#else
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c) : "memory");
#endif
    return result < 0 ? (errno = -result, -1) : result;
}

static long perform(const struct request *r, char *buf, size_t *out) {
    struct pollfd p = {.fd = r->fd, .events = r->a};
    uint16_t port = 0;
    int count = 0;
    char byte;
    long value;
    switch ((enum op)r->op) {
    case P_SOCKET:
        return stream(r->a, r->b, 0);
    case P_CONNECT:
        if (r->fd < 0)
            return connect_to(r->a);
        OK(connect_at(r->fd, loopback_of(r->fd), r->a));
        return r->fd;
    case P_LISTEN:
        value = r->fd < 0 ? listen_here(&port) : listen_at(r->fd, loopback_of(r->fd), &port);
        memcpy(buf, &port, sizeof port);
        *out = sizeof port;
        return value;
    case P_ACCEPT:
        return accept(r->fd, NULL, NULL);
    case P_SERVE:
        OK(listen(r->fd, 100));
        return accept(r->fd, NULL, NULL);
    case P_EPOLL_ACCEPT:
        return epoll_accept(r->fd);
    case P_TAKE:
        return receive_fd(r->fd < 0 ? requests : r->fd);
    case P_FETCH:
        return fetch_fd(r->a, r->fd);
    case P_MAILBOX:
        return mailbox(r->a, (struct sockaddr_un *)buf, out);
    case P_SEND:
        return send(r->fd, buf, r->in, r->a | MSG_NOSIGNAL);
    case P_RECV:
        value = recv(r->fd, buf, r->a, r->b);
        *out = value > 0 ? value : 0;
        return value;
    case P_SEND_PATTERN:
        send_all(r->fd, r->a, r->b, r->c);
        return 0;
    case P_RECV_PATTERN:
        recv_all(r->fd, r->a, r->b, r->c);
        return 0;
    case P_RECV_TO_EOF:
        recv_to_eof(r->fd, r->a, r->b, r->c);
        return 0;
    case P_ECHO:
        return echo(r->fd);
    case P_SHUTDOWN:
        return shutdown(r->fd, r->a);
    case P_CLOSE:
        return close(r->fd);
    case P_RESET:
        return reset(r->fd);
    case P_OPTION:
        count = r->c;
        return setsockopt(r->fd, r->a, r->b, &count, sizeof count);
    case P_GET_OPTION:
        return option(r->fd, r->a, r->b);
    case P_POLL:
        value = poll(&p, 1, r->b);
        return value < 0 ? value : p.revents;
    case P_NONBLOCK:
        nonblocking(r->fd, r->a);
        return 0;
    case P_FIONREAD:
        OK(ioctl(r->fd, FIONREAD, &count));
        return count;
    case P_READ_UNSEEN:
        return unseen(SYS_read, r->fd, (long)&byte, 1);
    case P_EXIT:
        _exit(0);
    case P_KILL:
        return raise(SIGKILL);
    }
    check_failed(__FILE__, __LINE__, "a known request", "op %d", r->op);
}

void peer_serve(int to) {
    char *buf = malloc(LIMIT);
    pid_t me = gettid();
    CHECK(buf);
    put(to, &me, sizeof me);
    for (struct request r; get(to, &r, sizeof r);) {
        struct reply reply = {0};
        CHECK(get(to, buf, r.in));
        put(to, "", 1);
        requests = to;
        errno = 0;
        size_t out = 0;
        reply.value = perform(&r, buf, &out);
        reply.out = out;
        reply.error = errno;
        put(to, &reply, sizeof reply);
        put(to, buf, reply.out);
    }
    close(to);
    free(buf);
}

void both_ends(int ends[2], bool client, int rounds) {
    uint16_t port;
    int listener = listen_here(&port), first = connect_to(port);
    int second = OK(accept(listener, NULL, NULL));
    close(listener);
    ends[0] = client ? first : second;
    ends[1] = client ? second : first;
    OK(fcntl(first, F_SETFD, FD_CLOEXEC));
    OK(fcntl(second, F_SETFD, FD_CLOEXEC));
    for (int i = 0; i < rounds; i++) {
        send_all(ends[0], 1, i * 10, 10);
        recv_all(ends[1], 1, i * 10, 10);
        send_all(ends[1], 2, i * 10, 10);
        recv_all(ends[0], 2, i * 10, 10);
    }
}

static void *receives(void *arg) {
    struct one_way *s = arg;
    recv_all(s->fd, s->seed, 0, s->bytes);
    return NULL;
}

static void *sends(void *arg) {
    struct one_way *s = arg;
    char buf[2000];
    for (size_t at = 0, n; at < s->bytes; at += n) {
        n = 1 + (at * 7919 + s->seed) % sizeof buf;
        n = n < s->bytes - at ? n : s->bytes - at;
        send_all(s->fd, s->seed, at, n);
    }
    return NULL;
}

void streams_begin(struct streams *s, const int ends[2], size_t bytes) {
    for (int i = 0; i < 2; i++) {
        s->to[i] = (struct one_way){ends[i], 7 + i, bytes};
        s->from[i] = (struct one_way){ends[1 - i], 7 + i, bytes};
        EQ(pthread_create(&s->threads[i], NULL, sends, &s->to[i]), 0);
        EQ(pthread_create(&s->threads[2 + i], NULL, receives, &s->from[i]), 0);
    }
}

void streams_end(struct streams *s) {
    for (int i = 0; i < 4; i++)
        EQ(pthread_join(s->threads[i], NULL), 0);
}
