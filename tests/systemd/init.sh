#!/bin/sh
# The first process in the namespaces of boot.sh, which becomes systemd. Usage: init.sh DIR USMC LIBRARY
set -eu
dir=$1 root=$1/root
mount -t tmpfs tmpfs "$dir"
mkdir "$root" "$dir/upper" "$dir/work"
mount -t overlay -o "lowerdir=/,upperdir=$dir/upper,workdir=$dir/work" overlay "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
# The kernel's settings are the whole machine's.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
# So are its files in memory: these are others.
for at in run tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$at"; done
chmod 1777 "$root/tmp"
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
for node in null zero full random urandom tty; do
    : >"$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
: >"$root/dev/console"
# Nothing is started but what a test starts.
rm -rf "$root"/lib/systemd/system/*.wants "$root"/usr/lib/systemd/system/*.wants "$root"/etc/systemd/system/* \
    "$root"/lib/systemd/system-generators/* "$root"/usr/local/lib/systemd/system/*
ln -s /lib/systemd/system/redis-server.service "$root/etc/systemd/system/redis.service"
# As the package has them.
install -D -m 755 "$2" "$root/usr/bin/usmc"
install -D -m 755 "$3" "$root/usr/lib/usmc/libusmc_preload.so"
ip link set lo up
cd "$root"
mkdir run/old
pivot_root . run/old
umount -l /run/old
rmdir /run/old
exec env -i container=usmc-tests PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=basic.target --log-target=console --show-status=0 </dev/null >/dev/console 2>&1
