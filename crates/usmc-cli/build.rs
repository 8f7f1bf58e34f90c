//! Compiles the programs of `bpf/` for the kernel, with clang: `usmc ebpf load` has them inside. Without clang the
//! command is built all the same, and says so when it is asked to load them.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = "bpf/tcp_option.bpf.c";

fn main() {
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-env-changed=CLANG");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let object = out.join("tcp_option.bpf.o");
    let clang = env::var_os("CLANG").unwrap_or_else(|| "clang".into());
    if !is_there(&clang) {
        println!(
            "cargo:warning=no clang: `usmc ebpf load` will have nothing to load (apt-get install clang)"
        );
        // Looked for again by every build: a file that is not there counts as changed.
        println!("cargo:rerun-if-changed={}", out.join("clang").display());
        return fs::write(&object, b"").expect("OUT_DIR is writable");
    }
    let status = compile(&clang, &object).status().expect("clang starts");
    assert!(status.success(), "clang could not compile {SOURCE}: {status}");
}

fn is_there(clang: &OsString) -> bool {
    Command::new(clang).arg("--version").output().is_ok_and(|out| out.status.success())
}

fn compile(clang: &OsString, object: &Path) -> Command {
    let endian = env::var("CARGO_CFG_TARGET_ENDIAN").expect("cargo sets it");
    let machine = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let mut command = Command::new(clang);
    command.args(["-target", if endian == "big" { "bpfeb" } else { "bpfel" }]);
    // -g is for the types of maps, which the kernel asks for.
    command.args(["-O2", "-g", "-Wall", "-Werror", "-fdebug-compilation-dir=."]);
    // Debian has asm/types.h where the compiler looks for it only when it compiles for this machine.
    let headers = format!("/usr/include/{machine}-linux-gnu");
    if Path::new(&headers).is_dir() {
        command.args(["-idirafter", &headers]);
    }
    command.args(["-c", SOURCE, "-o"]).arg(object);
    command
}
