//! Running a program: the processes, and what is seen of them.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, thread};

use super::program::{Program, Step};
use crate::fixture::slowness;
use crate::region::Hosts;
use crate::{Fixture, Process, build, procfs};

/// Threads of a process.
pub const THREADS: usize = 2;
/// Processes at the start of a program.
pub const PROCESSES: usize = 2;
/// And with those that are forked.
pub const MOST_PROCESSES: usize = 6;
/// Handles for sockets and epoll sets (`HANDLES` in `programs/actor/actor.c`).
pub const MOST_HANDLES: i64 = 64;
/// A thread that sleeps is looked at again after this time: nothing tells that a thread has fallen asleep.
const PAUSE: Duration = Duration::from_micros(60);
/// A thread under uSMC that sleeps for this long sleeps for good: nothing that wakes it takes longer.
const REST: Duration = Duration::from_millis(3);

/// Longer than TCP keeps an acknowledgement back (TCP_DELACK_MIN is 40 ms).
const PATIENCE: Duration = Duration::from_millis(45);

/// Operations that go on when there is room or data, be it after a timer of TCP's (a closed window, TCP_RTO_MIN).
const STREAMS: [&str; 4] = ["flood", "fill", "drain", "talk"];
const STREAM_REST: Duration = Duration::from_millis(450);

/// How the answer of a `fill` begins that ended without room (EAGAIN).
const FULL: &str = "-1 11 ";

/// A step that does not come to rest in this time hangs.
fn step_limit() -> Duration {
    Duration::from_secs(5) * slowness()
}

/// How fast a world over TCP goes from step to step where somebody sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pace {
    /// As fast as that can be told.
    Quick,
    /// As fast as a world under uSMC.
    AsUnderSmc,
    /// So slow that what TCP's timers keep back comes at once.
    Patient,
}

/// What came of a step: its own answer or `blocked`, then what others answered meanwhile.
pub type Observation = Vec<String>;

struct Worker {
    stream: UnixStream,
    pid: i32,
    tid: i32,
    /// Whether it is at a step.
    at_work: bool,
    /// Whether that is one of [`STREAMS`], or ends by a time limit.
    streams: bool,
    /// The stream that it sends in, if it tells how much.
    sends_in: Option<i64>,
    unread: Vec<u8>,
}

/// How far a stream of `fill`, `push` and `drain` is: TCP and rings take different amounts.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    sent: i64,
    /// Bytes of a `push` that has not answered yet.
    pending: i64,
    received: i64,
    /// What was in flight when it was full.
    full: i64,
}

/// How many connections were filled.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filled {
    /// In all.
    pub all: u64,
    /// Those that were in the ring meanwhile.
    pub in_ring: u64,
}

/// Processes that run programs, all under uSMC or all over TCP.
pub struct World<'a> {
    fixture: &'a Fixture,
    smc: bool,
    /// The processes are different hosts'.
    hosts: Option<&'a Hosts>,
    path: PathBuf,
    control: UnixListener,
    actors: Vec<Process>,
    workers: BTreeMap<(usize, usize), Worker>,
    ports: BTreeMap<i64, i64>,
    /// Streams by their seeds.
    streams: BTreeMap<i64, Stream>,
    filled: Filled,
    stuck: bool,
    /// How long threads have to sleep to be believed.
    rest: Duration,
}

impl<'a> World<'a> {
    /// Starts the processes, if there are hosts one on each.
    ///
    /// # Panics
    /// When they do not start.
    pub fn new(fixture: &'a Fixture, smc: bool, hosts: Option<&'a Hosts>) -> World<'a> {
        let path = fixture.scratch().join(if smc { "smc" } else { "tcp" });
        let _ = fs::remove_file(&path);
        let control = UnixListener::bind(&path).expect("a control socket");
        control.set_nonblocking(true).expect("a socket");
        let mut world = World {
            fixture,
            smc,
            hosts,
            path,
            control,
            actors: Vec::new(),
            workers: BTreeMap::new(),
            ports: BTreeMap::new(),
            streams: BTreeMap::new(),
            filled: Filled::default(),
            stuck: false,
            rest: if smc { REST } else { PAUSE },
        };
        world.start();
        world
    }

    fn start(&mut self) {
        let actor = build::program("actor");
        for process in 0..PROCESSES {
            let mut command = if self.smc {
                self.fixture.command(&actor)
            } else {
                let mut command = self.fixture.plain(&actor);
                command.env("USMC_TESTS_PLAIN", "1");
                command
            };
            if let Some(hosts) = self.hosts {
                hosts.dress_for_region(process, &mut command);
            }
            command.arg(&self.path).arg(process.to_string());
            self.actors.push(self.fixture.spawn(command));
        }
        self.greet(PROCESSES * THREADS);
    }

    /// Waits for as many threads to report.
    fn greet(&mut self, mut count: usize) {
        let start = Instant::now();
        while count > 0 {
            match self.control.accept() {
                Ok((stream, _)) => {
                    let (key, worker) = Worker::meet(stream);
                    self.workers.insert(key, worker);
                    count -= 1;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    assert!(start.elapsed() < 2 * step_limit(), "{count} threads did not report");
                    thread::sleep(PAUSE);
                }
                Err(e) => panic!("accept: {e}"),
            }
        }
    }

    /// How long a world over TCP waits after each step that leaves somebody asleep.
    pub fn set_pace(&mut self, pace: Pace) {
        self.rest = match pace {
            _ if self.smc => REST,
            Pace::Quick => PAUSE,
            Pace::AsUnderSmc => REST,
            Pace::Patient => PATIENCE,
        };
    }

    /// Runs a program to its end and leaves the world as it was.
    ///
    /// # Panics
    /// When the test's time is over.
    pub fn run(&mut self, program: &Program) -> Vec<Observation> {
        self.run_and(program, || {})
    }

    /// Likewise, and does something else before it tidies up.
    ///
    /// # Panics
    /// When the test's time is over.
    pub fn run_and(&mut self, program: &Program, at_the_end: impl FnOnce()) -> Vec<Observation> {
        assert!(!self.fixture.time_left().is_zero(), "no time is left for\n{program}");
        let seen = program.steps.iter().map(|step| self.step(step)).collect();
        at_the_end();
        self.tidy();
        seen
    }

    /// Does one step.
    pub fn step(&mut self, step: &Step) -> Observation {
        let key = (step.process, step.thread);
        if self.stuck {
            return vec!["stuck before".into()];
        }
        let Some(worker) = self.workers.get(&key) else { return vec!["no such thread".into()] };
        if worker.at_work {
            return vec!["busy".into()];
        }
        let mut args = step.args.clone();
        if step.op == "connect" {
            let Some(port) = args.get(1).and_then(|listener| self.ports.get(listener)) else {
                return vec!["no such port".into()];
            };
            args[1] = *port;
        }
        let stream = self.complete(&step.op, &mut args);
        let Some(worker) = self.workers.get_mut(&key) else { return vec!["no such thread".into()] };
        let words: Vec<String> = args.iter().map(i64::to_string).collect();
        let line = format!("{} {}\n", step.op, words.join(" "));
        worker.at_work = true;
        let is_limited = step.op == "push" && args[5] > 0;
        worker.streams = STREAMS.contains(&step.op.as_str()) || is_limited;
        worker.sends_in = stream;
        if worker.stream.write_all(line.as_bytes()).is_err() {
            return vec!["ended before".into()];
        }
        if step.at_once {
            return vec!["begun".into()];
        }
        let mut answers = self.settle();
        if step.op == "listen"
            && let Some(answer) = answers.get_mut(&key)
            && let Some((port, rest)) = answer.split_once(' ')
            && let Ok(port @ 1..) = port.parse::<i64>()
        {
            self.ports.insert(step.args[0], port);
            *answer = format!("0 {rest}");
        }
        for (worker, answer) in &mut answers {
            let stream = self.workers.get_mut(worker).and_then(|worker| worker.sends_in.take());
            let is_fill = *worker == key && step.op == "fill";
            let limits = if is_fill { step.args.get(3..5) } else { None };
            if let Some(seed) = stream {
                self.note_sent(seed, answer, limits);
            }
        }
        if step.op == "fork" && answers.get(&key).is_some_and(|a| a.starts_with("0 ")) {
            self.greet(THREADS);
        }
        let own = answers.remove(&key);
        let ended = answers.contains_key(&(step.process, usize::MAX));
        let own = own.unwrap_or_else(|| if ended { "ended" } else { "blocked" }.into());
        answers.remove(&(step.process, usize::MAX));
        let others = answers.into_iter().map(|((p, t), answer)| match t {
            usize::MAX => format!("{p}.0: {answer}"),
            _ => format!("{p}.{t}: {answer}"),
        });
        [own].into_iter().chain(others).collect()
    }

    /// Replaces lengths that depend on what is in flight, and adds places in streams. The stream that the step sends in, if
    /// it tells how much.
    fn complete(&mut self, op: &str, args: &mut Vec<i64>) -> Option<i64> {
        let (arguments, seed) = match op {
            "fill" => (5, args[1]),
            "push" => (6, args[1]),
            "drain" => (5, args[2]),
            _ => return None,
        };
        args.resize(arguments, 0);
        let stream = self.streams.entry(seed).or_default();
        match op {
            // What `flood` sends begins anew each time, and two of them may have one seed.
            "drain" if args[1] >= 0 => {
                args.push(0);
                None
            }
            "drain" => {
                let in_flight = stream.sent + stream.pending - stream.received;
                args[1] = in_flight * -args[1] / 64;
                args.push(stream.received);
                stream.received += args[1];
                None
            }
            _ => {
                if op == "push" {
                    if args[2] < 0 {
                        args[2] = stream.full * -args[2] / 100;
                    }
                    stream.pending = args[2];
                }
                args.push(stream.sent);
                Some(seed)
            }
        }
    }

    /// Takes how much was sent out of an answer, and judges it if there are limits.
    fn note_sent(&mut self, seed: i64, answer: &mut String, limits: Option<&[i64]>) {
        let Some((rest, sent)) = answer.split_once('#') else { return };
        let (amount, in_ring) = sent.split_once(' ').unwrap_or((sent, "0"));
        let stream = self.streams.entry(seed).or_default();
        stream.sent += amount.parse::<i64>().unwrap_or(0);
        stream.pending = 0;
        let mut seen = rest.trim_end().to_owned();
        if let Some([least, most]) = limits
            && seen.starts_with(FULL)
        {
            stream.full = stream.sent - stream.received;
            seen += match stream.full {
                full if full < *least => " too little",
                full if full > *most => " too much",
                _ => " as much as should",
            };
            self.filled.all += 1;
            self.filled.in_ring += u64::from(in_ring == "1");
        }
        *answer = seen;
    }

    /// How many connections were filled so far.
    pub fn filled(&self) -> Filled {
        self.filled
    }

    /// Waits until all threads have answered or sleep in their calls; the answers, and the ends of processes as
    /// those of a thread that has no number.
    fn settle(&mut self) -> BTreeMap<(usize, usize), String> {
        let mut answers = BTreeMap::new();
        let start = Instant::now();
        let mut asleep_since: Option<Instant> = None;
        loop {
            let mut ended = Vec::new();
            for (key, worker) in self.workers.iter_mut().filter(|(_, w)| w.at_work) {
                match worker.answer() {
                    Answer::None => {}
                    Answer::Line(line) => {
                        asleep_since = None;
                        answers.insert(*key, line);
                    }
                    Answer::End => ended.push((key.0, worker.pid)),
                }
            }
            for (process, pid) in ended {
                asleep_since = None;
                // Its control connection is not the last thing that a process closes.
                while !procfs::has_ended(pid) && start.elapsed() < step_limit() {
                    thread::yield_now();
                }
                self.workers.retain(|key, _| key.0 != process);
                answers.insert((process, usize::MAX), "ended".into());
            }
            let mut waiting = self.workers.values().filter(|w| w.at_work).peekable();
            if waiting.peek().is_none() {
                return answers;
            }
            let streams = self.workers.values().any(|w| w.at_work && w.streams);
            let rest = if streams { STREAM_REST } else { self.rest };
            if waiting.all(|w| procfs::state(w.pid, w.tid) == 'S') {
                if asleep_since.get_or_insert_with(Instant::now).elapsed() >= rest {
                    return answers;
                }
                thread::sleep(PAUSE);
            } else {
                asleep_since = None;
                thread::yield_now();
            }
            if start.elapsed() > step_limit() {
                self.stuck = true;
                let busy = self.workers.iter().filter(|(_, w)| w.at_work);
                for ((p, t), _) in busy {
                    answers.insert((*p, *t), "does not come to rest".into());
                }
                return answers;
            }
        }
    }

    /// Closes everything. Processes that are not as they were are replaced.
    pub fn tidy(&mut self) {
        self.ports.clear();
        self.streams.clear();
        let changed = self.stuck
            || self.workers.len() != PROCESSES * THREADS
            || (0..PROCESSES).any(|p| !self.workers.contains_key(&(p, 0)))
            || self.workers.values().any(|w| w.at_work);
        if changed {
            return self.restart();
        }
        for process in 0..PROCESSES {
            let op = "clear".into();
            self.step(&Step { process, thread: 0, op, args: vec![], at_once: false });
        }
    }

    /// Ends all processes and starts new ones.
    fn restart(&mut self) {
        self.stuck = false;
        self.workers.clear();
        // Each with its group, in which are the processes that it forked.
        self.actors.clear();
        while let Ok((late, _)) = self.control.accept() {
            drop(late);
        }
        self.start();
    }
}

enum Answer {
    None,
    Line(String),
    End,
}

impl Worker {
    /// Takes a thread's greeting: its process and number in the program, its pid and tid.
    fn meet(mut stream: UnixStream) -> ((usize, usize), Worker) {
        stream.set_nonblocking(false).expect("a socket");
        stream.set_read_timeout(Some(step_limit())).expect("a socket");
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("the thread's greeting");
            line.push(byte[0]);
        }
        stream.set_nonblocking(true).expect("a socket");
        let text = String::from_utf8_lossy(&line).into_owned();
        let mut numbers = text.split_whitespace().map(|w| w.parse::<i32>().expect("a number"));
        let mut next = || numbers.next().expect("four numbers");
        let key = (next() as usize, next() as usize);
        let (pid, tid) = (next(), next());
        (
            key,
            Worker {
                stream,
                pid,
                tid,
                at_work: false,
                streams: false,
                sends_in: None,
                unread: Vec::new(),
            },
        )
    }

    fn answer(&mut self) -> Answer {
        let mut bytes = [0; 2048];
        match self.stream.read(&mut bytes) {
            Ok(0) => return Answer::End,
            Ok(n) => self.unread.extend_from_slice(&bytes[..n]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Answer::None,
            Err(_) => return Answer::End,
        }
        if self.unread.last() != Some(&b'\n') {
            return Answer::None;
        }
        self.at_work = false;
        let line = String::from_utf8_lossy(&self.unread).trim_end().to_owned();
        self.unread.clear();
        Answer::Line(line)
    }
}
