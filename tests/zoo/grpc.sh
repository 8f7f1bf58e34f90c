# gRPC by Python: single calls, streams both ways, of messages up to 1 MB, from several threads.
setup_grpc() {
    sh .ci/packages python3-grpcio:-
    share=90
}

zoo_grpc() {
    port=$(free_port)
    start /usr/bin/python3 tests/programs/zoo/grpc_echo.py serve "$port"
    await_port "$port"
    client /usr/bin/python3 tests/programs/zoo/grpc_echo.py talk "$port" "$seconds"
    finish
}
