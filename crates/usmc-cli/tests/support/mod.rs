//! What the tests of `usmc` share: clean commands, directories that go away, and processes that hold
//! record files as the library would.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(unreachable_pub, reason = "part of a program")]

use std::env;
use std::fs::{self, File};
use std::mem::offset_of;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, memfd_create};
use usmc::observe::{Header, MAGIC, MEMFD_NAME, RECORDS_OFFSET, Record, VERSION};

/// A command whose environment says nothing about uSMC, and no file either.
pub fn clean(program: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("USMC_") {
            command.env_remove(name);
        }
    }
    command.env_remove("LD_PRELOAD").env("XDG_CONFIG_HOME", "/nonexistent").stdin(Stdio::null());
    command
}

/// `usmc` with these arguments.
pub fn usmc(args: &[&str]) -> Command {
    let mut command = clean(env!("CARGO_BIN_EXE_usmc"));
    command.args(args);
    command
}

/// Runs it to its end.
pub fn output(command: &mut Command) -> Output {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    spawn(command).wait_with_output().expect("its output")
}

/// While it is held, no child of this process is between its fork and its exec. Such a child holds the files of all tests:
/// a file that names no process is ascribed to the first that holds it, and a program that is being written cannot be
/// executed (ETXTBSY).
fn no_child_begins() -> MutexGuard<'static, ()> {
    static STARTING: Mutex<()> = Mutex::new(());
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn spawn(command: &mut Command) -> Child {
    let _one = no_child_begins();
    command.spawn().expect("the command starts")
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

/// A new directory, removed when dropped.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new() -> TempDir {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("usmc-cli-test-{}-{number}", std::process::id());
        let path = env::temp_dir().join(name);
        fs::create_dir(&path).expect("a directory for the test");
        TempDir(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn str(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }

    /// Writes a file in it and returns its path.
    pub fn file(&self, name: &str, content: &[u8]) -> String {
        let path = self.0.join(name);
        let _written = no_child_begins();
        fs::write(&path, content).expect("a file for the test");
        path.to_str().expect("UTF-8").to_owned()
    }

    /// Copies the command under test to this place in it.
    pub fn usmc_at(&self, place: &str) -> PathBuf {
        let path = self.0.join(place);
        let _written = no_child_begins();
        fs::copy(env!("CARGO_BIN_EXE_usmc"), &path).expect("a copy of the command");
        path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A library that every program here has loaded anyway, under the name of ours.
pub fn harmless_library(dir: &TempDir) -> String {
    let maps = fs::read_to_string("/proc/self/maps").expect("maps");
    let libc = maps.split_whitespace().find(|word| word.contains("/libc.so")).expect("libc");
    let path = dir.path().join("libusmc_preload.so");
    std::os::unix::fs::symlink(libc, &path).expect("a link");
    path.to_str().expect("UTF-8").to_owned()
}

/// The real library, built beside the command under test if nobody has built it yet.
pub fn real_library() -> PathBuf {
    let profile_dir = Path::new(env!("CARGO_BIN_EXE_usmc")).parent().expect("a directory");
    let library = profile_dir.join("libusmc_preload.so");
    if !library.exists() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "usmc-preload"]);
        cargo.env("CARGO_TARGET_DIR", profile_dir.parent().expect("a target directory"));
        if let Some(profile) = profile_dir.file_name().filter(|name| *name != "debug") {
            cargo.arg("--profile").arg(profile);
        }
        assert!(cargo.status().expect("cargo").success(), "the library builds");
    }
    library
}

/// One record as the library writes it.
#[derive(Clone, Copy)]
pub struct Rec {
    pub seq: u32,
    pub fd: u32,
    pub state: u8,
    pub mode: u8,
    pub reason: u8,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub tx_bytes: u64,
    pub rx_bytes: u64,
    pub window: u32,
    pub ring_size: u32,
}

impl Rec {
    /// A connected SMC-D socket.
    pub fn smcd(local: &str, peer: &str) -> Rec {
        Rec {
            seq: 2,
            fd: 5,
            state: 3,
            mode: 2,
            reason: 0,
            local: local.parse().expect("an address"),
            peer: peer.parse().expect("an address"),
            tx_bytes: 0,
            rx_bytes: 0,
            window: 65536,
            ring_size: 262_144,
        }
    }

    /// A connected socket on TCP.
    pub fn tcp(local: &str, peer: &str, reason: u8) -> Rec {
        Rec { mode: 1, reason, window: 0, ring_size: 0, ..Rec::smcd(local, peer) }
    }

    pub fn bytes(&self) -> [u8; size_of::<Record>()] {
        let mut bytes = [0; size_of::<Record>()];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let family = if self.local.is_ipv4() { 4 } else { 6 };
        let kind = u32::from_le_bytes([self.state, self.mode, self.reason, family]);
        let ports = u32::from(self.local.port()) | u32::from(self.peer.port()) << 16;
        put(offset_of!(Record, seq), &self.seq.to_ne_bytes());
        put(offset_of!(Record, fd), &self.fd.to_ne_bytes());
        put(offset_of!(Record, kind), &kind.to_ne_bytes());
        put(offset_of!(Record, ports), &ports.to_ne_bytes());
        for (at, addr) in
            [(offset_of!(Record, local), self.local), (offset_of!(Record, peer), self.peer)]
        {
            match addr.ip() {
                IpAddr::V4(v4) => put(at, &v4.octets()),
                IpAddr::V6(v6) => put(at, &v6.octets()),
            }
        }
        put(offset_of!(Record, tx_bytes), &self.tx_bytes.to_ne_bytes());
        put(offset_of!(Record, rx_bytes), &self.rx_bytes.to_ne_bytes());
        put(offset_of!(Record, window), &self.window.to_ne_bytes());
        put(offset_of!(Record, ring_size), &self.ring_size.to_ne_bytes());
        bytes
    }
}

/// A header as the library writes it.
pub fn header(high_water: u32, pid: u32) -> Vec<u8> {
    let mut bytes = vec![0; size_of::<Header>()];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(offset_of!(Header, magic), &MAGIC.to_ne_bytes());
    put(offset_of!(Header, version), &VERSION.to_ne_bytes());
    put(offset_of!(Header, record_size), &(size_of::<Record>() as u32).to_ne_bytes());
    put(offset_of!(Header, high_water), &high_water.to_ne_bytes());
    put(offset_of!(Header, pid), &pid.to_ne_bytes());
    bytes
}

/// A memfd with the library's name for it, holding `parts` at their offsets.
pub fn memfd(parts: &[(usize, &[u8])]) -> File {
    let file = File::from(memfd_create(MEMFD_NAME, MemfdFlags::CLOEXEC).expect("a memfd"));
    for (at, bytes) in parts {
        file.write_all_at(bytes, *at as u64).expect("content");
    }
    file
}

/// A complete file with these records.
pub fn record_file(records: &[Rec]) -> File {
    let bytes: Vec<u8> = records.iter().flat_map(Rec::bytes).collect();
    memfd(&[(0, &header(records.len() as u32, 0)), (RECORDS_OFFSET, &bytes)])
}

/// A process that holds `file` and does nothing else; ended and reaped when dropped.
pub struct Holder(Child);

impl Holder {
    pub fn new(file: &File) -> Holder {
        Holder::named("cat", file)
    }

    /// Runs `program`, which must wait for the end of its standard input as cat(1) does.
    pub fn named(program: &str, file: &File) -> Holder {
        Holder::start(Command::new(program).stderr(Stdio::null()), file)
    }

    /// A holder with this socket as its descriptor 2.
    pub fn with_socket(socket: &TcpStream, file: &File) -> Holder {
        let socket = OwnedFd::from(socket.try_clone().expect("a second descriptor"));
        Holder::start(Command::new("cat").stderr(socket), file)
    }

    fn start(command: &mut Command, file: &File) -> Holder {
        let out = file.try_clone().expect("a second descriptor");
        let child = spawn(command.stdin(Stdio::piped()).stdout(out));
        // As the library does; other tests' children have the file, too, between fork and exec.
        let at = offset_of!(Header, pid);
        if file.metadata().expect("metadata").len() > at as u64 {
            file.write_all_at(&child.id().to_ne_bytes(), at as u64).expect("pid");
        }
        Holder(child)
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reproducible noise (xorshift64*).
pub struct Noise(pub u64);

impl Noise {
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            let word = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d).to_ne_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}
