//! What every device has to do, tried on each of them, and on each behind a [`Faulty`] one: two processes that see neither
//! each other's ids nor a common directory allocate, attach, move bytes, and let go.
//!
//! The region is a file without a name, or the one that [`PLACE`] names: a virtual machine's device, for example.

use std::env;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::vec::Vec;
use usmc_shm::layout::{ACCEPTOR, CLIENT, Slot, near_len, segment_len};
use usmc_shm::region::units::Member;
use usmc_shm::region::{self, UNIT};
use usmc_shm::ring::Ring;
use usmc_shm::segment::Segment;
use usmc_shm::sync::Ordering::Relaxed;
use usmc_shm::sync::{AtomicBool, AtomicU32};

use super::region::{Region, provider};
use super::{Backing, Device, HandOver, Name, Shape, Size, memfd};
use crate::host::board::Board;
use crate::os::reason::Reason;
use crate::record::near::Near;

const SLOTS: u32 = 4;
const SHIFT: u32 = 14;
const UNITS: usize = 64;
const GID: [u64; 2] = [3, 4];
/// Bytes that each end sends: many rings full.
const BYTES: u64 = 3 << 20;
const PATIENCE: Duration = Duration::from_secs(60);
/// How the other process is told what to do.
const ORDER: &str = "USMC_CONFORMANCE";
/// The path of a region that has its members already: both processes join it as programs do.
const PLACE: &str = "USMC_CONFORMANCE_REGION";

/// A device that does not always do what it is asked for.
struct Faulty {
    inner: &'static dyn Device,
    /// So many calls are refused before one is served.
    refusals: AtomicU32,
    calls: AtomicU32,
    /// What is freed or given back stays where it is.
    forgets: AtomicBool,
}

impl Faulty {
    fn new(inner: &'static dyn Device, refusals: u32, forgets: bool) -> Faulty {
        let (refusals, calls) = (AtomicU32::new(refusals), AtomicU32::new(0));
        Faulty { inner, refusals, calls, forgets: AtomicBool::new(forgets) }
    }

    fn is_served(&self) -> bool {
        let every = self.refusals.load(Relaxed) + 1;
        (self.calls.fetch_add(1, Relaxed) + 1).is_multiple_of(every)
    }

    fn serve<T>(&self, call: impl FnOnce() -> Result<T, Reason>) -> Result<T, Reason> {
        if self.is_served() { call() } else { Err(Reason::NoMemory) }
    }
}

impl Device for Faulty {
    fn gid(&self) -> Option<[u64; 2]> {
        self.inner.gid()
    }

    fn chid(&self) -> u16 {
        self.inner.chid()
    }

    fn shape(&self, last: u32) -> Shape {
        self.inner.shape(last)
    }

    fn is_scarce(&self) -> bool {
        self.inner.is_scarce()
    }

    fn board(&'static self) -> Board<'static> {
        self.inner.board()
    }

    fn hand_over(&self) -> HandOver {
        self.inner.hand_over()
    }

    fn is_charged(&self) -> bool {
        self.inner.is_charged()
    }

    fn near(&self) -> Near {
        self.inner.near()
    }

    fn allocate(&self, size: Size) -> Result<Backing, Reason> {
        self.serve(|| self.inner.allocate(size))
    }

    fn inspect(&self, name: Name) -> Result<Size, Reason> {
        self.serve(|| self.inner.inspect(name))
    }

    fn attach(&self, name: Name, size: Size) -> Result<Backing, Reason> {
        self.serve(|| self.inner.attach(name, size))
    }

    unsafe fn detach(&self, backing: &Backing) {
        // SAFETY: the caller's contract.
        unsafe { self.inner.detach(backing) };
    }

    unsafe fn free(&self, backing: &Backing, is_idle: bool) {
        let forgets = self.forgets.load(Relaxed);
        // SAFETY: the caller's contract.
        unsafe { self.inner.free(backing, is_idle && !forgets) };
    }

    fn take(&self, at: *mut u8, len: usize) -> bool {
        self.is_served() && self.inner.take(at, len)
    }

    unsafe fn give_back(&self, at: *mut u8, len: usize) -> bool {
        // SAFETY: the caller's contract.
        !self.forgets.load(Relaxed) && unsafe { self.inner.give_back(at, len) }
    }

    fn has_ended(&self, owner: u64) -> bool {
        self.inner.has_ended(owner)
    }
}

/// The region of these tests.
struct Shared {
    region: Region,
    file: File,
    units: usize,
}

fn place() -> Option<String> {
    env::var(PLACE).ok()
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(make_region)
}

fn make_region() -> Shared {
    let file = match place() {
        Some(path) => File::options().read(true).write(true).open(path).expect("the region"),
        None => make_file(),
    };
    let region = Region::new(0);
    let units = map(&region, &path_of(file.as_raw_fd()), 1);
    Shared { region, file, units }
}

/// By which the provider opens a file that may have no other name.
fn path_of(fd: i32) -> String {
    place().unwrap_or_else(|| std::format!("/proc/self/fd/{fd}"))
}

/// A region of the peer 1, of whose processes nobody knows whether they live.
fn make_file() -> File {
    // SAFETY: a fresh descriptor of this process.
    let file = unsafe {
        let fd = libc::memfd_create(c"usmc-test-region".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0, "a file");
        File::from(OwnedFd::from_raw_fd(fd))
    };
    let len = region::len_for(UNITS);
    file.set_len(len as u64).expect("room");
    // SAFETY: a fresh mapping of the whole file, which nobody else has, and which ends here.
    unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_raw_fd();
        let base = libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, fd, 0);
        assert_ne!(base, libc::MAP_FAILED, "a mapping");
        let region = region::Region::format(base.cast(), len, GID).expect("a region");
        assert_eq!(region.units(), UNITS);
        libc::munmap(base, len);
    }
    file
}

/// Maps the region by its provider, and says how many units it has. Without members it is the `process` of the peer 1.
fn map(region: &Region, path: &str, process: u32) -> usize {
    let (fd, _) = provider::open(path).unwrap_or_else(|why| panic!("{path}: {}", why.text()));
    let mut units = 0;
    let mapped = region.map(fd, |map| {
        units = map.units();
        if place().is_some() { region.join(map) } else { Member::new(1, process, 1) }
    });
    mapped.unwrap_or_else(|why| panic!("{path}: {}", why.text()));
    // SAFETY: a descriptor of this function's.
    unsafe { libc::close(fd) };
    units
}

/// The tested devices, with the number of refusals before a call is served.
fn tested() -> &'static [(&'static dyn Device, u32)] {
    static TESTED: OnceLock<Vec<(&'static dyn Device, u32)>> = OnceLock::new();
    TESTED.get_or_init(|| {
        let mut all: Vec<(&'static dyn Device, u32)> = Vec::new();
        for real in [&memfd::MEMFDS as &'static dyn Device, &shared().region] {
            all.push((real, 0));
            for (refusals, forgets) in [(1, false), (3, false), (0, true)] {
                all.push((Box::leak(Box::new(Faulty::new(real, refusals, forgets))), refusals));
            }
        }
        all
    })
}

/// Calls until the device serves it. `refusals`: as many calls fail, each with a reason.
fn insist<T>(refusals: u32, mut call: impl FnMut() -> Result<T, Reason>) -> T {
    for _ in 0..refusals {
        match call() {
            Ok(done) => return done,
            Err(reason) => assert_eq!(reason, Reason::NoMemory),
        }
    }
    call().unwrap_or_else(|reason| panic!("refused: {}", reason.text()))
}

fn size(device: &dyn Device) -> Size {
    let near = near_len(SLOTS, SHIFT).expect("a segment");
    // Only where pages that nobody uses are not in memory.
    let far_shift = if device.near().kernel { SHIFT + 4 } else { 0 };
    Size { near, whole: segment_len(SLOTS, SHIFT, far_shift).expect("a segment") }
}

/// A segment as its maker makes it.
fn make(device: &'static dyn Device, refusals: u32) -> (Backing, Segment, u64) {
    let wanted = size(device);
    let memory = insist(refusals, || device.allocate(wanted));
    assert!(memory.len >= wanted.near && memory.whole <= wanted.whole);
    if !memory.is_zero {
        // SAFETY: memory of this segment alone.
        unsafe { memory.base.write_bytes(0, wanted.near) };
    }
    let far_shift = if memory.whole == wanted.near { 0 } else { SHIFT + 4 };
    let id = memory.name.id();
    // SAFETY: fresh memory of a segment's bytes.
    let map = unsafe { Segment::create(memory.base, SLOTS, (SHIFT, far_shift), id, 7) };
    for index in 0..SLOTS {
        for sender in [CLIENT, ACCEPTOR] {
            map.ring(index, sender).expect("a ring").reset();
        }
    }
    (memory, map, id)
}

fn byte_at(sender: usize, at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9) >> 13) as u8 ^ (sender as u8 * 0x55)
}

/// Sends and receives [`BYTES`] in pieces of all sizes, and checks each byte.
fn move_bytes(map: &Segment, index: u32, side: usize) {
    let begun = Instant::now();
    let (tx, rx) =
        (map.ring(index, side).expect("ours"), map.ring(index, 1 - side).expect("theirs"));
    let (mut sent, mut received) = (0, 0);
    while sent < BYTES || received < BYTES {
        let moved = send(&tx, side, &mut sent) + receive(&rx, 1 - side, &mut received);
        if moved == 0 {
            assert!(begun.elapsed() < PATIENCE, "{sent} sent, {received} received");
            std::thread::yield_now();
        }
    }
    while tx.unread() > 0 {
        assert!(begun.elapsed() < PATIENCE, "the peer does not read the rest");
        std::thread::yield_now();
    }
}

fn send(tx: &Ring<'_>, side: usize, sent: &mut u64) -> usize {
    let want = (1 + *sent as usize * 7 % 9000).min((BYTES - *sent) as usize);
    if want == 0 {
        return 0;
    }
    let room = tx.room(want).expect("a ring in order");
    let n = want.min(room.free);
    let bytes: Vec<u8> = (0..n as u64).map(|i| byte_at(side, *sent + i)).collect();
    // SAFETY: `n` bytes within the room.
    unsafe { tx.copy_in(room.prod, room.place, bytes.as_ptr(), n) };
    tx.publish(room.prod + n as u64);
    *sent += n as u64;
    n
}

fn receive(rx: &Ring<'_>, sender: usize, received: &mut u64) -> usize {
    let data = rx.data().expect("a ring in order");
    let mut bytes = std::vec![0; data.len.min(5000)];
    // SAFETY: as many bytes as are there, or fewer.
    unsafe { rx.copy_out(data.cons, data.place, bytes.as_mut_ptr(), bytes.len()) };
    for (i, byte) in (0..).zip(&bytes) {
        assert_eq!(*byte, byte_at(sender, *received + i), "byte {} is another", *received + i);
    }
    rx.consume(data.cons + bytes.len() as u64);
    *received += bytes.len() as u64;
    bytes.len()
}

/// Starts the other process, in a namespace of process ids of its own where that is permitted. It inherits a descriptor of that file.
fn peer(order: &str, file: i32) -> std::process::Child {
    // SAFETY: a descriptor of this process.
    let inherited = unsafe { libc::fcntl(file, libc::F_DUPFD, 0) };
    assert!(inherited >= 0, "a descriptor for the peer");
    let me = env::current_exe().expect("this test");
    // SAFETY: no pointers.
    let is_root = || unsafe { libc::geteuid() } == 0;
    let mut command = match is_root() {
        true => Command::new("unshare"),
        false => Command::new(&me),
    };
    if is_root() {
        command.args(["--pid", "--fork", "--kill-child"]).arg(&me);
    }
    let name = concat!(module_path!(), "::the_other_process");
    let name = name.split_once("::").expect("a crate").1;
    command.args([name, "--exact", "--ignored", "--quiet"]);
    let child = command.env(ORDER, std::format!("{order} {inherited}")).spawn().expect("a peer");
    // SAFETY: the duplicate above.
    unsafe { libc::close(inherited) };
    child
}

/// Not a test of its own: the peer of [`two_processes_move_bytes`].
#[test]
#[ignore = "is started by others"]
fn the_other_process() {
    let Ok(order) = env::var(ORDER) else { return };
    let words: Vec<&str> = order.split(' ').collect();
    let number = |i: usize| words[i].parse::<u64>().expect("a number");
    let (refusals, index) = (number(1) as u32, number(2) as u32);
    let fd = number(5) as i32;
    static MINE: Region = Region::new(0);
    let (real, name): (&'static dyn Device, Name) = match words[0] {
        "memfd" => (&memfd::MEMFDS, Name::Fd(fd)),
        _ => {
            map(&MINE, &path_of(fd), 2);
            (&MINE, Name::Run(number(3) as u32, number(4) as u32))
        }
    };
    let device = Faulty::new(real, refusals, false);
    let size = insist(refusals, || device.inspect(name));
    let memory = insist(refusals, || device.attach(name, size));
    // SAFETY: what the device has mapped.
    let map = unsafe { Segment::open(memory.base, memory.len, memory.whole) }.expect("a segment");
    move_bytes(&map, index, ACCEPTOR);
    let slot: &Slot = map.slot(index).expect("a slot");
    slot.end[ACCEPTOR].refs.store(0, Relaxed);
    // SAFETY: nothing of it is used from here on.
    unsafe { device.detach(&memory) };
}

#[test]
fn two_processes_move_bytes() {
    for (device, refusals) in tested() {
        let (memory, map, _) = make(*device, *refusals);
        let index = 2;
        let slot = map.slot(index).expect("a slot");
        slot.end.iter().for_each(|end| end.refs.store(1, Relaxed));
        let mut child = match memory.name {
            Name::Fd(fd) => peer(&std::format!("memfd {refusals} {index} 0 0"), fd),
            Name::Run(first, uses) => {
                let fd = shared().file.as_raw_fd();
                peer(&std::format!("region {refusals} {index} {first} {uses}"), fd)
            }
        };
        move_bytes(&map, index, CLIENT);
        assert!(child.wait().expect("a peer").success());
        assert_eq!(slot.end[ACCEPTOR].refs.load(Relaxed), 0, "the peer has not let go");
        // SAFETY: nothing of it is used from here on.
        unsafe { device.free(&memory, true) };
    }
}

#[test]
fn names_that_nobody_has_given_are_refused() {
    let mut pipe = [0; 2];
    // SAFETY: two numbers, and descriptors of this process.
    let (unsealed, short) = unsafe {
        assert_eq!(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC), 0);
        let make = |len| {
            let fd = libc::memfd_create(c"usmc-test".as_ptr(), libc::MFD_ALLOW_SEALING);
            assert_eq!(libc::ftruncate(fd, len), 0);
            fd
        };
        let short = make(4000);
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        assert_eq!(libc::fcntl(short, libc::F_ADD_SEALS, seals), 0);
        (make(1 << 20), short)
    };
    let runs = [(0, 0), (0, u32::MAX), (shared().units as u32, 1), (u32::MAX, 1), (5, 1 << 16)];
    let fds = [-1, pipe[0], unsealed, short].map(Name::Fd);
    let names: Vec<Name> = fds.into_iter().chain(runs.map(|(a, b)| Name::Run(a, b))).collect();
    for (device, refusals) in tested() {
        for name in &names {
            let told = (0..=*refusals).map(|_| device.inspect(*name)).last();
            assert_eq!(told, Some(Err(Reason::PeerBroken)), "{name:?}");
        }
    }
    // SAFETY: descriptors of this test.
    unsafe { pipe.into_iter().chain([unsealed, short]).for_each(|fd| _ = libc::close(fd)) };
}

/// Of a run only, as a memfd's memory lives as long as anybody has it.
#[test]
fn a_run_is_free_again_once_nobody_uses_it() {
    let device: &'static dyn Device = &shared().region;
    let (memory, _, id) = make(device, 0);
    let Name::Run(first, uses) = memory.name else { panic!("{:?}", memory.name) };
    assert_eq!(Name::of(id), Some(memory.name));
    assert!(device.inspect(memory.name).is_ok());
    // SAFETY: nothing of it is used from here on.
    unsafe { device.free(&memory, false) };
    assert!(device.inspect(memory.name).is_ok(), "a peer may still use it");
    // SAFETY: as above.
    unsafe { device.free(&memory, true) };
    assert_eq!(device.inspect(memory.name), Err(Reason::PeerBroken));
    assert_eq!(device.inspect(Name::Run(first, uses + 1)), Err(Reason::PeerBroken));
}

#[test]
fn what_no_device_has_room_for_is_refused() {
    // One of its own: where a region is full, it is swept.
    let Shared { region, units, .. } = make_region();
    let device: &dyn Device = &region;
    let most = Size { near: (units + 1) * UNIT, whole: (units + 1) * UNIT };
    assert_eq!(device.allocate(most).map(|memory| memory.len), Err(Reason::RegionFull));
    // A file of so many bytes is none.
    let most = Size { near: usize::MAX >> 1, whole: usize::MAX >> 1 };
    assert_eq!(memfd::MEMFDS.allocate(most).map(|memory| memory.len), Err(Reason::NoMemory));
}

#[test]
fn identities_tell_devices_apart() {
    let kernel = tested().iter().map(|(device, _)| (device.chid(), device.near().kernel));
    for (chid, kernel) in kernel {
        // SMC-D emulated (net/smc): from 0xff00 on.
        assert!(chid >= 0xff00);
        assert_eq!(kernel, chid == memfd::MEMFDS.chid());
    }
    assert!(shared().region.gid().is_some_and(|gid| place().is_some() || gid == GID));
    let names = [Name::Run(0, 1), Name::Run(5, 0xffff), Name::Run(0x7fff, 0)];
    assert!(names.into_iter().all(|name| Name::of(name.id()) == Some(name)));
    assert_eq!(Name::of(Name::Fd(3).id()), None);
}
