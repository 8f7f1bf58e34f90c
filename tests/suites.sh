#!/bin/sh
# The test suites of other projects, most from Debian's source packages, under plain TCP and under uSMC, as it is and with
# connections that change over at once: a test that passes without the library and does not pass with it fails this script, as
# does a suite whose connections all stayed TCP.
# Arguments: some suites only. An hour for all.
set -eu
cd "$(dirname "$0")/.."
. tests/rings.sh
usmc=${CARGO_TARGET_DIR:-$PWD/target}/release/usmc
suites=${*:-libevent redis postgresql zeromq3 uvloop go}
sh .ci/packages gcc:gcc make:make dpkg-dev:dpkg-source tcl:tclsh redis-server:redis-server redis-tools:redis-cli
work=$(mktemp -d)
ism=$(mktemp -d /dev/shm/usmc-suites.XXXXXX)
trap 'rm -rf "$work" "$ism"' EXIT
trap 'exit 1' INT TERM
chmod 755 "$work"
: >"$work/log"
# For servers that are not root.
chmod 666 "$work/log"

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
    (cd "$work/$1" && $apt update && $apt --download-only source "$(source_of "$1")" && tar xf ./*.orig.tar.* --strip-components=1)
}

# What apt calls it.
source_of() {
    case $1 in
    # The version of the server that is installed.
    postgresql) dpkg-query -W -f '${source:Package}=${source:Version}' postgresql-15 ;;
    *) echo "$1" ;;
    esac
}

# usmc run, by connections that change over as $1 says; nothing for tcp.
under() {
    by=$1
    shift
    case $by in
    tcp) ${as_user:-} "$@" ;;
    *) ${as_user:-} env USMC_ISM_DIR="$ism" USMC_CHANGE_OVER="$by" USMC_LOG="debug:$work/log" "$usmc" run -- "$@" ;;
    esac
}

# One line for each test that passed.
run_libevent() {
    for methods in "" EVENT_NOEPOLL=1 "EVENT_NOEPOLL=1 EVENT_NOPOLL=1"; do
        # shellcheck disable=SC2086 # assignments
        (cd "$work/libevent/test" && under "$1" env $methods ./regress </dev/null 2>&1) | tee -a "$work/out" |
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
        sed "s/$(printf '\033')\[[0-9;]*m//g" >"$work/out"
    # Some tests repeat a step as often as their time allows: it passes when it never fails.
    sed -n 's/^\[\(err\|exception\)\]: \(.*\) in tests.*/\2/p' "$work/out" | sort -u >"$work/redis.bad"
    sed -n 's/^\[ok\]: \(.*\) ([0-9]* ms)$/\1/p' "$work/out" | sort -u | comm -23 - "$work/redis.bad"
}

# Debian's own programs.
build_redis() {
    for program in server cli benchmark sentinel check-aof check-rdb; do
        # The server's program is all of them but the client and the benchmark, by its name.
        ln -s "$(command -v redis-$program || command -v redis-server)" "$work/redis/src/redis-$program"
    done
}

# PostgreSQL's regression tests through TCP, by a server with a process per connection. Neither runs as root.
build_postgresql() {
    sh .ci/packages postgresql-15:- postgresql-client-15:- libpq-dev:- bison:bison flex:flex
    regress=$work/postgresql/src/test/regress
    (cd "$work/postgresql" && ./configure --quiet --without-readline --without-zlib && make -s -C src/backend generated-headers &&
        make -s -C src/test/regress regress.so) >"$work/build.log" 2>&1 || return 1
    ln -s /usr/lib/postgresql/15/lib/autoinc.so /usr/lib/postgresql/15/lib/refint.so "$regress"
}

run_postgresql() {
    bin=/usr/lib/postgresql/15/bin
    dir=$work/postgresql.by.$1
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    mkdir "$dir"
    chown -R postgres "$dir" "$ism"
    (
        cd "$dir" || exit 1
        as_user='runuser -u postgres --'
        $as_user $bin/initdb -A trust -D data --no-sync
        printf "port=%d\nlisten_addresses='127.0.0.1'\nunix_socket_directories=''\nfsync=off\n" "$port" >>data/postgresql.conf
        under "$1" $bin/pg_ctl -D data -l log -w -s start
        under "$1" /usr/lib/postgresql/15/lib/pgxs/src/test/regress/pg_regress --host=127.0.0.1 --port="$port" \
            --bindir=$bin --inputdir="$regress" --outputdir="$dir" --dlpath="$regress" --max-connections=6 \
            --schedule="$regress/parallel_schedule" >result || true
        $as_user $bin/pg_ctl -D data -m fast -s stop
    ) >"$work/postgresql.log" 2>&1 </dev/null
    cat "$work/postgresql.log" "$dir/regression.diffs" "$dir/result" >"$work/out" 2>/dev/null || true
    sed -n 's/^ *\(test \)\{0,1\} *\([a-z_0-9]*\) *\.\.\. ok .*/\2/p' "$dir/result"
}

# libzmq's own tests, a program each.
build_zeromq3() {
    sh .ci/packages cmake:cmake g++:g++
    (cd "$work/zeromq3" && cmake -S . -B built -DWITH_LIBSODIUM=OFF -DENABLE_CURVE=OFF -DBUILD_TESTS=ON -DWITH_DOCS=OFF \
        -DBUILD_STATIC=OFF && make -C built -j2) >"$work/build.log" 2>&1
}

run_zeromq3() {
    for program in "$work"/zeromq3/built/bin/test_*; do
        (cd "$work/zeromq3/built" && under "$1" timeout 60 "$program" </dev/null >>"$work/out" 2>&1) && echo "${program##*/}"
    done
}

# Go's programs make their system calls themselves, so they stay on TCP, at either end of a peer under uSMC.
control_go() {
    sh .ci/packages golang-go:go
    GO111MODULE=off GOCACHE=$work/go go build -o "$work/streams" tests/programs/outside/streams.go
    mkfifo "$work/stdin"
    for server in "$work/streams serve" "python3 tests/programs/outside/streams.py serve"; do
        : >"$work/port"
        # shellcheck disable=SC2086 # words
        under lasting $server <"$work/stdin" >"$work/port" 2>/dev/null &
        exec 9>"$work/stdin"
        until port=$(sed -n 's/^port //p' "$work/port") && [ -n "$port" ]; do :; done
        case $server in
        python3*) client=$work/streams ;;
        *) client="python3 tests/programs/outside/streams.py" ;;
        esac
        # shellcheck disable=SC2086 # words
        under lasting timeout 100 $client talk "$port" 2>/dev/null || return 1
        exec 9>&-
        wait $!
    done
}

# uvloop's own, with the library that PyPI has built of the same version: a loop of libuv's, whose epoll_ctl goes by an
# io_uring. Not what looks at its source or compiles it.
fetch_uvloop() {
    sh .ci/packages python3-pip:- python3-venv:-
    /usr/bin/python3 -m venv "$work/python"
    pip="$work/python/bin/pip --quiet --disable-pip-version-check"
    $pip install --only-binary :all: uvloop==0.23.0 pytest psutil aiohttp pyOpenSSL
    # The source, for the tests in it.
    $pip download --no-deps --no-binary uvloop --dest "$work" uvloop==0.23.0
    mkdir "$work/uvloop"
    tar xf "$work"/uvloop-*.tar.gz -C "$work/uvloop" --strip-components=1 --wildcards 'uvloop-*/tests'
}

build_uvloop() {
    rm "$work"/uvloop/tests/test_sourcecode.py "$work"/uvloop/tests/test_cython.py
}

run_uvloop() {
    (cd "$work/uvloop" && PYTHONDONTWRITEBYTECODE=1 under "$1" timeout 600 "$work/python/bin/python" -m pytest -q -rA \
        -p no:cacheprovider tests </dev/null 2>&1) | tee "$work/out" | sed -n 's/^PASSED //p'
}

failed=0
for suite in $suites; do
    if [ "$suite" = go ]; then
        : >"$work/log"
        control_go || { echo "go: not all bytes came back" >&2; failed=1; }
        count_rings "$work/log"
        [ "$in_rings" = 0 ] || { echo "go: a connection left TCP" >&2; failed=1; }
        [ $failed != 0 ] || echo "go: every byte, by TCP"
        continue
    fi
    case $suite in
    uvloop) fetch_uvloop ;;
    *) fetch "$suite" ;;
    esac
    "build_$suite" || { cat "$work/build.log" >&2; exit 1; }
    "run_$suite" tcp | sort >"$work/$suite.tcp" || true
    count=$(wc -l <"$work/$suite.tcp")
    [ "$count" -gt 50 ] || { tail -n 60 "$work/out" >&2; echo "$suite: only $count tests ran" >&2; exit 1; }
    for how in lasting at-once; do
        : >"$work/log"
        : >"$work/out"
        "run_$suite" "$how" | sort >"$work/$suite.$how" || true
        worse=$(comm -23 "$work/$suite.tcp" "$work/$suite.$how")
        if [ -n "$worse" ]; then
            printf '%s, %s, passed over TCP only:\n%s\n' "$suite" "$how" "$worse"
            echo "The end of what the suite said:"
            tail -n 60 "$work/out"
            failed=1
        fi
        count_rings "$work/log"
        [ "$in_rings" -gt 0 ] || { echo "$suite, $how: all connections were TCP" >&2; failed=1; }
        echo "$suite, $how: $(wc -l <"$work/$suite.$how") tests passed, $count over TCP; $in_rings of $ends ends of" \
            "connections sent through rings"
    done
done
exit $failed
