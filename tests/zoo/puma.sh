# Puma with two workers of four threads, replaced one after another under load (a phased restart), then one is killed.
setup_puma() {
    sh .ci/packages puma:puma
}

restart_puma() {
    workers=$(pgrep -P "$group" | tr '\n' ' ')
    kill -s USR1 "$group"
    await_that sh -c 'for worker in $1; do ! kill -0 $worker || exit 1; done; pgrep -P "$2"' sh "$workers" "$group"
}

zoo_puma() {
    scratch
    port=$(free_port)
    cat >"$dir/echo.ru" <<'END'
run lambda { |env| body = env['rack.input'].read; [200, { 'Content-Length' => body.bytesize.to_s }, [body]] }
END
    cat >"$dir/conf.rb" <<END
bind 'tcp://127.0.0.1:$port'
workers 2
threads 4, 4
environment 'production'
rackup '$dir/echo.ru'
END
    start sh -c "cd $dir && exec puma -C $dir/conf.rb"
    await 'Worker 1 .*booted'
    http_and restart_puma -e -m 2 "$port" 8 "$seconds" post
    http_and kill_worker -e -m 1 "$port" 8 1 post >&2
    http "$port" 8 0.5 post >&2
    finish
}
