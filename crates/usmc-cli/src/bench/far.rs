//! The server's end of a run that is in another machine: `usmc bench --vm` asks `usmc bench --serve` for it.

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::control::{FORMAT, Greeting, Lines, REPLY_MOST, Reply, Request, Sight, Start, Up};
use super::ending::Ending;
use super::wire::Wire;

/// The other machine answers within this time, or something is wrong.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(60);
/// How often we look whether somebody wants us to end.
const TICK: Duration = Duration::from_millis(50);

/// The other machine.
pub struct Far {
    /// Where its servers listen.
    pub address: Ipv4Addr,
    /// What it said of itself.
    pub greeting: Greeting,
    /// What leads to it.
    pub wire: Wire,
    ending: Ending,
    lines: RefCell<Lines>,
}

impl Far {
    /// Connects to it.
    ///
    /// # Errors
    /// When nobody serves there, or in another version.
    pub fn connect(at: SocketAddrV4, ending: &Ending) -> Result<Far> {
        let stream = TcpStream::connect_timeout(&at.into(), CONNECT_LIMIT).with_context(|| {
            format!("nobody serves at {at}; start `usmc bench --serve {at}` in the other machine")
        })?;
        let mut lines = Lines::new(stream, REPLY_MOST)?;
        let greeting = match hear(&mut lines, ending)? {
            Reply::Greeting(greeting) if greeting.format == FORMAT => *greeting,
            Reply::Greeting(other) => {
                let own = env!("CARGO_PKG_VERSION");
                bail!("uSMC {} serves there, and this one is {own}: take one for both", other.usmc)
            }
            Reply::Failed(why) => bail!("{at} does not serve us: {why}"),
            other => bail!("{at} says {other:?}"),
        };
        let (address, wire) = (*at.ip(), Wire::to(*at.ip())?);
        Ok(Far { address, greeting, wire, ending: ending.clone(), lines: RefCell::new(lines) })
    }

    /// Has it start a case's server.
    ///
    /// # Errors
    /// When that fails there.
    pub fn start(&self, start: Start) -> Result<Up> {
        match self.ask(&Request::Start(start))? {
            Reply::Up(up) => Ok(up),
            other => unexpected(other),
        }
    }

    /// What it sees of the run.
    ///
    /// # Errors
    /// When it does not say.
    pub fn sight(&self) -> Result<Sight> {
        match self.ask(&Request::Look)? {
            Reply::Seen(sight) => Ok(*sight),
            other => unexpected(other),
        }
    }

    /// Has it end the case's server.
    ///
    /// # Errors
    /// When it does not say so.
    pub fn stop(&self) -> Result<()> {
        match self.ask(&Request::Stop)? {
            Reply::Stopped => Ok(()),
            other => unexpected(other),
        }
    }

    fn ask(&self, request: &Request) -> Result<Reply> {
        let mut lines = self.lines.borrow_mut();
        lines.say(request)?;
        hear(&mut lines, &self.ending)
    }
}

fn hear(lines: &mut Lines, ending: &Ending) -> Result<Reply> {
    let until = Instant::now() + PATIENCE;
    let reply = lines.hear(until, TICK, &mut || ending.check())?;
    reply.context("the other machine has closed the connection")
}

fn unexpected<T>(reply: Reply) -> Result<T> {
    match reply {
        Reply::Failed(why) => bail!("in the other machine: {why}"),
        other => bail!("the other machine says {other:?}"),
    }
}
