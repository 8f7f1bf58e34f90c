// Sockets that another process takes by pidfd_getfd(2), for which the holder's program does nothing. What is in a ring is refused;
// what is not stays TCP.
#include "peer.h"

// The peer's end, fetched. False where it is refused, being in a ring.
static bool fetch(struct pair p, int *fetched) {
    *fetched = fetch_fd(peer_pid(), p.peer);
    EQ(*fetched < 0, variant.warm && !is_plain());
    if (*fetched < 0)
        EQ(errno, EBUSY);
    return *fetched >= 0;
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

REMOTE_CASE(connection_is_fetched_only_from_tcp) {
    struct pair p = pair_open();
    int fetched;
    fetch(p, &fetched);
    goes_on(p, fetched, 0, 0);
}

REMOTE_CASE(unread_bytes_are_there_whether_fetched_or_not) {
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

// However far it is on its way to the ring.
REMOTE_CASE(connection_is_fetched_after_any_number_of_messages) {
    int refused = 0;
    for (int i = 0; i < 48; i++) {
        int ends[2], rounds = i / 2;
        both_ends(ends, i % 2, rounds);
        int there = peer_call(P_FETCH, ends[1], getpid(), 0, 0);
        if (there < 0) {
            EQ(errno, EBUSY);
            refused++;
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
    // The first ones have sent nothing; the last ones are in the ring.
    CHECK(refused < 48 && (refused > 4) == !is_plain());
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
