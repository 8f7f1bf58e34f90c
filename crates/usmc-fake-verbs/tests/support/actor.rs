//! The process that is told what to do: a line is a command, a line is its answer.

use std::io::{BufRead, Write};
use std::net::{Ipv6Addr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use usmc_verbs::{
    Access, Caps, Channel, Completion, Cq, Device, Error, Gid, Init, Library, Mr, Mtu, Operation,
    Path, Pd, Piece, Qp, Receive, Request, Rtr, Rts, Source,
};

use super::pingpong;

/// Set in a process that is told.
pub const ROLE: &str = "USMC_FAKE_VERBS_ACTOR";

/// Before each answer.
pub const MARK: &str = "=> ";

/// Bytes that the peer may write; behind them are the receives.
const MEMORY: usize = 2 << 20;
/// Bytes of a receive.
const RECEIVE: usize = 64;
const TOKENS: [u64; 2] = [1, 2];

/// Does what standard input says, until its end.
pub fn run() {
    let mut actor = None;
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<_> = line.split_whitespace().collect();
        let answer = match words.as_slice() {
            ["open", device] => Actor::new(device).map(|new| actor.insert(new).facts()),
            ["close"] => {
                actor = None;
                Ok("ok".into())
            }
            ["gids", device] => gids(device),
            ["serve", device, rounds, bytes] => serve(device, rounds, bytes),
            ["ping", device, address, rounds, bytes] => {
                pingpong::connect(address, &options(device, rounds, bytes))
                    .map_err(|error| error.to_string())
            }
            words => match &actor {
                Some(actor) => actor.command(words),
                None => Err("nothing is open".into()),
            },
        };
        say(&answer.unwrap_or_else(|error| error));
    }
}

fn say(answer: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "\n{MARK}{answer}");
    let _ = out.flush();
}

type Answer = Result<String, String>;

fn text(error: Error) -> String {
    error.to_string()
}

struct Actor {
    device: Device,
    domain: Pd,
    channel: Channel,
    /// Of sends, and of receives.
    queues: [Cq; 2],
    qp: Qp,
    memory: Mr,
    gid: Gid,
}

impl Actor {
    fn new(name: &str) -> Result<Actor, String> {
        let device =
            Library::open().and_then(|library| library.device(&real(name))).map_err(text)?;
        let gids = device.gids().map_err(text)?;
        let gid = gids.iter().find(|entry| entry.index == 1).ok_or("the device has no GID 1")?.gid;
        let domain = Pd::new(&device).map_err(text)?;
        let channel = Channel::new(&device).map_err(text)?;
        let queue = |token| Cq::new(&device, 64, Some(&channel), token).map_err(text);
        let queues = [queue(TOKENS[0])?, queue(TOKENS[1])?];
        let caps = Caps {
            send_requests: 8,
            receives: 8,
            send_pieces: 2,
            receive_pieces: 1,
            inline_bytes: 64,
        };
        let qp = Qp::new(&domain, &queues[0], &queues[1], caps).map_err(text)?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let memory = Mr::new(&domain, MEMORY + 8 * RECEIVE, access).map_err(text)?;
        qp.to_init(&Init { port: 1, pkey_index: 0, access }).map_err(text)?;
        Ok(Actor { device, domain, channel, queues, qp, memory, gid })
    }

    /// The sequence numbers wrap after a few packets.
    fn psn(&self) -> u32 {
        0xff_fffc
    }

    fn facts(&self) -> String {
        let (memory, qp_num) = (&self.memory, self.qp.number());
        format!("{qp_num} {} {} {} {}", self.psn(), self.gid, memory.address(), memory.rkey())
    }

    fn command(&self, words: &[&str]) -> Answer {
        match words {
            ["peer", qp_num, psn, gid, _, _, timeout, retries, rnr_retries] => {
                let gid = gid.parse::<Ipv6Addr>().map_err(|_| "a GID is an address")?;
                self.peer(number(qp_num)? as u32, number(psn)? as u32, Gid(gid.octets()))?;
                let (timeout, retry_count) = (number(timeout)? as u8, number(retries)? as u8);
                let rnr_retry = number(rnr_retries)? as u8;
                let rts = Rts { psn: self.psn(), timeout, retry_count, rnr_retry, max_reads: 1 };
                self.qp.to_rts(&rts).map_err(text)?;
            }
            ["receive", count] => {
                for wr_id in 0..number(count)? {
                    let place = MEMORY + (wr_id % 8) as usize * RECEIVE;
                    let piece = self.memory.piece(place, RECEIVE as u32).ok_or("a place")?;
                    self.qp
                        .post_receive(&[Receive { wr_id, piece }])
                        .map_err(|error| error.to_string())?;
                }
            }
            ["put", offset, data] => {
                self.memory.write(number(offset)? as usize, data.as_bytes()).ok_or("a place")?;
            }
            ["get", offset, len] => {
                return self.get(number(offset)? as usize, number(len)? as usize);
            }
            ["message", wr_id, len] => {
                return self.get(MEMORY + number(wr_id)? as usize * RECEIVE, number(len)? as usize);
            }
            ["post", chain @ ..] => self.post(chain)?,
            ["await", which, count] => return self.completions(which, number(count)? as usize),
            ["poll", which] => {
                let mut found = [Completion::default(); 64];
                let count = self.queue(which)?.poll(&mut found).map_err(text)?;
                return Ok(show(&found[..count]));
            }
            ["arm", which, kind] => self.queue(which)?.arm(*kind == "solicited").map_err(text)?,
            ["event", time] => {
                wait(self.channel.as_fd(), number(time)?);
                return Ok(format!("{:?}", self.channel.next_event().map_err(text)?));
            }
            ["async", time] => {
                wait(self.device.as_fd(), number(time)?);
                return Ok(format!("{:?}", self.device.next_event().map_err(text)?));
            }
            ["state"] => return Ok(format!("{:?}", self.qp.state().map_err(text)?)),
            ["port"] => return Ok(format!("{:?}", self.device.port(1).map_err(text)?)),
            ["error"] => self.qp.to_error().map_err(text)?,
            ["register"] => drop(Mr::new(&self.domain, 1, Access::LOCAL_WRITE).map_err(text)?),
            _ => return Err(format!("{words:?} is no command")),
        }
        Ok("ok".into())
    }

    fn peer(&self, peer_qp_num: u32, peer_psn: u32, peer: Gid) -> Result<(), String> {
        let path = Path {
            port: 1,
            gid_index: 1,
            peer,
            hop_limit: 1,
            traffic_class: 0,
            flow_label: 0,
            service_level: 0,
        };
        let mtu = Mtu::Bytes1024;
        let rtr = Rtr { path, mtu, peer_qp_num, peer_psn, max_peer_reads: 1, min_rnr_timer: 5 };
        self.qp.to_rtr(&rtr).map_err(text)
    }

    /// `write,ID,PIECES,ADDRESS,RKEY,FLAGS` and `send,ID,PIECES,FLAGS`. Pieces are `OFFSET+LEN`, with `/` between them; flags are
    /// s(ignaled), i(nline) and w(akes the peer: solicited).
    fn post(&self, chain: &[&str]) -> Result<(), String> {
        let mut parsed = Vec::new();
        for request in chain {
            let words: Vec<_> = request.split(',').collect();
            let (wr_id, pieces, operation, flags) = match words.as_slice() {
                ["write", wr_id, pieces, address, rkey, flags] => {
                    let (address, rkey) = (number(address)?, number(rkey)? as u32);
                    (wr_id, pieces, Operation::Write { address, rkey }, flags)
                }
                ["send", wr_id, pieces, flags] => {
                    (wr_id, pieces, Operation::Send { solicited: flags.contains('w') }, flags)
                }
                _ => return Err(format!("{request} is no request")),
            };
            parsed.push((number(wr_id)?, self.pieces(pieces)?, operation, *flags));
        }
        let source = |pieces, flags: &str| {
            if flags.contains('i') { Source::Inline(pieces) } else { Source::Memory(pieces) }
        };
        let requests: Vec<_> = parsed
            .iter()
            .map(|(wr_id, pieces, operation, flags)| Request {
                wr_id: *wr_id,
                operation: *operation,
                source: source(pieces, flags),
                signaled: flags.contains('s'),
            })
            .collect();
        let refused = |error: usmc_verbs::PostError| {
            format!("{} posted, errno {}", error.posted, error.errno)
        };
        self.qp.post_send(&requests).map_err(refused)
    }

    fn pieces(&self, text: &str) -> Result<Vec<Piece<'_>>, String> {
        let piece = |text: &str| {
            let (offset, len) = text.split_once('+').ok_or("a piece is OFFSET+LEN")?;
            let piece = self.memory.piece(number(offset)? as usize, number(len)? as u32);
            piece.ok_or_else(|| "the memory is too small".to_owned())
        };
        text.split('/').map(piece).collect()
    }

    fn queue(&self, which: &str) -> Result<&Cq, String> {
        match which {
            "sends" => Ok(&self.queues[0]),
            "receives" => Ok(&self.queues[1]),
            _ => Err("there are sends and receives".into()),
        }
    }

    fn get(&self, offset: usize, len: usize) -> Answer {
        let mut bytes = vec![0; len];
        self.memory.read(offset, &mut bytes).ok_or("a place")?;
        Ok(String::from_utf8_lossy(&bytes).replace('\0', "."))
    }

    /// Waits for completions: arms, polls, sleeps.
    fn completions(&self, which: &str, count: usize) -> Answer {
        let queue = self.queue(which)?;
        let mut found = vec![Completion::default(); count];
        let (mut have, start) = (0, Instant::now());
        while have < count {
            while self.channel.next_event().map_err(text)?.is_some() {}
            queue.arm(false).map_err(text)?;
            let new = queue.poll(&mut found[have..]).map_err(text)?;
            have += new;
            if start.elapsed() > Duration::from_secs(20) {
                return Err(format!("in 20 s only: {}", show(&found[..have])));
            }
            if new == 0 {
                wait(self.channel.as_fd(), 1000);
            }
        }
        Ok(show(&found))
    }
}

fn show(completions: &[Completion]) -> String {
    let one = |it: &Completion| {
        let len = if it.byte_len == 0 { String::new() } else { format!("+{}", it.byte_len) };
        format!("{}:{}{len}", it.wr_id, it.status.name())
    };
    completions.iter().map(one).collect::<Vec<_>>().join(" ")
}

/// Waits until the descriptor is readable, or for so many milliseconds.
fn wait(fd: BorrowedFd<'_>, milliseconds: u64) {
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: One entry.
    unsafe { libc::poll(&raw mut entry, 1, milliseconds as i32) };
}

fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{text} is no number"))
}

fn options(device: &str, rounds: &str, bytes: &str) -> pingpong::Options {
    let number = |text: &str| text.parse().expect("a number");
    pingpong::Options {
        device: real(device),
        gid_index: 1,
        rounds: number(rounds),
        bytes: number(bytes),
    }
}

/// The device that stands for one of the fabric's.
fn real(device: &str) -> String {
    std::env::var(super::REAL).unwrap_or_else(|_| device.into())
}

fn serve(device: &str, rounds: &str, bytes: &str) -> Answer {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    say(&listener.local_addr().map_err(|error| error.to_string())?.to_string());
    pingpong::listen(&listener, &options(device, rounds, bytes)).map_err(|error| error.to_string())
}

fn gids(device: &str) -> Answer {
    let library = Library::open().map_err(text)?;
    let entries = library.device(device).and_then(|device| device.gids()).map_err(text)?;
    let one =
        |it: &usmc_verbs::GidEntry| format!("{}:{}:{:?}:{}", it.index, it.gid, it.kind, it.ifindex);
    let shown: Vec<_> = entries.iter().map(one).collect();
    Ok(format!("{} {}", library.devices().map_err(text)?.join(","), shown.join(" ")))
}
