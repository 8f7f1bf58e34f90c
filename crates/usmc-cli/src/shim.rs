//! Shell scripts that become another program: wrappers of packages, and the shims of pyenv and its like.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::program;

/// Shells, by the names of their files.
const SHELLS: [&str; 7] = ["sh", "bash", "dash", "ash", "busybox", "ksh", "zsh"];
/// Bytes of a script that are looked at. Longer ones are no wrappers.
const MOST: u64 = 64 << 10;
/// Scripts that start scripts.
const DEPTH: u32 = 4;

/// What a shell script becomes in its last line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Shim {
    /// This program.
    Becomes(PathBuf),
    /// A program that the shell finds out when it runs, by this line.
    Unclear(String),
}

/// What the script at `path` becomes, if it is one that ends in `exec PROGRAM`.
pub fn of(path: &Path) -> Option<Shim> {
    let mut path = path.to_owned();
    let mut found = None;
    for _ in 0..DEPTH {
        match last_exec(&path) {
            Some(Shim::Becomes(next)) => {
                found = Some(Shim::Becomes(next.clone()));
                path = next;
            }
            Some(unclear) => return Some(unclear),
            None => break,
        }
    }
    found
}

fn last_exec(path: &Path) -> Option<Shim> {
    let shell = program::executed(path);
    let is_shell =
        shell != path && SHELLS.iter().any(|name| shell.file_name() == Some(OsStr::new(name)));
    if !is_shell {
        return None;
    }
    let mut text = Vec::new();
    File::open(path).ok()?.take(MOST).read_to_end(&mut text).ok()?;
    let text = String::from_utf8(text).ok()?;
    let mut lines = text.lines().map(str::trim);
    let line = lines.rfind(|line| !line.is_empty() && !line.starts_with('#'))?;
    let words = line.strip_prefix("exec ")?;
    Some(target(words).unwrap_or_else(|| Shim::Unclear(line.to_owned())))
}

/// The program that `exec` is given, where it is written out and nothing but options of `exec` and assignments of env(1) stand
/// before it.
fn target(words: &str) -> Option<Shim> {
    let mut words = words.split_whitespace();
    let mut word = words.next()?;
    while word.starts_with('-') {
        // `-a NAME` has a word of its own.
        if word == "-a" {
            words.next()?;
        }
        word = words.next()?;
    }
    let name = unquoted(word)?;
    if Path::new(name).file_name() == Some(OsStr::new("env")) {
        word = words.find(|word| !word.contains('='))?;
    } else if words.next() == Some("exec") {
        // `pyenv exec PROGRAM`: the manager looks for it.
        return None;
    }
    program::find(OsStr::new(unquoted(word)?)).map(Shim::Becomes)
}

/// A word without its quotes; `None` where the shell makes something else of it.
fn unquoted(word: &str) -> Option<&str> {
    let bare = [('"', '"'), ('\'', '\'')]
        .iter()
        .find_map(|(open, close)| word.strip_prefix(*open)?.strip_suffix(*close));
    let bare = bare.unwrap_or(word);
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._+-".contains(c);
    (!bare.is_empty() && bare.chars().all(is_plain)).then_some(bare)
}

/// How the manager of such a script says what it would start, where it is a known one.
pub fn manager(script: &Path, line: &str) -> Option<String> {
    let name = script.file_name()?.to_str()?;
    let managers = ["pyenv", "rbenv", "nodenv", "goenv", "plenv", "jenv"];
    let word = line.split_whitespace().find_map(|word| {
        let word = word.trim_matches(['"', '\'']);
        managers.into_iter().find(|manager| word.rsplit('/').next() == Some(manager))
    })?;
    Some(format!("{word} which {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn scripts_that_become_a_program_are_followed() {
        let dir = std::env::temp_dir().join(format!("usmc-shim-{}", std::process::id()));
        fs::create_dir(&dir).expect("a directory");
        let script = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).expect("a script");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("chmod");
            path
        };
        let ends_in = |line: &str| {
            of(&script("wrapper", &format!("#!/bin/sh\n# exec no\nx=1\n{line}\n\n# end\n")))
        };
        let ls = Some(Shim::Becomes("/bin/ls".into()));
        for line in [
            "exec /bin/ls",
            "exec /bin/ls \"$@\"",
            "  exec '/bin/ls' -l",
            "exec -a name /bin/ls \"$@\"",
            "exec env A=b /bin/ls",
            "exec \"/bin/ls\" \"$@\"",
        ] {
            assert_eq!(ends_in(line), ls, "{line}");
        }
        let unclear = |line: &str| Some(Shim::Unclear(line.to_owned()));
        for line in [
            "exec \"$JAVA\" x",
            "exec $(which ls)",
            "exec /nonexistent/x",
            "exec pyenv exec \"$program\" \"$@\"",
        ] {
            assert_eq!(ends_in(line), unclear(line), "{line}");
        }
        for line in ["/bin/ls", "execute ls", "exec"] {
            assert_eq!(ends_in(line), None, "{line}");
        }
        let first = script("first", "#!/bin/sh\nexec /bin/ls\n");
        let second = script("second", &format!("#! /bin/sh\nexec {} x\n", first.display()));
        assert_eq!(of(&second), ls);
        let endless = dir.join("endless");
        let endless = script("endless", &format!("#!/bin/sh\nexec {}\n", endless.display()));
        assert_eq!(of(&endless), Some(Shim::Becomes(endless.clone())));
        assert_eq!(of(Path::new("/bin/ls")), None);
        assert_eq!(of(&script("python", "#!/usr/bin/python3\nexec /bin/ls\n")), None);
        let line = "exec \"/opt/pyenv/libexec/pyenv\" exec \"$program\" \"$@\"";
        assert_eq!(manager(Path::new("/x/python3"), line).as_deref(), Some("pyenv which python3"));
        assert_eq!(manager(Path::new("/x/java"), "exec \"$JAVA\""), None);
        fs::remove_dir_all(&dir).expect("our own directory");
    }
}
