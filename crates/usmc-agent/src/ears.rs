//! Ears: sockets by which the agent wakes epoll sets of applications, and eventfds by which applications wake the agent. A doorbell, a byte of TCP
//! inside the host, costs several times as much.
//!
//! A set's ear is a pair of UNIX sockets: the process has one of them in the set by edges, and each byte is one. No process can make the agent wait
//! there, as the agent says with each byte that it does not, and a sender needs no lock that a reader holds. (With a pipe it does, and a reader may
//! take its bytes into memory that never comes.) Towards the agent an eventfd does: there the process writes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io;
use rustix::net::{
    AddressFamily, SendFlags, Shutdown, SocketFlags, SocketType, send, shutdown, socketpair,
};

use crate::rest::{Rest, Watch};

/// A room has at most so many of its process'.
const MOST: usize = 16;

/// The ears of one room.
#[derive(Default)]
pub(crate) struct Ears {
    /// The agent's ends, by their numbers.
    of_process: Vec<OwnedFd>,
    /// The agent's own, with its watch.
    own: Option<(OwnedFd, Watch)>,
}

impl Ears {
    /// The agent's own, which is made if need be.
    ///
    /// # Errors
    /// eventfd(2), epoll_ctl(2).
    pub(crate) fn own(&mut self, rest: &Rest, number: u64) -> std::io::Result<BorrowedFd<'_>> {
        let own = if let Some(own) = self.own.take() {
            own
        } else {
            let ear = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let watch = rest.watch_edges(&ear, number)?;
            (ear, watch)
        };
        Ok(self.own.insert(own).0.as_fd())
    }

    /// Whether applications may wake the agent so.
    pub(crate) fn has_own(&self) -> bool {
        self.own.is_some()
    }

    /// The agent hears nothing there any more, whatever a process still has.
    pub(crate) fn end(&mut self) {
        if let Some((ear, watch)) = self.own.take() {
            watch.end(&ear);
        }
    }

    /// One more of the process', if there are fewer than that: its number, and what the process gets.
    pub(crate) fn add(&mut self, most: u32) -> Option<(u32, OwnedFd)> {
        let unused = self.of_process.iter().position(is_closed);
        let at = unused.unwrap_or(self.of_process.len());
        if at >= MOST.min(most as usize) {
            return None;
        }
        let (own, other) = pair().ok()?;
        match self.of_process.get_mut(at) {
            Some(place) => *place = own,
            None => self.of_process.push(own),
        }
        Some((u32::try_from(at).ok()?, other))
    }

    /// Wakes what has that one. False where nothing does.
    pub(crate) fn ring(&self, number: u32) -> bool {
        let ear = usize::try_from(number).ok().and_then(|at| self.of_process.get(at));
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        ear.is_some_and(|ear| send(ear, &[0], flags).is_ok())
    }
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (own, other) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Nothing that the process sends is kept for the agent, whose close would be the last one of descriptors among it.
    shutdown(&own, Shutdown::Read)?;
    Ok((own, other))
}

/// Whether no process has the other end.
fn is_closed(ear: &OwnedFd) -> bool {
    let mut all = [PollFd::new(ear, PollFlags::empty())];
    poll(&mut all, Some(&Timespec::default())).is_ok()
        && all[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

#[cfg(test)]
mod tests {
    use super::*;

    use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
    use rustix::io::{Errno, read, write};

    #[test]
    fn an_ear_is_rung_until_nobody_has_it_or_it_is_full() {
        let mut ears = Ears::default();
        assert!(!ears.ring(0), "there is none");
        let (number, reads) = ears.add(2).expect("a pair");
        let (other, others) = ears.add(2).expect("a pair");
        assert_eq!((number, other, ears.add(2).is_none()), (0, 1, true));
        let mut bytes = [0; 512];
        assert!(ears.ring(number) && ears.ring(number));
        assert_eq!(
            (read(&reads, &mut bytes), read(&others, &mut bytes)),
            (Ok(2), Err(Errno::AGAIN))
        );
        // A process that never reads.
        let rung = (0..).take_while(|_| ears.ring(other)).count();
        assert!(rung >= 128 && !ears.ring(other) && ears.ring(number), "{rung}");
        assert_eq!(write(&reads, &[0]), Err(Errno::PIPE), "the agent takes nothing");
        drop(reads);
        assert!(!ears.ring(number) && !ears.ring(2) && !ears.ring(u32::MAX));
        // Its number is another set's.
        let (again, _reads) = ears.add(2).expect("a pair");
        assert!(again == number && ears.ring(again));
    }

    #[test]
    fn each_ring_is_an_edge() {
        let mut ears = Ears::default();
        let (number, reads) = ears.add(1).expect("a pair");
        let set = epoll::create(CreateFlags::CLOEXEC).expect("an epoll set");
        let flags = EventFlags::IN | EventFlags::ET;
        epoll::add(&set, &reads, EventData::new_u64(0), flags).expect("epoll_ctl");
        let event = epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) };
        let found = || epoll::wait(&set, &mut [event; 2][..], Some(&Timespec::default()));
        assert_eq!(found(), Ok(0));
        for _ in 0..3 {
            assert!(ears.ring(number));
            assert_eq!((found(), found()), (Ok(1), Ok(0)));
        }
    }
}
