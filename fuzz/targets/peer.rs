//! A connection of the whole library, from the calls of the C library down to the kernel's TCP, whose peer is hostile:
//! it writes any word of the slot at any time, sends and takes any bytes of TCP, and ends the connection as it likes.
//! Every call of the honest end comes back, gives bytes of this connection only, and leaves its own where they belong.
#![no_main]

use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use libfuzzer_sys::fuzz_target;
use usmc::api;
use usmc::fuzzing::{self, Endpoint, Tuple, layout, segment};
use usmc_fuzz::attacker::Attacker;
use usmc_fuzz::input::Input;
use usmc_fuzz::memory::memfd;
use usmc_fuzz::world::{World, mail, world};
use usmc_shm::board::{OFFER_WAYS, Offer, offer_phase};
use usmc_shm::layout::{
    ACCEPTOR, ARM_TCP, BY_SENDER, CLIENT, RETURNED, SEGMENT_MAGIC, SEGMENT_VERSION, SLOT_ATTACHED,
    SLOT_CONFIRMED, SLOT_OFFERED, SLOTS_OFFSET, SWITCHING, SegmentHeader, Slot, TCP_AGAIN, TX_BACK,
    TX_RING, TXF_BACK, TXF_CLOSED, TXF_DONE, TXF_LEFT, TXF_LOOK, data_offset, far_offset, near_len,
    segment_len, window_word,
};
use usmc_shm::layout::{TXF_ABORT, TXF_SHUT};

const SHIFT: u32 = 14;
const RING: usize = 1 << SHIFT;
/// Of a call: more than a ring, also than the two of a slot.
const MOST: usize = 3 * RING;
/// What the honest end sends.
static OURS: [u8; MOST] = [0x5A; MOST];
/// What the attacker sends, in the ring and by TCP.
static THEIRS: [u8; MOST] = [0x11; MOST];
/// What stands in the honest end's buffers before.
static CANARY: [u8; MOST] = [0xC5; MOST];
/// The attacker's index on the device, and its segment.
const ATTACKER: u32 = 1;
const SEGMENT: u64 = 0x5e65_5e65;
const SEGMENT_SLOTS: u32 = 2;

struct Scene {
    world: &'static World,
    /// The honest end's listener, and the attacker's.
    listeners: [i32; 2],
    ends: [Endpoint; 2],
    netns: u64,
    mailbox: i32,
    /// The attacker's segment.
    segment: i32,
    header: *mut u8,
    /// The honest end's epoll set, pipe and UNIX sockets.
    epoll: i32,
    pipe: [i32; 2],
    unix: [i32; 2],
    file: i32,
}

// SAFETY: there is one thread.
unsafe impl Sync for Scene {}
// SAFETY: as above.
unsafe impl Send for Scene {}

fn listen(fd: i32, is_honest: bool) -> Endpoint {
    let addr = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes([127, 0, 0, 1]) },
        sin_zero: [0; 8],
    };
    // SAFETY: a valid address.
    unsafe {
        let len = size_of::<libc::sockaddr_in>() as u32;
        assert_eq!(libc::bind(fd, (&raw const addr).cast(), len), 0, "bind");
        let done = if is_honest { api::listen(fd, 16) } else { libc::listen(fd, 16) };
        assert_eq!(done, 0, "listen");
    }
    name(fd)
}

/// Gives a client an address that few others have had of late: of one alone there are not ports enough for what is left
/// in TIME_WAIT.
fn bind_anywhere(fd: i32) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    const IP_BIND_ADDRESS_NO_PORT: i32 = 24;
    let [_, a, b, c] = NEXT.fetch_add(1, Relaxed).to_be_bytes();
    let addr = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes([127, a, b, c & 0x7f | 1]) },
        sin_zero: [0; 8],
    };
    let on = 1i32;
    // SAFETY: a valid option and address.
    unsafe {
        libc::setsockopt(fd, libc::IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, (&raw const on).cast(), 4);
        let len = size_of::<libc::sockaddr_in>() as u32;
        assert_eq!(libc::bind(fd, (&raw const addr).cast(), len), 0, "bind");
    }
}

/// libFuzzer's timer may interrupt connect(2), which goes on then.
fn finish_connect(fd: i32, done: i32) {
    let why = std::io::Error::last_os_error();
    assert!(done == 0 || why.kind() == std::io::ErrorKind::Interrupted, "connect: {why}");
    let mut pollfd = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one pollfd.
    while done != 0 && unsafe { libc::poll(&raw mut pollfd, 1, 1000) } != 1 {}
}

/// Its own end.
fn name(fd: i32) -> Endpoint {
    // SAFETY: all-zero is valid, and of the size that is stated.
    unsafe {
        let mut storage: libc::sockaddr_storage = std::mem::zeroed();
        let mut len = size_of::<libc::sockaddr_storage>() as u32;
        assert_eq!(
            libc::getsockname(fd, (&raw mut storage).cast(), &raw mut len),
            0,
            "getsockname"
        );
        Endpoint::from_sockaddr(&storage, len as usize).expect("an address")
    }
}

fn scene() -> &'static Scene {
    static SCENE: OnceLock<Scene> = OnceLock::new();
    SCENE.get_or_init(|| {
        let world = world();
        let all = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        let len = segment_len(SEGMENT_SLOTS, SHIFT, 0).expect("within the limits");
        let segment = memfd(len, all);
        let (mut pipe, mut unix) = ([0; 2], [0; 2]);
        // SAFETY: plain calls with valid arguments.
        let (listeners, header, epoll) = unsafe {
            libc::signal(libc::SIGPIPE, libc::SIG_IGN);
            libc::signal(libc::SIGURG, libc::SIG_IGN);
            assert_eq!(libc::pipe2(pipe.as_mut_ptr(), libc::O_NONBLOCK), 0);
            let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK;
            assert_eq!(libc::socketpair(libc::AF_UNIX, kind, 0, unix.as_mut_ptr()), 0);
            let header = libc::mmap(
                ptr::null_mut(),
                SLOTS_OFFSET,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                segment,
                0,
            );
            assert_ne!(header, libc::MAP_FAILED);
            let ours = api::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
            let theirs = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
            ([ours, theirs], header.cast::<u8>(), api::epoll_create1(0))
        };
        let ends = [listen(listeners[0], true), listen(listeners[1], false)];
        let mailbox = world.open_mailbox(ATTACKER);
        let netns = fuzzing::netns(listeners[0]);
        let file = memfd(MOST, 0);
        // SAFETY: a buffer of that size.
        unsafe { assert_eq!(libc::pwrite(file, OURS.as_ptr().cast(), MOST, 0), MOST as isize) };
        world.settle();
        let scene = Scene {
            world,
            listeners,
            ends,
            netns,
            mailbox,
            segment,
            header,
            epoll,
            pipe,
            unix,
            file,
        };
        scene.register();
        scene
    })
}

impl Scene {
    /// The attacker's listener is in the registry.
    fn register(&self) {
        let port = self.ends[1].port;
        let first = (port as usize).wrapping_mul(0x9e3b) >> 2;
        let place = &self.world.tables().listeners[first % layout::LISTENERS];
        let bits = u128::from_be_bytes(self.ends[1].addr);
        place.port.store(port.into(), Relaxed);
        place.netns.store(self.netns, Relaxed);
        place.addr[0].store((bits >> 64) as u64, Relaxed);
        place.addr[1].store(bits as u64, Relaxed);
        place.state.store(ATTACKER + 1, Relaxed);
        let at = self.ends[1];
        assert!(
            fuzzing::device().board().is_listening(Some(self.netns), at),
            "the registry has changed"
        );
    }

    /// The attacker's segment is in order, and the honest end has it.
    fn hand_over(&self) {
        // SAFETY: the attacker's mapping; all fields are atomics.
        let header = unsafe { &*self.header.cast::<SegmentHeader>() };
        header.magic.store(SEGMENT_MAGIC, Relaxed);
        header.version.store(SEGMENT_VERSION, Relaxed);
        header.slots.store(SEGMENT_SLOTS, Relaxed);
        header.ring_shift.store(SHIFT, Relaxed);
        header.retired.store(0, Relaxed);
        header.id.store(SEGMENT, Relaxed);
        header.owner.store(fuzzing::device().own_identity().expect("a device"), Relaxed);
        if let Some(segment::InUse { index, .. }) = segment::use_peer(SEGMENT) {
            segment::unuse(index);
            return;
        }
        let me = self.world.index;
        let none = fuzzing::OfferId { device: 0, index: 0, use_count: 0 };
        fuzzing::device().want_segment(none).expect("a mailbox");
        assert!(mail(self.mailbox, &self.world.mailbox(me), &[1], &[self.segment]), "mail");
        self.world.tables().processes[me as usize].mail.fetch_add(1, Relaxed);
        let Some(fuzzing::Mail::Segment(fd)) = fuzzing::device().receive() else {
            panic!("the segment did not come");
        };
        assert!(segment::map_peer(fd).is_ok(), "the segment is in order");
    }

    fn offers(&self, tuple: &Tuple) -> [&Offer; OFFER_WAYS] {
        let bucket = fuzzing::hash(&tuple.words()) as usize % (layout::OFFERS / OFFER_WAYS);
        let offers = &self.world.tables().offers;
        std::array::from_fn(|way| &offers[way * (layout::OFFERS / OFFER_WAYS) + bucket])
    }
}

/// A connection: the honest end's descriptor and the attacker's.
struct Play {
    scene: &'static Scene,
    honest: i32,
    theirs: i32,
    /// The honest end's part.
    side: usize,
    /// The honest end has closed it.
    is_closed: bool,
    /// Bytes that the attacker has sent by TCP.
    sent: u64,
    slot: Option<Known>,
}

/// What the attacker has of the slot.
struct Known {
    slot: &'static Slot,
    attacker: Attacker,
    /// The ring towards the honest end, and the one it writes.
    rx: *mut u8,
    numbers: Vec<u64>,
}

fuzz_target!(|bytes: &[u8]| {
    let scene = scene();
    let mut input = Input(bytes);
    scene.hand_over();
    let how = input.u8();
    let mut play = Play::begin(scene, usize::from(how & 1), how >> 1 & 3);
    if how & 8 != 0 {
        fuzzing::share(play.honest);
    }
    if how & 16 != 0 {
        play.switch();
    }
    while !input.is_over() {
        play.step(&mut input);
    }
    play.end();
});

impl Play {
    /// Connects. The honest end is the client or the acceptor, and gets as far as `far`: before the handshake, into it,
    /// or (two of three) into the ring.
    fn begin(scene: &'static Scene, side: usize, far: u8) -> Play {
        // SAFETY: valid addresses.
        let (honest, theirs) = unsafe {
            let nonblock = libc::SOCK_NONBLOCK;
            let server = scene.ends[usize::from(side == CLIENT)];
            let addr = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: server.port.to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes([127, 0, 0, 1]) },
                sin_zero: [0; 8],
            };
            let (addr, len) = ((&raw const addr).cast(), size_of::<libc::sockaddr_in>() as u32);
            let no_addr = (ptr::null_mut(), ptr::null_mut());
            if side == CLIENT {
                let honest = api::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
                bind_anywhere(honest);
                let done = api::connect(honest, addr, len);
                finish_connect(honest, done);
                let listener = scene.listeners[1];
                let theirs = libc::accept4(listener, no_addr.0, no_addr.1, nonblock);
                assert_eq!(api::fcntl(honest, libc::F_SETFL, libc::O_NONBLOCK as u64), 0);
                (honest, theirs)
            } else {
                let theirs = libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
                bind_anywhere(theirs);
                let done = libc::connect(theirs, addr, len);
                finish_connect(theirs, done);
                assert_eq!(libc::fcntl(theirs, libc::F_SETFL, nonblock), 0);
                let listener = scene.listeners[0];
                (api::accept4(listener, no_addr.0, no_addr.1, nonblock), theirs)
            }
        };
        assert!(honest >= 0 && theirs >= 0, "a connection");
        let is_closed = false;
        let mut play = Play { scene, honest, theirs, side, is_closed, sent: 0, slot: None };
        if far > 0 {
            play.shake_hands(far > 1);
        }
        play
    }

    /// What a correct peer does.
    fn shake_hands(&mut self, confirm: bool) {
        let (scene, netns) = (self.scene, self.scene.netns);
        let (ours, theirs) = (name(self.honest), name(self.theirs));
        let (client, server) = if self.side == CLIENT { (ours, theirs) } else { (theirs, ours) };
        let tuple = Tuple { netns, client, server };
        let word = |phase: u64| phase | u64::from(ATTACKER) << 8 | 7 << 32;
        let offers = scene.offers(&tuple);
        if self.side == ACCEPTOR {
            for (place, value) in offers[0].tuple.iter().zip(tuple.words()) {
                place.store(value, Relaxed);
            }
            offers[0].segment.store(SEGMENT, Relaxed);
            offers[0].slot.store(0, Relaxed);
            offers[0].usage.store(7, Relaxed);
            offers[0].state.store(word(offer_phase::OFFERED.into()), Relaxed);
            // SAFETY: the attacker's mapping of the whole segment is made for this.
            let slot = unsafe {
                let (base, len) = (mapping_of(scene.segment), SLOTS_OFFSET);
                base.add(len).write_bytes(0, data_offset(SEGMENT_SLOTS) - len);
                &*base.add(len).cast::<Slot>()
            };
            for side in [CLIENT, ACCEPTOR] {
                slot.dir[side].producer.window.store(window_word(0, SHIFT), Relaxed);
                slot.dir[side].arm.rx.store(ARM_TCP, Relaxed);
                slot.end[side].refs.store(1, Relaxed);
            }
            slot.control.state.store(7 << 8 | SLOT_OFFERED, Relaxed);
        }
        // It lasts: with the fourth send the handshake begins.
        for _ in 0..4 {
            self.send(1);
        }
        let Some(slot) = fuzzing::slot_of(self.honest) else {
            offers.iter().for_each(|offer| offer.state.store(0, Relaxed));
            return;
        };
        if self.side == CLIENT {
            // First contact, each time.
            let offer = offers.iter().find(|offer| offer.state.load(Relaxed) as u8 == 2);
            if let Some(offer) = offer {
                offer.wanted_by.store(ATTACKER, Relaxed);
                let wanted = offer.state.load(Relaxed) & !0xff | 3;
                offer.state.store(wanted, Relaxed);
                self.look();
                let pushed = offer.state.load(Relaxed) as u8 == 4;
                assert!(pushed, "the segment was not handed over");
            }
            let usage = slot.control.state.load(Relaxed) & !0xff;
            slot.control.state.store(usage | SLOT_ATTACHED, Relaxed);
        } else if confirm {
            slot.control.state.store(7 << 8 | SLOT_CONFIRMED, Relaxed);
        }
        self.know(slot);
        if confirm {
            self.look();
            assert!(fuzzing::is_ring(self.honest), "no way into the ring");
        }
        offers.iter().for_each(|offer| offer.state.store(0, Relaxed));
    }

    fn know(&mut self, slot: &'static Slot) {
        let index = fuzzing::offered(self.honest).expect("a slot").1 as usize;
        let at = ptr::from_ref(slot).cast::<u8>().cast_mut();
        // SAFETY: the segment that the slot is in, as its owner made it.
        let (base, slots) = unsafe {
            let base = at.sub(SLOTS_OFFSET + index * size_of::<Slot>());
            (base, (*base.cast::<SegmentHeader>()).slots.load(Relaxed))
        };
        // SAFETY: the ring of the other end in that segment.
        let rx = unsafe { base.add(data_offset(slots) + ((index * 2 + (1 - self.side)) << SHIFT)) };
        // SAFETY: the same; RING bytes.
        unsafe { rx.write_bytes(THEIRS[0], RING) };
        // SAFETY: as above.
        unsafe { self.fill_far(base, index) };
        // SAFETY: the mapping stays while the connection lives; it is its own other view.
        let attacker = unsafe { Attacker::new(at, size_of::<Slot>(), at) };
        let flags = [TXF_DONE, TXF_CLOSED, TXF_ABORT, TXF_SHUT, TXF_LEFT, TXF_BACK, TXF_LOOK];
        let mut numbers: Vec<u64> = flags.map(u64::from).to_vec();
        numbers.extend([0, 1, 2, TCP_AGAIN, BY_SENDER, RING as u64, RING as u64 * 2]);
        numbers.extend([SWITCHING, RETURNED, TX_RING, TX_BACK, TXF_DONE | TXF_SHUT].map(u64::from));
        // Where its socket is, and what it may say of that.
        slot.end[1 - self.side].pid.store(std::process::id(), Relaxed);
        let names = std::fs::metadata("/proc/self/ns/pid").expect("our own").ino();
        slot.end[1 - self.side].pids.store(names as u32, Relaxed);
        slot.end[1 - self.side].fd.store(self.theirs as u32, Relaxed);
        numbers.extend([std::process::id(), self.theirs as u32, self.honest as u32].map(u64::from));
        numbers.push(self.scene.world.device_fd as u64);
        self.slot = Some(Known { slot, attacker, rx, numbers });
    }

    /// A window may lie in the far part of the attacker's ring, too. What the honest end has given back of that begins at
    /// its start.
    ///
    /// # Safety
    /// `base` is the whole mapping of a segment, and `index` a slot of it.
    unsafe fn fill_far(&self, base: *mut u8, index: usize) {
        // SAFETY: the caller's contract: the header first, then the far part where the file has one.
        unsafe {
            let header = &*base.cast::<SegmentHeader>();
            let (slots, far_shift) = (header.slots.load(Relaxed), header.far_shift.load(Relaxed));
            if far_shift == 0 {
                return;
            }
            let near = near_len(slots, header.ring_shift.load(Relaxed)).expect("a segment");
            let far = base.add(far_offset(near) + ((index * 2 + (1 - self.side)) << far_shift));
            if far.read() != THEIRS[0] {
                far.write_bytes(THEIRS[0], 1 << far_shift);
            }
        }
    }

    /// The attacker's direction goes to the ring.
    fn switch(&mut self) {
        if let Some(known) = &self.slot {
            let producer = &known.slot.dir[1 - self.side].producer;
            producer.boundary.store(self.sent + 1, Relaxed);
            producer.state.store(TX_RING, Relaxed);
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let what = input.u8();
        let (a, b) = (usize::from(input.u16()), input.u8());
        if what & 1 == 0 {
            self.attack(what >> 1, a, b, input);
            return;
        }
        let places = places();
        match self.slot.take() {
            Some(known) => {
                let call = || self.act(what >> 1, a, b);
                known.attacker.during(input, &places, &known.numbers, call);
                if !self.is_closed && fuzzing::slot_of(self.honest).is_some() {
                    self.slot = Some(known);
                }
            }
            None => self.act(what >> 1, a, b),
        }
    }

    /// The attacker's moves: those of a correct peer, and others.
    fn attack(&mut self, what: u8, a: usize, b: u8, input: &mut Input<'_>) {
        match what % 16 {
            0 => self.tcp_send(a % 3000),
            1 => self.tcp_take(),
            // SAFETY: no pointers.
            2 if b & 0xf0 == 0 => unsafe { _ = libc::shutdown(self.theirs, i32::from(b) % 3) },
            2 => self.switch(),
            _ => {}
        }
        let side = self.side;
        let Some(known) = &self.slot else { return };
        let (ours, theirs) = (&known.slot.dir[side], &known.slot.dir[1 - side]);
        match what % 16 {
            3 => {
                theirs.producer.bells_sent.fetch_add(1, Relaxed);
                self.tcp_send(1);
            }
            4 => {
                let prod = theirs.producer.prod.load(Relaxed);
                theirs.producer.prod.store(prod.wrapping_add(a as u64 % 5000), Relaxed);
            }
            5 => ours.consumer.cons.store(ours.producer.prod.load(Relaxed), Relaxed),
            6 => {
                let taken = theirs.consumer.cons.load(Relaxed);
                theirs.producer.prod.store(taken.wrapping_add(a as u64), Relaxed);
            }
            7 => {
                ours.arm.rx.store(u32::from(b & 3), Relaxed);
                theirs.arm.tx.store(u32::from(b >> 2 & 3), Relaxed);
            }
            8 => drop(ours.producer.flags.fetch_or(TXF_LEFT, Relaxed)),
            9 => {
                theirs.producer.resume.store(self.sent + 1 + u64::from(b & 1), Relaxed);
                theirs.producer.state.store(TX_BACK, Relaxed);
                theirs.producer.flags.fetch_or(TXF_BACK, Relaxed);
            }
            10 => drop(theirs.producer.flags.fetch_or(b.into(), Relaxed)),
            12 => {
                let token = (a as u32 % 64 + 1) << 16 | u32::from(b);
                known.slot.end[side].passed_on.store(token, Relaxed);
            }
            11 => {
                let numbers = [self.honest, self.scene.world.device_fd, a as i32 % 64];
                let fd = numbers[usize::from(b) % numbers.len()];
                known.slot.end[1 - side].fd.store(fd as u32, Relaxed);
            }
            _ => known.attacker.scribble(input, &places(), &known.numbers),
        }
    }

    /// Data or doorbells.
    fn tcp_send(&mut self, len: usize) {
        // SAFETY: a buffer of at least that size.
        let n = unsafe { libc::send(self.theirs, THEIRS.as_ptr().cast(), len, libc::MSG_NOSIGNAL) };
        self.sent += n.max(0) as u64;
    }

    fn tcp_take(&self) {
        let mut buffer = [0u8; 4096];
        // SAFETY: a buffer of that size.
        unsafe { libc::recv(self.theirs, buffer.as_mut_ptr().cast(), buffer.len(), 0) };
    }

    /// A call of the honest end.
    fn act(&mut self, what: u8, a: usize, b: u8) {
        if self.is_closed {
            return;
        }
        let (fd, scene) = (self.honest, self.scene);
        match what % 20 {
            0..3 => self.send(a % MOST),
            3..6 => self.receive(a % MOST, b),
            6 => self.look(),
            7 => self.watch(b),
            // SAFETY: numbers that live on this stack.
            8 => unsafe {
                let mut count = 0i32;
                let asked = if b & 1 == 0 { libc::FIONREAD } else { libc::TIOCOUTQ };
                if api::ioctl(fd, asked, (&raw mut count).addr() as u64) == 0 {
                    assert!(count >= 0);
                }
            },
            9 if b & 0xc0 == 0 => {
                // SAFETY: no pointers.
                unsafe { api::shutdown(fd, i32::from(b) % 3) };
            }
            10 => {
                let (mut value, mut len) = (0i32, 4u32);
                let name = if b & 1 == 0 { libc::SO_ERROR } else { libc::SO_RCVLOWAT };
                let value = (&raw mut value).cast();
                // SAFETY: a number that lives on this stack.
                unsafe { api::getsockopt(fd, libc::SOL_SOCKET, name, value, &raw mut len) };
            }
            11 => {
                let value = a as i32 % 20000;
                let names = [libc::SO_RCVLOWAT, libc::SO_SNDBUF, libc::SO_RCVBUF];
                let name = names[usize::from(b) % names.len()];
                let value = (&raw const value).cast();
                // SAFETY: as above.
                unsafe { api::setsockopt(fd, libc::SOL_SOCKET, name, value, 4) };
            }
            12 => {
                let mut offset = 0;
                // SAFETY: as above.
                unsafe { api::sendfile(fd, scene.file, &raw mut offset, a % MOST) };
            }
            13 => self.splice(a % MOST, b),
            14 if b < 16 => self.pass_on(),
            15 if b < 16 => {
                // SAFETY: a byte.
                unsafe { api::send(fd, OURS.as_ptr().cast(), 1, libc::MSG_OOB) };
            }
            16 if b < 16 => self.close(),
            17 => self.receive(1, 0),
            _ => self.send(1),
        }
    }

    fn send(&mut self, len: usize) {
        // SAFETY: a buffer of at least that size.
        let n = unsafe { api::send(self.honest, OURS.as_ptr().cast(), len, libc::MSG_NOSIGNAL) };
        assert!(n <= len as isize, "{n} of {len} bytes sent");
    }

    fn receive(&mut self, len: usize, how: u8) {
        let mut flags = 0;
        for (bit, flag) in [libc::MSG_PEEK, libc::MSG_WAITALL, libc::MSG_TRUNC].iter().enumerate() {
            flags |= if how & 1 << bit != 0 { *flag } else { 0 };
        }
        let mut buffer = CANARY;
        // SAFETY: a buffer of at least that size.
        let n = unsafe { api::recv(self.honest, buffer.as_mut_ptr().cast(), len, flags) };
        assert!(n <= len as isize, "{n} bytes where {len} were wanted");
        let n = n.max(0) as usize;
        assert!(buffer[len..] == CANARY[len..], "written behind the buffer");
        assert!(flags & libc::MSG_TRUNC != 0 || buffer[..n] == THEIRS[..n], "bytes from elsewhere");
    }

    fn look(&mut self) {
        let events = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP | libc::POLLPRI;
        let mut pollfd = libc::pollfd { fd: self.honest, events, revents: 0 };
        // SAFETY: one pollfd.
        let n = unsafe { api::poll(&raw mut pollfd, 1, 0) };
        assert!((0..=1).contains(&n), "poll: {n}");
    }

    fn watch(&mut self, how: u8) {
        const TOKEN: u64 = 0x7031_0000_0000_2d11;
        let wanted = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP;
        let edge = if how & 4 != 0 { libc::EPOLLET } else { 0 };
        let mut event = libc::epoll_event { events: (wanted | edge) as u32, u64: TOKEN };
        let op = [libc::EPOLL_CTL_ADD, libc::EPOLL_CTL_MOD, libc::EPOLL_CTL_DEL];
        let mut events = [event; 4];
        // SAFETY: events that live on this stack.
        let n = unsafe {
            let (epoll, op) = (self.scene.epoll, op[usize::from(how & 3) % 3]);
            api::epoll_ctl(epoll, op, self.honest, &raw mut event);
            api::epoll_wait(epoll, events.as_mut_ptr(), 4, 0)
        };
        let told = events.map(|e| (e.events, e.u64));
        assert!((0..=1).contains(&n), "epoll_wait: {n} {told:x?}");
        if n == 1 {
            let told = events[0].u64;
            assert_eq!(told, TOKEN);
        }
    }

    fn splice(&mut self, len: usize, how: u8) {
        let [read, write] = self.scene.pipe;
        let none = ptr::null_mut;
        let flags = libc::SPLICE_F_NONBLOCK;
        let mut buffer = CANARY;
        let at = buffer.as_mut_ptr().cast();
        // SAFETY: buffers of at least that size.
        unsafe {
            if how & 1 == 0 {
                libc::write(write, OURS.as_ptr().cast(), len.min(4096));
                api::splice(read, none(), self.honest, none(), len, flags);
                while libc::read(read, at, MOST) > 0 {}
            } else {
                let n = api::splice(self.honest, none(), write, none(), len, flags);
                assert!(n <= len as isize, "{n} bytes where {len} were wanted");
                // A pipe holds more than a ring.
                let got = libc::read(read, at, MOST).max(0);
                assert_eq!(got, n.max(0));
                assert!(buffer[..got as usize] == THEIRS[..got as usize], "bytes from elsewhere");
            }
        }
    }

    /// Somebody else gets the connection, too: it is TCP after that.
    fn pass_on(&mut self) {
        let mut control = [0u64; 3];
        let mut iov = libc::iovec { iov_base: OURS.as_ptr().cast_mut().cast(), iov_len: 1 };
        // SAFETY: all-zero is valid; the control buffer has room for one descriptor's message.
        unsafe {
            let mut msg: libc::msghdr = std::mem::zeroed();
            (msg.msg_iov, msg.msg_iovlen) = (&raw mut iov, 1);
            (msg.msg_control, msg.msg_controllen) = (control.as_mut_ptr().cast(), 24);
            let header = libc::CMSG_FIRSTHDR(&raw const msg);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(header).cast::<i32>().write_unaligned(self.honest);
            let sent = api::sendmsg(self.scene.unix[0], &raw const msg, 0);
            if sent >= 0 {
                assert!(!fuzzing::is_ring(self.honest), "passed on in the ring");
            }
            let mut byte = 0u8;
            while libc::recv(self.scene.unix[1], (&raw mut byte).cast(), 1, 0) >= 0 {}
        }
    }

    fn close(&mut self) {
        self.is_closed = true;
        // SAFETY: our descriptor.
        unsafe { api::close(self.honest) };
    }

    fn end(mut self) {
        if let Some(known) = self.slot.take() {
            // SAFETY: RING bytes of a mapping that stays while the connection lives.
            let ring = unsafe { std::slice::from_raw_parts(known.rx, RING) };
            assert!(ring == &THEIRS[..RING], "something was written into the ring that is read");
            // Else there are no slots left some day.
            known.slot.end[self.side].refs.store(1, Relaxed);
            known.slot.end[1 - self.side].refs.store(0, Relaxed);
        }
        if !self.is_closed {
            self.close();
        }
        let reset = libc::linger { l_onoff: 1, l_linger: 0 };
        let mut drop_it = [0u8; 8];
        // SAFETY: our descriptors, an option of that size, and a buffer.
        unsafe {
            let len = size_of::<libc::linger>() as u32;
            let option = (&raw const reset).cast();
            libc::setsockopt(self.theirs, libc::SOL_SOCKET, libc::SO_LINGER, option, len);
            libc::close(self.theirs);
            // Segments that were handed over.
            while libc::recv(self.scene.mailbox, drop_it.as_mut_ptr().cast(), 8, 0) >= 0 {}
        }
        self.scene.world.check();
    }
}

/// Where words are worth changing: the slot, and again the lines that matter most.
fn places() -> [Range<usize>; 5] {
    let (line, whole) = (128, size_of::<Slot>());
    [0..whole, line..3 * line, 3 * line..4 * line, 6 * line..7 * line, 4 * line..5 * line]
}

/// The attacker's own mapping of its segment.
fn mapping_of(segment: i32) -> *mut u8 {
    static BASE: OnceLock<usize> = OnceLock::new();
    *BASE.get_or_init(|| {
        let len = segment_len(SEGMENT_SLOTS, SHIFT, 0).expect("within the limits");
        usmc_fuzz::memory::map_guarded(segment, 0, len).addr()
    }) as *mut u8
}
