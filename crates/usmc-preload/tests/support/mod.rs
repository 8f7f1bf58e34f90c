//! What the tests of the shared object share: they test the file that users load, as a release build makes
//! it, not the one that `cargo test` compiles beside them.
#![allow(dead_code, reason = "each test uses a part")]
#![allow(unreachable_pub, reason = "part of a program")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// <target> of <target>/<profile>/deps/<this test>
fn target() -> PathBuf {
    std::env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned()
}

/// Builds the shared object for 32-bit programs once and says where it is.
pub fn narrow_shared_object() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let done = Command::new("sh")
            .args(["narrow.sh", "--strict"])
            .env("CARGO_TARGET_DIR", target())
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .unwrap();
        assert!(done.success(), "no 32-bit shared object (make test-deps installs what it needs)");
        target().join("i686-unknown-linux-gnu/release/libusmc_preload.so")
    })
}

/// The C library of 32-bit programs.
pub fn narrow_libc() -> PathBuf {
    let linker = std::fs::canonicalize("/lib/ld-linux.so.2").expect("a 32-bit C library");
    linker.with_file_name("libc.so.6")
}

/// Builds the shared object once and says where it is.
pub fn shared_object() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let target = target();
        let done = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--release", "-p", "usmc-preload", "--target-dir"])
            .arg(&target)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(done.success(), "the shared object does not build");
        target.join("release/libusmc_preload.so")
    })
}

/// The C library this process runs on.
pub fn libc() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|l| l.contains("/libc.so.6")).expect("not glibc");
    line[line.find('/').unwrap()..].into()
}

/// Standard output of a tool.
pub fn output_of(command: &mut Command) -> String {
    let done =
        command.stderr(Stdio::inherit()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(done.status.success(), "{command:?}: {}", done.status);
    String::from_utf8(done.stdout).unwrap()
}

/// Whether a program is installed; says so when a test leaves something out.
pub fn have(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
    if !found {
        eprintln!("left out: {program} is not installed");
    }
    found
}

/// A directory of this test's own.
pub fn directory(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir
}
