#!/bin/sh
# Runs the ring on real threads under a checker of data races.
#
#   crates/usmc-shm/tests/sanitize.sh tsan     ThreadSanitizer
#   crates/usmc-shm/tests/sanitize.sh miri     Miri: also bounds, alignment, weak memory
#
# Needs a nightly toolchain with rust-src (tsan) or miri; says so and succeeds where there is none.
# Not under either: tests/hostile.rs, whose peer races on purpose.
set -eu
cd "$(dirname "$0")/../../.."

skip() {
    echo "$tool: skipped: $1"
    exit 0
}

tool=${1:?tsan or miri}
components=$(rustup component list --toolchain nightly --installed 2>/dev/null) || skip "no nightly toolchain"
target=$(rustc +nightly -vV | sed -n 's/^host: //p')
# Its own directory: flags differ from those of the other builds.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/$tool"

case $tool in
tsan)
    echo "$components" | grep -q '^rust-src' || skip "rustup component add rust-src --toolchain nightly"
    export RUSTFLAGS="-Zsanitizer=thread" TSAN_OPTIONS="halt_on_error=1"
    # Tests unwind; a std for each panic strategy would be one too many.
    export CARGO_PROFILE_DEV_PANIC=unwind
    exec cargo +nightly test -p usmc-shm -Zbuild-std --target "$target" --test stress --test oracle
    ;;
miri)
    echo "$components" | grep -q '^miri' || skip "rustup component add miri --toolchain nightly"
    export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-many-seeds=0..4"
    exec cargo +nightly miri test -p usmc-shm --test stress
    ;;
*)
    echo "usage: $0 tsan|miri" >&2
    exit 2
    ;;
esac
