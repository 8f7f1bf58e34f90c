//! What the generator believes of a program so far: who has which socket, and how much is unread where.
//!
//! It is there to make steps worth doing. Nothing is judged by it, so it may be wrong.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::program::Step;
use super::run::{Observation, PROCESSES, THREADS};

const EINPROGRESS: i64 = 115;
const EAGAIN: i64 = 11;
/// All of a stream, as a length of `drain`.
pub(super) const ALL: i64 = -64;
/// So much of a full one that there is room again, in a ring and by TCP.
pub(super) const MOST: i64 = -60;
/// So much that there may be room or not.
pub(super) const HALF: i64 = -32;
/// So little that there is none.
pub(super) const LITTLE: i64 = -2;
/// What can be sent beside what [`MOST`] has left, so that there is still room.
const BESIDE: i64 = 3000;
const MSG_OOB: i64 = 1;
const MSG_PEEK: i64 = 2;
/// epoll(7) has sets in sets in sets, but not without end.
const NESTED_SETS: usize = 5;

/// A socket or an epoll set, whoever has it open.
#[derive(Clone, Debug)]
pub(super) enum Object {
    /// A listener, and the clients that it has not accepted.
    Listener {
        /// 4 or 6.
        family: i64,
        /// Objects, in order.
        waiting: VecDeque<usize>,
    },
    /// One end of a connection.
    End {
        /// The other end, if it was accepted.
        peer: Option<usize>,
        /// Bytes that it could receive.
        unread: i64,
        /// Bytes that it sent before its other end was accepted.
        early: i64,
        /// Whether no more will come.
        ended: bool,
        /// Whether it sends no more, which its other end may not be there to notice.
        silent: bool,
        /// Calls do not wait.
        nonblock: bool,
        /// SO_RCVLOWAT.
        lowat: i64,
        /// It was sent in a message, or has sent urgent data: the connection goes back to TCP.
        passed: bool,
        /// It reads no more than what is there.
        deaf: bool,
        /// It was registered in an epoll set for edges.
        edged: bool,
        /// It has sent an urgent byte, and the other end has received nothing since.
        urgent: bool,
        /// A process that had it was killed.
        killed: bool,
        /// SO_SNDBUF and SO_RCVBUF as they were set; 0 = not at all, -1 = while several processes had it.
        buffers: [i64; 2],
        /// A close of it resets the connection (SO_LINGER).
        abortive: bool,
        /// A stream that it sends and that is not received to its end.
        load: Option<Load>,
    },
    /// An epoll set.
    Set {
        /// Objects that were registered, some of them no longer.
        members: BTreeSet<usize>,
    },
}

/// A stream under way: nothing else goes in this direction meanwhile, as nobody but the world knows how much there is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// The stream.
    pub seed: i64,
    /// The process that has filled the connection.
    pub by: usize,
    /// Whether there is room for more.
    pub room: Room,
    /// Bytes that were sent since it was known that there is room.
    beside: i64,
    /// A send sleeps whose bytes the world counts already.
    pub pending: bool,
}

/// Whether a loaded end can send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Room {
    /// It cannot.
    Full,
    /// It is not told so, but a send may find some.
    Low,
    /// It is TCP's affair.
    Unsure,
    /// It can.
    Free,
}

/// A loaded end, and where it is open.
#[derive(Clone, Debug)]
pub(super) struct Laden {
    /// The end as an object.
    pub object: usize,
    /// What is under way.
    pub load: Load,
    /// Handles of the process that has filled it. Known: how much a ring takes is known to each process by itself, so that
    /// another one finds some more room.
    pub senders: Vec<(usize, i64)>,
    /// Those that have the other end.
    pub receivers: Vec<(usize, i64)>,
}

/// The handles that a call which sleeps waits for.
fn handles_of(step: &Step) -> impl Iterator<Item = i64> {
    let args: Vec<i64> = match step.op.as_str() {
        "poll" | "select" => step.args.iter().skip(1).step_by(2).copied().collect(),
        "accept" => step.args.iter().skip(1).take(1).copied().collect(),
        _ => step.args.iter().take(1).copied().collect(),
    };
    args.into_iter()
}

fn polls(step: &Step) -> bool {
    ["poll", "select", "wait"].contains(&step.op.as_str())
}

/// Whether a receive leaves what it sees: read(2) and its like know no flags.
fn peeks(step: &Step) -> bool {
    step.op == "recv" && !matches!(step.args[1], 1 | 2 | 5) && step.args[3] & MSG_PEEK != 0
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    objects: Vec<Object>,
    /// By process and handle.
    open: BTreeMap<(usize, i64), usize>,
    /// Listeners by the handle that they were made with.
    listeners: BTreeMap<i64, usize>,
    /// Threads that sleep in a step, and what its handles meant when they fell asleep: a call keeps its sockets, whatever
    /// becomes of the numbers.
    asleep: BTreeMap<(usize, usize), (Step, Vec<usize>)>,
    processes: Vec<usize>,
    /// The number of a socket on which a thread slept has got another meaning.
    renumbered: bool,
}

impl Model {
    /// At the start of a program.
    pub(super) fn new() -> Model {
        Model { processes: (0..PROCESSES).collect(), ..Model::default() }
    }

    /// Processes that live.
    pub(super) fn processes(&self) -> &[usize] {
        &self.processes
    }

    /// Threads of a process that can be asked.
    pub(super) fn idle(&self, process: usize) -> Vec<usize> {
        (0..THREADS).filter(|t| !self.asleep.contains_key(&(process, *t))).collect()
    }

    /// Whether a thread sleeps in a step.
    pub(super) fn sleeps(&self, process: usize, thread: usize) -> bool {
        self.asleep.contains_key(&(process, thread))
    }

    /// Whether a call that is restarted after a signal could meet another socket at its number.
    pub(super) fn is_renumbered(&self) -> bool {
        self.renumbered
    }

    /// Whether any thread does.
    pub(super) fn somebody_sleeps(&self) -> bool {
        !self.asleep.is_empty()
    }

    /// Whether a thread sleeps in a receive on this socket.
    pub(super) fn is_awaited(&self, process: usize, handle: i64) -> bool {
        self.open.get(&(process, handle)).is_some_and(|o| self.receives(*o))
    }

    fn receives(&self, object: usize) -> bool {
        self.asleep.values().any(|(step, on)| step.op == "recv" && on.contains(&object))
    }

    /// Whether a thread sleeps in a call that takes what comes: bytes, or a connection. Whether a poll that wakes beside
    /// it still finds something is a matter of timing, by TCP, too.
    pub(super) fn is_taken_from(&self, process: usize, handle: i64) -> bool {
        self.number(process, handle).is_some_and(|object| self.takes_from(object))
    }

    /// The same of anything in an epoll set.
    pub(super) fn is_set_taken_from(&self, process: usize, set: i64) -> bool {
        self.number(process, set).is_some_and(|set| {
            (0..self.objects.len()).any(|o| self.takes_from(o) && self.holds(set, o, NESTED_SETS))
        })
    }

    fn takes_from(&self, object: usize) -> bool {
        let takes = |step: &Step| match step.op.as_str() {
            "accept" => true,
            "recv" => !peeks(step),
            _ => false,
        };
        self.asleep.values().any(|(step, on)| takes(step) && on.contains(&object))
    }

    /// Whether a thread sleeps in a poll, a select or a wait until something comes here.
    pub(super) fn is_watched(&self, process: usize, handle: i64) -> bool {
        self.number(process, handle).is_some_and(|object| self.is_object_watched(object))
    }

    /// Whether something is an object, or a set that has it, maybe in other sets.
    fn holds(&self, one: usize, object: usize, depth: usize) -> bool {
        match &self.objects[one] {
            Object::Set { members } if depth > 0 => {
                members.iter().any(|member| self.holds(*member, object, depth - 1))
            }
            _ => one == object,
        }
    }

    /// Whether a thread sleeps in a wait for this set.
    pub(super) fn is_waited_for(&self, process: usize, set: i64) -> bool {
        let Some(object) = self.number(process, set) else { return false };
        self.asleep.values().any(|(step, on)| step.op == "wait" && on.contains(&object))
    }

    /// Whether a thread sleeps in a receive from the other end. Known: an urgent byte does not end its splice, and stays
    /// for others to see.
    pub(super) fn is_received_by_peer(&self, process: usize, handle: i64) -> bool {
        let peer = self.open.get(&(process, handle)).and_then(|o| self.peer(*o));
        peer.is_some_and(|o| self.receives(o))
    }

    /// Whether the other end has shut both directions down and not read all. Known: it is not told of an urgent byte.
    pub(super) fn is_left_unread(&self, process: usize, handle: i64) -> bool {
        let peer = self.number(process, handle).and_then(|o| self.peer(o));
        let is_left = |object: &Object| {
            matches!(object, Object::End { deaf: true, silent: true, unread: 1.., .. })
        };
        peer.is_some_and(|o| is_left(&self.objects[o]))
    }

    /// Whether an urgent byte of this end's may be unread. Known: with the next one it may become data.
    pub(super) fn is_urgent(&self, process: usize, handle: i64) -> bool {
        matches!(self.object(process, handle), Some(Object::End { urgent: true, .. }))
    }

    /// Whether a process has an end of a connection that is moving. Known: killed now, it leaves a doorbell unread.
    pub(super) fn has_moving(&self, process: usize) -> bool {
        self.handles(process, |_| true).into_iter().any(|handle| self.is_moving(process, handle))
    }

    /// Whether a thread sleeps in a peek that waits for all. Known: O_NONBLOCK, set since, may end it by TCP.
    pub(super) fn is_peeked_for_all(&self, process: usize, handle: i64) -> bool {
        self.number(process, handle).is_some_and(|o| self.peeks_for_all(o))
    }

    /// The same of the other end. Known: while the connection goes back, a peek may show the ring's bytes only.
    pub(super) fn is_peeked_by_peer(&self, process: usize, handle: i64) -> bool {
        let peer = self.number(process, handle).and_then(|o| self.peer(o));
        peer.is_some_and(|o| self.peeks_for_all(o))
    }

    fn peeks_for_all(&self, object: usize) -> bool {
        let for_all = |step: &Step| peeks(step) && step.args[3] & i64::from(libc::MSG_WAITALL) != 0;
        self.asleep.values().any(|(step, on)| for_all(step) && on.contains(&object))
    }

    /// Whether a thread of this process sleeps in a poll, a select or a wait: what a close of anything in it does is
    /// nobody's promise.
    pub(super) fn is_polled(&self, process: usize) -> bool {
        self.asleep.iter().any(|((p, _), (step, _))| *p == process && polls(step))
    }

    /// Whether other processes have the socket.
    pub(super) fn is_shared(&self, process: usize, handle: i64) -> bool {
        let meant = self.open.get(&(process, handle));
        self.open.iter().any(|((p, _), o)| *p != process && Some(o) == meant)
    }

    /// Whether other processes have the socket while this one may have it in an epoll set, which reports it for as
    /// long as anybody has it. Known: we do not, once this process has closed it.
    pub(super) fn outlives_registration(&self, process: usize, handle: i64) -> bool {
        // Of one that was passed on, the registration is made anew, which is an edge.
        let edge = matches!(
            self.object(process, handle),
            Some(Object::End { passed: true, edged: true, .. })
        );
        (edge || self.is_shared(process, handle))
            && !self.handles(process, |o| matches!(o, Object::Set { .. })).is_empty()
    }

    fn load(&self, object: usize) -> Option<Load> {
        match self.objects[object] {
            Object::End { load, .. } => load,
            _ => None,
        }
    }

    /// Whether a stream is under way from an end.
    pub(super) fn is_loaded(&self, process: usize, handle: i64) -> bool {
        self.number(process, handle).is_some_and(|o| self.load(o).is_some())
    }

    /// Whether one is under way to it: how much of it has come is TCP's affair.
    pub(super) fn is_laden(&self, process: usize, handle: i64) -> bool {
        let peer = self.number(process, handle).and_then(|o| self.peer(o));
        peer.is_some_and(|peer| self.load(peer).is_some())
    }

    /// Whether what a poll or an epoll set says of it now is TCP's affair: whether there is room, or whether the end has
    /// come behind what is not read.
    pub(super) fn is_unsure(&self, process: usize, handle: i64) -> bool {
        self.number(process, handle).is_some_and(|o| self.is_object_unsure(process, o, false))
    }

    /// The same of anything in an epoll set. Bytes on their way are edges.
    pub(super) fn is_set_unsure(&self, process: usize, set: i64) -> bool {
        self.number(process, set).is_some_and(|set| {
            let all = 0..self.objects.len();
            all.into_iter()
                .any(|o| self.is_object_unsure(process, o, true) && self.holds(set, o, NESTED_SETS))
        })
    }

    fn is_object_unsure(&self, process: usize, object: usize, by_edges: bool) -> bool {
        let laden = self.peer(object).is_some_and(|peer| self.load(peer).is_some());
        let told = match self.objects[object] {
            Object::End { ended, edged, .. } => laden && (ended || (by_edges && edged)),
            _ => false,
        };
        let load = self.load(object);
        told || load.is_some_and(|load| load.room == Room::Unsure || load.by != process)
    }

    /// Whether a thread sleeps in a send of any size on this socket.
    pub(super) fn is_pushed(&self, object: usize) -> bool {
        self.asleep.values().any(|(step, on)| step.op == "push" && on.contains(&object))
    }

    /// Whether a thread sleeps in a poll, a select or a wait for it.
    pub(super) fn is_object_watched(&self, object: usize) -> bool {
        let holds = |on: &usize| self.holds(*on, object, NESTED_SETS);
        self.asleep.values().any(|(step, on)| polls(step) && on.iter().any(holds))
    }

    /// Whether a close of this handle would leave bytes of a stream to chance: a reset takes those that TCP has not
    /// delivered. And known: sends that sleep and lose their number.
    pub(super) fn loses_stream(&self, process: usize, handle: i64) -> bool {
        let Some(object) = self.number(process, handle) else { return false };
        let Object::End { unread, abortive, .. } = self.objects[object] else { return false };
        let laden = self.is_laden(process, handle);
        self.is_pushed(object)
            || (self.load(object).is_some() && (unread != 0 || abortive || laden))
    }

    /// The same of all that a process has.
    pub(super) fn loses_streams(&self, process: usize) -> bool {
        self.handles(process, |_| true).into_iter().any(|h| self.loses_stream(process, h))
    }

    /// Streams under way whose other end is there.
    pub(super) fn laden(&self) -> Vec<Laden> {
        let open = |object: usize| {
            let of_it = self.open.iter().filter(move |(_, o)| **o == object);
            of_it.map(|(at, _)| *at).collect::<Vec<_>>()
        };
        let all = (0..self.objects.len()).filter_map(|object| {
            let (load, peer) = (self.load(object)?, self.peer(object)?);
            let mut senders = open(object);
            senders.retain(|(process, _)| *process == load.by);
            Some(Laden { object, load, senders, receivers: open(peer) })
        });
        all.filter(|laden| !laden.receivers.is_empty()).collect()
    }

    /// SO_SNDBUF of an end and SO_RCVBUF of the other one.
    pub(super) fn buffers(&self, object: usize) -> [i64; 2] {
        let of = |object: Option<usize>, which: usize| match object.map(|o| &self.objects[o]) {
            Some(Object::End { buffers, .. }) => buffers[which],
            _ => 0,
        };
        [of(Some(object), 0), of(self.peer(object), 1)]
    }

    /// Epoll sets of a process that have this object.
    pub(super) fn sets_with(&self, process: usize, object: usize) -> Vec<i64> {
        let sets = self.handles(process, |o| matches!(o, Object::Set { .. }));
        let has = |set: &i64| {
            self.number(process, *set).is_some_and(|set| self.holds(set, object, NESTED_SETS))
        };
        sets.into_iter().filter(has).collect()
    }

    /// Whether the other end was sent in a message. Known: a peek may show nothing of what follows the change.
    pub(super) fn has_passed_peer(&self, process: usize, handle: i64) -> bool {
        let peer = self.open.get(&(process, handle)).and_then(|o| self.peer(*o));
        matches!(peer.map(|p| &self.objects[p]), Some(Object::End { passed: true, .. }))
    }

    /// Whether a process was killed that had the other end open.
    pub(super) fn has_killed_peer(&self, process: usize, handle: i64) -> bool {
        let peer = self.open.get(&(process, handle)).and_then(|o| self.peer(*o));
        matches!(peer.map(|p| &self.objects[p]), Some(Object::End { killed: true, .. }))
    }

    /// Whether an end or its other end waits for edges in an epoll set. Known: going back to TCP may give one more.
    pub(super) fn is_edged(&self, process: usize, handle: i64) -> bool {
        let Some(own) = self.open.get(&(process, handle)) else { return false };
        [Some(*own), self.peer(*own)]
            .into_iter()
            .flatten()
            .any(|o| matches!(self.objects[o], Object::End { edged: true, .. }))
    }

    /// Whether an end has bytes to read, or its end.
    pub(super) fn has_input(&self, process: usize, handle: i64) -> bool {
        let object = self.open.get(&(process, handle)).map(|own| &self.objects[*own]);
        matches!(object, Some(Object::End { unread, ended, .. }) if *ended || *unread > 0)
    }

    /// Whether an end or its other end was passed on, which the other may not have noticed yet.
    pub(super) fn is_moving(&self, process: usize, handle: i64) -> bool {
        self.has_passed_peer(process, handle)
            || matches!(self.object(process, handle), Some(Object::End { passed: true, .. }))
    }

    /// A connection of two ends that live, as process and handle of each.
    pub(super) fn pairs(&self) -> Vec<[(usize, i64); 2]> {
        let is_whole = |object: usize| {
            matches!(
                self.objects[object],
                Object::End {
                    peer: Some(_),
                    ended: false,
                    deaf: false,
                    lowat: 0 | 1,
                    killed: false,
                    ..
                }
            )
        };
        let other = |object: usize| self.peer(object).filter(|p| is_whole(*p));
        let ends = self.open.iter().filter(|(_, o)| is_whole(**o));
        let pairs = ends.filter_map(|(one, object)| {
            let peer = other(*object)?;
            let (other, _) = self.open.iter().find(|(_, o)| **o == peer)?;
            Some([*one, *other])
        });
        pairs.collect()
    }

    /// Handles of a process whose objects are of the wanted kind.
    pub(super) fn handles(&self, process: usize, wanted: impl Fn(&Object) -> bool) -> Vec<i64> {
        let of_process = self.open.range((process, i64::MIN)..=(process, i64::MAX));
        of_process.filter(|(_, o)| wanted(&self.objects[**o])).map(|((_, h), _)| *h).collect()
    }

    /// What a process' handle stands for.
    pub(super) fn object(&self, process: usize, handle: i64) -> Option<&Object> {
        self.open.get(&(process, handle)).map(|o| &self.objects[*o])
    }

    /// The same as a number, which all who have it open share.
    pub(super) fn number(&self, process: usize, handle: i64) -> Option<usize> {
        self.open.get(&(process, handle)).copied()
    }

    /// Whether an end cannot be sent in a message. Known: bytes in a ring cannot follow when either direction has ended,
    /// or their sender was passed on itself.
    pub(super) fn is_held_back(&self, process: usize, handle: i64) -> bool {
        let object = self.open.get(&(process, handle)).map(|o| (*o, &self.objects[*o]));
        let Some((number, Object::End { unread: 1.., ended, .. })) = object else { return false };
        let peer = self.peer(number).map(|p| &self.objects[p]);
        *ended || matches!(peer, Some(Object::End { passed, ended, .. }) if *passed || *ended)
    }

    /// Bytes on the way to the peer of an end.
    pub(super) fn in_flight(&self, process: usize, handle: i64) -> i64 {
        let Some(own) = self.open.get(&(process, handle)) else { return 0 };
        if self.load(*own).is_some() {
            return i64::MAX;
        }
        match (self.peer(*own).map(|p| &self.objects[p]), &self.objects[*own]) {
            (Some(Object::End { unread, .. }), _) => *unread,
            (_, Object::End { early, .. }) => *early,
            _ => 0,
        }
    }

    /// Takes in what came of a step.
    pub(super) fn learn(&mut self, step: &Step, seen: &Observation) {
        let Some((own, others)) = seen.split_first() else { return };
        match own.as_str() {
            "blocked" => {
                if step.op == "push" {
                    self.push(step, None);
                }
                let meant = handles_of(step).filter_map(|h| self.number(step.process, h));
                let meant = meant.collect();
                self.asleep.insert((step.process, step.thread), (step.clone(), meant));
            }
            answer => self.apply(step, answer),
        }
        for other in others {
            let Some((thread, answer)) = other.split_once(": ") else { continue };
            let Some((p, t)) = thread.split_once('.') else { continue };
            let (Ok(p), Ok(t)) = (p.parse(), t.parse()) else { continue };
            if answer == "ended" {
                self.end(p);
            } else if let Some((step, _)) = self.asleep.get(&(p, t)).cloned() {
                self.apply(&step, answer);
                self.asleep.remove(&(p, t));
            }
        }
    }

    fn kill(&mut self, process: usize) {
        for (_, object) in self.open.range((process, i64::MIN)..=(process, i64::MAX)) {
            if let Object::End { killed, .. } = &mut self.objects[*object] {
                *killed = true;
            }
        }
    }

    fn end(&mut self, process: usize) {
        self.processes.retain(|p| *p != process);
        self.asleep.retain(|(p, _), _| *p != process);
        for handle in self.handles(process, |_| true) {
            self.close(process, handle);
        }
    }

    fn close(&mut self, process: usize, handle: i64) {
        let Some(object) = self.open.remove(&(process, handle)) else { return };
        if !self.open.values().any(|o| *o == object) {
            self.finish(object);
            // What nobody can receive any more does not count.
            if let Some(peer) = self.peer(object) {
                self.set_load(peer, None);
            }
        }
    }

    fn set_load(&mut self, object: usize, new: Option<Load>) {
        if let Object::End { load, .. } = &mut self.objects[object] {
            *load = new;
        }
    }

    /// What came of a send of any size; `None`: it sleeps.
    fn push(&mut self, step: &Step, told: Option<&str>) {
        let [handle, seed, length, ..] = step.args[..] else { return };
        let meant = match self.asleep.get(&(step.process, step.thread)) {
            Some((_, on)) => on.first().copied(),
            None => self.number(step.process, handle),
        };
        let Some(object) = meant else { return };
        let known = self.load(object).filter(|load| load.seed == seed);
        let new = match told {
            // It had been counted, and received since.
            Some(_) if known.is_none() => return,
            Some("all") if known.is_some_and(|load| load.pending) => {
                known.map(|load| Load { pending: false, ..load })
            }
            Some("all") => known.map(|load| {
                let beside = load.beside + if length > 0 { length } else { BESIDE };
                let room = match load.room {
                    Room::Free if beside < BESIDE => Room::Free,
                    _ => Room::Unsure,
                };
                Load { room, beside, pending: false, ..load }
            }),
            Some("part") => known.map(|load| Load { room: Room::Unsure, pending: false, ..load }),
            Some(_) => known.map(|load| Load { pending: false, ..load }),
            None => known.map(|load| Load { pending: true, ..load }),
        };
        self.set_load(object, new);
    }

    fn peer(&self, object: usize) -> Option<usize> {
        match self.objects[object] {
            Object::End { peer, .. } => peer,
            _ => None,
        }
    }

    /// An end sends no more.
    fn finish(&mut self, object: usize) {
        if let Object::End { silent, .. } = &mut self.objects[object] {
            *silent = true;
        }
        if let Some(peer) = self.peer(object)
            && let Object::End { ended, .. } = &mut self.objects[peer]
        {
            *ended = true;
        }
    }

    fn add(&mut self, process: usize, handle: i64, object: Object) -> usize {
        self.close(process, handle);
        self.objects.push(object);
        self.open.insert((process, handle), self.objects.len() - 1);
        self.objects.len() - 1
    }

    fn apply(&mut self, step: &Step, answer: &str) {
        if answer == "ended" {
            if step.op == "exit" && step.args.first() != Some(&0) {
                self.kill(step.process);
            }
            return self.end(step.process);
        }
        let mut numbers = answer.split(' ').map(str::parse::<i64>);
        let (Some(Ok(result)), Some(Ok(error))) = (numbers.next(), numbers.next()) else { return };
        let (process, arg) = (step.process, |i: usize| step.args.get(i).copied().unwrap_or(0));
        let fresh = |nonblock| Object::End {
            peer: None,
            unread: 0,
            early: 0,
            ended: false,
            silent: false,
            nonblock,
            lowat: 1,
            passed: false,
            deaf: false,
            edged: false,
            urgent: false,
            killed: false,
            buffers: [0, 0],
            abortive: false,
            load: None,
        };
        let object = self.open.get(&(process, arg(0))).copied();
        match step.op.as_str() {
            "listen" if result == 0 => {
                let listener = Object::Listener { family: arg(1), waiting: VecDeque::new() };
                let object = self.add(process, arg(0), listener);
                self.listeners.insert(arg(0), object);
            }
            "connect" => {
                let end = self.add(process, arg(0), fresh(arg(3) != 0));
                if result == 0 || error == EINPROGRESS {
                    let listener = self.listeners.get(&arg(1)).copied();
                    if let Some(Object::Listener { waiting, .. }) =
                        listener.map(|l| &mut self.objects[l])
                    {
                        waiting.push_back(end);
                    }
                }
            }
            "accept" if result >= 0 => {
                let listener = self.open.get(&(process, arg(1))).copied();
                let end = self.add(process, arg(0), fresh(arg(2) != 0));
                let client = match listener.map(|l| &mut self.objects[l]) {
                    Some(Object::Listener { waiting, .. }) => waiting.pop_front(),
                    _ => None,
                };
                let (sent, is_over) = match client.map(|c| &self.objects[c]) {
                    Some(Object::End { early, silent, .. }) => (*early, *silent),
                    _ => (0, false),
                };
                if let Object::End { unread, ended, .. } = &mut self.objects[end] {
                    (*unread, *ended) = (sent, is_over);
                }
                for (one, other) in [(Some(end), client), (client, Some(end))] {
                    if let Some(Object::End { peer, .. }) = one.map(|o| &mut self.objects[o]) {
                        *peer = other;
                    }
                }
            }
            "close" => {
                self.renumbered |= self.is_awaited(process, arg(0));
                self.close(process, arg(0));
            }
            "dup2" if object.is_some() && object == self.open.get(&(process, arg(1))).copied() => {}
            "dup" | "dup2" if result >= 0 => {
                self.renumbered |= self.is_awaited(process, arg(0));
                if let Some(old) = self.open.get(&(process, arg(1))).copied() {
                    self.close(process, arg(0));
                    self.open.insert((process, arg(0)), old);
                }
            }
            "pass" if result >= 0 => {
                let old = self.open.get(&(process, arg(1))).copied();
                if let Some(Object::End { passed, .. }) = old.map(|o| &mut self.objects[o]) {
                    *passed = true;
                }
                if let Some(old) = old {
                    self.close(process, arg(0));
                    self.open.insert((process, arg(0)), old);
                }
            }
            "control" if result == 0 && arg(1) != 2 => {
                let Some(on) = self.number(process, arg(2)) else { return };
                if let Some(Object::Set { members }) = object.map(|o| &mut self.objects[o]) {
                    members.insert(on);
                }
                if let Object::End { edged, .. } = &mut self.objects[on] {
                    *edged |= arg(3) & 1 << 31 != 0;
                }
            }
            "epoll" if result >= 0 => {
                self.add(process, arg(0), Object::Set { members: BTreeSet::new() });
            }
            "nonblock" => {
                if let Some(Object::End { nonblock, .. }) = object.map(|o| &mut self.objects[o]) {
                    *nonblock = arg(1) != 0;
                }
            }
            "option" if arg(1) == 0 => {
                if let Some(Object::End { lowat, .. }) = object.map(|o| &mut self.objects[o]) {
                    *lowat = arg(2);
                }
            }
            "option" if result == 0 => {
                let is_shared = self.is_shared(process, arg(0));
                let end = object.map(|o| &mut self.objects[o]);
                if let Some(Object::End { buffers, abortive, .. }) = end {
                    match arg(1) {
                        1 => *abortive = true,
                        which @ (6 | 7) => {
                            buffers[which as usize - 6] = if is_shared { -1 } else { arg(2) }
                        }
                        _ => {}
                    }
                }
            }
            "fill" => {
                let Some(object) = object else { return };
                let room = if error == EAGAIN { Room::Full } else { Room::Unsure };
                let load = Load { seed: arg(1), by: process, room, beside: 0, pending: false };
                self.set_load(object, Some(load));
            }
            "push" => self.push(step, answer.split(' ').nth(3)),
            "drain" if result == 0 && answer.ends_with(" same") => {
                let Some(sender) = object.and_then(|o| self.peer(o)) else { return };
                let Some(load) = self.load(sender).filter(|load| load.seed == arg(2)) else {
                    return;
                };
                let room = match (arg(1), load.room) {
                    (ALL, _) => return self.set_load(sender, None),
                    (_, Room::Free) | (MOST, _) => Room::Free,
                    (LITTLE, Room::Full) => Room::Low,
                    _ => Room::Unsure,
                };
                self.set_load(sender, Some(Load { room, ..load }));
            }
            "shutdown" if result == 0 => {
                let Some(object) = object else { return };
                if let Object::End { deaf, .. } = &mut self.objects[object] {
                    *deaf |= arg(1) != 1;
                }
                if arg(1) != 0 {
                    self.finish(object);
                }
            }
            "disconnect" if result == 0 => {
                if let Some(object) = object {
                    self.finish(object);
                }
            }
            "send" if result > 0 => {
                // sendmmsg(2) returns messages, and their lengths are the text.
                let lengths = answer.split(' ').nth(3).unwrap_or("").split(',');
                let result =
                    if arg(1) == 4 { lengths.flat_map(str::parse::<i64>).sum() } else { result };
                // Urgent data is a byte, which is not among the others.
                let urgent = arg(3) & MSG_OOB != 0 && !matches!(arg(1), 1 | 2 | 5 | 6);
                if urgent
                    && let Some(Object::End { passed, urgent, .. }) =
                        object.map(|o| &mut self.objects[o])
                {
                    (*passed, *urgent) = (true, true);
                }
                let result = result - i64::from(urgent);
                let peer = object.and_then(|o| self.peer(o));
                match peer.or(object).map(|o| &mut self.objects[o]) {
                    Some(Object::End { unread, .. }) if peer.is_some() => *unread += result,
                    Some(Object::End { early, .. }) => *early += result,
                    _ => {}
                }
            }
            // read(2) and its like know no flags.
            "recv" if result > 0 && arg(3) & MSG_OOB != 0 && !matches!(arg(1), 1 | 2 | 5) => {}
            "recv" if result > 0 && (arg(3) & MSG_PEEK == 0 || matches!(arg(1), 1 | 2 | 5)) => {
                if let Some(Object::End { unread, .. }) = object.map(|o| &mut self.objects[o]) {
                    *unread -= result;
                }
                let peer = object.and_then(|o| self.peer(o)).map(|p| &mut self.objects[p]);
                if let Some(Object::End { urgent, .. }) = peer {
                    *urgent = false;
                }
            }
            "fork" if result == 0 => {
                // Known: a set that two processes use. Its registrations are ours, and the other's copy is old.
                let inherited: Vec<_> = self
                    .open
                    .iter()
                    .filter(|((p, _), o)| {
                        *p == process && !matches!(self.objects[**o], Object::Set { .. })
                    })
                    .map(|(k, o)| (k.1, *o))
                    .collect();
                for (handle, object) in inherited {
                    self.open.insert((arg(0) as usize, handle), object);
                }
                self.processes.push(arg(0) as usize);
            }
            _ => {}
        }
    }
}
