//! Two peers in a handshake, in one process: a TCP stream and a ring each way, one message queue each
//! way for RDMA, and a clock that only moves when nothing else can.

#![allow(clippy::large_enum_variant, reason = "there are two of each")]

use std::collections::VecDeque;
use std::time::Duration;

use smc_proto::decline::DeclineCode;
use smc_proto::handshake::client::{self, Accepted, ExpectAccept};
use smc_proto::handshake::server::{Choice, ExpectConfirm, ExpectProposal, Surroundings};
use smc_proto::handshake::{
    Agreement, Circumstances, ConfirmingLink, Ending, ExpectDecline, Fallback, Fault, Finished,
    Host, Path, SmcdSide, SmcrSide,
};
use smc_proto::ids::{BufferSize, Chid, Eid, MacAddr, MtuCode, PeerId, RoceGid, SmcdGid, U24};
use smc_proto::list::List;
use smc_proto::wire::clc::{self, Hostname, Message, Prefix, Reception, Release};
use smc_proto::wire::llc;

use super::stream::Stream;

/// What a peer has and is.
#[derive(Clone)]
pub struct Setup {
    pub host: Host,
    pub circumstances: Circumstances,
    /// The client's devices; a server has a device for each path in `paths`.
    pub devices: client::Devices,
    pub paths: Vec<Path>,
    /// CHIDs that a server reaches.
    pub chids: Vec<Chid>,
    pub same_subnet: bool,
    pub vlan_is_known: bool,
    /// Whether a link group with the peer exists here.
    pub has_link_group: bool,
    /// Whether a client that has none had one.
    pub lost_link_group: bool,
    /// Memory cannot be had, with this code.
    pub no_memory: Option<DeclineCode>,
    /// A server cannot use the client's memory, a client cannot make its link ready.
    pub no_link: Option<DeclineCode>,
    /// Reaches the peer's RoCEv2 port without a gateway.
    pub direct: bool,
    /// Wants eyecatchers in RMB elements.
    pub wants_eyecatchers: bool,
    /// What the application writes when the handshake is over.
    pub says: &'static [u8],
    /// What a client of another make says instead of what this crate makes it say.
    pub proposes: Option<fn(&mut clc::Proposal)>,
    /// What a server of another make understands of a Proposal; false: nothing.
    pub understands: Option<fn(&mut clc::Proposal) -> bool>,
}

/// How one handshake ended for one side.
#[derive(Debug)]
pub enum Outcome {
    Smc(Agreement),
    Ended(Ending),
}

impl Default for Outcome {
    /// As if the peer had hung up.
    fn default() -> Outcome {
        Outcome::Ended(Ending::Failed(Fault::Closed))
    }
}

/// Changes the bytes of the nth message, and says what becomes of the stream behind them.
pub type OnMessage<'f> = Box<dyn FnMut(usize, &mut Vec<u8>) -> Behind + 'f>;

/// What a test does to the streams.
pub struct Faults<'f> {
    /// For each CLC message (0: the first that is sent, and so on).
    pub clc: OnMessage<'f>,
    /// How long a CLC message is on its way.
    pub delay: Box<dyn FnMut(usize) -> Duration + 'f>,
    /// Whether the nth LLC message arrives.
    pub llc_arrives: Box<dyn FnMut(usize) -> bool + 'f>,
    /// How many of the bytes that are wanted are read at once.
    pub piece: Box<dyn FnMut() -> usize + 'f>,
    /// The applications write before each message, and where it stands is announced. Otherwise
    /// messages are at the start of the stream, as the kernel has them.
    pub early: bool,
}

/// What a stream does behind a message.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Behind {
    /// It goes on.
    Open,
    /// It ends there.
    Closed,
    /// Nothing arrives any more.
    Stalled,
}

impl Default for Faults<'_> {
    /// None.
    fn default() -> Self {
        Faults {
            clc: Box::new(|_, _| Behind::Open),
            delay: Box::new(|_| Duration::ZERO),
            llc_arrives: Box::new(|_| true),
            piece: Box::new(|| usize::MAX),
            early: false,
        }
    }
}

#[derive(Default)]
pub struct Result {
    pub client: Outcome,
    pub server: Outcome,
    /// What each application wrote, the client's first.
    pub wrote: [Vec<u8>; 2],
    /// What each read from TCP.
    pub read: [Vec<u8>; 2],
    /// What each read from shared memory, after that.
    pub ring: [Vec<u8>; 2],
    /// What came over TCP after SMC began.
    pub left: [Vec<u8>; 2],
    /// How long the handshake took.
    pub took: Duration,
    /// How many CLC messages were sent.
    pub messages: usize,
}

/// What each application writes when the handshake is over.
pub const FROM_CLIENT: &[u8] = b"\xe2\xd4\xc3\xd9\x01 the client's first bytes";
pub const FROM_SERVER: &[u8] = b"the server's";
/// What each writes before each message, if it does: it looks like one.
const EARLY: [&[u8]; 2] = [b"\xe2\xd4\xc3\xd9\x04\x00\x1c\x10 no Decline", b"220 ready\r\n"];

pub fn run(client: &Setup, server: &Setup, faults: Faults<'_>) -> Result {
    Pair::new(client, server, faults).run()
}

enum State {
    Accept(ExpectAccept),
    Proposal(ExpectProposal),
    Confirm(ExpectConfirm),
    Link(ConfirmingLink),
    Decline(ExpectDecline),
    Done(Outcome),
    Moving,
}

struct Peer {
    setup: Setup,
    state: State,
    deadline: Option<Duration>,
    reception: Reception,
    /// From the other peer.
    stream: Stream,
    rdma: VecDeque<Vec<u8>>,
    ring: Vec<u8>,
    /// Of the application.
    read: Vec<u8>,
    wrote: Vec<u8>,
}

struct Pair<'f> {
    /// Client, server.
    peers: [Peer; 2],
    faults: Faults<'f>,
    now: Duration,
    messages: usize,
    llc_messages: usize,
}

impl Peer {
    fn new(setup: &Setup) -> Peer {
        Peer {
            setup: setup.clone(),
            state: State::Moving,
            deadline: None,
            reception: Reception::new(),
            stream: Stream::default(),
            rdma: VecDeque::new(),
            ring: Vec::new(),
            read: Vec::new(),
            wrote: Vec::new(),
        }
    }
}

impl<'f> Pair<'f> {
    fn new(client: &Setup, server: &Setup, faults: Faults<'f>) -> Pair<'f> {
        let peers = [Peer::new(client), Peer::new(server)];
        Pair { peers, faults, now: Duration::ZERO, messages: 0, llc_messages: 0 }
    }

    fn run(mut self) -> Result {
        let setup = self.peers[1].setup.clone();
        match ExpectProposal::begin(setup.host, setup.circumstances) {
            Ok(state) => self.wait(1, State::Proposal(state)),
            Err(ending) => self.end(1, ending),
        }
        let setup = self.peers[0].setup.clone();
        match client::begin(setup.host, setup.circumstances, &setup.devices) {
            Ok((state, mut proposal)) => {
                if let (Message::Proposal(proposal), Some(change)) = (&mut proposal, setup.proposes)
                {
                    change(proposal);
                }
                self.send(0, &proposal);
                self.wait(0, State::Accept(state));
            }
            Err(ending) => self.end(0, ending),
        }
        while !self.peers.iter().all(|peer| matches!(peer.state, State::Done(_))) {
            if !(self.progress(0) | self.progress(1)) {
                self.time_passes();
            }
        }
        let mut result = Result { took: self.now, messages: self.messages, ..Result::default() };
        for (who, mut peer) in self.peers.into_iter().enumerate() {
            let rest = peer.stream.take(usize::MAX);
            let State::Done(outcome) = peer.state else { unreachable!() };
            match &outcome {
                Outcome::Smc(_) => (result.left[who], result.ring[who]) = (rest, peer.ring),
                Outcome::Ended(Ending::Fallback(_)) => peer.read.extend(rest),
                Outcome::Ended(Ending::Failed(_)) => {}
            }
            (result.read[who], result.wrote[who]) = (peer.read, peer.wrote);
            match who {
                0 => result.client = outcome,
                _ => result.server = outcome,
            }
        }
        result
    }

    fn wait(&mut self, who: usize, state: State) {
        let timeout = match &state {
            State::Accept(_) => ExpectAccept::TIMEOUT,
            State::Proposal(_) => ExpectProposal::TIMEOUT,
            State::Confirm(_) => ExpectConfirm::TIMEOUT,
            State::Link(link) => link.timeout(),
            State::Decline(_) => ExpectDecline::TIMEOUT,
            State::Done(_) | State::Moving => unreachable!(),
        };
        self.peers[who].deadline = Some(self.now + timeout);
        self.peers[who].state = state;
    }

    fn end(&mut self, who: usize, ending: Ending) {
        match &ending {
            Ending::Fallback(fallback) => {
                if let Some(decline) = fallback.decline {
                    self.send(who, &Message::Decline(decline));
                }
                self.write(who, self.peers[who].setup.says);
            }
            Ending::Failed(_) => self.peers[1 - who].stream.close(self.now),
        }
        self.peers[who].deadline = None;
        self.peers[who].state = State::Done(Outcome::Ended(ending));
    }

    fn established(&mut self, who: usize, agreement: Agreement) {
        let says = self.peers[who].setup.says;
        self.peers[who].wrote.extend(says);
        self.peers[1 - who].ring.extend(says);
        self.peers[who].deadline = None;
        self.peers[who].state = State::Done(Outcome::Smc(agreement));
    }

    /// The application writes, over TCP.
    fn write(&mut self, who: usize, bytes: &[u8]) {
        self.peers[who].wrote.extend(bytes);
        self.peers[1 - who].stream.write(self.now, bytes);
    }

    fn send(&mut self, who: usize, message: &Message) {
        if self.faults.early {
            self.write(who, EARLY[who]);
        }
        let mut buffer = [0; clc::MAX_LEN];
        let mut bytes = message.emit(&mut buffer).unwrap().to_vec();
        let arrives = self.now + (self.faults.delay)(self.messages);
        let behind = (self.faults.clc)(self.messages, &mut bytes);
        self.messages += 1;
        let stream = &mut self.peers[1 - who].stream;
        stream.announce();
        stream.write(arrives, &bytes);
        match behind {
            Behind::Open => {}
            Behind::Closed => stream.close(self.now),
            Behind::Stalled => stream.stall(),
        }
    }

    /// Does one thing that can be done without waiting; false if there is none.
    fn progress(&mut self, who: usize) -> bool {
        if let State::Done(_) = self.peers[who].state {
            return false;
        }
        if let Some(bytes) = self.peers[who].rdma.pop_front() {
            self.on_llc(who, &bytes);
            return true;
        }
        let piece = (self.faults.piece)().max(1);
        let (early, now) = (self.faults.early, self.now);
        let peer = &mut self.peers[who];
        if early && !peer.reception.has_begun() {
            let n = peer.stream.in_front(now);
            if n > 0 {
                peer.read.extend(peer.stream.take(n));
                return true;
            }
        }
        let n = piece.min(peer.reception.wanted()).min(peer.stream.available(now));
        if n == 0 {
            if peer.stream.is_over(now) && !matches!(peer.state, State::Link(_) | State::Decline(_))
            {
                let ending = match std::mem::replace(&mut peer.state, State::Moving) {
                    State::Accept(state) => state.on_closed(),
                    State::Proposal(state) => state.on_closed(),
                    State::Confirm(state) => state.on_closed(),
                    _ => unreachable!(),
                };
                self.end(who, ending);
                return true;
            }
            return false;
        }
        let bytes = peer.stream.take(n);
        match peer.reception.push(&bytes) {
            Ok(None) => {}
            Ok(Some(message)) => self.on_clc(who, message),
            Err(error) => {
                let ending = match std::mem::replace(&mut peer.state, State::Moving) {
                    State::Proposal(state) if matches!(error, clc::Error::Eyecatcher { .. }) => {
                        peer.read.extend(peer.reception.taken());
                        state.on_plain()
                    }
                    State::Accept(state) => state.on_malformed(error),
                    State::Proposal(state) => state.on_malformed(error),
                    State::Confirm(state) => state.on_malformed(error),
                    _ => Ending::Failed(Fault::Malformed(error)),
                };
                self.end(who, ending);
            }
        }
        true
    }

    fn on_clc(&mut self, who: usize, message: Message) {
        let setup = self.peers[who].setup.clone();
        match std::mem::replace(&mut self.peers[who].state, State::Moving) {
            State::Accept(state) => match state.on_message(message) {
                Err(ending) => self.end(who, ending),
                Ok(accepted) => self.confirm(who, accepted),
            },
            State::Proposal(state) => {
                let mut message = message;
                if let (Message::Proposal(proposal), Some(read)) = (&mut message, setup.understands)
                    && !read(proposal)
                {
                    let code = DeclineCode::NOSMCDEV;
                    return self.end(who, legacy_decline(setup.host.peer_id, code));
                }
                let choice = state.on_message(message, &setup);
                self.choose(who, choice);
            }
            State::Confirm(state) => match state.on_message(message) {
                Err(ending) => self.end(who, ending),
                Ok(confirmed) => match setup.no_link {
                    Some(code) => self.end(who, confirmed.decline(code)),
                    None => self.finish(who, confirmed.finish()),
                },
            },
            State::Link(state) => self.end(who, state.on_message(&message)),
            State::Decline(state) => self.end(who, state.on_message(&message)),
            State::Done(_) | State::Moving => unreachable!(),
        }
    }

    fn choose(&mut self, who: usize, mut choice: std::result::Result<Choice, Ending>) {
        let setup = self.peers[who].setup.clone();
        loop {
            let next = match choice {
                Err(ending) => return self.end(who, ending),
                Ok(next) => next,
            };
            let path = match &next {
                Choice::D(d) => d.path(),
                Choice::R(r) => r.path(),
            };
            let refused = match path {
                _ if setup.paths.contains(&path) => setup.no_memory,
                Path::Dv1 => Some(DeclineCode::NOSMCDDEV),
                Path::Rv1 => Some(DeclineCode::NOSMCDEV),
                Path::Dv2 | Path::Rv2 => Some(DeclineCode::NOSMCRDEV),
            };
            let first = !setup.has_link_group;
            let (state, accept) = match (next, refused) {
                (Choice::D(d), None) => d.accept(&smcd_side(2, first)),
                (Choice::R(r), None) => r.accept(&smcr_side(2, first, setup.direct)),
                (Choice::D(d), Some(code)) => {
                    choice = d.reject(code);
                    continue;
                }
                (Choice::R(r), Some(code)) => {
                    choice = r.reject(code);
                    continue;
                }
            };
            self.send(who, &accept);
            return self.wait(who, State::Confirm(state));
        }
    }

    fn confirm(&mut self, who: usize, accepted: Accepted) {
        let setup = self.peers[who].setup.clone();
        let first = !setup.has_link_group;
        match (accepted, setup.no_memory) {
            (Accepted::D(accepted), Some(code)) => self.end(who, accepted.decline(code)),
            (Accepted::R(accepted), Some(code)) => self.end(who, accepted.decline(code)),
            (Accepted::D(accepted), None) => match accepted.confirm(&smcd_side(1, first)) {
                Err(ending) => self.end(who, ending),
                Ok((agreement, confirm)) => {
                    self.send(who, &confirm);
                    self.established(who, agreement);
                }
            },
            (Accepted::R(accepted), None)
                if setup.lost_link_group && !accepted.is_first_contact() =>
            {
                self.end(who, accepted.out_of_sync(true));
            }
            (Accepted::R(accepted), None) => {
                match accepted.confirm(&smcr_side(1, first, setup.direct)) {
                    Err(ending) => self.end(who, ending),
                    Ok((finished, confirm)) => {
                        self.send(who, &confirm);
                        self.finish(who, finished);
                    }
                }
            }
        }
    }

    fn finish(&mut self, who: usize, finished: Finished) {
        match finished {
            Finished::Established(agreement) => self.established(who, agreement),
            Finished::ConfirmingLink(link) => {
                self.wait(who, State::Link(link));
                if who == 1 {
                    self.send_llc(who);
                }
            }
        }
    }

    fn send_llc(&mut self, who: usize) {
        let confirm = llc::ConfirmLink {
            mac: MacAddr([who as u8; 6]),
            gid: RoceGid([who as u8; 16]),
            qpn: U24::truncate(17),
            link_id: 1,
            link_uid: [0, 0, 0, 1],
            max_links: 2,
            max_conns: 255,
            no_rmbe_eyecatcher: !self.peers[who].setup.wants_eyecatchers,
        };
        let body = llc::Body::ConfirmLink(confirm);
        let message = match who {
            0 => llc::Message::response(llc::Version::V2, body),
            _ => llc::Message::request(llc::Version::V2, body),
        };
        let mut buffer = [0; llc::LEN];
        self.llc_messages += 1;
        if (self.faults.llc_arrives)(self.llc_messages - 1) {
            let bytes = message.emit(&mut buffer).unwrap().to_vec();
            self.peers[1 - who].rdma.push_back(bytes);
        }
    }

    fn on_llc(&mut self, who: usize, bytes: &[u8]) {
        let state = std::mem::replace(&mut self.peers[who].state, State::Moving);
        let State::Link(link) = state else {
            self.peers[who].state = state;
            return;
        };
        let message = llc::Message::parse(bytes).unwrap();
        let llc::Body::ConfirmLink(confirm) = message.body() else { unreachable!() };
        let refused = if who == 0 { self.peers[who].setup.no_link } else { None };
        let result = match refused {
            Some(code) => Err(link.decline(code)),
            None => link.on_confirmed(confirm),
        };
        match result {
            Err(ending) => self.end(who, ending),
            Ok(agreement) => {
                if who == 0 {
                    self.send_llc(who);
                }
                self.established(who, agreement);
            }
        }
    }

    /// Something arrives, or the earliest deadline is reached.
    fn time_passes(&mut self) {
        let waits = |who: &usize| self.peers[*who].deadline.is_some();
        let arrival = [0, 1].into_iter().filter(waits);
        let arrival = arrival.filter_map(|who| self.peers[who].stream.next_arrival(self.now)).min();
        let (deadline, who) = [0, 1]
            .into_iter()
            .filter_map(|who| Some((self.peers[who].deadline?, who)))
            .min()
            .expect("a peer that waits has a deadline");
        if let Some(arrival) = arrival.filter(|arrival| *arrival <= deadline) {
            self.now = arrival;
            return;
        }
        self.now = deadline;
        match std::mem::replace(&mut self.peers[who].state, State::Moving) {
            State::Accept(state) => self.end(who, state.on_timeout()),
            State::Proposal(state) => self.end(who, state.on_timeout()),
            State::Confirm(state) => self.end(who, state.on_timeout()),
            State::Link(state) => self.wait(who, State::Decline(state.on_timeout())),
            State::Decline(state) => self.end(who, state.on_timeout()),
            State::Done(_) | State::Moving => unreachable!(),
        }
    }
}

impl Surroundings for Setup {
    fn reaches(&self, _: SmcdGid, chid: Chid) -> bool {
        self.chids.contains(&chid)
    }

    fn same_subnet(&self, _: &Prefix) -> bool {
        self.same_subnet
    }

    fn vlan_is_known(&self) -> bool {
        self.vlan_is_known
    }
}

/// As a server of RFC 7609 declines.
fn legacy_decline(peer_id: PeerId, code: DeclineCode) -> Ending {
    let decline = Some(clc::Decline::new(true, peer_id, code));
    Ending::Fallback(Fallback { reason: code, peer_reason: None, decline, out_of_sync: false })
}

pub const ISM: SmcdGid = SmcdGid { gid: 0x1111, ext: 0 };
pub const ISM_CHID: Chid = Chid(0x0102);
pub const LOOPBACK: SmcdGid = SmcdGid { gid: 0x2222, ext: 0x3333 };

/// A peer that can do everything, and one link group with nobody.
pub fn able(id: u8) -> Setup {
    let local =
        clc::Local { peer_id: PeerId([id; 8]), gid: RoceGid([id; 16]), mac: MacAddr([id; 6]) };
    Setup {
        host: Host {
            peer_id: local.peer_id,
            hostname: Hostname::new("host"),
            release: Release::V2_1,
            features: clc::FeatureMask::EMULATED_ISM,
            max_conns: 255,
            max_links: 2,
            ueids: List::from_slice(&[Eid::user("TESTEID").unwrap()]).unwrap(),
            seid: None,
            smcd_v2: true,
        },
        circumstances: Circumstances::FINE,
        devices: client::Devices {
            smcr_v1: Some(local),
            smcd_v1: Some((ISM.gid, ISM_CHID)),
            prefix: Some(Prefix::default()),
            smcr_v2: Some(RoceGid::from_ipv4([10, 9, 0, id])),
            smcr_v2_mac: MacAddr([id; 6]),
            smcd_v2: List::from_slice(&[(LOOPBACK, Chid::LOOPBACK)]).unwrap(),
            vlan_unknown: false,
        },
        paths: vec![Path::Dv2, Path::Dv1, Path::Rv2, Path::Rv1],
        chids: vec![ISM_CHID, Chid::LOOPBACK],
        same_subnet: true,
        vlan_is_known: true,
        has_link_group: false,
        lost_link_group: false,
        no_memory: None,
        no_link: None,
        direct: true,
        wants_eyecatchers: false,
        says: if id == 1 { FROM_CLIENT } else { FROM_SERVER },
        proposes: None,
        understands: None,
    }
}

fn smcd_side(id: u8, first_contact: bool) -> SmcdSide {
    SmcdSide {
        gid: SmcdGid { gid: id.into(), ext: 7 },
        token: 0x0123_4567_89ab_cdef,
        size: BufferSize::from_code(2).unwrap(),
        link_id: id.into(),
        first_contact,
    }
}

fn smcr_side(id: u8, first_contact: bool, direct: bool) -> SmcrSide {
    SmcrSide {
        local: clc::Local {
            peer_id: PeerId([id; 8]),
            gid: RoceGid([id; 16]),
            mac: MacAddr([id; 6]),
        },
        qpn: U24::truncate(17),
        rkey: 0x3b0,
        alert_token: 1,
        size: BufferSize::from_code(2).unwrap(),
        mtu: MtuCode::from_code(2 + id).unwrap(),
        rmb_addr: 0xff32_f5d4_040d_0000,
        psn: U24::truncate(0x00ef_b11c),
        direct,
        gids: List::from_slice(&[RoceGid([id; 16])]).unwrap(),
        first_contact,
    }
}
