//! Memory for rings where it is limited.
//!
//! A page of a ring is taken when it is first written. Where a memory cgroup is full then, the kernel ends a process by
//! SIGKILL; where the kernel promises no more than it has (vm.overcommit_memory = 2), it sends SIGBUS. TCP meets neither:
//! its buffers shrink. So where there is such a limit, memory is asked for before it is used, an eighth of the limit is
//! left to the program, and what is granted is populated at once. Connections that get none are or become TCP.
//!
//! What nobody reads may take megabytes of a ring's far part. Where there is a limit, that is granted as a small part of what
//! is left, and all of them together a quarter.
//!
//! A page that nobody has written is taken by whoever reads it first, and a peer may say that it has written any, or give back
//! what it has (fallocate(2)). So towards another user's peer all of both rings is put aside from the first.

use core::fmt::Write;
use usmc_shm::ring::Grant;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicBool, AtomicU64};

use crate::os::path::{Path, each_line, read};
use crate::os::{clock, sys};

/// How long a look is believed.
const LIMITED_NS: u64 = 100_000_000;
const UNLIMITED_NS: u64 = 1_000_000_000;
/// The same where it would mean a refusal.
const REFUSED_NS: u64 = 10_000_000;
/// No limit.
const UNLIMITED: u64 = u64::MAX;
/// What is left to the program: the limit divided by this.
const SHARE: u64 = 8;
/// What may be taken until the next look, for the program takes memory meanwhile: what was found divided by this, but
/// at least [`LEAST`].
const PORTION: u64 = 8;
const LEAST: u64 = 1 << 20;
/// What may be put aside for strangers: what was found divided by this.
const STRANGERS: u64 = 2;
/// What one far part may take: what was found divided by this; and all of this process.
const FAR_PART: u64 = 64;
const FAR_PARTS: u64 = 4;
/// Less than so many bytes of a far part are not worth it.
const FAR_LEAST: usize = 1 << 19;
/// cgroups between a process and the root that are looked at.
const DEPTH: usize = 16;

/// When the last look was, CLOCK_MONOTONIC nanoseconds; 0 = never.
static SEEN: AtomicU64 = AtomicU64::new(0);
/// Bytes that may be taken until the next one.
static LEFT: AtomicU64 = AtomicU64::new(0);
/// What it found.
static FOUND: AtomicU64 = AtomicU64::new(UNLIMITED);
/// Bytes put aside for what strangers may make this process take.
static ASIDE: AtomicU64 = AtomicU64::new(0);
/// Bytes of far parts in memory that was asked for.
static FAR: AtomicU64 = AtomicU64::new(0);
/// Whether it found more than that.
static IS_MORE: AtomicBool = AtomicBool::new(false);

/// Takes `len` bytes of shared memory at `at`, which nobody may have used before. False where they are not to be had.
pub fn take(at: *mut u8, len: usize) -> bool {
    if !spend(len as u64) {
        return false;
    }
    if LEFT.load(Relaxed) == UNLIMITED {
        return true;
    }
    const PAGE: usize = 4096;
    let before = at.addr() % PAGE;
    // SAFETY: it changes no byte, and wraps within one page of the same mapping.
    let populated = unsafe {
        sys::madvise(at.wrapping_sub(before), (before + len).next_multiple_of(PAGE), sys::POPULATE)
    };
    // Linux before 5.14 does not know it.
    matches!(populated, Ok(()) | Err(libc::EINVAL))
}

/// The same for the far part of a ring, `len` bytes from `at` on: grants a smaller power of two where memory is limited, or
/// nothing.
pub fn take_far(at: *mut u8, len: usize) -> Grant {
    if is_unlimited() {
        return Grant::of(len);
    }
    let found = FOUND.load(Relaxed);
    let mut bytes = len;
    while bytes as u64 > found / FAR_PART {
        bytes /= 2;
    }
    let all = FAR.fetch_add(bytes as u64, Relaxed) + bytes as u64;
    if bytes >= FAR_LEAST && all <= found / FAR_PARTS && take(at, bytes) {
        return Grant { bytes, in_memory: bytes };
    }
    FAR.fetch_sub(bytes as u64, Relaxed);
    Grant::NONE
}

/// So many bytes of one are not in memory any more.
pub fn gave_far_back(len: u64) {
    let less = |far: u64| Some(far.saturating_sub(len));
    let _ = FAR.fetch_update(Relaxed, Relaxed, less);
}

/// Whether nothing limits what this process may take.
pub fn is_unlimited() -> bool {
    look_if_due(0);
    FOUND.load(Relaxed) == UNLIMITED
}

/// Puts so many bytes aside for a stranger's connection. False where they are not to be had.
pub fn put_aside(len: u64) -> bool {
    let (now, age) = look_if_due(0);
    let aside = ASIDE.fetch_add(len, Relaxed) + len;
    let is_there = || match FOUND.load(Relaxed) {
        UNLIMITED => true,
        found => aside <= found / STRANGERS,
    };
    if is_there() {
        return true;
    }
    if age > REFUSED_NS {
        look_again(now, 0);
        if is_there() {
            return true;
        }
    }
    give_back(len);
    false
}

/// They are not needed any more.
pub fn give_back(len: u64) {
    ASIDE.fetch_sub(len, Relaxed);
}

fn spend(len: u64) -> bool {
    let (now, age) = look_if_due(len);
    // What others have given back since is not believed to be gone for long.
    subtract(len)
        || ((age > REFUSED_NS || IS_MORE.load(Relaxed)) && {
            look_again(now, len);
            subtract(len)
        })
}

/// Looks where the last look is not believed any more. The time, and how long ago that was.
fn look_if_due(wanted: u64) -> (u64, u64) {
    let now = clock::now_ns();
    let age = match SEEN.load(Acquire) {
        0 => u64::MAX,
        seen => now.wrapping_sub(seen),
    };
    let is_unlimited = LEFT.load(Relaxed) == UNLIMITED;
    if age > if is_unlimited { UNLIMITED_NS } else { LIMITED_NS } {
        look_again(now, wanted);
    }
    (now, age)
}

fn look_again(now: u64, wanted: u64) {
    let found = look();
    FOUND.store(found, Relaxed);
    let left = match found {
        UNLIMITED => UNLIMITED,
        found => found.saturating_sub(ASIDE.load(Relaxed)),
    };
    let portion = match left {
        UNLIMITED => UNLIMITED,
        left => (left / PORTION).max(LEAST).max(wanted).min(left),
    };
    LEFT.store(portion, Relaxed);
    IS_MORE.store(portion < left, Relaxed);
    SEEN.store(now, Release);
}

fn subtract(len: u64) -> bool {
    let with = |left: u64| match left {
        UNLIMITED => Some(UNLIMITED),
        left => left.checked_sub(len),
    };
    LEFT.fetch_update(AcqRel, Relaxed, with).is_ok()
}

/// Bytes that may be taken now.
fn look() -> u64 {
    let in_cgroups = in_cgroups().unwrap_or(UNLIMITED);
    let mut text = [0; 64];
    let strict =
        read(c"/proc/sys/vm/overcommit_memory", &mut text).is_some_and(|t| t.trim() == "2");
    // There it is enough to populate: a refusal is an error then.
    if strict { in_cgroups.min(UNLIMITED - 1) } else { in_cgroups }
}

/// The files of a version of cgroups, and what is said there of page cache.
struct Version {
    mount: &'static str,
    limits: &'static [&'static str],
    usage: &'static str,
    cache: [&'static str; 2],
}

const V1: Version = Version {
    mount: "/sys/fs/cgroup/memory",
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    cache: ["total_inactive_file", "total_active_file"],
};
const V2: Version = Version {
    mount: "/sys/fs/cgroup",
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    cache: ["inactive_file", "active_file"],
};

/// The least that the limits of this process' cgroup, and of those around it, leave. `None`: it cannot be told.
fn in_cgroups() -> Option<u64> {
    let (version, path) = own_cgroup()?;
    let mut path = path.text().trim_end_matches('/');
    let mut least = UNLIMITED;
    for _ in 0..DEPTH {
        least = least.min(left_in(version, path));
        match path.rsplit_once('/') {
            Some((parent, _)) => path = parent,
            None => break,
        }
    }
    Some(least)
}

/// The cgroup of this process that limits memory.
// Not inlined, as nothing here that has a buffer: signal handlers come here, whose stacks may be 8 KiB.
#[inline(never)]
fn own_cgroup() -> Option<(&'static Version, Path)> {
    let (mut v1, mut v2) = (None, None);
    each_line(c"/proc/self/cgroup", |line| {
        // ID:CONTROLLERS:PATH; in version 2 without controllers.
        let Some((_, rest)) = line.split_once(':') else { return };
        let Some((controllers, path)) = rest.split_once(':') else { return };
        if controllers.is_empty() && v2.is_none() {
            v2 = Some(Path::of(format_args!("{path}")));
        } else if controllers.split(',').any(|c| c == "memory") {
            v1 = Some(Path::of(format_args!("{path}")));
        }
    })?;
    v1.map(|path| (&V1, path)).or(v2.map(|path| (&V2, path)))
}

/// What one cgroup's limits leave.
fn left_in(version: &Version, path: &str) -> u64 {
    let number = |file| number_in(version, path, file);
    // "max", and v1's number for it, are none; nor is what a container does not see.
    let limits = version.limits.iter().filter_map(|file| number(file));
    let Some(limit) = limits.min().filter(|limit| *limit < 1 << 60) else { return UNLIMITED };
    let Some(usage) = number(version.usage) else { return UNLIMITED };
    // The kernel takes the page cache away before anything else.
    let cache = cache_in(version, path);
    limit.saturating_sub(usage.saturating_sub(cache)).saturating_sub(limit / SHARE)
}

#[inline(never)]
fn number_in(version: &Version, path: &str, file: &str) -> Option<u64> {
    let mut text = [0; 64];
    read(name(version, path, file)?.c(), &mut text)?.trim().parse().ok()
}

/// Bytes of page cache.
#[inline(never)]
fn cache_in(version: &Version, path: &str) -> u64 {
    let mut cache = 0u64;
    if let Some(name) = name(version, path, "memory.stat") {
        each_line(name.c(), |line| {
            if let Some((word, bytes)) = line.split_once(' ')
                && version.cache.contains(&word)
            {
                cache = cache.saturating_add(bytes.parse().unwrap_or(0));
            }
        });
    }
    cache
}

fn name(version: &Version, path: &str, file: &str) -> Option<Path> {
    let mut name = Path::new();
    write!(name, "{}{path}/{file}", version.mount).ok()?;
    Some(name)
}
