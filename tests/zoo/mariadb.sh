# MariaDB: sysbench's transactions, killed under load and recovered; then each row is compared with what its client wrote.
setup_mariadb() {
    sh .ci/packages mariadb-server:mariadbd mariadb-client:mariadb sysbench:sysbench python3-pymysql:-
}

start_mariadb() {
    start mariadbd --no-defaults --datadir="$dir/data" --socket="$dir/socket" --pid-file="$dir/pid" --port="$port" \
        --bind-address=127.0.0.1 --user="$(id -un)" --skip-log-bin --innodb-flush-log-at-trx-commit=2 --skip-name-resolve
    await 'ready for connections'
}

sysbench_of() {
    client sysbench --db-driver=mysql --mysql-host=127.0.0.1 --mysql-port="$port" --mysql-user=zoo --mysql-db=zoo --tables=2 \
        --table-size=5000 --threads=8 --time="$seconds" oltp_read_write "$@"
}

zoo_mariadb() {
    scratch
    port=$(free_port)
    mariadb-install-db --no-defaults --datadir="$dir/data" --user="$(id -un)" --auth-root-authentication-method=normal \
        --skip-test-db >"$dir/install" 2>&1 || { cat "$dir/install" >&2; return 1; }
    start_mariadb
    mariadb --no-defaults -S "$dir/socket" -u root -e "create database zoo; create user zoo@'%'; grant all on zoo.* to zoo@'%'"
    sysbench_of prepare >&2
    sysbench_of run >"$dir/run"
    cat "$dir/run" >&2
    grep -q 'reconnects: *0 ' "$dir/run"
    # Rows of all sizes up to 1 MB; the server is killed amid them, and what was acknowledged is there afterwards.
    client /usr/bin/python3 tests/programs/zoo/mariadb.py "$port" write "$dir/written" >&2 &
    writer=$!
    await_that sh -c '[ "$(wc -l <"$1")" -ge 50 ]' sh "$dir/written"
    kill -s KILL "$group"
    wait $writer
    start_mariadb
    client /usr/bin/python3 tests/programs/zoo/mariadb.py "$port" check "$dir/written" >&2
    finish
    sed -n 's/.*queries: .*(\([0-9]*\)\..*/\1/p' "$dir/run"
}
