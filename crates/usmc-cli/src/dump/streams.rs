//! From what processes show of their connections to the segments of TCP that would have carried it.
//!
//! Every byte has its place in its direction's stream, so what both ends show appears once, and what nobody showed is
//! a gap that is named. A byte's sequence number is its place plus one: a connection that was open before begins in
//! the middle of its stream.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;

use super::attached::{Event, Kind};
use super::packet::{FIN, MOST, PSH, SYN, Segment};

/// Connections remembered; of more, those that were quiet for the longest time are forgotten.
const CONNECTIONS: usize = 1 << 16;

/// A segment, written.
pub struct Packet {
    /// The IP packet.
    pub bytes: Vec<u8>,
    /// CLOCK_REALTIME in nanoseconds.
    pub time_ns: u64,
    /// What is to be known beside it.
    pub comment: Option<String>,
}

/// Of a direction.
#[derive(Default)]
struct Direction {
    /// The place of the next byte; unknown before the first.
    next: Option<u64>,
    ended: bool,
}

impl Direction {
    /// The sequence number of what comes next.
    fn seq(&self) -> Option<u32> {
        self.next.map(|next| next.wrapping_add(1 + u64::from(self.ended)) as u32)
    }
}

#[derive(Default)]
struct Connection {
    /// Client to server, and back.
    directions: [Direction; 2],
    /// By role: whether its begin was seen. The accepting end's may be told when its client has sent already.
    opened: [bool; 2],
    greeted: bool,
    /// What carried each direction's last bytes; empty: TCP.
    carriers: [Rc<str>; 2],
    last_ns: u64,
}

/// All connections.
#[derive(Default)]
pub struct Streams(HashMap<(SocketAddr, SocketAddr), Connection>);

impl Streams {
    /// Takes an event, and gives its packets. Where something else carries its bytes than the ones before, a comment says so; an empty
    /// `carrier` is TCP.
    pub fn take(&mut self, event: &Event, carrier: &Rc<str>, mut put: impl FnMut(Packet)) {
        let (client, server) = match event.is_client {
            true => (event.local, event.peer),
            false => (event.peer, event.local),
        };
        if self.0.len() >= CONNECTIONS && !self.0.contains_key(&(client, server)) {
            self.forget_half();
        }
        let connection = self.0.entry((client, server)).or_default();
        connection.last_ns = event.time_ns;
        // What the client sends, and what the server receives.
        let from_client = event.is_sent == event.is_client;
        let (from, to) = if from_client { (client, server) } else { (server, client) };
        let mut wire = Wire { connection, from, to, client, from_client, time_ns: event.time_ns };
        match event.kind {
            Kind::Open => wire.open(event.is_client),
            Kind::Data => wire.data(event.offset, &event.bytes, carrier, &mut put),
            Kind::End => wire.end(&mut put),
        }
    }

    fn forget_half(&mut self) {
        let mut times: Vec<u64> = self.0.values().map(|c| c.last_ns).collect();
        times.sort_unstable();
        let middle = times[times.len() / 2];
        self.0.retain(|_, connection| connection.last_ns > middle);
    }
}

/// A direction of a connection, at one event.
struct Wire<'a> {
    connection: &'a mut Connection,
    from: SocketAddr,
    to: SocketAddr,
    client: SocketAddr,
    from_client: bool,
    time_ns: u64,
}

impl Wire<'_> {
    fn open(&mut self, by_client: bool) {
        let [mine, other] = &mut self.connection.directions;
        if self.connection.opened[usize::from(by_client)] || (mine.ended && other.ended) {
            // The addresses mean another connection now.
            *self.connection = Connection::default();
        }
        self.connection.opened[usize::from(by_client)] = true;
        self.connection.last_ns = self.time_ns;
    }

    /// SYN, SYN/ACK, ACK.
    fn greet(&mut self, put: &mut impl FnMut(Packet)) {
        if self.connection.greeted || !self.connection.opened.contains(&true) {
            return;
        }
        self.connection.greeted = true;
        let server = if self.from == self.client { self.to } else { self.from };
        let client = self.client;
        for direction in &mut self.connection.directions {
            direction.next.get_or_insert(0);
        }
        for (from, to, seq, ack, flags) in [
            (client, server, 0, None, SYN),
            (server, client, 0, Some(1), SYN),
            (client, server, 1, Some(1), 0),
        ] {
            let bytes = Segment { from, to, seq, ack, flags, bytes: &[] }.packet();
            put(Packet { bytes, time_ns: self.time_ns, comment: None });
        }
    }

    fn data(
        &mut self,
        offset: Option<u64>,
        bytes: &[u8],
        carrier: &Rc<str>,
        put: &mut impl FnMut(Packet),
    ) {
        self.greet(put);
        let own = &mut self.connection.directions[usize::from(!self.from_client)];
        let offset = offset.or(own.next).unwrap_or(0);
        let next = *own.next.get_or_insert(offset);
        let mut comments = Vec::new();
        let seen = next.saturating_sub(offset);
        if offset > next {
            comments.push(format!("{} bytes before these were not captured", offset - next));
        }
        let Some(mut left) = usize::try_from(seen).ok().and_then(|seen| bytes.get(seen..)) else {
            return;
        };
        let before = &mut self.connection.carriers[usize::from(!self.from_client)];
        if !left.is_empty() && before != carrier {
            let name = if carrier.is_empty() { "TCP" } else { carrier };
            comments.push(format!("by {name} from here on"));
            *before = Rc::clone(carrier);
        }
        let mut comment = (!comments.is_empty()).then(|| comments.join("; "));
        let mut at = offset.max(next);
        while !left.is_empty() {
            let (piece, rest) = left.split_at(left.len().min(MOST));
            self.put(at.wrapping_add(1) as u32, PSH, piece, comment.take(), put);
            at = at.wrapping_add(piece.len() as u64);
            left = rest;
        }
        self.connection.directions[usize::from(!self.from_client)].next = Some(at);
    }

    fn end(&mut self, put: &mut impl FnMut(Packet)) {
        self.greet(put);
        let own = &mut self.connection.directions[usize::from(!self.from_client)];
        if own.ended {
            return;
        }
        // Of a connection that nothing was seen of there is nothing to tell.
        let Some(seq) = own.seq() else { return };
        own.ended = true;
        self.put(seq, FIN, &[], None, put);
    }

    fn put(
        &self,
        seq: u32,
        flags: u8,
        bytes: &[u8],
        comment: Option<String>,
        put: &mut impl FnMut(Packet),
    ) {
        let ack = self.connection.directions[usize::from(self.from_client)].seq();
        let segment = Segment { from: self.from, to: self.to, seq, ack, flags, bytes };
        put(Packet { bytes: segment.packet(), time_ns: self.time_ns, comment });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dump::attached::Carrier;

    const CLIENT: &str = "127.0.0.1:40000";
    const SERVER: &str = "127.0.0.1:80";

    fn event(kind: Kind, is_client: bool, is_sent: bool, at: Option<u64>, bytes: &[u8]) -> Event {
        let [client, server] = [CLIENT, SERVER].map(|a| a.parse().expect("an address"));
        let (local, peer) = if is_client { (client, server) } else { (server, client) };
        let carrier = Carrier { number: 0, connection: 0 };
        let bytes = bytes.into();
        Event { kind, is_client, is_sent, offset: at, time_ns: 1, local, peer, carrier, bytes }
    }

    /// Source port, seq, ack, flags, bytes, of each packet.
    type Shown = (u16, u32, u32, u8, String);

    fn shown(events: &[Event]) -> Vec<Shown> {
        let mut streams = Streams::default();
        let mut packets = Vec::new();
        for event in events {
            streams.take(event, &"".into(), |p| packets.push(p));
        }
        let show = |p: &Packet| {
            let tcp = &p.bytes[20..];
            let word =
                |at: usize| u32::from_be_bytes([tcp[at], tcp[at + 1], tcp[at + 2], tcp[at + 3]]);
            let text = String::from_utf8_lossy(&tcp[20..]).into_owned();
            let text = p.comment.as_ref().map_or(text.clone(), |c| format!("{text} ({c})"));
            (u16::from_be_bytes([tcp[0], tcp[1]]), word(4), word(8), tcp[13], text)
        };
        packets.iter().map(show).collect()
    }

    fn row(port: u16, seq: u32, ack: u32, flags: u8, text: &str) -> Shown {
        (port, seq, ack, flags, text.to_owned())
    }

    #[test]
    fn a_connection_seen_from_its_begin_is_whole() {
        let events = [
            event(Kind::Open, false, false, None, b""),
            event(Kind::Data, false, false, Some(0), b"GET"),
            event(Kind::Data, false, true, Some(0), b"200"),
            event(Kind::End, false, false, None, b""),
            event(Kind::End, false, true, None, b""),
            event(Kind::End, false, true, None, b""),
        ];
        let expected = [
            row(40000, 0, 0, SYN, ""),
            row(80, 0, 1, SYN | 16, ""),
            row(40000, 1, 1, 16, ""),
            row(40000, 1, 1, PSH | 16, "GET"),
            row(80, 1, 4, PSH | 16, "200"),
            row(40000, 4, 4, FIN | 16, ""),
            row(80, 4, 5, FIN | 16, ""),
        ];
        assert_eq!(shown(&events), expected);
    }

    #[test]
    fn what_both_ends_show_appears_once() {
        let events = [
            event(Kind::Open, true, true, None, b""),
            event(Kind::Data, true, true, Some(0), b"abc"),
            event(Kind::Open, false, false, None, b""),
            event(Kind::Data, false, false, Some(0), b"ab"),
            event(Kind::Data, false, false, Some(2), b"cde"),
            event(Kind::Data, true, true, Some(3), b"de"),
        ];
        let texts: Vec<String> = shown(&events).into_iter().map(|row| row.4).collect();
        assert_eq!(texts, ["", "", "", "abc", "de"]);
    }

    #[test]
    fn an_open_connection_begins_in_the_middle_and_gaps_are_named() {
        let events = [
            event(Kind::Data, true, false, Some(1 << 32), b"x"),
            event(Kind::Data, true, true, Some(500), b"y"),
            event(Kind::Data, true, true, Some(510), b"z"),
            event(Kind::Data, true, true, None, b"!"),
        ];
        let expected = [
            row(80, 1, 0, PSH, "x"),
            row(40000, 501, 2, PSH | 16, "y"),
            row(40000, 511, 2, PSH | 16, "z (9 bytes before these were not captured)"),
            row(40000, 512, 2, PSH | 16, "!"),
        ];
        assert_eq!(shown(&events), expected);
    }

    #[test]
    fn addresses_that_come_again_are_another_connection() {
        let one = [
            event(Kind::Open, true, true, None, b""),
            event(Kind::Data, true, true, Some(0), b"one"),
        ];
        let packets = shown(&[&one[..], &one[..]].concat());
        assert_eq!(packets.iter().filter(|row| row.4 == "one").count(), 2);
        assert_eq!(packets.iter().filter(|row| row.3 == SYN).count(), 2);
    }

    #[test]
    fn what_carries_bytes_is_told_where_it_changes() {
        let mut streams = Streams::default();
        let mut told = Vec::new();
        for (carrier, at, bytes) in
            [("", 0, "a"), ("memory", 1, "b"), ("memory", 1, "b"), ("memory", 2, "c"), ("", 3, "d")]
        {
            let event = event(Kind::Data, true, true, Some(at), bytes.as_bytes());
            streams.take(&event, &carrier.into(), |packet| told.push(packet.comment));
        }
        let [memory, tcp] = ["memory", "TCP"].map(|name| Some(format!("by {name} from here on")));
        assert_eq!(told, [None, memory, None, tcp]);
    }

    #[test]
    fn a_large_write_becomes_many_packets() {
        let large = vec![b'l'; 3 * MOST + 1];
        let packets = shown(&[event(Kind::Data, true, true, Some(0), &large)]);
        let lens: Vec<usize> = packets.iter().map(|row| row.4.len()).collect();
        assert_eq!(lens, [MOST, MOST, MOST, 1]);
        assert_eq!(packets[3].1, 3 * MOST as u32 + 1);
    }
}
