//! Ping-pong by WRITE and SEND between two processes, as SMC-R does it: each message is written into the peer's memory, and a SEND behind it
//! says so. Each checks the other's bytes.
//!
//!     pingpong DEVICE GID-INDEX listen 0.0.0.0:4711 [ROUNDS [BYTES]]
//!     pingpong DEVICE GID-INDEX connect 10.9.0.2:4711 [ROUNDS [BYTES]]
//!
//! Both need the same ROUNDS and BYTES. By the TCP connection they exchange what their queue pairs need to know of each other. Works on any
//! RoCE device, also one of rdma_rxe, and on the fake library of the tests.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use usmc_verbs::{
    Access, Caps, Channel, Completion, Cq, Gid, Init, Library, Mr, Mtu, Operation, Path, Pd, Qp,
    Receive, Request, Rtr, Rts, Source, Status,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Bytes of the message behind the data: as many as a CDC message has.
const NOTICE: u32 = 44;

/// Receives that are posted: the kernel's SMC-R has as many.
const RECEIVES: u64 = 48;

/// What both sides agree on.
#[derive(Clone)]
pub struct Options {
    /// The name of the device.
    pub device: String,
    /// The place of the own address in the table of GIDs.
    pub gid_index: u8,
    /// Messages in each direction.
    pub rounds: u32,
    /// Bytes of a message.
    pub bytes: u32,
}

/// What the peer has to know.
struct Facts {
    qp_num: u32,
    psn: u32,
    gid: Gid,
    mtu: Mtu,
    address: u64,
    rkey: u32,
}

fn main() -> ExitCode {
    match run() {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("pingpong: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<String> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [device, gid_index, role, address, rest @ ..] = arguments.as_slice() else {
        return Err(
            "usage: pingpong DEVICE GID-INDEX listen|connect ADDRESS:PORT [ROUNDS [BYTES]]".into(),
        );
    };
    let number = |at: usize, default: u32| rest.get(at).map_or(Ok(default), |text| text.parse());
    let options = Options {
        device: device.clone(),
        gid_index: gid_index.parse()?,
        rounds: number(0, 1000)?,
        bytes: number(1, 14)?,
    };
    match role.as_str() {
        "listen" => listen(&TcpListener::bind(address)?, &options),
        "connect" => connect(address, &options),
        _ => Err("the third argument is listen or connect".into()),
    }
}

/// Waits for one peer and answers its messages.
pub fn listen(listener: &TcpListener, options: &Options) -> Outcome<String> {
    let (stream, _) = listener.accept()?;
    let mut end = End::new(options)?;
    end.meet(stream)?;
    for round in 0..options.rounds {
        end.take(round, b'c')?;
        end.put(round, b's')?;
    }
    end.finish()?;
    Ok(format!("{} messages of {} bytes each way", options.rounds, options.bytes))
}

/// Sends messages to a peer that listens.
pub fn connect(address: &str, options: &Options) -> Outcome<String> {
    let mut end = End::new(options)?;
    end.meet(TcpStream::connect(address)?)?;
    let start = Instant::now();
    for round in 0..options.rounds {
        end.put(round, b'c')?;
        end.take(round, b's')?;
    }
    let time = start.elapsed();
    end.finish()?;
    let one = time.as_secs_f64() * 1e6 / f64::from(options.rounds.max(1));
    Ok(format!("{} messages of {} bytes each way, {one:.2} µs each", options.rounds, options.bytes))
}

/// One side. Fields are dropped from the first on, though any order would do.
struct End {
    options: Options,
    qp: Qp,
    channel: Channel,
    sent: Cq,
    received: Cq,
    /// The first half is sent from, the second half is where the peer writes; then a place for each receive.
    memory: Mr,
    own: Facts,
    peer: Option<(Facts, TcpStream)>,
}

impl End {
    fn new(options: &Options) -> Outcome<End> {
        let device = Library::open()?.device(&options.device)?;
        let gids = device.gids()?;
        let Some(gid) = gids.iter().find(|entry| entry.index == u32::from(options.gid_index))
        else {
            return Err(
                format!("no GID {} is in use; there are {gids:?}", options.gid_index).into()
            );
        };
        let domain = Pd::new(&device)?;
        let channel = Channel::new(&device)?;
        let sent = Cq::new(&device, 256, None, 0)?;
        let received = Cq::new(&device, 256, Some(&channel), 0)?;
        let caps = Caps {
            send_requests: 64,
            receives: 64,
            send_pieces: 2,
            receive_pieces: 1,
            inline_bytes: 64,
        };
        let qp = Qp::new(&domain, &sent, &received, caps)?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let len = 2 * options.bytes as usize + RECEIVES as usize * NOTICE as usize;
        let memory = Mr::new(&domain, len, access)?;
        qp.to_init(&Init { port: gid.port, pkey_index: 0, access })?;
        let own = Facts {
            qp_num: qp.number(),
            psn: std::process::id() & 0xff_ffff,
            gid: gid.gid,
            mtu: device.port(gid.port)?.mtu,
            address: memory.address() + u64::from(options.bytes),
            rkey: memory.rkey(),
        };
        let end =
            End { options: options.clone(), qp, channel, sent, received, memory, own, peer: None };
        for number in 0..RECEIVES {
            end.post_receive(number)?;
        }
        Ok(end)
    }

    /// Exchanges facts, then connects the queue pairs. Both are ready when each has told so.
    fn meet(&mut self, mut stream: TcpStream) -> Outcome<()> {
        let own = &self.own;
        let numbers =
            [own.qp_num, own.psn, own.mtu as u32, own.rkey].map(|number| number.to_string());
        writeln!(stream, "{} {} {}", own.gid, own.address, numbers.join(" "))?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let peer = facts(&line).ok_or("the peer says nothing that is known here")?;
        let path = Path {
            port: 1,
            gid_index: self.options.gid_index,
            peer: peer.gid,
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
            service_level: 0,
        };
        self.qp.to_rtr(&Rtr {
            path,
            mtu: own.mtu.min(peer.mtu),
            peer_qp_num: peer.qp_num,
            peer_psn: peer.psn,
            max_peer_reads: 1,
            min_rnr_timer: 5,
        })?;
        self.qp.to_rts(&Rts {
            psn: own.psn,
            timeout: 15,
            retry_count: 7,
            rnr_retry: 7,
            max_reads: 1,
        })?;
        writeln!(stream, "ready")?;
        line.clear();
        reader.read_line(&mut line)?;
        self.peer = Some((peer, stream));
        Ok(())
    }

    /// WRITE and SEND in one chain; only the SEND makes a completion.
    fn put(&self, round: u32, from: u8) -> Outcome<()> {
        let Some((peer, _)) = &self.peer else { return Err("the ends have not met".into()) };
        let bytes = pattern(round, from, self.options.bytes);
        self.memory.write(0, &bytes).ok_or("the memory is too small")?;
        let piece = self.memory.piece(0, self.options.bytes).ok_or("the memory is too small")?;
        let mut notice = [0; NOTICE as usize];
        notice[..4].copy_from_slice(&round.to_be_bytes());
        let is_small = self.options.bytes <= self.qp.caps().inline_bytes;
        let pieces = [piece];
        self.qp.post_send(&[
            Request {
                wr_id: u64::from(round) << 1,
                operation: Operation::Write { address: peer.address, rkey: peer.rkey },
                source: if is_small { Source::Inline(&pieces) } else { Source::Memory(&pieces) },
                signaled: false,
            },
            Request {
                wr_id: u64::from(round) << 1 | 1,
                operation: Operation::Send { solicited: true },
                source: Source::Bytes(&notice),
                signaled: true,
            },
        ])?;
        // The memory is free for the next message.
        self.one(&self.sent).map(|_| ())
    }

    /// Waits for the peer's SEND and looks at what was written before it.
    fn take(&self, round: u32, from: u8) -> Outcome<()> {
        let completion = self.one(&self.received)?;
        let place = self.place(completion.wr_id);
        let mut notice = [0; 4];
        self.memory.read(place, &mut notice).ok_or("the memory is too small")?;
        let mut bytes = vec![0; self.options.bytes as usize];
        self.memory.read(bytes.len(), &mut bytes).ok_or("the memory is too small")?;
        if completion.byte_len != NOTICE || u32::from_be_bytes(notice) != round {
            return Err(format!("in round {round} the notice is {completion:?}, {notice:?}").into());
        }
        if bytes != pattern(round, from, self.options.bytes) {
            return Err(format!("in round {round} the bytes are others").into());
        }
        self.post_receive(completion.wr_id)
    }

    /// The next completion: polled for a while, then waited for by the channel.
    fn one(&self, queue: &Cq) -> Outcome<Completion> {
        let mut completion = [Completion::default()];
        let start = Instant::now();
        let mut is_armed = false;
        while queue.poll(&mut completion)? == 0 {
            if start.elapsed() > Duration::from_secs(20) {
                return Err("no completion in 20 s".into());
            }
            if is_armed && self.channel.next_event()?.is_some() {
                is_armed = false;
            }
            if start.elapsed() > Duration::from_micros(50) && !is_armed {
                self.received.arm(true)?;
                is_armed = true;
            }
            std::thread::yield_now();
        }
        let [completion] = completion;
        if completion.status != Status::SUCCESS {
            return Err(
                format!("request {} has failed: {}", completion.wr_id, completion.status).into()
            );
        }
        Ok(completion)
    }

    fn post_receive(&self, number: u64) -> Outcome<()> {
        let piece =
            self.memory.piece(self.place(number), NOTICE).ok_or("the memory is too small")?;
        Ok(self.qp.post_receive(&[Receive { wr_id: number, piece }])?)
    }

    fn place(&self, number: u64) -> usize {
        2 * self.options.bytes as usize + number as usize * NOTICE as usize
    }

    /// Lets the queue pair go when the peer is done as well: a device that is gone acknowledges nothing.
    fn finish(&mut self) -> Outcome<()> {
        let Some((_, stream)) = &mut self.peer else { return Ok(()) };
        stream.shutdown(std::net::Shutdown::Write)?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        Ok(())
    }
}

fn facts(line: &str) -> Option<Facts> {
    let words: Vec<_> = line.split_whitespace().collect();
    let [gid, address, qp_num, psn, mtu, rkey] = words.as_slice() else { return None };
    Some(Facts {
        gid: Gid(gid.parse::<std::net::Ipv6Addr>().ok()?.octets()),
        address: address.parse().ok()?,
        qp_num: qp_num.parse().ok()?,
        psn: psn.parse().ok()?,
        mtu: Mtu::from_number(mtu.parse().ok()?)?,
        rkey: rkey.parse().ok()?,
    })
}

/// Bytes that no other round and no other side sends.
fn pattern(round: u32, from: u8, len: u32) -> Vec<u8> {
    (0..len).map(|at| (round.wrapping_mul(31).wrapping_add(at * 7) as u8) ^ from).collect()
}
