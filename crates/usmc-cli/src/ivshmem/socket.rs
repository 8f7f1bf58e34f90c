//! Sockets: where they are made, whose they are, and how a descriptor goes through them.

use std::fs::{self, File};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, flock};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect,
    listen, recvmsg, sendmsg, socket_with,
};
use rustix::process::{PidfdFlags, pidfd_open, umask};

/// Where a socket is made, and for whom.
#[derive(Debug)]
pub struct Place<'a> {
    /// Its file.
    pub path: &'a Path,
    /// The file's mode.
    pub mode: u32,
    /// The file's group; its maker's where it is `None`.
    pub group: Option<u32>,
}

/// A socket's file, which is removed with this.
#[derive(Debug)]
pub struct Named {
    path: PathBuf,
    inode: (u64, u64),
}

impl Drop for Named {
    fn drop(&mut self) {
        // Another server may have its own there by now.
        if inode(&self.path).is_ok_and(|now| now == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|facts| (facts.dev(), facts.ino()))
}

impl Place<'_> {
    /// Makes a socket that listens there. The file of a dead server is replaced, a living one's is not.
    ///
    /// # Errors
    /// What is in the way.
    pub fn listen(&self) -> Result<(UnixListener, Named)> {
        let what = || self.path.display().to_string();
        let address = SocketAddrUnix::new(self.path);
        let address = address.with_context(|| format!("{}: too long for a socket", what()))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let dir = match self.path.parent() {
            Some(dir) if dir != Path::new("") => dir,
            _ => Path::new("."),
        };
        // Two servers that start do not take each other's new file for a dead one's.
        let alone = File::open(dir).with_context(|| format!("{}: make it first", dir.display()))?;
        flock(&alone, FlockOperation::LockExclusive).with_context(what)?;
        remove_dead(self.path, &address)?;
        // Nobody gets in before the mode and the group are right.
        let mask = umask(Mode::from_raw_mode(0o777));
        let bound = bind(&socket, &address);
        umask(mask);
        bound.with_context(|| format!("cannot make {}", what()))?;
        let named = Named { path: self.path.to_owned(), inode: inode(self.path)? };
        if let Some(group) = self.group {
            chown(self.path, None, Some(group))
                .with_context(|| format!("{}: cannot give it to the group", what()))?;
        }
        fs::set_permissions(self.path, fs::Permissions::from_mode(self.mode)).with_context(what)?;
        listen(&socket, 128).with_context(what)?;
        Ok((socket.into(), named))
    }
}

/// Removes a socket's file that no server has any more.
fn remove_dead(path: &Path, address: &SocketAddrUnix) -> Result<()> {
    let what = path.display();
    // A server is not to be disturbed by a connection: to another kind of socket there is none.
    let probe = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    match connect(&probe, address) {
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::CONNREFUSED) => {
            let is_socket = fs::symlink_metadata(path)
                .is_ok_and(|facts| rustix::fs::FileType::from_raw_mode(facts.mode()).is_socket());
            if !is_socket {
                bail!("{what} is no socket: remove it, or name another path");
            }
            fs::remove_file(path).with_context(|| format!("cannot remove {what}, a dead server's"))
        }
        Ok(()) | Err(Errno::PROTOTYPE | Errno::AGAIN) => {
            bail!("{what} has a server already: end that, or name another path")
        }
        Err(error) => Err(error).with_context(|| what.to_string()),
    }
}

/// The number of a group, given by name or number.
///
/// # Errors
/// There is no such group.
pub fn group(name: &str) -> Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let all = fs::read_to_string("/etc/group").context("/etc/group")?;
    let number = all.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    });
    number.ok_or_else(|| anyhow!("there is no group {name} in /etc/group; its number does, too"))
}

/// Sends bytes, and a descriptor with them, without waiting.
///
/// # Errors
/// What sendmsg(2) says; EMSGSIZE where a part of the bytes was sent.
pub fn send(socket: impl AsFd, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_slice();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    if sent == bytes.len() { Ok(()) } else { Err(Errno::MSGSIZE) }
}

/// Waits for a byte, and for the descriptor that comes with it.
///
/// # Errors
/// The other end sends none.
pub fn receive(socket: impl AsFd) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL,
    )?;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    fd.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "no descriptor came"))
}

/// Whether nobody has the other end any more.
pub fn is_hung_up(socket: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&socket, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

/// The process that has made the other end, as it was then: its number, and its user's.
pub fn maker(socket: impl AsFd) -> Option<(i32, u32)> {
    let credentials = socket_peercred(socket).ok()?;
    // 0 = it is in a namespace of processes that this one does not see.
    let pid = credentials.pid.as_raw_nonzero().get();
    (pid > 0).then(|| (pid, credentials.uid.as_raw()))
}

/// A descriptor of the process that has made the other end, by which its end is seen.
pub fn process(socket: &UnixStream) -> Option<OwnedFd> {
    let mut fd = -1i32;
    let mut len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, which `fd` has.
    #[expect(unsafe_code, reason = "rustix has no SO_PEERPIDFD")]
    let outcome = unsafe {
        let number = socket.as_raw_fd();
        let to = (&raw mut fd).cast();
        libc::getsockopt(number, libc::SOL_SOCKET, libc::SO_PEERPIDFD, to, &raw mut len)
    };
    if outcome == 0 && fd >= 0 {
        // SAFETY: the kernel has made it for this call.
        #[expect(unsafe_code, reason = "a new descriptor")]
        return Some(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    // Linux before 6.5. The number has been another process' only if the maker has ended since.
    let pid = rustix::process::Pid::from_raw(maker(socket)?.0)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_names_and_numbers() {
        assert_eq!((group("root").unwrap(), group("65533").unwrap()), (0, 65533));
        assert!(group("no such group").is_err());
    }

    #[test]
    fn a_descriptor_goes_through_and_a_hangup_is_seen() {
        let (one, other) = UnixStream::pair().unwrap();
        send(&one, b"x", Some(one.as_fd())).unwrap();
        assert!(receive(&other).is_ok());
        send(&one, b"x", None).unwrap();
        assert!(receive(&other).is_err());
        assert_eq!(maker(&one).map(|maker| maker.0), Some(std::process::id() as i32));
        assert!(process(&one).is_some());
        one.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(!is_hung_up(&other), "it may have the memory still");
        drop(one);
        assert!(is_hung_up(&other));
    }

    #[test]
    fn only_a_dead_servers_file_is_replaced() {
        let dir = std::env::temp_dir().join(format!("usmc-socket-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let path = dir.join("socket");
        let place = Place { path: &path, mode: 0o640, group: None };
        let (living, named) = place.listen().expect("a socket");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        let refused = place.listen().expect_err("a living server").to_string();
        assert!(refused.contains("has a server already"), "{refused}");
        assert!(living.accept().is_err(), "it was not disturbed");
        drop(living);
        std::mem::forget(named);
        let (_living, named) = place.listen().expect("in a dead one's place");
        drop(named);
        assert!(!path.exists());
        fs::write(&path, "").unwrap();
        let refused = place.listen().expect_err("somebody's file").to_string();
        assert!(refused.contains("is no socket"), "{refused}");
        fs::remove_dir_all(&dir).unwrap();
    }
}
