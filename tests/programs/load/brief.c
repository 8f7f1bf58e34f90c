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

// Answers one request for each connection.
void answer_briefs(const char *name, long count) {
    choose(name);
    uint16_t port = 0;
    int listener = listen_here(&port);
    printf("port %d\n", port);
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
    printf("slept %ld\n", sleeps() - before);
    close(listener);
}

// Asks for each of them, and reads the answer to its end.
void ask_briefs(const char *name, uint16_t port, long count) {
    choose(name);
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
    printf("slept %ld\n", sleeps() - before);
}
