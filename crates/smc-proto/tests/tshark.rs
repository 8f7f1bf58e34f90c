//! Wireshark's own SMC dissector names every message that this crate makes, none of them malformed.
//!
//! It knows CLC of both versions, LLC of version 1 and CDC of SMC-R; LLC of version 2 it leaves as
//! "RC Send". Needs tshark (`make test-deps`).

mod support;

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use pcap_file::pcap::{PcapPacket, PcapWriter};
use smc_proto::handshake::Path;
use smc_proto::wire::llc::{self, Body, Version};
use smc_proto::wire::tcp_option::SMC_OPTION;
use support::draw::Draw;
use support::peers::{Behind, Faults, able, run};

const CLIENT: u8 = 2;
const SERVER: u8 = 1;

/// A capture being written.
#[derive(Default)]
struct Capture {
    packets: Vec<Vec<u8>>,
    ports: u16,
}

impl Capture {
    fn packet(&mut self, from: u8, to: u8, protocol: u8, payload: &[u8]) {
        let mut packet = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 8, 0];
        let total = 20 + payload.len() as u16;
        packet.extend([0x45, 0]);
        packet.extend(total.to_be_bytes());
        packet.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
        packet.extend([10, 9, 0, from, 10, 9, 0, to]);
        packet.extend(payload);
        self.packets.push(packet);
    }

    /// One TCP connection with these messages, each with its sender.
    fn tcp(&mut self, messages: &[(u8, Vec<u8>)]) {
        self.ports += 1;
        let client_port = 40_000 + self.ports;
        let mut sequence = [0_u32; 3]; // by sender
        let mut segment = |capture: &mut Capture, from: u8, flags: u8, data: &[u8]| {
            let to = CLIENT + SERVER - from;
            let (source, target) = match from {
                CLIENT => (client_port, 9001_u16),
                _ => (9001, client_port),
            };
            let options: &[u8] = if flags & 2 != 0 { &SMC_OPTION } else { &[] };
            let mut bytes = Vec::new();
            bytes.extend(source.to_be_bytes());
            bytes.extend(target.to_be_bytes());
            bytes.extend(sequence[usize::from(from)].to_be_bytes());
            bytes.extend(sequence[usize::from(to)].to_be_bytes());
            bytes.extend([((20 + options.len()) as u8 / 4) << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
            bytes.extend(options);
            bytes.extend(data);
            sequence[usize::from(from)] += data.len() as u32 + u32::from(flags >> 1 & 1);
            capture.packet(from, to, 6, &bytes);
        };
        segment(self, CLIENT, 0x02, &[]);
        segment(self, SERVER, 0x12, &[]);
        segment(self, CLIENT, 0x10, &[]);
        for (from, bytes) in messages {
            segment(self, *from, 0x18, bytes);
        }
    }

    /// One RDMA SEND.
    fn send(&mut self, from: u8, payload: &[u8]) {
        let mut bytes = Vec::new();
        let length = 8 + 12 + payload.len() as u16 + 4;
        bytes.extend(0xc000_u16.to_be_bytes());
        bytes.extend(4791_u16.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend([0, 0]);
        const SEND_ONLY: u8 = 4;
        let psn = self.packets.len() as u8;
        bytes.extend([SEND_ONLY, 0, 0xff, 0xff, 0, 0, 0, 0x11, 0x80, 0, 0, psn]);
        bytes.extend(payload);
        bytes.extend([0; 4]);
        self.packet(from, CLIENT + SERVER - from, 17, &bytes);
    }

    fn tshark(&self, arguments: &[&str]) -> Vec<String> {
        let mut child = Command::new("tshark")
            .args(["-r", "-"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("tshark is installed");
        let mut writer = PcapWriter::new(Vec::new()).unwrap();
        for (n, data) in self.packets.iter().enumerate() {
            let packet = PcapPacket::new(Duration::from_millis(n as u64), data.len() as u32, data);
            writer.write_packet(&packet).unwrap();
        }
        let file = writer.into_writer();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(&file).unwrap();
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "tshark refused {arguments:?}");
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }
}

/// The CLC messages of a handshake, with their senders.
fn handshake(paths: &[Path], declines: bool) -> Vec<(u8, Vec<u8>)> {
    let (mut client, server) = (able(1), able(2));
    let has = |path| paths.contains(&path);
    client.devices.smcr_v1 = client.devices.smcr_v1.filter(|_| has(Path::Rv1));
    client.devices.smcd_v1 = client.devices.smcd_v1.filter(|_| has(Path::Dv1));
    client.devices.smcr_v2 = client.devices.smcr_v2.filter(|_| has(Path::Rv2));
    if !has(Path::Dv2) {
        client.devices.smcd_v2 = Default::default();
        client.host.smcd_v2 = has(Path::Rv2);
    }
    client.circumstances.ipsec = declines;
    let mut messages = Vec::new();
    let record = |n: usize, bytes: &mut Vec<u8>| {
        messages.push((if n == 1 { SERVER } else { CLIENT }, bytes.clone()));
        Behind::Open
    };
    run(&client, &server, Faults { clc: Box::new(record), ..Faults::default() });
    messages
}

/// Bytes that look random, different for each seed.
fn entropy(seed: u32) -> Vec<u8> {
    let word = |n: u32| (seed.wrapping_mul(64) + n).wrapping_mul(2_654_435_761);
    (0..64).map(|n| (word(n) >> 21) as u8).collect()
}

#[test]
fn tshark_names_every_message_and_finds_none_malformed() {
    let mut capture = Capture::default();
    let mut expected: Vec<&str> = Vec::new();
    for (paths, declines, names) in [
        (&[Path::Rv1][..], false, &["SMC-R-Accept", "SMC-R-Confirm"][..]),
        (&[Path::Dv1], false, &["SMC-D-Accept", "SMC-D-Confirm"]),
        (&[Path::Rv2], false, &["SMC-Rv2-Accept", "SMC-Rv2-Confirm"]),
        (&[Path::Dv2], false, &["SMC-Dv2-Accept", "SMC-Dv2-Confirm"]),
        (&[Path::Dv2, Path::Dv1, Path::Rv2, Path::Rv1], false, &["Accept", "Confirm"]),
        (&[Path::Rv1], true, &["Decline"]),
        (&[Path::Dv2], true, &["Decline"]),
    ] {
        capture.tcp(&handshake(paths, declines));
        if !declines {
            expected.push("Proposal");
        }
        expected.extend(names);
    }
    // Every LLC message of version 1 that the dissector has a name for, and CDC.
    let named = [
        ("CONFIRM_LINK", "Confirm Link"),
        ("ADD_LINK", "Add Link"),
        ("ADD_LINK_CONT", "Add Link Continuous"),
        ("DELETE_LINK", "Delete Link"),
        ("CONFIRM_RKEY", "Confirm Rkey"),
        ("TEST_LINK", "Test Link"),
        ("CONFIRM_RKEY_CONT", "Confirm Rkey Continuous"),
        ("DELETE_RKEY", "Delete Rkey"),
    ];
    for (name, shown) in named {
        let entropy = (0..10_000).map(entropy).find(|entropy| {
            let message = Draw(entropy).llc(&[], &[]);
            message.version() == Version::V1 && message.body().name() == name
        });
        let entropy = entropy.unwrap();
        let message = Draw(&entropy).llc(&[], &[]);
        if let Body::DeleteRkey(_) | Body::AddLink(_) = message.body() {
            assert_eq!(message.emitted_len(), llc::LEN);
        }
        let mut buffer = [0; llc::LEN];
        capture.send(SERVER, message.emit(&mut buffer).unwrap());
        expected.push(shown);
    }
    capture.send(CLIENT, &Draw(&entropy(0)).cdc_smcr().emit());
    expected.push("CDC Message");

    let shown = capture.tshark(&["-Y", "smc", "-T", "fields", "-e", "_ws.col.Info"]);
    assert_eq!(shown.len(), expected.len(), "{shown:#?}");
    for (line, expected) in shown.iter().zip(expected) {
        assert!(line.contains(expected), "{expected} in {line}");
    }
    assert_eq!(capture.tshark(&["-Y", "_ws.malformed"]), Vec::<String>::new());
    let syns = capture.tshark(&["-Y", "tcp.options.experimental.exid == 0xe2d4"]);
    assert_eq!(syns.len(), 14, "a SYN and a SYN-ACK of each connection");
}
