# BIND, asked by TCP: dnsperf's queries, and a zone of records of all sizes, which is transferred and compared. Reloaded under
# load.
setup_bind() {
    sh .ci/packages bind9:named bind9-dnsutils:dig dnsperf:dnsperf
}

zoo_bind() {
    scratch
    port=$(free_port)
    cat >"$dir/conf" <<END
options { directory "$dir"; listen-on port $port { 127.0.0.1; }; listen-on-v6 { none; }; pid-file "$dir/pid";
    session-keyfile none; recursion no; allow-transfer { any; }; tcp-clients 100; dnssec-validation no; };
controls { };
zone "zoo" { type master; file "$dir/zone"; };
END
    {
        echo "\$TTL 60"
        echo "@ SOA ns root 1 60 60 60 60"
        echo "@ NS ns"
        echo "ns A 127.0.0.1"
        awk 'BEGIN { for (n = 0; n < 5000; n++) { s = ""; for (k = 0; k < n % 8; k++) s = s sprintf("%025d", n * 1000 + k)
            printf "n%d A 10.0.%d.%d\nn%d TXT \"%s\"\n", n, n / 250, n % 250, n, s } }'
    } >"$dir/zone"
    awk 'BEGIN { for (n = 0; n < 5000; n++) printf "n%d.zoo %s\n", n, n % 2 ? "A" : "TXT" }' >"$dir/queries"
    start named -g -c "$dir/conf"
    await 'all zones loaded'
    client dig +tcp +onesoa +noall +answer -p "$port" @127.0.0.1 axfr zoo >"$dir/transferred"
    awk '$4 == "A" && $1 ~ /^n[0-9]/ { split($5, a, "."); if ("n" a[3] * 250 + a[4] ".zoo." != $1) exit 1; as++ }
        $4 == "TXT" { n = substr($1, 2) + 0; s = ""; for (k = 0; k < n % 8; k++) s = s sprintf("%025d", n * 1000 + k)
            if ($5 != "\"" s "\"") exit 1; txts++ }
        END { if (as != 5000 || txts != 5000) { print "transferred:", as + 0, txts + 0; exit 1 } }' "$dir/transferred" >&2 ||
        { tail -n 5 "$dir/transferred" "$out" >&2; return 1; }
    client dnsperf -m tcp -s 127.0.0.1 -p "$port" -d "$dir/queries" -c 8 -l "$seconds" -t 20 >"$dir/run" 2>&1 &
    load=$!
    kill -s HUP "$group"
    await 'reloading configuration succeeded'
    wait $load
    cat "$dir/run" >&2
    grep -Eq 'Queries lost: *0 ' "$dir/run"
    grep -Eq 'NOERROR [0-9]+ \(100.00%\)' "$dir/run"
    # Many questions by one connection, and the right answer to each.
    client dig +tcp +keepopen +short -p "$port" @127.0.0.1 $(seq -f 'n%.0f.zoo A' 0 499) >"$dir/answers"
    awk 'BEGIN { for (n = 0; n < 500; n++) printf "10.0.%d.%d\n", n / 250, n % 250 }' | cmp - "$dir/answers"
    sed -n 's/.*Queries per second: *\([0-9]*\).*/\1/p' "$dir/run"
    finish
}
