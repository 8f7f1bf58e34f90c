#!/bin/sh
# systemd as the first process of namespaces of its own, over a copy-on-write view of this root: nothing of it is seen outside, and
# nothing stays. Its first process' number in this namespace is printed once it runs.
# Usage: boot.sh DIR USMC LIBRARY; DIR is an empty directory. It ends by SIGTERM, and everything in it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
# A test that is killed takes it along.
[ "${4:-}" = inside ] || exec setpriv --pdeathsig TERM unshare --mount --propagation private sh "$here/boot.sh" "$@" inside
dir=$1 usmc=$2 library=$3
group=$dir/cgroup/usmc-tests-$$ own=$(sed -n 's/^0:://p' /proc/self/cgroup)
mkdir "$dir/cgroup" "$dir/world"
mount -t cgroup2 cgroup2 "$dir/cgroup"
# What scripts that were killed have left.
for left in "$dir"/cgroup/usmc-tests-*; do
    case ${left##*/usmc-tests-} in
    *[!0-9]*) ;;
    *) [ -d "/proc/${left##*-}" ] || find "$left" -depth -type d -exec rmdir {} + 2>/dev/null || : ;;
    esac
done
mkdir "$group"
echo 0 >"$group/cgroup.procs"
unshare --mount --pid --fork --net --uts --ipc --cgroup --kill-child sh "$here/init.sh" "$dir/world" "$usmc" "$library" &
unshare=$!
# With it, what it has started is killed.
trap 'kill -KILL "$unshare"' TERM
first=
# What has ended has no command line.
while [ -z "$first" ] && [ -n "$(tr -d '\0' <"/proc/$unshare/cmdline")" ]; do
    read -r first _ <"/proc/$unshare/task/$unshare/children" || :
done
echo "first process $first"
echo "$$" >"$dir/cgroup${own:-/}/cgroup.procs" 2>/dev/null || echo "$$" >"$dir/cgroup/cgroup.procs"
wait "$unshare" || :
# A signal ends the wait, too.
wait "$unshare" || :
# What is killed takes a moment to go.
while [ -d "$group" ]; do find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || :; done
umount "$dir/cgroup"
