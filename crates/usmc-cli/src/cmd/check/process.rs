//! A program that runs: is the library in it, and what else?
//!
//! Another process says what is read here: names are escaped, and files that it names are opened only to be read.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use procfs::process::{MMapPath, MemoryMap, Process};
use usmc::observe::{Mode, State};

use super::command;
use super::report::Finding;
use crate::imports::Imports;
use crate::library::{self, Library};
use crate::observed::{self, Refusal};
use crate::{proc, program};

/// Files of one process that are looked at.
const FILES: usize = 512;
/// Bytes of one of them.
const LARGEST: u64 = 256 << 20;
/// Descriptors of one process that are looked at.
const DESCRIPTORS: usize = 1 << 16;
/// What no connection of the program's is used by, however it is called there.
const OWN: [&str; 4] = ["libusmc_preload.so", "libc.so", "ld-linux", "ld-musl"];

/// What `usmc check --pid` is about.
pub struct Looked {
    /// Its number and name, for people.
    pub name: String,
    /// In order.
    pub findings: Vec<Finding>,
}

/// Looks at a process.
pub fn look(pid: u32, library: Option<&Library>, in_detail: bool) -> Looked {
    let unknown = |problem: &str, remedy: &str| Looked {
        name: format!("process {pid}"),
        findings: vec![Finding::failure(format!("process {pid} {problem}"), remedy)],
    };
    let Ok(number) = i32::try_from(pid) else {
        return unknown("cannot be: its number is too large", "see `ps`");
    };
    let maps = match Process::new(number).and_then(|process| process.maps()) {
        Ok(maps) => maps,
        Err(procfs::ProcError::PermissionDenied(_)) => {
            return unknown("is another user's", "`sudo usmc check --pid` looks at it");
        }
        Err(_) => return unknown("is not there", "see `ps` for its number"),
    };
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let name = format!("process {pid} ({})", shown(comm.trim_end_matches('\n')));
    let files = mapped(&maps.0);
    let mut findings = vec![own(pid, &files, library)];
    let is_in = !findings[0].is_failure();
    findings.extend(libc(&files));
    findings.extend(preloads(pid, &files));
    findings.extend(rings(pid));
    if is_in {
        findings.extend(sockets(pid));
    }
    let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    findings.extend(command::is_tested([exe.to_str()].into_iter().flatten()));
    let imports: Vec<Imports> = files.iter().filter_map(|file| imports(pid, file)).collect();
    let has = |word: &str| imports.iter().any(|of| of.has(word));
    let more = format!("usmc check --differences --pid {pid}");
    findings.extend(command::differences_of(has, in_detail, &more));
    Looked { name, findings }
}

/// A file that is mapped.
struct Mapped {
    path: PathBuf,
    inode: u64,
}

impl Mapped {
    fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The kernel writes it so.
    fn is_deleted(&self) -> bool {
        self.path.as_os_str().as_bytes().ends_with(b" (deleted)")
    }

    fn is_named(&self, start: &str) -> bool {
        self.name().starts_with(start)
    }
}

/// The files that code of the process is in, each once.
fn mapped(maps: &[MemoryMap]) -> Vec<Mapped> {
    let mut files = BTreeMap::new();
    for map in maps {
        let is_code = map.perms.contains(procfs::process::MMPermissions::EXECUTE);
        if let MMapPath::Path(path) = &map.pathname
            && is_code
            && files.len() < FILES
        {
            files.insert(path.clone(), map.inode);
        }
    }
    files.into_iter().map(|(path, inode)| Mapped { path, inode }).collect()
}

fn own(pid: u32, files: &[Mapped], library: Option<&Library>) -> Finding {
    if let Some(file) = files.iter().find(|file| file.is_named("libusmc_preload.so")) {
        let fact = format!("the library is in it: {}", path_shown(&file.path));
        return match file.is_deleted() {
            false => Finding::good(fact),
            true => Finding::note(
                fact,
                "the file has been replaced since; the program has the old one until it is started anew",
            ),
        };
    }
    let exe = PathBuf::from(format!("/proc/{pid}/exe"));
    let obstacle = library.and_then(|library| program::obstacle(&exe, library));
    match obstacle {
        Some((_, obstacle)) => Finding::failure(
            format!("the library is not in it, and cannot be: {obstacle}"),
            "use another build of it, if there is one",
        ),
        None => Finding::failure(
            "the library is not in it",
            "start it by `usmc run`; a configuration that excludes it leaves the library in, and idle",
        ),
    }
}

fn libc(files: &[Mapped]) -> Option<Finding> {
    let is_glibc = |file: &&Mapped| file.is_named("libc.so.6") || file.is_named("libc-2.");
    let is_musl = |file: &&Mapped| file.is_named("ld-musl") || file.is_named("libc.musl");
    if let Some(file) = files.iter().find(is_glibc) {
        return Some(Finding::good(format!("its C library is glibc: {}", path_shown(&file.path))));
    }
    if let Some(file) = files.iter().find(is_musl) {
        return Some(Finding::good(format!("its C library is musl: {}", path_shown(&file.path))));
    }
    Some(Finding::note(
        "it has no C library in a file of its own",
        "it is linked statically, or by Go: no library can get in",
    ))
}

/// What else is preloaded into it.
fn preloads(pid: u32, files: &[Mapped]) -> Option<Finding> {
    let environment =
        bounded(Path::new(&format!("/proc/{pid}/environ")), 1 << 20).unwrap_or_default();
    let variables = environment.split(|&byte| byte == 0);
    let of_variable = variables
        .filter_map(|variable| variable.strip_prefix(b"LD_PRELOAD="))
        .next()
        .unwrap_or_default()
        .to_vec();
    let of_file =
        bounded(&Path::new(&format!("/proc/{pid}/root")).join("etc/ld.so.preload"), 1 << 16)
            .unwrap_or_default();
    let both = [of_variable, of_file].join(&b' ');
    let others = both.split(|byte| b" :\n\t".contains(byte)).filter(|item| !item.is_empty());
    let base = |item: &[u8]| {
        String::from_utf8_lossy(item).rsplit('/').next().unwrap_or_default().to_owned()
    };
    let mut others: Vec<String> = others.map(base).filter(|name| name != library::NAME).collect();
    others.retain(|name| files.iter().any(|file| file.is_named(name)));
    others.dedup();
    (!others.is_empty()).then(|| {
        let names: Vec<String> = others.iter().map(|name| shown(name)).collect();
        let fact = format!("other libraries are preloaded into it, too: {}", names.join(", "));
        Finding::note(fact, "should it misbehave, compare without them")
    })
}

/// Its io_urings.
fn rings(pid: u32) -> Option<Finding> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten().take(DESCRIPTORS);
    let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    let count = links.filter(|link| link.as_os_str() == "anon_inode:[io_uring]").count();
    (count > 0).then(|| {
        let rings =
            if count == 1 { "an io_uring".to_owned() } else { format!("{count} io_urings") };
        Finding::note(
            format!("it has {rings}: connections that one reads, writes or polls stay TCP"),
            "most programs do without, by `io_uring = \"deny\"`",
        )
    })
}

/// What its connections are by.
fn sockets(pid: u32) -> Vec<Finding> {
    let process = match proc::find(pid) {
        Ok(Some(process)) => process,
        Ok(None) => return vec![Finding::good("it has made no TCP socket so far")],
        Err(problem) => return vec![Finding::note(problem.to_string(), "try again")],
    };
    let (mut memory, mut rdma, mut tcp) = (0, 0, 0);
    for file in &process.files {
        match observed::read(file) {
            Ok(reading) => {
                let is_open = |state: State| !matches!(state, State::Init | State::Listen);
                for socket in reading.sockets.iter().filter(|socket| is_open(socket.state)) {
                    match socket.mode {
                        Mode::Smcd => memory += 1,
                        Mode::Smcr => rdma += 1,
                        Mode::Tcp => tcp += 1,
                    }
                }
            }
            Err(Refusal::Version(version)) => {
                return vec![Finding::note(
                    format!("its library is of another version (layout {version})"),
                    "use the `usmc` of that version, or start it anew",
                )];
            }
            Err(_) => {}
        }
    }
    let fact = format!("connections: {memory} by shared memory, {rdma} by RDMA, {tcp} by TCP");
    vec![match tcp {
        0 => Finding::good(fact),
        _ => Finding::note(fact, "`usmc ss` says why; docs/it-says-tcp.md what to do"),
    }]
}

/// What a mapped file calls.
fn imports(pid: u32, file: &Mapped) -> Option<Imports> {
    let is_own = OWN.iter().any(|name| file.is_named(name));
    if is_own || file.is_deleted() {
        return None;
    }
    let inside = file.path.strip_prefix("/").ok()?;
    let path = Path::new("/proc").join(pid.to_string()).join("root").join(inside);
    let data = same(&path, file.inode)?;
    Imports::read(&data)
}

/// The content of the file at `path`, if it is the one that is mapped.
fn same(path: &Path, inode: u64) -> Option<Vec<u8>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .ok()?;
    let facts = file.metadata().ok()?;
    if !facts.is_file() || facts.ino() != inode || facts.len() > LARGEST {
        return None;
    }
    let mut data = Vec::new();
    file.take(LARGEST).read_to_end(&mut data).ok()?;
    Some(data)
}

fn bounded(path: &Path, most: u64) -> Result<Vec<u8>, ErrorKind> {
    let mut data = Vec::new();
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    file.and_then(|file| file.take(most).read_to_end(&mut data)).map_err(|e| e.kind())?;
    Ok(data)
}

fn path_shown(path: &Path) -> String {
    shown(&path.to_string_lossy())
}

/// What another process says, harmless to a terminal.
fn shown(text: &str) -> String {
    text.chars().take(256).flat_map(char::escape_default).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_the_library_is_said_to_be() {
        let looked = look(std::process::id(), None, false);
        assert!(
            looked.name.starts_with(&format!("process {} (", std::process::id())),
            "{}",
            looked.name
        );
        let facts: Vec<&str> = looked.findings.iter().map(|finding| &*finding.fact).collect();
        assert!(
            facts[0].starts_with("the library is not in it") && looked.findings[0].is_failure(),
            "{facts:?}"
        );
        assert!(facts.iter().any(|fact| fact.starts_with("its C library is ")), "{facts:?}");
        assert!(!facts.iter().any(|fact| fact.contains("io_uring:")), "{facts:?}");
    }

    #[test]
    fn what_is_no_process_is_said_to_be() {
        for (pid, fact) in [(u32::MAX, "too large"), (0, "is not there")] {
            let looked = look(pid, None, false);
            assert!(
                looked.findings[0].is_failure() && looked.findings[0].fact.contains(fact),
                "{:?}",
                looked.findings
            );
        }
    }

    #[test]
    fn names_of_others_are_escaped() {
        assert_eq!(shown("a\u{1b}[2J\u{202e}b"), "a\\u{1b}[2J\\u{202e}b");
        assert_eq!(shown(&"x".repeat(1000)).len(), 256);
    }
}
