// Pointers that lead nowhere, of all calls that take one beside the bytes: what TCP says of them, and the connection goes on.
#include "peer.h"

#include <stddef.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sendfile.h>

// A page that may not be touched, the kernel's half of all addresses, and the first page.
static void *nowhere[3];

static void set_up(void) {
    nowhere[0] = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(nowhere[0] != MAP_FAILED);
    nowhere[1] = (void *)-4096L;
    nowhere[2] = (void *)8;
}

// --- accept

// The pointers of a call, and what it says: 0, or an error, with which the connection is gone.
struct accepting {
    struct sockaddr *address;
    socklen_t *length;
    int error;
};

static void accepts(int listener, uint16_t port, struct accepting a, bool four) {
    int client = connect_to(port);
    int next = OK(dup(client));
    close(next);
    int fd = four ? accept4(listener, a.address, a.length, SOCK_CLOEXEC) : accept(listener, a.address, a.length);
    if (a.error) {
        int error = errno;
        EQ(fd, -1);
        EQ(error, a.error);
        // No number was used, and the connection has ended.
        EQ(OK(dup(client)), next);
        close(next);
        char c;
        EQ(recv(client, &c, 1, 0), 0);
    } else {
        EQ(fd, next);
        int ends[2] = {client, fd};
        EQ(ends_talk(ends, 0, 3), 30);
        close(fd);
    }
    close(client);
}

CASE(accept_says_of_bad_pointers_what_tcp_says) {
    set_up();
    uint16_t port;
    int listener = listen_here(&port);
    struct {
        struct sockaddr_storage address;
        socklen_t length;
    } stack, *heap = malloc(sizeof *heap);
    CHECK(heap);
    for (int four = 0; four < 2; four++)
        for (int where = 0; where < 2; where++) {
            struct sockaddr *address = (struct sockaddr *)(where ? &heap->address : &stack.address);
            socklen_t *length = where ? &heap->length : &stack.length;
            *length = sizeof stack.address;
            accepts(listener, port, (struct accepting){address, length, 0}, four);
            EQ(*length, sizeof(struct sockaddr_in));
            EQ(address->sa_family, AF_INET);
            accepts(listener, port, (struct accepting){NULL, NULL, 0}, four);
            accepts(listener, port, (struct accepting){address, NULL, EFAULT}, four);
            for (int i = 0; i < 3; i++) {
                *length = sizeof stack.address;
                accepts(listener, port, (struct accepting){NULL, nowhere[i], 0}, four);
                accepts(listener, port, (struct accepting){address, nowhere[i], EFAULT}, four);
                accepts(listener, port, (struct accepting){nowhere[i], NULL, EFAULT}, four);
                accepts(listener, port, (struct accepting){nowhere[i], nowhere[i], EFAULT}, four);
                accepts(listener, port, (struct accepting){nowhere[i], length, EFAULT}, four);
                *length = 0;
                accepts(listener, port, (struct accepting){nowhere[i], length, 0}, four);
                EQ(*length, sizeof(struct sockaddr_in));
                *length = -1;
                accepts(listener, port, (struct accepting){nowhere[i], length, EINVAL}, four);
            }
            *length = -1;
            accepts(listener, port, (struct accepting){address, length, EINVAL}, four);
            memset(address, 1, sizeof stack.address);
            *length = offsetof(struct sockaddr_in, sin_port);
            accepts(listener, port, (struct accepting){address, length, 0}, four);
            EQ(*length, sizeof(struct sockaddr_in));
            EQ(address->sa_family, AF_INET);
            EQ(((struct sockaddr_in *)address)->sin_port, 0x0101);
        }
    free(heap);
    close(listener);
}

// A stack that is not at random ends right below the kernel's half: of a 32-bit program, two pages below the last one.
CASE(accept_says_of_bad_pointers_beside_the_stack_what_tcp_says) {
    static char *few[8];
    int n = 0;
    // What else is in the environment lies between the frames and the end of the stack.
    for (char **v = environ; *v && n < 7; v++)
        if (!strncmp(*v, "LD_PRELOAD=", 11) || !strncmp(*v, "USMC_", 5))
            few[n++] = *v;
    OK(personality(ADDR_NO_RANDOMIZE));
    execle(own_path(), own_path(), "accept_says_of_bad_pointers_what_tcp_says", (char *)NULL, few);
    CHECK(!"exec");
}

// --- all others, on a connection
// (On i386, and with musl, libc reads messages and times itself, to translate them.)
#if defined(__LP64__) && defined(__GLIBC__)

struct asked {
    int fd, ep, file;
    void *bad;
};

typedef long call(struct asked a);

#define CALL(name, what) \
    static long name(struct asked a) { \
        return (what); \
    }

static char byte[1];
static socklen_t four = 4, negative = -1;
static int value;
static struct iovec one = {byte, 1};

CALL(recvfrom_length, recvfrom(a.fd, byte, 1, 0, (struct sockaddr *)&value, a.bad))
CALL(recvfrom_address, recvfrom(a.fd, byte, 1, 0, a.bad, &(socklen_t){16}))
CALL(recvmsg_header, recvmsg(a.fd, a.bad, 0))
CALL(recvmsg_vector, recvmsg(a.fd, &(struct msghdr){.msg_iov = a.bad, .msg_iovlen = 1}, 0))
CALL(recvmsg_name, recvmsg(a.fd, &(struct msghdr){.msg_iov = &one, .msg_iovlen = 1, .msg_name = a.bad, .msg_namelen = 16}, 0))
CALL(recvmsg_control,
    recvmsg(a.fd, &(struct msghdr){.msg_iov = &one, .msg_iovlen = 1, .msg_control = a.bad, .msg_controllen = 64}, 0))
CALL(recvmsg_negative,
    recvmsg(a.fd, &(struct msghdr){.msg_iov = &one, .msg_iovlen = 1, .msg_name = byte, .msg_namelen = -1}, 0))
CALL(recvmmsg_headers, recvmmsg(a.fd, a.bad, 1, 0, NULL))
CALL(recvmmsg_time, recvmmsg(a.fd, (struct mmsghdr[]){{.msg_hdr = {.msg_iov = &one, .msg_iovlen = 1}}}, 1, 0, a.bad))
CALL(sendto_address, sendto(a.fd, byte, 1, 0, a.bad, 16))
CALL(sendto_negative, sendto(a.fd, byte, 1, 0, (struct sockaddr *)byte, -1))
CALL(sendmsg_header, sendmsg(a.fd, a.bad, 0))
CALL(sendmsg_vector, sendmsg(a.fd, &(struct msghdr){.msg_iov = a.bad, .msg_iovlen = 1}, 0))
CALL(sendmsg_name, sendmsg(a.fd, &(struct msghdr){.msg_iov = &one, .msg_iovlen = 1, .msg_name = a.bad, .msg_namelen = 16}, 0))
CALL(sendmsg_negative,
    sendmsg(a.fd, &(struct msghdr){.msg_iov = &one, .msg_iovlen = 1, .msg_name = byte, .msg_namelen = -1}, 0))
CALL(sendmsg_control,
    sendmsg(a.fd, &(struct msghdr){.msg_iov = &one, .msg_iovlen = 1, .msg_control = a.bad, .msg_controllen = 64}, 0))
CALL(sendmmsg_headers, sendmmsg(a.fd, a.bad, 1, 0))
CALL(readv_vector, readv(a.fd, a.bad, 1))
CALL(readv_many, readv(a.fd, &one, 1025))
CALL(readv_negative, readv(a.fd, &one, -1))
CALL(writev_vector, writev(a.fd, a.bad, 1))
CALL(writev_many, writev(a.fd, &one, 1025))
CALL(getsockopt_value, getsockopt(a.fd, SOL_SOCKET, SO_ERROR, a.bad, &four))
CALL(getsockopt_length, getsockopt(a.fd, SOL_SOCKET, SO_ERROR, &value, a.bad))
CALL(getsockopt_negative, getsockopt(a.fd, SOL_SOCKET, SO_RCVLOWAT, &value, &negative))
CALL(setsockopt_value, setsockopt(a.fd, IPPROTO_TCP, TCP_NODELAY, a.bad, 4))
CALL(setsockopt_buffer, setsockopt(a.fd, SOL_SOCKET, SO_SNDBUF, a.bad, 4))
CALL(setsockopt_time, setsockopt(a.fd, SOL_SOCKET, SO_RCVTIMEO, a.bad, sizeof(struct timeval)))
CALL(setsockopt_short, setsockopt(a.fd, IPPROTO_TCP, TCP_NODELAY, &value, 3))
CALL(ioctl_unread, ioctl(a.fd, FIONREAD, a.bad))
CALL(ioctl_unsent, ioctl(a.fd, TIOCOUTQ, a.bad))
CALL(ioctl_waits, ioctl(a.fd, FIONBIO, a.bad))
CALL(epoll_ctl_add, epoll_ctl(a.ep, EPOLL_CTL_ADD, a.fd, a.bad))
CALL(epoll_ctl_modify, epoll_ctl(a.ep, EPOLL_CTL_MOD, a.fd, a.bad))
CALL(epoll_wait_events, epoll_wait(a.ep, a.bad, 1, 0))
CALL(epoll_wait_none, epoll_wait(a.ep, (struct epoll_event *)&value, 0, 0))
CALL(epoll_pwait_mask, epoll_pwait(a.ep, (struct epoll_event[1]){}, 1, 0, a.bad))
CALL(poll_fds, poll(a.bad, 1, 0))
CALL(ppoll_fds, ppoll(a.bad, 1, &(struct timespec){}, NULL))
// libc reads the times of ppoll, select and pselect itself.
CALL(ppoll_mask, ppoll(&(struct pollfd){a.fd, POLLIN, 0}, 1, &(struct timespec){}, a.bad))
CALL(select_sets, select(a.fd + 1, a.bad, NULL, NULL, &(struct timeval){}))
CALL(select_writable, select(a.fd + 1, NULL, a.bad, NULL, &(struct timeval){}))
CALL(sendfile_offset, sendfile(a.fd, a.file, a.bad, 1))

// What TCP says where there is a byte to read: -1 and an error, or what is returned.
static const struct row {
    const char *name;
    call *call;
    int error, value;
    bool takes; // the byte, all the same
    bool passes; // each message passes it: the library reads it without a question
} table[] = {
#define FAULT(name) {#name, name, EFAULT, 0, false, false}
#define PASSES(name) {#name, name, EFAULT, 0, false, true}
#define WRONG(name) {#name, name, EINVAL, 0, false, false}
    {"recvfrom_length", recvfrom_length, EFAULT, 0, true, false},
    {"recvfrom_address", recvfrom_address, 0, 1, true, false},
    PASSES(recvmsg_header),
    PASSES(recvmsg_vector),
    {"recvmsg_name", recvmsg_name, 0, 1, true, false},
    {"recvmsg_control", recvmsg_control, 0, 1, true, false},
    WRONG(recvmsg_negative),
    PASSES(recvmmsg_headers),
    FAULT(recvmmsg_time),
    FAULT(sendto_address),
    WRONG(sendto_negative),
    PASSES(sendmsg_header),
    PASSES(sendmsg_vector),
    FAULT(sendmsg_name),
    WRONG(sendmsg_negative),
    FAULT(sendmsg_control),
    PASSES(sendmmsg_headers),
    PASSES(readv_vector),
    WRONG(readv_many),
    WRONG(readv_negative),
    PASSES(writev_vector),
    WRONG(writev_many),
    FAULT(getsockopt_value),
    FAULT(getsockopt_length),
    WRONG(getsockopt_negative),
    FAULT(setsockopt_value),
    FAULT(setsockopt_buffer),
    FAULT(setsockopt_time),
    WRONG(setsockopt_short),
    FAULT(ioctl_unread),
    FAULT(ioctl_unsent),
    FAULT(ioctl_waits),
    FAULT(epoll_ctl_add),
    FAULT(epoll_ctl_modify),
    PASSES(epoll_wait_events),
    WRONG(epoll_wait_none),
    FAULT(epoll_pwait_mask),
    PASSES(poll_fds),
    PASSES(ppoll_fds),
    FAULT(ppoll_mask),
    PASSES(select_sets),
    PASSES(select_writable),
    FAULT(sendfile_offset),
};

// Of a page that may not be touched, where each message passes the pointer: `unmapped`; of all else otherwise.
static void ask_all(bool unmapped) {
    set_up();
    struct pair p = pair_open();
    int ep = OK(epoll_create1(EPOLL_CLOEXEC)), at = 0;
    struct epoll_event event = {EPOLLIN, {.u64 = 1}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, &event));
    int file = OK(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        for (int bad = 0; bad < 3; bad++) {
            if ((table[i].passes && bad == 0) != unmapped)
                continue;
            peer_says(p.peer, "x");
            wait_readable(p.fd, 1);
            errno = 0;
            long got = table[i].call((struct asked){p.fd, ep, file, nowhere[bad]});
            int error = got < 0 ? errno : 0;
            if (error != table[i].error || (got >= 0 && got != table[i].value))
                check_failed(__FILE__, __LINE__, table[i].name, "%ld, errno %d, pointer %p", got, error, nowhere[bad]);
            if (!table[i].takes) {
                EQ(recv(p.fd, byte, 1, MSG_DONTWAIT), 1);
                EQ(byte[0], 'x');
            }
            EQ(recv(p.fd, byte, 1, MSG_DONTWAIT), -1);
        }
    at = pair_talk(p, at, 20);
    if (variant.warm)
        assert_smcd(p.fd);
    close(file);
    close(ep);
    pair_close(p);
}

PAIR_CASE(calls_say_of_bad_pointers_what_tcp_says) {
    ask_all(false);
}

PAIR_CASE(calls_say_of_unmapped_arrays_what_tcp_says) {
    ask_all(true);
}

// A look at an event's memory, wherever that is and whatever is in it, is no sleep.
PAIR_CASE(an_event_far_from_the_stack_costs_no_sleep) {
    enum { ROUNDS = 2000 };
    struct pair p = pair_open();
    int ep = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event *event = calloc(1, sizeof *event);
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, p.fd, event));
    struct rusage before, after;
    OK(getrusage(RUSAGE_THREAD, &before));
    for (int i = 0; i < ROUNDS; i++)
        OK(epoll_ctl(ep, EPOLL_CTL_MOD, p.fd, event));
    OK(getrusage(RUSAGE_THREAD, &after));
    CHECK(after.ru_nvcsw - before.ru_nvcsw < ROUNDS / 4);
    free(event);
    close(ep);
    pair_close(p);
}
#endif
