//! The half of a queue pair that sends: requests become packets, which are repeated until the peer's device has acknowledged them.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use usmc_verbs::sys::*;

use crate::link::{self, Outbox, PACKET_MAX, Received};
use crate::memory;
use crate::nic::Core;
use crate::pair::Pair;
use crate::queues::Entry;
use crate::state::Fate;
use crate::wire::{DATA_MAX, HEADER, Header, Kind, LAST, PSN_MASK, SOLICITED, psn_after};

/// Packets on their way at a time.
const WINDOW: u64 = 64;

/// Waits for a receive are no shorter than this, whatever the code says: two processes would do nothing else.
const RNR_WAIT_MIN: Duration = Duration::from_millis(1);

/// A request to send.
pub(crate) struct Work {
    pub(crate) wr_id: u64,
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    pub(crate) pieces: Vec<ibv_sge>,
    /// The data, where the post has copied it.
    pub(crate) inline: Option<Vec<u8>>,
    pub(crate) address: u64,
    pub(crate) rkey: u32,
    pub(crate) len: u32,
    /// Its first packet. Packets are counted without wrapping; the lower 24 bits are the sequence number.
    first: u64,
}

impl Work {
    pub(crate) fn new(
        raw: &ibv_send_wr,
        pieces: Vec<ibv_sge>,
        inline: Option<Vec<u8>>,
        len: u32,
    ) -> Work {
        Work {
            wr_id: raw.wr_id,
            opcode: raw.opcode,
            flags: raw.send_flags,
            pieces,
            inline,
            address: raw.remote_addr,
            rkey: raw.rkey,
            len,
            first: 0,
        }
    }

    fn packets(&self) -> u64 {
        (self.len as usize).div_ceil(DATA_MAX).max(1) as u64
    }
}

#[derive(Default)]
pub(crate) struct Requester {
    /// Requests that are not completed, oldest first.
    pub(crate) work: VecDeque<Work>,
    /// Places of the send queue that are taken.
    pub(crate) used: u32,
    /// Requests that are done and made no completion.
    silent: u32,
    /// The next packet that a post makes; the oldest one that is not acknowledged; the next one to send; and the first that was never sent.
    posted: u64,
    oldest: u64,
    next: u64,
    fresh: u64,
    pub(crate) link: Option<OwnedFd>,
    pub(crate) outbox: Outbox,
    /// When an acknowledgement is overdue.
    timer: Option<Instant>,
    retries: u32,
    /// Until when the peer has asked to wait.
    wait: Option<Instant>,
    rnr_retries: u32,
}

impl Requester {
    pub(crate) fn start(&mut self, psn: u32) {
        let psn = u64::from(psn & PSN_MASK);
        (self.posted, self.oldest, self.next, self.fresh) = (psn, psn, psn, psn);
    }

    pub(crate) fn stop(&mut self) {
        self.outbox.clear();
        (self.link, self.timer, self.wait) = (None, None, None);
    }

    pub(crate) fn post(&mut self, mut work: Work) {
        work.first = self.posted;
        self.posted += work.packets();
        self.used += 1;
        self.work.push_back(work);
    }

    /// Sends all that is not acknowledged again. What is on its way arrives nevertheless; what stands before a full socket would only become
    /// more.
    fn rewind(&mut self) {
        self.next = self.oldest;
        if self.outbox.is_blocked {
            self.outbox.clear();
        }
        self.timer = None;
    }
}

impl Pair {
    pub(crate) fn complete_oldest(&mut self, core: &mut Core, status: u32) {
        let Some(work) = self.requester.work.pop_front() else { return };
        self.requester.silent += 1;
        let is_signaled = self.made.signals_all || work.flags & IBV_SEND_SIGNALED != 0;
        if status == IBV_WC_SUCCESS && !is_signaled {
            return;
        }
        let opcode = if work.opcode == IBV_WR_SEND { IBV_WC_SEND } else { IBV_WC_RDMA_WRITE };
        let completion = self.completion(work.wr_id, status, opcode, 0);
        let entry = Entry {
            completion,
            pair: self.made.id,
            freed: std::mem::take(&mut self.requester.silent),
        };
        core.queues.complete(self.made.send_queue, entry, false);
    }

    /// Answers of the peer's device.
    pub(crate) fn take_answers(
        &mut self,
        core: &mut Core,
        now: Instant,
        is_ready: &dyn Fn(RawFd) -> bool,
    ) {
        let mut packet = [0; PACKET_MAX];
        while let Some(link) =
            self.requester.link.as_ref().filter(|link| is_ready(link.as_raw_fd()))
        {
            match link::receive(link, &mut packet) {
                Received::Packet(len) => {
                    if let Some((header, _)) = Header::parse(&packet[..len]) {
                        self.take_answer(core, &header, now);
                    }
                }
                Received::Nothing => break,
                Received::Closed => self.requester.link = None,
            }
        }
    }

    fn take_answer(&mut self, core: &mut Core, header: &Header, now: Instant) {
        let is_ours = header.from_qp == self.attributes.dest_qp_num && header.from == self.to();
        if self.state != IBV_QPS_RTS || !is_ours {
            return;
        }
        let requester = &mut self.requester;
        let after = psn_after(header.psn, requester.oldest as u32 & PSN_MASK);
        let Some(at) = requester.oldest.checked_add_signed(i64::from(after)) else { return };
        let end = if header.kind == Kind::Ack { at + 1 } else { at };
        if end < requester.oldest || end > requester.fresh {
            return;
        }
        if end > requester.oldest {
            requester.oldest = end;
            requester.next = requester.next.max(end);
            (requester.timer, requester.retries, requester.rnr_retries) = (None, 0, 0);
        }
        while self.requester.work.front().is_some_and(|work| work.first + work.packets() <= end) {
            self.complete_oldest(core, IBV_WC_SUCCESS);
        }
        match header.kind {
            Kind::NotReady => self.wait_for_receive(core, header.code, now),
            Kind::Refused => self.fail(core, Some(u32::from(header.code))),
            _ => {}
        }
    }

    fn wait_for_receive(&mut self, core: &mut Core, code: u8, now: Instant) {
        self.requester.rnr_retries += 1;
        let allowed = u32::from(self.attributes.rnr_retry);
        if allowed < 7 && self.requester.rnr_retries > allowed {
            return self.fail(core, Some(IBV_WC_RNR_RETRY_EXC_ERR));
        }
        self.requester.rewind();
        self.requester.wait = Some(now + rnr_time(code).max(RNR_WAIT_MIN));
    }

    /// Repeats what was not acknowledged in time.
    pub(crate) fn repeat(&mut self, core: &mut Core, now: Instant) {
        if self.requester.timer.is_none_or(|timer| timer > now) {
            return;
        }
        if core.state.is_held(self.made.device, &self.to()) {
            self.requester.timer = self.timeout().map(|time| now + time);
            return;
        }
        self.requester.retries += 1;
        let allowed = u32::from(self.attributes.retry_cnt);
        if allowed < 7 && self.requester.retries > allowed {
            return self.fail(core, Some(IBV_WC_RETRY_EXC_ERR));
        }
        self.requester.rewind();
    }

    fn timeout(&self) -> Option<Duration> {
        let code = self.attributes.timeout;
        (code != 0).then(|| Duration::from_nanos(4096 << code))
    }

    /// Makes packets of requests, as far as the window allows, and sends what is due.
    pub(crate) fn transmit(&mut self, core: &mut Core, now: Instant) {
        if self.state != IBV_QPS_RTS || self.requester.wait.is_some_and(|wait| wait > now) {
            return;
        }
        self.requester.wait = None;
        while self.requester.next < self.requester.posted.min(self.requester.oldest + WINDOW) {
            let next = self.requester.next;
            let Some(at) =
                self.requester.work.iter().position(|work| next < work.first + work.packets())
            else {
                break;
            };
            if next >= self.requester.fresh
                && next == self.requester.work[at].first
                && !self.may_start(core, at)
            {
                break;
            }
            if self.state != IBV_QPS_RTS {
                return;
            }
            let packet = self.packet(&self.requester.work[at], next);
            let delay = core.state.delay(self.made.device, &self.to());
            self.requester.outbox.push(now + Duration::from_micros(delay), packet);
            self.requester.next += 1;
            self.requester.fresh = self.requester.fresh.max(self.requester.next);
        }
        if self.requester.oldest < self.requester.next && self.requester.timer.is_none() {
            self.requester.timer = self.timeout().map(|time| now + time);
        }
        self.flush_requests(core, now);
    }

    /// Whether the request may be sent for the first time. One that the device itself refuses fails when all before it are done.
    fn may_start(&mut self, core: &mut Core, at: usize) -> bool {
        let made = &self.made;
        if !core.state.devices[made.device].is_up {
            // What rxe does when something is posted to a port that is down (m0.md, section 5).
            self.fail(core, None);
            return false;
        }
        let work = &self.requester.work[at];
        let may_read = work.inline.is_some()
            || work.pieces.iter().all(|piece| core.memory.allows(made.domain, piece, 0));
        let failure = core.state.failure(made.device, made.number);
        if may_read && failure.is_none() {
            return true;
        }
        if at == 0 {
            let status = failure.map_or(IBV_WC_LOC_PROT_ERR, |(fault, status)| {
                core.state.use_up_failure(fault);
                status
            });
            self.fail(core, Some(status));
        }
        false
    }

    fn packet(&self, work: &Work, number: u64) -> Vec<u8> {
        let offset = (number - work.first) as usize * DATA_MAX;
        let len = (work.len as usize - offset).min(DATA_MAX);
        let is_last = number + 1 == work.first + work.packets();
        let is_solicited = work.flags & IBV_SEND_SOLICITED != 0;
        let header = Header {
            kind: if work.opcode == IBV_WR_SEND { Kind::Send } else { Kind::Write },
            flags: if is_last { LAST } else { 0 } | if is_solicited { SOLICITED } else { 0 },
            code: 0,
            psn: number as u32 & PSN_MASK,
            from_qp: self.made.number,
            to_qp: self.attributes.dest_qp_num,
            from: self.from,
            to: self.to(),
            address: work.address,
            rkey: work.rkey,
            total: work.len,
            offset: offset as u32,
        };
        let mut packet = Vec::with_capacity(HEADER + len);
        header.emit(&mut packet);
        match &work.inline {
            Some(data) => packet.extend(&data[offset..offset + len]),
            // SAFETY: The pieces lay in registered memory when the request was started, and the application keeps it mapped.
            None => unsafe { memory::gather(&work.pieces, offset, len, &mut packet) },
        }
        packet
    }

    /// Sends packets that are due. Where the peer is not there they are lost, and a later repetition tries again.
    fn flush_requests(&mut self, core: &Core, now: Instant) {
        let fate = core.state.fate(self.made.device, &self.to());
        if self.requester.outbox.is_empty() {
            return;
        }
        if self.requester.link.is_none() && fate == Fate::Delivered {
            let peer = core.state.owner(&self.to()).map(|device| &core.state.devices[device].name);
            self.requester.link = peer.and_then(|name| {
                link::connect(core.directory(), name, self.attributes.dest_qp_num)
            });
        }
        let is_open = self.requester.outbox.flush(self.requester.link.as_ref(), fate, now);
        if !is_open {
            self.requester.link = None;
        }
    }

    /// When this half has something to do by itself.
    pub(crate) fn requester_due(&self, core: &Core) -> Option<Instant> {
        let fate = core.state.fate(self.made.device, &self.to());
        let requester = &self.requester;
        [requester.timer, requester.wait, requester.outbox.due(fate)].into_iter().flatten().min()
    }
}

/// The time of a code for receivers that are not ready: steps of 1 and 1.5 between powers of two, from 10 µs on; 0 is the longest.
fn rnr_time(code: u8) -> Duration {
    let code = if code == 0 { 32 } else { u32::from(code) };
    let tens = match code {
        1 => 1,
        even if even.is_multiple_of(2) => 1 << (even / 2),
        odd => 3 << (odd / 2 - 1),
    };
    Duration::from_micros(10 * tens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_times_are_the_standards() {
        let micros = |code| rnr_time(code).as_micros();
        assert_eq!([1, 2, 3, 4, 5, 6].map(micros), [10, 20, 30, 40, 60, 80]);
        assert_eq!((micros(14), micros(31), micros(0)), (1280, 491_520, 655_360));
    }
}
