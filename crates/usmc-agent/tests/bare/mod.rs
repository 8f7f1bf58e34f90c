//! Two queue pairs of one thread, and nothing else: what the fabric itself takes for a message as agents post it.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use usmc_verbs::{
    Access, Caps, Completion, Cq, Gid, Init, Mr, Mtu, Operation, Path, Pd, Qp, Receive, Request,
    Rtr, Rts, Source, Status,
};

use crate::fake;

/// Bytes of a CDC message.
const CDC: u32 = 44;
/// Receives that are posted.
const RECEIVES: usize = 48;
const PORT: u8 = 1;

/// A queue pair with its queues and memory: the data, where the peer writes, and a place for each receive.
struct End {
    qp: Qp,
    sent: Cq,
    received: Cq,
    memory: Mr,
    bytes: usize,
}

impl End {
    fn new(test: u8, host: u8, bytes: usize) -> End {
        let (fabric, library) = fake::fabric();
        let (name, address) = (fake::device(test, host), fake::address(test, host));
        let IpAddr::V4(v4) = address else { panic!("{address}") };
        fabric.device(&name, 1024).expect("a device");
        fabric.gid(&name, PORT.into(), v4.to_ipv6_mapped(), "lo").expect("an address");
        let device = library.device(&name).expect("a device");
        let domain = Pd::new(&device).expect("a domain");
        let [sent, received] = [(); 2].map(|()| Cq::new(&device, 256, None, 0).expect("a queue"));
        let caps = Caps {
            send_requests: 64,
            receives: 64,
            send_pieces: 2,
            receive_pieces: 1,
            inline_bytes: 64,
        };
        let qp = Qp::new(&domain, &sent, &received, caps).expect("a queue pair");
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let len = 2 * bytes + RECEIVES * CDC as usize;
        let memory = Mr::new(&domain, len, access).expect("memory");
        qp.to_init(&Init { port: PORT, pkey_index: 0, access }).expect("INIT");
        let end = End { qp, sent, received, memory, bytes };
        (0..RECEIVES).for_each(|number| end.post_receive(number));
        end
    }

    fn connect(&self, peer: &End, address: Ipv4Addr) {
        let path = Path {
            port: PORT,
            gid_index: 1,
            peer: Gid(address.to_ipv6_mapped().octets()),
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
            service_level: 0,
        };
        let rtr = Rtr {
            path,
            mtu: Mtu::Bytes1024,
            peer_qp_num: peer.qp.number(),
            peer_psn: 0,
            max_peer_reads: 1,
            min_rnr_timer: 5,
        };
        self.qp.to_rtr(&rtr).expect("RTR");
        let rts = Rts { psn: 0, timeout: 15, retry_count: 7, rnr_retry: 7, max_reads: 1 };
        self.qp.to_rts(&rts).expect("RTS");
    }

    fn post_receive(&self, number: usize) {
        let place = 2 * self.bytes + number * CDC as usize;
        let piece = self.memory.piece(place, CDC).expect("memory");
        self.qp.post_receive(&[Receive { wr_id: number as u64, piece }]).expect("a receive");
    }

    /// WRITE and SEND in one chain, of which the SEND makes a completion.
    fn send(&self, peer: &End) {
        let pieces = [self.memory.piece(0, self.bytes as u32).expect("memory")];
        let operation = Operation::Write {
            address: peer.memory.address() + self.bytes as u64,
            rkey: peer.memory.rkey(),
        };
        let write =
            Request { wr_id: 0, operation, source: Source::Inline(&pieces), signaled: false };
        let cdc = [0; CDC as usize];
        let operation = Operation::Send { solicited: true };
        let send = Request { wr_id: 1, operation, source: Source::Bytes(&cdc), signaled: true };
        self.qp.post_send(&[write, send]).expect("a post");
        take(&self.sent);
    }

    fn receive(&self) {
        let number = take(&self.received) as usize;
        self.post_receive(number);
    }
}

/// The number of a request that is complete.
fn take(queue: &Cq) -> u64 {
    let mut completion = [Completion::default()];
    assert_eq!(queue.poll(&mut completion).expect("a queue"), 1);
    assert_eq!(completion[0].status, Status::SUCCESS);
    completion[0].wr_id
}

/// How long a message of so many bytes takes: its post, and what is taken and posted at both ends for it.
pub(crate) fn message(bytes: usize, count: u32) -> Duration {
    let test = fake::next_test();
    let ends = [0, 1].map(|host| End::new(test, host, bytes));
    fake::fabric().0.direct().expect("a fabric");
    for (at, end) in ends.iter().enumerate() {
        let IpAddr::V4(address) = fake::address(test, 1 - at as u8) else { panic!("IPv4") };
        end.connect(&ends[1 - at], address);
    }
    let [one, other] = &ends;
    let begun = Instant::now();
    for _ in 0..count {
        one.send(other);
        other.receive();
    }
    begun.elapsed() / count
}
