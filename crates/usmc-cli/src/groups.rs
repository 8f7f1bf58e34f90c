//! Link groups of SMC-D: pairs of processes that share memory. Each connection's record names the segment it lies in,
//! the same at both ends.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::observed::Socket;

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
}

/// One link group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Group {
    /// Its number: a part of the identity of its first segment.
    pub lg_id: String,
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
        slots: Vec<u32>,
        clients: Vec<Who>,
        servers: Vec<Who>,
    }
    let mut segments: BTreeMap<u64, Segment> = BTreeMap::new();
    for End { who, socket } in ends.into_iter().filter(|end| end.socket.segment != 0) {
        let segment = segments.entry(socket.segment).or_default();
        if !segment.slots.contains(&socket.slot) {
            segment.slots.push(socket.slot);
        }
        let side = if socket.is_client { &mut segment.clients } else { &mut segment.servers };
        if !side.contains(&who) {
            side.push(who);
        }
    }
    // Of processes that share an end by fork the first stands for all.
    let mut groups: BTreeMap<(Option<Who>, Option<Who>), Group> = BTreeMap::new();
    for (id, mut segment) in segments {
        segment.clients.sort();
        segment.servers.sort();
        let (client, server) = (segment.clients.first().cloned(), segment.servers.first().cloned());
        let group = groups.entry((client.clone(), server.clone())).or_insert_with(|| Group {
            lg_id: format!("{:08x}", id as u32),
            client,
            server,
            conns: 0,
            segments: 0,
        });
        group.conns += segment.slots.len();
        group.segments += 1;
    }
    groups.into_values().collect()
}
