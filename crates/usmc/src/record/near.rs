//! What this process has in common with those at the other end of a connection, so that their numbers mean something here.
//!
//! A peer writes ids of processes, CPU numbers and times of its clock into the slot. On one kernel all of them can be used;
//! between virtual machines none can. The device that a connection's memory belongs to says which.

use usmc_shm::layout::{End, Slot};
use usmc_shm::sync::Ordering::Relaxed;

use super::conn::Conn;
use crate::os::{process, sys};

/// What the processes that share a device have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Near {
    /// One kernel has the sockets and the processes of both ends.
    pub kernel: bool,
    /// Their time stamp counters tell the same time ([`crate::os::clock::tsc`]).
    pub clocks: bool,
    /// Their CPU numbers mean the same CPUs.
    pub cpus: bool,
}

impl Near {
    /// One kernel.
    pub const HOST: Near = Near { kernel: true, clocks: true, cpus: true };
    /// Memory alone, as between two virtual machines.
    pub const NOTHING: Near = Near { kernel: false, clocks: false, cpus: false };

    const KERNEL: u32 = 1;
    const CLOCKS: u32 = 2;
    const CPUS: u32 = 4;

    /// As a record keeps it.
    pub(super) fn word(self) -> u32 {
        let bit = |is_set, bit| if is_set { bit } else { 0 };
        bit(self.kernel, Near::KERNEL) | bit(self.clocks, Near::CLOCKS) | bit(self.cpus, Near::CPUS)
    }
}

impl Conn {
    /// Whether one kernel has both ends.
    pub fn is_on_one_kernel(&self) -> bool {
        self.near.load(Relaxed) & Near::KERNEL != 0
    }

    /// The stamp of what the peer published last; 0 where its clock tells another time. Read once: it is the peer's memory.
    #[inline(always)]
    pub fn peers_stamp(&self, slot: &Slot) -> u64 {
        let is_same = self.near.load(Relaxed) & Near::CLOCKS != 0;
        if is_same { self.peer(slot).stamp.load(Relaxed) } else { 0 }
    }

    /// The CPU on which the peer waits ([`crate::os::clock::cpu`]); 0 = unknown.
    #[inline(always)]
    pub fn peers_cpu(&self, slot: &Slot) -> u32 {
        let is_same = self.near.load(Relaxed) & Near::CPUS != 0;
        if is_same { self.peer(slot).cpu.load(Relaxed) } else { 0 }
    }

    /// Whether the ids of processes in the peer's end mean these processes here.
    pub fn knows_pids_of(&self, end: &End) -> bool {
        self.is_on_one_kernel() && is_our_namespace(end.pids.load(Relaxed))
    }

    /// Whether the process that the peer's end names is this one.
    pub fn is_own_peer(&self, slot: &Slot) -> bool {
        let end = &slot.end[1 - self.side()];
        end.pid.load(Relaxed) == process::pid() && self.knows_pids_of(end)
    }
}

/// This process has the end: the peer may look for the socket here.
pub fn name_process(end: &End) {
    end.pids.store(own_namespace(), Relaxed);
    end.pid.store(process::pid(), Relaxed);
}

/// This process has the end no more: the parent is named in its place, where no child has been meanwhile.
pub fn name_parent(end: &End) {
    let _ = end.pid.compare_exchange(process::pid(), sys::getppid(), Relaxed, Relaxed);
}

/// The number of our namespace of process ids on this host; 0 where `/proc` does not tell.
fn own_namespace() -> u32 {
    process::namespace().unwrap_or(0)
}

/// Whether all processes that hold an end have died, as far as their ids say so: the one that it names, or those of a family. The
/// end is one of our kernel's. A program that the socket was passed on to has another slot, if any.
pub fn has_lost_its_holders(end: &End) -> bool {
    if !is_our_namespace(end.pids.load(Relaxed)) {
        return false;
    }
    let members = || end.members.iter().map(|id| id.load(Relaxed)).filter(|id| *id != 0);
    let is_dead = |id: u32| id != 0 && !process::is_alive(id);
    match (end.refs.load(Relaxed), members().count()) {
        (1, 0) => is_dead(end.pid.load(Relaxed)),
        // The list may have been full.
        (holders, known) => known as u32 >= holders && members().all(is_dead),
    }
}

fn is_our_namespace(pids: u32) -> bool {
    pids != 0 && pids == own_namespace()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_another_namespace_mean_nothing() {
        let end = End::default();
        name_process(&end);
        assert!(is_our_namespace(end.pids.load(Relaxed)));
        assert!(!is_our_namespace(end.pids.load(Relaxed) + 1));
        assert!(!is_our_namespace(0));
    }

    #[test]
    fn holders_are_lost_where_all_that_are_known_have_died() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let dead = child.id();
        child.wait().unwrap();
        let end = End::default();
        end.refs.store(1, Relaxed);
        name_process(&end);
        assert!(!has_lost_its_holders(&end), "it is this process");
        end.pid.store(dead, Relaxed);
        assert!(has_lost_its_holders(&end));
        end.refs.store(2, Relaxed);
        assert!(!has_lost_its_holders(&end), "nobody knows the other one");
        end.members[0].store(dead, Relaxed);
        end.members[1].store(process::pid(), Relaxed);
        assert!(!has_lost_its_holders(&end));
        end.members[1].store(dead, Relaxed);
        assert!(has_lost_its_holders(&end));
        end.pids.store(own_namespace() + 1, Relaxed);
        assert!(!has_lost_its_holders(&end), "other processes have these ids");
    }

    #[test]
    fn a_record_keeps_what_is_near() {
        assert_eq!(Near::NOTHING.word(), 0);
        let all = [Near::KERNEL, Near::CLOCKS, Near::CPUS];
        assert_eq!(Near::HOST.word(), all.iter().sum::<u32>());
    }
}
