// One process of a torture program: its threads do what the controller says, a line at a time, and answer what came
// of it.
//
//   request   OP ARGUMENT...            numbers; sockets by handle
//   answer    RESULT ERRNO SIGPIPES TEXT
//
// SIGPIPES are those of this process since its last answer. Handles number the sockets of the whole program; this
// process' descriptor of one is in `fds`. Control connections are UNIX sockets at high numbers.
#include "check.h"
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/un.h>

enum { HANDLES = 64, THREADS = 2, MOST = 1 << 17, CONTROL = 700, ARGS = 40, TEXT = 1000 };

static int fds[HANDLES];
static const char *path;
static int process;
static _Atomic int sigpipes, sigusrs;
static pthread_t threads[THREADS];
// Whether an epoll set of this process waits for edges.
static _Atomic bool has_edges;
// Bytes that each thread has sent, which the next ones are made of.
static uint64_t sent[THREADS];

struct worker {
    int number, control;
    long arg[ARGS];
    int args;
    char text[TEXT];
    char *bytes;
};

static void on_signal(int number) {
    if (number == SIGPIPE)
        sigpipes++;
    else
        sigusrs++;
}

static int fd_of(long handle) {
    return handle >= 0 && handle < HANDLES ? fds[handle] : -1;
}

// What every new TCP socket gets: a delay by Nagle's algorithm would be a matter of timing.
static void adopt(long handle, int fd) {
    int one = 1;
    if (fd >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        fds[handle] = fd;
    }
}

static uint64_t digest(const char *bytes, size_t n) {
    uint64_t h = 0xcbf29ce484222325;
    for (size_t i = 0; i < n; i++)
        h = (h ^ (unsigned char)bytes[i]) * 0x100000001b3;
    return h;
}

static size_t length(long n) {
    return n < 0 ? 0 : n > MOST ? MOST : (size_t)n;
}

// An array of `parts` pieces over the worker's buffer.
static int pieces(struct worker *w, size_t n, struct iovec *iov, int parts) {
    size_t at = 0;
    for (int i = 0; i < parts; i++) {
        size_t len = i + 1 == parts ? n - at : n / parts;
        iov[i] = (struct iovec){w->bytes + at, len};
        at += len;
    }
    return parts;
}

// --- operations: arguments in `w->arg`, the result is the call's

// By its handle, a socket is of TCP, AF_SMC or IPPROTO_SMC; over TCP they are all the same.
static int made(long handle, bool six, int flags) {
    if (handle % 3 == 1)
        return stream(AF_SMC, six ? SMCPROTO_SMC6 : SMCPROTO_SMC, flags);
    return stream(six ? AF_INET6 : AF_INET, handle % 3 ? IPPROTO_SMC : 0, flags);
}

// listen HANDLE FAMILY BACKLOG: the port as the result
static long op_listen(struct worker *w) {
    bool six = w->arg[1] == 6;
    int fd = made(w->arg[0], six, SOCK_CLOEXEC);
    uint16_t port = 0;
    socklen_t len;
    struct sockaddr_storage at = address_of(six ? "::" : "127.0.0.1", 0, &len);
    if (bind(fd, (struct sockaddr *)&at, len) < 0 || listen(fd, w->arg[2]) < 0)
        return -1;
    port = local_port(fd);
    fds[w->arg[0]] = fd;
    return port;
}

// connect HANDLE PORT FAMILY NONBLOCK: 6 is ::1, 46 is 127.0.0.1 mapped
static long op_connect(struct worker *w) {
    long family = w->arg[2];
    const char *to = family == 6 ? "::1" : family == 46 ? "::ffff:127.0.0.1" : "127.0.0.1";
    int fd = made(w->arg[0], family != 4, SOCK_CLOEXEC | (w->arg[3] ? SOCK_NONBLOCK : 0));
    adopt(w->arg[0], fd);
    socklen_t len;
    struct sockaddr_storage at = address_of(to, w->arg[1], &len);
    return connect(fd, (struct sockaddr *)&at, len);
}

// accept HANDLE LISTENER NONBLOCK
static long op_accept(struct worker *w) {
    int fd = accept4(fd_of(w->arg[1]), NULL, NULL, SOCK_CLOEXEC | (w->arg[2] ? SOCK_NONBLOCK : 0));
    adopt(w->arg[0], fd);
    return fd < 0 ? fd : 0;
}

static long op_close(struct worker *w) {
    int fd = fd_of(w->arg[0]);
    if (fd >= 0)
        fds[w->arg[0]] = -1;
    return close(fd);
}

// dup NEW OLD
static long op_dup(struct worker *w) {
    int fd = dup(fd_of(w->arg[1]));
    if (fd >= 0)
        fds[w->arg[0]] = fd;
    return fd < 0 ? fd : 0;
}

// pass NEW OLD: a duplicate by way of a message
static long op_pass(struct worker *w) {
    int channel[2], fd = fd_of(w->arg[1]);
    if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, channel) < 0)
        return -2;
    char byte = 0, control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec iov = {&byte, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&msg);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    long done = sendmsg(channel[0], &msg, 0);
    if (done == 1 && recvmsg(channel[1], &msg, MSG_CMSG_CLOEXEC) == 1) {
        memcpy(&fds[w->arg[0]], CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof fd);
        done = 0;
    }
    int error = errno;
    close(channel[0]);
    close(channel[1]);
    errno = error;
    return done;
}

// dup2 ONTO OLD: both name the socket of OLD afterwards
static long op_dup2(struct worker *w) {
    int fd = dup2(fd_of(w->arg[1]), fd_of(w->arg[0]));
    return fd < 0 ? fd : 0;
}

// disconnect HANDLE: connect(2) to AF_UNSPEC
static long op_disconnect(struct worker *w) {
    struct sockaddr none = {.sa_family = AF_UNSPEC};
    return connect(fd_of(w->arg[0]), &none, sizeof none);
}

// When a FIN is acknowledged is a matter of timing (TCP_DELACK_MIN is 40 ms), and an edge for who waits for room. Where it
// is held up by unread bytes nobody waits for it. Not a sleep, which would look like the call's.
static void await_acknowledgement(int fd) {
    struct tcp_info info;
    socklen_t len = sizeof info;
    int error = errno;
    for (double until = now() + 0.06; now() < until; sched_yield())
        if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) < 0 ||
            (info.tcpi_state != TCP_FIN_WAIT1 && info.tcpi_state != TCP_CLOSING && info.tcpi_state != TCP_LAST_ACK))
            break;
    errno = error;
}

// shutdown HANDLE HOW
static long op_shutdown(struct worker *w) {
    int fd = fd_of(w->arg[0]);
    long done = shutdown(fd, w->arg[1]);
    if (has_edges)
        await_acknowledgement(fd);
    return done;
}

// nonblock HANDLE ON BY_IOCTL
static long op_nonblock(struct worker *w) {
    int fd = fd_of(w->arg[0]), on = w->arg[1];
    if (w->arg[2])
        return ioctl(fd, FIONBIO, &on);
    int flags = fcntl(fd, F_GETFL);
    return flags < 0 ? -1 : fcntl(fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK);
}

// send HANDLE HOW LENGTH FLAGS
static long op_send(struct worker *w) {
    int fd = fd_of(w->arg[0]), flags = w->arg[3];
    size_t n = length(w->arg[2]);
    pattern(process * THREADS + w->number + 1, sent[w->number], w->bytes, n);
    sent[w->number] += n;
    struct iovec iov[3];
    struct msghdr msg = {.msg_iov = iov};
    switch (w->arg[1]) {
    case 0: return send(fd, w->bytes, n, flags);
    case 1: return write(fd, w->bytes, n);
    case 2: return writev(fd, iov, pieces(w, n, iov, 3));
    case 3:
        msg.msg_iovlen = pieces(w, n, iov, 2);
        return sendmsg(fd, &msg, flags);
    case 4: {
        struct mmsghdr two[2] = {{.msg_hdr = msg}, {.msg_hdr = msg}};
        pieces(w, n, iov, 2);
        two[0].msg_hdr.msg_iovlen = two[1].msg_hdr.msg_iovlen = 1;
        two[1].msg_hdr.msg_iov = iov + 1;
        long done = sendmmsg(fd, two, 2, flags);
        for (long i = 0; i < done; i++)
            snprintf(w->text + strlen(w->text), 40, "%u,", two[i].msg_len);
        return done;
    }
    case 5: {
        int file = memfd_create("torture", MFD_CLOEXEC);
        off_t at = 0;
        long done = -1;
        if (write(file, w->bytes, n) == (ssize_t)n)
            done = sendfile(fd, file, &at, n);
        int error = errno;
        close(file);
        errno = error;
        return done;
    }
    default: {
        int pipes[2];
        if (n > 4096)
            n = 4096;
        if (pipe2(pipes, O_CLOEXEC) < 0 || (n > 0 && write(pipes[1], w->bytes, n) != (ssize_t)n))
            return -2;
        close(pipes[1]);
        long done = splice(pipes[0], NULL, fd, NULL, n, 0);
        int error = errno;
        close(pipes[0]);
        errno = error;
        return done;
    }
    }
}

// recv HANDLE HOW LENGTH FLAGS: the bytes' digest as the text
static long op_recv(struct worker *w) {
    int fd = fd_of(w->arg[0]), flags = w->arg[3];
    size_t n = length(w->arg[2]);
    struct iovec iov[3];
    struct msghdr msg = {.msg_iov = iov};
    long done;
    switch (w->arg[1]) {
    case 0: done = recv(fd, w->bytes, n, flags); break;
    case 1: done = read(fd, w->bytes, n); break;
    case 2: done = readv(fd, iov, pieces(w, n, iov, 3)); break;
    case 3:
        msg.msg_iovlen = pieces(w, n, iov, 2);
        done = recvmsg(fd, &msg, flags);
        if (done >= 0)
            snprintf(w->text, TEXT, "flags %x ", msg.msg_flags);
        break;
    case 4: {
        struct sockaddr_storage from;
        socklen_t len = sizeof from;
        done = recvfrom(fd, w->bytes, n, flags, (struct sockaddr *)&from, &len);
        break;
    }
    default: {
        int pipes[2];
        if (pipe2(pipes, O_CLOEXEC) < 0)
            return -2;
        done = splice(fd, NULL, pipes[1], NULL, n > 4096 ? 4096 : n, 0);
        int error = errno;
        if (done > 0 && read(pipes[0], w->bytes, done) != done)
            done = -3;
        close(pipes[0]);
        close(pipes[1]);
        errno = error;
    }
    }
    // MSG_TRUNC copies nothing.
    if (done > 0 && !(flags & MSG_TRUNC))
        snprintf(w->text + strlen(w->text), 40, "%016lx", digest(w->bytes, (size_t)done < n ? (size_t)done : n));
    return done;
}

// flood HANDLE LENGTH SEED: sends so many bytes, waiting for room
static long op_flood(struct worker *w) {
    struct pollfd room = {fd_of(w->arg[0]), POLLOUT, 0};
    long at = 0;
    while (at < w->arg[1]) {
        size_t n = length(w->arg[1] - at);
        pattern(w->arg[2], at, w->bytes, n);
        ssize_t done = send(room.fd, w->bytes, n, MSG_NOSIGNAL);
        if (done < 0 && errno != EAGAIN)
            return -1;
        if (done < 0)
            poll(&room, 1, -1);
        at += done > 0 ? done : 0;
    }
    return 0;
}

// Bytes that went to the kernel by this socket, and not by a ring.
static uint64_t sent_by_tcp(int fd) {
    // Of the kernel's struct tcp_info (linux/tcp.h), which goes on where libc's ends.
    struct {
        uint32_t words[36], not_sent, more[13];
        uint64_t sent;
    } info = {0};
    _Static_assert(offsetof(typeof(info), sent) == 200, "the place of tcpi_bytes_sent");
    socklen_t len = sizeof info;
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) < 0 ? 0 : info.sent + info.not_sent;
}

// fill HANDLE SEED PIECE LEAST MOST AT: sends pieces until there is no room and none comes before somebody reads. The
// controller keeps the number for itself, judges it by the limits, and says where in the stream this begins.
static long op_fill(struct worker *w) {
    int fd = fd_of(w->arg[0]);
    size_t piece = length(w->arg[2] ? w->arg[2] : 1 << 14);
    long at = w->arg[5];
    uint64_t by_tcp = sent_by_tcp(fd);
    struct pollfd room = {fd, POLLOUT, 0};
    ssize_t done;
    // A receiver of TCP's that has no memory drops what it gets, and is sent it again later and later: little moves then.
    for (double until = now() + 1.5;;) {
        bool was_still = nothing_moves(fd);
        pattern(w->arg[1], at, w->bytes, piece);
        done = send(fd, w->bytes, piece, MSG_DONTWAIT | MSG_NOSIGNAL);
        at += done > 0 ? done : 0;
        if (done > 0)
            continue;
        if (done == 0 || errno != EAGAIN)
            break;
        if (now() > until || (was_still && (poll(&room, 1, 0) == 0 || !(room.revents & POLLOUT)))) {
            errno = EAGAIN;
            break;
        }
        poll(NULL, 0, 1);
    }
    int error = errno;
    at -= w->arg[5];
    bool in_ring = at > 0 && sent_by_tcp(fd) - by_tcp < (uint64_t)at / 2;
    snprintf(w->text, TEXT, "#%ld %d", at, in_ring);
    errno = error;
    return done;
}

// push HANDLE SEED LENGTH HOW FLAGS LIMIT AT: one send of any size, for at most so many milliseconds; 0 = for ever.
// What went is told as none, a part or all.
static long op_push(struct worker *w) {
    int fd = fd_of(w->arg[0]), flags = w->arg[4] | MSG_NOSIGNAL, file = -1;
    size_t n = w->arg[2] > 0 ? w->arg[2] : 0;
    long limit = w->arg[5], at = w->arg[6];
    struct timeval none = {0}, time = {limit / 1000, limit % 1000 * 1000};
    char *bytes = malloc(n + 1), *mine = w->bytes;
    CHECK(bytes);
    pattern(w->arg[1], at, bytes, n);
    struct iovec iov[3];
    struct msghdr msg = {.msg_iov = iov};
    if (w->arg[3] == 5) {
        file = memfd_create("torture", MFD_CLOEXEC);
        CHECK(write(file, bytes, n) == (ssize_t)n);
    }
    if (limit)
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
    w->bytes = bytes;
    off_t from = 0;
    ssize_t done;
    switch (w->arg[3]) {
    case 0: done = send(fd, bytes, n, flags); break;
    case 1: done = write(fd, bytes, n); break;
    case 2: done = writev(fd, iov, pieces(w, n, iov, 3)); break;
    case 3:
        msg.msg_iovlen = pieces(w, n, iov, 2);
        done = sendmsg(fd, &msg, flags);
        break;
    default: done = sendfile(fd, file, &from, n);
    }
    int error = errno;
    w->bytes = mine;
    if (limit)
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &none, sizeof none);
    if (file >= 0)
        close(file);
    free(bytes);
    snprintf(w->text, TEXT, "%s#%zd", done <= 0 ? "none" : (size_t)done < n ? "part" : "all", done > 0 ? done : 0);
    errno = error;
    return done < 0 ? -1 : 0;
}

// One receive in a way of its own.
static ssize_t take(struct worker *w, int fd, size_t n, long how) {
    struct iovec iov[3];
    struct msghdr msg = {.msg_iov = iov};
    int pipes[2];
    ssize_t done;
    switch (how) {
    case 1: return read(fd, w->bytes, n);
    case 2: return readv(fd, iov, pieces(w, n, iov, 3));
    case 3: msg.msg_iovlen = pieces(w, n, iov, 2); return recvmsg(fd, &msg, 0);
    case 4:
        done = recv(fd, w->bytes, n, MSG_PEEK);
        return done <= 0 ? done : recv(fd, w->bytes, done, 0);
    case 5:
        if (pipe2(pipes, O_CLOEXEC) < 0)
            return -2;
        done = splice(fd, NULL, pipes[1], NULL, n, 0);
        int error = errno;
        if (done > 0 && read(pipes[0], w->bytes, done) != done)
            done = -3;
        close(pipes[0]);
        close(pipes[1]);
        errno = error;
        return done;
    case 6: return recv(fd, w->bytes, n, MSG_WAITALL);
    default: return recv(fd, w->bytes, n, 0);
    }
}

// Receives so many bytes of a stream from `at` on, waiting for them.
static long drain(struct worker *w, size_t bytes, uint64_t seed, long how, size_t piece, uint64_t at) {
    struct pollfd data = {fd_of(w->arg[0]), POLLIN, 0};
    char *expected = malloc(MOST);
    bool same = true;
    ssize_t done = 1;
    while (bytes > 0 && done != 0) {
        done = take(w, data.fd, bytes < piece ? bytes : piece, how);
        if (done < 0 && errno != EAGAIN)
            break;
        if (done < 0)
            poll(&data, 1, -1);
        if (done > 0) {
            pattern(seed, at, expected, done);
            same = same && !memcmp(expected, w->bytes, done);
            at += done;
            bytes -= done;
        }
    }
    int error = errno;
    free(expected);
    snprintf(w->text, TEXT, "%s", bytes > 0 ? "ended" : same ? "same" : "differs");
    errno = error;
    return done < 0 ? -1 : 0;
}

// drain HANDLE LENGTH SEED HOW PIECE AT: receives what `flood`, `fill` or `push` has sent. Where in the stream this is
// says the controller.
static long op_drain(struct worker *w) {
    size_t piece = length(w->arg[4]);
    return drain(w, w->arg[1] > 0 ? w->arg[1] : 0, w->arg[2], w->arg[3], piece ? piece : MOST, w->arg[5]);
}

// talk HANDLE ROUNDS LENGTH SEED TURN: sends and receives messages by turns, beginning with a send where TURN is 0
static long op_talk(struct worker *w) {
    long rounds = w->arg[1], size = w->arg[2], seed = w->arg[3], turn = w->arg[4], done = 0;
    for (long i = 0; i < 2 * rounds && done == 0; i++) {
        w->arg[1] = size;
        w->arg[2] = seed + i;
        done = (i + turn) % 2 ? drain(w, size, seed + i, 0, MOST, 0) : op_flood(w);
        if (w->text[0] && strcmp(w->text, "same"))
            return done;
    }
    return done;
}

// option HANDLE WHICH VALUE
static long op_option(struct worker *w) {
    int fd = fd_of(w->arg[0]), value = w->arg[2];
    struct linger linger = {.l_onoff = 1, .l_linger = value};
    switch (w->arg[1]) {
    case 0: return setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value);
    case 1: return setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    case 2: return setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &value, sizeof value);
    case 3: return setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &value, sizeof value);
    case 5: return setsockopt(fd, IPPROTO_TCP, TCP_CORK, &value, sizeof value);
    case 6: return setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &value, sizeof value);
    case 7: return setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &value, sizeof value);
    default: return setsockopt(fd, SOL_SOCKET, SO_PEEK_OFF, &value, sizeof value);
    }
}

// ask HANDLE WHICH
static long op_ask(struct worker *w) {
    int fd = fd_of(w->arg[0]), value = -1;
    socklen_t len = sizeof value;
    long done = -1;
    switch (w->arg[1]) {
    case 0: done = getsockopt(fd, SOL_SOCKET, SO_ERROR, &value, &len); break;
    case 1: done = getsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &value, &len); break;
    case 2: done = getsockopt(fd, SOL_SOCKET, SO_TYPE, &value, &len); break;
    case 3: done = ioctl(fd, FIONREAD, &value); break;
    case 4: done = getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, &len); break;
    case 5: done = ioctl(fd, SIOCATMARK, &value); break;
    case 6: done = getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &value, &len); break;
    case 9: done = getsockopt(fd, IPPROTO_TCP, TCP_CORK, &value, &len); break;
    case 7: {
        struct sockaddr_storage at;
        len = sizeof at;
        done = getpeername(fd, (struct sockaddr *)&at, &len);
        value = done == 0 ? at.ss_family : -1;
        break;
    }
    default: {
        struct tcp_info info;
        len = sizeof info;
        done = getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len);
        // When the acknowledgement of a FIN comes is a matter of timing.
        value = done < 0 ? -1 : info.tcpi_state == TCP_FIN_WAIT2 ? TCP_FIN_WAIT1 : info.tcpi_state;
    }
    }
    snprintf(w->text, TEXT, "%d", value);
    return done;
}

// poll TIMEOUT (HANDLE EVENTS)...
static long op_poll(struct worker *w) {
    struct pollfd polls[ARGS];
    int n = (w->args - 1) / 2;
    for (int i = 0; i < n; i++)
        polls[i] = (struct pollfd){fd_of(w->arg[1 + 2 * i]), w->arg[2 + 2 * i], 0};
    long done = poll(polls, n, w->arg[0]);
    for (int i = 0; i < n && done >= 0; i++)
        snprintf(w->text + strlen(w->text), 20, "%x,", polls[i].revents);
    return done;
}

// select TIMEOUT (HANDLE SETS)...: 1 reads, 2 writes, 4 exceptions
static long op_select(struct worker *w) {
    fd_set sets[3];
    int n = (w->args - 1) / 2, last = -1;
    for (int s = 0; s < 3; s++)
        FD_ZERO(&sets[s]);
    for (int i = 0; i < n; i++) {
        int fd = fd_of(w->arg[1 + 2 * i]);
        for (int s = 0; s < 3 && fd >= 0 && fd < FD_SETSIZE; s++)
            if (w->arg[2 + 2 * i] & 1 << s)
                FD_SET(fd, &sets[s]);
        last = fd > last ? fd : last;
    }
    struct timeval now = {0};
    long done = select(last + 1, &sets[0], &sets[1], &sets[2], w->arg[0] < 0 ? NULL : &now);
    for (int i = 0; i < n && done >= 0; i++) {
        int fd = fd_of(w->arg[1 + 2 * i]), bits = 0;
        for (int s = 0; s < 3 && fd >= 0 && fd < FD_SETSIZE; s++)
            bits |= !!FD_ISSET(fd, &sets[s]) << s;
        snprintf(w->text + strlen(w->text), 20, "%x,", bits);
    }
    return done;
}

// epoll HANDLE: a new set
static long op_epoll(struct worker *w) {
    int fd = epoll_create1(EPOLL_CLOEXEC);
    if (fd >= 0)
        fds[w->arg[0]] = fd;
    return fd < 0 ? fd : 0;
}

// control SET OP HANDLE EVENTS: the handle is the event's data
static long op_control(struct worker *w) {
    struct epoll_event event = {w->arg[3], {.u64 = w->arg[2]}};
    if (w->arg[1] != EPOLL_CTL_DEL && event.events & EPOLLET) {
        has_edges = true;
        await_acknowledgement(fd_of(w->arg[2]));
    }
    return epoll_ctl(fd_of(w->arg[0]), w->arg[1], fd_of(w->arg[2]), &event);
}

static int by_data(const void *a, const void *b) {
    const struct epoll_event *x = a, *y = b;
    return (x->data.u64 > y->data.u64) - (x->data.u64 < y->data.u64);
}

// Known: where rings have something to report, a wait asks the kernel for the others at most every 10 us.
static void let_time_pass(void) {
    for (double until = now() + 11e-6; now() < until;) {
    }
}

// wait SET MOST TIMEOUT: reports in the order of their data
static long op_wait(struct worker *w) {
    struct epoll_event events[16];
    let_time_pass();
    long done = epoll_wait(fd_of(w->arg[0]), events, w->arg[1], w->arg[2]);
    if (done > 0)
        qsort(events, done, sizeof *events, by_data);
    for (long i = 0; i < done; i++)
        snprintf(w->text + strlen(w->text), 40, "%d:%x,", (int)events[i].data.u64, events[i].events);
    return done;
}

// kick THREAD RESTARTS: answered when the signal's handler has run
static long op_kick(struct worker *w) {
    int before = sigusrs, error = pthread_kill(threads[w->arg[0]], w->arg[1] ? SIGUSR2 : SIGUSR1);
    while (!error && sigusrs == before)
        sched_yield();
    return error;
}

// clear: closes all, for the next program
static long op_clear(struct worker *w) {
    (void)w;
    for (int i = 0; i < HANDLES; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
        fds[i] = -1;
    }
    memset(sent, 0, sizeof sent);
    has_edges = false;
    return 0;
}

// Not by dprintf(3): its stream, which a fork of the other thread may copy half-closed, crashes the child's next fork.
__attribute__((format(printf, 2, 3))) static void tell(struct worker *w, const char *format, ...) {
    char line[TEXT + 100];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (write(w->control, line, n) != n)
        _exit(0); // the controller is gone
}

static void attach(struct worker *w) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    strncpy(at.sun_path, path, sizeof at.sun_path - 1);
    int fd = OK(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    OK(connect(fd, (struct sockaddr *)&at, sizeof at));
    w->control = OK(fcntl(fd, F_DUPFD_CLOEXEC, CONTROL));
    close(fd);
    tell(w, "%d %d %d %ld\n", process, w->number, getpid(), syscall(SYS_gettid));
}

static void start(int first);

// fork PROCESS: the child has this thread's place and a second thread
static long op_fork(struct worker *w) {
    pid_t pid = fork();
    if (pid == 0) {
        process = w->arg[0];
        // Control connections of this and the other thread; while we had them, they would outlive the parent.
        for (int fd = CONTROL; fd < CONTROL + 4 * THREADS; fd++)
            close(fd);
        sigpipes = 0;
        threads[0] = pthread_self();
        w->number = 0;
        start(1);
        attach(w);
        return -4;
    }
    return pid < 0 ? pid : 0;
}

// exit BY_SIGNAL
static long op_exit(struct worker *w) {
    if (w->arg[0])
        kill(getpid(), SIGKILL);
    _exit(0);
}

static const struct {
    const char *name;
    long (*run)(struct worker *);
} operations[] = {
    {"listen", op_listen}, {"connect", op_connect}, {"accept", op_accept}, {"close", op_close},
    {"dup", op_dup}, {"dup2", op_dup2}, {"pass", op_pass}, {"disconnect", op_disconnect}, {"shutdown", op_shutdown},
    {"nonblock", op_nonblock}, {"flood", op_flood}, {"fill", op_fill}, {"push", op_push}, {"drain", op_drain}, {"talk", op_talk}, {"send", op_send}, {"recv", op_recv}, {"option", op_option},
    {"ask", op_ask}, {"poll", op_poll}, {"select", op_select}, {"epoll", op_epoll},
    {"control", op_control}, {"wait", op_wait}, {"kick", op_kick}, {"fork", op_fork},
    {"exit", op_exit}, {"clear", op_clear},
};

// The controller sends the next line when it has the answer to the last.
static bool read_line(int fd, char *line, size_t room) {
    for (size_t n = 0; n + 1 < room;) {
        ssize_t got = TEMP_FAILURE_RETRY(read(fd, line + n, room - n - 1));
        if (got <= 0)
            return false;
        n += got;
        line[n] = 0;
        if (line[n - 1] == '\n')
            return true;
    }
    return false;
}

static void *work(void *arg) {
    struct worker *w = arg;
    w->bytes = malloc(MOST);
    attach(w);
    char line[TEXT];
    // The controller is gone, and with it all its processes.
    while (read_line(w->control, line, sizeof line)) {
        char *rest = line, *name = strsep(&rest, " ");
        w->args = 0;
        while (w->args < ARGS && rest && *rest && *rest != '\n')
            w->arg[w->args++] = strtol(rest, &rest, 10);
        memset(w->arg + w->args, 0, (ARGS - w->args) * sizeof *w->arg);
        w->text[0] = 0;
        size_t i = 0;
        while (i < sizeof operations / sizeof *operations && strcmp(operations[i].name, name))
            i++;
        CHECK(i < sizeof operations / sizeof *operations);
        errno = 0;
        long result = operations[i].run(w);
        int error = result == -1 ? errno : 0;
        // The child of a fork answers nothing: nobody asked it.
        if (result != -4)
            tell(w, "%ld %d %d %s\n", result, error, atomic_exchange(&sigpipes, 0), w->text);
    }
    _exit(0);
}

static void start(int first) {
    for (int i = first; i < THREADS; i++) {
        struct worker *w = calloc(1, sizeof *w);
        CHECK(w);
        w->number = i;
        EQ(pthread_create(&threads[i], NULL, work, w), 0);
    }
}

int main(int argc, char **argv) {
    EQ(argc, 3);
    path = argv[1];
    process = atoi(argv[2]);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    memset(fds, -1, sizeof fds);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGPIPE, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR2, &action, NULL);
    signal(SIGCHLD, SIG_IGN);
    start(0);
    pthread_join(threads[0], NULL);
}
