// One end of a stream: every byte is checked at its place, and both ends' hashes at its end.
#include "storm.h"

static uint64_t hash(uint64_t h, const unsigned char *p, size_t n) {
    for (; n > 0; p++, n--)
        h = (h ^ *p) * 0x9fb21c651e98df25u;
    return h;
}

static uint32_t size(void) {
    // Some fill the far part of a ring while their reader is stopped.
    if (draw(32) == 0)
        return 3000000 + draw(6000000);
    switch (draw(8)) {
    case 0:
        return draw(2);
    case 1:
        return 500000 + draw(2000000);
    case 2:
    case 3:
    case 4:
        return draw(300000);
    default:
        return draw(20000);
    }
}

void join(struct stream *stream, int side, uint64_t number) {
    uint64_t at = stream->holder_count++;
    CHECK(at < HOLDERS);
    stream->holders[at] = number | (uint32_t)side << 31;
}

struct stream *new_stream(uint64_t service) {
    uint64_t number = ++table->streams;
    CHECK(number < STREAMS);
    struct stream *s = &table->stream[number];
    join(s, CLIENT, my_number);
    s->seed = number * 7919;
    s->service = service;
    s->window = draw(2) ? 0 : 1 + draw(16000);
    for (int side = 0; side < 2; side++) {
        s->way[side].total = size();
        for (int i = 0; i < PLANS; i++) {
            if (draw(8) == 0)
                s->plan[side][i].kind = 1 + draw(KINDS - 1);
            s->plan[side][i].at = size();
        }
    }
    return s;
}

enum kind due(const struct end *end) {
    struct stream *s = end->stream;
    int side = end->side;
    uint64_t done = s->way[side].sent + s->way[1 - side].received, i = s->planned[side];
    if (!end->receives || !end->sends || i == PLANS)
        return NOTHING;
    // Near the end, the rest goes at once.
    if (done < s->plan[side][i].at && done < s->way[0].total + s->way[1].total)
        return NOTHING;
    s->planned[side]++;
    return s->plan[side][i].kind;
}

static bool has_plans(const struct end *end) {
    struct stream *s = end->stream;
    for (int i = s->planned[end->side]; i < PLANS; i++)
        if (s->plan[end->side][i].kind != NOTHING)
            return true;
    return false;
}

// The peer may be dead; nothing else may be wrong.
static enum result is_over(struct end *end, int line) {
    CHECK(errno == EPIPE || errno == ECONNRESET);
    end->stream->why[end->side] = line * 1000 + errno;
    end->stream->outcome[end->side] = BROKEN;
    return DONE;
}

static enum result part_is_done(struct end *end) {
    struct stream *s = end->stream;
    int parts = (end->receives ? 1 : 0) | (end->sends ? 2 : 0);
    uint64_t all = atomic_fetch_or(&s->parts[end->side], parts) | parts;
    uint64_t open = OPEN;
    if (all == 3)
        atomic_compare_exchange_strong(&s->outcome[end->side], &open, WHOLE);
    return DONE;
}

size_t allowed(const struct end *end) {
    const struct way *out = &end->stream->way[end->side], *in = &end->stream->way[1 - end->side];
    if (!end->sends)
        return 0;
    uint64_t left = out->total - out->sent;
    if (end->stream->window == 0 || in->received == in->total)
        return left;
    uint64_t limit = in->received + (end->side == CLIENT ? end->stream->window : 0);
    uint64_t most = limit > out->sent ? limit - out->sent : 0;
    return most < left ? most : left;
}

static bool is_sent(const struct end *end) {
    return !end->sends || end->stream->way[end->side].shut;
}

static bool is_received(const struct end *end) {
    return !end->receives || end->stream->way[1 - end->side].ended;
}

bool wants_in(const struct end *end) {
    return !is_received(end);
}

// 1: something was sent, 0: not now, -1: the stream is over.
static int send_some(struct end *end, size_t most, int flags) {
    static _Thread_local unsigned char buf[65536];
    struct way *out = &end->stream->way[end->side];
    size_t n = allowed(end);
    if (n > most)
        n = most;
    if (n > 0) {
        pattern(end->stream->seed + end->side, out->sent, buf, n);
        ssize_t r = send(end->fd, buf, n, flags);
        if (r < 0 && (errno == EAGAIN || errno == EINTR))
            return 0;
        if (r < 0) {
            is_over(end, __LINE__);
            return -1;
        }
        CHECK(r > 0 && (size_t)r <= n);
        out->sent_hash = hash(out->sent_hash, buf, r);
        out->sent += r;
        uint64_t received = out->received;
        if (out->sent > received + FULL)
            table->full++;
        me->steps++;
    }
    if (out->sent == out->total && !out->shut) {
        // Said before: the peer compares the hash when it sees the end.
        out->shut = 1;
        if (shutdown(end->fd, SHUT_WR) < 0) {
            EQ(errno, ENOTCONN);
            errno = ECONNRESET;
            is_over(end, __LINE__);
            return -1;
        }
        return 1;
    }
    return n > 0;
}

static int receive_some(struct end *end, size_t most, int flags) {
    static _Thread_local unsigned char buf[65536];
    struct stream *s = end->stream;
    struct way *in = &s->way[1 - end->side];
    ssize_t r = recv(end->fd, buf, most, flags);
    if (r < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    // A sender that was killed between its last byte and saying so has not ended the stream.
    if (r < 0 || (r == 0 && (in->received < in->total || !in->shut))) {
        if (r == 0)
            errno = EPIPE;
        is_over(end, __LINE__);
        return -1;
    }
    me->steps++;
    if (r == 0) {
        EQ(in->received_hash, in->sent_hash);
        EQ(in->sent, in->total);
        in->ended = 1;
        return 1;
    }
    if (in->received + r > in->total)
        check_failed(__FILE__, __LINE__, "no byte too many", "%llu + %zd of %llu in stream %ld", (unsigned long long)in->received,
            r, (unsigned long long)in->total, (long)(s - table->stream));
    check_socket = end->fd;
    check_pattern(s->seed + (1 - end->side), in->received, buf, r);
    in->received_hash = hash(in->received_hash, buf, r);
    in->received += r;
    return 1;
}

enum result pump(struct end *end, bool all) {
    size_t most = 1 + draw(65536);
    for (int i = 0; all || i < 8; i++) {
        int received = 0, sent = 0;
        if (!is_received(end) && (received = receive_some(end, most, MSG_DONTWAIT)) < 0)
            return DONE;
        if (!is_sent(end) && (sent = send_some(end, most, MSG_DONTWAIT)) < 0)
            return DONE;
        if (is_received(end) && is_sent(end))
            return part_is_done(end);
        if (!received && !sent)
            break;
    }
    return AGAIN;
}

bool say_name(struct end *end) {
    uint64_t name = end->stream - table->stream;
    ssize_t n = send(end->fd, &name, sizeof name, 0);
    if (n < 0) {
        is_over(end, __LINE__);
        return false;
    }
    EQ(n, sizeof name);
    return true;
}

bool hear_name(struct end *end, int flags, enum result *result) {
    uint64_t name = 0;
    ssize_t n = recv(end->fd, &name, sizeof name, flags | MSG_PEEK);
    if (n < 0 && errno == EAGAIN) {
        *result = AGAIN;
        return false;
    }
    if (n <= 0) {
        CHECK(n == 0 || errno == ECONNRESET);
        *result = DONE;
        return false;
    }
    EQ(n, sizeof name);
    EQ(recv(end->fd, &name, sizeof name, flags), sizeof name);
    CHECK(name > 0 && name <= table->streams);
    end->stream = &table->stream[name];
    join(end->stream, SERVER, my_number);
    me->steps++;
    return true;
}

// --- a process that has nothing else to do

static void *send_all_of_it(void *arg) {
    struct end *end = arg;
    while (!is_sent(end) && send_some(end, 65536, 0) >= 0)
        ;
    return NULL;
}

static void by_two_threads(struct end *end) {
    pthread_t sender;
    struct end half = *end;
    half.receives = false;
    EQ(pthread_create(&sender, NULL, send_all_of_it, &half), 0);
    while (!is_received(end) && receive_some(end, 65536, 0) >= 0)
        ;
    EQ(pthread_join(sender, NULL), 0);
    if (is_received(end) && is_sent(end))
        part_is_done(end);
}

// Calls that block, as many bytes as both have agreed on.
static enum result talk(struct end *end) {
    while (!is_sent(end) && (allowed(end) || end->stream->way[end->side].sent == end->stream->way[end->side].total))
        if (send_some(end, 16384, 0) < 0)
            return DONE;
    if (!is_received(end) && receive_some(end, 65536, 0) < 0)
        return DONE;
    return is_received(end) && is_sent(end) ? part_is_done(end) : AGAIN;
}

static enum result look(struct end *end) {
    if (pump(end, false) == DONE)
        return DONE;
    bool more = allowed(end) > 0;
    struct pollfd f = {.fd = end->fd, .events = (is_received(end) ? 0 : POLLIN) | (more ? POLLOUT : 0)};
    int n = poll(&f, 1, -1);
    CHECK(n == 1 || errno == EINTR);
    return AGAIN;
}

static void nothing_else(int keep) {
    (void)keep;
}

void run(struct end *end) {
    me->busy++;
    bool can_talk = end->stream->window > 0 && end->receives && end->sends;
    int style = draw(3);
    for (enum result result = AGAIN; result == AGAIN;) {
        enum kind kind = due(end);
        if (kind == EXEC)
            replace(end, 1, next.role);
        else if (kind != NOTHING)
            hand_to_child(end, kind, nothing_else);
        if (end->fd < 0) {
            me->busy--;
            return;
        }
        if (style == 0 && can_talk)
            result = talk(end);
        else if (style == 1 && !can_talk && !has_plans(end) && end->receives && end->sends) {
            by_two_threads(end);
            break;
        } else
            result = look(end);
    }
    close(end->fd);
    end->fd = -1;
    me->busy--;
}
