#!/usr/bin/env escript
%% gen_tcp's ways of waiting: an echo server with a process for each connection, and its client, which checks what comes back.
%% Usage: echo.escript serve, which prints its port and ends with its input; echo.escript talk PORT COUNT.

main(["serve"]) ->
    {ok, Listener} = gen_tcp:listen(0, [binary, {ip, {127, 0, 0, 1}}, {active, false}, {packet, 4}, {backlog, 64}]),
    {ok, Port} = inet:port(Listener),
    io:format("~b~n", [Port]),
    spawn_link(fun() -> accept(Listener, 0) end),
    io:get_line("");
main(["talk", Port, Count]) ->
    Begin = erlang:monotonic_time(microsecond),
    Self = self(),
    Clients = [spawn_link(fun() -> talk(list_to_integer(Port), list_to_integer(Count), N), Self ! {done, N} end)
               || N <- lists:seq(1, 4)],
    [receive {done, N} -> ok after 60000 -> halt(1) end || {N, _} <- lists:zip(lists:seq(1, 4), Clients)],
    Took = erlang:monotonic_time(microsecond) - Begin,
    io:format("~b~n", [4 * list_to_integer(Count) * 1000000 div Took]).

accept(Listener, Number) ->
    {ok, Socket} = gen_tcp:accept(Listener),
    Pid = spawn(fun() -> receive go -> serve(Socket, Number rem 3) end end),
    ok = gen_tcp:controlling_process(Socket, Pid),
    Pid ! go,
    accept(Listener, Number + 1).

%% By one event at a time, by ten, and by calls.
serve(Socket, 0) ->
    ok = inet:setopts(Socket, [{active, once}]),
    receive
        {tcp, Socket, Data} -> ok = gen_tcp:send(Socket, Data), serve(Socket, 0);
        {tcp_closed, Socket} -> ok
    end;
serve(Socket, 1) ->
    ok = inet:setopts(Socket, [{active, 10}]),
    serve_ten(Socket);
serve(Socket, 2) ->
    case gen_tcp:recv(Socket, 0, 60000) of
        {ok, Data} -> ok = gen_tcp:send(Socket, Data), serve(Socket, 2);
        {error, closed} -> ok
    end.

serve_ten(Socket) ->
    receive
        {tcp, Socket, Data} -> ok = gen_tcp:send(Socket, Data), serve_ten(Socket);
        {tcp_passive, Socket} -> serve(Socket, 1);
        {tcp_closed, Socket} -> ok
    end.

talk(Port, Count, Number) ->
    {ok, Socket} = gen_tcp:connect({127, 0, 0, 1}, Port, [binary, {active, false}, {packet, 4}, {nodelay, true}]),
    talk_on(Socket, Count, Number),
    ok = gen_tcp:close(Socket).

talk_on(_, 0, _) -> ok;
talk_on(Socket, Left, Number) ->
    Data = binary:copy(<<Number, Left:32>>, 1 + Left rem 300),
    ok = gen_tcp:send(Socket, Data),
    {ok, Data} = gen_tcp:recv(Socket, 0, 20000),
    talk_on(Socket, Left - 1, Number).
