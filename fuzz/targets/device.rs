//! The ISM device: the tables in its file (processes, listeners, offers), changed by a hostile user of it at any time,
//! hostile datagrams in the mailbox, and segments of any header, size, seal and kind of file.
#![no_main]

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use libfuzzer_sys::fuzz_target;
use usmc::fuzzing::{
    self, DmbRef, Endpoint, Mail, OfferId, PassedOn, PeerProcess, Receiver, Tuple, device, layout,
    segment,
};
use usmc_fuzz::attacker::Attacker;
use usmc_fuzz::input::Input;
use usmc_fuzz::memory::{PAGE, memfd};
use usmc_fuzz::world::{DEVICE, World, mail, world};
use usmc_shm::board::{LISTENER_CLAIMED, LISTENER_PROBES, Listener, OFFER_WAYS, Offer};
use usmc_shm::layout::{ACCEPTOR, CLIENT, SEGMENT_MAGIC, SEGMENT_VERSION, SegmentHeader, Slot};
use usmc_shm::layout::{SLOTS_OFFSET, segment_len};
use usmc_shm::segment::Segment;

/// Buckets of the offer table.
const OFFER_BUCKETS: usize = layout::OFFERS / OFFER_WAYS;

/// The attacker's own index on the device.
const ATTACKER: u32 = 1;
const PORTS: [u16; 3] = [80, 8080, 4711];
const NETNS: u64 = 0x4e45_5453;
/// Of sockets that are passed on.
const COOKIES: [u64; 2] = [0x1001, 0x1002];
/// Segments that the attacker has made and still writes to, at most.
const SEGMENTS: usize = 4;

struct Scene {
    world: &'static World,
    attacker: Attacker,
    mailbox: i32,
    /// Where words are worth changing, in the device file.
    places: Vec<Range<usize>>,
    known: Vec<u64>,
    pipe: i32,
}

fn fd_of(mail: Mail) -> i32 {
    match mail {
        Mail::Segment(fd) | Mail::Ear(_, fd) => fd,
        Mail::Delivery(what) => what.fd,
    }
}

// SAFETY: there is one thread.
unsafe impl Sync for Scene {}
// SAFETY: as above.
unsafe impl Send for Scene {}

fn endpoint(which: usize) -> Endpoint {
    let addr = match which / 3 {
        0 => [0; 16],
        1 => [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1],
        _ => [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    };
    Endpoint { addr, port: PORTS[which % 3] }
}

fn tuple(which: usize) -> Tuple {
    let client = Endpoint { port: 40000, ..endpoint(3 + which % 6) };
    Tuple { netns: NETNS, client, server: endpoint(3 + which % 6) }
}

/// Where an offer of this name is looked for.
fn bucket(words: &[u64; 6]) -> usize {
    fuzzing::hash(words) as usize % OFFER_BUCKETS
}

fn scene() -> &'static Scene {
    static SCENE: OnceLock<Scene> = OnceLock::new();
    SCENE.get_or_init(|| {
        let world = world();
        // SAFETY: two mappings of the device file, never unmapped.
        let attacker = unsafe { Attacker::new(world.device, DEVICE, world.device_there) };
        let tables = world.tables();
        let at = |place: *const u8| place.addr() - world.device.addr();
        let range = |from: *const u8, len: usize| at(from)..at(from) + len;
        let mut places = vec![range((&raw const tables.header).cast(), 40)];
        places
            .push(range((&raw const tables.processes[0]).cast(), 3 * size_of::<layout::Process>()));
        let mut known = vec![0, 1, 2, NETNS, u64::from(LISTENER_CLAIMED)];
        known.extend([layout::PROCESSES, layout::LISTENERS, layout::OFFERS].map(|n| n as u64));
        for port in PORTS {
            // As the registry hashes it; a wrong guess shows as missing coverage.
            let first = ((port as usize).wrapping_mul(0x9e3b) >> 2) % layout::LISTENERS;
            let len = LISTENER_PROBES.min(layout::LISTENERS - first).min(3);
            let len = len * size_of::<Listener>();
            places.push(range((&raw const tables.listeners[first]).cast(), len));
            known.push(port.into());
        }
        for which in 0..6 {
            let words = tuple(which).words();
            for way in 0..2 {
                let place = way * OFFER_BUCKETS + bucket(&words);
                let place = &raw const tables.offers[place];
                places.push(range(place.cast(), size_of::<Offer>()));
            }
            known.extend(words);
        }
        for cookie in COOKIES {
            // As the table hashes it; likewise.
            let hash = cookie.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            let first = hash as usize % (layout::PASSED_ON / layout::PASSED_ON_WAYS);
            let first = &raw const tables.passed_on[first * layout::PASSED_ON_WAYS];
            let len = layout::PASSED_ON_WAYS * size_of::<layout::PassedOnCell>();
            places.push(range(first.cast(), len));
            known.push(cookie);
        }
        for phase in 0..6 {
            known.push(phase | u64::from(world.index) << 8 | 1 << 32);
            known.push(phase | u64::from(ATTACKER) << 8 | 2 << 32);
        }
        let mut ends = [0; 2];
        // SAFETY: two writable numbers.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        let mailbox = world.open_mailbox(ATTACKER);
        world.settle();
        Scene { world, attacker, mailbox, places, known, pipe: ends[0] }
    })
}

/// A segment of the attacker's, as it maps it itself.
struct Crafted {
    fd: i32,
    base: *mut u8,
    len: usize,
    is_cut: bool,
}

impl Drop for Crafted {
    fn drop(&mut self) {
        // SAFETY: mapped by `craft`; nobody uses it any more. The honest end takes it for retired at its next look.
        unsafe {
            if !self.is_cut {
                (*self.base.cast::<SegmentHeader>()).retired.store(1, Relaxed);
            }
            libc::close(self.fd);
            libc::munmap(self.base.cast(), self.len);
        }
    }
}

struct Play<'a> {
    scene: &'static Scene,
    input: Input<'a>,
    tokens: Vec<u32>,
    offers: VecDeque<OfferId>,
    crafted: VecDeque<Crafted>,
    taken: Vec<(u32, u32)>,
    passed_on: Vec<PassedOn>,
}

fuzz_target!(|bytes: &[u8]| {
    let scene = scene();
    // The honest process has a mailbox.
    device().want_segment(OfferId { device: 0, index: 0, use_count: 0 }).expect("a mailbox");
    let mut play = Play {
        scene,
        input: Input(bytes),
        tokens: Vec::new(),
        offers: VecDeque::new(),
        crafted: VecDeque::new(),
        taken: Vec::new(),
        passed_on: Vec::new(),
    };
    while !play.input.is_over() {
        play.step();
    }
    play.end();
});

impl Play<'_> {
    fn step(&mut self) {
        let scene = self.scene;
        let mut input = Input(self.input.0);
        match input.below(16) {
            0..3 => {
                scene.attacker.scribble(&mut input, &scene.places, &scene.known);
                self.input = Input(input.0);
            }
            3 => {
                self.input = Input(input.0);
                self.send_mail();
            }
            4 => {
                self.input = Input(input.0);
                self.scribble_segment();
            }
            what => {
                let (a, b) = (input.u8().into(), input.u32());
                let attacker = &scene.attacker;
                attacker.during(&mut input, &scene.places, &scene.known, || self.act(what, a, b));
                self.input = Input(input.0);
            }
        }
    }

    /// A call of the honest end.
    fn act(&mut self, what: usize, a: usize, b: u32) {
        let device = device();
        let some_offer = match self.offers.get(a % 8) {
            Some(&id) => id,
            None => OfferId { device: 0, index: b, use_count: a as u32 & 3 },
        };
        match what {
            5 => self.tokens.extend(device.board().register_listener(NETNS, endpoint(a % 9)).ok()),
            6 => {
                let token = if a & 1 == 0 { self.tokens.pop().unwrap_or(b) } else { b };
                device.board().unregister_listener(token);
            }
            7 => {
                _ = device.board().is_listening((a & 1 == 0).then_some(NETNS), endpoint(a / 2 % 9))
            }
            8 => {
                let dmb = DmbRef { segment: b.into(), slot: b >> 16, usage: b };
                if let Ok(id) = device.board().offer(&tuple(a), dmb) {
                    assert!((id.index as usize) < layout::OFFERS);
                    self.offers.push_front(id);
                }
            }
            9 => device.board().clear_offer(some_offer),
            10 => {
                let to = device.board().wanted_by(some_offer).unwrap_or(PeerProcess(b));
                if let Ok(own) = segment::take_slot(segment::LOOPBACK, &tuple(a)) {
                    self.taken.push((own.segment.index, own.slot));
                    touch(&own.segment.map, own.segment.map.len());
                    let fd = segment::fd_of(own.segment.index).expect("an own segment");
                    let _ = device.push_segment(some_offer, to, fd);
                }
            }
            11 => {
                let words = tuple(a).words();
                let Some(found) = device.board().find_offer(&words) else { return };
                assert_eq!(found.id.index as usize % OFFER_BUCKETS, bucket(&words));
                self.attach(found.dmb, found.id);
            }
            12 => {
                let dmb = DmbRef { segment: u64::from(b & 7), slot: b >> 3, usage: 0 };
                self.attach(dmb, some_offer);
            }
            13 => {
                // As `clc::take_mail` does.
                for _ in 0..1000 {
                    let Some(mail) = device.receive() else { return };
                    let _ = segment::map_peer(fd_of(mail));
                }
                panic!("mail without end");
            }
            14 if a < 0x80 => self.pass_on(a, b),
            14 if a < 0xf0 => _ = device.is_identity_alive(u64::from(b) | (a as u64) << 32),
            14 => {
                match a & 1 {
                    0 => device.after_fork(false),
                    _ => device.leave(),
                }
                // Others are swept.
                let me = device.own_identity();
                assert_eq!(me.map(|me| me as u32), Ok(self.scene.world.index));
            }
            _ => {
                if let Some((segment, slot)) = self.taken.pop() {
                    segment::let_go(segment, Some(slot), false);
                }
            }
        }
    }

    /// Who holds a socket that is passed on.
    fn pass_on(&mut self, a: usize, b: u32) {
        let device = device();
        let cookie = COOKIES[a >> 3 & 1];
        let some = self.passed_on.last().copied().filter(|_| b & 1 == 0).unwrap_or(PassedOn(b));
        let whom = match b >> 1 & 3 {
            0 => Receiver::Program(7),
            1 => Receiver::Channel(b.into()),
            2 if b & 32 != 0 => Receiver::Child(7),
            2 => Receiver::this_program(),
            _ => Receiver::Unknown,
        };
        match a % 8 {
            0 => {
                // A pid that lives, and one that no process has.
                let alone =
                    [None, Some(std::process::id()), Some(i32::MAX as u32)][(b as usize >> 4) % 3];
                self.passed_on.extend(device.entrust(cookie, b & 8 != 0, alone));
            }
            1 => _ = device.is_about(some, cookie),
            2 => _ = device.hand_over(some, whom),
            3 => _ = device.call_off(some, whom),
            4 => {
                if let Some((passed_on, _)) = device.claim(cookie, &[Receiver::Child(7), whom]) {
                    self.passed_on.push(passed_on);
                }
            }
            5 if b & 16 != 0 => device.rename(some, Receiver::Child(7), whom),
            5 => _ = device.is_sole(some),
            6 if b & 16 != 0 => device.name_holder(some, b >> 8),
            6 if b & 32 != 0 => device.take_name_back(some),
            _ => device.release(some),
        }
    }

    /// What the acceptor does about an offer.
    fn attach(&self, dmb: DmbRef, id: OfferId) {
        match segment::use_peer(dmb.segment) {
            Some(segment::InUse { index, map, .. }) => {
                touch(&map, map.len());
                assert!(map.slot(dmb.slot).is_ok() == (dmb.slot < map.slots()));
                segment::unuse(index);
            }
            None => _ = device().want_segment(id),
        }
    }

    fn send_mail(&mut self) {
        let input = &mut self.input;
        let how = input.u8();
        let bytes = input.below(4);
        let count = if how & 1 == 0 { 1 } else { usize::from(how >> 4) };
        let mut fds = Vec::new();
        for _ in 0..count {
            match self.input.below(4) {
                0 => fds.push(self.scene.pipe),
                1 if how & 8 != 0 => fds.push(self.scene.world.device_file),
                1 => fds.push(self.scene.mailbox),
                _ => {
                    let fd = self.craft();
                    fds.push(fd);
                }
            }
        }
        let scene = self.scene;
        let to = scene.world.mailbox(scene.world.index);
        if mail(scene.mailbox, &to, &[1, 7, 7, 7][..bytes], &fds) && how & 2 == 0 {
            scene.world.tables().processes[scene.world.index as usize].mail.fetch_add(1, Relaxed);
        }
        for fd in fds {
            if ![scene.pipe, scene.mailbox, scene.world.device_file].contains(&fd) {
                // SAFETY: a descriptor of `craft`.
                unsafe { libc::close(fd) };
            }
        }
    }

    /// A file that may be a segment.
    fn craft(&mut self) -> i32 {
        let input = &mut self.input;
        let (how, slots, shift) =
            (input.u8(), u32::from(input.u8()), 14 + u32::from(input.u8() & 3));
        let slots = if how & 1 == 0 { slots & 3 } else { slots };
        let mut len = segment_len(slots, shift, 0).unwrap_or(PAGE).min(64 << 20);
        if how & 2 != 0 {
            len = usize::from(input.u16());
        }
        let all = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        let seals = if how & 4 != 0 { i32::from(input.u8()) & 0x1f } else { all };
        let fd = memfd(len, 0);
        let mapped = len.max(PAGE);
        if len >= PAGE {
            // SAFETY: a fresh mapping of the memfd.
            let base = unsafe {
                let both = libc::PROT_READ | libc::PROT_WRITE;
                libc::mmap(std::ptr::null_mut(), mapped, both, libc::MAP_SHARED, fd, 0)
            };
            assert_ne!(base, libc::MAP_FAILED);
            // SAFETY: the mapping's first page; all fields are atomics.
            let header = unsafe { &*base.cast::<SegmentHeader>() };
            header.magic.store(SEGMENT_MAGIC, Relaxed);
            header.version.store(SEGMENT_VERSION, Relaxed);
            header.slots.store(slots, Relaxed);
            header.ring_shift.store(shift, Relaxed);
            header.id.store(u64::from(how >> 3 & 7), Relaxed);
            header.owner.store(u64::from(self.scene.world.index) | 1 << 32, Relaxed);
            if self.crafted.len() == SEGMENTS {
                self.crafted.pop_front();
            }
            // SAFETY: no pointers.
            let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
            let crafted = Crafted { fd: own, base: base.cast(), len: mapped, is_cut: false };
            self.crafted.push_back(crafted);
        }
        // SAFETY: no pointers. It fails while a writable mapping exists, if writing is to be sealed.
        unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) };
        fd
    }

    fn scribble_segment(&mut self) {
        let which = self.input.below(SEGMENTS);
        let cut = self.input.u8() & 3 == 0;
        let Some(crafted) = self.crafted.get_mut(which) else { return };
        // SAFETY: no pointers. Whoever has it mapped and touches it next gets SIGBUS, if no seal is in the way.
        if crafted.is_cut || (cut && unsafe { libc::ftruncate(crafted.fd, 0) } == 0) {
            crafted.is_cut = true;
            return;
        }
        let len = crafted.len.min(SLOTS_OFFSET + size_of::<Slot>());
        // SAFETY: the attacker's own mapping; the honest end's place does not matter, it is not in a call.
        let attacker = unsafe { Attacker::new(crafted.base, len, crafted.base) };
        let known = [SEGMENT_MAGIC, u64::from(SEGMENT_VERSION), 1, 14, 15];
        attacker.scribble(&mut self.input, &[0..48, 0..len], &known);
    }

    /// Everything as it was, by honest means where there are any.
    fn end(mut self) {
        let (scene, device) = (self.scene, device());
        self.crafted.clear();
        for place in &scene.places[1..] {
            // SAFETY: inside the attacker's mapping.
            unsafe { scene.world.device.add(place.start).write_bytes(0, place.len()) };
        }
        if !scene.world.dir.join(format!("v5.m.{ATTACKER}")).exists() {
            // It was swept.
            let again = scene.world.open_mailbox(ATTACKER);
            // SAFETY: descriptors of our own.
            unsafe {
                libc::dup2(again, scene.mailbox);
                libc::close(again);
            }
        }
        let me = &scene.world.tables().processes[scene.world.index as usize];
        me.in_use.store(1, Relaxed);
        me.incarnation.store(1, Relaxed);
        me.mail.store(u32::MAX, Relaxed);
        while let Some(mail) = device.receive() {
            let _ = segment::map_peer(fd_of(mail));
        }
        for (segment, slot) in self.taken.drain(..) {
            segment::let_go(segment, Some(slot), false);
        }
        let mut drop_it = [0u8; 8];
        // SAFETY: a buffer of that size; descriptors that come along are dropped by the kernel.
        while unsafe { libc::recv(scene.mailbox, drop_it.as_mut_ptr().cast(), 8, 0) } >= 0 {}
        scene.world.check();
    }
}

/// Every slot and ring is where the mapping is.
fn touch(map: &Segment, len: usize) {
    let inside = map.base().addr()..map.base().addr() + len;
    let full = 1 << map.shifts().0;
    for index in [0, map.slots() / 2, map.slots() - 1] {
        let slot = std::ptr::from_ref(map.slot(index).expect("a slot")).addr();
        assert!(inside.contains(&slot) && slot + size_of::<Slot>() <= inside.end);
        for sender in [CLIENT, ACCEPTOR] {
            let ring = map.ring(index, sender).expect("a ring");
            let start = if sender == CLIENT { ring.meet().wrapping_sub(full) } else { ring.meet() };
            assert!(inside.contains(&start.addr()) && start.addr() + full <= inside.end);
            // SAFETY: inside the mapping (above).
            unsafe { start.add(full - 1).read_volatile() };
        }
    }
    assert!(map.slot(map.slots()).is_err());
}
