// stdio on connections: streams made by fdopen, dprintf, and streams whose descriptor is a connection.
#include "peer.h"

#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <wchar.h>

static int fails_with(int code, int value) {
    int saved = errno;
    if (value >= 0 || saved != code)
        check_failed(__FILE__, __LINE__, "fails", "%d, errno %d (%s), not %d", value, saved, strerror(saved),
            code);
    return 0;
}

PAIR_CASE(streams_hold_and_read_ahead_as_much_as_libcs) {
    struct pair p = pair_open();
    int other = OK(dup(p.fd));
    FILE *in = fdopen(p.fd, "r"), *out = fdopen(other, "w");
    CHECK(in && out);
    static char bytes[20000], got[20000];
    pattern(1, 0, bytes, sizeof bytes);
    struct stat about;
    OK(fstat(p.fd, &about));
    int block = about.st_blksize, held, left;
    CHECK(block > 0 && block <= 4096);
    for (int round = 0; round < 3; round++) {
        EQ(fwrite(bytes, 1, block + 100, out), block + 100);
        EQ(peer_recv(p.peer, got, block, MSG_WAITALL), block);
        EQ(peer_call(P_POLL, p.peer, POLLIN, 0, 0), 0);
        EQ(fflush(out), 0);
        EQ(peer_recv(p.peer, got + block, 100, MSG_WAITALL), 100);
        CHECK(!memcmp(bytes, got, block + 100));
        EQ(peer_send(p.peer, bytes, sizeof bytes, 0), sizeof bytes);
        wait_readable(p.fd, sizeof bytes);
        EQ(getc(in), bytes[0] & 255);
        OK(ioctl(p.fd, FIONREAD, &left));
        EQ(left, sizeof bytes - block);
        // What is more than a buffer is read past it, by blocks.
        EQ(fread(got, 1, 3 * block - 1, in), 3 * block - 1);
        CHECK(!memcmp(got, bytes + 1, 3 * block - 1));
        OK(ioctl(p.fd, FIONREAD, &held));
        EQ(left - held, 2 * block);
        EQ(fread(got, 1, sizeof bytes - 3 * block, in), sizeof bytes - 3 * block);
    }
    EQ(fclose(out), 0);
    EQ(fclose(in), 0);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}

PAIR_CASE(streams_read_and_write) {
    struct pair p = pair_open();
    int other = OK(dup(p.fd));
    FILE *in = fdopen(p.fd, "r"), *out = fdopen(other, "w");
    CHECK(in && out && in != out);
    EQ(fileno(in), p.fd);
    EQ(fileno(out), other);
    EQ(fileno_unlocked(out), other);
    char line[200];
    for (int i = 0; i < 30; i++) {
        int n = fprintf(out, "line %d of %s, %.3f\n", i, "many", i / 8.0);
        CHECK(n > 0);
        // Nothing is sent before the buffer is flushed.
        EQ(peer_call(P_POLL, p.peer, POLLIN, 0, 0), 0);
        EQ(fflush(out), 0);
        snprintf(line, sizeof line, "line %d of many, %.3f\n", i, i / 8.0);
        EQ(n, strlen(line));
        peer_hears(p.peer, line);
        peer_says(p.peer, line);
        char got[200];
        CHECK(fgets(got, sizeof got, in) && !strcmp(got, line));
    }
    peer_says(p.peer, "12 0x1f word\nx");
    int a, b;
    EQ(fscanf(in, "%d %x %s", &a, &b, line), 3);
    CHECK(a == 12 && b == 0x1f && !strcmp(line, "word"));
    EQ(getc(in), '\n');
    EQ(ungetc(getc(in), in), 'x');
    EQ(getc_unlocked(in), 'x');
    EQ(fseek(out, 0, SEEK_SET), -1);
    EQ(errno, ESPIPE);
    EQ(ftell(in), -1);
    EQ(errno, ESPIPE);
    // More than any buffer holds.
    size_t n = 300000;
    unsigned char *bytes = malloc(n);
    CHECK(bytes);
    pattern(1, 0, bytes, n);
    peer_begin(P_RECV_PATTERN, p.peer, 1, 0, n);
    EQ(fwrite(bytes, 1, n, out), n);
    EQ(fflush(out), 0);
    EQ(peer_end(), 0);
    peer_begin(P_SEND_PATTERN, p.peer, 2, 0, n);
    EQ(fread(bytes, 1, n, in), n);
    EQ(peer_end(), 0);
    check_pattern(2, 0, bytes, n);
    free(bytes);
    // Descriptor and stream are the same connection.
    CHECK(fputs("from the stream", out) >= 0);
    EQ(fclose(out), 0);
    FAILS(write(other, "x", 1), EBADF);
    peer_hears(p.peer, "from the stream");
    EQ(write(p.fd, "from the fd", 11), 11);
    peer_hears(p.peer, "from the fd");
    peer_says(p.peer, "last");
    OK(peer_call(P_SHUTDOWN, p.peer, SHUT_WR, 0, 0));
    EQ(fread(line, 1, 100, in), 4);
    CHECK(feof(in) && !ferror(in));
    EQ(fclose(in), 0);
    FAILS(read(p.fd, line, 1), EBADF);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
}

PAIR_CASE(stream_for_both_ways) {
    struct pair p = pair_open();
    FILE *stream = fdopen(p.fd, "r+b");
    CHECK(stream);
    char line[100];
    for (int i = 0; i < 20; i++) {
        CHECK(fprintf(stream, "question %d\n", i) > 0);
        EQ(fflush(stream), 0);
        snprintf(line, sizeof line, "question %d\n", i);
        peer_hears(p.peer, line);
        peer_says(p.peer, "answer\n");
        CHECK(fgets(line, sizeof line, stream));
        EQ(strcmp(line, "answer\n"), 0);
    }
    EQ(setvbuf(stream, NULL, _IONBF, 0), 0);
    EQ(fputc('!', stream), '!');
    peer_hears(p.peer, "!");
    EQ(fclose(stream), 0);
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
}

PAIR_CASE(streams_fail_as_the_connection_does) {
    struct pair p = pair_open();
    errno = 0;
    CHECK(!fdopen(p.fd, "nonsense") && errno == EINVAL);
    FILE *stream = fdopen(p.fd, "r+");
    CHECK(stream);
    nonblocking(p.fd, true);
    char buf[10];
    errno = 0;
    EQ(fread(buf, 1, 1, stream), 0);
    EQ(errno, EAGAIN);
    CHECK(ferror(stream));
    clearerr(stream);
    nonblocking(p.fd, false);
    peer_says(p.peer, "x");
    EQ(fgetc(stream), 'x');
    EQ(fflush(stream), 0);
    OK(shutdown(p.fd, SHUT_WR));
    signal(SIGPIPE, SIG_IGN);
    EQ(fputc('a', stream), 'a');
    errno = 0;
    EQ(fflush(stream), EOF);
    EQ(errno, EPIPE);
    CHECK(ferror(stream));
    fclose(stream);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}

PAIR_CASE(streams_may_be_wide) {
    struct pair p = pair_open();
    wchar_t line[10];
    for (int i = 0; i < 12; i++) {
        FILE *stream = fdopen(OK(dup(p.fd)), i % 2 ? "r+" : "w+");
        CHECK(stream);
        peer_says(p.peer, "x\n");
        wait_readable(p.fd, 2);
        bool works;
        switch (i / 2) {
        case 0: works = fgetws(line, 10, stream) && line[0] == L'x'; break;
        case 1: works = fgetwc(stream) == L'x' && fgetwc(stream) == L'\n'; break;
        case 2: works = ungetwc(L'y', stream) != WEOF && fgetwc(stream) == L'y' && fgetwc(stream) == L'x'; break;
        case 3: works = fputwc(L'z', stream) != WEOF; break;
        case 4: works = fputws(L"z", stream) >= 0; break;
        default: works = fwide(stream, 1) > 0 && fwprintf(stream, L"z%d", i) > 0;
        }
        CHECK(works);
        fclose(stream);
        // What the stream had not read, and what it has written.
        char rest[100];
        while (recv(p.fd, rest, sizeof rest, MSG_DONTWAIT) > 0)
            continue;
        while (peer_recv(p.peer, rest, sizeof rest, MSG_DONTWAIT) > 0)
            continue;
    }
    pair_talk(p, 0, 10);
    pair_close(p);
}

static void prints_and_exits(void *arg) {
    struct pair *p = arg;
    FILE *out = fdopen(p->fd, "w");
    CHECK(out && fputs("said at the end", out) >= 0);
    exit(0);
}

PAIR_CASE(exit_flushes_streams) {
    struct pair p = pair_open();
    pid_t pid = child(prints_and_exits, &p);
    close(p.fd);
    child_succeeds(pid);
    peer_hears(p.peer, "said at the end");
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
}

static int print(int fd, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int n = vdprintf(fd, format, list);
    va_end(list);
    return n;
}

#define FORMAT "%d %s %.3f %c %lld %g %g %g %g %g %g %g %g|"
#define VALUES 1, "two", 3.5, '4', 5LL, .1, .2, .3, .4, .5, .6, .7, .8
#define PRINTED "1 two 3.500 4 5 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8|"

PAIR_CASE(dprintf_and_vdprintf) {
    struct pair p = pair_open();
    for (int i = 0; i < 10; i++) {
        EQ(dprintf(p.fd, FORMAT, VALUES), strlen(PRINTED));
        peer_hears(p.peer, PRINTED);
        EQ(print(p.fd, FORMAT, VALUES), strlen(PRINTED));
        peer_hears(p.peer, PRINTED);
        errno = 7;
        EQ(dprintf(p.fd, "%s", ""), 0);
        EQ(errno, 7);
        peer_says(p.peer, "ok");
        char got[2];
        EQ(recv(p.fd, got, 2, MSG_WAITALL), 2);
    }
    peer_begin(P_RECV_TO_EOF, p.peer, 0, 0, 0);
    OK(shutdown(p.fd, SHUT_WR));
    signal(SIGPIPE, SIG_IGN);
    errno = 0;
    fails_with(EPIPE, dprintf(p.fd, "lost %d", 1));
    EQ(peer_end(), 0);
    pair_close(p);
    errno = 0;
    fails_with(EBADF, dprintf(p.fd, "closed"));
}

PAIR_CASE(reopened_stream_leaves_the_connection) {
    struct pair p = pair_open();
    FILE *stream = fdopen(p.fd, "w");
    CHECK(stream && fputs("before", stream) >= 0);
    CHECK(freopen("/dev/null", "w", stream) == stream);
    EQ(fileno(stream), p.fd);
    CHECK(fputs("after", stream) >= 0 && !fflush(stream));
    FAILS(send(p.fd, "x", 1, 0), ENOTSOCK);
    peer_hears(p.peer, "before");
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
    EQ(fclose(stream), 0);
    // The number is clean.
    struct pair q = pair_open();
    peer_says(q.peer, "ok");
    char got[2];
    EQ(recv(q.fd, got, 2, MSG_WAITALL), 2);
    pair_close(q);
}

CASE(fresh_connection_becomes_stdin_and_stdout) {
    // A server that inetd would start, without inetd and without exec.
    uint16_t port;
    int listener = listen_here(&port), client = connect_to(port), server = OK(accept(listener, NULL, NULL));
    int in = OK(dup(0)), out = OK(dup(1));
    fflush(stdout);
    OK(dup2(server, 0));
    OK(dup2(server, 1));
    close(server);
    for (int i = 0; i < 20; i++) {
        char line[100], want[100];
        snprintf(want, sizeof want, "request %d\n", i);
        EQ(send(client, want, strlen(want), 0), strlen(want));
        CHECK(fgets(line, sizeof line, stdin) && !strcmp(line, want));
        printf("got %s", line);
        EQ(fflush(stdout), 0);
        snprintf(want, sizeof want, "got request %d\n", i);
        EQ(recv(client, line, strlen(want), MSG_WAITALL), strlen(want));
        CHECK(!memcmp(line, want, strlen(want)));
    }
    EQ(fclose(stdin), 0);
    OK(dup2(out, 1));
    recv_to_eof(client, 0, 0, 0);
    (void)in;
}

// A program that was started without its first numbers: whatever connection gets them, libc's streams are about it.
static void reads_stdin(void *arg) {
    bool client = *(bool *)arg;
    uint16_t port;
    int listener = listen_here(&port), far = -1, near;
    close(0);
    if (client) {
        near = connect_to(port);
        far = OK(accept(listener, NULL, NULL));
    } else {
        // The number is taken while the client's socket gets its own.
        int place = OK(open("/dev/null", O_RDONLY));
        far = connect_to(port);
        close(place);
        near = OK(accept(listener, NULL, NULL));
    }
    EQ(near, 0);
    for (int i = 0; i < 20; i++) {
        char line[100], want[100];
        snprintf(want, sizeof want, "line %d\n", i);
        EQ(send(far, want, strlen(want), 0), strlen(want));
        CHECK(fgets(line, sizeof line, stdin) && !strcmp(line, want));
        EQ(send(near, want, strlen(want), 0), strlen(want));
        EQ(recv(far, line, strlen(want), MSG_WAITALL), strlen(want));
        CHECK(!memcmp(line, want, strlen(want)));
    }
}

CASE(connection_that_is_made_as_stdin) {
    for (int client = 0; client < 2; client++) {
        bool is_client = client;
        child_succeeds(child(reads_stdin, &is_client));
    }
}

static volatile bool flushing;

static void *flushes_everything(void *arg) {
    (void)arg;
    while (flushing)
        EQ(fflush(NULL), 0);
    return NULL;
}

PAIR_CASE(forks_while_streams_are_flushed) {
    struct pair p = pair_open();
    pthread_t thread;
    FILE *out = fdopen(p.fd, "w");
    CHECK(out);
    peer_begin(P_RECV_TO_EOF, p.peer, 1, 0, 150 * 100);
    flushing = true;
    EQ(pthread_create(&thread, NULL, flushes_everything, NULL), 0);
    for (int i = 0; i < 150; i++) {
        char bytes[100];
        pattern(1, i * sizeof bytes, bytes, sizeof bytes);
        EQ(fwrite(bytes, 1, sizeof bytes, out), sizeof bytes);
        if (i % 3)
            continue;
        pid_t pid = OK(fork());
        if (pid == 0)
            _exit(0);
        child_succeeds(pid);
    }
    flushing = false;
    EQ(pthread_join(thread, NULL), 0);
    EQ(fclose(out), 0);
    EQ(peer_end(), 0);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}
