//! A set with one connection in the ring, of which threads wait, change what is asked for, and take bytes, while the peer
//! sends: no schedule loses a wake-up. The kernel's set, the ring and the steps of a wait are modelled; what the kernel is
//! asked for is decided by the functions of this module.

use shuttle::scheduler::PctScheduler;
use shuttle::sync::atomic::Ordering::SeqCst;
use shuttle::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::{Config, Runner, thread};
use std::panic;

use super::{Asked, due, needed};
use crate::os::events::{IN, OUT};
use crate::watchers::set::ONESHOT;

const SCHEDULES: usize = 4000;

/// [`due`], or what is to be proved wrong. The last argument: the next wait looks at the entry by itself.
type Policy = fn(Asked, Asked, bool, bool, bool) -> Option<Asked>;

fn of_now(asked: Asked, needed: Asked, is_heard: bool, wakes: bool, _: bool) -> Option<Asked> {
    due(asked, needed, is_heard, wakes)
}

/// Nothing is asked of the kernel for an entry that the next wait looks at, if no thread sleeps.
fn of_before(_: Asked, needed: Asked, is_heard: bool, wakes: bool, hot: bool) -> Option<Asked> {
    match (hot && !is_heard, wakes) {
        (true, _) => None,
        (false, true) => Some(Asked(needed.0 | OUT)),
        (false, false) => Some(needed),
    }
}

/// What epoll(7) knows: one registration, by edges.
struct Kernel {
    asks: u32,
    bells: u32,
    is_queued: bool,
    is_over: bool,
}

#[derive(Clone, Copy, Default)]
struct Entry {
    events: u32,
    asked: u32,
    is_kicked: bool,
    is_disabled: bool,
    is_hot: bool,
    is_active: bool,
    is_armed: bool,
}

/// The registration as `keep` and the set's lock guard it.
struct World {
    kernel: Mutex<Kernel>,
    queued: Condvar,
    /// `entry::keep`.
    keep: Mutex<()>,
    /// The set's lock.
    entry: Mutex<Entry>,
    sleepers: AtomicU32,
    /// The ring: bytes sent and read, and whether the receiver asks for a doorbell.
    sent: AtomicUsize,
    read: AtomicUsize,
    arm: AtomicBool,
    messages: usize,
    policy: Policy,
}

impl World {
    fn tell(&self, asked: Asked) {
        let mut kernel = self.kernel.lock().unwrap();
        kernel.asks = asked.0;
        if asked.0 & OUT != 0 || (asked.0 & IN != 0 && kernel.bells > 0) {
            kernel.is_queued = true;
            self.queued.notify_one();
        }
        drop(kernel);
        let mut entry = self.entry.lock().unwrap();
        (entry.asked, entry.is_kicked) = (asked.pack(), asked.0 & OUT != 0);
    }

    fn ring_bell(&self) {
        let mut kernel = self.kernel.lock().unwrap();
        kernel.bells += 1;
        if kernel.asks & IN != 0 {
            kernel.is_queued = true;
            self.queued.notify_one();
        }
    }

    /// `super::update`. The caller keeps the registration.
    fn update(&self, anybody: bool) {
        let heard = self.sleepers.load(SeqCst) != 0;
        let now = *self.entry.lock().unwrap();
        let want = if now.is_disabled { 0 } else { now.events };
        let wakes = anybody || heard;
        let asked = Asked::unpack(now.asked);
        if let Some(asked) = (self.policy)(asked, needed(want), heard, wakes, !anybody) {
            self.tell(asked);
        }
    }

    /// EPOLL_CTL_MOD, and EPOLL_CTL_ADD of what was deleted.
    fn modify(&self, events: u32) {
        let _kept = self.keep.lock().unwrap();
        {
            let mut entry = self.entry.lock().unwrap();
            self.disarm(&mut entry);
            (entry.events, entry.is_disabled) = (events, false);
            (entry.is_hot, entry.is_active) = (true, true);
        }
        self.update(false);
    }

    /// EPOLL_CTL_DEL, which parks it.
    fn delete(&self) {
        let _kept = self.keep.lock().unwrap();
        let mut entry = self.entry.lock().unwrap();
        self.disarm(&mut entry);
        entry.is_disabled = true;
    }

    fn disarm(&self, entry: &mut Entry) {
        if entry.is_armed {
            entry.is_armed = false;
            self.arm.store(false, SeqCst);
        }
    }

    fn is_ready(&self, entry: &Entry) -> bool {
        let has_data = self.sent.load(SeqCst) != self.read.load(SeqCst);
        !entry.is_disabled && entry.events & IN != 0 && has_data
    }

    fn arm(&self, entry: &mut Entry) {
        entry.is_armed = true;
        if entry.events & (IN | OUT) != 0 {
            self.arm.store(true, SeqCst);
        }
    }

    /// `report::take_events`.
    fn take(&self, entry: &mut Entry) -> bool {
        if entry.is_disabled {
            return false;
        }
        let others = self.sleepers.load(SeqCst) != 0;
        if others {
            self.arm(entry);
        }
        if !self.is_ready(entry) {
            return false;
        }
        entry.is_active = true;
        entry.is_disabled = entry.events & ONESHOT != 0;
        if !others {
            self.disarm(entry);
        }
        true
    }

    fn look(&self) -> bool {
        let mut entry = self.entry.lock().unwrap();
        entry.is_hot && self.take(&mut entry)
    }

    /// `hot::arm`, before a sleep.
    fn sort_out(&self) {
        let mut entry = self.entry.lock().unwrap();
        if !entry.is_hot {
            return;
        }
        let is_active = std::mem::take(&mut entry.is_active);
        if !entry.is_disabled {
            self.arm(&mut entry);
        }
        if !is_active && !self.is_ready(&entry) {
            entry.is_hot = false;
        }
    }

    /// `epoll_wait::translate` of one event.
    fn translate(&self) {
        {
            let _kept = self.keep.lock().unwrap();
            let now = *self.entry.lock().unwrap();
            if now.is_kicked {
                let want = if now.is_disabled { 0 } else { now.events };
                self.tell(needed(want));
            }
        }
        let mut entry = self.entry.lock().unwrap();
        (entry.is_hot, entry.is_active) = (true, true);
    }

    /// What the kernel tells. `None`: the model is over.
    fn ask_kernel(&self, sleep: bool) -> Option<bool> {
        let mut kernel = self.kernel.lock().unwrap();
        loop {
            if kernel.is_over {
                return None;
            }
            if std::mem::take(&mut kernel.is_queued) {
                let bells = if kernel.bells > 0 { IN } else { 0 };
                if kernel.asks & (bells | OUT) != 0 {
                    return Some(true);
                }
            }
            if !sleep {
                return Some(false);
            }
            kernel = self.queued.wait(kernel).unwrap();
        }
    }

    /// A wait: whether the connection is told of. `None`: the model is over.
    fn wait(&self, has_timeout: bool) -> Option<bool> {
        loop {
            if self.look() {
                return Some(true);
            }
            if has_timeout {
                if !self.ask_kernel(false)? {
                    return Some(false);
                }
                self.translate();
                return Some(self.look());
            }
            self.sleepers.fetch_add(1, SeqCst);
            self.sort_out();
            let found = self.look();
            let told = if found { Some(false) } else { self.ask_kernel(true) };
            self.sleepers.fetch_sub(1, SeqCst);
            if found {
                return Some(true);
            }
            {
                let mut entry = self.entry.lock().unwrap();
                if entry.is_hot && self.sleepers.load(SeqCst) == 0 {
                    self.disarm(&mut entry);
                }
            }
            if told? {
                self.translate();
            }
        }
    }

    /// `epoll_wait::found`: other sleepers are woken for what remains.
    fn pass_on(&self) {
        let is_left = {
            let entry = self.entry.lock().unwrap();
            entry.is_hot && self.is_ready(&entry)
        };
        if self.sleepers.load(SeqCst) != 0 && is_left {
            let _kept = self.keep.lock().unwrap();
            self.update(true);
        }
    }

    fn receive(&self) {
        let sent = self.sent.load(SeqCst);
        self.kernel.lock().unwrap().bells = 0;
        // Bytes that came meanwhile are left.
        self.read.fetch_max(sent, SeqCst);
        if sent == self.messages {
            self.kernel.lock().unwrap().is_over = true;
            self.queued.notify_all();
        }
    }
}

/// What the threads do.
#[derive(Clone, Copy)]
struct Scene {
    waiters: usize,
    has_timeouts: bool,
    events: u32,
    /// What is asked for between, `None`: it is deleted.
    idle: Option<u32>,
    messages: usize,
}

fn play(scene: Scene, policy: Policy) {
    let asked = needed(scene.events);
    let world = Arc::new(World {
        kernel: Mutex::new(Kernel { asks: asked.0, bells: 0, is_queued: false, is_over: false }),
        queued: Condvar::new(),
        keep: Mutex::new(()),
        entry: Mutex::new(Entry {
            events: scene.events,
            asked: asked.pack(),
            is_hot: true,
            ..Entry::default()
        }),
        sleepers: AtomicU32::new(0),
        sent: AtomicUsize::new(0),
        read: AtomicUsize::new(0),
        arm: AtomicBool::new(false),
        messages: scene.messages,
        policy,
    });
    let mut threads = Vec::new();
    for _ in 0..scene.waiters {
        let world = Arc::clone(&world);
        threads.push(thread::spawn(move || {
            let mut tries = 0;
            loop {
                tries += 1;
                match world.wait(scene.has_timeouts && tries % 2 == 1) {
                    None => break,
                    Some(false) => {}
                    Some(true) => {
                        world.pass_on();
                        world.receive();
                        if scene.events & ONESHOT != 0 {
                            world.modify(scene.events);
                        }
                    }
                }
            }
        }));
    }
    let peer = Arc::clone(&world);
    threads.push(thread::spawn(move || {
        for _ in 0..peer.messages {
            peer.sent.fetch_add(1, SeqCst);
            if peer.arm.swap(false, SeqCst) {
                peer.ring_bell();
            }
        }
    }));
    for _ in 0..2 {
        match scene.idle {
            Some(events) => world.modify(events),
            None => world.delete(),
        }
        world.modify(scene.events);
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Every combination of what the threads can do.
fn scenes() -> impl Iterator<Item = Scene> {
    let idle = [Some(0), Some(ONESHOT), Some(OUT), None];
    let kinds = idle.into_iter().flat_map(|idle| [IN, IN | ONESHOT].map(|events| (idle, events)));
    kinds.flat_map(|(idle, events)| {
        [(1, false), (1, true), (2, false), (2, true)].map(|(waiters, has_timeouts)| Scene {
            waiters,
            has_timeouts,
            events,
            idle,
            messages: 3,
        })
    })
}

#[test]
fn no_schedule_loses_a_wake_up() {
    for scene in scenes() {
        shuttle::check_random(move || play(scene, of_now), SCHEDULES / 8);
        for depth in 2..5 {
            shuttle::check_pct(move || play(scene, of_now), SCHEDULES / 4, depth);
        }
    }
}

#[test]
fn the_model_notices_what_the_kernel_was_not_told() {
    let scene = Scene { waiters: 1, has_timeouts: false, events: IN, idle: Some(0), messages: 2 };
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    // The same schedules each time.
    let scheduler = PctScheduler::new_from_seed(1, 3, 10 * SCHEDULES);
    let found = panic::catch_unwind(|| {
        Runner::new(scheduler, Config::default()).run(move || play(scene, of_before))
    });
    panic::set_hook(hook);
    assert!(found.is_err(), "the model is blind");
}

#[test]
fn what_is_packed_is_unpacked() {
    for bits in 0..1 << Asked::BITS {
        assert_eq!(Asked::unpack(bits).pack(), bits);
        assert_eq!(Asked::of(Asked::unpack(bits).events()), Asked::unpack(bits));
    }
}
