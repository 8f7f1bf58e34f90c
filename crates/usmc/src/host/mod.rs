//! The device, a seam: where listeners are known, offers are left and DMBs change hands.
//!
//! Control plane only. The data path never comes here: once a DMB is mapped, both ends work in the ring.
//! A new device is one module that implements [`Device`]; nothing above it changes.

pub mod loopback;

use usmc_shm::sync::AtomicU32;

use crate::os::reason::Reason;
use crate::os::sys::Errno;
use crate::record::tuple::{Endpoint, Tuple};

/// A memory buffer both ends map: segment identity and the slot within it (SMC-D: DMB token).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DmbRef {
    /// The segment's random identity.
    pub segment: u64,
    /// Slot within it.
    pub slot: u32,
    /// Which use of the slot (`usmc_shm::handshake::Use`).
    pub usage: u32,
}

/// A place in the device's offer table, with the use count that tells later uses apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OfferId {
    /// Index.
    pub index: u32,
    /// Use count.
    pub use_count: u32,
}

/// A process on this device, as the device numbers them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerProcess(pub u32);

/// A segment for one connection, proven by what only its two ends know.
#[derive(Clone, Copy, Debug)]
pub struct Delivery {
    /// The memory.
    pub fd: i32,
    /// What of it.
    pub dmb: DmbRef,
    /// The receiver's token for its end of the connection.
    pub to: u64,
    /// The sender's.
    pub from: u64,
    /// Whether the other end is of our own user.
    pub is_kin: bool,
}

/// What comes by the mailbox. Its fd is the receiver's.
#[derive(Clone, Copy, Debug)]
pub enum Mail {
    /// A segment of our own user.
    Segment(i32),
    /// One for a connection of ours.
    Delivery(Delivery),
}

/// How far a handshake by CLC is, on the device ([`crate::handshake::clc`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// The client asks who holds the other end.
    Open,
    /// Somebody does: a Proposal may be sent.
    Held,
    /// It may be in the stream.
    Proposed,
    /// The answer may be in the stream.
    Answered,
    /// The client's word on it may be in the stream.
    Confirmed,
    /// As [`Stage::Proposed`] or [`Stage::Answered`], but its sender does not go on: who reads the message frees
    /// the place.
    Abandoned,
    /// No message is in the stream, and none will be.
    Over,
}

/// A message of such a handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// The client's Proposal.
    Proposal = 0,
    /// Accept or Decline.
    Answer = 1,
    /// Confirm or Decline.
    Confirm = 2,
}

/// What an acceptor finds for its connection.
#[derive(Clone, Copy, Debug)]
pub struct FoundOffer {
    /// Where.
    pub id: OfferId,
    /// What is offered.
    pub dmb: DmbRef,
}

/// The device's number for a connection that was passed on ([`crate::family::custody`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Custody(pub u32);

/// Who is meant to receive a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Receiver {
    /// The next program of the process with this pid.
    Program(u32),
    /// Whoever receives from the UNIX socket with this inode number.
    Channel(u64),
    /// A program that the process with this pid starts by posix_spawn(3) or the like.
    Child(u32),
    /// Nobody was told.
    Unknown,
}

impl Receiver {
    /// The program that this process becomes by exec, or has become.
    pub fn this_program() -> Receiver {
        Receiver::Program(crate::os::process::pid())
    }

    /// What this program may be to who started it. [`Receiver::Child`] comes first: its maker turns it into the other
    /// once the pid is known.
    pub fn started() -> [Receiver; 2] {
        [Receiver::Child(crate::os::sys::getppid()), Receiver::this_program()]
    }
}

/// Who tells the death of a process: where the word is that its kernel marks then ([`crate::family::life`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Voucher {
    /// Random; greater than [`usmc_shm::layout::VOUCHER_CLAIMED`].
    pub identity: u32,
    /// The process.
    pub pid: u32,
    /// The number of a descriptor there.
    pub fd: u32,
}

/// A device's control operations. None of them waits for a peer.
pub trait Device: Sync {
    /// Makes a listening address known.
    ///
    /// # Errors
    /// The reason why connections to it stay TCP.
    fn register_listener(&self, netns: u64, at: Endpoint) -> Result<u32, Reason>;
    /// The same for a forked child, which has inherited the listener and may be the one that accepts: its parent may end
    /// before anybody has. `None` where this process has registered the address already, or enough others have, or it
    /// cannot be registered.
    fn register_inherited(&self, netns: u64, at: Endpoint) -> Option<u32>;
    /// Forgets a listening address registered by this process.
    fn unregister_listener(&self, token: u32);
    /// Whether anybody on this device listens there (maybe already dead: harmless): of this user in this network
    /// namespace or, with `None`, of any user in any.
    fn is_listening(&self, netns: Option<u64>, at: Endpoint) -> bool;
    /// Whether a listener is registered there, and by somebody who has not closed it.
    fn is_registered(&self, netns: u64, at: Endpoint) -> bool;

    /// Leaves an offer for the acceptor of `tuple`.
    ///
    /// # Errors
    /// The reason why the connection stays TCP.
    fn offer(&self, tuple: &Tuple, dmb: DmbRef) -> Result<OfferId, Reason>;
    /// Takes an offer back or clears an answered one.
    fn clear_offer(&self, id: OfferId);
    /// Who asked for the offered segment, if anybody did and nobody pushed it yet.
    fn wanted_by(&self, id: OfferId) -> Option<PeerProcess>;
    /// Hands the segment's memory to the process that asked.
    ///
    /// # Errors
    /// The errno of the hand-over; EAGAIN means try again later.
    fn push_segment(&self, id: OfferId, to: PeerProcess, fd: i32) -> Result<(), Errno>;

    /// The offer left for this connection.
    fn find_offer(&self, tuple: &[u64; 6]) -> Option<FoundOffer>;
    /// Asks the offerer for a segment this process does not know, though it has looked into its mailbox since it found the
    /// offer. Whether it was handed over before.
    ///
    /// # Errors
    /// The reason why it cannot be received.
    fn want_segment(&self, id: OfferId) -> Result<bool, Reason>;
    /// What was sent to this process next.
    fn receive(&self) -> Option<Mail>;

    /// The device's GID; equal for all who share it.
    fn gid(&self) -> Option<[u64; 2]>;
    /// Makes sure that this process can be sent memory.
    ///
    /// # Errors
    /// The reason why it cannot.
    fn open_mailbox(&self) -> Result<PeerProcess, Reason>;
    /// Asks who holds the accepting end of this connection, whatever the network namespace.
    ///
    /// # Errors
    /// The reason why the connection stays TCP.
    fn ask_for_holder(&self, tuple: &Tuple) -> Result<OfferId, Reason>;
    /// Notes that a Proposal is about to be sent that nobody was asked about, as the first bytes of a stream.
    ///
    /// # Errors
    /// The reason why the connection stays TCP.
    fn propose_unasked(&self, tuple: &Tuple) -> Result<OfferId, Reason>;
    /// Whether this connection's client asks. The caller holds the accepting end.
    fn find_question(&self, tuple: &Tuple) -> Option<OfferId>;
    /// How far the handshake is.
    fn stage(&self, id: OfferId) -> Stage;
    /// Goes on with it; false where the other side was faster with another step.
    fn step(&self, id: OfferId, from: Stage, to: Stage) -> bool;
    /// Nobody will need it any more.
    fn free(&self, id: OfferId);
    /// Says how many bytes of its direction are before a message that the next step lets into the stream.
    fn announce(&self, id: OfferId, message: Message, at: u64);
    /// The same, read.
    fn announced(&self, id: OfferId, message: Message) -> Option<u64>;
    /// Hands memory over.
    ///
    /// # Errors
    /// The errno; EAGAIN means try again later.
    fn deliver(&self, to: PeerProcess, mailbox: u64, what: &Delivery) -> Result<(), Errno>;
    /// Which mailbox a process has at this moment: another one's is another number.
    fn mailbox_of(&self, process: PeerProcess) -> Option<u64>;
    /// Whether a process is of our own user, as its mailbox says.
    fn is_kin(&self, process: PeerProcess) -> bool;

    /// Begins to count who holds the socket with this SO_COOKIE: one, and if that is the process with pid `alone`, without
    /// others of its family, its death counts it out. `client`: it is the connecting end.
    fn entrust(&self, cookie: u64, client: bool, alone: Option<u32>) -> Option<Custody>;
    /// Whether this is the custody of that socket.
    fn is_about(&self, custody: Custody, cookie: u64) -> bool;
    /// One holder more, who will [`Device::claim`] it; false where that cannot be.
    fn hand_over(&self, custody: Custody, to: Receiver) -> bool;
    /// That one is expected no more, though still counted; false where he has claimed it.
    fn call_off(&self, custody: Custody, from: Receiver) -> bool;
    /// Likewise, of another holder.
    fn name_holder(&self, custody: Custody, pid: u32);
    /// No holder is this process alone any more.
    fn take_name_back(&self, custody: Custody);
    /// Who was expected by one name is expected by another, if he has not come yet.
    fn rename(&self, custody: Custody, from: Receiver, to: Receiver);
    /// A socket has come: whose custody it is in, and whether it is the connecting end. `None` where nobody was told
    /// of a receiver of these names, looked for one after the other; then nobody counts as the only holder any more.
    fn claim(&self, cookie: u64, by: &[Receiver]) -> Option<(Custody, bool)>;
    /// Whether there is one holder.
    fn is_sole(&self, custody: Custody) -> bool;
    /// One holder less.
    fn release(&self, custody: Custody);

    /// This process' identity on the device for segment headers: index and incarnation.
    ///
    /// # Errors
    /// The reason why there is none.
    fn own_identity(&self) -> Result<u64, Reason>;
    /// Whether the process of such an identity still lives.
    fn is_identity_alive(&self, identity: u64) -> bool;

    /// Who tells the death of this process; `None` where nobody can.
    fn voucher(&self) -> Option<Voucher>;
    /// Before a thread of this process sleeps: another one, by whose end the word was marked, may have had it.
    fn keep_alive(&self);
    /// The word of a peer, for as long as one of its users is left.
    ///
    /// # Errors
    /// The errno; EAGAIN means try again later.
    fn life_of(&self, voucher: Voucher) -> Result<&'static AtomicU32, Errno>;
    /// One user of it less.
    fn let_go_of_life(&self, word: *const AtomicU32);

    /// In a forked child: nothing of the parent's identity is ours. `listening`: the child inherits
    /// listeners and may be about to drop the rights it needs to open the device.
    fn after_fork(&self, listening: bool);
    /// The process ends in an orderly way.
    fn leave(&self);
}

/// Whether the owner of a word of [`Device::life_of`] lives.
#[inline(always)]
pub fn is_alive(word: u32) -> bool {
    loopback::is_alive(word)
}

/// The device new connections use.
pub fn current() -> &'static dyn Device {
    &loopback::LOOPBACK
}

/// Says now and then that this process lives, for as long as it makes calls.
pub fn keep_alive() {
    current().keep_alive();
}
