//! Three hosts with a region in common: network, process and mount namespaces, an ISM directory and a boot id each.

use std::fs;
use std::process::Command;

use usmc_tests::build::{self, tests_dir};
use usmc_tests::netns::{Netns, Who};
use usmc_tests::region::Hosts;
use usmc_tests::{Fixture, Process, is_plain};

const CLIENT: usize = 0;
const PROXY: usize = 1;
const SERVER: usize = 2;

/// Bytes of the region.
const REGION: usize = 32 << 20;

struct World {
    fixture: Fixture,
    net: Netns,
    hosts: Hosts,
}

fn boot_id(host: usize) -> String {
    format!("{:08x}-0000-4000-8000-000000000000", host + 1)
}

impl World {
    fn new(name: &str) -> World {
        let fixture = Fixture::new(name);
        let hosts = Hosts::new(&fixture, 3, REGION);
        for host in 0..3 {
            let file = fixture.scratch().join(format!("boot{host}"));
            fs::write(file, boot_id(host) + "\n").expect("our own file");
        }
        World { fixture, net: Netns::chain(), hosts }
    }

    /// A Python program of this host.
    fn python(&self, host: usize, args: &[&str]) -> Process {
        let who = Who { alone: true, ..Who::default() };
        let mut command: Command = self.net.plain(&self.fixture, host, who);
        self.hosts.dress(host, &mut command);
        let boot = self.fixture.scratch().join(format!("boot{host}"));
        let begin = "mount --bind $0 /proc/sys/kernel/random/boot_id && exec \"$@\"";
        command.args(["sh", "-c", begin]).arg(boot).arg(build::usmc());
        command.args(["run", "--", "/usr/bin/python3"]).args(args);
        self.fixture.spawn(command)
    }

    /// Ends of connections of these ports that are in the region, and all.
    fn ends(&self, ports: [u16; 2]) -> (usize, usize) {
        let ends: Vec<_> = ports.iter().flat_map(|port| self.fixture.connections(*port)).collect();
        let inside = self.hosts.count(&ends);
        if inside != ends.len() {
            println!("{ends:#?}");
        }
        (inside, ends.len())
    }

    /// Whether a host is a peer of the region, and its number.
    fn peer(&self, host: usize) -> Option<u64> {
        let shown = self.hosts.shown();
        let id = boot_id(host).replace('-', "");
        let peers = shown["peers"].as_array().expect("peers");
        peers.iter().find(|peer| peer["host"] == id)?["number"].as_u64()
    }
}

/// Passes on what comes to the next host; where that is gone it answers by itself.
const RELAY: &str = "import select, socket, sys
port, to, there = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
l = socket.create_server(('', port))
print('listening', flush=True)
other = {}
def end(s):
    for x in {s, other.pop(s)}:
        other.pop(x, None); x.close()
while True:
    for s in select.select([sys.stdin, l, *other], [], [])[0]:
        if s is sys.stdin: sys.exit()
        if s is l:
            c = l.accept()[0]
            try: u = socket.create_connection((to, there), timeout=10)
            except OSError: u = c
            other[c], other[u] = u, c
        elif s in other:
            try:
                d = s.recv(65536)
                if d: other[s].sendall(d)
                else: end(s)
            except OSError: end(s)
";

/// Messages there and back at each line of its input; says how many, or that the connection is over.
const TALKS: &str = "import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print('connected', flush=True)
k = 0
for line in sys.stdin:
    try:
        for _ in range(100):
            m = bytes((k + i) % 256 for i in range(700)); k += 1
            s.sendall(m)
            got = s.recv(700, socket.MSG_WAITALL)
            if not got: raise OSError('over')
            assert got == m, 'foreign bytes'
        print('talked', flush=True)
    except OSError: print('over', flush=True); break
";

#[test]
fn a_host_that_is_killed_gives_its_memory_back_and_the_others_go_on() {
    if is_plain() {
        return;
    }
    let world = World::new("three hosts");
    let all = world.hosts.free();
    let ports = [world.fixture.port(), world.fixture.port()];
    let [proxy_port, server_port] = ports.map(|port| port.to_string());
    let echo = tests_dir().join("programs/python/echo.py");
    let echo = echo.to_str().expect("text");
    let mut server = world.python(SERVER, &[echo, "mirror", "-", "0.0.0.0", &server_port]);
    assert_eq!(server.line(), "listening");
    let relay = ["-c", RELAY, &proxy_port, &world.net.address(SERVER), &server_port];
    let mut proxy = world.python(PROXY, &relay);
    assert_eq!(proxy.line(), "listening");
    let talker = |host: usize, to: &str| {
        let mut client = world.python(host, &["-c", TALKS, to, &proxy_port]);
        client.line_after("connected");
        client
    };
    let to_proxy = world.net.address(PROXY);
    let mut client = talker(CLIENT, &to_proxy);
    // So that the host has memory of its own, and not only slots in the others'.
    let mut second = talker(SERVER, &world.net.address_to_third());
    for talker in [&mut client, &mut second] {
        talker.say("on");
        talker.line_after("talked");
    }
    let (inside, ends) = world.ends(ports);
    println!("{inside} of {ends} ends in the region");
    assert_eq!((inside, ends), (8, 8), "client, proxy, server, and back");
    let taken = all - world.hosts.free();
    // All processes of the host, whose number is known by its boot id.
    let number = world.peer(SERVER).expect("a peer").to_string();
    second.kill();
    server.kill();
    let mut evict = Command::new(build::usmc());
    evict.args(["region", "evict"]).arg(world.hosts.region()).arg(&number);
    assert!(evict.status().expect("usmc").success());
    client.say("on");
    client.line_after("over");
    client.succeed();
    // The next to join takes back what it has left, also of what the proxy, which lives, has lent it.
    let mut client = talker(CLIENT, &to_proxy);
    client.say("on");
    client.line_after("talked");
    assert_eq!(world.ends(ports), (2, 2), "the other two go on in the region");
    assert_eq!(world.peer(SERVER), None, "{}", world.hosts.shown());
    let left = all - world.hosts.free();
    assert!(left < taken, "{left} units, before {taken}: {}", world.hosts.shown());
    client.succeed();
    proxy.succeed();
    // What ended in an orderly way comes back as well.
    let mut proxy = world.python(PROXY, &relay);
    assert_eq!(proxy.line(), "listening");
    talker(CLIENT, &to_proxy).succeed();
    assert_eq!(world.hosts.free(), all, "units are lost: {}", world.hosts.shown());
    proxy.succeed();
    world.fixture.finish();
}
