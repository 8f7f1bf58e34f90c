// Servers that make their listener, then become daemons: whoever is left to accept, in whatever order its family forked,
// ended and became other programs, the very first connection changes over.
#include "peer.h"

#include <sys/prctl.h>

// What becomes of the process that has made the listeners.
struct daemon {
    void (*become)(struct daemon *d);
    int listeners[2], count;
    int ready[2];
    uint16_t port;
};

static void say_ready(struct daemon *d) {
    EQ(write(d->ready[1], &d->port, sizeof d->port), sizeof d->port);
}

// The first connection of any of the listeners, to its end.
_Noreturn static void serve(struct daemon *d) {
    struct pollfd f[2];
    for (int i = 0; i < d->count; i++)
        f[i] = (struct pollfd){.fd = d->listeners[i], .events = POLLIN};
    CHECK(OK(poll(f, d->count, -1)) > 0);
    for (int i = 0; i < d->count; i++)
        if (f[i].revents) {
            echo(OK(accept(d->listeners[i], NULL, NULL)));
            _exit(0);
        }
    _exit(1);
}

// Another program does.
_Noreturn static void serve_by_exec(const char *how, struct daemon *d) {
    char number[16];
    OK(fcntl(d->listeners[0], F_SETFD, 0));
    snprintf(number, sizeof number, "%d", d->listeners[0]);
    execl(own_path(), own_path(), how, number, NULL);
    _exit(1);
}

static void listen_and_become(void *arg) {
    struct daemon *d = arg;
    for (int i = 0; i < d->count; i++) {
        int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
        set_option(fd, SOL_SOCKET, SO_REUSEPORT, 1);
        struct sockaddr_in at = {
            .sin_family = AF_INET, .sin_port = htons(d->port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        OK(bind(fd, (struct sockaddr *)&at, sizeof at));
        OK(listen(fd, 8));
        d->port = local_port(fd);
        d->listeners[i] = fd;
    }
    d->become(d);
}

// The only connection that there is, which is made once the daemon's parent has ended with `status`; -1: it has not.
static void first_connection(void (*become)(struct daemon *d), int count, int status) {
    struct daemon d = {.become = become, .count = count};
    OK(prctl(PR_SET_CHILD_SUBREAPER, 1));
    OK(pipe(d.ready));
    pid_t parent = child(listen_and_become, &d);
    EQ(read(d.ready[0], &d.port, sizeof d.port), sizeof d.port);
    int ended;
    if (status >= 0) {
        EQ(waitpid(parent, &ended, 0), parent);
        EQ(ended, status);
    }
    // Who comes new to the device removes what the dead have left there.
    struct daemon other = {.become = say_ready, .count = 1};
    OK(pipe(other.ready));
    child_succeeds(child(listen_and_become, &other));
    int fd = connect_to(d.port);
    for (int i = 0; i < 32; i++) {
        send_all(fd, 1, i * 10, 10);
        recv_all(fd, 1, i * 10, 10);
    }
    assert_smcd(fd);
    send_all(fd, 1, 320, 50000);
    OK(shutdown(fd, SHUT_WR));
    recv_to_eof(fd, 1, 320, 50000);
    close(fd);
    while (waitpid(-1, &ended, 0) > 0)
        EQ(ended, 0);
}

static void forks_and_exits(struct daemon *d) {
    if (OK(fork()) == 0)
        serve(d);
    say_ready(d);
    exit(0);
}

CASE(first_connection_where_the_parent_has_exited) {
    first_connection(forks_and_exits, 1, 0);
}

static void forks_and_exits_at_once(struct daemon *d) {
    say_ready(d);
    if (OK(fork()) != 0)
        _exit(0);
    serve(d);
}

CASE(first_connection_where_the_parent_exits_at_once) {
    first_connection(forks_and_exits_at_once, 1, 0);
}

CASE(first_connection_to_one_of_two_inherited_listeners) {
    first_connection(forks_and_exits, 2, 0);
}

static void forks_twice(struct daemon *d) {
    if (OK(fork()) == 0) {
        OK(setsid());
        if (OK(fork()) == 0) {
            say_ready(d);
            serve(d);
        }
        _exit(0);
    }
    _exit(0);
}

CASE(first_connection_behind_a_double_fork) {
    first_connection(forks_twice, 1, 0);
}

static void is_daemonised(struct daemon *d) {
    say_ready(d);
    OK(daemon(1, 1));
    serve(d);
}

CASE(first_connection_behind_daemon) {
    first_connection(is_daemonised, 1, 0);
}

// The one that is left of the daemon's parent does not accept itself.
static void forks_workers_and_exits(struct daemon *d) {
    if (OK(fork()) != 0)
        _exit(0);
    pid_t pid = OK(fork());
    if (pid == 0)
        serve(d);
    say_ready(d);
    child_succeeds(pid);
    _exit(0);
}

CASE(first_connection_to_a_worker_of_a_daemon) {
    first_connection(forks_workers_and_exits, 1, 0);
}

static void leaves_it_to_the_child(struct daemon *d) {
    pid_t pid = OK(fork());
    if (pid == 0)
        serve(d);
    OK(close(d->listeners[0]));
    say_ready(d);
    child_succeeds(pid);
    exit(0);
}

CASE(first_connection_where_the_parent_has_closed_its_listener) {
    first_connection(leaves_it_to_the_child, 1, -1);
}

static void leaves_it_to_the_parent(struct daemon *d) {
    pid_t pid = OK(fork());
    if (pid == 0)
        exit(0);
    child_succeeds(pid);
    say_ready(d);
    serve(d);
}

CASE(first_connection_where_the_child_has_exited) {
    first_connection(leaves_it_to_the_parent, 1, -1);
}

static void forks_and_is_killed(struct daemon *d) {
    if (OK(fork()) == 0)
        serve(d);
    say_ready(d);
    raise(SIGKILL);
}

CASE(first_connection_where_the_parent_was_killed) {
    first_connection(forks_and_is_killed, 1, SIGKILL);
}

static void forks_a_program_and_exits(struct daemon *d) {
    if (OK(fork()) == 0)
        serve_by_exec("--serve", d);
    say_ready(d);
    _exit(0);
}

CASE(first_connection_to_a_program_of_a_child) {
    first_connection(forks_a_program_and_exits, 1, 0);
}

// The child becomes another program once its parent is gone.
static void is_orphaned_and_becomes_a_program(struct daemon *d) {
    int lives[2];
    char c;
    OK(pipe2(lives, O_CLOEXEC));
    if (OK(fork()) != 0)
        _exit(0);
    close(lives[1]);
    EQ(read(lives[0], &c, 1), 0);
    say_ready(d);
    serve_by_exec("--serve", d);
}

CASE(first_connection_to_a_program_of_an_orphan) {
    first_connection(is_orphaned_and_becomes_a_program, 1, 0);
}

// Made before anybody who knows of the library listened: with its second request it tries again.
CASE(connection_to_a_listener_that_becomes_known_afterwards) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int listener = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(bind(listener, (struct sockaddr *)&at, sizeof at));
    OK(unseen(SYS_listen, listener, 8, 0));
    int client = connect_to(local_port(listener));
    int ends[2] = {client, OK(accept(listener, NULL, NULL))};
    ends_talk(ends, 0, 32);
    assert_smcd(client);
    close(listener);
    close(ends[0]);
    close(ends[1]);
}

// The next program does with the listener what this one did in other cases.
static void becomes_a_daemon_by_exec(struct daemon *d) {
    say_ready(d);
    serve_by_exec("--daemon", d);
}

CASE(first_connection_to_a_daemon_behind_an_exec) {
    first_connection(becomes_a_daemon_by_exec, 1, 0);
}
