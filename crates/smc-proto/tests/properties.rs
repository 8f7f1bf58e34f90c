//! What holds for all values and for all bytes.
//!
//! Each property is a bolero harness: `cargo test` runs it on random input for a bounded time,
//! `cargo bolero test <name>` fuzzes it.

mod support;

use std::sync::LazyLock;

use bolero::{ValueGenerator, check, produce};
use smc_proto::wire::{NoRoom, cdc, clc, llc, tcp_option};
use support::draw::Draw;
use support::{Frame, captures, frames};

/// Iterations of each property under `cargo test`.
const ITERATIONS: usize = 5_000;

/// Most random bytes per iteration: enough for the longest LLC message.
const ENTROPY_LEN: usize = 6_000;

fn entropy() -> impl ValueGenerator<Output = Vec<u8>> {
    produce::<Vec<u8>>().with().len(0..=ENTROPY_LEN)
}

/// All messages of the captures, as seeds to be mutated.
static GOLDEN: LazyLock<Vec<Frame>> =
    LazyLock::new(|| captures().iter().flat_map(|path| frames(path)).collect());

#[test]
fn a_clc_message_is_what_was_emitted() {
    check!().with_iterations(ITERATIONS).with_generator(entropy()).for_each(|entropy| {
        let message = Draw(entropy).clc();
        let mut buffer = [0xaa; clc::MAX_LEN];
        let bytes = message.emit(&mut buffer).unwrap().to_vec();
        assert_eq!(bytes.len(), message.emitted_len());
        assert_eq!(clc::Message::parse(&bytes).as_ref(), Ok(&message));
        assert_eq!(receive_in_pieces(entropy, &bytes), Ok(message.clone()));
        let short = NoRoom { need: bytes.len(), have: bytes.len() - 1 };
        assert_eq!(message.emit(&mut buffer[..bytes.len() - 1]), Err(short));
        let cut = entropy.len() % bytes.len();
        assert!(clc::Message::parse(&bytes[..cut]).is_err(), "cut at {cut}");
    });
}

/// Feeds a [`clc::Reception`] with pieces whose sizes are drawn from `entropy`.
fn receive_in_pieces(entropy: &[u8], mut bytes: &[u8]) -> Result<clc::Message, clc::Error> {
    let mut draw = Draw(entropy);
    let mut reception = clc::Reception::new();
    loop {
        let piece = usize::from(draw.u8()).clamp(1, reception.wanted());
        let (now, later) = bytes.split_at(piece);
        bytes = later;
        if let Some(message) = reception.push(now)? {
            assert!(bytes.is_empty(), "the end of the message is known exactly");
            return Ok(message);
        }
    }
}

#[test]
fn an_llc_message_is_what_was_emitted() {
    check!().with_iterations(ITERATIONS).with_generator(entropy()).for_each(|entropy| {
        let mut draw = Draw(entropy);
        let (updates, rkeys) = (draw.entries(), draw.entries());
        let message = draw.llc(&updates, &rkeys);
        let mut buffer = [0xaa; llc::MAX_LEN];
        let bytes = message.emit(&mut buffer).unwrap().to_vec();
        assert_eq!(bytes.len(), message.emitted_len());
        assert!(bytes.len() >= llc::LEN);
        assert_eq!(llc::Message::parse(&bytes), Ok(message));
        let short = NoRoom { need: bytes.len(), have: bytes.len() - 1 };
        assert_eq!(message.emit(&mut buffer[..bytes.len() - 1]), Err(short));
        assert!(llc::Message::parse(&bytes[..bytes.len() - 1]).is_err());
    });
}

#[test]
fn a_cdc_message_is_what_was_emitted() {
    check!().with_iterations(ITERATIONS).with_generator(entropy()).for_each(|entropy| {
        let mut draw = Draw(entropy);
        let smcr = draw.cdc_smcr();
        assert_eq!(cdc::SmcrRepr::parse(&smcr.emit()), Ok(smcr));
        let smcd = draw.cdc_smcd();
        let mut dmb = [0xaa; cdc::SmcdRepr::LEN];
        smcd.emit(&mut dmb).unwrap();
        assert_eq!(cdc::SmcdRepr::parse(&dmb), Ok(smcd));
        let (producer, consumer) = smcd.to_words();
        assert_eq!(cdc::SmcdRepr::from_words(producer, consumer), smcd);
    });
}

#[test]
fn random_bytes_never_panic() {
    check!().with_iterations(ITERATIONS).with_generator(entropy()).for_each(|bytes| survive(bytes));
}

#[test]
fn random_bytes_behind_a_valid_header_never_panic() {
    check!().with_iterations(ITERATIONS).with_generator(entropy()).for_each(|entropy| {
        let mut bytes = entropy.to_vec();
        if bytes.len() < 16 {
            return;
        }
        // A CLC header and trailer that fit, then an LLC one.
        let length = bytes.len().min(clc::MAX_LEN);
        bytes.truncate(length);
        bytes[..4].copy_from_slice(&[0xe2, 0xd4, 0xc3, 0xd9]);
        bytes[4] = 1 + bytes[4] % 4;
        bytes[5..7].copy_from_slice(&(length as u16).to_be_bytes());
        bytes[7] = bytes[7] & 0x0f | 0x10 << (bytes[7] >> 4 & 1);
        bytes[length - 4..].copy_from_slice(&[0xe2, 0xd4, 0xc3, 0xc4]);
        survive(&bytes);
        bytes[0] = (bytes[4] % 10) | (bytes[7] & 0x20);
        bytes[1..3].copy_from_slice(&(length as u16).to_ne_bytes());
        survive(&bytes);
    });
}

#[test]
fn mutated_golden_messages_never_panic() {
    check!().with_iterations(ITERATIONS).with_generator(entropy()).for_each(|entropy| {
        let mut draw = Draw(entropy);
        let golden = &GOLDEN[usize::from(draw.u16()) % GOLDEN.len()];
        let (Frame::SynOptions(bytes) | Frame::Clc(bytes) | Frame::Send { bytes, .. }) = golden;
        let mut bytes = bytes.clone();
        for _ in 0..=draw.below(8) {
            let at = usize::from(draw.u16()) % bytes.len().max(1);
            match draw.below(4) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at.min(bytes.len()), draw.u8()),
                _ if bytes.is_empty() => {}
                2 => bytes[at] ^= 1 << draw.below(8),
                _ => bytes[at] = draw.u8(),
            }
        }
        // Half of the time with a length that fits, to get past the first check.
        if draw.flag() && bytes.len() >= 8 {
            let length = bytes.len() as u16;
            match golden {
                Frame::Clc(_) => bytes[5..7].copy_from_slice(&length.to_be_bytes()),
                _ if bytes[0] & 0x20 != 0 => {
                    bytes[1..3].copy_from_slice(&length.to_ne_bytes());
                }
                _ => {}
            }
        }
        survive(&bytes);
    });
}

/// Reads bytes as everything there is. What is accepted has a form that stays as it is.
fn survive(bytes: &[u8]) {
    let _ = tcp_option::says_smc(bytes);
    if let Ok(message) = clc::Message::parse(bytes) {
        let mut buffer = [0; clc::MAX_LEN];
        let emitted = message.emit(&mut buffer).unwrap();
        assert!(emitted.len() <= bytes.len());
        assert_eq!(clc::Message::parse(emitted).as_ref(), Ok(&message));
        if let clc::Message::Proposal(proposal) = &message
            && let Some(smcd) = proposal.v2().and_then(|v2| v2.modes.smcd())
        {
            assert!(smcd.devices().count() <= 8);
        }
    }
    if let Ok(message) = llc::Message::parse(bytes) {
        let mut buffer = [0; llc::MAX_LEN];
        let emitted = message.emit(&mut buffer).unwrap();
        assert_eq!(llc::Message::parse(emitted), Ok(message));
    }
    if let Ok(message) = cdc::SmcrRepr::parse(bytes) {
        assert_eq!(cdc::SmcrRepr::parse(&message.emit()), Ok(message));
    }
    if let Ok(message) = cdc::SmcdRepr::parse(bytes) {
        let mut dmb = [0; cdc::SmcdRepr::LEN];
        message.emit(&mut dmb).unwrap();
        assert_eq!(cdc::SmcdRepr::parse(&dmb), Ok(message));
    }
    let mut reception = clc::Reception::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(reception.wanted().min(rest.len()));
        rest = later;
        if reception.push(now).is_err() {
            break;
        }
    }
}
