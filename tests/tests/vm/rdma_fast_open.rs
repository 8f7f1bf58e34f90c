//! Connections of two machines whose SYN has the Proposal, with the kernel's SMC as the server, and with an agent there.

use std::path::Path;

use usmc_tests::build::tests_dir;
use usmc_tests::netns::counter;
use usmc_tests::trips::legs;
use usmc_tests::vm::Guest;

use crate::programs::{End, Smc, for_each_pair, state};

/// The server's port, by whose SMC it has, and round trips to the first byte of an answer where a link group is there.
const SERVERS: [(Smc, u16, usize); 2] = [(Smc::Ours, 9241, 2), (Smc::Kernels, 9242, 3)];
/// Connections to each: the first one gets the cookie.
const CONNECTIONS: usize = 6;

/// What each way takes while times are taken, in milliseconds, and what a round trip takes.
const DELAY: u32 = 150;
const ROUND_TRIP: f64 = 2.0 * DELAY as f64;
/// The times of two clients differ by a round trip, but for this part of one.
const SLACK: f64 = 0.5;
/// A time may be shorter than its round trips by this part of one: clocks are not exact.
const EARLY: f64 = 0.1;

/// Where the scripts are.
fn python(script: &str) -> String {
    format!("python3 {}", tests_dir().join("programs/python").join(script).display())
}

/// All connections but the first are opened by a SYN with the Proposal, and are by RDMA. Then the network is slow.
pub(crate) fn opens(one: &mut Guest, other: &mut Guest) {
    let pairs = SERVERS.map(|(smc, ..)| (smc, Smc::Ours));
    for_each_pair(&pairs, (one, other), |server, client| {
        let (_, port, round_trips) = SERVERS[usize::from(server.smc == Smc::Kernels)];
        let (to, from) = (server.guest.address(), client.guest.address());
        let (serves, script) = (server.smc.how(), python("echo.py"));
        // AF_SMC asks for no Fast Open: all listeners take part.
        server.guest.run(&format!(
            "sysctl -qw net.ipv4.tcp_fastopen=1027; : >/tmp/echo
            sleep 900 | USMC_FAST_OPEN={from} {serves} {script} mirror - {to} {port} >/tmp/echo 2>&1 &
            echo $! >/tmp/echo.pid
            until grep -q listening /tmp/echo; do kill -0 $! || {{ cat /tmp/echo; exit 1; }}; sleep 0.1; done"
        ));
        let active =
            |guest: &mut Guest| counter(&guest.run("cat /proc/net/netstat"), "TCPFastOpenActive");
        let before = active(client.guest);
        connect(server, client, "USMC_FAST_OPEN", port);
        assert_eq!(active(client.guest) - before, CONNECTIONS as u64 - 1);
        let by_rdma = [server.by_rdma(port), client.by_rdma(port)];
        println!("  {by_rdma:?} of {CONNECTIONS} connections by RDMA");
        assert_eq!(by_rdma, [CONNECTIONS; 2]);
        end(client.guest, "opens");
        for guest in [&mut *server.guest, &mut *client.guest] {
            guest.run(&format!(
                "modprobe -C /dev/null -d $modules sch_netem; tc qdisc add dev eth0 root netem delay {DELAY}ms"
            ));
        }
        let clients = [("USMC_PEERS", round_trips + 1), ("USMC_FAST_OPEN", round_trips)];
        let [without, with] = clients.map(|(key, expected)| {
            let said = connect(server, client, key, port);
            let took = |at| times(&said, at).skip(1).fold(f64::MAX, f64::min) / ROUND_TRIP;
            let (made, answered) = (took(1), took(2));
            println!(
                "  {key}: connected after {made:.2} round trips, an answer after {answered:.2}"
            );
            // A slow machine makes each of them longer by as much.
            assert!(made >= 1.0 - EARLY && answered >= expected as f64 - EARLY, "{said}");
            end(client.guest, "opens");
            answered
        });
        assert!((without - with - 1.0).abs() <= SLACK, "{without} and {with} round trips");
        for guest in [&mut *server.guest, &mut *client.guest] {
            guest.run("tc qdisc del dev eth0 root");
        }
        end(server.guest, "echo");
        server.guest.run("sysctl -qw net.ipv4.tcp_fastopen=1");
    });
}

/// A client makes its connections, for which that key names the server. What it says.
fn connect(server: &mut End, client: &mut End, key: &str, port: u16) -> String {
    let (to, calls, script) = (server.guest.address(), client.smc.how(), python("opens.py"));
    let said = client.guest.run(&format!(
        ": >/tmp/opens; sleep 900 | {key}={to} {calls} {script} blocking {to} {port} {CONNECTIONS} >/tmp/opens 2>&1 &
        echo $! >/tmp/opens.pid
        for n in $(seq 300); do grep -qE '^open|rror' /tmp/opens && break; sleep 0.1; done
        cat /tmp/opens"
    ));
    let is_open = said.ends_with(&format!("open {CONNECTIONS}"));
    assert!(is_open, "{said}\n{}", state(server, "/tmp/echo"));
    said
}

/// Ends a program that was left running under that name.
fn end(guest: &mut Guest, name: &str) {
    guest.run(&format!(
        "pid=$(cat /tmp/{name}.pid); kill $pid; while kill -0 $pid 2>/dev/null; do sleep 0.1; done
        pkill -x sleep || :"
    ));
}

/// What the lines "took CONNECT FIRST" have at that place.
fn times(said: &str, at: usize) -> impl Iterator<Item = f64> {
    let lines = said.lines().filter(|line| line.starts_with("took "));
    lines.map(move |line| {
        let word = line.split(' ').nth(at);
        word.and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{line}"))
    })
}

/// From the SYN to the first byte of the answer: a round trip less than without Fast Open.
pub(crate) fn takes_so_many_round_trips(cable: &Path) {
    for (smc, port, expected) in SERVERS {
        let legs = legs(cable, port);
        println!("{port}, {smc:?}: {legs:?} legs");
        // Those that came before times were taken.
        let legs = &legs[..CONNECTIONS];
        assert_eq!(legs[1..].iter().min(), Some(&(2 * expected)), "{legs:?}");
        assert!(legs[1..].iter().all(|legs| *legs <= 2 * (expected + 1)), "{legs:?}");
    }
}
