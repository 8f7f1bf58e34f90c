//! Two hosts that have nothing in common but a network and, by the fake libibverbs, a fabric: network namespaces with an ISM directory
//! and an agent each.

use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use usmc_fake_verbs::fabric::{DIRECTORY, Fabric, VISIBLE};

use crate::netns::{Netns, ROOT};
use crate::ss::Socket;
use crate::{Fixture, Process, build};

/// Both, with their agents.
pub struct Hosts {
    /// The agents.
    pub agents: [Process; 2],
    /// The fabric.
    pub fabric: Fabric,
    net: Netns,
    dirs: [PathBuf; 2],
}

impl Hosts {
    /// Starts both agents, with these options.
    ///
    /// # Panics
    /// Without the right to make network namespaces.
    pub fn new(fixture: &Fixture, options: &[&str]) -> Hosts {
        let net = Netns::new();
        let fabric = Fabric::create(&fixture.scratch().join("fabric")).expect("a directory");
        let dirs = [0, 1].map(|host| {
            let dir = fixture.scratch().join(format!("host{host}"));
            fs::create_dir(&dir).expect("our own directory");
            fs::set_permissions(&dir, Permissions::from_mode(0o700)).expect("our own directory");
            let device = format!("host{host}");
            fabric.device(&device, 1024).expect("a line");
            let address: Ipv4Addr = net.address(host).parse().expect("an address");
            fabric.gid(&device, 1, address.to_ipv6_mapped(), "v0").expect("a line");
            dir
        });
        let agents =
            [0, 1].map(|host| start(fixture, (&net, &fabric), (host, &dirs[host]), options));
        Hosts { agents, fabric, net, dirs }
    }

    /// Starts the agent of a host anew.
    pub fn restart(&mut self, fixture: &Fixture, host: usize, options: &[&str]) {
        let world = (&self.net, &self.fabric);
        self.agents[host] = start(fixture, world, (host, &self.dirs[host]), options);
    }

    /// A host's address.
    pub fn address(&self, host: usize) -> String {
        self.net.address(host)
    }

    /// A host's ISM directory.
    pub fn ism_dir(&self, host: usize) -> &Path {
        &self.dirs[host]
    }

    /// A command that runs there under `usmc run`.
    pub fn command(&self, fixture: &Fixture, host: usize, program: &str) -> Command {
        let mut command = self.net.command(fixture, host, ROOT, program);
        command.env("USMC_ISM_DIR", &self.dirs[host]);
        command.env("USMC_PEERS", self.net.address(1 - host));
        command
    }

    /// A command that runs there without uSMC.
    pub fn plain(&self, fixture: &Fixture, host: usize) -> Command {
        self.net.plain(fixture, host, ROOT)
    }
}

/// An agent for programs of this host whose connections are to this host, too: a device has the loopback address.
///
/// # Panics
/// When it does not start.
pub fn start_for_loopback(fixture: &Fixture) -> Process {
    let fabric = Fabric::create(&fixture.scratch().join("fabric")).expect("a directory");
    fabric.device("host", 1024).expect("a line");
    fabric.gid("host", 1, Ipv4Addr::LOCALHOST.to_ipv6_mapped(), "lo").expect("a line");
    let mut command = fixture.plain(build::agent());
    command.arg("--socket").arg(fixture.ism_dir().join("agent")).args(["--ueid", "HOSTS"]);
    command.env("USMC_IBVERBS", build::fake_verbs()).env(DIRECTORY, fabric.directory());
    let mut agent = fixture.spawn(command);
    assert_eq!(agent.line(), "ready");
    agent
}

fn start(
    fixture: &Fixture,
    (net, fabric): (&Netns, &Fabric),
    (host, dir): (usize, &PathBuf),
    options: &[&str],
) -> Process {
    let mut command = net.plain(fixture, host, ROOT);
    command.arg(build::agent()).arg("--socket").arg(dir.join("agent"));
    command.args(["--ueid", "HOSTS"]).args(options);
    command.env("USMC_IBVERBS", build::fake_verbs());
    command.env(DIRECTORY, fabric.directory()).env(VISIBLE, format!("host{host}"));
    let mut agent = fixture.spawn(command);
    assert_eq!(agent.line(), "ready");
    agent
}

/// How many of these ends are by RDMA, and how many there are.
pub fn share(ends: &[Socket]) -> (usize, usize) {
    (ends.iter().filter(|end| end.is_smcr()).count(), ends.len())
}
