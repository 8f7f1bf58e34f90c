//! Process indices: taken by a byte lock that the kernel drops with the process.

use usmc_shm::board;
use usmc_shm::region::units::Member;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};

use super::layout::{DeviceFile, LOCK_BASE, PROCESSES};
use super::{
    directory,
    ism::{Ism, NO_INDEX},
};
use crate::os::reason::Reason;
use crate::os::{clock, process, sys};

/// This process' index, taken on first use.
///
/// # Errors
/// No device, or all indices in use.
pub fn index(dev: &Ism) -> Result<u32, Reason> {
    let index = dev.index.load(Acquire);
    if index != NO_INDEX {
        return Ok(index);
    }
    let file = dev.file()?;
    let _held = dev.lock.enter().ok_or(Reason::NoDevice)?;
    let index = dev.index.load(Acquire);
    if index != NO_INDEX {
        return Ok(index);
    }
    let index = take(dev, file)?;
    sweep(dev, file, index);
    dev.index.store(index, Release);
    Ok(index)
}

fn take(dev: &Ism, file: &DeviceFile) -> Result<u32, Reason> {
    let fd = dev.fd.load(Relaxed);
    for index in 0..PROCESSES {
        // Cheap filter: an index whose last owner left in order is free; the lock decides.
        if sys::lock_byte(fd, true, libc::F_WRLCK, LOCK_BASE + index as i64).is_err() {
            continue;
        }
        let process = &file.processes[index];
        if process.in_use.load(Acquire) != 0 {
            clean_up_after(file, index as u32);
        }
        if has_other_users_mailbox(index as u32) {
            // Left by another user in a directory where only they can remove it.
            let _ = sys::lock_byte(fd, true, libc::F_UNLCK, LOCK_BASE + index as i64);
            continue;
        }
        process.incarnation.fetch_add(1, Relaxed);
        process.pid.store(crate::os::process::pid(), Relaxed);
        process.in_use.store(1, Release);
        dev.mail_seen.store(process.mail.load(Relaxed), Relaxed);
        file.header.high_water.fetch_max(index as u32 + 1, Relaxed);
        return Ok(index as u32);
    }
    Err(Reason::TableFull)
}

/// Removes what processes left that did not end in order.
fn sweep(dev: &Ism, file: &DeviceFile, me: u32) {
    let high = (file.header.high_water.load(Relaxed) as usize).min(PROCESSES);
    for index in 0..high {
        if index as u32 != me && file.processes[index].in_use.load(Acquire) != 0 {
            sweep_one(dev, file, index as u32);
        }
    }
}

/// Removes what the last owner of an index left, if it is dead. With its lock held: another process may be about to take
/// the index, and what it makes then is not to be removed.
fn sweep_one(dev: &Ism, file: &DeviceFile, index: u32) {
    let (fd, at) = (dev.fd.load(Relaxed), LOCK_BASE + i64::from(index));
    if sys::lock_byte(fd, true, libc::F_WRLCK, at).is_err() {
        return;
    }
    let in_use = &file.processes[index as usize].in_use;
    if in_use.load(Acquire) != 0 {
        clean_up_after(file, index);
        in_use.store(0, Release);
    }
    let _ = sys::lock_byte(fd, true, libc::F_UNLCK, at);
}

fn clean_up_after(file: &DeviceFile, index: u32) {
    let _ = sys::unlink(directory::mailbox(index).c());
    let is_its = |owner| owner == index;
    board::forget(&file.listeners, &file.offers, is_its, clock::wall_ns());
}

fn has_other_users_mailbox(index: u32) -> bool {
    let name = directory::mailbox(index);
    match directory::point_at(&name) {
        Ok(fd) => {
            sys::close(fd);
            sys::unlink(name.c()).is_err()
        }
        Err(_) => false,
    }
}

fn is_locked(dev: &Ism, index: u32) -> bool {
    let at = LOCK_BASE + index as i64;
    sys::lock_byte(dev.fd.load(Relaxed), false, libc::F_WRLCK, at)
        .is_ok_and(|kind| kind != libc::F_UNLCK)
}

impl Ism {
    /// This process' identity on the device for segment headers: index and incarnation.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn own_identity(&self) -> Result<u64, Reason> {
        let index = index(self)?;
        let incarnation = self.file()?.processes[index as usize].incarnation.load(Relaxed);
        Ok(index as u64 | (incarnation as u64) << 32)
    }

    /// Does something that no other process of the directory does meanwhile. `None` where that cannot be.
    pub fn alone<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        const TRIES: u32 = 10_000;
        let _held = self.lock.enter()?;
        let fd = self.fd.load(Relaxed);
        let is_held = (0..TRIES).any(|look| {
            process::give_way(look);
            sys::lock_byte(fd, true, libc::F_WRLCK, LOCK_BASE - 1).is_ok()
        });
        let done = is_held.then(act);
        if is_held {
            let _ = sys::lock_byte(fd, true, libc::F_UNLCK, LOCK_BASE - 1);
        }
        done
    }

    /// Whether a member of a region, of this directory, still lives.
    pub fn has_member(&self, member: Member) -> bool {
        let Ok(file) = self.file() else { return true };
        let (index, process) =
            (u32::from(member.process), &file.processes[member.process as usize]);
        member.is_incarnation(process.incarnation.load(Relaxed)) && is_taken(self, index)
    }

    /// Whether the process of such an identity still lives.
    pub fn is_identity_alive(&self, identity: u64) -> bool {
        let Ok(file) = self.file() else { return true };
        let Some(process) = file.processes.get(identity as u32 as usize) else { return false };
        if process.incarnation.load(Relaxed) != (identity >> 32) as u32 {
            return false;
        }
        identity as u32 == self.index.load(Relaxed) || is_locked(self, identity as u32)
    }
}

/// Whether an index is somebody's.
pub fn is_taken(dev: &Ism, index: u32) -> bool {
    index == dev.index.load(Relaxed) || is_locked(dev, index)
}

impl Ism {
    /// The process ends in an orderly way.
    pub fn leave(&self) {
        let index = self.index.swap(NO_INDEX, AcqRel);
        if index == NO_INDEX {
            return;
        }
        let Ok(file) = self.file() else { return };
        clean_up_after(file, index);
        file.processes[index as usize].in_use.store(0, Release);
        let at = LOCK_BASE + index as i64;
        let _ = sys::lock_byte(self.fd.load(Relaxed), true, libc::F_UNLCK, at);
    }
}
