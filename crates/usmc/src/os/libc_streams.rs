//! Whether libc's own streams (stdio) come to the library for connections. How they do is `api::streams`' affair.

use usmc_shm::sync::Ordering::{Acquire, Release};
use usmc_shm::sync::{AtomicBool, AtomicU32};

use super::hook::Hook;

const UNKNOWN: u32 = 0;
const SERVED: u32 = 1;
const REFUSED: u32 = 2;

static STATE: AtomicU32 = AtomicU32::new(UNKNOWN);
/// Whether a table was changed.
static IS_CHANGED: AtomicBool = AtomicBool::new(false);
/// Has them come, if this libc allows it, and calls [`settle`].
pub static SERVE: Hook<()> = Hook::new();

/// Whether they come to us, from now on.
pub fn serve() -> bool {
    if !is_known() {
        SERVE.call(());
    }
    STATE.load(Acquire) == SERVED
}

/// Whether [`settle`] was called.
pub fn is_known() -> bool {
    STATE.load(Acquire) != UNKNOWN
}

/// All tables are changed, or none is.
pub fn settle(is_done: bool) {
    STATE.store(if is_done { SERVED } else { REFUSED }, Release);
}

/// A table is about to be changed.
pub fn begin() {
    IS_CHANGED.store(true, Release);
}

/// Whether some come to us: such streams may write under libc's own locks.
pub fn are_served() -> bool {
    IS_CHANGED.load(Acquire)
}
