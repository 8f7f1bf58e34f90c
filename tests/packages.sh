#!/bin/sh
# What `make deb`, `make rpm` and `make image` have made: checked by lintian, installed into Debian roots and an empty one, used,
# exchanged for newer versions while connections live, removed; the image is used by Docker as an init container is; a newcomer's first steps
# are timed. Needs root, debootstrap, rpm, Docker and a mirror of Debian's.
# Usage: packages.sh [deb] [systemd] [rpm] [image] [newcomer]. ROOTS: a directory for the roots (default <target>/roots).
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
target=$(cd "$target" && pwd)
base=${ROOTS:-$target/roots}/packages
packages=redis-server,redis-tools,python3-minimal,libpython3-stdlib,man-db,bash-completion,zsh,fish,systemd,rpm
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
deb=$target/packages/usmc_$version-1_$(dpkg --print-architecture).deb
rpm=$target/packages/usmc-$version-1.$(uname -m).rpm
work=$(mktemp -d)
daemon=''
trap '[ -z "$daemon" ] || { kill "$daemon" && wait "$daemon"; } 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
failed=''

fail() {
    printf '  FAIL  %s\n' "$1" | head -n 20
    failed="$failed $name"
}

# Makes a root in $1 with nothing but what Debian calls its minimum, and these packages. Each test has an own one from that.
debian() {
    [ -e "$1/.made" ] && return
    rm -rf "$1"
    mkdir -p "$1"
    debootstrap --variant=minbase ${2:+--include=$2} bookworm "$1" "${MIRROR:-http://deb.debian.org/debian}" >"$1.log" 2>&1 || {
        tail -n 3 "$1.log" >&2
        return 1
    }
    rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*
    : >"$1/.made"
}

# Runs a script of tests/packages in a root of its own, in namespaces that end with it. What it writes is in memory only. Before it,
# `script.sh before` runs there with this machine's network, if a third word says so. $2: the root.
inside() {
    cp tests/packages/* "$work/test/"
    unshare --mount --pid --fork --kill-child sh -c '
        base=$1 work=$2 script=$3
        mount -t tmpfs tmpfs "$work/mnt"
        mkdir "$work/mnt/upper" "$work/mnt/work" "$work/mnt/root"
        mount -t overlay overlay -o "lowerdir=$base,upperdir=$work/mnt/upper,workdir=$work/mnt/work" "$work/mnt/root"
        root=$work/mnt/root
        mkdir "$root/test"
        mount --bind "$work/test" "$root/test"
        mount -t proc proc "$root/proc"
        mount -t tmpfs tmpfs "$root/dev"
        mount -t tmpfs -o mode=755 tmpfs "$root/run"
        mkdir -m 1777 "$root/dev/shm" "$root/run/lock"
        for node in null zero urandom; do : >"$root/dev/$node"; mount --bind "/dev/$node" "$root/dev/$node"; done
        ln -s /proc/self/fd "$root/dev/fd"
        mkdir "$root/dev/pts"
        mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"
        ln -s pts/ptmx "$root/dev/ptmx"
        enter="timeout 300 chroot $root env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 sh /test/$script"
        if [ -n "$4" ]; then
            cp /etc/resolv.conf "$root/etc/"
            $enter "$4" || exit
        fi
        exec unshare --net sh -c "ip link set lo up && exec $enter"' \
        sh "${2:-$base}" "$work" "$1" "${3:-}"
}

# A package $1 of another version $2, with another library where there is one.
repack() {
    rm -rf "$work/repack"
    dpkg-deb -R "$deb" "$work/repack"
    sed -i "s/^Version: .*/Version: $2/" "$work/repack/DEBIAN/control"
    [ -z "${3:-}" ] || {
        cp "$3" "$work/repack/usr/lib/usmc/libusmc_preload.so"
        strip --strip-unneeded "$work/repack/usr/lib/usmc/libusmc_preload.so"
        (cd "$work/repack" && find usr lib -type f -exec md5sum {} + >DEBIAN/md5sums)
    }
    dpkg-deb --root-owner-group -Znone -b "$work/repack" "$1" >/dev/null
}

# Builds a library whose ISM directory has the next version of the layout, by changing a copy of the sources.
next_layout() {
    copy=$target/packages/next
    layout=crates/usmc/src/host/layout.rs
    mkdir -p "$copy"
    git ls-files -z | tar --null -T - -cf - | tar -C "$copy" -xf -
    now=$(sed -n 's/^pub const VERSION: u32 = \([0-9]\);$/\1/p' $layout)
    sed -i "s/^pub const VERSION: u32 = $now;/pub const VERSION: u32 = $((now + 1));/; s/\"v$now\.\"/\"v$((now + 1)).\"/" "$copy/$layout"
    ! cmp -s $layout "$copy/$layout" || return 1
    (cd "$copy" && CARGO_TARGET_DIR=$copy/target ${CARGO:-cargo} build --quiet --profile tools --locked -p usmc-preload)
    next=$copy/target/tools/libusmc_preload.so
}

test_deb() {
    if command -v lintian >/dev/null; then
        said=$(lintian --allow-root --fail-on error,warning "$deb" 2>&1) && echo "  ok    lintian" || fail "$said"
    fi
    next_layout || { fail "no library with another layout"; return; }
    cp "$deb" "$work/test/1.deb"
    repack "$work/test/2.deb" "$version-2"
    repack "$work/test/3.deb" "$version-3" "$next"
    inside deb.sh || fail "see above"
}

# With a systemd that runs: services are neither started nor, by an upgrade, stopped; a removal stops them.
test_systemd() {
    cp "$deb" "$work/test/1.deb"
    repack "$work/test/2.deb" "$version-2"
    cp tests/packages/* "$work/test/"
    : >"$work/test/said"
    timeout --kill-after=10 120 systemd-nspawn --quiet --register=no --keep-unit --private-network --volatile=overlay --directory="$base" \
        --bind="$work/test:/test" --bind-ro="$work/test/packages.service:/etc/systemd/system/packages.service" \
        /lib/systemd/systemd --unit=packages.service >"$work/boot" 2>&1 </dev/null && status=0 || status=$?
    cat "$work/test/said"
    [ $status = 0 ] || fail "$(tail -n 3 "$work/boot")"
}

# As a list of files, and what a file of it is.
test_rpm() {
    rpm -qip "$rpm" | grep -q "^Version *: $version\$" || fail "its version is another one"
    root=$work/empty
    mkdir -p "$root"
    # In there is no shell for its scripts.
    said=$(rpm --root "$root" -i --nodeps --noscripts --force-debian "$rpm" 2>&1) || { fail "$said"; return; }
    rpm -qlp "$rpm" | LC_ALL=C sort >"$work/listed"
    (cd "$root" && find . \( -path ./var/lib -o -path ./root \) -prune -o \( ! -type d -o -path '*/usmc*' \) -print | sed 's/^\.//') |
        LC_ALL=C sort >"$work/found"
    said=$(diff "$work/listed" "$work/found") && echo "  ok    an empty root has the files that are listed" || fail "$said"
    cp "$rpm" "$work/test/1.rpm"
    inside rpm.sh || fail "see above"
}

docker() {
    /usr/bin/docker --host "unix://$work/docker/socket" "$@"
}

# A daemon of our own, which sets up no firewall and pulls nothing.
start_docker() {
    mkdir -p "$work/docker"
    dockerd --iptables=false --ip6tables=false --bridge=none --host "unix://$work/docker/socket" \
        --data-root "$work/docker/data" --exec-root "$work/docker/exec" --pidfile "$work/docker/pid" >"$work/docker/log" 2>&1 &
    daemon=$!
    timeout 60 sh -c 'until grep -q "API listen on" "$1"; do kill -0 "$2" || exit 1; sleep 0.1; done' sh "$work/docker/log" $daemon
}

test_image() {
    image=$(echo "$target/packages/usmc-$version"-*.image.tar)
    start_docker || { fail "$(tail -n 3 "$work/docker/log")"; return; }
    docker load -q -i "$image" >/dev/null || { fail "docker load"; return; }
    run="docker run --rm --network none"
    [ "$($run "usmc:$version" --version)" = "usmc $version" ] || fail "it says another version"
    # Another image: the root, which has no uSMC.
    tar -C "$base" --exclude ./usr/share --exclude ./var/cache -c . | docker import - debian:test >/dev/null
    docker volume create usmc >/dev/null
    # As an init container does, twice, as the pod is made anew with its volume.
    for _ in 1 2; do
        $run -v usmc:/to "usmc:$version" export /to >"$work/said" || { fail "export"; return; }
    done
    echo "  ok    docker loads it, and it copies itself: $(wc -l <"$work/said") files"
    cp tests/packages/* "$work/test/"
    docker run --rm --network none --tmpfs /dev/shm -v usmc:/usmc:ro -v "$work/test:/test:ro" debian:test sh /test/image.sh ||
        fail "see above"
    # COPY --from, in a build without network.
    mkdir -p "$work/build"
    printf 'FROM debian:test\nCOPY --from=usmc:%s /usmc /usmc\nRUN ["/usmc/usmc", "check"]\n' "$version" >"$work/build/Dockerfile"
    said=$(DOCKER_BUILDKIT=0 docker build --network none -q "$work/build" 2>&1) && echo "  ok    COPY --from" || fail "$said"
    kill "$daemon"
    wait "$daemon" || fail "dockerd ended by $?"
    daemon=''
}

# The lines of docs/first-steps.md, in a root that has nothing.
test_newcomer() {
    debian "$base.empty" || { fail "there is no root"; return; }
    cp "$deb" docs/first-steps.md "$work/test/"
    date +%s >"$work/test/begin"
    inside newcomer.sh "$base.empty" before || fail "see above"
}

mkdir -p "$work/test/man" "$work/mnt"
cp docs/man/* "$work/test/man/"
debian "$base" $packages || { echo "there is no root" >&2; exit 1; }
for name in ${*:-deb systemd rpm image newcomer}; do
    echo "$name"
    "test_$name"
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
