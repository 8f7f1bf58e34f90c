// Peers that are killed, before or after they shut their direction down: what they leave unread resets the connection, and
// where they had read everything, the first send does.
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

// It is killed behind the system call that took a doorbell, before it has counted it.
REMOTE_CASE(half_closed_peer_is_killed_with_a_doorbell_in_its_hands) {
    struct pair p = half_closed_and_full();
    nonblocking(p.fd, true);
    OK(peer_call(P_NONBLOCK, p.peer, 1, 0, 0));
    char byte = 0;
    double until = now() + 10;
    while (!is_plain() && peer_call(P_READ_UNSEEN, p.peer, 0, 0, 0) != 1) {
        EQ(errno, EAGAIN);
        CHECK(now() < until);
        EQ(send(p.fd, &byte, 1, MSG_NOSIGNAL), -1);
        EQ(errno, EAGAIN);
    }
    kill(peer_pid(), SIGKILL);
    peer_forget();
    nonblocking(p.fd, false);
    EQ(send(p.fd, &byte, 1, MSG_NOSIGNAL), -1);
    CHECK(errno == EPIPE || errno == ECONNRESET);
    close(p.fd);
}

static void waits(void *arg) {
    close(*(int *)arg);
    for (;;)
        pause();
}

static void waits_for_data(void *arg) {
    int *ends = arg;
    close(ends[0]);
    struct pollfd f = {.fd = ends[1], .events = POLLIN};
    poll(&f, 1, -1);
    _exit(1);
}

// The kernel's answer to a doorbell is the application's error, whichever call of ours meets it first. The child that
// is killed does not say who it is: its parent was the end's.
CASE(half_closed_peer_that_was_killed_has_answered) {
    int ends[2], status;
    char byte = 0;
    connect_here(&ends[0], &ends[1]);
    warm_here(ends[0], ends[1]);
    OK(shutdown(ends[1], SHUT_WR));
    FAILS(recv(ends[1], &byte, 1, MSG_DONTWAIT), EAGAIN);
    EQ(recv(ends[0], &byte, 1, 0), 0);
    pid_t pid = child(waits_for_data, ends);
    close(ends[1]);
    wait_asleep(pid, pid);
    kill(pid, SIGKILL);
    EQ(waitpid(pid, &status, 0), pid);
    EQ(send(ends[0], &byte, 1, MSG_NOSIGNAL), 1);
    struct pollfd f = {.fd = ends[0]};
    EQ(unseen(SYS_poll, (long)&f, 1, 10000), 1);
    CHECK(f.revents & POLLHUP);
    // Of a peer that nobody vouches for the kernel is not asked at each send.
    for (double until = now() + 10; send(ends[0], &byte, 1, MSG_NOSIGNAL) == 1;)
        CHECK(now() < until);
    EQ(errno, EPIPE);
    FAILS(send(ends[0], &byte, 1, MSG_NOSIGNAL), EPIPE);
    close(ends[0]);
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

static volatile sig_atomic_t pipes;

static void on_pipe(int number) {
    (void)number;
    pipes++;
}

// A peer that was killed after `unread` bytes that it did not read; `half_closed`: after it had shut its direction down.
static int left_by_the_killed(size_t unread, bool half_closed) {
    struct pair p = pair_open();
    struct sigaction act = {.sa_handler = on_pipe};
    OK(sigaction(SIGPIPE, &act, NULL));
    // TCP would keep what is sent last until the peer has acknowledged what it has read.
    set_option(p.fd, IPPROTO_TCP, TCP_NODELAY, 1);
    send_all(p.fd, 1, 0, 1000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 1000), 0);
    if (half_closed) {
        OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
        recv_to_eof(p.fd, 2, 0, 0);
    }
    if (unread > 0)
        send_all(p.fd, 1, 1000, unread);
    kill(peer_pid(), SIGKILL);
    peer_forget();
    // The kernel handles the FIN or the reset later where it is short of CPU. Of a half-closed peer in the ring there may be neither.
    struct pollfd end = {.fd = p.fd, .events = half_closed ? 0 : POLLRDHUP};
    if (unread > 0)
        unseen(SYS_poll, (long)&end, 1, is_plain() || !variant.warm || !half_closed ? 10000 : 20);
    return p.fd;
}

// Each call of a kind that sends one byte.
static ssize_t send_one(int fd, int how) {
    char byte = 0;
    struct iovec iov = {&byte, 1};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    switch (how) {
    case 0:
        return send(fd, &byte, 1, 0);
    case 1:
        return write(fd, &byte, 1);
    case 2:
        return writev(fd, &iov, 1);
    default:
        return sendmsg(fd, &message, 0);
    }
}

static void is_broken(int fd, int how) {
    int before = pipes;
    FAILS(send_one(fd, how), EPIPE);
    EQ(pipes, before + 1);
    char byte = 0;
    FAILS(send(fd, &byte, 1, MSG_NOSIGNAL), EPIPE);
    EQ(pipes, before + 1);
}

static void had_read_everything(int how, bool half_closed) {
    int fd = left_by_the_killed(0, half_closed);
    // The first one goes out, and provokes the reset, which the kernel handles later where it is short of CPU.
    EQ(send_one(fd, how), 1);
    struct pollfd reset = {.fd = fd};
    // In the ring there may be none.
    unseen(SYS_poll, (long)&reset, 1, is_plain() || !variant.warm ? 10000 : 20);
    is_broken(fd, how);
    char byte;
    EQ(recv(fd, &byte, 1, 0), 0);
    close(fd);
}

REMOTE_CASE(killed_peer_that_had_read_everything_breaks_the_second_send) {
    had_read_everything(0, false);
}

REMOTE_CASE(killed_peer_that_had_read_everything_breaks_the_second_write) {
    had_read_everything(1, false);
}

REMOTE_CASE(killed_peer_that_had_read_everything_breaks_the_second_writev) {
    had_read_everything(2, false);
}

REMOTE_CASE(killed_peer_that_had_read_everything_breaks_the_second_sendmsg) {
    had_read_everything(3, false);
}

REMOTE_CASE(killed_peer_that_had_shut_down_and_read_everything_breaks_the_second_send) {
    had_read_everything(0, true);
}

REMOTE_CASE(killed_peer_with_unread_bytes_resets_the_first_send) {
    int fd = left_by_the_killed(500, false);
    int before = pipes;
    FAILS(send_one(fd, 0), ECONNRESET);
    EQ(pipes, before);
    is_broken(fd, 0);
    close(fd);
}

REMOTE_CASE(killed_peer_that_had_shut_down_breaks_the_first_send_with_unread_bytes) {
    int fd = left_by_the_killed(500, true);
    is_broken(fd, 1);
    close(fd);
}

// Sends at any moment of the peer's death: some go out, then one is told of it, and all that follow say EPIPE.
REMOTE_CASE(sends_around_the_death_of_the_peer_fail_for_good) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 1000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 1000), 0);
    char byte = 0;
    kill(peer_pid(), SIGKILL);
    double until = now() + 10;
    ssize_t n;
    while ((n = send(p.fd, &byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT)) == 1 || (n < 0 && errno == EAGAIN))
        CHECK(now() < until);
    CHECK(errno == EPIPE || errno == ECONNRESET);
    FAILS(send(p.fd, &byte, 1, MSG_NOSIGNAL), EPIPE);
    peer_forget();
    close(p.fd);
}

// A connection in use, of which `run` has the other end, in another process.
static pid_t elsewhere(void (*run)(void *), int ends[2]) {
    connect_here(&ends[0], &ends[1]);
    warm_here(ends[0], ends[1]);
    pid_t pid = child(run, ends);
    close(ends[1]);
    return pid;
}

static void kill_and_wait(pid_t pid) {
    int status;
    kill(pid, SIGKILL);
    EQ(waitpid(pid, &status, 0), pid);
    EQ(status, SIGKILL);
}

static void echoes(void *arg) {
    int *ends = arg;
    close(ends[0]);
    echo(ends[1]);
}

// What it echoes, it has read; it sleeps in its next receive then, and has heard the doorbell before.
static void talk(int fd, int rounds) {
    for (int i = 0; i < rounds; i++) {
        send_all(fd, 1, i * 100, 100);
        recv_all(fd, 1, i * 100, 100);
    }
}

static void breaks_the_second_send(int fd) {
    struct sigaction act = {.sa_handler = on_pipe};
    OK(sigaction(SIGPIPE, &act, NULL));
    EQ(send_one(fd, 0), 1);
    is_broken(fd, 0);
    close(fd);
}

// Ten rounds of `talk`, and one byte that ends them.
static void talk_back(int fd) {
    char buf[100];
    for (int i = 0; i < 10; i++) {
        recv_all(fd, 1, i * 100, 100);
        send_all(fd, 1, i * 100, 100);
    }
    EQ(recv(fd, buf, 1, 0), 1);
}

// Who made the connection has closed it, and its child is killed.
CASE(killed_child_had_the_connection_of_a_process_that_lives) {
    int ends[2];
    pid_t pid = elsewhere(echoes, ends);
    talk(ends[0], 10);
    kill_and_wait(pid);
    breaks_the_second_send(ends[0]);
}

static void forks_and_is_killed(void *arg) {
    int *ends = arg;
    close(ends[0]);
    talk_back(ends[1]);
    pid_t pid = OK(fork());
    if (pid > 0)
        raise(SIGKILL);
    char byte = 1;
    EQ(send(ends[1], &byte, 1, 0), 1);
    echo(ends[1]);
}

// Of two that hold the peer's end one is killed: the other is still there.
CASE(killed_parent_leaves_the_connection_to_its_child) {
    int ends[2], status;
    pid_t pid = elsewhere(forks_and_is_killed, ends);
    talk(ends[0], 10);
    send_all(ends[0], 9, 0, 1);
    EQ(waitpid(pid, &status, 0), pid);
    EQ(status, SIGKILL);
    char byte;
    EQ(recv(ends[0], &byte, 1, 0), 1);
    talk(ends[0], 1000);
    OK(shutdown(ends[0], SHUT_WR));
    EQ(recv(ends[0], &byte, 1, 0), 0);
    close(ends[0]);
}

static void *takes_part(void *arg) {
    int *ends = arg;
    connect_here(&ends[0], &ends[1]);
    warm_here(ends[0], ends[1]);
    return NULL;
}

// The thread that was the first to have a connection in shared memory ends, and its process goes on.
CASE(connection_outlives_the_thread_that_made_it) {
    int ends[2];
    pthread_t thread;
    EQ(pthread_create(&thread, NULL, takes_part, ends), 0);
    EQ(pthread_join(thread, NULL), 0);
    for (int i = 0; i < 1000; i++) {
        send_all(ends[0], 1, i * 10, 10);
        recv_all(ends[1], 1, i * 10, 10);
    }
    pid_t pid = child(echoes, ends);
    close(ends[1]);
    talk(ends[0], 10);
    kill_and_wait(pid);
    breaks_the_second_send(ends[0]);
}

// The word of a process is marked when it becomes another program, and that closes the connection.
static void executes(void *arg) {
    int *ends = arg;
    close(ends[0]);
    OK(fcntl(ends[1], F_SETFD, FD_CLOEXEC));
    talk_back(ends[1]);
    execl("/bin/sleep", "sleep", "1000", (char *)NULL);
}

CASE(peer_that_became_another_program_breaks_the_second_send) {
    int ends[2];
    pid_t pid = elsewhere(executes, ends);
    talk(ends[0], 10);
    send_all(ends[0], 9, 0, 1);
    char byte;
    EQ(recv(ends[0], &byte, 1, 0), 0);
    breaks_the_second_send(ends[0]);
    kill_and_wait(pid);
}
