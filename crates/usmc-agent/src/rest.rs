//! How the agent waits for its next work: it spins while there was some lately, and sleeps behind that.
//!
//! ```text
//!        a later time           nothing for as long as that pays           still nothing
//! Worked ────────────▶ Awake ────────────────────────────────────▶ Armed ───────────────▶ asleep ──▶ Awake
//!   │                                                                ▲
//!   └────────────────── where no spin pays ──────────────────────────┘
//!
//! any ── work ──▶ Worked
//! ```
//!
//! A turn with work may have the time of an earlier one, so the spin begins with the first turn whose time is later.
//!
//! What would wake the agent is armed first, and then all is looked at once more: what came in between is found there.
//!
//! How long it spins follows what has come of it (`halt_poll_ns` of the kernel's KVM does so, too). Work that ends a sleep sooner than the
//! longest spin would have been found by one: the spin becomes longer. A longer sleep makes it shorter, down to none. Between two such
//! words nothing changes, so that it cannot swing where work comes evenly.
//!
//! Behind what was brought to an application the agent gives its processor away before it sleeps (`lend`).

mod lend;

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lend::Lend;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::getpid;

/// How long the agent spins once it finds nothing to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spin {
    /// So long at most; zero = never.
    For(Duration),
    /// It never sleeps, which takes a processor.
    Always,
}

impl Default for Spin {
    /// Up to 50 us, about what a sleep and its end cost. An agent that gives the only processor away is back sooner than one that has
    /// slept, too.
    fn default() -> Spin {
        Spin::For(Duration::from_micros(50))
    }
}

/// The shortest spin but none.
const SHORTEST: Duration = Duration::from_micros(6);

/// Work that comes within this time of the last one costs no system call: the agent neither gives its processor away nor looks at sockets
/// before.
pub const NEAR: Duration = Duration::from_micros(5);

/// What is readable is taken so many at a time.
const EVENTS: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// The last turn had work.
    Worked,
    Awake,
    /// Everything that wakes is armed.
    Armed,
}

/// What to do before the next look at everything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Nothing.
    Look,
    /// To arm what wakes.
    Arm,
    /// To sleep ([`Rest::sleep`]).
    Sleep,
}

/// The waits of one thread.
pub struct Rest {
    epoll: Arc<OwnedFd>,
    spin: Spin,
    state: State,
    worked: Instant,
    /// How long a spin takes now.
    spins: Duration,
    /// Whether it has slept since there was work.
    has_slept: bool,
    lend: Lend,
    calls: Cell<u64>,
    /// What has ended a sleep, for the next [`Rest::look`].
    found: RefCell<Vec<(u64, EventFlags)>>,
}

/// Ends a watch.
pub struct Watch(Arc<OwnedFd>);

impl Watch {
    /// The descriptor wakes nobody any more.
    pub fn end(self, fd: impl AsFd) {
        // A failure: it was not watched.
        let _ = epoll::delete(&self.0, fd);
    }
}

impl Rest {
    /// Nothing wakes it yet.
    ///
    /// # Errors
    /// epoll_create1(2).
    pub fn new(spin: Spin) -> io::Result<Rest> {
        let epoll = Arc::new(epoll::create(CreateFlags::CLOEXEC)?);
        let spins = if let Spin::For(most) = spin { most } else { Duration::MAX };
        Ok(Rest {
            epoll,
            spin,
            state: State::Awake,
            worked: Instant::now(),
            spins,
            has_slept: false,
            lend: Lend::new(cheapest_call()),
            calls: Cell::new(0),
            found: RefCell::default(),
        })
    }

    /// The descriptor wakes it when it is readable, until it is closed by all that have it. `number`: what [`Rest::sleep`] calls it.
    ///
    /// # Errors
    /// epoll_ctl(2).
    pub fn watch(&self, fd: impl AsFd, number: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(number), EventFlags::IN)?)
    }

    /// The descriptor wakes it once for each time that something comes there or it ends, or that there is room to send again. What is not
    /// taken is not told again. The owner ends the watch before the close, as a process may have a duplicate.
    ///
    /// # Errors
    /// epoll_ctl(2).
    pub fn watch_edges(&self, fd: impl AsFd, number: u64) -> io::Result<Watch> {
        let flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::OUT | EventFlags::ET;
        epoll::add(&self.epoll, fd, EventData::new_u64(number), flags)?;
        Ok(Watch(self.epoll.clone()))
    }

    /// It wakes each time that there is room to send.
    ///
    /// # Errors
    /// epoll_ctl(2).
    pub fn watch_room(&self, fd: impl AsFd, number: u64) -> io::Result<()> {
        let flags = EventFlags::OUT | EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(number), flags)?)
    }

    /// It wakes no more.
    pub fn unwatch(&self, fd: impl AsFd) {
        // A failure: it was not watched.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// The numbers of what is watched and has something, and what it has: some of them now, the rest with the next call. It does not wait.
    ///
    /// # Errors
    /// epoll_wait(2).
    pub fn look(&self, mut each: impl FnMut(u64, EventFlags)) -> io::Result<()> {
        let found = self.found.take();
        let found = if found.is_empty() { self.wait(Some(Duration::ZERO))? } else { found };
        found.into_iter().for_each(|(number, flags)| each(number, flags));
        Ok(())
    }

    fn wait(&self, most: Option<Duration>) -> io::Result<Vec<(u64, EventFlags)>> {
        self.count_call();
        let mut events = Vec::with_capacity(EVENTS);
        match epoll::wait(&self.epoll, spare_capacity(&mut events), most.map(timespec).as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(events.iter().map(|event| (event.data.u64(), event.flags)).collect())
    }

    /// Whether the next [`Rest::look`] gives what has ended a sleep.
    pub fn has_found(&self) -> bool {
        !self.found.borrow().is_empty()
    }

    /// Whether a look at everything is the last one before a sleep.
    pub fn is_armed(&self) -> bool {
        self.state == State::Armed
    }

    /// System calls that it has made to look, to give its processor away, and to sleep.
    pub fn calls(&self) -> u64 {
        self.calls.get()
    }

    fn count_call(&self) {
        self.calls.set(self.calls.get().wrapping_add(1));
    }

    /// Something was brought to an application, which may have no other processor.
    pub fn brings(&mut self) {
        if self.spin != Spin::For(Duration::ZERO) {
            self.lend.brings();
        }
    }

    /// An application has done something.
    pub fn answers(&mut self) {
        self.lend.answers();
    }

    /// Whether it spins, and there was no work for a moment.
    pub fn is_spinning(&self, now: Instant) -> bool {
        let idle = now.saturating_duration_since(self.worked);
        self.state != State::Armed && (NEAR..self.spins).contains(&idle)
    }

    /// After a look at everything, which began then or shortly behind that: whether there was work, and what is next.
    pub fn next(&mut self, has_worked: bool, now: Instant) -> Next {
        self.lend.ends_turn();
        if has_worked {
            if std::mem::take(&mut self.has_slept) {
                self.learn(now.duration_since(self.worked));
            }
            (self.state, self.worked) = (State::Worked, now);
            return Next::Look;
        }
        if self.state == State::Worked && now > self.worked {
            (self.state, self.worked) = (State::Awake, now);
        }
        let idle = now.duration_since(self.worked);
        let spins = idle < self.spins;
        match self.state {
            State::Worked | State::Awake if spins => {
                // The applications that have the next work may have no other processor. Before that a turn is long enough without a pause.
                if idle >= NEAR {
                    self.count_call();
                    thread::yield_now();
                }
                Next::Look
            }
            State::Worked | State::Awake if self.lend.is_due() => {
                self.count_call();
                let begun = Instant::now();
                thread::yield_now();
                self.lend.was_away(begun.elapsed());
                Next::Look
            }
            State::Worked | State::Awake => {
                self.state = State::Armed;
                Next::Arm
            }
            State::Armed => {
                self.state = State::Awake;
                self.has_slept = true;
                self.lend.sleeps();
                Next::Sleep
            }
        }
    }

    /// Work has come so long after the last, with a sleep between them.
    fn learn(&mut self, idle: Duration) {
        if let Spin::For(most) = self.spin {
            let longer = if idle < most { (self.spins * 2).max(SHORTEST) } else { self.spins / 2 };
            self.spins = if longer < SHORTEST { Duration::ZERO } else { longer.min(most) };
        }
    }

    /// Sleeps until something that is watched has something, which the next [`Rest::look`] gives, or until one of `others` is readable, or the time has passed. `None`: without a
    /// limit.
    ///
    /// # Errors
    /// poll(2), but for a signal, which ends the sleep.
    pub fn sleep(&self, others: &[BorrowedFd<'_>], most: Option<Duration>) -> io::Result<()> {
        if !self.found.borrow().is_empty() {
            return Ok(());
        }
        if others.is_empty() {
            *self.found.borrow_mut() = self.wait(most)?;
            return Ok(());
        }
        self.count_call();
        let all = [self.epoll.as_fd()].into_iter().chain(others.iter().copied());
        let mut all: Vec<PollFd<'_>> =
            all.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut all, most.map(timespec).as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !all[0].revents().is_empty() {
            *self.found.borrow_mut() = self.wait(Some(Duration::ZERO))?;
        }
        Ok(())
    }
}

/// How long the cheapest system call takes, of a few: any of them may have been interrupted.
fn cheapest_call() -> Duration {
    let call = |_| {
        let begun = Instant::now();
        let _ = getpid();
        begun.elapsed()
    };
    (0..8).map(call).min().unwrap_or_default()
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn it_spins_then_arms_then_sleeps() {
        let mut rest = Rest::new(Spin::For(Duration::ZERO)).expect("an epoll set");
        let now = Instant::now();
        let mut next = |all: [bool; 3]| all.map(|has_worked| rest.next(has_worked, now));
        assert_eq!(next([true, false, false]), [Next::Look, Next::Arm, Next::Sleep]);
        // What came while it armed keeps it awake.
        assert_eq!(next([false, true, false]), [Next::Arm, Next::Look, Next::Arm]);
        let mut spins = Rest::new(Spin::Always).expect("an epoll set");
        assert!((0..1000).all(|_| spins.next(false, Instant::now()) == Next::Look));
    }

    #[test]
    fn a_spin_begins_behind_the_work() {
        let mut rest = Rest::new(Spin::default()).expect("an epoll set");
        // The time of the first of several turns with work.
        let begun = Instant::now();
        let after = |micros| begun + Duration::from_micros(micros);
        let times = [(true, 0), (true, 0), (false, 0), (false, 60), (false, 100)];
        assert!(times.iter().all(|(any, at)| rest.next(*any, after(*at)) == Next::Look));
        assert_eq!(rest.next(false, after(111)), Next::Arm);
    }

    /// Work that comes at such distances, in microseconds: which of them a spin has found.
    fn found_by_spins(rest: &mut Rest, now: &mut Instant, gaps: &[u64]) -> Vec<bool> {
        let each = |gap: &u64| {
            let until = *now + Duration::from_micros(*gap);
            let mut has_slept = false;
            while *now < until {
                *now += Duration::from_micros(1);
                has_slept |= rest.next(*now >= until, *now) == Next::Sleep;
            }
            !has_slept
        };
        gaps.iter().map(each).collect()
    }

    #[test]
    fn spins_follow_what_has_come_of_them() {
        let mut now = Instant::now();
        let mut rest = Rest::new(Spin::For(Duration::from_micros(50))).expect("an epoll set");
        assert_eq!(found_by_spins(&mut rest, &mut now, &[40; 3]), [true; 3]);
        // Seldom work: no spin after some.
        found_by_spins(&mut rest, &mut now, &[1000; 8]);
        assert_eq!(rest.spins, Duration::ZERO);
        // Often again: the first few show that spins would pay.
        let found = found_by_spins(&mut rest, &mut now, &[30; 10]);
        assert!(!found[0] && found[4..].iter().all(|found| *found), "{found:?}");
        // One that is late changes little.
        assert_eq!(
            found_by_spins(&mut rest, &mut now, &[30, 5000, 10, 10]),
            [true, false, true, true]
        );
        let mut never = Rest::new(Spin::For(Duration::ZERO)).expect("an epoll set");
        assert_eq!(found_by_spins(&mut never, &mut now, &[10; 20]), [false; 20]);
    }

    #[test]
    fn what_is_watched_ends_a_sleep() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let mut one = TcpStream::connect(listener.local_addr().expect("a port")).expect("TCP");
        let (other, _) = listener.accept().expect("TCP");
        let rest = Rest::new(Spin::default()).expect("an epoll set");
        let begun = Instant::now();
        rest.sleep(&[other.as_fd()], Some(Duration::from_millis(20))).expect("poll");
        assert!(begun.elapsed() >= Duration::from_millis(20));
        one.write_all(b"x").expect("TCP");
        rest.sleep(&[other.as_fd()], None).expect("poll");
        rest.watch(&other, 7).expect("epoll");
        let mut ready = Vec::new();
        rest.sleep(&[], None).expect("poll");
        rest.look(|number, flags| ready.push((number, flags))).expect("epoll");
        assert_eq!(ready, [(7, EventFlags::IN)]);
        rest.unwatch(&other);
        rest.look(|number, _| panic!("{number}")).expect("epoll");
        let watch = rest.watch_edges(&other, 8).expect("epoll");
        ready.clear();
        (0..2).for_each(|_| rest.look(|number, flags| ready.push((number, flags))).expect("epoll"));
        assert_eq!(ready, [(8, EventFlags::IN | EventFlags::OUT)]);
        watch.end(&other);
        one.write_all(b"x").expect("TCP");
        rest.look(|number, _| panic!("{number}")).expect("epoll");
    }
}
