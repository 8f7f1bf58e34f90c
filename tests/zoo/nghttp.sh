# nghttpd with windows of HTTP/2 smaller than what it sends, so that either end waits for the other all the time.
setup_nghttp() {
    sh .ci/packages nghttp2-server:nghttpd nghttp2-client:h2load
}

zoo_nghttp() {
    scratch
    port=$(free_port)
    start nghttpd --no-tls --echo-upload -n 2 -w 10 -W 12 -d "$work/www" -a 127.0.0.1 "$port"
    await_port "$port"
    clients=
    for n in 0 1 2 3 4 5 6 7; do
        for name in 9 34 50 5$n; do
            client nghttp -w 10 -W 12 "http://127.0.0.1:$port/$name" | cmp - "$work/www/$name"
            client nghttp -w 10 -W 12 -d "$work/www/$name" "http://127.0.0.1:$port/" | cmp - "$work/www/$name"
        done &
        clients="$clients $!"
    done
    for each in $clients; do
        wait "$each"
    done
    for n in $(seq 0 99); do
        echo "http://127.0.0.1:$port/$n"
    done >"$dir/urls"
    client h2load -c 8 -m 8 -w 10 -W 12 -D "$seconds" -i "$dir/urls" >"$dir/load"
    cat "$dir/load" >&2
    grep -q ' 0 failed, 0 errored, 0 timeout' "$dir/load"
    sed -n 's/^finished in [^,]*, \([0-9]*\).*/\1/p' "$dir/load"
    finish
}
