//! `usmc export`: copies this program and its libraries into a directory that other containers mount.

use std::env;
use std::ffi::{OsStr, c_int};
use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{Mode, OFlags, fchmod, mkdirat, openat};
use rustix::io::Errno;

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
    let top = Held::top(dir).with_context(|| unwritable(dir))?;
    let mut files = vec![(wide.clone(), dir.join(NAME), top.at(NAME))];
    let narrow = library::narrow_file(&wide);
    let narrow_dir = match &narrow {
        Some(_) => Some(tree(&top).with_context(|| unwritable(dir))?),
        None => None,
    };
    if let (Some(from), Some(held)) = (narrow, &narrow_dir) {
        files.push((from, dir.join(NARROW).join(NAME), held.at(NAME)));
    }
    if let (true, Ok(twin)) = (program::is_static(&exe), library::dynamic_self()) {
        files.push((twin, dir.join(TWIN), top.at(TWIN)));
    }
    // Whoever waits for the command finds all that it needs.
    files.push((exe, dir.join("usmc"), top.at("usmc")));
    for (from, to, held) in files {
        copy(&from, &held)
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

/// A directory that is open: whoever may write to the one around it cannot lead us elsewhere by a link in its place.
struct Held(OwnedFd);

impl Held {
    const FLAGS: OFlags = OFlags::DIRECTORY.union(OFlags::RDONLY).union(OFlags::CLOEXEC);

    /// The one that the user names. It is made if it is not there.
    fn top(path: &Path) -> io::Result<Held> {
        fs::create_dir_all(path)?;
        Ok(Held(rustix::fs::open(path, Held::FLAGS, Mode::empty())?))
    }

    /// One in it, which others may search. It is made if it is not there; a link is refused.
    fn inner(&self, name: &OsStr) -> io::Result<Held> {
        let mode = Mode::from_raw_mode(0o755);
        match mkdirat(&self.0, name, mode) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let dir = openat(&self.0, name, Held::FLAGS.union(OFlags::NOFOLLOW), Mode::empty())?;
        // Whatever the umask.
        fchmod(&dir, mode)?;
        Ok(Held(dir))
    }

    /// The path of a name in it, for as long as it is held.
    fn at(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd()))
    }
}

/// Links by which each class of programs finds its library below `$LIB`, as `crates/usmc-preload/tree.sh` makes them. Which
/// class a container's plain `lib` is for is not known here: it is said to be for 64 bits, as most programs are. The directory of
/// the 32-bit library.
fn tree(top: &Held) -> io::Result<Held> {
    let name = |path: &'static str| Path::new(path).file_name().unwrap_or_default();
    let lib = top.inner(OsStr::new("lib"))?;
    let (wide, narrow) = (lib.inner(name(WIDE))?, lib.inner(name(NARROW))?);
    link(&Path::new("../..").join(NAME), &wide.at(NAME))?;
    link(&Path::new(name(WIDE)).join(NAME), &lib.at(NAME))?;
    link(Path::new(WIDE), &top.at("lib64"))?;
    link(Path::new(WIDE), &top.at("$LIB"))?;
    link(Path::new(NARROW), &top.at("lib32"))?;
    Ok(narrow)
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
