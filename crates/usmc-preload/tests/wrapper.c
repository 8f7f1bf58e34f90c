// What libraries do that give TCP programs another kind of socket: smc_run's (AF_SMC), mptcpize's (MPTCP).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

int socket(int family, int kind, int protocol) {
    int (*next)(int, int, int) = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
    if ((family == AF_INET || family == AF_INET6) && (kind & 0xf) == SOCK_STREAM && protocol % IPPROTO_TCP == 0) {
        if (strcmp(getenv("WRAPPER"), "smc"))
            return next(family, kind, 262);
        return next(43, kind, family == AF_INET6);
    }
    return next(family, kind, protocol);
}
