//! Two virtual machines with soft-RoCE (rdma_rxe): the engine at one end, the kernel's SMC-R at the other, and the engine at both.
//!
//! The kernel is Debian's of a newer series, whose sockets are SMC's by a protocol of their own (IPPROTO_SMC, Linux 6.11).
//!
//! `USMC_TESTS_VM_STEP` takes those steps only whose names have the word, and `USMC_TESTS_VM_TIMES` repeats them in one boot.

use std::cell::Cell;
use std::time::Duration;

use usmc_tests::cluster::Cluster;
use usmc_tests::fixture::tool;
use usmc_tests::vm::{self, Guest, Guests};
use usmc_tests::{Fixture, build, flag, is_plain};

#[path = "vm/rdma_ends.rs"]
mod ends;
#[path = "vm/rdma_fast_open.rs"]
mod fast_open;
#[path = "vm/rdma_links.rs"]
mod links;
#[path = "vm/rdma_programs.rs"]
mod programs;

const LIMIT: Duration = Duration::from_secs(600);
const UEID: &str = "USMC-TESTS";

/// Something that both are asked to do.
type Step = fn(&mut Guest, &mut Guest);

const STEPS: [(&str, Step); 14] = [
    ("both ends are the engine's", both_ends_are_the_engines),
    ("the kernel serves", the_kernel_serves),
    ("the kernel is the client", the_kernel_is_the_client),
    ("round trips", round_trips),
    ("three hundred connections", three_hundred_connections),
    ("an end is killed", an_end_is_killed),
    ("moves", programs::moves),
    ("ends", ends::meet),
    ("redis", programs::redis),
    ("two agents", programs::two_agents),
    ("nginx", programs::nginx),
    ("PostgreSQL", programs::postgresql),
    ("links are cut", links::are_cut),
    ("Fast Open", fast_open::opens),
];

#[test]
fn two_guests_by_rdma() {
    if is_plain() || !vm::is_wanted_with_rdma() {
        return;
    }
    build::usmc();
    build::example("usmc-agent", "peer");
    let done = Cell::new(0);
    vm::again_if_a_kernel_panics(|| steps_behind(&done));
}

/// Those whose frames are looked at when both have ended.
const CAPTURED: [&str; 5] = [
    "both ends are the engine's",
    "the kernel serves",
    "the kernel is the client",
    "round trips",
    "Fast Open",
];

/// All steps but for so many that other machines have done, and counts those that these have.
fn steps_behind(done: &Cell<usize>) {
    let times =
        std::env::var("USMC_TESTS_VM_TIMES").map_or(1, |times| times.parse().expect("a number"));
    let fixture = Fixture::with_limit("two guests by rdma", times * LIMIT);
    let _cluster =
        Cluster::new(&fixture, &build::rdma_vm_image().expect("is_wanted_with_rdma() was asked"));
    let mut guests = Guests::boot_for_rdma(&fixture);
    let [one, other] = guests.both();
    set_up(one);
    set_up(other);
    set_up_kernels(other);
    let only = std::env::var("USMC_TESTS_VM_STEP").unwrap_or_default();
    let steps = STEPS.into_iter().filter(|(name, _)| name.contains(&only));
    let before = done.get();
    for (at, (name, step)) in (0..times).flat_map(|_| steps.clone()).enumerate() {
        if at >= before || CAPTURED.contains(&name) {
            println!("{name}, {} s left", fixture.time_left().as_secs());
            step(one, other);
            done.set(done.get().max(at + 1));
        }
    }
    guests.shut_down();
    if only.is_empty() {
        bytes_went_by_rdma(guests.cable());
        wireshark_finds_nothing_malformed(guests.cable());
        connections_take_so_many_round_trips(guests.cable());
        fast_open::takes_so_many_round_trips(guests.cable());
    }
    fixture.finish();
}

/// Figures of three carriers in the same two machines. Their code is translated, with one processor each, and their device is soft-RoCE: only the
/// ratios mean anything, and only here.
#[test]
fn what_carries_faster() {
    if is_plain() || !flag("USMC_TESTS_VM_SPEED") || !vm::is_wanted_with_rdma() {
        return;
    }
    build::usmc();
    let fixture = Fixture::with_limit("guests' speed by rdma", 3 * LIMIT);
    let mut guests = Guests::boot_for_rdma(&fixture);
    let [one, other] = guests.both();
    for guest in [&mut *one, &mut *other] {
        set_up(guest);
        set_up_kernels(guest);
    }
    programs::speed(one, other);
    guests.shut_down();
    fixture.finish();
}

/// What the cable carried: handshakes by TCP, and by RoCE (UDP port 4791) more than all bytes of all connections.
fn bytes_went_by_rdma(cable: &std::path::Path) {
    for port in PORTS {
        let handshakes =
            vm::frames(cable, &format!("tcp port {port} and tcp[tcpflags] & tcp-syn != 0"));
        let long = vm::frames(cable, &format!("tcp port {port} and greater 400"));
        println!("{port}: {handshakes} SYNs, {long} long frames of TCP");
        assert_eq!((handshakes, long), (2 * CONNECTIONS, 0), "port {port}");
    }
    // A frame has 1024 of them at most, and the last one of a message fewer.
    let frames = vm::frames(cable, "udp dst port 4791 and greater 1000");
    println!("{frames} long frames by RDMA");
    assert!(frames >= 2 * PORTS.len() * CONNECTIONS * BYTES / 1024 * 9 / 10);
}

/// Wireshark knows CLC and CDC. It knows no LLC of version 2, and leaves that as data.
fn wireshark_finds_nothing_malformed(cable: &std::path::Path) {
    let path = cable.to_string_lossy();
    // Wireshark takes LLC of version 2 for RPC over RDMA otherwise, the kernel's as well. It takes bytes of RDMA WRITEs for many protocols:
    // only SENDs are looked at.
    let words = [
        "-r",
        &path,
        "--disable-protocol",
        "rpcordma",
        "-q",
        "-z",
        "io,phs,tcp or infiniband.bth.opcode==4",
    ];
    let out = tool("tshark", &words);
    let said = String::from_utf8_lossy(&out.stdout);
    let frames = |protocol: &str| {
        let lines = said.lines().map(str::trim_start).filter(|line| line.starts_with(protocol));
        let counts = lines.filter_map(|line| line.split("frames:").nth(1)?.split(' ').next());
        counts.map(|count| count.parse::<usize>().expect("a count")).sum::<usize>()
    };
    println!("{} frames of SMC for Wireshark", frames("smc "));
    assert!(frames("smc ") > 1000 && frames("_ws.malformed") == 0, "{said}");
}

/// The device, and the programs that say SMC in SYNs.
fn set_up(guest: &mut Guest) {
    guest.run(
        "for name in crc32_generic rdma_rxe ib_uverbs; do modprobe -C /dev/null -d $modules $name; done
        rdma link add rxe0 type rxe netdev eth0
        mkdir -p /tmp/cgroup && mount -t cgroup2 none /tmp/cgroup
        mount -t bpf none /sys/fs/bpf 2>/dev/null || :
        usmc ebpf load --cgroup /tmp/cgroup",
    );
}

/// The kernel's SMC, whose sockets programs get by a protocol.
fn set_up_kernels(guest: &mut Guest) {
    guest.run(&format!(
        "for name in smc smc_diag; do modprobe -C /dev/null -d $modules $name; done
        {}",
        programs::smcr(&format!("ueid {UEID}"))
    ));
}

/// An echo server of so many connections in the kernel's SMC, and its client.
const SERVER: &str = "import socket, sys, threading
listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 256)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((sys.argv[1], int(sys.argv[2]))); listener.listen(512)
print('ready', flush=True)
def echo(s):
    while data := s.recv(50000): s.sendall(data)
    s.close()
threads = []
for _ in range(int(sys.argv[3])):
    t = threading.Thread(target=echo, args=(listener.accept()[0],)); t.start(); threads.append(t)
for t in threads: t.join()
print('done', flush=True)
";
const CLIENT: &str = "import hashlib, socket, sys, threading
def talk(n):
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 256)
    s.connect((sys.argv[1], int(sys.argv[2])))
    data = hashlib.sha256(bytes([n])).digest() * (int(sys.argv[4]) // 32)
    def send():
        for at in range(0, len(data), 30011): s.sendall(data[at:at + 30011])
        s.shutdown(socket.SHUT_WR)
    t = threading.Thread(target=send); t.start()
    got = b''
    while piece := s.recv(50000): got += piece
    t.join(); s.close()
    assert got == data, (len(got), len(data))
for n in range(int(sys.argv[3])): talk(n)
print('done', flush=True)
";

/// Starts one end, and waits until it says that word.
fn start(guest: &mut Guest, what: &str, log: &str, word: &str) {
    guest.run(&format!(
        ": >/tmp/{log}; {what} >/tmp/{log} 2>&1 &
        until grep -q {word} /tmp/{log}; do kill -0 $! 2>/dev/null || {{ cat /tmp/{log}; exit 1; }}; sleep 0.1; done"
    ));
}

/// Waits until it is done, and gives what it has said.
fn end(guest: &mut Guest, log: &str) -> String {
    let (_, said) = guest.try_run(&format!(
        "for n in $(seq 300); do grep -qE 'done|rror' /tmp/{log} && break; sleep 0.1; done; cat /tmp/{log}"
    ));
    assert!(said.contains("done"), "{said}");
    said
}

fn engine(words: &str) -> String {
    format!("USMC_UEID={UEID} {} {words}", build::example("usmc-agent", "peer").display())
}

/// So many connections left TCP, one of them by first contact.
fn assert_smc(said: &str, connections: usize) {
    assert!(said.contains("slept "), "{said}");
    assert_eq!(said.matches("smc ").count(), connections, "{said}");
    assert_eq!(said.matches("first contact").count(), 1, "{said}");
    assert!(!said.contains("aborted"), "{said}");
}

/// Those of the three steps.
const PORTS: [u16; 3] = [9201, 9202, 9203];
const CONNECTIONS: usize = 5;
const BYTES: usize = 320_000;

fn both_ends_are_the_engines(one: &mut Guest, other: &mut Guest) {
    start(other, &engine(&format!("serve 10.0.0.2 9201 {CONNECTIONS}")), "serve", "ready");
    start(one, &engine(&format!("talk 10.0.0.2:9201 {CONNECTIONS} {BYTES}")), "talk", "smc");
    let said = [end(one, "talk"), end(other, "serve")];
    said.iter().for_each(|said| assert_smc(said, CONNECTIONS));
    // An engine sleeps, and is woken. Beside other load one of them may find something at each look.
    assert!(said.iter().any(|said| !said.contains("slept 0 ")), "{said:?}");
}

fn the_kernel_serves(one: &mut Guest, other: &mut Guest) {
    let server = format!("python3 -c \"{SERVER}\" 10.0.0.2 9202 {CONNECTIONS}");
    start(other, &server, "serve", "ready");
    start(one, &engine(&format!("talk 10.0.0.2:9202 {CONNECTIONS} {BYTES}")), "talk", "smc");
    assert_smc(&end(one, "talk"), CONNECTIONS);
    end(other, "serve");
}

fn the_kernel_is_the_client(one: &mut Guest, other: &mut Guest) {
    start(one, &engine(&format!("serve 10.0.0.1 9203 {CONNECTIONS}")), "serve", "ready");
    let client = format!("python3 -c \"{CLIENT}\" 10.0.0.1 9203 {CONNECTIONS} {BYTES}");
    start(other, &client, "talk", "done");
    assert_smc(&end(one, "serve"), CONNECTIONS);
}

/// One connection after the other, with a short message and its answer: the engine with itself, and as a client and a server of the kernel's.
fn round_trips(one: &mut Guest, other: &mut Guest) {
    start(other, &engine(&format!("serve 10.0.0.2 9211 {CONNECTIONS}")), "serve", "ready");
    start(one, &engine(&format!("turns 10.0.0.2:9211 {CONNECTIONS} 100")), "talk", "done");
    end(other, "serve");
    let server = format!("python3 -c \"{SERVER}\" 10.0.0.2 9212 {CONNECTIONS}");
    start(other, &server, "serve", "ready");
    start(one, &engine(&format!("turns 10.0.0.2:9212 {CONNECTIONS} 100")), "talk", "done");
    end(other, "serve");
    start(one, &engine(&format!("serve 10.0.0.1 9213 {CONNECTIONS}")), "serve", "ready");
    let client = format!("python3 -c \"{CLIENT}\" 10.0.0.1 9213 {CONNECTIONS} 96");
    start(other, &client, "talk", "done");
    end(one, "serve");
}

/// From the SYN to the first byte of the answer: three where both ends are the engine, and one more for the kernel's CONFIRM_RKEY. First
/// contact takes one more to confirm the link.
fn connections_take_so_many_round_trips(cable: &std::path::Path) {
    for (port, next) in [(9211, 3), (9212, 4), (9213, 4)] {
        let legs = usmc_tests::trips::legs(cable, port);
        println!("{port}: {legs:?} legs");
        assert_eq!(legs.len(), CONNECTIONS);
        // The end of the connection before may still be under way, and counts then.
        assert_eq!(legs[1..].iter().min(), Some(&(2 * next)), "{legs:?}");
        assert!(legs[1..].iter().all(|legs| *legs <= 2 * (next + 1)), "{legs:?}");
        assert_eq!(legs[0], 8, "first contact: {legs:?}");
    }
}

/// More than a link group has room for: a second one begins. The kernel is the server.
fn three_hundred_connections(one: &mut Guest, other: &mut Guest) {
    const MANY: usize = 300;
    start(other, &format!("python3 -c \"{SERVER}\" 10.0.0.2 9231 {MANY}"), "serve", "ready");
    start(one, &engine(&format!("all 10.0.0.2:9231 {MANY} 3000")), "talk", "done");
    let said = end(one, "talk");
    end(other, "serve");
    let [all, first] = ["smc ", "first contact"].map(|what| said.matches(what).count());
    println!("{all} of {MANY} connections, {first} groups");
    assert_eq!((all, first), (MANY, 2), "{said}");
}

/// A client in the kernel's SMC that reads, and says what it finds.
const READER: &str = "import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 256)
s.connect((sys.argv[1], int(sys.argv[2])))
s.sendall(b'x' * 1000); s.recv(10)
print('reads', flush=True)
try:
    while s.recv(1000): pass
    print('end', s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), flush=True)
except OSError as e: print('end', e, flush=True)
";

/// The same that reads nothing more.
const SLEEPER: &str = "import signal, socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 256)
s.connect((sys.argv[1], int(sys.argv[2])))
s.sendall(b'x' * 1000); s.recv(10)
print('sleeps', flush=True)
signal.pause()
";

/// The kernel's client is killed with bytes unread, and the engine sees a reset. Then the engine's process is: without an agent that outlives
/// it the kernel finds out by its own test of the link.
fn an_end_is_killed(one: &mut Guest, other: &mut Guest) {
    test_links_each(other, 1);
    start(one, &engine("serve 10.0.0.1 9221 2"), "serve", "ready");
    start(other, &format!("python3 -c \"{SLEEPER}\" 10.0.0.1 9221"), "sleeper", "sleeps");
    other.run("pkill -9 -f 10.0.0.1.9221");
    one.run("for n in $(seq 600); do grep -q 'aborted.*Reset' /tmp/serve && exit; sleep 0.1; done; cat /tmp/serve; exit 1");
    start(other, &format!("python3 -c \"{READER}\" 10.0.0.1 9221"), "reader", "reads");
    one.run("pkill -9 -x peer");
    let said = other.run("for n in $(seq 600); do grep -q end /tmp/reader && break; sleep 0.1; done; cat /tmp/reader");
    // ECONNABORTED, which the kernel shows once it has reported an end.
    assert!(said.contains("end 103"), "{said}");
    test_links_each(other, 30);
}

/// The kernel tests a new link that is idle for so many seconds, and gives it up two seconds later. A machine may stand still as long.
fn test_links_each(guest: &mut Guest, seconds: u32) {
    guest.run(&format!("sysctl -qw net.smc.smcr_testlink_time={seconds}"));
}
