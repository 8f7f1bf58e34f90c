// Peers that are killed after they shut their direction down: their FIN is here already, and what they leave unread
// resets the connection.
#include "peer.h"

static struct pair half_closed_and_full(void) {
    struct pair p = pair_open();
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 1000), 0);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    recv_to_eof(p.fd, 2, 0, 1000);
    // It has heard all wake-ups, and sleeps no more.
    send_all(p.fd, 1, 0, 1000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 1000), 0);
    char byte;
    EQ(peer_recv(p.peer, &byte, 1, MSG_DONTWAIT), -1);
    EQ(errno, EAGAIN);
    fill(p.fd, 1, 0);
    return p;
}

static void is_reset(int fd) {
    char byte = 0;
    EQ(send(fd, &byte, 1, MSG_NOSIGNAL), -1);
    CHECK(errno == EPIPE || errno == ECONNRESET);
    EQ(recv(fd, &byte, 1, 0), 0);
    close(fd);
}

static void kill_peer(void *sleeper) {
    wait_asleep(getppid(), *(pid_t *)sleeper);
    kill(peer_pid(), SIGKILL);
}

// Another process, as the peer's own thread of control is asked for nothing any more.
static pid_t kill_peer_when_asleep(void) {
    static pid_t self;
    self = getpid();
    return child(kill_peer, &self);
}

REMOTE_CASE(half_closed_peer_is_killed_during_a_send) {
    struct pair p = half_closed_and_full();
    pid_t pid = kill_peer_when_asleep();
    char buf[1000] = {0};
    EQ(send(p.fd, buf, sizeof buf, MSG_NOSIGNAL), -1);
    CHECK(errno == EPIPE || errno == ECONNRESET);
    peer_forget();
    child_succeeds(pid);
    close(p.fd);
}

REMOTE_CASE(half_closed_peer_is_killed_during_a_poll) {
    struct pair p = half_closed_and_full();
    pid_t pid = kill_peer_when_asleep();
    struct pollfd f = {.fd = p.fd, .events = POLLOUT};
    EQ(poll(&f, 1, 10000), 1);
    EQ(f.revents, POLLOUT | POLLERR | POLLHUP);
    peer_forget();
    child_succeeds(pid);
    is_reset(p.fd);
}

static void in_epoll(uint32_t edge) {
    struct pair p = half_closed_and_full();
    int set = OK(epoll_create1(EPOLL_CLOEXEC));
    struct epoll_event event = {EPOLLOUT | edge, {.fd = p.fd}};
    OK(epoll_ctl(set, EPOLL_CTL_ADD, p.fd, &event));
    pid_t pid = kill_peer_when_asleep();
    EQ(epoll_wait(set, &event, 1, 10000), 1);
    EQ(event.events, EPOLLOUT | EPOLLERR | EPOLLHUP);
    peer_forget();
    child_succeeds(pid);
    close(set);
    is_reset(p.fd);
}

REMOTE_CASE(half_closed_peer_is_killed_during_epoll_wait) {
    in_epoll(0);
}

REMOTE_CASE(half_closed_peer_is_killed_during_epoll_wait_for_an_edge) {
    in_epoll(EPOLLET);
}

// Sends alone find it out, as long as there is no room.
REMOTE_CASE(half_closed_peer_is_killed_between_sends) {
    struct pair p = half_closed_and_full();
    nonblocking(p.fd, true);
    kill(peer_pid(), SIGKILL);
    peer_forget();
    char byte = 0;
    double until = now() + 10;
    while (send(p.fd, &byte, 1, MSG_NOSIGNAL) < 0 && errno == EAGAIN)
        CHECK(now() < until);
    CHECK(errno == EPIPE || errno == ECONNRESET);
    close(p.fd);
}

static void waits(void *arg) {
    close(*(int *)arg);
    for (;;)
        pause();
}

// What an edge-triggered set was asked for does not name the peer's end, and the last holder of that dies.
CASE(death_of_the_peer_is_an_edge_of_what_may_be_read) {
    int ends[2], status, ep = OK(epoll_create1(0));
    char byte;
    connect_here(&ends[0], &ends[1]);
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLET};
    nonblocking(ends[0], true);
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, ends[0], &event));
    warm_here(ends[0], ends[1]);
    // It has heard all doorbells: its kernel ends the connection by a FIN.
    FAILS(recv(ends[1], &byte, 1, MSG_DONTWAIT), EAGAIN);
    pid_t pid = child(waits, ends);
    close(ends[1]);
    fill(ends[0], 1, 0);
    while (epoll_wait(ep, &event, 1, 0) > 0)
        fill(ends[0], 1, 0);
    FAILS(recv(ends[0], &byte, 1, 0), EAGAIN);
    kill(pid, SIGKILL);
    EQ(waitpid(pid, &status, 0), pid);
    EQ(epoll_wait(ep, &event, 1, 10000), 1);
    CHECK(event.events & EPOLLIN);
    close(ends[0]);
    close(ep);
}
