//! Where everything lies in a segment: a sealed memfd of one client process and one listener.
//!
//! ```text
//! 0          SegmentHeader (one page)
//! 4096       Slot × slots                     cursors, flags, arm words
//! data       (ring × 2) × slots               slot 0: client→acceptor, acceptor→client; slot 1: …
//!                                             the two may have different sizes
//! far        (far part × 2) × slots           the same order
//! ```
//!
//! The two rings of a slot meet in the middle of a page, and small messages stay around that place
//! ([`crate::ring`]): a connection that has only ever seen such has one page of data in memory. The far parts take what
//! nobody reads, and are not in memory before.
//!
//! All fields are atomics of the target's byte order: both ends run on one machine.

use crate::sync::Ordering::Relaxed;
use crate::sync::{AtomicU32, AtomicU64, MODEL};

/// First eight bytes of a segment.
pub const SEGMENT_MAGIC: u64 = u64::from_le_bytes(*b"uSMCsegm");
/// Changes whenever a field here moves.
pub const SEGMENT_VERSION: u32 = 11;
/// Bytes before slot 0.
pub const SLOTS_OFFSET: usize = 4096;
/// Most slots of one segment.
pub const SLOTS_MAX: u32 = 4096;
/// log2 of the smallest window of a ring, 16 KiB (the smallest RMB of RFC 7609 §4.3.1).
pub const WINDOW_SHIFT_MIN: u32 = if MODEL { 1 } else { 14 };
/// log2 of the largest ring, 4 MiB; also of the largest far part of one.
pub const WINDOW_SHIFT_MAX: u32 = 22;
/// The unit of [`Producer::far_pages`], and what all parts but the rings begin at a multiple of.
pub const PAGE: usize = if MODEL { 1 } else { 4096 };
/// log2 of what a far part begins at a multiple of, so that its pages are its own on all machines.
const FAR_ALIGN_SHIFT: u32 = 16;

/// Bytes of each ring in the page that the two of a slot share: half of it.
pub const SHARED: usize = if MODEL { 1 } else { 2048 };

/// The client end of a connection; also the direction client → acceptor.
pub const CLIENT: usize = 0;
/// The accepting end; also the direction acceptor → client.
pub const ACCEPTOR: usize = 1;

/// Start of a segment.
#[repr(C)]
pub struct SegmentHeader {
    /// [`SEGMENT_MAGIC`].
    pub magic: AtomicU64,
    /// [`SEGMENT_VERSION`].
    pub version: AtomicU32,
    /// Number of slots.
    pub slots: AtomicU32,
    /// log2 of the bytes of a ring, or both where the two of a slot differ ([`rings_word`]).
    pub ring_shift: AtomicU32,
    /// 1 once the client allocates no more slots here.
    pub retired: AtomicU32,
    /// Random identity, never 0.
    pub id: AtomicU64,
    /// Process index (low half) and incarnation (high half) of the client.
    pub owner: AtomicU64,
    /// log2 of the bytes of a ring's far part; 0 = there are none.
    pub far_shift: AtomicU32,
    /// Of an agent's room: a bit for each slot whose process has rung by the agent's ear ([`crate::agent::Request::RoomEar`]) and which the agent has
    /// not looked at yet.
    pub rang: AtomicU64,
}

/// A slot holds no connection.
pub const SLOT_FREE: u32 = 0;
/// The client offered it for a connection.
pub const SLOT_OFFERED: u32 = 1;
/// The acceptor found its connection's offer.
pub const SLOT_ATTACHED: u32 = 2;
/// The client confirmed: both ends may switch their sending direction.
pub const SLOT_CONFIRMED: u32 = 3;
/// The client took the offer back, or one of the two declined before the client had confirmed.
pub const SLOT_WITHDRAWN: u32 = 4;

/// Handshake state, written rarely.
#[derive(Default)]
#[repr(C, align(128))]
pub struct Control {
    /// `SLOT_*` in the low 8 bits, the slot's use count above (so a late CAS cannot hit the next use).
    pub state: AtomicU32,
    /// Process index of the acceptor, for diagnosis.
    pub attached_by: AtomicU32,
    /// In a region: the acceptor's peer ([`crate::region::peers::Peers::holder`]), written before the slot is attached.
    pub attached_peer: AtomicU32,
    /// In a region: the tokens of the connection that it is offered for, the client's first. Both went through its TCP stream.
    pub tokens: [AtomicU64; 2],
}

/// What the processes of one end keep between themselves (fork shares an end). The peer can write it;
/// a peer that does spoils only this connection.
#[derive(Default)]
#[repr(C, align(128))]
pub struct End {
    /// Processes that hold this end.
    pub refs: AtomicU32,
    /// Sends through the kernel's TCP in flight (in the ring: doorbells), [`SWITCHING`] and [`RETURNED`]; see
    /// [`crate::span`] and [`crate::back`].
    pub tcp_sends: AtomicU32,
    /// Sleepers in the kernel that wait for data of the ring.
    pub rx_sleepers: AtomicU32,
    /// Sleepers in the kernel that wait for room in the ring.
    pub tx_sleepers: AtomicU32,
    /// Doorbell bytes this end has taken out of the TCP stream.
    pub bells_drained: AtomicU32,
    /// `END_*` bits, a count at [`END_MARKS_SHIFT`], and at [`END_ERRNO_SHIFT`] the error of [`END_ERROR_TAKEN`];
    /// 0 = unknown.
    pub flags: AtomicU32,
    /// Lock of the sending direction, used once several processes hold this end.
    pub tx_lock: AtomicU64,
    /// Lock of the receiving direction, likewise.
    pub rx_lock: AtomicU64,
    /// Bytes of the TCP span the application has not read yet, plus one; 0 = not computed. Or [`TCP_AGAIN`],
    /// [`BY_SENDER`].
    pub tcp_left: AtomicU64,
    /// SO_RCVBUF as the kernel counts it, in bytes; 0 = the application has never set it.
    pub rcv_buf: AtomicU32,
    /// SO_RCVLOWAT of the application; 0 = the default, 1.
    pub rcvlowat: AtomicU32,
    /// Lock of whoever ends the sending direction's ring span ([`crate::back`]), be it the peer.
    pub back_lock: AtomicU64,
    /// A process that holds this end; 0 = unknown.
    pub pid: AtomicU32,
    /// The socket's number there.
    pub fd: AtomicU32,
    /// Other holders of the socket, by the directory's number for it; 0 = nobody but the processes counted in `refs`.
    pub passed_on: AtomicU32,
    /// Threads asleep in a send.
    pub blocked_sends: AtomicU32,
    /// Calls that are taking the connection out of the ring.
    pub leaving: AtomicU32,
    /// Ids of processes that are counted in `refs`; 0 = a free place.
    pub members: [AtomicU32; 8],
    /// Doorbells in flight that processes of the other end send on behalf of this one.
    pub bells_for: AtomicU32,
    /// The namespace in which `pid` and `members` are ids of processes, by the inode of `/proc/self/ns/pid`; 0 = unknown.
    pub pids: AtomicU32,
    /// Processes of this end, by the directory's number plus one, 0 = none: in the low half the one whose mailbox takes the peer's
    /// ear, in the high half the one whose ear the peer has. Where the peer is an agent, the high half has the number of an ear that the agent
    /// has given, plus one ([`ARM_EAR`]).
    pub ears: AtomicU32,
}

/// Bit of [`End::tcp_sends`]: no TCP send begins any more; the sending direction changes from TCP to the
/// ring, or has changed.
pub const SWITCHING: u32 = 1 << 31;
/// Bit of [`End::tcp_sends`]: the sending direction leaves the ring, or never gets there; no doorbell begins.
pub const RETURNED: u32 = 1 << 30;
/// The other bits of [`End::tcp_sends`].
pub const IN_FLIGHT: u32 = RETURNED - 1;
/// The application has TCP_NODELAY set (the kernel socket of a ring connection always has).
pub const END_NODELAY: u32 = 1;
/// The application has TCP_CORK set.
pub const END_CORK: u32 = 2;
/// ECONNRESET was reported to the application.
pub const END_RESET_SEEN: u32 = 4;
/// The application shut its receiving direction down.
pub const END_SHUT_RD: u32 = 8;
/// An error was taken out of the kernel's socket, perhaps by another process of this end.
pub const END_ERROR_TAKEN: u32 = 16;
/// The application sent after the peer's end: TCP would have been reset by now.
pub const END_SENT_AFTER: u32 = 32;

/// We shut the kernel socket's receiving direction down ourselves, to wake a sender of ours that slept there. A byte by TCP
/// would be answered by a RST: no doorbells, and a sleeper looks by itself.
pub const END_CUT: u32 = 64;
/// A process of this end has given the application's options back to the kernel's socket, on the way out of the ring.
pub const END_GIVEN_BACK: u32 = 128;
/// Where in [`End::flags`] eight bits count how often SO_RCVLOWAT was set with enough to read: epoll's edge for processes
/// that share the end.
pub const END_MARKS_SHIFT: u32 = 8;
/// Where in [`End::flags`] the errno of [`END_ERROR_TAKEN`] stands, eight bits.
pub const END_ERRNO_SHIFT: u32 = 16;
/// The socket has SO_LINGER with no time: its end is a reset, be it by a death.
pub const END_RESETS: u32 = 1 << 24;

/// This end may be handed on to a program that knows nothing of the ring, also behind the peer's end: a peer that ends its
/// direction leaves copies of what is unread ([`Producer::copied`]).
pub const END_HANDS_ON: u32 = 1 << 25;

/// This end has the far parts of both rings in reach: its peer's window may grow into one.
pub const END_FAR: u32 = 1 << 26;

/// Written by the sender only.
#[derive(Default)]
#[repr(C, align(128))]
pub struct Producer {
    /// Bytes published since the ring began.
    pub prod: AtomicU64,
    /// Where cursors lie: [`window_word`]. Changed while the ring is empty, or by a window that grows, for the bytes
    /// from [`Producer::grown_at`] on.
    pub window: AtomicU64,
    /// The sender's own: up to this cursor it sends without a look at `cons`.
    pub limit: AtomicU64,
    /// `TX_*`.
    pub state: AtomicU32,
    /// `TXF_*` bits. The receiver sets [`TXF_LEFT`], the sender all others.
    pub flags: AtomicU32,
    /// Doorbell bytes the sender has put into the TCP stream.
    pub bells_sent: AtomicU32,
    /// CPU the sending end last waited on, or an agent has run on, plus one; 0 = unknown.
    pub cpu: AtomicU32,
    /// Length in bytes of the TCP span before the ring, plus one; 0 = not drawn yet. Valid once `state` is
    /// [`TX_RING`].
    pub boundary: AtomicU64,
    /// The sender's cycle counter when it last published: what a waiter on several connections orders them by. The
    /// lowest bit is [`STAMP_BEHIND`].
    pub stamp: AtomicU64,
    /// The identity of a process that holds the sending end, and whose word tells its death; 0 = none does,
    /// [`VOUCHER_CLAIMED`].
    pub voucher: AtomicU32,
    /// Its process id, for processes that share its namespace of these.
    pub voucher_pid: AtomicU32,
    /// Bytes of TCP before the span that follows the ring, plus one; 0 = not drawn yet. Valid once `state` is
    /// [`TX_BACK`].
    pub resume: AtomicU64,
    /// Where the receiver has left: everything before this cursor was read or sent again. Valid likewise. With [`TXF_COPIED`]:
    /// where the copies end.
    pub resent: AtomicU64,
    /// With [`WINDOW_SPLIT`]: bytes before this cursor lie where `window_before` says.
    pub grown_at: AtomicU64,
    /// [`window_word`] before it grew.
    pub window_before: AtomicU64,
    /// The number of the descriptor of the voucher's word in its process.
    pub voucher_fd: AtomicU32,
    /// The sender's own: pages of the ring's far part, from its start on, that may be in memory. They stay so when the slot
    /// changes hands.
    pub far_pages: AtomicU32,
    /// With [`STAMP_BEHIND`]: the sender's cycle counter when the kernel last took something of another connection.
    pub behind: AtomicU64,
    /// Likewise, when that was no doorbell: what is read there. 0 of a sender that does not tell.
    pub behind_bytes: AtomicU64,
    /// The ring's bytes from this cursor on stand in TCP, too, behind `resume`; plus one, 0 = none do. Valid as that is. Where
    /// the receiver has left: `resent` when bytes that were published late began to be sent, and `behind` what the kernel
    /// had got then.
    pub copied: AtomicU64,
}

/// [`Producer::window`] of `1 << shift` bytes: position = (cursor − base) mod window.
pub const fn window_word(base: u32, shift: u32) -> u64 {
    (shift as u64) << 32 | base as u64
}

/// Bit of [`Producer::window`]: it has grown while bytes were unread.
pub const WINDOW_SPLIT: u64 = 1 << 63;

impl Producer {
    /// log2 of the window. Whatever the sender has written there: to be checked.
    pub fn window_shift(&self) -> u32 {
        shift_of(self.window.load(Relaxed))
    }
}

/// log2 of the window that a word speaks of.
pub const fn shift_of(word: u64) -> u32 {
    ((word & !WINDOW_SPLIT) >> 32) as u32
}

/// [`Producer::stamp`]: in the last minute, the kernel took something of another connection.
pub const STAMP_BEHIND: u64 = 1;

/// [`Producer::voucher`]: somebody is just writing its process id and descriptor. Identities are greater.
pub const VOUCHER_CLAIMED: u32 = 1;

/// [`End::tcp_left`]: the ring is over, the next bytes are TCP's for good.
pub const TCP_AGAIN: u64 = u64::MAX;
/// [`End::tcp_left`]: the sender went back before this end had seen the switch; only doorbells stand between the TCP
/// span and the bytes that follow.
pub const BY_SENDER: u64 = u64::MAX - 1;

/// The direction's bytes go through the kernel's TCP.
pub const TX_TCP: u32 = 0;
/// The direction's bytes go through the ring.
pub const TX_RING: u32 = 1;
/// The direction's bytes go through the kernel's TCP again ([`crate::back`]).
pub const TX_BACK: u32 = 2;

/// No byte follows (shutdown for writing, or close).
pub const TXF_DONE: u32 = 1;
/// The sending end is closed altogether: what is sent to it is lost.
pub const TXF_CLOSED: u32 = 2;
/// The sending end closed with unread data, or with SO_LINGER 0: TCP would have sent a RST.
pub const TXF_ABORT: u32 = 4;
/// With [`TXF_DONE`]: by shutdown(2), so that a FIN goes out whatever follows.
pub const TXF_SHUT: u32 = 8;
/// The receiver takes nothing more out of the ring: its sender sends what is unread by TCP.
pub const TXF_LEFT: u32 = 16;
/// The sender goes back to TCP: the receiver reads the ring to its end first. Never with [`TXF_LEFT`].
pub const TXF_BACK: u32 = 32;
/// The sender has left the other direction: look there.
pub const TXF_LOOK: u32 = 64;
/// All copies are in the sender's kernel ([`Producer::copied`]), up to the cursor [`Producer::resent`].
pub const TXF_COPIED: u32 = 128;
/// The bits that say that one of the directions is on its way back to TCP.
pub const TXF_RETURNS: u32 = TXF_LEFT | TXF_BACK | TXF_LOOK;
/// The bits that say how the direction ends.
pub const TXF_ENDS: u32 = TXF_DONE | TXF_CLOSED | TXF_ABORT | TXF_SHUT;

/// Written by the receiver only.
#[derive(Default)]
#[repr(C, align(128))]
pub struct Consumer {
    /// Bytes the receiver has taken out.
    pub cons: AtomicU64,
}

/// The sleepers that want to be woken. Written by a sleeper, taken by its waker.
#[derive(Default)]
#[repr(C, align(128))]
pub struct Arm {
    /// `ARM_*` bits of sleepers that wait for data.
    pub rx: AtomicU32,
    /// `ARM_*` bits of sleepers that wait for room.
    pub tx: AtomicU32,
}

/// Wake by one byte on the connection's own TCP socket.
pub const ARM_TCP: u32 = 1;
/// Wake by an ear. Where an agent wakes: that of the sleeping epoll set ([`crate::agent::Request::Ear`]), whose number is in [`End::ears`]. Where
/// an agent sleeps: that of the room ([`crate::agent::Request::RoomEar`]). A process that has none rings by [`ARM_TCP`]'s way.
pub const ARM_EAR: u32 = 8;
/// Nobody sleeps, but the receiver has left ([`TXF_LEFT`]): the bytes just published have to go by TCP.
pub const ARM_LEFT: u32 = 2;
/// One of several processes that share the waking end is about to ring. A process that is killed then leaves it, and the next one
/// that looks for sleepers rings.
pub const ARM_RINGING: u32 = 4;

/// One direction of a connection.
#[derive(Default)]
#[repr(C)]
pub struct Direction {
    /// The sender's line.
    pub producer: Producer,
    /// The receiver's line.
    pub consumer: Consumer,
    /// The sleepers' line.
    pub arm: Arm,
}

/// One connection.
#[derive(Default)]
#[repr(C)]
pub struct Slot {
    /// The handshake.
    pub control: Control,
    /// Indexed by [`CLIENT`] and [`ACCEPTOR`].
    pub end: [End; 2],
    /// Indexed by the sending end.
    pub dir: [Direction; 2],
}

#[cfg(not(any(loom, shuttle)))]
const _: () = {
    assert!(size_of::<SegmentHeader>() <= SLOTS_OFFSET);
    assert!(
        size_of::<Producer>() == 128 && size_of::<Consumer>() == 128 && size_of::<Arm>() == 128
    );
    assert!(size_of::<Slot>() == 128 * 9);
};

// 32-bit and 64-bit processes share these.
#[cfg(not(any(loom, shuttle)))]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<SegmentHeader>() == 56 && align_of::<SegmentHeader>() == 8);
    assert!(offset_of!(SegmentHeader, retired) == 20 && offset_of!(SegmentHeader, id) == 24);
    assert!(offset_of!(SegmentHeader, far_shift) == 40);
    assert!(size_of::<Control>() == 128 && offset_of!(Control, attached_by) == 4);
    assert!(offset_of!(Control, attached_peer) == 8 && offset_of!(Control, tokens) == 16);
    assert!(size_of::<End>() == 128 && offset_of!(End, flags) == 20);
    assert!(offset_of!(End, tx_lock) == 24 && offset_of!(End, tcp_left) == 40);
    assert!(offset_of!(End, rcv_buf) == 48 && offset_of!(End, back_lock) == 56);
    assert!(offset_of!(End, pid) == 64 && offset_of!(End, passed_on) == 72);
    assert!(offset_of!(End, members) == 84 && offset_of!(End, bells_for) == 116);
    assert!(offset_of!(End, ears) == 124);
    assert!(offset_of!(Producer, state) == 24 && offset_of!(Producer, boundary) == 40);
    assert!(offset_of!(Producer, stamp) == 48 && offset_of!(Producer, resume) == 64);
    assert!(offset_of!(Producer, voucher) == 56 && offset_of!(Producer, voucher_fd) == 96);
    assert!(offset_of!(Producer, far_pages) == 100);
    assert!(offset_of!(Producer, behind) == 104 && offset_of!(Producer, behind_bytes) == 112);
    assert!(offset_of!(Producer, copied) == 120);
    assert!(offset_of!(Direction, consumer) == 128 && offset_of!(Direction, arm) == 256);
    assert!(offset_of!(Slot, end) == 128 && offset_of!(Slot, dir) == 384);
};

/// [`SegmentHeader::ring_shift`] of rings of these sizes, each as the log2 of its bytes: the client's and the acceptor's.
pub const fn rings_word(shifts: [u32; 2]) -> u32 {
    let [client, acceptor] = shifts;
    if client == acceptor { client } else { client | acceptor << 8 }
}

/// The sizes that such a word speaks of. Whatever a stranger has written there: to be checked.
pub const fn ring_shifts(word: u32) -> [u32; 2] {
    let (client, acceptor) = (word & 0xff, word >> 8);
    if acceptor == 0 { [word; 2] } else { [client, acceptor] }
}

const fn is_ring(shift: u32) -> bool {
    shift >= WINDOW_SHIFT_MIN && shift <= WINDOW_SHIFT_MAX
}

/// Bytes of a segment with `slots` slots and rings as [`rings_word`] says, without their far parts; `None` outside the limits.
pub const fn near_len(slots: u32, rings: u32) -> Option<usize> {
    let [client, acceptor] = ring_shifts(rings);
    if slots == 0 || slots > SLOTS_MAX || !is_ring(client) || !is_ring(acceptor) {
        return None;
    }
    let pair = (1_u64 << client) + (1_u64 << acceptor);
    // In 64 bits: on a 32-bit machine a stranger's header may ask for more than there are addresses.
    let len = data_offset(slots) as u64 + slots as u64 * pair + SHARED as u64;
    if len > isize::MAX as u64 { None } else { Some(len as usize) }
}

/// Bytes of a segment with far parts of `1 << far_shift` bytes, more than a ring's; 0 = it has none.
pub const fn segment_len(slots: u32, rings: u32, far_shift: u32) -> Option<usize> {
    let Some(near) = near_len(slots, rings) else { return None };
    if far_shift == 0 {
        return Some(near);
    }
    let [client, acceptor] = ring_shifts(rings);
    if far_shift <= client || far_shift <= acceptor || far_shift > WINDOW_SHIFT_MAX {
        return None;
    }
    let len = far_offset(near) as u64 + ((slots as u64) << (far_shift + 1));
    if len > isize::MAX as u64 { None } else { Some(len as usize) }
}

/// Offset of the first far part, behind `near` bytes ([`near_len`]).
pub const fn far_offset(near: usize) -> usize {
    near.next_multiple_of(1 << FAR_ALIGN_SHIFT)
}

/// Offset of the first ring, in the middle of a page.
pub const fn data_offset(slots: u32) -> usize {
    (SLOTS_OFFSET + slots as usize * size_of::<Slot>()).next_multiple_of(4096) + SHARED
}
