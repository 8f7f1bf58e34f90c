// storm ROLE TABLE PORT SERVICE LISTENER NUMBER [FD:STREAM:SIDE:RECEIVES:SENDS]…
//
// Roles: server, single, many, and what those become by exec: child, worker. NUMBER 0: a new process, whose LISTENER
// is 1 where it is protected from the harness.
#include "storm.h"

#include <execinfo.h>
#include <sys/prctl.h>

sigset_t wait_mask;
static volatile sig_atomic_t asked_to_stop;

static void on_term(int signal) {
    (void)signal;
    asked_to_stop = 1;
}

bool stopping(void) {
    return asked_to_stop;
}

static int listen_when_free(uint16_t port) {
    socklen_t len;
    struct sockaddr_storage at = address_of("127.0.0.1", port, &len);
    int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    // The workers of a root that was killed are about to close theirs.
    for (double until = now() + 30; bind(fd, (struct sockaddr *)&at, len) < 0 || listen(fd, 4096) < 0;) {
        EQ(errno, EADDRINUSE);
        CHECK(now() < until);
        poll(NULL, 0, 1);
    }
    return fd;
}

enum { WORKERS = 3 };

static pid_t start_worker(int i, pid_t root) {
    uint64_t number = new_number();
    pid_t pid = OK(fork());
    if (pid > 0)
        return pid;
    become(number, ROLE_WORKER | (next.protected ? PROTECTED : 0), 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    asked_to_stop = getppid() != root;
    signal(SIGCHLD, SIG_IGN);
    next.role = "worker";
    if (i % WORKERS == 0)
        serve_by_children();
    serve_many(NULL, 0);
    end_well();
}

// Sees to it that there are workers, until it is asked to stop.
void serve(uint16_t port) {
    sigset_t both;
    sigemptyset(&both);
    sigaddset(&both, SIGTERM);
    sigaddset(&both, SIGCHLD);
    sigprocmask(SIG_BLOCK, &both, NULL);
    next.listener = listen_when_free(port);
    printf("port %d\n", port);
    pid_t workers[WORKERS] = {0}, root = getpid();
    for (bool stop = false;;) {
        for (int i = 0; !stop && i < WORKERS; i++)
            if (workers[i] == 0)
                workers[i] = start_worker(i, root);
        stop |= sigwaitinfo(&both, NULL) == SIGTERM;
        int left = 0;
        for (int i = 0; i < WORKERS; i++) {
            if (workers[i] > 0 && stop)
                kill(workers[i], SIGTERM);
            if (workers[i] > 0 && waitpid(workers[i], NULL, WNOHANG) == workers[i])
                workers[i] = 0;
            left += workers[i] > 0;
        }
        if (stop && left == 0)
            end_well();
    }
}

static struct end end_of(const char *text) {
    struct end end = {.fd = -1};
    long stream;
    int receives, sends;
    EQ(sscanf(text, "%d:%ld:%d:%d:%d", &end.fd, &stream, &end.side, &receives, &sends), 5);
    end.stream = stream ? &table->stream[stream] : NULL;
    end.receives = receives;
    end.sends = sends;
    OK(fcntl(end.fd, F_SETFD, FD_CLOEXEC));
    // What nobody could send by TCP is not taken along where others seem to hold it (docs/differences.md).
    struct sockaddr_storage at;
    if (stream && !is_plain() && getsockname(end.fd, (struct sockaddr *)&at, &(socklen_t){sizeof at}) == 0
        && ((struct sockaddr_in *)&at)->sin_port == 0) {
        end.stream->lost = 1;
        close(end.fd);
        end.fd = -1;
    }
    return end;
}

// Beside the table, for the harness: whose standard error this is may have been killed.
static void note_errors(void) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s.errors", next.path);
    int fd = OK(open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    OK(dup2(fd, 2));
    close(fd);
}

// A crash is not to go without a word: whose child it is does not wait for it.
static void on_crash(int signal, siginfo_t *info, void *context) {
    (void)context;
    dprintf(2, "process %d: signal %d at %p\n", getpid(), signal, info->si_addr);
    void *frames[32];
    backtrace_symbols_fd(frames, backtrace(frames, 32), 2);
    _exit(1);
}

int main(int argc, char **argv) {
    CHECK(argc >= 7);
    struct sigaction crash = {.sa_sigaction = on_crash, .sa_flags = SA_SIGINFO};
    for (size_t i = 0; i < 4; i++)
        sigaction((int[]){SIGSEGV, SIGBUS, SIGABRT, SIGILL}[i], &crash, NULL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    // The kernel's word to a group that has lost its leader while a member is stopped.
    signal(SIGHUP, SIG_IGN);
    struct sigaction on = {.sa_handler = on_term};
    sigaction(SIGTERM, &on, NULL);
    // Only waits are to be interrupted, and an exec not at all.
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    sigprocmask(SIG_BLOCK, &term, &wait_mask);
    sigdelset(&wait_mask, SIGTERM);
    const char *role = argv[1];
    uint64_t number = atol(argv[6]);
    bool fresh = number == 0;
    next = (struct next){role, argv[2], atol(argv[3]), atol(argv[4]), fresh ? -1 : atol(argv[5]),
        fresh && atol(argv[5]) == 1, !fresh};
    open_table(next.path);
    note_errors();
    bool serves = !strcmp(role, "server"), works = !strcmp(role, "worker"), is_child = !strcmp(role, "child");
    if (!serves)
        signal(SIGCHLD, SIG_IGN);
    enum role what = serves ? ROLE_ROOT : works ? ROLE_WORKER : is_child ? ROLE_CHILD : ROLE_CLIENT;
    become(fresh ? new_number() : number, what | (next.protected ? PROTECTED : 0), next.resumes);
    struct end ends[argc];
    int count = 0;
    for (int i = 7; i < argc; i++)
        if ((ends[count] = end_of(argv[i])).fd >= 0)
            count++;
    if (serves)
        serve(next.port);
    if (works)
        serve_many(ends, count);
    if (!strcmp(role, "many"))
        talk_many(ends, count);
    if (count == 1)
        run(&ends[0]);
    has_resumed();
    if (!is_child)
        talk_singly();
    end_well();
}
