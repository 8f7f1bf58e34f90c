#!/bin/sh
# Puts Debian's 32-bit Python into DIR, beside nothing of the system: its packages cannot be installed together with
# the 64-bit ones. Python's library in Python is the same for both, so that of /usr/lib is used.
# Usage: python32.sh DIR; then DIR/python3 runs it.
set -eu
dir=$1
[ ! -x "$dir/python3" ] || exit 0
version=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
work=$dir.$$
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
cd "$work"
# Lists of its own, so that the system learns of no other architecture; who downloads may not be able to leave root.
apt() {
    apt-get -qq -o APT::Architecture=i386 -o APT::Architectures=i386 -o Dir::State::Lists="$work/lists" \
        -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o Acquire::Retries=3 "$@"
}
# Any one of the lists will do.
apt update || :
apt download "python$version-minimal:i386" libexpat1:i386 zlib1g:i386
for package in *.deb; do
    dpkg-deb -x "$package" root
done
rm -rf lists cache ./*.deb
cat >python3 <<EOF
#!/bin/sh
export LD_LIBRARY_PATH='$dir/root/lib/i386-linux-gnu:$dir/root/usr/lib/i386-linux-gnu' PYTHONHOME=/usr PYTHONDONTWRITEBYTECODE=1
exec '$dir/root/usr/bin/python$version' "\$@"
EOF
chmod 755 python3
rm -rf "$dir"
mv "$work" "$dir"
