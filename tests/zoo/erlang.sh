# Erlang's gen_tcp, by all its ways of waiting.
setup_erlang() {
    sh .ci/packages erlang-base:escript
}

zoo_erlang() {
    start escript tests/programs/zoo/echo.escript serve
    await '^[0-9]'
    client escript tests/programs/zoo/echo.escript talk "$(grep '^[0-9]' "$out")" 5000
}
