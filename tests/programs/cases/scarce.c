// Resources that ran out: the connection stays TCP, and no byte is lost.
#include "peer.h"

#include <sys/prctl.h>
#include <sys/resource.h>

static void limit(int resource, rlim_t value) {
    struct rlimit now;
    OK(getrlimit(resource, &now));
    now.rlim_cur = value;
    OK(setrlimit(resource, &now));
}

// For our own segments; who exceeds it in a call gets a signal that ends it.
static void no_large_files(void) {
    limit(RLIMIT_FSIZE, 4096);
}

static void no_addresses(void) {
    long pages = 0;
    FILE *statm = fopen("/proc/self/statm", "re");
    CHECK(statm && fscanf(statm, "%ld", &pages) == 1);
    fclose(statm);
    limit(RLIMIT_AS, (rlim_t)(pages + 4) * sysconf(_SC_PAGESIZE));
}

static void no_descriptors(void) {
    int lowest = OK(dup(0));
    close(lowest);
    limit(RLIMIT_NOFILE, lowest);
}

static void talks(int fd, uint64_t ours, uint64_t theirs) {
    for (int i = 0; i < 100; i++) {
        size_t n = i % 10 ? 10 : 30000;
        send_all(fd, ours, i * 30000, n);
        recv_all(fd, theirs, i * 30000, n);
    }
}

// A process with a limit and one without, of which the former connects, if `client`. Over TCP, as both can see, unless
// `may`: the other end's memory may be had all the same.
static void one_is_short(void (*of)(void), bool client, bool may) {
    uint16_t port;
    int listener = listen_here(&port), done[2];
    OK(pipe(done));
    pid_t pid = OK(fork());
    if (pid == 0) {
        char byte;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(done[1]);
        int fd = client ? connect_to(port) : OK(accept(listener, NULL, NULL));
        close(listener);
        of();
        talks(fd, 1, 2);
        EQ(read(done[0], &byte, 1), 0);
        recv_to_eof(fd, 2, 3000000, 0);
        close(fd);
        _exit(0);
    }
    int fd = client ? OK(accept(listener, NULL, NULL)) : connect_to(port);
    close(listener);
    close(done[0]);
    talks(fd, 2, 1);
    if (!may)
        assert_tcp(fd);
    close(done[1]);
    OK(shutdown(fd, SHUT_WR));
    recv_to_eof(fd, 1, 3000000, 0);
    close(fd);
    child_succeeds(pid);
}

CASE(client_that_may_not_make_large_files) {
    one_is_short(no_large_files, true, false);
}

CASE(server_that_may_not_make_large_files) {
    one_is_short(no_large_files, false, true);
}

// Nor the device's own file, which nobody has made yet.
CASE(program_that_may_not_make_large_files_at_all) {
    no_large_files();
    int ends[2];
    both_ends(ends, true, 32);
    close(ends[0]);
    recv_to_eof(ends[1], 1, 320, 0);
    close(ends[1]);
}

CASE(client_without_addresses) {
    one_is_short(no_addresses, true, false);
}

CASE(server_without_addresses) {
    one_is_short(no_addresses, false, false);
}

CASE(client_without_descriptors) {
    one_is_short(no_descriptors, true, false);
}

CASE(server_without_descriptors) {
    one_is_short(no_descriptors, false, false);
}

// All is missing from the start: nothing is known of the device.
CASE(program_that_starts_with_few_descriptors) {
    uint16_t port;
    int listener = listen_here(&port);
    pid_t pid = OK(fork());
    if (pid == 0) {
        const char *path = own_path();
        OK(dup2(connect_to(port), 3));
        closefrom(4);
        // The loader needs one.
        limit(RLIMIT_NOFILE, 5);
        execl(path, path, "--echo", "3", (char *)NULL);
        _exit(1);
    }
    int fd = OK(accept(listener, NULL, NULL));
    close(listener);
    for (int i = 0; i < 64; i++) {
        send_all(fd, 1, i * 10, 10);
        recv_all(fd, 1, i * 10, 10);
    }
    assert_tcp(fd);
    OK(shutdown(fd, SHUT_WR));
    recv_to_eof(fd, 1, 640, 0);
    close(fd);
    child_succeeds(pid);
}
