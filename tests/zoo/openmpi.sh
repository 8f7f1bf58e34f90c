# OpenMPI's processes on one host by TCP: exchanges of all sizes among four, each checked.
setup_openmpi() {
    sh .ci/packages openmpi-bin:mpirun libopenmpi-dev:- gcc:gcc libc6-dev:-
}

zoo_openmpi() {
    scratch
    mpicc -O2 -Wall -o "$dir/exchange" tests/programs/zoo/exchange.c
    # Its own files go to the server's directory.
    export TMPDIR="$dir" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    start mpirun --oversubscribe -n 4 --mca btl tcp,self --mca pml ob1 --mca btl_tcp_if_include lo --mca oob_tcp_if_include lo \
        --mca plm isolated --mca mpi_yield_when_idle 1 "$dir/exchange" "$seconds"
    await_end
    wait "$group" || { cat "$out" >&2; return 1; }
    grep '^[0-9]' "$out"
}
