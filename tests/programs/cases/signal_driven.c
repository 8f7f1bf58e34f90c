// Signal-driven I/O (O_ASYNC): the signal comes for what arrives, and for room, whether anybody sleeps or not.
#include "peer.h"

static sigset_t blocked(int number) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    EQ(pthread_sigmask(SIG_BLOCK, &set, NULL), 0);
    return set;
}

static void comes(const sigset_t *set, siginfo_t *info) {
    struct timespec limit = {20, 0};
    CHECK(sigtimedwait(set, info, &limit) > 0);
}

// What is pending already.
static void forget(const sigset_t *set) {
    struct timespec none = {0, 0};
    while (sigtimedwait(set, NULL, &none) > 0) {
    }
}

static void goes_on(struct pair p) {
    EQ(peer_call(P_SEND_PATTERN, p.peer, 21, 0, 3000), 0);
    recv_all(p.fd, 21, 0, 3000);
    send_all(p.fd, 22, 0, 3000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 22, 0, 3000), 0);
}

PAIR_CASE(signal_for_bytes) {
    struct pair p = pair_open();
    sigset_t io = blocked(SIGIO);
    send_all(p.fd, 1, 0, 100);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 50), 0);
    OK(fcntl(p.fd, F_SETOWN, getpid()));
    EQ(fcntl(p.fd, F_GETOWN), getpid());
    OK(fcntl(p.fd, F_SETFL, OK(fcntl(p.fd, F_GETFL)) | O_ASYNC | O_NONBLOCK));
    CHECK(fcntl(p.fd, F_GETFL) & O_ASYNC);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 100), 0);
    nonblocking(p.fd, false);
    recv_all(p.fd, 2, 0, 50);
    forget(&io);
    for (int i = 0; i < 20; i++) {
        peer_says(p.peer, "wake up");
        siginfo_t info;
        comes(&io, &info);
        char buf[16];
        EQ(recv(p.fd, buf, sizeof buf, 0), 7);
    }
    goes_on(p);
    forget(&io);
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    siginfo_t info;
    comes(&io, &info);
    pair_close(p);
}

PAIR_CASE(signal_by_ioctl_names_the_descriptor) {
    struct pair p = pair_open();
    int number = SIGRTMIN + 3, on = 1, me = getpid();
    sigset_t set = blocked(number);
    OK(ioctl(p.fd, FIOSETOWN, &me));
    OK(fcntl(p.fd, F_SETSIG, number));
    OK(ioctl(p.fd, FIOASYNC, &on));
    peer_says(p.peer, "x");
    siginfo_t info;
    do {
        comes(&set, &info);
        EQ(info.si_fd, p.fd);
    } while (!(info.si_band & POLLIN));
    char byte;
    EQ(recv(p.fd, &byte, 1, 0), 1);
    on = 0;
    OK(ioctl(p.fd, FIOASYNC, &on));
    goes_on(p);
    pair_close(p);
}

PAIR_CASE(signal_for_room) {
    struct pair p = pair_open();
    sigset_t io = blocked(SIGIO);
    OK(fcntl(p.fd, F_SETOWN, getpid()));
    OK(fcntl(p.fd, F_SETFL, OK(fcntl(p.fd, F_GETFL)) | O_ASYNC));
    size_t n = fill(p.fd, 1, 0);
    forget(&io);
    peer_begin(P_RECV_PATTERN, p.peer, 1, 0, n);
    siginfo_t info;
    comes(&io, &info);
    wait_events(p.fd, POLLOUT, POLLOUT);
    EQ(peer_end(), 0);
    goes_on(p);
    pair_close(p);
}

CASE(signal_of_a_socket_that_was_asked_before_it_connected) {
    sigset_t io = blocked(SIGIO);
    uint16_t port;
    int listener = listen_here(&port), client = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(fcntl(client, F_SETOWN, getpid()));
    OK(fcntl(client, F_SETFL, O_RDWR | O_ASYNC));
    socklen_t len;
    struct sockaddr_storage to = address_of("127.0.0.1", port, &len);
    OK(connect(client, (struct sockaddr *)&to, len));
    int server = OK(accept(listener, NULL, NULL));
    for (int i = 0; i < 20; i++) {
        forget(&io);
        EQ(send(server, "a", 1, 0), 1);
        siginfo_t info;
        comes(&io, &info);
        char byte;
        EQ(recv(client, &byte, 1, 0), 1);
        EQ(send(client, "b", 1, 0), 1);
        EQ(recv(server, &byte, 1, 0), 1);
    }
    close(client);
    close(server);
}

CASE(signal_of_a_listener) {
    sigset_t io = blocked(SIGIO);
    uint16_t port;
    int listener = listen_here(&port);
    OK(fcntl(listener, F_SETOWN, getpid()));
    OK(fcntl(listener, F_SETFL, O_RDWR | O_ASYNC));
    int client = connect_to(port);
    siginfo_t info;
    comes(&io, &info);
    int server = OK(accept(listener, NULL, NULL));
    EQ(fcntl(server, F_GETFL) & O_ASYNC, 0);
    // Which asks nothing of what it accepts.
    warm_here(client, server);
    close(client);
    close(server);
}
