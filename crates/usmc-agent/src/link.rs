//! A queue pair with all the memory that it can reach. Each has a protection domain of its own: a key is good on one link.

use rustc_hash::FxHashMap;
use smc_proto::ids::U24;
use smc_proto::link_group::{Key, Port};
use usmc_rdma::nic::{ArenaId, RmbId, Write};
use usmc_verbs::{
    Access, Caps, Error, Gid, Init, Mr, Mtu, Operation, Path, Pd, Piece, Qp, Receive, Request, Rtr,
    Rts, Source,
};

use crate::adapter::{Adapter, PORT, Queues};

/// Bytes of a receive: the longest message, LLC's of version 2.
const RECEIVE: usize = 8192;
/// Bytes of a message that is copied with its request, if the device can.
const INLINE: u32 = 64;
/// Completions of a link with so many messages under way are awaited, or with half of those that there may be.
const MANY: usize = 8;
/// Most requests of a chain.
const CHAIN: usize = usmc_rdma::transfer::WRITES + 1;
/// Requests of nearly all chains: one WRITE and its SEND. Arrays for six of them would take longer to make than the chain.
const SHORT: usize = 2;

/// As the kernel's SMC-R has them (`smc_ib.c`): 134 ms for an answer, for ever on a single link, 0.06 ms before a receive is tried again.
const TIMEOUT: u8 = 15;
const RETRIES: u8 = 7;
const RNR_RETRIES: u8 = 7;
const RNR_TIMER: u8 = 5;

/// Memory that may be registered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    pub(crate) start: *mut u8,
    pub(crate) len: usize,
}

pub(crate) struct Link {
    // Before its memory: requests fail where that goes first.
    qp: Qp,
    local: Port,
    receives: Mr,
    /// Places for messages that are too long to be copied with their request: for all that are under way, as a device may copy none.
    long: Mr,
    queues: Queues,
    next_long: usize,
    rmbs: FxHashMap<RmbId, Mr>,
    /// Their local keys.
    arenas: FxHashMap<ArenaId, u32>,
    /// By local key, which is what a WRITE names: there is an arena for each process.
    sources: FxHashMap<u32, Mr>,
    domain: Pd,
    gid_index: u8,
    /// SENDs that are not complete.
    pub(crate) under_way: usize,
    /// It is destroyed once nothing is under way.
    pub(crate) is_closing: bool,
    /// A completion has said that it failed.
    pub(crate) is_broken: bool,
    /// A completion of a receive has said so: no successful one follows.
    pub(crate) is_flushed: bool,
}

impl Link {
    /// A queue pair in the state INIT, with its receives posted. `number`: in each completion.
    pub(crate) fn new(adapter: &Adapter, number: u32, psn: U24) -> Result<Link, Error> {
        let domain = Pd::new(&adapter.device)?;
        let queues = adapter.queues;
        let (places, receives) = (queues.sends(), queues.receives());
        let caps = Caps {
            send_requests: (places * CHAIN) as u32,
            receives,
            send_pieces: 2,
            receive_pieces: 1,
            inline_bytes: INLINE,
        };
        let qp = Qp::new(&domain, &adapter.sends, &adapter.receives, caps)?;
        qp.to_init(&Init {
            port: PORT,
            pkey_index: 0,
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        })?;
        let receives = Mr::new(&domain, receives as usize * RECEIVE, Access::LOCAL_WRITE)?;
        let long = Mr::new(&domain, places * RECEIVE, Access::LOCAL_READ)?;
        let local = Port { qpn: U24::truncate(qp.number()), psn, ..adapter.port() };
        let link = Link {
            qp,
            local,
            receives,
            long,
            queues,
            next_long: 0,
            rmbs: FxHashMap::default(),
            arenas: FxHashMap::default(),
            sources: FxHashMap::default(),
            domain,
            gid_index: adapter.gid.index as u8,
            under_way: 0,
            is_closing: false,
            is_broken: false,
            is_flushed: false,
        };
        for place in 0..queues.receives() {
            link.receive_again(number, place)?;
        }
        Ok(link)
    }

    pub(crate) fn local(&self) -> Port {
        self.local
    }

    /// Whether so many messages are under way that the next one may have to wait for the first.
    pub(crate) fn is_busy(&self) -> bool {
        self.under_way >= MANY.min(self.queues.sends() / 2)
    }

    /// Connects it to the peer's, and lets it send.
    pub(crate) fn connect(&self, remote: &Port) -> Result<(), Error> {
        let mtu = self.local.mtu.min(remote.mtu);
        self.qp.to_rtr(&Rtr {
            path: Path {
                port: PORT,
                gid_index: self.gid_index,
                peer: Gid(remote.gid.0),
                hop_limit: if remote.direct { 1 } else { 64 },
                traffic_class: 0,
                flow_label: 0,
                service_level: 0,
            },
            mtu: Mtu::from_number(mtu.code().into()).unwrap_or(Mtu::Bytes256),
            peer_qp_num: remote.qpn.value(),
            peer_psn: remote.psn.value(),
            max_peer_reads: 1,
            min_rnr_timer: RNR_TIMER,
        })?;
        self.qp.to_rts(&Rts {
            psn: self.local.psn.value(),
            timeout: TIMEOUT,
            retry_count: RETRIES,
            rnr_retry: RNR_RETRIES,
            max_reads: 1,
        })
    }

    /// It takes and sends nothing any more.
    pub(crate) fn to_error(&self) -> Result<(), Error> {
        self.qp.to_error()
    }

    /// The peer's key of an RMB.
    ///
    /// # Safety
    /// The memory stays mapped as long as the link is there.
    pub(crate) unsafe fn rmb(&mut self, id: RmbId, memory: Memory) -> Result<Key, Error> {
        if !self.rmbs.contains_key(&id) {
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            // SAFETY: the caller's contract; the rings of a segment are named by raw pointers only.
            let mr = unsafe { Mr::register(&self.domain, memory.start, memory.len, access) }?;
            self.rmbs.insert(id, mr);
        }
        let mr = &self.rmbs[&id];
        Ok(Key { rkey: mr.rkey(), addr: mr.address() })
    }

    /// The peer's key is good no more.
    pub(crate) fn forget(&mut self, id: RmbId) {
        self.rmbs.remove(&id);
    }

    /// Send buffers that were there are no more.
    pub(crate) fn forget_arena(&mut self, id: ArenaId) {
        if let Some(lkey) = self.arenas.remove(&id) {
            self.sources.remove(&lkey);
        }
    }

    /// Memory of applications that is registered.
    pub(crate) fn registrations(&self) -> usize {
        self.rmbs.len() + self.arenas.len()
    }

    /// The own key of memory with send buffers.
    ///
    /// # Safety
    /// As for [`Link::rmb`].
    pub(crate) unsafe fn arena(&mut self, id: ArenaId, memory: Memory) -> Result<u32, Error> {
        if let Some(lkey) = self.arenas.get(&id) {
            return Ok(*lkey);
        }
        let access = Access::LOCAL_READ;
        // SAFETY: as above.
        let mr = unsafe { Mr::register(&self.domain, memory.start, memory.len, access) }?;
        let lkey = mr.lkey();
        self.arenas.insert(id, lkey);
        self.sources.insert(lkey, mr);
        Ok(lkey)
    }

    /// Posts WRITEs, and a SEND behind them.
    pub(crate) fn post(&mut self, number: u32, writes: &[Write], message: &[u8]) -> Option<()> {
        match writes.len() {
            0..SHORT => self.post_chain::<SHORT>(number, writes, message),
            _ => self.post_chain::<CHAIN>(number, writes, message),
        }
    }

    /// A chain of at most `MOST` requests.
    fn post_chain<const MOST: usize>(
        &mut self,
        number: u32,
        writes: &[Write],
        message: &[u8],
    ) -> Option<()> {
        let mut gathered: [[Piece<'_>; 2]; MOST] = [[self.long.piece(0, 1)?; 2]; MOST];
        let mut counts = [0; MOST];
        for ((write, pieces), count) in writes.iter().zip(&mut gathered).zip(&mut counts) {
            let mr = self.sources.get(&write.lkey)?;
            for part in write.source.iter().filter(|part| part.len > 0) {
                let offset = usize::try_from(part.addr.checked_sub(mr.address())?).ok()?;
                *pieces.get_mut(*count)? = mr.piece(offset, part.len)?;
                *count += 1;
            }
        }
        let wr_id = u64::from(number);
        let (operation, source) = (Operation::Send { solicited: true }, Source::Bytes(message));
        let mut chain = [Request { wr_id, operation, source, signaled: true }; MOST];
        for ((write, to), (pieces, count)) in
            writes.iter().zip(&mut chain).zip(gathered.iter().zip(counts))
        {
            let operation = Operation::Write { address: write.to.addr, rkey: write.to.rkey };
            let source = Source::Memory(pieces.get(..count)?);
            *to = Request { wr_id, operation, source, signaled: false };
        }
        let long;
        if message.len() > self.qp.caps().inline_bytes as usize {
            let place = self.next_long * RECEIVE;
            self.long.write(place, message)?;
            long = [self.long.piece(place, message.len() as u32)?];
            chain.get_mut(writes.len())?.source = Source::Memory(&long);
        }
        self.qp.post_send(chain.get(..=writes.len())?).ok()?;
        if message.len() > self.qp.caps().inline_bytes as usize {
            self.next_long = (self.next_long + 1) % self.queues.sends();
        }
        self.under_way += 1;
        Some(())
    }

    /// The message of a receive: the bytes of its place.
    pub(crate) fn message(&self, place: u32, len: u32, into: &mut [u8; RECEIVE]) -> Option<usize> {
        let len = (len as usize).min(RECEIVE);
        self.receives.read(place as usize * RECEIVE, into.get_mut(..len)?)?;
        Some(len)
    }

    /// The place can have another message.
    pub(crate) fn receive_again(&self, number: u32, place: u32) -> Result<(), Error> {
        let piece = self.receives.piece(place as usize * RECEIVE, RECEIVE as u32);
        let piece = piece.ok_or(Error::Invalid { what: "a place of a receive" })?;
        let wr_id = u64::from(place) << 32 | u64::from(number);
        let posted = self.qp.post_receive(&[Receive { wr_id, piece }]);
        posted.map_err(|error| Error::Call { name: "ibv_post_recv", errno: error.errno })
    }
}

/// Room for the longest message.
pub(crate) type Message = [u8; RECEIVE];
/// Such a room, empty.
pub(crate) const NO_MESSAGE: Message = [0; RECEIVE];
