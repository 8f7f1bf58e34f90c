// Programs that allow themselves few system calls, and die at any other.
#include "peer.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>

static const int allowed[] = {SYS_read, SYS_write, SYS_close, SYS_sendto, SYS_recvfrom, SYS_poll, SYS_brk, SYS_mmap,
    SYS_munmap, SYS_wait4, SYS_exit_group, SYS_rt_sigreturn, SYS_socket, SYS_bind, SYS_listen, SYS_getsockname,
    SYS_connect,
#ifdef SYS_socketcall
    // What libc calls instead of the others, and where there is no number for accept.
    SYS_socketcall, SYS_mmap2,
#else
    SYS_accept,
#endif
};
#define ALLOWED (sizeof allowed / sizeof *allowed)

static void install(bool by_number) {
    struct sock_filter filter[2 * ALLOWED + 2];
    size_t n = 0;
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < ALLOWED; i++) {
        filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], 0, 1);
        filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog program = {n, filter};
    OK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    // Asked first, as libraries do; changes nothing.
    FAILS(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, NULL), EFAULT);
    if (by_number)
        OK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program));
    else
        OK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

static void goes_on_in_the_sandbox(bool by_number) {
    struct pair p = pair_open();
    send_all(p.fd, 1, 0, 3000);
    EQ(peer_call(P_SEND_PATTERN, p.peer, 2, 0, 5000), 0);
    wait_readable(p.fd, 5000);
    recv_all(p.fd, 2, 0, 1000);
    install(by_number);
    recv_all(p.fd, 2, 1000, 4000);
    EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 0, 3000), 0);
    for (int i = 0; i < 50; i++) {
        send_all(p.fd, 1, 3000 + i * 500, 500);
        EQ(peer_call(P_RECV_PATTERN, p.peer, 1, 3000 + i * 500, 500), 0);
        peer_begin(P_SEND_PATTERN, p.peer, 2, 5000 + i * 700, 700);
        struct pollfd readable = {.fd = p.fd, .events = POLLIN};
        EQ(poll(&readable, 1, 20000), 1);
        recv_all(p.fd, 2, 5000 + i * 700, 700);
        EQ(peer_end(), 0);
    }
    pair_close(p);
}

REMOTE_CASE(connection_of_a_program_that_installs_a_filter) {
    goes_on_in_the_sandbox(false);
}

REMOTE_CASE(connection_of_a_program_that_installs_a_filter_by_number) {
    goes_on_in_the_sandbox(true);
}

// What it opens afterwards costs its own calls only, whether it had sockets before or not.
static void opens_in_the_sandbox(int listener, int client) {
    uint16_t port = 0;
    listen_at(listener, "127.0.0.1", &port);
    socklen_t len;
    struct sockaddr_storage at = address_of("127.0.0.1", port, &len);
    OK(connect(client, (struct sockaddr *)&at, len));
    int server = OK(accept(listener, NULL, NULL));
    for (int i = 0; i < 20; i++) {
        send_all(client, 1, i * 100, 100);
        recv_all(server, 1, i * 100, 100);
        send_all(server, 2, i * 100, 100);
        recv_all(client, 2, i * 100, 100);
    }
    close(client);
    recv_to_eof(server, 1, 2000, 0);
    close(server);
    close(listener);
}

CASE(sockets_of_a_program_that_installs_a_filter_first) {
    install(false);
    opens_in_the_sandbox(OK(socket(AF_INET, SOCK_STREAM, 0)), OK(socket(AF_INET, SOCK_STREAM, 0)));
}

CASE(sockets_made_before_the_filter_and_used_after_it) {
    int listener = OK(socket(AF_INET, SOCK_STREAM, 0)), client = OK(socket(AF_INET, SOCK_STREAM, 0));
    install(true);
    opens_in_the_sandbox(listener, client);
}

CASE(native_sockets_of_a_program_that_installs_a_filter_first) {
    install(false);
    opens_in_the_sandbox(stream(AF_SMC, SMCPROTO_SMC, 0), stream(AF_INET, IPPROTO_SMC, 0));
}

CASE(native_sockets_made_before_the_filter_and_used_after_it) {
    int listener = stream(AF_SMC, SMCPROTO_SMC, 0), client = stream(AF_INET, IPPROTO_SMC, 0);
    install(true);
    opens_in_the_sandbox(listener, client);
}
