//! Whether connections to other hosts could be by RDMA, and what one to a certain place is by.

use std::fmt;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::Path;

use usmc::observe::Mode;
use usmc::reason::Reason;
use usmc::syn_option::Outcome;

use super::live;
use super::report::{Finding, Report};
use crate::agent::{self, Conn};
use crate::config::Config;
use crate::library::Library;
use crate::observed::Socket;
use crate::regions::device_name;
use crate::remedies;

/// `HOST:PORT` of a command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Target(String);

impl Target {
    /// Of a word that names a place, and no program.
    pub fn of(word: &str) -> Option<Target> {
        let (host, port) = word.rsplit_once(':')?;
        let is_place = !host.is_empty() && !host.contains('/');
        let is_place = is_place && port.parse::<u16>().is_ok_and(|port| port != 0);
        is_place.then(|| Target(word.to_owned()))
    }

    /// The same of an option's value.
    ///
    /// # Errors
    /// What to write instead.
    pub fn parse(word: &str) -> Result<Target, String> {
        let such = "write HOST:PORT, such as 10.0.0.2:7000 or [fd00::2]:7000";
        Target::of(word).ok_or_else(|| format!("{word:?} names no place; {such}"))
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What agents there are, and what devices they have.
pub fn agents(ism_dir: &Path) -> Vec<Finding> {
    let report = agent::report(ism_dir);
    if report.agents.is_empty() {
        return vec![Finding::note(
            "none answers: connections to other hosts stay TCP, if no region is in between",
            "start one where RDMA is wanted; see usmc-agent(8)",
        )];
    }
    let answers = |path: &Path| Finding::good(format!("one answers at {}", path.display()));
    let mut findings: Vec<_> = report.agents.iter().map(|path| answers(path)).collect();
    for device in &report.devices {
        let fact = format!(
            "device {} port {} is {}, with the address {}",
            device.name,
            device.port,
            device.state,
            shown(device.gid)
        );
        findings.push(match device.is_up() {
            true => Finding::good(fact),
            false => Finding::note(fact, "see `rdma link`, and bring its network interface up"),
        });
    }
    findings
}

/// A GID of RoCEv2 is an IP address, one of version 4 a mapped one.
fn shown(gid: Option<IpAddr>) -> String {
    gid.map_or("none".to_owned(), |gid| gid.to_canonical().to_string())
}

/// Makes a connection to that place, and says step by step what it is by.
///
/// # Errors
/// When the output cannot be written.
pub fn check<W: Write>(
    target: &Target,
    probe: &Path,
    (config, library): (&Config, &Library),
    report: &mut Report<W>,
) -> io::Result<()> {
    let address = match target.0.to_socket_addrs().map(|mut all| all.next()) {
        Ok(Some(address)) => address,
        found => {
            let why = found.err().map_or("no address".to_owned(), |e| e.to_string());
            let fact = format!("{target} is not known: {why}");
            return report.add([Finding::failure(fact, "give an address, or see resolv.conf(5)")]);
        }
    };
    report.add(route(address, &config.ism_dir()))?;
    let reached = match live::reach(probe, (config, library), address) {
        Ok(reached) => reached,
        Err(problem) => {
            let fact = format!("no connection to {address}: {problem:#}");
            let remedy = "start its server; let firewalls pass the connection";
            return report.add([Finding::failure(fact, remedy)]);
        }
    };
    report.add(reached.socket.syn_option.and_then(said))?;
    report.add([judge(&reached)])
}

/// From where the place is reached, and whether that is a device's address.
fn route(address: SocketAddr, ism_dir: &Path) -> Option<Finding> {
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => ([0; 4], 0).into(),
        SocketAddr::V6(_) => ([0_u16; 8], 0).into(),
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(address).ok()?;
    let own = socket.local_addr().ok()?.ip().to_canonical();
    if own == address.ip().to_canonical() {
        return Some(Finding::good(format!("{address} is at this host")));
    }
    let devices = agent::report(ism_dir).devices;
    let has = |gid: Option<IpAddr>| gid.is_some_and(|gid| gid.to_canonical() == own);
    let device = devices.iter().find(|device| has(device.gid));
    let by = device.map_or(String::new(), |device| format!(", which device {} has", device.name));
    Some(Finding::good(format!("{address} is reached from {own}{by}")))
}

/// What the TCP option has said of it.
fn said(outcome: Outcome) -> Option<Finding> {
    match outcome {
        Outcome::Speaks => Some(Finding::good("its SYN says that it speaks SMC")),
        Outcome::Silent | Outcome::Echoed => Some(Finding::note(
            "its SYN does not say SMC",
            "load the eBPF programs at both hosts (`usmc ebpf load`), or name each other's addresses in `peers`",
        )),
        Outcome::Unarmed | Outcome::Undecided => None,
    }
}

/// A connection that was made, as its record has it, and as the agent has.
pub struct Reached {
    /// Its record.
    pub socket: Socket,
    /// What the agent has of it; `None`: the agent has let go of it, which the library may not have noticed.
    pub conn: Option<Conn>,
    /// Whether an agent has answered.
    pub has_agent: bool,
}

impl Reached {
    /// Whether nothing more is to be waited for.
    pub fn is_settled(&self) -> bool {
        let is_open = [Reason::None, Reason::Pending].map(|reason| reason as u8);
        match self.socket.mode {
            Mode::Smcd => true,
            Mode::Smcr => match &self.conn {
                Some(conn) => conn.device.is_some(),
                None => !self.has_agent,
            },
            Mode::Tcp => !is_open.contains(&self.socket.reason),
        }
    }
}

fn judge(reached: &Reached) -> Finding {
    let Reached { socket, conn, .. } = reached;
    let device = || conn.as_ref()?.device.clone();
    if !reached.is_settled() {
        return Finding::failure(
            "whether a connection there can leave TCP was not decided in ten seconds",
            "see whether an agent runs there (`usmc check`), and its log",
        );
    }
    match socket.mode {
        Mode::Smcd => {
            let device = device_name(socket.region);
            Finding::good(format!("a connection there is by shared memory, of device {device}"))
        }
        Mode::Smcr => {
            let device = device().map_or(String::new(), |device| format!(", by device {device}"));
            Finding::good(format!("a connection there is by RDMA{device}"))
        }
        Mode::Tcp => {
            let remedy = Reason::from_code(socket.reason).and_then(remedies::of);
            let remedy = remedy.unwrap_or("run `usmc check` at the other host, too");
            Finding::failure(format!("a connection there is TCP: {}", socket.reason_text()), remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_no_programs() {
        for place in ["10.0.0.2:6379", "[::1]:80", "db.example:5432"] {
            assert!(Target::of(place).is_some(), "{place}");
        }
        for program in ["redis-server", "/opt/a:80", "x:0", "x:65536", ":80", "x:", "a:b"] {
            assert!(Target::of(program).is_none(), "{program}");
        }
    }
}
