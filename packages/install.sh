#!/bin/sh
# Installs what has been built, stripped: the one list of files that `make install` and all packages have.
# Usage: install.sh TARGET PREFIX [DESTDIR]; TARGET is cargo's directory. UNITS, ZSH and CLASS: where a distribution has systemd's
# units and zsh's completions, and what `$LIB` is for in PREFIX/lib/usmc/lib (see tree.sh).
set -eu
cd "$(dirname "$0")/.."
target=$1 prefix=$2 root=${3:-}
release=$target/release narrow=$target/i686-unknown-linux-gnu/release/libusmc_preload.so
private=$root$prefix/lib/usmc
share=$root$prefix/share
units=$root${UNITS:-$prefix/lib/systemd/system}
zsh=$root${ZSH:-$prefix/share/zsh/site-functions}
# Nobody's umask decides who may start it.
umask 022

# A program or library without what only debuggers read; what the dynamic linker reads stays. Programs that have the old one
# mapped keep it.
binary() {
    install -D -m 755 "$1" "$2.new"
    ${STRIP:-strip} --strip-unneeded "$2.new"
    mv -f "$2.new" "$2"
}

file() {
    install -D -m 644 "$1" "$2"
}

if [ -f "$release/usmc-static" ]; then
    binary "$release/usmc-static" "$root$prefix/bin/usmc"
    binary "$release/usmc" "$private/usmc-probe"
else
    binary "$release/usmc" "$root$prefix/bin/usmc"
fi
binary "$release/usmc-agent" "$private/usmc-agent"
# No library to link with, so not where the dynamic linker looks for these. Services that may execute /usr/lib alone can map it.
binary "$release/libusmc_preload.so" "$private/libusmc_preload.so"
if [ -f "$narrow" ]; then
    binary "$narrow" "$private/lib/i386-linux-gnu/libusmc_preload.so"
    sh crates/usmc-preload/tree.sh "$private" ../../libusmc_preload.so
fi

for page in docs/man/*.[1-8]; do
    file "$page" "$share/man/man${page##*.}/${page##*/}"
done
for shell in bash zsh fish; do
    case $shell in
    bash) to=$share/bash-completion/completions/usmc ;;
    zsh) to=$zsh/_usmc ;;
    fish) to=$share/fish/vendor_completions.d/usmc.fish ;;
    esac
    mkdir -p "${to%/*}"
    "$release/usmc" completions $shell >"$to"
done
for unit in docs/systemd/usmc-*; do
    file "$unit" "$units/${unit##*/}"
    sed -i "s|/usr/local/bin|$prefix/bin|" "$units/${unit##*/}"
done
file docs/tmpfiles.d/usmc.conf "$root$prefix/lib/tmpfiles.d/usmc.conf"

for text in README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT; do
    file "$text" "$share/doc/usmc/$text"
done
# What is for users: docs/SUMMARY.md's first two parts.
for text in $(sed -n '/^# Manual/q; s/^.*](\([a-z-]*\.md\))$/\1/p' docs/SUMMARY.md); do
    file "docs/$text" "$share/doc/usmc/$text"
done
for manifest in packages/kubernetes/*/*.yaml; do
    file "$manifest" "$share/usmc/${manifest#packages/}"
done
file docs/config/usmc.toml "$share/doc/usmc/examples/usmc.toml"
sh packages/notices.sh >"$share/doc/usmc/NOTICES"
