// Streams to and fro between machines of which any may die, stand still or lose its memory at any moment. A stream that ends early does
// so by an error that TCP has for that; a byte that comes is the one that was sent.
#include "guests.h"

#include <sys/mman.h>

// What the harness reads (tests/tests/vm/long.rs).
struct counts {
    _Atomic uint32_t whole, ended, steps;
};

static struct counts *counts;
static volatile sig_atomic_t is_over;

static void on_term(int number) {
    (void)number;
    is_over = 1;
}

// Neither end waits for a machine that is gone for longer than that: some ten seconds.
static void be_impatient(int fd) {
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 3);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 7);
    set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 10000);
}

static bool is_an_end(int code) {
    switch (code) {
    case ECONNRESET:
    case ECONNREFUSED:
    case ECONNABORTED:
    case EPIPE:
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
        return true;
    default:
        return false;
    }
}

// The number of bytes, or 0 at an end.
static size_t or_end(ssize_t n) {
    if (n < 0)
        CHECK(is_an_end(errno));
    return n > 0 ? n : 0;
}

static void *echo(void *arg) {
    int fd = (int)(intptr_t)arg;
    char buf[PIECE];
    uint64_t seed, at = 0;
    be_impatient(fd);
    if (or_end(recv(fd, &seed, sizeof seed, MSG_WAITALL)) == sizeof seed)
        for (size_t n; (n = or_end(recv(fd, buf, sizeof buf, 0))) > 0; at += n) {
            check_pattern(seed, at, buf, n);
            size_t sent = 0;
            for (size_t more; sent < n && (more = or_end(send(fd, buf + sent, n - sent, 0))) > 0;)
                sent += more;
            if (sent < n)
                break;
        }
    close(fd);
    return NULL;
}

void serve_churn(const char *address, uint16_t port) {
    serve_by_threads(address, port, echo);
}

// Whether there is a connection. A machine that is gone does not refuse it.
static bool reach(int fd, const char *address, uint16_t port) {
    nonblocking(fd, true);
    if (connect_at(fd, address, port) < 0) {
        if (errno != EINPROGRESS) {
            CHECK(is_an_end(errno));
            return false;
        }
        struct pollfd made = {.fd = fd, .events = POLLOUT};
        if (poll(&made, 1, 10000) != 1)
            return false;
        int code = 0;
        socklen_t len = sizeof code;
        OK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &len));
        if (code != 0) {
            CHECK(is_an_end(code));
            return false;
        }
    }
    return true;
}

// Whether more may follow: waits for one of these, and not for ever.
static bool waits_for(int fd, short events) {
    struct pollfd p = {.fd = fd, .events = events};
    int n = TEMP_FAILURE_RETRY(poll(&p, 1, 60000));
    // TCP itself gives up before.
    CHECK(n == 1);
    return true;
}

static bool exchange(int fd, uint64_t seed, uint64_t end, bool blocks) {
    char buf[PIECE];
    if (or_end(send(fd, &seed, sizeof seed, 0)) != sizeof seed)
        return false;
    nonblocking(fd, !blocks);
    for (uint64_t sent = 0, got = 0; got < end; counts->steps++) {
        if (sent < end && sent - got < 2 * PIECE) {
            size_t want = piece_of(seed, sent, end);
            pattern(seed, sent, buf, want);
            ssize_t n = send(fd, buf, want, blocks ? MSG_DONTWAIT : 0);
            if (n < 0 && errno != EAGAIN)
                return or_end(n);
            sent += n > 0 ? n : 0;
            if (n < 0)
                waits_for(fd, POLLIN | POLLOUT);
        }
        bool must = sent == end || sent - got >= 2 * PIECE;
        if (!blocks && must)
            waits_for(fd, POLLIN);
        ssize_t n = recv(fd, buf, sizeof buf, blocks && must ? 0 : MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN))
            return or_end(n);
        if (n > 0) {
            check_pattern(seed, got, buf, n);
            got += n;
        }
    }
    return true;
}

void churn(const char *path, char **servers, int count) {
    int file = OK(open(path, O_RDWR | O_CREAT, 0600));
    OK(ftruncate(file, sizeof *counts));
    counts = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(counts != MAP_FAILED);
    struct sigaction action = {.sa_handler = on_term, .sa_flags = SA_RESTART};
    OK(sigaction(SIGTERM, &action, NULL));
    srand(getpid());
    for (uint64_t number = 1; !is_over; number++) {
        char address[64];
        int port;
        EQ(sscanf(servers[rand() % count], "%63[^:]:%d", address, &port), 2);
        int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
        be_impatient(fd);
        set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
        uint64_t end = rand() % 4 ? 1 + rand() % 60000 : rand() % 1000000;
        bool is_whole = reach(fd, address, port) && exchange(fd, (uint64_t)getpid() << 32 | number, end, rand() % 2);
        if (is_whole)
            counts->whole++;
        else
            counts->ended++;
        counts->steps++;
        close(fd);
        // The machines have other things to do, and a server that is not there is not asked all the time.
        poll(NULL, 0, is_whole ? 20 : 50);
    }
    printf("whole %u ended %u\n", counts->whole, counts->ended);
}
