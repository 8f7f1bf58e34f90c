#!/bin/sh
# Real servers with clients of their own, over TCP and under uSMC in turn. Each client checks what comes back. Under uSMC
# connections have to go through rings: so says the library's log of a run of its own, for short connections pay for each line.
# Prints what each does per second: the median of ROUNDS (default 3), lowest and highest,
# and uSMC over TCP within a round. SECONDS_EACH (default 3): how long those take that go by time.
# BY=rdma: by an agent over the fake libibverbs instead, as between two hosts. What it makes per second says nothing then.
# Arguments: some servers only. Each is setup_NAME and zoo_NAME of a file in tests/zoo.
set -eu
cd "$(dirname "$0")/.."
. tests/rings.sh
for file in tests/zoo/*.sh; do
    # shellcheck disable=SC1090 # named above
    . "$file"
done
rounds=${ROUNDS:-3}
seconds=${SECONDS_EACH:-3}
servers=${*:-$(sed -n 's/^zoo_\([a-z_]*\)() {$/\1/p' tests/zoo/*.sh)}
work=$(mktemp -d)
ism=
groups=
trap 'stop || :; rm -rf "$work" "$ism"' EXIT
trap 'exit 1' INT TERM

# Under uSMC, or not; as the user that the server asks for, where we are root.
under() {
    log=
    [ "$how" != logged ] || log="debug:$work/log"
    # shellcheck disable=SC2086 # words
    [ "$how" = tcp ] || set -- env USMC_ISM_DIR="$ism" USMC_LOG="$log" $by "$work/bin/usmc" run -- "$@"
    [ -z "$as" ] || set -- setpriv --reuid="$as" --regid="$as" --clear-groups -- "$@"
    exec "$@"
}

# Starts a server in a session of its own, whose number is `group`. Its output is the file `out`; its input does not end.
start() {
    out=$(mktemp "$work/out.XXXXXX")
    ZOO_WORK=$work setsid sh -c 'exec "$@"' sh sh -c '. "$1"; shift; under "$@"' sh "$work/under" "$@" <>"$work/stdin" >"$out" 2>&1 &
    group=$!
    groups="$groups $group"
}

# Waits for the end of what was started last.
await_end() {
    timeout 60 sh -c 'while kill -0 "$1" 2>/dev/null && ! grep -qs "^State:.Z" "/proc/$1/status"; do sleep 0.05; done' sh "$group" ||
        { echo "does not end:" >&2; cat "$out" >&2; return 1; }
}

# Ends what was started last in order.
finish() {
    kill -s TERM "$group"
    await_end
}

# Kills what is left of the servers. Who has left their sessions may take its time to find that out; to stay is an error.
stop() {
    for group in $groups; do
        pkill -KILL -s "$group" || :
        wait "$group" 2>/dev/null || :
    done
    groups=
    timeout 10 sh -c 'while grep -qz "^ZOO_WORK=$1\$" /proc/[0-9]*/environ 2>/dev/null; do sleep 0.05; done' sh "$work" || {
        for process in $(grep -lz "^ZOO_WORK=$work\$" /proc/[0-9]*/environ 2>/dev/null | tr -dc '0-9\n'); do
            echo "left behind: $(tr '\0' ' ' <"/proc/$process/cmdline")" >&2
            kill -s KILL "$process"
        done
        return 1
    }
}

# Waits until what was started last has printed a line that matches, for at most a minute.
await() {
    timeout 60 sh -c 'until grep -q "$1" "$2"; do kill -0 "$3" || exit 1; sleep 0.05; done' sh "$1" "$out" "$group" ||
        { echo "no $1:" >&2; cat "$out" >&2; return 1; }
}

# Waits until something listens at a port.
await_port() {
    timeout 60 sh -c 'until ss -Hltn "sport = :$1" | grep -q .; do kill -0 "$2" || exit 1; sleep 0.05; done' sh "$1" "$group" ||
        { echo "nothing listens:" >&2; cat "$out" >&2; return 1; }
}

# Waits until a command succeeds.
await_that() {
    timeout 60 sh -c 'until "$@" >/dev/null 2>&1; do sleep 0.05; done' sh "$@" || { echo "never: $*" >&2; cat "$out" >&2; return 1; }
}

free_port() {
    /usr/bin/python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# An empty directory of the server's.
scratch() {
    dir=$(mktemp -d "$work/dir.XXXXXX")
    chmod 755 "$dir"
    [ -z "$as" ] || chown "$as:$as" "$dir"
}

client() {
    (under timeout 100 "$@")
}

# Our client of HTTP, see tests/programs/zoo/http.c. With -m, calls the function $1 at each mark.
http() {
    client "$work/bin/http" "$@"
}

http_and() {
    action=$1
    shift
    mkfifo "$work/marks"
    http "$@" >"$work/marks" &
    load=$!
    while read -r line; do
        case $line in
        mark) "$action" >&2 </dev/null || { echo "$action failed" >&2; kill $load; } ;;
        *) echo "$line" ;;
        esac
    done <"$work/marks"
    rm "$work/marks"
    wait $load
}

build() {
    sh .ci/packages gcc:gcc libc6-dev:- procps:pkill iproute2:ss
    mkdir "$work/bin"
    chmod 755 "$work"
    # Where other users find them.
    release=${CARGO_TARGET_DIR:-$PWD/target}/release
    cp "$release/usmc" "$release/usmc-agent" "$release/libusmc_preload.so" "$work/bin"
    [ "${BY:-}" != rdma ] || cp "$release/libusmc_fake_verbs.so" "$work/bin"
    gcc -O2 -Wall -o "$work/bin/http" tests/programs/zoo/http.c
    mkdir "$work/www"
    "$work/bin/http" make "$work/www"
    mkfifo "$work/stdin"
}

# One round of one server.
once() {
    trap stop EXIT
    trap 'exit 1' INT TERM
    # The functions that a server's own shell needs.
    {
        echo "how='$how' work='$work' ism='$ism' as='$as' by='$by'"
        sed -n '/^under() {/,/^}/p' tests/zoo.sh
    } >"$work/under"
    "zoo_$server"
    trap - EXIT
    stop
}

# An agent for connections inside this host, as the user that the server asks for.
start_agent() {
    by='USMC_PEERS=127.0.0.1 USMC_LOOPBACK=off'
    printf 'device host 1024\ngid host 1 v2 ::ffff:127.0.0.1 lo\n' >"$ism/fabric"
    [ -z "$as" ] || chown "$as:$as" "$ism/fabric"
    (how=tcp; under env USMC_IBVERBS="$work/bin/libusmc_fake_verbs.so" USMC_FAKE_VERBS="$ism" "$work/bin/usmc-agent" \
        --socket "$ism/agent" --ueid ZOO) >"$work/agent" 2>&1 &
    agent=$!
    timeout 10 sh -c 'until grep -q ready "$1"; do sleep 0.05; done' sh "$work/agent" || { cat "$work/agent" >&2; exit 1; }
}

# Ends it: no connection is left.
end_agent() {
    kill -s TERM "$agent"
    timeout 20 sh -c 'while kill -0 "$1" 2>/dev/null && ! grep -qs "^State:.Z" "/proc/$1/status"; do sleep 0.05; done' sh "$agent" ||
        { echo "the agent does not end:" >&2; cat "$work/agent" >&2; kill -s KILL "$agent"; return 1; }
    wait "$agent"
}

build
failed=0
for server in $servers; do
    # As whom it runs, and how many of the connections' ends have to be in rings, in per cent.
    as='' share=50
    "setup_$server"
    [ "$(id -u)" = 0 ] || as=
    ism=$(mktemp -d /dev/shm/usmc-zoo.XXXXXX)
    [ -z "$as" ] || chown "$as:$as" "$ism"
    for file in log logged tcp usmc; do
        : >"$work/$file"
    done
    chmod 666 "$work/log"
    by=
    [ "${BY:-}" != rdma ] || start_agent
    for round in $(seq 0 "$rounds"); do
        for how in $([ "$round" = 0 ] && echo logged || echo tcp usmc); do
            # Each command of it has to succeed, which the shell does not ask for on the left of ||.
            set +e
            (set -e; once) >>"$work/$how" 2>"$work/errors"
            status=$?
            set -e
            [ $status = 0 ] || { echo "$server: failed by $how" >&2; cat "$work/errors" >&2; failed=1; }
        done
    done
    count_rings "$work/log"
    if [ -n "$by" ]; then
        ends=$((2 * $(grep -c 'accepted from port' "$work/log" || :)))
        in_rings=$(grep -c ': handed to the agent' "$work/log" || :)
        end_agent || failed=1
    fi
    rm -rf "$ism"
    for how in tcp usmc; do
        sort -n "$work/$how" | awk -v how=$how '{ v[NR] = $1 } END { printf " %s %d/s (%d-%d),", how, v[int((NR + 1) / 2)], v[1], v[NR] }'
    done >"$work/line"
    paste "$work/tcp" "$work/usmc" | awk 'NF == 2 && $1 { print $2 / $1 }' | sort -n |
        awk '{ v[NR] = $1 } END { printf " %.2f (%.2f-%.2f) of TCP,", v[int((NR + 1) / 2)], v[1], v[NR] }' >>"$work/line"
    echo "$server:$(cat "$work/line") $in_rings of $ends ends of connections sent through rings"
    [ "$in_rings" -gt 0 ] && [ $((in_rings * 100)) -ge $((ends * share)) ] || { echo "$server: too few rings" >&2; failed=1; }
    [ -z "${KEEP:-}" ] || { cp "$work/log" "$KEEP/$server.log"; cp "$work/errors" "$KEEP/$server.errors"; }
done
exit $failed
