# In a container of another image: uSMC from a volume.
set -eu
. /test/functions.sh
PATH=/usmc:$PATH
usmc check >/tmp/check 2>&1 || fail "usmc check: $(cat /tmp/check)"
serve 7001
talk first 7001
await are "$(port_of first)" 'SMCD SMCD'
ends_well first "$client"
kill "$server"
wait "$server" || fail "the server ended by $?"
# By the environment alone, where an entry point is to stay.
export LD_PRELOAD=/usmc/libusmc_preload.so
python3 /test/stream.py serve 7002 >/tmp/serve.7002 &
server=$!
await grep -q ready /tmp/serve.7002
: >/tmp/second
python3 /test/stream.py talk 7002 /tmp/second >/tmp/second.port 2>/tmp/second.errors &
client=$!
await test -s /tmp/second.port
await are "$(port_of second)" 'SMCD SMCD'
ends_well second $client
kill "$server"
ok "programs of another image share memory by the volume"
