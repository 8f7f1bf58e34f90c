#!/bin/sh
# CPython's own tests of everything that opens TCP sockets, under plain TCP and under uSMC, as it is and with connections
# that change over at once, for most of the tests' carry one message. A test that passes without the library and does not
# pass with it fails this script, and so do connections that all stayed TCP. Arguments: some modules only.
set -eu
cd "$(dirname "$0")/.."
. tests/rings.sh
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

# usmc run, by connections that change over as $1 says.
under() {
    how=$1
    shift
    # shellcheck disable=SC2086 # words
    USMC_ISM_DIR=$ism USMC_CHANGE_OVER=$how USMC_LOG="debug:$work/log" timeout 300 "$usmc" run -- \
        "$python" -m test $options "$@"
}

# Some of these tests are races by themselves: one that failed among all others has to pass alone, twice.
passes_alone() {
    for _ in 1 2; do
        under "$1" -m "$3" "$2" </dev/null >"$work/alone.log" 2>&1 || return 1
    done
}

total=0
failed=0
for module in $modules; do
    timeout 300 "$python" -m test $options "$module" >"$work/tcp.log" 2>&1 || true
    outcomes "$work/tcp.log" | grep ' ok$' >"$work/tcp.ok" || true
    count=$(wc -l <"$work/tcp.ok")
    for how in lasting at-once; do
        : >"$work/log"
        under $how "$module" >"$work/usmc.log" 2>&1 || true
        count_rings "$work/log"
        grep -c ' \.\.\. ' "$work/usmc.log" >/dev/null || { echo "$module: nothing ran" >&2; exit 1; }
        outcomes "$work/usmc.log" | grep ' ok$' >"$work/usmc.ok" || true
        worse=$(comm -23 "$work/tcp.ok" "$work/usmc.ok" | while read -r name rest; do
            passes_alone $how "$module" "$name" || echo "$name $rest"
        done)
        total=$((total + count))
        if [ -n "$worse" ]; then
            echo "$module, $how: passes over TCP, not under uSMC:"
            echo "$worse"
            failed=$((failed + $(echo "$worse" | wc -l)))
        else
            echo "$module, $how: $count tests, same outcomes; $in_rings of $ends ends of connections sent through rings"
        fi
        # Not all wait for each other: where the answer is on its way before the other end is there, it goes by TCP.
        if [ $how = at-once ] && [ "$ends" -gt 20 ] && [ $((in_rings * 10)) -lt "$ends" ]; then
            echo "$module: hardly a connection left TCP" >&2
            failed=$((failed + 1))
        fi
    done
done
echo "$((total - failed)) passed, $failed failed"
[ "$failed" = 0 ]
