/* For LD_PRELOAD: a program's TCP sockets are the kernel's SMC sockets, as by smc_run(8), which no package of Debian 12 has. */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* IPPROTO_SMC, Linux 6.11 */
#define SMC 256

int socket(int domain, int type, int protocol)
{
    const int kind = type & ~(SOCK_NONBLOCK | SOCK_CLOEXEC);
    const int is_tcp = protocol == 0 || protocol == IPPROTO_TCP;

    if ((domain == AF_INET || domain == AF_INET6) && kind == SOCK_STREAM && is_tcp)
        protocol = SMC;
    return (int)syscall(SYS_socket, domain, type, protocol);
}
