#!/bin/sh
# Builds the library for 32-bit programs and puts it beside the other one. Where that is impossible it says why, and
# `usmc` knows: those programs stay TCP. With --strict that is a failure.
set -eu
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-target} triple=i686-unknown-linux-gnu
impossible() {
    echo "32-bit programs stay TCP: $1; \`make deps32\` installs it" >&2
    [ "$strict" != --strict ]
    exit
}
strict=${1:-}
[ "$(uname -m)" = x86_64 ] || exit 0
ls "$(rustc --print target-libdir --target $triple)"/libcore-* >/dev/null 2>&1 ||
    impossible "there is no Rust library for $triple"
echo 'int main(void) { return 0; }' | cc -m32 -x c -o /dev/null - 2>/dev/null ||
    impossible "cc -m32 does not work"
${CARGO:-cargo} build --quiet --release --locked -p usmc-preload --target $triple
sh crates/usmc-preload/tree.sh "$target/release/lib/usmc" \
    ../../../../libusmc_preload.so ../../../../../$triple/release/libusmc_preload.so
