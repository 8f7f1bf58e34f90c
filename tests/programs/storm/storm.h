// Streams between processes that are killed, stopped, forked and replaced at any moment.
//
// Where a stream stands lies in a table that all processes map, so that whoever goes on with it knows, be it a forked
// child or the next program. The harness reads the table (tests/src/storm.rs has its layout, too).
#ifndef STORM_H
#define STORM_H
#include "check.h"

#include <stdatomic.h>

// --- the table

enum { PROCESSES = 1 << 17, STREAMS = 1 << 18, HOLDERS = 12, PLANS = 2 };
enum { CLIENT, SERVER };

// How a stream's process changes.
enum kind {
    NOTHING,
    TO_CHILD,   // A forked child goes on, the parent closes.
    HELD,       // The same, and the parent closes only when the child has ended.
    SPLIT,      // The child receives, the parent sends.
    EXEC,       // The next program goes on.
    CHILD_EXEC, // A child's next program goes on.
    KINDS
};

enum outcome { OPEN, WHOLE, BROKEN };

// One process. The harness writes `killed`.
struct process {
    _Atomic uint64_t pid, role, killed, ended, busy, steps;
    uint64_t maker; // The process that was about to make it; 0: the harness, or not said yet.
    uint64_t spare;
};

// One direction. The sender writes the first half, the receiver the second.
struct way {
    uint64_t total, sent, sent_hash, shut;
    uint64_t received, received_hash, ended;
};

struct stream {
    uint64_t seed;
    // 0: each end sends at will; else the client is ahead of what it received by this much, the server never.
    uint64_t window;
    uint64_t service; // Which server.
    _Atomic uint64_t holder_count;
    uint32_t holders[HOLDERS]; // The top bit: the server's.
    // By side.
    _Atomic uint64_t outcome[2], parts[2];
    uint64_t why[2];
    struct way way[2];
    struct {
        uint32_t kind, at;
    } plan[2][PLANS];
    uint64_t planned[2];
    // An exec could not take the end along, as others held it, or were killed when they did (docs/differences.md).
    _Atomic uint64_t lost;
};

// More than a ring holds without its far part.
enum { FULL = 1 << 20 };

struct table {
    // `full`: sends that left more than FULL bytes unread.
    _Atomic uint64_t stop, pause, processes, streams, forks, execs, refused, full;
    char fill[4096 - 8 * 8];
    struct process process[PROCESSES];
    struct stream stream[STREAMS];
};

extern struct table *table;
// Our process and its number there.
extern struct process *me;
extern uint64_t my_number;

enum role { ROLE_ROOT = 1, ROLE_WORKER, ROLE_CLIENT, ROLE_CHILD, PROTECTED = 16 };

void open_table(const char *path);
// A number for a process that is about to be made.
uint64_t new_number(void);
// `busy`: as if it had so many streams in its hands already.
void become(uint64_t number, enum role role, uint64_t busy);
_Noreturn void end_well(void);

// --- chance

void seed_chance(uint64_t seed);
uint32_t draw(uint32_t below);

// --- a stream's end in this process

struct end {
    int fd;
    struct stream *stream; // NULL: the server has not read which one.
    int side;
    bool receives, sends;
};

enum result { AGAIN, DONE };

struct stream *new_stream(uint64_t service);
// A process of this number holds an end of it from now on.
void join(struct stream *stream, int side, uint64_t number);
// Sends and receives without sleeping, some rounds or all that is possible.
enum result pump(struct end *end, bool all);
bool wants_in(const struct end *end);
// How much may be sent now.
size_t allowed(const struct end *end);
// Reads which stream it is; false: not yet, or ended (DONE in *result).
bool hear_name(struct end *end, int flags, enum result *result);
bool say_name(struct end *end);
// The change of process that is due at this point.
enum kind due(const struct end *end);

// Runs a stream to its end, or hands it on. Closes the fd.
void run(struct end *end);

// --- roles; `next` says how an exec goes on

struct next {
    const char *role, *path;
    uint16_t port;
    uint64_t service;
    int listener;
    bool protected;
    bool resumes; // An exec's: it counts as busy until its streams do.
};
extern struct next next;

// Several streams on one epoll set; `ends` are those that an earlier program had.
void serve_many(struct end *ends, int count);
void talk_many(struct end *ends, int count);
void serve_by_children(void);
void talk_singly(void);
_Noreturn void serve(uint16_t port);
// Becomes the next program with these ends; returns where that was refused.
void replace(struct end *ends, int count, const char *role);
// A child that has this end alone goes on. Says what it closes of the parent's by `alone`.
void hand_to_child(struct end *end, enum kind kind, void (*alone)(int keep));
// A child goes on with a connection that was just accepted.
void accept_by_child(int fd, void (*alone)(int keep));
// The streams that came by exec are in our hands.
void has_resumed(void);
bool stopping(void);
// For waits: the mask with which a request to stop comes through.
extern sigset_t wait_mask;

#endif
