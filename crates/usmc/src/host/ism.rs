//! The loopback ISM device: a directory. The processes that can open it share the device.
//!
//! - `v5.device`: one mapped file with the tables of [`layout`], 5 being their version;
//! - `v5.m.<index>`: the mailbox of process `<index>`, a UNIX datagram socket that receives segments.
//!
//! A process is alive while it holds the byte lock of its index on the device file; the kernel lets go of it
//! when the process ends, however it ends. Everything else here is disposable and swept by the next
//! process that takes an index.

use core::ptr;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64};

use super::board::{Board, Owners};
use super::layout::DeviceFile;
use super::{OfferId, PeerProcess};
use super::{directory, ears, mailbox, own_word, peer_words, processes};
use crate::os::process::Lock;
use crate::os::reason::Reason;
use crate::os::sys::Errno;

/// The device of this process.
pub static ISM: Ism = Ism {
    lock: Lock::new(),
    file: AtomicPtr::new(ptr::null_mut()),
    fd: AtomicI32::new(-1),
    index: AtomicU32::new(NO_INDEX),
    mailbox: AtomicI32::new(-1),
    mail_seen: AtomicU32::new(0),
    failed: AtomicU32::new(0),
    switch_seen: AtomicU64::new(0),
};

pub(super) const NO_INDEX: u32 = u32::MAX;

/// This process' side of the directory; opened on first use.
pub struct Ism {
    pub(super) lock: Lock,
    pub(super) file: AtomicPtr<DeviceFile>,
    pub(super) fd: AtomicI32,
    pub(super) index: AtomicU32,
    pub(super) mailbox: AtomicI32,
    pub(super) mail_seen: AtomicU32,
    pub(super) failed: AtomicU32,
    /// The switch that this process has acted upon.
    switch_seen: AtomicU64,
}

/// The number of the device whose memory the directory's mailboxes hand over.
pub const DEVICE: u8 = 0;

impl Owners for Ism {
    fn own(&self) -> Result<u32, Reason> {
        processes::index(self)
    }

    fn lives(&self, owner: u32) -> bool {
        processes::is_taken(self, owner)
    }
}

impl Ism {
    /// The mapped tables, once they are.
    pub(super) fn opened(&self) -> Option<&'static DeviceFile> {
        // SAFETY: set once to a mapping that is never removed; all fields are atomics.
        unsafe { self.file.load(Acquire).as_ref() }
    }

    /// The same; opens the directory the first time, and never tries again after a failure.
    pub(super) fn file(&self) -> Result<&'static DeviceFile, Reason> {
        if let Some(file) = self.opened() {
            return Ok(file);
        }
        if self.failed.load(Relaxed) != 0 {
            return Err(Reason::NoDevice);
        }
        let _held = self.lock.enter().ok_or(Reason::NoDevice)?;
        if self.file.load(Acquire).is_null() {
            match directory::open() {
                Ok((fd, file)) => {
                    self.fd.store(crate::os::table::keep_fd(fd), Relaxed);
                    self.file.store(file, Release);
                }
                Err((step, errno)) => {
                    self.failed.store(1, Relaxed);
                    crate::os::log::warn(format_args!(
                        "ISM directory {}: {step} failed (errno {errno}); all connections stay TCP; \
                         `usmc check` says what to do",
                        directory::path().text()
                    ));
                    return Err(Reason::NoDevice);
                }
            }
        }
        self.opened().ok_or(Reason::NoDevice)
    }

    /// Hands the segment's memory to the process that asked.
    ///
    /// # Errors
    /// The errno of the hand-over; EAGAIN means try again later.
    pub fn push_segment(&self, id: OfferId, to: PeerProcess, fd: i32) -> Result<(), Errno> {
        mailbox::push(self, to, fd)?;
        self.board().mark_pushed(id);
        Ok(())
    }

    /// Asks the offerer for a segment this process does not know, though it has looked into its mailbox since it found the
    /// offer. Whether it was handed over before.
    ///
    /// # Errors
    /// The reason why it cannot be received.
    pub fn want_segment(&self, id: OfferId) -> Result<bool, Reason> {
        let PeerProcess(me) = self.open_mailbox()?;
        Ok(self.board().want(id, me))
    }

    /// The directory's board; an empty one where the directory cannot be used.
    pub fn board(&self) -> Board<'_> {
        match self.file() {
            Ok(file) => Board {
                device: DEVICE,
                listeners: &file.listeners,
                offers: &file.offers,
                owners: self,
            },
            Err(_) => Board::none(DEVICE),
        }
    }

    /// The directory's switch ([`super::layout::Header::switch`]): odd where connections are to stay TCP. 0 where the directory is not open.
    #[inline(always)]
    pub fn switch(&self) -> u64 {
        self.opened().map_or(0, |file| file.header.switch.load(Relaxed))
    }

    /// Whether connections are to stay TCP, and those in a ring to come back (`usmc off`).
    #[inline]
    pub fn is_off(&self) -> bool {
        !self.switch().is_multiple_of(2)
    }

    /// The switch, where this process has not acted upon it as it is now.
    #[inline(always)]
    pub fn new_switch(&self) -> Option<u64> {
        let switch = self.switch();
        (switch != self.switch_seen.load(Relaxed)).then_some(switch)
    }

    /// No connection of this process has to leave its ring any more because of this value of the switch.
    pub fn acted_upon_switch(&self, switch: u64) {
        self.switch_seen.store(switch, Relaxed);
    }

    /// A connection has come into a ring, perhaps while others were leaving theirs.
    pub fn look_at_switch_again(&self) {
        if self.is_off() {
            self.switch_seen.store(0, Relaxed);
        }
    }

    /// The device's GID; equal for all processes that share it.
    pub fn gid(&self) -> Option<[u64; 2]> {
        let gid = &self.file().ok()?.header.gid;
        Some([gid[0].load(Relaxed), gid[1].load(Relaxed)])
    }

    /// Makes sure that this process can be sent memory.
    ///
    /// # Errors
    /// The reason why it cannot.
    pub fn open_mailbox(&self) -> Result<PeerProcess, Reason> {
        let me = processes::index(self)?;
        mailbox::ensure(self, me)?;
        Ok(PeerProcess(me))
    }

    /// In a forked child: nothing of the parent's identity is ours. `listening`: the child inherits
    /// listeners and may be about to drop the rights it needs to open the device.
    pub fn after_fork(&self, listening: bool) {
        own_word::after_fork();
        peer_words::after_fork();
        ears::after_fork();
        self.lock.reset();
        self.index.store(NO_INDEX, Relaxed);
        let mailbox = self.mailbox.swap(-1, Relaxed);
        if mailbox >= 0 {
            crate::os::table::release_fd(mailbox);
        }
        if listening
            && crate::os::sys::geteuid() == 0
            && let Ok(me) = processes::index(self)
        {
            // Prefork servers drop their rights next; the mailbox has to exist before.
            let _ = mailbox::ensure(self, me);
        }
    }
}

/// The directory that new connections use.
pub fn current() -> &'static Ism {
    &ISM
}
