// The other end of the connection under test: an obedient process (or thread) that does one call at a time.
//
// In remote variants it is another process, started by exec, so both ends have nothing in common but the
// device. A handle is the fd's number on the peer's side. Calls return what the system call returned, with
// errno set. `peer_begin` … `peer_end` leave a call running; `peer_asleep` waits until it blocks.
#ifndef PEER_H
#define PEER_H
#include "case.h"

#include <sys/un.h>

// Set before the first request: the remote peer is started without the library.
extern bool peer_is_plain;

struct pair {
    int fd;   // our end
    int peer; // the peer's handle
};

enum op {
    P_SOCKET,       // a: family, b: protocol
    P_CONNECT,      // fd: a socket, or -1 for a new one; a: port
    P_LISTEN,       // fd: likewise; out: port
    P_ACCEPT,       // fd: listener
    P_SERVE,        // likewise, after listen(2)
    P_TAKE,         // by peer_take, or from fd: the descriptor's number there
    P_FETCH,        // fd: another process' number, a: its pid; by pidfd_getfd(2)
    P_MAILBOX,      // a: bound to a path, or to an abstract name; out: its address
    P_EPOLL_ACCEPT, // fd: listener, non-blocking: waits for it in an epoll set
    P_SEND,         // a: flags, in: bytes
    P_RECV,         // a: length, b: flags, out: bytes
    P_SEND_PATTERN, // a: seed, b: first byte, c: length; all of it
    P_RECV_PATTERN, // likewise
    P_RECV_TO_EOF,  // likewise
    P_ECHO,         // until EOF, then closes
    P_SHUTDOWN,     // a: how
    P_CLOSE,
    P_RESET,      // closes with SO_LINGER 0
    P_OPTION,     // a: level, b: name, c: value
    P_GET_OPTION, // a: level, b: name
    P_POLL,       // a: events, b: timeout; value: revents
    P_NONBLOCK,   // a: on
    P_FIONREAD,
    P_READ_UNSEEN, // a byte, by a system call of our own that no library sees; the fd does not wait
    P_EXIT, // ends without closing anything by itself
    P_KILL, // SIGKILL
};

// A connection in the way `variant` says.
struct pair pair_open(void);
// The same of a socket of ours, which is used up, and one of the peer's (P_SOCKET; -1: of AF_INET).
struct pair pair_of(int fd, int peer);
// Several of them, all with the one peer.
void pair_close(struct pair p);
// From byte `at` of both directions on, ten bytes there and back, so many times; where that ends.
int pair_talk(struct pair p, int at, int times);
// The same where both ends are ours.
int ends_talk(const int ends[2], int at, int times);

long peer_call(enum op op, int fd, long a, long b, long c);
void peer_begin(enum op op, int fd, long a, long b, long c);
long peer_end(void);
// Waits until the call begun blocks in the kernel.
void peer_asleep(void);
// The peer's process; ours when it is a thread.
pid_t peer_pid(void);

long peer_send(int fd, const void *buf, size_t n, int flags);
long peer_recv(int fd, void *buf, size_t n, int flags);
// The peer sends these bytes, all of them.
void peer_says(int fd, const char *text);
// The peer receives exactly these bytes.
void peer_hears(int fd, const char *text);

// The peer gets this descriptor in a message; its number there.
int peer_take(int fd);

// A UNIX datagram socket of the peer's that is not connected, and its address.
int peer_mailbox(bool path, struct sockaddr_un *at, socklen_t *len);

// A system call that no library sees.
long unseen(long number, long a, long b, long c);

// The peer was killed by other means.
void peer_forget(void);

void peer_serve(int control);
// Sends back what comes, until EOF, and closes; how many bytes. `PROGRAM --echo FD` does only that.
long echo(int fd);
// This program, for `--echo`.
const char *own_path(void);
// Both ends of a connection here, close-on-exec, in use for so many rounds: the connecting one first, if `client`.
void both_ends(int ends[2], bool client, int rounds);
void peer_end_all(void);

// Threads of ours that send and receive so many bytes on both ends, in both directions.
struct one_way {
    int fd;
    uint64_t seed;
    size_t bytes;
};
struct streams {
    struct one_way to[2], from[2];
    pthread_t threads[4];
};
void streams_begin(struct streams *s, const int ends[2], size_t bytes);
void streams_end(struct streams *s);

#endif
