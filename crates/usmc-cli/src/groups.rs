//! Link groups of SMC-D: pairs of processes that share memory, and in a region pairs of kernels. Each connection's record names the
//! segment it lies in, the same at both ends.

use std::collections::BTreeMap;

use serde::Serialize;

use usmc::observe::Mode;

use crate::observed::Socket;
use crate::regions::{Host, device_name};

/// A process, as link groups and statistics name it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
pub struct Who {
    /// Its number.
    pub pid: u32,
    /// Its program.
    pub comm: String,
}

/// A connection's end.
pub struct End<'a> {
    /// Whose.
    pub who: Who,
    /// Its record.
    pub socket: &'a Socket,
    /// In a region: the kernels of both ends, the client's first, if they are known.
    pub hosts: Option<[Host; 2]>,
}

/// One link group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Group {
    /// `SMCD`.
    pub mode: &'static str,
    /// Its number: a part of the identity of its first segment.
    pub lg_id: String,
    /// Whose memory it is: `loopback`, or a region's id.
    pub device: String,
    /// The kernel at the other end of a region's: the client's, where only the server is here.
    pub host: Option<Host>,
    /// The connecting process, whose memory it is; unknown if it cannot be inspected.
    pub client: Option<Who>,
    /// The accepting one.
    pub server: Option<Who>,
    /// Connections.
    pub conns: usize,
    /// Segments that they lie in.
    pub segments: usize,
}

/// The groups of these ends.
pub fn groups<'a>(ends: impl IntoIterator<Item = End<'a>>) -> Vec<Group> {
    /// A segment's users: connections by slot, clients, servers.
    #[derive(Default)]
    struct Segment {
        region: Option<u128>,
        hosts: Option<[Host; 2]>,
        slots: Vec<u32>,
        clients: Vec<Who>,
        servers: Vec<Who>,
    }
    let mut segments: BTreeMap<u64, Segment> = BTreeMap::new();
    let is_one = |socket: &Socket| socket.mode == Mode::Smcd && socket.segment != 0;
    for End { who, socket, hosts } in ends.into_iter().filter(|end| is_one(end.socket)) {
        let segment = segments.entry(socket.segment).or_default();
        segment.region = socket.region;
        segment.hosts = hosts.or(segment.hosts.take());
        if !segment.slots.contains(&socket.slot) {
            segment.slots.push(socket.slot);
        }
        let side = if socket.is_client { &mut segment.clients } else { &mut segment.servers };
        if !side.contains(&who) {
            side.push(who);
        }
    }
    // Of processes that share an end by fork the first stands for all, and of a region's those that are here for their kernel.
    type Key = (Option<u128>, Option<[Host; 2]>, Option<Who>, Option<Who>);
    let mut groups: BTreeMap<Key, Group> = BTreeMap::new();
    for (id, mut segment) in segments {
        segment.clients.sort();
        segment.servers.sort();
        let (client, server) = (segment.clients.first().cloned(), segment.servers.first().cloned());
        let hosts = segment.hosts;
        let key = match &hosts {
            Some(hosts) => (segment.region, Some(hosts.clone()), None, None),
            None => (segment.region, None, client.clone(), server.clone()),
        };
        let group = groups.entry(key).or_insert_with(|| Group {
            mode: "SMCD",
            // Of a region's segment the low half says where it is, and the high half is random.
            lg_id: format!("{:08x}", if segment.region.is_some() { id >> 32 } else { id } as u32),
            device: device_name(segment.region),
            host: hosts.map(|[its, other]| if client.is_some() { other } else { its }),
            client: client.clone(),
            server: server.clone(),
            conns: 0,
            segments: 0,
        });
        group.client = group.client.take().or(client);
        group.server = group.server.take().or(server);
        group.conns += segment.slots.len();
        group.segments += 1;
    }
    groups.into_values().collect()
}
