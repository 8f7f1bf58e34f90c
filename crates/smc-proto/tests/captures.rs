//! Every message of every capture is read, and written again byte for byte.

mod support;

use std::collections::BTreeMap;

use smc_proto::wire::{cdc, clc, llc, tcp_option};
use support::Frame;

#[test]
fn every_captured_message_is_read_and_written_identically() {
    let mut table = String::new();
    for path in support::captures() {
        let mut counts = BTreeMap::<String, u32>::new();
        for frame in support::frames(&path) {
            *counts.entry(check(&frame)).or_default() += 1;
        }
        let counts: Vec<_> = counts.iter().map(|(what, n)| format!("{what} {n}")).collect();
        let name = path.file_stem().unwrap().to_str().unwrap();
        table += &format!("{name}: {}\n", counts.join(", "));
    }
    let expected = include_str!("captures/expected.txt");
    assert_eq!(table, expected, "messages found in the captures");
}

/// Checks one message and says what it is.
fn check(frame: &Frame) -> String {
    match frame {
        Frame::SynOptions(options) => {
            if tcp_option::says_smc(options) { "SYN with SMC" } else { "SYN without" }.to_owned()
        }
        Frame::Clc(bytes) => {
            let message = clc::Message::parse(bytes)
                .unwrap_or_else(|error| panic!("{error:?} in {bytes:02x?}"));
            let mut buffer = [0xaa; clc::MAX_LEN];
            assert_eq!(message.emit(&mut buffer).unwrap(), bytes, "{message:#?}");
            let mode = match &message {
                clc::Message::Accept(answer) | clc::Message::Confirm(answer) => match answer {
                    clc::Answer::R(_) => " R",
                    clc::Answer::D(_) => " D",
                },
                _ => "",
            };
            let version = clc::Header::parse(bytes).unwrap().is_v1();
            format!("{:?} v{}{mode}", message.kind(), if version { 1 } else { 2 })
        }
        Frame::Send { bytes, .. } if bytes[0] == cdc::TYPE => {
            let message = cdc::SmcrRepr::parse(bytes)
                .unwrap_or_else(|error| panic!("{error:?} in {bytes:02x?}"));
            assert_eq!(message.emit(), bytes.as_slice(), "{message:#?}");
            "CDC".to_owned()
        }
        Frame::Send { bytes, .. } => {
            let message = llc::Message::parse(bytes)
                .unwrap_or_else(|error| panic!("{error:?} in {bytes:02x?}"));
            let mut buffer = [0xaa; llc::MAX_LEN];
            assert_eq!(message.emit(&mut buffer).unwrap(), bytes, "{message:#?}");
            let response = if message.is_response() { " response" } else { "" };
            format!("{:?} {}{response}", message.version(), message.body().name())
        }
    }
}
