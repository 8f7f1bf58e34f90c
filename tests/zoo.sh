#!/bin/sh
# Real servers with clients of their own, over TCP and under uSMC in turn. Each client checks what comes back; under uSMC
# connections have to go through rings. Prints what each does per second: the median of ROUNDS (default 3), lowest and highest.
# Arguments: some servers only.
set -eu
cd "$(dirname "$0")/.."
. tests/rings.sh
usmc=${CARGO_TARGET_DIR:-$PWD/target}/release/usmc
rounds=${ROUNDS:-3}
servers=${*:-erlang rabbitmq}
work=$(mktemp -d)
ism=$(mktemp -d /dev/shm/usmc-zoo.XXXXXX)
group=
trap 'stop; rm -rf "$work" "$ism"' EXIT
trap 'exit 1' INT TERM

# Under uSMC, or not.
under() {
    if [ "$how" = usmc ]; then
        USMC_ISM_DIR="$ism" USMC_LOG="debug:$work/log" exec "$usmc" run -- "$@"
    else
        exec "$@"
    fi
}

# Starts a server in a process group of its own: `group`. Its output is $work/out.
start() {
    mkfifo "$work/stdin"
    setsid sh -c 'exec "$@"' sh sh -c '. "$1"; shift; under "$@"' sh "$work/under" "$@" <"$work/stdin" >"$work/out" 2>&1 &
    group=$!
    exec 9>"$work/stdin"
    rm "$work/stdin"
}

# A server that ends in order may take its time, and all that it had to say was said.
stop() {
    exec 9>&-
    [ -z "$group" ] || kill -s KILL -- "-$group" 2>/dev/null || :
    [ -z "$group" ] || wait "$group" 2>/dev/null || :
    group=
}

# Waits until the server has printed a line that matches, for at most a minute.
await() {
    timeout 60 sh -c 'until grep -q "$1" "$2"; do kill -0 "$3" || exit 1; sleep 0.05; done' sh "$1" "$work/out" "$group" ||
        { cat "$work/out" >&2; return 1; }
}

free_port() {
    /usr/bin/python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

client() {
    (under timeout 100 "$@")
}

setup_erlang() {
    sh .ci/packages erlang-base:escript
}

zoo_erlang() {
    start escript tests/programs/zoo/echo.escript serve
    await '^[0-9]'
    client escript tests/programs/zoo/echo.escript talk "$(grep '^[0-9]' "$work/out")" 5000
}

setup_rabbitmq() {
    sh .ci/packages rabbitmq-server:rabbitmq-server python3-pika:-
}

zoo_rabbitmq() {
    dir=$(mktemp -d "$work/rabbit.XXXXXX")
    port=$(free_port)
    echo '[].' >"$dir/plugins"
    HOME=$dir ERL_EPMD_PORT=$(free_port) ERL_EPMD_ADDRESS=127.0.0.1
    RABBITMQ_MNESIA_BASE=$dir/db RABBITMQ_LOG_BASE=$dir/log RABBITMQ_NODENAME=zoo@localhost RABBITMQ_DIST_PORT=$(free_port)
    RABBITMQ_NODE_IP_ADDRESS=127.0.0.1 RABBITMQ_NODE_PORT=$port RABBITMQ_ENABLED_PLUGINS_FILE=$dir/plugins
    RABBITMQ_CONF_ENV_FILE=/dev/null RABBITMQ_CONFIG_FILE=$dir/none RABBITMQ_ADVANCED_CONFIG_FILE=$dir/none
    export HOME ERL_EPMD_PORT ERL_EPMD_ADDRESS RABBITMQ_MNESIA_BASE RABBITMQ_LOG_BASE RABBITMQ_NODENAME RABBITMQ_DIST_PORT \
        RABBITMQ_NODE_IP_ADDRESS RABBITMQ_NODE_PORT RABBITMQ_ENABLED_PLUGINS_FILE RABBITMQ_CONF_ENV_FILE RABBITMQ_CONFIG_FILE \
        RABBITMQ_ADVANCED_CONFIG_FILE
    # A daemon that the server's start needs, and that outlives it.
    ERL_EPMD_RELAXED_COMMAND_CHECK=1 epmd -relaxed_command_check -daemon
    # What it leaves when it is killed goes there, too.
    start sh -c "cd $dir && exec /usr/lib/rabbitmq/bin/rabbitmq-server"
    done=0
    await 'completed with' && client /usr/bin/python3 tests/programs/zoo/rabbitmq.py "$port" 2000 || done=1
    stop
    epmd -kill >/dev/null 2>&1 || :
    return $done
}

# The functions that a server's own shell needs.
cat >"$work/under" <<END
how=\$ZOO_HOW work='$work' ism='$ism' usmc='$usmc'
$(sed -n '/^under() {/,/^}/p' tests/zoo.sh)
END

failed=0
for server in $servers; do
    "setup_$server"
    : >"$work/log"
    : >"$work/tcp"
    : >"$work/usmc"
    for _ in $(seq "$rounds"); do
        for how in tcp usmc; do
            export ZOO_HOW=$how
            (trap - EXIT; "zoo_$server"; status=$?; stop; exit $status) >>"$work/$how" || { echo "$server: failed by $how" >&2; failed=1; }
        done
    done
    count_rings "$work/log"
    for how in tcp usmc; do
        sort -n "$work/$how" | awk -v how=$how '{ v[NR] = $1 } END { printf " %s %d/s (%d-%d)", how, v[int((NR + 1) / 2)], v[1], v[NR] }'
    done >"$work/line"
    echo "$server:$(cat "$work/line"), $in_rings of $ends ends of connections sent through rings"
    [ "$in_rings" -gt 0 ] || { echo "$server: all connections were TCP" >&2; failed=1; }
done
exit $failed
