//! Which users count as ourselves.
//!
//! The kernel tells of a user by its number in our user namespace: the sender of a message (SCM_CREDENTIALS) and the owner of
//! a file alike. Those that the namespace does not know all have one number, which may be somebody's, or ours, as well
//! (`/proc/sys/kernel/overflowuid`). So that one means nobody, unless the namespace knows them all. Root is nobody of ours
//! either, unless we were root: that of a container may have no rights but its number.

use usmc_shm::sync::Ordering::Relaxed;
use usmc_shm::sync::{AtomicU32, AtomicU64};

use crate::os::{path, sys};

/// Whom this process was when it was first asked, plus one; 0 = not asked yet.
static FIRST: AtomicU64 = AtomicU64::new(0);
/// This process may have gone to another user namespace, where [`FIRST`] means somebody else.
static HAS_MOVED: AtomicU32 = AtomicU32::new(0);
/// The number of all whom the namespace does not know, plus one; 0 = not asked yet.
static UNKNOWN: AtomicU64 = AtomicU64::new(0);
/// What the kernel has for that by default.
const UNKNOWN_BY_DEFAULT: u32 = 65534;
/// Whether the namespace knows all users: one of these.
static KNOWS: AtomicU32 = AtomicU32::new(NOT_ASKED);
const NOT_ASKED: u32 = 0;
const ALL: u32 = 1;
const SOME: u32 = 2;

/// The user that this process was when it first asked. What it has in the ISM directory stays where it is, whoever it becomes
/// by setuid(2).
pub fn first() -> u32 {
    let known = match FIRST.load(Relaxed) {
        0 => {
            let own = u64::from(sys::geteuid()) + 1;
            FIRST.compare_exchange(0, own, Relaxed, Relaxed).err().unwrap_or(own)
        }
        known => known,
    };
    (known - 1) as u32
}

/// This process is about to go to another user namespace, or has a child that does.
pub fn moves() {
    HAS_MOVED.store(1, Relaxed);
    KNOWS.store(SOME, Relaxed);
}

/// Whether a number that the kernel tells is a user to be trusted like ourselves: the one that we are, or were before we
/// dropped our rights.
pub fn is_own(uid: u32) -> bool {
    let is_ours = uid == sys::geteuid() || (uid == first() && HAS_MOVED.load(Relaxed) == 0);
    is_ours && is_exact(uid)
}

/// Whether such a number means one user only.
pub fn is_exact(uid: u32) -> bool {
    (uid != UNKNOWN_BY_DEFAULT && uid != unknown()) || knows_all()
}

fn unknown() -> u32 {
    let known = UNKNOWN.load(Relaxed);
    if known != 0 {
        return (known - 1) as u32;
    }
    let mut text = [0; 16];
    let said = path::read(c"/proc/sys/kernel/overflowuid", &mut text);
    let number = said.and_then(|text| text.trim().parse().ok()).unwrap_or(UNKNOWN_BY_DEFAULT);
    UNKNOWN.store(u64::from(number) + 1, Relaxed);
    number
}

fn knows_all() -> bool {
    if KNOWS.load(Relaxed) == NOT_ASKED {
        let mut text = [0; 512];
        let map = path::read(c"/proc/self/uid_map", &mut text);
        let knows = if map.is_some_and(is_whole) { ALL } else { SOME };
        KNOWS.store(knows, Relaxed);
    }
    KNOWS.load(Relaxed) == ALL
}

/// Whether a namespace's map (user_namespaces(7)) has all users: the last number is none.
fn is_whole(map: &str) -> bool {
    let length = |line: &str| line.split_whitespace().nth(2)?.parse::<u64>().ok();
    map.lines().filter_map(length).sum::<u64>() == u64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_of_some_users_is_not_whole() {
        assert!(is_whole("         0          0 4294967295\n"));
        assert!(is_whole("0 1 65534\n65534 65535 4294901760\n65535 0 1\n"));
        assert!(!is_whole("         0     100000      65536\n"));
        assert!(!is_whole("     65534      61001          1\n"));
        assert!(!is_whole(""));
    }

    #[test]
    fn we_are_our_own_user_and_root_is_not() {
        let own = sys::geteuid();
        assert!(is_own(own) || !is_exact(own));
        assert!(!is_own(own + 1));
        assert_eq!(is_own(0), own == 0);
    }
}
