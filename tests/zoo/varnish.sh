# Varnish before nginx: half of the answers from its cache, half passed through.
setup_varnish() {
    sh .ci/packages varnish:varnishd nginx-light:nginx gcc:gcc libc6-dev:-
    share=90
}

zoo_varnish() {
    scratch
    port=$(free_port)
    start_nginx
    cat >"$dir/vcl" <<END
vcl 4.1;
backend default { .host = "127.0.0.1"; .port = "$back"; }
sub vcl_recv { if (req.url ~ "[02468]$") { return (pass); } return (hash); }
END
    start varnishd -F -j none -n "$dir/varnish" -f "$dir/vcl" -a "127.0.0.1:$port" -T none -s malloc,50m -p thread_pool_min=10 \
        -p thread_pool_max=100
    await_port "$port"
    http "$port" 16 "$seconds" get
    finish
}
