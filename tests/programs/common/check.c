// Checks, time, children, and the pattern.
#include "check.h"

#include <stdarg.h>
#include <sys/prctl.h>

_Noreturn void check_failed(const char *file, int line, const char *what, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const char *base = strrchr(file, '/');
    dprintf(2, "%s:%d: failed in process %d: %s: %s\n", base ? base + 1 : file, line, getpid(), what,
        text);
    _exit(1);
}

void tell_harness(const char *format, ...) {
    if (!getenv("USMC_TESTS_ID"))
        return;
    char line[256], answer[64];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line - 1, format, args);
    va_end(args);
    line[n] = '\n';
    CHECK(write(1, line, n + 1) == n + 1);
    size_t got = 0;
    while (got < sizeof answer - 1) {
        ssize_t r = read(0, answer + got, 1);
        CHECK(r == 1);
        if (answer[got++] == '\n')
            break;
    }
    answer[got] = 0;
    CHECK(!strcmp(answer, "ok\n"));
}

bool is_plain(void) {
    const char *said = getenv("USMC_TESTS_PLAIN");
    return said && *said && strcmp(said, "0");
}

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

void wait_asleep(pid_t pid, pid_t tid) {
    CHECK(wait_asleep_or_gone(pid, tid));
}

void wait_asleep_for_room(pid_t tid) {
    bool is_asleep = wait_asleep_or_gone(getpid(), tid);
    CHECK(is_asleep || sizeof(void *) == 4);
}

bool wait_asleep_or_gone(pid_t pid, pid_t tid) {
    char path[64], stat[512];
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", pid, tid);
    double until = now() + 20;
    for (;;) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) {
            EQ(errno, ENOENT);
            return false;
        }
        ssize_t n = read(fd, stat, sizeof stat - 1);
        if (n < 0)
            EQ(errno, ESRCH);
        close(fd);
        if (n < 0)
            return false;
        stat[n] = 0;
        char *end = strrchr(stat, ')');
        CHECK(end);
        if (end[2] == 'S')
            return true;
        CHECK(now() < until);
        sched_yield();
    }
}

pid_t child(void (*run)(void *), void *arg) {
    fflush(NULL);
    pid_t parent = getpid();
    pid_t pid = OK(fork());
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        run(arg);
        _exit(0);
    }
    return pid;
}

void child_succeeds(pid_t pid) {
    int status;
    EQ(TEMP_FAILURE_RETRY(waitpid(pid, &status, 0)), pid);
    if (status != 0)
        check_failed(__FILE__, __LINE__, "the child succeeds", "wait status 0x%x", status);
}

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

void pattern(uint64_t seed, uint64_t at, void *buf, size_t n) {
    unsigned char *p = buf;
    while (n > 0) {
        uint64_t word = mix(seed * 0x100000001b3u + at / 8);
        size_t skip = at % 8, take = 8 - skip < n ? 8 - skip : n;
        memcpy(p, (unsigned char *)&word + skip, take);
        p += take;
        at += take;
        n -= take;
    }
}

// Where in the stream bytes stand that came for others; -1: nowhere near.
static int64_t place_of(uint64_t seed, uint64_t near, const unsigned char *p, size_t n) {
    enum { AROUND = 1 << 22, TELLING = 8 };
    if (n < TELLING)
        return -1;
    uint64_t from = near > AROUND ? near - AROUND : 0;
    unsigned char *all = malloc(2 * AROUND);
    if (!all)
        return -1;
    pattern(seed, from, all, 2 * AROUND);
    const unsigned char *found = memmem(all, 2 * AROUND, p, TELLING);
    int64_t place = found ? (int64_t)(from + (found - all)) : -1;
    free(all);
    return place;
}

// The first bytes that came instead: those of a message name it.
static const char *in_hex(const unsigned char *p, size_t n) {
    static _Thread_local char text[3 * 16 + 1];
    for (size_t i = 0; i < n && i < 16; i++)
        snprintf(text + 3 * i, 4, " %02x", p[i]);
    return text;
}

_Thread_local int check_socket = -1;

// "", or the socket's number and ports.
static const char *from_socket(void) {
    static _Thread_local char text[64];
    struct sockaddr_in local = {0}, peer = {0};
    socklen_t len = sizeof local;
    if (check_socket < 0)
        return "";
    getsockname(check_socket, (struct sockaddr *)&local, &len);
    len = sizeof peer;
    getpeername(check_socket, (struct sockaddr *)&peer, &len);
    snprintf(text, sizeof text, " by fd %d, port %d, of port %d", check_socket, ntohs(local.sin_port), ntohs(peer.sin_port));
    return text;
}

void check_pattern(uint64_t seed, uint64_t at, const void *buf, size_t n) {
    const unsigned char *p = buf;
    unsigned char want[4096];
    while (n > 0) {
        size_t take = n < sizeof want ? n : sizeof want;
        pattern(seed, at, want, take);
        for (size_t i = 0; memcmp(p, want, take) && i < take; i++)
            if (p[i] != want[i])
                check_failed(__FILE__, __LINE__, "each byte is the one that was sent",
                    "stream %llu%s, byte %llu: got%s, sent 0x%02x; %zu bytes, the next of which are sent at %lld",
                    (unsigned long long)seed, from_socket(), (unsigned long long)(at + i), in_hex(p + i, n - i), want[i], n - i,
                    (long long)place_of(seed, at + i, p + i, n - i));
        p += take;
        at += take;
        n -= take;
    }
}
