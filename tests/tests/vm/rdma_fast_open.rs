//! Connections of two machines whose SYN has the Proposal, with the kernel's SMC as the server, and with an agent there.

use std::path::Path;

use usmc_tests::build::tests_dir;
use usmc_tests::netns::counter;
use usmc_tests::trips::legs;
use usmc_tests::vm::Guest;

use crate::programs::{Smc, for_each_pair, state};

/// The server's port, by whose SMC it has, and round trips to the first byte of an answer where a link group is there.
const SERVERS: [(Smc, u16, usize); 2] = [(Smc::Ours, 9241, 2), (Smc::Kernels, 9242, 3)];
/// Connections to each: the first one gets the cookie.
const CONNECTIONS: usize = 6;

/// All connections but the first are opened by a SYN with the Proposal, and are by RDMA.
pub(crate) fn opens(one: &mut Guest, other: &mut Guest) {
    let pairs = SERVERS.map(|(smc, ..)| (smc, Smc::Ours));
    for_each_pair(&pairs, (one, other), |server, client| {
        let (_, port, _) = SERVERS[usize::from(server.smc == Smc::Kernels)];
        let python = tests_dir().join("programs/python");
        let python = python.display();
        let (to, serves, calls) = (server.guest.address(), server.smc.how(), client.smc.how());
        let from = client.guest.address();
        // AF_SMC asks for no Fast Open: all listeners take part.
        server.guest.run(&format!(
            "sysctl -qw net.ipv4.tcp_fastopen=1027
            sleep 600 | USMC_FAST_OPEN={from} {serves} python3 {python}/echo.py mirror - {to} {port} >/tmp/echo 2>&1 &
            echo $! >/tmp/echo.pid
            until grep -q listening /tmp/echo; do kill -0 $! || {{ cat /tmp/echo; exit 1; }}; sleep 0.1; done"
        ));
        let active =
            |guest: &mut Guest| counter(&guest.run("cat /proc/net/netstat"), "TCPFastOpenActive");
        let before = active(client.guest);
        client.guest.run(&format!(
            "sleep 600 | USMC_FAST_OPEN={to} {calls} python3 {python}/opens.py blocking {to} {port} {CONNECTIONS} >/tmp/opens 2>&1 &
            echo $! >/tmp/opens.pid
            for n in $(seq 300); do grep -qE '^open|rror' /tmp/opens && break; sleep 0.1; done"
        ));
        let said = client.guest.run("cat /tmp/opens");
        assert_eq!(said, format!("open {CONNECTIONS}"), "{}", state(server, "/tmp/echo"));
        assert_eq!(active(client.guest) - before, CONNECTIONS as u64 - 1);
        let by_rdma = [server.by_rdma(port), client.by_rdma(port)];
        println!("  {by_rdma:?} of {CONNECTIONS} connections by RDMA");
        assert_eq!(by_rdma, [CONNECTIONS; 2]);
        for (guest, name) in [(&mut *client.guest, "opens"), (&mut *server.guest, "echo")] {
            guest.run(&format!(
                "pid=$(cat /tmp/{name}.pid); kill $pid; while kill -0 $pid 2>/dev/null; do sleep 0.1; done
                pkill -x sleep; sysctl -qw net.ipv4.tcp_fastopen=1"
            ));
        }
    });
}

/// From the SYN to the first byte of the answer: a round trip less than without Fast Open.
pub(crate) fn takes_so_many_round_trips(cable: &Path) {
    for (smc, port, expected) in SERVERS {
        let legs = legs(cable, port);
        println!("{port}, {smc:?}: {legs:?} legs");
        assert_eq!(legs.len(), CONNECTIONS);
        assert_eq!(legs[1..].iter().min(), Some(&(2 * expected)), "{legs:?}");
        assert!(legs[1..].iter().all(|legs| *legs <= 2 * (expected + 1)), "{legs:?}");
    }
}
