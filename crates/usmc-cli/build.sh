#!/bin/sh
# Builds usmc, and puts it beside the libraries, where it finds them: <target>/release/usmc. It needs none of the release profile's link-time
# optimization, which takes minutes.
# --static: once more, as a static program that runs beside every libc (containers of other systems), <target>/release/usmc-static. Where
# that is impossible it says why; `make install` then takes the dynamic one.
set -eu
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-target} name=usmc
if [ "${1:-}" = --static ]; then
    echo 'int main(void) { return 0; }' | ${CC:-cc} -static-pie -x c -o /dev/null - 2>/dev/null || {
        echo "usmc is not linked statically: there is no libc.a for the compiler" >&2
        exit
    }
    name=usmc-static
    ${CARGO:-cargo} rustc --quiet --profile tools --locked -p usmc-cli --features static --bin $name -- \
        -C target-feature=+crt-static
else
    ${CARGO:-cargo} build --quiet --profile tools --locked -p usmc-cli --bin $name
fi
mkdir -p "$target/release"
# A copy, as a later build would write to another name of the same file. Tests build side by side, and beside programs that run.
from=$target/tools/$name to=$target/release/$name
! cmp -s "$from" "$to" || exit 0
cp "$from" "$to.$$"
mv -f "$to.$$" "$to"
