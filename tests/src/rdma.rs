//! Two hosts that have nothing in common but a network and, by the fake libibverbs, a fabric: network namespaces with an ISM directory
//! and an agent each.

pub mod world;

use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use usmc_fake_verbs::fabric::{DIRECTORY, Fabric, VISIBLE};

use crate::netns::{Netns, ROOT};
use crate::network::{self, At, CLIENT, Network, SERVER};
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
    /// Starts both agents, with options of their own.
    ///
    /// # Panics
    /// Without the right to make network namespaces.
    pub fn new(fixture: &Fixture, options: [&[&str]; 2]) -> Hosts {
        let net = Netns::new();
        let fabric = Fabric::create(&fixture.scratch().join("fabric")).expect("a directory");
        let dirs = [0, 1].map(|host| directory(fixture, &fabric, host, &net.address(host)));
        let agents = [0, 1].map(|host| {
            let command = net.plain(fixture, host, ROOT);
            start(fixture, command, &fabric, (host, &dirs[host]), options[host])
        });
        Hosts { agents, fabric, net, dirs }
    }

    /// Starts the agent of a host anew.
    pub fn restart(&mut self, fixture: &Fixture, host: usize, options: &[&str]) {
        let command = self.net.plain(fixture, host, ROOT);
        let place = (host, &*self.dirs[host]);
        self.agents[host] = start(fixture, command, &self.fabric, place, options);
    }

    /// A host's address.
    pub fn address(&self, host: usize) -> String {
        self.net.address(host)
    }

    /// A tool at a host, which has to succeed.
    pub fn tool(&self, host: usize, command: &[&str]) {
        self.net.tool(host, command);
    }

    /// What a host's kernel has counted of TCP.
    pub fn netstat(&self, fixture: &Fixture, host: usize) -> String {
        let mut command = self.net.plain(fixture, host, ROOT);
        command.args(["cat", "/proc/net/netstat"]);
        fixture.run(command)
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
    let fabric = loopback(fixture);
    let mut command = fixture.plain(build::agent());
    command.arg("--socket").arg(fixture.ism_dir().join("agent")).args(["--ueid", "HOSTS"]);
    command.env("USMC_IBVERBS", build::fake_verbs()).env(DIRECTORY, fabric.directory());
    let mut agent = fixture.spawn(command);
    assert_eq!(agent.line(), "ready");
    agent
}

/// As [`start_for_loopback`], by systemd-socket-activate(1): when the first connection is handed over. It tells `manager`, which is the
/// path of a socket, how it is.
///
/// # Panics
/// When the socket does not come.
pub fn activate_for_loopback(fixture: &Fixture, manager: &Path) -> Process {
    let fabric = loopback(fixture);
    let socket = fixture.ism_dir().join("agent");
    let mut command = fixture.plain(build::system_program("systemd-socket-activate"));
    command.arg("--seqpacket").arg("-l").arg(&socket);
    command.env("NOTIFY_SOCKET", manager).env("USMC_IBVERBS", build::fake_verbs());
    command.env(DIRECTORY, fabric.directory());
    // It hands the environment on by name.
    for name in ["NOTIFY_SOCKET", "USMC_IBVERBS", DIRECTORY, "USMC_TESTS_ID"] {
        command.args(["-E", name]);
    }
    command.arg(build::agent()).args(["--ueid", "HOSTS"]);
    let agent = fixture.spawn(command);
    fixture.wait_until("the agent's socket", || socket.exists());
    agent
}

/// A fabric with one device, which has the loopback address.
fn loopback(fixture: &Fixture) -> Fabric {
    let fabric = Fabric::create(&fixture.scratch().join("fabric")).expect("a directory");
    fabric.device("host", 1024).expect("a line");
    fabric.gid("host", 1, Ipv4Addr::LOCALHOST.to_ipv6_mapped(), "lo").expect("a line");
    fabric
}

/// The agents of a network's client and server, and their hosts' ISM directories.
///
/// # Panics
/// When one does not start.
pub fn agents_of(fixture: &Fixture, network: &Network) -> [(Process, PathBuf); 2] {
    let fabric = Fabric::create(&fixture.scratch().join("fabric")).expect("a directory");
    let dirs = [CLIENT, SERVER].into_iter().enumerate();
    let dirs: Vec<_> =
        dirs.map(|(host, address)| directory(fixture, &fabric, host, address)).collect();
    [At::Client, At::Server].map(|at| {
        let host = usize::from(at == At::Server);
        let command = network.command(fixture, at, "env");
        let agent = start(fixture, command, &fabric, (host, &dirs[host]), &[]);
        (agent, dirs[host].clone())
    })
}

/// Ends such agents, and all that the network had for a test.
///
/// # Panics
/// When something is left.
pub fn end_agents(fixture: Fixture, network: Network, agents: [Process; 2]) {
    for mut agent in agents {
        agent.signal(libc::SIGTERM);
        agent.wait();
    }
    assert!(network::ebpf("unload", network.cgroup()).status.success());
    network.end();
    fixture.finish();
}

/// A host's ISM directory. Its device is on the fabric.
fn directory(fixture: &Fixture, fabric: &Fabric, host: usize, address: &str) -> PathBuf {
    let dir = fixture.scratch().join(format!("host{host}"));
    fs::create_dir(&dir).expect("our own directory");
    fs::set_permissions(&dir, Permissions::from_mode(0o700)).expect("our own directory");
    let device = format!("host{host}");
    fabric.device(&device, 1024).expect("a line");
    let address: Ipv4Addr = address.parse().expect("an address");
    fabric.gid(&device, 1, address.to_ipv6_mapped(), "v0").expect("a line");
    dir
}

fn start(
    fixture: &Fixture,
    mut command: Command,
    fabric: &Fabric,
    (host, dir): (usize, &Path),
    options: &[&str],
) -> Process {
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
