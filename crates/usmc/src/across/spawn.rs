//! posix_spawn(3) and its relatives: libc makes the process and starts the program by itself, and nobody sees what its
//! child does with descriptors. What the program will have is told by the file actions and by close-on-exec.

use core::ffi::c_int;
use core::mem::MaybeUninit;
use core::ptr;
use core::slice;
use libc::posix_spawn_file_actions_t;
use usmc_shm::bell::less;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed};
use usmc_shm::sync::{AtomicU32, AtomicU64};

use crate::across::exec;
use crate::family::{holders, passed_on};
use crate::host::Receiver;
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::table::{self, Entry};
use crate::os::{errno, log, process, real};
use crate::record::conn::{self, F_CLC};
use crate::record::numbers;
use crate::record::phase::Phase;
use crate::stream::fallback::{self, Patience};

/// What libc's child does before it becomes the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Closes a number.
    Close(c_int),
    /// Duplicates the first to the second.
    Dup2(c_int, c_int),
    /// Opens a file there.
    Open(c_int),
    /// Closes this number and all above.
    CloseFrom(c_int),
    /// Nothing to descriptors.
    Other,
}

/// A list of such steps as libc keeps it.
#[derive(Clone, Copy)]
pub enum Actions {
    /// glibc's array.
    Array(&'static [Action]),
    /// musl's chain, from the last step on; null = none.
    Chain(*const Link),
}

impl Actions {
    /// From the last one to the first.
    fn backwards(self) -> impl Iterator<Item = Step> {
        let (mut array, mut chain) = match self {
            Actions::Array(array) => (array.iter(), ptr::null()),
            Actions::Chain(last) => ([].iter(), last),
        };
        core::iter::from_fn(move || {
            // SAFETY: a list of libc's, which stays as it is while the plan is used (see `Plan::of`).
            let link = unsafe { chain.as_ref() }.inspect(|link| chain = link.earlier);
            array.next_back().map(Action::step).or(link.map(Link::step))
        })
    }
}

/// `struct fdop` of musl (`fdop.h`).
#[repr(C)]
pub struct Link {
    earlier: *const Link,
    _later: *const Link,
    kind: c_int,
    fd: c_int,
    from: c_int,
}

impl Link {
    fn step(&self) -> Step {
        match self.kind {
            1 => Step::Close(self.fd),
            2 => Step::Dup2(self.from, self.fd),
            3 => Step::Open(self.fd),
            _ => Step::Other,
        }
    }
}

/// The first fields of musl's `posix_spawn_file_actions_t` (<spawn.h>).
#[repr(C)]
struct Chain {
    _pad: [c_int; 2],
    last: *const Link,
}

/// `struct __spawn_action` of glibc (posix/spawn_int.h); [`is_layout_known`] looks whether it still is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Action {
    kind: c_int,
    of: Of,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Of {
    _aligned: [usize; 0],
    fd: c_int,
    /// Of [`DUP2`] alone; of others libc may have left it as malloc(3) gave it.
    new: MaybeUninit<c_int>,
    _rest: MaybeUninit<[usize; 2]>,
}

impl Action {
    fn step(&self) -> Step {
        match self.kind {
            CLOSE => Step::Close(self.of.fd),
            // SAFETY: libc has set it where that is what the entry is for.
            DUP2 => Step::Dup2(self.of.fd, unsafe { self.of.new.assume_init() }),
            OPEN => Step::Open(self.of.fd),
            CLOSE_FROM => Step::CloseFrom(self.of.fd),
            _ => Step::Other,
        }
    }
}

const CLOSE: c_int = 0;
const DUP2: c_int = 1;
const OPEN: c_int = 2;
const CLOSE_FROM: c_int = 5;

/// The first fields of glibc's `posix_spawn_file_actions_t` (<spawn.h>).
#[repr(C)]
struct List {
    _room: c_int,
    count: c_int,
    first: *const Action,
}

const _: () = assert!(size_of::<List>() <= size_of::<posix_spawn_file_actions_t>());

/// What libc's child will do to descriptors before it becomes the program.
#[derive(Clone, Copy)]
pub enum Plan {
    /// These.
    Actions(Actions),
    /// Overwrites this number (popen(3)).
    Overwrites(c_int),
    /// Nobody knows.
    Unknown,
}

impl Plan {
    /// Nothing at all.
    pub const NOTHING: Plan = Plan::Actions(Actions::Array(&[]));

    /// # Safety
    /// What posix_spawn(3) takes; it stays as it is while the plan is used.
    pub unsafe fn of(actions: *const posix_spawn_file_actions_t) -> Plan {
        if actions.is_null() {
            return Plan::NOTHING;
        }
        if !is_layout_known() {
            return Plan::Unknown;
        }
        // SAFETY: the caller's contract, and the layout was looked at.
        Plan::Actions(unsafe { entries(actions) })
    }

    /// Where the program's `fd` comes from, as a number of ours, and what becomes of close-on-exec on the way.
    fn origin(&self, fd: c_int) -> Option<(c_int, Kept)> {
        let actions = match *self {
            Plan::Actions(actions) => actions,
            Plan::Overwrites(number) if number == fd => return None,
            Plan::Overwrites(_) => Actions::Array(&[]),
            // Whatever is done to it.
            Plan::Unknown => return Some((fd, Kept::Perhaps)),
        };
        let mut at = (fd, Kept::AsItIs);
        for step in actions.backwards() {
            match step {
                Step::Close(fd) | Step::Open(fd) if fd == at.0 => return None,
                Step::CloseFrom(fd) if fd <= at.0 => return None,
                Step::Dup2(from, to) if to == at.0 => at = (from, Kept::AskedFor),
                _ => {}
            }
        }
        Some(at)
    }

    /// The connection of ours that the program's `fd` will be.
    fn given(&self, fd: c_int) -> Option<Given> {
        let (from, kept) = self.origin(fd)?;
        let Entry::Conn(index) = table::get(from) else { return None };
        let asked_for = kept == Kept::AskedFor;
        let has_it = kept != Kept::AsItIs || exec::crosses_exec(from);
        has_it.then_some(Given { fd: from, index, asked_for })
    }

    /// The numbers that descriptors are duplicated to.
    fn targets(&self) -> impl Iterator<Item = c_int> + use<> {
        let actions =
            if let Plan::Actions(actions) = *self { actions } else { Actions::Array(&[]) };
        actions
            .backwards()
            .filter_map(|step| if let Step::Dup2(_, to) = step { Some(to) } else { None })
    }

    /// Calls `act` once for every connection that the program will have.
    fn for_each(&self, mut act: impl FnMut(Given)) {
        let mut met = Met::nobody();
        let mut look = |fd| {
            if let Some(given) = self.given(fd)
                && met.is_first(given.index)
            {
                act(given);
            }
        };
        // First: of several numbers that one counts which is asked for.
        self.targets().for_each(&mut look);
        table::for_each(0, u32::MAX, |fd, _| look(fd));
    }
}

/// What libc's child does to a number's close-on-exec flag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kept {
    /// Nothing.
    AsItIs,
    /// It is taken off, because the number is wanted.
    AskedFor,
    /// Nobody knows.
    Perhaps,
}

/// The connections that were met: a bit for each record. Without memory for it all are met for the first time, which counts
/// some too often, so that they stay TCP.
struct Met(*mut u8);

impl Met {
    const BYTES: usize = conn::CONNS / 8;

    fn nobody() -> Met {
        Met(sys::mmap_private(ptr::null_mut(), Met::BYTES).unwrap_or(ptr::null_mut()))
    }

    fn is_first(&mut self, index: u32) -> bool {
        if self.0.is_null() {
            return true;
        }
        // SAFETY: indices are below CONNS; the mapping is ours alone.
        let byte = unsafe { &mut *self.0.add(index as usize / 8) };
        let before = *byte;
        *byte |= 1 << (index % 8);
        *byte != before
    }
}

impl Drop for Met {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: mapped by `nobody`.
            unsafe { sys::munmap(self.0, Met::BYTES) };
        }
    }
}

/// A connection that the program will have: one of our numbers for it.
#[derive(Clone, Copy)]
struct Given {
    fd: c_int,
    index: u32,
    /// By number, and not because nobody said otherwise.
    asked_for: bool,
}

/// # Safety
/// Initialised, and of the layout above.
unsafe fn entries(actions: *const posix_spawn_file_actions_t) -> Actions {
    // SAFETY: the caller's contract.
    unsafe {
        if real::is_musl() {
            return Actions::Chain((*actions.cast::<Chain>()).last);
        }
        let list = &*actions.cast::<List>();
        Actions::Array(match usize::try_from(list.count) {
            Ok(count) if count > 0 && !list.first.is_null() => {
                slice::from_raw_parts(list.first, count)
            }
            _ => &[],
        })
    }
}

/// Whether libc's lists look as we think: one is made and read. (It allocates, as its callers have done before.)
fn is_layout_known() -> bool {
    /// 0 = not looked yet, 1 = they do, 2 = they do not.
    static LAYOUT: AtomicU32 = AtomicU32::new(0);
    if LAYOUT.load(Relaxed) == 0 {
        // SAFETY: integers and null pointers.
        let mut list: posix_spawn_file_actions_t = unsafe { core::mem::zeroed() };
        let at = &raw mut list;
        // SAFETY: a list of our own, made before it is used, and a string.
        let fits = unsafe {
            real::posix_spawn_file_actions_init(at) == 0 && {
                let made = real::posix_spawn_file_actions_addclose(at, 11) == 0
                    && real::posix_spawn_file_actions_adddup2(at, 12, 13) == 0
                    && real::posix_spawn_file_actions_addopen(at, 14, c"/".as_ptr(), 0, 0) == 0;
                // Since glibc 2.34.
                let closes = real::posix_spawn_file_actions_addclosefrom_np(at, 15) == 0;
                let fits = made && looks_like(at, closes);
                real::posix_spawn_file_actions_destroy(at);
                fits
            }
        };
        LAYOUT.store(if fits { 1 } else { 2 }, Relaxed);
    }
    LAYOUT.load(Relaxed) == 1
}

/// Whether the list of these steps is what we take it for.
///
/// # Safety
/// libc's, with these steps.
unsafe fn looks_like(actions: *const posix_spawn_file_actions_t, closes: bool) -> bool {
    let all = [Step::CloseFrom(15), Step::Open(14), Step::Dup2(12, 13), Step::Close(11)];
    let steps = &all[usize::from(!closes)..];
    // SAFETY: larger than what is looked at first. glibc has allocated room for so many entries, if they are as small as ours, as
    // it allocates eight at a time; musl's links are as large in all of its releases.
    unsafe {
        let list = &*actions.cast::<List>();
        let has_all = list.count == steps.len() as c_int && list.first.is_aligned();
        (real::is_musl() || has_all) && entries(actions).backwards().eq(steps.iter().copied())
    }
}

/// The program that libc is about to start.
fn child() -> Receiver {
    Receiver::Child(process::pid())
}

/// Calls of [`around`] under way.
static SPAWNING: AtomicU32 = AtomicU32::new(0);

struct Spawning {
    alone: bool,
}

impl Spawning {
    fn begin() -> Spawning {
        Spawning { alone: SPAWNING.fetch_add(1, AcqRel) == 0 }
    }

    /// Whether no other thread is about to start a program: the place that is kept by our own pid is this one's.
    fn is_alone(&self) -> bool {
        self.alone && SPAWNING.load(Acquire) == 1
    }
}

impl Drop for Spawning {
    fn drop(&mut self) {
        // None is counted where a fork of this thread's own signal handler has forgotten it.
        less(&SPAWNING);
    }
}

/// Runs `start`, which makes a process and starts a program there. What that program will have of our connections
/// becomes TCP for now. `start` returns what the call returns, and, if a program was started, `Some` with its pid,
/// which is 0 where nobody tells.
///
/// # Errors
/// See [`crate::stream::fallback::leave`]: a connection that the program was to be given stays in the ring.
pub fn around<T>(plan: Plan, start: impl FnOnce() -> (T, Option<u32>)) -> Result<T, Errno> {
    if process::is_foreign_child() {
        return Ok(start().0);
    }
    let errno = errno::keep();
    let spawning = Spawning::begin();
    let mut left = Ok(());
    // For all of them together.
    let patience = Patience::new();
    let mut withheld = Withheld::nothing();
    plan.for_each(|given| left = left.and(leave(given, &patience, &mut withheld)));
    if let Err(code) = left {
        plan.for_each(call_off);
        return Err(code);
    }
    drop(errno);
    let (done, started) = start();
    let _errno = errno::keep();
    // It is another program by now, or none.
    drop(withheld);
    match started {
        None => plan.for_each(call_off),
        Some(0) => {}
        // It is found by our own pid then, as are the others.
        Some(_) if !spawning.is_alone() => {}
        Some(pid) => plan.for_each(|given| {
            passed_on::rename(conn::at(given.index), child(), Receiver::Program(pid));
        }),
    }
    Ok(done)
}

fn leave(given: Given, patience: &Patience, withheld: &mut Withheld) -> Result<(), Errno> {
    let conn = conn::at(given.index);
    if conn.phase() == Phase::Fresh {
        // The program would not learn of the connection that it becomes.
        holders::note_copied(conn);
    }
    let left = match conn.phase() {
        Phase::Early | Phase::Offered | Phase::Attached | Phase::Ring => {
            exec::lend(given.fd, given.index, child(), patience)
        }
        // A message of a handshake that has ended may still stand in the stream.
        _ if conn.has(F_CLC) => {
            fallback::leave_within(given.fd, given.index, Reason::PassedOn, patience)
        }
        _ => return Ok(()),
    };
    match left {
        // What is just left open is most likely not meant to be used there.
        Err(_) if !given.asked_for && withheld.add(given.index) => {
            log::warn(format_args!("fd {}: in the ring, and closed in the new program", given.fd));
            Ok(())
        }
        done => done,
    }
}

/// Numbers that are close-on-exec for as long as it takes to start a program, which would take doorbells for the bytes of
/// these connections.
struct Withheld {
    places: [Option<&'static AtomicU64>; 64],
    count: usize,
}

/// All of them: the number plus one, and the connection from bit 32 on.
static WITHHELD: [AtomicU64; 256] = [const { AtomicU64::new(0) }; 256];

/// The next program of this process gets it after all, unless another thread has closed it.
fn give(place: &AtomicU64) {
    let word = place.load(Relaxed);
    let fd = (word as u32).wrapping_sub(1).cast_signed();
    if table::get(fd) == Entry::Conn((word >> 32) as u32) {
        close_on_exec(fd, false);
    }
    place.store(0, Relaxed);
}

/// Fork, in the child: programs that other threads were starting are not started here.
pub fn after_fork() {
    SPAWNING.store(0, Relaxed);
    WITHHELD.iter().filter(|place| place.load(Relaxed) != 0).for_each(give);
}

impl Withheld {
    fn nothing() -> Withheld {
        Withheld { places: [None; 64], count: 0 }
    }

    /// All numbers of a connection. False where there are too many.
    fn add(&mut self, index: u32) -> bool {
        let mut all = true;
        numbers::for_each(|fd, of, _| {
            if of == index && exec::crosses_exec(fd) {
                all &= self.add_number(fd, index);
            }
        });
        all
    }

    fn add_number(&mut self, fd: c_int, index: u32) -> bool {
        let word = u64::from(index) << 32 | u64::from(fd.cast_unsigned() + 1);
        let note = |place: &&AtomicU64| place.compare_exchange(0, word, Relaxed, Relaxed).is_ok();
        let Some(own) = self.places.get_mut(self.count) else { return false };
        let Some(place) = WITHHELD.iter().find(note) else { return false };
        if !close_on_exec(fd, true) {
            place.store(0, Relaxed);
            return false;
        }
        *own = Some(place);
        self.count += 1;
        true
    }
}

impl Drop for Withheld {
    fn drop(&mut self) {
        self.places.iter().flatten().for_each(|place| give(place));
    }
}

fn close_on_exec(fd: c_int, on: bool) -> bool {
    let flags = if on { libc::FD_CLOEXEC } else { 0 };
    sys::fcntl(fd, libc::F_SETFD, flags as usize).is_ok()
}

fn call_off(given: Given) {
    let conn = conn::at(given.index);
    if conn.passed_on.load(Relaxed) != 0 {
        passed_on::take_back(conn, child(), false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn action(kind: c_int, fd: c_int, new: c_int) -> Action {
        let new = MaybeUninit::new(new);
        Action { kind, of: Of { _aligned: [], fd, new, _rest: MaybeUninit::uninit() } }
    }

    /// musl's list of such steps: kind, number and source of each.
    fn chained(steps: &[(c_int, c_int, c_int)]) -> *const Link {
        steps.iter().fold(ptr::null(), |earlier, &(kind, fd, from)| {
            let later = ptr::null();
            Box::leak(Box::new(Link { earlier, _later: later, kind, fd, from }))
        })
    }

    #[test]
    fn numbers_are_followed_back_through_the_actions() {
        let actions: &'static [Action] = Box::leak(Box::new([
            action(DUP2, 7, 0),
            action(DUP2, 0, 1),
            action(CLOSE, 7, 0),
            action(OPEN, 2, 0),
            action(DUP2, 9, 9),
            action(CLOSE_FROM, 20, 0),
        ]));
        let chain = chained(&[
            (2, 0, 7),
            (2, 1, 0),
            (1, 7, 0),
            (3, 2, 0),
            (2, 9, 9),
            // A directory to change to, of which no number is told.
            (4, 0, 0),
        ]);
        let plan = Plan::Actions(Actions::Chain(chain));
        assert_eq!(plan.origin(0), Some((7, Kept::AskedFor)));
        assert_eq!(plan.origin(1), Some((7, Kept::AskedFor)));
        assert_eq!(plan.origin(2), None);
        assert_eq!(plan.origin(7), None);
        assert_eq!(plan.origin(20), Some((20, Kept::AsItIs)));
        assert!(plan.targets().eq([9, 1, 0]));
        let plan = Plan::Actions(Actions::Array(actions));
        assert_eq!(plan.origin(0), Some((7, Kept::AskedFor)));
        assert_eq!(plan.origin(1), Some((7, Kept::AskedFor)));
        assert_eq!(plan.origin(2), None);
        assert_eq!(plan.origin(7), None);
        assert_eq!(plan.origin(8), Some((8, Kept::AsItIs)));
        assert_eq!(plan.origin(9), Some((9, Kept::AskedFor)));
        assert_eq!(plan.origin(19), Some((19, Kept::AsItIs)));
        assert_eq!(plan.origin(20), None);
        assert!(plan.targets().eq([9, 1, 0]));
        assert_eq!(Plan::Overwrites(1).origin(1), None);
        assert_eq!(Plan::Overwrites(1).origin(0), Some((0, Kept::AsItIs)));
        assert_eq!(Plan::Unknown.origin(5), Some((5, Kept::Perhaps)));
    }

    #[test]
    fn a_connection_is_met_once() {
        let mut met = Met::nobody();
        for index in [0, 7, 8, conn::CONNS as u32 - 1] {
            assert!(met.is_first(index) && !met.is_first(index));
        }
        assert!(met.is_first(1));
        let mut unknown = Met(ptr::null_mut());
        assert!(unknown.is_first(1) && unknown.is_first(1));
    }

    #[test]
    fn lists_of_this_libc_are_known() {
        assert!(is_layout_known());
    }
}
