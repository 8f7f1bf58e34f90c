// What other threads, or the interrupted one, were doing at a fork is not being done in the child.
#include "peer.h"

#include <dirent.h>
#include <signal.h>
#include <sys/epoll.h>

pid_t _Fork(void);

struct long_send {
    int fd;
    _Atomic pid_t tid;
};

#define LONG_SEND (8 << 20)

static void *send_long(void *arg) {
    struct long_send *send = arg;
    send->tid = gettid();
    send_all(send->fd, 1, 0, LONG_SEND);
    return NULL;
}

// A thread sleeps in a send at the fork. The child has no such thread, and is alone with the connection afterwards.
REMOTE_CASE(send_of_another_thread_at_a_fork) {
    struct pair p = pair_open();
    struct long_send send = {.fd = p.fd};
    int there[2];
    char c;
    pthread_t thread;
    EQ(pthread_create(&thread, NULL, send_long, &send), 0);
    while (send.tid == 0)
        sched_yield();
    wait_asleep(getpid(), send.tid);
    OK(pipe(there));
    pid_t pid = OK(fork());
    if (pid == 0) {
        close(there[1]);
        EQ(read(there[0], &c, 1), 0);
        for (int i = 0; i < 16; i++) {
            recv_all(p.fd, 2, i * 10, 10);
            send_all(p.fd, 1, LONG_SEND + i * 10, 10);
        }
        assert_smcd(p.fd);
        _exit(0);
    }
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, LONG_SEND), 0);
    EQ(pthread_join(thread, NULL), 0);
    close(p.fd);
    close(there[1]);
    for (int i = 0; i < 16; i++) {
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 10, 10), 0);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, LONG_SEND + i * 10, 10), 0);
    }
    child_succeeds(pid);
}

static pid_t handlers_child;

static void fork_and_return(int number) {
    int saved = errno;
    (void)number;
    handlers_child = _Fork();
    errno = saved;
}

static void *interrupts(void *arg) {
    pthread_t *sleeper = arg;
    wait_asleep(getpid(), getpid());
    EQ(pthread_kill(*sleeper, SIGUSR1), 0);
    return NULL;
}

// A signal handler forks in a receive that waits. Both return into it, and the child goes on with the connection.
REMOTE_CASE(child_of_a_signal_handler_goes_on) {
    struct pair p = pair_open();
    struct sigaction act = {.sa_handler = fork_and_return};
    pthread_t self = pthread_self(), thread;
    int there[2];
    char c;
    OK(pipe(there));
    OK(sigaction(SIGUSR1, &act, NULL));
    EQ(pthread_create(&thread, NULL, interrupts, &self), 0);
    FAILS(recv(p.fd, &c, 1, 0), EINTR);
    if (handlers_child == 0) {
        int other = OK(socket(AF_INET, SOCK_STREAM, 0));
        close(there[1]);
        EQ(read(there[0], &c, 1), 0);
        for (int i = 0; i < 16; i++) {
            recv_all(p.fd, 2, i * 10, 10);
            send_all(p.fd, 1, i * 10, 10);
        }
        assert_smcd(p.fd);
        close(other);
        _exit(0);
    }
    EQ(pthread_join(thread, NULL), 0);
    close(p.fd);
    close(there[1]);
    for (int i = 0; i < 16; i++) {
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 10, 10), 0);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 10, 10), 0);
    }
    child_succeeds(handlers_child);
}


static volatile bool stop;
static uint16_t port;

static void *shuts_down(void *arg) {
    int listener = *(int *)arg, ep = OK(epoll_create1(0));
    while (!stop) {
        int ends[2] = {connect_to(port), OK(accept(listener, NULL, NULL))};
        struct epoll_event event = {EPOLLIN, {.u64 = 1}};
        OK(epoll_ctl(ep, EPOLL_CTL_ADD, ends[0], &event));
        OK(shutdown(ends[0], SHUT_WR));
        close(ends[0]);
        close(ends[1]);
    }
    close(ep);
    return NULL;
}

// A fork takes all locks, and takes longer where there are many connections.
CASE(shutdowns_of_a_thread_beside_forks) {
    enum { IDLE = 200 };
    int listener = listen_here(&port), idle[IDLE][2];
    pthread_t thread;
    for (int i = 0; i < IDLE; i++) {
        idle[i][0] = connect_to(port);
        idle[i][1] = OK(accept(listener, NULL, NULL));
    }
    EQ(pthread_create(&thread, NULL, shuts_down, &listener), 0);
    for (int i = 0; i < 500; i++) {
        pid_t pid = OK(fork());
        if (pid == 0)
            _exit(0);
        child_succeeds(pid);
    }
    stop = true;
    EQ(pthread_join(thread, NULL), 0);
    for (int i = 0; i < 2 * IDLE; i++)
        close(idle[i / 2][i % 2]);
    close(listener);
}

// O_NONBLOCK belongs to the socket, and who has set it may be gone when the connection changes over.
PAIR_CASE(nonblocking_by_a_child_that_is_gone) {
    struct pair p = pair_open();
    char c;
    pid_t pid = OK(fork());
    if (pid == 0) {
        OK(fcntl(p.fd, F_SETFL, O_NONBLOCK));
        _exit(0);
    }
    child_succeeds(pid);
    for (int i = 0; i < 16; i++) {
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 10, 10), 0);
        wait_readable(p.fd, 10);
        recv_all(p.fd, 2, i * 10, 10);
        send_all(p.fd, 1, i * 10, 10);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 10, 10), 0);
    }
    assert_smcd(p.fd);
    FAILS(recv(p.fd, &c, 1, 0), EAGAIN);
    pair_close(p);
}

PAIR_CASE(rcvlowat_of_a_child_that_is_gone) {
    struct pair p = pair_open();
    int value;
    socklen_t len = sizeof value;
    char c;
    OK(fcntl(p.fd, F_SETFL, O_NONBLOCK));
    pid_t pid = OK(fork());
    if (pid == 0) {
        set_option(p.fd, SOL_SOCKET, SO_RCVLOWAT, 100);
        _exit(0);
    }
    child_succeeds(pid);
    FAILS(recv(p.fd, &c, 1, 0), EAGAIN);
    OK(getsockopt(p.fd, SOL_SOCKET, SO_RCVLOWAT, &value, &len));
    EQ(value, 100);
    pair_close(p);
}

static void *runs_program(void *arg) {
    EQ(system(arg), 0);
    return NULL;
}

// Bytes are unread whose sender has ended its direction, so that the program cannot be given the connection.
CASE(fork_beside_a_program_that_is_not_given_a_connection) {
    int ends[2], go[2];
    char command[100], buf[10];
    pthread_t thread;
    both_ends(ends, true, 20);
    OK(fcntl(ends[0], F_SETFD, 0));
    EQ(send(ends[1], "0123456789", 10, 0), 10);
    OK(shutdown(ends[1], SHUT_WR));
    OK(pipe(go));
    snprintf(command, sizeof command, "read line <&%d", go[0]);
    EQ(pthread_create(&thread, NULL, runs_program, command), 0);
    while (fcntl(ends[0], F_GETFD) != FD_CLOEXEC)
        sched_yield();
    pid_t pid = OK(fork());
    if (pid == 0) {
        EQ(fcntl(ends[0], F_GETFD), 0);
        _exit(0);
    }
    child_succeeds(pid);
    EQ(write(go[1], "\n", 1), 1);
    EQ(pthread_join(thread, NULL), 0);
    EQ(fcntl(ends[0], F_GETFD), 0);
    EQ(recv(ends[0], buf, 10, 0), 10);
    close(ends[0]);
    close(ends[1]);
    close(go[0]);
    close(go[1]);
}

static struct pollfd polled;
static _Atomic pid_t poller;

static void *polls(void *arg) {
    (void)arg;
    poller = gettid();
    EQ(poll(&polled, 1, -1), 1);
    return NULL;
}

// What a call is given to read from is not written to.
PAIR_CASE(array_of_a_poll_beside_a_fork) {
    struct pair p = pair_open();
    pthread_t thread;
    char c;
    polled = (struct pollfd){.fd = p.fd, .events = POLLIN};
    EQ(pthread_create(&thread, NULL, polls, NULL), 0);
    while (poller == 0)
        sched_yield();
    wait_asleep(getpid(), poller);
    pid_t pid = OK(fork());
    if (pid == 0) {
        EQ(polled.fd, p.fd);
        EQ(polled.events, POLLIN);
        _exit(0);
    }
    child_succeeds(pid);
    peer_says(p.peer, "x");
    EQ(pthread_join(thread, NULL), 0);
    EQ(polled.revents, POLLIN);
    EQ(recv(p.fd, &c, 1, 0), 1);
    pair_close(p);
}

// Open numbers of this kind.
static int open_numbers(const char *kind) {
    DIR *dir = opendir("/proc/self/fd");
    int count = 0;
    CHECK(dir);
    for (struct dirent *entry; (entry = readdir(dir));) {
        char target[100];
        ssize_t n = readlinkat(dirfd(dir), entry->d_name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = '\0';
        count += strstr(target, kind) != NULL;
    }
    closedir(dir);
    return count;
}

// A sender that has something to read itself looks again and again.
CASE(numbers_of_a_sleeping_thread_are_not_inherited) {
    int ends[2];
    struct long_send send;
    pthread_t thread;
    both_ends(ends, true, 20);
    send_all(ends[1], 2, 0, 10);
    send = (struct long_send){.fd = ends[0]};
    EQ(pthread_create(&thread, NULL, send_long, &send), 0);
    while (send.tid == 0)
        sched_yield();
    wait_asleep(getpid(), send.tid);
    for (int i = 0; i < 20; i++) {
        pid_t pid = OK(fork());
        if (pid == 0) {
            EQ(open_numbers("timerfd"), 0);
            _exit(0);
        }
        child_succeeds(pid);
    }
    recv_all(ends[1], 1, 0, LONG_SEND);
    EQ(pthread_join(thread, NULL), 0);
    close(ends[0]);
    close(ends[1]);
}

static void *tries_a_program(void *arg) {
    char *args[] = {"usmc-no-such-program", NULL};
    (void)arg;
    while (!stop)
        FAILS(execvp(args[0], args), ENOENT);
    return NULL;
}

// A process that tries a program does not count as a holder meanwhile; its child does, and ends more than what is shared.
CASE(forks_beside_a_program_that_is_not_found) {
    int ends[2], own[2], there[2];
    char c;
    pthread_t thread;
    both_ends(ends, true, 20);
    OK(pipe(there));
    pid_t holder = OK(fork());
    if (holder == 0) {
        close(there[1]);
        EQ(read(there[0], &c, 1), 0);
        _exit(0);
    }
    EQ(pthread_create(&thread, NULL, tries_a_program, NULL), 0);
    int at = 200;
    for (int i = 0; i < 200; i++) {
        pid_t pid = OK(fork());
        if (pid == 0) {
            both_ends(own, true, 10);
            _exit(0);
        }
        child_succeeds(pid);
        at = ends_talk(ends, at, 1);
    }
    stop = true;
    EQ(pthread_join(thread, NULL), 0);
    ends_talk(ends, at, 10);
    close(there[1]);
    child_succeeds(holder);
    close(ends[0]);
    close(ends[1]);
}
