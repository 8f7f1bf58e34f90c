//! What the tests share: messages out of captures, and values out of random bytes.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(unreachable_pub, reason = "part of a program")]

pub mod draw;
pub mod peers;
pub mod stream;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};

use pcap_file::pcap::PcapReader;

/// The captures, by name, in order.
pub fn captures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "pcap"))
        .collect();
    files.sort();
    files
}

/// A message of a capture.
#[derive(Clone, Debug)]
pub enum Frame {
    /// The options of a SYN or SYN-ACK.
    SynOptions(Vec<u8>),
    /// A CLC message.
    Clc(Vec<u8>),
    /// What an RDMA SEND carried, LLC or CDC, and whether the server sent it: in all captures its
    /// addresses end in odd numbers, the client's in even ones.
    Send { by_server: bool, bytes: Vec<u8> },
}

/// All messages of a capture in their order, retransmissions left out.
pub fn frames(path: &Path) -> Vec<Frame> {
    let mut reader = PcapReader::new(File::open(path).unwrap()).unwrap();
    let mut extraction = Extraction::default();
    while let Some(packet) = reader.next_packet() {
        extraction.ethernet(&packet.unwrap().data);
    }
    extraction.frames
}

#[derive(Default)]
struct Extraction {
    frames: Vec<Frame>,
    /// Bytes of a TCP direction that do not make a message yet.
    streams: HashMap<(Vec<u8>, u32), Vec<u8>>,
    seen: HashSet<(Vec<u8>, u32, u32)>,
}

impl Extraction {
    fn ethernet(&mut self, frame: &[u8]) {
        let packet = &frame[14..];
        let (protocol, addresses, payload) = match frame[12..14] {
            [0x08, 0x00] => {
                let header = usize::from(packet[0] & 15) * 4;
                let total = usize::from(u16_at(packet, 2));
                (packet[9], &packet[12..20], &packet[header..total])
            }
            [0x86, 0xdd] => {
                let len = usize::from(u16_at(packet, 4));
                (packet[6], &packet[8..40], &packet[40..40 + len])
            }
            _ => return,
        };
        match protocol {
            6 => self.tcp(addresses, payload),
            17 if u16_at(payload, 2) == 4791 => self.roce(addresses, &payload[8..]),
            _ => {}
        }
    }

    fn tcp(&mut self, addresses: &[u8], segment: &[u8]) {
        let ports = u32_at(segment, 0);
        let sequence = u32_at(segment, 4);
        let header = usize::from(segment[12] >> 4) * 4;
        let (options, data) = (&segment[20..header], &segment[header..]);
        let direction = (addresses.to_vec(), ports);
        if segment[13] & 2 != 0 {
            self.streams.insert(direction, Vec::new());
            self.frames.push(Frame::SynOptions(options.to_vec()));
            return;
        }
        if data.is_empty() || !self.seen.insert((addresses.to_vec(), ports, sequence)) {
            return;
        }
        let stream = self.streams.entry(direction).or_default();
        stream.extend_from_slice(data);
        while stream.len() >= 8 && stream[..3] == [0xe2, 0xd4, 0xc3] {
            let length = usize::from(u16_at(stream, 5));
            if stream.len() < length {
                return;
            }
            let rest = stream.split_off(length);
            self.frames.push(Frame::Clc(std::mem::replace(stream, rest)));
        }
        if stream.len() >= 8 {
            stream.clear(); // the application's
        }
    }

    /// RoCE v2: base transport header of 12 bytes, payload, pad, 4 bytes of check sum.
    fn roce(&mut self, addresses: &[u8], packet: &[u8]) {
        const SEND_ONLY: u8 = 4;
        let (opcode, pad) = (packet[0], usize::from(packet[1] >> 4 & 3));
        let (qpn, psn) = (u32_at(packet, 4) & 0xff_ffff, u32_at(packet, 8) & 0xff_ffff);
        if opcode == SEND_ONLY && self.seen.insert((addresses.to_vec(), qpn, psn)) {
            let by_server = addresses[addresses.len() / 2 - 1] & 1 != 0;
            let bytes = packet[12..packet.len() - 4 - pad].to_vec();
            self.frames.push(Frame::Send { by_server, bytes });
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().unwrap())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}
