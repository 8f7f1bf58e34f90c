//! Hosts of one device whose network is slow, as that between emulated machines is: TCP's buffers are never empty while a stream flows.

use usmc_tests::build::tests_dir;
use usmc_tests::netns::{Netns, Who};
use usmc_tests::ss::{self, Socket};
use usmc_tests::{Fixture, Process, is_plain};

fn spawn(fixture: &Fixture, net: &Netns, host: usize, args: &[&str]) -> Process {
    let mut command = net.command(fixture, host, Who::default(), "/usr/bin/python3");
    command.arg(tests_dir().join("programs/python/stream.py")).args(args);
    fixture.spawn(command)
}

#[test]
fn streams_leave_a_slow_link_from_their_first_byte_on() {
    let fixture = Fixture::new("slow link");
    let net = Netns::new();
    for host in [0, 1] {
        let limit = ["rate", "400mbit", "burst", "64kb", "latency", "50ms"];
        net.tool(host, &[&["tc", "qdisc", "add", "dev", "v0", "root", "tbf"], &limit[..]].concat());
    }
    let styles = ["blocking", "poll"];
    for style in styles {
        let number = fixture.port().to_string();
        let mut sink = spawn(&fixture, &net, 0, &["sink", "-", "0.0.0.0", &number]);
        assert_eq!(sink.line(), "listening");
        let to = net.address(0);
        let mut source = spawn(&fixture, &net, 1, &["source", style, &to, &number]);
        let port = u16::try_from(source.number_after("port")).expect("a port");
        if !is_plain() {
            fixture.wait_until(&format!("{style} to be in shared memory"), || {
                let is_end = |s: &&Socket| [s.local_port(), s.peer_port()].contains(&port);
                ss::list().iter().filter(is_end).filter(|s| s.is_smcd()).count() == 2
            });
        }
        source.say("enough");
        let sent = source.number_after("sent");
        assert_eq!(sink.number_after("took"), sent);
        source.succeed();
        sink.succeed();
    }
    println!("{} connections in shared memory", styles.len());
    fixture.finish();
}
