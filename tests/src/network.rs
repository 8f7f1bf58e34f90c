//! A network of a test's own: a client's, a router's and a server's namespace, joined by veth pairs, and a cgroup for the
//! processes in them. All of it goes with the processes that hold the namespaces.
//!
//! ```text
//! client 10.77.1.2 ── 10.77.1.1 router 10.77.2.1 ── 10.77.2.2 server      (fd77:1:: and fd77:2:: likewise)
//! ```

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Fixture, Process, build, is_plain, leftovers};

/// The client's address, and the server's.
pub const CLIENT: &str = "10.77.1.2";
/// The server's address.
pub const SERVER: &str = "10.77.2.2";
/// The server's address of IP version 6.
pub const SERVER6: &str = "fd77:2::2";
/// An address of nobody's, for the router to translate.
pub const SERVICE: &str = "10.77.1.100";

/// Where a program runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum At {
    /// The connecting end.
    Client,
    /// Between them.
    Router,
    /// The accepting end.
    Server,
}

/// The namespaces and the cgroup.
pub struct Network {
    namespaces: [Process; 3],
    cgroup: PathBuf,
}

impl Network {
    /// Makes it.
    ///
    /// # Panics
    /// When the machine has no namespaces, veth or cgroup2, or we are not root.
    pub fn new(fixture: &Fixture) -> Network {
        let namespaces = [At::Client, At::Router, At::Server].map(|_| {
            let mut holder = fixture.plain("unshare");
            holder.args([
                "--net",
                "sh",
                "-c",
                "ip link set lo up && echo ready && read line || true",
            ]);
            let mut holder = fixture.spawn(holder);
            holder.line_after("ready");
            holder
        });
        let network = Network { namespaces, cgroup: new_cgroup() };
        for (at, other, link, lan) in
            [(At::Client, At::Router, "north", 1), (At::Server, At::Router, "south", 2)]
        {
            let peer = network.namespaces[other as usize].pid().to_string();
            let ip =
                |at, words: &str| network.do_at(at, "ip", &words.split(' ').collect::<Vec<_>>());
            ip(at, &format!("link add {link} type veth peer name {link} netns {peer}"));
            for (at, host) in [(at, 2), (other, 1)] {
                ip(at, &format!("address add 10.77.{lan}.{host}/24 dev {link}"));
                ip(at, &format!("-6 address add fd77:{lan}::{host}/64 dev {link} nodad"));
                ip(at, &format!("link set {link} up"));
            }
            ip(at, &format!("route add default via 10.77.{lan}.1"));
            ip(at, &format!("-6 route add default via fd77:{lan}::1"));
        }
        network.sysctl(At::Router, "net.ipv4.ip_forward=1");
        network.sysctl(At::Router, "net.ipv6.conf.all.forwarding=1");
        network
    }

    /// A test's world with the programs of `usmc ebpf` loaded. `None` where that is not possible.
    ///
    /// # Panics
    /// As [`Network::new`].
    pub fn with_programs(name: &str) -> Option<(Fixture, Network)> {
        if is_plain() || !is_bpf_permitted() {
            return None;
        }
        let fixture = Fixture::new(name);
        let network = Network::new(&fixture);
        let out = ebpf("load", network.cgroup());
        let told = String::from_utf8_lossy(&out.stdout).into_owned();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert_eq!(told.trim(), format!("loaded at {}", network.cgroup().display()));
        Some((fixture, network))
    }

    /// The cgroup.
    pub fn cgroup(&self) -> &Path {
        &self.cgroup
    }

    /// A command that runs `program` there, in the cgroup.
    pub fn command(&self, fixture: &Fixture, at: At, program: impl AsRef<OsStr>) -> Command {
        let mut command = fixture.plain("sh");
        command.args(["-c", "echo 0 >\"$0\" && exec \"$@\""]).arg(self.cgroup.join("cgroup.procs"));
        command.arg("nsenter").arg(self.namespace(at)).arg(program.as_ref());
        command
    }

    /// A command that runs there under `usmc run` with these options, in the cgroup.
    pub fn under_usmc(&self, fixture: &Fixture, at: At, ism_dir: &Path, option: &str) -> Command {
        let mut command = self.command(fixture, at, build::usmc());
        command.args(["run", "--tcp-option", option, "--log", "debug", "--ism-dir"]).arg(ism_dir);
        command.arg("--");
        command
    }

    fn namespace(&self, at: At) -> String {
        format!("--net=/proc/{}/ns/net", self.namespaces[at as usize].pid())
    }

    /// Runs a tool there.
    ///
    /// # Panics
    /// When it fails.
    pub fn do_at(&self, at: At, program: &str, args: &[&str]) {
        let out = Command::new("nsenter").arg(self.namespace(at)).arg(program).args(args).output();
        let out = out.unwrap_or_else(|e| panic!("nsenter: {e}"));
        let errors = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{program} {args:?}: {errors}");
    }

    /// Sets a variable of the kernel's there.
    pub fn sysctl(&self, at: At, setting: &str) {
        let (name, value) = setting.split_once('=').expect("NAME=VALUE");
        let path = format!("/proc/sys/{}", name.replace('.', "/"));
        self.do_at(at, "sh", &["-c", &format!("echo {value} >{path}")]);
    }

    /// Rules for the router, as nft(8) reads them.
    pub fn route_by(&self, rules: &str) {
        self.do_at(At::Router, "nft", &[rules]);
    }

    /// Takes the router's rules away.
    pub fn route_freely(&self) {
        self.do_at(At::Router, "nft", &["flush", "ruleset"]);
    }

    /// Records what crosses the router's link towards `at`.
    pub fn record(&self, fixture: &Fixture, at: At) -> Recording {
        let file = fixture.scratch().join(format!("{at:?}.pcap"));
        let link = if at == At::Client { "north" } else { "south" };
        let mut command = fixture.plain("nsenter");
        command.arg(self.namespace(At::Router)).args(["tcpdump", "-i", link, "-Z", "root"]);
        command.args(["--immediate-mode", "-U", "-w"]).arg(&file).arg(SYNS);
        let process = fixture.spawn(command);
        fixture.wait_until("tcpdump to listen", || process.errors().contains("listening on"));
        Recording { process, file }
    }

    /// Ends all; waits for the cgroup's last process.
    ///
    /// # Panics
    /// When one is left.
    pub fn end(mut self) {
        for namespace in &mut self.namespaces {
            namespace.succeed();
        }
        assert!(remove(&self.cgroup), "processes are left in {}", self.cgroup.display());
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if self.cgroup.exists() {
            // A panic: the processes are being killed by the fixture's other parts.
            let _ = fs::write(self.cgroup.join("cgroup.kill"), "1");
            remove(&self.cgroup);
        }
    }
}

fn remove(cgroup: &Path) -> bool {
    let until = Instant::now() + Duration::from_secs(5);
    while fs::remove_dir(cgroup).is_err() {
        if Instant::now() > until {
            return false;
        }
        thread::park_timeout(Duration::from_millis(1));
    }
    true
}

/// Where the cgroup2 hierarchy is.
pub fn cgroups() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let cgroup2 = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
    Some(PathBuf::from(cgroup2.split(' ').nth(4)?))
}

fn new_cgroup() -> PathBuf {
    let parent = cgroups().expect("a cgroup2 is mounted");
    leftovers::sweep(&parent);
    let path = parent.join(leftovers::name());
    fs::create_dir(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    path
}

/// `usmc ebpf` with these words for a cgroup.
pub fn ebpf(action: &str, cgroup: &Path) -> Output {
    let mut command = Command::new(build::usmc());
    command.args(["ebpf", action, "--cgroup"]).arg(cgroup);
    command.output().expect("running usmc ebpf")
}

/// Whether programs can be loaded into this kernel by us; says why not where the output is not captured.
pub fn is_bpf_permitted() -> bool {
    let problem = match cgroups() {
        None => "no cgroup2 is mounted".to_owned(),
        Some(_) => {
            let cgroup = match std::panic::catch_unwind(new_cgroup) {
                Ok(cgroup) => cgroup,
                Err(_) => return skipped("no cgroup can be made"),
            };
            let out = ebpf("load", &cgroup);
            let _ = ebpf("unload", &cgroup);
            remove(&cgroup);
            if out.status.success() {
                return true;
            }
            String::from_utf8_lossy(&out.stderr).trim().to_owned()
        }
    };
    skipped(&problem)
}

fn skipped(why: &str) -> bool {
    // Not by a macro, whose output is shown of failed tests only.
    let _ = writeln!(
        std::io::stderr(),
        "skipped, for programs cannot be loaded into this kernel: {why}"
    );
    false
}

/// What tcpdump(1) records: its names for TCP's flags are IPv4's only.
const SYNS: &str = "tcp[13] & 2 != 0 or (ip6[6] = 6 and ip6[53] & 2 != 0)";

/// SYNs and SYN-ACKs on a link.
pub struct Recording {
    process: Process,
    file: PathBuf,
}

/// One of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Syn {
    /// Whether it is a SYN-ACK.
    pub is_answer: bool,
    /// The port of who accepts.
    pub server_port: u16,
    /// All bytes after the 20 of the TCP header.
    pub options: Vec<u8>,
}

impl Recording {
    /// What was seen so far.
    pub fn seen(&self) -> Vec<Syn> {
        syns(&fs::read(&self.file).unwrap_or_default())
    }

    /// Waits for the first SYN towards this port and the first SYN-ACK from it. Either may be sent again.
    pub fn handshake(&self, fixture: &Fixture, server_port: u16) -> [Syn; 2] {
        let first = |is_answer| {
            let is_meant = |s: &Syn| s.server_port == server_port && s.is_answer == is_answer;
            self.seen().into_iter().find(is_meant)
        };
        let mut found = [None, None];
        fixture.wait_until("a handshake on the wire", || {
            found = [first(false), first(true)];
            found.iter().all(Option::is_some)
        });
        found.map(|syn| syn.expect("found"))
    }

    /// Ends it.
    pub fn end(mut self) {
        self.process.terminate();
    }
}

/// Those in a capture of Ethernet frames, in pcap format of this machine's byte order.
pub fn syns(pcap: &[u8]) -> Vec<Syn> {
    const FILE_HEADER: usize = 24;
    const RECORD_HEADER: usize = 16;
    const ETHERNET: usize = 14;
    const SYN: u8 = 2;
    const ACK: u8 = 16;
    let mut found = Vec::new();
    let mut rest = pcap.get(FILE_HEADER..).unwrap_or_default();
    while let Some(length) = rest.get(8..12) {
        let length = u32::from_le_bytes(length.try_into().expect("four bytes")) as usize;
        let Some(frame) = rest.get(RECORD_HEADER..RECORD_HEADER + length) else { break };
        rest = &rest[RECORD_HEADER + length..];
        let packet = &frame[ETHERNET..];
        let (protocol, header) = match packet[0] >> 4 {
            4 => (packet[9], usize::from(packet[0] & 15) * 4),
            _ => (packet[6], 40),
        };
        if protocol != 6 || packet[header + 13] & SYN == 0 {
            continue;
        }
        let tcp = &packet[header..];
        let is_answer = tcp[13] & ACK != 0;
        let port = if is_answer { [tcp[0], tcp[1]] } else { [tcp[2], tcp[3]] };
        found.push(Syn {
            is_answer,
            server_port: u16::from_be_bytes(port),
            options: tcp[20..usize::from(tcp[12] >> 4) * 4].to_vec(),
        });
    }
    found
}

/// The option of this kind among the options of a SYN, whole.
pub fn option(kind: u8, options: &[u8]) -> Option<&[u8]> {
    let mut rest = options;
    loop {
        match rest {
            [] | [0, ..] => return None,
            [1, after @ ..] => rest = after,
            [found, length, ..] => {
                let (option, after) = rest.split_at_checked(usize::from(*length))?;
                if *found == kind {
                    return Some(option);
                }
                rest = after;
            }
            [_] => return None,
        }
    }
}
