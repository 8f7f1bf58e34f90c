//! How the service finds work: it looks at connections that had some lately, at sockets, and at the clock; and how it rests.

use std::cmp::Reverse;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use usmc_shm::state::EndState;

use super::{OTHERS, RoomId, Service, Ticket, WAKES};
use crate::deputy::{Deputy, Heard, Heat, Rang};
use crate::rest::{NEAR, Next};

/// While there is work the sockets are looked at so often, and not before so many turns: each look is a system call, and on a slow processor
/// a turn takes long, too.
const SOCKETS: Duration = Duration::from_micros(100);
const TURNS: u32 = 8;
/// Behind turns with work the clock is asked for one turn of so many: it would take a tenth of each.
const CLOCK: u8 = 4;
/// Connections that had no work for so long are not looked at any more.
const SWEEP: Duration = Duration::from_millis(1);
/// What needs no better time than this is looked at so often.
const TICK: Duration = Duration::from_secs(1);

/// An application that has ended its writing direction closes without a word of its kernel's: it is looked at after so long, then after
/// twice that, up to the last; up to the late one while the peer waits for what it reads; up to [`TICK`] where nothing but its close is left.
/// One that sends by the kernel is looked at while the peer waits.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LATE_LOOK: Duration = Duration::from_millis(32);
const LAST_LOOK: Duration = Duration::from_secs(32);
/// A handshake has its place in the line for so long: a kernel has answered by then, unless its application does not accept.
const PLACE: Duration = Duration::from_secs(1);

impl Service {
    /// Looks at everything once. Whether there was anything. A caller that sleeps by itself does so behind a turn without work: the next turn then asks
    /// for the time.
    pub fn turn(&mut self) -> bool {
        if self.clock == 0 {
            (self.turned, self.clock) = (Instant::now(), CLOCK);
        }
        let now = self.turned;
        let mut any = false;
        // What has ended a sleep.
        if self.rest.has_found() {
            any |= self.look_at_sockets(now);
        }
        any |= self.driver.turn(now);
        // What came for applications goes to them before anything else.
        any |= self.take_events();
        self.ring_ears();
        any |= self.look_at_hot();
        // A sleep looks at sockets, too.
        self.deaf = self.deaf.saturating_add(1);
        let is_late = match self.deaf {
            TURNS.. => now >= self.heard + SOCKETS,
            _ => now >= self.heard + SOCKETS * TURNS,
        };
        let is_due = is_late && !self.rest.is_armed();
        let is_idle = !any && self.rest.is_spinning(now);
        if is_due || is_idle && now >= self.heard + NEAR {
            any |= self.look_at_sockets(now);
        }
        if now >= self.swept + SWEEP {
            self.swept = now;
            self.sweep();
        }
        any |= self.look_at_half(now);
        self.look_at_begun(now);
        self.look_at_sending(now);
        if now >= self.ticked + TICK {
            self.ticked = now;
            self.has_to_tick = self.rooms.tick(now, &mut self.driver);
            any |= self.hear_rooms();
        }
        any |= self.take_events();
        self.ring_ears();
        self.clock = if any { self.clock - 1 } else { 0 };
        any
    }

    pub(super) fn deputy(&mut self, ticket: Ticket) -> Option<&mut Deputy> {
        self.cases.get_mut(&ticket).map(|case| &mut case.deputy)
    }

    /// It has work, and is looked at from now on.
    pub(super) fn heat(&mut self, ticket: Ticket) -> Option<&mut Deputy> {
        let deputy = &mut self.cases.get_mut(&ticket)?.deputy;
        if deputy.works() == Heat::Cold {
            self.hot.push(ticket);
        }
        Some(deputy)
    }

    fn look_at_hot(&mut self) -> bool {
        let mut any = false;
        let mut at = 0;
        while let Some(ticket) = self.hot.get(at).copied() {
            at += 1;
            let Some(case) = self.cases.get_mut(&ticket) else { continue };
            let of_interest = |conn| self.driver.engine.is_reader_of_interest(conn);
            if case.deputy.has_news(case.conn.is_some_and(of_interest)) {
                case.deputy.works();
                self.look_at(ticket);
                any = true;
            }
        }
        if any {
            self.rest.answers();
        }
        any
    }

    /// What the application has done with its end.
    fn look_at(&mut self, ticket: Ticket) {
        if self.relay(ticket) {
            return self.look_at_ring(ticket);
        }
        let Some(case) = self.cases.get_mut(&ticket) else { return };
        let (before, now, conn) = (case.deputy.told, case.deputy.end(), case.conn);
        if now == EndState::Shut {
            case.deputy.lived_at = Instant::now();
        }
        match (before, now) {
            (EndState::Closed | EndState::Aborted, _) => {}
            (_, EndState::Closed | EndState::Aborted) => {
                case.deputy.told = now;
                match conn {
                    Some(conn) => self.driver.close(conn, now == EndState::Aborted),
                    None => self.end_if_left(ticket),
                }
            }
            (EndState::Open, EndState::Shut) => {
                case.deputy.told = now;
                conn.into_iter().for_each(|conn| self.driver.shut(conn));
                self.watch_close(ticket, FIRST_LOOK);
            }
            _ => conn.into_iter().for_each(|conn| self.driver.dirty(conn)),
        }
    }

    /// What an application that sends by the kernel has done with the ring, of which the kernel says nothing.
    fn look_at_ring(&mut self, ticket: Ticket) {
        let Some(case) = self.cases.get_mut(&ticket) else { return };
        let Some(conn) = case.conn else { return };
        let is_shut = case.deputy.told == EndState::Shut && case.deputy.reads_ring();
        if is_shut && case.deputy.has_closed() {
            case.deputy.told = EndState::Closed;
            self.driver.close(conn, false);
        } else {
            self.driver.dirty(conn);
        }
    }

    /// Moves the bytes of an application that is out of the ring. Whether it sends by the kernel.
    pub(super) fn relay(&mut self, ticket: Ticket) -> bool {
        let Some(case) = self.cases.get_mut(&ticket) else { return false };
        let to_leave = case.conn.filter(|conn| self.driver.engine.is_to_leave(*conn));
        if to_leave.is_none() && case.deputy.stays_in_ring() {
            return false;
        }
        if let Some(conn) = to_leave {
            if case.deputy.wake_reader() == Rang::Ear {
                case.deputy.ring_bell();
            }
            self.driver.engine.leave_ring(conn);
        }
        let came = case.conn.map(|conn| self.driver.engine.came(conn)).unwrap_or_default();
        let was_heard = !case.deputy.reads_in_silence();
        let moved = case.deputy.relay(came);
        let falls_silent = was_heard && case.deputy.reads_in_silence();
        if let (Some(conn), Some(upto)) = (case.conn, moved.taken) {
            self.driver.engine.taken(conn, upto);
        }
        if let (Some(conn), Some(upto)) = (case.conn, moved.urgent) {
            self.driver.engine.is_urgent(conn, upto);
        }
        if !case.deputy.is_relayed() {
            return false;
        }
        if moved.is_dead {
            self.is_gone(ticket, true);
            return true;
        }
        let before = case.deputy.told;
        let ends = case.deputy.is_relayed_to_its_end();
        let now = match (before, moved.is_over) {
            (EndState::Open | EndState::Shut, _) if ends => EndState::Closed,
            (EndState::Open, true) => EndState::Shut,
            (before, _) => before,
        };
        case.deputy.told = now;
        let Some(conn) = case.conn else {
            let sends_by_kernel = case.deputy.sends_by_kernel();
            if moved.is_over && self.has_left(ticket) {
                // Both have left the ring at a time: nobody asks for TCP any more.
                self.is_gone(ticket, false);
            }
            return sends_by_kernel;
        };
        match now {
            _ if now == before && moved.any => self.driver.dirty(conn),
            _ if now == before => {}
            EndState::Shut => {
                self.driver.shut(conn);
                self.watch_close(ticket, FIRST_LOOK);
            }
            _ => self.driver.close(conn, false),
        }
        if falls_silent {
            self.watch_reader(ticket);
        }
        self.cases.get(&ticket).is_some_and(|case| case.deputy.sends_by_kernel())
    }

    fn look_at_sockets(&mut self, now: Instant) -> bool {
        (self.heard, self.deaf) = (now, 0);
        let mut found = Vec::new();
        // A failure: the next turn looks again.
        let _ = self.rest.look(|number, flags| found.push((number, flags)));
        let mut any = false;
        for (number, flags) in found {
            if let Some((_, wake)) = WAKES.iter().find(|(of, _)| *of == number) {
                self.driver.wake(*wake);
            } else if number & OTHERS != 0 {
                self.ready.push(number);
                any = true;
            } else if number >= RoomId::FIRST {
                any |= self.hear_room(number);
            } else {
                self.hear(Ticket(number), flags);
                any = true;
            }
        }
        any
    }

    /// Applications have rung by the agent's ear of a room. The next look at what is hot finds what for.
    fn hear_room(&mut self, number: u64) -> bool {
        let rang =
            self.rooms.take_rang(number).filter_map(|place| self.places.get(&place)).copied();
        let rang: Vec<Ticket> = rang.collect();
        rang.iter().for_each(|ticket| _ = self.heat(*ticket));
        !rang.is_empty()
    }

    /// A process that ended between its word in the room and the eventfd leaves the word behind, and its next ones do not ring. Whether there
    /// was a word.
    fn hear_rooms(&mut self) -> bool {
        let rang = self.rooms.take_all_rang().filter_map(|place| self.places.get(&place)).copied();
        let rang: Vec<Ticket> = rang.collect();
        rang.iter().for_each(|ticket| _ = self.heat(*ticket));
        !rang.is_empty()
    }

    /// Something has come over the connection inside the host.
    fn hear(&mut self, ticket: Ticket, flags: EventFlags) {
        if self.is_sending(ticket) {
            return self.end_if_left(ticket);
        }
        if self.relay(ticket) {
            self.heat(ticket);
            // Both directions are shut, or it was reset.
            if flags.contains(EventFlags::ERR) {
                self.is_gone(ticket, true);
            }
            return;
        }
        let Some(deputy) = self.deputy(ticket) else { return };
        let ends = flags.intersects(EventFlags::ERR | EventFlags::HUP | EventFlags::RDHUP);
        let heard = deputy.listen(ends);
        if heard != Heard::Junk && self.relay(ticket) {
            self.heat(ticket);
            return;
        }
        let Some(deputy) = self.deputy(ticket) else { return };
        if heard == Heard::Junk && deputy.is_closed_by_peer() {
            // The application has sent where nobody reads: TCP answers so.
            deputy.reset();
            return self.is_gone(ticket, false);
        }
        if heard == Heard::Junk && !self.has_left(ticket) {
            // Somebody has written to the socket itself. Nothing is lost in silence.
            return self.abort(ticket);
        }
        self.heat(ticket);
        self.look_at(ticket);
        if ends || matches!(heard, Heard::End | Heard::Error) {
            let is_error = heard == Heard::Error || flags.contains(EventFlags::ERR);
            self.has_ended(ticket, is_error);
        }
    }

    /// No more comes there. Flags that came before have been looked at: an end without them is a death.
    fn has_ended(&mut self, ticket: Ticket, is_error: bool) {
        let Some(deputy) = self.deputy(ticket) else { return };
        match deputy.told {
            EndState::Open => self.is_gone(ticket, true),
            EndState::Shut if is_error => self.is_gone(ticket, true),
            EndState::Shut | EndState::Closed | EndState::Aborted => {}
        }
    }

    /// The application does nothing with the connection any more, and does not say so. `has_died`: nobody has the slot, either.
    pub(super) fn is_gone(&mut self, ticket: Ticket, has_died: bool) {
        let Some(case) = self.cases.get_mut(&ticket) else { return };
        case.has_died |= has_died;
        self.has_to_tick |= has_died;
        if matches!(case.deputy.told, EndState::Open | EndState::Shut) {
            case.deputy.told = EndState::Closed;
            let unread = has_died && case.deputy.is_unread();
            case.conn.into_iter().for_each(|conn| self.driver.close(conn, unread));
        }
        self.end_if_left(ticket);
    }

    /// What had no work is not looked at any more, in two steps.
    fn sweep(&mut self) {
        let hot = std::mem::take(&mut self.hot);
        for ticket in hot {
            let heat = self.deputy(ticket).map(|deputy| deputy.heat);
            match heat {
                Some(Heat::Hot { has_worked: true }) => {
                    if let Some(deputy) = self.deputy(ticket) {
                        deputy.heat = Heat::Hot { has_worked: false };
                        deputy.say_processor();
                    }
                    self.hot.push(ticket);
                }
                Some(Heat::Hot { has_worked: false }) => {
                    self.arm_one(ticket);
                    self.hot.push(ticket);
                }
                // It was looked at since it was armed.
                Some(Heat::Armed) => self.cool(ticket),
                Some(Heat::Cold) | None => {}
            }
        }
    }

    fn arm_one(&mut self, ticket: Ticket) {
        let Some(case) = self.cases.get_mut(&ticket) else { return };
        let waits = case.conn.is_some_and(|conn| self.driver.engine.waits_for_reader(conn));
        case.deputy.arm(waits);
    }

    fn cool(&mut self, ticket: Ticket) {
        if let Some(deputy) = self.deputy(ticket) {
            deputy.heat = Heat::Cold;
        }
    }

    fn watch_close(&mut self, ticket: Ticket, wait: Duration) {
        let due = Instant::now() + wait;
        if let Some(deputy) = self.deputy(ticket) {
            deputy.looked_at = Some(due);
            self.half.push(Reverse((due, ticket, wait)));
        }
    }

    /// Bytes have come for an application. Where no doorbell tells that the application reads them, the peer may wait for that.
    pub(super) fn watch_reader(&mut self, ticket: Ticket) {
        let Some(case) = self.cases.get(&ticket) else { return };
        let is_late = case.deputy.looked_at.is_none_or(|due| due > Instant::now() + FIRST_LOOK);
        if case.deputy.reads_in_silence() && is_late && self.waits_for_reader(ticket) {
            self.watch_close(ticket, FIRST_LOOK);
        }
    }

    /// The peer has closed: of an application that has ended its writing direction nothing but its close is left.
    pub(super) fn watch_last_close(&mut self, ticket: Ticket) {
        let is_last =
            |deputy: &mut Deputy| deputy.told == EndState::Shut && deputy.is_closed_by_peer();
        if self.deputy(ticket).is_some_and(is_last) {
            self.watch_close(ticket, FIRST_LOOK);
        }
    }

    fn waits_for_reader(&self, ticket: Ticket) -> bool {
        let conn = self.cases.get(&ticket).and_then(|case| case.conn);
        conn.is_some_and(|conn| self.driver.engine.waits_for_reader(conn))
    }

    /// Whether applications that have ended their writing direction have closed, or were killed, and what those have read of which no doorbell
    /// tells.
    fn look_at_half(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(Reverse((due, ticket, wait))) = self.half.peek().copied()
            && due <= now
        {
            self.half.pop();
            let Some(deputy) = self.deputy(ticket) else { continue };
            // Another look was asked for since.
            let is_open = matches!(deputy.told, EndState::Open | EndState::Shut);
            if !is_open || deputy.looked_at != Some(due) {
                continue;
            }
            deputy.looked_at = None;
            let (has_news, may_close) = (deputy.has_news(true), deputy.told == EndState::Shut);
            let is_last = deputy.is_closed_by_peer();
            any |= has_news;
            if has_news {
                self.heat(ticket);
                self.look_at(ticket);
            } else if may_close && now.duration_since(deputy.lived_at) >= TICK {
                deputy.lived_at = now;
                self.provoke(ticket);
            }
            // This look was the last one where the application has read the ring to its end, and goes on by the kernel.
            if !self.deputy(ticket).is_some_and(|deputy| deputy.reads_in_silence()) {
                continue;
            }
            // Behind the peer's close nobody waits for room.
            let next = match !is_last && self.waits_for_reader(ticket) {
                true if has_news => FIRST_LOOK,
                true => (wait * 2).min(LATE_LOOK),
                false if !may_close => continue,
                false if is_last => (wait * 2).min(TICK),
                false => (wait * 2).min(LAST_LOOK),
            };
            self.watch_close(ticket, next);
        }
        any
    }

    /// An application that does nothing may have been killed.
    fn provoke(&mut self, ticket: Ticket) {
        let Some(case) = self.cases.get(&ticket) else { return };
        case.deputy.provoke();
        if !case.deputy.can_ring() && self.rooms.is_owner_gone(case.room) {
            self.is_gone(ticket, true);
        }
    }

    /// A handshake that is not answered makes room for the next one in its line.
    fn look_at_begun(&mut self, now: Instant) {
        while let Some((since, ticket)) = self.begun.front().copied() {
            let has_place = self.cases.get(&ticket).is_some_and(|case| case.line.is_some());
            if has_place && now.duration_since(since) < PLACE {
                return;
            }
            self.begun.pop_front();
            self.next_in_line(ticket);
        }
    }

    /// After a turn: whether there was work. Arms, or sleeps for so long at most, once there was none for a while. `others` wake, too. Whether
    /// it has slept.
    ///
    /// # Errors
    /// The last device has failed, or poll(2).
    pub fn rest_behind(
        &mut self,
        any: bool,
        others: &[BorrowedFd<'_>],
        most: Duration,
    ) -> io::Result<bool> {
        match self.rest.next(any, self.turned) {
            Next::Look => Ok(false),
            Next::Arm => {
                for at in 0..self.hot.len() {
                    if let Some(ticket) = self.hot.get(at).copied() {
                        self.arm_one(ticket);
                    }
                }
                self.driver.arm().map_err(io::Error::other)?;
                self.driver.lost().for_each(|fd| self.rest.unwatch(fd));
                Ok(false)
            }
            // The last turn has posted what somebody waits for, and counts as none: the agent arms once more.
            Next::Sleep if !self.driver.hears_sends() => Ok(false),
            Next::Sleep => {
                // Each was looked at since it was armed.
                for ticket in std::mem::take(&mut self.hot) {
                    self.cool(ticket);
                }
                let tick = self.has_to_tick.then(|| TICK.saturating_sub(self.ticked.elapsed()));
                let half = self.half.peek().map(|Reverse((due, ..))| *due);
                let half = half.map(|due| due.saturating_duration_since(Instant::now()));
                let begun = self.begun.front().map(|(since, _)| *since + PLACE);
                let sending = self.sending.front().map(|(due, ..)| *due);
                let [begun, sending] = [begun, sending]
                    .map(|due| due.map(|due| due.saturating_duration_since(Instant::now())));
                let due = [self.driver.next_turn(), tick, half, begun, sending, Some(most)];
                let due = due.into_iter().flatten().min();
                self.rest.sleep(others, due)?;
                Ok(true)
            }
        }
    }
}
