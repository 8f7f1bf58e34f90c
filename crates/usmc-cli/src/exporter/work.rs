//! The exporter at work: one thread that sleeps until something happens.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{JoinHandle, spawn_blocking};

use super::counts::{Counter, Counts};
use super::exposition::{self, Format};
use super::families::{self, Metrics, OF_PROCESSES, Value};
use super::http::{self, Listener, Scraped};
use super::ledger::Ledger;
use super::notice::{Finder, Notice};
use super::rdma::{self, Agents};
use super::state::{Kept, State};
use super::tracked::{Seen, Tracker};
use super::{gauges, log};
use crate::agent::{self, Report};
use crate::sock_diag;

/// How long agents may take for a scrape.
const AGENTS: Duration = Duration::from_secs(1);
/// A look at all processes comes no sooner after the last one than so many times the processor's time that that took.
const REST: u32 = 10;
/// The same for a look at new ones, which may not live long.
const REST_OF_PASSES: u32 = 4;
/// The same for a look that a client waits for.
const REST_OF_SCRAPES: u32 = 2;
/// How long a process may take from opening its device to its record file.
const EARLY: Duration = Duration::from_millis(100);
/// How long after such word all processes are looked at, during which no new one is met.
const LATE: Duration = Duration::from_secs(1);

/// What the exporter is told.
#[derive(Debug)]
pub struct Settings {
    /// The ISM directory of the configuration.
    pub ism_dir: PathBuf,
    /// How often it looks at all processes at least.
    pub interval: Duration,
}

/// When something took place last, and what it took.
#[derive(Clone, Copy, Debug)]
struct Last {
    end: Instant,
    /// Of the processor, which others may use meanwhile.
    took: Duration,
    /// By the clock.
    elapsed: Duration,
}

/// Something takes place.
struct Begun {
    at: Instant,
    used: Duration,
}

impl Begun {
    fn now() -> Begun {
        Begun { at: Instant::now(), used: used() }
    }

    fn end(self) -> Last {
        let took = used().saturating_sub(self.used);
        Last { end: Instant::now(), took, elapsed: self.at.elapsed() }
    }
}

/// The processor's time that this thread has used.
fn used() -> Duration {
    let used = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(used.tv_sec.try_into().unwrap_or(0), used.tv_nsec.try_into().unwrap_or(0))
}

impl Last {
    fn never() -> Last {
        Last { end: Instant::now(), took: Duration::ZERO, elapsed: Duration::ZERO }
    }

    /// When it may be again, with such a rest.
    fn next(self, rest: u32) -> Instant {
        self.end + self.took * rest
    }
}

/// The descriptor, which the runtime waits for.
fn watched(fd: OwnedFd) -> Result<AsyncFd<OwnedFd>> {
    // SAFETY: an owned descriptor stays open and the same until it is dropped, and it is dropped with what is made here.
    #[expect(unsafe_code, reason = "the runtime asks for a promise that OwnedFd keeps")]
    let watched = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    watched.context("epoll")
}

/// All that is known.
struct Known {
    settings: Settings,
    tracker: Tracker,
    notice: Notice,
    finder: Finder,
    /// Devices whose directories are watched.
    devices: BTreeSet<(u64, u64)>,
    agents: Agents,
    report: Report,
    state: Option<State>,
    is_state_lost: bool,
    state_errors: u64,
    looks: u64,
    look: Last,
    pass: Last,
    /// When new processes are looked for, and until when again.
    next_pass: Option<(Instant, Instant)>,
    next_look: Instant,
    /// The gauges of the last look.
    gauges: Metrics,
}

impl Known {
    /// Looks at all processes.
    fn look_at_all(&mut self) {
        let begun = Begun::now();
        let next = begun.at + self.settings.interval;
        self.finder.know_all();
        match self.tracker.look(sock_diag::tcp_sockets) {
            Ok(seen) => self.take(&seen),
            Err(problem) => log(format_args!("{problem:#}")),
        }
        self.looks += 1;
        self.look = begun.end();
        self.next_look = self.look.next(REST).max(next);
    }

    fn take(&mut self, seen: &[Seen]) {
        for one in seen {
            self.watch_device(&one.process);
        }
        self.gauges = Metrics::default();
        gauges::show(seen, &mut self.gauges);
    }

    fn watch_device(&mut self, process: &crate::proc::Process) {
        if let Some((dir, identity)) = &process.device
            && self.devices.len() < 1024
            && self.devices.insert(*identity)
        {
            let seen = format!("/proc/{}/root{}", process.pid, dir.display());
            self.notice.watch(seen.as_ref());
        }
    }

    /// The kernel has told of ISM directories.
    fn noticed(&mut self) {
        let told = self.notice.read();
        if told.dirs {
            self.notice.find();
        }
        // What is in a directory that has just been made was not told of.
        if told.begins || told.dirs {
            let now = Instant::now();
            self.next_pass = Some((self.pass.next(REST_OF_PASSES).max(now), now + EARLY));
            // A process that was there before its device is none of the new ones.
            self.next_look = self.next_look.min(self.look.next(REST).max(now + LATE));
        }
    }

    /// Looks at new processes, if that is due.
    fn find_new(&mut self) {
        let Some((due, until)) = self.next_pass else { return };
        let begun = Begun::now();
        if begun.at < due {
            return;
        }
        let found = self.finder.pass();
        for mut process in found.processes {
            self.watch_device(&process);
            self.tracker.admit(&mut process);
        }
        self.pass = begun.end();
        let again = self.pass.next(REST_OF_PASSES).max(self.pass.end + Duration::from_millis(1));
        self.next_pass = (found.is_early && again < until).then_some((again, until));
    }

    /// Does what is due, and says when something will be.
    fn act(&mut self) -> Instant {
        self.find_new();
        self.tracker.fold_ended();
        if Instant::now() >= self.next_look {
            self.look_at_all();
            self.keep();
        }
        self.next_pass.map_or(self.next_look, |(due, _)| due.min(self.next_look))
    }

    /// Writes the state.
    fn keep(&mut self) {
        let Some(state) = &mut self.state else { return };
        let mut kept = Kept::default();
        (kept.ended, kept.live) = self.tracker.kept();
        kept.agents = self.agents.clone();
        match state.write(kept) {
            Ok(()) => self.is_state_lost = false,
            Err(problem) => {
                self.state_errors += 1;
                if !std::mem::replace(&mut self.is_state_lost, true) {
                    log(format_args!("sums would not outlive this process: {problem:#}"));
                }
            }
        }
    }

    /// All metrics. What is told is kept first: a sum that was told is never told smaller again.
    fn metrics(&mut self, report: Option<Report>) -> Metrics {
        if Instant::now() >= self.look.next(REST_OF_SCRAPES) || self.looks == 0 {
            self.look_at_all();
        }
        self.tracker.fold_ended();
        if let Some(report) = report {
            self.agents.look(&report.counts);
            self.report = report;
        }
        self.keep();
        let mut metrics = Metrics::default();
        show_sums(&self.tracker.sums(), &mut metrics);
        metrics.0.extend(self.gauges.0.iter().cloned());
        metrics.more(families::HIDDEN, [], self.tracker.hidden as u64);
        rdma::show_report(&self.report, &mut metrics);
        self.agents.show(&mut metrics);
        metrics.more(families::UNTRACKED, [], self.tracker.untracked as u64);
        metrics.more(families::REFUSED, [], self.tracker.refused() as u64);
        let took = self.look.elapsed.as_secs_f64();
        metrics.family(families::LOOK).insert(Vec::new(), Value::Measure(took));
        metrics.more(families::LOOKS, [], self.looks);
        metrics.more(families::STATE_ERRORS, [], self.state_errors);
        metrics.more(families::BUILD, [env!("CARGO_PKG_VERSION")], 1);
        metrics
    }
}

/// The counters of processes.
fn show_sums(sums: &Ledger, metrics: &mut Metrics) {
    for counter in OF_PROCESSES {
        metrics.family(counter.about());
    }
    for (owner, counts) in sums.iter() {
        show_counts([&owner.ism_dir, &owner.program], counts, metrics);
    }
}

fn show_counts([dir, program]: [&str; 2], counts: &Counts, metrics: &mut Metrics) {
    for (key, n) in counts.iter() {
        let about = key.counter.about();
        let (mode, device) = (key.device.mode(), key.device.name());
        let role = if key.is_client { "client" } else { "server" };
        match key.counter {
            Counter::TransmitBytes | Counter::ReceiveBytes => {
                metrics.more(about, [dir, program, mode, &device], n);
            }
            Counter::ChangedOver => metrics.more(about, [dir, program, mode, &device, role], n),
            Counter::Fallbacks => {
                metrics.more(about, [dir, program, role, &gauges::reason(key.code)], n);
            }
            Counter::HandshakeErrors => metrics.more(about, [dir, program, role], n),
            Counter::Rings => {
                let size = 1_u64 << key.code.min(63);
                metrics.more(about, [dir, program, &size.to_string()], n);
            }
            Counter::SpecialCalls => {
                let call = super::counts::CALLS.get(usize::from(key.code)).unwrap_or(&"other");
                metrics.more(about, [dir, program, call], n);
            }
            _ => metrics.more(about, [dir, program], n),
        }
    }
}

/// The exporter, as its parts see it.
pub struct Exporter {
    known: RefCell<Known>,
    /// A question to agents that is not answered yet.
    asked: Cell<Option<JoinHandle<Report>>>,
    /// Told when something is due earlier than it was.
    changed: tokio::sync::Notify,
}

impl Exporter {
    /// With what an earlier one has kept.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(
        settings: Settings,
        tracker: Tracker,
        agents: Agents,
        state: Option<State>,
    ) -> Result<Exporter> {
        let what = "cannot watch directories; raise fs.inotify.max_user_instances";
        let notice = Notice::new(vec![settings.ism_dir.clone()]).context(what)?;
        let known = Known {
            settings,
            tracker,
            notice,
            finder: Finder::default(),
            devices: BTreeSet::new(),
            agents,
            report: Report::default(),
            state,
            is_state_lost: false,
            state_errors: 0,
            looks: 0,
            look: Last::never(),
            pass: Last::never(),
            next_pass: None,
            next_look: Instant::now(),
            gauges: Metrics::default(),
        };
        let changed = tokio::sync::Notify::new();
        Ok(Exporter { known: RefCell::new(known), asked: Cell::new(None), changed })
    }

    /// Asks agents. One that does not answer in time is asked again only once it has.
    async fn report(&self) -> Option<Report> {
        let asked = self.asked.take();
        let mut asked = asked.unwrap_or_else(|| {
            let dir = self.known.borrow().settings.ism_dir.clone();
            spawn_blocking(move || agent::report(&dir))
        });
        match tokio::time::timeout(AGENTS, &mut asked).await {
            Ok(answered) => answered.ok(),
            Err(_) => {
                self.asked.set(Some(asked));
                None
            }
        }
    }

    /// Works until a signal says that it is enough.
    ///
    /// # Errors
    /// No descriptor is left.
    pub async fn work(self: Rc<Self>, listener: Listener, ready: impl FnOnce()) -> Result<()> {
        let what = "cannot hear signals";
        let mut enough = signal(SignalKind::terminate()).context(what)?;
        let mut interrupt = signal(SignalKind::interrupt()).context(what)?;
        // A client that is gone is an error of write(2), and no signal.
        let _gone = signal(SignalKind::pipe()).context(what)?;
        let (notice, exits) = {
            let known = self.known.borrow();
            let notice = known.notice.as_fd().try_clone_to_owned().context("dup")?;
            (notice, known.tracker.exits().as_fd().try_clone_to_owned().context("dup")?)
        };
        let (notice, exits) = (watched(notice)?, watched(exits)?);
        self.known.borrow_mut().act();
        let serving = tokio::task::spawn_local(http::serve(listener, self.clone()));
        ready();
        loop {
            let due = self.known.borrow_mut().act();
            tokio::select! {
                _ = enough.recv() => break,
                _ = interrupt.recv() => break,
                told = notice.readable() => {
                    told.context("epoll")?.clear_ready_matching(Ready::READABLE);
                    self.known.borrow_mut().noticed();
                }
                ended = exits.readable() => {
                    ended.context("epoll")?.clear_ready_matching(Ready::READABLE);
                    self.known.borrow_mut().fold_all();
                }
                () = self.changed.notified() => {}
                () = tokio::time::sleep_until(due.into()) => {}
            }
        }
        serving.abort();
        let mut known = self.known.borrow_mut();
        known.look_at_all();
        known.keep();
        Ok(())
    }
}

impl Known {
    /// The kernel has told of ends.
    fn fold_all(&mut self) {
        let mut before = usize::MAX;
        while self.tracker.len() < before {
            before = self.tracker.len();
            self.tracker.fold_ended();
        }
    }
}

impl Scraped for Exporter {
    async fn scrape(&self, format: Format) -> String {
        let report = self.report().await;
        let metrics = self.known.borrow_mut().metrics(report);
        self.changed.notify_one();
        exposition::write(Arc::new(metrics), format)
    }
}
