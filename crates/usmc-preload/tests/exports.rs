//! The shared object exports the table, all of it and nothing else, and needs nothing but libc.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use support::{libc, output_of, shared_object};
#[cfg(target_arch = "x86_64")]
use support::{narrow_libc, narrow_shared_object};

/// The table itself, read by macros of the same names that keep the names only.
#[allow(unused_imports, dead_code, reason = "only the names are used")]
#[path = "../src/symbols.rs"]
mod symbols;

/// What 32-bit machines have besides.
#[allow(unused_imports, dead_code, reason = "only the names are used")]
#[path = "../src/symbols_narrow.rs"]
mod symbols_narrow;

mod interpose {
    macro_rules! interpose {
        ($($name:ident($($args:tt)*) $(-> $ret:ty)? = $api:ident $(: $proof:ident)?;)*) => {
            pub(crate) const INTERPOSED: &[&str] = &[$(stringify!($name)),*];
        };
    }
    macro_rules! fortified {
        ($($name:ident($($args:tt)*) -> $ret:ty = $api:ident($($given:tt)*) if $fits:expr;)*) => {
            pub(crate) const FORTIFIED: &[&str] = &[$(stringify!($name)),*];
        };
    }
    pub(crate) use {fortified, interpose};
}

mod variadic {
    macro_rules! variadic {
        ($($name:ident($($args:tt)*) -> $ret:ty = $function:ident;)*) => {
            pub(crate) const VARIADIC: &[&str] = &[$(stringify!($name)),*];
        };
    }
    pub(crate) use variadic;
}

mod by_number {
    macro_rules! export {
        ($name:ident;) => {
            pub(crate) const BY_NUMBER: &[&str] = &[stringify!($name)];
        };
    }
    pub(crate) use export;
}

/// Relatives of table symbols that libc exports to programs and we leave alone.
const ABSENT: &[(&str, &str)] = &[
    ("pread", "a socket has no position: the kernel refuses with ESPIPE, as it should"),
    ("pwrite", "as pread"),
    ("fstat", "the fd is the kernel's socket, so what it says is true"),
    (
        "sigset",
        "obsolete; made of sigaction inside libc, where no handler of a socket program comes from",
    ),
    ("fork", "libc tells of it through pthread_atfork, wherever in libc it is called"),
    ("forkpty", "as fork"),
    ("exit", "ends with our destructor"),
];

/// A build of the library, and the C library it is for.
struct Build {
    object: PathBuf,
    libc: PathBuf,
    is_narrow: bool,
}

/// Every build there is for this machine.
fn builds() -> Vec<Build> {
    let wide = Build { object: shared_object().into(), libc: libc(), is_narrow: false };
    #[cfg(target_arch = "x86_64")]
    return vec![
        wide,
        Build { object: narrow_shared_object().into(), libc: narrow_libc(), is_narrow: true },
    ];
    #[cfg(not(target_arch = "x86_64"))]
    vec![wide]
}

fn table(build: &Build) -> BTreeSet<&'static str> {
    let mut names = [symbols::INTERPOSED, symbols::FORTIFIED, symbols::BY_NUMBER].concat();
    #[cfg(target_arch = "x86_64")]
    names.extend(symbols::VARIADIC);
    if build.is_narrow {
        names.extend(symbols_narrow::INTERPOSED);
    }
    let count = names.len();
    let set: BTreeSet<_> = names.into_iter().collect();
    assert_eq!(set.len(), count, "a symbol has two lines");
    set
}

/// Dynamic symbols by name, with the versions they come in.
fn dynamic(file: &std::path::Path, which: &str) -> BTreeMap<String, Vec<String>> {
    let listing =
        output_of(Command::new("nm").args(["-D", "--with-symbol-versions", which]).arg(file));
    let mut symbols = BTreeMap::<String, Vec<String>>::new();
    for word in listing.lines().filter_map(|line| line.split_whitespace().last()) {
        let (name, version) = word.split_once('@').unwrap_or((word, ""));
        symbols.entry(name.into()).or_default().push(version.trim_start_matches('@').into());
    }
    symbols
}

/// What programs can link with: a symbol for glibc's own libraries only is none of ours.
fn public_in_libc(build: &Build) -> BTreeSet<String> {
    let all = dynamic(&build.libc, "--defined-only");
    all.into_iter()
        .filter(|(_, v)| v.iter().any(|v| v != "GLIBC_PRIVATE"))
        .map(|(n, _)| n)
        .collect()
}

#[test]
fn the_exports_are_the_table() {
    for build in builds() {
        let exported = dynamic(&build.object, "--defined-only");
        let exported: BTreeSet<_> = exported.keys().map(String::as_str).collect();
        assert_eq!(exported, table(&build));
    }
}

#[test]
fn exports_carry_no_version() {
    for build in builds() {
        // A program asks for `read@GLIBC_2.2.5`; only an unversioned definition answers to every version.
        for (name, versions) in dynamic(&build.object, "--defined-only") {
            assert_eq!(versions, [""], "{name}");
        }
    }
}

#[test]
fn no_twin_is_forgotten() {
    for build in builds() {
        let (table, libc) = (table(&build), public_in_libc(&build));
        let mut forgotten = Vec::new();
        for name in &table {
            let bare = name.trim_start_matches('_').trim_end_matches("_chk").trim_end_matches("_2");
            let bare = bare.strip_suffix("64").unwrap_or(bare);
            for twin in [
                bare.to_string(),
                format!("{bare}64"),
                format!("__{bare}"),
                format!("__{bare}64"),
                format!("__{bare}_chk"),
                format!("__{bare}64_chk"),
                format!("__{bare}_2"),
                format!("__{bare}64_2"),
                format!("__libc_{bare}"),
                format!("__libc_{bare}64"),
                format!("_IO_{bare}"),
                format!("__{bare}_nocancel"),
                format!("{bare}_cancel"),
                format!("__{bare}_time64"),
            ] {
                let is_absent = ABSENT.iter().any(|(name, _)| *name == twin);
                if libc.contains(&twin) && !table.contains(twin.as_str()) && !is_absent {
                    forgotten.push(twin);
                }
            }
        }
        assert!(forgotten.is_empty(), "libc exports, the table does not: {forgotten:?}");
    }
}

#[test]
fn what_is_absent_is_absent_on_purpose() {
    for build in builds() {
        let (table, libc) = (table(&build), public_in_libc(&build));
        for (name, reason) in ABSENT {
            assert!(libc.contains(*name), "{name} is nothing of libc's ({reason})");
            assert!(!table.contains(name), "{name} is in the table, so not: {reason}");
        }
    }
}

#[test]
fn only_libc_is_needed() {
    for build in builds() {
        let listing = output_of(Command::new("readelf").args(["-dW"]).arg(&build.object));
        let needed: Vec<_> = listing.lines().filter(|l| l.contains("(NEEDED)")).collect();
        assert!(needed.len() == 1 && needed[0].contains("[libc.so.6]"), "{needed:?}");
        let now = |l: &str| l.contains("(FLAGS_1)") && l.contains("NOW");
        assert!(listing.lines().any(now), "calls are bound lazily");
        assert!(!listing.contains("INITFIRST"), "the environment is not there yet (see build.rs)");
    }
}

#[test]
fn no_version_of_anything_is_needed() {
    for build in builds() {
        // A version that somebody's libc lacks would keep each of his programs from starting.
        let listing = output_of(Command::new("readelf").args(["-SdVW"]).arg(&build.object));
        for part in ["VERNEED", ".gnu.version_r"] {
            assert!(!listing.contains(part), "{}: {part}", build.object.display());
        }
        for (name, versions) in dynamic(&build.object, "--undefined-only") {
            assert_eq!(versions, [""], "{name}");
        }
    }
}

#[test]
fn nothing_allocates_locks_or_keeps_thread_locals() {
    for build in builds() {
        let imports = dynamic(&build.object, "--undefined-only");
        let names: Vec<_> = imports.keys().map(String::as_str).collect();
        println!("imports: {names:?}");
        // Calls of our own to what we interpose would come back to us.
        let table = table(&build);
        for name in &names {
            assert!(!table.contains(name), "{name} is imported, but it is our own export");
        }
        // Every import is used at start only, or is pure, or ends the process; and every libc has it.
        let known = [
            ("dl_iterate_phdr", "start; later where a program makes an io_uring by liburing"),
            ("getenv", "start"),
            ("readlink", "start"),
            ("abort", "the end"),
            ("clock_gettime", "pure, through the vDSO"),
            ("__errno_location", "pure"),
            ("memcpy", "pure"),
            ("memmove", "pure"),
            ("memset", "pure"),
            ("memcmp", "pure"),
            ("bcmp", "pure"),
            ("strlen", "pure"),
            ("__cxa_finalize", "weak: the C start files"),
            ("__gmon_start__", "weak: the C start files"),
            ("_ITM_registerTMCloneTable", "weak: the C start files"),
            ("_ITM_deregisterTMCloneTable", "weak: the C start files"),
        ];
        for name in &names {
            assert!(
                known.iter().any(|(k, _)| k == name),
                "{name} is imported; may it be called anywhere, and has each libc got it?"
            );
        }
        let segments = output_of(Command::new("readelf").args(["-lW"]).arg(&build.object));
        let has_tls = segments.lines().any(|l| l.trim_start().starts_with("TLS "));
        assert!(!has_tls, "thread-local storage of a shared object may allocate");
    }
}
