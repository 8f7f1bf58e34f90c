//! The devices as the engine sees them ([`usmc_rdma::nic::Nic`]).

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use smc_proto::ids::U24;
use smc_proto::link_group::{Connect, Key, Port};
use smc_proto::wire::cdc::SmcrRepr;
use usmc_rdma::nic::{ArenaId, DeviceId, Nic, PostFailed, QpId, RmbId, Write};
use usmc_verbs::{Completion, Error, Status};

use crate::adapter::{Adapter, BATCH, mapped};
use crate::link::{Link, Memory, Message, NO_MESSAGE};
use crate::pnet::Pnet;
use crate::sys;

/// The devices of a host, and their queue pairs.
#[derive(Default)]
pub struct Adapters {
    pub(crate) all: Vec<Adapter>,
    links: Vec<Option<Placed>>,
    rmbs: HashMap<RmbId, Memory>,
    arenas: HashMap<ArenaId, Memory>,
    refusal: Option<Error>,
    pnet: Pnet,
    /// SENDs that are not complete, on all links.
    under_way: usize,
    /// Somebody may wait for one of them.
    are_awaited: bool,
}

/// Chains of so many bytes are awaited: an application may wait for their room.
const MUCH: usize = 1024;
/// Looks at a queue of completions until it is empty, at most: what comes meanwhile comes later.
const LOOKS: usize = 1024;

/// A device takes so long at most to flush the receives of a queue pair that is given up.
const FLUSH: Duration = Duration::from_millis(20);

/// The place of a receive's message.
pub(crate) fn place_of(one: &Completion) -> u32 {
    (one.wr_id >> 32) as u32
}

fn bytes_of(writes: &[Write]) -> usize {
    writes.iter().map(|write| write.len() as usize).sum()
}

struct Placed {
    link: Link,
    device: DeviceId,
}

impl Adapters {
    /// One more.
    pub fn add(&mut self, adapter: Adapter) -> DeviceId {
        self.all.push(adapter);
        DeviceId(self.all.len() as u8 - 1)
    }

    /// All devices.
    pub fn ids(&self) -> impl Iterator<Item = DeviceId> + use<> {
        (0..self.all.len()).map(|at| DeviceId(at as u8))
    }

    /// A device.
    pub fn get(&self, device: DeviceId) -> Option<&Adapter> {
        self.all.get(usize::from(device.0))
    }

    /// The physical networks. Without one a device is in a network of those that have none.
    pub fn set_pnet(&mut self, pnet: Pnet) {
        self.pnet = pnet;
    }

    /// The network of a device.
    pub fn network(&self, device: DeviceId) -> Option<&str> {
        self.pnet.of_device(self.get(device)?.name())
    }

    /// The device for a TCP connection whose own end has this address. Where the network device with that address is in a physical network it
    /// is one of that, and there may be none; else the one whose address it is, or which is on that network device
    /// (`smc_pnet_find_roce_resource` of net/smc).
    pub fn device_for(&self, own: IpAddr) -> Option<DeviceId> {
        let wanted = mapped(own);
        let interface = || sys::interface_of(own.to_canonical());
        let network = if self.pnet.has_no_interface() { None } else { interface() };
        let network = network.and_then(|(_, name)| self.pnet.of_interface(&name));
        let find = |is_it: &dyn Fn(&Adapter) -> bool| {
            self.all.iter().position(|adapter| {
                let is_in =
                    network.is_none_or(|id| self.pnet.of_device(adapter.name()) == Some(id));
                !adapter.is_dead && !adapter.is_settling && is_in && is_it(adapter)
            })
        };
        let mut place = find(&|adapter| adapter.address() == wanted);
        if network.is_some() {
            place = place.or_else(|| find(&Adapter::is_up)).or_else(|| find(&|_| true));
        } else {
            place = place.or_else(|| {
                let (interface, _) = interface()?;
                find(&|adapter| adapter.gid.ifindex == interface)
            });
        }
        Some(DeviceId(u8::try_from(place?).ok()?))
    }

    /// Memory that connections will have their RMB in.
    ///
    /// # Safety
    /// It stays mapped until [`Adapters::remove_rmb`], and is shared memory that is read and written by raw pointers and atomics only.
    pub unsafe fn add_rmb(&mut self, rmb: RmbId, start: *mut u8, len: usize) {
        self.rmbs.insert(rmb, Memory { start, len });
    }

    /// Memory that connections will have their send buffers in.
    ///
    /// # Safety
    /// As for [`Adapters::add_rmb`], until [`Adapters::remove_arena`].
    pub unsafe fn add_arena(&mut self, arena: ArenaId, start: *mut u8, len: usize) {
        self.arenas.insert(arena, Memory { start, len });
    }

    /// No device can reach the RMB any more: it may be unmapped. No connection has it, and no peer has a key for it
    /// ([`usmc_rdma::Engine::holder`]).
    pub fn remove_rmb(&mut self, rmb: RmbId) {
        self.rmbs.remove(&rmb);
        self.links.iter_mut().flatten().for_each(|placed| placed.link.forget(rmb));
    }

    /// The same of an arena. Nothing that is posted lies there.
    pub fn remove_arena(&mut self, arena: ArenaId) {
        self.arenas.remove(&arena);
        self.links.iter_mut().flatten().for_each(|placed| placed.link.forget_arena(arena));
    }

    /// Registrations of RMBs and arenas on all links.
    pub fn registrations(&self) -> usize {
        self.links.iter().flatten().map(|placed| placed.link.registrations()).sum()
    }

    /// The first thing that a device has refused of what connections need: they stay TCP by that, and nobody else says so.
    pub fn refusal(&self) -> Option<&Error> {
        self.refusal.as_ref()
    }

    /// What there is, or else a note that it was refused.
    fn noted<T>(&mut self, had: Result<T, Error>) -> Option<T> {
        had.map_err(|error| self.refusal.get_or_insert(error)).ok()
    }

    /// Whether anything was posted that is not complete.
    pub fn are_under_way(&self) -> bool {
        self.under_way > 0
    }

    /// Whether somebody may wait for the completion of something that was posted.
    pub(crate) fn are_sends_awaited(&self) -> bool {
        self.are_awaited
    }

    fn is_less_under_way(&mut self, sends: usize) {
        self.under_way -= sends;
        self.are_awaited &= self.under_way > 0;
    }

    /// Queue pairs that are there, those included that are about to go.
    pub fn queue_pairs(&self) -> usize {
        self.links.iter().flatten().count()
    }

    fn placed(&mut self, qp: QpId) -> Option<&mut Placed> {
        self.links.get_mut(qp.0 as usize)?.as_mut()
    }

    pub(crate) fn link(&mut self, qp: QpId) -> Option<&mut Link> {
        self.placed(qp).map(|placed| &mut placed.link)
    }

    /// The queue pair of that number on a device.
    pub(crate) fn by_number(&self, device: DeviceId, qp_num: u32) -> Option<QpId> {
        let is_it = |placed: &Option<Placed>| {
            placed.as_ref().is_some_and(|placed| {
                placed.device == device && placed.link.local().qpn.value() == qp_num
            })
        };
        self.links.iter().position(is_it).map(|place| QpId(place as u32))
    }

    /// The queue pairs of a device.
    pub(crate) fn of(&self, device: DeviceId) -> Vec<QpId> {
        let is_its = |placed: &Option<Placed>| placed.as_ref().is_some_and(|p| p.device == device);
        let all = self.links.iter().enumerate().filter(|(_, placed)| is_its(placed));
        all.map(|(place, _)| QpId(place as u32)).collect()
    }

    /// The queue pair of a completion. One that is gone may have left it, and another one have its place.
    pub(crate) fn of_completion(&self, one: &Completion) -> Option<QpId> {
        let qp = QpId(one.wr_id as u32);
        let placed = self.links.get(qp.0 as usize)?.as_ref()?;
        (placed.link.local().qpn.value() == one.qp_num).then_some(qp)
    }

    /// A completion of the queue pair's.
    pub(crate) fn count(&mut self, qp: QpId, one: &Completion, is_send: bool) {
        let Some(device) = self.placed(qp).map(|placed| placed.device) else { return };
        let Some(adapter) = self.all.get_mut(usize::from(device.0)) else { return };
        let counts = &mut adapter.counts;
        match one.status {
            Status::SUCCESS if is_send => counts.completions += 1,
            Status::SUCCESS => counts.messages += 1,
            // Of a queue pair that was given up.
            Status::FLUSHED => {}
            _ => counts.errors += 1,
        }
    }

    /// A SEND of the queue pair is complete. Whether the engine has to know.
    pub(crate) fn completed(&mut self, qp: QpId) -> bool {
        let Some(link) = self.link(qp).filter(|link| link.under_way > 0) else { return false };
        link.under_way -= 1;
        let is_over = link.is_closing && link.under_way == 0;
        self.is_less_under_way(1);
        if is_over {
            self.remove(qp);
            return false;
        }
        self.link(qp).is_some_and(|link| !link.is_closing)
    }

    /// A request of the queue pair has failed. Whether the engine has to know: once.
    pub(crate) fn failed(&mut self, qp: QpId) -> bool {
        let Some(link) = self.link(qp) else { return false };
        if link.is_closing {
            self.remove(qp);
            return false;
        }
        !std::mem::replace(&mut link.is_broken, true)
    }

    /// The message in a place of a queue pair's receives.
    pub(crate) fn message(
        &mut self,
        qp: QpId,
        place: u32,
        len: u32,
        into: &mut Message,
    ) -> Option<usize> {
        let link = self.link(qp)?;
        let len = link.message(place, len, into)?;
        // Where that fails the queue pair is in error, as its completions say.
        let _ = link.receive_again(qp.0, place);
        (!link.is_closing).then_some(len)
    }

    /// A receive of the queue pair has failed: nothing that was successful comes behind it.
    pub(crate) fn has_flushed(&mut self, qp: QpId) {
        if let Some(link) = self.link(qp) {
            link.is_flushed = true;
        }
    }

    /// The queue pair takes no message any more, and those that it has taken are in the queue of receives.
    fn silence(&mut self, qp: QpId) {
        let Some((device, link)) = self.placed(qp).map(|p| (p.device, &mut p.link)) else { return };
        if link.is_flushed || link.to_error().is_err() {
            return;
        }
        let qp_num = link.local().qpn.value();
        let is_its = |one: &Completion| one.qp_num == qp_num && one.status != Status::SUCCESS;
        let Some(adapter) = self.all.get_mut(usize::from(device.0)) else { return };
        let until = Instant::now() + FLUSH;
        while !adapter.is_dead && !adapter.come.iter().any(is_its) && Instant::now() < until {
            if adapter.look_at_receives() == 0 {
                thread::yield_now();
            }
        }
    }

    fn remove(&mut self, qp: QpId) {
        let gone = self.links.get_mut(qp.0 as usize).and_then(Option::take);
        self.is_less_under_way(gone.map_or(0, |placed| placed.link.under_way));
    }

    fn make(&mut self, device: DeviceId) -> Result<(QpId, Port), Error> {
        let free = self.links.iter().position(Option::is_none);
        let place = free.unwrap_or(self.links.len());
        let adapter = self.all.get(usize::from(device.0)).filter(|adapter| !adapter.is_dead);
        let adapter = adapter.ok_or(Error::Invalid { what: "no such device" })?;
        let link = Link::new(adapter, place as u32, random_psn())?;
        let local = link.local();
        let placed = Some(Placed { link, device });
        match self.links.get_mut(place) {
            Some(free) => *free = placed,
            None => self.links.push(placed),
        }
        Ok((QpId(place as u32), local))
    }
}

impl Nic for Adapters {
    fn port(&self, device: DeviceId) -> Port {
        self.all.get(usize::from(device.0)).map(Adapter::port).unwrap_or_default()
    }

    fn are_together(&self, one: DeviceId, other: DeviceId) -> bool {
        self.network(one) == self.network(other)
    }

    fn create(&mut self, device: DeviceId) -> Option<(QpId, Port)> {
        let made = self.make(device);
        self.noted(made)
    }

    fn sends(&self, device: DeviceId) -> usize {
        self.get(device).map(|adapter| adapter.queues.sends()).unwrap_or_default()
    }

    fn connect(&mut self, qp: QpId, remote: &Port) -> Connect {
        match self.link(qp).map(|link| link.connect(remote)) {
            Some(Ok(())) => Connect::Done,
            _ => Connect::Failed,
        }
    }

    fn destroy(&mut self, qp: QpId) {
        let Some(link) = self.link(qp) else { return };
        link.is_closing = true;
        if link.under_way == 0 || link.is_broken {
            self.remove(qp);
        }
    }

    fn cut(&mut self, qp: QpId) -> Vec<Vec<u8>> {
        self.silence(qp);
        let taken = self.taken(qp);
        self.remove(qp);
        taken
    }

    fn taken(&mut self, qp: QpId) -> Vec<Vec<u8>> {
        let Some(device) = self.placed(qp).map(|placed| placed.device) else { return Vec::new() };
        let Some(adapter) = self.all.get_mut(usize::from(device.0)) else { return Vec::new() };
        for _ in 0..LOOKS {
            if adapter.look_at_receives() < BATCH {
                break;
            }
        }
        let come = std::mem::take(&mut adapter.come);
        let is_its =
            |one: &Completion| one.status == Status::SUCCESS && self.of_completion(one) == Some(qp);
        let (its, others): (VecDeque<_>, VecDeque<_>) = come.into_iter().partition(is_its);
        let mut into = NO_MESSAGE;
        let message = |one: &Completion| {
            let len = self.message(qp, place_of(one), one.byte_len, &mut into)?;
            into.get(..len).map(<[u8]>::to_vec)
        };
        let taken = its.iter().filter_map(message).collect();
        if let Some(adapter) = self.all.get_mut(usize::from(device.0)) {
            adapter.come = others;
        }
        taken
    }

    fn rmb(&mut self, qp: QpId, rmb: RmbId) -> Option<Key> {
        let memory = *self.rmbs.get(&rmb)?;
        // SAFETY: the contract of `add_rmb`: links are of this, and go with it.
        let key = unsafe { self.link(qp)?.rmb(rmb, memory) };
        self.noted(key)
    }

    fn forget(&mut self, qp: QpId, rmb: RmbId) {
        if let Some(link) = self.link(qp) {
            link.forget(rmb);
        }
    }

    fn arena(&mut self, qp: QpId, arena: ArenaId) -> Option<u32> {
        let memory = *self.arenas.get(&arena)?;
        // SAFETY: as above.
        let lkey = unsafe { self.link(qp)?.arena(arena, memory) };
        self.noted(lkey)
    }

    fn post(&mut self, qp: QpId, writes: &[Write], message: &[u8]) -> Result<(), PostFailed> {
        let placed = self.placed(qp).ok_or(PostFailed)?;
        let (device, link) = (placed.device, &mut placed.link);
        link.post(qp.0, writes, message).ok_or(PostFailed)?;
        let bytes = bytes_of(writes);
        // Somebody waits until it is complete: for the room of its bytes, for the end of a connection or for what an LLC message does.
        let is_awaited = link.is_busy() || bytes >= MUCH || !SmcrRepr::is_of_data(message);
        self.under_way += 1;
        self.are_awaited |= is_awaited;
        if let Some(adapter) = self.all.get_mut(usize::from(device.0)) {
            adapter.counts.posts += 1;
            adapter.counts.requests += writes.len() as u64 + 1;
            adapter.counts.tx_bytes += bytes as u64;
        }
        Ok(())
    }
}

/// A first sequence number that nobody guesses: what an earlier queue pair of that number had on its way is not taken for this one's.
fn random_psn() -> U24 {
    // Without a random one it is 0, which works.
    U24::truncate(u32::from_ne_bytes(sys::random().unwrap_or_default()))
}
