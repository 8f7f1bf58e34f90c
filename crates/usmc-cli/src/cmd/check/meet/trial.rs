//! The connection that is tried, between two processes under the library: messages that come back, until it is known what carries them.
//!
//! A message is a kind, three zeros, a length of four bytes, the lowest first, and as many bytes.

use std::ffi::c_int;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use smc_proto::decline::DeclineCode;
use usmc::observe::{Mode, State};
use usmc::reason::Reason;
use usmc::syn_option::Outcome as Syn;

use super::wire::{Hello, PROTOCOL, Talk, Trouble, Wants};
use crate::observed::{self, Socket};
use crate::regions::device_name;
use crate::{agent, proc};

/// The longest wait for a connection, and for a message.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// How long a connection may be TCP for a reason that may pass.
const PASSING: Duration = Duration::from_millis(1500);
/// How long it may be in the middle of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Round trips between two looks, unless they take longer than [`LOOK`].
const ROUNDS: usize = 50;
const LOOK: Duration = Duration::from_millis(200);
/// Round trips that are measured, unless they take longer than [`MEASURE`].
const MEASURED: usize = 500;
const MEASURE: Duration = Duration::from_millis(500);
/// Round trips that a connection is given at least, before a reason that may pass is taken for the last one.
const CHANCE: u64 = 100;
/// Bytes of a message in these.
pub const SMALL: usize = 64;
/// Bytes of the messages whose content is compared: below a ring's smallest size, beyond it, and odd.
const LARGE: [usize; 6] = [1, 4095, 16 << 10, 65_521, 32 << 10, MOST];
/// Bytes of a message at most.
const MOST: usize = 64 << 10;
const HEAD: usize = 8;

/// Comes back.
const ECHO: u8 = b'e';
/// Asks what the other end is by: comes back with its [`Mode`], and whether that may change.
const ASK: u8 = b'm';

/// What moves bytes.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "UPPERCASE")]
pub enum By {
    /// The kernel.
    Tcp,
    /// Shared memory.
    Smcd,
    /// An agent.
    Smcr,
}

/// An end of the connection, as its own process knows it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct End {
    /// What moves its bytes.
    pub by: By,
    /// Whose memory, or which device of RDMA's.
    pub device: Option<String>,
    /// Why it is TCP: [`Reason`]'s code.
    pub reason: u8,
    /// The same in words.
    pub text: String,
    /// Whether the other end's SYN said SMC, where that is known.
    pub said_smc: Option<bool>,
}

/// An end, and whether it may still become something else.
struct Looked {
    end: End,
    is_open: bool,
    is_in_handshake: bool,
}

/// What this process' library says of a connection. `None`: it has no record, as there is no library.
fn look(stream: &TcpStream, ism_dir: &Path) -> Option<Looked> {
    let fd = u32::try_from(stream.as_raw_fd()).ok()?;
    let files = proc::record_files(std::process::id());
    let readings = files.iter().filter_map(|file| observed::read(file).ok());
    let is_it = |s: &Socket| s.fd == fd && !matches!(s.state, State::Init | State::Listen);
    let socket = readings.flat_map(|reading| reading.sockets).find(is_it)?;
    Some(judge(&socket, ism_dir))
}

fn judge(socket: &Socket, ism_dir: &Path) -> Looked {
    let reason = Reason::from_code(socket.reason).unwrap_or(Reason::None);
    let (mut by, mut device, mut is_in_handshake) = (By::Tcp, None, false);
    match socket.mode {
        Mode::Smcd => (by, device) = (By::Smcd, Some(device_name(socket.region))),
        Mode::Smcr => {
            // The agent alone knows whether its handshake is over.
            let conns = agent::report(ism_dir).conns;
            let conn = conns
                .into_iter()
                .find(|conn| (conn.local, conn.peer) == (socket.local, socket.peer));
            match conn {
                Some(conn) if conn.device.is_none() => is_in_handshake = true,
                conn => (by, device) = (By::Smcr, conn.and_then(|conn| conn.device)),
            }
        }
        Mode::Tcp => is_in_handshake = matches!(reason, Reason::Pending | Reason::Handshake),
    }
    let may_pass =
        matches!(reason, Reason::None | Reason::Short | Reason::NoOffer | Reason::NotHeld);
    let text = match reason {
        Reason::Declined => format!("{}: {}", reason.text(), DeclineCode(socket.declined)),
        _ => socket.reason_text(),
    };
    let said_smc = match socket.syn_option {
        Some(Syn::Speaks) => Some(true),
        Some(Syn::Silent | Syn::Echoed) => Some(false),
        _ => None,
    };
    let end = End { by, device, reason: reason as u8, text, said_smc };
    Looked { is_open: by == By::Tcp && (is_in_handshake || may_pass), end, is_in_handshake }
}

/// What the process of the connecting end is to do.
#[derive(Serialize, Deserialize, Debug)]
pub struct Plan {
    /// Where to.
    pub to: SocketAddr,
    /// Which check it is for.
    pub token: String,
    /// The ISM directory, where an agent may be.
    pub ism_dir: PathBuf,
}

/// What it has seen.
#[derive(Serialize, Deserialize, Debug)]
pub struct Seen {
    /// Its end; `None` without the library.
    pub end: Option<End>,
    /// A round trip, in nanoseconds: the median.
    pub ns: Option<u64>,
    /// Bytes that came back as they were sent.
    pub bytes: u64,
    /// Why not.
    pub problem: Option<String>,
}

/// Makes the connection, in a process under the library, and prints what was seen.
///
/// # Errors
/// The plan is none, or the output cannot be written.
pub fn client(plan: &str) -> Result<c_int> {
    let plan: Plan = serde_json::from_str(plan).context("not a plan")?;
    let mut seen = Seen { end: None, ns: None, bytes: 0, problem: None };
    if let Err(trouble) = play(&plan, &mut seen) {
        seen.problem = Some(trouble.to_string());
    }
    println!("{}", serde_json::to_string(&seen).context("JSON")?);
    Ok(0)
}

fn play(plan: &Plan, seen: &mut Seen) -> Result<(), Trouble> {
    let mut talk = Talk::new(TcpStream::connect_timeout(&plan.to, PATIENCE)?)?;
    let hello = Hello { usmc_check: PROTOCOL, wants: Wants::Trial(plan.token.clone()) };
    talk.say(&hello, soon())?;
    settle(&mut talk, &plan.ism_dir, seen)?;
    seen.ns = Some(measure(MEASURED, MEASURE, || round(&mut talk).map(drop))?);
    for (number, len) in LARGE.into_iter().enumerate() {
        let sent = noise(number as u64 + 1, len);
        if echoed(&mut talk, &sent)? != sent {
            seen.problem = Some("what came back is not what was sent".to_owned());
            break;
        }
        seen.bytes += len as u64;
    }
    // What it is now.
    ask(&mut talk)?;
    seen.end = look(&talk.stream, &plan.ism_dir).map(|looked| looked.end);
    Ok(())
}

/// Sends messages until both ends know what they are by, or have had the time to.
fn settle(talk: &mut Talk, ism_dir: &Path, seen: &mut Seen) -> Result<(), Trouble> {
    let begun = Instant::now();
    loop {
        let until = Instant::now() + LOOK;
        for _ in 0..ROUNDS {
            seen.bytes += round(talk)?;
            if Instant::now() >= until {
                break;
            }
        }
        let [mode, is_open, is_in_handshake] = ask(talk)?;
        let own = look(&talk.stream, ism_dir);
        seen.end = own.as_ref().map(|looked| looked.end.clone());
        let Some(own) = own else { return Ok(()) };
        let (left, other_left) = (own.end.by != By::Tcp, mode != By::Tcp as u8);
        let is_open = own.is_open || is_open != 0 || left != other_left;
        let limit = if own.is_in_handshake || is_in_handshake != 0 { HANDSHAKE } else { PASSING };
        let has_had_it = seen.bytes >= CHANCE * SMALL as u64 && begun.elapsed() > limit;
        if !is_open || has_had_it || begun.elapsed() > HANDSHAKE {
            return Ok(());
        }
    }
}

/// The median of so many round trips, in nanoseconds.
///
/// # Errors
/// One of them failed.
pub fn measure(
    most: usize,
    limit: Duration,
    mut round: impl FnMut() -> Result<(), Trouble>,
) -> Result<u64, Trouble> {
    let begun = Instant::now();
    let mut times = Vec::with_capacity(most);
    while times.len() < most && (times.is_empty() || begun.elapsed() < limit) {
        let start = Instant::now();
        round()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(u64::try_from(times[times.len() / 2].as_nanos()).unwrap_or(u64::MAX))
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// A small message and its echo; how many bytes came back.
fn round(talk: &mut Talk) -> Result<u64, Trouble> {
    let sent = [b'u'; SMALL];
    match echoed(talk, &sent)? == sent {
        true => Ok(SMALL as u64),
        false => Err(Trouble::Foreign("other bytes than were sent".to_owned())),
    }
}

fn echoed(talk: &mut Talk, bytes: &[u8]) -> Result<Vec<u8>, Trouble> {
    let deadline = soon();
    talk.send(&message(ECHO, bytes), deadline)?;
    receive(talk, deadline).map(|(_, bytes)| bytes)
}

/// What the other end is by.
fn ask(talk: &mut Talk) -> Result<[u8; 3], Trouble> {
    let deadline = soon();
    talk.send(&message(ASK, &[]), deadline)?;
    let (_, said) = receive(talk, deadline)?;
    said.first_chunk().copied().ok_or_else(|| Trouble::Foreign("no mode".to_owned()))
}

fn message(kind: u8, bytes: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, 0, 0, 0];
    message.extend((bytes.len() as u32).to_le_bytes());
    message.extend(bytes);
    message
}

fn receive(talk: &mut Talk, deadline: Instant) -> Result<(u8, Vec<u8>), Trouble> {
    let mut head = [0; HEAD];
    talk.exactly(&mut head, deadline)?;
    let [kind, _, _, _, len @ ..] = head;
    let len = u32::from_le_bytes(len) as usize;
    if len > MOST || ![ECHO, ASK].contains(&kind) {
        return Err(Trouble::Foreign(head.escape_ascii().to_string()));
    }
    let mut bytes = vec![0; len];
    talk.exactly(&mut bytes, deadline)?;
    Ok((kind, bytes))
}

/// Plays the serving end until the other one has closed; what this end was by when it was last asked.
pub fn serve(talk: &mut Talk, ism_dir: &Path, deadline: Instant) -> Option<End> {
    let mut end = None;
    while let Ok((kind, bytes)) = receive(talk, deadline.min(soon())) {
        let bytes = match kind {
            ASK => {
                let looked = look(&talk.stream, ism_dir);
                let said = looked.as_ref().map_or([0; 3], |looked| {
                    [looked.end.by as u8, looked.is_open.into(), looked.is_in_handshake.into()]
                });
                end = looked.map(|looked| looked.end);
                said.to_vec()
            }
            _ => bytes,
        };
        if talk.send(&message(kind, &bytes), deadline.min(soon())).is_err() {
            break;
        }
    }
    end
}

/// Reproducible bytes (xorshift64*).
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::thread;

    #[test]
    fn messages_come_back_and_without_a_library_there_is_no_end() {
        let (mut talk, other) = Talk::pair();
        let server = thread::spawn(move || {
            serve(&mut Talk::new(other).expect("a socket"), Path::new("/nonexistent"), soon())
        });
        for len in LARGE {
            let sent = noise(len as u64, len);
            assert_eq!(echoed(&mut talk, &sent).expect("an echo"), sent);
        }
        assert_eq!(ask(&mut talk).expect("an answer"), [0; 3]);
        assert!(measure(5, PATIENCE, || round(&mut talk).map(drop)).expect("rounds") > 0);
        drop(talk);
        assert_eq!(server.join().expect("the server"), None);
    }

    #[test]
    fn hostile_messages_end_it() {
        for bytes in
            [&b"e\0\0\0\xff\xff\xff\xff"[..], b"x\0\0\0\0\0\0\0", b"e\0\0\0\x01\0\x01\0", b"e\0"]
        {
            let (talk, mut other) = Talk::pair();
            other.write_all(bytes).expect("room");
            drop(other);
            let mut talk = talk;
            assert_eq!(serve(&mut talk, Path::new("/nonexistent"), soon()), None);
        }
        // And the connecting end, of whom another comes.
        let (mut talk, mut other) = Talk::pair();
        other.write_all(&message(ASK, &[1])).expect("room");
        assert!(ask(&mut talk).is_err());
    }
}
