//! `usmc export`: copies this program and its libraries into a directory that other containers mount.

use std::env;
use std::ffi::c_int;
use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::library::{self, NAME, NARROW, TWIN, WIDE};
use crate::program;

/// Copy usmc and its libraries into a directory, for other containers
///
/// An image that has nothing but uSMC has no shell and no cp(1): its container copies itself by this command into a
/// volume, from which programs in other containers are started. Each file that is there is replaced as a whole, and
/// programs that use it go on with the old one.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    /// Where to; it is made if it is not there
    #[arg(value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,
}

/// Copies what there is here: the command, the library for 64-bit programs, that for 32-bit ones, and the twin for `check`.
///
/// # Errors
/// When a file cannot be read or written, or when there is no library here.
pub fn run(args: &Args) -> Result<c_int> {
    let dir = &args.directory;
    let exe = env::current_exe().context("cannot tell where usmc itself is; mount /proc")?;
    let wide = library::search()?;
    fs::create_dir_all(dir).with_context(|| unwritable(dir))?;
    let mut files = vec![(wide.clone(), PathBuf::from(NAME))];
    if let Some(narrow) = library::narrow_file(&wide) {
        files.push((narrow, Path::new(NARROW).join(NAME)));
        tree(dir).with_context(|| unwritable(dir))?;
    }
    if let (true, Ok(twin)) = (program::is_static(&exe), library::dynamic_self()) {
        files.push((twin, TWIN.into()));
    }
    // Whoever waits for the command finds all that it needs.
    files.push((exe, "usmc".into()));
    for (from, name) in files {
        let to = dir.join(name);
        copy(&from, &to)
            .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
        if !args.quiet {
            println!("{}", to.display());
        }
    }
    Ok(0)
}

fn unwritable(dir: &Path) -> String {
    format!("cannot write to {}; mount a volume there that this user may write to", dir.display())
}

/// Links by which each class of programs finds its library below `$LIB`, as `crates/usmc-preload/tree.sh` makes them. Which
/// class a container's plain `lib` is for is not known here: it is said to be for 64 bits, as most programs are.
fn tree(dir: &Path) -> io::Result<()> {
    for made in ["lib", WIDE, NARROW].map(|name| dir.join(name)) {
        fs::create_dir_all(&made)?;
        fs::set_permissions(&made, Permissions::from_mode(0o755))?;
    }
    let wide = Path::new(WIDE).strip_prefix("lib").unwrap_or(Path::new(WIDE));
    link(&Path::new("../..").join(NAME), &dir.join(WIDE).join(NAME))?;
    link(&wide.join(NAME), &dir.join("lib").join(NAME))?;
    link(Path::new(WIDE), &dir.join("lib64"))?;
    link(Path::new(WIDE), &dir.join("$LIB"))?;
    link(Path::new(NARROW), &dir.join("lib32"))
}

/// A name beside `path` that nobody else has.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}", std::process::id()))
}

/// Puts `new` in the place of `path`, or takes it away again.
fn replace(new: &Path, path: &Path, made: io::Result<()>) -> io::Result<()> {
    made.and_then(|()| fs::rename(new, path)).inspect_err(|_| {
        let _ = fs::remove_file(new);
    })
}

fn link(target: &Path, path: &Path) -> io::Result<()> {
    let new = beside(path);
    let made = symlink(target, &new);
    replace(&new, path, made)
}

/// Copies a file. One that is there is not written to: programs have it mapped.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let new = beside(to);
    let copied = || {
        let mut source = fs::File::open(from)?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o755).open(&new)?;
        io::copy(&mut source, &mut file)?;
        // Other users start it, whatever this one's umask is.
        file.set_permissions(Permissions::from_mode(0o755))
    };
    let made = copied();
    replace(&new, to, made)
}
