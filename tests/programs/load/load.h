// Roles of the load program.
#ifndef LOAD_H
#define LOAD_H
#include "check.h"

void serve(uint16_t port, bool reuseport);
void cycle(uint16_t port, uint64_t seed, uint32_t most);
void many(uint16_t port, int count, size_t length, size_t taken);
void idle(uint16_t port, const char *call);
void unread(void);
void blocked(uint16_t port);
void answer_briefs(const char *name, long count);
void ask_briefs(const char *name, uint16_t port, long count);
void interrupted(const char *call, long rounds);
void timed(const char *call, long rounds);
void ignored(const char *call, long rounds);
void sink(uint16_t port);
void source(uint16_t port, uint64_t n);

#endif
