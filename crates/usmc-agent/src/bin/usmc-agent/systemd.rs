//! systemd, where it has started the agent: the socket that systemd has made (sd_listen_fds(3)), and the agent's word to it of how the
//! agent is (sd_notify(3)).

use std::error::Error;
use std::os::fd::{FromRawFd, OwnedFd};

use sd_notify::NotifyState;

/// The socket by which programs come. `None`: the agent makes its own. Called once, before anything is opened.
///
/// # Errors
/// The variables are nonsense, or there are several sockets.
pub(crate) fn listener() -> Result<Option<OwnedFd>, Box<dyn Error>> {
    let mut given = sd_notify::listen_fds()?;
    if given.len() > 1 {
        return Err("systemd gives several sockets: the agent has one".into());
    }
    // SAFETY: it is open, and was given to this process, in which nobody else knows it.
    Ok(given.next().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Tells systemd, if systemd wants word. A word that is lost does no harm.
pub(crate) fn tell(state: NotifyState<'_>) {
    let _ = sd_notify::notify(&[state]);
}
