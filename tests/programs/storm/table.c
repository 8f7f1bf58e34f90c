// The table, chance, and what a process says about itself.
#include "storm.h"

#include <sys/mman.h>

struct table *table;
struct process *me;
uint64_t my_number;

void open_table(const char *path) {
    int fd = OK(open(path, O_RDWR | O_CLOEXEC));
    table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(table != MAP_FAILED);
    close(fd);
}

uint64_t new_number(void) {
    uint64_t number = ++table->processes;
    CHECK(number < PROCESSES);
    table->process[number].maker = my_number;
    return number;
}

void become(uint64_t number, enum role role, uint64_t busy) {
    my_number = number;
    me = &table->process[number];
    me->busy = busy;
    me->role = role;
    me->pid = getpid();
    // Not the same again after an exec.
    seed_chance(table->stream[0].seed * 1000003 + number + (me->steps << 20));
}

void end_well(void) {
    me->ended = 1;
    exit(0);
}

static uint64_t state;

void seed_chance(uint64_t seed) {
    state = seed * 0x9e3779b97f4a7c15u + 1;
    draw(1);
}

uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}
