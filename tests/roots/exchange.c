// Two processes, made by fork(2), that exchange messages by TCP. With a port it goes on until it is killed.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void need(int holds, const char *what) {
    if (!holds) {
        perror(what);
        exit(1);
    }
}

static void take(int fd, char *buf, size_t n) {
    for (ssize_t got; n > 0; buf += got, n -= got)
        need((got = read(fd, buf, n)) > 0, "read");
}

int main(int argc, char **argv) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(argc > 1 ? atoi(argv[1]) : 0)};
    socklen_t len = sizeof at;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    need(bind(listener, (struct sockaddr *)&at, sizeof at) == 0, "bind");
    need(listen(listener, 5) == 0, "listen");
    need(getsockname(listener, (struct sockaddr *)&at, &len) == 0, "getsockname");
    unsigned long rounds = argc > 1 ? -1 : 300, sum = 0;
    char buf[3000];
    pid_t child = fork();
    need(child >= 0, "fork");
    if (child == 0) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        need(connect(fd, (struct sockaddr *)&at, sizeof at) == 0, "connect");
        for (unsigned long i = 0; i < rounds; i++) {
            memset(buf, i, sizeof buf);
            need(write(fd, buf, sizeof buf) == sizeof buf, "write");
            take(fd, buf, 7);
        }
        return 0;
    }
    int fd = accept(listener, NULL, NULL);
    need(fd >= 0, "accept");
    for (unsigned long i = 0; i < rounds; i++) {
        take(fd, buf, sizeof buf);
        sum += (unsigned char)buf[i % sizeof buf];
        need(write(fd, buf, 7) == 7, "write");
    }
    int status;
    need(read(fd, buf, 1) == 0, "the end");
    need(waitpid(child, &status, 0) == child && status == 0, "the child");
    printf("%lu\n", sum);
    return 0;
}
