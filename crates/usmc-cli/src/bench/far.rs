//! The server's end of a run that is in another machine: `usmc bench --vm`, or `--rdma`, asks `usmc bench --serve` for it.

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::agents::Work;
use super::control::{
    FORMAT, Greeting, Lines, NO_MESSAGE, REPLY_MOST, Reply, Request, Sight, Start, Up,
};
use super::ending::Ending;
use super::mode::Way;
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
    /// How connections of uSMC have to go.
    pub way: Way,
    ending: Ending,
    lines: RefCell<Lines>,
}

impl Far {
    /// Connects to it.
    ///
    /// # Errors
    /// When nobody serves there, or in another version; when connections have to be by RDMA, and one of both hosts has no agent.
    pub fn connect(at: SocketAddrV4, way: Way, ending: &Ending) -> Result<Far> {
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
        let (ending, lines) = (ending.clone(), RefCell::new(lines));
        let far = Far { address, greeting, wire, way, ending, lines };
        if way == Way::Rdma {
            far.agents()?;
        }
        Ok(far)
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

    /// What the agents of both hosts have done so far.
    ///
    /// # Errors
    /// When one of both hosts has none.
    pub fn agents(&self) -> Result<Work> {
        let here = Work::here()?;
        match self.ask(&Request::Agents)? {
            Reply::Agents(there) => Ok(here.plus(*there)),
            Reply::Failed(why) if why.starts_with(NO_MESSAGE) => {
                let (there, here) = (&self.greeting.usmc, env!("CARGO_PKG_VERSION"));
                bail!(
                    "uSMC {there} serves there, which does not tell of agents, and this one is {here}: take one for both"
                )
            }
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
