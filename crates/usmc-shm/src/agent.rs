//! What a process and the agent (`usmc agent`) say to each other, by a connection of their SOCK_SEQPACKET socket for each request.
//!
//! The process has a TCP connection to another host. It makes a second one inside its own host, whose one end is the **deputy** of the
//! first: the application's descriptor will be that. The process sends [`Request::Hand`] with two descriptors, the TCP connection and the
//! other end of the deputy's. The agent answers at once, whatever the peer does.
//!
//! By [`Answer::Ring`] comes the memfd of a segment: the deputy's connection is in a ring of that, in which the process is the acceptor and
//! the agent the client, as between any two processes. By [`Answer::Tcp`] the agent has not touched the TCP connection.
//!
//! Where the peer does not want SMC after all, the agent leaves the application's ring ([`crate::back`]), which nobody has read. The process
//! asks for the TCP connection ([`Request::Fetch`]), which stands just behind the messages of the handshake, and gets it with
//! [`Answer::Tcp`].
//!
//! A client's Proposal may go with its SYN (TCP Fast Open). The process asks for it ([`Request::Propose`]) before it connects, and gets it
//! behind [`Answer::Proposal`]; it hands the connection over later, as [`Role::Proposed`].
//!
//! An application sleeps on its end of the deputy's connection, and the agent wakes it by a byte there. Where it sleeps in an epoll set there is a
//! cheaper way: the process asks for an **ear** of that set ([`Request::Ear`]), one of a pair of UNIX sockets, and has it in the set by edges. The
//! number that comes along stands in the slots of all connections that the set waits for ([`crate::layout::ARM_EAR`]). It means one room. In the
//! other direction a process has an ear of the agent's for each room ([`Request::RoomEar`]): an eventfd, and a word in the room that says which
//! slots rang.
//!
//! Somebody may also ask what the agent has ([`Request::Show`]). The answer's file has lines of words: what it is about, and then
//! `name=value`. No value has a blank in it; readers pass over names and kinds of lines that they do not know.
//!
//! | line | names |
//! |---|---|
//! | `device` | `name`, `port`, `state` (ACTIVE or DOWN), `links`, `gid`, and its counters: `posts`, `requests`, `tx-bytes`, … |
//! | `agent` | `established`, `fallbacks`, `failures`: what has become of connections; `cpu-ns`, its CPU time |
//! | `group` | `id` (8 hexadecimal digits), `role`, `type`, `version`, `conns`, `rmbs`, `peer-rmbs` |
//! | `link` | `group` (its `id`), `id`, `device`, `port`, `state`, `conns`, `gid`, `peer-gid`, `qpn`, `peer-qpn` |
//! | `conn` | `local`, `peer`, `state`: ACTIVE with `group` and `link`, or INIT while its handshake is under way |

/// Where the socket is, in the directory that both have in common.
pub const SOCKET: &str = "agent";

/// First word of each message; changes whenever anything here does.
const MAGIC: u32 = u32::from_le_bytes(*b"uSA4");

/// Which end of its connection a process has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// It has connected.
    Client,
    /// It has connected, and the agent's Proposal ([`Request::Propose`]) has gone with the SYN.
    Proposed,
    /// It has accepted.
    Server,
}

/// A slot of a segment, for one of its uses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Place {
    /// The segment's identity.
    pub segment: u64,
    /// The slot.
    pub slot: u32,
    /// Which use of it ([`crate::handshake::Use`]).
    pub usage: u32,
}

/// What a process wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// To hand a connection over, of which it has this end. Both ends have said SMC, or it is known of the peer.
    Hand(Role),
    /// To have a connection back, whose deputy has that slot.
    Fetch(Place),
    /// To know what the agent has.
    Show,
    /// To have the Proposal for a server at that address, before there is a connection. IPv4 is mapped.
    Propose([u8; 16]),
    /// To be woken by one of a pair of UNIX sockets, for the connections of the room in which one has that slot.
    Ear(Place),
    /// To wake the agent by an eventfd, for the connections of the room in which one has that slot.
    RoomEar(Place),
}

/// What becomes of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The deputy's connection is in that ring; the memfd comes with the message.
    Ring(Place),
    /// The connection stays TCP. To [`Request::Fetch`] it comes with the message.
    Tcp {
        /// The reason, as a Decline has it (RFC 7609, appendix A.2.4); 0 = none.
        code: u32,
    },
    /// The file that comes with the message says it ([`Request::Show`]).
    Shown,
    /// Behind this message, in the same packet, comes a Proposal of so many bytes, at most [`PROPOSAL_MAX`] ([`Request::Propose`]).
    Proposal(u32),
    /// The socket that comes with the message has that number, less than 2^16 - 1, in the room ([`Request::Ear`]).
    Ear(u32),
    /// The eventfd that comes with the message wakes the agent ([`Request::RoomEar`]).
    RoomEar,
}

/// Bytes of each message.
pub const LEN: usize = 24;

/// The longest Proposal that goes with a SYN, in bytes: it has to fit into a segment of any network, and Linux takes no more along
/// (`net/ipv4/tcp_output.c`, `tcp_send_syn_data`: the MSS of the last connection, 536 where none is known).
pub const PROPOSAL_MAX: usize = 512;

/// Numbers of ears are smaller: half a word in a slot has room for them, and for none.
pub const EARS: u32 = u16::MAX as u32;

/// Nobody's.
const NOWHERE: Place = Place { segment: 0, slot: 0, usage: 0 };

/// Kind of message, its own word, and a place.
type Parts = (u32, u32, Place);

fn emit((kind, word, Place { segment, slot, usage }): Parts) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    let head = u64::from(MAGIC) << 32 | u64::from(kind);
    let words = [head, u64::from(slot) << 32 | u64::from(usage | word), segment];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// An address in the words of a place.
fn packed(address: [u8; 16]) -> Place {
    let bits = u128::from_be_bytes(address);
    let low = bits as u64;
    Place { segment: (bits >> 64) as u64, slot: (low >> 32) as u32, usage: low as u32 }
}

fn unpacked(Place { segment, slot, usage }: Place) -> [u8; 16] {
    let low = u64::from(slot) << 32 | u64::from(usage);
    (u128::from(segment) << 64 | u128::from(low)).to_be_bytes()
}

fn parse(bytes: &[u8]) -> Option<Parts> {
    let bytes: &[u8; LEN] = bytes.try_into().ok()?;
    let word = |at: usize| u64::from_le_bytes(core::array::from_fn(|i| bytes[8 * at + i]));
    let [head, place, segment] = [word(0), word(1), word(2)];
    let (slot, usage) = ((place >> 32) as u32, place as u32);
    (head >> 32 == u64::from(MAGIC)).then_some((head as u32, usage, Place { segment, slot, usage }))
}

impl Request {
    /// As it is sent.
    pub fn emit(&self) -> [u8; LEN] {
        emit(match *self {
            Request::Hand(Role::Client) => (0, 0, NOWHERE),
            Request::Hand(Role::Server) => (1, 0, NOWHERE),
            Request::Fetch(place) => (2, 0, place),
            Request::Show => (5, 0, NOWHERE),
            Request::Hand(Role::Proposed) => (7, 0, NOWHERE),
            Request::Propose(address) => (8, 0, packed(address)),
            Request::Ear(place) => (10, 0, place),
            Request::RoomEar(place) => (12, 0, place),
        })
    }

    /// Of what has come; `None`: it is none.
    pub fn parse(bytes: &[u8]) -> Option<Request> {
        match parse(bytes)? {
            (0, _, NOWHERE) => Some(Request::Hand(Role::Client)),
            (1, _, NOWHERE) => Some(Request::Hand(Role::Server)),
            (2, _, place) => Some(Request::Fetch(place)),
            (5, _, NOWHERE) => Some(Request::Show),
            (7, _, NOWHERE) => Some(Request::Hand(Role::Proposed)),
            (8, _, place) => Some(Request::Propose(unpacked(place))),
            (10, _, place) => Some(Request::Ear(place)),
            (12, _, place) => Some(Request::RoomEar(place)),
            _ => None,
        }
    }
}

impl Answer {
    /// As it is sent.
    pub fn emit(&self) -> [u8; LEN] {
        emit(match *self {
            Answer::Ring(place) => (3, 0, place),
            Answer::Tcp { code } => (4, code, NOWHERE),
            Answer::Shown => (6, 0, NOWHERE),
            Answer::Proposal(len) => (9, len, NOWHERE),
            Answer::Ear(number) => (11, number, NOWHERE),
            Answer::RoomEar => (13, 0, NOWHERE),
        })
    }

    /// Of what has come; `None`: it is none.
    pub fn parse(bytes: &[u8]) -> Option<Answer> {
        match parse(bytes)? {
            (3, _, place) => Some(Answer::Ring(place)),
            (4, code, Place { segment: 0, slot: 0, .. }) => Some(Answer::Tcp { code }),
            (6, _, NOWHERE) => Some(Answer::Shown),
            (13, _, NOWHERE) => Some(Answer::RoomEar),
            (9, len, Place { segment: 0, slot: 0, .. }) if len as usize <= PROPOSAL_MAX => {
                Some(Answer::Proposal(len))
            }
            (11, number, Place { segment: 0, slot: 0, .. }) if number < EARS => {
                Some(Answer::Ear(number))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place { segment: u64::MAX - 5, slot: 7, usage: 0x12_3456 };

    #[test]
    fn messages_come_back_as_they_were() {
        let hands = [Role::Client, Role::Proposed, Role::Server].map(Request::Hand);
        let address = core::array::from_fn(|at| 0xf0 | at as u8);
        let others = [
            Request::Fetch(PLACE),
            Request::Show,
            Request::Propose(address),
            Request::Ear(PLACE),
            Request::RoomEar(PLACE),
        ];
        let requests = hands.into_iter().chain(others);
        for request in requests {
            assert_eq!(Request::parse(&request.emit()), Some(request));
            assert_eq!(Answer::parse(&request.emit()), None);
        }
        let tcp = Answer::Tcp { code: 0x0304_0000 };
        let ear = Answer::Ear(EARS - 1);
        for answer in
            [Answer::Ring(PLACE), tcp, Answer::Shown, Answer::Proposal(156), ear, Answer::RoomEar]
        {
            assert_eq!(Answer::parse(&answer.emit()), Some(answer));
            assert_eq!(Request::parse(&answer.emit()), None);
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let (request, answer) = (Request::Fetch(PLACE).emit(), Answer::Tcp { code: 1 }.emit());
        // The kind and the magic number.
        for at in 0..8 {
            let (mut bad_request, mut bad_answer) = (request, answer);
            bad_request[at] ^= 0x80;
            bad_answer[at] ^= 0x80;
            assert_eq!(Request::parse(&bad_request), None);
            assert_eq!(Answer::parse(&bad_answer), None);
        }
        assert_eq!(Answer::parse(&Answer::Proposal(PROPOSAL_MAX as u32 + 1).emit()), None);
        assert_eq!(Answer::parse(&Answer::Ear(EARS).emit()), None);
        assert!(Request::parse(&request[..LEN - 1]).is_none() && Answer::parse(&[]).is_none());
        let mut hand = Request::Hand(Role::Server).emit();
        hand[20] = 1;
        assert_eq!(Request::parse(&hand), None);
    }
}
