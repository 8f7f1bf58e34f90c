//! Running a program: the processes, and what is seen of them.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, thread};

use super::program::{Program, Step};
use crate::{Fixture, Process, build, procfs};

/// Threads of a process.
pub const THREADS: usize = 2;
/// Processes at the start of a program.
pub const PROCESSES: usize = 2;
/// And with those that are forked.
pub const MOST_PROCESSES: usize = 6;
/// Handles for sockets and epoll sets (`HANDLES` in `programs/actor/actor.c`).
pub const MOST_HANDLES: i64 = 64;
/// A step that does not come to rest in this time hangs.
const STEP_LIMIT: Duration = Duration::from_secs(5);
/// A thread that sleeps is looked at again after this time: nothing tells that a thread has fallen asleep.
const PAUSE: Duration = Duration::from_micros(60);
/// A thread under uSMC that sleeps for this long sleeps for good: nothing that wakes it takes longer.
const REST: Duration = Duration::from_millis(3);

/// Longer than TCP keeps an acknowledgement back (TCP_DELACK_MIN is 40 ms).
const PATIENCE: Duration = Duration::from_millis(45);

/// Operations that go on when there is room or data, be it after a timer of TCP's (a closed window, TCP_RTO_MIN).
const STREAMS: [&str; 3] = ["flood", "drain", "talk"];
const STREAM_REST: Duration = Duration::from_millis(450);

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
    /// Whether that is one of [`STREAMS`].
    streams: bool,
    unread: Vec<u8>,
}

/// Processes that run programs, all under uSMC or all over TCP.
pub struct World<'a> {
    fixture: &'a Fixture,
    smc: bool,
    path: PathBuf,
    control: UnixListener,
    actors: Vec<Process>,
    workers: BTreeMap<(usize, usize), Worker>,
    ports: BTreeMap<i64, i64>,
    /// How much went into a connection before it was full, which differs.
    filled: BTreeMap<i64, i64>,
    stuck: bool,
    /// How long threads have to sleep to be believed.
    rest: Duration,
}

impl<'a> World<'a> {
    /// Starts the processes.
    ///
    /// # Panics
    /// When they do not start.
    pub fn new(fixture: &'a Fixture, smc: bool) -> World<'a> {
        let path = fixture.scratch().join(if smc { "smc" } else { "tcp" });
        let _ = fs::remove_file(&path);
        let control = UnixListener::bind(&path).expect("a control socket");
        control.set_nonblocking(true).expect("a socket");
        let mut world = World {
            fixture,
            smc,
            path,
            control,
            actors: Vec::new(),
            workers: BTreeMap::new(),
            ports: BTreeMap::new(),
            filled: BTreeMap::new(),
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
                    assert!(start.elapsed() < 2 * STEP_LIMIT, "{count} threads did not report");
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
        let Some(worker) = self.workers.get_mut(&key) else { return vec!["no such thread".into()] };
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
        if step.op == "drain" && args[1] < 0 {
            args[1] = self.filled.get(&(-1 - args[1])).copied().unwrap_or(0);
        }
        let words: Vec<String> = args.iter().map(i64::to_string).collect();
        let line = format!("{} {}\n", step.op, words.join(" "));
        worker.at_work = true;
        worker.streams = STREAMS.contains(&step.op.as_str());
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
        if step.op == "fill"
            && let Some(answer) = answers.get_mut(&key)
            && let Some((rest, amount)) = answer.split_once('#')
        {
            self.filled.insert(step.args[0], amount.parse().unwrap_or(0));
            *answer = rest.trim_end().into();
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
                while !procfs::has_ended(pid) && start.elapsed() < STEP_LIMIT {
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
            if start.elapsed() > STEP_LIMIT {
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
        self.filled.clear();
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
        stream.set_read_timeout(Some(STEP_LIMIT)).expect("a socket");
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
        (key, Worker { stream, pid, tid, at_work: false, streams: false, unread: Vec::new() })
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
