#!/bin/sh
# Makes a Debian package of what has been built, into DIR. debhelper's programs are run over what install.sh installs: what is
# in the package is said in one place, and its scripts are what Debian's own packages have. cargo-deb would have a list of files and
# scripts of its own.
# Usage: deb.sh TARGET DIR
set -eu
cd "$(dirname "$0")/.."
target=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
work=$out/deb.work
rm -rf "$work"
mkdir -p "$work"
cp -R packages/debian "$work/"
# The same sources make the same package.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}
export SOURCE_DATE_EPOCH DEB_BUILD_OPTIONS=noautodbgsym
cat >"$work/debian/changelog" <<END
usmc ($version-1) unstable; urgency=medium

  * Version $version; see /usr/share/doc/usmc/CHANGELOG.md.gz.

 -- $(sed -n 's/^Maintainer: //p' packages/debian/control)  $(date --utc -R -d "@$SOURCE_DATE_EPOCH")
END
root=$work/debian/usmc
UNITS=/lib/systemd/system ZSH=/usr/share/zsh/vendor-completions CLASS=x86_64 sh packages/install.sh "$target" /usr "$root"
# The file copyright has them.
rm "$root"/usr/share/doc/usmc/LICENSE-*

cd "$work"
dh_installdocs
dh_installchangelogs
dh_lintian
dh_installtmpfiles
# Which of them a host needs is its administrator's to say. An upgrade ends no connections: he starts them anew.
dh_installsystemd --no-enable --no-start --no-stop-on-upgrade --no-restart-after-upgrade
dh_compress
dh_fixperms
# The libraries need no version of libc, and the 32-bit one no package: without 32-bit programs nobody loads it.
dh_shlibdeps -X libusmc_preload.so
libc=$(dpkg-query -W -f '${source:Package} (= ${source:Version})' libc6-dev)
# With a twin, the command is linked statically.
[ ! -f "$root/usr/lib/usmc/usmc-probe" ] || printf 'usmc:Built-Using=%s\n' "$libc" >>debian/usmc.substvars
dh_installdeb
dh_gencontrol
dh_md5sums
dh_builddeb --destdir="$out"
rm -rf "$work"
