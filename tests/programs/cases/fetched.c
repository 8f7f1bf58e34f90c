// Sockets that another process takes by pidfd_getfd(2), for which the holder's program does nothing.
#include "peer.h"

// The peer's end, fetched. False where it is refused: a library of another word size does not understand the holder's.
static bool fetch(struct pair p, int *fetched) {
    *fetched = fetch_fd(peer_pid(), p.peer);
    if (*fetched >= 0)
        return true;
    EQ(errno, EBUSY);
    CHECK(getenv("USMC_TESTS_PEER") && variant.warm && !is_plain());
    return false;
}

// From these bytes on (ours to the holder, its to us), our end and whoever has the other one talk.
static void goes_on(struct pair p, int fetched, int there, int back) {
    for (int i = 0; i < 48; i++, there += 20, back += 20) {
        send_all(p.fd, 1, there, 20);
        if (i % 2 && fetched >= 0)
            recv_all(fetched, 1, there, 20);
        else
            EQ(peer_call(P_RECV_PATTERN, p.peer, 1, there, 20), 0);
        if (fetched >= 0)
            send_all(fetched, 2, back, 10);
        else
            EQ(peer_call(P_SEND_PATTERN, p.peer, 2, back, 10), 0);
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, back + 10, 10), 0);
        recv_all(p.fd, 2, back, 20);
    }
    if (fetched >= 0) {
        assert_tcp(p.fd);
        close(fetched);
    } else {
        assert_smcd(p.fd);
    }
    pair_close(p);
}

REMOTE_CASE(fetched_connection_is_shared_with_its_holder) {
    struct pair p = pair_open();
    int fetched;
    fetch(p, &fetched);
    goes_on(p, fetched, 0, 0);
}

REMOTE_CASE(fetched_connection_has_what_was_unread) {
    struct pair p = pair_open();
    int fetched;
    send_all(p.fd, 1, 0, 30000);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 20000), 0);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 10), 0);
    recv_all(p.fd, 2, 0, 10);
    if (fetch(p, &fetched))
        recv_all(fetched, 1, 10, 9990);
    else
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 10, 9990), 0);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 10000, 20000), 0);
    recv_all(p.fd, 2, 10, 19990);
    goes_on(p, fetched, 30000, 20000);
}

REMOTE_CASE(holder_asleep_in_a_receive_is_fetched_from) {
    struct pair p = pair_open();
    int fetched;
    peer_begin(P_RECV_PATTERN, p.peer, 1, 0, 100);
    peer_asleep();
    fetch(p, &fetched);
    peer_asleep();
    send_all(p.fd, 1, 0, 100);
    EQ(peer_end(), 0);
    goes_on(p, fetched, 100, 0);
}

REMOTE_CASE(holder_asleep_in_a_send_is_fetched_from) {
    struct pair p = pair_open();
    int fetched, bytes = 5 << 20;
    peer_begin(P_SEND_PATTERN, p.peer, 2, 0, bytes);
    peer_asleep();
    fetch(p, &fetched);
    recv_all(p.fd, 2, 0, bytes);
    EQ(peer_end(), 0);
    goes_on(p, fetched, 0, bytes);
}

REMOTE_CASE(holder_that_waits_for_room_is_fetched_from) {
    struct pair p = pair_open();
    int fetched, bytes = 0;
    EQ(peer_call(P_NONBLOCK, p.peer, true, 0, 0), 0);
    char buf[50000];
    for (long n = 0; n >= 0; bytes += n > 0 ? n : 0) {
        pattern(2, bytes, buf, sizeof buf);
        n = peer_send(p.peer, buf, sizeof buf, 0);
    }
    EQ(errno, EAGAIN);
    peer_begin(P_POLL, p.peer, POLLOUT, -1, 0);
    peer_asleep();
    fetch(p, &fetched);
    recv_all(p.fd, 2, 0, bytes);
    EQ(peer_end(), POLLOUT);
    EQ(peer_call(P_NONBLOCK, p.peer, false, 0, 0), 0);
    goes_on(p, fetched, 0, bytes);
}

// As one that computes, or waits for something else.
REMOTE_CASE(stopped_holder_is_fetched_from) {
    struct pair p = pair_open();
    int fetched, status;
    send_all(p.fd, 1, 0, 5000);
    OK(kill(peer_pid(), SIGSTOP));
    EQ(waitpid(peer_pid(), &status, WUNTRACED), peer_pid());
    CHECK(WIFSTOPPED(status));
    bool has = fetch(p, &fetched);
    if (has)
        recv_all(fetched, 1, 0, 1000);
    OK(kill(peer_pid(), SIGCONT));
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, has ? 1000 : 0, has ? 4000 : 5000), 0);
    goes_on(p, fetched, 5000, 0);
}

// Neither of the two ends is the fetcher's.
REMOTE_CASE(third_process_fetches_a_connection) {
    enum { REFUSED = 42 };
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 5000);
    pid_t pid = OK(fork());
    if (pid == 0) {
        close(p.fd);
        int fetched;
        if (!fetch(p, &fetched))
            _exit(REFUSED);
        recv_all(fetched, 1, 0, 1000);
        send_all(fetched, 2, 0, 1000);
        _exit(0);
    }
    int status;
    EQ(waitpid(pid, &status, 0), pid);
    bool has = status == 0;
    // A holder of another word size is not served, and keeps what it has.
    CHECK(has || (getenv("USMC_TESTS_PEER") && variant.warm && !is_plain() && WEXITSTATUS(status) == REFUSED));
    int there = has ? 1000 : 0;
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, there, 5000 - there), 0);
    recv_all(p.fd, 2, 0, there);
    for (int at = 5000; at < 6000; at += 50) {
        send_all(p.fd, 1, at, 50);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at, 50), 0);
    }
    pair_close(p);
}

REMOTE_CASE(options_of_a_fetched_connection_are_both_processes) {
    struct pair p = pair_open();
    int fetched;
    OK(peer_call(P_OPTION, p.peer, SOL_SOCKET, SO_RCVLOWAT, 5));
    OK(peer_call(P_OPTION, p.peer, IPPROTO_TCP, TCP_NODELAY, 1));
    if (fetch(p, &fetched)) {
        EQ(option(fetched, SOL_SOCKET, SO_RCVLOWAT), 5);
        EQ(option(fetched, IPPROTO_TCP, TCP_NODELAY), 1);
        set_option(fetched, SOL_SOCKET, SO_RCVLOWAT, 7);
        set_option(fetched, IPPROTO_TCP, TCP_NODELAY, 0);
        EQ(peer_call(P_GET_OPTION, p.peer, SOL_SOCKET, SO_RCVLOWAT, 0), 7);
        EQ(peer_call(P_GET_OPTION, p.peer, IPPROTO_TCP, TCP_NODELAY, 0), 0);
        OK(peer_call(P_OPTION, p.peer, SOL_SOCKET, SO_RCVLOWAT, 3));
        EQ(option(fetched, SOL_SOCKET, SO_RCVLOWAT), 3);
        set_option(fetched, SOL_SOCKET, SO_RCVLOWAT, 1);
        goes_on((struct pair){p.fd, p.peer}, dup(fetched), 0, 0);
        EQ(option(fetched, SOL_SOCKET, SO_RCVLOWAT), 1);
        EQ(option(fetched, IPPROTO_TCP, TCP_NODELAY), 0);
        close(fetched);
        return;
    }
    pair_close(p);
}

// What is unread there can only be read there: its sender has left the ring.
CASE(unread_bytes_of_a_sender_that_was_fetched_stay_with_their_reader) {
    int ends[2];
    variant.remote = true;
    both_ends(ends, true, 32);
    send_all(ends[0], 1, 320, 5000);
    send_all(ends[1], 2, 320, 3000);
    int there = OK(peer_call(P_FETCH, ends[1], getpid(), 0, 0));
    if (!is_plain())
        FAILS(peer_call(P_FETCH, ends[0], getpid(), 0, 0), EBUSY);
    recv_all(ends[0], 2, 320, 3000);
    int other = OK(peer_call(P_FETCH, ends[0], getpid(), 0, 0));
    EQ(peer_call(P_RECV_PATTERN, there, 1, 320, 5000), 0);
    EQ(peer_call(P_SEND_PATTERN, other, 1, 5320, 100), 0);
    recv_all(ends[1], 1, 5320, 100);
    close(ends[0]);
    close(ends[1]);
}

REMOTE_CASE(holder_closes_what_was_fetched) {
    struct pair p = pair_open();
    int fetched;
    if (!fetch(p, &fetched))
        return pair_close(p);
    // Before it has noticed.
    EQ(peer_call(P_CLOSE, p.peer, 0, 0, 0), 0);
    for (int at = 0; at < 1000; at += 10) {
        send_all(p.fd, 1, at, 10);
        recv_all(fetched, 1, at, 10);
        send_all(fetched, 2, at, 10);
        recv_all(p.fd, 2, at, 10);
    }
    if (!getenv("USMC_TESTS_PEER"))
        assert_smcd(p.fd);
    close(fetched);
    recv_to_eof(p.fd, 2, 1000, 0);
    close(p.fd);
}

struct reader {
    int fd;
    volatile pid_t thread;
};

static void *reads_a_byte(void *arg) {
    struct reader *r = arg;
    char byte;
    __atomic_store_n(&r->thread, gettid(), __ATOMIC_RELEASE);
    EQ(recv(r->fd, &byte, 1, 0), 1);
    return NULL;
}

// O_NONBLOCK is the connection's, whoever sets it, and whatever carries its bytes when that matters.
static void holder_changes_o_nonblock_and_closes(bool on) {
    struct pair p = pair_open();
    int fetched;
    if (!fetch(p, &fetched))
        return pair_close(p);
    char byte;
    nonblocking(fetched, !on);
    for (int at = 0; at < 1000; at += 10) {
        if (at == 30)
            EQ(peer_call(P_NONBLOCK, p.peer, on, 0, 0), 0);
        if (at == 40)
            EQ(peer_call(P_CLOSE, p.peer, 0, 0, 0), 0);
        send_all(p.fd, 1, at, 10);
        wait_readable(fetched, 10);
        recv_all(fetched, 1, at, 10);
        send_all(fetched, 2, at, 10);
        recv_all(p.fd, 2, at, 10);
    }
    if (!getenv("USMC_TESTS_PEER"))
        assert_smcd(p.fd);
    if (on) {
        FAILS(recv(fetched, &byte, 1, 0), EAGAIN);
    } else {
        struct reader r = {.fd = fetched};
        pthread_t thread;
        EQ(pthread_create(&thread, NULL, reads_a_byte, &r), 0);
        while (!__atomic_load_n(&r.thread, __ATOMIC_ACQUIRE))
            sched_yield();
        wait_asleep(getpid(), r.thread);
        EQ(send(p.fd, "x", 1, 0), 1);
        EQ(pthread_join(thread, NULL), 0);
    }
    close(fetched);
    close(p.fd);
}

REMOTE_CASE(holder_sets_o_nonblock_and_closes_what_was_fetched) {
    holder_changes_o_nonblock_and_closes(true);
}

REMOTE_CASE(holder_clears_o_nonblock_and_closes_what_was_fetched) {
    holder_changes_o_nonblock_and_closes(false);
}

// Whether what the peer fetches can go to a ring again: its library has to be ours.
static bool comes_back(void) {
    variant.remote = true;
    return !getenv("USMC_TESTS_PEER");
}

// Once one process is left that has it.
CASE(fetched_connection_comes_back) {
    bool back = comes_back();
    for (int i = 0; back && i < 12; i++) {
        int ends[2], rounds = (int[]){0, 2, 32}[i % 3];
        bool holder_closes = i / 6;
        both_ends(ends, i / 3 % 2, rounds);
        struct pair p = {ends[0], OK(peer_call(P_FETCH, ends[1], getpid(), 0, 0))};
        int at = pair_talk(p, rounds * 10, 48);
        at = ends_talk(ends, at, 1);
        assert_tcp(p.fd);
        if (holder_closes) {
            close(ends[1]);
            pair_talk(p, at, 96);
            assert_smcd(p.fd);
            pair_close(p);
            continue;
        }
        EQ(peer_call(P_CLOSE, p.peer, 0, 0, 0), 0);
        ends_talk(ends, at, 96);
        assert_smcd(p.fd);
        close(ends[0]);
        close(ends[1]);
    }
}

struct fetcher {
    int told[2], done[2], pid;
};

// Fetches the number that it is told, holds it until it is told so, and says when it has.
static void fetches(void *arg) {
    struct fetcher *f = arg;
    int number;
    CHECK(read(f->told[0], &number, sizeof number) == sizeof number);
    int fetched = OK(fetch_fd(f->pid, number));
    CHECK(write(f->done[1], "", 1) == 1);
    CHECK(read(f->told[0], &number, 1) == 1);
    close(fetched);
}

CASE(connection_of_two_fetchers_comes_back_to_the_last) {
    bool back = comes_back();
    for (int i = 0; back && i < 4; i++) {
        struct fetcher f = {.pid = getpid()};
        int ends[2];
        char byte;
        OK(pipe(f.told));
        OK(pipe(f.done));
        pid_t pid = child(fetches, &f);
        both_ends(ends, i % 2, 32);
        struct pair p = {ends[0], -1};
        for (int n = 0; n < 2; n++) {
            if (n == i / 2) {
                p.peer = OK(peer_call(P_FETCH, ends[1], getpid(), 0, 0));
            } else {
                EQ(write(f.told[1], &ends[1], sizeof ends[1]), sizeof ends[1]);
                EQ(read(f.done[0], &byte, 1), 1);
            }
        }
        close(ends[1]);
        int at = pair_talk(p, 320, 96);
        assert_tcp(p.fd);
        EQ(write(f.told[1], "", 1), 1);
        child_succeeds(pid);
        pair_talk(p, at, 96);
        assert_smcd(p.fd);
        pair_close(p);
        for (int n = 0; n < 2; n++) {
            close(f.told[n]);
            close(f.done[n]);
        }
    }
}

struct holding {
    int told[2], round;
};

// Both ends, until it is killed.
static void holds(void *arg) {
    struct holding *h = arg;
    int ends[2];
    both_ends(ends, h->round % 2, 32);
    CHECK(write(h->told[1], ends, sizeof ends) == sizeof ends);
    pause();
}

CASE(connection_of_a_killed_holder_comes_back) {
    for (int round = 0; round < 2; round++) {
        struct holding h = {.round = round};
        int ends[2], fetched[2];
        OK(pipe(h.told));
        pid_t pid = child(holds, &h);
        EQ(read(h.told[0], ends, sizeof ends), sizeof ends);
        for (int i = 0; i < 2; i++)
            fetched[i] = OK(fetch_fd(pid, ends[i]));
        OK(kill(pid, SIGKILL));
        EQ(waitpid(pid, NULL, 0), pid);
        ends_talk(fetched, 320, 96);
        assert_smcd(fetched[0]);
        for (int i = 0; i < 2; i++) {
            close(fetched[i]);
            close(h.told[i]);
        }
    }
}

// Before it has noticed.
CASE(holder_forks_after_it_was_fetched_from) {
    bool back = comes_back();
    for (int i = 0; back && i < 4; i++) {
        int ends[2], turn[2];
        both_ends(ends, i % 2, i / 2 ? 32 : 0);
        struct pair p = {ends[0], OK(peer_call(P_FETCH, ends[1], getpid(), 0, 0))};
        OK(pipe(turn));
        pid_t pid = OK(fork());
        if (pid == 0) {
            char byte;
            close(ends[0]);
            CHECK(read(turn[0], &byte, 1) == 1);
            _exit(0);
        }
        close(ends[1]);
        int at = pair_talk(p, i / 2 ? 320 : 0, 96);
        assert_tcp(p.fd);
        EQ(write(turn[1], "", 1), 1);
        child_succeeds(pid);
        pair_talk(p, at, 96);
        assert_smcd(p.fd);
        pair_close(p);
        close(turn[0]);
        close(turn[1]);
    }
}

// However far it is on its way to the ring.
REMOTE_CASE(connection_is_fetched_after_any_number_of_messages) {
    for (int i = 0; i < 48; i++) {
        int ends[2], rounds = i / 2;
        both_ends(ends, i % 2, rounds);
        int there = peer_call(P_FETCH, ends[1], getpid(), 0, 0);
        if (there < 0) {
            EQ(errno, EBUSY);
            CHECK(getenv("USMC_TESTS_PEER") && !is_plain());
        }
        int at = rounds * 10;
        for (int n = 0; n < 30; n++, at += 10) {
            send_all(ends[0], 1, at, 10);
            if (n % 2 && there >= 0)
                EQ(peer_call(P_RECV_PATTERN, there, 1, at, 10), 0);
            else
                recv_all(ends[1], 1, at, 10);
            if (n % 3 && there >= 0)
                EQ(peer_call(P_SEND_PATTERN, there, 2, at, 10), 0);
            else
                send_all(ends[1], 2, at, 10);
            recv_all(ends[0], 2, at, 10);
        }
        close(ends[0]);
        close(ends[1]);
        if (there >= 0)
            OK(peer_call(P_CLOSE, there, 0, 0, 0));
    }
}

struct holder {
    int told[2], go[2], round;
};

// Both ends, and threads that use both in both directions.
static void holds_streams(void *arg) {
    struct holder *h = arg;
    int ends[2];
    char byte;
    both_ends(ends, h->round % 2, h->round < 2 ? 0 : 32);
    struct streams streams;
    streams_begin(&streams, ends, 3 << 20);
    CHECK(write(h->told[1], ends, sizeof ends) == sizeof ends);
    streams_end(&streams);
    // The fetcher is still to be served.
    CHECK(read(h->go[0], &byte, 1) == 1);
}

CASE(connections_of_busy_threads_are_fetched) {
    for (int round = 0; round < 6; round++) {
        struct holder h = {.round = round};
        OK(pipe(h.told));
        OK(pipe(h.go));
        pid_t pid = child(holds_streams, &h);
        int ends[2], fetched[2];
        EQ(read(h.told[0], ends, sizeof ends), sizeof ends);
        for (int i = 0; i < 2; i++)
            fetched[i] = OK(fetch_fd(pid, ends[(round + i) % 2]));
        EQ(write(h.go[1], "", 1), 1);
        child_succeeds(pid);
        // Nobody else has them any more.
        for (int i = 0; i < 2; i++) {
            send_all(fetched[i], 5, 0, 1000);
            recv_all(fetched[1 - i], 5, 0, 1000);
        }
        for (int at = 1000; at < 2000; at += 10) {
            for (int i = 0; i < 2; i++) {
                send_all(fetched[i], 5, at, 10);
                recv_all(fetched[1 - i], 5, at, 10);
            }
        }
        assert_smcd(fetched[0]);
        close(fetched[0]);
        recv_to_eof(fetched[1], 5, 0, 0);
        close(fetched[1]);
        for (int i = 0; i < 2; i++) {
            close(h.told[i]);
            close(h.go[i]);
        }
    }
}

// A family of processes has it.
CASE(connection_of_parent_and_child_is_fetched) {
    int ends[2], turns[2], back[2];
    both_ends(ends, true, 32);
    OK(pipe(turns));
    OK(pipe(back));
    send_all(ends[0], 1, 320, 300);
    pid_t parent = getpid(), child = OK(fork());
    if (child == 0) {
        char turn;
        CHECK(read(turns[0], &turn, 1) == 1);
        recv_all(ends[1], 1, 420, 100);
        send_all(ends[1], 2, 420, 100);
        _exit(0);
    }
    // A third, which has forgotten them.
    pid_t fetcher = OK(fork());
    if (fetcher == 0) {
        close(ends[0]);
        close(ends[1]);
        int fetched = OK(fetch_fd(parent, ends[1]));
        recv_all(fetched, 1, 320, 100);
        send_all(fetched, 2, 320, 100);
        _exit(0);
    }
    child_succeeds(fetcher);
    EQ(write(turns[1], "", 1), 1);
    child_succeeds(child);
    recv_all(ends[1], 1, 520, 100);
    recv_all(ends[0], 2, 320, 200);
    close(ends[1]);
    recv_to_eof(ends[0], 2, 520, 0);
    for (int i = 0; i < 2; i++) {
        close(turns[i]);
        close(back[i]);
    }
}

// A listener goes on in both.
REMOTE_CASE(fetched_listener_serves) {
    int listener = OK(peer_call(P_LISTEN, -1, 0, 0, 0));
    int fetched = OK(fetch_fd(peer_pid(), listener));
    uint16_t port = local_port(fetched);
    for (int i = 0; i < 4; i++) {
        struct pair p;
        if (i % 2) {
            p.fd = connect_to(port);
            p.peer = OK(peer_call(P_ACCEPT, listener, 0, 0, 0));
        } else {
            p.peer = OK(peer_call(P_CONNECT, -1, port, 0, 0));
            p.fd = OK(accept(fetched, NULL, NULL));
        }
        goes_on(p, -1, 0, 0);
    }
    close(fetched);
    OK(peer_call(P_CLOSE, listener, 0, 0, 0));
}

// The other one is without the library, as holder and as fetcher.
REMOTE_CASE(connection_of_a_program_without_the_library_is_fetched) {
    peer_is_plain = true;
    struct pair p = {.fd = -1};
    uint16_t port;
    int listener = listen_here(&port);
    p.peer = OK(peer_call(P_CONNECT, -1, port, 0, 0));
    p.fd = OK(accept(listener, NULL, NULL));
    int fetched = OK(fetch_fd(peer_pid(), p.peer));
    int there = OK(peer_call(P_FETCH, listener, getpid(), 0, 0));
    goes_on(p, fetched, 0, 0);
    p.fd = connect_to(port);
    p.peer = OK(peer_call(P_ACCEPT, there, 0, 0, 0));
    for (int at = 0; at < 640; at += 10) {
        send_all(p.fd, 1, at, 10);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at, 10), 0);
    }
    assert_tcp(p.fd);
    pair_close(p);
    close(listener);
}

// Before it is connected.
CASE(socket_that_is_fetched_before_it_is_connected_stays_tcp) {
    uint16_t port;
    int listener = listen_here(&port), fd, turns[2][2];
    OK(pipe(turns[0]));
    OK(pipe(turns[1]));
    pid_t parent = getpid(), pid = OK(fork());
    char turn;
    if (pid == 0) {
        CHECK(read(turns[1][0], &fd, sizeof fd) == sizeof fd);
        int fetched = OK(fetch_fd(parent, fd));
        CHECK(write(turns[0][1], "", 1) == 1 && read(turns[1][0], &turn, 1) == 1);
        recv_all(fetched, 2, 320, 1000);
        send_all(fetched, 1, 320, 1000);
        _exit(0);
    }
    fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    EQ(write(turns[1][1], &fd, sizeof fd), sizeof fd);
    EQ(read(turns[0][0], &turn, 1), 1);
    socklen_t len;
    struct sockaddr_storage at = address_of("127.0.0.1", port, &len);
    OK(connect(fd, (struct sockaddr *)&at, len));
    int server = OK(accept(listener, NULL, NULL));
    for (int i = 0; i < 32; i++) {
        send_all(fd, 1, i * 10, 10);
        recv_all(server, 1, i * 10, 10);
        send_all(server, 2, i * 10, 10);
        recv_all(fd, 2, i * 10, 10);
    }
    assert_tcp(fd);
    send_all(server, 2, 320, 1000);
    EQ(write(turns[1][1], "", 1), 1);
    recv_all(server, 1, 320, 1000);
    child_succeeds(pid);
    close(fd);
    close(server);
}
