//! How commands that serve until they are asked to end hear of it.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGPIPE, SIGTERM};

/// A socket from which something can be read once the process is to end. SIGPIPE is ignored from then on: whoever reads what is
/// written may end first.
///
/// # Errors
/// The system has no descriptors left.
pub fn on_signal() -> Result<UnixStream> {
    let (stop, told) = UnixStream::pair().context("socketpair")?;
    for signal in [SIGINT, SIGTERM] {
        let told = told.try_clone().context("dup")?;
        signal_hook::low_level::pipe::register(signal, told).context("cannot hear signals")?;
    }
    let ignored = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGPIPE, ignored).context("cannot hear signals")?;
    Ok(stop)
}
