// Connections with one request each, one after the other, and how often either end sleeps for them.
#include "load.h"

#include <sys/resource.h>

enum { REQUEST = 64, ANSWER = 1024 };

// The ways to wait: in calls that block, in poll(2), or in an epoll set.
static enum { BLOCKS, POLLS, EPOLLS } way;
static int set;

static void choose(const char *name) {
    way = !strcmp(name, "epoll") ? EPOLLS : !strcmp(name, "poll") ? POLLS : BLOCKS;
    set = OK(epoll_create1(0));
}

static void want(int op, int fd, uint32_t events) {
    struct epoll_event event = {events, {.fd = fd}};
    if (way == EPOLLS)
        OK(epoll_ctl(set, op, fd, &event));
}

// Waits for this one, the only one that can have something to tell.
static void wait_for(int fd, uint32_t events) {
    struct epoll_event event;
    struct pollfd p = {.fd = fd, .events = (short)events};
    if (way == EPOLLS) {
        EQ(epoll_wait(set, &event, 1, -1), 1);
        EQ(event.data.fd, fd);
        CHECK(event.events & events);
    } else if (way == POLLS) {
        EQ(poll(&p, 1, -1), 1);
        CHECK(p.revents & (short)events);
    }
}

static long sleeps(void) {
    struct rusage usage;
    OK(getrusage(RUSAGE_SELF, &usage));
    return usage.ru_nvcsw;
}

// Answers one request for each of so many connections, and returns how often it has slept after the first.
static long answer(int listener, long count) {
    want(EPOLL_CTL_ADD, listener, EPOLLIN);
    char bytes[ANSWER] = {0};
    long before = 0;
    for (long i = 0; i < count; i++) {
        wait_for(listener, EPOLLIN);
        int fd = OK(accept(listener, NULL, NULL));
        want(EPOLL_CTL_ADD, fd, EPOLLIN);
        wait_for(fd, EPOLLIN);
        EQ(recv(fd, bytes, sizeof bytes, 0), REQUEST);
        EQ(send(fd, bytes, ANSWER, 0), ANSWER);
        close(fd);
        before = i ? before : sleeps();
    }
    return sleeps() - before;
}

// Asks for each of them, and reads the answer to its end; returns as above.
static long ask(uint16_t port, long count) {
    char bytes[ANSWER] = {0};
    long before = 0;
    for (long i = 0; i < count; i++) {
        int fd = OK(socket(AF_INET, SOCK_STREAM | (way == BLOCKS ? 0 : SOCK_NONBLOCK), 0));
        struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
        to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        CHECK(connect(fd, (struct sockaddr *)&to, sizeof to) == 0 || errno == EINPROGRESS);
        want(EPOLL_CTL_ADD, fd, EPOLLOUT);
        wait_for(fd, EPOLLOUT);
        EQ(send(fd, bytes, REQUEST, 0), REQUEST);
        want(EPOLL_CTL_MOD, fd, EPOLLIN);
        wait_for(fd, EPOLLIN);
        ssize_t got = 0, n;
        while ((n = recv(fd, bytes, sizeof bytes, 0)) != 0) {
            if (n < 0) {
                EQ(errno, EAGAIN);
                wait_for(fd, EPOLLIN);
            } else {
                got += n;
            }
        }
        EQ(got, ANSWER);
        close(fd);
        before = i ? before : sleeps();
    }
    return sleeps() - before;
}

void answer_briefs(const char *name, long count) {
    choose(name);
    uint16_t port = 0;
    int listener = listen_here(&port);
    printf("port %d\n", port);
    printf("slept %ld\n", answer(listener, count));
    close(listener);
}

void ask_briefs(const char *name, uint16_t port, long count) {
    choose(name);
    printf("slept %ld\n", ask(port, count));
}

static volatile sig_atomic_t signals;

static void note(int signal) {
    (void)signal;
    signals++;
}

// Waits for nothing, until a handler ends it.
static void wait_in_vain(const char *call, int listener, int silent) {
    char byte;
    struct pollfd p = {.fd = silent, .events = POLLIN};
    struct epoll_event event;
    long done = !strcmp(call, "accept") ? accept(listener, NULL, NULL)
        : !strcmp(call, "recv")         ? recv(silent, &byte, 1, 0)
        : !strcmp(call, "poll")         ? poll(&p, 1, -1)
                                        : epoll_wait(set, &event, 1, -1);
    EQ(done, -1);
    EQ(errno, EINTR);
}

// A child that answers connections to this port, many of which this process has made.
static pid_t answering(uint16_t *port) {
    int listener = listen_here(port);
    pid_t child = OK(fork());
    if (child == 0)
        answer(listener, LONG_MAX);
    close(listener);
    ask(*port, 5000);
    return child;
}

static void end(pid_t child) {
    OK(kill(child, SIGKILL));
    EQ(waitpid(child, NULL, 0), child);
}

// A listener that nobody connects to, in the set.
static int silent_listener(void) {
    uint16_t port = 0;
    int listener = listen_here(&port);
    struct epoll_event event = {EPOLLIN, {.fd = listener}};
    OK(epoll_ctl(set, EPOLL_CTL_ADD, listener, &event));
    return listener;
}

// Waits in this call for two milliseconds again and again, behind some brief connections each time, with a signal that nobody handles
// meanwhile. Prints how many waits it has ended.
void ignored(const char *call, long rounds) {
    choose("blocks");
    uint16_t port = 0;
    pid_t child = answering(&port);
    int listener = silent_listener();
    struct epoll_event event;
    struct sigevent winch = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGWINCH};
    timer_t timer;
    OK(timer_create(CLOCK_MONOTONIC, &winch, &timer));
    long ended = 0;
    for (long i = 0; i < rounds; i++) {
        ask(port, 20);
        struct itimerspec soon = {.it_value = {0, 20000 + i % 100 * 1000}};
        struct pollfd p = {.fd = listener, .events = POLLIN};
        OK(timer_settime(timer, 0, &soon, NULL));
        int done = !strcmp(call, "poll") ? poll(&p, 1, 2) : epoll_wait(set, &event, 1, 2);
        CHECK(done == 0 || errno == EINTR);
        ended += done != 0;
    }
    printf("ended %ld\n", ended);
    end(child);
    close(listener);
}

// Waits in this call again and again, behind some brief connections each time, with a signal for each wait some microseconds after it
// has begun. Prints how many waits it has not ended, so that another one had to.
void interrupted(const char *call, long rounds) {
    choose("blocks");
    uint16_t port = 0, own = 0;
    pid_t child = answering(&port);
    int listener = listen_here(&own);
    int silent = connect_to(own), other = OK(accept(listener, NULL, NULL));
    struct epoll_event event = {EPOLLIN, {.fd = silent}};
    OK(epoll_ctl(set, EPOLL_CTL_ADD, silent, &event));
    struct sigaction ends = {.sa_handler = note};
    OK(sigaction(SIGALRM, &ends, NULL));
    timer_t timer;
    OK(timer_create(CLOCK_MONOTONIC, NULL, &timer));
    long late = 0;
    for (long i = 0; i < rounds; i++) {
        ask(port, 20);
        signals = 0;
        struct itimerspec soon = {.it_value = {0, 20000 + i % 100 * 1000}, .it_interval = {0, 20000000}};
        OK(timer_settime(timer, 0, &soon, NULL));
        wait_in_vain(call, listener, silent);
        late += signals > 1;
        OK(timer_settime(timer, 0, &(struct itimerspec){0}, NULL));
    }
    printf("late %ld\n", late);
    end(child);
    close(other);
}

static int by_time(const void *a, const void *b) {
    long one = *(const long *)a, other = *(const long *)b;
    return (one > other) - (one < other);
}

// Waits in this call for half a millisecond again and again, behind some brief connections each time. Prints how many nanoseconds that
// takes: the median.
void timed(const char *call, long rounds) {
    choose("blocks");
    uint16_t port = 0;
    pid_t child = answering(&port);
    int listener = silent_listener();
    struct epoll_event event;
    struct timespec limit = {.tv_nsec = 500000}, before, after;
    long *took = calloc(rounds, sizeof *took);
    for (long i = 0; i < rounds; i++) {
        ask(port, 20);
        struct pollfd p = {.fd = listener, .events = POLLIN};
        OK(clock_gettime(CLOCK_MONOTONIC, &before));
        EQ(!strcmp(call, "poll") ? ppoll(&p, 1, &limit, NULL) : epoll_pwait2(set, &event, 1, &limit, NULL), 0);
        OK(clock_gettime(CLOCK_MONOTONIC, &after));
        took[i] = (after.tv_sec - before.tv_sec) * 1000000000 + after.tv_nsec - before.tv_nsec;
    }
    qsort(took, rounds, sizeof *took, by_time);
    printf("took %ld\n", took[rounds / 2]);
    free(took);
    end(child);
    close(listener);
}
