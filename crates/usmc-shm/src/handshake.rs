//! How two processes agree on a slot without waiting for each other: one word, four steps.
//!
//! ```text
//!   FREE ──offer──▶ OFFERED ──attach──▶ ATTACHED ──confirm──▶ CONFIRMED
//!    ▲   (client)      │     (acceptor)     │      (client)        │
//!    │      (client)   └─withdraw─▶ WITHDRAWN ◀─decline─┘ (either)  │
//!    └────────────────────release (client, when both ends are done)┘
//! ```
//!
//! Every step is one compare-and-swap on [`Control::state`] that also compares the [`Use`], so an acceptor
//! that comes late can never touch the slot's next connection. Either side switches its sending direction
//! ([`crate::span`]) only in [`SlotState::Confirmed`]: then both have the memory mapped and both know that the
//! other holds the very same TCP connection.
//!
//! The words of a slot are reset before [`offer`], whose Release store publishes them to [`attach`].

use crate::Broken;
use crate::layout::{
    Control, SLOT_ATTACHED, SLOT_CONFIRMED, SLOT_FREE, SLOT_OFFERED, SLOT_WITHDRAWN,
};
use crate::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// The low bits of [`Control::state`] that hold `SLOT_*`.
const PHASE_BITS: u32 = 8;
const PHASE_MASK: u32 = (1 << PHASE_BITS) - 1;

/// Which use of its slot a connection is; it travels in the offer. Repeats after 2²⁴ connections of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Use(u32);

impl Use {
    /// The number for an offer record.
    pub fn to_bits(self) -> u32 {
        self.0
    }

    /// Reads an offer record; what does not fit matches no slot's use by accident only.
    pub fn from_bits(bits: u32) -> Use {
        Use(bits & (u32::MAX >> PHASE_BITS))
    }

    fn word(self, phase: u32) -> u32 {
        self.0 << PHASE_BITS | phase
    }
}

/// How far one use of a slot has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotState {
    /// The client waits for the acceptor, which may never come.
    Offered,
    /// The acceptor has the memory; the client has not confirmed yet.
    Attached,
    /// Both ends may switch their sending direction.
    Confirmed,
    /// This use is over or was taken back: the connection stays TCP.
    Gone,
}

/// How far `usage` of the slot is.
#[inline]
pub fn phase(control: &Control, usage: Use) -> SlotState {
    // Acquire: pairs with the Release of each step; what its author wrote before is visible.
    phase_of(control.state.load(Acquire), usage)
}

fn phase_of(word: u32, usage: Use) -> SlotState {
    if word >> PHASE_BITS != usage.0 {
        return SlotState::Gone;
    }
    match word & PHASE_MASK {
        SLOT_OFFERED => SlotState::Offered,
        SLOT_ATTACHED => SlotState::Attached,
        SLOT_CONFIRMED => SlotState::Confirmed,
        _ => SlotState::Gone,
    }
}

/// The client offers a slot it owns, whose words it has reset, and puts the result into the offer table.
///
/// # Errors
/// [`Broken`] when the slot is not free: do not use it any more.
pub fn offer(control: &Control) -> Result<Use, Broken> {
    // Relaxed: only the client leaves FREE, and it keeps its own slots apart by other means.
    let word = control.state.load(Relaxed);
    if word & PHASE_MASK != SLOT_FREE {
        return Err(Broken);
    }
    let usage = Use::from_bits((word >> PHASE_BITS).wrapping_add(1));
    // Release: pairs with the Acquire in `attach`; the reset slot is visible.
    control.state.store(usage.word(SLOT_OFFERED), Release);
    Ok(usage)
}

/// The acceptor takes the offer. A process that shares the accepted socket by fork may come second: it
/// finds `Attached` or `Confirmed`, which is just as good.
///
/// Returns the phase reached; [`SlotState::Gone`] means that the connection stays TCP.
pub fn attach(control: &Control, usage: Use, process: u32, peer: u32) -> SlotState {
    // Before the slot is ours, so that no instant is left in which nobody knows whose it is. All that compete for it are of one peer.
    control.attached_peer.store(peer, Relaxed);
    match step(control, usage, SLOT_OFFERED, SLOT_ATTACHED) {
        Ok(()) => {
            control.attached_by.store(process, Relaxed);
            SlotState::Attached
        }
        Err(found) => found,
    }
}

/// The client, seeing its own live connection attached, confirms.
///
/// Returns the phase reached: [`SlotState::Confirmed`] (also when a forked process did it before),
/// [`SlotState::Offered`] while nobody attached, [`SlotState::Gone`] after a withdrawal.
pub fn confirm(control: &Control, usage: Use) -> SlotState {
    step(control, usage, SLOT_ATTACHED, SLOT_CONFIRMED).err().unwrap_or(SlotState::Confirmed)
}

/// The client takes its offer back.
///
/// After `Ok` nobody has attached and nobody will: the slot may be released at once.
///
/// # Errors
/// The phase found. The acceptor was faster and holds the slot until its end is done, also after [`SlotState::Gone`]:
/// then it has declined, or another process of the client has withdrawn before.
pub fn withdraw(control: &Control, usage: Use) -> Result<(), SlotState> {
    step(control, usage, SLOT_OFFERED, SLOT_WITHDRAWN)
}

/// Either side, after the attachment, wants the connection to stay TCP.
///
/// Returns [`SlotState::Gone`] when it does, whoever wanted it; [`SlotState::Confirmed`] where the client was faster.
pub fn decline(control: &Control, usage: Use) -> SlotState {
    step(control, usage, SLOT_ATTACHED, SLOT_WITHDRAWN).err().unwrap_or(SlotState::Gone)
}

/// The client puts a slot back when both ends are done with `usage`; the next [`offer`] has another use.
/// Harmless when repeated or late.
pub fn release(control: &Control, usage: Use) {
    let word = control.state.load(Relaxed);
    if word >> PHASE_BITS == usage.0 {
        // Relaxed: whatever told the client that both ends are done orders their work before this.
        // A failure means that somebody else released it: nothing is left to do.
        let _ = control.state.compare_exchange(word, usage.word(SLOT_FREE), Relaxed, Relaxed);
    }
}

fn step(control: &Control, usage: Use, from: u32, to: u32) -> Result<(), SlotState> {
    // AcqRel: each step sees what the one before it published, and publishes what its author wrote.
    // Acquire on failure: as in `phase`.
    control
        .state
        .compare_exchange(usage.word(from), usage.word(to), AcqRel, Acquire)
        .map(drop)
        .map_err(|found| phase_of(found, usage))
}
