// What the cases use and musl's headers lack: forced in front of every file that is built by musl-gcc. A program for musl
// makes such calls by number, as these do.
#ifndef LACKS_H
#define LACKS_H

#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define TEMP_FAILURE_RETRY(e) \
    ({ \
        __typeof__(e) result_; \
        do \
            result_ = (e); \
        while (result_ == -1 && errno == EINTR); \
        result_; \
    })

// linux/fs.h, which musl's own headers contradict.
#ifndef RWF_HIPRI
#define RWF_HIPRI 1
#define RWF_DSYNC 2
#define RWF_SYNC 4
#define RWF_NOWAIT 8
#define RWF_APPEND 16

static inline ssize_t preadv2(int fd, const struct iovec *iov, int count, off_t at, int flags) {
    return syscall(SYS_preadv2, fd, iov, count, at, 0, flags);
}

static inline ssize_t pwritev2(int fd, const struct iovec *iov, int count, off_t at, int flags) {
    return syscall(SYS_pwritev2, fd, iov, count, at, 0, flags);
}
#endif

static inline int close_range(unsigned first, unsigned last, int flags) {
    return syscall(SYS_close_range, first, last, flags);
}

static inline void closefrom(int first) {
    close_range(first, UINT_MAX, 0);
}

static inline int epoll_pwait2(int set, struct epoll_event *events, int max, const struct timespec *timeout,
                               const sigset_t *mask) {
    return syscall(SYS_epoll_pwait2, set, events, max, timeout, mask, _NSIG / 8);
}

#endif
