//! Connections between two hosts that carry one message and its answer: what they teach a client, and what it does.

#![cfg(target_arch = "x86_64")]

use std::path::Path;

use usmc_tests::build::tests_dir;
use usmc_tests::network::{self, At, Network};
use usmc_tests::rdma::world::finish;
use usmc_tests::rdma::{agents_of, end_agents};
use usmc_tests::{Fixture, Process};

/// So many brief ones within a second, and those that follow stay TCP (`handshake/brief.rs`).
const ENOUGH: usize = 16;
const REASON: &str = "connections to this server were brief lately";

/// Both ends of many connections, and their port.
struct Ends<'a> {
    fixture: &'a Fixture,
    client: Process,
    server: Process,
    port: u16,
    /// How many connections are open.
    open: usize,
}

impl<'a> Ends<'a> {
    fn new(
        fixture: &'a Fixture,
        network: &Network,
        dirs: [&Path; 2],
        setting: (&str, &str),
    ) -> Ends<'a> {
        let port = fixture.port();
        let start = |at: At, role: &str, address: &str| {
            let dir = dirs[usize::from(at == At::Server)];
            let mut command = network.under_usmc(fixture, at, dir, "auto");
            command.arg("env").arg(format!("{}={}", setting.0, setting.1)).arg("/usr/bin/python3");
            command.arg(tests_dir().join("programs/python/brief.py"));
            command.args([role, address, &port.to_string()]);
            fixture.spawn(command)
        };
        let mut server = start(At::Server, "server", "0.0.0.0");
        assert_eq!(server.line(), "listening");
        let client = start(At::Client, "client", network::SERVER);
        Ends { fixture, client, server, port, open: 0 }
    }

    fn does(&mut self, what: &str) -> String {
        self.client.say(what);
        self.client.line()
    }

    /// How many of the client's open connections are by RDMA, once each is, or is to stay TCP.
    fn by_rdma(&self) -> usize {
        let mut by_rdma = 0;
        self.fixture.wait_until(&format!("{} connections that are decided", self.open), || {
            let mut seen = self.fixture.connections(self.port);
            seen.retain(|end| end.peer_port() == self.port);
            by_rdma = seen.iter().filter(|end| end.is_smcr()).count();
            let tcp = seen.iter().filter(|end| end.fallback_reason == REASON).count();
            seen.len() == self.open && by_rdma + tcp == self.open
        });
        by_rdma
    }

    /// Opens so many, of which so many are by RDMA. Besides, how long ago the last brief one had ended, in milliseconds.
    fn open(&mut self, count: usize) -> (usize, usize) {
        let before = self.by_rdma();
        let said = self.does(&format!("open {count}"));
        self.open += count;
        let by_rdma = self.by_rdma() - before;
        println!("{by_rdma} of {count} connections by RDMA, {said} ms");
        let took = said.strip_prefix("opened ").and_then(|took| took.parse().ok());
        (by_rdma, took.unwrap_or_else(|| panic!("{said}")))
    }

    fn close(&mut self) {
        assert_eq!(self.does("close"), "closed");
        self.open = 0;
    }

    fn end(self) {
        finish(self.client, self.server);
    }
}

#[test]
fn a_server_of_brief_connections_stays_tcp_for_a_while() {
    const HELD: usize = 20;
    let Some((fixture, network)) = Network::with_programs("brief connections") else { return };
    let [(one, near), (other, far)] = agents_of(&fixture, &network);
    let ends = |setting| Ends::new(&fixture, &network, [&near, &far], setting);

    let mut some = ends(("USMC_LOG", ""));
    assert_eq!(some.does(&format!("brief {}", ENOUGH - 1)), "done");
    assert_eq!(some.open(1).0, 1, "fewer are nobody's trouble");
    // That one lasts, so that all begins anew.
    assert_eq!(some.does("send 40"), "sent");
    some.close();
    // The next ones stay TCP but for two in a second. Once more where the machine took too long.
    fixture.wait_until("a round of less than a second", || {
        assert_eq!(some.does(&format!("brief {}", 2 * ENOUGH)), "done");
        let (by_rdma, took) = some.open(HELD);
        // Bytes go by each.
        assert_eq!(some.does("send 5"), "sent");
        some.close();
        assert!(took > 900 || by_rdma <= 1 + took / 500, "{by_rdma} in {took} ms");
        took <= 900
    });
    // None ends for a second.
    fixture.wait_until("all of some connections by RDMA", || some.open(5).0 == 5);
    some.close();
    some.end();

    // All connections last, or the server may expect a first message.
    for setting in [("USMC_CHANGE_OVER", "at-once"), ("USMC_PEERS", network::SERVER)] {
        let mut all = ends(setting);
        assert_eq!(all.does(&format!("brief {}", 3 * ENOUGH)), "done");
        assert_eq!(all.open(HELD).0, HELD, "{setting:?}");
        all.close();
        all.end();
    }
    end_agents(fixture, network, [one, other]);
}
