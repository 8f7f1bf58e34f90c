//! `usmc bench --serve`: the servers' end of `usmc bench --vm` and `--rdma`, for one client after the other.
//!
//! All that a client says is hostile. It chooses among the cases of [`super::between`], and numbers within bounds. What it has started
//! ends with its connection, or when it says nothing for too long.

use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::agents::Work;
use super::case::{Case, End};
use super::control::{
    FORMAT, Greeting, Lines, REQUEST_MOST, Reply, Request, SECONDS, Sight, Start, Up,
};
use super::ending::{Ending, Interrupted};
use super::host::{Ends, LOAD_LIMIT, World};
use super::machine::Machine;
use super::mode::Way;
use super::process::families;
use super::proof::Look;
use super::record::Missed;
use super::watch::Watch;
use super::{between, obstacle};

/// A client that has nothing running says something within this time.
const IDLE_LIMIT: Duration = Duration::from_secs(60);
/// How often connections are looked at, and whether somebody wants us to end.
const TICK: Duration = Duration::from_millis(25);
/// Further clients that are sent away in one tick.
const REFUSALS: usize = 16;
/// The longest reason that is sent.
const WORDS_MOST: usize = 4000;

/// Serves until somebody ends it.
///
/// # Errors
/// When nothing can be served at that address.
pub fn serve(at: SocketAddrV4, ending: &Ending) -> Result<()> {
    let listener = TcpListener::bind(at).with_context(|| format!("cannot listen at {at}"))?;
    listener.set_nonblocking(true).context("O_NONBLOCK")?;
    let at = listener.local_addr().context("getsockname")?;
    let mut out = io::stdout();
    let line = format!(
        "Serves `usmc bench --vm {at}`, or --rdma, in the other machine; Ctrl-C ends it.\n"
    );
    out.write_all(line.as_bytes()).and_then(|()| out.flush()).context("cannot write")?;
    let host =
        Host { listener, address: ip(at), cases: between(Way::Rdma), ending: ending.clone() };
    while let Some((stream, client)) = host.accept()? {
        match host.client(stream) {
            Ok(()) => {}
            Err(problem) if problem.is::<Interrupted>() => break,
            Err(problem) => super::tell(&format!("{client}: {problem:#}")),
        }
    }
    Ok(())
}

fn ip(at: SocketAddr) -> Ipv4Addr {
    match at {
        SocketAddr::V4(at) => *at.ip(),
        SocketAddr::V6(_) => Ipv4Addr::UNSPECIFIED,
    }
}

/// What is served, and where.
struct Host {
    listener: TcpListener,
    address: Ipv4Addr,
    cases: Vec<Case>,
    ending: Ending,
}

/// A case's server for a client.
struct Running {
    world: World,
    watch: Watch,
    /// No client needs it any longer than that.
    until: Instant,
}

impl Running {
    fn look(&self) -> Look {
        Look::at(&families(&self.world.servers()), self.world.port)
    }

    fn tick(&mut self) {
        let pids = self.world.servers();
        let port = self.world.port;
        self.watch.tick(|| Look::at(&families(&pids), port));
    }

    fn sight(&self) -> Result<Sight> {
        let cpu = self.world.server_cpu(&self.world.servers())?;
        Ok(Sight { now: self.look(), best: self.watch.best().clone(), cpu })
    }
}

impl Host {
    /// The next client; nothing: somebody wants us to end.
    fn accept(&self) -> Result<Option<(TcpStream, SocketAddr)>> {
        let tick = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        while !self.ending.has_come() {
            let _ = poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], Some(&tick));
            match self.listener.accept() {
                Ok(client) => return Ok(Some(client)),
                // Also what went wrong with a client that is gone again (accept(2)).
                Err(_) => continue,
            }
        }
        Ok(None)
    }

    /// Sends those away who come while another one is served.
    fn refuse_others(&self) {
        for _ in 0..REFUSALS {
            let Ok((stream, _)) = self.listener.accept() else { return };
            let _ = stream.set_nonblocking(true);
            if let Ok(mut lines) = Lines::new(stream, 0) {
                let why = "another client is served; try again later".to_owned();
                let _ = lines.say(&Reply::Failed(why));
            }
        }
    }

    /// Serves a client as long as it stays.
    fn client(&self, stream: TcpStream) -> Result<()> {
        let mut lines = Lines::new(stream, REQUEST_MOST)?;
        lines.say(&Reply::Greeting(Box::new(self.greeting())))?;
        let mut running: Option<Running> = None;
        loop {
            let until = running.as_ref().map_or(Instant::now() + IDLE_LIMIT, |run| run.until);
            let heard = lines.hear(until, TICK, &mut || {
                self.ending.check()?;
                self.refuse_others();
                running.iter_mut().for_each(Running::tick);
                Ok(())
            });
            let request = match heard {
                Ok(Some(request)) => request,
                Ok(None) => return Ok(()),
                Err(problem) => {
                    let _ = lines.say(&failed(&problem));
                    return Err(problem);
                }
            };
            let reply = match request {
                Request::Start(start) => {
                    running = None;
                    self.start(&start).map(|run| {
                        let (port, password) = (run.world.port, run.world.password.clone());
                        running = Some(run);
                        Reply::Up(Up { port, password })
                    })
                }
                Request::Look => match &running {
                    Some(run) => run.sight().map(|sight| Reply::Seen(Box::new(sight))),
                    None => Ok(Reply::Failed("nothing runs".to_owned())),
                },
                Request::Agents => Work::here().map(|work| Reply::Agents(Box::new(work))),
                Request::Stop => {
                    running = None;
                    Ok(Reply::Stopped)
                }
            };
            match reply {
                Err(problem) if problem.is::<Interrupted>() => return Err(problem),
                reply => lines.say(&reply.unwrap_or_else(|problem| failed(&problem)))?,
            }
        }
    }

    fn greeting(&self) -> Greeting {
        let obstacles = self.cases.iter().filter_map(|case| {
            Some(Missed { case: case.name(), why: obstacle(case, &[End::Server])? })
        });
        Greeting {
            format: FORMAT,
            usmc: env!("CARGO_PKG_VERSION").to_owned(),
            machine: Machine::here(),
            obstacles: obstacles.collect(),
        }
    }

    fn start(&self, start: &Start) -> Result<Running> {
        let case = self.cases.iter().find(|case| case.name() == start.case);
        let Some((case, server)) = case.and_then(|case| Some((case, case.server.as_ref()?))) else {
            bail!("there is no case of this name");
        };
        if !case.modes.contains(&start.mode) {
            bail!("{} is not between machines", start.mode);
        }
        if !SECONDS.contains(&start.seconds) {
            bail!("a run takes {} to {} seconds", SECONDS.start(), SECONDS.end());
        }
        if let Some(why) = obstacle(case, &[End::Server]) {
            bail!(why);
        }
        let setting = start.setting.map(super::control::Tuning::setting).transpose()?;
        let mut world = World::new(start.mode, &Ends::Server(self.address), &self.ending)?;
        world.setting = setting;
        let wanted = server(&mut world)?;
        let length = Duration::from_secs_f64(start.seconds) + 2 * LOAD_LIMIT;
        let watch = Watch::new(start.mode, wanted, 1);
        Ok(Running { world, watch, until: Instant::now() + length })
    }
}

fn failed(problem: &anyhow::Error) -> Reply {
    Reply::Failed(format!("{problem:#}").chars().take(WORDS_MOST).collect())
}
