# In a Debian root whose first process is systemd: what the package does to running services.
set -eu
. /test/functions.sh
export DEBIAN_FRONTEND=noninteractive
sockets='usmc-agent.socket usmc-ivshmem.socket usmc-ivshmem-host.socket'

active() {
    # shellcheck disable=SC2086 # a list of words
    systemctl is-active $sockets usmc-agent.service usmc-ivshmem.service | grep -c '^active' || :
}

process() {
    systemctl show --value --property MainPID usmc-ivshmem.service
}

# QEMU's and udev's packages make it.
getent group kvm >/dev/null || groupadd --system kvm
dpkg -i /test/1.deb >/tmp/dpkg 2>&1 || fail "$(cat /tmp/dpkg)"
[ "$(active)" = 0 ] || fail "an installation starts services"
# shellcheck disable=SC2086 # a list of words
systemctl enable --now $sockets >/tmp/enable 2>&1 || fail "$(cat /tmp/enable)"
systemctl start usmc-ivshmem.service || fail "$(systemctl status --no-pager usmc-ivshmem.service)"
[ "$(active)" = 4 ] || fail "$(active) units of 4 are active"
server=$(process)
[ "$(readlink "/proc/$server/exe")" = /usr/bin/usmc ] || fail "the server is $(readlink "/proc/$server/exe")"
ok "services start when an administrator says so"
dpkg -i /test/2.deb >/tmp/dpkg 2>&1 || fail "$(cat /tmp/dpkg)"
[ "$(active)" = 4 ] && [ "$(process)" = "$server" ] || fail "an upgrade stopped services"
[ "$(readlink "/proc/$server/exe")" = '/usr/bin/usmc (deleted)' ] || fail "the program was not replaced"
[ "$(systemctl show --value --property NeedDaemonReload usmc-ivshmem.service)" = no ] || fail "systemd has old units"
ok "an upgrade leaves them alone"
dpkg -r usmc >/tmp/dpkg 2>&1 || fail "$(cat /tmp/dpkg)"
[ "$(active)" = 0 ] || fail "a removal leaves $(active) units active"
[ ! -e "/proc/$server" ] || fail "the server lives"
[ ! -e /run/usmc ] || fail "left behind: $(ls /run/usmc)"
dpkg -P usmc >/tmp/dpkg 2>&1 || fail "$(cat /tmp/dpkg)"
left=$(find /etc /run /usr /var -xdev -name '*usmc*' ! -path '/var/lib/dpkg/*')
[ -z "$left" ] || fail "left behind: $left"
ok "a removal stops and disables them"
