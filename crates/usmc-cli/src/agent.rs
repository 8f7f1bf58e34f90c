//! What agents tell of themselves: devices, link groups and links of SMC-R ([`usmc_shm::agent::Request::Show`]).

use std::collections::HashMap;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Seek};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg, socket_with,
    sockopt,
};
use serde::Serialize;
use usmc_shm::agent::{Answer, LEN, Request, SOCKET};

/// Where the agent of a whole host listens.
const SYSTEM: &str = "/run/usmc";
/// How long an agent may take for its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of a report at most.
const MOST: u64 = 64 << 20;

/// A device that an agent has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// Its port, from 1.
    pub port: u32,
    /// `ACTIVE` or `DOWN`.
    pub state: String,
    /// Links that go by it.
    pub links: usize,
    /// Its address.
    pub gid: Option<IpAddr>,
    /// What it has done.
    pub counts: DeviceCounts,
}

/// What a device has done since its agent began. An agent of an earlier version tells none of it.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize)]
pub struct DeviceCounts {
    /// The device.
    pub ibdevice: String,
    /// Chains that were posted: WRITEs and the message behind them.
    pub posts: u64,
    /// Requests (WRs) in them.
    pub requests: u64,
    /// Bytes that their WRITEs took from send buffers.
    pub tx_bytes: u64,
    /// Chains that are complete.
    pub completions: u64,
    /// Messages that have come: CDC and LLC.
    pub messages: u64,
    /// Requests and receives that have failed.
    pub errors: u64,
}

/// What has become of connections that an agent was handed, since it began.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize)]
pub struct AgentCounts {
    /// Its socket.
    pub socket: PathBuf,
    /// By RDMA.
    pub established: u64,
    /// TCP.
    pub fallbacks: u64,
    /// Reset, as nobody knew what the peer has.
    pub failures: u64,
    /// CPU time of the agent, in nanoseconds; an earlier version does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_ns: Option<u64>,
    /// Its devices.
    pub devices: Vec<DeviceCounts>,
}

impl Device {
    /// Whether anything can go by it.
    pub fn is_up(&self) -> bool {
        self.state == "ACTIVE"
    }
}

/// A link group of SMC-R, in smcr's words.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Group {
    /// `SMCR`.
    pub mode: &'static str,
    /// Its number at this host.
    pub lg_id: String,
    /// `CLNT` or `SERV`: which end of the group this host is.
    pub role: String,
    /// `SINGLE`, `SYM`, `ASYML`, `ASYMP` or `NONE`.
    pub r#type: String,
    /// Of the messages: 1 or 2.
    pub version: u32,
    /// Connections.
    pub conns: usize,
    /// RMBs of this host that the peer has a key for.
    pub rmbs: usize,
    /// RMBs of the peer's.
    pub peer_rmbs: usize,
    /// The physical network of its devices, if it has a name.
    pub pnetid: Option<String>,
    /// Its links.
    pub links: Vec<Link>,
}

/// A link of a group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Link {
    /// Its number at both ends.
    pub link_id: u32,
    /// The device here.
    pub ibdevice: String,
    /// Its port.
    pub ibport: u32,
    /// `LINK_ACTIVE` or `LINK_ACTIVATING`.
    pub state: String,
    /// Connections that go by it.
    pub conns: usize,
    /// Its path MTU, in bytes.
    pub mtu: u32,
    /// Messages that may be under way here.
    pub send_wr: u32,
    /// Receives that are posted here.
    pub recv_wr: u32,
    /// The address of the device.
    pub gid: String,
    /// The address of the peer's.
    pub peer_gid: String,
    /// The queue pair here.
    pub qpn: u32,
    /// The peer's.
    pub peer_qpn: u32,
}

/// A connection that was handed to an agent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Conn {
    /// The application's end.
    pub local: SocketAddr,
    /// The other host's.
    pub peer: SocketAddr,
    /// The device that it goes by; `None`: its handshake is under way.
    pub device: Option<String>,
}

/// What agents have told.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Report {
    /// Devices of all agents.
    pub devices: Vec<Device>,
    /// Their link groups.
    pub groups: Vec<Group>,
    /// Their connections.
    pub conns: Vec<Conn>,
    /// The sockets of agents that have answered.
    pub agents: Vec<PathBuf>,
    /// What each of them has counted.
    pub counts: Vec<AgentCounts>,
}

/// What the agents of the ISM directory and of the host tell. An agent that is not there, or lets this user not in, adds nothing.
pub fn report(ism_dir: &Path) -> Report {
    let mut report = Report::default();
    let system = Some(Path::new(SYSTEM)).filter(|system| *system != ism_dir);
    for dir in [ism_dir].into_iter().chain(system) {
        let socket = dir.join(SOCKET);
        if let Some(text) = ask(&socket) {
            report.counts.push(AgentCounts { socket: socket.clone(), ..AgentCounts::default() });
            add(&mut report, &text);
            report.agents.push(socket);
        }
    }
    report
}

fn ask(path: &Path) -> Option<String> {
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let socket = socket_with(kind.0, kind.1, kind.2, None).ok()?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(PATIENCE)).ok()?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE)).ok()?;
    connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
    let mut none = SendAncillaryBuffer::default();
    let request = Request::Show.emit();
    sendmsg(&socket, &[IoSlice::new(&request)], &mut none, SendFlags::NOSIGNAL).ok()?;
    let mut bytes = [0; LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?.bytes;
    let file = control.drain().find_map(|part| match part {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    Answer::parse(bytes.get(..got)?).filter(|answer| *answer == Answer::Shown)?;
    let mut file = File::from(file?);
    file.rewind().ok()?;
    let mut text = String::new();
    file.take(MOST).read_to_string(&mut text).ok()?;
    Some(text)
}

fn add(report: &mut Report, text: &str) {
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let kind = words.next().unwrap_or_default();
        let values: HashMap<&str, &str> = words.filter_map(|word| word.split_once('=')).collect();
        let text = |name: &str| values.get(name).copied().unwrap_or("-").to_owned();
        let number = |name: &str| values.get(name).and_then(|n| n.parse().ok()).unwrap_or(0);
        let count = |name: &str| number(name) as usize;
        let total = |name: &str| values.get(name).and_then(|n| n.parse().ok()).unwrap_or(0_u64);
        match kind {
            "device" => {
                let counts = DeviceCounts {
                    ibdevice: text("name"),
                    posts: total("posts"),
                    requests: total("requests"),
                    tx_bytes: total("tx-bytes"),
                    completions: total("completions"),
                    messages: total("messages"),
                    errors: total("errors"),
                };
                if let Some(agent) = report.counts.last_mut() {
                    agent.devices.push(counts.clone());
                }
                report.devices.push(Device {
                    name: text("name"),
                    port: number("port"),
                    state: text("state"),
                    links: count("links"),
                    gid: text("gid").parse().ok(),
                    counts,
                });
            }
            "agent" => {
                if let Some(agent) = report.counts.last_mut() {
                    agent.established = total("established");
                    agent.fallbacks = total("fallbacks");
                    agent.failures = total("failures");
                    agent.cpu_ns = values.get("cpu-ns").and_then(|n| n.parse().ok());
                }
            }
            "group" => report.groups.push(Group {
                mode: "SMCR",
                lg_id: text("id"),
                role: text("role"),
                r#type: text("type"),
                version: number("version"),
                conns: count("conns"),
                rmbs: count("rmbs"),
                peer_rmbs: count("peer-rmbs"),
                pnetid: Some(text("pnetid")).filter(|id| id != "-"),
                links: Vec::new(),
            }),
            "link" => {
                let link = Link {
                    link_id: number("id"),
                    ibdevice: text("device"),
                    ibport: number("port"),
                    state: text("state"),
                    conns: count("conns"),
                    mtu: number("mtu"),
                    send_wr: number("send-wr"),
                    recv_wr: number("recv-wr"),
                    gid: text("gid"),
                    peer_gid: text("peer-gid"),
                    qpn: number("qpn"),
                    peer_qpn: number("peer-qpn"),
                };
                // It follows its group.
                if let Some(group) = report.groups.last_mut()
                    && group.lg_id == text("group")
                {
                    group.links.push(link);
                }
            }
            "conn" => {
                let end = |name: &str| text(name).parse().ok();
                let link = || {
                    let group =
                        report.groups.last().filter(|group| group.lg_id == text("group"))?;
                    group.links.iter().find(|link| link.link_id == number("link"))
                };
                let device = match text("state").as_str() {
                    "INIT" => None,
                    _ => Some(link().map_or("-".to_owned(), |link| link.ibdevice.clone())),
                };
                if let (Some(local), Some(peer)) = (end("local"), end("peer")) {
                    report.conns.push(Conn { local, peer, device });
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_unknown_ones_passed_over() {
        let counts = vec![AgentCounts::default()];
        let mut report = Report { counts, ..Report::default() };
        add(
            &mut report,
            "device name=rxe0 port=1 state=ACTIVE links=1 gid=::ffff:10.0.0.1 posts=7 tx-bytes=5000000000\n\
             agent established=4 fallbacks=1 cpu-ns=5000000001\n\
             weather sunny=yes\n\
             group id=00000100 role=SERV type=SINGLE version=2 conns=3 rmbs=4 peer-rmbs=5 colour=red\n\
             link group=00000100 id=1 device=rxe0 port=1 state=LINK_ACTIVE conns=3 mtu=512 send-wr=16 recv-wr=48 gid=::1 peer-gid=::2 qpn=17 peer-qpn=18\n\
             conn local=10.0.0.1:80 peer=10.0.0.2:4000 state=ACTIVE group=00000100 link=1\n\
             conn local=[::1]:80 peer=[::2]:4000 state=INIT\n\
             conn local=here peer=there state=INIT\n\
             link group=00000200 id=1 device=rxe0\n",
        );
        let [device] = &report.devices[..] else { panic!("{report:?}") };
        let gid = device.gid.map(|gid| gid.to_canonical());
        assert_eq!((&*device.name, device.links, gid), ("rxe0", 1, "10.0.0.1".parse().ok()));
        assert_eq!((device.counts.posts, device.counts.tx_bytes), (7, 5_000_000_000));
        let [agent] = &report.counts[..] else { panic!("{report:?}") };
        assert_eq!((agent.established, agent.fallbacks, agent.failures), (4, 1, 0));
        assert_eq!(agent.cpu_ns, Some(5_000_000_001));
        assert_eq!(agent.devices, std::slice::from_ref(&device.counts));
        let [group] = &report.groups[..] else { panic!("{report:?}") };
        assert_eq!((&*group.role, group.conns, group.rmbs, group.peer_rmbs), ("SERV", 3, 4, 5));
        let [link] = &group.links[..] else { panic!("{report:?}") };
        let conns: Vec<_> =
            report.conns.iter().map(|conn| (conn.peer.port(), conn.device.as_deref())).collect();
        assert_eq!(conns, [(4000, Some("rxe0")), (4000, None)]);
        assert_eq!((&*link.state, link.conns, link.qpn, link.peer_qpn), ("LINK_ACTIVE", 3, 17, 18));
        assert_eq!((link.mtu, link.send_wr, link.recv_wr), (512, 16, 48));
    }
}
