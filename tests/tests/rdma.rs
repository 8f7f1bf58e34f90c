//! Programs of two hosts whose connections go by RDMA: by the fake libibverbs, which proves everything but the wire.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use usmc_tests::build::{system_program, tests_dir};
use usmc_tests::network::{self, At, Network};
use usmc_tests::procfs::sleeps_in;
use usmc_tests::rdma::world::{CLIENT, SERVER, World};
use usmc_tests::rdma::{activate_for_loopback, agents_of, end_agents, share};
use usmc_tests::{Fixture, Process, is_plain};

fn python(world: &World, host: usize, args: &[&str]) -> Process {
    let mut command = world.python(host, "echo.py");
    command.args(args);
    world.fixture.spawn(command)
}

/// A server that listens, and its port.
fn serves(world: &World, style: &str) -> (Process, u16) {
    serves_as(world, "server", style)
}

fn serves_as(world: &World, role: &str, style: &str) -> (Process, u16) {
    let port = world.fixture.port();
    let mut server = python(world, SERVER, &[role, style, "0.0.0.0", &port.to_string()]);
    assert_eq!(server.line(), "listening");
    (server, port)
}

/// A client that is connected to it, and waits for a line.
fn calls(world: &World, style: &str, port: u16) -> Process {
    let (to, number) = (world.hosts.address(SERVER), port.to_string());
    let mut client = python(world, CLIENT, &["client", style, &to, &number, "pause"]);
    let _ = client.number_after("port ");
    client
}

/// What both agents show is a group with one connection, by one link to the other's.
fn assert_one_group(world: &World) {
    let [one, other] = [CLIENT, SERVER].map(|host| {
        let [group] = &world.groups(host)[..] else { panic!("{:?}", world.groups(host)) };
        let expected = (&"SINGLE".into(), &1.into(), &1.into());
        assert_eq!((&group["type"], &group["conns"], &group["links"][0]["conns"]), expected);
        let table = world.says(host, &["linkgroup", "link-show"]);
        let device = format!("host{host}");
        assert!(table.contains("LINK_ACTIVE") && table.contains(&device), "{table}");
        group.clone()
    });
    assert_eq!((&one["role"], &other["role"]), (&"CLNT".into(), &"SERV".into()));
    for (ours, theirs) in [("gid", "peer_gid"), ("qpn", "peer_qpn"), ("link_id", "link_id")] {
        assert_eq!(one["links"][0][ours], other["links"][0][theirs]);
    }
}

/// The client that waits for a line goes on, and the server gets all that it sends.
fn complete(client: &mut Process, server: &mut Process, what: &str) {
    client.say("");
    let echoed = client.number_after("echoed ");
    client.succeed();
    assert_eq!(server.number_after("served "), echoed, "{what}");
    server.succeed();
}

/// However a program waits.
#[test]
fn every_way_to_wait() {
    if is_plain() {
        return;
    }
    let world = World::new("waits by RDMA");
    for style in
        ["blocking", "poll", "select", "epoll", "edge", "oneshot", "peek", "waitall", "busy"]
    {
        let (mut server, port) = serves(&world, style);
        let mut client = calls(&world, style, port);
        world.assert_smcr(port, 2);
        if style == "blocking" {
            assert_one_group(&world);
        }
        complete(&mut client, &mut server, style);
    }
    world.end();
}

/// A thread that waits by poll(2) for an urgent byte while another one's first send hands the connection over: it comes to the deputy.
#[test]
fn a_poll_beside_a_hand_over() {
    if is_plain() {
        return;
    }
    let world = World::new("a poll beside a hand-over");
    let port = world.fixture.port();
    let number = port.to_string();
    let script = |host: usize, words: [&str; 3]| {
        let mut command = world.python(host, "beside.py");
        command.args(words);
        world.fixture.spawn(command)
    };
    let mut server = script(SERVER, ["serve", "0.0.0.0", &number]);
    assert_eq!(server.line(), "listening");
    let agent = &world.hosts.agents[SERVER];
    agent.signal(libc::SIGSTOP);
    let mut client = script(CLIENT, ["call", &world.hosts.address(SERVER), &number]);
    assert_eq!(client.line(), "connected");
    assert_eq!(server.line(), "waits");
    world.fixture.wait_until("a thread that polls", || {
        matches!(sleeps_in(server.pid()), Some(libc::SYS_poll | libc::SYS_ppoll))
    });
    agent.signal(libc::SIGCONT);
    world.assert_smcr(port, 2);
    client.say("");
    assert_eq!(server.line(), "urgent");
    server.succeed();
    client.succeed();
    world.end();
}

/// An urgent byte, the first of its direction, is told of behind the end, too.
#[test]
fn an_urgent_byte_behind_an_end() {
    let world = World::new("an urgent byte behind an end");
    let port = world.fixture.port();
    let number = port.to_string();
    let script = |host: usize, words: [&str; 3]| {
        let mut command = world.python(host, "urgent_end.py");
        command.args(words);
        world.fixture.spawn(command)
    };
    let mut server = script(SERVER, ["serve", "0.0.0.0", &number]);
    assert_eq!(server.line(), "listening");
    let mut client = script(CLIENT, ["call", &world.hosts.address(SERVER), &number]);
    assert_eq!(server.line(), "urgent");
    server.succeed();
    client.succeed();
    world.end();
}

/// Both ends send urgent bytes from their first message on, for which each leaves its agent's ring while the other one's come.
#[test]
fn urgent_bytes_both_ways() {
    const ROUNDS: usize = 15;
    const PAIRS: usize = 4;
    if is_plain() {
        return;
    }
    let world = World::new("urgent bytes both ways");
    let start = |host: usize, words: &[&str]| {
        let mut command = world.python(host, "ends.py");
        command.args(words);
        world.fixture.spawn(command)
    };
    for _ in 0..ROUNDS {
        let pairs = [(); PAIRS].map(|()| {
            let port = world.fixture.port().to_string();
            let mut server = start(SERVER, &["serve", "0.0.0.0", &port, "urgent"]);
            assert_eq!(server.line(), "ready");
            (server, start(CLIENT, &["call", &world.hosts.address(SERVER), &port, "urgent"]))
        });
        for end in pairs.into_iter().flat_map(|(server, client)| [server, client]) {
            let said = { end }.succeed();
            assert!(said.ends_with("urgent 8"), "{said}");
        }
    }
    for host in [CLIENT, SERVER] {
        let agent = &world.json(host, &["stats", "--json"])["agents"][0];
        assert_eq!(agent["established"], ROUNDS * PAIRS, "{agent}");
    }
    println!("{0} of {0} connections by RDMA, at both ends", ROUNDS * PAIRS);
    world.end();
}

/// An agent that is to end with its last connection waits for none that is aborted, and whose peer does not answer.
#[test]
fn an_agent_ends_beside_a_silent_peer() {
    /// As long as link groups that end may take, and much more; links are tested after 30 s.
    const MOST: Duration = Duration::from_secs(25);
    if is_plain() {
        return;
    }
    let mut world = World::new("a silent peer");
    let port = world.fixture.port();
    let (number, gate) = (port.to_string(), world.fixture.scratch().join("gate"));
    let gate = gate.to_str().expect("UTF-8");
    world.hosts.tool(SERVER, &["mkfifo", gate]);
    let start = |host: usize, role: &str, address: &str| {
        let mut command = world.python(host, "ends.py");
        command.args([role, address, &number, "killed", gate]);
        world.fixture.spawn(command)
    };
    let mut server = start(SERVER, "serve", "0.0.0.0");
    assert_eq!(server.line(), "ready");
    let mut client = start(CLIENT, "call", &world.hosts.address(SERVER));
    let _ = client.number_after("full ");
    world.assert_smcr(port, 2);
    world.hosts.agents[CLIENT].signal(libc::SIGSTOP);
    server.kill();
    let begun = Instant::now();
    world.stop(SERVER);
    let lasted = begun.elapsed();
    world.hosts.agents[CLIENT].signal(libc::SIGCONT);
    assert!(lasted < MOST, "{lasted:?}");
    assert_eq!(client.line(), "reset");
    client.succeed();
    world.end();
}

/// A server's host without an agent declines, and each way to wait goes on over TCP, with all that was written meanwhile.
#[test]
fn a_peer_without_an_agent() {
    if is_plain() {
        return;
    }
    let mut world = World::new("one agent");
    world.stop(SERVER);
    for style in
        ["blocking", "poll", "select", "epoll", "edge", "oneshot", "peek", "busy", "nested"]
    {
        let (mut server, port) = serves(&world, style);
        let mut client = calls(&world, style, port);
        let mut seen = Vec::new();
        world.fixture.wait_until(&format!("TCP, with the reason: {style}"), || {
            seen = world.fixture.connections(port);
            seen.len() == 2 && seen.iter().all(|end| end.fallback_reason.contains("declined"))
        });
        complete(&mut client, &mut server, style);
    }
    world.end();
}

/// A server declines while its client sleeps. The client's agent rings once.
#[test]
fn a_decline_wakes_a_client() {
    if is_plain() {
        return;
    }
    let mut world = World::new("a decline in a sleep");
    world.stop(SERVER);
    const WAITS: [libc::c_long; 5] = [
        libc::SYS_recvfrom,
        libc::SYS_poll,
        libc::SYS_ppoll,
        libc::SYS_epoll_wait,
        libc::SYS_epoll_pwait,
    ];
    for style in ["blocking", "poll", "select", "epoll", "edge", "nested"] {
        let (mut server, port) = serves(&world, style);
        server.signal(libc::SIGSTOP);
        let mut client = calls(&world, style, port);
        world.fixture.wait_until(&format!("a client asleep: {style}"), || {
            sleeps_in(client.pid()).is_some_and(|call| WAITS.contains(&call))
        });
        server.signal(libc::SIGCONT);
        complete(&mut client, &mut server, style);
    }
    world.end();
}

/// `usmc check HOST:PORT` says what a connection there is by, and `usmc ss` and `usmc stats` what those of programs are by.
#[test]
fn what_commands_say() {
    if is_plain() {
        return;
    }
    let mut world = World::new("commands say it");
    let number = world.fixture.port();
    let address = world.hosts.address(SERVER);
    let place = format!("{address}:{number}");
    let mut mirror = python(&world, SERVER, &["mirror", "-", "0.0.0.0", &number.to_string()]);
    assert_eq!(mirror.line(), "listening");
    let check = |world: &World| {
        let output = world.usmc(CLIENT, &["check", &place]).output().expect("usmc");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (status, said) = check(&world);
    assert_eq!(status, Some(0), "{said}");
    for fact in
        ["device host0 port 1 is ACTIVE", "which device host0 has", "by RDMA, by device host0"]
    {
        assert!(said.contains(fact), "{fact}: {said}");
    }
    let (mut server, port) = serves(&world, "poll");
    let mut client = calls(&world, "blocking", port);
    world.assert_smcr(port, 2);
    for (host, end) in [(CLIENT, "client"), (SERVER, "server")] {
        let shown = usmc_tests::ss::parse(&world.says(host, &["ss", "--json"]));
        let pid = [&client, &server][host].pid();
        let own = shown.iter().find(|end| end.pid == pid).expect("its connection");
        assert_eq!((&*own.mode, &*own.device), ("SMCR", &*format!("host{host}")));
        let stats = world.json(host, &["stats", "--json", "--pid", &pid.to_string()]);
        let memory = &stats["devices"][0]["by_memory"];
        let rdma = memory.as_array().expect("an array").iter().find(|of| of["device"] == "rdma");
        let of = &rdma.unwrap_or_else(|| panic!("{memory}"))["smc_connections"];
        assert_eq!(of[end], 1, "{memory}");
        let stats = world.json(host, &["stats", "--json"]);
        // The mirror's, and this one. What is not yet complete is not counted so.
        let agent = &stats["agents"][0];
        let count = |of: &Value, name: &str| of[name].as_u64().unwrap_or_else(|| panic!("{of}"));
        assert_eq!((count(agent, "established"), count(agent, "failures")), (2, 0), "{agent}");
        assert!(count(agent, "cpu_ns") > 0, "{agent}");
        let device = &agent["devices"][0];
        let [posts, requests, bytes] = ["posts", "requests", "tx_bytes"].map(|n| count(device, n));
        let [done, messages] = ["completions", "messages"].map(|n| count(device, n));
        assert!(bytes > 0 && posts > 10 && requests > posts && messages > 10, "{device}");
        assert!(done <= posts && posts - done <= 16, "{device}");
        assert_eq!(count(device, "errors"), 0, "{device}");
        let printed = world.says(host, &["stats"]);
        assert!(printed.contains(&format!("Device host{host}\n")), "{printed}");
    }
    complete(&mut client, &mut server, "blocking");
    world.stop(SERVER);
    let (status, said) = check(&world);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("is TCP: ") && said.contains("declined"), "{said}");
    mirror.close_stdin();
    mirror.succeed();
    let (status, said) = check(&world);
    assert!(status == Some(1) && said.contains("no connection to"), "{said}");
    world.end();
}

/// A child of the server's has the connection. The parent closes it, or keeps it for good: then it stays TCP.
#[test]
fn a_server_forks() {
    if is_plain() {
        return;
    }
    let world = World::new("a server forks");
    for style in ["blocking", "poll", "epoll", "edge"] {
        for (role, ends) in [("forker", (2, 2)), ("keeper", (0, 3))] {
            let (mut server, port) = serves_as(&world, role, style);
            let mut client = calls(&world, style, port);
            let mut seen = Vec::new();
            world.fixture.wait_until(&format!("{ends:?} by RDMA of a {role}, {style}"), || {
                seen = world.fixture.connections(port);
                share(&seen) == ends
            });
            complete(&mut client, &mut server, role);
        }
    }
    world.end();
}

/// A client ends its direction before its server's host has declined, or accepted. The server hears of the end.
#[test]
fn a_client_ends_its_direction_at_once() {
    if is_plain() {
        return;
    }
    let mut world = World::new("an end at once");
    for has_agent in [true, false] {
        if !has_agent {
            // They were by RDMA: buffers that the peer has a key for are left.
            let groups = world.groups(SERVER);
            assert!(groups.len() == 1 && groups[0]["rmbs"] != 0, "{groups:?}");
            world.stop(SERVER);
        }
        for (style, bytes) in [("blocking", 3000), ("poll", 1), ("epoll", 200_000), ("edge", 70)] {
            let (mut server, port) = serves_as(&world, "batch", style);
            let (to, number) = (world.hosts.address(SERVER), port.to_string());
            let args = ["job", style, &to, &number, &bytes.to_string()];
            let mut client = python(&world, CLIENT, &args);
            assert_eq!(client.number_after("echoed "), bytes, "{style}");
            client.succeed();
            assert_eq!(server.number_after("served "), bytes, "{style}");
            server.succeed();
        }
    }
    world.end();
}

/// Programs of an agent that is killed find their connections reset.
#[test]
fn an_agent_is_killed() {
    if is_plain() {
        return;
    }
    let mut world = World::new("an agent is killed");
    let (mut server, port) = serves(&world, "epoll");
    let mut client = calls(&world, "blocking", port);
    world.assert_smcr(port, 2);
    world.hosts.agents[CLIENT].kill();
    assert!(!client.wait().success());
    assert!(client.errors().contains("ConnectionResetError"), "{}", client.errors());
    // Its end may have been reset by now, and it with that.
    let _ = server.terminate();
    // A new one serves at once.
    world.hosts.restart(&world.fixture, CLIENT, &[]);
    let (mut server, next) = serves(&world, "epoll");
    let mut client = calls(&world, "blocking", next);
    world.assert_smcr(next, 2);
    complete(&mut client, &mut server, "blocking");
    world.hosts.agents.iter_mut().for_each(Process::kill);
    world.end();
}

/// An agent lets go of a process that was silent for too long. The process asks once more, and its connection is not lost.
#[test]
fn an_agent_lets_go() {
    if is_plain() {
        return;
    }
    let world = World::new("an agent lets go");
    for host in [CLIENT, SERVER] {
        let socket = world.hosts.ism_dir(host).join("agent");
        let other = socket.with_extension("other");
        fs::rename(&socket, &other).expect("our own directory");
        let mut command = world.hosts.plain(&world.fixture, host);
        command.arg("/usr/bin/python3").arg(tests_dir().join("programs/python/deaf.py"));
        command.args([&socket, &other]);
        let mut deaf = world.fixture.spawn(command);
        assert_eq!(deaf.line(), "ready");
        let (mut server, port) = serves(&world, "poll");
        let mut client = calls(&world, "blocking", port);
        deaf.succeed();
        world.assert_smcr(port, 2);
        complete(&mut client, &mut server, "blocking");
    }
    world.end();
}

/// Redis of one host, and its benchmark on the other: with fifty connections, and with values larger than a buffer.
#[test]
fn redis_serves_another_host() {
    if is_plain() {
        return;
    }
    let world = World::new("redis by RDMA");
    let port = world.fixture.port();
    let number = port.to_string();
    let server = system_program("redis-server");
    let mut command = world.hosts.command(&world.fixture, SERVER, server.to_str().expect("text"));
    command.args(["--port", &number, "--protected-mode", "no", "--save", "", "--daemonize", "no"]);
    let mut server = world.fixture.spawn(command);
    let _ = server.line_after("");
    let to = world.hosts.address(SERVER);
    let benchmark = system_program("redis-benchmark");
    let run = |arguments: &[&str]| {
        let program = benchmark.to_str().expect("text");
        let mut command = world.hosts.command(&world.fixture, CLIENT, program);
        command.args(["-h", &to, "-p", &number, "-q"]).args(arguments);
        world.fixture.spawn(command)
    };
    // Redis takes its time until it listens.
    let ping = || run(&["-n", "1", "-c", "1", "-t", "ping_inline"]).wait().success();
    world.fixture.wait_until("redis", ping);
    let mut many = run(&["-n", "1000000", "-c", "50", "-t", "set,get", "-d", "100"]);
    world.assert_smcr(port, 2 * 50);
    many.kill();
    run(&["-n", "40", "-c", "4", "-t", "set,get", "-d", "1000000"]).succeed();
    server.terminate();
    world.end();
}

/// An epoll set that sleeps and an agent that does wake each other by ears, and hardly by doorbells: with one connection, and with ten.
#[test]
fn an_epoll_set_and_its_agent_have_ears() {
    const ROUNDS: u64 = 4000;
    if is_plain() {
        return;
    }
    let world = World::new("ears");
    let port = world.fixture.port();
    let number = port.to_string();
    let program = |host: usize, name: &str, arguments: &[&str]| {
        let program = system_program(name);
        let program = program.to_str().expect("text");
        let mut command = world.hosts.command(&world.fixture, host, program);
        // A wait does not spin.
        command.args(arguments).env("USMC_BUSY_POLL_US", "0");
        world.fixture.spawn(command)
    };
    let arguments = ["--port", &number, "--protected-mode", "no", "--save", ""];
    let mut server = program(SERVER, "redis-server", &arguments);
    let _ = server.line_after("");
    let to = world.hosts.address(SERVER);
    let run = |clients: &str, rounds: u64| {
        let rounds = rounds.to_string();
        let arguments = ["-h", &to, "-p", &number, "-q", "-n", &rounds, "-c", clients, "-t", "get"];
        program(CLIENT, "redis-benchmark", &arguments)
    };
    world.fixture.wait_until("redis", || run("1", 1).wait().success());
    let pid = server.pid().to_string();
    let counts = || {
        let stats = world.json(SERVER, &["stats", "--json", "--pid", &pid]);
        let all = stats["devices"].as_array().expect("an array");
        let count = |name: &str| all.iter().map(|of| of[name].as_u64().expect("a count")).sum();
        let connections = all.iter().map(|of| of["smc_connections"]["server"].as_u64());
        let connections: Option<u64> = connections.sum();
        (connections, ["sleeps", "doorbells_sent", "doorbells_drained"].map(count))
    };
    let (_, mut before): (_, [u64; 3]) = counts();
    for (clients, connections) in [("1", 2), ("10", 12)] {
        run(clients, ROUNDS).succeed();
        let (all, now) = counts();
        let [sleeps, sent, drained] = [0, 1, 2].map(|at| now[at] - before[at]);
        println!("  {clients}: {sleeps} sleeps, doorbells: {sent} sent, {drained} taken out");
        // Those of the benchmark itself, and of its first request.
        assert!(all.is_some_and(|all| all >= connections), "{all:?} of {connections} by RDMA");
        assert!(sleeps > ROUNDS / 40, "redis did not sleep");
        assert!(sent + drained < sleeps / 2, "{sent} + {drained} doorbells in {sleeps} sleeps");
        before = now;
    }
    server.terminate();
    world.end();
}

/// Hosts whose SYNs say SMC, and that were told nothing of each other. A server that does not say it gets the client's bytes alone.
#[test]
#[cfg(target_arch = "x86_64")]
fn hosts_that_say_smc() {
    let Some((fixture, network)) = Network::with_programs("SMC is said") else { return };
    let [(one, near), (other, far)] = agents_of(&fixture, &network);
    let echo = tests_dir().join("programs/python/echo.py");
    let cases = [
        (true, "server", "client", (2, 2)),
        (true, "server", "late", (2, 2)),
        (true, "forker", "client", (2, 2)),
        (true, "keeper", "client", (0, 3)),
        (false, "server", "client", (0, 1)),
        (false, "server", "late", (0, 1)),
    ];
    for (speaks, serves, role, expected) in cases {
        let port = fixture.port();
        let number = port.to_string();
        let mut command = match speaks {
            true => network.under_usmc(&fixture, At::Server, &far, "auto"),
            false => network.command(&fixture, At::Server, "env"),
        };
        command.arg("/usr/bin/python3").arg(&echo).args([serves, "poll", "0.0.0.0", &number]);
        let mut server = fixture.spawn(command);
        assert_eq!(server.line(), "listening");
        let mut command = network.under_usmc(&fixture, At::Client, &near, "auto");
        command.arg("/usr/bin/python3").arg(&echo).args([role, "poll", network::SERVER, &number]);
        command.arg("pause");
        // The client's first SYN is lost: whether the server speaks SMC is not known while connect(2) is made.
        let recording = (!speaks && role == "late").then(|| {
            network.route_by(
                "table ip f { chain c { type filter hook forward priority 0; policy drop; }; }",
            );
            network.record(&fixture, At::Client)
        });
        let mut client = fixture.spawn(command);
        if let Some(recording) = recording {
            fixture
                .wait_until("a SYN", || recording.seen().iter().any(|syn| syn.server_port == port));
            network.route_freely();
            recording.end();
        }
        let _ = client.number_after("port ");
        let mut seen = Vec::new();
        fixture.wait_until(&format!("{expected:?} by RDMA of {serves}, {role}"), || {
            seen = fixture.connections(port);
            share(&seen) == expected
        });
        complete(&mut client, &mut server, role);
    }
    connections_are_made_between_two_questions(&fixture, &network, (&near, &far));
    connections_are_made_before_a_sleep(&fixture, &network, (&near, &far));
    end_agents(fixture, network, [one, other]);
}

/// A client that is not made to wait asks what the server has said, and then whether the connection is made: its answer comes in between.
#[cfg(target_arch = "x86_64")]
fn connections_are_made_between_two_questions(
    fixture: &Fixture,
    network: &Network,
    dirs: (&Path, &Path),
) {
    connections_are_made_meanwhile(fixture, network, dirs, 10, &[]);
}

/// A client is about to sleep until it can send. Its SYN is answered when it is sent again, after a second.
#[cfg(target_arch = "x86_64")]
fn connections_are_made_before_a_sleep(fixture: &Fixture, network: &Network, dirs: (&Path, &Path)) {
    connections_are_made_meanwhile(fixture, network, dirs, 40, &["980", "1060"]);
}

/// Connections of tests/programs/python/eager.py, whose first SYNs are not answered, and whose questions to the kernel take their time.
#[cfg(target_arch = "x86_64")]
fn connections_are_made_meanwhile(
    fixture: &Fixture,
    network: &Network,
    (near, far): (&Path, &Path),
    count: usize,
    when: &[&str],
) {
    let port = fixture.port();
    let number = port.to_string();
    let python = tests_dir().join("programs/python");
    let mut command = network.under_usmc(fixture, At::Server, far, "auto");
    command.arg("/usr/bin/python3").arg(python.join("echo.py"));
    let mut server = fixture.spawn({
        command.args(["mirror", "-", "0.0.0.0", &number]);
        command
    });
    assert_eq!(server.line(), "listening");
    let answers = "tcp flags & (syn | ack) == syn | ack drop";
    network.route_by(&format!(
        "table ip f {{ chain c {{ type filter hook forward priority 0; {answers}; }}; }}"
    ));
    let recording = network.record(fixture, At::Client);
    let mut command = network.under_usmc(fixture, At::Client, near, "auto");
    command.args(["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=getsockopt"]);
    command.args(["-e", "inject=getsockopt:delay_exit=2000"]);
    command.arg("/usr/bin/python3").arg(python.join("eager.py"));
    command.args([network::SERVER, &number, &count.to_string()]).args(when);
    let mut client = fixture.spawn(command);
    fixture.wait_until("all SYNs", || {
        recording.seen().iter().filter(|syn| syn.server_port == port).count() >= count
    });
    network.route_freely();
    recording.end();
    client.line_after("back");
    let seen = fixture.connections(port);
    assert_eq!(share(&seen), (2 * count, 2 * count), "{seen:#?}");
    client.close_stdin();
    client.succeed();
    server.close_stdin();
    server.succeed();
}

/// systemd has the socket, and starts the agent for the first connection, which is carried already. The socket is there when the agent has
/// gone.
#[test]
fn an_agent_that_is_started_by_its_socket_carries_the_first_connection() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("activated agent");
    let path = fixture.scratch().join("manager");
    let manager = UnixDatagram::bind(&path).expect("a socket");
    manager.set_read_timeout(Some(fixture.time_left())).expect("a limit");
    let heard = || {
        let mut text = [0; 64];
        let len = manager.recv(&mut text).expect("word of the agent");
        String::from_utf8_lossy(&text[..len]).trim().to_owned()
    };
    let mut agent = activate_for_loopback(&fixture, &path);
    let port = fixture.port();
    let start = |role: &str, rest: &[&str]| {
        let mut command = fixture.command("/usr/bin/python3");
        command.env("USMC_PEERS", "127.0.0.1").env("USMC_LOOPBACK", "off");
        command.arg(tests_dir().join("programs/python/echo.py"));
        command.args([role, "poll", "127.0.0.1", &port.to_string()]).args(rest);
        fixture.spawn(command)
    };
    let mut server = start("server", &[]);
    assert_eq!(server.line(), "listening");
    let mut client = start("client", &["pause"]);
    assert_eq!(heard(), "READY=1");
    let _ = client.number_after("port ");
    fixture.wait_until("the connection by RDMA", || share(&fixture.connections(port)) == (2, 2));
    agent.signal(libc::SIGTERM);
    assert_eq!(heard(), "STOPPING=1");
    // Its connections end first.
    client.close_stdin();
    client.succeed();
    server.succeed();
    agent.succeed();
    assert!(fixture.ism_dir().join("agent").exists(), "the socket is systemd's");
    fs::remove_file(fixture.ism_dir().join("agent")).expect("its file");
    println!("2 of 2 ends by RDMA");
    fixture.finish();
}
