//! What systemd gives to a service and keeps for it: sockets that it has made (sd_listen_fds(3)), descriptors that the service
//! has stored (sd_pid_notify_with_fds(3)), and word of how the service is.

use std::env;
use std::ffi::OsString;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sendmsg_addr, socket_with,
};

use super::log;

/// The first descriptor that a service is given.
const FIRST: i32 = 3;

/// What this process was given, each with its name. To be called once, before it opens anything.
pub fn given() -> Vec<(String, OwnedFd)> {
    let variable = |name| env::var(name).ok();
    let number = |name| variable(name)?.parse::<i32>().ok();
    let is_mine = number("LISTEN_PID") == Some(std::process::id() as i32);
    let count = number("LISTEN_FDS").filter(|count| is_mine && (1..1 << 20).contains(count));
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let all = FIRST..FIRST + count.unwrap_or(0);
    let given = all.filter_map(|fd| {
        let name = names.next().unwrap_or_default().to_owned();
        // SAFETY: only the number is used, and EBADF is an answer.
        #[expect(unsafe_code, reason = "a number of another program's")]
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        fcntl_setfd(borrowed, FdFlags::CLOEXEC).ok()?;
        // SAFETY: it is open, and was given to this process, in which nobody else knows it.
        #[expect(unsafe_code, reason = "a number of another program's")]
        Some((name, unsafe { OwnedFd::from_raw_fd(fd) }))
    });
    given.collect()
}

/// The one that starts services.
pub struct Manager {
    socket: OwnedFd,
    address: SocketAddrUnix,
}

impl Manager {
    /// The one that has started this process, if it wants word.
    pub fn of_this_process() -> Option<Manager> {
        let name: OsString = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty())?;
        let address = match name.as_bytes() {
            [b'@', rest @ ..] => SocketAddrUnix::new_abstract_name(rest),
            path => SocketAddrUnix::new(path),
        };
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
        match (socket, address) {
            (Ok(socket), Ok(address)) => Some(Manager { socket, address }),
            _ => None,
        }
    }

    fn send(&self, text: &str, fd: Option<BorrowedFd<'_>>) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = fd.as_slice();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let text = [IoSlice::new(text.as_bytes())];
        let sent = loop {
            let flags = SendFlags::NOSIGNAL;
            match sendmsg_addr(&self.socket, &self.address, &text, &mut control, flags) {
                Err(Errno::INTR) => {}
                other => break other,
            }
        };
        if let Err(error) = sent {
            log(format_args!("systemd does not hear ({error}): a restart would lose clients"));
        }
    }

    /// The service is ready.
    pub fn ready(&self) {
        self.send("READY=1", None);
    }

    /// The service ends.
    pub fn stopping(&self) {
        self.send("STOPPING=1", None);
    }

    /// What people read of the service.
    pub fn status(&self, text: &str) {
        self.send(&format!("STATUS={text}"), None);
    }

    /// Keeps a descriptor for the next process of the service, also when the other end of it is closed.
    pub fn store(&self, name: &str, fd: impl AsFd) {
        self.send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"), Some(fd.as_fd()));
    }

    /// Keeps the descriptors of this name no longer.
    pub fn remove(&self, name: &str) {
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), None);
    }
}
