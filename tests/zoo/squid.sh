# Squid before nginx, half of its answers from its cache, reconfigured under load.
setup_squid() {
    sh .ci/packages squid:squid nginx-light:nginx
    as=www-data
}

reload_squid() {
    kill -s HUP "$group"
    marks=$((marks + 1))
    await_that sh -c '[ "$(grep -c "Accepting reverse-proxy HTTP Socket connections" "$1")" -gt "$2" ]' sh "$dir/log" "$marks"
}

zoo_squid() {
    scratch
    port=$(free_port)
    start_nginx
    cat >"$dir/conf" <<END
http_port 127.0.0.1:$port accel defaultsite=zoo no-vhost
cache_peer 127.0.0.1 parent $back 0 no-query originserver
http_access allow all
acl half urlpath_regex [02468]$
cache deny half
refresh_pattern . 60 50% 60
cache_mem 16 MB
maximum_object_size_in_memory 1 MB
pid_filename $dir/pid
cache_log $dir/log
access_log none
coredump_dir $dir
netdb_filename none
pinger_enable off
shutdown_lifetime 1 seconds
visible_hostname zoo
END
    start squid -N -f "$dir/conf"
    await_port "$port"
    marks=0
    http_and reload_squid -e -m 1 "$port" 16 "$seconds" get
    http "$port" 16 0.5 get >&2
    finish
}
