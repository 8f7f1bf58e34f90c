#!/bin/sh
# Prints the copyright notices of what is linked into the programs, from the sources that cargo has unpacked.
set -eu
cd "$(dirname "$0")/.."
sources=${CARGO_HOME:-$HOME/.cargo}/registry/src
cat <<'END'
uSMC's own licence is Apache-2.0 or MIT, at your option. Its programs contain, in object form, Rust's standard library (Apache-2.0 or
MIT, see https://www.rust-lang.org/policies/licenses) and the libraries below. Where one may be had under the MIT licence, that is
chosen. Where `usmc` is linked statically (see ldd(1)), it contains the GNU C library, too, which is under the LGPL, version 2.1 or
later: it can be linked with another one from uSMC's sources by `make build`.
END
# Not what only the compiler runs.
list=$(${CARGO:-cargo} tree --locked --edges normal,no-proc-macro --prefix none --format '{p} | {l} | {r}')
echo "$list" | sed -n 's/ (\*)$//; / (\/.*) | /!s/ | /\t/gp' | LC_ALL=C sort -u | while IFS="$(printf '\t')" read -r name licence place; do
    printf '\n\n==== %s: %s\n%s\n' "$name" "$licence" "$place"
    version=${name#* v}
    for dir in "$sources"/*/"${name%% *}-$version"; do
        for text in "$dir"/LICENSE-MIT* "$dir"/LICENSE "$dir"/LICENSE.* "$dir"/license* "$dir"/LICENCE* "$dir"/COPYING*; do
            if [ -f "$text" ]; then
                echo
                cat "$text"
                break 2
            fi
        done
    done
done
