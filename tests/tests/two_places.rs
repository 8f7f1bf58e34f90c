//! `usmc check --serve` and `usmc check --connect`: what is said, at both ends, of connections between two places.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use usmc_tests::build::usmc;
use usmc_tests::fixture::slowness;
use usmc_tests::netns::{Netns, ROOT, Who};
use usmc_tests::{Fixture, Process, is_plain, rdma, region};

/// A serving end, and where it waits.
struct Served {
    process: Process,
    port: u16,
}

/// What `usmc check` is given besides the place.
type Dress<'a> = &'a dyn Fn(&mut Command);

fn serve(fixture: &Fixture, mut command: Command, at: &str, args: &[&str]) -> Served {
    command.arg(usmc()).args(["check", "--serve", at]).args(args);
    let mut process = fixture.spawn(command);
    let line = process.line_after("waits at ");
    let port = line.split(';').next().and_then(|at| at.rsplit(':').next());
    let port = port.and_then(|port| port.parse().ok()).unwrap_or_else(|| panic!("{line}"));
    Served { process, port }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Connects, and ends as it should; what was printed.
fn connect(mut command: Command, place: &str, args: &[&str], works: bool) -> String {
    command.arg(usmc()).args(["check", "--connect", place]).args(args);
    let output = command.output().expect("usmc check");
    let text = text(&output);
    assert_eq!(output.status.code(), Some(i32::from(!works)), "{text}");
    text
}

/// What the serving end has printed, once it has ended with the same verdict.
fn told(mut served: Served, works: bool) -> String {
    let mut lines = Vec::new();
    while let Some(line) = served.process.try_line() {
        lines.push(line);
    }
    let status = served.process.wait();
    let text = lines.join("\n") + &served.process.errors();
    assert_eq!(status.code(), Some(i32::from(!works)), "{text}");
    text
}

fn says(text: &str, facts: &[&str]) {
    for fact in facts {
        assert!(text.contains(fact), "{fact}: {text}");
    }
}

/// A command in one of two namespaces, as `dress` has it.
fn inside(fixture: &Fixture, net: &Netns, end: usize, dress: Dress<'_>) -> Command {
    let mut command = net.plain(fixture, end, ROOT);
    // A program that hands everything on.
    command.arg("env");
    dress(&mut command);
    command
}

const IN_MEMORY: [&str; 3] = [
    "ok    this end is in shared memory (SMC-D), of the ISM directory",
    "ok    the other end is in shared memory (SMC-D), of the ISM directory",
    "bytes came back as they were sent",
];

#[test]
fn on_one_host_both_ends_say_shared_memory() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("check, loopback");
    let served = serve(&fixture, fixture.plain("env"), "127.0.0.1:0", &["--once"]);
    let place = format!("localhost:{}", served.port);
    let here = connect(fixture.plain("env"), &place, &[], true);
    let there = told(served, true);
    for text in [&here, &there] {
        says(text, &IN_MEMORY);
        says(
            text,
            &[
                "in one network namespace",
                "both use one ISM directory: device ",
                "no address is translated",
            ],
        );
        says(text, &["µs by TCP, ", "µs by shared memory", "leave TCP: by shared memory."]);
        assert!(!text.contains("FAIL"), "{text}");
    }
    println!("{here}{there}");
    fixture.finish();
}

#[test]
fn one_check_follows_the_other_and_programs_can_read_them() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("check, repeated");
    let mut served = serve(&fixture, fixture.plain("env"), "[::1]:0", &[]);
    let place = format!("[::1]:{}", served.port);
    for _ in 0..3 {
        let json = connect(fixture.plain("env"), &place, &["--json"], true);
        let json: Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(json["works"], true);
        let facts = json["sections"].as_array().expect("sections").iter();
        let facts =
            facts.flat_map(|section| section["findings"].as_array().expect("findings").iter());
        let is_in_memory = |finding: &&Value| {
            finding["fact"].as_str().is_some_and(|fact| fact.contains("in shared memory (SMC-D)"))
        };
        assert_eq!(facts.filter(is_in_memory).count(), 2, "{json}");
        served.process.line_after("Check from [::1]:");
        served.process.line_after("Connections between these two leave TCP");
    }
    assert_eq!(connect(fixture.plain("env"), &place, &["-q"], true), "");
    served.process.terminate();
    fixture.finish();
}

#[test]
fn namespaces_that_share_a_directory_share_memory() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("check, shared directory");
    let net = Netns::new();
    let served = serve(&fixture, inside(&fixture, &net, 0, &|_| ()), "0", &["--once"]);
    let place = format!("{}:{}", net.address(0), served.port);
    let here = connect(inside(&fixture, &net, 1, &|_| ()), &place, &[], true);
    let there = told(served, true);
    for text in [&here, &there] {
        says(text, &IN_MEMORY);
        says(
            text,
            &["on one host, in two network namespaces", "both use one ISM directory: device "],
        );
    }
    fixture.finish();
}

#[test]
fn different_directories_are_named_at_both_ends() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("check, two directories");
    let net = Netns::new();
    let dirs = [0, 1].map(|end| fixture.scratch().join(format!("ism{end}")));
    let dress = |end: usize| {
        let dir = dirs[end].clone();
        move |command: &mut Command| {
            command.env("USMC_ISM_DIR", &dir);
        }
    };
    let served = serve(&fixture, inside(&fixture, &net, 0, &dress(0)), "0.0.0.0:0", &["--once"]);
    let place = format!("{}:{}", net.address(0), served.port);
    let here = connect(inside(&fixture, &net, 1, &dress(1)), &place, &[], false);
    let there = told(served, false);
    let [ours, theirs] = [1, 0].map(|end| dirs[end].display().to_string());
    for (text, [ours, theirs]) in [(&here, [&ours, &theirs]), (&there, [&theirs, &ours])] {
        says(
            text,
            &[
                "FAIL  they use different ISM directories",
                &format!("{ours} (device "),
                &format!("{theirs} (device "),
            ],
        );
        says(
            text,
            &[
                "-> give both one",
                "end is TCP: peer is not under uSMC on this device",
                "end is TCP: client made no offer",
            ],
        );
        says(text, &["µs by TCP", "Connections between these two stay TCP."]);
        assert!(!text.contains("shared memory (SMC-D)"), "{text}");
    }
    println!("{here}{there}");
    fixture.finish();
}

/// A port of the router's that leads to the server, as of a container that publishes one.
#[test]
fn translated_addresses_are_said_and_peers_help() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("check, NAT");
    let net = Netns::chain();
    // The server's end is the third, the router the second.
    let served = serve(&fixture, inside(&fixture, &net, 2, &|_| ()), "0.0.0.0:0", &[]);
    let port = served.port;
    let public = net.address(1);
    net.tool(1, &["sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"]);
    let (to, from) = (format!("{}:{port}", net.address(2)), net.address_to_third());
    let rules = format!(
        "add table ip nat; add chain ip nat pre {{ type nat hook prerouting priority -100; }}; \
         add chain ip nat post {{ type nat hook postrouting priority 100; }}; \
         add rule ip nat pre ip daddr {public} tcp dport {port} dnat to {to}; \
         add rule ip nat post ip daddr {} tcp dport {port} snat to {from}",
        net.address(2)
    );
    net.tool(1, &["nft", &rules]);
    let place = format!("{public}:{port}");
    let here = connect(inside(&fixture, &net, 0, &|_| ()), &place, &[], false);
    let remedy = format!("in `peers`: {public} here, {from} there");
    says(
        &here,
        &[
            "note  addresses are translated on the way (NAT)",
            &format!("the other end is {to}, and {public}:{port}"),
            &remedy,
        ],
    );
    says(&here, &["this end is TCP: ", "both use one ISM directory", "stay TCP."]);
    let mut served = served;
    served.process.terminate();
    // And what it says helps.
    let at = format!("0.0.0.0:{port}");
    let served = serve(
        &fixture,
        inside(&fixture, &net, 2, &|command| {
            command.env("USMC_PEERS", &from);
        }),
        &at,
        &["--once"],
    );
    let here = connect(
        inside(&fixture, &net, 0, &|command| {
            command.env("USMC_PEERS", &public);
        }),
        &place,
        &[],
        true,
    );
    for text in [here, told(served, true)] {
        says(&text, &IN_MEMORY);
        says(&text, &["note  addresses are translated"]);
    }
    fixture.finish();
}

#[test]
fn a_region_is_named() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("check, region");
    let net = Netns::new();
    let hosts = region::Hosts::new(&fixture, 2, 64 << 20);
    let dress = |host: usize| {
        let hosts = &hosts;
        move |command: &mut Command| hosts.dress(host, command)
    };
    let served = serve(&fixture, inside(&fixture, &net, 0, &dress(0)), "0.0.0.0:0", &["--once"]);
    let place = format!("{}:{}", net.address(0), served.port);
    let here = connect(inside(&fixture, &net, 1, &dress(1)), &place, &[], true);
    let gid = hosts.shown()["gid"].as_str().expect("text").to_owned();
    for text in [here, told(served, true)] {
        says(
            &text,
            &[
                &format!("both have region {gid} in common"),
                "note  they use different ISM directories",
            ],
        );
        says(
            &text,
            &[
                &format!("this end is in shared memory (SMC-D), of region {gid}"),
                "by shared memory.",
            ],
        );
    }
    fixture.finish();
}

/// The agents' hosts are one kernel here, and have nothing else in common.
#[test]
fn agents_carry_it_and_are_named() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("check, agents");
    let mut hosts = rdma::Hosts::new(&fixture, [&[], &[]]);
    let inside = |host: usize| {
        let mut command = hosts.plain(&fixture, host);
        command.arg("env").env("USMC_ISM_DIR", hosts.ism_dir(host));
        command.env("USMC_PEERS", hosts.address(1 - host));
        command
    };
    let served = serve(&fixture, inside(1), "0.0.0.0:0", &["--once"]);
    let place = format!("{}:{}", hosts.address(1), served.port);
    let here = connect(inside(0), &place, &[], true);
    says(
        &here,
        &[
            "ok    this end is by RDMA (SMC-R), by device host0",
            "the other end is by RDMA (SMC-R), by device host1",
        ],
    );
    let there = told(served, true);
    says(&there, &["this end is by RDMA (SMC-R), by device host1", "leave TCP: by RDMA."]);
    for agent in &mut hosts.agents {
        agent.terminate();
    }
    fixture.finish();
}

/// Two users, of whom the directory is one's: the reason is a user's, and named.
#[test]
fn an_end_whose_directory_is_closed_to_it_says_so() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("check, closed directory");
    let net = Netns::new();
    let served = serve(&fixture, inside(&fixture, &net, 0, &|_| ()), "0.0.0.0:0", &["--once"]);
    let place = format!("{}:{}", net.address(0), served.port);
    let who = Who { user: Some(61_003), group: None, alone: false };
    let mut stranger = net.plain(&fixture, 1, who);
    stranger.arg("env");
    let here = connect(stranger, &place, &[], false);
    says(&here, &["FAIL  user 61003 cannot use ", "of user 0 at ", "end is TCP: "]);
    let there = told(served, false);
    says(
        &there,
        &[
            "FAIL  the other end is not able to leave TCP: user 61003 cannot use",
            "of user 61003 at ",
        ],
    );
    fixture.finish();
}

#[test]
fn why_tcp_does_not_get_there_is_told_apart() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("check, unreached");
    let net = Netns::new();
    let command = || inside(&fixture, &net, 1, &|_| ());
    let port = fixture.port();
    let refused = connect(command(), &format!("{}:{port}", net.address(0)), &[], false);
    says(
        &refused,
        &["is refused: nobody listens there", &format!("start `usmc check --serve {port}` there")],
    );
    net.tool(1, &["ip", "route", "add", "unreachable", "192.0.2.0/24"]);
    says(&connect(command(), "192.0.2.1:1", &[], false), &["has no way there"]);
    net.tool(
        0,
        &[
            "nft",
            "add table ip f; add chain ip f in { type filter hook input priority 0; policy drop; }",
        ],
    );
    let dropped = connect(command(), &format!("{}:{port}", net.address(0)), &[], false);
    says(&dropped, &["is not answered within 5 s: the host is down, or a firewall drops it"]);
    let unknown = connect(command(), "no-such-host.invalid:1", &[], false);
    says(&unknown, &["no-such-host.invalid:1 is not known: "]);
    fixture.finish();
}

/// Answers whoever connects by these bytes, and closes once it is closed to.
fn stranger(bytes: &'static [u8]) -> (u16, thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its address").port();
    let answering = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut chunk = [0; 4096];
        let _ = stream.read(&mut chunk);
        // Who has heard enough resets.
        while stream.write_all(bytes).is_ok() && bytes.len() > 1000 {}
        while stream.read(&mut chunk).is_ok_and(|n| n > 0) {}
    });
    (port, answering)
}

#[test]
fn a_hostile_serving_end_is_quoted_and_does_no_harm() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("check, hostile server");
    const ENDLESS: &[u8] = &[b'{'; 4096];
    let welcome = br#"{"usmc_check":1,"token":"t","side":{"local":"1.2.3.4:5","peer":"6.7.8.9:1","facts":{"version":"\u001b[2J","device_version":5,"boot":"","netns":0,"uid":0,"host":"\u202e","directory":"/\r\n","gid":"\u0007","problem":null,"regions":[],"has_agent":false,"devices":[]}}}
"#;
    let strangers = [
        (
            &b"-ERR unknown command '{'\r\n"[..],
            "is no `usmc check --serve`: it says \"-ERR unknown command",
        ),
        (b"HTTP/1.1 400 \x1b]0;owned\x07\r\n", "it says \"HTTP/1.1 400 \\x1b]0;owned\\x07"),
        (ENDLESS, "it says \"{{{{"),
        (b"{\"usmc_check\":1}\n", "is no `usmc check --serve`: it says"),
        (b"\n", "is no `usmc check --serve`"),
        (b"", "it says nothing"),
        // One that goes on and then says nothing more.
        (welcome, "the other end does not answer any more: it says nothing"),
    ];
    thread::scope(|scope| {
        for (bytes, fact) in strangers {
            let command = fixture.plain("env");
            scope.spawn(move || {
                let (port, answering) = stranger(bytes);
                let begun = Instant::now();
                let text = connect(command, &format!("127.0.0.1:{port}"), &[], false);
                says(&text, &[fact, "Nothing can be said of connections there"]);
                let is_harmful = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
                assert!(!text.contains(is_harmful), "{text:?}");
                assert!(begun.elapsed() < Duration::from_secs(30) * slowness(), "{text}");
                answering.join().expect("the stranger");
            });
        }
    });
    fixture.finish();
}

#[test]
fn hostile_clients_do_not_keep_others_from_a_check() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("check, hostile clients");
    let mut served = serve(&fixture, fixture.plain("env"), "127.0.0.1:0", &[]);
    let dial = || TcpStream::connect(("127.0.0.1", served.port)).expect("it listens");
    // Some say nothing, and stay.
    let silent: Vec<TcpStream> = (0..8).map(|_| dial()).collect();
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"\x16\x03\x01\x02\x00\x1b[2J\n",
        b"{\"usmc_check\":1,\"wants\":{\"trial\":\"guessed\"}}\n",
        b"{\"usmc_check\":1,\"wants\":{\"check\":{}}}\n",
        b"{\"usmc_check\":99999999999}\n",
        b"{\"usmc_check\":2,\"wants\":{\"trial\":\"\"}}\n",
        &[b'['; 100_000],
        b"",
    ] {
        let mut stream = dial();
        // It may have had enough.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        assert!(said.is_empty(), "{}", said.escape_ascii());
    }
    let here = connect(fixture.plain("env"), &format!("127.0.0.1:{}", served.port), &[], true);
    says(&here, &IN_MEMORY);
    served.process.line_after("Check from ");
    let all = served.process.line_after("Connections between these two leave TCP");
    assert!(!all.contains(|c: char| c.is_control()));
    drop(silent);
    served.process.terminate();
    fixture.finish();
}

/// Where the library is not found, the other end is told so, and both say TCP.
#[test]
fn an_end_without_the_library_says_why() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("check, no library");
    let lacks = || {
        let mut command = fixture.plain("env");
        command.env("USMC_LIBRARY", Path::new("/nonexistent/x.so"));
        command
    };
    let served = serve(&fixture, lacks(), "127.0.0.1:0", &["--once"]);
    let place = format!("127.0.0.1:{}", served.port);
    let here = connect(fixture.plain("env"), &place, &[], false);
    says(
        &here,
        &[
            "FAIL  the other end is not able to leave TCP: USMC_LIBRARY: there is no file",
            "the other end is TCP: it is without the library",
        ],
    );
    says(&told(served, false), &["this end is TCP: it is without the library", "stay TCP."]);
    let served = serve(&fixture, fixture.plain("env"), "127.0.0.1:0", &["--once"]);
    let place = format!("127.0.0.1:{}", served.port);
    says(
        &connect(lacks(), &place, &[], false),
        &["FAIL  USMC_LIBRARY: there is no file", "this end is TCP"],
    );
    says(&told(served, false), &["not able to leave TCP: USMC_LIBRARY: there is no file"]);
    fixture.finish();
}
