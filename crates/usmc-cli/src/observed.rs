//! Reading a process' `usmc-conn` file (usmc/src/observe.rs) for `usmc ss` and `usmc stats`.
//!
//! Every byte of it is hostile. The file is read with pread(2), never mapped, so that shrinking it under
//! us means a short read and not SIGBUS; each word is copied out once and range-checked; no count taken
//! from it decides how much is read or kept beyond [`MAX_RECORDS`].

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{Ordering, fence};

use smc_proto::decline::DeclineCode;
use usmc::observe::{
    BUFFERS, CLIENT_END, DEVICE_SHIFT, Fallback, Header, InRegion as RawInRegion, MAGIC, Mode,
    PARTS, PLACES, REASONS, RECORDS_OFFSET, Record, State, TOTALS_OFFSET, Totals as RawTotals,
    VERSION, WAS_SMCD,
};
use usmc::reason::Reason;
use usmc::syn_option::Outcome;

const RECORD: usize = size_of::<Record>();
/// Records fetched by one pread(2).
const CHUNK: usize = 512;
/// Records looked at in one file: a million sockets, 128 MiB.
const MAX_RECORDS: usize = 1 << 20;
/// Further tries for a record that changes while we read it.
const MAX_TRIES: usize = 64;
/// Further tries for all records of one file.
const MAX_FILE_TRIES: usize = 4096;

/// What a record file is to its reader; it may be another one at each look.
pub trait Source {
    /// Bytes in it.
    ///
    /// # Errors
    /// As fstat(2).
    fn size(&self) -> io::Result<u64>;
    /// As pread(2).
    ///
    /// # Errors
    /// As pread(2).
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize>;
}

impl Source for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        FileExt::read_at(self, buf, at)
    }
}

/// One socket, as its process describes it.
#[derive(Clone, Debug)]
pub struct Socket {
    /// Its number in the process.
    pub fd: u32,
    /// Where it is in its life.
    pub state: State,
    /// What moves its bytes.
    pub mode: Mode,
    /// [`usmc::reason::Reason`], as the process' library numbers it.
    pub reason: u8,
    /// The decline code that goes with [`usmc::reason::Reason::Declined`].
    pub declined: u32,
    /// Own address; IPv4-mapped ones as IPv4.
    pub local: SocketAddr,
    /// The other end's.
    pub peer: SocketAddr,
    /// Bytes sent (not in mode TCP).
    pub tx_bytes: u64,
    /// Bytes received (not in mode TCP).
    pub rx_bytes: u64,
    /// What the send ring's window had in bytes when it last grew or the connection changed; means nothing in mode TCP.
    pub window: u32,
    /// Bytes of each of its rings; `None` in mode TCP, or where its library does not tell.
    pub ring_size: Option<u32>,
    /// What the TCP option came to; by a library that is newer, maybe something unknown.
    pub syn_option: Option<Outcome>,
    /// Which slot of its segment.
    pub slot: u32,
    /// Which record of the file.
    pub index: usize,
    /// The connecting end.
    pub is_client: bool,
    /// Is or was in a ring.
    pub was_smcd: bool,
    /// The identity of the memory that both ends share, 0 in mode TCP.
    pub segment: u64,
    /// The id of the region that its memory is or was in, or was to be in; `None`: it is none's.
    pub region: Option<u128>,
    /// What was counted for it, as `usmc::observe::Totals::closed` orders it.
    pub counters: [u64; 9],
}

impl Socket {
    /// Why the connection is TCP.
    pub fn reason_text(&self) -> String {
        match Reason::from_code(self.reason) {
            Some(Reason::None) => "not decided yet".to_owned(),
            Some(reason @ Reason::Declined) => {
                format!("{}: {}", reason.text(), DeclineCode(self.declined))
            }
            Some(reason) => reason.text().to_owned(),
            None => format!("reason {}, which this version of usmc does not know", self.reason),
        }
    }
}

/// What a process has counted for connections that are closed, and as a whole: `usmc::observe::Totals`.
#[derive(Clone, Debug)]
pub struct Totals {
    /// As [`Socket::counters`].
    pub closed: [u64; 9],
    /// Connections that were in a ring, by role: accepting, connecting.
    pub smcd: [u64; 2],
    /// Those that were not, by role and reason.
    pub fallback: [[u64; REASONS]; 2],
    /// Sleeps over several connections.
    pub set_sleeps: u64,
    /// Spins that made such sleeps unnecessary.
    pub set_spins: u64,
    /// Rings by size.
    pub buffers: [u64; BUFFERS],
    /// Slots that were used before.
    pub reused: u64,
    /// TCP_CORK.
    pub cork: u64,
    /// TCP_NODELAY.
    pub nodelay: u64,
    /// sendfile(2).
    pub sendpage: u64,
    /// splice(2).
    pub splice: u64,
    /// MSG_OOB.
    pub urgent: u64,
    /// Of all that, the part of each region, in the order of [`Reading::regions`].
    pub regions: [InRegion; PLACES],
}

/// What a process has counted for connections of a region that are closed: `usmc::observe::InRegion`.
#[derive(Clone, Debug)]
pub struct InRegion {
    /// Sent, received.
    pub bytes: [u64; 2],
    /// As [`Totals::smcd`].
    pub smcd: [u64; 2],
    /// As [`Totals::fallback`].
    pub fallback: [[u64; REASONS]; 2],
}

impl Default for Totals {
    fn default() -> Totals {
        Totals::decode(&[0; size_of::<RawTotals>()])
    }
}

impl Totals {
    fn decode(bytes: &[u8; size_of::<RawTotals>()]) -> Totals {
        let word = |at: usize| u64_at(bytes, at);
        let several = |at: usize, i: usize| word(at + 8 * i);
        let fallback = |role: usize, reason: usize| {
            let at = offset_of!(RawTotals, fallback) + 8 * (role * REASONS + reason);
            (0..PARTS)
                .fold(0, |sum: u64, part| sum.wrapping_add(word(at + part * size_of::<Fallback>())))
        };
        Totals {
            closed: std::array::from_fn(|i| several(offset_of!(RawTotals, closed), i)),
            smcd: std::array::from_fn(|i| several(offset_of!(RawTotals, smcd), i)),
            fallback: std::array::from_fn(|role| {
                std::array::from_fn(|reason| fallback(role, reason))
            }),
            set_sleeps: word(offset_of!(RawTotals, set_sleeps)),
            set_spins: word(offset_of!(RawTotals, set_spins)),
            buffers: std::array::from_fn(|i| several(offset_of!(RawTotals, buffers), i)),
            reused: word(offset_of!(RawTotals, reused)),
            cork: word(offset_of!(RawTotals, cork)),
            nodelay: word(offset_of!(RawTotals, nodelay)),
            sendpage: word(offset_of!(RawTotals, sendpage)),
            splice: word(offset_of!(RawTotals, splice)),
            urgent: word(offset_of!(RawTotals, urgent)),
            regions: std::array::from_fn(|i| {
                let at = offset_of!(RawTotals, regions) + i * size_of::<RawInRegion>();
                let fallback = at + offset_of!(RawInRegion, fallback);
                InRegion {
                    bytes: std::array::from_fn(|n| several(at + offset_of!(RawInRegion, bytes), n)),
                    smcd: std::array::from_fn(|n| several(at + offset_of!(RawInRegion, smcd), n)),
                    fallback: std::array::from_fn(|role| {
                        std::array::from_fn(|reason| several(fallback, role * REASONS + reason))
                    }),
                }
            }),
        }
    }
}

/// What a file told.
#[derive(Default, Debug)]
pub struct Reading {
    /// Sockets in it.
    pub sockets: Vec<Socket>,
    /// What the process counted besides.
    pub totals: Totals,
    /// Records that kept changing.
    pub unsteady: usize,
    /// Records that no correct library writes.
    pub senseless: usize,
    /// The ids of the process' regions; 0 = none.
    pub regions: [u128; PLACES],
    tries: usize,
}

/// Why a file was not read.
#[derive(PartialEq, Eq, Debug)]
pub enum Refusal {
    /// No such file as a library of any version makes.
    Foreign,
    /// A library of another version made it.
    Version(u32),
    /// Its process has not finished making it.
    Unfinished,
    /// pread(2) failed.
    Unreadable(io::ErrorKind),
}

impl From<io::Error> for Refusal {
    fn from(e: io::Error) -> Refusal {
        Refusal::Unreadable(e.kind())
    }
}

/// The process that wrote the file, by its own account, in its own pid namespace.
pub fn claimed_pid(file: &File) -> Option<u32> {
    let mut header = [0; size_of::<Header>()];
    file.read_exact_at(&mut header, 0).ok()?;
    Some(u32_at(&header, offset_of!(Header, pid)))
}

/// Reads all records.
///
/// # Errors
/// When the file is not one of ours, or of another version.
pub fn read(file: &impl Source) -> Result<Reading, Refusal> {
    let size = file.size()?;
    let header = read_header(file)?;
    let room = size.saturating_sub(RECORDS_OFFSET as u64) / RECORD as u64;
    let used = u32_at(&header, offset_of!(Header, high_water)) as u64;
    let count = used.min(room).min(MAX_RECORDS as u64) as usize;

    let mut totals = [0; size_of::<RawTotals>()];
    read_up_to(file, &mut totals, TOTALS_OFFSET as u64)?;
    let regions = regions_of(&header);
    let mut reading = Reading { totals: Totals::decode(&totals), regions, ..Reading::default() };
    let mut copies = [const { [0u8; CHUNK * RECORD] }; 3];
    let mut first = 0;
    while first < count {
        let wanted = (count - first).min(CHUNK);
        let mut got = wanted;
        for copy in &mut copies {
            let n = read_up_to(file, &mut copy[..got * RECORD], offset(first))?;
            got = n / RECORD;
            fence(Ordering::SeqCst);
        }
        for i in 0..got {
            let [before, record, after] = copies.each_ref().map(|c| &c[i * RECORD..][..RECORD]);
            reading.take(file, first + i, [before, record, after])?;
        }
        if got < wanted {
            break;
        }
        first += got;
    }
    Ok(reading)
}

/// Reads one record, and the ids of the regions ([`Reading::regions`]).
///
/// # Errors
/// As [`read`].
pub fn read_one(
    file: &impl Source,
    index: usize,
) -> Result<(Option<Socket>, [u128; PLACES]), Refusal> {
    let regions = regions_of(&read_header(file)?);
    let mut reading = Reading { regions, ..Reading::default() };
    if index < MAX_RECORDS {
        let mut copies = [[0u8; RECORD]; 3];
        for copy in &mut copies {
            read_up_to(file, copy, offset(index))?;
            fence(Ordering::SeqCst);
        }
        reading.take(file, index, copies.each_ref().map(|copy| &copy[..]))?;
    }
    Ok((reading.sockets.pop(), regions))
}

/// The header of a file of this version.
fn read_header(file: &impl Source) -> Result<[u8; size_of::<Header>()], Refusal> {
    let mut header = [0; size_of::<Header>()];
    if read_up_to(file, &mut header, 0)? < header.len() {
        return Err(Refusal::Foreign);
    }
    match u64_at(&header, offset_of!(Header, magic)) {
        MAGIC => {}
        0 => return Err(Refusal::Unfinished),
        _ => return Err(Refusal::Foreign),
    }
    let version = u32_at(&header, offset_of!(Header, version));
    let record_size = u32_at(&header, offset_of!(Header, record_size));
    if version != VERSION || record_size as usize != RECORD {
        return Err(Refusal::Version(version));
    }
    Ok(header)
}

fn regions_of(header: &[u8; size_of::<Header>()]) -> [u128; PLACES] {
    std::array::from_fn(|i| {
        let half =
            |n: usize| u128::from(u64_at(header, offset_of!(Header, regions) + 16 * i + 8 * n));
        half(0) << 64 | half(1)
    })
}

impl Reading {
    /// Takes the middle of three copies, made one after the other, if the sequence number of the first
    /// is even and still that of the last; else tries again with this record alone.
    fn take(&mut self, file: &impl Source, index: usize, copies: [&[u8]; 3]) -> io::Result<()> {
        if let Some(record) = steady(copies) {
            self.push(index, record);
            return Ok(());
        }
        for _ in 0..MAX_TRIES.min(MAX_FILE_TRIES - self.tries) {
            self.tries += 1;
            let mut again = [[0u8; RECORD]; 3];
            for copy in &mut again {
                if read_up_to(file, copy, offset(index))? < RECORD {
                    return Ok(());
                }
                fence(Ordering::SeqCst);
            }
            if let Some(record) = steady(again.each_ref().map(|c| &c[..])) {
                self.push(index, record);
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.unsteady += 1;
        Ok(())
    }

    fn push(&mut self, index: usize, record: &[u8]) {
        if u32_at(record, offset_of!(Record, seq)) == 0 {
            return;
        }
        match decode(index, record, &self.regions) {
            Some(socket) => self.sockets.push(socket),
            None => self.senseless += 1,
        }
    }
}

fn steady([before, record, after]: [&[u8]; 3]) -> Option<&[u8]> {
    let seq = |r: &[u8]| u32_at(r, offset_of!(Record, seq));
    let same = seq(before) == seq(after) && seq(record) == seq(before);
    (same && seq(before).is_multiple_of(2)).then_some(record)
}

fn decode(index: usize, record: &[u8], regions: &[u128; PLACES]) -> Option<Socket> {
    let [state, mode, reason, family] = u32_at(record, offset_of!(Record, kind)).to_le_bytes();
    let ports = u32_at(record, offset_of!(Record, ports));
    let end =
        |at: usize, port: u32| Some(SocketAddr::new(address(&record[at..], family)?, port as u16));
    let small = |at: usize| u64::from(u32_at(record, at));
    let place = u32_at(record, offset_of!(Record, slot));
    let device = (place >> DEVICE_SHIFT & 7) as usize;
    let mode = mode_of(mode)?;
    let region = device.checked_sub(1).and_then(|i| regions.get(i)).copied();
    let tx_bytes = u64_at(record, offset_of!(Record, tx_bytes));
    let rx_bytes = u64_at(record, offset_of!(Record, rx_bytes));
    Some(Socket {
        fd: u32_at(record, offset_of!(Record, fd)),
        state: state_of(state)?,
        mode,
        reason,
        declined: u64_at(record, offset_of!(Record, segment)) as u32,
        local: end(offset_of!(Record, local), ports)?,
        peer: end(offset_of!(Record, peer), ports >> 16)?,
        tx_bytes,
        rx_bytes,
        window: u32_at(record, offset_of!(Record, window)),
        ring_size: Some(u32_at(record, offset_of!(Record, ring_size)))
            .filter(|size| *size != 0 && mode != Mode::Tcp),
        syn_option: Outcome::from_code((place >> 24) as u8),
        slot: place & 0xffff,
        index,
        is_client: place & CLIENT_END != 0,
        was_smcd: place & WAS_SMCD != 0,
        segment: u64_at(record, offset_of!(Record, segment)),
        region: region.filter(|id| *id != 0),
        counters: [
            tx_bytes,
            rx_bytes,
            u64_at(record, offset_of!(Record, tx_calls)),
            u64_at(record, offset_of!(Record, rx_calls)),
            small(offset_of!(Record, tx_full)),
            small(offset_of!(Record, sleeps)),
            small(offset_of!(Record, spins)),
            small(offset_of!(Record, bells_sent)),
            small(offset_of!(Record, bells_drained)),
        ],
    })
}

fn state_of(code: u8) -> Option<State> {
    [State::Init, State::Listen, State::Active, State::PeerClosed, State::AppClosed]
        .into_iter()
        .find(|s| *s as u8 == code)
}

fn mode_of(code: u8) -> Option<Mode> {
    [Mode::Tcp, Mode::Smcd, Mode::Smcr].into_iter().find(|m| *m as u8 == code)
}

fn address(bytes: &[u8], family: u8) -> Option<IpAddr> {
    match family {
        4 => Some(IpAddr::from(*bytes.first_chunk::<4>()?)),
        6 => Some(Ipv6Addr::from(*bytes.first_chunk::<16>()?).to_canonical()),
        _ => None,
    }
}

fn offset(index: usize) -> u64 {
    (RECORDS_OFFSET + index * RECORD) as u64
}

/// Fills `buf` from `at`; fewer bytes only at the end of the file.
fn read_up_to(file: &impl Source, buf: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(&mut buf[done..], at + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |b| u32::from_ne_bytes(*b))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |b| u64::from_ne_bytes(*b))
}
