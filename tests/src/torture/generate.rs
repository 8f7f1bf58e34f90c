//! Random programs. Each step is drawn with the knowledge of what came of those before, over TCP.

mod laden;
mod streams;

use std::collections::VecDeque;

use super::model::{Model, Object};
use super::program::Step;
use super::run::{MOST_HANDLES, MOST_PROCESSES, Observation};
use crate::Draw;

/// Bytes in flight in a direction: so few that neither TCP's buffers nor a ring are full, as their sizes are nobody's
/// promise. Streams that fill them know no numbers (`laden.rs`).
const MOST_IN_FLIGHT: i64 = 10_000;
/// In so many of a hundred programs connections are filled.
const FILLING: u64 = 8;
const MSG_DONTWAIT: i64 = libc::MSG_DONTWAIT as i64;

/// Draws the steps of one program.
pub struct Generator {
    draw: Draw,
    model: Model,
    planned: VecDeque<Step>,
    left: usize,
    handles: i64,
    forks: usize,
    /// Handles of epoll sets.
    sets: Vec<i64>,
    /// How many streams were drawn that fill a connection.
    streams: i64,
    /// Whether it fills connections at all: a TCP connection is really full a fifth of a second later only.
    fills: bool,
    /// For ends that have memory in common and nothing else (`programs/region/left_out.txt`).
    is_between_hosts: bool,
}

impl Generator {
    /// A program of 8 to 60 steps.
    pub fn new(seed: u64, is_between_hosts: bool) -> Generator {
        let mut draw = Draw::from_seed(seed);
        let left = 8 + draw.below(53) as usize;
        let (model, planned) = (Model::new(), VecDeque::new());
        let (handles, forks, sets, streams) = (0, 0, Vec::new(), 0);
        // A region has no far parts.
        let fills = draw.percent(FILLING) && !is_between_hosts;
        let mut generator = Generator {
            draw,
            model,
            planned,
            left,
            handles,
            forks,
            sets,
            streams,
            fills,
            is_between_hosts,
        };
        generator.listen(0);
        generator
    }

    /// What came of the step before.
    pub fn learn(&mut self, step: &Step, seen: &Observation) {
        self.model.learn(step, seen);
    }

    fn plan(&mut self, process: usize, thread: usize, op: &str, args: &[i64]) {
        let (op, args) = (op.to_owned(), args.to_vec());
        self.planned.push_back(Step { process, thread, op, args, at_once: false });
    }

    fn handle(&mut self) -> i64 {
        self.handles += 1;
        self.handles - 1
    }

    /// A process that lives and a thread of it that does nothing.
    fn actor(&mut self) -> Option<(usize, usize)> {
        let process = self.draw.pick(self.model.processes())?;
        Some((process, self.thread(process)?))
    }

    fn thread(&mut self, process: usize) -> Option<usize> {
        let idle = self.model.idle(process);
        self.draw.pick(&idle)
    }

    /// Whether no more will come to an end of a connection.
    fn has_ended(&self, process: usize, handle: i64) -> bool {
        matches!(self.model.object(process, handle), Some(Object::End { ended: true, .. }))
    }

    /// A handle of a process, now and then one that stands for nothing there.
    fn any(&mut self, process: usize, wanted: impl Fn(&Object) -> bool) -> Option<i64> {
        if self.draw.percent(2) && self.handles > 0 {
            let handle = self.draw.below(self.handles as u64) as i64;
            // Known: a set that two processes use. One that this process has inherited is not the model's.
            let inherited = self.sets.contains(&handle)
                && !self.model.handles(process, is_set).contains(&handle);
            return (!inherited).then_some(handle);
        }
        let handles = self.model.handles(process, wanted);
        self.draw.pick(&handles)
    }
}

impl Iterator for Generator {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        // A draw may find nothing to do: say, a recv where no socket is.
        for _ in 0..100 {
            if let Some(step) = self.planned.pop_front() {
                return Some(step);
            }
            self.invent();
        }
        None
    }
}

fn is_end(object: &Object) -> bool {
    matches!(object, Object::End { .. })
}

fn is_listener(object: &Object) -> bool {
    matches!(object, Object::Listener { .. })
}

fn is_set(object: &Object) -> bool {
    matches!(object, Object::Set { .. })
}

fn is_socket(object: &Object) -> bool {
    !is_set(object)
}

/// Draws what a step does, for one of a process' threads.
type Invention = fn(&mut Generator, usize, usize) -> Option<()>;

impl Generator {
    fn invent(&mut self) {
        let Some((process, thread)) = self.actor() else { return };
        let ends = !self.model.handles(process, is_end).is_empty();
        let room = self.handles + 4 < MOST_HANDLES;
        let laden = if self.model.laden().is_empty() { 0 } else { 1 };
        // The way back waits for the peer's next call, and a killed process leaves a message of the handshake unread.
        let leaves = !self.is_between_hosts;
        let kinds: &[(u64, Invention)] = &[
            (if ends { 24 } else { 0 }, Generator::send),
            (if ends { 28 } else { 0 }, Generator::recv),
            (
                if !room {
                    0
                } else if ends {
                    4
                } else {
                    60
                },
                Generator::pair,
            ),
            (if room { 3 } else { 0 }, Generator::connect),
            (if room { 4 } else { 0 }, Generator::accept),
            (u64::from(room), |g, p, _| {
                g.listen(p);
                Some(())
            }),
            (4, Generator::close),
            (3, Generator::shutdown),
            (if room { 2 } else { 0 }, Generator::dup),
            (1, Generator::dup2),
            (if room && leaves { 2 } else { 0 }, Generator::pass),
            (3, Generator::nonblock),
            (2, Generator::option),
            (5, Generator::ask),
            (5, Generator::poll),
            (3, Generator::select),
            (if room { 3 } else { 0 }, Generator::epoll),
            (6, Generator::control),
            (8, Generator::wait),
            (2, Generator::kick),
            (1, Generator::fork),
            (1, Generator::exit),
            (1, Generator::disconnect),
            (if ends { 2 } else { 0 }, Generator::cork),
            (if ends && leaves { 1 } else { 0 }, Generator::urge),
            (if ends && self.fills { 5 } else { 0 }, Generator::fill),
            (20 * laden, Generator::drain),
            (10 * laden, Generator::push),
            (5 * laden, Generator::refill),
            (16 * laden, Generator::look),
            (if ends { 1 } else { 0 }, Generator::run_at_once),
        ];
        let kind = self.draw.weighted(kinds);
        kind(self, process, thread);
    }

    fn listen(&mut self, process: usize) {
        let (handle, family) = (self.handle(), self.draw.weighted(&[(3, 4), (1, 6)]));
        self.plan(process, 0, "listen", &[handle, family, 64]);
    }

    /// The process and the handle of any listener.
    fn listener(&mut self) -> Option<(usize, i64)> {
        let all = |process: &usize| {
            let handles = self.model.handles(*process, is_listener).into_iter();
            handles.map(|h| (*process, h)).collect::<Vec<_>>()
        };
        let listeners: Vec<_> = self.model.processes().iter().flat_map(all).collect();
        self.draw.pick(&listeners)
    }

    /// An address family by which a listener can be reached.
    fn family_to(&mut self, process: usize, listener: i64) -> i64 {
        match self.model.object(process, listener) {
            Some(Object::Listener { family: 6, .. }) => self.draw.one(&[6, 4, 46]),
            _ => self.draw.weighted(&[(3, 4), (1, 46)]),
        }
    }

    /// A connection, and a conversation of some rounds, after which it may be in shared memory.
    fn pair(&mut self, process: usize, thread: usize) -> Option<()> {
        let (server, listener) = self.listener()?;
        let acceptor = self.thread(server)?;
        let (client, accepted) = (self.handle(), self.handle());
        let family = self.family_to(server, listener);
        let nonblock = self.draw.percent(30);
        self.plan(process, thread, "connect", &[client, listener, family, 0]);
        self.plan(server, acceptor, "accept", &[accepted, listener, i64::from(nonblock)]);
        if self.draw.percent(25) {
            self.limit([(process, thread, client), (server, acceptor, accepted)]);
        }
        let rounds = self.draw.weighted(&[(2, 0), (1, 1), (2, 2), (4, 3), (2, 6)]);
        // The handshake's messages go to and fro first.
        let rounds = if self.is_between_hosts { 3 * rounds } else { rounds };
        self.converse((process, thread, client), (server, acceptor, accepted), rounds);
        Some(())
    }

    /// Messages by turns between two ends, each with its process and thread.
    fn converse(&mut self, one: (usize, usize, i64), other: (usize, usize, i64), rounds: usize) {
        for _ in 0..rounds {
            for (from, to) in [(one, other), (other, one)] {
                let size = 1 + self.draw.below(200) as i64;
                self.plan(from.0, from.1, "send", &[from.2, 0, size, 0]);
                self.plan(to.0, to.1, "recv", &[to.2, 0, 1000, MSG_DONTWAIT]);
            }
        }
        self.left += 4 * rounds;
    }

    fn connect(&mut self, process: usize, thread: usize) -> Option<()> {
        let (server, listener) = self.listener()?;
        let family = self.family_to(server, listener);
        let nonblock = i64::from(self.draw.percent(60));
        let handle = self.handle();
        self.plan(process, thread, "connect", &[handle, listener, family, nonblock]);
        Some(())
    }

    fn accept(&mut self, process: usize, thread: usize) -> Option<()> {
        let listener = self.any(process, is_listener)?;
        let empty = match self.model.object(process, listener) {
            Some(Object::Listener { waiting, .. }) => waiting.is_empty(),
            _ => false,
        };
        if empty && self.draw.percent(70) {
            return None;
        }
        let nonblock = i64::from(self.draw.percent(50));
        // The listener itself waits or not by what was said to it.
        if self.model.is_watched(process, listener) && empty {
            return None;
        }
        let handle = self.handle();
        self.plan(process, thread, "accept", &[handle, listener, nonblock]);
        Some(())
    }

    fn send(&mut self, process: usize, thread: usize) -> Option<()> {
        let handle = self.any(process, is_end)?;
        // A closed peer resets the connection, and TCP loses what it has not delivered.
        if self.model.is_laden(process, handle) && self.has_ended(process, handle) {
            return None;
        }
        let in_flight = self.model.in_flight(process, handle);
        let room = MOST_IN_FLIGHT.saturating_sub(in_flight);
        let size = self.size().min(room.max(0));
        let flags = self.draw.weighted(&[
            (5, 0),
            (3, MSG_DONTWAIT),
            (2, libc::MSG_NOSIGNAL.into()),
            (1, (libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT).into()),
        ]);
        // How much a sleeper gets of two messages is a matter of timing.
        let two = u64::from(!self.model.somebody_sleeps());
        let how = self.draw.weighted(&[(6, 0), (4, 1), (2, 2), (2, 3), (two, 4), (1, 5), (1, 6)]);
        self.plan(process, thread, "send", &[handle, how, size, flags]);
        Some(())
    }

    fn size(&mut self) -> i64 {
        let most = self.draw.weighted(&[(1, 1), (6, 100), (4, 2000), (2, 9000)]);
        self.draw.below(most + 1) as i64
    }

    fn recv(&mut self, process: usize, thread: usize) -> Option<()> {
        let handle = self.any(process, is_end)?;
        if self.model.is_laden(process, handle) {
            return None;
        }
        let (unread, waits, lowat) = match self.model.object(process, handle) {
            Some(Object::End { unread, ended, nonblock, lowat, .. }) => {
                (*unread, !ended && !nonblock, *lowat)
            }
            _ => (0, false, 1),
        };
        let size = match self.draw.below(4) {
            0 => self.size(),
            1 => unread,
            2 => self.draw.below(unread.max(0) as u64 + 1) as i64,
            _ => 20_000,
        };
        // Known: a splice in the middle of a handshake by messages takes longer than a thread is watched.
        let splice = u64::from(!self.is_between_hosts);
        let how = self.draw.weighted(&[(6, 0), (4, 1), (2, 2), (3, 3), (1, 4), (splice, 5)]);
        let mut flags = self.draw.weighted(&[
            (10, 0),
            (3, libc::MSG_PEEK.into()),
            (2, libc::MSG_WAITALL.into()),
            (1, libc::MSG_TRUNC.into()),
            (1, (libc::MSG_PEEK | libc::MSG_WAITALL).into()),
        ]);
        if self.model.has_passed_peer(process, handle) {
            flags &= !i64::from(libc::MSG_PEEK);
        }
        if self.draw.percent(30) {
            flags |= MSG_DONTWAIT;
        }
        if self.draw.percent(if self.model.is_moving(process, handle) { 15 } else { 1 }) {
            flags = libc::MSG_OOB.into();
        }
        // Two who sleep for the same bytes share them by chance. And known: the kernel lets a call sleep until
        // SO_RCVLOWAT is reached even if it asks for less, we wake it with the first byte.
        if self.model.is_awaited(process, handle) || (waits && lowat > 1) {
            return None;
        }
        let ignores_flags = how == 1 || how == 2 || how == 5;
        let all = flags & i64::from(libc::MSG_WAITALL) != 0 && !ignores_flags;
        let wants = if all { size.max(1) } else { 1 };
        let waits = waits && unread < wants && (ignores_flags || flags & MSG_DONTWAIT == 0);
        // A receive of nothing ends with any wake-up, be it for an acknowledgement.
        if size == 0 {
            flags |= MSG_DONTWAIT;
        }
        // Some calls may sleep, but a program in which all do is a short one.
        if waits && self.draw.percent(75) {
            flags |= MSG_DONTWAIT;
            self.plan(process, thread, "recv", &[handle, 0, size, flags]);
            return Some(());
        }
        // As in `wait_for_none_taken`.
        let at_once = !ignores_flags && flags & (MSG_DONTWAIT | i64::from(libc::MSG_PEEK)) != 0;
        if !at_once && self.model.is_watched(process, handle) {
            return None;
        }
        self.plan(process, thread, "recv", &[handle, how, size, flags]);
        Some(())
    }

    fn close(&mut self, process: usize, thread: usize) -> Option<()> {
        let handle = self.any(process, |_| true)?;
        // There is little left to do without listeners.
        let listens = self.model.object(process, handle).is_some_and(is_listener);
        if (listens && self.draw.percent(80))
            || self.model.is_polled(process)
            || self.model.outlives_registration(process, handle)
            || self.model.loses_stream(process, handle)
        {
            return None;
        }
        self.plan(process, thread, "close", &[handle]);
        Some(())
    }

    fn shutdown(&mut self, process: usize, thread: usize) -> Option<()> {
        let handle = self.any(process, is_end)?;
        // Known: as in `ask`.
        if self.model.has_killed_peer(process, handle) {
            return None;
        }
        let how = self.draw.weighted(&[(1, 0), (4, 1), (2, 2)]);
        // When the FIN of an end that reads no more is acknowledged, there is one more edge. TCP delays that by up to 40 ms.
        let (deaf, silent) = match self.model.object(process, handle) {
            Some(Object::End { deaf, silent, .. }) => (*deaf, *silent),
            _ => (false, false),
        };
        let ends_both = (deaf || how != 1) && (silent || how != 0);
        if ends_both && self.model.is_edged(process, handle) {
            return None;
        }
        // The FIN behind a stream is acknowledged when all is read, and an edge then. Who reads no more reads a stream by
        // halves.
        let loaded = self.model.is_loaded(process, handle);
        if (loaded && self.model.is_edged(process, handle))
            || (how != 1 && self.model.is_laden(process, handle))
        {
            return None;
        }
        self.plan(process, thread, "shutdown", &[handle, how]);
        Some(())
    }

    fn dup(&mut self, process: usize, thread: usize) -> Option<()> {
        let old = self.any(process, |_| true)?;
        let new = self.handle();
        self.plan(process, thread, "dup", &[new, old]);
        Some(())
    }

    fn pass(&mut self, process: usize, thread: usize) -> Option<()> {
        let old = self.any(process, is_end)?;
        let over = self.has_ended(process, old);
        // Known: a set that came in a message. And who gets a failed connection is not told its error.
        if over
            || self.sets.contains(&old)
            || self.model.is_loaded(process, old)
            || self.model.is_laden(process, old)
            || self.model.is_edged(process, old)
            || self.model.is_held_back(process, old)
            || self.model.is_peeked_by_peer(process, old)
        {
            return None;
        }
        let new = self.handle();
        self.plan(process, thread, "pass", &[new, old]);
        Some(())
    }

    fn dup2(&mut self, process: usize, thread: usize) -> Option<()> {
        let (onto, old) = (self.any(process, is_end)?, self.any(process, is_end)?);
        if self.model.is_polled(process)
            || self.model.outlives_registration(process, onto)
            || self.model.loses_stream(process, onto)
        {
            return None;
        }
        self.plan(process, thread, "dup2", &[onto, old]);
        Some(())
    }

    fn nonblock(&mut self, process: usize, thread: usize) -> Option<()> {
        let handle = self.any(process, is_socket)?;
        if self.model.is_peeked_for_all(process, handle) {
            return None;
        }
        let (on, how) = (self.draw.below(2) as i64, self.draw.below(2) as i64);
        self.plan(process, thread, "nonblock", &[handle, on, how]);
        Some(())
    }

    fn option(&mut self, process: usize, thread: usize) -> Option<()> {
        let handle = self.any(process, is_socket)?;
        let which = self.draw.weighted(&[(3, 0), (3, 1), (1, 2), (1, 3)]);
        if which == 0
            && (self.model.is_awaited(process, handle) || self.model.is_laden(process, handle))
        {
            return None;
        }
        let value = match which {
            0 => self.draw.one(&[1, 10, 100, 2000, 0]),
            1 => 0,
            _ => self.draw.below(2) as i64,
        };
        self.plan(process, thread, "option", &[handle, which, value]);
        Some(())
    }

    fn ask(&mut self, process: usize, thread: usize) -> Option<()> {
        let handle = self.any(process, is_socket)?;
        let which = self.draw.weighted(&[
            (4, 0),
            (1, 1),
            (1, 2),
            (4, 3),
            (1, 4),
            (1, 5),
            (1, 6),
            (2, 7),
            (3, 8),
            (1, 9),
        ]);
        // Known: the killed peer's socket may have had a doorbell, and the kernel's is reset by that.
        if matches!(which, 7 | 8) && self.model.has_killed_peer(process, handle) {
            return None;
        }
        // How many bytes have come, and whether a FIN has behind them.
        let streams = self.model.is_laden(process, handle) || self.model.is_loaded(process, handle);
        if matches!(which, 3 | 8) && streams {
            return None;
        }
        self.plan(process, thread, "ask", &[handle, which]);
        Some(())
    }

    /// How long to wait: at times for ever, if that may be; the thread is then lost for a while.
    fn patience(&mut self, process: usize) -> i64 {
        let idle = self.model.idle(process).len();
        if idle > 1 && self.draw.percent(15) { -1 } else { 0 }
    }

    /// A poll that sleeps beside a receive or an accept sees something or not, by chance: it looks once, then.
    fn wait_for_none_taken(&self, process: usize, args: &mut [i64]) {
        if args[1..].iter().step_by(2).any(|handle| self.model.is_taken_from(process, *handle)) {
            args[0] = 0;
        }
    }

    // Not on sets: known, of an entry that has fired or asks for no data, the kernel's poll knows better.
    fn poll(&mut self, process: usize, thread: usize) -> Option<()> {
        let mut args = vec![self.patience(process)];
        for _ in 0..1 + self.draw.below(4) {
            let handle = self.any(process, is_socket)?;
            if self.model.is_unsure(process, handle) {
                return None;
            }
            args.extend([handle, self.events(false)]);
        }
        self.wait_for_none_taken(process, &mut args);
        self.plan(process, thread, "poll", &args);
        Some(())
    }

    fn select(&mut self, process: usize, thread: usize) -> Option<()> {
        let mut args = vec![self.patience(process)];
        for _ in 0..1 + self.draw.below(3) {
            let handle = self.any(process, is_socket)?;
            if self.model.is_unsure(process, handle) {
                return None;
            }
            if !args[1..].chunks(2).any(|pair| pair[0] == handle) {
                args.extend([handle, 1 + self.draw.below(7) as i64]);
            }
        }
        self.wait_for_none_taken(process, &mut args);
        self.plan(process, thread, "select", &args);
        Some(())
    }

    /// Bits of poll(2) or epoll_ctl(2).
    fn events(&mut self, epoll: bool) -> i64 {
        let mut events = self.draw.weighted(&[
            (6, i64::from(libc::EPOLLIN)),
            (3, (libc::EPOLLIN | libc::EPOLLOUT).into()),
            (2, (libc::EPOLLIN | libc::EPOLLRDHUP).into()),
            (1, libc::EPOLLOUT.into()),
            (1, libc::EPOLLRDHUP.into()),
            (1, libc::EPOLLPRI.into()),
            (1, 0),
        ]);
        if epoll {
            events |= self.draw.weighted(&[
                (4, 0),
                (3, 1 << 31),
                (1, i64::from(libc::EPOLLONESHOT)),
                (1, 1 << 31 | i64::from(libc::EPOLLONESHOT)),
            ]);
        }
        events
    }

    /// Bits of epoll_ctl(2) for one of its sockets.
    fn registration(&mut self, process: usize, handle: i64) -> i64 {
        let events = self.events(true);
        // Known: on its way back to TCP it may give one more edge.
        if self.model.is_moving(process, handle) { events & !(1 << 31) } else { events }
    }

    fn epoll(&mut self, process: usize, thread: usize) -> Option<()> {
        let set = self.handle();
        self.sets.push(set);
        self.plan(process, thread, "epoll", &[set]);
        for _ in 0..self.draw.below(4) {
            let Some(handle) = self.any(process, is_socket) else { break };
            let events = self.registration(process, handle);
            self.plan(process, thread, "control", &[set, 1, handle, events]);
        }
        Some(())
    }

    fn control(&mut self, process: usize, thread: usize) -> Option<()> {
        let set = self.any(process, is_set)?;
        let handle = self.any(process, |_| true)?;
        let op = self.draw.weighted(&[(5, 1), (2, 2), (4, 3)]);
        let events = self.registration(process, handle);
        if self.model.is_waited_for(process, set) && self.model.is_taken_from(process, handle) {
            return None;
        }
        self.plan(process, thread, "control", &[set, op, handle, events]);
        Some(())
    }

    fn wait(&mut self, process: usize, thread: usize) -> Option<()> {
        let set = self.any(process, is_set)?;
        // Room for all: which come first is nobody's promise.
        if self.model.is_set_unsure(process, set) {
            return None;
        }
        let taken = self.model.is_set_taken_from(process, set);
        let patience = if taken { 0 } else { self.patience(process) };
        self.plan(process, thread, "wait", &[set, 16, patience]);
        Some(())
    }

    /// A signal for the other thread, best while it sleeps in a call.
    fn kick(&mut self, process: usize, thread: usize) -> Option<()> {
        let other = 1 - thread;
        if !self.model.sleeps(process, other) && self.draw.percent(80) {
            return None;
        }
        // Known: the kernel restarts a call with its number, whatever that means by now, or ends it; we go on with the
        // socket.
        if self.model.is_renumbered() {
            return None;
        }
        let restarts = self.draw.below(2) as i64;
        self.plan(process, thread, "kick", &[other as i64, restarts]);
        Some(())
    }

    fn fork(&mut self, process: usize, thread: usize) -> Option<()> {
        let child = super::run::PROCESSES + self.forks;
        if child >= MOST_PROCESSES {
            return None;
        }
        self.forks += 1;
        self.plan(process, thread, "fork", &[child as i64]);
        Some(())
    }

    fn exit(&mut self, process: usize, thread: usize) -> Option<()> {
        if self.model.processes().len() < 2
            || self.draw.percent(50)
            || self.model.loses_streams(process)
        {
            return None;
        }
        let is_killed = self.draw.percent(40) && !self.is_between_hosts;
        let by_signal = i64::from(is_killed && !self.model.has_moving(process));
        self.plan(process, thread, "exit", &[by_signal]);
        Some(())
    }

    fn disconnect(&mut self, process: usize, thread: usize) -> Option<()> {
        let handle = self.any(process, is_end)?;
        // Known: a sleeper is told ECONNRESET where TCP says EPIPE first and ECONNRESET then.
        // Another process may be told the error twice; an error that a poll has seen is forgotten, where TCP reports it afterwards.
        let over = self.has_ended(process, handle);
        let shared = self.model.is_shared(process, handle);
        let streams = self.model.is_laden(process, handle) || self.model.is_loaded(process, handle);
        if over || shared || streams || self.model.is_awaited(process, handle) {
            return None;
        }
        self.plan(process, thread, "disconnect", &[handle]);
        Some(())
    }
}
