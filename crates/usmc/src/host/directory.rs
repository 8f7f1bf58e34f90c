//! Finding, creating and checking the ISM directory.

use core::ffi::CStr;
use core::fmt::{self, Write};
use usmc_shm::agent::SOCKET;
use usmc_shm::sync::Ordering::Relaxed;

use super::layout::{DeviceFile, MAGIC, PREFIX, VERSION};
use crate::os::owner;
use crate::os::path::Path;
use crate::os::sys::{self, Errno};

/// The ISM directory: `USMC_ISM_DIR`, or one per user under the shared-memory mount.
pub fn path() -> Path {
    let mut p = Path::new();
    let configured = crate::os::config::get().ism_dir();
    let _ = if configured.is_empty() {
        write!(p, "/dev/shm/usmc-{}", owner::first())
    } else {
        p.write_str(configured)
    };
    p
}

/// Where an agent listens ([`usmc_shm::agent`]).
pub fn agent() -> Path {
    let mut p = path();
    let _ = write!(p, "/{SOCKET}");
    p
}

/// The mailbox of a process.
pub fn mailbox(index: u32) -> Path {
    file(format_args!("m.{index}"))
}

/// A file of ours in the directory.
fn file(name: fmt::Arguments<'_>) -> Path {
    let mut p = path();
    let _ = write!(p, "/{PREFIX}{name}");
    p
}

/// Gives a file that was just made in the directory to the users that may make others there, and to nobody else: a
/// user that can write the device's file can truncate it, too, and so end the processes that have it mapped. The
/// permissions that it is to have, whatever the umask.
fn give_to_group(fd: i32) -> Result<u32, Errno> {
    let dir = facts()?;
    let is_shared = dir.mode & 0o020 != 0
        && (sys::fstat(fd).is_ok_and(|file| file.gid == dir.gid)
            || sys::chgrp(fd, dir.gid).is_ok());
    Ok(if is_shared { 0o660 } else { 0o600 })
}

/// Gives a file that was just made the permissions that `mode` tells, whatever the umask; `None`: it is not to be changed. Does
/// nothing to what others may have put in its place.
fn set_mode(path: &CStr, mode: impl FnOnce(i32, &sys::FileFacts) -> Option<u32>) {
    let Ok(fd) = sys::open(path, libc::O_PATH | libc::O_NOFOLLOW, 0) else { return };
    if let Ok(file) = sys::fstat(fd)
        && file.uid == sys::geteuid()
        && let Some(mode) = mode(fd, &file)
        && file.mode & 0o777 != mode
    {
        // The one way to change the mode of just this file.
        let _ = sys::chmod(link_to(fd).c(), mode);
    }
    sys::close(fd);
}

/// Gives a socket that was just bound its permissions.
pub fn share_socket(path: &CStr) {
    let is_socket = |file: &sys::FileFacts| file.mode & libc::S_IFMT == libc::S_IFSOCK;
    set_mode(path, |fd, file| if is_socket(file) { give_to_group(fd).ok() } else { None });
}

/// Whether a mailbox can be no other than that of the process whose index it bears: nobody may put another there, or
/// whoever may is ourselves. `fd` is the socket file, opened for nothing else.
pub fn is_trustworthy(fd: i32) -> bool {
    let Ok(facts) = sys::fstat(fd) else { return false };
    facts.mode & libc::S_IFMT == libc::S_IFSOCK && (owner::is_own(facts.uid) || keeps_names())
}

/// Whether nobody but the directory's owner can rename or remove what others have made in it.
fn keeps_names() -> bool {
    facts().is_ok_and(|f| f.mode & 0o022 == 0 || f.mode & libc::S_ISVTX != 0)
}

/// The directory's.
fn facts() -> Result<sys::FileFacts, Errno> {
    let fd = sys::open(path().c(), libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW, 0)?;
    let facts = sys::fstat(fd);
    sys::close(fd);
    facts
}

/// Opens a file of the directory for nothing but to name it, so that it is the same one in what follows.
pub fn point_at(file: &Path) -> Result<i32, Errno> {
    sys::open(file.c(), libc::O_PATH | libc::O_NOFOLLOW, 0)
}

/// Such a file's name.
pub fn link_to(fd: i32) -> Path {
    Path::of(format_args!("/proc/self/fd/{fd}"))
}

/// The failed step and its errno.
pub type Failure = (&'static str, Errno);

/// Opens the directory's device file, creating what is missing.
///
/// # Errors
/// The step that failed.
pub fn open() -> Result<(i32, *mut DeviceFile), Failure> {
    check_directory()?;
    let device = file(format_args!("device"));
    let flags = libc::O_RDWR | libc::O_NOFOLLOW;
    let fd = match sys::open(device.c(), flags, 0) {
        Err(libc::ENOENT) => {
            create(&device)?;
            sys::open(device.c(), flags, 0)
        }
        other => other,
    }
    .map_err(|e| ("opening the device file", e))?;
    match map(fd) {
        Ok(mapped) => Ok((fd, mapped)),
        Err(failure) => {
            sys::close(fd);
            Err(failure)
        }
    }
}

/// Permissions of a directory that we make.
const DIRECTORY_MODE: u32 = 0o700;

/// Creates the default directory, and refuses one that strangers could have prepared.
fn check_directory() -> Result<(), Failure> {
    let dir = path();
    match sys::mkdir(dir.c(), DIRECTORY_MODE) {
        // Where it is ours, and the umask has only taken permissions away.
        Ok(()) => set_mode(dir.c(), |_, file| {
            let has_less = file.mode & 0o777 & !DIRECTORY_MODE == 0;
            (file.mode & libc::S_IFMT == libc::S_IFDIR && has_less).then_some(DIRECTORY_MODE)
        }),
        Err(libc::EEXIST) => {}
        Err(e) => return Err(("creating the directory", e)),
    }
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_RDONLY;
    let fd = sys::open(dir.c(), flags, 0).map_err(|e| ("opening the directory", e))?;
    let facts = sys::fstat(fd);
    sys::close(fd);
    let facts = facts.map_err(|e| ("inspecting the directory", e))?;
    let is_ours = facts.uid == owner::first() && owner::is_exact(facts.uid);
    if crate::os::config::get().ism_dir().is_empty() && !is_ours {
        return Err(("the directory belongs to another user: using it", libc::EPERM));
    }
    if facts.mode & 0o002 != 0 {
        return Err(("the directory is writable for everybody: using it", libc::EPERM));
    }
    Ok(())
}

/// Makes a complete device file and then names it, so nobody sees half of one. A process that is killed in between leaves nothing.
fn create(device: &Path) -> Result<(), Failure> {
    let unnamed = sys::open(path().c(), libc::O_RDWR | libc::O_TMPFILE, 0o600);
    if let Ok(fd) = unnamed {
        let made = complete(fd).and_then(|()| name(&link_to(fd), device, libc::AT_SYMLINK_FOLLOW));
        sys::close(fd);
        return made;
    }
    // A file system that has only files with names.
    let temporary = file(format_args!("device.{}.{:x}", sys::getpid(), sys::random() as u32));
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
    let fd = sys::open(temporary.c(), flags, 0o600).map_err(|e| ("creating the device file", e))?;
    let made = complete(fd);
    sys::close(fd);
    let named = made.and_then(|()| name(&temporary, device, 0));
    let _ = sys::unlink(temporary.c());
    named
}

/// Gives a new device file its mode and contents.
fn complete(fd: i32) -> Result<(), Failure> {
    let shared = give_to_group(fd).and_then(|mode| sys::fchmod(fd, mode));
    shared.map_err(|e| ("giving the device file its mode", e))?;
    fill(fd)
}

fn name(file: &Path, device: &Path, flags: i32) -> Result<(), Failure> {
    match sys::link(file.c(), device.c(), flags) {
        Ok(()) | Err(libc::EEXIST) => Ok(()),
        Err(e) => Err(("naming the device file", e)),
    }
}

fn fill(fd: i32) -> Result<(), Failure> {
    // Allocated now: a full file system fails here with ENOSPC and not later with SIGBUS.
    sys::fallocate(fd, size_of::<DeviceFile>() as u64)
        .map_err(|e| ("reserving the device file's space", e))?;
    let len = size_of::<DeviceFile>();
    let mapped = sys::mmap_shared(fd, len).map_err(|e| ("mapping the device file", e))?;
    {
        // SAFETY: a fresh mapping of the file's full size, all atomics, zero is valid.
        let file = unsafe { &*mapped.cast::<DeviceFile>() };
        file.header.gid[0].store(sys::random(), Relaxed);
        file.header.gid[1].store(sys::random(), Relaxed);
        file.header.version.store(VERSION, Relaxed);
        file.header.magic.store(MAGIC, Relaxed);
    }
    // SAFETY: nothing refers to the mapping any more.
    unsafe { sys::munmap(mapped, len) };
    Ok(())
}

fn map(fd: i32) -> Result<*mut DeviceFile, Failure> {
    let facts = sys::fstat(fd).map_err(|e| ("inspecting the device file", e))?;
    let len = size_of::<DeviceFile>();
    if facts.size != len as u64 || facts.mode & libc::S_IFMT != libc::S_IFREG {
        return Err(("the device file is of another version: using it", libc::EPROTO));
    }
    if facts.mode & 0o002 != 0 {
        // To every user that comes that far in the directory.
        return Err(("the device file is writable for everybody: using it", libc::EPERM));
    }
    let mapped = sys::mmap_shared(fd, len).map_err(|e| ("mapping the device file", e))?;
    // SAFETY: mapped with the file's full size; all fields are atomics.
    let header = unsafe { &(*mapped.cast::<DeviceFile>()).header };
    if header.magic.load(Relaxed) != MAGIC || header.version.load(Relaxed) != VERSION {
        // SAFETY: `header` is not used again.
        unsafe { sys::munmap(mapped, len) };
        return Err(("the device file is of another version: using it", libc::EPROTO));
    }
    Ok(mapped.cast())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_stays_whoever_we_become() {
        if !crate::os::config::get().ism_dir().is_empty() {
            return;
        }
        let before = mailbox(7).text().to_owned();
        // By a system call of our own: for this thread alone, which ends. Only root can.
        // SAFETY: three numbers.
        let other = unsafe { libc::syscall(libc::SYS_setresuid, -1, 65534, -1) };
        assert!(other < 0 || sys::geteuid() == 65534);
        assert_eq!(mailbox(7).text(), before);
    }
}
