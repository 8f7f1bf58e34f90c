//! A server that has nothing but its TCP connection.

use std::io::{Read, Write};
use std::net::TcpStream;

use smc_proto::decline::DeclineCode;
use smc_proto::ids::PeerId;
use smc_proto::wire::clc::{Decline, HEADER_LEN, MAX_LEN, Message};

use crate::process::LIMIT;

/// The next CLC message that comes.
pub(crate) fn message(peer: &mut TcpStream) -> Message {
    peer.set_read_timeout(Some(LIMIT)).expect("a socket");
    let mut bytes = vec![0; HEADER_LEN];
    peer.read_exact(&mut bytes).expect("a header");
    let len = usize::from(u16::from_be_bytes([bytes[5], bytes[6]]));
    bytes.resize(len, 0);
    peer.read_exact(&mut bytes[HEADER_LEN..]).expect("a message");
    Message::parse(&bytes).expect("CLC")
}

/// A peer that does not want SMC after all, and sends this by TCP at once.
pub(crate) fn decline(peer: &mut TcpStream, then: &[u8]) {
    assert!(matches!(message(peer), Message::Proposal(_)));
    let decline = Decline::new(false, PeerId([9; 8]), DeclineCode::NOSMCDEV);
    let mut bytes = [0; MAX_LEN];
    let bytes = Message::Decline(decline).emit(&mut bytes).expect("room").to_vec();
    peer.write_all(&[&bytes, then].concat()).expect("TCP");
}
