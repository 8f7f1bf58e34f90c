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

use std::env;
use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use smc_proto::close::Direction;
use smc_proto::handshake::{Circumstances, Host};
use smc_proto::ids::{Eid, PeerId};
use smc_proto::list::List;
use smc_proto::wire::clc::{FeatureMask, Hostname, Release};
use usmc_agent::adapter::Adapter;
use usmc_agent::driver::Driver;
use usmc_agent::nic::Adapters;
use usmc_agent::rest::{Next, Rest, Spin};
use usmc_agent::room::Room;
use usmc_agent::service::{Place, RoomId, Service};
use usmc_rdma::nic::DeviceId;
use usmc_rdma::{Config, Event};
use usmc_shm::state::EndState;
use usmc_shm::sync::Ordering::Acquire;
use usmc_verbs::Library;

/// Rings of 64 KiB.
const SHIFT: u32 = 16;
/// Of a room; there are as many rooms as connections need.
const SLOTS: u32 = 64;
/// "I speak SMC" in the SYN, by the programs of `usmc ebpf load` (crates/usmc/src/handshake/syn_option.rs).
const SOL_SMC: i32 = 286;
const SYN_OPTION: i32 = 1 << 8 | 254;
const SPEAKS: u32 = 2;
/// Handshakes at a time: a kernel answers one after the other, each within six seconds or not at all.
const HANDSHAKES: usize = 8;
/// Nothing moves for so long: something is wrong.
const PATIENCE: Duration = Duration::from_secs(30);

type Failure = Box<dyn std::error::Error>;

/// A connection's application, which has nothing but its slot.
struct Application {
    place: Place,
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
    rooms: Vec<RoomId>,
    applications: Vec<Application>,
    is_server: bool,
    established: usize,
    /// No application does anything before so many are.
    waits_for: usize,
    over: usize,
    moved: Instant,
    rest: Rest,
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
            service: Service::new(Driver::new(config, adapters), &rest)?,
            rooms: Vec::new(),
            applications: Vec::new(),
            is_server,
            established: 0,
            waits_for: 0,
            over: 0,
            moved: Instant::now(),
            rest,
            sleeps: 0,
        })
    }

    fn begin(&mut self, tcp: TcpStream, wants: u64) -> Result<(), Failure> {
        let peer_says_smc = outcome(tcp.as_raw_fd())? == SPEAKS;
        let circumstances = Circumstances { peer_says_smc, ..Circumstances::FINE };
        let has_room = |room: &&RoomId| self.service.room(**room).is_some_and(Room::has_room);
        let room = match self.rooms.iter().find(has_room) {
            Some(room) => *room,
            None => {
                let room = self.service.add_room(SLOTS, SHIFT, &self.rest)?;
                self.rooms.push(room);
                room
            }
        };
        let begun = self.service.begin(room, !self.is_server, tcp, DeviceId(0), circumstances)?;
        self.applications.push(Application {
            place: begun.ok_or("no slot")?,
            wants,
            sent: 0,
            got: 0,
            back: Vec::new(),
            is_shut: false,
            is_closed: false,
        });
        Ok(())
    }

    /// A look at everything, and the rest behind it. `listener`: what wakes it, too.
    fn turn(&mut self, listener: Option<&TcpListener>) -> Result<(), Failure> {
        let before = self.moved;
        // TCP that is given back is closed: its connection is over.
        let mut events = Vec::new();
        if self.service.turn(|place, event, _| events.push((place, event))) {
            self.moved = Instant::now();
        }
        for (place, event) in events {
            self.handle(place, event)?;
        }
        if self.established >= self.waits_for {
            for at in 0..self.applications.len() {
                self.act(at)?;
            }
        }
        if self.moved.elapsed() > PATIENCE {
            return Err("nothing moves".into());
        }
        match self.rest.next(self.moved != before) {
            Next::Look => {}
            Next::Arm => self.service.arm()?,
            Next::Sleep => {
                let others: Vec<_> = listener.map(AsFd::as_fd).into_iter().collect();
                self.service.sleep(&self.rest, &others, PATIENCE)?;
                self.sleeps += 1;
            }
        }
        Ok(())
    }

    fn handle(&mut self, place: Option<Place>, event: Event) -> Result<(), Failure> {
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
            Event::Over { .. } => {
                self.applications.retain(|application| Some(application.place) != place);
                self.over += 1;
            }
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
        let Place { room, slot, end } = application.place;
        let segment = self.service.room(room).ok_or("a room")?.segment();
        let rx = segment.ring(slot, end).map_err(|_| "a slot")?;
        let tx = segment.ring(slot, 1 - end).map_err(|_| "a slot")?;
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
            any = true;
        }
        if application.is_shut && has_ended && !rx.has_data() {
            application.is_closed = true;
            let (got, wants) = (application.got, application.wants);
            if !self.is_server && got != wants {
                return Err(format!("{got} of {wants} bytes came back").into());
            }
            let _ = tx.dir().producer.close(false);
            any = true;
        }
        if any {
            self.moved = Instant::now();
            // The agent is this very thread, and awake.
            let _ = segment.header().news.tell(slot);
        }
        Ok(())
    }
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
