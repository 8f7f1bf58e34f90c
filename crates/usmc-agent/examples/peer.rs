//! An echo server, or its client, whose bytes go by SMC-R: for tests whose other end is the kernel's AF_SMC, or this program.
//!
//! ```text
//! peer serve ADDRESS PORT COUNT        serves so many connections, one after the other or at a time, and ends
//! peer talk ADDRESS:PORT COUNT BYTES   so many connections, so many bytes over each and back; then says `done`
//! peer turns ADDRESS:PORT COUNT BYTES  the same, one after the other
//! peer all ADDRESS:PORT COUNT BYTES    the same, all of them at a time
//! ```
//!
//! The own address says which RDMA device is used. Both say `smc N` for each connection that leaves TCP, and `tcp REASON`, and end with 1,
//! where one does not.

use std::collections::HashMap;
use std::env;
use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::{SendFlags, send};
use smc_proto::close::Direction;
use smc_proto::handshake::Host;
use smc_proto::ids::{Eid, PeerId};
use smc_proto::list::List;
use smc_proto::wire::clc::{FeatureMask, Hostname, Release};
use usmc_agent::adapter::Adapter;
use usmc_agent::driver::Driver;
use usmc_agent::nic::Adapters;
use usmc_agent::rest::{Rest, Spin};
use usmc_agent::service::{Handed, Service, Ticket};
use usmc_agent::sys::Owner;
use usmc_rdma::nic::DeviceId;
use usmc_rdma::{Config, Event};
use usmc_shm::agent::{Answer, Place, Role};
use usmc_shm::layout::{ACCEPTOR, CLIENT};
use usmc_shm::segment::Segment;
use usmc_shm::span::TxSpan;
use usmc_shm::state::EndState;
use usmc_shm::sync::Ordering::{self, Acquire};
use usmc_verbs::Library;

/// Rings of 64 KiB.
const SHIFT: u32 = 16;
/// "I speak SMC" in the SYN, by the programs of `usmc ebpf load` (crates/usmc/src/handshake/syn_option.rs).
const SOL_SMC: i32 = 286;
const SYN_OPTION: i32 = 1 << 8 | 254;
const SPEAKS: u32 = 2;
/// Handshakes at a time: a kernel answers one after the other, each within six seconds or not at all.
const HANDSHAKES: usize = 8;
/// Nothing moves for so long: something is wrong.
const PATIENCE: Duration = Duration::from_secs(30);

type Failure = Box<dyn std::error::Error>;

/// A connection that is to have an application.
struct Begun {
    /// The application's end of the connection to the agent.
    socket: TcpStream,
    wants: u64,
}

/// A connection's application, which has nothing but its slot and its end of a connection to the agent.
struct Application {
    segment: Segment,
    slot: u32,
    /// `None` once it is closed.
    socket: Option<TcpStream>,
    /// A client's bytes, each as its place says.
    wants: u64,
    sent: u64,
    got: u64,
    /// A server's bytes that are to go back.
    back: Vec<u8>,
    is_shut: bool,
    is_closed: bool,
}

struct Peer {
    service: Service,
    begun: HashMap<Ticket, Begun>,
    segments: HashMap<u64, Segment>,
    applications: Vec<Application>,
    is_server: bool,
    established: usize,
    /// No application does anything before so many are.
    waits_for: usize,
    over: usize,
    moved: Instant,
    sleeps: usize,
}

fn byte_at(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

impl Peer {
    fn new(own: Ipv4Addr, is_server: bool) -> Result<Peer, Failure> {
        let library = Library::open()?;
        let adapter = Adapter::open(library, IpAddr::V4(own))?;
        let mut adapters = Adapters::default();
        adapters.add(adapter.ok_or("no RDMA device has this address")?);
        let mut ueids = List::new();
        let ueid = Eid::user(&env::var("USMC_UEID")?).map_err(|_| "USMC_UEID is no EID")?;
        ueids.push(ueid).map_err(|_| "room")?;
        let id = u64::from(std::process::id()) << 16 | 0x0200_0000_0000_0001;
        let host = Host {
            peer_id: PeerId(id.to_be_bytes()),
            hostname: Hostname::new("usmc"),
            release: Release::V2_1,
            features: FeatureMask(0),
            max_conns: 255,
            max_links: 1,
            ueids,
            seid: None,
            smcd_v2: false,
        };
        let rest = Rest::new(Spin::default())?;
        let (devices, first_token) = (vec![DeviceId(0)], std::process::id());
        let config = Config { host, devices, first_token, test_interval: Duration::from_secs(30) };
        Ok(Peer {
            service: Service::new(Driver::new(config, adapters)?, rest, SHIFT)?,
            begun: HashMap::new(),
            segments: HashMap::new(),
            applications: Vec::new(),
            is_server,
            established: 0,
            waits_for: 0,
            over: 0,
            moved: Instant::now(),
            sleeps: 0,
        })
    }

    fn begin(&mut self, tcp: TcpStream, wants: u64) -> Result<(), Failure> {
        if outcome(tcp.as_raw_fd())? != SPEAKS {
            println!("tcp: the peer does not say SMC");
            return Err("a connection stays TCP".into());
        }
        let role = if self.is_server { Role::Server } else { Role::Client };
        let inside = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let deputy = TcpStream::connect(inside.local_addr()?)?.into();
        let socket = inside.accept()?.0;
        let owner = Owner::own();
        let ticket = self.service.hand_over(Handed { role, tcp, deputy, owner });
        self.begun.insert(ticket, Begun { socket, wants });
        Ok(())
    }

    /// An answer has come. The application writes at once; that its connection is SMC an event says.
    fn take(&mut self, ticket: Ticket, answer: Answer) -> Result<(), Failure> {
        let begun = self.begun.remove(&ticket).ok_or("an answer without a question")?;
        let Place { segment: id, slot, .. } = match answer {
            Answer::Ring(place) => place,
            Answer::Tcp { code } => {
                println!("tcp {code:#x}");
                return Err("a connection stays TCP".into());
            }
            Answer::Shown | Answer::Proposal(_) | Answer::Ear(_) | Answer::RoomEar => {
                return Err("an answer to another question".into());
            }
        };
        let segment = match self.segments.get(&id) {
            Some(segment) => *segment,
            None => map(self.service.memfd(ticket).ok_or("a memfd")?)?,
        };
        self.segments.insert(id, segment);
        let known = segment.slot(slot).map_err(|_| "a slot")?;
        known.end[ACCEPTOR].refs.store(1, Ordering::Relaxed);
        TxSpan::new(known, ACCEPTOR).try_switch(|| Some(0)).map_err(|_| "a boundary")?;
        self.applications.push(Application {
            segment,
            slot,
            socket: Some(begun.socket),
            wants: begun.wants,
            sent: 0,
            got: 0,
            back: Vec::new(),
            is_shut: false,
            is_closed: false,
        });
        self.service.is_answered(ticket);
        Ok(())
    }

    /// A look at everything, and the rest behind it. `listener`: what wakes it, too.
    fn turn(&mut self, listener: Option<&TcpListener>) -> Result<(), Failure> {
        let before = self.moved;
        if self.service.turn() {
            self.moved = Instant::now();
        }
        while let Some((ticket, answer)) = self.service.poll_answer() {
            self.moved = Instant::now();
            self.take(ticket, answer)?;
        }
        while let Some(event) = self.service.poll_event() {
            self.handle(event)?;
        }
        if self.established >= self.waits_for {
            for at in 0..self.applications.len() {
                self.act(at)?;
            }
            self.applications.retain(|application| !application.is_closed);
        }
        if self.moved.elapsed() > PATIENCE {
            return Err("nothing moves".into());
        }
        let others: Vec<_> = listener.map(AsFd::as_fd).into_iter().collect();
        let slept = self.service.rest_behind(self.moved != before, &others, PATIENCE)?;
        self.sleeps += usize::from(slept);
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Established { conn, first_contact, .. } => {
                self.established += 1;
                println!(
                    "smc {}{}",
                    conn.token(),
                    if first_contact { " first contact" } else { "" }
                );
            }
            Event::Ending { conn, reading, .. } => {
                if !matches!(reading, Direction::Open | Direction::Ended) {
                    println!("aborted {}: {reading:?}", conn.token());
                }
            }
            Event::Over { .. } => self.over += 1,
            Event::Fallback { reason, peer_reason, .. } => {
                println!("tcp {reason:?} {peer_reason:?}");
                return Err("a connection stays TCP".into());
            }
            Event::Failed { fault, .. } => return Err(format!("failed: {fault:?}").into()),
            Event::Misbehaved { how, .. } => {
                return Err(format!("the peer misbehaves: {how:?}").into());
            }
            Event::Data { .. }
            | Event::Room { .. }
            | Event::Withdrawn { .. }
            | Event::GroupUp { .. } => {}
            Event::GroupDown { .. } => println!("group down"),
        }
        Ok(())
    }

    /// What the application of a connection does next.
    fn act(&mut self, at: usize) -> Result<(), Failure> {
        let Some(application) = self.applications.get_mut(at) else { return Ok(()) };
        if application.is_closed {
            return Ok(());
        }
        let (segment, slot) = (application.segment, application.slot);
        let known = segment.slot(slot).map_err(|_| "a slot")?;
        let rx = segment.ring(slot, CLIENT).map_err(|_| "a slot")?;
        let tx = segment.ring(slot, ACCEPTOR).map_err(|_| "a slot")?;
        let mut any = false;
        // Before the bytes: those of an ended direction are all there.
        let has_ended = rx.dir().producer.flags(Acquire).end() != EndState::Open;
        let data = rx.data().map_err(|_| "a ring")?;
        if data.len > 0 && application.back.is_empty() {
            let mut bytes = vec![0; data.len];
            // SAFETY: as many bytes as are there.
            unsafe { rx.copy_out(data.cons, data.place, bytes.as_mut_ptr(), bytes.len()) };
            rx.consume(data.cons + data.len as u64);
            if self.is_server {
                application.back = bytes;
            } else if let Some((at, _)) =
                (application.got..).zip(&bytes).find(|(at, byte)| **byte != byte_at(*at))
            {
                return Err(format!("byte {at} is another").into());
            }
            application.got += data.len as u64;
            any = true;
        }
        let chunk: Vec<u8> = match self.is_server {
            true => mem::take(&mut application.back),
            false => {
                let n = (application.wants - application.sent).min(30_011);
                (application.sent..application.sent + n).map(byte_at).collect()
            }
        };
        if !chunk.is_empty() {
            let room = tx.room(chunk.len()).map_err(|_| "a ring")?;
            let n = chunk.len().min(room.free);
            // SAFETY: within the room.
            unsafe { tx.copy_in(room.prod, room.place, chunk.as_ptr(), n) };
            tx.publish(room.prod + n as u64);
            application.sent += n as u64;
            if self.is_server {
                application.back = chunk.get(n..).unwrap_or_default().to_vec();
            }
            any |= n > 0;
        }
        let is_done = match self.is_server {
            true => has_ended && !rx.has_data() && application.back.is_empty(),
            false => application.sent == application.wants,
        };
        if is_done && !application.is_shut {
            application.is_shut = true;
            let _ = tx.dir().producer.shut();
            let socket = application.socket.as_ref().ok_or("a socket")?;
            // The agent may have reset it.
            let _ = socket.shutdown(Shutdown::Write);
            any = true;
        }
        if application.is_shut && has_ended && !rx.has_data() {
            application.is_closed = true;
            let (got, wants) = (application.got, application.wants);
            if !self.is_server && got != wants {
                return Err(format!("{got} of {wants} bytes came back").into());
            }
            let _ = tx.dir().producer.close(false);
            application.socket = None;
            known.end[ACCEPTOR].refs.store(0, Ordering::Release);
            any = true;
        } else if any && (tx.has_rx_sleepers() || rx.has_tx_sleepers()) {
            let socket = application.socket.as_ref().ok_or("a socket")?;
            let take = || tx.take_rx_sleepers(false) | rx.take_tx_sleepers(false);
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let _ = TxSpan::new(known, ACCEPTOR).ring(take, || send(socket, &[0], flags).is_ok());
        }
        if any {
            self.moved = Instant::now();
        }
        Ok(())
    }
}

/// An application's own view of a segment.
fn map(memfd: BorrowedFd<'_>) -> Result<Segment, Failure> {
    let len = rustix::fs::fstat(memfd)?.st_size as usize;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping, which stays until the program ends.
    let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, memfd, 0) }?;
    // SAFETY: all of it, and it is sealed.
    unsafe { Segment::open(base.cast(), len, len) }.map_err(|_| "a segment".into())
}

/// What came of the option.
fn outcome(fd: i32) -> Result<u32, Failure> {
    let (mut value, mut len) = (0_u32, size_of::<u32>() as u32);
    let at = (&raw mut value).cast();
    // SAFETY: a place of that length.
    if unsafe { libc::getsockopt(fd, SOL_SMC, SYN_OPTION, at, &raw mut len) } != 0 {
        return Err("the programs of `usmc ebpf load` are not there".into());
    }
    Ok(value)
}

/// A socket that says it.
fn socket() -> Result<i32, Failure> {
    let one = 1_u32;
    // SAFETY: no pointers but to a local of that length.
    unsafe {
        let fd = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if libc::setsockopt(fd, SOL_SMC, SYN_OPTION, (&raw const one).cast(), 4) != 0 {
            return Err("the programs of `usmc ebpf load` are not there".into());
        }
        Ok(fd)
    }
}

fn name(at: SocketAddrV4) -> libc::sockaddr_in {
    // SAFETY: all-zero is a value of it.
    let mut name: libc::sockaddr_in = unsafe { mem::zeroed() };
    name.sin_family = libc::AF_INET as u16;
    name.sin_port = at.port().to_be();
    name.sin_addr.s_addr = u32::from(*at.ip()).to_be();
    name
}

fn connect(at: SocketAddrV4) -> Result<TcpStream, Failure> {
    let (fd, name) = (socket()?, name(at));
    // SAFETY: a name of that length; the descriptor is this function's.
    unsafe {
        let done = libc::connect(fd, (&raw const name).cast(), size_of_val(&name) as u32);
        let error = io::Error::last_os_error();
        let stream = TcpStream::from_raw_fd(fd);
        if done == 0 { Ok(stream) } else { Err(error.into()) }
    }
}

fn listen(at: SocketAddrV4) -> Result<TcpListener, Failure> {
    let (fd, name, one) = (socket()?, name(at), 1_u32);
    // SAFETY: likewise.
    unsafe {
        let reuse = (&raw const one).cast();
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, reuse, 4);
        let bound = libc::bind(fd, (&raw const name).cast(), size_of_val(&name) as u32);
        let done = bound == 0 && libc::listen(fd, 128) == 0;
        let error = io::Error::last_os_error();
        let listener = TcpListener::from_raw_fd(fd);
        if done { Ok(listener) } else { Err(error.into()) }
    }
}

fn serve(own: Ipv4Addr, port: u16, count: usize) -> Result<(), Failure> {
    let mut peer = Peer::new(own, true)?;
    let listener = listen(SocketAddrV4::new(own, port))?;
    listener.set_nonblocking(true)?;
    println!("ready");
    while peer.over < count {
        let mut is_idle = peer.applications.is_empty();
        if let Ok((tcp, _)) = listener.accept() {
            peer.begin(tcp, 0)?;
            is_idle = true;
        }
        // It waits for its first client as long as that takes.
        if is_idle && peer.moved.elapsed() > PATIENCE / 2 {
            peer.moved = Instant::now();
        }
        peer.turn(Some(&listener))?;
    }
    println!("slept {} times", peer.sleeps);
    Ok(())
}

fn talk(at: SocketAddrV4, count: usize, bytes: u64, how: &str) -> Result<(), Failure> {
    let first = connect(at)?;
    let SocketAddr::V4(own) = first.local_addr()? else { return Err("IPv4 only".into()) };
    let mut peer = Peer::new(*own.ip(), false)?;
    peer.waits_for = if how == "all" { count } else { 0 };
    peer.begin(first, bytes)?;
    for begun in 1..count {
        while (how == "turns" && peer.over < begun) || begun - peer.established >= HANDSHAKES {
            peer.turn(None)?;
        }
        peer.begin(connect(at)?, bytes)?;
    }
    while peer.over < count {
        peer.turn(None)?;
    }
    println!("slept {} times", peer.sleeps);
    Ok(())
}

fn run() -> Result<(), Failure> {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["serve", address, port, count] => serve(address.parse()?, port.parse()?, count.parse()?)?,
        [how @ ("talk" | "turns" | "all"), at, count, bytes] => {
            talk(at.parse()?, count.parse()?, bytes.parse()?, how)?;
        }
        _ => return Err("how it is used stands at the head of its source".into()),
    }
    println!("done");
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
