//! Where `libusmc_preload.so` is, and how it gets into LD_PRELOAD.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

const NAME: &str = "libusmc_preload.so";
/// Debian's directory for this architecture's libraries.
const MULTIARCH: &str = concat_arch();

const fn concat_arch() -> &'static str {
    if cfg!(target_arch = "aarch64") { "aarch64-linux-gnu" } else { "x86_64-linux-gnu" }
}

/// Finds the library: `$USMC_LIBRARY` if set, else beside this executable, else in PREFIX/lib.
///
/// # Errors
/// When it is nowhere, or where LD_PRELOAD cannot name it; says what to do.
pub fn find() -> Result<PathBuf> {
    let path = match env::var_os("USMC_LIBRARY").filter(|v| !v.is_empty()) {
        Some(path) => {
            let path = std::path::absolute(path).context("USMC_LIBRARY has no absolute form")?;
            if !path.is_file() {
                bail!(
                    "USMC_LIBRARY: there is no file {}; set it to the path of {NAME}, or unset it",
                    path.display()
                );
            }
            path
        }
        None => search()?,
    };
    nameable(&path)?;
    Ok(path)
}

fn search() -> Result<PathBuf> {
    let exe = env::current_exe().context("cannot tell where usmc itself is; mount /proc")?;
    let beside = exe.parent().unwrap_or(Path::new("/"));
    let lib = beside.parent().unwrap_or(beside).join("lib");
    let places = [beside.join(NAME), lib.join(NAME), lib.join(MULTIARCH).join(NAME)];
    if let Some(found) = places.iter().find(|p| p.is_file()) {
        return Ok(found.clone());
    }
    let [a, b, c] = places.map(|p| p.display().to_string());
    bail!(
        "{NAME} is neither {a} nor {b} nor {c}; build it with `cargo build --release`, \
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
    }

    #[test]
    fn paths_the_linker_would_split_are_refused() {
        for bad in ["/a b/x.so", "/a:b/x.so", "/$LIB/x.so"] {
            assert!(nameable(Path::new(bad)).is_err(), "{bad}");
        }
        assert!(nameable(Path::new("/usr/lib/x.so")).is_ok());
    }
}
