//! Whether the library gets into programs of other systems: those of images, and of containers.

use std::fmt;
use std::fs;
use std::io::Read;
use std::path::Path;

use crate::program::{self, Obstacle};

/// Longest first line of a script that is read.
const LONGEST: u64 = 256;

/// What a program is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fit {
    /// Linked with glibc.
    Glibc,
    /// Linked with musl.
    Musl,
    /// The library does not get into it.
    Unserved(Obstacle),
    /// Nobody has looked, for this reason.
    Unknown(&'static str),
}

impl fmt::Display for Fit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fit::Glibc => f.write_str("can be served (glibc)"),
            Fit::Musl => f.write_str("can be served (musl)"),
            Fit::Unserved(why) => write!(f, "stays TCP: {why}"),
            Fit::Unknown(why) => write!(f, "it was not looked at: {why}"),
        }
    }
}

/// What the program at `path` is, which may be another system's.
pub fn of_file(path: &Path) -> Fit {
    match program::obstacle_of(path) {
        Some(obstacle) => Fit::Unserved(obstacle),
        None if program::is_musl(path) => Fit::Musl,
        None => Fit::Glibc,
    }
}

/// The same by a program's first bytes. That a dynamically linked program is Go's does not show there.
pub fn of_start(bytes: &[u8]) -> Fit {
    match program::obstacle_in(bytes) {
        _ if !bytes.starts_with(b"\x7fELF") => Fit::Unknown("it is no program"),
        Some(obstacle) => Fit::Unserved(obstacle),
        None if program::is_musl_in(bytes) => Fit::Musl,
        None => Fit::Glibc,
    }
}

/// The program that a script's first line names, by path or, behind env(1), by name.
pub fn interpreter(path: &Path) -> Option<String> {
    let mut start = Vec::new();
    fs::File::open(path).ok()?.take(LONGEST).read_to_end(&mut start).ok()?;
    interpreter_in(&start)
}

/// The same by a script's first bytes.
pub fn interpreter_in(start: &[u8]) -> Option<String> {
    let line = start.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let line = String::from_utf8_lossy(&line[..line.len().min(LONGEST as usize)]).into_owned();
    let mut words = line.split_whitespace();
    let named = words.next()?;
    if !named.ends_with("/env") {
        return Some(named.to_owned());
    }
    words.find(|word| !word.starts_with('-') && !word.contains('=')).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scripts_interpreter_is_named() {
        let file = std::env::temp_dir().join(format!("usmc-script-{}", std::process::id()));
        for (text, name) in [
            ("#!/bin/sh -e\n", Some("/bin/sh")),
            ("#! /usr/bin/env -S A=b bash\n", Some("bash")),
            ("#!\n", None),
            ("\x7fELF", None),
            ("", None),
        ] {
            fs::write(&file, text).unwrap();
            assert_eq!(interpreter(&file).as_deref(), name, "{text}");
        }
        fs::remove_file(&file).unwrap();
    }
}
