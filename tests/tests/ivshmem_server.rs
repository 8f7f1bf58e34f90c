//! `usmc ivshmem-server`: virtual machines get memory and doorbells, hear of each other, and leave nothing behind.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use usmc_shm::handshake;
use usmc_shm::layout::{ACCEPTOR, CLIENT, near_len};
use usmc_shm::region::Region;
use usmc_shm::region::peers::Life;
use usmc_shm::region::units::{Member, Run};
use usmc_shm::segment::Segment;
use usmc_shm::sync::Ordering::Relaxed;
use usmc_tests::ivshmem::{Client, Manager, join, map, receive, say};
use usmc_tests::{Fixture, Process, build, is_plain};

/// A small region: what is tested here takes few units.
const SIZE: &str = "1M";

/// A fixture, and paths for sockets in it.
struct World {
    fixture: Fixture,
    socket: PathBuf,
    host: PathBuf,
}

impl World {
    fn new(name: &str) -> World {
        // What has to be built first takes none of the test's time.
        build::usmc();
        let fixture = Fixture::new(name);
        let socket = fixture.scratch().join("vm.sock");
        let host = fixture.scratch().join("host.sock");
        World { fixture, socket, host }
    }

    /// A server's command, with both sockets.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.fixture.plain(build::usmc());
        command.arg("ivshmem-server").args(args);
        command.args(["--host-socket", text(&self.host), text(&self.socket)]);
        command
    }

    /// A server that is ready.
    fn server(&self, args: &[&str]) -> Process {
        let mut server = self.fixture.spawn(self.command(args));
        server.line_after("ready");
        server
    }

    fn client(&self) -> Client {
        Client::connect(&self.socket, 1)
    }

    fn status(&self) -> Value {
        let text = usmc(&["ivshmem-server", "status", text(&self.host), "--json"]);
        serde_json::from_str(&text).expect("JSON")
    }

    /// Waits until the server has so many, closed ones that may live among them.
    fn wait_for_clients(&self, count: usize) {
        self.fixture.wait_until("the number of clients", || {
            self.status()["clients"].as_array().is_some_and(|all| all.len() == count)
        });
    }

    fn end(self, mut server: Process) {
        assert!(server.terminate().success(), "{}", server.errors());
        assert!(!self.socket.exists() && !self.host.exists(), "a socket's file is left");
        drop(server);
        self.fixture.finish();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

fn usmc(args: &[&str]) -> String {
    let out = Command::new(build::usmc()).args(args).output().expect("usmc");
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "usmc {args:?}: {errors}");
    String::from_utf8(out.stdout).expect("text")
}

/// What a command that has to fail says.
fn refused(command: &mut Command) -> String {
    let out = command.output().expect("usmc");
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(1), "{errors}");
    errors
}

fn inode(client: &Client) -> u64 {
    client.memory.as_ref().expect("the memory").metadata().expect("a file").ino()
}

#[test]
fn sixteen_machines_ring_each_other() {
    const MACHINES: usize = 16;
    const VECTORS: usize = 4;
    if is_plain() {
        return;
    }
    let world = World::new("sixteen machines");
    let server = world.server(&["--size", SIZE, "--vectors", "4"]);
    let mut all: Vec<Client> = Vec::new();
    for number in 0..MACHINES {
        let client = Client::connect(&world.socket, VECTORS);
        assert_eq!(client.id, number as i64);
        // At once it knows all that were there, and nobody else.
        let known: Vec<i64> = client.doorbells.keys().copied().collect();
        assert_eq!(known, (0..=number as i64).collect::<Vec<_>>());
        assert!(client.doorbells.values().all(|its| its.len() == VECTORS));
        all.iter_mut().for_each(|other| other.sees_arrival(client.id, VECTORS));
        all.push(client);
    }
    assert!(all.iter().all(|client| inode(client) == inode(&all[0])));
    for from in &all {
        for (at, to) in all.iter().enumerate() {
            for vector in 0..VECTORS {
                from.ring(to.id, vector);
                for (other, client) in all.iter().enumerate() {
                    let heard = (0..VECTORS).map(|v| u64::from(other == at && v == vector));
                    assert_eq!(client.rings(), heard.collect::<Vec<_>>());
                }
            }
        }
    }
    // One after the other leaves, and those that stay hear of it.
    while let Some(gone) = all.pop() {
        let id = gone.id;
        drop(gone);
        all.iter_mut().for_each(|other| other.sees_departure(id));
    }
    world.end(server);
}

#[test]
fn an_id_is_not_given_again_at_once() {
    if is_plain() {
        return;
    }
    let world = World::new("ids");
    let server = world.server(&["--size", SIZE]);
    let mut stays = world.client();
    for id in 1..6 {
        let client = world.client();
        assert_eq!(client.id, id);
        stays.sees_arrival(id, 1);
        drop(client);
        stays.sees_departure(id);
    }
    world.end(server);
}

/// The memory is a region that a client can neither shorten nor lengthen.
#[test]
fn the_memory_is_a_sealed_region() {
    if is_plain() {
        return;
    }
    let world = World::new("sealed");
    let server = world.server(&["--size", SIZE]);
    let client = world.client();
    let memory = client.memory.as_ref().expect("the memory");
    assert_eq!(memory.metadata().expect("a file").len(), 1 << 20);
    assert!(memory.set_len(4096).is_err() && memory.set_len(1 << 21).is_err());
    // SAFETY: fcntl(2) touches no memory of ours.
    let more = unsafe { libc::fcntl(memory.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE) };
    assert_eq!(more, -1);
    assert!(client.region().units() > 0);
    drop(client);
    world.end(server);
}

/// As many as there may be, with messages for far more than a socket's buffer, and one that reads last.
#[test]
fn a_client_that_does_not_read_holds_up_nobody() {
    const VECTORS: usize = 8;
    if is_plain() {
        return;
    }
    let world = World::new("silent");
    let server = world.server(&["--size", SIZE, "--vectors", "8"]);
    let mut silent = Client::silent(&world.socket);
    let mut all: Vec<Client> = Vec::new();
    for _ in 1..64 {
        let mut client = Client::connect(&world.socket, VECTORS);
        // A descriptor for each would be too many for one process.
        client.doorbells.values_mut().for_each(Vec::clear);
        all.push(client);
    }
    let mut late = Client::silent(&world.socket);
    assert!(late.message().is_none(), "there are 64");
    let status = world.status();
    let clients = status["clients"].as_array().expect("clients");
    assert!(clients[0]["behind"].as_u64().expect("a number") > 0, "all fits into the buffer");
    for client in &mut all {
        for id in client.id + 1..64 {
            client.sees_arrival(id, VECTORS);
            client.doorbells.get_mut(&id).expect("a client").clear();
        }
    }
    let gone = all.pop().expect("a client").id;
    all.iter_mut().for_each(|client| client.sees_departure(gone));
    silent.read_greeting();
    assert_eq!(silent.id, 0);
    // The last one may have come and gone unheard of, as far as there was no room to say so.
    let is_told = |silent: &Client, id: &i64| {
        silent.doorbells.get(id).is_some_and(|its| its.len() == VECTORS)
    };
    while !(0..gone).all(|id| is_told(&silent, &id)) {
        silent.learn();
    }
    assert!(!silent.doorbells.contains_key(&gone));
    drop(all);
    (1..gone).for_each(|_| assert!(!silent.learn().1));
    drop(silent);
    world.end(server);
}

#[test]
fn a_client_that_says_anything_is_closed() {
    if is_plain() {
        return;
    }
    let world = World::new("hostile");
    let server = world.server(&["--size", SIZE]);
    let mut stays = world.client();
    for bytes in [&b"x"[..], &[0; 8], &[0xff; 4096]] {
        let mut hostile = world.client();
        stays.sees_arrival(hostile.id, 1);
        say(&hostile, bytes);
        stays.sees_departure(hostile.id);
        assert!(hostile.message().is_none());
    }
    // One that has not read its greeting.
    let hostile = Client::silent(&world.socket);
    let _ = (&hostile.socket).write(b"hello");
    stays.learn();
    assert!(!stays.learn().1);
    let mut next = world.client();
    stays.sees_arrival(next.id, 1);
    next.ring(stays.id, 0);
    assert_eq!(stays.rings(), [1]);
    // One that is full of descriptors.
    let (socket, fds) = (next.socket.as_raw_fd(), [0; 1]);
    send_with_fd(socket, &fds);
    stays.sees_departure(next.id);
    assert!(next.message().is_none());
    drop(stays);
    world.end(server);
}

fn send_with_fd(socket: i32, fds: &[i32; 1]) {
    let mut control = [0u64; 4];
    let mut byte = [0u8];
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: all-zero is a valid msghdr; the buffers outlive the call; the control buffer holds one fd's message.
    unsafe {
        let mut msg: libc::msghdr = std::mem::zeroed();
        (msg.msg_iov, msg.msg_iovlen) = (&raw mut iov, 1);
        msg.msg_control = control.as_mut_ptr().cast();
        msg.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let header = libc::CMSG_FIRSTHDR(&raw const msg);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(header).cast::<i32>().write_unaligned(fds[0]);
        assert_eq!(libc::sendmsg(socket, &raw const msg, libc::MSG_NOSIGNAL), 1);
    }
}

fn life(region: &Region, peer: u8) -> Life {
    region.peers().0[usize::from(peer)].life()
}

/// A run with a segment, whose one slot has a client at the owner, and an acceptor at another peer.
fn connection(region: &Region, owner: u8, acceptor: u8) -> Run {
    let shifts = (14, 0);
    let len = near_len(1, shifts.0).expect("a segment");
    let member = Member::new(owner, 1, 1).expect("a member");
    let run = region.claim(len, member).expect("room");
    // SAFETY: a run of this size, which nobody else has.
    let segment = unsafe { Segment::create(region.at(run.first), 1, shifts, 2, 1 << 32 | 1) };
    let slot = segment.slot(0).expect("a slot");
    let usage = handshake::offer(&slot.control).expect("free");
    handshake::attach(&slot.control, usage, 1, region.peers().holder(acceptor));
    slot.end[CLIENT].refs.store(1, Relaxed);
    slot.end[CLIENT].pid.store(1, Relaxed);
    slot.end[ACCEPTOR].refs.store(1, Relaxed);
    run
}

/// The acceptor's end is over.
fn hang_up(region: &Region, run: Run) {
    let len = near_len(1, 14).expect("a segment");
    // SAFETY: made by `connection`, and mapped still.
    let segment = unsafe { Segment::open(region.at(run.first), len, len) }.expect("a segment");
    segment.slot(0).expect("a slot").end[ACCEPTOR].refs.store(0, Relaxed);
}

#[test]
fn what_a_dead_machine_leaves_comes_back_unless_it_is_used() {
    if is_plain() {
        return;
    }
    let world = World::new("death");
    let server = world.server(&["--size", SIZE]);
    let (mut stays, dies) = (world.client(), world.client());
    let other = world.client();
    let region = stays.region();
    let all = region.words().free();
    let peers = [stays.join(&region), dies.join(&region), other.join(&region)];
    let [living, dead, third] = peers;
    let status = world.status();
    assert_eq!(status["clients"][1]["peers"], serde_json::json!([dead]), "{status}");
    // A run without a segment, units that were being claimed, and a connection with a living peer.
    let member = Member::new(dead, 7, 1).expect("a member");
    region.claim(1, member).expect("room");
    region.words().0[region.units() - 1].store(member.word(), Relaxed);
    let listeners = region.listeners();
    for (place, peer) in listeners.iter().zip([dead, living]) {
        let owner = Member::new(peer, 1, 1).expect("a member").owner();
        place.state.store(owner + 1, Relaxed);
    }
    let used = connection(&region, dead, living);
    let own = connection(&region, living, dead);
    let left = region.words().free();
    drop(dies);
    stays.sees_arrival(1, 1);
    stays.sees_arrival(2, 1);
    stays.sees_departure(1);
    assert_eq!(life(&region, dead), Life::Gone);
    assert!(life(&region, living) == Life::Alive && life(&region, third) == Life::Alive);
    let states = [0, 1].map(|place: usize| listeners[place].state.load(Relaxed));
    assert!(states[0] == 0 && states[1] != 0, "{states:?}");
    assert_eq!(region.words().free(), left + 2);
    assert_eq!(region.words().run_at(used.first), Some(used));
    assert_eq!(region.words().run_at(own.first), Some(own));
    // The next death finds it unused.
    hang_up(&region, used);
    drop(other);
    world.wait_for_clients(1);
    assert_eq!((life(&region, dead), life(&region, third)), (Life::Free, Life::Free));
    assert_eq!(region.words().free(), all - own.count as usize);
    drop(stays);
    world.wait_for_clients(0);
    assert_eq!(region.words().free(), all);
    world.end(server);
}

/// A machine whose client is closed may go on, and write: it is dead once its process is.
#[test]
fn a_closed_client_is_not_taken_for_dead() {
    const CLIENT: &str = "import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.recv(8)
print('id', int.from_bytes(s.recv(8), 'little'), flush=True)
sys.stdin.readline()
s.send(b'x')
sys.stdin.readline()
";
    if is_plain() {
        return;
    }
    let world = World::new("closed");
    let server = world.server(&["--size", SIZE]);
    let mut stays = world.client();
    let mut command = world.fixture.plain("python3");
    command.args(["-c", CLIENT, text(&world.socket)]);
    let mut machine = world.fixture.spawn(command);
    let id = machine.number_after("id") as i64;
    stays.sees_arrival(id, 1);
    let region = stays.region();
    let peer = join(&region, id);
    let run = region.claim(1, Member::new(peer, 1, 1).expect("a member")).expect("room");
    machine.say("talk");
    stays.sees_departure(id);
    let status = world.status();
    assert_eq!(status["clients"][1]["closed"], true, "{status}");
    assert_eq!(life(&region, peer), Life::Alive);
    // Nor is one that only says that it says nothing more.
    let half = world.client();
    let its = half.join(&region);
    half.socket.shutdown(Shutdown::Write).expect("a socket");
    stays.sees_arrival(half.id, 1);
    stays.sees_departure(half.id);
    world.status();
    assert_eq!(life(&region, its), Life::Alive);
    machine.kill();
    world.fixture.wait_until("the death", || life(&region, peer) != Life::Alive);
    world.wait_for_clients(2);
    assert_eq!(region.words().run_at(run.first), None);
    assert_eq!(life(&region, its), Life::Alive);
    drop((stays, half));
    drop(machine);
    world.end(server);
}

#[test]
fn processes_of_the_host_get_the_region() {
    if is_plain() {
        return;
    }
    let world = World::new("host");
    let group = fs::metadata(world.fixture.scratch()).expect("a directory").gid().to_string();
    let server = world.server(&[
        "--size",
        SIZE,
        "--host-mode",
        "0640",
        "--host-group",
        &group,
        "--vectors",
        "2",
    ]);
    let facts = fs::metadata(&world.host).expect("a socket");
    assert_eq!((facts.mode() & 0o777, facts.gid().to_string()), (0o640, group));
    let closed = fs::metadata(&world.socket).expect("a socket").permissions().mode() & 0o777;
    assert_eq!(closed, 0o600);
    let client = Client::connect(&world.socket, 2);
    // More of them than may stay.
    let visitors: Vec<(UnixStream, OwnedFd)> = (0..80)
        .map(|_| {
            let socket = UnixStream::connect(&world.host).expect("a server");
            let mut byte = [0];
            let (count, mut fds) = receive(socket.as_raw_fd(), &mut byte);
            assert_eq!((count, byte, fds.len()), (1, [1], 1));
            (socket, fds.remove(0))
        })
        .collect();
    let (first, last) = (&visitors[0], &visitors[79]);
    assert_eq!((&first.0).read(&mut [0]).expect("the end"), 0);
    let file: fs::File = last.1.try_clone().expect("a copy").into();
    assert_eq!(file.metadata().expect("a file").ino(), inode(&client));
    // What the one writes the other reads.
    let region = map(&file);
    let peer = client.join(&region);
    assert!(client.region().peers().is_alive(peer));
    (&last.0).write_all(b"nonsense").expect("room");
    let mut rest = Vec::new();
    let end = (&last.0).read_to_end(&mut rest);
    assert!(end.is_ok() || end.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
    assert!(rest.is_empty());
    let status = world.status();
    let its = &status["clients"][0];
    assert_eq!((&its["id"], &its["vectors"]), (&0.into(), &2.into()), "{status}");
    assert_eq!(its["pid"], std::process::id(), "{status}");
    assert_eq!((&its["behind"], &status["memory"]["bytes"]), (&0.into(), &(1 << 20).into()));
    let shown = usmc(&["ivshmem-server", "status", text(&world.host)]);
    assert!(shown.contains("units are free") && shown.contains("open"), "{shown}");
    assert!(usmc(&["region", "show", text(&world.host)]).contains("alive"));
    usmc(&["region", "evict", text(&world.host), &peer.to_string()]);
    assert_eq!(life(&region, peer), Life::Gone);
    drop((visitors, client));
    let wrong = refused(Command::new(build::usmc()).args([
        "ivshmem-server",
        "status",
        text(&world.fixture.scratch().join("none")),
    ]));
    assert!(wrong.contains("starts one"), "{wrong}");
    world.end(server);
}

#[test]
fn a_restart_loses_nobody() {
    const VECTORS: usize = 2;
    if is_plain() {
        return;
    }
    let world = World::new("restart");
    let manager = Manager::new(world.fixture.scratch());
    let listeners =
        [&world.socket, &world.host].map(|path| UnixListener::bind(path).expect("a socket"));
    let sockets = [("host", listeners[1].as_raw_fd()), ("vm", listeners[0].as_raw_fd())];
    let start = || {
        let mut service = world.fixture.plain(build::usmc());
        service.args(["ivshmem-server", "--size", SIZE, "--vectors", "2"]);
        let server = world.fixture.spawn(manager.start(&service, &sockets));
        world.fixture.wait_until("the service", || manager.is_ready());
        server
    };
    let mut server = start();
    let mut one = Client::connect(&world.socket, VECTORS);
    let mut silent = Client::silent(&world.socket);
    let leaves = Client::connect(&world.socket, VECTORS);
    one.sees_arrival(1, VECTORS);
    one.sees_arrival(2, VECTORS);
    let region = one.region();
    let peers = [one.join(&region), leaves.join(&region)];
    let kept = manager.names();
    let names = ["client-0", "memory", "process-2", "state", "vector-1-1"];
    assert!(names.iter().all(|name| kept.iter().any(|its| its == name)), "{kept:?}");
    assert!(server.terminate().success());
    assert!(world.socket.exists(), "it is the manager's");

    // Nobody serves. One client leaves, and one comes.
    drop(leaves);
    let socket = world.socket.clone();
    let comes = std::thread::spawn(move || Client::connect(&socket, VECTORS));
    let mut server = start();
    let mut new = comes.join().expect("a client");
    assert_eq!(new.id, 3);
    one.sees_departure(2);
    one.sees_arrival(3, VECTORS);
    assert_eq!((life(&region, peers[0]), life(&region, peers[1])), (Life::Alive, Life::Free));
    new.ring(0, 1);
    one.ring(3, 0);
    assert_eq!((one.rings(), new.rings()), (vec![0, 1], vec![1, 0]));
    // All that it was told, and was not, is one story.
    silent.read_greeting();
    while silent.doorbells.get(&3).is_none_or(|its| its.len() < VECTORS) {
        silent.learn();
    }
    assert_eq!(silent.doorbells.keys().copied().collect::<Vec<_>>(), [0, 1, 3]);
    assert!(silent.doorbells.values().all(|its| its.len() == VECTORS));

    // Killed, once it has written down what it has said.
    world.status();
    server.kill();
    let mut server = start();
    let last = Client::connect(&world.socket, VECTORS);
    assert_eq!(last.id, 4);
    for client in [&mut one, &mut silent, &mut new] {
        client.sees_arrival(4, VECTORS);
        last.ring(client.id, 0);
        assert_eq!(client.rings(), [1, 0]);
        client.ring(4, 1);
    }
    assert_eq!(last.rings(), [0, 3]);
    assert_eq!(last.memory.as_ref().map(|_| inode(&last)), Some(inode(&one)));

    // What has left is kept no longer.
    drop((silent, new, last));
    one.sees_departures(&[1, 3, 4]);
    world.wait_for_clients(1);
    world.fixture.wait_until("the manager", || {
        manager.names() == ["client-0", "memory", "process-0", "state", "vector-0-0", "vector-0-1"]
    });
    assert!(server.terminate().success());
    drop((server, one));
    world.fixture.finish();
}

/// A closed client's process may end while nobody serves.
#[test]
fn a_restart_does_not_forget_the_closed() {
    if is_plain() {
        return;
    }
    let world = World::new("restart closed");
    let manager = Manager::new(world.fixture.scratch());
    let listeners =
        [&world.socket, &world.host].map(|path| UnixListener::bind(path).expect("a socket"));
    let sockets = [("host", listeners[1].as_raw_fd()), ("vm", listeners[0].as_raw_fd())];
    let start = || {
        let mut service = world.fixture.plain(build::usmc());
        service.args(["ivshmem-server", "--size", SIZE]);
        let server = world.fixture.spawn(manager.start(&service, &sockets));
        world.fixture.wait_until("the service", || manager.is_ready());
        server
    };
    let mut server = start();
    let mut stays = world.client();
    let mut command = world.fixture.plain("python3");
    let script = "import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.send(b'x')
print('sent', flush=True)
sys.stdin.readline()
";
    command.args(["-c", script, text(&world.socket)]);
    let mut machine = world.fixture.spawn(command);
    machine.line_after("sent");
    world
        .fixture
        .wait_until("the server to close it", || world.status()["clients"][1]["closed"] == true);
    let region = stays.region();
    let peer = join(&region, 1);
    assert!(server.terminate().success());
    let mut server = start();
    assert_eq!(world.status()["clients"][1]["closed"], true);
    assert_eq!(life(&region, peer), Life::Alive);
    assert!(server.terminate().success());
    machine.kill();
    let mut server = start();
    world.wait_for_clients(1);
    assert_eq!(life(&region, peer), Life::Free);
    let next = world.client();
    assert_eq!(next.id, 2);
    while stays.learn() != (2, true) {}
    assert!(server.terminate().success());
    drop((server, stays, next, machine));
    world.fixture.finish();
}

#[test]
fn a_dead_servers_socket_is_replaced_and_a_living_ones_is_not() {
    if is_plain() {
        return;
    }
    let world = World::new("stale");
    let mut server = world.server(&["--size", SIZE]);
    let second = refused(&mut world.command(&["--size", SIZE]));
    assert!(second.contains("has a server already"), "{second}");
    let client = world.client();
    server.kill();
    assert!(world.socket.exists() && world.host.exists());
    let mut server = world.server(&["--size", SIZE]);
    drop(client);
    assert_eq!(world.client().id, 0, "the other server was not disturbed");
    server.signal(libc::SIGINT);
    assert!(server.wait().success());
    assert!(!world.socket.exists() && !world.host.exists());
    // Somebody else's file.
    fs::write(&world.socket, "mine").expect("our own file");
    let strange = refused(&mut world.command(&["--size", SIZE]));
    assert!(strange.contains("is no socket"), "{strange}");
    assert_eq!(fs::read_to_string(&world.socket).expect("our own file"), "mine");
    fs::remove_file(&world.socket).expect("our own file");
    // What has taken a file's place stays.
    let mut server = world.server(&["--size", SIZE]);
    fs::remove_file(&world.socket).expect("the server's");
    let _other = UnixListener::bind(&world.socket).expect("a socket");
    assert!(server.terminate().success());
    let facts = fs::metadata(&world.socket).expect("another's");
    assert!(facts.file_type().is_socket() && !world.host.exists());
    drop(server);
    world.fixture.finish();
}

#[test]
fn the_memory_may_be_a_file() {
    if is_plain() {
        return;
    }
    let world = World::new("file");
    let strange = world.fixture.scratch().join("strange");
    fs::write(&strange, vec![0; 1 << 20]).expect("our own file");
    let file = world.fixture.scratch().join("region");
    let file = text(&file);
    let mut server = world.server(&["--file", file, "--size", SIZE]);
    let client = world.client();
    assert_eq!(fs::metadata(file).expect("a file").ino(), inode(&client));
    assert_eq!(client.id, 0);
    let region = client.region();
    let peer = client.join(&region);
    assert_eq!(world.status()["memory"]["file"], file);
    // Another server would give the same ids.
    let mut other = world.fixture.plain(build::usmc());
    let socket = world.fixture.scratch().join("other.sock");
    other.args(["ivshmem-server", "--file", file, text(&socket)]);
    let second = refused(&mut other);
    assert!(second.contains("has another server"), "{second}");
    assert!(!socket.exists());
    // The machine outlives its server. Its id is its own still.
    server.kill();
    let mut server = world.server(&["--file", file]);
    let others: Vec<Client> = (0..3).map(|_| world.client()).collect();
    assert!(others.iter().all(|other| other.id != client.id));
    drop(others);
    world.wait_for_clients(0);
    assert_eq!(life(&region, peer), Life::Alive);
    assert!(server.terminate().success());
    for (args, problem) in [
        (&["--file", file, "--size", "2M"][..], "leave --size away"),
        (&["--file", text(&strange)], "no region"),
        (&["--size", "3M"], "a power of two"),
        (&["--vectors", "17"], "17"),
    ] {
        let mut command = world.fixture.plain(build::usmc());
        command.arg("ivshmem-server").args(args).arg(&socket);
        let out = command.output().expect("usmc");
        let errors = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success());
        assert!(errors.contains(problem), "{errors}");
    }
    drop((server, client));
    world.fixture.finish();
}

#[test]
fn huge_pages_are_used_or_missed() {
    if is_plain() {
        return;
    }
    let world = World::new("huge pages");
    let mut server = world.fixture.spawn(world.command(&["--size", "2M", "--hugetlb"]));
    if server.try_line().is_some() {
        let client = world.client();
        assert!(client.region().units() > 0);
        drop(client);
        return world.end(server);
    }
    assert!(!server.wait().success());
    assert!(server.errors().contains("huge page"), "{}", server.errors());
    drop(server);
    world.fixture.finish();
}

/// The real client: QEMU has the device, and hears of others.
#[test]
fn qemu_is_served() {
    if is_plain() {
        return;
    }
    let qemu = ["/usr/bin/qemu-system-x86_64", "/usr/libexec/qemu-kvm"];
    let Some(qemu) = qemu.iter().find(|path| Path::new(path).exists()) else {
        println!("skipped: no qemu-system-x86_64 (apt-get install qemu-system-x86)");
        return;
    };
    let world = World::new("qemu");
    let server = world.server(&["--size", SIZE, "--vectors", "2"]);
    let start = || {
        let mut command = world.fixture.plain(qemu);
        let chardev = format!("socket,path={},id=iv", world.socket.display());
        command.args(["-machine", "q35", "-accel", "tcg", "-m", "16", "-S"]);
        command.args(["-nodefaults", "-display", "none", "-qmp", "stdio"]);
        command.args(["-chardev", &chardev, "-device", "ivshmem-doorbell,chardev=iv,vectors=2"]);
        let mut qemu = world.fixture.spawn(command);
        // Devices are realized before it listens to QMP.
        qemu.line_after("{\"QMP\"");
        qemu
    };
    let mut first = Client::connect(&world.socket, 2);
    let mut one = start();
    first.sees_arrival(1, 2);
    let mut other = start();
    first.sees_arrival(2, 2);
    one.say("{\"execute\": \"qmp_capabilities\"}");
    one.line_after("{\"return\"");
    one.say("{\"execute\": \"query-pci\"}");
    let devices = one.line_after("{\"return\"");
    // Vendor and device of ivshmem, and memory of the size that was said.
    assert!(
        devices.contains("\"device\": 4368") && devices.contains("\"size\": 1048576"),
        "{devices}"
    );
    let status = world.status();
    assert_eq!(status["clients"][1]["pid"], one.pid(), "{status}");
    let region = first.region();
    let peer = join(&region, 1);
    one.kill();
    first.sees_departure(1);
    world.wait_for_clients(2);
    assert_eq!(life(&region, peer), Life::Free);
    // It has heard that the other one left, and is well.
    other.say("{\"execute\": \"qmp_capabilities\"}");
    other.line_after("{\"return\"");
    other.say("{\"execute\": \"quit\"}");
    other.line_after("{\"return\"");
    assert!(other.wait().success());
    first.sees_departure(2);
    drop((first, one, other));
    world.end(server);
}

/// Programs of two ISM directories name the socket for the host's processes as their region, and have their bytes in the server's memory.
#[test]
fn programs_of_the_host_use_the_servers_memory() {
    if is_plain() {
        return;
    }
    build::program("load");
    let world = World::new("host programs");
    let server = world.server(&["--size", "16M"]);
    let shown = usmc(&["region", "show", text(&world.host), "--json"]);
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    let gid = shown["gid"].as_str().expect("an id").to_owned();
    let load = |host: &str, args: &[&str]| {
        let dir = world.fixture.scratch().join(host);
        std::fs::create_dir(&dir).expect("a new directory");
        let mut command = world.fixture.command(build::program("load"));
        command.env("USMC_REGIONS", &world.host).env("USMC_ISM_DIR", dir).args(args);
        world.fixture.spawn(command)
    };
    let mut echo = load("one", &["server"]);
    let port = echo.line_after("port");
    let mut client = load("other", &["many", &port, "1"]);
    client.line_after("connected");
    for _ in 0..100 {
        client.say("talk");
        client.line_after("round");
    }
    let ends: Vec<_> = world
        .fixture
        .sockets()
        .into_iter()
        .filter(|end| [echo.pid(), client.pid()].contains(&end.pid) && end.state != "LISTEN")
        .collect();
    assert!(
        ends.len() == 2 && ends.iter().all(|end| end.is_smcd() && end.device == gid),
        "{ends:?}"
    );
    println!("1 connection in shared memory");
    let shown = usmc(&["device", "--regions", text(&world.host)]);
    assert!(shown.contains("server") && shown.contains(&gid[..8]), "{shown}");
    client.succeed();
    echo.succeed();
    world.end(server);
}
