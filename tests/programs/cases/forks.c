// Every way to make a process: each of them leaves the connections to both, as fork does.
#include "peer.h"

#include <linux/sched.h>
#include <pty.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/time.h>

pid_t _Fork(void);

struct turns {
    struct pair p;
    int to_child[2], to_parent[2];
};

static void turn(struct turns *t, int i) {
    send_all(t->p.fd, 1, i * 1000, 1000);
    recv_all(t->p.fd, 1, i * 1000, 1000);
}

#define ROUNDS 20

static int child_turns(void *arg) {
    struct turns *t = arg;
    char c;
    for (int i = 1; i < ROUNDS; i += 2) {
        EQ(read(t->to_child[0], &c, 1), 1);
        turn(t, i);
        EQ(write(t->to_parent[1], "x", 1), 1);
    }
    return 0;
}

static pid_t by_Fork(struct turns *t) {
    (void)t;
    return _Fork();
}

static pid_t by_forkpty(struct turns *t) {
    int terminal;
    (void)t;
    return forkpty(&terminal, NULL, NULL, NULL);
}

static pid_t by_sys_fork(struct turns *t) {
    (void)t;
    return syscall(SYS_fork);
}

static pid_t by_sys_clone(struct turns *t) {
    (void)t;
    return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}

static pid_t by_sys_clone3(struct turns *t) {
    struct clone_args args = {.exit_signal = SIGCHLD};
    (void)t;
    return syscall(SYS_clone3, &args, sizeof args);
}

static pid_t by_clone(struct turns *t) {
    size_t size = 256 << 10;
    char *stack = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(stack != MAP_FAILED);
    return clone(child_turns, stack + size, SIGCHLD, t);
}

// Parent and child take turns on the connection; then the child is gone and the parent goes on.
static void alternate(pid_t (*make)(struct turns *)) {
    struct turns t = {.p = pair_open()};
    OK(pipe(t.to_child));
    OK(pipe(t.to_parent));
    peer_begin(P_ECHO, t.p.peer, 0, 0, 0);
    pid_t pid = OK(make(&t));
    if (pid == 0)
        _exit(child_turns(&t));
    char c;
    for (int i = 0; i < ROUNDS; i += 2) {
        turn(&t, i);
        EQ(write(t.to_child[1], "x", 1), 1);
        EQ(read(t.to_parent[0], &c, 1), 1);
    }
    child_succeeds(pid);
    turn(&t, ROUNDS);
    close(t.p.fd);
    EQ(peer_end(), (ROUNDS + 1) * 1000);
}

PAIR_CASE(processes_made_by_Fork) {
    alternate(by_Fork);
}
PAIR_CASE(processes_made_by_forkpty) {
    alternate(by_forkpty);
}
PAIR_CASE(processes_made_by_the_system_call_fork) {
    alternate(by_sys_fork);
}
PAIR_CASE(processes_made_by_the_system_call_clone) {
    alternate(by_sys_clone);
}
PAIR_CASE(processes_made_by_the_system_call_clone3) {
    alternate(by_sys_clone3);
}
PAIR_CASE(processes_made_by_clone_with_a_stack) {
    alternate(by_clone);
}

PAIR_CASE(daemon_goes_on_with_the_connection) {
    struct turns t = {.p = pair_open()};
    OK(pipe(t.to_child));
    OK(pipe(t.to_parent));
    peer_begin(P_ECHO, t.p.peer, 0, 0, 0);
    pid_t pid = OK(fork());
    if (pid == 0) {
        OK(daemon(1, 0));
        _exit(child_turns(&t));
    }
    child_succeeds(pid);
    close(t.to_parent[1]);
    char c;
    for (int i = 0; i < ROUNDS; i += 2) {
        turn(&t, i);
        EQ(write(t.to_child[1], "x", 1), 1);
        EQ(read(t.to_parent[0], &c, 1), 1);
    }
    EQ(read(t.to_parent[0], &c, 1), 0);
    turn(&t, ROUNDS);
    close(t.p.fd);
    EQ(peer_end(), (ROUNDS + 1) * 1000);
}

// The acceptor asks for the memory of its client, which hands it over at its next call. Then the acceptor forks, before it
// has looked, and leaves the connection to its child.
REMOTE_CASE(memory_that_was_handed_over_to_the_parent) {
    uint16_t port;
    int listener = listen_here(&port), peer = OK(peer_call(P_CONNECT, -1, port, 0, 0));
    struct pair p = {.fd = OK(accept(listener, NULL, NULL)), .peer = peer};
    int first = 2 - variant.warm, there[2];
    char c;
    for (int i = 0; i < first; i++) {
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 10, 10), 0);
        recv_all(p.fd, 2, i * 10, 10);
        send_all(p.fd, 1, i * 10, 10);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 10, 10), 0);
    }
    OK(pipe(there));
    pid_t pid = OK(fork());
    if (pid == 0) {
        close(there[1]);
        EQ(read(there[0], &c, 1), 0);
        for (int i = first; i < first + 16; i++) {
            recv_all(p.fd, 2, i * 10, 10);
            send_all(p.fd, 1, i * 10, 10);
        }
        assert_smcd(p.fd);
        _exit(0);
    }
    close(p.fd);
    close(there[1]);
    for (int i = first; i < first + 16; i++) {
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 10, 10), 0);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 10, 10), 0);
    }
    child_succeeds(pid);
    close(listener);
}

// What handlers of pthread_atfork do with a connection.
static struct pair handled;
static int in_child;

static void before(void) {
    if (handled.fd)
        send_all(handled.fd, 1, 0, 100);
}

static void in_the_parent(void) {
    if (handled.fd)
        send_all(handled.fd, 1, 100, 100);
}

static void in_the_child(void) {
    if (!handled.fd)
        return;
    in_child = handled.fd;
    send_all(handled.fd, 1, 200, 100);
    close(handled.fd);
    FAILS(send(in_child, "x", 1, 0), EBADF);
}

__attribute__((constructor)) static void register_handlers(void) {
    EQ(pthread_atfork(before, in_the_parent, in_the_child), 0);
}

PAIR_CASE(handlers_of_pthread_atfork_use_the_connection) {
    handled = pair_open();
    int fd = handled.fd;
    pid_t pid = OK(fork());
    if (pid == 0)
        _exit(0);
    child_succeeds(pid);
    handled.fd = 0;
    unsigned char got[300];
    EQ(peer_recv(handled.peer, got, sizeof got, MSG_WAITALL), 300);
    check_pattern(1, 0, got, 100);
    bool parent_first = got[100] != ({
        unsigned char c;
        pattern(1, 200, &c, 1);
        c;
    });
    check_pattern(1, parent_first ? 100 : 200, got + 100, 100);
    check_pattern(1, parent_first ? 200 : 100, got + 200, 100);
    send_all(fd, 1, 0, 100);
    EQ(peer_call(P_RECV_PATTERN, handled.peer, 1, 0, 100), 0);
    close(fd);
    EQ(peer_call(P_RECV_TO_EOF, handled.peer, 0, 0, 0), 0);
}

// Forks in a signal handler, whatever it interrupts.
static volatile sig_atomic_t forks;
// The next signal comes so long after the handler: however long a fork takes, what it interrupts goes on in between.
static const struct itimerval next_fork = {.it_value = {0, 2000}};

static void fork_now(int number) {
    int saved = errno, status;
    (void)number;
    pid_t pid = _Fork();
    if (pid == 0)
        _exit(7);
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 7 << 8)
        abort();
    forks++;
    OK(setitimer(ITIMER_REAL, &next_fork, NULL));
    errno = saved;
}

PAIR_CASE(signal_handler_that_forks) {
    struct pair p = pair_open();
    struct sigaction act = {.sa_handler = fork_now, .sa_flags = SA_RESTART};
    OK(sigaction(SIGALRM, &act, NULL));
    peer_begin(P_ECHO, p.peer, 0, 0, 0);
    OK(setitimer(ITIMER_REAL, &next_fork, NULL));
    size_t at = 0;
    double late = now() + 5;
    for (; forks < 100 && (forks < 10 || now() < late); at += 700) {
        send_all(p.fd, 1, at, 700);
        recv_all(p.fd, 1, at, 700);
    }
    OK(setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL));
    close(p.fd);
    EQ(peer_end(), at);
}

// Threads open, use and close connections while another forks.
static volatile bool stop;
static int opening;
static uint16_t busy_port;

static void *opens_and_closes(void *arg) {
    (void)arg;
    for (int i = 0; !stop; i++) {
        int fd = connect_to(busy_port);
        for (int k = 0; k < 6; k++) {
            send_all(fd, 1, k * 100, 100);
            recv_all(fd, 1, k * 100, 100);
        }
        close(fd);
    }
    __atomic_fetch_sub(&opening, 1, __ATOMIC_RELEASE);
    return NULL;
}

static void *serves(void *arg) {
    int listener = *(int *)arg, ep = OK(epoll_create1(EPOLL_CLOEXEC)), open = 0;
    struct epoll_event event = {EPOLLIN, {.fd = listener}};
    OK(epoll_ctl(ep, EPOLL_CTL_ADD, listener, &event));
    while (__atomic_load_n(&opening, __ATOMIC_ACQUIRE) > 0 || open > 0) {
        if (epoll_wait(ep, &event, 1, 100) < 1)
            continue;
        if (event.data.fd == listener) {
            struct epoll_event new = {EPOLLIN, {.fd = OK(accept4(listener, NULL, NULL, SOCK_CLOEXEC))}};
            OK(epoll_ctl(ep, EPOLL_CTL_ADD, new.data.fd, &new));
            open++;
            continue;
        }
        char buf[1000];
        ssize_t n = OK(recv(event.data.fd, buf, sizeof buf, 0));
        if (n > 0) {
            EQ(send(event.data.fd, buf, n, 0), n);
        } else {
            // A child may still hold the socket, and with it the registration.
            OK(epoll_ctl(ep, EPOLL_CTL_DEL, event.data.fd, NULL));
            close(event.data.fd);
            open--;
        }
    }
    close(ep);
    return NULL;
}

CASE(forks_while_threads_open_and_close) {
    pthread_t threads[3];
    int listener = listen_here(&busy_port);
    opening = 2;
    EQ(pthread_create(&threads[0], NULL, serves, &listener), 0);
    for (int i = 1; i < 3; i++)
        EQ(pthread_create(&threads[i], NULL, opens_and_closes, NULL), 0);
    for (int i = 0; i < 300; i++) {
        pid_t pid = OK(fork());
        if (pid == 0)
            _exit(0);
        child_succeeds(pid);
    }
    stop = true;
    for (int i = 2; i >= 0; i--)
        EQ(pthread_join(threads[i], NULL), 0);
}
