//! Looks for tests.

use std::time::Duration;

use usmc::observe::{Mode, State};
use usmc::reason::Reason;

use super::app::App;
use crate::observed::{Socket, Totals};
use crate::sockets::{Look, Program, Seen};

/// A socket between two ports of 127.0.0.1 that has sent and received so many bytes, each by a call.
pub fn socket(mode: Mode, [local, peer]: [u16; 2], [tx, rx]: [u64; 2]) -> Socket {
    let at = |port: u16| format!("127.0.0.1:{port}").parse().expect("an address");
    Socket {
        fd: 5,
        state: State::Active,
        mode,
        reason: if mode == Mode::Tcp { Reason::NotRegistered as u8 } else { 0 },
        declined: 0,
        local: at(local),
        peer: at(peer),
        tx_bytes: tx,
        rx_bytes: rx,
        window: 16_384,
        ring_size: (mode != Mode::Tcp).then_some(262_144),
        syn_option: None,
        slot: 1,
        index: 0,
        is_client: local > peer,
        was_smcd: mode != Mode::Tcp,
        segment: 7,
        region: None,
        counters: [tx, rx, tx, rx, 0, tx / 10, tx / 2, 0, 0],
    }
}

/// In process `program` of a look, with this inode.
pub fn seen(socket: Socket, program: usize, inode: u64) -> Seen {
    Seen::new(socket, program, Some(1), Some(inode))
}

/// A process, which has closed connections with so many bytes sent.
pub fn program(pid: u32, comm: &str, closed: u64) -> Program {
    let mut totals = Totals::default();
    totals.closed[0] = closed;
    Program { pid, start: Some(u64::from(pid)), comm: comm.to_owned(), totals: vec![totals] }
}

/// Of two processes, `redis` with 100 and `client` with 200 as their numbers.
pub fn look(sockets: Vec<Seen>) -> Look {
    let programs = vec![program(100, "redis", 0), program(200, "client", 0)];
    Look { programs, sockets, ..Look::default() }
}

/// Two looks, two seconds apart: 100 and 50 bytes a second between both processes, one more connection on TCP.
pub fn app() -> App {
    let mut app = App::new(Duration::from_secs(2));
    let at = |tx: u64, rx: u64| {
        look(vec![
            seen(socket(Mode::Smcd, [6379, 40_000], [tx, rx]), 0, 1),
            seen(socket(Mode::Smcd, [40_000, 6379], [rx, tx]), 1, 2),
            seen(socket(Mode::Tcp, [40_001, 80], [0, 0]), 1, 3),
        ])
    };
    app.model.take(at(1000, 500), Duration::from_secs(10));
    app.model.take(at(1200, 600), Duration::from_secs(12));
    app.arrange();
    app
}
