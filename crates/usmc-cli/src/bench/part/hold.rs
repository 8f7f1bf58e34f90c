//! The client of `fanin` and `idle`: many connections in one epoll set, and requests on few of them.

use std::io::{ErrorKind, Read};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use socket2::Socket;

use super::events::{EVENTS, STAYS, raise_limit, send_all};
use super::line;
use super::spec::{Done, Hold, Spec};

/// Exchanges that active connections have had before the run at least: enough to change over.
const WARM_UP: u64 = 150;

struct Crowd {
    set: Epoll,
    sockets: Vec<Socket>,
    got: Vec<usize>,
    request: Vec<u8>,
    answer: Vec<u8>,
}

/// Plays the client.
pub fn play(spec: &Spec, wanted: &Hold) -> Result<()> {
    raise_limit()?;
    let mut crowd = Crowd {
        set: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("epoll_create")?,
        sockets: Vec::new(),
        got: vec![0; wanted.connections],
        request: vec![STAYS; spec.request],
        answer: vec![0; spec.answer],
    };
    // What the first connection costs is no matter of their number.
    crowd.open(spec)?;
    crowd.exchange(0..1, WARM_UP, Duration::MAX)?;
    super::say("base", &())?;
    super::hear()?;
    while crowd.sockets.len() < wanted.connections {
        crowd.open(spec)?;
        let last = crowd.sockets.len() - 1;
        crowd.exchange(last..last + 1, wanted.before as u64, Duration::MAX)?;
    }
    // Those that were used last are active, so that none of them is the first, which is special.
    let active = crowd.sockets.len() - wanted.active..crowd.sockets.len();
    let warm_up = WARM_UP * wanted.active as u64;
    crowd.exchange(active.clone(), warm_up, Duration::MAX)?;
    super::start(|| crowd.exchange(active.clone(), warm_up, Duration::MAX).map(drop))?;
    let (cpu, begin) = (super::cpu_time(), Instant::now());
    let operations = if wanted.active == 0 {
        // Nothing is to happen, here nor there; the driver tells when it is over.
        super::hear()?;
        0
    } else {
        crowd.exchange(active, u64::MAX, Duration::from_secs_f64(wanted.seconds))?
    };
    let seconds = begin.elapsed().as_secs_f64();
    let cpu_seconds = (super::cpu_time() - cpu).as_secs_f64();
    super::say("measured", &())?;
    super::hear()?;
    super::say("done", &Done { operations, seconds, cpu_seconds, ..Done::default() })?;
    super::rest()
}

impl Crowd {
    fn open(&mut self, spec: &Spec) -> Result<()> {
        let socket = line::connect(&spec.at)?;
        line::set_nodelay(&socket, spec)?;
        socket.set_nonblocking(true).context("O_NONBLOCK")?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, self.sockets.len() as u64);
        self.set.add(&socket, event).context("epoll_ctl")?;
        self.sockets.push(socket);
        Ok(())
    }

    /// One request after the other on each of these, until so many are answered or time is over. None is left
    /// unanswered.
    fn exchange(
        &mut self,
        active: std::ops::Range<usize>,
        most: u64,
        length: Duration,
    ) -> Result<u64> {
        let begin = Instant::now();
        let (mut asked, mut answered) = (0, 0);
        for at in active {
            if asked < most {
                send_all(&self.sockets[at], &self.request).context("cannot send")?;
                asked += 1;
            }
        }
        let mut events = [EpollEvent::empty(); EVENTS];
        while answered < asked {
            let count = match self.set.wait(&mut events, EpollTimeout::NONE) {
                Err(nix::errno::Errno::EINTR) => continue,
                other => other.context("epoll_wait")?,
            };
            let go_on = begin.elapsed() < length;
            for event in &events[..count] {
                let at = event.data() as usize;
                if !self.take(at)? {
                    continue;
                }
                answered += 1;
                if go_on && asked < most {
                    send_all(&self.sockets[at], &self.request).context("cannot send")?;
                    asked += 1;
                }
            }
        }
        Ok(answered)
    }

    /// Receives; true when the answer is whole.
    fn take(&mut self, at: usize) -> Result<bool> {
        let wanted = self.answer.len() - self.got[at];
        match (&self.sockets[at]).read(&mut self.answer[..wanted]) {
            Ok(0) => bail!("the server hung up"),
            Ok(n) => self.got[at] += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(e) => return Err(e).context("cannot receive"),
        }
        let whole = self.got[at] == self.answer.len();
        if whole {
            self.got[at] = 0;
        }
        Ok(whole)
    }
}
