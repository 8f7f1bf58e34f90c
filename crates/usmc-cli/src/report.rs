//! What `usmc report` collects, and how.
//!
//! Each [`Item`] is a file of the bundle. [`system`] has those about the machine, [`processes`] those about programs under uSMC, and
//! [`own`] what commands of this program say. Nothing here opens a command line, and of an environment only what begins with `USMC_`
//! is kept.

pub mod bundle;
pub mod own;
pub mod processes;
pub mod system;

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Bytes of a file at most; what is longer is cut off.
const MOST: u64 = 8 << 20;

/// A file of the bundle.
pub struct Item {
    /// Its name.
    pub member: String,
    /// Where its content comes from, for people.
    pub from: String,
    /// Makes the content, or says why there is none.
    pub content: Box<dyn FnOnce() -> Result<String, String>>,
}

impl Item {
    /// A file that is made by `content`.
    pub fn new(
        member: impl Into<String>,
        from: impl Into<String>,
        content: impl FnOnce() -> Result<String, String> + 'static,
    ) -> Item {
        Item { member: member.into(), from: from.into(), content: Box::new(content) }
    }

    /// A copy of a file.
    pub fn file(member: impl Into<String>, path: impl Into<String>) -> Item {
        let path = path.into();
        Item::new(member, path.clone(), move || read(path.as_ref()))
    }
}

/// A file's text.
///
/// # Errors
/// It cannot be read.
pub fn read(path: &Path) -> Result<String, String> {
    bytes(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// A file's bytes, up to the limit: a process may give files of /proc any length.
///
/// # Errors
/// It cannot be read.
pub fn bytes(path: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MOST).read_to_end(&mut bytes));
    read.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    Ok(bytes)
}

/// One line for each of these files, with its text on it, or why there is none.
fn lines(paths: impl IntoIterator<Item = String>) -> String {
    let line = |path: String| match read(path.as_ref()) {
        Ok(text) => format!("{path}: {}\n", text.trim().replace('\n', " | ")),
        Err(problem) => format!("{problem}\n"),
    };
    paths.into_iter().map(line).collect()
}

/// The same for those that are there.
fn lines_of_present(paths: impl IntoIterator<Item = String>) -> String {
    lines(paths.into_iter().filter(|path| Path::new(path).exists()))
}

/// All that is collected.
pub fn items() -> Vec<Item> {
    let mut items = own::items();
    items.extend(system::items());
    items.extend(processes::items());
    items
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_told() {
        assert_eq!(bytes("/dev/zero".as_ref()).map(|bytes| bytes.len() as u64), Ok(MOST));
        let item = Item::file("x", "/nonexistent/x");
        let told = (item.content)().expect_err("no such file");
        assert!(told.contains("cannot read /nonexistent/x"), "{told}");
        let both = lines(["/proc/sys/kernel/ostype".to_owned(), "/nonexistent/y".to_owned()]);
        assert!(both.starts_with("/proc/sys/kernel/ostype: Linux\ncannot read /nonexistent/y:"));
        assert_eq!(lines_of_present(["/nonexistent/y".to_owned()]), "");
    }

    #[test]
    fn members_have_names_of_their_own() {
        let mut names: Vec<String> = items().into_iter().map(|item| item.member).collect();
        assert!(names.iter().all(|name| !name.starts_with('/') && !name.contains("..")));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
