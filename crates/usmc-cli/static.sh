#!/bin/sh
# Builds usmc once more, as a static program that runs beside every libc (containers of other systems), into
# <target>/release/usmc-static. Where that is impossible it says why; `make install` then takes the dynamic one.
set -eu
cd "$(dirname "$0")/../.."
echo 'int main(void) { return 0; }' | ${CC:-cc} -static-pie -x c -o /dev/null - 2>/dev/null || {
    echo "usmc is not linked statically: there is no libc.a for the compiler" >&2
    exit
}
${CARGO:-cargo} rustc --quiet --release --locked -p usmc-cli --features static --bin usmc-static -- \
    -C target-feature=+crt-static
