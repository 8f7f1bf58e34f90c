//! What the tests need built: `usmc` with its preload library, and the C programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The directory of this crate.
pub fn tests_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The build directory in use (`target`, or what `CARGO_TARGET_DIR` says).
fn target_dir() -> PathBuf {
    // <target>/<profile>/deps/<test>, whoever runs it.
    let exe = std::env::current_exe().expect("the test's own path");
    exe.ancestors().nth(3).expect("a test runs from <target>/<profile>/deps").to_owned()
}

/// The `usmc` command: `USMC_BIN`, or built here once by `cargo build --release`.
pub fn usmc() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(given) = std::env::var_os("USMC_BIN") {
            return PathBuf::from(given);
        }
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let target = target_dir();
        let built = Command::new(cargo)
            .args(["build", "--release", "--quiet", "-p", "usmc-cli", "-p", "usmc-preload"])
            .arg("--target-dir")
            .arg(&target)
            .current_dir(tests_dir())
            .status()
            .expect("running cargo");
        assert!(built.success(), "cargo build --release failed");
        target.join("release/usmc")
    })
}

/// The C program `programs/NAME.c`, with the files it is made of.
struct Program {
    name: &'static str,
    flags: &'static [&'static str],
}

/// Fortified builds call `__read_chk` and the like; the rest is built the same way.
const PROGRAMS: &[Program] = &[
    Program { name: "cases", flags: &["-O2", "-U_FORTIFY_SOURCE"] },
    Program { name: "fortified", flags: &["-O2", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"] },
    Program { name: "stream", flags: &["-O2"] },
];

/// Builds the C programs where needed and returns the path of one of them.
pub fn program(name: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let dir = BUILT.get_or_init(|| {
        let dir = target_dir().join("programs");
        fs::create_dir_all(&dir).expect("the programs' directory");
        for program in PROGRAMS {
            compile(program, &dir);
        }
        dir
    });
    let path = dir.join(name);
    assert!(path.exists(), "no program named {name}: add it to PROGRAMS in tests/src/build.rs");
    path
}

fn compile(program: &Program, dir: &Path) {
    let sources = tests_dir().join("programs");
    let own = sources.join(program.name);
    let newest = |path: &Path| {
        let files = fs::read_dir(path).into_iter().flatten().flatten();
        files.filter_map(|f| f.metadata().ok()?.modified().ok()).max()
    };
    let out = dir.join(program.name);
    let built = fs::metadata(&out).and_then(|m| m.modified()).ok();
    if built.is_some() && built > newest(&own).max(newest(&sources.join("common"))) {
        return;
    }
    let mut files: Vec<PathBuf> = [own.as_path(), &sources.join("common")]
        .iter()
        .flat_map(|d| fs::read_dir(d).unwrap_or_else(|e| panic!("{}: {e}", d.display())))
        .map(|f| f.expect("a directory entry").path())
        .filter(|p| p.extension().is_some_and(|e| e == "c"))
        .collect();
    files.sort();
    // Under a name of its own, then renamed: two runs may build at once.
    let temporary = dir.join(format!("{}.{}", program.name, std::process::id()));
    let built = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(program.flags)
        .args(["-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-stringop-overflow", "-Wno-stringop-overread", "-pthread", "-I"])
        .arg(sources.join("common"))
        .args(&files)
        .arg("-o")
        .arg(&temporary)
        .status()
        .expect("running cc: install gcc (make test-deps)");
    assert!(built.success(), "compiling {} failed", program.name);
    fs::rename(&temporary, &out).expect("naming the program");
}
