//! A process that shows its connections: the reader's side of `usmc::observe::Capture`.
//!
//! The file is read by pread(2), never mapped, and every word of it is hostile. An exclusive flock(2) on it keeps other
//! readers away and tells the process that somebody is there: it goes with us, however we end.

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags, fallocate, flock};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use usmc::observe::{
    ASK, CAPTURE_OFFSET, Capture, EVENT_CARRIER_SHIFT, EVENT_CLIENT, EVENT_DATA, EVENT_END,
    EVENT_OPEN, EVENT_SENT, Event as RawEvent, Header, PLACES, RECORDS_OFFSET, Record, UNPLACED,
};
use usmc::tap::TapControl;

use super::capture::Lost;
use crate::observed::{self, Socket};

/// Bytes taken at once.
const CHUNK: u64 = 4 << 20;
/// Largest ring we believe in.
const MOST: u64 = 1 << 28;
const HEADER: usize = size_of::<RawEvent>();
const TAP: usize = CAPTURE_OFFSET + offset_of!(Capture, tap);

/// What is captured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Filter {
    /// All connections of a process.
    All,
    /// Those accepted at this address (unspecified: any) and port.
    Listener(SocketAddr),
}

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The connection began.
    Open,
    /// Bytes.
    Data,
    /// The direction ended.
    End,
}

/// One event of one process.
#[derive(Clone, Debug)]
pub struct Event {
    /// What.
    pub kind: Kind,
    /// The process is the connecting end.
    pub is_client: bool,
    /// It has sent, not received.
    pub is_sent: bool,
    /// The place of the first byte in its direction's stream, if it is known.
    pub offset: Option<u64>,
    /// CLOCK_REALTIME in nanoseconds.
    pub time_ns: u64,
    /// The process' own end.
    pub local: SocketAddr,
    /// The other one.
    pub peer: SocketAddr,
    /// What carries the bytes, and which of the process' records says more of it.
    pub carrier: Carrier,
    /// Bytes of the stream.
    pub bytes: Vec<u8>,
}

/// What carries bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Carrier {
    /// 0 TCP, 1 memory of the ISM directory, and from 2 on that of the process' regions.
    pub number: u8,
    /// The process' own number for the connection: its record's index and 1 more in the low half, above it the record's use.
    pub connection: u64,
}

/// Which file, whatever its name.
pub type Identity = (u64, u64);

/// The file's identity.
///
/// # Errors
/// As fstat(2).
pub fn identity(file: &File) -> io::Result<Identity> {
    let facts = file.metadata()?;
    Ok((facts.dev(), facts.ino()))
}

/// A process under capture; let go when dropped.
pub struct Attached {
    /// Which process.
    pub pid: u32,
    file: File,
    process: Option<OwnedFd>,
    ring: u64,
    size: u64,
    tail: u64,
    lost_before: Lost,
    since_ns: u64,
}

impl Attached {
    /// Begins to capture process `pid`, whose record file is `file`. Events before `since_ns` are another's.
    ///
    /// # Errors
    /// When the file is not what it should be, or somebody else captures.
    pub fn attach(pid: u32, file: &File, filter: Filter, since_ns: u64) -> Result<Attached> {
        let reading = observed::read(file);
        let reading = match reading {
            Ok(reading) => reading,
            Err(refusal) => bail!("process {pid} shows no readable records ({refusal:?})"),
        };
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty());
        let file = File::from(file.with_context(|| format!("cannot capture process {pid}"))?);
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            bail!("process {pid} is captured by another usmc dump; end that first");
        }
        let ring = u64_at(&file, offset_of!(Header, ring_offset))?;
        let size = u64_at(&file, offset_of!(Header, ring_size))?;
        let room = file.metadata()?.len();
        let fits = size.is_power_of_two()
            && (4096..=MOST).contains(&size)
            && ring >= RECORDS_OFFSET as u64
            && ring.checked_add(size).is_some_and(|end| end <= room);
        ensure!(fits, "process {pid} has no ring to capture by");
        let process = Pid::from_raw(pid.cast_signed())
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        let zero = Lost::default();
        let mut attached =
            Attached { pid, file, process, ring, size, tail: 0, lost_before: zero, since_ns };
        attached.begin(filter)?;
        for socket in reading.sockets {
            let at = RECORDS_OFFSET + socket.index * size_of::<Record>();
            let at = at + offset_of!(Record, captured);
            attached.file.write_all_at(&ASK.to_ne_bytes(), at as u64)?;
        }
        Ok(attached)
    }

    fn begin(&mut self, filter: Filter) -> Result<()> {
        let session = self.word(CAPTURE_OFFSET + offset_of!(Capture, session))?;
        self.lost_before = self.lost_ever()?;
        self.tail = u64_at(&self.file, TAP + offset_of!(TapControl, tail))?;
        if session == 0 {
            // Nobody writes: what is there is an earlier reader's.
            self.tail = self.head()?;
            self.put(TAP + offset_of!(TapControl, tail), &self.tail.to_ne_bytes())?;
        }
        let (port, addr, follow) = match filter {
            Filter::All => (0, [0; 16], 0u32),
            Filter::Listener(at) => {
                let addr = match at.ip() {
                    ip if ip.is_unspecified() => [0; 16],
                    IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                    IpAddr::V6(v6) => v6.octets(),
                };
                (u32::from(at.port()), addr, 1)
            }
        };
        self.put(CAPTURE_OFFSET + offset_of!(Capture, port), &port.to_ne_bytes())?;
        self.put(CAPTURE_OFFSET + offset_of!(Capture, addr), &addr)?;
        self.put(CAPTURE_OFFSET + offset_of!(Capture, follow), &follow.to_ne_bytes())?;
        self.put(CAPTURE_OFFSET + offset_of!(Capture, session), &1u32.to_ne_bytes())
    }

    /// Which file it is.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn identity(&self) -> io::Result<Identity> {
        identity(&self.file)
    }

    /// Takes events that are there; true when there may be more.
    ///
    /// # Errors
    /// When the process has written nonsense: it is of no more use.
    pub fn take(&mut self, mut each: impl FnMut(Event)) -> Result<bool> {
        let there = self.head()?.wrapping_sub(self.tail);
        ensure!(there <= self.size, "process {} wrote nonsense into its capture ring", self.pid);
        if there == 0 {
            return Ok(false);
        }
        let mut bytes = vec![0; there.min(CHUNK) as usize];
        let at = self.tail & (self.size - 1);
        let first = bytes.len().min((self.size - at) as usize);
        self.file.read_exact_at(&mut bytes[..first], self.ring + at)?;
        self.file.read_exact_at(&mut bytes[first..], self.ring)?;
        let mut left = &bytes[..];
        while let Some(header) = left.first_chunk::<HEADER>() {
            let len = u32_in(header, offset_of!(RawEvent, len)) as usize;
            let body = u32_in(header, offset_of!(RawEvent, bytes)) as usize;
            let is_sane = len >= HEADER && len.is_multiple_of(8) && body <= len - HEADER;
            ensure!(is_sane, "process {} wrote nonsense into its capture ring", self.pid);
            let Some((event, rest)) = left.split_at_checked(len) else { break };
            if let Some(event) = decode(header, &event[HEADER..][..body])
                && event.time_ns >= self.since_ns
            {
                each(event);
            }
            left = rest;
        }
        let taken = bytes.len() - left.len();
        ensure!(taken > 0, "process {} wrote nonsense into its capture ring", self.pid);
        self.tail = self.tail.wrapping_add(taken as u64);
        self.put(TAP + offset_of!(TapControl, tail), &self.tail.to_ne_bytes())?;
        Ok(true)
    }

    /// The record of the connection that an event is about, if it still is that, and the ids of the process' regions.
    pub fn record_of(&self, event: &Event) -> Option<(Option<Socket>, [u128; PLACES])> {
        let index = (event.carrier.connection as u32).checked_sub(1)?;
        let (socket, regions) = observed::read_one(&self.file, index as usize).ok()?;
        let is_its = |s: &Socket| (s.local, s.peer) == (event.local, event.peer);
        Some((socket.filter(is_its), regions))
    }

    /// What the process could not show since we are attached.
    ///
    /// # Errors
    /// As pread(2).
    pub fn lost(&self) -> Result<Lost> {
        let ever = self.lost_ever()?;
        let since = |now: u64, before: u64| now.saturating_sub(before);
        Ok(Lost {
            bytes: since(ever.bytes, self.lost_before.bytes),
            events: since(ever.events, self.lost_before.events),
        })
    }

    fn lost_ever(&self) -> Result<Lost> {
        let at = TAP + offset_of!(TapControl, lost);
        Ok(Lost { bytes: u64_at(&self.file, at)?, events: u64_at(&self.file, at + 8)? })
    }

    /// Nothing more is to be shown; what is there can still be taken.
    ///
    /// # Errors
    /// As pwrite(2).
    pub fn stop(&self) -> Result<()> {
        self.put(CAPTURE_OFFSET + offset_of!(Capture, session), &0u32.to_ne_bytes())
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        let Some(process) = &self.process else { return true };
        let mut fds = [PollFd::new(process, PollFlags::IN)];
        poll(&mut fds, Some(&rustix::event::Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// The writer's cursor: two looks that agree are no half of a change.
    fn head(&self) -> Result<u64> {
        let at = TAP + offset_of!(TapControl, head);
        let mut last = u64_at(&self.file, at)?;
        for _ in 0..1000 {
            let now = u64_at(&self.file, at)?;
            if now == last {
                break;
            }
            last = now;
        }
        Ok(last)
    }

    fn word(&self, at: usize) -> Result<u32> {
        let mut bytes = [0; 4];
        self.file.read_exact_at(&mut bytes, at as u64)?;
        Ok(u32::from_ne_bytes(bytes))
    }

    fn put(&self, at: usize, bytes: &[u8]) -> Result<()> {
        Ok(self.file.write_all_at(bytes, at as u64)?)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self.stop();
        // Its memory is given back; what is being written there just now is nobody's any more.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = fallocate(&self.file, hole, self.ring, self.size);
    }
}

fn decode(header: &[u8; HEADER], bytes: &[u8]) -> Option<Event> {
    let word = u32_in(header, offset_of!(RawEvent, kind));
    let kind = match word & 0xff {
        EVENT_DATA => Kind::Data,
        EVENT_OPEN => Kind::Open,
        EVENT_END => Kind::End,
        _ => return None,
    };
    let ports = u32_in(header, offset_of!(RawEvent, ports));
    let addr = |at: usize, port: u32| {
        let octets = header[at..].first_chunk::<16>()?;
        Some(SocketAddr::new(Ipv6Addr::from(*octets).to_canonical(), port as u16))
    };
    let offset = u64_in(header, offset_of!(RawEvent, offset));
    Some(Event {
        kind,
        is_client: word & EVENT_CLIENT != 0,
        is_sent: word & EVENT_SENT != 0,
        offset: (offset != UNPLACED).then_some(offset),
        time_ns: u64_in(header, offset_of!(RawEvent, time_ns)),
        local: addr(offset_of!(RawEvent, local), ports)?,
        peer: addr(offset_of!(RawEvent, peer), ports >> 16)?,
        carrier: Carrier {
            number: (word >> EVENT_CARRIER_SHIFT & 7) as u8,
            connection: u64_in(header, offset_of!(RawEvent, connection)),
        },
        bytes: bytes.to_vec(),
    })
}

fn u32_in(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |b| u32::from_ne_bytes(*b))
}

fn u64_in(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |b| u64::from_ne_bytes(*b))
}

fn u64_at(file: &File, at: usize) -> Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at as u64)?;
    Ok(u64::from_ne_bytes(bytes))
}
