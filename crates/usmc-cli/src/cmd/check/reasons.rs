//! `usmc check --reasons`: why connections are TCP, and what can be done about it.

use std::io::{self, Write};

use crate::remedies;

/// Prints them all, in the order of their codes.
///
/// # Errors
/// When the output cannot be written.
pub fn list(out: &mut impl Write) -> io::Result<()> {
    for reason in remedies::all() {
        writeln!(out, "{}", reason.text())?;
        if let Some(remedy) = remedies::of(reason) {
            writeln!(out, "    -> {remedy}")?;
        }
    }
    Ok(())
}
