//! A storm: who is there, who is killed or stopped, and what became of the streams.
//!
//! `programs/storm` keeps all of that in a file that its processes map; here it is read and written at the offsets
//! of `storm.h`.

use std::fmt::Write;
use std::fs::{self, File};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::fixture::slowness;
use crate::procfs;

const HEADER: u64 = 4096;
const PROCESS: u64 = 64;
const PROCESSES: u64 = 1 << 17;
const STREAM: u64 = 296;
const STREAMS: u64 = 1 << 18;
const STREAMS_AT: u64 = HEADER + PROCESSES * PROCESS;
const HOLDERS: usize = 12;

/// Roles of processes; [`PROTECTED`] may be added.
pub const ROOT: u64 = 1;
/// Serves connections by itself or by children.
pub const WORKER: u64 = 2;
/// Makes connections.
pub const CLIENT: u64 = 3;
/// Has one connection of somebody else's.
pub const CHILD: u64 = 4;
/// Lives through it all.
pub const PROTECTED: u64 = 16;

/// What the harness counts or asks for, by its place in the header.
#[derive(Clone, Copy)]
pub enum Header {
    /// Everybody ends after the stream in hand.
    Stop = 0,
    /// Nobody begins a stream.
    Pause = 1,
    /// Numbers given out.
    Processes = 2,
    /// Likewise.
    Streams = 3,
    /// Forks of a process with connections.
    Forks = 4,
    /// Execs of one.
    Execs = 5,
    /// Of these, refused with EBUSY.
    Refused = 6,
    /// Sends that left more unread than a ring holds without its far part.
    Full = 7,
}

/// The shared file.
pub struct Table {
    file: File,
    path: PathBuf,
}

impl Table {
    /// An empty one.
    ///
    /// # Panics
    /// Without room.
    pub fn create(path: &Path, seed: u64) -> Table {
        let mut options = File::options();
        let file =
            options.read(true).write(true).create_new(true).open(path).expect("our own file");
        file.set_len(STREAMS_AT + STREAMS * STREAM).expect("a sparse file");
        let table = Table { file, path: path.to_owned() };
        table.set(STREAMS_AT, seed);
        table
    }

    fn word(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, at).expect("the table");
        u64::from_ne_bytes(bytes)
    }

    fn set(&self, at: u64, value: u64) {
        self.file.write_all_at(&value.to_ne_bytes(), at).expect("the table");
    }

    /// A field of the header.
    pub fn get(&self, field: Header) -> u64 {
        self.word(field as u64 * 8)
    }

    /// Asks for something.
    pub fn put(&self, field: Header, value: u64) {
        self.set(field as u64 * 8, value);
    }

    /// The process of a number; `None` before it has begun.
    fn process(&self, number: u64) -> Option<Entry> {
        let mut bytes = [0; PROCESS as usize];
        self.file.read_exact_at(&mut bytes, HEADER + number * PROCESS).expect("the table");
        let word = |i: usize| u64::from_ne_bytes(bytes[i * 8..][..8].try_into().expect("8 bytes"));
        let pid = i32::try_from(word(0)).expect("a pid");
        (pid != 0).then_some(Entry {
            pid,
            role: word(1),
            killed: word(2) != 0,
            ended: word(3) != 0,
            busy: word(4),
            steps: word(5),
        })
    }

    /// Whether the process of a number is still to come, with a stream. Where who was about to make it was killed it may
    /// never; a stream that it got is excused by its maker then.
    fn is_awaited(&self, number: u64) -> bool {
        let maker = self.word(HEADER + number * PROCESS + 48);
        maker != 0 && self.process(maker).is_none_or(|maker| !maker.killed)
    }

    fn mark_killed(&self, number: u64) {
        self.set(HEADER + number * PROCESS + 16, 1);
    }

    /// What its processes wrote to standard error.
    pub fn errors(&self) -> String {
        fs::read_to_string(self.path.with_extension("errors")).unwrap_or_default()
    }

    /// What is wrong with a stream that nobody works on any more; whether it was whole.
    ///
    /// # Errors
    /// A description.
    pub fn judge(&self, number: u64) -> Result<bool, String> {
        let mut bytes = [0; STREAM as usize];
        self.file.read_exact_at(&mut bytes, STREAMS_AT + number * STREAM).expect("the table");
        let word = |i: usize| u64::from_ne_bytes(bytes[i * 8..][..8].try_into().expect("8 bytes"));
        let count = (word(3) as usize).min(HOLDERS);
        let holders: Vec<u32> = (0..count)
            .map(|i| u32::from_ne_bytes(bytes[32 + i * 4..][..4].try_into().expect("4 bytes")))
            .filter(|&h| h != 0)
            .collect();
        let outcomes = [word(10), word(11)];
        // Both have sent and received everything, and found the other's hash.
        if outcomes == [1, 1] {
            return Ok(true);
        }
        let was_killed =
            |h: &u32| self.process(u64::from(h & 0x7fff_ffff)).is_none_or(|process| process.killed);
        let heard = holders.iter().any(|h| h >> 31 != 0);
        // A connection that no server has read from ends with the listener.
        if holders.iter().any(was_killed) || (!heard && outcomes[0] != 1) {
            return Ok(false);
        }
        // An exec that could not take it along, as documented.
        if word(36) != 0 && !crate::is_plain() {
            return Ok(false);
        }
        let mut text = format!("stream {number} of server {}: outcomes {outcomes:?}", word(2));
        let _ = write!(text, ", holders {holders:x?}, window {}", word(1));
        let _ = write!(text, ", ended at line and errno {} and {}", word(14), word(15));
        for way in 0..2 {
            let at = 16 + way * 7;
            let _ = write!(
                text,
                "; {} bytes, {} sent, {} received",
                word(at),
                word(at + 1),
                word(at + 4)
            );
        }
        let half = |i: usize| u32::from_ne_bytes(bytes[i * 4..][..4].try_into().expect("4 bytes"));
        let plans: Vec<(u32, u32)> = (0..4).map(|i| (half(60 + i * 2), half(61 + i * 2))).collect();
        let planned = [word(34), word(35)];
        let _ = write!(text, "; plans {plans:?}, done {planned:?}");
        Err(text)
    }
}

#[derive(Clone, Copy)]
struct Entry {
    pid: i32,
    role: u64,
    killed: bool,
    ended: bool,
    busy: u64,
    steps: u64,
}

/// A process that has begun and not ended, as far as is known.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// In the table.
    pub number: u64,
    /// Its process id.
    pub pid: i32,
    /// [`ROOT`] …, maybe with [`PROTECTED`].
    pub role: u64,
    /// Streams in its hands.
    pub busy: u64,
    steps: u64,
    since: Instant,
}

/// How long a process with a stream may do nothing. Everybody else is given time meanwhile.
const PATIENCE: Duration = Duration::from_secs(30);

/// Who is there.
pub struct Crowd {
    marker: String,
    members: Vec<Member>,
    /// Numbers given out, whose process has not begun.
    expected: Vec<u64>,
    seen: u64,
}

impl Crowd {
    /// Nobody. `marker` is in the environment of everybody who will be there.
    pub fn new(marker: &str) -> Crowd {
        Crowd { marker: marker.to_owned(), members: Vec::new(), expected: Vec::new(), seen: 0 }
    }

    /// Looks who has come and gone.
    ///
    /// # Panics
    /// Where a process died by itself, or does nothing although it has a stream.
    pub fn refresh(&mut self, table: &Table) -> &[Member] {
        let now = Instant::now();
        let high = table.get(Header::Processes);
        self.expected.extend(self.seen + 1..=high);
        self.seen = high;
        self.expected.retain(|&number| {
            let Some(Entry { pid, role, busy, steps, .. }) = table.process(number) else {
                return true;
            };
            self.members.push(Member { number, pid, role, busy, steps, since: now });
            false
        });
        self.members.retain_mut(|member| {
            let has_ended = procfs::has_ended(member.pid);
            let entry = table.process(member.number).expect("it has begun");
            if has_ended {
                let (pid, role, well) = (member.pid, entry.role, entry.ended || entry.killed);
                assert!(well, "process {pid} of role {role} died by itself:\n{}", table.errors());
            }
            if entry.steps != member.steps || entry.busy == 0 {
                member.since = now;
            }
            let idle = now - member.since;
            assert!(
                idle < PATIENCE * slowness(),
                "process {} hangs:\n{}",
                member.pid,
                procfs::describe(&self.marker)
            );
            (member.role, member.busy, member.steps) = (entry.role, entry.busy, entry.steps);
            !has_ended
        });
        &self.members
    }

    /// The numbers of those who are made and have not begun.
    pub fn awaited(&self, table: &Table) -> Vec<u64> {
        self.expected.iter().copied().filter(|&number| table.is_awaited(number)).collect()
    }

    /// A handle for signals, if that process is still the one it was.
    pub fn handle(&self, member: &Member) -> Option<Handle> {
        // SAFETY: no memory of ours.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, member.pid, 0) };
        if fd < 0 {
            return None;
        }
        // SAFETY: a descriptor that was just made for us.
        let fd = unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).expect("a descriptor")) };
        procfs::has_marker(member.pid, &self.marker).then_some(Handle(fd))
    }
}

/// Means one process for good.
pub struct Handle(OwnedFd);

impl Handle {
    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        let none = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: the descriptor is ours; no further information is passed.
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, self.0.as_raw_fd(), signal, none, 0) };
    }

    /// Kills it, having said so in the table.
    pub fn kill(&self, table: &Table, member: &Member) {
        table.mark_killed(member.number);
        self.signal(libc::SIGKILL);
    }
}

/// What must not grow in a process that lives through it all.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Open descriptors.
    pub fds: usize,
    /// Segments mapped.
    pub segments: usize,
    /// All mappings, the words of peers that live or have lately died among them.
    pub mappings: usize,
    /// Threads.
    pub threads: usize,
    /// Resident memory without files, KiB.
    pub resident: usize,
}

impl Size {
    /// Of a process.
    pub fn of(pid: i32) -> Size {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(name)).unwrap_or("0");
            line.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0)
        };
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        Size {
            fds: procfs::open_fds(pid),
            segments: maps.lines().filter(|l| l.contains("/memfd:usmc-segment")).count(),
            mappings: maps.lines().count(),
            threads: field("Threads:"),
            resident: field("RssAnon:") + field("RssShmem:"),
        }
    }
}
