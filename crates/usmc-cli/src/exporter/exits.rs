//! The ends of processes, as the kernel tells them: a descriptor of each (pidfd_open(2)), and one for all of them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Ends told at once.
const AT_ONCE: usize = 256;

/// Tells of ends.
#[derive(Debug)]
pub struct Exits {
    epoll: OwnedFd,
}

impl Exits {
    /// Of no process so far.
    ///
    /// # Errors
    /// As epoll_create(2).
    pub fn new() -> Result<Exits, Errno> {
        Ok(Exits { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    /// Tells of the end of this process, too, by `token`, as long as the result lives.
    ///
    /// # Errors
    /// ESRCH: it has ended.
    pub fn watch(&self, pid: u32, token: u64) -> Result<OwnedFd, Errno> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.epoll, &process, data, epoll::EventFlags::IN)?;
        Ok(process)
    }

    /// The tokens of processes that have ended and are still watched; some of them, if there are many.
    pub fn ended(&self) -> Vec<u64> {
        let mut events = Vec::with_capacity(AT_ONCE);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Whoever asks will ask again.
        let _ = epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&now));
        events.iter().map(|event| event.data.u64()).collect()
    }
}

impl AsFd for Exits {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_end_of_a_process_is_told() {
        let exits = Exits::new().expect("an epoll set");
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("cat");
        let watched = exits.watch(child.id(), 7).expect("a child");
        assert!(exits.ended().is_empty());
        drop(child.stdin.take());
        child.wait().expect("its end");
        assert_eq!(exits.ended(), [7]);
        drop(watched);
        assert!(exits.ended().is_empty());
        assert_eq!(exits.watch(child.id(), 8).err(), Some(Errno::SRCH));
    }
}
