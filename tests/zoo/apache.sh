# Apache, by threads and by processes: reloaded under load by its graceful restart, then one worker is killed under load.
setup_apache_event() {
    sh .ci/packages apache2-bin:apache2
    as=www-data
}

setup_apache_prefork() {
    setup_apache_event
}

restart_apache() {
    kill -s USR1 "$group"
    marks=$((marks + 1))
    await_that sh -c '[ "$(grep -c "resuming normal operations" "$1")" -gt "$2" ]' sh "$dir/errors" "$marks"
}

# One that has just ended by itself does not count.
kill_worker() {
    for worker in $(pgrep -P "$group"); do
        ! kill -s KILL "$worker" 2>/dev/null || return 0
    done
    return 1
}

apache_restarted() {
    scratch
    port=$(free_port)
    modules=/usr/lib/apache2/modules
    cat >"$dir/conf" <<END
ServerRoot $dir
ServerName zoo
PidFile $dir/pid
DefaultRuntimeDir $dir
ErrorLog $dir/errors
LogLevel notice
Listen 127.0.0.1:$port
LoadModule mpm_$1_module $modules/mod_mpm_$1.so
LoadModule authz_core_module $modules/mod_authz_core.so
DocumentRoot $work/www
MaxKeepAliveRequests 0
KeepAliveTimeout 30
GracefulShutdownTimeout 10
$2
END
    start apache2 -f "$dir/conf" -DFOREGROUND
    await_port "$port"
    marks=0
    http_and restart_apache -m 3 "$port" 16 "$seconds" get
    http_and kill_worker -e -m 1 "$port" 16 1 get >&2
    http "$port" 16 0.5 get >&2
    finish
}

zoo_apache_event() {
    apache_restarted event 'StartServers 2
ThreadsPerChild 25
MaxRequestWorkers 100'
}

zoo_apache_prefork() {
    apache_restarted prefork 'StartServers 16
MaxRequestWorkers 40'
}
