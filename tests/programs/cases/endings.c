// Ends of a connection that other cases do not come to: see the tables of docs/ending.md.
#include "peer.h"

// Both ends have shut their sending directions down, and the peer has not read a thousand bytes.
static struct pair shut_on_both_sides(void) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 1000);
    EQ(peer_call(P_POLL, p.peer, POLLIN, 10000, 0), POLLIN);
    OK(shutdown(p.fd, SHUT_WR));
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    wait_events(p.fd, POLLRDHUP, POLLRDHUP | POLLHUP);
    return p;
}

static void is_over_without_an_error(int fd) {
    char byte;
    EQ(events_now(fd, POLLIN | POLLRDHUP), POLLIN | POLLRDHUP | POLLHUP);
    EQ(option(fd, SOL_SOCKET, SO_ERROR), 0);
    EQ(recv(fd, &byte, 1, 0), 0);
    FAILS(send(fd, &byte, 1, MSG_NOSIGNAL), EPIPE);
    OK(close(fd));
}

PAIR_CASE(reset_behind_the_fins_of_both_ends_is_none) {
    struct pair p = shut_on_both_sides();
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    is_over_without_an_error(p.fd);
}

REMOTE_CASE(death_behind_the_fins_of_both_ends_is_no_reset) {
    struct pair p = shut_on_both_sides();
    peer_call(P_KILL, 0, 0, 0, 0);
    is_over_without_an_error(p.fd);
}

// The kernel resets itself at the first byte that comes: the peer's close is none.
PAIR_CASE(bytes_where_both_directions_are_shut_reset_both_ends) {
    struct pair p = pair_open();
    OK(shutdown(p.fd, SHUT_RDWR));
    EQ(peer_send(p.peer, "x", 1, MSG_NOSIGNAL), 1);
    wait_events(p.fd, POLLIN, POLLIN | POLLERR | POLLHUP);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    char byte;
    FAILS(recv(p.fd, &byte, 1, 0), ECONNRESET);
    EQ(recv(p.fd, &byte, 1, 0), 0);
    FAILS(send(p.fd, &byte, 1, MSG_NOSIGNAL), EPIPE);
    OK(close(p.fd));
}

PAIR_CASE(send_of_nothing_to_a_closed_peer_provokes_no_answer) {
    struct pair p = pair_open();
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    char byte = 0;
    EQ(recv(p.fd, &byte, 1, 0), 0);
    EQ(send(p.fd, &byte, 0, 0), 0);
    EQ(send(p.fd, &byte, 0, 0), 0);
    EQ(events_now(p.fd, POLLOUT | POLLRDHUP), POLLOUT | POLLRDHUP);
    EQ(send(p.fd, &byte, 1, MSG_NOSIGNAL), 1);
    wait_events(p.fd, POLLRDHUP, POLLRDHUP | POLLERR | POLLHUP);
    FAILS(send(p.fd, &byte, 1, MSG_NOSIGNAL), EPIPE);
    OK(close(p.fd));
}

// Our own shutdown for reading ends nothing: the peer's end still does.
PAIR_CASE(end_behind_a_shutdown_for_reading) {
    struct pair p = pair_open();
    OK(shutdown(p.fd, SHUT_RD));
    EQ(events_now(p.fd, POLLIN | POLLRDHUP), POLLIN | POLLRDHUP);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
    char byte;
    EQ(recv(p.fd, &byte, 1, 0), 0);
    EQ(events_now(p.fd, POLLIN | POLLRDHUP), POLLIN | POLLRDHUP);
    OK(shutdown(p.fd, SHUT_WR));
    EQ(events_now(p.fd, POLLIN | POLLRDHUP), POLLIN | POLLRDHUP | POLLHUP);
    OK(close(p.fd));
}
