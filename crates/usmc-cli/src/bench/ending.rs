//! Ctrl-C and its like: a run is left in good order, not in the middle.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGPIPE, SIGTERM};

/// Whether somebody wants this program to end.
#[derive(Clone, Default)]
pub struct Ending(Arc<AtomicBool>);

/// The error of a run that was left because of that.
#[derive(Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

impl Ending {
    /// Listens from now on. Writing to a program that is gone is an error from now on, and no signal.
    ///
    /// # Errors
    /// As sigaction(2).
    pub fn listen() -> Result<Ending> {
        let ending = Ending::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&ending.0)).context("sigaction")?;
        }
        signal_hook::flag::register(SIGPIPE, Arc::default()).context("sigaction")?;
        Ok(ending)
    }

    /// Whether to end.
    pub fn has_come(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Ends what is under way.
    ///
    /// # Errors
    /// [`Interrupted`], if somebody wants so.
    pub fn check(&self) -> Result<()> {
        if self.has_come() { bail!(Interrupted) } else { Ok(()) }
    }
}
