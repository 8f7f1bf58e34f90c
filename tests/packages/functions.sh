# To be sourced by the scripts that run in roots. The first thing that is not so ends the script.

fail() {
    echo "  FAIL  $1" >&2
    exit 1
}

ok() {
    echo "  ok    $1"
}

# Waits until a command succeeds, for at most a minute.
await() {
    tries=0
    until "$@" >/dev/null 2>&1; do
        tries=$((tries + 1))
        [ $tries -lt 600 ] || fail "never: $*"
        sleep 0.1
    done
}

# The modes of a connection's two ends.
modes() {
    usmc ss --json 2>/dev/null | python3 /test/modes.py "$1"
}

are() {
    [ "$(modes "$1")" = "$2" ]
}

# Starts a server of streams under uSMC at a port; its process is `server`.
serve() {
    usmc run -- python3 /test/stream.py serve "$1" >"/tmp/serve.$1" 2>&1 &
    server=$!
    await grep -q ready "/tmp/serve.$1"
}

# Starts a client named $1 of the server at port $2; it ends when /tmp/NAME is gone. Its process is `client`.
talk() {
    : >"/tmp/$1"
    usmc run -- python3 /test/stream.py talk "$2" "/tmp/$1" >"/tmp/$1.port" 2>"/tmp/$1.errors" &
    client=$!
    await test -s "/tmp/$1.port"
}

port_of() {
    cat "/tmp/$1.port"
}

# Waits until a client has made a hundred more round trips.
goes_on() {
    begin=$(cat "/tmp/$1.count")
    # Leading zeros would make it octal.
    await sh -c '[ "$(sed "s/^0*//" "$1")" -gt "$2" ]' sh "/tmp/$1.count" "$(($(echo "$begin" | sed 's/^0*//') + 100))"
}

# Ends a client, which has seen no wrong byte.
ends_well() {
    rm "/tmp/$1"
    wait "$2" || fail "$1: $(cat "/tmp/$1.errors")"
}

# Whether a process has a library mapped that is no file any more.
has_replaced_library() {
    grep -q 'libusmc_preload.so (deleted)' "/proc/$1/maps"
}

# What is on the disk, but for the package managers' own notes.
listing() {
    find / -xdev \( -path /tmp -o -path /test -o -path /proc -o -path /dev -o -path '/var/lib/dpkg' -o -path '/var/log' \
        -o -path /var/lib/rpm -o -path /var/lib/apt -o -path /var/cache \) -prune -o -print | LC_ALL=C sort
    find /run | LC_ALL=C sort
}
