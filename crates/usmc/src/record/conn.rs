//! The record of one TCP socket in this process.
//!
//! Records are private memory: after a fork each process has its own copy, and everything both must
//! agree on lies in the slot (or is asked of the kernel). Their life is in [`super::phase`].

mod unused;

pub use self::unused::{alloc, free};

use core::ptr;
use usmc_shm::layout::{ACCEPTOR, CLIENT, End, IN_FLIGHT, Producer, Slot};
use usmc_shm::ring::{Memory, Ring};
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use usmc_shm::sync::fence;
use usmc_shm::sync::{AtomicPtr, AtomicU32, AtomicU64};

use crate::os::hook::Hook;
use crate::os::process::Lock;
use crate::os::reason::Reason;
use crate::os::spin::Learnt;
use crate::os::{cache, memory, single};
use crate::record::near::Near;
use crate::record::order;
use crate::record::phase::{Event, Phase};
use crate::record::users::Users;

// One folder sets and clears each flag (tests/layers.rs sees to it); the others call its functions.

/// Flag: this is the connecting end.
pub const F_CLIENT: u32 = 1;
/// Flag: another process may hold this socket, too; ask the kernel instead of trusting cached options.
pub const F_SHARED: u32 = 2;
/// Flag: O_NONBLOCK as last seen.
pub const F_NONBLOCK: u32 = 4;
/// Flag: options of the kernel socket were set for ring use ([`crate::handshake::transition`]).
pub const F_TUNED: u32 = 8;
/// Flag: the connection must not leave TCP (an option needs the kernel to see the bytes).
pub const F_KERNEL_ONLY: u32 = 16;
/// Flag: a fork is going on, and the child's hold is counted.
pub const F_FORKED: u32 = 32;
/// Flag: not counted as a holder while an exec is tried.
pub const F_DOWN: u32 = 64;
/// Was there at a fork: another process may have the socket, whatever carries its bytes.
pub const F_COPIED: u32 = 128;
/// Came from elsewhere ([`crate::passing::adopt`]): another process may have the socket.
pub const F_ADOPTED: u32 = 256;

/// Flag: just out of the ring, and epoll sets do not know it yet: no step of the handshake is made.
pub const F_SETTLING: u32 = 512;
/// Flag: handed over to the next program, while an exec is tried.
pub const F_HANDED: u32 = 1024;
/// What a listener accepts stays TCP: it inherits options with which the kernel has to see the bytes.
pub const F_CHILDREN_TCP: u32 = 2048;
/// [`F_INQ`] is what the kernel says.
pub const F_INQ_KNOWN: u32 = 4096;
/// Received messages tell what is left unread (TCP_INQ).
pub const F_INQ: u32 = 8192;
/// A CLC message of the peer's may stand in the stream ([`crate::handshake::clc`]).
pub const F_CLC: u32 = 16384;

/// Asks for the TCP option, or came from a listener that does ([`crate::handshake::syn_option`]).
pub const F_ARMED: u32 = 1 << 16;

/// Was tied to a slot.
pub const F_HAD_SLOT: u32 = 1 << 17;

/// Took part in a handshake by CLC messages, or was about to.
pub const F_HANDSHAKE: u32 = 1 << 18;

/// Came by fork in the ring: the first call that moves bytes shows it to `usmc ss` ([`crate::watch::observer`]).
pub const F_UNSHOWN: u32 = 1 << 19;

/// Was [`F_SHARED`] a moment ago: another process may have changed O_NONBLOCK.
pub const F_STALE: u32 = 1 << 20;

/// A stranger at the other end has named processes as holders of our locks that are not: nobody waits for those of this ring.
pub const F_SCRIBBLED: u32 = 1 << 21;

/// The socket is a deputy ([`crate::handshake::clc::deputy`]): an agent has its other end, and the connection to another host.
pub const F_DEPUTY: u32 = 1 << 22;

/// The connection's SYN says no SMC, as those to its server were brief lately ([`crate::handshake::brief`]).
pub const F_BRIEF: u32 = 1 << 23;

/// Times a connection comes back from the ring and may go there again.
pub const RETURNS: usize = 3;

/// A slot of an earlier time in the ring. Calls may be looking at it still, so it is kept as long as the record.
struct Past {
    slot: AtomicPtr<Slot>,
    segment: AtomicU32,
    index: AtomicU32,
}

/// The word of nobody.
static NO_LIFE: AtomicU32 = AtomicU32::new(0);
/// What no word ever is: marked, and without an owner.
const NEVER: u32 = u32::MAX;

/// The record. Its first two lines are all that a connection of one request and its answer needs.
#[repr(C, align(128))]
pub struct Conn {
    /// Held for every step of the receiving direction.
    pub rx_lock: Lock,
    /// `Phase::Fresh` … `Phase::Plain`.
    pub phase: AtomicU32,
    /// `F_*`.
    pub flags: AtomicU32,
    slot: AtomicPtr<Slot>,
    /// Where the slot's rings meet.
    meet: AtomicPtr<u8>,
    life: AtomicPtr<AtomicU32>,
    /// When the kernel's state was last asked for, CLOCK_MONOTONIC nanoseconds.
    pub kernel_seen: AtomicU64,
    /// log2 of the bytes of the client's ring, eight bits above of the acceptor's, and above that of a far part; 0 = out of reach.
    shifts: AtomicU32,
    /// What may be unread of what we send, in bytes: a multiple of 4096, at least the smallest window's; 0 = not asked yet.
    pub tx_most: AtomicU32,
    /// Bits of kernel poll events that stay true (RDHUP, HUP, ERR).
    pub kernel_events: AtomicU32,
    returns: AtomicU32,

    /// Its users.
    pub users: Users,
    /// A duplicate for such calls, plus one: what they need the kernel for outlives the number. 0 = none.
    pub spare: AtomicU32,
    /// Counts the uses of the record.
    pub use_count: AtomicU32,
    /// Calls so far ([`crate::record::change_over`]).
    pub calls: AtomicU32,
    /// First entry of the list of epoll sets that watch it, plus one.
    pub watchers: AtomicU32,
    /// Record in the observation file, plus one.
    pub observed: AtomicU32,
    /// Why it is plain TCP ([`Reason`]).
    pub reason: AtomicU32,
    /// The device's number for its holders ([`crate::family::passed_on`]); 0 = it was not passed on.
    pub passed_on: AtomicU32,
    /// Calls that the kernel does, unobserved, for a connection that may come back ([`crate::stream::unseen`]).
    pub unseen: AtomicU32,
    /// Cell that counts holders while there is no slot ([`crate::family::holders`]); 0 = none.
    pub cell: AtomicU32,
    /// What the peer's SYN or SYN-ACK said ([`crate::handshake::syn_option::Outcome`]).
    pub syn_option: AtomicU32,
    /// Times a send found no room; epoll's edge for EPOLLOUT.
    pub tx_blocks: AtomicU32,
    /// SO_SNDBUF as the kernel counts it, in bytes; 0 = the application has never set it.
    pub snd_buf: AtomicU32,
    /// SO_RCVBUF, likewise.
    pub rcv_buf: AtomicU32,
    next_free: AtomicU32,

    /// The connection's name ([`crate::record::tuple::Tuple::words`]).
    pub tuple: [AtomicU64; 6],
    /// Offer, or the listener's registration.
    pub offer_index: AtomicU32,
    /// Offer's use count.
    pub offer_use: AtomicU32,
    /// Held for a step of the handshake.
    pub step_lock: Lock,
    /// What had come when [`Conn::looks`] were last made in vain, plus one, in bytes; 0 = never.
    pub received: AtomicU64,
    /// Calls left in which an acceptor looks for an offer.
    pub looks: AtomicU32,
    /// Segment table index, valid from Phase::Offered/Phase::Attached on.
    pub segment: AtomicU32,
    /// Slot index in the segment.
    pub slot_index: AtomicU32,
    /// Which use of the slot (`usmc_shm::handshake::Use`).
    pub usage: AtomicU32,
    /// Options that may have another value than a new socket's ([`crate::record::options`]).
    pub options: AtomicU32,
    /// The device (`device::Index`) that the slot belongs to, or that a handshake was begun for; and what the slot's processes have
    /// in common ([`Near`]).
    pub device: AtomicU32,
    pub(super) near: AtomicU32,
    /// SO_RCVLOWAT of the application; 0 = the default, 1.
    rcvlowat: AtomicU32,
    /// An fd found to be a duplicate, for registrations whose own number was closed.
    pub duplicate: AtomicU32,

    /// Sleepers of this process that wait for data, and armed epoll entries.
    pub rx_sleepers: AtomicU32,
    /// Sleepers of this process that wait for room.
    pub tx_sleepers: AtomicU32,
    /// Threads of this process asleep in a send.
    pub blocked_sends: AtomicU32,
    /// Threads of this process in the middle of a doorbell.
    pub ringing: AtomicU32,
    /// The voucher of the peer ([`crate::family::liveness`]), as last seen.
    pub voucher: AtomicU32,
    /// What his word was then.
    pub life_seen: AtomicU32,
    /// When a send last asked the kernel whether the peer lives ([`crate::os::clock::tsc`]).
    pub asked: AtomicU64,
    /// When a doorbell was last to make the peer's kernel answer, CLOCK_MONOTONIC nanoseconds.
    pub provoked: AtomicU64,
    /// The process that was sent this one's ear for the connection, plus one ([`crate::host::ears`]); 0 = none.
    pub ear_sent: AtomicU32,
    /// When a poll that had no need to sleep did.
    pub polled: AtomicU64,
    /// Since when threads that wait for room may wait in vain, CLOCK_MONOTONIC nanoseconds; 0 = they do not.
    pub stuck: AtomicU64,
    /// The peer's cursor then.
    pub stuck_at: AtomicU64,
    /// Large sends that have found room in the ring itself, up to what makes a stream ([`crate::stream::bulk`]).
    pub streamed: AtomicU32,
    /// What spins on it have come to.
    pub spins: Learnt,

    /// Held for every step of the sending direction.
    pub tx_lock: Lock,
    /// The far parts of the slot's rings; null where they are out of reach.
    far: AtomicPtr<u8>,
    /// [`Far`].
    far_part: AtomicU32,
    /// Its number plus one, while it is listed for what its peer may never read ([`crate::stream::unheard`]); 0 = it is not.
    pub unheard: AtomicU32,
    /// The one that was listed before it, plus one; 0 = it was the first.
    pub unheard_before: AtomicU32,
    /// Bytes of our ring's far part that limited memory was asked for; 0 = none.
    pub far_taken: AtomicU32,
    /// What the byte counts of `usmc ss` need beside the present ring's: bytes of earlier rings less doorbells; sent,
    /// received.
    pub bias: [AtomicU64; 2],
    past: [Past; RETURNS],
    /// The handshake by CLC.
    pub clc: super::clc_state::State,
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(Conn, users) == 64 && offset_of!(Conn, tuple) == 128);
};

/// What a record knows of the far part of the ring that it sends by.
///
/// ```text
/// Unused ──grow──▶ InUse ──found empty──▶ Left ──a second later, given back──▶ Unused
///                    ▲                      │
///                    └─────────grow─────────┘       (and from each to Unused with the slot)
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Far {
    /// It is not in memory, or another process sees to that.
    Unused,
    /// The window is there, or was when somebody last looked.
    InUse,
    /// The ring was found empty then, in milliseconds of CLOCK_MONOTONIC.
    Left(u32),
}

impl Far {
    const UNUSED: u32 = 0;
    const IN_USE: u32 = 1;

    fn of(word: u32) -> Far {
        match word {
            Far::UNUSED => Far::Unused,
            Far::IN_USE => Far::InUse,
            ms => Far::Left(ms),
        }
    }

    fn word(self) -> u32 {
        match self {
            Far::Unused => Far::UNUSED,
            Far::InUse => Far::IN_USE,
            Far::Left(ms) => ms.max(Far::IN_USE + 1),
        }
    }
}

/// Records whose ring's far part is not [`Far::Unused`].
static FAR_PARTS: AtomicU32 = AtomicU32::new(0);

/// Whether there are such.
#[inline(always)]
pub fn has_far_parts() -> bool {
    FAR_PARTS.load(Relaxed) != 0
}

impl Conn {
    /// The phase.
    #[inline(always)]
    pub fn phase(&self) -> Phase {
        // Acquire: pairs with the Release in `go`; the slot is set.
        Phase::of(self.phase.load(Acquire))
    }

    /// Moves on, by an event that may happen now ([`phase::LEGAL`]). The caller keeps other events away, or they may come in any
    /// order.
    pub fn go(&self, event: Event) {
        let before = Phase::of(self.phase.load(Relaxed));
        debug_assert!(event.may_follow(before), "{event:?} in {before:?}");
        // Release: a thread that sees the phase sees the slot.
        self.phase.store(event.leads_to() as u32, Release);
    }

    /// Whether one of the flags is set.
    #[inline(always)]
    pub fn has(&self, flag: u32) -> bool {
        self.flags.load(Relaxed) & flag != 0
    }

    /// Sets or clears flags.
    pub fn set_flag(&self, flag: u32, on: bool) {
        single::put(&self.flags, flag, on);
    }

    /// What becomes of this fresh socket must not leave TCP: the kernel has to see the bytes.
    pub fn keep_to_kernel(&self) {
        self.set_flag(F_KERNEL_ONLY, true);
    }

    /// Whether what this listener accepts has to stay TCP.
    pub fn keep_children_to_kernel(&self, on: bool) {
        self.set_flag(F_CHILDREN_TCP, on);
    }

    /// Whether received messages tell what is left unread (TCP_INQ); the kernel is asked where that is not known.
    pub fn tells_unread(&self, ask: impl FnOnce() -> bool) -> bool {
        if !self.has(F_INQ_KNOWN) {
            self.set_flag(F_INQ, ask());
            self.set_flag(F_INQ_KNOWN, true);
        }
        self.has(F_INQ)
    }

    /// The kernel is to be asked for TCP_INQ anew.
    pub fn forget_tells_unread(&self) {
        self.set_flag(F_INQ_KNOWN, false);
    }

    /// SO_RCVLOWAT; 0 = the default. Of a shared end, as the process that set it last left it.
    #[inline(always)]
    pub fn lowat(&self) -> u32 {
        match self.slot().filter(|_| self.has(F_SHARED)) {
            Some(slot) => self.end(slot).rcvlowat.load(Relaxed),
            None => self.rcvlowat.load(Relaxed),
        }
    }

    /// Sets it.
    pub fn set_lowat(&self, value: u32) {
        self.rcvlowat.store(value, Relaxed);
        if let Some(slot) = self.slot() {
            self.end(slot).rcvlowat.store(value, Relaxed);
        }
    }

    /// Stops the calls that go to the kernel unobserved while there is no slot. False while any is under way.
    pub fn stop_kernel_calls(&self) -> bool {
        self.users.stop_early_calls()
    }

    /// Lets them go on, there being no slot after all.
    pub fn go_on_with_kernel_calls(&self) {
        self.users.let_early_calls_begin();
    }

    /// Final: plain TCP, for this reason.
    pub fn give_up(&self, reason: Reason) {
        self.reason.store(reason as u32, Relaxed);
        self.go(Event::GivesUp);
    }

    /// The same where the phase is [`Phase::Early`]. Whether it was.
    pub fn give_up_early(&self, reason: Reason) -> bool {
        let gives_up = self.leave_early(Event::GivesUp);
        if gives_up {
            self.reason.store(reason as u32, Relaxed);
        }
        gives_up
    }

    /// Whether the peer may be another user's, so that nothing is to be expected of it.
    pub fn is_with_other_user(&self) -> bool {
        self.has(F_HANDSHAKE) && !self.clc.is_with_kin()
    }

    /// The event happens if the phase is [`Phase::Early`]: false where another thread was faster, be it one that makes an offer, or
    /// one that wants the connection to stay TCP.
    pub fn leave_early(&self, event: Event) -> bool {
        debug_assert!(event.may_follow(Phase::Early), "{event:?}");
        let [before, after] = [Phase::Early, event.leads_to()].map(|phase| phase as u32);
        self.phase.compare_exchange(before, after, AcqRel, Acquire).is_ok()
    }

    /// Our end.
    #[inline(always)]
    pub fn side(&self) -> usize {
        if self.has(F_CLIENT) { CLIENT } else { ACCEPTOR }
    }

    /// Ties the record to a slot; the phase is set afterwards.
    ///
    /// # Safety
    /// The slot and its rings' memory stay mapped until [`Conn::forget_slot`].
    pub unsafe fn set_slot(&self, slot: *const Slot, memory: Memory, (device, near): (u8, Near)) {
        let far_shift = if memory.far.is_null() { 0 } else { memory.far_shift };
        self.meet.store(memory.meet.cast(), Relaxed);
        self.far.store(memory.far.cast(), Relaxed);
        let [client, acceptor] = memory.shifts;
        self.shifts.store(client | acceptor << 8 | far_shift << 16, Relaxed);
        self.device.store(device.into(), Relaxed);
        self.near.store(near.word(), Relaxed);
        self.tx_most.store(0, Relaxed);
        self.set_far_part(Far::Unused);
        self.set_life(None);
        self.voucher.store(0, Relaxed);
        self.stuck.store(0, Relaxed);
        self.ear_sent.store(0, Relaxed);
        self.set_flag(F_HAD_SLOT, true);
        order::begin();
        self.slot.store(slot.cast_mut(), Release);
    }

    /// The word that tells the peer's death; one that never says anything where there is none. There is a slot.
    #[inline(always)]
    pub fn life(&self) -> &AtomicU32 {
        // SAFETY: not null since `set_slot`; it stays mapped until `set_life`, whose callers keep others away.
        unsafe { &*self.life.load(Relaxed) }
    }

    /// Whether there is one.
    pub fn has_life(&self) -> bool {
        !ptr::eq(self.life.load(Relaxed), &raw const NO_LIFE)
    }

    /// From now on it is this one, which the device has counted us as a user of. Nobody else uses the old one: the
    /// caller holds the sending lock, or there is no ring.
    pub fn set_life(&self, word: Option<&'static AtomicU32>) {
        let word = ptr::from_ref(word.unwrap_or(&NO_LIFE)).cast_mut();
        let before = self.life.swap(word, Relaxed);
        self.life_seen.store(NEVER, Relaxed);
        if !before.is_null() && !ptr::eq(before, &raw const NO_LIFE) {
            LIFE_LEFT.call(before.cast_const());
        }
    }

    /// log2 of the bytes of the ring that we send by.
    pub fn full_shift(&self) -> u32 {
        self.shifts.load(Relaxed) >> (8 * self.side()) & 0xff
    }

    /// Whether the far parts of the rings are in reach.
    pub fn has_far(&self) -> bool {
        self.shifts.load(Relaxed) > 0xffff
    }

    /// What becomes of our ring's far part.
    #[inline(always)]
    pub fn far_part(&self) -> Far {
        Far::of(self.far_part.load(Relaxed))
    }

    /// A step of [`Far`].
    pub fn set_far_part(&self, now: Far) {
        let before = Far::of(self.far_part.swap(now.word(), Relaxed));
        match (before, now) {
            (Far::Unused, Far::Unused) => {}
            (Far::Unused, _) => drop(FAR_PARTS.fetch_add(1, Relaxed)),
            (_, Far::Unused) => {
                FAR_PARTS.fetch_sub(1, Relaxed);
                memory::gave_far_back(self.far_taken.swap(0, Relaxed).into());
            }
            _ => {}
        }
    }

    /// The slot is not ours any more.
    pub fn forget_slot(&self) {
        self.set_far_part(Far::Unused);
        if self.has(F_HANDSHAKE) {
            self.clc.give_back();
        }
        self.slot.store(ptr::null_mut(), Release);
    }

    /// How often it came back from the ring. A thread that finds it changed finds the phase changed, too.
    #[inline(always)]
    pub fn returns(&self) -> u32 {
        self.returns.load(Acquire)
    }

    /// The slot becomes one of an earlier time. False where there were too many: it stays what it is.
    pub fn leave_slot(&self) -> bool {
        let Some(past) = self.past.get(self.returns() as usize) else { return false };
        past.segment.store(self.segment.load(Relaxed), Relaxed);
        past.index.store(self.slot_index.load(Relaxed), Relaxed);
        past.slot.store(self.slot.load(Relaxed), Relaxed);
        self.forget_slot();
        true
    }

    /// After [`Conn::leave_slot`] and the change of the phase, and before a step of the next handshake can be made.
    pub fn came_back(&self) {
        self.returns.fetch_add(1, Release);
        // Pairs with the one in `Unseen::enter`.
        fence(SeqCst);
    }

    fn past(&self, number: usize) -> Option<&'static Slot> {
        let slot = self.past[number].slot.load(Acquire);
        // SAFETY: as in `slot`; the segment counts it as used until `forget_past`.
        if slot.is_null() { None } else { Some(unsafe { &*slot }) }
    }

    /// The slots of earlier times, the oldest first: end, segment, index in it.
    pub fn past_ends(&self) -> impl Iterator<Item = (&'static End, u32, u32)> {
        (0..RETURNS).filter_map(|number| {
            let slot = self.past(number)?;
            let at = |cell: &AtomicU32| cell.load(Relaxed);
            let past = &self.past[number];
            Some((&slot.end[self.side()], at(&past.segment), at(&past.index)))
        })
    }

    /// Our ends of all its slots, the oldest first.
    pub fn ends(&self) -> impl Iterator<Item = &'static End> {
        let present = self.slot().map(|slot| &slot.end[self.side()]);
        self.past_ends().map(|(end, ..)| end).chain(present)
    }

    /// Whether everything that was sent in earlier times is in the kernel: no send is in flight there, and what a thread
    /// published when the peer had left already was sent by TCP.
    pub fn is_past_sent(&self) -> bool {
        (0..RETURNS).filter_map(|number| self.past(number)).all(|slot| {
            let own = self.own(slot);
            let left = own.flags(Acquire).is_left();
            self.end(slot).tcp_sends.load(Acquire) & IN_FLIGHT == 0
                && (!left || own.prod.load(Acquire) == own.resent.load(Acquire))
        })
    }

    /// They are released.
    pub fn forget_past(&self) {
        self.past.iter().for_each(|past| past.slot.store(ptr::null_mut(), Release));
        self.returns.store(0, Relaxed);
    }

    /// What the processes that came to this connection by fork share about it.
    pub fn family(&self) -> Option<&'static End> {
        match self.slot() {
            Some(slot) => Some(&slot.end[self.side()]),
            None => self.past_ends().last().map(|(end, ..)| end),
        }
    }

    /// The slot, if there is one.
    #[inline(always)]
    pub fn slot(&self) -> Option<&'static Slot> {
        let slot = self.slot.load(Acquire);
        // SAFETY: set_slot's contract; the thread that unmaps has taken both locks and forgotten the slot first.
        if slot.is_null() { None } else { Some(unsafe { &*slot }) }
    }

    /// Whether the connection is in the ring, and in this slot's. To be asked with a lock that keeps it there.
    pub fn is_in_ring_of(&self, slot: &Slot) -> bool {
        self.phase() == Phase::Ring && self.has_slot(slot)
    }

    /// Whether this is the record's present slot, likewise.
    #[inline(always)]
    pub fn has_slot(&self, slot: &Slot) -> bool {
        ptr::eq(self.slot.load(Acquire), slot)
    }

    /// The direction towards us.
    #[inline(always)]
    pub fn rx<'a>(&self, slot: &'a Slot) -> Ring<'a> {
        // SAFETY: set_slot's contract.
        unsafe { Ring::new(slot, 1 - self.side(), self.memory()) }
    }

    /// The direction away from us.
    #[inline(always)]
    pub fn tx<'a>(&self, slot: &'a Slot) -> Ring<'a> {
        let most = match self.tx_most.load(Relaxed) {
            0 => usize::MAX,
            most => most as usize,
        };
        // SAFETY: set_slot's contract.
        unsafe { Ring::new(slot, self.side(), self.memory()) }.limited(most)
    }

    #[inline(always)]
    fn memory(&self) -> Memory {
        let (shifts, meet) = (self.shifts.load(Relaxed), self.meet.load(Relaxed).cast());
        let far = self.far.load(Relaxed).cast();
        let of_rings = [shifts & 0xff, shifts >> 8 & 0xff];
        Memory { meet, shifts: of_rings, far, far_shift: shifts >> 16 }
    }

    /// What our processes share about this end.
    #[inline(always)]
    pub fn end<'a>(&self, slot: &'a Slot) -> &'a End {
        &slot.end[self.side()]
    }

    /// What the peer's processes share about theirs.
    #[inline(always)]
    pub fn peer_end<'a>(&self, slot: &'a Slot) -> &'a End {
        &slot.end[1 - self.side()]
    }

    /// The peer's sending line.
    #[inline(always)]
    pub fn peer<'a>(&self, slot: &'a Slot) -> &'a Producer {
        &slot.dir[1 - self.side()].producer
    }

    /// Our sending line.
    #[inline(always)]
    pub fn own<'a>(&self, slot: &'a Slot) -> &'a Producer {
        &slot.dir[self.side()].producer
    }
}

/// Most records of one process. They take address space, which 32-bit programs have little of.
pub const CONNS: usize = if cfg!(target_pointer_width = "32") { 1 << 15 } else { 1 << 18 };

static BASE: AtomicPtr<Conn> = AtomicPtr::new(ptr::null_mut());
static NEXT: AtomicU32 = AtomicU32::new(0);

/// The word of a peer's process is not looked at any more: the device counts one user less.
pub static LIFE_LEFT: Hook<*const AtomicU32> = Hook::new();

/// Record `index`.
#[inline(always)]
pub fn at(index: u32) -> &'static Conn {
    debug_assert!((index as usize) < CONNS);
    let base = BASE.load(Relaxed);
    // SAFETY: indices come only from `alloc` (through the fd table), so BASE is set and index < CONNS;
    // the memory is never unmapped, zero is a valid record, all fields are atomics.
    unsafe { &*base.add(index as usize) }
}

/// Record `index` is going to be used.
#[inline(always)]
pub fn fetch(index: u32) {
    let place = BASE.load(Relaxed).wrapping_add(index as usize);
    cache::fetch(place);
    // The second line.
    cache::fetch(place.cast::<u8>().wrapping_add(64));
}

/// Record `index`, if it was ever in use. For numbers from elsewhere.
pub fn get(index: u32) -> Option<&'static Conn> {
    (index < NEXT.load(Relaxed).min(CONNS as u32)).then(|| at(index))
}

/// The record of the table that has this address in it.
pub fn around(address: usize) -> Option<u32> {
    let offset = address.checked_sub(BASE.load(Relaxed).addr())?;
    let index = (offset / size_of::<Conn>()) as u32;
    get(index).map(|_| index)
}

/// The index of a record of the table.
pub fn index_of(conn: &Conn) -> u32 {
    let offset = ptr::from_ref(conn).addr() - BASE.load(Relaxed).addr();
    (offset / size_of::<Conn>()) as u32
}

/// A record outside the table, of a connection in the ring with these flags.
#[cfg(test)]
pub fn loose(flags: u32) -> Conn {
    // SAFETY: atomics and integers only: zero is a valid record.
    let conn: Conn = unsafe { core::mem::zeroed() };
    conn.set_flag(flags | F_SHARED, true);
    conn.phase.store(Phase::Ring as u32, Relaxed);
    conn
}

/// Calls `each` for every record in use.
pub fn for_each(mut each: impl FnMut(u32, &'static Conn)) {
    for_all(|index, conn| {
        if conn.phase() != Phase::Free {
            each(index, conn);
        }
    });
}

/// Calls `each` for every record that was ever in use.
pub fn for_all(mut each: impl FnMut(u32, &'static Conn)) {
    let high = (NEXT.load(Relaxed) as usize).min(CONNS);
    for index in 0..high as u32 {
        each(index, at(index));
    }
}
