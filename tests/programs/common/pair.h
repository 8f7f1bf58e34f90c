// Of a pair, for the programs with `casework`.
#ifndef PAIR_H
#define PAIR_H
#include "peer.h"

// The peer reads some of what it was sent, from byte `read` of stream 1 on, and the connection is full again. Where nothing is read for
// a second, the sender of a 32-bit program, or to one, goes back to TCP. A connection that is TCP stays full by itself.
static inline void keep_in_ring(struct pair p, size_t *read, size_t *sent) {
    enum { PART = 100000 };
    if (!variant.warm || is_plain())
        return;
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, *read, PART), 0);
    *read += PART;
    *sent += fill(p.fd, 1, *sent);
}

#endif
