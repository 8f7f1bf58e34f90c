//! The folders of `src` are layers: a file imports only from its own folder and from those above it in `lib.rs`.
//!
//! Imports are read from the source: `use` trees and paths that begin with `crate`, `super` or `self`. Comments, strings and tests
//! are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Files of a circle of imports at most, all of them in one folder.
const CIRCLE: usize = 7;

/// A module's path in the crate: `["stream", "room"]`.
type Module = Vec<String>;

/// The source of a crate.
struct Source {
    /// Folders as `lib.rs` has them, from the highest layer on: each may import those before it.
    layers: Vec<String>,
    /// By module: the file's path and its text.
    files: BTreeMap<Module, (String, String)>,
}

impl Source {
    fn read(root: &Path) -> Source {
        let mut files = BTreeMap::new();
        collect(root, &mut Vec::new(), &mut files);
        let lib = files.get(&Vec::new()).map(|(_, text)| text.clone()).expect("src/lib.rs");
        Source { layers: layers(&lib), files }
    }

    fn layer(&self, module: &[String]) -> Option<usize> {
        self.layers.iter().position(|layer| Some(layer) == module.first())
    }

    /// What each file imports, as modules of this crate.
    fn imports(&self) -> BTreeMap<&Module, BTreeSet<Module>> {
        let of = |(module, (_, text)): (_, &(String, String))| {
            let paths = paths(&tokens(text), module);
            (module, paths.into_iter().filter_map(|path| self.module_of(path)).collect())
        };
        self.files.iter().map(of).collect()
    }

    /// The longest beginning of a path that is a file.
    fn module_of(&self, mut path: Vec<String>) -> Option<Module> {
        while !path.is_empty() && !self.files.contains_key(&path) {
            path.pop();
        }
        (!path.is_empty()).then_some(path)
    }

    /// Imports from a lower layer: file and module.
    fn upward(&self) -> BTreeSet<(String, String)> {
        let mut found = BTreeSet::new();
        for (module, imports) in self.imports() {
            let Some(own) = self.layer(module) else { continue };
            for import in imports {
                if self.layer(&import).is_some_and(|layer| layer > own) {
                    found.insert((self.files[module].0.clone(), import.join("::")));
                }
            }
        }
        found
    }

    /// The largest set of files in which each leads to each other by imports: of one folder, or of all.
    fn circle(&self, is_of_one_folder: bool) -> Vec<Module> {
        let imports = self.imports();
        let keep = |from: &Module, to: &Module| !is_of_one_folder || from.first() == to.first();
        let reached: BTreeMap<_, _> =
            self.files.keys().map(|start| (start, reached(&imports, start, &keep))).collect();
        let mut largest = Vec::new();
        for (start, there) in &reached {
            let leads_back = |module: &&&Module| reached[**module].contains(*start);
            let circle: Vec<_> =
                there.iter().filter(leads_back).map(|&module| module.clone()).collect();
            if circle.len() > largest.len() {
                largest = circle;
            }
        }
        largest
    }
}

/// All that `start` leads to.
fn reached<'a>(
    imports: &'a BTreeMap<&Module, BTreeSet<Module>>,
    start: &Module,
    keep: &dyn Fn(&Module, &Module) -> bool,
) -> BTreeSet<&'a Module> {
    let mut seen = BTreeSet::new();
    let mut next = vec![start];
    while let Some(at) = next.pop() {
        for import in imports.get(at).into_iter().flatten() {
            if keep(at, import) && import != at && seen.insert(import) {
                next.push(import);
            }
        }
    }
    seen
}

fn collect(dir: &Path, at: &mut Module, files: &mut BTreeMap<Module, (String, String)>) {
    for entry in fs::read_dir(dir).expect("src").flatten() {
        let name = entry.file_name().into_string().expect("a name in UTF-8");
        if entry.path().is_dir() {
            at.push(name);
            collect(&entry.path(), at, files);
            at.pop();
        } else if let Some(stem) = name.strip_suffix(".rs") {
            let mut module = at.clone();
            if stem != "mod" && !(at.is_empty() && stem == "lib") {
                module.push(stem.to_owned());
            }
            let shown = at.iter().map(|folder| format!("{folder}/")).collect::<String>() + &name;
            let text = fs::read_to_string(entry.path()).expect("a source file");
            files.insert(module, (shown, text));
        }
    }
}

/// The folders in the order of `lib.rs`; what tests and fuzzing alone have is none.
fn layers(lib: &str) -> Vec<String> {
    let named = |line: &str| {
        let name = line.strip_prefix("pub ").unwrap_or(line).strip_prefix("mod ")?;
        Some(name.strip_suffix(';')?.to_owned())
    };
    lib.lines().filter_map(named).filter(|name| name != "fuzzing").collect()
}

/// Words and signs, without comments, strings and what begins with `#[cfg(test)]`: tests are at the end of a file.
fn tokens(text: &str) -> Vec<String> {
    let text = text.split("\n#[cfg(test)]").next().unwrap_or_default();
    let mut tokens = Vec::new();
    let mut rest = text.char_indices().peekable();
    while let Some((at, c)) = rest.next() {
        if text[at..].starts_with("//") {
            while rest.next_if(|(_, c)| *c != '\n').is_some() {}
        } else if c == '"' {
            while let Some((_, c)) = rest.next() {
                match c {
                    '\\' => drop(rest.next()),
                    '"' => break,
                    _ => {}
                }
            }
        } else if c == '\'' && text[at + 1..].starts_with(['"', '\\']) {
            // The character that begins a string, or one that is written with an escape.
            rest.next();
            rest.next_if(|(_, c)| matches!(c, '"' | '\\' | '\''));
        } else if c.is_alphanumeric() || c == '_' {
            let mut word = c.to_string();
            while let Some((_, c)) = rest.next_if(|(_, c)| c.is_alphanumeric() || *c == '_') {
                word.push(c);
            }
            tokens.push(word);
        } else if !c.is_whitespace() {
            tokens.push(c.to_string());
        }
    }
    tokens
}

/// The paths into this crate that a module's tokens have, from the crate's root on.
fn paths(tokens: &[String], module: &Module) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let is_start = matches!(&tokens[at][..], "crate" | "super" | "self");
        let leads_on = tokens[at + 1..].starts_with(&[":".to_owned(), ":".to_owned()]);
        let goes_on = at >= 2 && tokens[at - 2..at].iter().all(|sign| sign == ":");
        if is_start && leads_on && !goes_on {
            at = tree(tokens, at, &mut module.clone(), true, &mut found);
        } else {
            at += 1;
        }
    }
    found
}

/// Reads a path or a tree of a `use` at `at`, below `base`; where it ends.
fn tree(
    tokens: &[String],
    mut at: usize,
    base: &mut Module,
    is_first: bool,
    found: &mut Vec<Vec<String>>,
) -> usize {
    let mut path = base.clone();
    let mut first = is_first;
    while let Some(token) = tokens.get(at) {
        match &token[..] {
            "crate" if first => path.clear(),
            "super" if first || path.len() < base.len() => drop(path.pop()),
            "self" => {}
            "{" => {
                at += 1;
                while tokens.get(at).is_some_and(|token| token != "}") {
                    at = tree(tokens, at, &mut path, false, found);
                    if tokens.get(at).is_some_and(|token| token == ",") {
                        at += 1;
                    }
                }
                return at + 1;
            }
            word if word.starts_with(|c: char| c.is_alphanumeric() || c == '_') => {
                path.push(word.to_owned());
            }
            // `*`, or a sign that ends the path.
            "*" => {}
            _ => break,
        }
        first = false;
        at += 1;
        if tokens[at..].starts_with(&[":".to_owned(), ":".to_owned()]) {
            at += 2;
        } else {
            break;
        }
    }
    found.push(path);
    if tokens.get(at).is_some_and(|token| token == "as") {
        at += 2;
    }
    at
}

fn source() -> Source {
    Source::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"))
}

#[test]
fn folders_import_only_what_is_above_them() {
    let found = source().upward();
    assert!(
        found.is_empty(),
        "imports from a lower layer, see the order in src/lib.rs: {found:#?}"
    );
}

#[test]
fn circles_are_small_and_inside_a_folder() {
    let source = source();
    let circle = source.circle(true);
    assert!(circle.len() <= CIRCLE, "{} files import each other: {circle:?}", circle.len());
    let whole = source.circle(false);
    assert!(whole.len() <= CIRCLE, "files of several folders import each other: {whole:?}");
}

#[test]
fn atomics_come_from_one_module() {
    let names_them = |(_, text): &&(String, String)| {
        let tokens = tokens(text);
        let words: Vec<&str> = tokens.iter().map(String::as_str).collect();
        words.windows(7).any(|w| {
            matches!(w[0], "core" | "std") && w[1..] == [":", ":", "sync", ":", ":", "atomic"]
        })
    };
    let source = source();
    let found: Vec<_> = source.files.values().filter(names_them).map(|(path, _)| path).collect();
    assert!(found.is_empty(), "use usmc_shm::sync, which the models replace: {found:?}");
}

/// Whether a path leads to one device, by its file or by its number.
fn names_a_device(path: &[String]) -> bool {
    let words: Vec<&str> = path.iter().map(String::as_str).collect();
    matches!(words[..], ["device", "memfd" | "region" | "LOOPBACK" | "REGION", ..])
}

#[test]
fn no_code_outside_its_folder_names_a_device() {
    let source = source();
    // The fuzz targets play the host's part, too.
    let others = source.files.iter().filter(|(module, _)| {
        !matches!(module.first().map(String::as_str), Some("device" | "fuzzing"))
    });
    let found: Vec<_> = others
        .filter(|(module, (_, text))| {
            // A module that is imported is used by its name.
            paths(&tokens(text), module).iter().any(|path| names_a_device(path))
                || text.contains("device::LOOPBACK")
                || text.contains("device::REGION")
        })
        .map(|(_, (path, _))| path)
        .collect();
    assert!(found.is_empty(), "ask `device::of`, or what the connection knows: {found:?}");
    let path = ["device", "memfd", "MEMFDS"].map(str::to_owned);
    assert!(names_a_device(&path) && !names_a_device(&path[..1]));
}

/// Whether a file names a bit of a slot's state words (`TX_RING`, `TXF_DONE`, `END_CUT`), or looks at one behind the back of
/// `usmc_shm::state`.
fn names_bits(text: &str) -> bool {
    let is_bit =
        |word: &String| ["TX_", "TXF_", "END_"].iter().any(|family| word.starts_with(family));
    tokens(text).iter().any(is_bit)
}

#[test]
fn bits_of_state_words_are_named_in_one_place() {
    let source = source();
    let files = source.files.values();
    let found: BTreeSet<_> =
        files.filter(|(_, text)| names_bits(text)).map(|(path, _)| &path[..]).collect();
    assert!(found.is_empty(), "ask usmc_shm::state: {found:?}");
    assert!(names_bits("fn f() { own.flags.load(Relaxed) & TXF_DONE; }"));
    assert!(!names_bits("// TXF_DONE\nfn f() { END; own.flags(Relaxed).is_done() }"));
}

#[test]
fn the_tables_of_ends_name_cases_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = fs::read_to_string(root.join("docs/ending.md")).expect("the tables");
    let mut files = fs::read_dir(root.join("tests/programs/cases")).expect("the cases").flatten();
    let cases = files.by_ref().map(|file| fs::read_to_string(file.path()).unwrap_or_default());
    let cases: Vec<String> = cases.collect();
    let names: Vec<&str> =
        docs.split('`').skip(1).step_by(2).filter(|name| name.matches('_').count() > 2).collect();
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        let is_there = cases.iter().any(|text| text.contains(&format!("CASE({name})")));
        assert!(is_there, "docs/ending.md: there is no case {name}");
    }
}

/// The flags that a file sets or clears in records (`F_*`).
fn flags_set(text: &str) -> BTreeSet<String> {
    let tokens = tokens(text);
    let calls = tokens.iter().enumerate().filter(|(_, word)| *word == "set_flag");
    let arguments = |(at, _): (usize, &String)| {
        tokens[at..].iter().take_while(|word| *word != ")" && *word != ",").cloned().collect()
    };
    let words = calls.flat_map(|call| -> Vec<String> { arguments(call) });
    words.filter(|word| word.starts_with("F_")).collect()
}

#[test]
fn a_flag_of_records_is_set_by_one_folder() {
    let source = source();
    let mut folders: BTreeMap<String, BTreeSet<&String>> = BTreeMap::new();
    for (module, (_, text)) in &source.files {
        for flag in flags_set(text) {
            folders.entry(flag).or_default().extend(module.first());
        }
    }
    folders.retain(|_, folders| folders.len() > 1);
    assert!(folders.is_empty(), "ask the folder that has it to set it: {folders:?}");
    let found = flags_set("fn f() { conn.set_flag(conn::F_DOWN | F_HANDED, has(F_SHARED)); }");
    assert_eq!(found, BTreeSet::from(["F_DOWN".to_owned(), "F_HANDED".to_owned()]));
}

/// A crate of three layers whose lowest one has this file.
fn three_layers(file: &str) -> Source {
    let lib = "mod os;\n\nmod record;\n\npub mod api;\n#[cfg(fuzzing)]\npub mod fuzzing;\n";
    let files = [
        (vec![], "lib.rs", lib),
        (vec!["os"], "os/mod.rs", "pub mod sys;\n"),
        (vec!["os", "sys"], "os/sys.rs", ""),
        (vec!["record"], "record/mod.rs", "pub mod conn;\n"),
        (vec!["record", "conn"], "record/conn.rs", file),
        (vec!["api"], "api/mod.rs", "pub mod bytes;\n"),
        (vec!["api", "bytes"], "api/bytes.rs", "use crate::record::conn::{self, Conn};\n"),
    ];
    let owned = |words: Vec<&str>| words.into_iter().map(str::to_owned).collect();
    Source {
        layers: layers(lib),
        files: files
            .map(|(module, path, text)| (owned(module), (path.to_owned(), text.to_owned())))
            .into_iter()
            .collect(),
    }
}

#[test]
fn an_import_from_a_lower_layer_is_found_however_it_is_written() {
    for file in [
        "use crate::api::bytes;",
        "use crate::{os::sys, api::bytes::{self, read}};",
        "use super::super::api::bytes::*;",
        "fn f() { let _ = \"text // of\"; crate::api::bytes::read() }",
        "pub use crate::api::bytes::read as r;",
        "const QUOTE: char = '\"'; struct S { state: crate::api::bytes::State }",
    ] {
        let found = three_layers(file).upward();
        let edge = ("record/conn.rs".to_owned(), "api::bytes".to_owned());
        assert_eq!(found, BTreeSet::from([edge]), "{file}");
    }
    for file in [
        "use crate::os::sys::{self, Errno};\nuse super::conn as own;\n",
        "// use crate::api::bytes;\n/// [`crate::api::bytes`]\nconst S: &str = \"crate::api::bytes\";",
        "use crate::os::sys;\n#[cfg(test)]\nmod tests { use crate::api::bytes; }",
    ] {
        assert_eq!(three_layers(file).upward(), BTreeSet::new(), "{file}");
    }
}

#[test]
fn a_circle_is_found() {
    let found = three_layers("use crate::api::bytes;").circle(false);
    assert_eq!(found, [["api", "bytes"], ["record", "conn"]]);
    let source = three_layers("use crate::os::sys;");
    assert_eq!((source.circle(true), source.circle(false)), (Vec::new(), Vec::new()));
}
