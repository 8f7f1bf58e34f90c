// Options by which the kernel has to see the bytes, or says more about them: they do what they do on TCP.
#include "peer.h"

#include <aio.h>
#include <dlfcn.h>
#ifdef __GLIBC__
#include <execinfo.h>
#endif
#include <linux/aio_abi.h>
#include <linux/errqueue.h>
#include <linux/filter.h>
#include <linux/net_tstamp.h>
#include <linux/tls.h>
#include <sys/mman.h>
#include <sys/time.h>

#ifndef SO_PEEK_OFF
#define SO_PEEK_OFF 42
#endif
#define ORIGIN_TIMESTAMPING 4
#define ORIGIN_ZEROCOPY 5

// Bytes go both ways still.
static void goes_on(struct pair p, uint64_t at) {
    EQ(peer_call(P_SEND_PATTERN, p.peer, 11, at, 5000), 0);
    recv_all(p.fd, 11, at, 5000);
    send_all(p.fd, 12, at, 5000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 12, at, 5000), 0);
}

static void stays_in_the_ring(struct pair p) {
    if (variant.warm)
        assert_smcd(p.fd);
}

// The next control message of the kind, or NULL.
static struct cmsghdr *control_of(struct msghdr *msg, int level, int type) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c))
        if (c->cmsg_level == level && c->cmsg_type == type)
            return c;
    return NULL;
}

struct message {
    struct iovec iov;
    char bytes[64], control[512];
    struct msghdr msg;
};

static ssize_t receive_message(int fd, struct message *m, size_t n, int flags) {
    m->iov = (struct iovec){m->bytes, n};
    m->msg = (struct msghdr){
        .msg_iov = &m->iov, .msg_iovlen = 1, .msg_control = m->control, .msg_controllen = sizeof m->control};
    return recvmsg(fd, &m->msg, flags);
}

// Waits for the next message of the error queue.
static struct sock_extended_err next_error(int fd, struct message *m) {
    wait_events(fd, 0, POLLERR);
    EQ(receive_message(fd, m, 0, MSG_ERRQUEUE), 0);
    CHECK(m->msg.msg_flags & MSG_ERRQUEUE);
    struct cmsghdr *c = control_of(&m->msg, IPPROTO_IP, IP_RECVERR);
    CHECK(c);
    struct sock_extended_err e;
    memcpy(&e, CMSG_DATA(c), sizeof e);
    return e;
}

PAIR_CASE(zero_copy_sends_are_completed) {
    struct pair p = pair_open();
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 700), 0);
    set_option(p.fd, SOL_SOCKET, SO_ZEROCOPY, 1);
    EQ(option(p.fd, SOL_SOCKET, SO_ZEROCOPY), 1);
    char buf[10000];
    for (int i = 0; i < 4; i++) {
        pattern(1, i * sizeof buf, buf, sizeof buf);
        EQ(send(p.fd, buf, sizeof buf, MSG_ZEROCOPY), sizeof buf);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * sizeof buf, sizeof buf), 0);
    }
    for (uint32_t next = 0; next < 4;) {
        struct message m;
        struct sock_extended_err e = next_error(p.fd, &m);
        EQ(e.ee_errno, 0);
        EQ(e.ee_origin, ORIGIN_ZEROCOPY);
        EQ(e.ee_info, next);
        CHECK(e.ee_data >= next && e.ee_data < 4);
        next = e.ee_data + 1;
    }
    struct message m;
    FAILS(receive_message(p.fd, &m, 0, MSG_ERRQUEUE), EAGAIN);
    EQ(events_now(p.fd, 0), 0);
    recv_all(p.fd, 2, 0, 700);
    goes_on(p, 0);
    pair_close(p);
}

PAIR_CASE(zero_copy_without_its_option_is_a_send) {
    struct pair p = pair_open();
    char buf[1000];
    pattern(1, 0, buf, sizeof buf);
    EQ(send(p.fd, buf, sizeof buf, MSG_ZEROCOPY), sizeof buf);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, sizeof buf), 0);
    set_option(p.fd, SOL_SOCKET, SO_ZEROCOPY, 1);
    EQ(send(p.fd, "no flag", 7, 0), 7);
    peer_hears(p.peer, "no flag");
    EQ(events_now(p.fd, 0), 0);
    stays_in_the_ring(p);
    pair_close(p);
}

static const struct tls12_crypto_info_aes_gcm_128 crypto = {
    .info = {TLS_1_2_VERSION, TLS_CIPHER_AES_GCM_128}, .key = "0123456789abcde", .salt = "abc"};

PAIR_CASE(kernel_tls) {
    struct pair p = pair_open();
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 300), 0);
    recv_all(p.fd, 2, 0, 300);
    if (setsockopt(p.fd, IPPROTO_TCP, TCP_ULP, "tls", 3) != 0) {
        // A kernel without it: nothing has happened.
        EQ(errno, ENOENT);
        stays_in_the_ring(p);
    } else {
        // Records as they leave us.
        OK(setsockopt(p.fd, SOL_TLS, TLS_TX, &crypto, sizeof crypto));
        EQ(send(p.fd, "secret", 6, 0), 6);
        unsigned char record[64];
        long n = OK(peer_recv(p.peer, record, 5 + 8 + 6 + 16, MSG_WAITALL));
        EQ(n, 5 + 8 + 6 + 16);
        EQ(record[0], 23);
        CHECK(memcmp(record + 13, "secret", 6));
    }
    FAILS(setsockopt(p.fd, IPPROTO_TCP, TCP_ULP, "no such", 7), ENOENT);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 300, 5000), 0);
    recv_all(p.fd, 2, 300, 5000);
    pair_close(p);
}

PAIR_CASE(peek_offset) {
    struct pair p = pair_open();
    int zero = 0;
    if (setsockopt(p.fd, SOL_SOCKET, SO_PEEK_OFF, &zero, sizeof zero) != 0) {
        EQ(errno, EOPNOTSUPP); // before Linux 6.9
        return;
    }
    EQ(option(p.fd, SOL_SOCKET, SO_PEEK_OFF), 0);
    peer_says(p.peer, "abcdefgh");
    wait_readable(p.fd, 8);
    char buf[16];
    EQ(recv(p.fd, buf, 3, MSG_PEEK), 3);
    EQ(recv(p.fd, buf + 3, 3, MSG_PEEK), 3);
    CHECK(!memcmp(buf, "abcdef", 6));
    EQ(recv(p.fd, buf, 2, 0), 2);
    CHECK(!memcmp(buf, "ab", 2));
    EQ(recv(p.fd, buf, sizeof buf, MSG_PEEK), 2);
    CHECK(!memcmp(buf, "gh", 2));
    FAILS(recv(p.fd, buf, sizeof buf, MSG_PEEK | MSG_DONTWAIT), EAGAIN);
    // A peek behind what is there waits for more.
    peer_says(p.peer, "ij");
    EQ(recv(p.fd, buf, sizeof buf, MSG_PEEK), 2);
    CHECK(!memcmp(buf, "ij", 2));
    EQ(recv(p.fd, buf, sizeof buf, 0), 8);
    CHECK(!memcmp(buf, "cdefghij", 8));
    goes_on(p, 0);
    set_option(p.fd, SOL_SOCKET, SO_PEEK_OFF, -1);
    peer_says(p.peer, "kl");
    wait_readable(p.fd, 2);
    EQ(recv(p.fd, buf, 2, MSG_PEEK), 2);
    EQ(recv(p.fd, buf, 2, MSG_PEEK), 2);
    EQ(recv(p.fd, buf, 2, 0), 2);
    pair_close(p);
}

// What is received carries a stamp, once the kernel has begun to make them.
static void stamps_come(struct pair p, int type) {
    double until = now() + 10;
    for (;;) {
        struct message m;
        peer_says(p.peer, "x");
        EQ(receive_message(p.fd, &m, 1, 0), 1);
        struct cmsghdr *c = control_of(&m.msg, SOL_SOCKET, type);
        if (c) {
            struct timeval stamp;
            memcpy(&stamp, CMSG_DATA(c), sizeof stamp);
            CHECK(stamp.tv_sec >= time(NULL) - 100 && stamp.tv_sec <= time(NULL) + 1);
            return;
        }
        CHECK(now() < until);
    }
}

PAIR_CASE(receive_time_stamps) {
    struct pair p = pair_open();
    set_option(p.fd, SOL_SOCKET, SO_TIMESTAMP, 1);
    EQ(option(p.fd, SOL_SOCKET, SO_TIMESTAMP), 1);
    stamps_come(p, SO_TIMESTAMP);
    set_option(p.fd, SOL_SOCKET, SO_TIMESTAMPNS, 1);
    stamps_come(p, SO_TIMESTAMPNS);
    goes_on(p, 0);
    pair_close(p);
}

CASE(receive_time_stamps_inherited_from_the_listener) {
    uint16_t port;
    int listener = listen_here(&port);
    set_option(listener, SOL_SOCKET, SO_TIMESTAMPNS, 1);
    int client = connect_to(port), server = OK(accept(listener, NULL, NULL));
    double until = now() + 10;
    for (bool seen = false; !seen;) {
        struct message m;
        EQ(send(client, "x", 1, 0), 1);
        EQ(receive_message(server, &m, 1, 0), 1);
        seen = control_of(&m.msg, SOL_SOCKET, SO_TIMESTAMPNS);
        EQ(send(server, "y", 1, 0), 1);
        EQ(receive_message(client, &m, 1, 0), 1);
        CHECK(!control_of(&m.msg, SOL_SOCKET, SO_TIMESTAMPNS));
        CHECK(now() < until);
    }
    // And goes on.
    for (int i = 0; i < 20; i++) {
        struct message m;
        EQ(send(client, "x", 1, 0), 1);
        EQ(receive_message(server, &m, 1, 0), 1);
        CHECK(control_of(&m.msg, SOL_SOCKET, SO_TIMESTAMPNS));
        EQ(send(server, "y", 1, 0), 1);
        EQ(receive_message(client, &m, 1, 0), 1);
    }
}

PAIR_CASE(send_time_stamps_come_by_the_error_queue) {
    struct pair p = pair_open();
    set_option(p.fd, SOL_SOCKET, SO_TIMESTAMPING,
        SOF_TIMESTAMPING_TX_ACK | SOF_TIMESTAMPING_SOFTWARE | SOF_TIMESTAMPING_OPT_ID | SOF_TIMESTAMPING_OPT_TSONLY);
    for (int i = 0; i < 3; i++) {
        send_all(p.fd, 1, i * 100, 100);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 100, 100), 0);
        struct message m;
        struct sock_extended_err e = next_error(p.fd, &m);
        EQ(e.ee_errno, ENOMSG);
        EQ(e.ee_origin, ORIGIN_TIMESTAMPING);
        EQ(e.ee_info, SCM_TSTAMP_ACK);
        EQ(e.ee_data, i * 100 + 99);
        CHECK(control_of(&m.msg, SOL_SOCKET, SO_TIMESTAMPING));
    }
    goes_on(p, 0);
    pair_close(p);
}

static int left_in_queue(int fd, size_t n, ssize_t expected) {
    struct message m;
    EQ(receive_message(fd, &m, n, 0), expected);
    struct cmsghdr *c = control_of(&m.msg, IPPROTO_TCP, TCP_CM_INQ);
    CHECK(c);
    int left;
    memcpy(&left, CMSG_DATA(c), sizeof left);
    return left;
}

PAIR_CASE(receive_tells_how_much_is_left) {
    struct pair p = pair_open();
    struct message m;
    peer_says(p.peer, "a");
    EQ(receive_message(p.fd, &m, 1, 0), 1);
    EQ(m.msg.msg_controllen, 0);
    set_option(p.fd, IPPROTO_TCP, TCP_INQ, 1);
    EQ(option(p.fd, IPPROTO_TCP, TCP_INQ), 1);
    peer_says(p.peer, "0123456789");
    wait_readable(p.fd, 10);
    EQ(left_in_queue(p.fd, 4, 4), 6);
    EQ(left_in_queue(p.fd, 50, 6), 0);
    // No room for it is told as for every control message.
    peer_says(p.peer, "b");
    m.iov = (struct iovec){m.bytes, 1};
    m.msg = (struct msghdr){.msg_iov = &m.iov, .msg_iovlen = 1};
    EQ(recvmsg(p.fd, &m.msg, 0), 1);
    EQ(m.msg.msg_flags, MSG_CTRUNC);
    peer_says(p.peer, "c");
    struct mmsghdr many = {.msg_hdr = {.msg_iov = &m.iov, .msg_iovlen = 1, .msg_control = m.control,
                               .msg_controllen = sizeof m.control}};
    EQ(recvmmsg(p.fd, &many, 1, 0, NULL), 1);
    CHECK(control_of(&many.msg_hdr, IPPROTO_TCP, TCP_CM_INQ));
    stays_in_the_ring(p);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    wait_events(p.fd, POLLRDHUP, POLLRDHUP);
    EQ(left_in_queue(p.fd, 1, 0), 1);
    set_option(p.fd, IPPROTO_TCP, TCP_INQ, 0);
    EQ(receive_message(p.fd, &m, 1, 0), 0);
    EQ(m.msg.msg_controllen, 0);
    pair_close(p);
}

CASE(how_much_is_left_is_told_by_inheritance) {
    uint16_t port;
    int listener = listen_here(&port);
    set_option(listener, IPPROTO_TCP, TCP_INQ, 1);
    int client = connect_to(port), server = OK(accept(listener, NULL, NULL));
    warm_here(client, server);
    EQ(send(client, "12345", 5, 0), 5);
    wait_readable(server, 5);
    EQ(left_in_queue(server, 2, 2), 3);
    EQ(left_in_queue(server, 9, 3), 0);
    close(client);
    close(server);
}

PAIR_CASE(fields_of_a_received_message) {
    struct pair p = pair_open();
    char byte;
    struct iovec iov = {&byte, 1};
    peer_says(p.peer, "abc");
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_namelen = 77, .msg_controllen = 0, .msg_flags = -1};
    EQ(recvmsg(p.fd, &msg, 0), 1);
    EQ(msg.msg_namelen, 77); // nobody asked for a name
    EQ(msg.msg_flags, 0);
    struct sockaddr_storage name;
    msg = (struct msghdr){.msg_iov = &iov, .msg_iovlen = 1, .msg_name = &name, .msg_namelen = sizeof name};
    EQ(recvmsg(p.fd, &msg, MSG_CMSG_CLOEXEC), 1);
    EQ(msg.msg_namelen, 0);
    EQ(msg.msg_flags, MSG_CMSG_CLOEXEC);
    EQ(msg.msg_iovlen, 1);
    EQ(msg.msg_iov->iov_len, 1);
    EQ(recv(p.fd, &byte, 1, 0), 1);
    stays_in_the_ring(p);
    pair_close(p);
}

PAIR_CASE(mapped_receive) {
    struct pair p = pair_open();
    void *at = mmap(NULL, 65536, PROT_READ, MAP_SHARED, p.fd, 0);
    CHECK(at != MAP_FAILED);
    peer_says(p.peer, "hello");
    wait_readable(p.fd, 5);
    // The first fields of struct tcp_zerocopy_receive, which all kernels know.
    struct {
        uint64_t address;
        uint32_t length, recv_skip_hint;
    } map = {(uintptr_t)at, 65536, 0};
    socklen_t len = sizeof map;
    OK(getsockopt(p.fd, IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE, &map, &len));
    EQ(map.length, 0);
    EQ(map.recv_skip_hint, 5);
    char buf[8];
    EQ(recv(p.fd, buf, sizeof buf, 0), 5);
    CHECK(!memcmp(buf, "hello", 5));
    OK(munmap(at, 65536));
    goes_on(p, 0);
    pair_close(p);
}

PAIR_CASE(filter_that_drops_everything_for_a_while) {
    struct pair p = pair_open();
    struct sock_filter drop = {BPF_RET | BPF_K, 0, 0, 0};
    struct sock_fprog program = {1, &drop};
    OK(setsockopt(p.fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program));
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 500), 0);
    char byte;
    timeout_option(p.fd, SO_RCVTIMEO, 0.05);
    FAILS(recv(p.fd, &byte, 1, 0), EAGAIN);
    timeout_option(p.fd, SO_RCVTIMEO, 0);
    OK(setsockopt(p.fd, SOL_SOCKET, SO_DETACH_FILTER, &drop, sizeof(int)));
    recv_all(p.fd, 2, 0, 500);
    goes_on(p, 0);
    pair_close(p);
}

CASE(fast_open) {
    uint16_t port;
    int listener = listen_here(&port);
    set_option(listener, IPPROTO_TCP, TCP_FASTOPEN, 16);
    socklen_t len;
    struct sockaddr_storage to = address_of("127.0.0.1", port, &len);
    for (int i = 0; i < 4; i++) {
        int client = OK(socket(AF_INET, SOCK_STREAM, 0));
        if (i % 2) {
            set_option(client, IPPROTO_TCP, TCP_FASTOPEN_CONNECT, 1);
            OK(connect(client, (struct sockaddr *)&to, len));
            EQ(send(client, "first", 5, 0), 5);
        } else {
            EQ(sendto(client, "first", 5, MSG_FASTOPEN, (struct sockaddr *)&to, len), 5);
        }
        int server = OK(accept(listener, NULL, NULL));
        char buf[8];
        EQ(recv(server, buf, 5, MSG_WAITALL), 5);
        CHECK(!memcmp(buf, "first", 5));
        for (int j = 0; j < 20; j++) {
            send_all(server, i, j * 700, 700);
            recv_all(client, i, j * 700, 700);
            send_all(client, i + 9, j * 700, 700);
            recv_all(server, i + 9, j * 700, 700);
        }
        OK(shutdown(client, SHUT_WR));
        recv_to_eof(server, 0, 0, 0);
        close(client);
        close(server);
    }
    // Clients without it, of such a listener, leave TCP.
    int client = connect_to(port), server = OK(accept(listener, NULL, NULL));
    warm_here(client, server);
    close(client);
    close(server);
}

static void aio_ends(struct aiocb *c, ssize_t n) {
    while (aio_error(c) == EINPROGRESS)
        OK(aio_suspend((const struct aiocb *[]){c}, 1, NULL));
    EQ(aio_error(c), 0);
    EQ(aio_return(c), n);
}

// libc does it by threads of its own, past this library.
PAIR_CASE(aio_reads_and_writes) {
    struct pair p = pair_open();
    char buf[5000], out[5000];
    for (int i = 0; i < 3; i++) {
        pattern(1, i * 5000, out, sizeof out);
        struct aiocb writing = {.aio_fildes = p.fd, .aio_buf = out, .aio_nbytes = sizeof out};
        OK(aio_write(&writing));
        aio_ends(&writing, sizeof out);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 5000, 5000), 0);
        struct aiocb reading = {.aio_fildes = p.fd, .aio_buf = buf, .aio_nbytes = 10};
        OK(aio_read(&reading));
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 10, 10), 0);
        aio_ends(&reading, 10);
        check_pattern(2, i * 10, buf, 10);
    }
    goes_on(p, 0);
    pair_close(p);
}

PAIR_CASE(aio_lists) {
    struct pair p = pair_open();
    char in[10], out[5000];
    pattern(1, 0, out, sizeof out);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 10), 0);
    wait_readable(p.fd, 10);
    struct aiocb
        writing = {.aio_fildes = p.fd, .aio_buf = out, .aio_nbytes = sizeof out, .aio_lio_opcode = LIO_WRITE},
        reading = {.aio_fildes = p.fd, .aio_buf = in, .aio_nbytes = sizeof in, .aio_lio_opcode = LIO_READ},
        none = {.aio_fildes = 9999, .aio_lio_opcode = LIO_NOP};
    struct aiocb *all[] = {&none, NULL, &writing, &reading};
    OK(lio_listio(LIO_WAIT, all, 4, NULL));
    aio_ends(&writing, sizeof out);
    aio_ends(&reading, 10);
    check_pattern(2, 0, in, 10);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 5000), 0);
    goes_on(p, 0);
    pair_close(p);
}

static long submit_by_number(aio_context_t context, long count, struct iocb **all) {
    long n = syscall(SYS_io_submit, context, count, all);
    return n < 0 ? -errno : n;
}

static void submits(long (*submit)(aio_context_t, long, struct iocb **)) {
    struct pair p = pair_open();
    aio_context_t context = 0;
    OK(syscall(SYS_io_setup, 8, &context));
    char in[10], out[5000];
    for (int i = 0; i < 3; i++) {
        pattern(1, i * 5000, out, sizeof out);
        struct iovec iov = {out + 2000, 3000};
        struct iocb
            first = {.aio_fildes = p.fd, .aio_lio_opcode = IOCB_CMD_PWRITE, .aio_buf = (uintptr_t)out, .aio_nbytes = 2000},
            second = {.aio_fildes = p.fd, .aio_lio_opcode = IOCB_CMD_PWRITEV, .aio_buf = (uintptr_t)&iov, .aio_nbytes = 1},
            asking = {.aio_fildes = p.fd, .aio_lio_opcode = IOCB_CMD_POLL, .aio_buf = POLLIN, .aio_data = 7},
            reading = {.aio_fildes = p.fd, .aio_lio_opcode = IOCB_CMD_PREAD, .aio_buf = (uintptr_t)in, .aio_nbytes = 10};
        struct io_event events[2];
        EQ(submit(context, 2, (struct iocb *[]){&first, &second}), 2);
        EQ(syscall(SYS_io_getevents, context, 2, 2, events, NULL), 2);
        EQ(events[0].res + events[1].res, 5000);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 5000, 5000), 0);
        EQ(submit(context, 1, (struct iocb *[]){&asking}), 1);
        EQ(syscall(SYS_io_getevents, context, 0, 1, events, &(struct timespec){0}), 0);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 10, 10), 0);
        EQ(syscall(SYS_io_getevents, context, 1, 1, events, NULL), 1);
        CHECK(events[0].data == 7 && events[0].res & POLLIN);
        wait_readable(p.fd, 10);
        EQ(submit(context, 1, (struct iocb *[]){&reading}), 1);
        EQ(syscall(SYS_io_getevents, context, 1, 1, events, NULL), 1);
        EQ(events[0].res, 10);
        check_pattern(2, i * 10, in, 10);
    }
    EQ(submit(context, 0, NULL), 0);
    EQ(submit(context, 1, NULL), -EFAULT);
    OK(syscall(SYS_io_destroy, context));
    goes_on(p, 0);
    pair_close(p);
}

PAIR_CASE(io_submit_by_number) {
    submits(submit_by_number);
}

// libaio's, whose place the library takes.
PAIR_CASE(io_submit_by_libaio) {
    long (*submit)(aio_context_t, long, struct iocb **) = dlsym(RTLD_DEFAULT, "io_submit");
    CHECK(submit || is_plain());
    submits(submit ? submit : submit_by_number);
}

// It writes by itself.
// musl has no backtraces.
#ifdef __GLIBC__
PAIR_CASE(backtrace_to_a_connection) {
    struct pair p = pair_open();
    int ends[2];
    OK(pipe(ends));
    void *at[] = {(void *)aio_ends, (void *)goes_on};
    char text[4096];
    backtrace_symbols_fd(at, 2, ends[1]);
    ssize_t n = OK(read(ends[0], text, sizeof text - 1));
    CHECK(n > 0);
    text[n] = 0;
    for (int i = 0; i < 3; i++) {
        backtrace_symbols_fd(at, 2, p.fd);
        peer_hears(p.peer, text);
    }
    goes_on(p, 0);
    close(ends[0]);
    close(ends[1]);
    pair_close(p);
}
#endif

// The kernel reads and writes what it is given, from a moment on that nobody tells: it is asked with TCP's connection.
PAIR_CASE(connection_is_offered_to_a_block_device) {
    enum { NBD_SET_SOCK = 0xab00 };
    struct pair p = pair_open();
    int none = OK(open("/dev/null", O_RDWR));
    FAILS(ioctl(none, NBD_SET_SOCK, p.fd), ENOTTY);
    FAILS(ioctl(none, NBD_SET_SOCK, 9999), ENOTTY);
    FAILS(ioctl(none, NBD_SET_SOCK, -1), ENOTTY);
    goes_on(p, 0);
    assert_tcp(p.fd);
    close(none);
    pair_close(p);
}

// Control messages are looked at before it is connected, and do not connect it.
CASE(fast_open_with_control_messages) {
    uint16_t port;
    int listener = listen_here(&port);
    set_option(listener, IPPROTO_TCP, TCP_FASTOPEN, 16);
    socklen_t len;
    struct sockaddr_storage to = address_of("127.0.0.1", port, &len);
    for (int i = 0; i < 3; i++) {
        int client = OK(socket(AF_INET, SOCK_STREAM, 0));
        union {
            char bytes[CMSG_SPACE(sizeof(uint32_t))];
            struct cmsghdr align;
        } control = {0};
        struct iovec iov = {"first", 5};
        struct msghdr msg = {.msg_name = &to, .msg_namelen = len, .msg_iov = &iov, .msg_iovlen = 1,
            .msg_control = &control, .msg_controllen = sizeof control};
        *CMSG_FIRSTHDR(&msg) = (struct cmsghdr){
            .cmsg_len = CMSG_LEN(sizeof(uint32_t)), .cmsg_level = SOL_SOCKET, .cmsg_type = SO_TIMESTAMPING};
        EQ(sendmsg(client, &msg, MSG_FASTOPEN), 5);
        int server = OK(accept(listener, NULL, NULL));
        char buf[8];
        EQ(recv(server, buf, 5, MSG_WAITALL), 5);
        CHECK(!memcmp(buf, "first", 5));
        close(client);
        close(server);
    }
}

CASE(deferred_accept) {
    uint16_t port;
    int listener = listen_here(&port);
    set_option(listener, IPPROTO_TCP, TCP_DEFER_ACCEPT, 5);
    CHECK(option(listener, IPPROTO_TCP, TCP_DEFER_ACCEPT) >= 5);
    int client = connect_to(port);
    nonblocking(listener, true);
    FAILS(accept(listener, NULL, NULL), EAGAIN);
    send_all(client, 1, 0, 100);
    wait_events(listener, POLLIN, POLLIN);
    int server = OK(accept(listener, NULL, NULL));
    int here = -1;
    OK(ioctl(server, FIONREAD, &here));
    EQ(here, 100);
    recv_all(server, 1, 0, 100);
    warm_here(client, server);
    send_all(client, 1, 100, 50000);
    recv_all(server, 1, 100, 50000);
    close(client);
    close(server);
}

PAIR_CASE(options_of_time) {
    // What the kernel does with them, it does with its own connection, which lives as long as ours.
    struct pair p = pair_open();
    set_option(p.fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(p.fd, IPPROTO_TCP, TCP_KEEPIDLE, 1);
    set_option(p.fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
    set_option(p.fd, IPPROTO_TCP, TCP_KEEPCNT, 1);
    set_option(p.fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 500);
    set_option(p.fd, IPPROTO_TCP, TCP_QUICKACK, 0);
    char byte;
    timeout_option(p.fd, SO_RCVTIMEO, 2.5);
    FAILS(recv(p.fd, &byte, 1, 0), EAGAIN);
    timeout_option(p.fd, SO_RCVTIMEO, 0);
    goes_on(p, 0);
    stays_in_the_ring(p);
    pair_close(p);
}
