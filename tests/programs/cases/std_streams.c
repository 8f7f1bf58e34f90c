// stdin, stdout and stderr on a connection, as inetd gives them: libc's own streams, which were there before.
#include "peer.h"

#include <stdio_ext.h>
#include <wchar.h>

// A connection that is in the ring, where it can be, has these numbers, and its own no more.
struct standard {
    struct pair p;
    int at; // where pair_talk ended
    int kept[3];
};

static struct standard standard_open(void) {
    struct standard s = {.p = pair_open()};
    s.at = pair_talk(s.p, 0, 40);
    fflush(stdout);
    for (int fd = 0; fd < 3; fd++) {
        s.kept[fd] = OK(fcntl(fd, F_DUPFD_CLOEXEC, 100));
        OK(dup2(s.p.fd, fd));
    }
    close(s.p.fd);
    return s;
}

// The numbers mean what they meant; the connection has its own again.
static void standard_end(struct standard *s) {
    EQ(fflush(stdout), 0);
    s->p.fd = OK(fcntl(0, F_DUPFD_CLOEXEC, 3));
    for (int fd = 0; fd < 3; fd++) {
        OK(dup2(s->kept[fd], fd));
        close(s->kept[fd]);
    }
}

PAIR_CASE(standard_streams_read_and_write) {
    static char big[40000], got[40000];
    struct standard s = standard_open();
    pattern(7, 0, big, sizeof big);
    for (int i = 0; i < 10; i++) {
        char line[100], word[100], *all = NULL;
        size_t room = 0;
        int number;
        peer_says(s.p.peer, "one line\nand 42 more\nlast\n");
        CHECK(fgets(line, sizeof line, stdin) && !strcmp(line, "one line\n"));
        EQ(scanf("%99s %d", word, &number), 2);
        CHECK(!strcmp(word, "and") && number == 42);
        EQ(getline(&all, &room, stdin), 6);
        EQ(getchar(), 'l');
        EQ(ungetc('L', stdin), 'L');
        EQ(getline(&all, &room, stdin), 5);
        CHECK(!strcmp(all, "Last\n"));
        free(all);
        printf("%s has %d\n", word, number);
        EQ(puts("puts"), 5);
        EQ(putchar('!'), '!');
        EQ(fflush(stdout), 0);
        peer_hears(s.p.peer, "and has 42\nputs\n!");
        // Unbuffered.
        errno = ENOENT;
        perror("perror");
        peer_hears(s.p.peer, "perror: No such file or directory\n");
        // More than a buffer holds.
        EQ(fwrite(big, 1, sizeof big, stdout), sizeof big);
        EQ(fflush(stdout), 0);
        EQ(peer_recv(s.p.peer, got, sizeof got, MSG_WAITALL), sizeof got);
        CHECK(!memcmp(big, got, sizeof big));
        memset(got, 0, sizeof got);
        EQ(peer_send(s.p.peer, big, sizeof big, 0), sizeof big);
        EQ(fread(got, 1, sizeof got, stdin), sizeof got);
        CHECK(!memcmp(big, got, sizeof big));
    }
    standard_end(&s);
    pair_talk(s.p, s.at, 40);
    assert_smcd(s.p.fd);
    pair_close(s.p);
}

PAIR_CASE(standard_streams_know_the_end_and_errors) {
    struct standard s = standard_open();
    peer_says(s.p.peer, "x");
    OK(peer_call(P_SHUTDOWN, s.p.peer, SHUT_WR, 0, 0));
    EQ(getchar(), 'x');
    EQ(getchar(), EOF);
    CHECK(feof(stdin) && !ferror(stdin));
    clearerr(stdin);
    EQ(printf("still"), 5);
    EQ(fflush(stdout), 0);
    peer_hears(s.p.peer, "still");
    signal(SIGPIPE, SIG_IGN);
    OK(shutdown(1, SHUT_WR));
    EQ(printf("lost"), 4);
    errno = 0;
    EQ(fflush(stdout), EOF);
    EQ(errno, EPIPE);
    CHECK(ferror(stdout));
    clearerr(stdout);
    __fpurge(stdout);
    standard_end(&s);
    pair_close(s.p);
}

// They are as wide as their first use wants, for good.
static void uses_wide_characters(void *arg) {
    (void)arg;
    wchar_t line[100];
    CHECK(fgetws(line, 100, stdin) && !wcscmp(line, L"a wide line\n"));
    EQ(getwc(stdin), 'w');
    CHECK(wprintf(L"%ls, %d\n", L"wide", 7) == 8);
    EQ(fflush(stdout), 0);
    CHECK(fgetws(line, 100, stdin) && !wcscmp(line, L"ait\n"));
    CHECK(fputws(L"at the end", stdout) >= 0);
    exit(0);
}

PAIR_CASE(standard_streams_may_be_wide) {
    struct standard s = standard_open();
    pid_t pid = child(uses_wide_characters, NULL);
    peer_says(s.p.peer, "a wide line\nwait\n");
    peer_hears(s.p.peer, "wide, 7\nat the end");
    child_succeeds(pid);
    standard_end(&s);
    pair_talk(s.p, s.at, 10);
    pair_close(s.p);
}

static void says_and_exits(void *arg) {
    (void)arg;
    EQ(printf("said at the end"), 15);
    exit(0);
}

PAIR_CASE(exit_flushes_standard_output) {
    struct standard s = standard_open();
    pid_t pid = child(says_and_exits, NULL);
    standard_end(&s);
    close(s.p.fd);
    child_succeeds(pid);
    peer_hears(s.p.peer, "said at the end");
    EQ(peer_call(P_RECV_TO_EOF, s.p.peer, 0, 0, 0), 0);
    OK(peer_call(P_CLOSE, s.p.peer, 0, 0, 0));
}

static void closes_one_by_one(void *arg) {
    const struct standard *s = arg;
    EQ(fclose(stdin), 0);
    EQ(printf("by stdout\n"), 10);
    EQ(fclose(stdout), 0);
    FAILS(write(1, "x", 1), EBADF);
    CHECK(freopen("/dev/null", "w", stderr) == stderr);
    // Nobody has it any more but our parent.
    peer_says(s->p.peer, "");
    CHECK(fputs("to nowhere", stderr) >= 0);
    int fresh = OK(open("/dev/null", O_RDONLY));
    EQ(fresh, 0);
    exit(0);
}

PAIR_CASE(standard_streams_are_closed_and_reopened) {
    struct standard s = standard_open();
    pid_t pid = child(closes_one_by_one, &s);
    child_succeeds(pid);
    peer_hears(s.p.peer, "by stdout\n");
    standard_end(&s);
    pair_talk(s.p, s.at, 10);
    pair_close(s.p);
}

// A shell reads as much as it needs of what a client has sent that sends no more, and starts what reads the rest.
static void becomes_a_shell(void *command) {
    OK(execl("/bin/sh", "sh", "-c", (char *)command, (char *)NULL));
}

static void shell_hands_on(const char *command, enum op end) {
    // More than the kernel's buffer for it, less than a ring.
    enum { REST = 200000 };
    struct standard s = standard_open();
    peer_says(s.p.peer, "first\n");
    EQ(peer_call(P_SEND_PATTERN, s.p.peer, 3, 0, REST), 0);
    if (end == P_SHUTDOWN)
        OK(peer_call(P_SHUTDOWN, s.p.peer, SHUT_WR, 0, 0));
    pid_t pid = child(becomes_a_shell, (void *)command);
    for (int fd = 0; fd < 3; fd++)
        OK(dup2(s.kept[fd], fd));
    peer_hears(s.p.peer, "first is heard\n");
    EQ(peer_call(P_RECV_PATTERN, s.p.peer, 3, 0, REST), 0);
    if (end != P_SHUTDOWN)
        OK(peer_call(P_SHUTDOWN, s.p.peer, SHUT_WR, 0, 0));
    peer_hears(s.p.peer, "and gone\n");
    EQ(peer_call(P_RECV_TO_EOF, s.p.peer, 0, 0, 0), 0);
    child_succeeds(pid);
    OK(peer_call(P_CLOSE, s.p.peer, 0, 0, 0));
}

#define SHELL "read line; echo $line is heard; "

PAIR_CASE(shell_on_a_connection_starts_what_reads_on) { shell_hands_on(SHELL "cat; echo and gone", P_POLL); }

PAIR_CASE(shell_of_a_client_that_has_ended_starts_what_reads_on) {
    shell_hands_on(SHELL "cat; echo and gone", P_SHUTDOWN);
}

PAIR_CASE(shell_of_a_client_that_has_ended_starts_what_knows_of_no_ring) {
    shell_hands_on(SHELL "env -i cat; echo and gone", P_SHUTDOWN);
}

PAIR_CASE(shell_of_a_client_that_has_ended_becomes_another_program) {
    shell_hands_on(SHELL "exec sh -c 'cat; echo and gone'", P_SHUTDOWN);
}
