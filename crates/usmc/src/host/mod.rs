//! The ISM directory: where listeners are known, offers are left and DMBs change hands.
//!
//! Control plane only. The data path never comes here: once a DMB is mapped, both ends work in the ring.

pub mod agreements;
pub mod board;
pub mod directory;
pub mod ears;
pub mod ism;
pub mod layout;
pub mod listeners;
pub mod mailbox;
pub mod offers;
pub mod own_word;
pub mod passed_on;
pub mod peer_words;
pub mod processes;

pub use ism::current;

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

/// A place in the offer table of a device's board, with the use count that tells later uses apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OfferId {
    /// The device's number.
    pub device: u8,
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
    pub is_own_user: bool,
}

/// What comes by the mailbox. Its fd is the receiver's.
#[derive(Clone, Copy, Debug)]
pub enum Mail {
    /// A segment of our own user.
    Segment(i32),
    /// One for a connection of ours.
    Delivery(Delivery),
    /// The ear of a process of our own user ([`ears`]).
    Ear(PeerProcess, i32),
}

/// How far a handshake by CLC is, on the device ([`crate::handshake::clc`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// The client asks for the holder of the other end.
    Open,
    /// Somebody does: a Proposal may be sent.
    Held,
    /// It may be in the stream.
    Proposed,
    /// The answer may be in the stream.
    Answered,
    /// The client's word on it may be in the stream.
    Confirmed,
    /// As [`Stage::Proposed`] or [`Stage::Answered`], but its sender does not go on: the reader of the message frees
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

/// The device's number for a connection that was passed on ([`crate::family::passed_on`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PassedOn(pub u32);

/// The meant receiver of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Receiver {
    /// The next program of the process with this pid.
    Program(u32),
    /// The process that receives from the UNIX socket with this inode number.
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

    /// What this program may be to the process that started it. [`Receiver::Child`] comes first: its maker turns it into the other
    /// once the pid is known.
    pub fn started() -> [Receiver; 2] {
        [Receiver::Child(crate::os::sys::getppid()), Receiver::this_program()]
    }
}

/// What tells the death of a process: where the word is that its kernel marks then ([`crate::family::liveness`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Voucher {
    /// Random; greater than [`usmc_shm::layout::VOUCHER_CLAIMED`].
    pub identity: u32,
    /// The process.
    pub pid: u32,
    /// The number of a descriptor there.
    pub fd: u32,
}
