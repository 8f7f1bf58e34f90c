//! What a record keeps of a handshake by CLC messages.

use usmc_shm::sync::Ordering::Relaxed;
use usmc_shm::sync::{AtomicU32, AtomicU64};

use crate::os::{clock, memory, process};

/// Devices on which one client asks at most.
pub const DEVICES: usize = 5;
/// log2 of the least that is taken of memory.
const PAGE_SHIFT: u32 = 12;

/// How far this end is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Step {
    /// There is no handshake by CLC.
    None = 0,
    /// Client: has asked on the device.
    Asked = 1,
    /// Client: has proposed.
    Proposed = 2,
    /// Client: has read the Accept.
    Accepted = 3,
    /// Acceptor: has said that it holds the connection.
    Held = 4,
    /// Acceptor: has read the Proposal.
    Asking = 5,
    /// Acceptor: has answered.
    Answered = 6,
    /// Acceptor: has read the Confirm.
    Confirmed = 7,
    /// Client: the destination was declared to speak SMC, or may say so by the SYN-ACK, and nothing is sent yet.
    Declared = 8,
    /// Acceptor: the client was declared or has said SMC, and nothing is read yet.
    Expecting = 9,
    /// Either: this process, or the one that it was forked by, forked while a message was in the stream. Whichever reads
    /// up to it takes it out.
    Leftover = 10,
    /// Either: an agent is about to get the connection ([`crate::handshake::clc::deputy`]).
    Handing = 11,
    /// Client: an agent's Proposal went with the SYN, and no agent has the connection. The answer is declined.
    Refusing = 12,
}

const STEPS: [Step; 13] = [
    Step::None,
    Step::Asked,
    Step::Proposed,
    Step::Accepted,
    Step::Held,
    Step::Asking,
    Step::Answered,
    Step::Confirmed,
    Step::Declared,
    Step::Expecting,
    Step::Leftover,
    Step::Handing,
    Step::Refusing,
];

/// A record's part in a handshake. All zero: none.
#[derive(Default)]
#[repr(C)]
pub struct State {
    pub step: AtomicU32,
    /// The process that is in it: a forked child is not.
    pub pid: AtomicU32,
    /// When this step began, in milliseconds.
    pub since: AtomicU32,
    /// When a message was first seen that could not be taken yet, in milliseconds; 0 = none was.
    pub partial: AtomicU32,
    /// Decline code, of whichever side, for `usmc ss`; 0 = neither has declined.
    pub declined: AtomicU32,
    /// Whether the peer is of our own user.
    pub is_own_user: AtomicU32,
    /// Pages put aside for what a stranger may make us take.
    pub aside: AtomicU32,
    /// Whether they are for far parts, too.
    pub far_aside: AtomicU32,
    /// Client: its questions, by device: index + 1 above the use count; 0 = none there.
    asked: [AtomicU64; DEVICES],
    /// Whether the kernel's socket has the mark of a ring for the sake of messages ([`crate::family::mark`]).
    pub is_marked: AtomicU32,
    /// Whether TCP_NODELAY is on for the sake of messages, and off to the application: a small send would wait until the message
    /// before it is acknowledged, which takes up to 40 ms.
    pub hurries: AtomicU32,
    /// Where the message of [`Step::Leftover`] stands in the stream.
    pub leftover: AtomicU64,
    /// Acceptor: the token of our Accept.
    pub own: AtomicU64,
    /// Acceptor: that of the client's Confirm.
    pub peer: AtomicU64,
    /// Of a connection that an agent gets: the connection to the agent, plus one; 0 = none, the largest two are states
    /// of [`crate::handshake::clc::deputy`].
    pub control: AtomicU32,
    /// Of a connection that an agent gets: whether this end has connected.
    pub has_connected: AtomicU32,
    /// Client: bytes of the agent's Proposal that went with the SYN (TCP Fast Open); 0 = none did.
    pub in_syn: AtomicU32,
    /// Client: whether the kernel's socket has TCP_FASTOPEN_CONNECT for the sake of that.
    pub opens_fast: AtomicU32,
    /// Of a deputy: the identity of the agent's room.
    pub room: AtomicU64,
    /// What was delivered: the peer's token, segment, slot and use, file. The token is set last.
    pub given: [AtomicU64; 4],
}

impl State {
    /// The step.
    pub fn step(&self) -> Step {
        STEPS.get(self.step.load(Relaxed) as usize).copied().unwrap_or(Step::None)
    }

    /// It is at this one now, in this process.
    pub fn set(&self, step: Step) {
        self.pid.store(process::pid(), Relaxed);
        self.since.store(clock::now_ms(), Relaxed);
        self.partial.store(0, Relaxed);
        self.step.store(step as u32, Relaxed);
    }

    /// Whether a handshake of this process is under way.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.step.load(Relaxed) != Step::None as u32
    }

    /// The client has asked on this device.
    pub fn ask(&self, device: u8, index: u32, use_count: u32) {
        if let Some(place) = self.asked.get(usize::from(device)) {
            place.store((u64::from(index) + 1) << 32 | u64::from(use_count), Relaxed);
        }
    }

    /// Its questions: device, index and use count.
    pub fn asked(&self) -> impl Iterator<Item = (u8, u32, u32)> {
        (0..).zip(&self.asked).filter_map(|(device, place)| {
            let place = place.load(Relaxed);
            Some((device, ((place >> 32) as u32).checked_sub(1)?, place as u32))
        })
    }

    /// It asks no more.
    pub fn forget_asked(&self) {
        self.asked.iter().for_each(|place| place.store(0, Relaxed));
    }

    /// Whether the peer, with whom there was a handshake, is of our own user: what it says of itself is as good as our own
    /// word.
    pub fn is_with_kin(&self) -> bool {
        self.is_own_user.load(Relaxed) != 0
    }

    /// Puts memory aside for what a peer with such rings may make us take. With their far parts only where nothing limits it:
    /// those of a few connections would be the rings of all others. False where there is none.
    pub fn put_aside(&self, (ring_shift, far_shift): (u32, u32)) -> bool {
        self.give_back();
        // Beside the rings: the pages of the segment's head and of the slot.
        let near = (2 << ring_shift >> PAGE_SHIFT) + 2;
        let far = if far_shift == 0 { 0 } else { 2 << far_shift >> PAGE_SHIFT };
        let put = |pages: u64| {
            let has = memory::put_aside(pages << PAGE_SHIFT);
            if has {
                self.aside.store(pages as u32, Relaxed);
            }
            has
        };
        let with_far = far > 0 && memory::is_unlimited() && put(near + far);
        self.far_aside.store(with_far.into(), Relaxed);
        with_far || put(near)
    }

    /// Whether that was for the far parts, too.
    pub fn has_far_aside(&self) -> bool {
        self.far_aside.load(Relaxed) != 0
    }

    /// The connection is not in such rings any more.
    pub fn give_back(&self) {
        let pages = self.aside.swap(0, Relaxed);
        memory::give_back(u64::from(pages) << PAGE_SHIFT);
    }

    /// The record is free.
    pub fn clear(&self) {
        self.give_back();
        self.forget_asked();
        let State { step, pid, since, partial, declined, is_own_user, is_marked, hurries, .. } =
            self;
        let cells = [step, pid, since, partial, declined, is_own_user, is_marked, hurries];
        let of_agents = [&self.control, &self.has_connected, &self.in_syn, &self.opens_fast];
        for cell in cells.into_iter().chain(of_agents) {
            cell.store(0, Relaxed);
        }
        for cell in [&self.own, &self.peer, &self.leftover].into_iter().chain(&self.given) {
            cell.store(0, Relaxed);
        }
    }
}
