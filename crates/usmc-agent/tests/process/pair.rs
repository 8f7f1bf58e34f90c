//! Two agents whose turns a test takes, and that never sleep.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;

use usmc_agent::agent::Agent;
use usmc_agent::control::Control;
use usmc_agent::driver::Driver;
use usmc_agent::rest::{Rest, Spin};
use usmc_agent::service::Service;
use usmc_shm::agent::Role;

use super::{Process, ask_at, fake, loopback};

/// One for each host.
pub(crate) struct Pair(pub(crate) [Agent; 2]);

impl Pair {
    pub(crate) fn new(test: u8) -> Pair {
        Pair([0, 1].map(|host| {
            let (config, adapters) = fake::host(test, host);
            let rest = Rest::new(Spin::Always).expect("an epoll set");
            let driver = Driver::new(config, adapters).expect("an epoll set");
            let service = Service::new(driver, rest, super::SHIFT).expect("a service");
            let control = Control::listen(&path(test, host), &service).expect("a socket");
            Agent::new(service, control)
        }))
    }

    /// With a connection between them, the client's end first.
    pub(crate) fn connected() -> (Pair, [Process; 2]) {
        let test = fake::next_test();
        let mut pair = Pair::new(test);
        let (give, given) = mpsc::channel();
        let asks = thread::spawn(move || give.send(connect(test)).expect("the test"));
        let ends = loop {
            pair.turn();
            if let Ok(ends) = given.try_recv() {
                break ends;
            }
        };
        asks.join().expect("the processes");
        (pair, ends)
    }

    pub(crate) fn turn(&mut self) {
        [0, 1].into_iter().for_each(|host| self.turn_one(host));
    }

    pub(crate) fn turn_one(&mut self, host: usize) {
        self.0[host].turn(|_| {}).expect("a device");
    }
}

fn path(test: u8, host: u8) -> PathBuf {
    let name = format!("pair-{}-{test}-{host}", std::process::id());
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// A connection between the agents of a test, over a fabric that costs nothing, for agents that turn meanwhile.
pub(crate) fn connect(test: u8) -> [Process; 2] {
    fake::fabric().0.direct().expect("a fabric");
    let [client, server] = loopback();
    let mut ends = [Process::default(), Process::default()];
    for (host, tcp) in [client, server].into_iter().enumerate() {
        let asked = ask_at(&path(test, host as u8), [Role::Client, Role::Server][host], tcp);
        ends[host].take(asked, [host as u64, 1 - host as u64], 0);
    }
    ends
}
