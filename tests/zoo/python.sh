# Python's web servers: gunicorn by processes and by threads behind nginx, as it is meant to be, and uvicorn by itself.
# gunicorn is reloaded and a worker killed under load.
setup_gunicorn_sync() {
    sh .ci/packages gunicorn:gunicorn nginx-light:nginx
    # One connection for each request.
    share=0
}

setup_gunicorn_gthread() {
    sh .ci/packages gunicorn:gunicorn
}

setup_uvicorn() {
    sh .ci/packages uvicorn:uvicorn
    share=90
}

reload_gunicorn() {
    workers=$(pgrep -P "$group" | tr '\n' ' ')
    kill -s HUP "$group"
    await_that sh -c 'for worker in $1; do ! kill -0 $worker || exit 1; done; pgrep -P "$2"' sh "$workers" "$group"
}

gunicorn_reloaded() {
    http_and reload_gunicorn -e -m 2 "$1" 8 "$seconds" post
    http_and kill_worker -e -m 1 "$1" 8 1 post >&2
    http "$1" 8 0.5 post >&2
    finish
}

zoo_gunicorn_sync() {
    scratch
    port=$(free_port)
    front=$(free_port)
    start_nginx "client_max_body_size 2m; client_body_buffer_size 1m;
    server { listen 127.0.0.1:$front; location / { proxy_pass http://127.0.0.1:$port; } }"
    start /usr/bin/python3 -m gunicorn --chdir tests/programs/zoo -b "127.0.0.1:$port" -w 4 --graceful-timeout 10 echo:wsgi
    await_port "$port"
    gunicorn_reloaded "$front"
}

zoo_gunicorn_gthread() {
    port=$(free_port)
    start /usr/bin/python3 -m gunicorn --chdir tests/programs/zoo -b "127.0.0.1:$port" -w 2 --threads 8 --keep-alive 30 \
        --graceful-timeout 10 echo:wsgi
    await_port "$port"
    gunicorn_reloaded "$port"
}

zoo_uvicorn() {
    port=$(free_port)
    start /usr/bin/python3 -m uvicorn --app-dir tests/programs/zoo --port "$port" --no-access-log --log-level warning echo:asgi
    await_port "$port"
    http "$port" 16 "$seconds" post
    finish
}
