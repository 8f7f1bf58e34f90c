//! The client of `connect`: many short connections, so many at a time.

use std::io::{ErrorKind, Read};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use rustix::io::Errno;
use socket2::{SockAddr, Socket};

use super::events::{EVENTS, LAST, STAYS, raise_limit, send_all};
use super::line::{self, Line};
use super::spec::{Brief, Done, Spec, Wait};

/// Part of the run's length that goes before it.
const WARM_UP: f64 = 0.2;
/// Exchanges on the lasting connection that shows that the library is at work.
const LASTING: usize = 200;

/// Plays the client.
pub fn play(spec: &Spec, wanted: &Brief) -> Result<()> {
    raise_limit()?;
    let mut crowds = (0..wanted.threads)
        .map(|i| Crowd::new(spec, share(wanted, i)))
        .collect::<Result<Vec<Crowd>>>()?;
    let warm_up = Duration::from_secs_f64(wanted.seconds * WARM_UP);
    let length = Duration::from_secs_f64(wanted.seconds);
    all(&mut crowds, |crowd| crowd.run(warm_up))?;
    super::start(|| Ok(()))?;
    let (cpu, begin) = (super::cpu_time(), Instant::now());
    let operations = all(&mut crowds, |crowd| crowd.run(length))?;
    let seconds = begin.elapsed().as_secs_f64();
    let cpu_seconds = (super::cpu_time() - cpu).as_secs_f64();
    super::say("measured", &())?;
    super::hear()?;
    // Within a machine these connections were too short to leave TCP, which is on purpose. One that lasts shows that they could have.
    let lasting = lasting(spec)?;
    super::say("done", &Done { operations, seconds, cpu_seconds, ..Done::default() })?;
    super::rest()?;
    drop((lasting, crowds));
    Ok(())
}

/// Connections of one thread.
fn share(wanted: &Brief, thread: usize) -> usize {
    let more = usize::from(thread < wanted.concurrency % wanted.threads);
    wanted.concurrency / wanted.threads + more
}

/// Runs all, each in a thread if there are several, and returns the sum.
fn all(crowds: &mut [Crowd], run: impl Fn(&mut Crowd) -> Result<u64> + Sync) -> Result<u64> {
    if let [only] = crowds {
        return run(only);
    }
    thread::scope(|scope| {
        let threads: Vec<_> = crowds.iter_mut().map(|crowd| scope.spawn(|| run(crowd))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a thread ended"))?)
            .sum()
    })
}

fn lasting(spec: &Spec) -> Result<Line> {
    let mut line =
        Line::new(line::connect(&spec.at)?, &Spec { wait: Wait::Blocking, ..spec.clone() })?;
    let (request, mut answer) = (vec![STAYS; spec.request], vec![0; spec.answer]);
    for _ in 0..LASTING {
        line.send(&request).context("cannot send")?;
        if !line.receive(&mut answer).context("cannot receive")? {
            bail!("the server hung up");
        }
    }
    Ok(line)
}

/// The connections of one thread.
struct Crowd {
    spec: Spec,
    set: Epoll,
    guests: Vec<Guest>,
    request: Vec<u8>,
    answer: Vec<u8>,
}

/// One connection at a time.
struct Guest {
    socket: Option<Socket>,
    got: usize,
    asked: bool,
}

impl Crowd {
    fn new(spec: &Spec, size: usize) -> Result<Crowd> {
        let guests = (0..size).map(|_| Guest { socket: None, got: 0, asked: false }).collect();
        let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("epoll_create")?;
        let (request, answer) = (vec![LAST; spec.request], vec![0; spec.answer]);
        Ok(Crowd { spec: spec.clone(), set, guests, request, answer })
    }

    /// Connects, asks and closes for so long, and until one was finished; the number of connections that were finished in that time.
    fn run(&mut self, length: Duration) -> Result<u64> {
        let begin = Instant::now();
        for at in 0..self.guests.len() {
            self.open(at)?;
        }
        let mut done = 0;
        let mut events = [EpollEvent::empty(); EVENTS];
        while done == 0 || begin.elapsed() < length {
            let count = match self.set.wait(&mut events, EpollTimeout::from(100u8)) {
                Err(nix::errno::Errno::EINTR) => continue,
                other => other.context("epoll_wait")?,
            };
            for event in &events[..count] {
                let at = event.data() as usize;
                if self.go_on(at)? {
                    done += 1;
                    self.open(at)?;
                }
            }
        }
        for guest in &mut self.guests {
            guest.socket = None;
        }
        Ok(done)
    }

    /// A new connection in this place. The old one leaves the set with its close.
    fn open(&mut self, at: usize) -> Result<()> {
        self.guests[at] = Guest { socket: None, got: 0, asked: false };
        let (socket, name) = line::socket(&self.spec.at)?;
        socket.set_nonblocking(true).context("O_NONBLOCK")?;
        connect(&socket, &name)?;
        let event = EpollEvent::new(EpollFlags::EPOLLOUT, at as u64);
        self.set.add(&socket, event).context("epoll_ctl")?;
        self.guests[at].socket = Some(socket);
        Ok(())
    }

    /// The next step of this connection; true after its last.
    fn go_on(&mut self, at: usize) -> Result<bool> {
        let guest = &mut self.guests[at];
        let Some(mut socket) = guest.socket.as_ref() else { return Ok(false) };
        if !guest.asked {
            if let Some(error) = socket.take_error().context("SO_ERROR")? {
                return Err(error).context("cannot connect");
            }
            send_all(socket, &self.request).context("cannot send")?;
            guest.asked = true;
            let mut event = EpollEvent::new(EpollFlags::EPOLLIN, at as u64);
            self.set.modify(socket, &mut event).context("epoll_ctl")?;
            return Ok(false);
        }
        match socket.read(&mut self.answer) {
            Ok(0) if guest.got == self.answer.len() => Ok(true),
            Ok(0) => bail!("the server hung up after {} bytes", guest.got),
            Ok(n) => {
                guest.got += n;
                Ok(false)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(e).context("cannot receive"),
        }
    }
}

/// Begins to connect. A full queue of a UNIX listener says so at once, and is tried again.
fn connect(socket: &Socket, name: &SockAddr) -> Result<()> {
    loop {
        match socket.connect(name) {
            Ok(()) => return Ok(()),
            Err(e) if e.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => return Ok(()),
            Err(e) if e.kind() == ErrorKind::WouldBlock => thread::yield_now(),
            Err(e) => return Err(e).context("cannot connect"),
        }
    }
}
