//! The ISM device as somebody uses it who does not keep to its rules: its tables (usmc's `loopback/layout.rs`), or a region's
//! (docs/region.md), written by hand, and mail in other people's mailboxes.

use std::fs::{self, File};
use std::io::IoSlice;
use std::net::{SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use usmc_shm::region::{BOARD_AT, LISTENERS, OFFERS, PEERS_AT};

use crate::fixture::DEVICE_PREFIX;

const PROCESSES_AT: u64 = 4096;
const LISTENERS_AT: u64 = PROCESSES_AT + 4096 * 64;
const OFFERS_AT: u64 = LISTENERS_AT + 4096 * 64;
const WAYS: u64 = 16;
/// In the place of the network namespace, where a handshake by CLC is meant whose server has no loopback address.
const ANY: u64 = u64::MAX;
/// An index that nobody else takes.
const ME: u32 = 4000;
/// A place of a region's peers that nobody else takes, and its state: alive.
const PEER: u32 = 200;
const ALIVE: u64 = 1 << 32 | 2;

/// Where a board is, how large, and by which number we are known there.
#[derive(Clone, Copy)]
struct Layout {
    listeners_at: u64,
    listeners: u64,
    offers_at: u64,
    buckets: u64,
    /// A listener's network namespace: one that nobody is in, and in a region none.
    netns: u64,
    me: u32,
}

const DIRECTORY: Layout = Layout {
    listeners_at: LISTENERS_AT,
    listeners: 4096,
    offers_at: OFFERS_AT,
    buckets: 1024,
    netns: 0xffff_1234,
    me: ME,
};
const REGION: Layout = Layout {
    listeners_at: BOARD_AT as u64,
    listeners: LISTENERS as u64,
    offers_at: (BOARD_AT + LISTENERS * 64) as u64,
    buckets: OFFERS as u64 / WAYS,
    netns: 0,
    me: PEER << 12 | 1,
};

/// Phases of an offer: it waits for the acceptor; the acceptor wants the memory.
const OFFERED: u8 = 2;
const WANTED: u8 = 3;
/// Phases of a handshake by CLC.
pub const OPEN: u8 = 5;
/// The acceptor holds the connection.
pub const HELD: u8 = 6;
/// A Proposal may be in the stream.
pub const PROPOSED: u8 = 7;
/// An answer may be.
pub const ANSWERED: u8 = 8;
/// A Confirm may be.
pub const CONFIRMED: u8 = 9;
/// A message may be in the stream, whose sender does not wait for an answer.
pub const ABANDONED: u8 = 10;

/// The device of a test.
pub struct Device {
    file: File,
    dir: PathBuf,
    layout: Layout,
}

/// By which a connection to a loopback address is asked for: its network namespace, which is this process' own, and the kernel's boot.
fn own_namespace() -> u64 {
    const SO_NETNS_COOKIE: i32 = 71;
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let (mut cookie, mut len) = (0u64, size_of::<u64>() as u32);
    let at = (&raw mut cookie).cast();
    // SAFETY: an integer of that length.
    let told = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, at, &raw mut len)
    };
    assert_eq!(told, 0, "a kernel that names network namespaces");
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot");
    let half = boot.replace('-', "")[..16].to_owned();
    cookie ^ (u64::from_str_radix(&half, 16).expect("a number") | 1)
}

/// One place of the offer table.
#[derive(Clone, Copy)]
pub struct Place(u64);

impl Device {
    /// Opens the device file, which has to exist.
    ///
    /// # Panics
    /// When it does not.
    pub fn open(dir: &Path) -> Device {
        let file =
            File::options().read(true).write(true).open(dir.join(format!("{DEVICE_PREFIX}device")));
        Device { file: file.expect("a device file"), dir: dir.to_owned(), layout: DIRECTORY }
    }

    /// Opens a region and joins it, as a kernel of which nobody knows.
    ///
    /// # Panics
    /// When it is not there.
    pub fn open_region(path: &Path) -> Device {
        let file = File::options().read(true).write(true).open(path).expect("a region");
        let device = Device { file, dir: path.to_owned(), layout: REGION };
        device.set(PEERS_AT as u64 + u64::from(PEER) * 256, ALIVE);
        device
    }

    /// The device's CHID.
    pub fn chid(&self) -> u16 {
        let [gid, ext] = self.gid();
        if self.layout.me == ME { 0xffff } else { 0xff00 + ((gid ^ ext) % 255) as u16 }
    }

    fn word(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, at).expect("within the file");
        u64::from_ne_bytes(bytes)
    }

    fn set(&self, at: u64, word: u64) {
        self.file.write_all_at(&word.to_ne_bytes(), at).expect("within the file");
    }

    /// The device's GID.
    pub fn gid(&self) -> [u64; 2] {
        [self.word(16), self.word(24)]
    }

    /// Registers a listener that is in a network namespace of its own.
    pub fn listen(&self, at: SocketAddr) {
        let port = u64::from(at.port());
        let start = (u64::from(at.port()) * 0x9e3b) >> 2;
        let Layout { listeners_at, listeners, netns, me, .. } = self.layout;
        let place = (0..64).map(|i| listeners_at + (start + i) % listeners * 64);
        let place = place.into_iter().find(|&at| self.word(at) as u32 == 0).expect("a free place");
        let [high, low] = halves(at);
        self.set(place + 8, netns);
        self.set(place + 16, high.swap_bytes());
        self.set(place + 24, low.swap_bytes());
        self.set(place, u64::from(me + 1) | port << 32);
    }

    fn bucket(&self, client: SocketAddr, server: SocketAddr) -> ([u64; 6], u64) {
        let ([c0, c1], [s0, s1]) = (halves(client), halves(server));
        let ports = u64::from(client.port()) << 16 | u64::from(server.port());
        let netns = if server.ip().is_loopback() { own_namespace() } else { ANY };
        let words = [netns, c0, c1, s0, s1, ports];
        let hash = words.iter().fold(0x9e37_79b9_7f4a_7c15_u64, |h, w| {
            let h = (h ^ w).wrapping_mul(0xff51_afd7_ed55_8ccd);
            h ^ (h >> 32)
        });
        (words, self.layout.offers_at + hash % self.layout.buckets * 128)
    }

    /// The places of a bucket.
    fn places(&self, first: u64) -> impl Iterator<Item = u64> + use<> {
        let step = self.layout.buckets * 128;
        (0..WAYS).map(move |i| first + i * step)
    }

    /// Asks for the holder of a connection, as its client does.
    ///
    /// # Panics
    /// When the table is full there.
    pub fn ask(&self, client: SocketAddr, server: SocketAddr) -> Place {
        let (words, first) = self.bucket(client, server);
        let at = self.places(first).find(|&at| self.word(at) as u8 == 0).expect("a free place");
        for (i, word) in words.iter().enumerate() {
            self.set(at + 8 + i as u64 * 8, *word);
        }
        // Who wants it, and who we are.
        let me = u64::from(self.layout.me);
        self.set(at + 72, me << 32);
        (0..3).for_each(|i| self.set(at + 80 + i * 8, 0));
        let use_count = (self.word(at) >> 32).wrapping_add(1) << 32;
        self.set(at, use_count | me << 8 | u64::from(OPEN));
        Place(at)
    }

    /// What a client has asked for this connection.
    pub fn find(&self, client: SocketAddr, server: SocketAddr) -> Option<Place> {
        let (words, first) = self.bucket(client, server);
        let is_it = |&at: &u64| {
            self.word(at) as u8 >= OPEN
                && words.iter().enumerate().all(|(i, w)| self.word(at + 8 + i as u64 * 8) == *w)
        };
        self.places(first).find(is_it).map(Place)
    }

    /// An offer of memory without CLC that is made at present.
    pub fn find_offer(&self) -> Option<Place> {
        let is_offer = |&at: &u64| (OFFERED..OPEN).contains(&(self.word(at) as u8));
        let Layout { offers_at, buckets, .. } = self.layout;
        (0..buckets * WAYS).map(|i| offers_at + i * 128).find(is_offer).map(Place)
    }

    /// Asks for its memory, to be sent to [`Device::mailbox`].
    pub fn want(&self, place: Place) {
        self.set(place.0 + 72, self.word(place.0 + 72) & !0xffff_ffff | u64::from(ME));
        self.set(place.0, self.word(place.0) & !0xff | u64::from(WANTED));
    }

    /// A mailbox of our own, for everybody's mail.
    ///
    /// # Panics
    /// When there is one.
    pub fn mailbox(&self) -> UnixDatagram {
        let path = self.dir.join(format!("{DEVICE_PREFIX}m.{ME}"));
        let mailbox = UnixDatagram::bind(&path).expect("a mailbox");
        fs::set_permissions(path, fs::Permissions::from_mode(0o666)).expect("our own file");
        mailbox.set_nonblocking(true).expect("a socket");
        mailbox
    }

    /// How far it is.
    pub fn phase(&self, place: Place) -> u8 {
        self.word(place.0) as u8
    }

    /// Sets that, and who owns the place.
    pub fn set_phase(&self, place: Place, phase: u8) {
        let state = self.word(place.0) & !0xffff_ffff;
        self.set(place.0, state | u64::from(self.layout.me) << 8 | u64::from(phase));
    }

    /// Says where message 0, 1 or 2 stands.
    pub fn announce(&self, place: Place, message: u64, at: u64) {
        self.set(place.0 + 80 + message * 8, at + 1);
    }

    /// Where it stands.
    pub fn announced(&self, place: Place, message: u64) -> Option<u64> {
        self.word(place.0 + 80 + message * 8).checked_sub(1)
    }

    /// Sends a segment with tokens into a process' mailbox; false where that is not possible.
    pub fn deliver(&self, link_id: u32, segment: u64, to: u64, from: u64, memory: RawFd) -> bool {
        let mailbox = self.dir.join(format!("{DEVICE_PREFIX}m.{}", link_id & 0xfff));
        let words = [segment, 0, to, from, 0];
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let sent = send_with_fd(&mailbox, &bytes, memory);
        let mail = PROCESSES_AT + u64::from(link_id & 0xfff) * 64 + 8;
        self.set(mail, self.word(mail).wrapping_add(1 << 32));
        sent
    }
}

fn halves(at: SocketAddr) -> [u64; 2] {
    let v6 = match at {
        SocketAddr::V4(v4) => SocketAddrV4::ip(&v4).to_ipv6_mapped(),
        SocketAddr::V6(v6) => *v6.ip(),
    };
    let bytes = v6.octets();
    [0, 8].map(|i| u64::from_ne_bytes(bytes[i..i + 8].try_into().expect("eight bytes")))
}

fn send_with_fd(to: &Path, bytes: &[u8], fd: RawFd) -> bool {
    let socket = UnixDatagram::unbound().expect("a socket");
    if socket.connect(to).is_err() {
        return false;
    }
    let mut control = [0u64; 4];
    let iov = [IoSlice::new(bytes)];
    // SAFETY: all-zero is a valid msghdr; the buffers outlive the call; the control buffer holds one fd's message.
    unsafe {
        let mut msg: libc::msghdr = std::mem::zeroed();
        msg.msg_iov = iov.as_ptr().cast_mut().cast();
        msg.msg_iovlen = 1;
        msg.msg_control = control.as_mut_ptr().cast();
        msg.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let header = libc::CMSG_FIRSTHDR(&raw const msg);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(header).cast::<i32>().write_unaligned(fd);
        libc::sendmsg(socket.as_raw_fd(), &raw const msg, libc::MSG_NOSIGNAL) >= 0
    }
}
