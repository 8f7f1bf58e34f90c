//! Streams that fill a connection, and what becomes of it while its reader is slow. How much fits is each kind's own
//! affair: so bytes are named by parts of what is in flight, and what is said of room holds for both kinds.

use super::super::model::{ALL, HALF, LITTLE, Laden, MOST, Room};
use super::{Generator, MSG_DONTWAIT};

const SO_SNDBUF: i64 = 6;
const SO_RCVBUF: i64 = 7;
/// So much that it never fits beside what is in flight, in hundredths of what is there when it is full.
const TOO_MUCH: i64 = -300;
/// As much as there is when it is full.
const AS_MUCH: i64 = -100;
/// How long a send with a time limit waits, in milliseconds.
const LIMIT: i64 = 20;
const IN_AND_OUT: i64 = (libc::EPOLLIN | libc::EPOLLOUT) as i64;

impl Generator {
    /// Buffers' sizes for a connection that has just been made. Not for one that is full. Known: a ring that has grown while
    /// bytes were unread does not grow again before these are read.
    pub(super) fn limit(&mut self, [one, other]: [(usize, usize, i64); 2]) {
        let both = self.draw.percent(30);
        let directions = if both { vec![(one, other), (other, one)] } else { vec![(one, other)] };
        for (from, to) in directions {
            // Not less than a receiver has from the start: TCP drops what comes within a window that it has offered before.
            let snd = self.draw.one(&[40_000, 100_000, 200_000]);
            let rcv = self.draw.one(&[70_000, 100_000, 200_000]).min(2 * snd);
            let which = self.draw.weighted(&[(6, 3), (1, 1), (1, 2)]);
            for (bit, (process, thread, handle), option, size) in
                [(1, from, SO_SNDBUF, snd), (2, to, SO_RCVBUF, rcv)]
            {
                if which & bit != 0 {
                    self.plan(process, thread, "option", &[handle, option, size]);
                }
            }
        }
    }

    /// A connection is filled to its end, and most often watched by an epoll set meanwhile. Before that it talks until it may
    /// well be in the ring: one that gets there while it is full has room again, which TCP has not.
    pub(super) fn fill(&mut self, _process: usize, _thread: usize) -> Option<()> {
        if self.model.somebody_sleeps() {
            return None;
        }
        let mut pairs = self.model.pairs();
        pairs.retain(|[(process, handle), _]| !self.model.is_loaded(*process, *handle));
        let [(process, handle), (other, peer)] = self.draw.pick(&pairs)?;
        let (thread, reader) = (self.thread(process)?, self.thread(other)?);
        let is_talking = !self.model.is_laden(process, handle);
        if is_talking {
            self.empty(process, handle);
        }
        self.empty(other, peer);
        if is_talking {
            self.converse((process, thread, handle), (other, reader, peer), 4);
        }
        if self.draw.percent(50) && self.handles + 4 < super::MOST_HANDLES {
            self.watch(process, thread, handle);
        }
        self.streams += 1;
        let seed = 100_000 + self.streams;
        let object = self.model.number(process, handle)?;
        self.plan_fill(process, thread, handle, object, seed);
        self.left += 12;
        Some(())
    }

    fn plan_fill(&mut self, process: usize, thread: usize, handle: i64, object: usize, seed: i64) {
        let piece = self.draw.weighted(&[(4, 16_384), (1, 1000), (1, 100_000)]);
        let [snd, rcv] = self.model.buffers(object);
        // tcp(7) doubles both, and counts more than the bytes. A ring takes as much as TCP, and some bytes may have gone
        // by TCP before.
        let (least, most) = match (snd, rcv) {
            (-1, _) | (_, -1) => (16_384, 128 << 20),
            (0, _) => (100_000, 128 << 20),
            (snd, 0) => (snd / 2, 128 << 20),
            (snd, rcv) => ((snd + rcv) / 2, 6 * (snd + rcv)),
        };
        self.plan(process, thread, "fill", &[handle, seed, piece, least, most]);
    }

    /// An epoll set for this socket alone, most often for edges.
    fn watch(&mut self, process: usize, thread: usize, handle: i64) {
        let set = self.handle();
        self.sets.push(set);
        let which = self.draw.one(&[IN_AND_OUT, IN_AND_OUT, libc::EPOLLOUT.into()]);
        let how = self.draw.weighted(&[(6, 1 << 31), (2, 0), (1, libc::EPOLLONESHOT.into())]);
        self.plan(process, thread, "epoll", &[set]);
        self.plan(process, thread, "control", &[set, 1, handle, which | how]);
        // Bytes on their way to it are edges.
        let laden = how == 1 << 31 && self.model.is_laden(process, handle);
        if !laden && self.draw.percent(80) {
            self.plan(process, thread, "wait", &[set, 16, 0]);
        }
    }

    /// A stream under way, and where it is sent.
    fn loaded(&mut self) -> Option<(Laden, (usize, i64))> {
        let mut all = self.model.laden();
        all.retain(|laden| !laden.senders.is_empty());
        let which = self.draw.below(all.len().max(1) as u64) as usize;
        let laden = (which < all.len()).then(|| all.swap_remove(which))?;
        let sender = self.draw.one(&laden.senders);
        Some((laden, sender))
    }

    /// The reader takes some or all.
    pub(super) fn drain(&mut self, _process: usize, _thread: usize) -> Option<()> {
        let all = self.model.laden();
        let which = self.draw.below(all.len().max(1) as u64) as usize;
        let laden = all.get(which)?;
        let (process, handle) = self.draw.one(&laden.receivers);
        let thread = self.thread(process)?;
        // What little is depends on both buffers. And known: a send asleep looks for room by itself, and takes what there is.
        let [snd, rcv] = self.model.buffers(laden.object);
        let is_sized = snd > 0 && rcv > 0;
        let little = u64::from(is_sized && laden.load.room == Room::Full && !laden.load.pending);
        // Whether somebody who waits for room is woken then would be TCP's affair.
        let watched = self.model.is_object_watched(laden.object) || laden.load.pending;
        let kinds = [(4, ALL), (6, MOST), (4 * little, LITTLE), (u64::from(!watched), HALF)];
        let part = self.draw.weighted(&kinds);
        let how = self.draw.weighted(&[(6, 0), (2, 1), (1, 2), (2, 3), (1, 4), (1, 5), (1, 6)]);
        let piece = self.draw.one(&[4000, 20_000, 1 << 17]);
        self.plan(process, thread, "drain", &[handle, part, laden.load.seed, how, piece]);
        Some(())
    }

    /// A send of any size: what fits into room, and what does not.
    pub(super) fn push(&mut self, _process: usize, _thread: usize) -> Option<()> {
        let (laden, (process, handle)) = self.loaded()?;
        let thread = self.thread(process)?;
        let is_full = laden.load.room == Room::Full;
        if !(is_full || laden.load.room == Room::Free) || self.model.is_pushed(laden.object) {
            return None;
        }
        let small = 1 + self.draw.below(1000) as i64;
        // By TCP a large one from a free connection may meet a timer.
        let waits = is_full && self.model.idle(process).len() > 1 && self.draw.percent(40);
        let (length, flags, limit) = if waits {
            (self.draw.one(&[small, AS_MUCH]), 0, 0)
        } else {
            // A receiver of TCP's whose size is not set takes more and more.
            let is_sized = self.model.buffers(laden.object).iter().all(|size| *size > 0);
            let large = u64::from(is_full || is_sized);
            let length = self.draw.weighted(&[(2, small), (large, TOO_MUCH)]);
            if self.draw.percent(30) { (length, 0, LIMIT) } else { (length, MSG_DONTWAIT, 0) }
        };
        let by_flags = flags & MSG_DONTWAIT != 0;
        let how = self.draw.weighted(&[(6, 0), (3, 3), (if by_flags { 0 } else { 4 }, 1)]);
        let how = if how == 1 { self.draw.one(&[1, 2, 5]) } else { how };
        self.plan(process, thread, "push", &[handle, laden.load.seed, length, how, flags, limit]);
        self.left += 2;
        Some(())
    }

    /// It is filled again.
    pub(super) fn refill(&mut self, _process: usize, _thread: usize) -> Option<()> {
        let (laden, (process, handle)) = self.loaded()?;
        let thread = self.thread(process)?;
        // What TCP acknowledges before it is full is an edge: of room for somebody asleep, or of whatever else is there.
        let edges = self.model.is_edged(process, handle)
            && (self.model.somebody_sleeps() || self.model.has_input(process, handle));
        if edges || self.model.is_pushed(laden.object) {
            return None;
        }
        self.plan_fill(process, thread, handle, laden.object, laden.load.seed);
        self.left += 4;
        Some(())
    }

    /// Somebody asks for room, or waits for it.
    pub(super) fn look(&mut self, _process: usize, _thread: usize) -> Option<()> {
        let (laden, (process, handle)) = self.loaded()?;
        let thread = self.thread(process)?;
        if self.model.is_unsure(process, handle) {
            return None;
        }
        let others = self.model.idle(process).len() > 1;
        let patience = if others && self.draw.percent(40) { -1 } else { 0 };
        let events = self.draw.one(&[IN_AND_OUT, libc::EPOLLOUT.into()]);
        let sets = self.model.sets_with(process, laden.object);
        match self.draw.below(8) {
            0 | 1 => self.plan(process, thread, "poll", &[patience, handle, events]),
            2 => self.plan(process, thread, "select", &[patience, handle, 2]),
            3 if self.handles + 4 < super::MOST_HANDLES => self.watch(process, thread, handle),
            _ => {
                let set = self.draw.pick(&sets)?;
                if self.model.is_set_unsure(process, set) {
                    return None;
                }
                let taken = self.model.is_set_taken_from(process, set);
                let patience = if taken { 0 } else { patience };
                self.plan(process, thread, "wait", &[set, 16, patience]);
            }
        }
        self.left += 1;
        Some(())
    }

    /// An end reads what is on its way to it.
    pub(super) fn empty(&mut self, process: usize, handle: i64) {
        self.plan(process, 0, "recv", &[handle, 0, 20_000, MSG_DONTWAIT]);
        if self.model.has_passed_peer(process, handle) {
            // The first may have stopped at an urgent byte.
            self.plan(process, 0, "recv", &[handle, 0, 20_000, MSG_DONTWAIT]);
        }
    }
}
