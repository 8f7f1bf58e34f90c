//! The loopback ISM device: a directory. Who can open it shares the device.
//!
//! - `v5.device`: one mapped file with the tables of [`layout`], 5 being their version;
//! - `v5.m.<index>`: the mailbox of process `<index>`, a UNIX datagram socket that receives segments.
//!
//! A process is alive while it holds the byte lock of its index on the device file; the kernel lets go of it
//! when the process ends, however it ends. Everything else here is disposable and swept by the next
//! process that takes an index.

mod agreements;
mod custody;
mod directory;
pub mod layout;
mod life;
mod listeners;
mod lives;
mod mailbox;
mod offers;
mod processes;

pub use life::is_alive;

use core::ptr;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicI32, AtomicPtr, AtomicU32};

use super::{
    Custody, Delivery, Device, DmbRef, FoundOffer, Mail, Message, OfferId, PeerProcess, Receiver,
    Stage, Voucher,
};
use crate::os::process::Lock;
use crate::os::reason::Reason;
use crate::os::sys::Errno;
use crate::record::tuple::{Endpoint, Tuple};
use layout::DeviceFile;

/// The device of this process.
pub static LOOPBACK: Loopback = Loopback {
    lock: Lock::new(),
    file: AtomicPtr::new(ptr::null_mut()),
    fd: AtomicI32::new(-1),
    index: AtomicU32::new(NO_INDEX),
    mailbox: AtomicI32::new(-1),
    mail_seen: AtomicU32::new(0),
    failed: AtomicU32::new(0),
};

const NO_INDEX: u32 = u32::MAX;

/// This process' side of the directory; opened on first use.
pub struct Loopback {
    lock: Lock,
    file: AtomicPtr<DeviceFile>,
    fd: AtomicI32,
    index: AtomicU32,
    mailbox: AtomicI32,
    mail_seen: AtomicU32,
    failed: AtomicU32,
}

impl Loopback {
    /// The mapped tables, once they are.
    fn opened(&self) -> Option<&'static DeviceFile> {
        // SAFETY: set once to a mapping that is never removed; all fields are atomics.
        unsafe { self.file.load(Acquire).as_ref() }
    }

    /// The same; opens the directory the first time, and never tries again after a failure.
    fn file(&self) -> Result<&'static DeviceFile, Reason> {
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
}

impl Device for Loopback {
    fn register_listener(&self, netns: u64, at: Endpoint) -> Result<u32, Reason> {
        listeners::register(self, netns, at)
    }
    fn register_inherited(&self, netns: u64, at: Endpoint) -> Option<u32> {
        listeners::register_inherited(self, netns, at)
    }
    fn unregister_listener(&self, token: u32) {
        listeners::unregister(self, token);
    }
    fn is_listening(&self, netns: Option<u64>, at: Endpoint) -> bool {
        listeners::is_listening(self, netns, at)
    }
    fn is_registered(&self, netns: u64, at: Endpoint) -> bool {
        listeners::is_registered(self, netns, at)
    }
    fn offer(&self, tuple: &Tuple, dmb: DmbRef) -> Result<OfferId, Reason> {
        offers::offer(self, tuple, dmb)
    }
    fn clear_offer(&self, id: OfferId) {
        offers::clear(self, id);
    }
    fn wanted_by(&self, id: OfferId) -> Option<PeerProcess> {
        offers::wanted_by(self, id)
    }
    fn push_segment(&self, id: OfferId, to: PeerProcess, fd: i32) -> Result<(), Errno> {
        mailbox::push(self, to, fd)?;
        offers::mark_pushed(self, id);
        Ok(())
    }
    fn find_offer(&self, tuple: &[u64; 6]) -> Option<FoundOffer> {
        offers::find(self, tuple)
    }
    fn want_segment(&self, id: OfferId) -> Result<bool, Reason> {
        let PeerProcess(me) = self.open_mailbox()?;
        Ok(offers::want(self, id, me))
    }
    fn receive(&self) -> Option<Mail> {
        mailbox::receive(self)
    }
    fn gid(&self) -> Option<[u64; 2]> {
        let gid = &self.file().ok()?.header.gid;
        Some([gid[0].load(Relaxed), gid[1].load(Relaxed)])
    }
    fn open_mailbox(&self) -> Result<PeerProcess, Reason> {
        let me = processes::index(self)?;
        mailbox::ensure(self, me)?;
        Ok(PeerProcess(me))
    }
    fn ask_for_holder(&self, tuple: &Tuple) -> Result<OfferId, Reason> {
        agreements::ask(self, tuple)
    }
    fn propose_unasked(&self, tuple: &Tuple) -> Result<OfferId, Reason> {
        agreements::propose_unasked(self, tuple)
    }
    fn find_question(&self, tuple: &Tuple) -> Option<OfferId> {
        agreements::find(self, tuple)
    }
    fn stage(&self, id: OfferId) -> Stage {
        agreements::stage(self, id)
    }
    fn step(&self, id: OfferId, from: Stage, to: Stage) -> bool {
        agreements::step(self, id, from, to)
    }
    fn free(&self, id: OfferId) {
        agreements::free(self, id);
    }
    fn announce(&self, id: OfferId, message: Message, at: u64) {
        agreements::announce(self, id, message, at);
    }
    fn announced(&self, id: OfferId, message: Message) -> Option<u64> {
        agreements::announced(self, id, message)
    }
    fn deliver(&self, to: PeerProcess, mailbox: u64, what: &Delivery) -> Result<(), Errno> {
        mailbox::deliver(self, to, mailbox, what)
    }
    fn mailbox_of(&self, process: PeerProcess) -> Option<u64> {
        mailbox::identity(process)
    }

    fn is_kin(&self, process: PeerProcess) -> bool {
        mailbox::is_own(process)
    }
    fn entrust(&self, cookie: u64, client: bool, alone: Option<u32>) -> Option<Custody> {
        custody::entrust(self, cookie, client, alone)
    }
    fn is_about(&self, custody: Custody, cookie: u64) -> bool {
        custody::is_about(self, custody, cookie)
    }
    fn hand_over(&self, custody: Custody, to: Receiver) -> bool {
        custody::hand_over(self, custody, to)
    }
    fn call_off(&self, custody: Custody, from: Receiver) -> bool {
        custody::call_off(self, custody, from)
    }
    fn name_holder(&self, custody: Custody, pid: u32) {
        custody::name_holder(self, custody, pid);
    }
    fn take_name_back(&self, custody: Custody) {
        custody::take_name_back(self, custody);
    }
    fn rename(&self, custody: Custody, from: Receiver, to: Receiver) {
        custody::rename(self, custody, from, to);
    }
    fn claim(&self, cookie: u64, by: &[Receiver]) -> Option<(Custody, bool)> {
        custody::claim(self, cookie, by)
    }
    fn is_sole(&self, custody: Custody) -> bool {
        custody::is_sole(self, custody)
    }
    fn release(&self, custody: Custody) {
        custody::release(self, custody);
    }
    fn own_identity(&self) -> Result<u64, Reason> {
        processes::identity(self)
    }
    fn is_identity_alive(&self, identity: u64) -> bool {
        processes::is_alive(self, identity)
    }
    fn voucher(&self) -> Option<Voucher> {
        life::voucher()
    }
    fn keep_alive(&self) {
        life::keep();
    }
    fn life_of(&self, voucher: Voucher) -> Result<&'static AtomicU32, Errno> {
        lives::find(voucher)
    }
    fn let_go_of_life(&self, word: *const AtomicU32) {
        lives::let_go(word);
    }
    fn after_fork(&self, listening: bool) {
        life::after_fork();
        lives::after_fork();
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
    fn leave(&self) {
        processes::leave(self);
    }
}
