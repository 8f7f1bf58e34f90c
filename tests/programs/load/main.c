// One program for tests that are about whole processes: a server, and clients of several kinds.
//
//   load server [PORT [reuseport]]   echo server on one epoll set; "stats" on its input asks for counts
//   load cycle PORT SEED [MOST]      connects, has up to MOST messages echoed, closes, for ever; survives the server's death
//   load many PORT COUNT [LENGTH [TAKEN]]   COUNT connections at once; talks over all of them at each input line, and
//                                    takes so many bytes of memory amid the second round
//   load idle PORT CALL              one connection; sleeps in CALL on it until the server is gone
//   load unread / load blocked PORT  a reader that stops, and a sender that counts how often it wakes meanwhile
//   load answer WAY COUNT / load ask WAY PORT COUNT   COUNT connections with one request each, whose ends wait by WAY
//                                    (blocks, poll, epoll) and count how often they sleep
//   load interrupted CALL ROUNDS     counts waits in CALL (accept, recv, poll, epoll_wait) that a signal has not ended
//   load ignored CALL ROUNDS         counts waits in CALL (poll, epoll) that a signal without a handler has ended
//   load timed CALL ROUNDS           tells how long waits in CALL (poll, epoll) take that have a time limit
//   load sink [PORT] / load source PORT BYTES   BYTES each way at once, checked byte by byte
#include "load.h"

#include <sys/resource.h>

int main(int argc, char **argv) {
    // Ten thousand connections need their fds.
    struct rlimit limit;
    OK(getrlimit(RLIMIT_NOFILE, &limit));
    limit.rlim_cur = limit.rlim_max;
    OK(setrlimit(RLIMIT_NOFILE, &limit));
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, NULL, _IOLBF, 0);
    const char *role = argc > 1 ? argv[1] : "";
    long a = argc > 2 ? atol(argv[2]) : 0, b = argc > 3 ? atol(argv[3]) : 0;
    if (!strcmp(role, "server"))
        serve(a, argc > 3 && !strcmp(argv[3], "reuseport"));
    else if (!strcmp(role, "cycle"))
        cycle(a, b, argc > 4 ? atol(argv[4]) : 12);
    else if (!strcmp(role, "many"))
        many(a, b, argc > 4 ? atol(argv[4]) : 100, argc > 5 ? atol(argv[5]) : 0);
    else if (!strcmp(role, "idle"))
        idle(a, argc > 3 ? argv[3] : "");
    else if (!strcmp(role, "unread"))
        unread();
    else if (!strcmp(role, "blocked"))
        blocked(a);
    else if (!strcmp(role, "answer") && argc == 4)
        answer_briefs(argv[2], b);
    else if (!strcmp(role, "ask") && argc == 5)
        ask_briefs(argv[2], b, atol(argv[4]));
    else if (!strcmp(role, "interrupted"))
        interrupted(argc > 2 ? argv[2] : "", b);
    else if (!strcmp(role, "ignored"))
        ignored(argc > 2 ? argv[2] : "", b);
    else if (!strcmp(role, "timed"))
        timed(argc > 2 ? argv[2] : "", b);
    else if (!strcmp(role, "sink"))
        sink(a);
    else if (!strcmp(role, "source"))
        source(a, b);
    else
        return 2;
    return 0;
}
