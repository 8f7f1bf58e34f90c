// Numbers that another thread closes, or makes mean something else, at any moment of a call: each byte that a send has taken
// arrives on the connection that the number meant.
#include "peer.h"

enum { ROUNDS = 100, MOST = 20000, ROUNDS_OF_TALK = 40 };

struct writer {
    int fd;
    int sent;
    bool ended;
};

// Bytes, one by one, until the number is closed.
static void *write_on(void *arg) {
    struct writer *w = arg;
    while (w->sent < MOST) {
        ssize_t n = write(w->fd, "x", 1);
        if (n < 0) {
            EQ(errno, EBADF);
            break;
        }
        EQ(n, 1);
        __atomic_store_n(&w->sent, w->sent + 1, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&w->ended, true, __ATOMIC_RELEASE);
    return NULL;
}

// Returns when the writer has sent about so many.
static void wait_for(const struct writer *w, int sent) {
    while (__atomic_load_n(&w->sent, __ATOMIC_ACQUIRE) < sent && !__atomic_load_n(&w->ended, __ATOMIC_ACQUIRE))
        ;
}

// To the end.
static int count_all(int fd) {
    char buf[4096];
    int all = 0;
    for (ssize_t n; (n = OK(recv(fd, buf, sizeof buf, 0))) > 0;)
        all += n;
    return all;
}

CASE(bytes_sent_beside_a_close_arrive) {
    for (int i = 0; i < ROUNDS; i++) {
        int ends[2];
        both_ends(ends, i % 2, ROUNDS_OF_TALK);
        struct writer w = {.fd = ends[0]};
        pthread_t thread;
        EQ(pthread_create(&thread, NULL, write_on, &w), 0);
        wait_for(&w, 50 + i * 7);
        OK(close(ends[0]));
        EQ(pthread_join(thread, NULL), 0);
        EQ(count_all(ends[1]), w.sent);
        close(ends[1]);
    }
}

// Ends the writer by closing its number, which must not have ended before; how much it has sent.
static int end_of(pthread_t thread, struct writer *w) {
    CHECK(!__atomic_load_n(&w->ended, __ATOMIC_ACQUIRE) || w->sent == MOST);
    OK(close(w->fd));
    EQ(pthread_join(thread, NULL), 0);
    return w->sent;
}

// The number means one connection, then the other.
CASE(bytes_sent_beside_a_dup2_arrive) {
    for (int i = 0; i < ROUNDS; i++) {
        int one[2], other[2];
        both_ends(one, i % 2, ROUNDS_OF_TALK);
        both_ends(other, i % 2, ROUNDS_OF_TALK);
        struct writer w = {.fd = OK(fcntl(one[0], F_DUPFD_CLOEXEC, 100))};
        pthread_t thread;
        EQ(pthread_create(&thread, NULL, write_on, &w), 0);
        for (int turn = 0; turn < 4; turn++) {
            wait_for(&w, 50 + i + turn * 500);
            EQ(dup3(turn % 2 ? one[0] : other[0], w.fd, O_CLOEXEC), w.fd);
        }
        int sent = end_of(thread, &w);
        OK(close(one[0]));
        OK(close(other[0]));
        EQ(count_all(one[1]) + count_all(other[1]), sent);
        close(one[1]);
        close(other[1]);
    }
}

// Nobody else has the connections: their records end.
CASE(bytes_sent_beside_a_dup2_that_closes_arrive) {
    for (int i = 0; i < ROUNDS; i++) {
        int one[2], other[2];
        both_ends(one, i % 2, ROUNDS_OF_TALK);
        both_ends(other, i % 2, ROUNDS_OF_TALK);
        struct writer w = {.fd = OK(fcntl(one[0], F_DUPFD_CLOEXEC, 100))};
        close(one[0]);
        pthread_t thread;
        EQ(pthread_create(&thread, NULL, write_on, &w), 0);
        wait_for(&w, 50 + i * 7);
        EQ(dup3(other[0], w.fd, O_CLOEXEC), w.fd);
        wait_for(&w, 2000);
        close(other[0]);
        int sent = end_of(thread, &w);
        EQ(count_all(one[1]) + count_all(other[1]), sent);
        close(one[1]);
        close(other[1]);
    }
}

// A pipe gets the number.
CASE(bytes_sent_beside_a_pipe_that_gets_the_number_arrive) {
    for (int i = 0; i < ROUNDS; i++) {
        int ends[2], pipes[2], piped = 0;
        both_ends(ends, i % 2, ROUNDS_OF_TALK);
        OK(pipe2(pipes, O_CLOEXEC));
        struct writer w = {.fd = OK(fcntl(ends[0], F_DUPFD_CLOEXEC, 100))};
        pthread_t thread;
        EQ(pthread_create(&thread, NULL, write_on, &w), 0);
        wait_for(&w, 50 + i * 7);
        EQ(dup2(pipes[1], w.fd), w.fd);
        wait_for(&w, 2000);
        int sent = end_of(thread, &w);
        OK(close(ends[0]));
        OK(ioctl(pipes[0], FIONREAD, &piped));
        EQ(count_all(ends[1]) + piped, sent);
        close(pipes[0]);
        close(pipes[1]);
        close(ends[1]);
    }
}
