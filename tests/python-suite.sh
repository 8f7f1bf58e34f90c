#!/bin/sh
# CPython's own tests of everything that opens TCP sockets, under plain TCP and under uSMC. A test that
# passes without the library and does not pass with it fails this script. Arguments: some modules only.
set -eu
cd "$(dirname "$0")/.."
usmc=${CARGO_TARGET_DIR:-$PWD/target}/release/usmc
sh .ci/packages python3:/usr/bin/python3 libpython3.11-testsuite:-
work=$(mktemp -d)
ism=$(mktemp -d /dev/shm/usmc-suite.XXXXXX)
trap 'rm -rf "$work" "$ism"' EXIT
trap 'exit 1' INT TERM
# Another Python, such as the 32-bit one of tests/python32.sh.
python=${PYTHON:-/usr/bin/python3}
modules=${*:-test_socket test_selectors test_socketserver test_asyncio test_ssl test_ftplib test_smtplib test_httpservers \
    test_httplib test_xmlrpc test_urllib2_localnet test_poplib test_imaplib test_asyncore test_multiprocessing_fork \
    test_multiprocessing_spawn test_multiprocessing_forkserver}
# The VSOCK tests hang on hosts without a hypervisor's answer, with and without the library.
options="-u network -v -i ThreadedVSOCK*"

outcomes() {
    sed -n 's/^\(test[^ ]* ([^)]*)\).*\.\.\. \(.*\)$/\1 \2/p' "$1" | sed 's/ skipped .*/ skipped/' | sort -u
}

# Some of these tests are races by themselves: one that failed among all others has to pass alone, twice.
passes_alone() {
    for _ in 1 2; do
        USMC_ISM_DIR=$ism timeout 300 "$usmc" run -- \
            "$python" -m test $options -m "$2" "$1" </dev/null >"$work/alone.log" 2>&1 || return 1
    done
}

total=0
failed=0
for module in $modules; do
    timeout 300 "$python" -m test $options "$module" >"$work/tcp.log" 2>&1 || true
    USMC_ISM_DIR=$ism timeout 300 "$usmc" run -- \
        "$python" -m test $options "$module" >"$work/usmc.log" 2>&1 || true
    grep -c ' \.\.\. ' "$work/usmc.log" >/dev/null || { echo "$module: nothing ran" >&2; exit 1; }
    outcomes "$work/tcp.log" | grep ' ok$' >"$work/tcp.ok" || true
    outcomes "$work/usmc.log" | grep ' ok$' >"$work/usmc.ok" || true
    worse=$(comm -23 "$work/tcp.ok" "$work/usmc.ok" | while read -r name rest; do
        passes_alone "$module" "$name" || echo "$name $rest"
    done)
    count=$(wc -l <"$work/tcp.ok")
    total=$((total + count))
    if [ -n "$worse" ]; then
        echo "$module: passes over TCP, not under uSMC:"
        echo "$worse"
        failed=$((failed + $(echo "$worse" | wc -l)))
    else
        echo "$module: $count tests, same outcomes"
    fi
done
echo "$((total - failed)) passed, $failed failed"
[ "$failed" = 0 ]
