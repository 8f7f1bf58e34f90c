// Roles of the program for virtual machines.
#ifndef GUESTS_H
#define GUESTS_H
#include "check.h"

enum { PIECE = 16384 };

// One end of an exchange: what it sends comes back.
struct talk {
    int fd;
    uint64_t seed, sent, got, end;
};

// A thread for each connection, whose number it gets.
void serve_by_threads(const char *address, uint16_t port, void *(*each)(void *));
void serve_blocking(const char *address, uint16_t port);
void serve_events(const char *address, uint16_t port);
void talk_blocking(struct talk *all, int count);
// `stalls`: now and then it sends all that finds room before it reads, and stands still for some 20 ms.
void talk_events(struct talk *all, int count, bool stalls);
// An echo server whose clients may be gone at any moment.
void serve_churn(const char *address, uint16_t port);
// Streams to these until SIGTERM; the counts are in the file.
void churn(const char *path, char **servers, int count);
// So many short messages, each with its answer.
void ping(const char *address, uint16_t port, uint64_t count);
void sink(const char *address, uint16_t port);
void source(const char *address, uint16_t port, uint64_t n);

// A listener, which may come again at once.
int listener_at(const char *address, uint16_t port);
// A connection, whose server has been told the seed.
int connection(const char *address, uint16_t port, uint64_t seed);
// The length of the next piece from here, which both ends can tell.
size_t piece_of(uint64_t seed, uint64_t at, uint64_t end);
// Stays, with everything open, until SIGTERM comes.
void rest(void);

#endif
