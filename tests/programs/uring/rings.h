// Rings, made and used by libc's syscall(2) or by liburing.
#ifndef RINGS_H
#define RINGS_H
#include <liburing.h>
#include <stdbool.h>

struct ring;

struct way {
    int (*enter)(struct ring *ring, unsigned count, unsigned wait);
    bool is_libs;
};

extern const struct way BY_NUMBER, BY_LIBURING;

struct ring {
    const struct way *way;
    struct io_uring u;
};

// Not where the kernel was told to refuse rings (kernel.io_uring_disabled, seccomp).
bool uring_is_allowed(void);
// False where rings are not allowed.
bool ring_open(struct ring *ring, const struct way *way, unsigned entries, unsigned flags);
void ring_close(struct ring *ring);
struct io_uring_sqe *entry(struct ring *ring);
// All that is prepared; waits for so many results.
int submit_and_wait(struct ring *ring, unsigned wait);
// By number: so many of what is prepared.
int submit_some(struct ring *ring, unsigned count, unsigned wait);
// The next result that is there; its user data.
int next_result(struct ring *ring, uint64_t *data);
bool no_result(struct ring *ring);
// Submits the one entry that is prepared, and waits for its result.
int one_result(struct ring *ring, uint64_t data);
int register_files(struct ring *ring, const int *fds, unsigned count);

#endif
