//! RDMA devices that are open, each with its queues of completions and one address.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use smc_proto::ids::{MacAddr, MtuCode, RoceGid};
use smc_proto::link_group::Port;
use usmc_rdma::{FOR_LLC, SENDS};
use usmc_verbs::{Channel, Completion, Cq, Device, Error, GidEntry, GidType, Library, PortState};

/// The only port that is used: RoCE devices have one.
pub(crate) const PORT: u8 = 1;
/// Completions that a queue has room for, where links have as many messages as by default: those of some hundred links.
const COMPLETIONS: u32 = 4096;
/// Soft-RoCE has no larger queue.
const MOST_COMPLETIONS: u32 = 32767;
/// Completions that are taken at once.
pub(crate) const BATCH: usize = 32;
/// The queue's token in its events.
const OF_SENDS: u64 = 0;
const OF_RECEIVES: u64 = 1;

/// What the queues of a link hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Queues {
    sends: u16,
}

impl Queues {
    /// Messages under way at least, of which two are LLC's, and at most: so many that a device's queue of completions has room for those of some
    /// links. (The kernel lets 2 to 2048 be set, net.smc.smcr_max_send_wr.)
    pub const LIMITS: std::ops::RangeInclusive<u16> = FOR_LLC as u16 + 2..=512;

    /// Room for so many messages under way. `None`: outside [`Queues::LIMITS`].
    pub fn new(sends: u16) -> Option<Queues> {
        Some(Queues { sends }).filter(|queues| Queues::LIMITS.contains(&queues.sends))
    }

    /// Messages that a link has under way at most: SENDs, each with the WRITEs before it.
    pub fn sends(self) -> usize {
        self.sends.into()
    }

    /// Receives that a link has posted: three for each message that a peer has under way, as the kernel has (`smc_wr.h`).
    pub fn receives(self) -> u32 {
        3 * u32::from(self.sends)
    }

    fn completions(self) -> u32 {
        let usual = Queues::default().receives();
        (COMPLETIONS * self.receives().div_ceil(usual)).min(MOST_COMPLETIONS)
    }
}

impl Default for Queues {
    fn default() -> Queues {
        Queues { sends: SENDS as u16 }
    }
}

/// What an agent's devices are told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// The queues of their links.
    pub queues: Queues,
    /// Their links' largest path MTU: a port's own, if that is less.
    pub mtu: MtuCode,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { queues: Queues::default(), mtu: MTU_MOST }
    }
}

/// 4096 bytes, as InfiniBand counts them.
const MTU_MOST: MtuCode = match MtuCode::from_code(5) {
    Some(code) => code,
    None => unreachable!(),
};

/// What a device has done, since the agent began.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Chains that were posted: WRITEs and the message behind them.
    pub posts: u64,
    /// Requests (WRs) in them.
    pub requests: u64,
    /// Bytes that their WRITEs took from send buffers.
    pub tx_bytes: u64,
    /// Chains that are complete.
    pub completions: u64,
    /// Messages that have come: CDC and LLC.
    pub messages: u64,
    /// Requests and receives that have failed, but for those of queue pairs that were given up.
    pub errors: u64,
}

/// A device with one of its RoCEv2 addresses.
pub struct Adapter {
    /// What it has done so far.
    pub(crate) counts: Counts,
    pub(crate) device: Device,
    pub(crate) gid: GidEntry,
    pub(crate) channel: Channel,
    pub(crate) sends: Cq,
    pub(crate) receives: Cq,
    /// Where they are taken to.
    batch: Box<[Completion; BATCH]>,
    /// Completions of receives that are out of their queue, and that nobody has looked at.
    pub(crate) come: VecDeque<Completion>,
    /// Whether the queue of sends and that of receives have an event with their next completion, or have had one that was not taken.
    armed: [Cell<bool>; 2],
    port: Port,
    /// The queues of its links.
    pub(crate) queues: Queues,
    /// It has failed: nothing is made or looked for there any more.
    pub(crate) is_dead: bool,
    /// Its port has come up lately: no connection is to use it yet.
    pub(crate) is_settling: bool,
}

impl Adapter {
    /// Opens the first device that has this address for RoCEv2: that of a TCP connection's own end. `None` where none has.
    ///
    /// # Errors
    /// What the library says of a device that has it.
    pub fn open(library: Library, address: IpAddr) -> Result<Option<Adapter>, Error> {
        let wanted = mapped(address);
        for name in library.devices()? {
            let device = library.device(&name)?;
            let is_it = |entry: &GidEntry| {
                entry.port == PORT
                    && entry.kind == GidType::RoceV2
                    && Ipv6Addr::from(entry.gid.0) == wanted
            };
            if let Some(gid) = device.gids()?.into_iter().find(is_it) {
                return Adapter::new(device, gid, Settings::default()).map(Some);
            }
        }
        Ok(None)
    }

    /// Opens the device of that name with one of its RoCEv2 addresses: the first that is an IPv4 one, or else the first that is not of the
    /// link alone, or else the first. `None` where it has none.
    ///
    /// # Errors
    /// What the library says of the device.
    pub fn open_device(
        library: Library,
        name: &str,
        settings: Settings,
    ) -> Result<Option<Adapter>, Error> {
        let device = library.device(name)?;
        let rank = |entry: &GidEntry| {
            let address = Ipv6Addr::from(entry.gid.0);
            match address.to_ipv4_mapped() {
                Some(_) => 0,
                None if !address.is_unicast_link_local() => 1,
                None => 2,
            }
        };
        let is_fit = |entry: &GidEntry| entry.port == PORT && entry.kind == GidType::RoceV2;
        let gid = device.gids()?.into_iter().filter(is_fit).min_by_key(rank);
        gid.map(|gid| Adapter::new(device, gid, settings)).transpose()
    }

    fn new(device: Device, gid: GidEntry, settings: Settings) -> Result<Adapter, Error> {
        let channel = Channel::new(&device)?;
        let Settings { queues, mtu } = settings;
        let completions = queues.completions();
        let sends = Cq::new(&device, completions, Some(&channel), OF_SENDS)?;
        let receives = Cq::new(&device, completions, Some(&channel), OF_RECEIVES)?;
        let state = device.port(PORT)?;
        let port = Port {
            mac: mac_of(gid.ifindex),
            gid: RoceGid(gid.gid.0),
            mtu: MtuCode::from_code(state.mtu as u8).unwrap_or_default().min(mtu),
            direct: true,
            ..Port::default()
        };
        let armed = [Cell::new(false), Cell::new(false)];
        let come = VecDeque::with_capacity(BATCH);
        let batch = Box::new([Completion::default(); BATCH]);
        let counts = Counts::default();
        Ok(Adapter {
            counts,
            device,
            gid,
            channel,
            sends,
            receives,
            batch,
            come,
            armed,
            port,
            queues,
            is_dead: false,
            is_settling: false,
        })
    }

    /// Takes what the queue of receives has, up to a batch of it. How many there were.
    pub(crate) fn look_at_receives(&mut self) -> usize {
        if self.is_dead {
            return 0;
        }
        // A queue that is broken gives its queue pairs up by asynchronous events.
        let count = self.receives.poll(&mut self.batch[..]).unwrap_or(0).min(BATCH);
        if count > 0 {
            self.come.extend(&self.batch[..count]);
        }
        count
    }

    /// The queues of its links.
    pub fn queues(&self) -> Queues {
        self.queues
    }

    /// What it has done so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// What a peer is told of it. It has no queue pair.
    pub fn port(&self) -> Port {
        self.port
    }

    /// Its address; an IPv4 one mapped.
    pub fn address(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.gid.gid.0)
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        self.device.name()
    }

    /// Whether the port carries data now.
    pub fn is_up(&self) -> bool {
        self.device.port(PORT).is_ok_and(|port| port.state == PortState::Active)
    }

    /// Readable once a completion has come since [`Adapter::arm`] that it was for, and once the port or a queue pair has something.
    pub fn wakes(&self) -> [BorrowedFd<'_>; 2] {
        [self.channel.as_fd(), self.device.events_fd()]
    }

    /// Takes the events that have made the channel readable.
    ///
    /// # Errors
    /// The device has failed.
    pub(crate) fn take_notices(&self) -> Result<(), Error> {
        // A queue has an event once for each time that it is armed.
        while self.armed.iter().any(Cell::get)
            && let Some(token) = self.channel.next_event()?
        {
            self.armed[usize::from(token == OF_RECEIVES)].set(false);
        }
        Ok(())
    }

    /// Whether the next completion of a send makes an event.
    pub(crate) fn hears_sends(&self) -> bool {
        self.armed[0].get()
    }

    /// Asks for an event with the next completion of a receive, and with that of a send where it is awaited. A thread that goes to sleep looks
    /// once more behind it.
    ///
    /// # Errors
    /// The device has failed.
    pub fn arm(&self, are_sends_awaited: bool) -> Result<(), Error> {
        let [sends, receives] = &self.armed;
        if are_sends_awaited && !sends.replace(true) {
            self.sends.arm(false)?;
        }
        if !receives.replace(true) {
            self.receives.arm(true)?;
        }
        Ok(())
    }
}

/// As it stands in a table of addresses.
pub(crate) fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

/// The hardware address of a network device; zeros where it has none. SMC version 2 shows it, and does not use it.
fn mac_of(ifindex: u32) -> MacAddr {
    let read = |dir: &Path, file| fs::read_to_string(dir.join(file)).unwrap_or_default();
    let all = fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let mut dirs = all.map(|entry| entry.path());
    let found = dirs.find(|dir| read(dir, "ifindex").trim().parse() == Ok(ifindex));
    let text = found.map(|dir| read(&dir, "address")).unwrap_or_default();
    let mut mac = [0; 6];
    for (byte, digits) in mac.iter_mut().zip(text.trim().split(':')) {
        *byte = u8::from_str_radix(digits, 16).unwrap_or(0);
    }
    MacAddr(mac)
}
