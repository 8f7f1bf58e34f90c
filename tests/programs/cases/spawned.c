// Programs that libc starts by itself: posix_spawn, popen, system. What they are given of our connections goes on there.
#include "peer.h"

#include <dlfcn.h>
#include <spawn.h>
#include <sys/resource.h>

extern char **environ;

typedef int spawn_function(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
    char *const[], char *const[]);

// A number that nothing else has.
enum { AT = 77 };

static pid_t spawn_echo(spawn_function *spawn, const posix_spawn_file_actions_t *actions, int fd) {
    char number[16];
    snprintf(number, sizeof number, "%d", fd);
    char *argv[] = {"echo", "--echo", number, NULL};
    pid_t pid = -1;
    EQ(spawn(&pid, own_path(), actions, NULL, argv, environ), 0);
    CHECK(pid > 0);
    return pid;
}

static uint64_t echoes(int fd) {
    for (int i = 0; i < 64; i++) {
        send_all(fd, 1, i * 10, 10);
        recv_all(fd, 1, i * 10, 10);
    }
    return 640;
}

static void echoes_the_rest(int fd, uint64_t at) {
    send_all(fd, 1, at, 100000);
    OK(shutdown(fd, SHUT_WR));
    recv_to_eof(fd, 1, at, 100000);
    close(fd);
}

// What we send comes back, over shared memory in the end.
static void is_echoed(int fd) {
    uint64_t at = echoes(fd);
    assert_smcd(fd);
    echoes_the_rest(fd, at);
}

CASE(spawned_program_goes_on_at_another_number) {
    spawn_function *spawns[] = {posix_spawn, posix_spawnp};
    for (int i = 0; i < 12; i++) {
        int ends[2], rounds = (int[]){0, 2, 32}[i / 4];
        both_ends(ends, i % 2, rounds);
        posix_spawn_file_actions_t actions;
        EQ(posix_spawn_file_actions_init(&actions), 0);
        EQ(posix_spawn_file_actions_addopen(&actions, 90, "/dev/null", O_RDONLY, 0), 0);
        EQ(posix_spawn_file_actions_adddup2(&actions, ends[1], 91), 0);
        EQ(posix_spawn_file_actions_adddup2(&actions, 91, AT), 0);
#ifdef __GLIBC__
        EQ(posix_spawn_file_actions_addclosefrom_np(&actions, 90), 0);
#else // musl has no such action.
        EQ(posix_spawn_file_actions_addclose(&actions, 90), 0);
        EQ(posix_spawn_file_actions_addclose(&actions, 91), 0);
#endif
        pid_t pid = spawn_echo(spawns[i / 2 % 2], &actions, AT);
        EQ(posix_spawn_file_actions_destroy(&actions), 0);
        close(ends[1]);
        is_echoed(ends[0]);
        child_succeeds(pid);
    }
}

static void by_system(void) {
    EQ(system("true; true"), 0);
}

// glibc 2.39 has them. In front of an older one they are there, and say so.
CASE(program_spawned_by_pidfd_goes_on) {
    const char *names[] = {"pidfd_spawn", "pidfd_spawnp"};
    void *libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    CHECK(libc);
    for (int i = 0; i < 2; i++) {
        spawn_function *spawn = dlsym(RTLD_DEFAULT, names[i]);
        char *argv[] = {"echo", "--echo", "77", NULL};
        int pidfd = -1, ends[2];
        if (!dlsym(libc, names[i])) {
            if (spawn)
                EQ(spawn(&pidfd, own_path(), NULL, NULL, argv, environ), ENOSYS);
            EQ(pidfd, -1);
            continue;
        }
        both_ends(ends, i, 32);
        posix_spawn_file_actions_t actions;
        EQ(posix_spawn_file_actions_init(&actions), 0);
        EQ(posix_spawn_file_actions_adddup2(&actions, ends[1], AT), 0);
        EQ(spawn(&pidfd, own_path(), &actions, NULL, argv, environ), 0);
        EQ(posix_spawn_file_actions_destroy(&actions), 0);
        close(ends[1]);
        is_echoed(ends[0]);
        siginfo_t info;
        OK(waitid((idtype_t)3, pidfd, &info, WEXITED));
        EQ(info.si_status, 0);
        close(pidfd);
    }
    dlclose(libc);
}

struct sender {
    int fd;
    pid_t tid;
};

static void *sends_much(void *arg) {
    struct sender *s = arg;
    __atomic_store_n(&s->tid, gettid(), __ATOMIC_RELEASE);
    send_all(s->fd, 1, 0, 5 << 20);
    return NULL;
}

// Who starts a program waits for none of them longer than for one.
CASE(program_starts_while_many_sends_sleep) {
    enum { COUNT = 5 };
    int ends[COUNT][2], full[1024], fulls = 0;
    struct sender senders[COUNT];
    pthread_t threads[COUNT];
    for (int i = 0; i < COUNT; i++) {
        both_ends(ends[i], i % 2, 32);
        OK(fcntl(ends[i][0], F_SETFD, 0));
        senders[i] = (struct sender){.fd = ends[i][0]};
        EQ(pthread_create(&threads[i], NULL, sends_much, &senders[i]), 0);
        while (!__atomic_load_n(&senders[i].tid, __ATOMIC_ACQUIRE))
            sched_yield();
        wait_asleep(getpid(), senders[i].tid);
    }
    // No number is left to get hold of the other ends by.
    struct rlimit before, low = {512, 512};
    OK(getrlimit(RLIMIT_NOFILE, &before));
    low.rlim_max = before.rlim_max;
    OK(setrlimit(RLIMIT_NOFILE, &low));
    while ((full[fulls] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
        fulls++;
    double start = now();
    by_system();
    double took = now() - start;
    CHECK(took < 4);
    while (fulls > 0)
        close(full[--fulls]);
    OK(setrlimit(RLIMIT_NOFILE, &before));
    for (int i = 0; i < COUNT; i++) {
        recv_all(ends[i][1], 1, 0, 5 << 20);
        EQ(pthread_join(threads[i], NULL), 0);
        close(ends[i][0]);
        recv_to_eof(ends[i][1], 1, 5 << 20, 0);
        close(ends[i][1]);
    }
}

CASE(spawned_program_goes_on_with_what_is_not_closed) {
    for (int i = 0; i < 6; i++) {
        int ends[2], rounds = (int[]){0, 2, 32}[i / 2];
        both_ends(ends, i % 2, rounds);
        OK(fcntl(ends[1], F_SETFD, 0));
        posix_spawnattr_t attributes;
        EQ(posix_spawnattr_init(&attributes), 0);
        EQ(posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP), 0);
        char number[16];
        snprintf(number, sizeof number, "%d", ends[1]);
        char *argv[] = {"echo", "--echo", number, NULL};
        pid_t pid;
        EQ(posix_spawn(&pid, own_path(), NULL, &attributes, argv, environ), 0);
        close(ends[1]);
        is_echoed(ends[0]);
        child_succeeds(pid);
    }
}

CASE(spawned_program_takes_unread_bytes_along) {
    for (int i = 0; i < 2; i++) {
        int ends[2];
        both_ends(ends, i, 32);
        OK(fcntl(ends[1], F_SETFD, 0));
        send_all(ends[0], 3, 0, 5000);
        pid_t pid = spawn_echo(posix_spawn, NULL, ends[1]);
        close(ends[1]);
        recv_all(ends[0], 3, 0, 5000);
        is_echoed(ends[0]);
        child_succeeds(pid);
    }
}

// It would find doorbells where the bytes are: it finds the number closed, as differences.md says, and we have it as before.
CASE(program_does_not_get_what_cannot_leave_the_ring) {
    for (int i = 0; i < 2; i++) {
        int ends[2];
        both_ends(ends, i, 32);
        OK(dup2(ends[1], 9));
        close(ends[1]);
        send_all(ends[0], 3, 0, 5000);
        OK(shutdown(ends[0], SHUT_WR));
        int status = OK(system("exec 2> /dev/null <&9"));
        CHECK(WIFEXITED(status));
        EQ(WEXITSTATUS(status) == 0, is_plain());
        EQ(fcntl(9, F_GETFD), 0);
        recv_to_eof(9, 3, 0, 5000);
        close(9);
        close(ends[0]);
    }
}

CASE(shell_of_popen_passes_it_on) {
    for (int i = 0; i < 2; i++) {
        int ends[2];
        both_ends(ends, i, 32);
        OK(dup2(ends[1], 9));
        close(ends[1]);
        char command[PATH_MAX + 64];
        snprintf(command, sizeof command, "exec %s --echo 9", own_path());
        FILE *out = popen(command, i ? "re" : "w");
        CHECK(out);
        close(9);
        is_echoed(ends[0]);
        EQ(pclose(out), 0);
    }
}

static void *echo_by_system(void *path) {
    char command[PATH_MAX + 64];
    snprintf(command, sizeof command, "exec %s --echo 9", (const char *)path);
    EQ(system(command), 0);
    return NULL;
}

static void *close_it(void *go) {
    char byte;
    EQ(read(*(int *)go, &byte, 1), 1);
    close(9);
    return NULL;
}

// We have it as well, for a while.
CASE(command_of_system_goes_on) {
    for (int i = 0; i < 2; i++) {
        int ends[2], go[2];
        both_ends(ends, i, 32);
        OK(pipe2(go, O_CLOEXEC));
        OK(dup2(ends[1], 9));
        close(ends[1]);
        pthread_t command, closer;
        EQ(pthread_create(&command, NULL, echo_by_system, (void *)own_path()), 0);
        EQ(pthread_create(&closer, NULL, close_it, &go[0]), 0);
        send_all(ends[0], 3, 0, 5000);
        recv_all(ends[0], 3, 0, 5000);
        EQ(write(go[1], "", 1), 1);
        EQ(pthread_join(closer, NULL), 0);
        is_echoed(ends[0]);
        EQ(pthread_join(command, NULL), 0);
        close(go[0]);
        close(go[1]);
    }
}

static void by_spawn(void) {
    char *argv[] = {"true", NULL};
    pid_t pid;
    EQ(posix_spawnp(&pid, "true", NULL, NULL, argv, environ), 0);
    child_succeeds(pid);
}

static void by_popen(void) {
    char line[16];
    FILE *out = popen("echo yes | cat", "r");
    CHECK(out && fgets(line, sizeof line, out));
    CHECK(!strcmp(line, "yes\n"));
    EQ(pclose(out), 0);
}

static void not_at_all(void) {
    char *argv[] = {"nothing", NULL};
    pid_t pid;
    EQ(posix_spawn(&pid, "/nowhere/at/all", NULL, NULL, argv, environ), ENOENT);
    EQ(posix_spawnp(&pid, "no-such-program-anywhere", NULL, NULL, argv, environ), ENOENT);
}

// Programs that have it open without a use for it.
PAIR_CASE(connection_comes_back_after_programs_of_libc) {
    void (*ways[])(void) = {by_spawn, by_system, by_popen};
    struct pair p = pair_open();
    int at = 0;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        ways[i]();
        at = pair_talk(p, at, 64);
        if (variant.remote)
            assert_smcd(p.fd);
    }
    pair_close(p);
}

PAIR_CASE(connection_comes_back_after_a_program_that_is_not_there) {
    struct pair p = pair_open();
    EQ(peer_call(P_SEND_PATTERN, p.peer, 3, 0, 3000), 0);
    not_at_all();
    recv_all(p.fd, 3, 0, 3000);
    pair_talk(p, 0, 64);
    if (variant.remote)
        assert_smcd(p.fd);
    pair_close(p);
}

// What a program is not given stays where it is: no call is made after it.
PAIR_CASE(connection_that_a_program_is_not_given_stays) {
    struct pair p = pair_open();
    pair_talk(p, 0, 16);
    char *argv[] = {"true", NULL};
    pid_t pid;
    for (int i = 0; i < 4; i++) {
        posix_spawn_file_actions_t actions;
        EQ(posix_spawn_file_actions_init(&actions), 0);
        OK(fcntl(p.fd, F_SETFD, i == 0 ? FD_CLOEXEC : 0));
        if (i == 1)
            EQ(posix_spawn_file_actions_addclose(&actions, p.fd), 0);
        else if (i == 2)
            EQ(posix_spawn_file_actions_addopen(&actions, p.fd, "/dev/null", O_RDWR, 0), 0);
        else if (i == 3)
#ifdef __GLIBC__
            EQ(posix_spawn_file_actions_addclosefrom_np(&actions, 3), 0);
#else // musl has no such action.
            EQ(posix_spawn_file_actions_addclose(&actions, p.fd), 0);
#endif
        // The peer's end may be ours, too, and is open in the same way.
        if (!variant.remote)
            OK(fcntl(p.peer, F_SETFD, FD_CLOEXEC));
        EQ(posix_spawn(&pid, "/bin/true", &actions, NULL, argv, environ), 0);
        child_succeeds(pid);
        EQ(posix_spawn_file_actions_destroy(&actions), 0);
        assert_smcd(p.fd);
    }
    pair_close(p);
}
