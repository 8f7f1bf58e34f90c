//! A test's world of two hosts with an agent each: programs and commands at either, and the end of all.

use std::process::Command;

use serde_json::Value;

use super::{Hosts, share};
use crate::build::{tests_dir, usmc};
use crate::{Fixture, Process};

/// The host whose programs connect.
pub const CLIENT: usize = 0;
/// The host whose programs listen.
pub const SERVER: usize = 1;

/// Both hosts, and what a test has.
pub struct World {
    /// The test's fixture.
    pub fixture: Fixture,
    /// The hosts.
    pub hosts: Hosts,
}

impl World {
    /// For a test of the usual length, with agents as they are by default.
    pub fn new(name: &str) -> World {
        World::with(Fixture::new(name), [&[], &[]])
    }

    /// With options of each agent.
    pub fn with(fixture: Fixture, options: [&[&str]; 2]) -> World {
        let hosts = Hosts::new(&fixture, options);
        World { fixture, hosts }
    }

    /// A command that runs a script of `programs/python` at a host under `usmc run`. The script's own words follow.
    pub fn python(&self, host: usize, script: &str) -> Command {
        let mut command = self.hosts.command(&self.fixture, host, "/usr/bin/python3");
        command.arg(tests_dir().join("programs/python").join(script));
        command
    }

    /// `usmc` with these words at a host, whose programs know the other one.
    pub fn usmc(&self, host: usize, words: &[&str]) -> Command {
        let mut command = self.hosts.plain(&self.fixture, host);
        command.arg(usmc()).args(words).env("USMC_ISM_DIR", self.hosts.ism_dir(host));
        command.env("USMC_PEERS", self.hosts.address(1 - host));
        command
    }

    /// What it prints.
    pub fn says(&self, host: usize, words: &[&str]) -> String {
        self.fixture.run(self.usmc(host, words))
    }

    /// What it prints in JSON.
    ///
    /// # Panics
    /// When it is no JSON.
    pub fn json(&self, host: usize, words: &[&str]) -> Value {
        serde_json::from_str(&self.says(host, words)).expect("JSON")
    }

    /// The link groups of SMC-R that a host's agent shows.
    ///
    /// # Panics
    /// When it is no list.
    pub fn groups(&self, host: usize) -> Vec<Value> {
        let all = self.json(host, &["linkgroup", "--json"]);
        let Value::Array(mut groups) = all else { panic!("{all}") };
        groups.retain(|group| group["mode"] == "SMCR");
        groups
    }

    /// Waits until so many of so many ends of the connections at this port are by RDMA ([`share`]).
    pub fn assert_share(&self, port: u16, expected: (usize, usize)) {
        let mut seen = Vec::new();
        self.fixture.wait_until(&format!("{expected:?} by RDMA"), || {
            seen = self.fixture.connections(port);
            share(&seen) == expected
        });
        println!("{} of {} ends by RDMA", expected.0, expected.1);
    }

    /// Waits until all ends of the connections at this port are there and by RDMA.
    pub fn assert_smcr(&self, port: u16, ends: usize) {
        self.assert_share(port, (ends, ends));
    }

    /// The agent of a host stops.
    pub fn stop(&mut self, host: usize) {
        self.hosts.agents[host].terminate();
    }

    /// Those agents stop that still run, which have no connection, and nothing is left.
    pub fn end(self) {
        let World { fixture, mut hosts } = self;
        for agent in hosts.agents.iter_mut().filter(|agent| !agent.has_ended()) {
            agent.signal(libc::SIGTERM);
            agent.succeed();
        }
        drop(hosts);
        fixture.finish();
    }
}

/// A client and a server end by themselves when nobody says anything more.
pub fn finish(mut client: Process, mut server: Process) {
    for end in [&mut client, &mut server] {
        end.close_stdin();
        end.succeed();
    }
}
