//! What the tests need built: `usmc` with its preload library, and the C programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The directory of this crate.
pub fn tests_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The build directory in use (`target`, or what `CARGO_TARGET_DIR` says).
pub fn target() -> PathBuf {
    // <target>/<profile>/deps/<test>, whoever runs it and in whichever profile.
    let exe = std::env::current_exe().expect("the test's own path");
    exe.ancestors().nth(3).expect("a test runs from <target>/<profile>/deps").to_owned()
}

/// The `usmc` command: `USMC_BIN`, or built here once with the library, as `make build` does.
pub fn usmc() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(given) = std::env::var_os("USMC_BIN") {
            return PathBuf::from(given);
        }
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let target = target();
        let mut library = Command::new(cargo);
        library.args(["build", "--release", "--quiet", "-p", "usmc-preload"]);
        let mut command = Command::new("sh");
        command.arg(tests_dir().join("../crates/usmc-cli/build.sh"));
        for build in [&mut library, &mut command] {
            let built = build.env("CARGO_TARGET_DIR", &target).current_dir(tests_dir()).status();
            assert!(built.expect("running cargo").success(), "{build:?} failed");
        }
        target.join("release/usmc")
    })
}

/// The unit tests of a crate of the workspace, in the profile of these tests.
pub fn unit_tests(package: &str) -> PathBuf {
    cargo_builds(package, &["test", "--no-run", "--lib"])
}

/// An example program of a crate of the workspace, likewise.
pub fn example(package: &str, name: &str) -> PathBuf {
    cargo_builds(package, &["build", "--example", name])
}

/// The agent.
pub fn agent() -> &'static Path {
    static AGENT: OnceLock<PathBuf> = OnceLock::new();
    AGENT.get_or_init(|| cargo_builds("usmc-agent", &["build", "--bin", "usmc-agent"]))
}

/// A libibverbs.so.1 for tests.
pub fn fake_verbs() -> &'static Path {
    static FAKE: OnceLock<PathBuf> = OnceLock::new();
    FAKE.get_or_init(|| {
        cargo_build("usmc-fake-verbs", &["build", "--lib"]);
        agent().with_file_name("libusmc_fake_verbs.so")
    })
}

/// The program that a call of cargo builds.
fn cargo_builds(package: &str, what: &[&str]) -> PathBuf {
    let built = cargo_build(package, what);
    let messages = serde_json::Deserializer::from_slice(&built).into_iter::<serde_json::Value>();
    let path =
        messages.flatten().find_map(|message| message["executable"].as_str().map(PathBuf::from));
    path.expect("the program")
}

/// What cargo says of it.
fn cargo_build(package: &str, what: &[&str]) -> Vec<u8> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let target = target();
    let exe = std::env::current_exe().expect("the test's own path");
    let profile =
        exe.ancestors().nth(2).and_then(Path::file_name).expect("<target>/<profile>/deps");
    let profile = if profile == "debug" { "dev".as_ref() } else { profile };
    let built = Command::new(cargo)
        .args(what)
        .args(["--message-format", "json", "-p", package, "--profile"])
        .arg(profile)
        .arg("--target-dir")
        .arg(&target)
        .current_dir(tests_dir())
        .stderr(Stdio::inherit())
        .output()
        .expect("running cargo");
    assert!(built.status.success(), "cargo {what:?} -p {package} failed");
    built.stdout
}

/// The library for 32-bit programs, beside the other one where `usmc run` finds it. Says why not.
fn build_narrow_library() -> bool {
    usmc();
    let script = tests_dir().join("../crates/usmc-preload/narrow.sh");
    let built = Command::new("sh")
        .arg(script)
        .arg("--strict")
        .env("CARGO_TARGET_DIR", target())
        .status()
        .expect("running narrow.sh");
    built.success()
}

/// A program for 32 bits, where these can be built at all.
pub fn narrow_program(name: &str) -> Option<PathBuf> {
    build_narrow_library().then(|| program(name))
}

/// Where Debian keeps PostgreSQL's programs, those of the newest version.
pub fn postgres_dir() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    let mut dirs: Vec<PathBuf> = versions.flatten().map(|e| e.path().join("bin")).collect();
    dirs.retain(|d| d.join("postgres").exists());
    dirs.sort();
    dirs.pop()
}

/// A C program: all `.c` files of its directories under `programs/`.
struct Program {
    name: &'static str,
    dirs: &'static [&'static str],
    flags: &'static [&'static str],
}

const PROGRAMS: &[Program] = &[
    Program {
        name: "cases",
        dirs: &["common", "casework", "cases"],
        flags: &["-U_FORTIFY_SOURCE"],
    },
    // Calls `__read_chk` and the like.
    Program {
        name: "fortified",
        dirs: &["common", "casework", "fortified"],
        flags: &["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"],
    },
    Program {
        name: "uring",
        dirs: &["common", "casework", "uring"],
        flags: &["-Wl,--no-as-needed", "-luring"],
    },
    Program { name: "actor", dirs: &["common", "actor"], flags: &[] },
    Program { name: "load", dirs: &["common", "load"], flags: &[] },
    // Cannot load the library.
    Program { name: "load-static", dirs: &["common", "load"], flags: &["-static"] },
    Program { name: "storm", dirs: &["common", "storm"], flags: &[] },
    Program { name: "guests", dirs: &["common", "guests"], flags: &[] },
    // A library, for LD_PRELOAD.
    Program { name: "smc_sockets.so", dirs: &["smc_sockets"], flags: &["-shared", "-fPIC"] },
];

/// The same for 32 bits, where these run.
const NARROW_PROGRAMS: &[Program] = &[
    Program {
        name: "cases32",
        dirs: &["common", "casework", "cases"],
        flags: &["-m32", "-U_FORTIFY_SOURCE"],
    },
    // With 64 bits of time and of offsets: other functions of libc's.
    Program {
        name: "cases32t",
        dirs: &["common", "casework", "cases"],
        flags: &["-m32", "-U_FORTIFY_SOURCE", "-D_TIME_BITS=64", "-D_FILE_OFFSET_BITS=64"],
    },
    Program {
        name: "fortified32",
        dirs: &["common", "casework", "fortified"],
        flags: &["-m32", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"],
    },
    Program { name: "load32", dirs: &["common", "load"], flags: &["-m32"] },
    Program { name: "guests32", dirs: &["common", "guests"], flags: &["-m32"] },
];

/// The same for musl, by `musl-gcc`.
const MUSL_PROGRAMS: &[Program] = &[
    Program { name: "cases-musl", dirs: &["common", "casework", "cases"], flags: &[] },
    Program { name: "load-musl", dirs: &["common", "load"], flags: &[] },
];

/// Some cases pass bad arguments on purpose, hence the exceptions.
const WARNINGS: &[&str] =
    &["-Wall", "-Wextra", "-Werror", "-Wno-stringop-overflow", "-Wno-stringop-overread"];

/// Builds the C programs where needed and returns the path of one of them. With the first one for 32 bits comes the
/// library for it.
pub fn program(name: &str) -> PathBuf {
    static WIDE: OnceLock<()> = OnceLock::new();
    static NARROW: OnceLock<()> = OnceLock::new();
    static MUSL: OnceLock<()> = OnceLock::new();
    let dir = target().join("programs");
    let cc = || std::env::var_os("CC").map_or_else(|| Command::new("cc"), Command::new);
    let compile_all = |programs: &[Program], cc: &dyn Fn() -> Command| {
        fs::create_dir_all(&dir).expect("the programs' directory");
        programs.iter().for_each(|program| compile(program, &dir, cc()));
    };
    if NARROW_PROGRAMS.iter().any(|program| program.name == name) {
        NARROW.get_or_init(|| {
            let built = build_narrow_library();
            assert!(built, "no 32-bit library (make test-deps installs what it needs)");
            compile_all(NARROW_PROGRAMS, &cc);
        });
    } else if MUSL_PROGRAMS.iter().any(|program| program.name == name) {
        MUSL.get_or_init(|| compile_all(MUSL_PROGRAMS, &|| musl_gcc(&dir)));
    } else {
        WIDE.get_or_init(|| compile_all(PROGRAMS, &cc));
    }
    let path = dir.join(name);
    assert!(path.exists(), "no program named {name}: add it to PROGRAMS in tests/src/build.rs");
    path
}

/// The compiler for musl, with the kernel's headers but none of glibc's beside them.
fn musl_gcc(dir: &Path) -> Command {
    let headers = dir.join("kernel-headers");
    fs::create_dir_all(&headers).expect("a directory for the kernel's headers");
    let machine = format!("/usr/include/{}-linux-gnu/asm", std::env::consts::ARCH);
    let places = [
        ("linux", "/usr/include/linux"),
        ("asm-generic", "/usr/include/asm-generic"),
        ("asm", &machine),
    ];
    for (name, place) in places {
        let link = headers.join(name);
        if fs::symlink_metadata(&link).is_err() {
            // Another run may do so, too.
            let _ = std::os::unix::fs::symlink(place, &link);
        }
        assert!(link.is_dir(), "no {}: install linux-libc-dev (make test-deps)", link.display());
    }
    let mut command = Command::new("musl-gcc");
    command.arg("-idirafter").arg(headers).arg("-include");
    command.arg(tests_dir().join("programs/musl/lacks.h"));
    command
}

fn compile(program: &Program, out_dir: &Path, mut cc: Command) {
    let root = tests_dir().join("programs");
    let dirs: Vec<PathBuf> = program.dirs.iter().map(|d| root.join(d)).collect();
    let mut files = Vec::new();
    for dir in &dirs {
        let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        files.extend(entries.flatten().map(|e| e.path()));
    }
    files.sort();
    let changed = |path: &PathBuf| fs::metadata(path).and_then(|m| m.modified()).ok();
    let out = out_dir.join(program.name);
    let newest = files.iter().filter_map(changed).max();
    if changed(&out).is_some_and(|built| Some(built) > newest) {
        return;
    }
    // Under a name of its own, then renamed: two runs may build at once.
    let temporary = out_dir.join(format!("{}.{}", program.name, std::process::id()));
    let built = cc
        .args(["-O2", "-std=gnu11", "-g", "-pthread"])
        .args(program.flags)
        .args(WARNINGS)
        .args(dirs.iter().flat_map(|d| [Path::new("-I"), d.as_path()]))
        .args(files.iter().filter(|f| f.extension().is_some_and(|e| e == "c")))
        .arg("-o")
        .arg(&temporary)
        .status()
        .expect("running the compiler: install gcc and musl-tools (make test-deps)");
    assert!(built.success(), "compiling {} failed", program.name);
    fs::rename(&temporary, &out).expect("naming the program");
}

/// Debian's 32-bit Python, which `tests/python32.sh` fetches.
pub fn python32() -> PathBuf {
    program("cases32");
    let python = target().join("python32/python3");
    assert!(python.exists(), "no {} (make test-deps fetches it)", python.display());
    python
}

/// A Node whose libuv makes an io_uring, which `tests/node24.sh` fetches.
pub fn node24() -> PathBuf {
    let node = target().join("node24/node");
    assert!(node.exists(), "no {} (make test-deps fetches it)", node.display());
    node
}

/// What virtual machines boot, which `tests/vm/image` makes.
pub fn vm_image() -> Option<PathBuf> {
    image("vm")
}

/// The same with a kernel whose SMC can be a peer (6.12).
pub fn rdma_vm_image() -> Option<PathBuf> {
    image("vm-rdma")
}

fn image(name: &str) -> Option<PathBuf> {
    let dir = target().join(name);
    dir.join("initrd").exists().then_some(dir)
}

/// A program that Debian keeps in `sbin`, which is not on every user's path.
pub fn system_program(name: &str) -> PathBuf {
    ["/usr/sbin", "/usr/bin"]
        .iter()
        .map(|dir| Path::new(dir).join(name))
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("no {name} here (make test-deps installs it)"))
}
