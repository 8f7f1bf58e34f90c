#!/bin/sh
# Puts Debian's 32-bit Python into DIR, for DIR/python3 to run it: its packages cannot be installed together with the
# 64-bit ones. CPython's own tests are the system's, where `make python-suite` has installed them.
# Usage: python32.sh DIR
set -eu
dir=$1
[ "$(uname -m)" = x86_64 ] || exit 0
[ ! -x "$dir/python3" ] || exit 0
version=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
work=$dir.$$
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
cd "$work"
# With lists of its own: the system learns of no other architecture, and root is not asked for.
apt() {
    apt-get -qq -o APT::Architecture=i386 -o APT::Architectures=i386 -o Dir::State::Lists="$work/lists" \
        -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o Acquire::Retries=3 "$@"
}
# Any one of the lists will do.
apt update || :
apt download "python$version-minimal:i386" "libpython$version-minimal:i386" "libpython$version-stdlib:i386" \
    libexpat1:i386 zlib1g:i386 libffi8:i386
for package in *.deb; do
    dpkg-deb -x "$package" debian
done
rm -rf lists cache ./*.deb "debian/usr/lib/python$version/test"
ln -s "/usr/lib/python$version/test" "debian/usr/lib/python$version/test"
cat >python3 <<EOF
#!/bin/sh
export LD_LIBRARY_PATH='$dir/debian/lib/i386-linux-gnu:$dir/debian/usr/lib/i386-linux-gnu'
export PYTHONHOME='$dir/debian/usr' PYTHONDONTWRITEBYTECODE=1
exec '$dir/debian/usr/bin/python$version' "\$@"
EOF
chmod 755 python3
rm -rf "$dir"
mv "$work" "$dir"
