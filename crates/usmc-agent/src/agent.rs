//! All of an agent, from its start to its end.
//!
//! ```text
//!   Serves ──told──▶ Drains ──no connection left──▶ Stops ──all is said, or late──▶ Done
//!                      └────────told again────────────▲
//! ```
//!
//! One that drains takes no connection. Its socket stays while a process may have to fetch one that is TCP again. One that stops has aborted what was left, and tells its peers that their link groups end.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use usmc_rdma::Event;

use crate::control::Control;
use crate::service::Service;

/// The number of what tells it to end: no visitor's.
const ORDERS: u64 = u64::MAX;
/// How long peers have to answer at the end.
const END: Duration = Duration::from_secs(5);
/// How long the last messages may take, which a peer that has ended does not acknowledge.
const LAST: Duration = Duration::from_millis(200);
/// It looks at everything so often, whatever happens.
const MOST: Duration = Duration::from_secs(60);

/// How far it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Processes come in.
    Serves,
    /// No connection is taken any more.
    Drains,
    /// All connections end, until then.
    Stops(Instant),
    /// There is nothing more to do.
    Done,
}

/// What a turn has found.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Found {
    /// The descriptor of [`Agent::watch_orders`] is readable.
    pub order: bool,
    /// It has slept.
    pub slept: bool,
}

/// A service with its socket.
pub struct Agent {
    service: Service,
    control: Control,
    stage: Stage,
}

impl Agent {
    /// It serves.
    pub fn new(service: Service, control: Control) -> Agent {
        Agent { service, control, stage: Stage::Serves }
    }

    /// How far it is.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Its connections.
    pub fn service(&self) -> &Service {
        &self.service
    }

    /// Readable: it is to be told something, as [`Found::order`] says.
    ///
    /// # Errors
    /// epoll_ctl(2).
    pub fn watch_orders(&self, fd: impl AsFd) -> io::Result<()> {
        self.service.rest().watch(fd, ORDERS)
    }

    /// It is to end: in order, and at once where it was told so before.
    pub fn end(&mut self) {
        match self.stage {
            Stage::Serves => {
                self.control.drain();
                self.stage = Stage::Drains;
            }
            Stage::Drains => self.stop(),
            Stage::Stops(_) | Stage::Done => {}
        }
    }

    fn stop(&mut self) {
        self.control.close();
        self.service.stop();
        self.stage = Stage::Stops(Instant::now() + END);
    }

    /// Looks at everything once, and rests where there is nothing to do. `each` gets what happens.
    ///
    /// # Errors
    /// The last device has failed, or the kernel.
    pub fn turn(&mut self, mut each: impl FnMut(&Event)) -> io::Result<Found> {
        let mut any = self.service.turn();
        let ready = self.service.take_ready();
        let order = ready.contains(&ORDERS);
        any |= self.control.turn(&ready, &mut self.service);
        while let Some(event) = self.service.poll_event() {
            each(&event);
        }
        let mut most = self.control.next_turn().map_or(MOST, |due| due.min(MOST));
        if self.stage == Stage::Drains
            && !self.control.is_closed()
            && !self.service.has_to_give_back()
        {
            self.control.close();
        }
        match self.stage {
            Stage::Drains if self.control.visitors() == 0 && !self.service.is_in_use() => {
                self.stop();
                any = true;
            }
            Stage::Stops(until) => {
                let (driver, now) = (self.service.driver(), Instant::now());
                let is_said = driver.engine.groups() == 0 && self.service.connections() == 0;
                let until = if is_said { until.min(now + LAST) } else { until };
                let left = until.saturating_duration_since(now);
                self.stage = match is_said && !driver.adapters.are_under_way() {
                    false if !left.is_zero() => Stage::Stops(until),
                    _ => Stage::Done,
                };
                most = most.min(left);
                any |= self.stage == Stage::Done;
            }
            Stage::Serves | Stage::Drains | Stage::Done => {}
        }
        let slept = self.service.rest_behind(any || order, &[], most)?;
        Ok(Found { order, slept })
    }
}
