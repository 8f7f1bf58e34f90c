#include "rings.h"
#include "check.h"

#include <sys/mman.h>

// Hands what is prepared to the kernel's ring.
static void flush(struct ring *ring) {
    struct io_uring_sq *sq = &ring->u.sq;
    unsigned tail = *sq->ktail;
    for (; sq->sqe_head != sq->sqe_tail; sq->sqe_head++, tail++)
        sq->array[tail & *sq->kring_mask] = sq->sqe_head & *sq->kring_mask;
    io_uring_smp_store_release(sq->ktail, tail);
}

static int enter_by_number(struct ring *ring, unsigned count, unsigned wait) {
    flush(ring);
    unsigned flags = wait ? IORING_ENTER_GETEVENTS : 0;
    return OK(syscall(SYS_io_uring_enter, ring->u.ring_fd, count, wait, flags, NULL, 0));
}

static int enter_by_liburing(struct ring *ring, unsigned count, unsigned wait) {
    (void)count;
    return wait ? io_uring_submit_and_wait(&ring->u, wait) : io_uring_submit(&ring->u);
}

const struct way BY_NUMBER = {enter_by_number, false};
const struct way BY_LIBURING = {enter_by_liburing, true};

bool uring_is_allowed(void) {
    struct io_uring_params params = {0};
    long fd = syscall(SYS_io_uring_setup, 8, &params);
    if (fd < 0 && (errno == ENOSYS || errno == EPERM)) {
        fprintf(stderr, "io_uring is not allowed here\n");
        return false;
    }
    close(OK(fd));
    return true;
}

bool ring_open(struct ring *ring, const struct way *way, unsigned entries, unsigned flags) {
    if (!uring_is_allowed())
        return false;
    memset(ring, 0, sizeof *ring);
    ring->way = way;
    if (way->is_libs) {
        EQ(io_uring_queue_init(entries, &ring->u, flags), 0);
        return true;
    }
    struct io_uring_params params = {.flags = flags};
    int fd = OK(syscall(SYS_io_uring_setup, entries, &params));
    EQ(io_uring_queue_mmap(fd, &params, &ring->u), 0);
    return true;
}

void ring_close(struct ring *ring) {
    if (ring->way->is_libs) {
        io_uring_queue_exit(&ring->u);
        return;
    }
    struct io_uring_sq *sq = &ring->u.sq;
    struct io_uring_cq *cq = &ring->u.cq;
    OK(munmap(sq->sqes, *sq->kring_entries * sizeof(struct io_uring_sqe)));
    if (cq->ring_ptr && cq->ring_ptr != sq->ring_ptr)
        OK(munmap(cq->ring_ptr, cq->ring_sz));
    OK(munmap(sq->ring_ptr, sq->ring_sz));
    OK(close(ring->u.ring_fd));
}

struct io_uring_sqe *entry(struct ring *ring) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->u);
    CHECK(sqe);
    memset(sqe, 0, sizeof *sqe);
    return sqe;
}

int submit_and_wait(struct ring *ring, unsigned wait) {
    struct io_uring_sq *sq = &ring->u.sq;
    return ring->way->enter(ring, sq->sqe_tail - *sq->khead, wait);
}

int submit_some(struct ring *ring, unsigned count, unsigned wait) {
    return enter_by_number(ring, count, wait);
}

int next_result(struct ring *ring, uint64_t *data) {
    struct io_uring_cqe *cqe;
    EQ(io_uring_peek_cqe(&ring->u, &cqe), 0);
    int value = cqe->res;
    if (data)
        *data = cqe->user_data;
    io_uring_cqe_seen(&ring->u, cqe);
    return value;
}

bool no_result(struct ring *ring) {
    return !io_uring_cq_ready(&ring->u);
}

int one_result(struct ring *ring, uint64_t data) {
    EQ(submit_and_wait(ring, 1), 1);
    uint64_t got;
    int value = next_result(ring, &got);
    EQ(got, data);
    return value;
}

int register_files(struct ring *ring, const int *fds, unsigned count) {
    if (ring->way->is_libs)
        return io_uring_register_files(&ring->u, fds, count);
    return syscall(SYS_io_uring_register, ring->u.ring_fd, IORING_REGISTER_FILES, fds, count);
}
