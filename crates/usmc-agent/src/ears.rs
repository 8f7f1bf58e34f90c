//! Ears: pipes by which the agent wakes epoll sets of applications, and eventfds by which applications wake the agent. A doorbell, a byte of TCP
//! inside the host, costs several times as much.
//!
//! The agent makes the pipe and keeps the writing end, so that no process can make the agent wait for room in it. The process has the reading end
//! in its set by edges, each write is one, and nobody has to read. The agent never writes to its own ears, so that they may be eventfds: these can
//! be written to without a SIGPIPE when the agent is gone.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::{self, Errno, write};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};
use usmc_shm::agent::EARS;

use crate::rest::{Rest, Watch};

/// Bytes of a pipe: one page, the least. A process that never reads is woken by doorbells once it is full.
const BYTES: usize = 4096;

/// The ears of one room.
#[derive(Default)]
pub(crate) struct Ears {
    /// Writing ends, by their numbers.
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
        if self.own.is_none() {
            let ear = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            let watch = rest.watch_edges(&ear, number)?;
            self.own = Some((ear, watch));
        }
        self.own.as_ref().map(|(ear, _)| ear.as_fd()).ok_or_else(|| Errno::NOENT.into())
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

    /// One more of the process', if there are fewer than `most`: its number, and what the process gets.
    pub(crate) fn add(&mut self, most: u32) -> Option<(u32, OwnedFd)> {
        let number = u32::try_from(self.of_process.len()).ok()?;
        if number >= most.min(EARS) || !are_edges_told() {
            return None;
        }
        let (reads, writes) = pipe().ok()?;
        self.of_process.push(writes);
        Some((number, reads))
    }

    /// Wakes what has that one. False where nothing does.
    pub(crate) fn ring(&self, number: u32) -> bool {
        let ear = usize::try_from(number).ok().and_then(|at| self.of_process.get(at));
        ear.is_some_and(|ear| ring(ear).is_ok())
    }
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (reads, writes) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // A failure: it has more room.
    let _ = fcntl_setpipe_size(&writes, BYTES);
    Ok((reads, writes))
}

fn ring(ear: impl AsFd) -> io::Result<()> {
    loop {
        match write(ear.as_fd(), &[0]) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            // EPIPE comes without a signal, which Rust's programs ignore.
            Err(error) => return Err(error),
        }
    }
}

/// Whether each write to a pipe is an edge, also to one that was not read: kernels 5.5 to 5.13 tell of the first alone, where that was not
/// mended.
fn are_edges_told() -> bool {
    static TOLD: OnceLock<bool> = OnceLock::new();
    *TOLD.get_or_init(|| try_edges().unwrap_or(false))
}

fn try_edges() -> io::Result<bool> {
    let set = epoll::create(CreateFlags::CLOEXEC)?;
    let (reads, writes) = pipe()?;
    epoll::add(&set, &reads, EventData::new_u64(0), EventFlags::IN | EventFlags::ET)?;
    let is_told = || -> io::Result<bool> {
        ring(&writes)?;
        let mut room =
            [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 2];
        Ok(epoll::wait(&set, &mut room[..], Some(&Timespec::default()))? == 1)
    };
    Ok(is_told()? && is_told()? && is_told()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    use rustix::io::read;

    #[test]
    fn an_ear_is_rung_until_nobody_has_it_or_it_is_full() {
        let mut ears = Ears::default();
        assert!(!ears.ring(0), "there is none");
        let (number, reads) = ears.add(2).expect("this kernel tells of each edge");
        let (other, others) = ears.add(2).expect("a pipe");
        assert_eq!((number, other, ears.add(2).is_none()), (0, 1, true));
        let mut bytes = [0; 2 * BYTES];
        assert!(ears.ring(number) && ears.ring(number));
        assert_eq!(
            (read(&reads, &mut bytes), read(&others, &mut bytes)),
            (Ok(2), Err(Errno::AGAIN))
        );
        // A process that never reads.
        let rung = (0..).take_while(|_| ears.ring(other)).count();
        assert!(rung >= BYTES && !ears.ring(other) && ears.ring(number));
        drop(reads);
        assert!(!ears.ring(number) && !ears.ring(2) && !ears.ring(u32::MAX));
    }
}
