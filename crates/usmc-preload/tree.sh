#!/bin/sh
# Makes TREE/$LIB/libusmc_preload.so lead each class of programs to its own library, whatever the dynamic linkers of
# this system take `$LIB` for: `lib/x86_64-linux-gnu` and `lib/i386-linux-gnu` (or `lib32`) on Debian, `lib64` and `lib`
# on Fedora, `lib` and `lib32` on Arch. musl's takes it for the name of a directory, which leads to the 64-bit library.
# Usage: tree.sh TREE WIDE [NARROW]; both files as seen from TREE/lib/x86_64-linux-gnu. Without NARROW it is there. CLASS: whose
# `lib` is, where that is another system's to say: x86_64 or i386.
set -eu
tree=$1 wide=$2 narrow=${3:-} name=libusmc_preload.so
mkdir -p "$tree/lib/x86_64-linux-gnu" "$tree/lib/i386-linux-gnu"
ln -sfn "$wide" "$tree/lib/x86_64-linux-gnu/$name"
[ -z "$narrow" ] || ln -sfn "$narrow" "$tree/lib/i386-linux-gnu/$name"
ln -sfn lib/x86_64-linux-gnu "$tree/lib64"
ln -sfn lib/x86_64-linux-gnu "$tree/\$LIB"
ln -sfn lib/i386-linux-gnu "$tree/lib32"
if [ -e /usr/lib64/libc.so.6 ]; then class=i386; else class=x86_64; fi
class=${CLASS:-$class}
ln -sfn $class-linux-gnu/$name "$tree/lib/$name"
