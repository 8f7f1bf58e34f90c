//! Completion queues with their arms, completion channels, and the asynchronous events of open devices.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use usmc_verbs::sys::*;

/// Events behind a descriptor that counts them: one read takes one.
pub(crate) struct Events<T> {
    fd: OwnedFd,
    waiting: VecDeque<T>,
}

impl<T> Events<T> {
    pub(crate) fn new() -> io::Result<Events<T>> {
        // SAFETY: No pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_SEMAPHORE | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: A new descriptor.
        Ok(Events { fd: unsafe { OwnedFd::from_raw_fd(fd) }, waiting: VecDeque::new() })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    fn push(&mut self, event: T) {
        self.waiting.push_back(event);
        let one = 1u64.to_ne_bytes();
        // SAFETY: Eight bytes. The count is far from its end.
        unsafe { libc::write(self.fd(), one.as_ptr().cast(), one.len()) };
    }

    /// An event, after the descriptor was read.
    pub(crate) fn take(&mut self) -> Option<T> {
        self.waiting.pop_front()
    }

    fn remove(&mut self, is_it: impl Fn(&T) -> bool) {
        let before = self.waiting.len();
        self.waiting.retain(|event| !is_it(event));
        for _ in self.waiting.len()..before {
            let mut count = [0u8; 8];
            // SAFETY: Eight bytes. There was an event for each count, so that the read does not wait.
            unsafe { libc::read(self.fd(), count.as_mut_ptr().cast(), count.len()) };
        }
    }
}

/// An entry of a completion queue, and the places that are free in a queue pair once it has been polled.
pub(crate) struct Entry {
    pub(crate) completion: ibv_wc,
    pub(crate) pair: u32,
    pub(crate) freed: u32,
}

pub(crate) struct Queue {
    /// The application's `ibv_cq`.
    pub(crate) raw: usize,
    pub(crate) context: u32,
    pub(crate) channel: Option<u32>,
    pub(crate) capacity: usize,
    entries: VecDeque<Entry>,
    /// Whether it is armed, and for solicited completions only.
    armed: Option<bool>,
    /// Entries, for a poll without the lock.
    pub(crate) pending: Arc<AtomicUsize>,
    pub(crate) unacknowledged: u32,
}

impl Queue {
    pub(crate) fn new(
        raw: usize,
        context: u32,
        channel: Option<u32>,
        capacity: usize,
        pending: Arc<AtomicUsize>,
    ) -> Queue {
        let (entries, armed) = (VecDeque::new(), None);
        Queue { raw, context, channel, capacity, entries, armed, pending, unacknowledged: 0 }
    }

    /// Arming for any completion holds against arming for solicited ones.
    pub(crate) fn arm(&mut self, solicited_only: bool) {
        self.armed = Some(solicited_only && self.armed != Some(false));
    }

    pub(crate) fn pop(&mut self) -> Option<Entry> {
        let entry = self.entries.pop_front();
        self.pending.store(self.entries.len(), Ordering::Release);
        entry
    }
}

/// An asynchronous event: its kind, and a pointer or the port.
#[derive(Clone, Copy)]
pub(crate) struct Asynchronous {
    pub(crate) kind: u32,
    pub(crate) element: usize,
}

pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) events: Events<Asynchronous>,
}

/// By their numbers.
#[derive(Default)]
pub(crate) struct Queues {
    pub(crate) queues: BTreeMap<u32, Queue>,
    /// Events are `ibv_cq`s.
    pub(crate) channels: BTreeMap<u32, Events<usize>>,
    pub(crate) contexts: BTreeMap<u32, Context>,
}

impl Queues {
    /// Puts an entry into a queue. A failure is not solicited by itself, as with rxe and against the standard: whoever passes with that passes
    /// with both.
    pub(crate) fn complete(&mut self, number: u32, entry: Entry, is_solicited: bool) {
        let Some(queue) = self.queues.get_mut(&number) else { return };
        if queue.entries.len() >= queue.capacity {
            let event = Asynchronous { kind: IBV_EVENT_CQ_ERR, element: queue.raw };
            let context = queue.context;
            return self.report(context, event);
        }
        queue.entries.push_back(entry);
        queue.pending.store(queue.entries.len(), Ordering::Release);
        if queue.armed.is_some_and(|solicited_only| is_solicited || !solicited_only) {
            queue.armed = None;
            if let Some(channel) = queue.channel.and_then(|number| self.channels.get_mut(&number)) {
                channel.push(queue.raw);
            }
        }
    }

    /// The queue, with its events.
    pub(crate) fn remove_queue(&mut self, number: u32) {
        let Some(queue) = self.queues.remove(&number) else { return };
        if let Some(channel) = queue.channel.and_then(|number| self.channels.get_mut(&number)) {
            channel.remove(|raw| *raw == queue.raw);
        }
        self.forget(queue.context, queue.raw);
    }

    pub(crate) fn report(&mut self, context: u32, event: Asynchronous) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.events.push(event);
        }
    }

    /// Removes the events of what is destroyed.
    pub(crate) fn forget(&mut self, context: u32, raw: usize) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.events.remove(|event| event.element == raw);
        }
    }
}
