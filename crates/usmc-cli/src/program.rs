//! Looking at a command before it is started: can the preload library get into it at all?
//!
//! Only certainties are reported. A program that cannot be served simply runs on TCP.

use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, FileKind, ReadCache};
use rustix::fs::{Access, access};

/// Scripts that name scripts as their interpreters: as deep as the kernel goes.
const MAX_INTERPRETERS: u32 = 4;
/// Longest `#!` line the kernel looks at (BINPRM_BUF_SIZE).
const MAX_SHEBANG: u64 = 256;

#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = elf::EM_AARCH64;
#[cfg(not(target_arch = "aarch64"))]
const MACHINE: u16 = elf::EM_X86_64;

/// Why the library cannot serve a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Obstacle {
    /// No dynamic linker runs, so nobody reads LD_PRELOAD.
    Static,
    /// Go makes its system calls itself, whether linked statically or not.
    Go,
    /// The dynamic linker ignores LD_PRELOAD for programs that gain privileges.
    Privileged(&'static str),
    /// 32-bit.
    Narrow,
    /// Another processor's.
    Foreign,
    /// Another C library's; the preload would keep it from starting.
    Musl,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Static => f.write_str("it is statically linked and loads no library"),
            Obstacle::Go => f.write_str("it is a Go program and does not call the C library"),
            Obstacle::Privileged(how) => {
                write!(f, "it is {how}, and the dynamic linker then ignores LD_PRELOAD")
            }
            Obstacle::Narrow => f.write_str("it is a 32-bit program and the library has 64 bits"),
            Obstacle::Foreign => f.write_str("it is built for another processor"),
            Obstacle::Musl => {
                f.write_str("it uses the musl C library, and uSMC is built for glibc")
            }
        }
    }
}

/// Looks a command up as execvp(3) does.
pub fn find(command: &OsStr) -> Option<PathBuf> {
    let executable = |path: &PathBuf| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    if command.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(command)).filter(executable);
    }
    let path = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    env::split_paths(&path).map(|dir| dir.join(command)).find(executable)
}

/// What keeps the library out of the program at `path`, or out of the interpreter it names, which is
/// returned with it. `None` when nothing is known to.
pub fn obstacle(path: &Path) -> Option<(PathBuf, Obstacle)> {
    let mut path = path.to_owned();
    for _ in 0..MAX_INTERPRETERS {
        match interpreter(&path) {
            Some(next) => path = next,
            None => break,
        }
    }
    let file = File::open(&path).ok()?;
    let found = gains_privileges(&path, &file).or_else(|| inspect(file))?;
    Some((path, found))
}

/// The program that a script's first line names.
fn interpreter(path: &Path) -> Option<PathBuf> {
    let mut line = Vec::new();
    File::open(path).ok()?.take(MAX_SHEBANG).read_to_end(&mut line).ok()?;
    let line = line.strip_prefix(b"#!")?.split(|&b| b == b'\n').next()?;
    let name = line.split(|b| matches!(b, b' ' | b'\t')).find(|word| !word.is_empty())?;
    Some(PathBuf::from(OsStr::from_bytes(name)))
}

fn gains_privileges(path: &Path, file: &File) -> Option<Obstacle> {
    let meta = file.metadata().ok()?;
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    if meta.mode() & 0o4000 != 0 && meta.uid() != uid.as_raw() {
        return Some(Obstacle::Privileged("setuid"));
    }
    // Without group execute permission the bit once meant mandatory locking, and changes nothing.
    if meta.mode() & 0o2010 == 0o2010 && meta.gid() != gid.as_raw() {
        return Some(Obstacle::Privileged("setgid"));
    }
    let has_capabilities =
        rustix::fs::getxattr(path, "security.capability", &mut [0u8; 64][..]).is_ok();
    (has_capabilities && !uid.is_root())
        .then_some(Obstacle::Privileged("given capabilities by its file"))
}

fn inspect(file: File) -> Option<Obstacle> {
    let data = ReadCache::new(file);
    match FileKind::parse(&data).ok()? {
        FileKind::Elf64 => {
            inspect_elf(FileHeader64::<Endianness>::parse(&data).ok()?, &data, MACHINE)
        }
        FileKind::Elf32 => {
            let machine = if MACHINE == elf::EM_X86_64 { elf::EM_386 } else { elf::EM_ARM };
            let header = FileHeader32::<Endianness>::parse(&data).ok()?;
            inspect_elf(header, &data, machine).or(Some(Obstacle::Narrow))
        }
        _ => None,
    }
}

fn inspect_elf<H: FileHeader<Endian = Endianness>>(
    header: &H,
    data: &ReadCache<File>,
    machine: u16,
) -> Option<Obstacle> {
    let endian = header.endian().ok()?;
    if header.e_machine(endian) != machine {
        return Some(Obstacle::Foreign);
    }
    let sections = header.sections(endian, data).ok();
    let is_go = sections.is_some_and(|s| s.section_by_name(endian, b".go.buildinfo").is_some());
    if is_go {
        return Some(Obstacle::Go);
    }
    let segments = header.program_headers(endian, data).ok()?;
    let linker = segments.iter().find_map(|s| s.interpreter(endian, data).ok().flatten());
    match linker {
        None => Some(Obstacle::Static),
        Some(linker) if linker.windows(7).any(|w| w == b"ld-musl") => Some(Obstacle::Musl),
        Some(_) => None,
    }
}

/// Whether this user may read the file at all, to tell "not there" from "not allowed".
pub fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}
