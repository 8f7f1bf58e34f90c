//! What a program calls and is linked with, as its file says. What its libraries call, and what it loads while it
//! runs, is not looked at.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use object::elf::{self, FileHeader64};
use object::read::elf::{Dyn, FileHeader, Sym};
use object::{Endianness, StringTable};

/// The names a program needs from elsewhere.
#[derive(Default, Debug)]
pub struct Imports {
    functions: BTreeSet<String>,
    libraries: Vec<String>,
}

impl Imports {
    /// Those of the program at `path`; none where it is not a 64-bit one or has no such list.
    pub fn of(path: &Path) -> Imports {
        fs::read(path).ok().and_then(|data| read(&data)).unwrap_or_default()
    }

    /// Those of a program or library that is read already.
    pub fn read(data: &[u8]) -> Option<Imports> {
        read(data)
    }

    /// Whether a function is called, by this name or a large-file or checked form of it, or a library (`name.so`) is
    /// linked with, whatever its version.
    pub fn has(&self, word: &str) -> bool {
        if word.ends_with(".so") {
            let is_it = |name: &String| {
                name.strip_prefix(word).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            return self.libraries.iter().any(is_it);
        }
        [word.to_owned(), format!("{word}64"), format!("__{word}_chk")]
            .iter()
            .any(|name| self.functions.contains(name))
    }
}

fn read(data: &[u8]) -> Option<Imports> {
    let header = FileHeader64::<Endianness>::parse(data).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.sections(endian, data).ok()?;
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM).ok()?;
    let undefined = symbols.iter().filter(|symbol| symbol.is_undefined(endian));
    let names = undefined.filter_map(|symbol| symbols.symbol_name(endian, symbol).ok());
    let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
    let functions = names.map(text).collect();
    let mut libraries = Vec::new();
    if let Some((entries, strings)) = sections.dynamic(endian, data).ok()? {
        let strings: StringTable<'_> = sections.strings(endian, data, strings).ok()?;
        let needed = entries.iter().filter(|e| e.tag(endian) == elf::DT_NEEDED);
        libraries.extend(needed.filter_map(|e| e.string(endian, strings).ok()).map(text));
    }
    Some(Imports { functions, libraries })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_all_their_forms() {
        let imports = Imports {
            functions: ["open64", "__fwprintf_chk", "popen"].map(str::to_owned).into(),
            libraries: ["liburing.so.2", "libc.so"].map(str::to_owned).into(),
        };
        for word in ["open", "fwprintf", "popen", "liburing.so", "libc.so"] {
            assert!(imports.has(word), "{word}");
        }
        for word in ["pop", "fork", "libur.so", "liburing-ffi.so", "64"] {
            assert!(!imports.has(word), "{word}");
        }
    }

    #[test]
    fn a_real_programs_imports_are_read() {
        let own = Imports::of(&std::env::current_exe().expect("this test's path"));
        assert!(own.has("libc.so") && own.has("malloc") && !own.has("liburing.so"), "{own:?}");
        let none = Imports::of(Path::new("/etc/passwd"));
        assert!(none.functions.is_empty() && none.libraries.is_empty());
    }
}
