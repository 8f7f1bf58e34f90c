// A sender that nobody reads from, and how often it wakes meanwhile.
#include "load.h"

#include <sys/resource.h>
#include <sys/time.h>

enum { TALKS = 8 };

// Answers a few messages, and then reads nothing until its input ends.
void unread(void) {
    uint16_t port = 0;
    int listener = listen_here(&port);
    printf("port %d\n", port);
    int fd = OK(accept(listener, NULL, NULL));
    char byte;
    for (int i = 0; i < TALKS; i++) {
        EQ(recv(fd, &byte, 1, 0), 1);
        EQ(send(fd, &byte, 1, 0), 1);
    }
    EQ(read(0, &byte, 1), 0);
    close(fd);
    close(listener);
}

static void nothing(int signal) {
    (void)signal;
}

// Sends until a timer interrupts the sleep for room, and prints how often it slept. The program has handlers with SA_RESTART
// and without it, and its connection a size that another thread might raise.
void blocked(uint16_t port) {
    int fd = connect_to(port), size = 65536;
    char byte = 1;
    for (int i = 0; i < TALKS; i++) {
        EQ(send(fd, &byte, 1, 0), 1);
        EQ(recv(fd, &byte, 1, 0), 1);
    }
    // The harness looks where the connection is.
    printf("talked\n");
    EQ(read(0, &byte, 1), 1);
    OK(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size));
    struct sigaction ends = {.sa_handler = nothing}, restarts = {.sa_handler = nothing, .sa_flags = SA_RESTART};
    OK(sigaction(SIGALRM, &ends, NULL));
    OK(sigaction(SIGUSR1, &restarts, NULL));
    static char chunk[16384];
    // A sender leaves the ring after a second without a reader: the timer is faster.
    struct itimerval timer = {.it_value = {.tv_usec = 400000}, .it_interval = {.tv_usec = 50000}};
    struct rusage before, after;
    OK(setitimer(ITIMER_REAL, &timer, NULL));
    OK(getrusage(RUSAGE_SELF, &before));
    while (send(fd, chunk, sizeof chunk, 0) > 0)
        ;
    EQ(errno, EINTR);
    OK(getrusage(RUSAGE_SELF, &after));
    printf("slept %ld\n", after.ru_nvcsw - before.ru_nvcsw);
    close(fd);
}
