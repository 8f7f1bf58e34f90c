//! What agents tell of themselves: devices, link groups and links of SMC-R ([`usmc_shm::agent::Request::Show`]).

use std::collections::HashMap;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Seek};
use std::mem::MaybeUninit;
use std::path::Path;
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
    /// Links that go by it.
    pub links: usize,
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
    /// The address of the device.
    pub gid: String,
    /// The address of the peer's.
    pub peer_gid: String,
    /// The queue pair here.
    pub qpn: u32,
    /// The peer's.
    pub peer_qpn: u32,
}

/// What agents have told.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Report {
    /// Devices of all agents.
    pub devices: Vec<Device>,
    /// Their link groups.
    pub groups: Vec<Group>,
}

/// What the agents of the ISM directory and of the host tell. An agent that is not there, or lets this user not in, adds nothing.
pub fn report(ism_dir: &Path) -> Report {
    let mut report = Report::default();
    let system = Some(Path::new(SYSTEM)).filter(|system| *system != ism_dir);
    for dir in [ism_dir].into_iter().chain(system) {
        if let Some(text) = ask(&dir.join(SOCKET)) {
            add(&mut report, &text);
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
        match kind {
            "device" => report.devices.push(Device {
                name: text("name"),
                port: number("port"),
                links: count("links"),
            }),
            "group" => report.groups.push(Group {
                mode: "SMCR",
                lg_id: text("id"),
                role: text("role"),
                r#type: text("type"),
                version: number("version"),
                conns: count("conns"),
                rmbs: count("rmbs"),
                peer_rmbs: count("peer-rmbs"),
                links: Vec::new(),
            }),
            "link" => {
                let link = Link {
                    link_id: number("id"),
                    ibdevice: text("device"),
                    ibport: number("port"),
                    state: text("state"),
                    conns: count("conns"),
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
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_unknown_ones_passed_over() {
        let mut report = Report::default();
        add(
            &mut report,
            "device name=rxe0 port=1 state=ACTIVE links=1 gid=::ffff:10.0.0.1\n\
             weather sunny=yes\n\
             group id=00000100 role=SERV type=SINGLE version=2 conns=3 rmbs=4 peer-rmbs=5 colour=red\n\
             link group=00000100 id=1 device=rxe0 port=1 state=LINK_ACTIVE conns=3 gid=::1 peer-gid=::2 qpn=17 peer-qpn=18\n\
             link group=00000200 id=1 device=rxe0\n",
        );
        assert_eq!(report.devices, [Device { name: "rxe0".into(), port: 1, links: 1 }]);
        let [group] = &report.groups[..] else { panic!("{report:?}") };
        assert_eq!((&*group.role, group.conns, group.rmbs, group.peer_rmbs), ("SERV", 3, 4, 5));
        let [link] = &group.links[..] else { panic!("{report:?}") };
        assert_eq!((&*link.state, link.conns, link.qpn, link.peer_qpn), ("LINK_ACTIVE", 3, 17, 18));
    }
}
