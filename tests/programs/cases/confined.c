// Processes that change their rights, root, namespaces or limits after their connections are there.
#include "peer.h"

#include <net/if.h>
#include <grp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

static bool is_root(void) {
    return geteuid() == 0;
}

static void goes_on(struct pair p, uint64_t at) {
    for (int i = 0; i < 5; i++, at += 4000) {
        EQ(peer_call(P_SEND_PATTERN, p.peer, 2, at, 4000), 0);
        recv_all(p.fd, 2, at, 4000);
        send_all(p.fd, 1, at, 4000);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, at, 4000), 0);
    }
    peer_begin(P_ECHO, p.peer, 0, 0, 0);
    if (access("/proc/self", F_OK) == 0)
        peer_asleep();
    send_all(p.fd, 3, 0, 100000);
    recv_all(p.fd, 3, 0, 100000);
    OK(shutdown(p.fd, SHUT_WR));
    recv_to_eof(p.fd, 0, 0, 0);
    EQ(peer_end(), 100000);
    close(p.fd);
}

static void talk(int client, int server) {
    for (int i = 0; i < 30; i++) {
        send_all(client, 1, i * 300, 300);
        recv_all(server, 1, i * 300, 300);
        send_all(server, 2, i * 300, 300);
        recv_all(client, 2, i * 300, 300);
    }
    close(client);
    recv_to_eof(server, 0, 0, 0);
    close(server);
}

// Connections made now, in either role and within the process, carry what they have to.
static void new_ones_work(void) {
    struct variant was = variant;
    for (int i = 0; i < 2; i++) {
        variant.client = i;
        variant.warm = false;
        struct pair p = pair_open();
        goes_on(p, 0);
    }
    variant = was;
    int client, server;
    connect_here(&client, &server);
    talk(client, server);
}

PAIR_CASE(other_user_from_now_on) {
    struct pair p = pair_open();
    if (is_root()) {
        OK(setgroups(0, NULL));
        OK(setresgid(65534, 65534, 65534));
        OK(setresuid(65534, 65534, 65534));
    }
    goes_on(p, 0);
    new_ones_work();
}

CASE(other_user_before_the_first_connection) {
    uint16_t port;
    int listener = listen_here(&port);
    if (is_root()) {
        OK(setresgid(65534, 65534, 65534));
        OK(setresuid(65534, 65534, 65534));
    }
    int client = connect_to(port), server = OK(accept(listener, NULL, NULL));
    talk(client, server);
}

PAIR_CASE(other_root_from_now_on) {
    struct pair p = pair_open();
    if (is_root()) {
        char empty[] = "root.XXXXXX";
        CHECK(mkdtemp(empty));
        OK(chroot(empty));
        OK(chdir("/"));
    }
    goes_on(p, 0);
    new_ones_work();
}

static void lo_up(void) {
    int s = OK(socket(AF_INET, SOCK_DGRAM, 0));
    struct ifreq r = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    OK(ioctl(s, SIOCSIFFLAGS, &r));
    close(s);
}

PAIR_CASE(other_network_from_now_on) {
    struct pair p = pair_open();
    uint16_t port;
    int old = listen_here(&port);
    if (is_root()) {
        OK(unshare(CLONE_NEWNET));
        lo_up();
        // The same address means another listener, or none, here.
        socklen_t len;
        struct sockaddr_storage to = address_of("127.0.0.1", port, &len);
        int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
        FAILS(connect(fd, (struct sockaddr *)&to, len), ECONNREFUSED);
        close(fd);
        uint16_t again = port;
        int here = listen_at(OK(socket(AF_INET, SOCK_STREAM, 0)), "127.0.0.1", &again);
        EQ(again, port);
        int client = connect_to(port), server = OK(accept(here, NULL, NULL));
        nonblocking(old, true);
        FAILS(accept(old, NULL, NULL), EAGAIN);
        for (int i = 0; i < 30; i++) {
            send_all(client, 1, i * 300, 300);
            recv_all(server, 1, i * 300, 300);
            send_all(server, 2, i * 300, 300);
            recv_all(client, 2, i * 300, 300);
        }
        close(client);
        recv_to_eof(server, 0, 0, 0);
    }
    goes_on(p, 0);
}

static void lo_mtu(int bytes) {
    int s = OK(socket(AF_INET, SOCK_DGRAM, 0));
    struct ifreq r = {.ifr_name = "lo", .ifr_mtu = bytes};
    OK(ioctl(s, SIOCSIFMTU, &r));
    close(s);
}

// What nobody has read when a connection goes back to TCP finds room there, as between containers, too.
CASE(what_is_unread_fits_into_tcp_of_all_segments) {
    static const int mtus[] = {1500, 9000, 65536};
    if (!is_root())
        return;
    OK(unshare(CLONE_NEWNET));
    lo_up();
    for (size_t m = 0; m < sizeof mtus / sizeof *mtus; m++) {
        lo_mtu(mtus[m]);
        uint16_t port;
        int listener = listen_here(&port), client = connect_to(port), server = OK(accept(listener, NULL, NULL));
        for (int i = 0; i < 30; i++) {
            send_all(client, 1, i * 300, 300);
            recv_all(server, 1, i * 300, 300);
            send_all(server, 2, i * 300, 300);
            recv_all(client, 2, i * 300, 300);
        }
        assert_smcd(client);
        size_t sent = fill(client, 1, 9000);
        CHECK(sent >= 200000);
        // What the receiver has not read is sent again by TCP, as the next one may be anybody.
        int channel[2];
        OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
        send_fd(channel[0], server);
        close(server);
        server = receive_fd(channel[1]);
        close(channel[0]);
        close(channel[1]);
        recv_all(server, 1, 9000, sent);
        OK(shutdown(client, SHUT_WR));
        recv_to_eof(server, 0, 0, 0);
        close(client);
        close(server);
        close(listener);
    }
}

PAIR_CASE(other_mounts_from_now_on) {
    struct pair p = pair_open();
    if (is_root()) {
        OK(unshare(CLONE_NEWNS));
        OK(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
        OK(mount("none", "/dev/shm", "tmpfs", 0, NULL));
    }
    goes_on(p, 0);
    new_ones_work();
}

// --- children in a namespace of process ids of their own

static struct pair shared;

static pid_t child_elsewhere(void (*run)(void *), void *arg) {
    if (is_root())
        OK(unshare(CLONE_NEWPID));
    pid_t pid = OK(fork());
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        EQ(getpid() == 1, is_root());
        run(arg);
        _exit(0);
    }
    return pid;
}

static void child_alternates(void *arg) {
    (void)arg;
    for (int i = 0; i < 200; i++) {
        char byte;
        EQ(recv(shared.fd, &byte, 1, 0), 1);
        EQ(send(shared.fd, &byte, 1, 0), 1);
    }
}

PAIR_CASE(child_with_process_ids_of_its_own) {
    shared = pair_open();
    pid_t pid = child_elsewhere(child_alternates, NULL);
    for (int i = 0; i < 200; i++) {
        char byte = i, got;
        EQ(peer_send(shared.peer, &byte, 1, 0), 1);
        EQ(peer_recv(shared.peer, &got, 1, 0), 1);
        EQ(got, byte);
    }
    child_succeeds(pid);
    send_all(shared.fd, 1, 0, 70000);
    EQ(peer_call(P_RECV_PATTERN, shared.peer, 1, 0, 70000), 0);
    pair_close(shared);
}

enum { RECORD = 64, RECORDS = 40000 };

static void write_records(int number) {
    unsigned char record[RECORD];
    for (int i = 0; i < RECORDS; i++) {
        memset(record, number * 128 + i % 128, sizeof record);
        EQ(send(shared.fd, record, sizeof record, 0), sizeof record);
    }
}

static void child_writes(void *arg) {
    write_records((int)(intptr_t)arg);
}

static void *read_records(void *arg) {
    int fd = (int)(intptr_t)arg, next[2] = {0, 0};
    unsigned char record[RECORD];
    for (int i = 0; i < 2 * RECORDS; i++) {
        EQ(recv(fd, record, sizeof record, MSG_WAITALL), sizeof record);
        for (size_t j = 1; j < sizeof record; j++)
            CHECK(record[j] == record[0]);
        int number = record[0] / 128;
        EQ(record[0] % 128, next[number]++ % 128);
    }
    return NULL;
}

CASE(parent_and_child_with_process_ids_of_its_own_write_at_once) {
    // Locks that survive their holder know it by its id, which means nothing in another namespace.
    int server;
    connect_here(&shared.fd, &server);
    warm_here(shared.fd, server);
    pthread_t reader;
    EQ(pthread_create(&reader, NULL, read_records, (void *)(intptr_t)server), 0);
    pid_t pid = child_elsewhere(child_writes, (void *)1);
    write_records(0);
    EQ(pthread_join(reader, NULL), 0);
    child_succeeds(pid);
    close(server);
    close(shared.fd);
}

// --- limits

PAIR_CASE(descriptors_of_high_numbers) {
    struct rlimit limit;
    OK(getrlimit(RLIMIT_NOFILE, &limit));
    // As high as this machine lets us.
    limit.rlim_cur = limit.rlim_max;
    OK(setrlimit(RLIMIT_NOFILE, &limit));
    struct pair p = pair_open();
    int last = limit.rlim_cur - 1;
    EQ(dup2(p.fd, last), last);
    OK(close(p.fd));
    int lower = OK(fcntl(last, F_DUPFD_CLOEXEC, last - 100));
    CHECK(lower >= last - 100);
    p.fd = last;
    int set = OK(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = 5};
    OK(epoll_ctl(set, EPOLL_CTL_ADD, last, &event));
    peer_says(p.peer, "x");
    EQ(epoll_wait(set, &event, 1, 20000), 1);
    EQ(event.data.u32, 5);
    wait_events(lower, POLLIN, POLLIN);
    char byte;
    EQ(recv(lower, &byte, 1, 0), 1);
    OK(close(lower));
    FAILS(dup2(last, last + 1), EBADF);
    goes_on(p, 0);
}

PAIR_CASE(everything_is_closed_after_the_limit_was_lowered) {
    struct pair p = pair_open();
    struct rlimit limit;
    OK(getrlimit(RLIMIT_NOFILE, &limit));
    limit.rlim_cur = 100;
    OK(setrlimit(RLIMIT_NOFILE, &limit));
    OK(close_range(64, ~0U, 0));
    goes_on(p, 0);
    // What the library needs is still there: new connections leave TCP.
    variant.warm = true;
    for (int i = 0; i < 2; i++) {
        variant.client = i;
        goes_on(pair_open(), 0);
    }
}
