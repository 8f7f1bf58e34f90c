// One stream after the other, and servers that fork for each.
#include "storm.h"

static int connect_once(void) {
    socklen_t len;
    struct sockaddr_storage to = address_of("127.0.0.1", next.port, &len);
    int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(fd, (struct sockaddr *)&to, len) == 0)
        return fd;
    CHECK(errno == ECONNREFUSED || errno == ECONNRESET);
    close(fd);
    return -1;
}

void talk_singly(void) {
    while (!table->stop) {
        int fd = table->pause ? -1 : connect_once();
        if (fd < 0) {
            poll(NULL, 0, 1);
            continue;
        }
        struct end end = {fd, new_stream(next.service), CLIENT, true, true};
        if (say_name(&end))
            run(&end);
        else
            close(fd);
    }
    end_well();
}

static void without_listener(int keep) {
    (void)keep;
    close(next.listener);
    next.listener = -1;
}

void serve_by_children(void) {
    while (!stopping()) {
        struct pollfd f = {.fd = next.listener, .events = POLLIN};
        int n = ppoll(&f, 1, NULL, &wait_mask);
        CHECK(n >= 0 || errno == EINTR);
        int fd = n > 0 ? accept4(next.listener, NULL, NULL, SOCK_CLOEXEC) : -1;
        if (fd >= 0)
            accept_by_child(fd, without_listener);
        else
            CHECK(n < 0 || errno == EAGAIN || errno == ECONNABORTED);
    }
    end_well();
}
