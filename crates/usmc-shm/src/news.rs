//! Which slots of a segment have news for the agent that has their other ends.
//!
//! A process that has written, read or ended says so ([`News::tell`]): a bit of its slot. An agent that is awake looks at one word for all
//! connections of a segment. One that wants to sleep says that first ([`News::sleep`]), and is woken by the segment's eventfd(2).
//!
//! A process that is killed before it has rung leaves the word that asks for it, and the next process rings. The agent learns of its death
//! by other means, and looks at all of its slots then.

use crate::layout::News;
use crate::sync::Ordering::{Acquire, Relaxed, Release, SeqCst};
use crate::sync::fence;

/// Slots of a segment that has an agent, at most.
pub const SLOTS: u32 = u64::BITS;

impl News {
    /// An application's process has done something with a slot. Whether the agent has to be woken: it sleeps, or is about to.
    #[inline]
    #[must_use]
    pub fn tell(&self, slot: u32) -> bool {
        // Release: the agent that takes the bit sees what was done.
        self.slots.fetch_or(1 << (slot % SLOTS), Release);
        // Pairs with the fence in `sleep`: either the agent sees the bit or this process sees the agent asleep.
        fence(SeqCst);
        self.asleep.load(Relaxed) != 0
    }

    /// The slots that processes have told of, a bit each, since the last call.
    #[inline]
    pub fn take(&self) -> u64 {
        if self.slots.load(Relaxed) == 0 {
            return 0;
        }
        // Acquire: pairs with the Release in `tell`.
        self.slots.swap(0, Acquire)
    }

    /// The agent is going to sleep. False where there is news: it has to look first.
    #[must_use]
    pub fn sleep(&self) -> bool {
        self.asleep.store(1, Relaxed);
        fence(SeqCst);
        let may_sleep = self.slots.load(Relaxed) == 0;
        if !may_sleep {
            self.wake();
        }
        may_sleep
    }

    /// The agent is awake.
    pub fn wake(&self) {
        self.asleep.store(0, Relaxed);
    }
}
