//! `usmc check --declines`: what the codes of SMC's Decline message mean, and what can be done about those that uSMC's own
//! peers say.

use std::io::{self, Write};

use smc_proto::decline::{self, DeclineCode};

/// What helps, where something on these machines does.
fn remedy(code: DeclineCode) -> Option<&'static str> {
    Some(match code {
        DeclineCode::MEM => {
            "no slot or memory was left: see `usmc ss` for connections, and the limits of both processes"
        }
        DeclineCode::NOSMCDEV | DeclineCode::NOSMCRDEV => {
            "the peer has no device that this one has; towards the kernel's SMC uSMC goes on by TCP"
        }
        DeclineCode::NOSMCDDEV => "let both ends share the ISM directory, and one of their UEIDs",
        DeclineCode::NOSMCD2DEV => "let both ends share one ISM directory (`ism_dir`)",
        DeclineCode::NOUEID => "configure the same UEID at both ends (`usmc ueid`)",
        DeclineCode::PEERNOSMC => {
            "load the programs at the peer (`usmc ebpf`), or let nothing strip TCP options"
        }
        DeclineCode::OPTUNSUPP => {
            "data in the SYN comes before any handshake: go without TCP Fast Open"
        }
        _ => return None,
    })
}

/// Prints them all, in the order of their numbers.
///
/// # Errors
/// When the output cannot be written.
pub fn list(out: &mut impl Write) -> io::Result<()> {
    for known in decline::ALL {
        writeln!(out, "{:08x} {:<12} {}", known.code.0, known.name, known.text)?;
        if let Some(remedy) = remedy(known.code) {
            writeln!(out, "{:>24} {remedy}", "->")?;
        }
    }
    Ok(())
}
