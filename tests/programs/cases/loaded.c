// Libraries that come later, or before this one: plugins, the resolver and name services, constructors.
#include "peer.h"

#include <arpa/nameser.h>
#include <dlfcn.h>
#include <netdb.h>
#include <pwd.h>
#include <resolv.h>
#include <stdlib.h>

// --- a constructor of the program: what it opens is used by main

static int constructed[2] = {-1, -1};

// Of the libcs glibc alone passes main's arguments to constructors.
__attribute__((constructor(101))) static void before_main(void) {
    char words[4096];
    int fd = open("/proc/self/cmdline", O_RDONLY);
    ssize_t n = read(fd, words, sizeof words - 1);
    close(fd);
    CHECK(n > 0);
    words[n] = 0;
    const char *first = words + strlen(words) + 1;
    if (first < words + n && !strcmp(first, "connection_of_a_constructor"))
        connect_here(&constructed[0], &constructed[1]);
}

static void both_ways(int a, int b, int rounds) {
    for (int i = 0; i < rounds; i++) {
        send_all(a, 1, i * 700, 700);
        recv_all(b, 1, i * 700, 700);
        send_all(b, 2, i * 700, 700);
        recv_all(a, 2, i * 700, 700);
    }
}

CASE(connection_of_a_constructor) {
    CHECK(constructed[0] >= 0);
    both_ways(constructed[0], constructed[1], 30);
    assert_smcd(constructed[0]);
    OK(shutdown(constructed[0], SHUT_WR));
    recv_to_eof(constructed[1], 0, 0, 0);
}

static int at_exit_fd = -1;

static void speak_at_exit(void) {
    EQ(send(at_exit_fd, "last words", 10, 0), 10);
}

__attribute__((destructor)) static void after_main(void) {
    if (at_exit_fd >= 0)
        EQ(send(at_exit_fd, " and more", 9, 0), 9);
}

static void child_exits(void *arg) {
    at_exit_fd = *(int *)arg;
    atexit(speak_at_exit);
    exit(0);
}

PAIR_CASE(destructors_and_exit_handlers_send) {
    struct pair p = pair_open();
    child_succeeds(child(child_exits, &p.fd));
    peer_hears(p.peer, "last words and more");
    OK(close(p.fd));
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}

// --- functions found by name

PAIR_CASE(functions_found_by_dlsym) {
    struct pair p = pair_open();
    ssize_t (*send_by)(int, const void *, size_t, int) = dlsym(RTLD_DEFAULT, "send");
    ssize_t (*read_by)(int, void *, size_t) = dlsym(RTLD_DEFAULT, "read");
    int (*close_by)(int) = dlsym(RTLD_DEFAULT, "close");
    void *program = dlopen(NULL, RTLD_NOW);
    int (*poll_by)(struct pollfd *, nfds_t, int) = dlsym(program, "poll");
    CHECK(send_by && read_by && close_by && poll_by);
    EQ(send_by(p.fd, "hello", 5, 0), 5);
    peer_hears(p.peer, "hello");
    peer_says(p.peer, "there");
    struct pollfd event = {.fd = p.fd, .events = POLLIN};
    EQ(poll_by(&event, 1, 20000), 1);
    char buf[8];
    EQ(read_by(p.fd, buf, sizeof buf), 5);
    CHECK(!memcmp(buf, "there", 5));
    OK(close_by(p.fd));
    EQ(peer_call(P_RECV_TO_EOF, p.peer, 0, 0, 0), 0);
    OK(peer_call(P_CLOSE, p.peer, 0, 0, 0));
}

// --- the resolver, by TCP; musl is told of servers by files alone

#ifdef __GLIBC__
static size_t answer(const unsigned char *query, size_t n, unsigned char *out) {
    // The question as it came, and one address for it.
    memcpy(out, query, n);
    HEADER *head = (HEADER *)out;
    head->qr = 1;
    head->ra = 1;
    head->rcode = NOERROR;
    head->arcount = 0;
    size_t end = sizeof(HEADER);
    while (query[end])
        end += query[end] + 1;
    end += 1 + 4;
    bool is_a = query[end - 3] == 1;
    head->ancount = htons(is_a);
    if (is_a) {
        static const unsigned char record[] = {0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 77};
        memcpy(out + end, record, sizeof record);
        end += sizeof record;
    }
    return end;
}

static void *serve_names(void *arg) {
    int listener = (int)(intptr_t)arg;
    for (int fd; (fd = accept(listener, NULL, NULL)) >= 0;) {
        unsigned char len[2], query[600], out[700];
        while (recv(fd, len, 2, MSG_WAITALL) == 2) {
            size_t n = len[0] << 8 | len[1];
            CHECK(n < sizeof query);
            EQ(recv(fd, query, n, MSG_WAITALL), n);
            n = answer(query, n, out + 2);
            out[0] = n >> 8;
            out[1] = n;
            EQ(send(fd, out, n + 2, MSG_NOSIGNAL), n + 2);
        }
        close(fd);
    }
    return NULL;
}

static void finds_address(const char *name) {
    struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found;
    EQ(getaddrinfo(name, "80", &hints, &found), 0);
    struct sockaddr_in *at = (struct sockaddr_in *)found->ai_addr;
    EQ(at->sin_addr.s_addr, inet_addr("192.0.2.77"));
    EQ(at->sin_port, htons(80));
    freeaddrinfo(found);
}

CASE(resolver_by_tcp) {
    uint16_t port;
    int listener = listen_here(&port);
    pthread_t server;
    EQ(pthread_create(&server, NULL, serve_names, (void *)(intptr_t)listener), 0);
    EQ(res_init(), 0);
    _res.options |= RES_USEVC | RES_STAYOPEN;
    _res.options &= ~(RES_DNSRCH | RES_DEFNAMES);
    _res.nscount = 1;
    _res.nsaddr_list[0] = (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    for (int i = 0; i < 40; i++) {
        char name[64];
        snprintf(name, sizeof name, "host%d.example.", i);
        finds_address(name);
        unsigned char out[600];
        CHECK(res_query(name, ns_c_in, ns_t_a, out, sizeof out) > 0);
        // Connections of the program come and go beside the resolver's.
        int a, b;
        connect_here(&a, &b);
        both_ways(a, b, 3);
        close(a);
        close(b);
    }
    res_nclose(&_res);
    OK(shutdown(listener, SHUT_RDWR));
    EQ(pthread_join(server, NULL), 0);
    close(listener);
}
#endif

CASE(name_services) {
    struct addrinfo *found;
    EQ(getaddrinfo("localhost", NULL, NULL, &found), 0);
    freeaddrinfo(found);
    CHECK(getpwnam("root"));
    CHECK(!getpwnam("nobody has this name"));
    CHECK(getprotobyname("tcp"));
    int a, b;
    connect_here(&a, &b);
    warm_here(a, b);
    CHECK(getpwuid(0));
    char host[200], service[50];
    struct sockaddr_storage peer;
    socklen_t len = sizeof peer;
    OK(getpeername(a, (struct sockaddr *)&peer, &len));
    EQ(getnameinfo((struct sockaddr *)&peer, len, host, sizeof host, service, sizeof service, NI_NUMERICSERV), 0);
    EQ(atoi(service), peer_port(a));
    both_ways(a, b, 10);
    close(a);
    close(b);
}
