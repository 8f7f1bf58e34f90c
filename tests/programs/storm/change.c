// How a stream's process changes: forked children and next programs.
#include "storm.h"

struct next next;

void hand_to_child(struct end *end, enum kind kind, void (*alone)(int keep)) {
    if (kind == SPLIT && (end->stream->window > 0 || !end->receives || !end->sends))
        kind = TO_CHILD;
    uint64_t number = new_number();
    join(end->stream, end->side, number);
    int held[2] = {-1, -1};
    if (kind == HELD || kind == CHILD_EXEC)
        OK(pipe2(held, O_CLOEXEC));
    table->forks++;
    char byte;
    if (OK(fork()) == 0) {
        become(number, ROLE_CHILD, 0);
        alone(end->fd);
        next.role = "child";
        next.protected = next.resumes = false;
        if (kind == SPLIT)
            end->sends = false;
        if (kind == HELD)
            close(held[0]);
        if (kind == CHILD_EXEC) {
            // A connection that both hold may be refused to be taken along (docs/differences.md).
            close(held[1]);
            EQ(TEMP_FAILURE_RETRY(read(held[0], &byte, 1)), 0);
            close(held[0]);
            replace(end, 1, next.role);
        }
        run(end);
        end_well();
    }
    if (kind == SPLIT) {
        end->receives = false;
        return;
    }
    if (kind == HELD) {
        close(held[1]);
        EQ(TEMP_FAILURE_RETRY(read(held[0], &byte, 1)), 0);
        close(held[0]);
    }
    close(end->fd);
    end->fd = -1;
    if (kind == CHILD_EXEC) {
        close(held[0]);
        close(held[1]);
    }
}

void accept_by_child(int fd, void (*alone)(int keep)) {
    uint64_t number = new_number();
    table->forks++;
    if (OK(fork()) == 0) {
        become(number, ROLE_CHILD, 0);
        alone(fd);
        next.role = "child";
        next.protected = next.resumes = false;
        struct end end = {fd, NULL, SERVER, true, true};
        enum result result;
        me->busy++;
        bool heard = hear_name(&end, 0, &result);
        me->busy--;
        if (heard)
            run(&end);
        end_well();
    }
    close(fd);
}

void has_resumed(void) {
    me->busy -= next.resumes;
    next.resumes = false;
}

static void cross_exec(int fd, bool on) {
    if (fd >= 0)
        OK(fcntl(fd, F_SETFD, on ? 0 : FD_CLOEXEC));
}

void replace(struct end *ends, int count, const char *role) {
    if (next.protected)
        return;
    char text[8][24], (*each)[64] = malloc(count * sizeof *each);
    const char **argv = malloc((count + 16) * sizeof *argv);
    CHECK(each && argv);
    int n = 0;
    snprintf(text[0], sizeof text[0], "%d", next.port);
    snprintf(text[1], sizeof text[1], "%d", (int)next.service);
    snprintf(text[2], sizeof text[2], "%d", next.listener);
    snprintf(text[3], sizeof text[3], "%llu", (unsigned long long)my_number);
    argv[n++] = "storm";
    argv[n++] = role;
    argv[n++] = next.path;
    for (int i = 0; i < 4; i++)
        argv[n++] = text[i];
    for (int i = 0; i < count; i++) {
        long stream = ends[i].stream ? ends[i].stream - table->stream : 0;
        snprintf(each[i], sizeof each[i], "%d:%ld:%d:%d:%d", ends[i].fd, stream, ends[i].side, ends[i].receives,
            ends[i].sends);
        argv[n++] = each[i];
        cross_exec(ends[i].fd, true);
    }
    argv[n] = NULL;
    cross_exec(next.listener, true);
    table->execs++;
    me->steps++;
    execv("/proc/self/exe", (char **)argv);
    // Bytes that nobody could send by TCP (docs/differences.md).
    EQ(errno, EBUSY);
    table->refused++;
    for (int i = 0; i < count; i++)
        cross_exec(ends[i].fd, false);
    cross_exec(next.listener, false);
    free(each);
    free(argv);
}
