# In an empty Debian root: the lines of docs/first-steps.md as they stand there, from `apt update` to the first connection that
# `usmc ss` shows in shared memory, in less than two minutes since /test/begin. `before`: those that need a network.
set -eu
. /test/functions.sh
export DEBIAN_FRONTEND=noninteractive HOME=/root
cd /test

# Runs the page's line that is so.
run() {
    line=$(grep -x "    $1" first-steps.md) || fail "docs/first-steps.md has no line $1"
    exec sh -c "exec $line"
}

seconds() {
    echo $(($(date +%s) - $(cat /test/begin)))
}

if [ "${1:-}" = before ]; then
    [ -z "$(command -v usmc redis-server python3)" ] || fail "the root is not empty"
    # Nobody is there to say yes, and no service is to start.
    echo 'APT::Get::Assume-Yes "true";' >/etc/apt/apt.conf.d/yes
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
    for command in 'apt update' 'apt install .*'; do
        (run "$command") >/tmp/apt 2>&1 || fail "$command: $(tail -n 5 /tmp/apt)"
    done
    ok "apt has installed it after $(seconds) s"
    exit
fi

(run 'usmc check') >/tmp/check 2>&1 || fail "usmc check: $(cat /tmp/check)"
run 'usmc run -- redis-server .*' >/tmp/server 2>&1 &
server=$!
await grep -q 'Ready to accept connections' /tmp/server
run 'usmc run -- redis-benchmark .*' >/tmp/client 2>&1 &
client=$!
# Both ends of at least one connection.
await sh -c '[ "$(usmc ss | awk "/redis-(server|benchmark)/ && / SMCD / { n[\$3]++ } END { print length(n) }")" = 2 ]'
took=$(seconds)
usmc ss | sed -n '1p;/ SMCD /{p;q}'
kill $client
kill $server
wait $client 2>/dev/null || :
wait $server || fail "redis-server ended by $?"
[ "$took" -lt 120 ] || fail "the first connection in shared memory came after $took s"
ok "the first connection is in shared memory after $took s"
