# PHP behind nginx: one connection for each request, as nginx does by default, and kept ones. The script gives back what it is
# sent. Reloaded and a worker killed under load.
setup_php_close() {
    sh .ci/packages php-fpm:- nginx-light:nginx
    # What nginx asks of it is asked by connections of one request.
    share=0
}

setup_php_kept() {
    setup_php_close
    share=50
}

reload_php() {
    kill -s USR2 "$group"
    marks=$((marks + 1))
    await_that sh -c '[ "$(grep -c "ready to handle connections" "$1")" -gt "$2" ]' sh "$dir/log" "$marks"
}

behind_nginx() {
    scratch
    port=$(free_port)
    cat >"$dir/conf" <<END
[global]
pid = $dir/pid
error_log = $dir/log
daemonize = no
process_control_timeout = 10s
[zoo]
$([ "$(id -u)" != 0 ] || echo 'user = root')
listen = 127.0.0.1:$port
pm = static
pm.max_children = 8
END
    cat >"$dir/echo.php" <<'END'
<?php
header('Content-Type: application/octet-stream');
echo file_get_contents('php://input');
END
    php=$(echo /usr/sbin/php-fpm*)
    start_nginx "upstream php { server 127.0.0.1:$port; $1 }
    client_body_buffer_size 1m; client_max_body_size 2m;
    server { listen 127.0.0.1:$((front=$(free_port))); location / {
        fastcgi_pass php; $2 include /etc/nginx/fastcgi_params; fastcgi_param SCRIPT_FILENAME $dir/echo.php; } }"
    start "$php" -R -F -y "$dir/conf"
    await_port "$port"
    marks=0
    http_and reload_php -e -m 2 "$front" 8 "$seconds" post
    http_and kill_worker -e -m 1 "$front" 8 1 post >&2
    http "$front" 8 0.5 post >&2
    finish
}

zoo_php_close() {
    behind_nginx '' ''
}

zoo_php_kept() {
    behind_nginx 'keepalive 8;' 'fastcgi_keep_conn on;'
}
