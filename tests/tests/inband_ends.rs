//! What ends a handshake in the TCP stream, between network namespaces, in its middle: a close, the process' end, another program.

use usmc_tests::build::tests_dir;
use usmc_tests::netns::{Netns, ROOT};
use usmc_tests::region::Hosts;
use usmc_tests::{Fixture, Process, is_plain};

/// Bytes of a region between the two namespaces, each of which is a host's.
const REGION: usize = 64 << 20;

/// An end of a connection over which `COUNT` messages go to and fro. Then it closes the socket or leaves it to its process' end, or reads
/// what comes of that.
const ENDS: &str = "import socket, sys
role, to, port, count, how = sys.argv[1:6]
if role == 'server':
    l = socket.create_server(('', int(port)))
    print('listening', flush=True)
    s = l.accept()[0]
else: s = socket.create_connection((to, int(port)))
for k in range(int(count)):
    if role == 'client': s.sendall(b'x' * 90)
    assert len(s.recv(90, socket.MSG_WAITALL)) == 90
    if role == 'server': s.sendall(b'y' * 90)
print('done', flush=True); sys.stdin.readline()
if how == 'read': print('end', s.recv(1), flush=True)
elif how == 'close': s.close()
else: s.detach()
";

/// A message of the handshake may be unread then, of which the application knows nothing: TCP would send a RST, and take away what
/// is on its way.
#[test]
fn an_end_in_the_middle_of_a_handshake_is_no_reset() {
    let fixture = Fixture::new("in-band ends");
    let net = Netns::new();
    let hosts = Hosts::new(&fixture, 2, REGION);
    let (to, mut count) = (net.address(0), 0);
    for (messages, how, ending) in (1..=5)
        .flat_map(|n| ["close", "exit"].map(|how| (n, how)))
        .flat_map(|(n, how)| [0, 1].map(|ending| (n, how, ending)))
    {
        let number = fixture.port().to_string();
        let start = |host: usize| {
            let mut command = net.command(&fixture, host, ROOT, "/usr/bin/python3");
            // Over the region, and over the directory.
            if count % 3 > 0 {
                hosts.dress(host, &mut command);
            }
            let how = if host == ending { how } else { "read" };
            let role = ["server", "client"][host];
            command.args(["-c", ENDS, role, &to, &number, &messages.to_string(), how]);
            fixture.spawn(command)
        };
        let mut server = start(0);
        server.line_after("listening");
        let mut ends = [server, start(1)];
        count += 1;
        ends.iter_mut().for_each(|end| _ = end.line_after("done"));
        ends[ending].succeed();
        ends[1 - ending].say("read");
        let seen = ends[1 - ending].line_after("end");
        assert_eq!(seen, "b''", "{messages} messages, {how} by {ending}");
        ends[1 - ending].succeed();
    }
    println!("{count} connections were ended");
    fixture.finish();
}

/// A message of the handshake that stands behind unread bytes never gets to the next program, however often a process tries to become
/// that.
#[test]
fn no_next_program_reads_a_message() {
    let fixture = Fixture::new("in-band execs");
    let net = Netns::new();
    let hosts = Hosts::new(&fixture, 2, REGION);
    let mut refused = [0; 4];
    for (messages, steps, becomes) in (0..18).map(|n| (1 + n / 2 % 3, n / 6, n % 2)) {
        let number = fixture.port().to_string();
        let to = net.address(0);
        let start = |host: usize| {
            let mut command = net.command(&fixture, host, ROOT, "/usr/bin/python3");
            hosts.dress(host, &mut command);
            let (role, part) =
                (["server", "client"][host], ["send", "become"][usize::from(host == becomes)]);
            command.arg(tests_dir().join("programs/python/becomes.py"));
            command.args([role, &to, &number, &messages.to_string(), part]);
            fixture.spawn(command)
        };
        let mut server = start(0);
        server.line_after("listening");
        let mut ends = [server, start(1)];
        ends.iter_mut().for_each(|end| _ = end.line_after("done"));
        let sender = 1 - becomes;
        ends[sender].say("send");
        ends[sender].line_after("sent");
        for _ in 0..steps {
            for end in [becomes, sender] {
                ends[end].say("step");
                ends[end].line_after("stepped");
            }
        }
        ends[becomes].say("become");
        ends[sender].say("end");
        let mut last = 0;
        let got = loop {
            let line = ends[becomes].line();
            match line.strip_prefix("refused ") {
                Some(times) => last = times.parse().expect("a number"),
                None => break line,
            }
        };
        assert_eq!(
            got,
            format!("got b'{}'", "z".repeat(30)),
            "{messages} messages, {steps} steps, {becomes} becomes another"
        );
        refused[last] += 1;
        ends.iter_mut().for_each(|end| _ = end.succeed());
    }
    println!("execs that were refused so often: {refused:?}");
    assert!(is_plain() || refused[3] > 0, "no message was in the way");
    fixture.finish();
}

/// A client has been reset and another one has its port. What the server still has of the first one is not the second one's other end.
#[test]
fn a_connection_that_was_reset_does_not_answer_for_its_namesake() {
    let fixture = Fixture::new("in-band namesakes");
    let net = Netns::new();
    let hosts = Hosts::new(&fixture, 2, REGION);
    for in_region in [false, true] {
        let [number, from] = [(); 2].map(|()| fixture.port().to_string());
        let start = |host: usize, program: &str, args: &[&str]| {
            let mut command = net.command(&fixture, host, ROOT, program);
            if in_region {
                hosts.dress(host, &mut command);
            }
            let role = ["server", "client"][host];
            command.args(args).arg(tests_dir().join("programs/python/namesake.py"));
            command.args([role, &net.address(0), &number, &from]);
            fixture.spawn(command)
        };
        let python = "/usr/bin/python3";
        let mut server = start(0, python, &[]);
        server.line_after("listening");
        let mut plain = start(1, "/usr/bin/env", &["-u", "LD_PRELOAD", python]);
        plain.line_after("connected");
        server.line_after("first");
        let step = |end: &mut Process, what: &str| {
            end.say(what);
            assert_eq!(end.line(), "done");
        };
        // So many that the server looks for a handshake of it.
        for _ in 0..40 {
            step(&mut plain, "go on");
            step(&mut server, "first");
        }
        plain.succeed();
        let mut client = start(1, python, &[]);
        client.line_after("connected");
        step(&mut server, "accept");
        // It asks for its other end by now. The server hears of the reset at its next call alone.
        (0..40).for_each(|_| step(&mut client, "go on"));
        step(&mut server, "first");
        (0..10).for_each(|_| step(&mut client, "go on"));
        server.say("second");
        assert_eq!(server.line(), "read 4500 of others 0", "in a region: {in_region}");
        assert_eq!(server.line(), "done");
        client.succeed();
        server.succeed();
    }
    fixture.finish();
}
