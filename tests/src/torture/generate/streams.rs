//! What becomes of many bytes, of bytes that are held back, and of urgent ones.

use super::{Generator, MOST_IN_FLIGHT, is_end};

const MSG_MORE: i64 = libc::MSG_MORE as i64;
const TCP_CORK: i64 = 5;

impl Generator {
    /// Sends that may be held back, and then what lets them go. When a sleeper would see the first of them is TCP's
    /// affair.
    pub(super) fn cork(&mut self, process: usize, thread: usize) -> Option<()> {
        let handle = self.any(process, is_end)?;
        let room = MOST_IN_FLIGHT.saturating_sub(self.model.in_flight(process, handle));
        // What is held back has not met a closed peer yet.
        if self.has_ended(process, handle) {
            return None;
        }
        if self.model.somebody_sleeps()
            || self.model.has_killed_peer(process, handle)
            || room < 1000
        {
            return None;
        }
        let by_option = self.draw.percent(50);
        if by_option {
            self.plan(process, thread, "option", &[handle, TCP_CORK, 1]);
        }
        for _ in 0..1 + self.draw.below(3) {
            let how = self.draw.one(&[0, 0, 3]);
            let flags = if by_option { 0 } else { MSG_MORE };
            let size = 1 + self.draw.below(200) as i64;
            self.plan(
                process,
                thread,
                "send",
                &[handle, how, size, flags | i64::from(libc::MSG_NOSIGNAL)],
            );
        }
        if by_option {
            self.plan(process, thread, "option", &[handle, TCP_CORK, 0]);
        } else if self.draw.percent(10) {
            self.plan(process, thread, "shutdown", &[handle, 1]);
        } else {
            let size = 1 + self.draw.below(200) as i64;
            self.plan(process, thread, "send", &[handle, 0, size, libc::MSG_NOSIGNAL.into()]);
        }
        Some(())
    }

    /// Urgent data, with which the connection goes back to TCP.
    pub(super) fn urge(&mut self, process: usize, thread: usize) -> Option<()> {
        let handle = self.any(process, is_end)?;
        let full = self.model.in_flight(process, handle) > MOST_IN_FLIGHT - 100;
        if full
            || self.model.has_killed_peer(process, handle)
            || self.model.is_edged(process, handle)
            || self.model.is_held_back(process, handle)
            || self.model.is_received_by_peer(process, handle)
            || self.model.is_urgent(process, handle)
            || self.model.is_left_unread(process, handle)
            || self.model.is_laden(process, handle)
        {
            return None;
        }
        let size = self.draw.weighted(&[(3, 1), (1, 2), (2, 40)]);
        let flags = libc::MSG_OOB | libc::MSG_NOSIGNAL;
        let how = self.draw.one(&[0, 3]);
        self.plan(process, thread, "send", &[handle, how, size, flags.into()]);
        Some(())
    }

    /// A connection with nothing under way and nobody asleep: its ends, and what makes it empty.
    fn quiet_pair(&mut self) -> Option<[(usize, i64); 2]> {
        if self.model.somebody_sleeps() {
            return None;
        }
        let mut pairs = self.model.pairs();
        let busy = |(p, h): (usize, i64)| self.model.is_loaded(p, h) || self.model.is_laden(p, h);
        pairs.retain(|[one, _]| !busy(*one));
        let [one, other] = self.draw.pick(&pairs)?;
        for (process, handle) in [one, other] {
            self.empty(process, handle);
        }
        Some([one, other])
    }

    /// Streams and conversations, in both directions and over several connections at the same moment. What TCP promises
    /// is that all comes, in its order.
    pub(super) fn run_at_once(&mut self, _process: usize, _thread: usize) -> Option<()> {
        let mut busy: Vec<(usize, usize)> = Vec::new();
        let mut used = Vec::new();
        let mut parts = Vec::new();
        for round in 0..1 + self.draw.below(3) {
            let Some([one, other]) = self.quiet_pair() else { break };
            // By which handles and processes ever: two streams on one connection would mix.
            let ends = [one, other].map(|(process, handle)| self.model.number(process, handle));
            if ends.iter().any(|end| used.contains(end)) {
                continue;
            }
            used.extend(ends);
            let seed = 2000 + 1000 * round as i64;
            if self.draw.percent(50) {
                let threads = [one, other].map(|end| free_thread(&mut busy, end.0));
                let (rounds, size) =
                    (1 + self.draw.below(100) as i64, 1 + self.draw.below(3000) as i64);
                if let [Some(first), Some(second)] = threads {
                    parts.push(((one.0, first), "talk", vec![one.1, rounds, size, seed, 0]));
                    parts.push(((other.0, second), "talk", vec![other.1, rounds, size, seed, 1]));
                }
                continue;
            }
            let both = [(one, other), (other, one)];
            let directions = if self.draw.percent(50) { &both[..] } else { &both[..1] };
            for (from, to) in directions {
                let threads = [from, to].map(|end| free_thread(&mut busy, end.0));
                let most = self.draw.weighted(&[(4, 30_000), (3, 300_000), (1, 2_000_000)]);
                let length = self.draw.below(most) as i64;
                if let [Some(sender), Some(receiver)] = threads {
                    parts.push(((from.0, sender), "flood", vec![from.1, length, seed]));
                    parts.push(((to.0, receiver), "drain", vec![to.1, length, seed]));
                }
            }
        }
        let last = parts.len().checked_sub(1)?;
        for (at, ((process, thread), op, args)) in parts.into_iter().enumerate() {
            self.plan(process, thread, op, &args);
            if let Some(step) = self.planned.back_mut() {
                step.at_once = at < last;
            }
        }
        self.left += last + 4;
        Some(())
    }
}

/// A thread of the process that has nothing to do yet.
fn free_thread(busy: &mut Vec<(usize, usize)>, process: usize) -> Option<usize> {
    let thread = (0..super::super::run::THREADS).find(|t| !busy.contains(&(process, *t)))?;
    busy.push((process, thread));
    Some(thread)
}
