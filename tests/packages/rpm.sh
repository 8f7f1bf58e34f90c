# In a Debian root with rpm: the RPM package, with its scripts. There is no rpm database, so that nothing that it requires is known.
set -eu
. /test/functions.sh
export HOME=/tmp
# Of other packages where this one is for.
mkdir -p /usr/share/licenses /usr/share/zsh/site-functions
listing >/tmp/before
rpm -i --nodeps --force-debian /test/1.rpm 2>/tmp/rpm || fail "$(cat /tmp/rpm)"
rpm -V --nodeps usmc || fail "rpm -V"
[ "$(stat -c '%a %U %G' /run/usmc)" = '755 root root' ] || fail "/run/usmc is not there"
usmc check >/tmp/check 2>&1 || fail "usmc check: $(cat /tmp/check)"
serve 7001
talk first 7001
await are "$(port_of first)" 'SMCD SMCD'
ends_well first $client
kill "$server"
wait "$server" || fail "the server ended by $?"
systemctl enable usmc-agent.socket >/dev/null 2>&1
rpm -e --nodeps usmc 2>/tmp/rpm || fail "$(cat /tmp/rpm)"
listing >/tmp/after
left=$(diff /tmp/before /tmp/after) || fail "left behind: $left"
ok "installed by rpm it shares memory, and leaves nothing"
