//! Where `libusmc_preload.so` is, and how it gets into LD_PRELOAD.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::program;

/// Its file.
pub const NAME: &str = "libusmc_preload.so";
/// What the dynamic linker replaces by where its own class keeps libraries: `lib64`, `lib/i386-linux-gnu`.
const LIB: &str = "$LIB";
/// The dynamic linker of 64-bit programs, where all of them name it.
const LINKER: &str = if cfg!(target_arch = "aarch64") {
    "/lib/ld-linux-aarch64.so.1"
} else {
    "/lib64/ld-linux-x86-64.so.2"
};
/// That of 32-bit programs.
pub const NARROW_LINKER: &str = "/lib/ld-linux.so.2";
/// The place of the 32-bit library in a tree for `$LIB`.
pub const NARROW: &str = "lib/i386-linux-gnu";
/// The place of the 64-bit one.
pub const WIDE: &str =
    if cfg!(target_arch = "aarch64") { "lib/aarch64-linux-gnu" } else { "lib/x86_64-linux-gnu" };
/// What `make install` has for itself, in the prefix.
const PRIVATE: &str = "lib/usmc";

/// What `usmc run` preloads.
pub struct Library {
    /// The file for 64-bit programs.
    pub path: PathBuf,
    /// What LD_PRELOAD says: that file, or a name with `$LIB` that leads each class of programs to its own.
    pub preload: PathBuf,
    /// The file for 32-bit programs, or why they stay TCP.
    pub narrow: Result<PathBuf, NoNarrow>,
}

/// Why 32-bit programs stay TCP.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NoNarrow {
    /// None run here.
    NoPrograms,
    /// There is no such file.
    Missing(PathBuf),
}

impl Library {
    /// The files of both classes, as far as they are there.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        [Some(&self.path), self.narrow.as_ref().ok()].into_iter().flatten().map(PathBuf::as_path)
    }

    /// What LD_PRELOAD is to say for a program, and for those that it starts. musl takes `$LIB` for a directory of that
    /// name: where there is none (`crates/usmc-preload/tree.sh` makes one), it needs the file's own.
    pub fn preload_for(&self, is_musl: bool) -> &Path {
        if is_musl && !self.preload.is_file() { &self.path } else { &self.preload }
    }
}

/// Finds the library: `$USMC_LIBRARY` if set, else beside this executable, else in PREFIX/lib/usmc or PREFIX/lib.
///
/// # Errors
/// When it is nowhere, or where LD_PRELOAD cannot name it; says what to do.
pub fn find() -> Result<Library> {
    let library = match env::var_os("USMC_LIBRARY").filter(|v| !v.is_empty()) {
        Some(path) => named(&path)?,
        None => with_narrow(search()?),
    };
    nameable(Path::new(&without_lib(&library.preload)))?;
    Ok(library)
}

/// The library that `USMC_LIBRARY` names.
fn named(path: &OsStr) -> Result<Library> {
    let path = std::path::absolute(path).context("USMC_LIBRARY has no absolute form")?;
    let (wide, narrow) = match has_lib(&path) {
        true => (in_lib(&path, Path::new(LINKER)), in_lib(&path, Path::new(NARROW_LINKER))),
        // Which class it is for is not ours to ask; the other one has none.
        false => (Some(path.clone()), None),
    };
    let wide = wide.unwrap_or_else(|| path.clone());
    if !wide.is_file() {
        bail!(
            "USMC_LIBRARY: there is no file {}; set it to the path of {NAME}, or unset it",
            wide.display()
        );
    }
    let narrow = match narrow {
        Some(file) if file.is_file() => Ok(file),
        Some(file) => Err(NoNarrow::Missing(file)),
        None if has_lib(&path) => Err(NoNarrow::NoPrograms),
        None => Err(NoNarrow::Missing(path.clone())),
    };
    Ok(Library { path: wide, preload: path, narrow })
}

/// Where the tree for `$LIB` may be whose 64-bit library is `wide`: around it, or beside it. Where it is missing, the first
/// one is where it should be.
fn trees(wide: &Path) -> Vec<PathBuf> {
    let dir = wide.parent().unwrap_or(Path::new("/"));
    let mut trees = vec![dir.join("lib/usmc"), dir.to_owned(), dir.join("usmc")];
    if dir.ends_with(PRIVATE) {
        trees.swap(0, 1);
    }
    trees
}

/// The 32-bit library in the tree of `wide`, also where no 32-bit programs run.
pub fn narrow_file(wide: &Path) -> Option<PathBuf> {
    trees(wide).into_iter().map(|tree| tree.join(NARROW).join(NAME)).find(|file| file.is_file())
}

/// Looks for the 32-bit library beside `wide`: in a tree for `$LIB`, or in a directory that is one.
fn with_narrow(wide: PathBuf) -> Library {
    let dir = wide.parent().unwrap_or(Path::new("/"));
    let mut trees = trees(&wide);
    if let Some(prefix) = lib_of(Path::new(LINKER)).and_then(|lib| stripped(dir, &lib)) {
        trees.push(prefix);
    }
    let mut missing = None;
    for tree in trees {
        let preload = tree.join(LIB).join(NAME);
        let Some(narrow) = in_lib(&preload, Path::new(NARROW_LINKER)) else {
            return Library {
                path: wide.clone(),
                preload: wide,
                narrow: Err(NoNarrow::NoPrograms),
            };
        };
        let same = in_lib(&preload, Path::new(LINKER)).is_some_and(|file| file.is_file());
        if same && narrow.is_file() {
            return Library { path: wide, preload, narrow: Ok(narrow) };
        }
        missing = missing.or(Some(narrow));
    }
    let narrow = Err(NoNarrow::Missing(missing.unwrap_or_else(|| dir.join(NAME))));
    Library { path: wide.clone(), preload: wide, narrow }
}

/// `dir` without `lib` at its end.
fn stripped(dir: &Path, lib: &Path) -> Option<PathBuf> {
    dir.ends_with(lib).then(|| dir.ancestors().nth(lib.components().count()).map(Path::to_owned))?
}

/// What `$LIB` is for the programs of a dynamic linker: the directory that it lies in itself, without the prefix.
fn lib_of(linker: &Path) -> Option<PathBuf> {
    let real = linker.canonicalize().ok()?;
    let dir = real.parent()?;
    let lib = dir.strip_prefix("/usr").or_else(|_| dir.strip_prefix("/")).ok()?;
    Some(lib.to_owned())
}

fn has_lib(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == LIB)
}

/// `path` as the dynamic linker at `linker` expands it; `None` where there is none.
fn in_lib(path: &Path, linker: &Path) -> Option<PathBuf> {
    let lib = lib_of(linker)?;
    let expanded = |part: std::path::Component<'_>| match part.as_os_str() {
        part if part == LIB => lib.clone(),
        part => PathBuf::from(part),
    };
    Some(path.components().map(expanded).collect())
}

fn without_lib(path: &Path) -> PathBuf {
    path.components().filter(|part| part.as_os_str() != LIB).collect()
}

/// The dynamically linked twin of a static `usmc`, in `lib/usmc`, or beside it.
pub const TWIN: &str = "usmc-probe";

/// This program in a form that the library gets into: itself, or if it is linked statically its twin.
///
/// # Errors
/// When it has none; says what to do.
pub fn dynamic_self() -> Result<PathBuf> {
    let exe = env::current_exe().context("cannot tell where usmc itself is; mount /proc")?;
    if !program::is_static(&exe) {
        return Ok(exe);
    }
    let beside = exe.parent().unwrap_or(Path::new("/"));
    let prefix = beside.parent().unwrap_or(beside);
    // Where cargo builds both, the twin has the command's name.
    let places = [prefix.join(PRIVATE).join(TWIN), beside.join(TWIN), beside.join("usmc")];
    let found = places.iter().find(|path| path.is_file() && !program::is_static(path));
    found.cloned().with_context(|| {
        format!(
            "this usmc is linked statically, and its twin for the library is not at {}; \
             `make install` puts it there",
            places[0].display()
        )
    })
}

/// The library for 64-bit programs that belongs to this executable.
///
/// # Errors
/// When it is nowhere; says what to do.
pub fn search() -> Result<PathBuf> {
    let exe = env::current_exe().context("cannot tell where usmc itself is; mount /proc")?;
    let beside = exe.parent().unwrap_or(Path::new("/"));
    let prefix = beside.parent().unwrap_or(beside);
    // What an earlier version installed in PREFIX/lib is not to be found before what this one did.
    let places = [beside, &prefix.join(PRIVATE), &prefix.join("lib"), &prefix.join(WIDE)];
    let places = places.map(|dir| dir.join(NAME));
    if let Some(found) = places.iter().find(|p| p.is_file()) {
        return Ok(found.clone());
    }
    let [a, b, c, d] = places.map(|p| p.display().to_string());
    bail!(
        "{NAME} is neither {a} nor {b}, {c} or {d}; build it with `make build`, \
         install it with `make install`, or set USMC_LIBRARY to its path"
    )
}

/// The dynamic linker splits LD_PRELOAD at spaces and colons, expands `$`, and knows no quoting.
fn nameable(path: &Path) -> Result<()> {
    let bytes = path.as_os_str().as_bytes();
    if let Some(bad) = bytes.iter().find(|b| matches!(b, b' ' | b':' | b'$' | b'\t' | b'\n')) {
        bail!(
            "LD_PRELOAD cannot name {}: the dynamic linker gives {:?} in a path a meaning of its own; \
             move uSMC, or set USMC_LIBRARY to a symbolic link without it",
            path.display(),
            char::from(*bad)
        );
    }
    Ok(())
}

fn items(list: &OsStr) -> impl Iterator<Item = &[u8]> {
    list.as_bytes().split(|b| matches!(b, b' ' | b':')).filter(|item| !item.is_empty())
}

/// `list` with `library` in front, unless it is in it already.
pub fn prepend(library: &Path, list: Option<&OsStr>) -> OsString {
    let library = library.as_os_str();
    match list {
        Some(list) if items(list).any(|item| item == library.as_bytes()) => list.to_owned(),
        Some(list) if items(list).next().is_some() => {
            OsString::from_vec([library.as_bytes(), b":", list.as_bytes()].concat())
        }
        _ => library.to_owned(),
    }
}

/// `list` without any copy of our library; `None` when nothing is left.
pub fn strip(list: &OsStr) -> Option<OsString> {
    let ours = |item: &&[u8]| Path::new(OsStr::from_bytes(item)).file_name() != Some(NAME.as_ref());
    let rest: Vec<&[u8]> = items(list).filter(ours).collect();
    (!rest.is_empty()).then(|| OsString::from_vec(rest.join(&b':')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_user_preloads_is_kept() {
        let library = Path::new("/opt/libusmc_preload.so");
        for (before, after) in [
            (None, "/opt/libusmc_preload.so"),
            (Some(""), "/opt/libusmc_preload.so"),
            (Some("a.so b.so"), "/opt/libusmc_preload.so:a.so b.so"),
            (Some("a.so:/opt/libusmc_preload.so"), "a.so:/opt/libusmc_preload.so"),
        ] {
            assert_eq!(prepend(library, before.map(OsStr::new)), after);
        }
        assert_eq!(strip("a.so:/opt/libusmc_preload.so b.so".as_ref()), Some("a.so:b.so".into()));
        assert_eq!(strip("/opt/libusmc_preload.so".as_ref()), None);
        assert_eq!(strip("/opt/$LIB/libusmc_preload.so:a.so".as_ref()), Some("a.so".into()));
    }

    #[test]
    fn each_class_has_its_own_file_below_lib() {
        let dir = env::temp_dir().join(format!("usmc-library-{}", std::process::id()));
        let linker = dir.join("usr/lib/class/ld.so");
        std::fs::create_dir_all(linker.parent().expect("a directory")).expect("a directory");
        std::fs::write(&linker, b"").expect("a file");
        let real = lib_of(&linker).expect("a library directory");
        assert!(Path::new("/").join(&real) == linker.parent().expect("a directory"));
        let path = Path::new("/opt/$LIB/x.so");
        assert_eq!(in_lib(path, &linker), Some(Path::new("/opt").join(real).join("x.so")));
        assert_eq!(in_lib(path, Path::new("/nonexistent/ld.so")), None);
        assert_eq!(stripped(Path::new("/opt/lib/a"), Path::new("lib/a")), Some("/opt".into()));
        assert_eq!(stripped(Path::new("/opt/lib"), Path::new("lib/a")), None);
        assert!(has_lib(path) && nameable(&without_lib(path)).is_ok());
        std::fs::remove_dir_all(&dir).expect("removing it");
    }

    #[test]
    fn a_dynamic_command_is_its_own_twin() {
        let exe = env::current_exe().expect("the test's own path");
        assert_eq!(dynamic_self().ok(), (!program::is_static(&exe)).then_some(exe));
    }

    #[test]
    fn musl_is_given_a_file_that_it_finds() {
        let exe = env::current_exe().expect("the test's own path");
        let (path, dir) = (exe.clone(), exe.with_file_name(LIB));
        let [there, missing] = [exe, dir.join(NAME)].map(|preload| Library {
            path: path.clone(),
            preload,
            narrow: Err(NoNarrow::NoPrograms),
        });
        assert_eq!(there.preload_for(true), there.preload);
        assert_eq!(missing.preload_for(true), path);
        assert_eq!(missing.preload_for(false), missing.preload);
    }

    #[test]
    fn paths_the_linker_would_split_are_refused() {
        for bad in ["/a b/x.so", "/a:b/x.so", "/$LIB/x.so"] {
            assert!(nameable(Path::new(bad)).is_err(), "{bad}");
        }
        assert!(nameable(Path::new("/usr/lib/x.so")).is_ok());
    }
}
