// Programs made of cases. A case is a function. `PROGRAM --list` prints the cases, `PROGRAM NAME [VARIANT]`
// runs one.
#ifndef CASE_H
#define CASE_H
#include "check.h"

enum kind {
    SINGLE, // run once
    PAIR,   // run in every variant of `struct variant`
    REMOTE, // only where the peer is another process
};

struct test_case {
    const char *name;
    enum kind kind;
    void (*run)(void);
    struct test_case *next;
};

void register_case(struct test_case *c);

#define DEFINE_CASE(k, n) \
    static void n(void); \
    static struct test_case case_##n = {.name = #n, .kind = k, .run = n}; \
    __attribute__((constructor)) static void register_##n(void) { register_case(&case_##n); } \
    static void n(void)

#define CASE(n) DEFINE_CASE(SINGLE, n)
#define PAIR_CASE(n) DEFINE_CASE(PAIR, n)
#define REMOTE_CASE(n) DEFINE_CASE(REMOTE, n)

// How `pair_open` makes connections.
struct variant {
    bool remote; // the peer's end is in another process; otherwise in a thread of this one
    bool client; // our end is the one that connected
    bool warm;   // messages went both ways before, and the harness saw SMC-D
};
extern struct variant variant;

#endif
