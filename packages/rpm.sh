#!/bin/sh
# Makes an RPM package of what has been built, into DIR: the files that install.sh installs, by rpmbuild. It is for systems whose
# 64-bit libraries are in lib64, as Fedora's, RHEL's and SUSE's are. cargo-generate-rpm would have a list of files of its own.
# Usage: rpm.sh TARGET DIR
set -eu
cd "$(dirname "$0")/.."
target=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
work=$out/rpm.work
root=$work/root
rm -rf "$work"
mkdir -p "$work"
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}
export SOURCE_DATE_EPOCH
CLASS=i386 sh packages/install.sh "$target" /usr "$root"
mkdir -p "$root/usr/share/licenses/usmc"
mv "$root"/usr/share/doc/usmc/LICENSE-* "$root"/usr/share/doc/usmc/NOTICES "$root/usr/share/licenses/usmc/"
find "$root/usr/share/man" -type f -exec gzip -9n {} +

# Files, and the directories that no other package has.
{
    find "$root" ! -type d -printf '"/%P"\n'
    for dir in usr/lib/usmc usr/share/usmc usr/share/doc/usmc usr/share/licenses/usmc; do
        find "$root/$dir" -type d -printf "%%%%dir \"/$dir/%P\"\n"
    done
} | sed -e '/\/man\//b' -e 's|^"/usr/share/doc/|%doc &|; s|^"/usr/share/licenses/|%license &|; s|/"$|"|' >"$root.files"
rpmbuild --quiet -bb --define "_topdir $work" --define "_rpmdir $out" --define '_rpmfilename %{name}-%{version}-%{release}.%{arch}.rpm' \
    --define "staged $root" --define "package_version $version" --define '_source_date_epoch_from_changelog 0' \
    --define 'use_source_date_epoch_as_buildtime 1' --define 'clamp_mtime_to_source_date_epoch 1' --define '_buildhost localhost' packages/usmc.spec
rm -rf "$work"
