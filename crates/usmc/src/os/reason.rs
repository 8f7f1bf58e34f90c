//! Why a connection is plain TCP: one list, one text each, shown by `usmc ss` and `usmc check`.

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        /// Why a socket's bytes move over TCP (rule 3: the reason can be read).
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u8)]
        pub enum Reason { $($(#[$doc])* $name = $code,)* }

        impl Reason {
            /// The reason with this code, if there is one.
            pub const fn from_code(code: u8) -> Option<Reason> {
                match code { $($code => Some(Reason::$name),)* _ => None }
            }
            /// A short phrase for people.
            pub const fn text(self) -> &'static str {
                match self { $(Reason::$name => $text,)* }
            }
        }
    };
}

reasons! {
    /// Not on TCP, or not decided yet.
    None = 0, "";
    /// The destination is not a listener of this ISM device.
    NotRegistered = 1, "peer is not under uSMC on this device";
    /// The handshake is under way: offered, or the offer found, and not confirmed so far.
    Pending = 2, "handshake pending";
    /// The acceptor found no offer for this connection.
    NoOffer = 3, "client made no offer";
    /// The ISM directory cannot be used.
    NoDevice = 4, "ISM directory unusable";
    /// Excluded by configuration.
    Excluded = 5, "excluded by configuration";
    /// No slot or memory left.
    NoMemory = 6, "no slot or memory left";
    /// A region has no free units ([`crate::device::region`]).
    RegionFull = 36, "region full";
    /// A region's listener is on no network of this host, and the configuration names none that it is on (`region_nets`).
    NotOnLink = 43, "listener of a region behind a gateway";
    /// Loads of a region's memory do not come from a cache ([`crate::device::region::provider`]).
    Uncached = 37, "region's memory is not cached";
    /// A region is a PCI device's, which a kernel that is locked down does not let be mapped.
    Lockdown = 38, "kernel lockdown forbids the region's device";
    /// What a region should be in is something else's, or empty.
    RegionForeign = 39, "file or device has no region in it";
    /// A region that another version of uSMC has made.
    RegionVersion = 40, "region is of another version of uSMC";
    /// A region's file or device is not there, or not for this user.
    RegionClosed = 41, "region cannot be opened";
    /// A device-dax node whose pages cannot be mapped in parts ([`crate::device::region::provider`]).
    RegionPages = 42, "region is device-dax with pages larger than 4K";
    /// One of both ends is about to lose the region (`usmc region drain`).
    RegionDrained = 44, "region is being drained";
    /// The directory's connections are to stay TCP (`usmc off`).
    SwitchedOff = 45, "switched off by usmc off";
    /// The offer table is full.
    OffersFull = 7, "offer table full";
    /// The segment could not be handed over or mapped.
    NoSegment = 8, "segment could not be shared with the peer";
    /// More sockets than the library's tables hold.
    TableFull = 9, "connection table full";
    /// TCP Fast Open, TCP_ULP, zero-copy or similar: the kernel has to see the bytes.
    KernelFeature = 10, "uses a kernel TCP feature";
    /// The peer died or withdrew during the handshake.
    PeerGone = 11, "peer withdrew during the handshake";
    /// Shared state held values no correct peer writes.
    PeerBroken = 12, "peer wrote nonsense into shared memory";
    /// The socket arrived by exec or SCM_RIGHTS.
    Adopted = 13, "socket came from another process";
    /// Wrapped in a stdio stream.
    Stdio = 14, "used through stdio";
    /// The connection already used the kernel's byte stream in a way whose end cannot be located.
    NoBoundary = 15, "boundary of the TCP span unknown";
    /// shutdown(2) came before the change-over.
    ShutDown = 16, "shut down before the change-over";
    /// Passed on to another process or program, which may be without the library.
    PassedOn = 18, "passed on to another process";
    /// Urgent data (MSG_OOB).
    Urgent = 19, "urgent data was sent";
    /// The peer's end went back to TCP ([`crate::stream::fallback`]).
    PeerLeft = 20, "peer went back to TCP";
    /// A program that this one has started has it, too ([`crate::across::spawn`]).
    Lent = 24, "a program that was started has it, too";
    /// A send would have slept because of what the program itself has not read ([`crate::stream::room`]).
    Unread = 33, "both ends sent more than rings hold before they read";
    /// SO_RCVLOWAT is more than that ([`crate::stream::room`]).
    TooMuch = 34, "waits for more bytes than a ring holds";
    /// The process has an io_uring that cannot be looked into ([`crate::os::kernel_only`]).
    Uring = 21, "process has an io_uring that cannot be looked into";
    /// An entry of an io_uring is about it ([`crate::uring`]).
    ByUring = 35, "used through an io_uring";
    /// The process has a seccomp filter ([`crate::os::kernel_only`]).
    Sandboxed = 22, "process has installed a seccomp filter";
    /// Threads of the process have tables of descriptors of their own ([`crate::os::kernel_only`]).
    OwnFiles = 32, "threads of the process do not share their descriptors";
    /// A signal handler used the connection in the middle of a step of its handshake.
    Interrupted = 23, "signal handler interrupted the change-over";
    /// Neither on this device nor, by its SYN or SYN-ACK, a speaker of SMC ([`crate::handshake::syn_option`]).
    PeerSilent = 28, "peer says no SMC in its SYN";
    /// The option came back as it was sent.
    OptionEchoed = 29, "TCP option was echoed on the way";
    /// It says that it speaks SMC, but not over this device.
    NoCommonDevice = 30, "peer speaks SMC, but shares no device";
    /// The destination is a listener of another network namespace or user, and no process of the device has said that
    /// it holds the connection ([`crate::handshake::clc`]).
    NotHeld = 25, "no process of this device holds the other end (NAT, or it does not look)";
    /// CLC messages are being exchanged.
    Handshake = 26, "CLC handshake not finished yet";
    /// One of both ends has declined.
    Declined = 27, "CLC handshake was declined";
    /// The process forked in the middle of a handshake by CLC.
    Forked = 31, "forked in the middle of the handshake";
    /// Others to that server, which is on another host, were over after a few calls ([`crate::handshake::brief`]).
    Brief = 46, "connections to this server were brief lately";
    /// Few calls were made on it so far ([`crate::record::change_over`]).
    Short = 17, "too little use so far to change over";
}
