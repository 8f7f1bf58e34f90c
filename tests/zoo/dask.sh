# Dask: a scheduler and two workers, which pass arrays among themselves; one worker is killed amid the work and its part is done
# by the other.
setup_dask() {
    sh .ci/packages python3-distributed:- python3-numpy:-
}

zoo_dask() {
    scratch
    port=$(free_port)
    start /usr/bin/python3 -m distributed.cli.dask_scheduler --host 127.0.0.1 --port "$port" --no-dashboard --no-show
    await_port "$port"
    for n in 1 2; do
        start /usr/bin/python3 -m distributed.cli.dask_worker "tcp://127.0.0.1:$port" --host 127.0.0.1 --nthreads 2 --no-nanny \
            --no-dashboard --local-directory "$dir/$n"
    done
    client /usr/bin/python3 tests/programs/zoo/dask_sums.py "$port" "$seconds" "$group"
}
