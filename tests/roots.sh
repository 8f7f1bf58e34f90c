#!/bin/sh
# The library and the static `usmc` in other systems' root directories: Debian's older and newer releases, and one whose libc
# is musl. In each a shell, a C program, Python and redis run plain and under uSMC, say the same, and redis' and Python's
# connections are in shared memory at both ends. Needs root, debootstrap, musl-tools and a mirror of Debian's.
# Usage: roots.sh [ROOT ...]; some of: bullseye bookworm trixie musl. ROOTS: a directory for them (default <target>/roots).
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
roots=${ROOTS:-$target/roots}
mirror=${MIRROR:-http://deb.debian.org/debian}
packages=redis-server,redis-tools,python3-minimal,libpython3-stdlib,gcc,libc6-dev
mkdir -p "$roots"
roots=$(cd "$roots" && pwd)
failed=''

fail() {
    printf '  FAIL  %s\n' "$1" | head -n 20
    failed="$failed $name"
}

# A root of a Debian release.
debian() {
    [ -e "$roots/$1/.made" ] && return
    rm -rf "${roots:?}/$1"
    debootstrap --variant=minbase --include=$packages "$1" "$roots/$1" "$mirror" >"$roots/$1.log" 2>&1 || {
        tail -n 3 "$roots/$1.log" >&2
        return 1
    }
    : >"$roots/$1/.made"
}

# A root without glibc: musl's dynamic linker, and redis and busybox, which Debian has as sources, built by musl-gcc.
musl() {
    [ -e "$roots/musl/.made" ] && return
    dir=$roots/musl headers=$roots/kernel-headers
    rm -rf "$dir" "$roots/musl-sources"
    mkdir -p "$dir/bin" "$dir/usr/bin" "$dir/lib" "$dir/tmp" "$headers" "$roots/musl-sources"
    for part in linux asm-generic; do ln -sfn "/usr/include/$part" "$headers/$part"; done
    ln -sfn "/usr/include/$(uname -m)-linux-gnu/asm" "$headers/asm"
    cp -L "/lib/ld-musl-$(uname -m).so.1" "$dir/lib/"
    (
        cd "$roots/musl-sources"
        printf 'deb-src %s bookworm main\n' "$mirror" >sources.list
        options="-o Dir::Etc::sourcelist=$PWD/sources.list -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists=$PWD/lists"
        mkdir -p lists/partial
        # shellcheck disable=SC2086 # a list of words
        apt-get $options update -qq && apt-get $options source -qq redis busybox
        cc="musl-gcc -idirafter $headers"
        cd redis-*/
        make -s -C src MALLOC=libc USE_SYSTEMD=no BUILD_TLS=no USE_JEMALLOC=no USE_SYSTEM_JEMALLOC=no \
            CC="$cc" redis-server redis-cli redis-benchmark
        cp src/redis-server src/redis-cli src/redis-benchmark "$dir/usr/bin/"
        cd ../busybox-*/
        make -s allnoconfig
        for option in ASH SH_IS_ASH ASH_TEST TEST TEST1 ECHO CAT UNAME LS SEQ SLEEP FANCY_SLEEP FLOAT_DURATION GREP; do
            sed -i "s/^# CONFIG_$option is not set/CONFIG_$option=y/" .config
        done
        yes '' | make -s oldconfig >/dev/null
        make -s CC="$cc" busybox
        cp busybox "$dir/bin/"
    ) >"$roots/musl.log" 2>&1 || {
        tail -n 3 "$roots/musl.log" >&2
        return 1
    }
    for applet in sh [ echo cat uname ls seq sleep grep; do ln -sfn busybox "$dir/bin/$applet"; done
    : >"$dir/.made"
}

# Puts what `make install` installs into a root, and the C program.
furnish() {
    rm -rf "$1/opt/usmc" "$1/dev/shm/usmc"
    mkdir -p "$1/dev" "$1/proc" "$1/tmp"
    sh packages/install.sh "$target" /opt/usmc "$1"
    cp tests/roots/exchange.c tests/roots/exchange.py "$1/tmp/"
    if [ -e "$1/usr/bin/gcc" ]; then
        chroot "$1" gcc -O2 -o /tmp/exchange /tmp/exchange.c
    else
        musl-gcc -O2 -o "$1/tmp/exchange" tests/roots/exchange.c
    fi
}

# Runs a command in the root, in mount, process and network namespaces of its own, which end with it.
inside() {
    unshare --mount --pid --fork --net --kill-child sh -c '
        root=$1; shift
        mount -t proc proc "$root/proc"
        mount -t tmpfs tmpfs "$root/dev"
        mkdir "$root/dev/shm"
        for node in null zero urandom; do : >"$root/dev/$node"; mount --bind "/dev/$node" "$root/dev/$node"; done
        ip link set lo up
        exec timeout 120 chroot "$root" "$@"' sh "$@"
}

# What it says plain and under uSMC is the same.
same() {
    what=$1
    shift
    plain=$(inside "$root" "$@" 2>&1) || { fail "$what, plain: $plain"; return; }
    ours=$(inside "$root" /opt/usmc/bin/usmc run -- "$@" 2>&1) || { fail "$what: $ours"; return; }
    [ "$plain" = "$ours" ] && echo "  ok    $what" || fail "$what: \`$ours' instead of \`$plain'"
}

# What a script in the root prints under uSMC has to end with the word `shared`.
shared() {
    said=$(inside "$root" /bin/sh -c "$2" 2>&1) || :
    case $said in *shared) echo "  ok    $1" ;; *) fail "$1: $said" ;; esac
}

for name in ${*:-bullseye bookworm trixie musl}; do
    echo "$name"
    root=$roots/$name
    case $name in musl) musl ;; *) debian "$name" ;; esac || { fail "there is no such root"; continue; }
    furnish "$root"
    same shell /bin/sh -c 'for i in 1 2 3; do echo $i | cat; done; uname -s; (exit 3) || echo $?'
    same C /tmp/exchange
    [ ! -e "$root/usr/bin/python3" ] || same Python python3 /tmp/exchange.py
    # shellcheck disable=SC2016 # for the shell in there
    both='u=/opt/usmc/bin/usmc; ends() { [ "$($u ss | grep -c ":7000 .*SMCD")" -ge 2 ] && echo shared; }; '
    shared "C in shared memory" "$both"'$u run -- /tmp/exchange 7000 & for i in $(seq 100); do ends && break; sleep 0.1; done'
    shared "redis in shared memory" "$both"'$u run -- redis-server --port 7000 --save "" --logfile /tmp/redis.log >/dev/null &
        until $u run -- redis-cli -p 7000 ping >/dev/null 2>&1; do sleep 0.1; done
        $u run -- redis-benchmark -p 7000 -q -n 3000 -c 3 -t set,get >/tmp/benchmark || exit 1
        $u run -- redis-benchmark -p 7000 -q -n 100000000 -c 3 -t get >/dev/null &
        for i in $(seq 100); do ends && break; sleep 0.1; done'
    same "redis-cli" /bin/sh -c 'redis-server --port 7001 --save "" --logfile /tmp/redis.log >/dev/null &
        until redis-cli -p 7001 ping >/dev/null 2>&1; do sleep 0.1; done
        for i in 1 2 3 4 5; do redis-cli -p 7001 -r 20 incr n; done'
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
