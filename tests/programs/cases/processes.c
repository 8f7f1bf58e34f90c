// fork and its kin: several processes on one connection, servers of every shape.
#include "peer.h"

#include <spawn.h>

extern char **environ;

struct turns {
    struct pair p;
    int to_child[2], to_parent[2];
};

static void pass_turn(int fd) {
    EQ(write(fd, "x", 1), 1);
}

static void await_turn(int fd) {
    char c;
    EQ(read(fd, &c, 1), 1);
}

static struct turns take_turns(struct pair p) {
    struct turns t = {.p = p};
    OK(pipe(t.to_child));
    OK(pipe(t.to_parent));
    return t;
}

// Each turn sends and receives the next 1000 bytes.
static void turn(struct turns *t, int i) {
    send_all(t->p.fd, 1, i * 1000, 1000);
    recv_all(t->p.fd, 1, i * 1000, 1000);
}

static void child_turns(void *arg) {
    struct turns *t = arg;
    for (int i = 1; i < 40; i += 2) {
        await_turn(t->to_child[0]);
        turn(t, i);
        pass_turn(t->to_parent[1]);
    }
}

PAIR_CASE(parent_and_child_alternate) {
    struct turns t = take_turns(pair_open());
    peer_begin(P_ECHO, t.p.peer, 0, 0, 0);
    pid_t pid = child(child_turns, &t);
    for (int i = 0; i < 40; i += 2) {
        turn(&t, i);
        pass_turn(t.to_child[1]);
        await_turn(t.to_parent[0]);
    }
    child_succeeds(pid);
    turn(&t, 40);
    close(t.p.fd);
    EQ(peer_end(), 41000);
}

static void grandchild_turns(void *arg) {
    struct turns *t = arg;
    pid_t pid = child(child_turns, t);
    child_succeeds(pid);
}

PAIR_CASE(parent_and_grandchild_alternate) {
    struct turns t = take_turns(pair_open());
    peer_begin(P_ECHO, t.p.peer, 0, 0, 0);
    pid_t pid = child(grandchild_turns, &t);
    for (int i = 0; i < 40; i += 2) {
        turn(&t, i);
        pass_turn(t.to_child[1]);
        await_turn(t.to_parent[0]);
    }
    child_succeeds(pid);
    close(t.p.fd);
    EQ(peer_end(), 40000);
}

struct held {
    struct pair p;
    int end[2];
};

static void hold(void *arg) {
    struct held *h = arg;
    await_turn(h->end[0]);
}

PAIR_CASE(connection_ends_with_its_last_holder) {
    struct held h = {.p = pair_open()};
    OK(pipe(h.end));
    pid_t pid = child(hold, &h);
    send_all(h.p.fd, 1, 0, 100);
    close(h.p.fd);
    EQ(peer_call(P_RECV_PATTERN, h.p.peer, 1, 0, 100), 0);
    EQ(peer_call(P_POLL, h.p.peer, POLLIN | POLLRDHUP, 100, 0), 0);
    pass_turn(h.end[1]);
    child_succeeds(pid);
    EQ(peer_call(P_RECV_TO_EOF, h.p.peer, 0, 0, 0), 0);
}

static void write_last_words(void *arg) {
    struct held *h = arg;
    await_turn(h->end[0]);
    send_all(h->p.fd, 1, 100, 100);
}

PAIR_CASE(child_goes_on_after_the_parent_closed) {
    struct held h = {.p = pair_open()};
    OK(pipe(h.end));
    pid_t pid = child(write_last_words, &h);
    send_all(h.p.fd, 1, 0, 100);
    close(h.p.fd);
    pass_turn(h.end[1]);
    child_succeeds(pid);
    EQ(peer_call(P_RECV_TO_EOF, h.p.peer, 1, 0, 200), 0);
}

static void close_and_end(void *arg) {
    close(((struct pair *)arg)->fd);
}

static void just_end(void *arg) {
    (void)arg;
}

static void be_killed(void *arg) {
    (void)arg;
    raise(SIGKILL);
}

PAIR_CASE(children_that_do_not_use_it_change_nothing) {
    struct pair p = pair_open();
    void (*ways[])(void *) = {close_and_end, just_end, be_killed};
    for (int i = 0; i < 12; i++) {
        pid_t pid = child(ways[i % 3], &p);
        int status;
        EQ(waitpid(pid, &status, 0), pid);
        send_all(p.fd, 1, i * 5000, 5000);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 5000, 5000), 0);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 5000, 5000), 0);
        recv_all(p.fd, 2, i * 5000, 5000);
    }
    pair_close(p);
}

static void shut_it_down(void *arg) {
    OK(shutdown(((struct pair *)arg)->fd, SHUT_WR));
}

PAIR_CASE(shutdown_by_the_child_holds_for_the_parent) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 100);
    child_succeeds(child(shut_it_down, &p));
    FAILS(send(p.fd, "x", 1, MSG_NOSIGNAL), EPIPE);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 1, 0, 100), 0);
    peer_says(p.peer, "ok");
    char buf[4];
    EQ(recv(p.fd, buf, 4, 0), 2);
    pair_close(p);
}

static void read_half(void *arg) {
    recv_all(((struct pair *)arg)->fd, 1, 0, 3000);
}

PAIR_CASE(child_reads_the_first_half_and_the_parent_the_second) {
    struct pair p = pair_open();
    EQ(peer_call(P_SEND_PATTERN, p.peer, 1, 0, 6000), 0);
    child_succeeds(child(read_half, &p));
    recv_all(p.fd, 1, 3000, 3000);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 1, 6000, 6000), 0);
    recv_all(p.fd, 1, 6000, 6000);
    pair_close(p);
}

static void write_many(void *arg) {
    struct pair *p = arg;
    unsigned char record[32];
    memset(record, getpid() % 251, sizeof record);
    for (int i = 0; i < 500; i++)
        EQ(send(p->fd, record, sizeof record, 0), sizeof record);
}

PAIR_CASE(processes_write_at_once_and_records_stay_whole) {
    struct pair p = pair_open();
    pid_t pids[3];
    for (int i = 0; i < 3; i++)
        pids[i] = child(write_many, &p);
    for (int i = 0; i < 1500; i++) {
        unsigned char record[32];
        EQ(peer_recv(p.peer, record, 32, MSG_WAITALL), 32);
        for (int k = 1; k < 32; k++)
            EQ(record[k], record[0]);
    }
    for (int i = 0; i < 3; i++)
        child_succeeds(pids[i]);
    pair_close(p);
}

static void client_of_fork_server(void *port) {
    for (int i = 0; i < 10; i++) {
        int fd = connect_to(*(uint16_t *)port);
        for (int k = 0; k < 20; k++) {
            send_all(fd, i, k * 500, 500);
            recv_all(fd, i, k * 500, 500);
        }
        if (i == 9)
            assert_smcd(fd);
        OK(shutdown(fd, SHUT_WR));
        recv_to_eof(fd, 0, 0, 0);
        close(fd);
    }
}

static void serve_one(void *arg) {
    int fd = *(int *)arg;
    char buf[4096];
    for (ssize_t n; (n = OK(recv(fd, buf, sizeof buf, 0))) > 0;)
        for (ssize_t sent = 0; sent < n;)
            sent += OK(send(fd, buf + sent, n - sent, 0));
}

CASE(process_per_connection) {
    uint16_t port;
    int listener = listen_here(&port);
    pid_t client = child(client_of_fork_server, &port), servers[10];
    for (int i = 0; i < 10; i++) {
        int fd = OK(accept(listener, NULL, NULL));
        servers[i] = child(serve_one, &fd);
        close(fd);
    }
    for (int i = 0; i < 10; i++)
        child_succeeds(servers[i]);
    child_succeeds(client);
}

static void prefork_worker(void *arg) {
    int *in = arg, listener = in[0];
    struct pollfd f[] = {{.fd = listener, .events = POLLIN}, {.fd = in[1], .events = POLLIN}};
    nonblocking(listener, true);
    for (;;) {
        EQ(poll(f, 2, 20000) > 0, 1);
        if (f[1].revents)
            return;
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            continue;
        serve_one(&fd);
        close(fd);
    }
}

static void two_connections(void *arg) {
    uint16_t port = *(uint16_t *)arg;
    for (int i = 0; i < 25; i++) {
        int fd = connect_to(port);
        for (int k = 0; k < 10; k++) {
            send_all(fd, i, k * 500, 500);
            recv_all(fd, i, k * 500, 500);
        }
        close(fd);
    }
}

CASE(preforked_workers_accept_from_one_listener) {
    uint16_t port;
    int in[3] = {listen_here(&port)}, end[2];
    OK(pipe(end));
    in[1] = end[0];
    pid_t workers[4], clients[4];
    for (int i = 0; i < 4; i++)
        workers[i] = child(prefork_worker, in);
    for (int i = 0; i < 4; i++)
        clients[i] = child(two_connections, &port);
    for (int i = 0; i < 4; i++)
        child_succeeds(clients[i]);
    EQ(write(end[1], "x", 1), 1);
    for (int i = 0; i < 4; i++)
        child_succeeds(workers[i]);
}

static void run_true(int way) {
    char *argv[] = {"true", NULL};
    pid_t pid;
    int status = 0;
    if (way == 0) {
        pid = vfork();
        if (pid == 0) {
            execv("/bin/true", argv);
            _exit(1);
        }
    } else if (way == 1) {
        EQ(posix_spawn(&pid, "/bin/true", NULL, NULL, argv, environ), 0);
    } else if (way == 2) {
        EQ(system("exit 7"), 7 << 8);
        return;
    } else {
        FILE *pipe = popen("echo hello", "r");
        char line[16] = {0};
        CHECK(pipe && fgets(line, sizeof line, pipe) && !strcmp(line, "hello\n"));
        EQ(pclose(pipe), 0);
        return;
    }
    CHECK(pid > 0);
    EQ(waitpid(pid, &status, 0), pid);
    EQ(status, 0);
}

PAIR_CASE(commands_started_meanwhile_change_nothing) {
    struct pair p = pair_open();
    for (int i = 0; i < 12; i++) {
        run_true(i % 4);
        send_all(p.fd, 1, i * 3000, 3000);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, i * 3000, 3000), 0);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, i * 3000, 3000), 0);
        recv_all(p.fd, 2, i * 3000, 3000);
    }
    pair_close(p);
}

PAIR_CASE(command_that_inherits_the_fd_keeps_the_connection_open) {
    struct pair p = pair_open();
    int in[2];
    OK(pipe2(in, O_CLOEXEC));
    pid_t pid = OK(fork());
    if (pid == 0) {
        dup2(in[0], 0);
        execl("/bin/cat", "cat", (char *)NULL);
        _exit(1);
    }
    send_all(p.fd, 1, 0, 100);
    close(p.fd);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 100), 0);
    EQ(peer_call(P_POLL, p.peer, POLLIN | POLLRDHUP, 100, 0), 0);
    close(in[1]);
    child_succeeds(pid);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
}

CASE(fresh_connection_becomes_standard_input_and_output_of_a_command) {
    // inetd's way: the accepted socket, not yet used, is handed to a program by exec.
    uint16_t port;
    int listener = listen_here(&port), client = connect_to(port), fd = OK(accept(listener, NULL, NULL));
    pid_t pid = OK(fork());
    if (pid == 0) {
        dup2(fd, 0);
        dup2(fd, 1);
        close(fd);
        close(client);
        execl("/bin/cat", "cat", (char *)NULL);
        _exit(1);
    }
    close(fd);
    for (int i = 0; i < 20; i++) {
        send_all(client, 1, i * 1000, 1000);
        recv_all(client, 1, i * 1000, 1000);
    }
    OK(shutdown(client, SHUT_WR));
    recv_to_eof(client, 1, 0, 0);
    child_succeeds(pid);
}

static void exit_at_once(void *port) {
    int fd = connect_to(*(uint16_t *)port);
    char c = 'x';
    for (int i = 0; i < 8; i++) {
        EQ(send(fd, &c, 1, 0), 1);
        EQ(recv(fd, &c, 1, 0), 1);
    }
    send_all(fd, 3, 0, 8000);
    exit(0);
}

CASE(last_bytes_of_a_process_that_exits_arrive) {
    uint16_t port;
    int listener = listen_here(&port);
    for (int i = 0; i < 20; i++) {
        pid_t pid = child(exit_at_once, &port);
        int fd = OK(accept(listener, NULL, NULL));
        char c;
        for (int k = 0; k < 8; k++) {
            EQ(recv(fd, &c, 1, 0), 1);
            EQ(send(fd, &c, 1, 0), 1);
        }
        child_succeeds(pid);
        recv_to_eof(fd, 3, 0, 8000);
        close(fd);
    }
}
