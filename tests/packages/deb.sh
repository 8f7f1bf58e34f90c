# In a Debian root: the package's life. /test/1.deb is what `make deb` makes; 2.deb a newer version of the same; 3.deb has a
# library with another layout of the ISM directory.
set -eu
. /test/functions.sh
export DEBIAN_FRONTEND=noninteractive HOME=/root
# The other service has no link of its own to enable.
units='usmc-agent.socket usmc-agent.service usmc-ivshmem.socket usmc-ivshmem-host.socket'

enabled() {
    # shellcheck disable=SC2086 # a list of words
    systemctl is-enabled $units 2>/dev/null | grep -c '^enabled' || :
}

listing >/tmp/before
apt-get install -y -qq --no-install-recommends /test/1.deb >/tmp/apt 2>&1 || fail "$(cat /tmp/apt)"
ok "apt installs it"
[ "$(dpkg-query -W -f '${Depends}' usmc | tr ',' '\n' | grep -cvE '^ *(libc6|libgcc-s1) ')" = 0 ] || fail "it depends on more than libc"
# shellcheck disable=SC2016 # dpkg's
[ -z "$(dpkg-query -W -f '${Conffiles}' usmc)" ] || fail "it has configuration files"
dpkg --verify usmc
[ "$(stat -c '%a %U %G' /run/usmc)" = '755 root root' ] || fail "/run/usmc is $(stat -c '%a %U %G' /run/usmc)"
[ "$(enabled)" = 0 ] || fail "units are enabled"
ok "/run/usmc is there, no unit is enabled"
usmc check >/tmp/check 2>&1 || fail "usmc check: $(cat /tmp/check)"
usmc run -v -- true 2>&1 | grep -q /usr/lib/usmc/ || fail "the library is another one: $(usmc run -v -- true 2>&1)"
ok "usmc check: $(tail -n 1 /tmp/check)"
[ ! -e /usr/lib/usmc/lib/i386-linux-gnu ] ||
    [ "$(od -An -tu1 -j4 -N1 /usr/lib/usmc/lib/i386-linux-gnu/libusmc_preload.so | tr -d ' ')" = 1 ] || fail "the 32-bit library is not"

for page in $(cd /test/man && ls); do
    man --warnings "${page##*.}" "${page%.*}" >/tmp/page 2>/tmp/man || fail "man $page"
    [ -s /tmp/page ] && [ ! -s /tmp/man ] || fail "man $page: $(cat /tmp/man)"
done
ok "man shows every page"
bash -c '. /usr/share/bash-completion/completions/usmc
    COMP_WORDS=(usmc linkg) COMP_CWORD=1
    _usmc usmc linkg usmc
    [ "${COMPREPLY[*]}" = linkgroup ]' || fail "bash completes nothing"
HOME=/tmp fish -c 'complete -C "usmc exp"' | grep -q '^export' || fail "fish completes nothing"
zsh -fc 'autoload -U compinit; compinit -u -D; [ "$_comps[usmc]" = _usmc ] && autoload +X _usmc' || fail "zsh knows no completion"
ok "bash, fish and zsh complete"

usmc run -- redis-server --port 7000 --save '' --logfile /tmp/redis.log >/dev/null &
redis=$!
await usmc run -- redis-cli -p 7000 ping
usmc run -- redis-benchmark -p 7000 -q -n 100000000 -c 1 -t get >/dev/null 2>&1 &
load=$!
shared() {
    case $(modes 7000) in *'SMCD SMCD'*) ;; *) false ;; esac
}
await shared
kill $load
usmc run -- redis-cli -p 7000 shutdown nosave || :
wait $redis || fail "redis ended by $?"
ok "redis and its client are in shared memory"

serve 7001
old_server=$server
talk first 7001
first=$client
await are "$(port_of first)" 'SMCD SMCD'
dpkg -i /test/2.deb >/tmp/dpkg 2>&1 || fail "$(cat /tmp/dpkg)"
has_replaced_library $old_server || fail "the server's library was not replaced"
goes_on first
are "$(port_of first)" 'SMCD SMCD' || fail "the old connection is $(modes "$(port_of first)")"
ok "a connection goes on in shared memory during an upgrade"
talk second 7001
second=$client
! has_replaced_library $second || fail "a new program has the old library"
await are "$(port_of second)" 'SMCD SMCD'
ok "a new program and an old one share memory"

dpkg -i /test/3.deb >/tmp/dpkg 2>&1 || fail "$(cat /tmp/dpkg)"
talk third 7001
third=$client
goes_on third
are "$(port_of third)" 'TCP TCP' || fail "programs of two layouts are $(modes "$(port_of third)")"
serve 7002
new_server=$server
talk fourth 7002
fourth=$client
await are "$(port_of fourth)" 'SMCD SMCD'
usmc ss >/tmp/ss 2>&1 || fail "usmc ss"
[ "$(find /dev/shm/usmc-0 -name 'v*.device' | wc -l)" = 2 ] || fail "there are not two layouts: $(ls /dev/shm/usmc-0)"
ok "with another layout, a new program and an old one use TCP, and two new ones share memory, in one directory"
for name in first second third fourth; do goes_on $name; done
are "$(port_of first)" 'SMCD SMCD' || fail "the first connection is $(modes "$(port_of first)")"
ends_well first $first
ends_well second $second
ends_well third $third
ends_well fourth $fourth
kill $old_server $new_server
wait $old_server || fail "the old server ended by $?"
wait $new_server || fail "the new server ended by $?"
ok "every byte came back, from the first version's server, too"

# shellcheck disable=SC2086 # a list of words
systemctl enable $units >/dev/null 2>&1
[ "$(enabled)" = 4 ] || fail "systemd enables $(enabled) units of 4"
dpkg -i /test/2.deb >/tmp/dpkg 2>&1 || fail "$(cat /tmp/dpkg)"
[ "$(enabled)" = 4 ] || fail "another version disabled units"
apt-get remove -y -qq usmc >/tmp/apt 2>&1 || fail "$(cat /tmp/apt)"
[ -z "$(find /etc/systemd -name 'usmc*')" ] || fail "units are still enabled: $(find /etc/systemd -name 'usmc*')"
[ ! -e /run/usmc ] || fail "/run/usmc is left"
ok "a removal disables the units"
apt-get purge -y -qq usmc >/tmp/apt 2>&1 || fail "$(cat /tmp/apt)"
listing >/tmp/after
left=$(diff /tmp/before /tmp/after) || fail "left behind: $left"
find /var/lib/dpkg /var/lib/systemd -name '*usmc*' | grep . && fail "left in dpkg's or systemd's notes"
ok "a purge leaves nothing"
