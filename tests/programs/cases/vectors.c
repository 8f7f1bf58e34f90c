// Scatter/gather, messages, several messages, files and pipes.
#include "peer.h"

#include <sys/mman.h>
#include <sys/sendfile.h>

PAIR_CASE(writev_and_readv) {
    struct pair p = pair_open();
    char a[10], b[1], c[20] = {0};
    struct iovec out[] = {{"Hello", 5}, {"", 0}, {", ", 2}, {NULL, 0}, {"world", 5}};
    EQ(writev(p.fd, out, 5), 12);
    peer_hears(p.peer, "Hello, world");
    peer_says(p.peer, "0123456789Xabcdefgh");
    wait_readable(p.fd, 19);
    struct iovec in[] = {{a, 10}, {NULL, 0}, {b, 1}, {c, 20}};
    EQ(readv(p.fd, in, 4), 19);
    CHECK(!memcmp(a, "0123456789", 10) && b[0] == 'X' && !strcmp(c, "abcdefgh"));
    EQ(writev(p.fd, out, 0), 0);
    FAILS(writev(p.fd, out, -1), EINVAL);
    FAILS(readv(p.fd, in, IOV_MAX + 1), EINVAL);
    pair_close(p);
}

PAIR_CASE(vectors_of_the_largest_count) {
    struct pair p = pair_open();
    struct iovec iov[IOV_MAX];
    char out[IOV_MAX * 3], in[IOV_MAX * 3];
    pattern(1, 0, out, sizeof out);
    for (int i = 0; i < IOV_MAX; i++)
        iov[i] = (struct iovec){out + 3 * i, 3};
    EQ(writev(p.fd, iov, IOV_MAX), sizeof out);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, sizeof out), 0);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, sizeof in), 0);
    wait_readable(p.fd, sizeof in);
    for (int i = 0; i < IOV_MAX; i++)
        iov[i] = (struct iovec){in + 3 * i, 3};
    EQ(readv(p.fd, iov, IOV_MAX), sizeof in);
    check_pattern(2, 0, in, sizeof in);
    pair_close(p);
}

PAIR_CASE(large_vectors_do_not_block_forever_and_keep_order) {
    struct pair p = pair_open();
    size_t n = 3 << 20;
    char *buf = malloc(n);
    CHECK(buf);
    pattern(1, 0, buf, n);
    struct iovec iov[] = {{buf, 100}, {buf + 100, n / 2}, {buf + 100 + n / 2, n / 2 - 100}};
    peer_begin(P_RECV_PATTERN, p.peer, 1, 0, n);
    EQ(writev(p.fd, iov, 3), n);
    EQ(peer_end(), 0);
    free(buf);
    pair_close(p);
}

PAIR_CASE(sendmsg_and_recvmsg) {
    struct pair p = pair_open();
    struct iovec out[] = {{"one ", 4}, {"two", 3}};
    struct msghdr msg = {.msg_iov = out, .msg_iovlen = 2};
    EQ(sendmsg(p.fd, &msg, 0), 7);
    peer_hears(p.peer, "one two");
    peer_says(p.peer, "three");
    char buf[16] = {0}, control[64];
    struct sockaddr_storage name;
    struct iovec in = {buf, 16};
    msg = (struct msghdr){.msg_name = &name, .msg_namelen = sizeof name, .msg_iov = &in,
        .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control, .msg_flags = -1};
    EQ(recvmsg(p.fd, &msg, 0), 5);
    CHECK(!strcmp(buf, "three"));
    EQ(msg.msg_controllen, 0);
    EQ(msg.msg_namelen, 0);
    EQ(msg.msg_flags, 0);
    FAILS(recvmsg(p.fd, &msg, MSG_DONTWAIT), EAGAIN);
    msg = (struct msghdr){.msg_iov = &in, .msg_iovlen = IOV_MAX + 1};
    FAILS(sendmsg(p.fd, &msg, 0), EMSGSIZE);
    FAILS(recvmsg(p.fd, &msg, 0), EMSGSIZE);
    pair_close(p);
}

PAIR_CASE(sendmsg_refuses_rights) {
    struct pair p = pair_open();
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {0};
    struct iovec iov = {"x", 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
        .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    *c = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET,
        .cmsg_type = SCM_RIGHTS};
    // TCP takes the bytes and does not look at rights.
    EQ(sendmsg(p.fd, &msg, 0), 1);
    c->cmsg_type = 0x7777;
    FAILS(sendmsg(p.fd, &msg, 0), EINVAL);
    peer_hears(p.peer, "x");
    pair_close(p);
}

PAIR_CASE(sendmmsg_and_recvmmsg) {
    struct pair p = pair_open();
    struct iovec out[] = {{"first", 5}, {"second", 6}, {"third", 5}};
    struct mmsghdr msgs[3] = {0};
    for (int i = 0; i < 3; i++)
        msgs[i].msg_hdr = (struct msghdr){.msg_iov = &out[i], .msg_iovlen = 1};
    EQ(sendmmsg(p.fd, msgs, 3, 0), 3);
    for (int i = 0; i < 3; i++)
        EQ(msgs[i].msg_len, out[i].iov_len);
    peer_hears(p.peer, "firstsecondthird");
    peer_says(p.peer, "abcdefghij");
    wait_readable(p.fd, 10);
    char in[3][4];
    struct iovec iov[3];
    for (int i = 0; i < 3; i++) {
        iov[i] = (struct iovec){in[i], 4};
        msgs[i] = (struct mmsghdr){.msg_hdr = {.msg_iov = &iov[i], .msg_iovlen = 1}};
    }
    EQ(recvmmsg(p.fd, msgs, 3, 0, NULL), 3);
    EQ(msgs[0].msg_len + msgs[1].msg_len + msgs[2].msg_len, 10);
    CHECK(!memcmp(in[0], "abcd", 4) && !memcmp(in[1], "efgh", 4) && !memcmp(in[2], "ij", 2));
    FAILS(recvmmsg(p.fd, msgs, 3, MSG_DONTWAIT, NULL), EAGAIN);
    peer_says(p.peer, "xy");
    EQ(recvmmsg(p.fd, msgs, 3, MSG_WAITFORONE, NULL), 1);
    EQ(msgs[0].msg_len, 2);
    pair_close(p);
}

PAIR_CASE(positioned_calls_fail_as_on_any_socket) {
    struct pair p = pair_open();
    char c = 'x';
    struct iovec iov = {&c, 1};
    FAILS(lseek(p.fd, 0, SEEK_CUR), ESPIPE);
    FAILS(pread(p.fd, &c, 1, 0), ESPIPE);
    FAILS(pwrite(p.fd, &c, 1, 0), ESPIPE);
    FAILS(preadv(p.fd, &iov, 1, 0), ESPIPE);
    EQ(pwritev2(p.fd, &iov, 1, -1, 0), 1);
    peer_hears(p.peer, "x");
    peer_says(p.peer, "y");
    EQ(preadv2(p.fd, &iov, 1, -1, 0), 1);
    EQ(c, 'y');
    pair_close(p);
}

// Those of newer kernels than libc's header knows; where the kernel refuses one, nothing has moved.
PAIR_CASE(flags_of_positioned_calls) {
    enum { NOAPPEND = 0x20, ATOMIC = 0x40, DONTCACHE = 0x80, NOSIGNAL = 0x100, UNKNOWN = 0x40000000 };
    struct pair p = pair_open();
    char buf[8];
    struct iovec in = {buf, sizeof buf}, out = {"x", 1}, bad[] = {{buf, 1}, {NULL, 5}};
    const int flags[] = {0, RWF_HIPRI, RWF_DSYNC | RWF_SYNC, RWF_NOWAIT, RWF_APPEND, NOAPPEND, NOSIGNAL,
        NOAPPEND | NOSIGNAL | RWF_NOWAIT, ATOMIC, DONTCACHE, RWF_APPEND | NOAPPEND, UNKNOWN, UNKNOWN | RWF_NOWAIT};
    bool knows_nosignal = false;
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
            peer_says(p.peer, "y");
            wait_readable(p.fd, 1);
            errno = 0;
            ssize_t n = preadv2(p.fd, &in, 1, -1, flags[i]);
            if (n < 0) {
                CHECK(errno == EOPNOTSUPP || (errno == EINVAL && flags[i] == (RWF_APPEND | NOAPPEND)));
                EQ(recv(p.fd, buf, sizeof buf, 0), 1);
            } else {
                EQ(n, 1);
            }
            EQ(buf[0], 'y');
            CHECK(!(flags[i] & (ATOMIC | DONTCACHE | UNKNOWN)) || n < 0);
            CHECK(flags[i] & ~(RWF_HIPRI | RWF_DSYNC | RWF_SYNC | RWF_NOWAIT | RWF_APPEND) || n == 1);
            // Both calls know the same ones.
            EQ(pwritev2(p.fd, &out, 1, -1, flags[i]), n);
            if (n > 0)
                peer_hears(p.peer, "x");
            if (n > 0 && flags[i] == NOSIGNAL)
                knows_nosignal = true;
        }
        FAILS(preadv2(p.fd, &in, 1, -1, RWF_NOWAIT), EAGAIN);
        peer_says(p.peer, "abc");
        wait_readable(p.fd, 3);
        FAILS(preadv2(p.fd, bad, 2, -1, RWF_NOWAIT), EFAULT);
        EQ(preadv2(p.fd, &in, 1, -1, RWF_NOWAIT), 3);
        CHECK(!memcmp(buf, "abc", 3));
    }
    EQ(peer_call(P_POLL, p.peer, POLLIN, 0, 0), 0);
    // No signal ends us.
    OK(shutdown(p.fd, SHUT_WR));
    if (knows_nosignal)
        FAILS(pwritev2(p.fd, &out, 1, -1, NOSIGNAL), EPIPE);
    pair_close(p);
}

// An unlinked file with the pattern in it.
static int file_of(uint64_t seed, size_t n) {
    int fd = OK(memfd_create("file", 0));
    char buf[65536];
    for (size_t at = 0; at < n;) {
        size_t take = n - at < sizeof buf ? n - at : sizeof buf;
        pattern(seed, at, buf, take);
        at += OK(write(fd, buf, take));
    }
    OK(lseek(fd, 0, SEEK_SET));
    return fd;
}

PAIR_CASE(sendfile_from_a_file) {
    struct pair p = pair_open();
    size_t n = 1 << 20;
    int file = file_of(1, n);
    peer_begin(P_RECV_PATTERN, p.peer, 1, 0, n);
    for (size_t sent = 0; sent < n;)
        sent += OK(sendfile(p.fd, file, NULL, n - sent));
    EQ(peer_end(), 0);
    EQ(lseek(file, 0, SEEK_CUR), n);
    EQ(sendfile(p.fd, file, NULL, 100), 0);
    // With an offset the file's own position stays.
    off_t at = 1000;
    peer_begin(P_RECV_PATTERN, p.peer, 1, 1000, 50000);
    while (at < 51000)
        OK(sendfile(p.fd, file, &at, 51000 - at));
    EQ(at, 51000);
    EQ(peer_end(), 0);
    EQ(lseek(file, 0, SEEK_CUR), n);
    // One that does not block takes a part.
    nonblocking(p.fd, true);
    size_t sent = 0;
    at = 0;
    for (long r; (r = sendfile(p.fd, file, &at, n - at)) > 0;) {
        sent += r;
        if ((size_t)at == n)
            at = 0;
        CHECK(sent < (256u << 20));
    }
    EQ(errno, EAGAIN);
    for (size_t got = 0; got < sent;) {
        size_t take = n - got % n < sent - got ? n - got % n : sent - got;
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, got % n, take), 0);
        got += take;
    }
    close(file);
    pair_close(p);
}

PAIR_CASE(splice_both_ways) {
    struct pair p = pair_open();
    int pipes[2];
    OK(pipe(pipes));
    // SPLICE_F_NONBLOCK is about the pipe; the socket's own flag decides about the socket.
    nonblocking(p.fd, true);
    FAILS(splice(p.fd, NULL, pipes[1], NULL, 100, 0), EAGAIN);
    nonblocking(p.fd, false);
    peer_begin(P_SEND_PATTERN, p.peer, 1, 0, 300000);
    char buf[65536];
    for (size_t got = 0; got < 300000;) {
        long n = OK(splice(p.fd, NULL, pipes[1], NULL, 300000 - got, 0));
        CHECK(n > 0 && n <= 65536);
        EQ(read(pipes[0], buf, n), n);
        check_pattern(1, got, buf, n);
        got += n;
    }
    EQ(peer_end(), 0);
    peer_begin(P_RECV_PATTERN, p.peer, 2, 0, 300000);
    for (size_t at = 0; at < 300000;) {
        pattern(2, at, buf, 30000);
        EQ(write(pipes[1], buf, 30000), 30000);
        for (size_t moved = 0; moved < 30000;)
            moved += OK(splice(pipes[0], NULL, p.fd, NULL, 30000 - moved, SPLICE_F_MORE));
        at += 30000;
    }
    EQ(peer_end(), 0);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    EQ(splice(p.fd, NULL, pipes[1], NULL, 100, 0), 0);
    close(pipes[0]);
    close(pipes[1]);
    pair_close(p);
}

PAIR_CASE(splice_waits_for_bytes) {
    struct pair p = pair_open();
    int pipes[2];
    OK(pipe(pipes));
    peer_begin(P_RECV, p.peer, 5, MSG_WAITALL, 0);
    peer_asleep();
    EQ(write(pipes[1], "hello", 5), 5);
    EQ(splice(pipes[0], NULL, p.fd, NULL, 5, 0), 5);
    EQ(peer_end(), 5);
    close(pipes[0]);
    close(pipes[1]);
    pair_close(p);
}

PAIR_CASE(bad_addresses_give_efault_and_lose_nothing) {
    struct pair p = pair_open();
    FAILS(write(p.fd, (void *)8, 10), EFAULT);
    FAILS(send(p.fd, NULL, 10, 0), EFAULT);
    FAILS(writev(p.fd, &(struct iovec){(void *)16, 10}, 1), EFAULT);
    peer_says(p.peer, "precious");
    wait_readable(p.fd, 8);
    FAILS(read(p.fd, (void *)8, 8), EFAULT);
    FAILS(recv(p.fd, NULL, 8, 0), EFAULT);
    FAILS(readv(p.fd, (void *)8, 1), EFAULT);
    // With 64 bits of time on a 32-bit machine libc itself looks into the message first, and dies.
    if (sizeof(time_t) <= sizeof(long))
        FAILS(recvmsg(p.fd, (void *)8, 0), EFAULT);
    char buf[16];
    EQ(recv(p.fd, buf, 16, 0), 8);
    CHECK(!memcmp(buf, "precious", 8));
    EQ(send(p.fd, "on", 2, 0), 2);
    peer_hears(p.peer, "on");
    pair_close(p);
}

PAIR_CASE(bad_buffers_beside_good_ones) {
    struct pair p = pair_open();
    char buf[16];
    struct iovec in[] = {{buf, 2}, {NULL, 5}}, out[] = {{"xy", 2}, {NULL, 5}}, bad[] = {{NULL, 5}};
    FAILS(writev(p.fd, out, 2), EFAULT);
    FAILS(sendmsg(p.fd, &(struct msghdr){.msg_iov = out, .msg_iovlen = 2}, 0), EFAULT);
    FAILS(pwritev2(p.fd, out, 2, -1, RWF_NOWAIT), EFAULT);
    EQ(send(p.fd, "z", 1, 0), 1);
    peer_hears(p.peer, "z");
    for (int i = 0; i < 3; i++) {
        // The second time without a sleep, and so without a doorbell.
        peer_says(p.peer, "abcdef");
        wait_readable(p.fd, 6);
        FAILS(recv(p.fd, NULL, 10, 0), EFAULT);
        FAILS(readv(p.fd, bad, 1), EFAULT);
        FAILS(readv(p.fd, in, 2), EFAULT);
        EQ(recv(p.fd, buf, 4, 0), 4);
        in[0].iov_base = buf + 4;
        EQ(readv(p.fd, in, 2), 2);
        in[0].iov_base = buf;
        CHECK(!memcmp(buf, "abcdef", 6));
    }
    FAILS(recv(p.fd, NULL, 10, MSG_DONTWAIT), EAGAIN);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    wait_events(p.fd, POLLRDHUP, POLLRDHUP);
    EQ(recv(p.fd, NULL, 10, 0), 0);
    pair_close(p);
}

PAIR_CASE(unmapped_buffers_give_efault) {
    struct pair p = pair_open();
    char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    OK(munmap(page + 4096, 4096));
    FAILS(send(p.fd, page + 4096, 10, 0), EFAULT);
    peer_says(p.peer, "precious");
    wait_readable(p.fd, 8);
    FAILS(recv(p.fd, page + 4096, 8, 0), EFAULT);
    char buf[16];
    EQ(recv(p.fd, buf, 16, 0), 8);
    CHECK(!memcmp(buf, "precious", 8));
    pair_close(p);
}

PAIR_CASE(calls_through_syscall) {
    struct pair p = pair_open();
    char buf[16];
    for (int i = 0; i < 5; i++) {
        EQ(syscall(SYS_write, p.fd, "abc", 3), 3);
        peer_hears(p.peer, "abc");
        peer_says(p.peer, "defghi");
        wait_readable(p.fd, 6);
        EQ(syscall(SYS_read, p.fd, buf, 3), 3);
        CHECK(!memcmp(buf, "def", 3));
        EQ(syscall(SYS_recvfrom, p.fd, buf, 16, 0, NULL, NULL), 3);
        CHECK(!memcmp(buf, "ghi", 3));
        EQ(syscall(SYS_sendto, p.fd, "xyz", 3, 0, NULL, 0), 3);
        peer_hears(p.peer, "xyz");
        // Mixed with the ordinary functions, in order.
        EQ(send(p.fd, "1", 1, 0), 1);
        EQ(syscall(SYS_write, p.fd, "2", 1), 1);
        EQ(write(p.fd, "3", 1), 1);
        peer_hears(p.peer, "123");
    }
    FAILS(syscall(SYS_recvfrom, p.fd, buf, 16, MSG_DONTWAIT, NULL, NULL), EAGAIN);
    struct iovec iov = {"vec", 3};
    EQ(syscall(SYS_writev, p.fd, &iov, 1), 3);
    peer_hears(p.peer, "vec");
    struct pollfd f = {.fd = p.fd, .events = POLLIN | POLLOUT};
    EQ(syscall(SYS_poll, &f, 1, 0), 1);
    EQ(f.revents, POLLOUT);
    int other = OK(syscall(SYS_dup, p.fd));
    EQ(syscall(SYS_close, p.fd), 0);
    EQ(send(other, "dup", 3, 0), 3);
    peer_hears(p.peer, "dup");
    p.fd = other;
    pair_close(p);
}
