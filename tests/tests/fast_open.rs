//! Connections to another host whose SYN has the Proposal (TCP Fast Open): an agent's at each host, by the fake libibverbs.

use std::process::Command;

use usmc_tests::Process;
use usmc_tests::netns::counter;
use usmc_tests::rdma::world::{CLIENT, SERVER, World, finish};

/// Both hosts let listeners take part in Fast Open, and clients.
fn two_hosts(name: &str) -> World {
    let world = World::new(name);
    for host in [CLIENT, SERVER] {
        world.hosts.tool(host, &["sysctl", "-qw", "net.ipv4.tcp_fastopen=3"]);
    }
    world
}

fn command(world: &World, host: usize, script: &str) -> Command {
    let mut command = world.python(host, script);
    command.env("USMC_FAST_OPEN", world.hosts.address(1 - host)).env_remove("USMC_PEERS");
    command
}

/// An echo server, and its port.
fn serves(world: &World) -> (Process, u16) {
    let port = world.fixture.port();
    let mut command = command(world, SERVER, "echo.py");
    command.args(["mirror", "-", "0.0.0.0", &port.to_string()]);
    let mut server = world.fixture.spawn(command);
    assert_eq!(server.line(), "listening");
    (server, port)
}

/// A client that tries so many connections.
fn tries(world: &World, style: &str, port: u16, count: usize) -> Process {
    let mut command = command(world, CLIENT, "opens.py");
    command.args([style, &world.hosts.address(SERVER), &port.to_string(), &count.to_string()]);
    world.fixture.spawn(command)
}

/// A client that has so many connections.
fn opens(world: &World, style: &str, port: u16, count: usize) -> Process {
    let mut client = tries(world, style, port, count);
    (0..count).for_each(|_| assert!(client.line().starts_with("took "), "{style}"));
    assert_eq!(client.line(), format!("open {count}"), "{style}");
    client
}

/// SYNs with data that were sent and acknowledged by the client's host, and accepted by the server's.
fn counts(world: &World) -> [u64; 2] {
    let count = |host, name| counter(&world.hosts.netstat(&world.fixture, host), name);
    [count(CLIENT, "TCPFastOpenActive"), count(SERVER, "TCPFastOpenPassive")]
}

/// The first connection gets the cookie; all others are opened by a SYN with the Proposal, and are by RDMA.
#[test]
fn the_proposal_goes_with_the_syn() {
    let world = two_hosts("Fast Open");
    let (mut server, port) = serves(&world);
    let mut expected = [0, 0];
    for (round, style) in ["blocking", "poll", "epoll"].into_iter().enumerate() {
        const COUNT: usize = 6;
        let mut client = opens(&world, style, port, COUNT);
        let with_data = COUNT as u64 - u64::from(round == 0);
        expected = expected.map(|count| count + with_data);
        assert_eq!(counts(&world), expected, "{style}");
        world.assert_share(port, (2 * COUNT, 2 * COUNT));
        client.say("go");
        assert_eq!(client.line(), format!("again {COUNT}"), "{style}");
        client.close_stdin();
        client.succeed();
        world.fixture.wait_until("the ends", || world.fixture.connections(port).is_empty());
    }
    server.close_stdin();
    server.succeed();
    world.end();
}

/// The server's library and agent do not wait for the acknowledgement of the SYN-ACK: it is lost, and the client's Confirm stands for it.
#[test]
fn the_answer_waits_for_no_acknowledgement() {
    const COUNT: usize = 6;
    const BARE: &str = "iifname v0 tcp flags & (syn | ack | psh | fin) == ack drop";
    let world = two_hosts("Fast Open at once");
    let (server, port) = serves(&world);
    let rule =
        format!("table ip f {{ chain c {{ type filter hook input priority 0; {BARE}; }}; }}");
    world.hosts.tool(SERVER, &["nft", &rule]);
    let mut client = opens(&world, "blocking", port, COUNT);
    assert_eq!(counts(&world), [COUNT as u64 - 1; 2]);
    world.assert_share(port, (2 * COUNT, 2 * COUNT));
    world.hosts.tool(SERVER, &["nft", "delete table ip f"]);
    client.say("go");
    assert_eq!(client.line(), format!("again {COUNT}"));
    finish(client, server);
    world.end();
}

/// connect(2) says that nobody listens, as it does over TCP.
#[test]
fn a_server_that_is_gone_refuses() {
    let world = two_hosts("Fast Open refused");
    let (mut server, port) = serves(&world);
    let mut client = opens(&world, "blocking", port, 2);
    assert_eq!(counts(&world), [1, 1]);
    client.close_stdin();
    client.succeed();
    server.close_stdin();
    server.succeed();
    for style in ["blocking", "poll", "epoll"] {
        let mut client = tries(&world, style, port, 2);
        assert_eq!([client.line(), client.line()], ["refused ECONNREFUSED"; 2], "{style}");
        assert_eq!(client.line(), "open 0");
        client.close_stdin();
        client.succeed();
    }
    world.end();
}

/// The client's agent is gone when the connection is made, whose Proposal it has composed: the server's Accept is declined, and all bytes go by
/// TCP.
#[test]
fn an_agent_that_is_gone_meanwhile() {
    let mut world = two_hosts("Fast Open without its agent");
    let (server, port) = serves(&world);
    let mut client = opens(&world, "blocking", port, 1);
    client.close_stdin();
    client.succeed();
    let rule = "iifname v0 tcp flags & (syn | ack) == syn | ack drop";
    let table =
        format!("table ip f {{ chain c {{ type filter hook input priority 0; {rule}; }}; }}");
    world.hosts.tool(CLIENT, &["nft", &table]);
    let mut client = tries(&world, "poll", port, 1);
    world.fixture.wait_until("a SYN", || {
        let mut command = world.hosts.plain(&world.fixture, CLIENT);
        command.args(["ss", "-tnH", "state", "syn-sent"]);
        !world.fixture.run(command).is_empty()
    });
    world.hosts.agents[CLIENT].kill();
    world.hosts.tool(CLIENT, &["nft", "delete table ip f"]);
    assert!(client.line().starts_with("took "));
    assert_eq!(client.line(), "open 1");
    assert_eq!(counts(&world), [1, 1]);
    world.assert_share(port, (0, 2));
    client.say("go");
    assert_eq!(client.line(), "again 1");
    finish(client, server);
    world.end();
}

/// The server's library declines where its host has no agent, and all bytes go by TCP.
#[test]
fn a_server_without_an_agent_declines() {
    let mut world = two_hosts("Fast Open declined");
    world.stop(SERVER);
    let (server, port) = serves(&world);
    let mut client = opens(&world, "blocking", port, 4);
    assert_eq!(counts(&world), [3, 3]);
    world.assert_share(port, (0, 8));
    client.say("go");
    assert_eq!(client.line(), "again 4");
    finish(client, server);
    world.end();
}
