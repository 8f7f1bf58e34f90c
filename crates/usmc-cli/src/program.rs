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
use object::{Endianness, FileKind, ReadCache, ReadRef};
use rustix::fs::{Access, access};

use crate::library::Library;

/// Scripts that name scripts as their interpreters: as deep as the kernel goes.
const MAX_INTERPRETERS: u32 = 4;
/// Longest `#!` line the kernel looks at (BINPRM_BUF_SIZE).
const MAX_SHEBANG: u64 = 256;

/// The library's processor, and what its 32-bit programs say.
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = elf::EM_AARCH64;
#[cfg(target_arch = "aarch64")]
const NARROW_MACHINE: u16 = elf::EM_ARM;
#[cfg(not(target_arch = "aarch64"))]
const MACHINE: u16 = elf::EM_X86_64;
#[cfg(not(target_arch = "aarch64"))]
const NARROW_MACHINE: u16 = elf::EM_386;

/// Why the library cannot serve a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Obstacle {
    /// No dynamic linker runs, so nobody reads LD_PRELOAD.
    Static,
    /// Go makes its system calls itself, whether linked statically or not.
    Go,
    /// The dynamic linker ignores LD_PRELOAD for programs that gain privileges.
    Privileged(&'static str),
    /// 32-bit, and nothing else is in the way: it has to be served by the 32-bit library.
    Narrow,
    /// Another processor's.
    Foreign,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Static => f.write_str("it is statically linked and loads no library"),
            Obstacle::Go => f.write_str("it is a Go program and does not call the C library"),
            Obstacle::Privileged(how) => {
                write!(f, "it is {how}, and the dynamic linker then ignores LD_PRELOAD")
            }
            Obstacle::Narrow => f.write_str(
                "it is a 32-bit program, and there is no 32-bit library (see usmc check)",
            ),
            Obstacle::Foreign => f.write_str("it is built for another processor"),
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

/// Why a command leads to no program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NoProgram {
    /// There is no such file.
    Nowhere,
    /// There is a file, which this user may not execute.
    NotExecutable(PathBuf),
    /// It is a directory.
    Directory(PathBuf),
}

/// Why [`find`] finds nothing.
pub fn why_none(command: &OsStr) -> NoProgram {
    let named = match command.as_bytes().contains(&b'/') {
        true => Some(PathBuf::from(command)),
        false => {
            let path = env::var_os("PATH").unwrap_or_default();
            env::split_paths(&path).map(|dir| dir.join(command)).find(|path| path.is_file())
        }
    };
    match named {
        Some(path) if path.is_dir() => NoProgram::Directory(path),
        Some(path) if path.exists() => NoProgram::NotExecutable(path),
        _ => NoProgram::Nowhere,
    }
}

/// What keeps the library out of the program at `path`, or out of the interpreter it names, which is
/// returned with it. `None` when nothing is known to.
pub fn obstacle(path: &Path, library: &Library) -> Option<(PathBuf, Obstacle)> {
    look(path).filter(|(_, found)| *found != Obstacle::Narrow || library.narrow.is_err())
}

/// The same where there is no 32-bit library.
fn look(path: &Path) -> Option<(PathBuf, Obstacle)> {
    let path = executed(path);
    let file = File::open(&path).ok()?;
    let found = gains_privileges(&path, &file).or_else(|| inspect(file))?;
    Some((path, found))
}

/// What the kernel executes for the program at `path`: itself, or the interpreter of a script.
pub fn executed(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..MAX_INTERPRETERS {
        match interpreter(&path) {
            Some(next) => path = next,
            None => break,
        }
    }
    path
}

/// The program that a script's first line names, be it through env(1).
fn interpreter(path: &Path) -> Option<PathBuf> {
    let mut line = Vec::new();
    File::open(path).ok()?.take(MAX_SHEBANG).read_to_end(&mut line).ok()?;
    let line = line.strip_prefix(b"#!")?.split(|&b| b == b'\n').next()?;
    let mut words = line.split(|b| matches!(b, b' ' | b'\t')).filter(|word| !word.is_empty());
    let named = PathBuf::from(OsStr::from_bytes(words.next()?));
    if named.file_name().is_none_or(|name| name != "env") {
        return Some(named);
    }
    let command = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='));
    Some(command.and_then(|name| find(OsStr::from_bytes(name))).unwrap_or(named))
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
    obstacle_in(&ReadCache::new(file))
}

/// The same of a program's contents, or of as many bytes of its beginning as there are.
pub fn obstacle_in<'d>(data: impl ReadRef<'d>) -> Option<Obstacle> {
    match FileKind::parse(data).ok()? {
        FileKind::Elf64 => {
            inspect_elf(FileHeader64::<Endianness>::parse(data).ok()?, MACHINE, data)
        }
        FileKind::Elf32 => {
            let header = FileHeader32::<Endianness>::parse(data).ok()?;
            inspect_elf(header, NARROW_MACHINE, data).or(Some(Obstacle::Narrow))
        }
        _ => None,
    }
}

fn inspect_elf<'d, H: FileHeader<Endian = Endianness>>(
    header: &H,
    machine: u16,
    data: impl ReadRef<'d>,
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
    linker(header, data)?.is_none().then_some(Obstacle::Static)
}

/// The dynamic linker that a program names, if it names one. `None`: its headers cannot be read.
fn linker<'d, H: FileHeader<Endian = Endianness>>(
    header: &H,
    data: impl ReadRef<'d>,
) -> Option<Option<&'d [u8]>> {
    let endian = header.endian().ok()?;
    let segments = header.program_headers(endian, data).ok()?;
    Some(segments.iter().find_map(|s| s.interpreter(endian, data).ok().flatten()))
}

/// What keeps the library out of the program at `path`, which may be another system's: no other file is looked at. A 32-bit
/// program has no library there.
pub fn obstacle_of(path: &Path) -> Option<Obstacle> {
    File::open(path).ok().and_then(inspect)
}

/// Whether no dynamic linker loads the program at `path`.
pub fn is_static(path: &Path) -> bool {
    File::open(path).ok().and_then(inspect) == Some(Obstacle::Static)
}

/// Whether the program at `path`, or the interpreter that it names, is loaded by musl's dynamic linker, which takes
/// `$LIB` in LD_PRELOAD for the name of a directory.
pub fn is_musl(path: &Path) -> bool {
    File::open(executed(path)).is_ok_and(|file| is_musl_in(&ReadCache::new(file)))
}

/// The same of a program's contents, or of as many bytes of its beginning as there are.
pub fn is_musl_in<'d>(data: impl ReadRef<'d>) -> bool {
    let linker = match FileKind::parse(data) {
        Ok(FileKind::Elf64) => {
            FileHeader64::<Endianness>::parse(data).ok().and_then(|header| linker(header, data))
        }
        Ok(FileKind::Elf32) => {
            FileHeader32::<Endianness>::parse(data).ok().and_then(|header| linker(header, data))
        }
        _ => None,
    };
    linker.flatten().is_some_and(|name| name.windows(7).any(|part| part == b"ld-musl"))
}

/// Whether one of these rules, a comma list as of `exclude_programs`, is for the executable of this file name.
pub fn is_named(rules: &str, name: &str) -> bool {
    rules.split(',').any(|rule| is_like(rule.trim().as_bytes(), name.as_bytes()))
}

/// As the library compares them: `*` is anything.
fn is_like(pattern: &[u8], name: &[u8]) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some((b'*', rest)) => (0..=name.len()).any(|skip| is_like(rest, &name[skip..])),
        Some((first, rest)) => name.first() == Some(first) && is_like(rest, &name[1..]),
    }
}

/// Whether there is a file of that name.
pub fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Whether `command` is a bare name that no searchable directory of PATH has.
pub fn is_nowhere(command: &OsStr) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs = env::split_paths(&path);
    !command.as_bytes().contains(&b'/') && !dirs.any(|dir| exists(&dir.join(command)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown};

    /// A 64-bit ELF file with nothing but an interpreter and one named section.
    fn elf64(machine: u16, linker: Option<&str>, section: &str) -> Vec<u8> {
        let linker = linker.map(|name| [name.as_bytes(), b"\0"].concat());
        let names = [b"\0", section.as_bytes(), b"\0.shstrtab\0"].concat();
        let (segments, segments_at) = (u16::from(linker.is_some()), 64u64);
        let linker_at = segments_at + 56;
        let linker = linker.unwrap_or_default();
        let names_at = linker_at + linker.len() as u64;
        let sections_at = (names_at + names.len() as u64).next_multiple_of(8);
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        let half = |values: &[u16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        let words =
            |values: &[u64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        file.extend(half(&[3, machine, 1, 0]));
        file.extend(words(&[0, segments_at, sections_at]));
        file.extend(half(&[0, 0, 64, 56, segments, 64, 3, 2]));
        file.extend(words(&[0x4_0000_0003, linker_at, 0, 0]));
        file.extend(words(&[linker.len() as u64, linker.len() as u64, 1]));
        file.extend(&linker);
        file.extend(&names);
        file.resize(sections_at as usize, 0);
        file.extend([0; 64]);
        let shstrtab = 2 + section.len() as u64;
        for (name, kind, at, size) in [(1, 1, 64, 0), (shstrtab, 3, names_at, names.len() as u64)] {
            file.extend(words(&[name | kind << 32, 0, 0, at, size, 0, 0, 0]));
        }
        file
    }

    /// A 32-bit ELF file with nothing but an interpreter.
    fn elf32(machine: u16, is_dynamic: bool) -> Vec<u8> {
        let linker = b"/lib/ld-linux.so.2\0";
        let (segments_at, linker_at) = (52u32, 52 + 32);
        let mut file = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        let half = |values: &[u16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        let words =
            |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        file.extend(half(&[3, machine, 1, 0]));
        file.extend(words(&[0, segments_at, 0, 0]));
        file.extend(half(&[52, 32, u16::from(is_dynamic), 40, 0, 0]));
        let size = linker.len() as u32;
        file.extend(words(&[elf::PT_INTERP, linker_at, 0, 0, size, size, 4, 1]));
        file.extend(linker);
        file
    }

    struct Temp(PathBuf);

    impl Temp {
        fn new(name: &str, content: &[u8]) -> Temp {
            let name = format!("usmc-program-{}-{name}", std::process::id());
            let path = env::temp_dir().join(name);
            fs::write(&path, content).expect("a file for the test");
            Temp(path)
        }
    }

    impl Drop for Temp {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    #[test]
    fn programs_that_cannot_be_served_are_recognised() {
        let glibc = Some("/lib64/ld-linux-x86-64.so.2");
        for (name, content, obstacle) in [
            ("dynamic", elf64(MACHINE, glibc, ".text"), None),
            ("static", elf64(MACHINE, None, ".text"), Some(Obstacle::Static)),
            ("go", elf64(MACHINE, glibc, ".go.buildinfo"), Some(Obstacle::Go)),
            ("go-static", elf64(MACHINE, None, ".go.buildinfo"), Some(Obstacle::Go)),
            ("musl", elf64(MACHINE, Some("/lib/ld-musl-x86_64.so.1"), "."), None),
            ("foreign", elf64(elf::EM_RISCV, glibc, ".text"), Some(Obstacle::Foreign)),
            ("narrow", elf32(NARROW_MACHINE, true), Some(Obstacle::Narrow)),
            ("narrow-static", elf32(NARROW_MACHINE, false), Some(Obstacle::Static)),
            ("narrow-foreign", elf32(elf::EM_RISCV, true), Some(Obstacle::Foreign)),
            ("text", b"echo\n".to_vec(), None),
            ("cut", elf64(MACHINE, glibc, ".text")[..80].to_vec(), None),
            ("empty", Vec::new(), None),
        ] {
            let file = Temp::new(name, &content);
            let found = look(&file.0).map(|(_, obstacle)| obstacle);
            assert_eq!(found, obstacle, "{name}");
            assert_eq!(
                is_static(&file.0),
                name.ends_with("static") && name != "go-static",
                "{name}"
            );
            assert_eq!(is_musl(&file.0), name == "musl", "{name}");
        }
    }

    #[test]
    fn rules_are_for_whole_names() {
        for (rules, name, is_it) in [
            ("redis-*", "redis-server", true),
            ("sshd, redis-server", "redis-server", true),
            ("redis", "redis-server", false),
            ("*", "x", true),
            ("a*b", "a/b", true),
            ("", "x", false),
        ] {
            assert_eq!(is_named(rules, name), is_it, "{rules} {name}");
        }
    }

    #[test]
    fn what_is_no_program_is_told_apart() {
        let file = Temp::new("no-program", b"text");
        let path = file.0.as_os_str();
        assert_eq!(why_none(path), NoProgram::NotExecutable(file.0.clone()));
        assert_eq!(why_none("/".as_ref()), NoProgram::Directory("/".into()));
        assert_eq!(why_none("/nonexistent/x".as_ref()), NoProgram::Nowhere);
        assert_eq!(why_none("usmc-no-such-program".as_ref()), NoProgram::Nowhere);
    }

    #[test]
    fn a_scripts_interpreter_is_looked_at() {
        let interpreter = Temp::new("interpreter", &elf64(MACHINE, None, ".text"));
        let line = format!("#! {} -x\nrest", interpreter.0.display());
        let script = Temp::new("script", line.as_bytes());
        let wrapped = Temp::new("wrapped", format!("#!{}\n", script.0.display()).as_bytes());
        for path in [&script.0, &wrapped.0] {
            assert_eq!(look(path), Some((interpreter.0.clone(), Obstacle::Static)));
        }
        fs::set_permissions(&interpreter.0, fs::Permissions::from_mode(0o755)).expect("chmod");
        let line = format!("#!/usr/bin/env -S A=b {} -x\n", interpreter.0.display());
        let by_env = Temp::new("by_env", line.as_bytes());
        assert_eq!(executed(&by_env.0), interpreter.0);
        let endless = Temp::new("endless", b"");
        fs::write(&endless.0, format!("#!{}\n", endless.0.display())).expect("a loop");
        assert_eq!(look(&endless.0), None);
    }

    #[test]
    fn programs_that_gain_privileges_are_recognised() {
        if !rustix::process::geteuid().is_root() {
            let su = Path::new("/bin/su");
            assert!(!su.exists() || look(su).is_some(), "root's setuid program");
            return;
        }
        let file = Temp::new("setuid", &elf64(MACHINE, Some("/lib64/ld-linux-x86-64.so.2"), "."));
        chown(&file.0, Some(65534), None).expect("chown");
        fs::set_permissions(&file.0, fs::Permissions::from_mode(0o4755)).expect("chmod");
        let found = look(&file.0).map(|(_, obstacle)| obstacle);
        assert_eq!(found, Some(Obstacle::Privileged("setuid")));
    }
}
