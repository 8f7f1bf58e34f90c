#!/bin/sh
# The test suites of other projects, from Debian's source packages, under plain TCP and under uSMC: a test that passes
# without the library and does not pass with it fails this script. Arguments: some suites only. Half an hour for all.
set -eu
cd "$(dirname "$0")/.."
usmc=${CARGO_TARGET_DIR:-$PWD/target}/release/usmc
suites=${*:-libevent redis}
sh .ci/packages gcc:gcc make:make dpkg-dev:dpkg-source tcl:tclsh redis-server:redis-server redis-tools:redis-cli
work=$(mktemp -d)
ism=$(mktemp -d /dev/shm/usmc-suites.XXXXXX)
trap 'rm -rf "$work" "$ism"' EXIT INT TERM
chmod 755 "$work"

# The source of a package, in $work/NAME; nothing of the system's is changed.
fetch() {
    mkdir -p "$work/apt/sources" "$work/apt/lists/partial" "$work/$1"
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
        case $file in
        *.list) sed 's/^deb /deb-src /' "$file" ;;
        *.sources) sed 's/^Types: .*/Types: deb-src/' "$file" ;;
        esac >"$work/apt/sources/${file##*/}" 2>/dev/null || true
    done
    apt="apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$work/apt/sources
        -o Dir::State::lists=$work/apt/lists -o APT::Sandbox::User=root"
    (cd "$work/$1" && $apt update && $apt --download-only source "$1" && tar xf "$1"_*.orig.tar.* --strip-components=1)
}

# usmc run, or nothing.
under() {
    if [ "$1" = usmc ]; then
        shift
        USMC_ISM_DIR=$ism "$usmc" run -- "$@"
    else
        shift
        "$@"
    fi
}

# One line for each test that passed.
run_libevent() {
    for methods in "" EVENT_NOEPOLL=1 "EVENT_NOEPOLL=1 EVENT_NOPOLL=1"; do
        # shellcheck disable=SC2086 # assignments
        (cd "$work/libevent/test" && under "$1" env $methods ./regress </dev/null 2>&1) |
            sed -n "s/^\([a-z_0-9]*\/[^:]*\): .*OK\$/\1 ${methods:-epoll}/p"
    done
}

build_libevent() {
    (cd "$work/libevent" && ./configure --quiet --disable-openssl --disable-samples && make -s -j2) >"$work/build.log" 2>&1
}

# Those that use connections; the others test data structures.
REDIS="unit/networking unit/introspection unit/limits unit/obuf-limits unit/client-eviction unit/querybuf unit/pause unit/wait
    unit/tracking unit/multi unit/quit unit/replybufsize unit/shutdown unit/pubsub unit/protocol unit/auth
    integration/block-repl integration/replication integration/replication-2 integration/replication-3
    integration/replication-4 integration/replication-psync integration/psync2-reg integration/redis-cli
    integration/redis-benchmark integration/rdb integration/failover integration/shutdown"

run_redis() {
    single=
    for unit in $REDIS; do
        single="$single --single $unit"
    done
    # shellcheck disable=SC2086 # words
    (cd "$work/redis" && under "$1" ./runtest --clients 2 $single </dev/null 2>&1) |
        sed "s/$(printf '\033')\[[0-9;]*m//g" | sed -n 's/^\[ok\]: \(.*\) ([0-9]* ms)$/\1/p'
}

# Debian's own programs.
build_redis() {
    for program in server cli benchmark sentinel check-aof check-rdb; do
        ln -s "$(command -v redis-$program)" "$work/redis/src/redis-$program"
    done
}

failed=0
for suite in $suites; do
    fetch "$suite"
    "build_$suite" || { cat "$work/build.log" >&2; exit 1; }
    for how in tcp usmc; do
        "run_$suite" "$how" | sort >"$work/$suite.$how" || true
    done
    count=$(wc -l <"$work/$suite.tcp")
    [ "$count" -gt 50 ] || { echo "$suite: only $count tests ran" >&2; exit 1; }
    worse=$(comm -23 "$work/$suite.tcp" "$work/$suite.usmc")
    if [ -n "$worse" ]; then
        printf '%s, passed over TCP only:\n%s\n' "$suite" "$worse"
        failed=1
    fi
    echo "$suite: $(wc -l <"$work/$suite.usmc") tests passed under uSMC, $count over TCP"
done
exit $failed
