// What every test program is made of: checks, sockets, and a pattern that tells each byte's place.
//
// No program sleeps to synchronise; the Rust side bounds the time of all of them.
#ifndef CHECK_H
#define CHECK_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// Native SMC sockets, for headers that do not have them.
#ifndef AF_SMC
#define AF_SMC 43
#endif
#ifndef IPPROTO_SMC
#define IPPROTO_SMC 256
#endif
#define SMCPROTO_SMC 0
#define SMCPROTO_SMC6 1

// --- checks: a failed one names its place and values and ends the program

_Noreturn void check_failed(const char *file, int line, const char *what, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#define CHECK(e) \
    do { \
        if (!(e)) \
            check_failed(__FILE__, __LINE__, #e, "errno %d (%s)", errno, strerror(errno)); \
    } while (0)

// Both sides as long long.
#define EQ(a, b) \
    do { \
        long long a_ = (long long)(a); \
        int errno_ = errno; \
        long long b_ = (long long)(b); \
        if (a_ != b_) \
            check_failed(__FILE__, __LINE__, #a " == " #b, "%lld != %lld, errno %d (%s)", a_, b_, \
                errno_, strerror(errno_)); \
    } while (0)

// The call succeeds; its value.
#define OK(call) \
    ({ \
        long long v_ = (long long)(call); \
        if (v_ < 0) \
            check_failed(__FILE__, __LINE__, #call, "%lld, errno %d (%s)", v_, errno, strerror(errno)); \
        (long)v_; \
    })

// The call fails with this errno.
#define FAILS(call, code) \
    do { \
        errno = 0; \
        long long v_ = (long long)(call); \
        int errno_ = errno; \
        if (v_ != -1 || errno_ != (code)) \
            check_failed(__FILE__, __LINE__, #call " fails with " #code, "%lld, errno %d (%s)", v_, \
                errno_, strerror(errno_)); \
    } while (0)

// --- connections

// A listener on an ephemeral port of 127.0.0.1.
int listen_here(uint16_t *port);
// Likewise on any address of a family, with options set by the caller before.
int listen_at(int fd, const char *address, uint16_t *port);
struct sockaddr_storage address_of(const char *text, uint16_t port, socklen_t *len);
int connect_to(uint16_t port);
int connect_at(int fd, const char *address, uint16_t port);
uint16_t local_port(int fd);
uint16_t peer_port(int fd);
// A connected pair in this thread: connects, then accepts.
void connect_here(int *client, int *server);
// Messages both ways until the connection could change over, then asks the harness to confirm SMC-D.
void warm_here(int client, int server);
// Asks the harness to assert that this connection is SMC-D at both ends. Nothing when run by hand.
void assert_smcd(int fd);
// Likewise, that it is TCP.
void assert_tcp(int fd);
// Whether the library is not there: the harness runs everything over TCP.
bool is_plain(void);
// A stream socket of this family and protocol with these flags of socket(2). In a plain run, the TCP socket that a
// native SMC socket is underneath.
int stream(int family, int protocol, int flags);
// The loopback address of a socket's own family.
const char *loopback_of(int fd);
// Prints a line for the harness and waits for its answer.
void tell_harness(const char *format, ...) __attribute__((format(printf, 1, 2)));

// A descriptor in a message (SCM_RIGHTS).
ssize_t try_send_fd(int channel, int fd);
void send_fd(int channel, int fd);
int receive_fd(int channel);
// By pidfd_getfd(2) from another process.
int fetch_fd(pid_t pid, int number);

// --- bytes: position `at` of a stream has exactly one right value

void pattern(uint64_t seed, uint64_t at, void *buf, size_t n);
// The socket that they come from: its number and ports are told with a failure.
extern _Thread_local int check_socket;
// Ends the program if a byte differs.
void check_pattern(uint64_t seed, uint64_t at, const void *buf, size_t n);
void send_all(int fd, uint64_t seed, uint64_t at, size_t n);
void recv_all(int fd, uint64_t seed, uint64_t at, size_t n);
// Reads up to EOF and checks that exactly `n` bytes came.
void recv_to_eof(int fd, uint64_t seed, uint64_t at, size_t n);
// Bytes `at` to `end` of a stream, one by one, each read before the next is sent.
void trickle(int from, int to, uint64_t seed, uint64_t at, uint64_t end);
// Sends without blocking until the connection takes no more before somebody reads; how many bytes it took.
size_t fill(int fd, uint64_t seed, uint64_t at);
// Whether a connection that takes nothing now takes nothing until somebody reads.
bool nothing_moves(int fd);

// --- time, processes, threads

double now(void);
void nonblocking(int fd, bool on);
int option(int fd, int level, int name);
void set_option(int fd, int level, int name, int value);
void timeout_option(int fd, int name, double seconds);
// Waits until thread `tid` of process `pid` sleeps in the kernel.
void wait_asleep(pid_t pid, pid_t tid);
// The same; false where the thread has ended before.
bool wait_asleep_or_gone(pid_t pid, pid_t tid);
// Waits until a thread of this process sleeps for room. In a 32-bit program it may have ended before: a ring there has no far part,
// so a sender whose bytes nobody reads for a while goes back to TCP, which has room.
void wait_asleep_for_room(pid_t tid);
// Forks a child that dies with us and ends with status 0 if `run` returns.
pid_t child(void (*run)(void *), void *arg);
// Waits for a child and checks that it ended with status 0.
void child_succeeds(pid_t pid);
// Waits until poll(2) says exactly these events, for at most ten seconds.
void wait_events(int fd, short events, short expected);
// Exactly one event with this mask comes from an epoll set, in time.
void one_event(int ep, uint32_t events, uint64_t data);
// It has nothing to tell now.
void no_event(int ep);
// Waits until `n` bytes can be read (FIONREAD).
void wait_readable(int fd, int n);
// The events that poll(2) says now.
short events_now(int fd, short events);

#endif
