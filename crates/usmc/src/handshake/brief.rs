//! Servers of other hosts whose connections are brief. An agent's connection costs both hosts some hundred system calls beyond TCP's (a connection
//! inside each host, memory, an exchange of sockets: [`super::clc::deputy`]), which the bytes of a few requests do not bring in. As soon as
//! [`ENOUGH`] of them have ended within a second, what this process opens to that server stays TCP, but for one connection each [`TRY_MS`]: only
//! connections that an agent had are known to be brief. Its SYN does not say SMC then, so that neither end has anything to do with it.
//!
//! So this is for servers that are known by the option in their SYN-ACK. One that the configuration names (`peers`) may in turn expect a first message
//! of this host's; and the configuration may say that all connections last (`change_over`).
//!
//! ```text
//!        ┌───────one has lasted───────┬────────────────────────────┐
//!        ▼                            │                            │
//!     Unknown ──one has ended──▶ Counting ──ENOUGH in a second──▶ Brief
//!                                     ▲                            │
//!                                     └──none ended for a second───┘
//! ```

use usmc_shm::sync::AtomicU64;
use usmc_shm::sync::Ordering::Relaxed;

use crate::os::{clock, config};
use crate::record::tuple::Endpoint;

/// So many brief connections of a server's have to end within a second: fewer cost little.
const ENOUGH: u32 = 16;
/// The time in which they have to end, and how long the last one's end counts, in milliseconds.
const WINDOW_MS: u32 = 1000;
/// The time between two tries by RDMA, in milliseconds: shorter than the last end counts.
const TRY_MS: u32 = 500;

/// Calls of a connection in either direction, and its bytes in both, from which on it has lasted. By system calls, not by a clock: a connection
/// by RDMA costs an end some sixty more than TCP's, and a message saves four to seven.
const CALLS: u64 = 16;
const BYTES: u64 = 256 << 10;

/// Bits of a time in milliseconds that a word keeps: four and a half hours.
const TIME_BITS: u32 = 24;
const TIME: u32 = (1 << TIME_BITS) - 1;

/// What is known of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Nothing.
    Unknown,
    /// So many brief connections have ended since then.
    Counting { since: u32, ended: u32 },
    /// The last one ended then, and the last try was made then.
    Brief { ended: u32, tried: u32 },
}

impl State {
    /// A word of these states, without the highest bits, which are the server's.
    const BITS: u32 = 2 + 2 * TIME_BITS;

    fn of(word: u64) -> State {
        let [one, other] = [word >> TIME_BITS, word].map(|word| word as u32 & TIME);
        match word >> (2 * TIME_BITS) & 3 {
            1 => State::Counting { since: one, ended: other },
            2 => State::Brief { ended: one, tried: other },
            _ => State::Unknown,
        }
    }

    fn word(self) -> u64 {
        let (kind, one, other) = match self {
            State::Unknown => (0, 0, 0),
            State::Counting { since, ended } => (1, since, ended),
            State::Brief { ended, tried } => (2, ended, tried),
        };
        kind << (2 * TIME_BITS) | u64::from(one & TIME) << TIME_BITS | u64::from(other & TIME)
    }

    /// A connection that an agent had has ended.
    fn after_end(self, was_brief: bool, now: u32) -> State {
        match self {
            _ if !was_brief => State::Unknown,
            State::Brief { ended, tried } if since(ended, now) < WINDOW_MS => {
                State::Brief { ended: now, tried }
            }
            State::Counting { since: first, ended } if since(first, now) < WINDOW_MS => {
                match ended + 1 {
                    ended if ended < ENOUGH => State::Counting { since: first, ended },
                    _ => State::Brief { ended: now, tried: now },
                }
            }
            _ => State::Counting { since: now, ended: 1 },
        }
    }

    /// A connection is about to be made. Whether it stays TCP.
    fn after_made(self, now: u32) -> (State, bool) {
        match self {
            State::Brief { ended, tried } if since(ended, now) < WINDOW_MS => {
                match since(tried, now) < TRY_MS {
                    true => (self, true),
                    false => (State::Brief { ended, tried: now }, false),
                }
            }
            _ => (self, false),
        }
    }
}

fn since(then: u32, now: u32) -> u32 {
    now.wrapping_sub(then) & TIME
}

fn now() -> u32 {
    clock::now_ms() & TIME
}

/// A word for each place of a server's name, with 14 more bits of the name: two servers of one place are taken for one in one case of 16 000, and
/// push each other out otherwise.
static SERVERS: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

/// A server's place, and the bits of its name in the word there.
fn place(server: Endpoint) -> (&'static AtomicU64, u64) {
    let address = u128::from_ne_bytes(server.addr);
    let words = [address as u64, (address >> 64) as u64, u64::from(server.port)];
    // Each product by an odd number without a pattern spreads the word over the bits above it.
    let name = words.into_iter().fold(0_u64, |name, word| {
        (name.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    });
    let at = (name >> 32) as usize % SERVERS.len();
    (&SERVERS[at], name >> State::BITS)
}

/// Makes a server's state another one, and gives what `to` gives besides.
fn change<T>(server: Endpoint, to: impl Fn(State) -> (State, T)) -> T {
    let (place, name) = place(server);
    let mut word = place.load(Relaxed);
    loop {
        let known = word >> State::BITS == name;
        let (state, given) = to(if known { State::of(word) } else { State::Unknown });
        let new = name << State::BITS | state.word();
        // What is unknown leaves another server's place alone.
        if new == word || (state == State::Unknown && !known) {
            return given;
        }
        match place.compare_exchange(word, new, Relaxed, Relaxed) {
            Ok(_) => return given,
            Err(now) => word = now,
        }
    }
}

/// Whether a connection to that server, which is about to be made, stays TCP.
pub fn stays_tcp(server: Endpoint) -> bool {
    !config::get().changes_over_at_once && change(server, |state| state.after_made(now()))
}

/// What has become of a connection that an agent had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Use {
    /// Calls that moved bytes, by direction.
    pub calls: [u64; 2],
    /// Bytes of both.
    pub bytes: u64,
    /// Milliseconds from its hand-over to its end.
    pub lasted: u32,
}

impl Use {
    /// `None`: the connection teaches nothing, as it was kept for later and not used.
    fn was_brief(self) -> Option<bool> {
        let is_little = self.calls.into_iter().all(|calls| calls < CALLS) && self.bytes < BYTES;
        (!is_little || self.lasted < WINDOW_MS).then_some(is_little)
    }
}

/// This process' last end of a connection to that server is closed.
pub fn ended(server: Endpoint, used: Use) {
    ended_at(server, used, now());
}

fn ended_at(server: Endpoint, used: Use, now: u32) {
    if let Some(was_brief) = used.was_brief() {
        change(server, |state| (state.after_end(was_brief, now), ()));
    }
}

#[cfg(test)]
mod tests {
    use super::State::{Brief, Counting, Unknown};
    use super::*;

    fn after(state: State, ends: u32, now: u32) -> State {
        (0..ends).fold(state, |state, _| state.after_end(true, now))
    }

    #[test]
    fn states_are_words() {
        let states = [
            Unknown,
            Counting { since: TIME, ended: 3 },
            Brief { ended: 0, tried: TIME },
            Brief { ended: 1 << 23, tried: 7 },
        ];
        for state in states {
            assert_eq!(State::of(state.word()), state);
            assert_eq!(state.word() >> State::BITS, 0);
        }
    }

    #[test]
    fn enough_within_a_second_are_brief() {
        let counting = after(Unknown, ENOUGH - 1, 50);
        assert_eq!(counting, Counting { since: 50, ended: ENOUGH - 1 });
        assert_eq!(counting.after_made(50), (counting, false));
        assert_eq!(after(counting, 1, 1049), Brief { ended: 1049, tried: 1049 });
        // One second is over.
        assert_eq!(after(counting, 1, 1050), Counting { since: 1050, ended: 1 });
        assert_eq!(counting.after_end(false, 51), Unknown);
    }

    #[test]
    fn one_in_a_while_is_tried_and_time_goes_round() {
        let start = TIME - 10;
        let brief = after(Unknown, ENOUGH, start);
        assert_eq!(brief.after_made(start + 5), (brief, true));
        let now = (start + TRY_MS) & TIME;
        let (tried, stays) = brief.after_made(now);
        assert_eq!((tried, stays), (Brief { ended: start, tried: now }, false));
        assert!(tried.after_made(now).1, "one at a time");
        // It was brief, too, and what is known is so for another second.
        let again = tried.after_end(true, now);
        assert_eq!(again, Brief { ended: now, tried: now });
        assert_eq!(again.after_end(false, now), Unknown);
        // Nothing has ended for a second: those that are open may last.
        let later = (now + WINDOW_MS) & TIME;
        assert_eq!(again.after_made(later), (again, false));
        assert_eq!(again.after_end(true, later), Counting { since: later, ended: 1 });
    }

    #[test]
    fn servers_and_uses_are_apart() {
        let server = |port| Endpoint { addr: [9; 16], port };
        let one = Use { calls: [1, 1], bytes: 100, lasted: 0 };
        let uses = [
            one,
            Use { calls: [1, CALLS], ..one },
            Use { bytes: BYTES, ..one },
            Use { lasted: WINDOW_MS, ..one },
        ];
        for _ in 0..ENOUGH {
            for (port, used) in (1..).zip(uses) {
                ended_at(server(port), used, 70);
            }
        }
        let state = |port| change(server(port), |state| (state, state));
        let brief = Brief { ended: 70, tried: 70 };
        assert_eq!([1, 2, 3, 4, 5].map(state), [brief, Unknown, Unknown, Unknown, Unknown]);
        // One that was used in the meantime says the contrary, of however long ago.
        ended_at(server(1), Use { calls: [CALLS, 1], lasted: 1 << 20, ..one }, 80);
        assert_eq!(state(1), Unknown);
    }
}
