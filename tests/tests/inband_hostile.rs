//! Peers in a CLC handshake that say one thing and do another, at each step of it: the connection is TCP with the
//! application's bytes as they were sent, and nobody else's.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Deref;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use smc_proto::decline::{self, DeclineCode};
use smc_proto::handshake::client::{self, Accepted};
use smc_proto::handshake::server::{Choice, ExpectProposal, Surroundings};
use smc_proto::handshake::{Circumstances, Host, SmcdSide};
use smc_proto::ids::{BufferSize, Chid, Eid, PeerId, SmcdGid};
use smc_proto::list::List;
use smc_proto::wire::clc::{
    Answer, Decline, FeatureMask, Hostname, MAX_LEN, Message, Prefix, Release,
};
use usmc_tests::build::{self, tests_dir};
use usmc_tests::device::{ABANDONED, ANSWERED, CONFIRMED, Device, HELD, PROPOSED, Place};
use usmc_tests::fixture::slowness;
use usmc_tests::{Fixture, Process, is_plain, region};

/// The board on which both ends find each other.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    /// An ISM directory's.
    Directory,
    /// A region's.
    Region,
}

/// Each test for a directory and for a region.
macro_rules! on_both {
    ($($name:ident)*) => {
        mod in_directory {
            $(#[test] fn $name() { if !usmc_tests::is_plain() { super::$name(super::On::Directory) } })*
        }
        mod in_region {
            $(#[test] fn $name() { if !usmc_tests::is_plain() { super::$name(super::On::Region) } })*
        }
    };
}

on_both! {
    what_stands_in_the_place_of_a_message_and_is_none_is_the_applications
    a_client_that_leaves_at_any_step_leaves_the_server_well
    a_message_that_is_in_the_stream_at_a_fork_is_not_for_the_child_that_is_left
    a_message_that_comes_when_the_handshake_is_over_is_not_for_the_application
    what_a_peer_that_ends_has_sent_of_a_message_is_not_for_the_application
    a_proposal_in_single_bytes_is_one_all_the_same
    a_message_whose_end_the_window_keeps_back_is_taken_out
    a_message_that_never_ends_is_given_up
    proposals_that_cannot_be_are_declined_with_their_code
    a_servers_decline_is_shown_and_the_bytes_go_on
    a_servers_accept_that_leads_nowhere_is_declined
    a_server_that_answers_with_something_else_or_not_at_all_is_tcp
    the_accept_of_a_server_that_does_not_wait_any_more_is_no_input
}

/// A test's world, and the region in it.
struct World {
    fixture: Fixture,
    region: Option<PathBuf>,
}

impl World {
    fn new(on: On, name: &str) -> World {
        let fixture = Fixture::new(name);
        let region = (on == On::Region).then(|| region::create(fixture.scratch(), 16 << 20));
        World { fixture, region }
    }

    fn command(&self, program: &str) -> Command {
        let mut command = self.fixture.command(program);
        if let Some(region) = &self.region {
            command.env("USMC_REGIONS", region).env("USMC_LOOPBACK", "off");
        }
        command
    }

    fn device(&self) -> Device {
        match &self.region {
            Some(region) => Device::open_region(region),
            None => Device::open(self.fixture.ism_dir()),
        }
    }

    fn finish(self) {
        self.fixture.finish();
    }
}

impl Deref for World {
    type Target = Fixture;

    fn deref(&self) -> &Fixture {
        &self.fixture
    }
}

fn host() -> Host {
    Host {
        peer_id: PeerId::default(),
        hostname: Hostname::new("hostile"),
        release: Release::V2_1,
        features: FeatureMask::EMULATED_ISM,
        max_conns: 255,
        max_links: 2,
        ueids: List::from_slice(&[Eid::user("USMC").expect("an EID")]).expect("one"),
        seid: None,
        smcd_v2: true,
    }
}

fn gid(device: &Device) -> SmcdGid {
    let [gid, ext] = device.gid();
    SmcdGid { gid, ext }
}

fn side(gid: SmcdGid, token: u64, link_id: u32) -> SmcdSide {
    let size = BufferSize::from_code(4).expect("a size");
    SmcdSide { gid, token, size, link_id, first_contact: true }
}

fn begin(device: &Device) -> (client::ExpectAccept, Message) {
    begin_at(gid(device), device)
}

fn begin_at(gid: SmcdGid, device: &Device) -> (client::ExpectAccept, Message) {
    let devices = client::Devices {
        smcd_v2: List::from_slice(&[(gid, Chid(device.chid()))]).expect("one"),
        ..client::Devices::default()
    };
    client::begin(host(), Circumstances::FINE, &devices).expect("a Proposal")
}

fn bytes(message: &Message) -> Vec<u8> {
    message.emit(&mut [0; MAX_LEN]).expect("room").to_vec()
}

fn decline_of(code: DeclineCode) -> Message {
    Message::Decline(Decline::new(false, PeerId::default(), code))
}

struct Anybody;

impl Surroundings for Anybody {
    fn reaches(&self, _: SmcdGid, _: Chid) -> bool {
        true
    }
    fn same_subnet(&self, _: &Prefix) -> bool {
        false
    }
    fn vlan_is_known(&self) -> bool {
        true
    }
}

/// A server under uSMC that sends back what it gets.
fn mirror(fixture: &World) -> (Process, SocketAddr) {
    server_in(fixture, "mirror", "-")
}

fn server_in(fixture: &World, role: &str, style: &str) -> (Process, SocketAddr) {
    let port = fixture.port();
    let mut server = fixture.command("/usr/bin/python3");
    server.arg(tests_dir().join("programs/python/echo.py"));
    server.args([role, style, "127.0.0.1", &port.to_string()]);
    let mut server = fixture.spawn(server);
    assert_eq!(server.line(), "listening");
    (server, (Ipv4Addr::LOCALHOST, port).into())
}

/// A client of it that keeps the books by hand.
struct Rogue<'a> {
    stream: TcpStream,
    device: &'a Device,
    place: Place,
    sent: u64,
    received: u64,
}

impl<'a> Rogue<'a> {
    /// Connects, and is held by the server.
    fn held(fixture: &World, device: &'a Device, server: SocketAddr) -> Rogue<'a> {
        let stream = TcpStream::connect(server).expect("the server listens");
        stream.set_nodelay(true).expect("a TCP socket");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a TCP socket");
        let place = device.ask(stream.local_addr().expect("connected"), server);
        let mut rogue = Rogue { stream, device, place, sent: 0, received: 0 };
        fixture.wait_until("the server to hold the connection", || {
            rogue.echo(b"hello");
            device.phase(place) == HELD
        });
        rogue
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server reads");
        self.sent += bytes.len() as u64;
    }

    fn expect(&mut self, bytes: &[u8]) {
        let mut got = vec![0; bytes.len()];
        self.stream.read_exact(&mut got).expect("an answer");
        self.received += got.len() as u64;
        assert_eq!(got, bytes, "not what was sent");
    }

    /// Some bytes of the application, there and back.
    fn echo(&mut self, bytes: &[u8]) {
        self.send(bytes);
        self.expect(bytes);
    }

    fn say(&mut self, message: u64, phase: u8) {
        self.device.announce(self.place, message, self.sent);
        self.device.set_phase(self.place, phase);
    }

    fn propose(&mut self) {
        self.say(0, PROPOSED);
        self.send(&bytes(&begin(self.device).1));
    }

    /// The server's answer to the Proposal, with an echo before or behind it.
    fn answer(&mut self, fixture: &World) -> Message {
        fixture.wait_until("an answer", || self.device.phase(self.place) == ANSWERED);
        let at = self.device.announced(self.place, 1).expect("a place");
        assert_eq!(at, self.received, "the server sent bytes that nobody waited for");
        let mut buffer = [0; MAX_LEN];
        self.stream.read_exact(&mut buffer[..8]).expect("a header");
        let length = usize::from(u16::from_be_bytes([buffer[5], buffer[6]]));
        self.stream.read_exact(&mut buffer[8..length]).expect("a message");
        self.received += length as u64;
        Message::parse(&buffer[..length]).expect("a CLC message")
    }

    /// So many of the application's bytes, and the answer, wherever it is among them.
    fn answer_among(&mut self, count: usize) -> (Vec<u8>, Message) {
        let mut got = Vec::new();
        let at = loop {
            let is_there = self.device.phase(self.place) == ANSWERED;
            let at = is_there.then(|| self.device.announced(self.place, 1).expect("a place"));
            let at = at.map(|at| (at - self.received) as usize);
            let length = |at: usize| {
                Some(usize::from(u16::from_be_bytes(*got.get(at + 5..)?.first_chunk()?)))
            };
            match at.and_then(|at| Some((at, length(at)?))) {
                Some((at, length)) if got.len() >= count + length => break at..at + length,
                _ => {}
            }
            let mut some = [0; 1 << 16];
            let n = self.stream.read(&mut some).expect("bytes");
            assert_ne!(n, 0, "the end");
            got.extend_from_slice(&some[..n]);
        };
        self.received += got.len() as u64;
        let answer = Message::parse(&got.drain(at).collect::<Vec<_>>());
        (got, answer.expect("a CLC message"))
    }

    /// Held, proposed and accepted: the server's token and link id.
    fn accepted(fixture: &World, device: &'a Device, server: SocketAddr) -> (Rogue<'a>, u64, u32) {
        let mut rogue = Rogue::held(fixture, device, server);
        rogue.propose();
        let Message::Accept(Answer::D(accept)) = rogue.answer(fixture) else { panic!("no Accept") };
        assert_eq!((accept.gid, accept.token != 0), (device.gid()[0], true));
        (rogue, accept.token, accept.link_id)
    }

    fn confirm(&mut self, token: u64) {
        let (state, proposal) = begin(self.device);
        let choice = ExpectProposal::begin(host(), Circumstances::FINE)
            .and_then(|s| s.on_message(proposal, &Anybody));
        let Ok(Choice::D(choice)) = choice else { panic!("SMC-D was offered") };
        let side = side(gid(self.device), token, 4000);
        let Ok(Accepted::D(accepted)) = state.on_message(choice.accept(&side).1) else {
            panic!("an Accept of our own")
        };
        let (_, confirm) = accepted.confirm(&side).expect("a Confirm");
        self.say(2, CONFIRMED);
        self.send(&bytes(&confirm));
    }
}

fn memory() -> File {
    // SAFETY: a valid name; the descriptor is ours.
    unsafe {
        let fd = libc::memfd_create(c"hostile".as_ptr(), libc::MFD_ALLOW_SEALING);
        assert_eq!(libc::ftruncate(fd, 1 << 20), 0);
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, seals), 0);
        File::from_raw_fd(fd)
    }
}

fn finish(fixture: World, mut server: Process, at: SocketAddr) {
    // It serves others as ever.
    let mut other = TcpStream::connect(at).expect("the server listens");
    other.write_all(b"still there").expect("it reads");
    let mut got = [0; 11];
    other.read_exact(&mut got).expect("it answers");
    assert_eq!(&got, b"still there");
    drop(other);
    server.succeed();
    fixture.finish();
}

fn what_stands_in_the_place_of_a_message_and_is_none_is_the_applications(on: On) {
    let fixture = World::new(on, "hostile no message");
    let (server, at) = mirror(&fixture);
    let device = fixture.device();
    let proposal = bytes(&begin(&device).1);
    let mut wrong_end = proposal.clone();
    *wrong_end.last_mut().expect("a trailer") ^= 1;
    let mut too_long = proposal.clone();
    too_long[5..7].copy_from_slice(&u16::MAX.to_be_bytes());
    for garbage in [vec![0x55; 224], b"GET / HTTP/1.0\r\n\r\n".to_vec(), wrong_end, too_long] {
        let mut rogue = Rogue::held(&fixture, &device, at);
        rogue.say(0, PROPOSED);
        rogue.echo(&garbage);
        (0..100).for_each(|_| rogue.echo(b"and on"));
    }
    // A message that nobody agreed on: of a client that did not ask, and of one that says it is elsewhere.
    let mut stream = TcpStream::connect(at).expect("the server listens");
    stream.write_all(&proposal).expect("it reads");
    let mut got = vec![0; proposal.len()];
    stream.read_exact(&mut got).expect("it answers");
    assert_eq!(got, proposal);
    let mut rogue = Rogue::held(&fixture, &device, at);
    rogue.device.announce(rogue.place, 0, rogue.sent + 1_000_000);
    rogue.device.set_phase(rogue.place, PROPOSED);
    rogue.echo(&proposal);
    drop(rogue);
    finish(fixture, server, at);
}

fn a_client_that_leaves_at_any_step_leaves_the_server_well(on: On) {
    let fixture = World::new(on, "hostile early close");
    let (server, at) = mirror(&fixture);
    let device = fixture.device();
    drop(Rogue::held(&fixture, &device, at));
    for part in [0, 3, 8, 100] {
        let mut rogue = Rogue::held(&fixture, &device, at);
        rogue.say(0, PROPOSED);
        rogue.send(&bytes(&begin(&device).1)[..part]);
    }
    let mut rogue = Rogue::held(&fixture, &device, at);
    rogue.propose();
    drop(rogue);
    drop(Rogue::accepted(&fixture, &device, at));
    let (mut rogue, _, _) = Rogue::accepted(&fixture, &device, at);
    rogue.say(2, CONFIRMED);
    rogue.send(&bytes(&decline_of(DeclineCode::MEM))[..20]);
    drop(rogue);
    let (mut rogue, ..) = Rogue::accepted(&fixture, &device, at);
    rogue.confirm(7);
    drop(rogue);
    finish(fixture, server, at);
}

fn a_message_that_is_in_the_stream_at_a_fork_is_not_for_the_child_that_is_left(on: On) {
    // A Proposal; a Confirm; a Confirm whose sender has gone back on it, so that no message is there.
    for case in 0..3 {
        let fixture = World::new(on, "hostile fork");
        let (mut server, at) = server_in(&fixture, "heir", "-");
        let device = fixture.device();
        let mut rogue = match case {
            0 => Rogue::held(&fixture, &device, at),
            _ => Rogue::accepted(&fixture, &device, at).0,
        };
        rogue.echo(b"!");
        match case {
            0 => rogue.propose(),
            1 => rogue.confirm(11),
            _ => device.set_phase(rogue.place, ABANDONED),
        }
        server.say("fork");
        server.line_after("heir");
        (0..100).for_each(|_| rogue.echo(b"over TCP"));
        drop(rogue);
        server.line_after("served");
        server.succeed();
        fixture.finish();
    }
}

fn a_message_that_comes_when_the_handshake_is_over_is_not_for_the_application(on: On) {
    for (style, is_late) in ["recv", "splice", "at-once"].map(|s| [(s, false), (s, true)]).concat()
    {
        let fixture = World::new(on, "hostile shutdown");
        let (mut server, at) = server_in(&fixture, "half", style);
        let device = fixture.device();
        let mut rogue = Rogue::held(&fixture, &device, at);
        rogue.echo(b"!");
        let proposal = bytes(&begin(&device).1);
        rogue.say(0, PROPOSED);
        if is_late {
            server.say("go on");
            server.line_after("half");
            // Longer than a call waits for what is on its way.
            thread::sleep(Duration::from_millis(200));
            rogue.send(&proposal);
        } else {
            rogue.send(&proposal);
            server.say("go on");
            server.line_after("half");
        }
        rogue.send(&[0; 1000]);
        // A close would reset: an answer may be unread.
        rogue.stream.shutdown(Shutdown::Write).expect("connected");
        assert_eq!(server.line(), "got 1000", "{style}, {is_late}");
        server.succeed();
        fixture.finish();
    }
}

/// A peer's end in the middle of a message: a process that is killed with bytes unread takes along what its kernel has not sent.
fn what_a_peer_that_ends_has_sent_of_a_message_is_not_for_the_application(on: On) {
    let styles = [("recv", false), ("splice", false)];
    let at_once = ["recv-at-once", "at-once"].map(|style| [(style, false), (style, true)]);
    for (style, is_reset) in [&styles[..], &at_once.concat()].concat() {
        for part in [3, 6, 100] {
            let fixture = World::new(on, "hostile end");
            let (mut server, at) = server_in(&fixture, "half", style);
            let device = fixture.device();
            let mut rogue = Rogue::held(&fixture, &device, at);
            rogue.echo(b"!");
            rogue.send(b"12345");
            rogue.say(0, PROPOSED);
            rogue.send(&bytes(&begin(&device).1)[..part]);
            if is_reset {
                reset(rogue.stream);
            } else {
                rogue.stream.shutdown(Shutdown::Write).expect("connected");
            }
            server.say("go on");
            server.line_after("half");
            let end = if is_reset { "got 5 reset" } else { "got 5" };
            assert_eq!(server.line(), end, "{style}, {part} bytes");
            server.succeed();
            fixture.finish();
        }
    }
    // At a fork.
    let fixture = World::new(on, "hostile end at a fork");
    let (mut server, at) = server_in(&fixture, "heir", "-");
    let device = fixture.device();
    let mut rogue = Rogue::held(&fixture, &device, at);
    rogue.echo(b"!");
    rogue.say(0, PROPOSED);
    rogue.send(&bytes(&begin(&device).1)[..6]);
    server.say("fork");
    server.line_after("heir");
    rogue.stream.shutdown(Shutdown::Write).expect("connected");
    let mut rest = Vec::new();
    rogue.stream.read_to_end(&mut rest).expect("an end");
    assert_eq!(rest, b"", "a part of a message was taken for bytes");
    server.line_after("served");
    server.succeed();
    fixture.finish();
}

/// Ends a connection by a RST.
fn reset(stream: TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let size = size_of_val(&linger) as libc::socklen_t;
    let (fd, at) = (stream.as_raw_fd(), (&raw const linger).cast());
    // SAFETY: a linger of its size.
    let set = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, at, size) };
    assert_eq!(set, 0);
}

fn a_proposal_in_single_bytes_is_one_all_the_same(on: On) {
    let fixture = World::new(on, "hostile slow");
    let (server, at) = mirror(&fixture);
    let device = fixture.device();
    let mut rogue = Rogue::held(&fixture, &device, at);
    let proposal = bytes(&begin(&device).1);
    rogue.say(0, PROPOSED);
    for byte in proposal {
        rogue.send(&[byte]);
    }
    assert!(matches!(rogue.answer(&fixture), Message::Accept(_)));
    rogue.say(2, CONFIRMED);
    rogue.send(&bytes(&decline_of(DeclineCode::MEM)));
    (0..100).for_each(|_| rogue.echo(b"over TCP"));
    drop(rogue);
    finish(fixture, server, at);
}

/// The kernel shuts the window where the packet that a message's beginning came in takes most of the receive buffer, until that is read. It
/// depends on how packets are cut: some connections in a thousand (`clc/stream.rs` has a test that looks for one).
fn a_message_whose_end_the_window_keeps_back_is_taken_out(on: On) {
    const CONNECTIONS: u64 = 150;
    let fixture = World::new(on, "hostile window");
    let (server, at) = mirror(&fixture);
    let device = fixture.device();
    let proposal = bytes(&begin(&device).1);
    let begun = Instant::now();
    for n in 0..CONNECTIONS {
        let mut rogue = Rogue::held(&fixture, &device, at);
        // What the server has not read fills its buffer.
        server.signal(libc::SIGSTOP);
        let many = vec![b'.'; 10_000 + (n as usize * 104_729) % 790_000];
        rogue.send(&many);
        rogue.say(0, PROPOSED);
        rogue.send(&proposal);
        server.signal(libc::SIGCONT);
        let (echoed, answer) = rogue.answer_among(many.len());
        assert!(echoed == many, "{n}: others than the application's bytes");
        assert!(matches!(answer, Message::Accept(_)), "{n}");
    }
    let took = begun.elapsed();
    let most = Duration::from_secs(20) * slowness();
    assert!(took < most, "{took:?}: messages were waited for");
    finish(fixture, server, at);
}

fn a_message_that_never_ends_is_given_up(on: On) {
    let fixture = World::new(on, "hostile slow-loris");
    let (server, at) = mirror(&fixture);
    let device = fixture.device();
    let mut rogue = Rogue::held(&fixture, &device, at);
    let half = bytes(&begin(&device).1)[..100].to_vec();
    rogue.say(0, PROPOSED);
    rogue.send(&half);
    // Nobody else has to wait meanwhile.
    let mut other = TcpStream::connect(at).expect("the server listens");
    other.write_all(b"meanwhile").expect("it reads");
    other.read_exact(&mut [0; 9]).expect("it answers");
    rogue.expect(&half);
    (0..100).for_each(|_| rogue.echo(b"over TCP"));
    drop(rogue);
    finish(fixture, server, at);
}

fn proposals_that_cannot_be_are_declined_with_their_code(on: On) {
    let fixture = World::new(on, "hostile declined");
    let (server, at) = mirror(&fixture);
    let device = fixture.device();
    let elsewhere = SmcdGid { gid: 1, ext: 2 };
    let (_, far) = begin_at(elsewhere, &device);
    let mut other_eid = host();
    other_eid.ueids = List::from_slice(&[Eid::user("OTHER").expect("an EID")]).expect("one");
    let devices = client::Devices {
        smcd_v2: List::from_slice(&[(gid(&device), Chid(device.chid()))]).expect("one"),
        ..client::Devices::default()
    };
    let (_, stranger) = client::begin(other_eid, Circumstances::FINE, &devices).expect("begun");
    let cases = [(far, DeclineCode::NOSMCD2DEV), (stranger, DeclineCode::NOSMCDDEV)];
    for (proposal, code) in cases {
        let mut rogue = Rogue::held(&fixture, &device, at);
        rogue.say(0, PROPOSED);
        rogue.send(&bytes(&proposal));
        let Message::Decline(decline) = rogue.answer(&fixture) else { panic!("no Decline") };
        assert_eq!(decline.code, code);
        (0..100).for_each(|_| rogue.echo(b"over TCP"));
    }
    finish(fixture, server, at);
}

#[test]
fn tokens_of_others_give_nothing() {
    if is_plain() {
        return;
    }
    let fixture = World::new(On::Directory, "hostile tokens");
    let (server, at) = mirror(&fixture);
    let device = fixture.device();
    let memory = memory();
    let (mut one, token, link_id) = Rogue::accepted(&fixture, &device, at);
    let (mut two, other, _) = Rogue::accepted(&fixture, &device, at);
    assert_ne!(token, other);
    one.confirm(11);
    two.confirm(22);
    // Somebody else's token, a guessed one, and the right one with the other connection's.
    for (to, from) in [(token, 22), (token ^ 1 << 40, 11), (other, 11), (0, 0)] {
        assert!(device.deliver(link_id, 99, to, from, memory.as_raw_fd()));
    }
    for n in 0..200u32 {
        one.echo(&[b"one", &n.to_be_bytes()[..]].concat());
        two.echo(&[b"two", &n.to_be_bytes()[..]].concat());
    }
    // Everything right but the memory: it is no segment.
    assert!(device.deliver(link_id, 99, token, 11, memory.as_raw_fd()));
    (0..200).for_each(|_| one.echo(b"over TCP"));
    let smcd = fixture.connections(at.port()).iter().filter(|s| s.is_smcd()).count();
    assert_eq!(smcd, 0);
    drop((one, two));
    finish(fixture, server, at);
}

/// Root of a container is root to the kernel, has no rights, and may share the device.
#[test]
fn memory_goes_to_no_mailbox_of_roots_that_the_table_names() {
    if is_plain() {
        return;
    }
    let fixture = World::new(On::Directory, "hostile root");
    fixture.give_to("61001:61001");
    let port = fixture.port().to_string();
    let user = |program: &str| {
        let mut command = fixture.plain("setpriv");
        command.args(["--reuid=61001", "--regid=61001", "--clear-groups"]);
        command.arg(build::usmc()).args(["run", "--", "/usr/bin/python3", "-c", program, &port]);
        fixture.spawn(command)
    };
    // It does not look for the offer while the client makes it.
    let mut server = user(
        "import socket, sys
s = socket.create_server(('127.0.0.1', int(sys.argv[1])))
print('listening', flush=True)
c = s.accept()[0]
c.sendall(c.recv(1)); c.sendall(c.recv(1))
sys.stdin.read()
n = 0
while d := c.recv(4096): n += len(d)
print('received', n)",
    );
    server.line_after("listening");
    let mut client = user(
        "import socket, sys
c = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
c.sendall(b'x'); c.recv(1); c.sendall(b'x'); c.recv(1)
print('ready', flush=True)
n = 0
while sys.stdin.readline():
    c.sendall(b'x'); n += 1
    print('sent', n, flush=True)",
    );
    client.line_after("ready");
    let device = fixture.device();
    let mailbox = device.mailbox();
    let mut send = || {
        client.say("on");
        client.number_after("sent")
    };
    let mut offer = device.find_offer();
    fixture.wait_until("an offer", || {
        send();
        offer = device.find_offer();
        offer.is_some()
    });
    device.want(offer.expect("an offer"));
    let sent = (0..10).map(|_| send()).last().expect("ten");
    let mail = mailbox.recv(&mut [0; 64]);
    assert_eq!(mail.expect_err("memory for root").kind(), std::io::ErrorKind::WouldBlock);
    client.succeed();
    server.close_stdin();
    assert_eq!(server.number_after("received"), sent);
    server.succeed();
    fixture.finish();
}

/// A server that counts as one in another network namespace, and is asked by a client under uSMC, which checks the
/// bytes it gets back. `act` plays the server's part of the handshake.
fn server_that(
    on: On,
    name: &str,
    act: impl Fn(&Device, Place, &mut TcpStream, &mut u64) -> bool,
) -> Vec<String> {
    /// The client goes on until as many were answered.
    const ANSWERS: usize = 400;
    /// The client is looked at behind as many of them, the last one among them: a look takes longer than many messages.
    const LOOK_EACH: usize = 20;
    let fixture = World::new(on, name);
    // Somebody has to make the device.
    let (mut maker, _) = mirror(&fixture);
    let device = fixture.device();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let at = listener.local_addr().expect("bound");
    device.listen(at);
    let mut client = fixture.command("/usr/bin/python3");
    client.arg(tests_dir().join("programs/python/echo.py"));
    client.args(["client", "poll", "127.0.0.1", &at.port().to_string(), "pause"]);
    let mut client = fixture.spawn(client);
    let (mut stream, peer) = listener.accept().expect("the client");
    stream.set_nodelay(true).expect("a TCP socket");
    let (mut sent, mut received, mut place, mut done) = (0u64, 0u64, None, false);
    let (mut answers, mut reasons) = (0, Vec::new());
    let mut buffer = vec![0; 70_000];
    loop {
        place = place.or_else(|| device.find(peer, at));
        if let Some(place) = place.filter(|_| !done) {
            device.set_phase(place, HELD);
            done = device.phase(place) == HELD;
        }
        // The Proposal is not for the application.
        let before = place
            .filter(|&p| device.phase(p) == PROPOSED)
            .and_then(|p| device.announced(p, 0))
            .filter(|&proposal| proposal >= received);
        let room = before.map_or(buffer.len(), |p| ((p - received) as usize).min(buffer.len()));
        if room == 0 {
            let mut header = [0; 8];
            stream.read_exact(&mut header).expect("a Proposal");
            let length = u64::from(u16::from_be_bytes([header[5], header[6]]));
            stream.read_exact(&mut buffer[8..length as usize]).expect("all of it");
            received += length;
            if !act(&device, place.expect("asked"), &mut stream, &mut sent) {
                break;
            }
            continue;
        }
        let peeked = stream.peek(&mut buffer[..room]).unwrap_or(0);
        if peeked == 0 {
            break;
        }
        // It may be there by now.
        let now = place
            .filter(|&p| device.phase(p) == PROPOSED)
            .and_then(|p| device.announced(p, 0))
            .filter(|&proposal| proposal >= received);
        let n = now.map_or(peeked, |p| peeked.min((p - received) as usize));
        if n == 0 {
            continue;
        }
        stream.read_exact(&mut buffer[..n]).expect("what was peeked at");
        received += n as u64;
        let answer: Vec<u8> = buffer[..n].iter().map(|b| 255 - b).collect();
        if stream.write_all(&answer).is_err() {
            break;
        }
        sent += n as u64;
        answers += 1;
        if answers % LOOK_EACH == 0 {
            for socket in fixture.sockets() {
                if socket.peer_port() == at.port() && !reasons.contains(&socket.fallback_reason) {
                    reasons.push(socket.fallback_reason);
                }
            }
        }
        if answers == ANSWERS {
            client.close_stdin();
        }
    }
    drop(stream);
    if client.line().starts_with("port ") && done {
        let status = client.wait();
        reasons.push(format!("{}", status.success()));
    }
    drop(listener);
    maker.close_stdin();
    maker.succeed();
    fixture.finish();
    reasons
}

fn answer_with(device: &Device, place: Place, stream: &mut TcpStream, sent: &mut u64, what: &[u8]) {
    device.announce(place, 1, *sent);
    device.set_phase(place, ANSWERED);
    stream.write_all(what).expect("the client reads");
    *sent += what.len() as u64;
}

fn accept_of(device: &Device, gid: SmcdGid, link_id: u32) -> Vec<u8> {
    let (_, proposal) = begin(device);
    let choice = ExpectProposal::begin(host(), Circumstances::FINE)
        .and_then(|state| state.on_message(proposal, &Anybody));
    let Ok(Choice::D(choice)) = choice else { panic!("SMC-D was offered") };
    bytes(&choice.accept(&side(gid, 77, link_id)).1)
}

fn a_servers_decline_is_shown_and_the_bytes_go_on(on: On) {
    let codes = [DeclineCode::MEM, DeclineCode::NOSMCDDEV, DeclineCode::INTERR];
    assert!(codes.iter().all(|code| decline::ALL.iter().any(|known| known.code == *code)));
    for code in codes {
        let reasons = server_that(on, "hostile server declines", |device, place, stream, sent| {
            answer_with(device, place, stream, sent, &bytes(&decline_of(code)));
            true
        });
        assert_eq!(reasons.last().map(String::as_str), Some("true"), "{reasons:?}");
        let shown = format!("CLC handshake was declined: {code}");
        assert!(reasons.contains(&shown), "{shown} in {reasons:?}");
    }
}

fn a_servers_accept_that_leads_nowhere_is_declined(on: On) {
    // The GID of another device, and a process that is none.
    for (other_gid, link_id) in [(true, 0), (false, 3999)] {
        let reasons = server_that(on, "hostile server accepts", |device, place, stream, sent| {
            let gid = if other_gid { SmcdGid { gid: 9, ext: 9 } } else { gid(device) };
            answer_with(device, place, stream, sent, &accept_of(device, gid, link_id));
            // The Decline that follows is for us to take out; its place is announced.
            let until = Instant::now() + Duration::from_secs(10) * slowness();
            let mut buffer = [0; 70_000];
            let mut received = 0;
            while device.phase(place) != CONFIRMED {
                assert!(Instant::now() < until, "the client says nothing to it");
                let n = stream.peek(&mut buffer).expect("the client lives");
                received = received.max(n);
                // It says it with its next request, which comes when this one is answered.
                if device.phase(place) == ANSWERED {
                    stream.read_exact(&mut buffer[..n]).expect("what was peeked at");
                    let answer: Vec<u8> = buffer[..n].iter().map(|b| 255 - b).collect();
                    stream.write_all(&answer).expect("the client reads");
                }
            }
            false
        });
        // We have hung up.
        assert_eq!(reasons.last().map(String::as_str), Some("false"), "{reasons:?}");
    }
}

fn a_server_that_answers_with_something_else_or_not_at_all_is_tcp(on: On) {
    let reasons = server_that(on, "hostile server silent", |_, _, _, _| true);
    assert_eq!(reasons.last().map(String::as_str), Some("true"), "{reasons:?}");
    // An announced answer that does not come: the application's bytes stand in its place.
    let reasons = server_that(on, "hostile server lies", |device, place, _, sent| {
        device.announce(place, 1, *sent);
        device.set_phase(place, ANSWERED);
        true
    });
    assert_eq!(reasons.last().map(String::as_str), Some("true"), "{reasons:?}");
}

fn the_accept_of_a_server_that_does_not_wait_any_more_is_no_input(on: On) {
    let reasons = server_that(on, "hostile server leaves", |device, place, stream, sent| {
        // As a server under uSMC that ends, or goes on by TCP, before the client has read its Accept.
        let accept = accept_of(device, gid(device), 1);
        device.announce(place, 1, *sent);
        device.set_phase(place, ABANDONED);
        stream.write_all(&accept).expect("the client reads");
        *sent += accept.len() as u64;
        true
    });
    assert_eq!(reasons.last().map(String::as_str), Some("true"), "{reasons:?}");
}
