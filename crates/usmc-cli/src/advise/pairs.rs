//! Pairs of programs whose connections have both ends on this host, from two looks.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;

use crate::place::{self, Place};
use crate::sock_diag::{ESTABLISHED, Kernel, LISTEN};
use crate::{library, proc, program};

use super::commands;
use super::look::Look;

/// A program at one end.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
pub struct Program {
    /// Its name.
    pub program: String,
    /// The service of systemd that it is a part of.
    pub service: Option<String>,
    /// The container.
    pub container: Option<String>,
    /// The user, by number.
    pub user: Option<u32>,
    /// Whether the library is in it; `None`: nobody lets us look.
    pub library: Option<bool>,
    /// What keeps the library out.
    pub obstacle: Option<String>,
}

/// Programs that talk to each other over TCP, by the server's port.
#[derive(Debug, Serialize)]
pub struct Pair {
    /// The end that listens.
    pub server: Program,
    /// Where.
    pub port: u16,
    /// The end that connects.
    pub client: Program,
    /// Connections that were open at the second look.
    pub connections: usize,
    /// Both ways, per second.
    pub bytes_per_second: u64,
    /// With data, both ways, per second.
    pub segments_per_second: u64,
    /// An estimate: neither side was woken more often by these connections.
    pub wake_ups_per_second_at_most: u64,
    /// What brings them into shared memory; empty where nothing does, or is needed.
    pub commands: Vec<String>,
}

/// What two looks have shown.
#[derive(Debug, Serialize)]
pub struct Seen {
    /// The busiest first.
    pub pairs: Vec<Pair>,
    /// Pairs that moved nothing meanwhile.
    pub idle: usize,
}

/// One end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct End {
    net: u64,
    inode: u64,
}

/// What is summed up for a pair.
#[derive(Default)]
struct Sum {
    connections: usize,
    bytes: u64,
    /// Towards the server, and towards the client.
    segments: [u64; 2],
    servers: BTreeSet<u32>,
    clients: BTreeSet<u32>,
}

/// The pairs that two looks, so far apart, show.
pub fn pairs(before: &Look, after: &Look, between: Duration) -> Seen {
    let mut known: HashMap<u32, Program> = HashMap::new();
    let mut sums: BTreeMap<(Program, u16, Program), Sum> = BTreeMap::new();
    for [server, client] in connections(after) {
        let owner =
            |end: End| after.owners.get(&end.inode).and_then(|pids| pids.iter().min()).copied();
        let (Some(server_pid), Some(client_pid)) = (owner(server), owner(client)) else { continue };
        let mut program = |pid: u32| known.entry(pid).or_insert_with(|| Program::of(pid)).clone();
        let key = (
            program(server_pid),
            after.sockets[&server.net][&server.inode].local.port(),
            program(client_pid),
        );
        let sum = sums.entry(key).or_default();
        sum.connections += 1;
        let (to_client, from_server) = moved(before, after, server);
        let (to_server, from_client) = moved(before, after, client);
        sum.bytes = sum.bytes.saturating_add(from_server).saturating_add(from_client);
        sum.segments[0] += u64::from(to_server);
        sum.segments[1] += u64::from(to_client);
        sum.servers.extend(after.owners.get(&server.inode).into_iter().flatten());
        sum.clients.extend(after.owners.get(&client.inode).into_iter().flatten());
    }
    let pair = |((server, port, client), sum): ((Program, u16, Program), Sum)| {
        finished(server, port, client, &sum, (before, after, between))
    };
    let mut pairs: Vec<Pair> = sums.into_iter().map(pair).collect();
    let all = pairs.len();
    pairs.retain(|pair| pair.segments_per_second + pair.bytes_per_second > 0);
    pairs.sort_by_key(|pair| std::cmp::Reverse(pair.segments_per_second));
    commands::fill(&mut pairs);
    Seen { idle: all - pairs.len(), pairs }
}

fn finished(
    server: Program,
    port: u16,
    client: Program,
    sum: &Sum,
    (before, after, between): (&Look, &Look, Duration),
) -> Pair {
    let rate = |count: u64| (count as f64 / between.as_secs_f64().max(0.001)).round() as u64;
    let slept = |pids: &BTreeSet<u32>| {
        let of = |look: &Look, pid: &u32| look.sleeps.get(pid).copied().unwrap_or(0);
        pids.iter().map(|pid| of(after, pid).saturating_sub(of(before, pid))).sum::<u64>()
    };
    // A segment wakes a receiver that sleeps: no more wake-ups than segments, and no more than sleeps.
    let wake_ups =
        sum.segments[0].min(slept(&sum.servers)) + sum.segments[1].min(slept(&sum.clients));
    Pair {
        server,
        port,
        client,
        connections: sum.connections,
        bytes_per_second: rate(sum.bytes),
        segments_per_second: rate(sum.segments[0] + sum.segments[1]),
        wake_ups_per_second_at_most: rate(wake_ups),
        commands: Vec::new(),
    }
}

/// Segments and bytes that an end has sent between the looks.
fn moved(before: &Look, after: &Look, end: End) -> (u32, u64) {
    let of = |look: &Look| look.sockets.get(&end.net)?.get(&end.inode).copied();
    let Some(now) = of(after) else { return (0, 0) };
    match of(before).filter(|then| (then.local, then.peer) == (now.local, now.peer)) {
        Some(then) => {
            // The kernel's count has 32 bits.
            let segments = (now.tx_segments as u32).wrapping_sub(then.tx_segments as u32);
            (segments, now.tx_bytes.saturating_sub(then.tx_bytes))
        }
        // It was made meanwhile.
        None => (now.tx_segments as u32, now.tx_bytes),
    }
}

/// Connections with both ends here: the listening side's first.
fn connections(look: &Look) -> Vec<[End; 2]> {
    let mut by_name: HashMap<(SocketAddr, SocketAddr), Vec<End>> = HashMap::new();
    let mut listeners: HashSet<(u64, u16)> = HashSet::new();
    let all = look
        .sockets
        .iter()
        .flat_map(|(net, sockets)| sockets.iter().map(|(inode, k)| (*net, *inode, k)));
    for (net, inode, kernel) in all {
        match kernel.state {
            LISTEN => drop(listeners.insert((net, kernel.local.port()))),
            ESTABLISHED => {
                by_name.entry((kernel.local, kernel.peer)).or_default().push(End { net, inode })
            }
            _ => {}
        }
    }
    let kernel = |end: &End| -> Kernel { look.sockets[&end.net][&end.inode] };
    let mut found = Vec::new();
    for (name, ends) in &by_name {
        for end in ends {
            let Some(other) = other_end(*end, *name, &by_name) else { continue };
            let listens = |end: &End| listeners.contains(&(end.net, kernel(end).local.port()));
            let is_server = match (listens(end), listens(&other)) {
                (one, two) if one != two => one,
                // Its listener has gone, or both ports have one.
                _ => (name.0.port(), name.0) < (name.1.port(), name.1),
            };
            if is_server {
                found.push([*end, other]);
            }
        }
    }
    found
}

/// The end with the names the other way round: in the same network namespace, or the only one in the others. Loopback
/// addresses lead to no other.
fn other_end(
    end: End,
    (local, peer): (SocketAddr, SocketAddr),
    by_name: &HashMap<(SocketAddr, SocketAddr), Vec<End>>,
) -> Option<End> {
    let others = by_name.get(&(peer, local))?;
    if let Some(here) = others.iter().find(|other| other.net == end.net && other.inode != end.inode)
    {
        return Some(*here);
    }
    let is_unique =
        others.len() == 1 && by_name.get(&(local, peer)).is_some_and(|ends| ends.len() == 1);
    (is_unique && !peer.ip().is_loopback() && others[0] != end).then(|| others[0])
}

impl Program {
    fn of(pid: u32) -> Program {
        let exe = format!("/proc/{pid}/exe");
        let (service, container) = match place::of(pid) {
            Place::Service(name) => (Some(name), None),
            Place::Container(id) => (None, Some(id)),
            Place::Elsewhere => (None, None),
        };
        Program {
            program: proc::comm(pid),
            service,
            container,
            user: place::user(pid),
            library: place::has_library(pid),
            obstacle: obstacle(exe.as_ref()),
        }
    }

    /// For people: `redis-server (redis-server.service, user 105)`.
    pub fn text(&self) -> String {
        let container =
            self.container.as_ref().map(|id| format!("container {}", &id[..12.min(id.len())]));
        let user = self.user.map(|user| format!("user {user}"));
        let facts: Vec<String> =
            [self.service.clone(), container, user].into_iter().flatten().collect();
        if facts.is_empty() {
            self.program.clone()
        } else {
            format!("{} ({})", self.program, facts.join(", "))
        }
    }
}

fn obstacle(exe: &std::path::Path) -> Option<String> {
    let found = match library::find() {
        Ok(library) => program::obstacle(exe, &library).map(|(_, obstacle)| obstacle),
        Err(_) => program::obstacle_of(exe),
    };
    found.map(|obstacle| obstacle.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(local: &str, peer: &str, state: u8, segments: u32, bytes: u64) -> Kernel {
        Kernel {
            local: local.parse().unwrap(),
            peer: peer.parse().unwrap(),
            state,
            tx_segments: segments.into(),
            rx_segments: 0,
            tx_bytes: bytes,
            rx_bytes: 0,
            tx_queued: 0,
            rx_queued: 0,
        }
    }

    const SERVER: &str = "127.0.0.1:6379";
    const CLIENT: &str = "127.0.0.1:40000";

    /// A server, a client, and a listener, in namespace 1; two ends in 2 and 3.
    fn world(segments: u32, sleeps: u64) -> Look {
        let mut look = Look::default();
        let here = [
            (10, socket(SERVER, "0.0.0.0:0", LISTEN, 0, 0)),
            (11, socket(SERVER, CLIENT, ESTABLISHED, segments, u64::from(segments) * 5)),
            (12, socket(CLIENT, SERVER, ESTABLISHED, segments, u64::from(segments) * 10)),
            // The same names elsewhere, and one whose other end is on another host.
            (13, socket("10.0.0.1:5000", "10.0.0.9:443", ESTABLISHED, 9, 9)),
        ];
        look.sockets.insert(1, here.into());
        look.sockets.insert(
            2,
            [(21, socket("172.17.0.2:80", "172.17.0.3:50000", ESTABLISHED, 0, 0))].into(),
        );
        look.sockets.insert(
            3,
            [
                (31, socket("172.17.0.3:50000", "172.17.0.2:80", ESTABLISHED, 0, 0)),
                (32, socket(CLIENT, SERVER, ESTABLISHED, 0, 0)),
            ]
            .into(),
        );
        let own = std::process::id();
        look.owners = [10, 11, 12, 13, 21, 31, 32].map(|inode| (inode, vec![own])).into();
        look.sleeps.insert(own, sleeps);
        look
    }

    #[test]
    fn both_ends_are_found_and_the_listener_is_the_server() {
        let mut found = connections(&world(0, 0));
        found.sort_by_key(|[server, _]| server.inode);
        let ends: Vec<[u64; 2]> = found.iter().map(|ends| ends.map(|end| end.inode)).collect();
        assert_eq!(ends, [[11, 12], [21, 31]]);
    }

    #[test]
    fn rates_are_differences() {
        let seen = pairs(&world(1000, 50), &world(3000, 1050), Duration::from_secs(2));
        // The other pair moved nothing.
        assert_eq!((seen.pairs.len(), seen.idle), (1, 1));
        let pair = &seen.pairs[0];
        assert_eq!((pair.port, pair.connections), (6379, 1));
        assert_eq!(pair.segments_per_second, 2000);
        assert_eq!(pair.bytes_per_second, 15_000);
        // Thousand sleeps on either side, in two seconds.
        assert_eq!(pair.wake_ups_per_second_at_most, 1000);
        // A count that has started anew.
        let seen = pairs(&world(u32::MAX, 0), &world(1, 0), Duration::from_secs(1));
        assert_eq!(seen.pairs[0].segments_per_second, 4);
    }
}
