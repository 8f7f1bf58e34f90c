//! A plugin of container runtimes (NRI, the node resource interface of containerd and CRI-O): pods that are chosen are given the
//! library and one ISM directory for each namespace of Kubernetes.
//!
//! [`wire`] has the frames, [`api`] the messages, [`session`] the conversation; none of them does I/O. [`choice`] says who is given
//! the library, [`injector`] how. [`devices`] are the directories, [`acl`] lets users in, [`rootfs`] looks into containers.
//!
//! It fails open: whatever goes wrong here, or comes from there, containers are created as if there were no plugin.

pub mod acl;
pub mod api;
pub mod choice;
pub mod devices;
pub mod injector;
pub mod rootfs;
pub mod session;
pub mod wire;

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::ivshmem::log;
use injector::Injector;
use session::{Session, State};

/// How long a runtime is waited for before it is tried again, and how often directories are looked after without one.
const AGAIN: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// How long a runtime may take to read what it is sent.
const SEND: Duration = Duration::from_secs(2);
/// The file that is locked while a plugin is registered. No namespace has such a name.
const LOCK: &str = ".registered";

/// Locks the file by which others see that a plugin is registered; `None`: another one is.
fn lock(devices: &Path) -> Result<Option<File>> {
    let path = devices.join(LOCK);
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
    let file = file.with_context(|| format!("cannot write {}", path.display()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}

/// Whether a plugin is registered that has its directories in `devices`.
pub fn is_registered(devices: &Path) -> bool {
    let Ok(file) = File::open(devices.join(LOCK)) else { return false };
    flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
}

/// What goes on with a runtime.
pub struct Runtime {
    /// Its socket.
    pub socket: PathBuf,
    /// Two digits: when this plugin is asked, among others.
    pub index: String,
    /// Where the directories are.
    pub devices: PathBuf,
}

/// Why a conversation is over.
enum Over {
    /// A signal came.
    Stopped,
    /// For this reason; it is to be tried again.
    Lost(String),
}

impl Runtime {
    /// Serves until something can be read from `stop`. A runtime that is gone is waited for.
    ///
    /// # Errors
    /// The directory cannot be written to.
    pub fn serve(&self, injector: &mut Injector, stop: &UnixStream) -> Result<()> {
        let mut said = String::new();
        loop {
            let lost = match is_registered(&self.devices) {
                true => "another plugin of uSMC is registered on this node".to_owned(),
                false => match self.converse(injector, stop)? {
                    Over::Stopped => return Ok(()),
                    Over::Lost(why) => why,
                },
            };
            if lost != said {
                log(format_args!("{lost}; waiting for {}", self.socket.display()));
                said = lost;
            }
            if wait(stop, None) {
                return Ok(());
            }
        }
    }

    fn converse(&self, injector: &mut Injector, stop: &UnixStream) -> Result<Over> {
        let lost = |why: String| Ok(Over::Lost(why));
        let mut trunk = match UnixStream::connect(&self.socket) {
            Ok(trunk) => trunk,
            Err(error) => return lost(format!("no runtime answers: {error}")),
        };
        trunk.set_write_timeout(Some(SEND)).context("cannot limit the time of a write")?;
        let mut session = Session::new(&self.index);
        let mut buffer = vec![0; 64 << 10];
        // Held for as long as it is registered.
        let mut held = None;
        loop {
            if let Err(error) = trunk.write_all(&session.take()) {
                return lost(format!("the runtime does not read: {error}"));
            }
            if let (State::Ready(runtime), None) = (session.state(), &held) {
                held = lock(&self.devices)?;
                if held.is_none() {
                    return lost("another plugin of uSMC was faster".to_owned());
                }
                log(format_args!("registered with {runtime}"));
            }
            if wait(stop, Some(&trunk)) {
                return Ok(Over::Stopped);
            }
            let got = match trunk.read(&mut buffer) {
                Ok(0) => return lost("the runtime has closed the connection".to_owned()),
                Ok(got) => got,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return lost(format!("cannot read from the runtime: {error}")),
            };
            if let Err(ended) = session.receive(&buffer[..got], injector) {
                let _ = trunk.write_all(&session.take());
                return lost(ended.to_string());
            }
        }
    }
}

/// Makes the directories of the namespaces in the list, and of those that come to it, until something can be read from `stop`: for
/// nodes whose runtime has no NRI, where pods name all the rest themselves.
pub fn only_directories(injector: &mut Injector, stop: &UnixStream) {
    loop {
        injector.make_directories();
        if wait(stop, None) {
            return;
        }
    }
}

/// Waits for bytes from the runtime, or for [`AGAIN`]; `true`: it is to stop.
fn wait(stop: &UnixStream, trunk: Option<&UnixStream>) -> bool {
    let mut set = vec![PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN)];
    set.extend(trunk.map(|trunk| PollFd::from_borrowed_fd(trunk.as_fd(), PollFlags::IN)));
    let timeout = if trunk.is_some() { None } else { Some(&AGAIN) };
    loop {
        match poll(&mut set, timeout) {
            Err(Errno::INTR) => {}
            Err(_) => return true,
            Ok(_) => return !set[0].revents().is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_is_registered_for_as_long_as_it_holds_the_lock() {
        let dir = std::env::temp_dir().join(format!("usmc-nri-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        assert!(!is_registered(&dir));
        let held = lock(&dir).unwrap().expect("the first one");
        assert!(is_registered(&dir) && lock(&dir).unwrap().is_none());
        drop(held);
        assert!(!is_registered(&dir) && lock(&dir).unwrap().is_some());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
