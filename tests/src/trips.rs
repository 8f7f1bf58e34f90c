//! How many round trips a connection by SMC-R takes, counted in a capture: no clock is in it.
//!
//! What counts is a change of direction: SYN, SYN-ACK, CLC messages over TCP; LLC, CDC and WRITEs over RoCE (UDP port 4791). What only
//! acknowledges does not.

use std::fs;
use std::path::Path;

/// The UDP port of RoCEv2.
const ROCE: u16 = 4791;
/// InfiniBand's opcodes of a reliable connection: an acknowledgement, and the WRITEs.
const ACKNOWLEDGE: u8 = 0x11;
const WRITES: std::ops::RangeInclusive<u8> = 0x06..=0x0b;

/// What a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Frame {
    /// The SYN of a connection to that port.
    Syn { port: u16 },
    /// The TCP of a handshake.
    Tcp,
    /// A WRITE.
    Write,
    /// Another message of RDMA.
    Message,
}

/// Changes of direction, and the first frame, from each SYN to that port until the first WRITE of the server's: two make a round trip.
///
/// # Panics
/// When the capture cannot be read.
pub fn legs(capture: &Path, port: u16) -> Vec<usize> {
    let mut all = Vec::new();
    // The client, the last sender, and the legs so far.
    let mut open: Option<([u8; 4], [u8; 4], usize)> = None;
    for (sender, frame) in frames(&fs::read(capture).expect("a capture")) {
        match (frame, &mut open) {
            (Frame::Syn { port: to }, _) if to == port => open = Some((sender, sender, 1)),
            (Frame::Syn { .. }, _) | (_, None) => {}
            (frame, Some((client, last, legs))) => {
                *legs += usize::from(*last != sender);
                *last = sender;
                if frame == Frame::Write && sender != *client {
                    all.push(*legs);
                    open = None;
                }
            }
        }
    }
    all
}

/// The frames of a capture in libpcap's format, each with its sender's IPv4 address.
fn frames(capture: &[u8]) -> Vec<([u8; 4], Frame)> {
    let mut all = Vec::new();
    let mut at = 24;
    while let Some(header) = capture.get(at..at + 16) {
        let len = u32::from_le_bytes(header[8..12].try_into().expect("four bytes")) as usize;
        let Some(frame) = capture.get(at + 16..at + 16 + len) else { break };
        all.extend(frame_of(frame));
        at += 16 + len;
    }
    all
}

fn frame_of(frame: &[u8]) -> Option<([u8; 4], Frame)> {
    let two = |at: usize| Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?));
    if two(12)? != 0x0800 {
        return None;
    }
    let ip = 14;
    let header = usize::from(frame.get(ip)? & 15) * 4;
    let (total, sender) =
        (usize::from(two(ip + 2)?), frame.get(ip + 12..ip + 16)?.try_into().ok()?);
    let body = ip + header;
    let kind = match frame.get(ip + 9)? {
        6 => {
            let (flags, data) =
                (*frame.get(body + 13)?, usize::from(frame.get(body + 12)? >> 4) * 4);
            match (flags & 2 != 0, flags & 16 != 0) {
                (true, false) => Frame::Syn { port: two(body + 2)? },
                (true, true) => Frame::Tcp,
                // Bytes, or an acknowledgement alone.
                _ if total > header + data => Frame::Tcp,
                _ => return None,
            }
        }
        17 if two(body + 2)? == ROCE => match *frame.get(body + 8)? {
            ACKNOWLEDGE => return None,
            opcode if WRITES.contains(&opcode) => Frame::Write,
            _ => Frame::Message,
        },
        _ => return None,
    };
    Some((sender, kind))
}
