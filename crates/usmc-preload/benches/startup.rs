//! What a program pays that never opens a socket: `true`, alone, with an empty shared object preloaded, and
//! with ours.  `cargo bench -p usmc-preload --bench startup`
//!
//! Runs alternate, so that a busy machine slows all of them; the quickest and the median run are printed.

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const RUNS: usize = 500;

fn start(preload: Option<&Path>) -> Duration {
    let mut command = Command::new("true");
    command.env_clear().stdin(Stdio::null());
    if let Some(file) = preload {
        command.env("LD_PRELOAD", file);
    }
    let begin = Instant::now();
    assert!(command.status().unwrap().success());
    begin.elapsed()
}

/// The least that any preloaded file costs.
fn empty_object() -> std::path::PathBuf {
    let dir = support::directory("startup");
    let (source, object) = (dir.join("empty.c"), dir.join("empty.so"));
    std::fs::write(&source, "static int nothing __attribute__((unused));\n").unwrap();
    let cc = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&object).arg(&source).status();
    assert!(cc.unwrap().success());
    object
}

fn main() {
    let empty = empty_object();
    let cases = [
        ("alone", None),
        ("empty", Some(empty.as_path())),
        ("usmc", Some(support::shared_object())),
    ];
    let mut times = cases.map(|_| Vec::with_capacity(RUNS));
    for _ in 0..RUNS {
        for ((_, preload), times) in cases.iter().zip(&mut times) {
            times.push(start(*preload));
        }
    }
    for ((name, _), times) in cases.iter().zip(&mut times) {
        times.sort();
        let (least, median) = (times[0].as_micros(), times[RUNS / 2].as_micros());
        println!("{name:>6}: least {least} us, median {median} us");
    }
    std::fs::remove_dir_all(empty.parent().unwrap()).unwrap();
}
