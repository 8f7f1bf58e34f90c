// Filling a connection for good.
#include "check.h"

// Whether TCP, should it take nothing now, takes nothing until somebody reads: nothing is in flight whose
// acknowledgement would make room, and of what is queued the peer's window takes nothing. (A window smaller than a
// segment is used by a timer, some 200 ms later.) In the ring nothing is queued, and full is full.
bool nothing_moves(int fd) {
    // Words of the kernel's struct tcp_info (linux/tcp.h), which goes on where libc's ends.
    enum { UNACKED = 24 / 4, NOT_SENT = 144 / 4, WINDOW = 228 / 4, WORDS };
    uint32_t info[WORDS];
    socklen_t len = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &len) < 0)
        return true; // a send says why
    EQ(len, sizeof info);
    return info[UNACKED] == 0 && (info[NOT_SENT] == 0 || info[WINDOW] == 0);
}

size_t fill(int fd, uint64_t seed, uint64_t at) {
    char buf[16384];
    size_t total = 0;
    double until = now() + 20;
    for (;;) {
        bool was_still = nothing_moves(fd);
        pattern(seed, at + total, buf, sizeof buf);
        ssize_t n = send(fd, buf, sizeof buf, MSG_DONTWAIT);
        if (n < 0) {
            EQ(errno, EAGAIN);
            if (was_still && !(events_now(fd, POLLOUT) & POLLOUT))
                return total;
            CHECK(now() < until);
            OK(poll(NULL, 0, 1));
            continue;
        }
        CHECK(n > 0);
        total += n;
    }
}
