# HAProxy before nginx, reloaded under load: by -sf, as its manual shows. What the old process has begun it ends.
setup_haproxy_http() {
    sh .ci/packages haproxy:haproxy nginx-light:nginx
}

setup_haproxy_tcp() {
    setup_haproxy_http
}

# nginx with the files of the client, at `back`.
start_nginx() {
    back=$(free_port)
    cat >"$dir/nginx.conf" <<END
worker_processes 1; pid nginx.pid; daemon off; error_log stderr warn;
$([ "$(id -u)" != 0 ] || [ -n "$as" ] || echo 'user root;')
events { worker_connections 2000; }
http {
    access_log off; keepalive_requests 1000000;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    server { listen 127.0.0.1:$back; root $work/www; }
    ${1:-}
}
END
    start nginx -p "$dir" -c "$dir/nginx.conf"
    await_port "$back"
}

start_haproxy() {
    cat >"$dir/haproxy.cfg" <<END
global
    maxconn 2000
defaults
    mode $1
    timeout connect 10s
    timeout client 60s
    timeout server 60s
frontend front
    bind 127.0.0.1:$port
    default_backend back
backend back
    server nginx 127.0.0.1:$back
END
    start haproxy -f "$dir/haproxy.cfg"
    await_port "$port"
}

reload_haproxy() {
    old=$group
    start haproxy -f "$dir/haproxy.cfg" -sf "$old"
    # The new one tells the old one once it listens itself.
    await_that sh -c '! ss -Hltnp "sport = :$1" | grep -q "pid=$2,"' sh "$port" "$old"
    kill -0 "$group"
}

haproxy_reloaded() {
    scratch
    port=$(free_port)
    start_nginx
    start_haproxy "$1"
    http_and reload_haproxy -m 4 "$port" 32 "$seconds" get
}

zoo_haproxy_http() {
    haproxy_reloaded http
}

zoo_haproxy_tcp() {
    haproxy_reloaded tcp
}
