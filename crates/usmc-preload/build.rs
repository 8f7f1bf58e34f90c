//! Linker flags of the shared object.
//!
//! `now`: everything is bound at load time, so no call ever resolves lazily. `defs`: a symbol that libc
//! lacks stops the build, not somebody's program. `exclude-libs`: nothing of a static library is exported;
//! the rest of the export list is rustc's own (the `no_mangle` items of this crate, as a version script;
//! a second script would be an error), and `tests/exports.rs` compares it with the table.
//!
//! What it is linked with is no libc but a stub that has the few symbols every libc has, without versions: a version
//! of the build machine's that is newer than somebody's libc would keep each of his programs from starting. All else
//! of libc's is found at start, by `usmc::real`.
//!
//! Not `initfirst`: glibc then runs our constructor before its own, with `environ` still null, and the
//! configuration would silently be empty. A constructor of another library that is faster than ours is
//! served by `usmc::real`, which resolves on demand.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// What glibc has had since 2.17 and musl since 1.2, the start files' weak symbol included.
const SYMBOLS: &[&str] = &[
    "__cxa_finalize",
    "__errno_location",
    "abort",
    "bcmp",
    "clock_gettime",
    "dl_iterate_phdr",
    "getenv",
    "memcmp",
    "memcpy",
    "memmove",
    "memset",
    "readlink",
    "strlen",
];

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,now,-z,defs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    // Searched before the directories of the system.
    println!("cargo::rustc-cdylib-link-arg=-L{}", stub().display());
    println!("cargo::rerun-if-changed=build.rs");
}

/// Makes the stub and returns its directory.
fn stub() -> PathBuf {
    let dir = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let source = dir.join("stub.c");
    let functions = SYMBOLS.iter().map(|name| format!("void {name}(void) {{}}\n"));
    fs::write(&source, functions.collect::<String>()).expect("writing the stub's source");
    let linker = env::var_os("RUSTC_LINKER").unwrap_or_else(|| "cc".into());
    let narrow = env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86");
    let done = Command::new(&linker)
        .args(narrow.then_some("-m32"))
        .args(["-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-Wl,-soname,libc.so.6", "-o"])
        .arg(dir.join("libc.so"))
        .arg(&source)
        .status()
        .unwrap_or_else(|error| panic!("running {}: {error}; install gcc", linker.display()));
    assert!(done.success(), "{} could not make a stub of libc", linker.display());
    dir
}
