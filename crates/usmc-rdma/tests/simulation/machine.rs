//! One host: an engine, its devices, and a segment with slots.

use std::alloc::Layout;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use smc_proto::handshake::{Circumstances, Host};
use smc_proto::ids::{Eid, PeerId};
use smc_proto::list::List;
use smc_proto::wire::clc::{FeatureMask, Hostname, Release};
use usmc_rdma::buffers::SlotBuffers;
use usmc_rdma::nic::{ArenaId, DeviceId, RmbId};
use usmc_rdma::{Config, ConnId, Engine, Memory, Wish};
use usmc_shm::layout::{ACCEPTOR, CLIENT, segment_len};
use usmc_shm::segment::Segment;

use crate::application::{Application, Manner};
use crate::hosts::Plan;
use crate::wire::{Devices, Wire};

/// One host.
pub(crate) struct Machine {
    pub(crate) engine: Engine<SlotBuffers>,
    pub(crate) nic: Devices,
    pub(crate) segment: Segment,
    pub(crate) free: Vec<u32>,
    /// By connection: which of the network's ends it is, and its slot.
    pub(crate) ends: BTreeMap<ConnId, (usize, u32)>,
    pub(crate) groups: usize,
    pub(crate) memory: (*mut u8, Layout),
}

impl Machine {
    pub(crate) fn new(host: usize, plan: Plan, wire: &Rc<RefCell<Wire>>) -> Machine {
        let shift = plan.shifts[host % 2];
        let len = segment_len(plan.slots, shift, 0).expect("a segment");
        let layout = Layout::from_size_align(len, 4096).expect("a layout");
        // SAFETY: a layout with bytes; what is mapped lives until `drop`, after everything that uses it.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        // SAFETY: fresh memory of a segment's bytes.
        let segment = unsafe { Segment::create(base, plan.slots, (shift, 0), 1, 1) };
        {
            let mut wire = wire.borrow_mut();
            wire.arenas.insert(host, (base.expose_provenance() as u64, len));
        }
        let mut ueids = List::new();
        ueids.push(Eid::user("SIMULATION").expect("an EID")).expect("room");
        let identity = Host {
            peer_id: PeerId([7, 0, 2, 0, 0, 0, 0, host as u8 + 1]),
            hostname: Hostname::new("simulation"),
            release: Release::V2_1,
            features: FeatureMask(0),
            max_conns: 255,
            max_links: plan.devices.min(2),
            ueids,
            seid: None,
            smcd_v2: false,
        };
        let config = Config {
            host: identity,
            devices: (0..plan.devices).map(DeviceId).collect(),
            first_token: host as u32 * 77,
            test_interval: Duration::from_secs(30),
        };
        Machine {
            engine: Engine::new(config),
            nic: Devices { host, wire: wire.clone() },
            segment,
            free: (0..plan.slots).collect(),
            ends: BTreeMap::new(),
            groups: 0,
            memory: (base, layout),
        }
    }

    /// A slot for a connection, with the application at its other end.
    pub(crate) fn prepare(
        &mut self,
        slot: u32,
        streams: [usize; 2],
        (manner, wants): (Manner, u64),
    ) -> (Wish<SlotBuffers>, Application) {
        for sender in [CLIENT, ACCEPTOR] {
            self.segment.ring(slot, sender).expect("a slot").reset();
        }
        let buffers = SlotBuffers::new(self.segment, slot, ACCEPTOR).expect("a slot");
        let (addr, size) = buffers.rmb();
        let rmb = RmbId(slot.into());
        let key = (self.nic.host, rmb.0);
        self.nic.wire.borrow_mut().rmbs.insert(key, (addr, size.bytes() as usize));
        let memory = Memory { rmb, size, arena: ArenaId(0) };
        let circumstances = Circumstances::FINE;
        let wish = Wish { buffers, memory, device: DeviceId(0), circumstances };
        let streams = streams.map(|stream| stream as u64);
        let mut application = Application::new(self.segment, slot, CLIENT, streams, wants);
        application.manner = manner;
        (wish, application)
    }
}
