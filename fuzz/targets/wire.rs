//! CLC, LLC and CDC messages and the TCP option, as a peer on the wire may send them. What is accepted has a form
//! that stays as it is.
#![no_main]

use libfuzzer_sys::fuzz_target;
use smc_proto::connection::Connection;
use smc_proto::wire::{cdc, clc, llc, tcp_option};
use usmc_fuzz::input::Input;

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    match input.below(6) {
        0 => clc(input),
        1 => llc(input.0),
        4 => {
            // Of a length that its header tells, and with its trailer.
            let mut message = input.bytes(clc::MAX_LEN).to_vec();
            let len = message.len();
            if len >= 12 {
                let last = if message[3] & 1 != 0 { 0xd9 } else { 0xc4 };
                let eyecatcher = [0xe2, 0xd4, 0xc3, last];
                message[..4].copy_from_slice(&eyecatcher);
                message[5..7].copy_from_slice(&(len as u16).to_be_bytes());
                message[len - 4..].copy_from_slice(&eyecatcher);
            }
            clc(Input(&message));
        }
        5 => {
            let mut message = input.bytes(llc::MAX_LEN).to_vec();
            if message.len() >= 4 {
                let len = message.len() as u16;
                message[1..3].copy_from_slice(&len.to_ne_bytes());
            }
            llc(&message);
        }
        2 => cdc(input),
        _ => _ = tcp_option::says_smc(input.0),
    }
});

fn clc(mut input: Input<'_>) {
    let whole = input.0;
    if let Ok(message) = clc::Message::parse(whole) {
        let mut buffer = [0; clc::MAX_LEN];
        let emitted = message.emit(&mut buffer).expect("MAX_LEN is enough");
        assert!(emitted.len() <= whole.len());
        assert_eq!(clc::Message::parse(emitted).as_ref(), Ok(&message));
        if let clc::Message::Proposal(proposal) = &message
            && let Some(smcd) = proposal.v2().and_then(|v2| v2.modes.smcd())
        {
            assert!(smcd.devices().count() <= 8);
        }
    }
    // In pieces, as TCP brings it.
    let mut reception = clc::Reception::new();
    while !input.is_over() {
        let wanted = reception.wanted();
        assert!((1..=clc::MAX_LEN).contains(&wanted));
        let now = input.bytes(wanted);
        if now.is_empty() || !matches!(reception.push(now), Ok(None)) {
            break;
        }
    }
}

fn llc(bytes: &[u8]) {
    if let Ok(message) = llc::Message::parse(bytes) {
        let mut buffer = [0; llc::MAX_LEN];
        let emitted = message.emit(&mut buffer).expect("MAX_LEN is enough");
        assert_eq!(llc::Message::parse(emitted), Ok(message));
    }
}

/// A connection in rings of drawn sizes, and what the peer says of its cursors and its end.
fn cdc(mut input: Input<'_>) {
    let sizes = [0, 1].map(|_| 1u32 << (14 + input.below(6)));
    let token = input.u32();
    let mut connection = Connection::expect(sizes[1]);
    // Otherwise CDC comes before the peer is known, until this side has something to say.
    if token & 1 == 1 {
        connection.peer(sizes[0], token);
    }
    connection.closing.on_established();
    let mut misbehaved = false;
    while !input.is_over() && !misbehaved {
        match input.below(8) {
            0 => {
                if let Ok(said) = cdc::SmcrRepr::parse(input.bytes(cdc::SmcrRepr::LEN)) {
                    assert_eq!(cdc::SmcrRepr::parse(&said.emit()), Ok(said));
                    misbehaved = connection.on_smcr(&said).is_err();
                }
            }
            1 => {
                if let Ok(said) = cdc::SmcdRepr::parse(input.bytes(cdc::SmcdRepr::LEN)) {
                    let mut dmb = [0; cdc::SmcdRepr::LEN];
                    said.emit(&mut dmb).expect("LEN is enough");
                    assert_eq!(cdc::SmcdRepr::parse(&dmb), Ok(said));
                    misbehaved = connection.on_smcd(&said).is_err();
                }
            }
            // A cursor that the peer may send or may just not.
            2 => {
                let mut said = connection.emit_smcd();
                said.producer.count = connection.consumer.cursor().count.wrapping_add(input.u32());
                said.producer.wrap = input.u8().into();
                misbehaved = connection.on_smcd(&said).is_err();
            }
            3 => {
                let (len, urgent) = (input.u32() % (sizes[0] + 2), input.flag());
                let room = connection.producer.room();
                assert!(room <= sizes[0]);
                let pieces = connection.producer.pieces(len.min(room));
                assert!(pieces.iter().all(|piece| piece.offset + piece.len <= sizes[0]));
                let produced = match urgent {
                    true => connection.producer.produce_urgent(len),
                    false => connection.producer.produce(len),
                };
                assert!(!produced || len <= room);
            }
            4 => {
                connection.peer(sizes[0], token);
                let sent = connection.emit_smcr().expect("the peer is known");
                assert!(!connection.wants_cdc());
                if input.flag() {
                    connection.on_sent(&sent);
                }
            }
            5 => {
                let _ = connection.emit_validation();
                let again = connection.producer.unconfirmed();
                assert!(again.iter().all(|piece| piece.offset + piece.len <= sizes[0]));
            }
            6 => match input.below(4) {
                0 => _ = connection.closing.on_shutdown_write(),
                1 => _ = connection.closing.on_close(input.flag()),
                2 => connection.closing.on_links_lost(),
                _ => connection.producer.block(),
            },
            _ => {
                let there = connection.consumer.available();
                assert!(there <= sizes[1]);
                let pieces = connection.consumer.pieces(there);
                assert!(pieces.iter().all(|piece| piece.offset + piece.len <= sizes[1]));
                let _ = connection.consumer.consume(input.u32() % (there + 1));
            }
        }
    }
}
