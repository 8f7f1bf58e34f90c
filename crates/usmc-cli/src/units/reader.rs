//! What the files of a unit say, as systemd.syntax(7) and systemd.exec(5) have it: sections, continued lines, and lists that an
//! empty assignment begins anew.

use std::path::{Component, Path, PathBuf};

/// An assignment of the section `[Service]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Assignment {
    /// Its key, by the name that it has today.
    pub key: String,
    /// All behind the first `=`, without blanks around it.
    pub value: String,
    /// Which of the unit's files it is from, in their order.
    pub file: usize,
}

/// All assignments of a service, in the order in which they count.
#[derive(Clone, Default, Debug)]
pub struct Settings {
    assignments: Vec<Assignment>,
}

/// Keys of old that systemd still takes.
const OLD_NAMES: [(&str, &str); 3] = [
    ("ReadWriteDirectories", "ReadWritePaths"),
    ("ReadOnlyDirectories", "ReadOnlyPaths"),
    ("InaccessibleDirectories", "InaccessiblePaths"),
];

impl Settings {
    /// Those of these texts: the unit's file, then its drop-ins.
    pub fn of<'a>(texts: impl IntoIterator<Item = &'a str>) -> Settings {
        let mut assignments = Vec::new();
        for (file, text) in texts.into_iter().enumerate() {
            let own = service_section(text).into_iter();
            assignments.extend(own.map(|(key, value)| Assignment { key, value, file }));
        }
        Settings { assignments }
    }

    /// The assignments of a key since the last empty one.
    pub fn assigned<'a>(&'a self, key: &str) -> impl Iterator<Item = &'a Assignment> {
        let is_it = move |assignment: &&Assignment| assignment.key == key;
        let reset = self.assignments.iter().rposition(|a| a.key == key && a.value.is_empty());
        self.assignments[reset.map_or(0, |at| at + 1)..].iter().filter(is_it)
    }

    /// The value of a key that has one only: the last.
    pub fn last(&self, key: &str) -> Option<&str> {
        self.assigned(key).last().map(|assignment| &*assignment.value)
    }

    /// Whether a switch is on.
    pub fn is_on(&self, key: &str) -> bool {
        self.last(key).is_some_and(is_yes)
    }

    /// The words of a list.
    pub fn words(&self, key: &str) -> Vec<String> {
        self.assigned(key).flat_map(|assignment| words(&assignment.value)).collect()
    }

    /// The paths of a list, without their marks: `-` (may be missing), `+` (in the unit's root), and options behind `:`.
    pub fn paths(&self, key: &str) -> Vec<PathBuf> {
        let plain = |word: String| {
            let path = word.trim_start_matches(['-', '+']);
            expanded(path.split(':').next().unwrap_or_default())
        };
        self.words(key).into_iter().map(plain).collect()
    }

    /// The last value of a variable in `Environment=`.
    pub fn variable(&self, name: &str) -> Option<String> {
        let value = |word: &String| word.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
        self.words("Environment").iter().rev().find_map(value)
    }

    /// The program that it starts: without the marks before it, and without arguments.
    pub fn program(&self) -> Option<PathBuf> {
        let line = self.assigned("ExecStart").next()?;
        let first = words(&line.value).into_iter().next()?;
        Some(first.trim_start_matches(['-', '@', ':', '+', '!']).into())
    }

    /// The files whose assignments of a key undo or hide those of file `file`: they come later.
    pub fn later(&self, key: &str, file: usize) -> impl Iterator<Item = &Assignment> {
        self.assignments.iter().filter(move |a| a.file > file && a.key == key)
    }
}

/// What systemd takes for "on".
pub fn is_yes(value: &str) -> bool {
    ["1", "yes", "y", "true", "t", "on"].iter().any(|yes| value.eq_ignore_ascii_case(yes))
}

/// The assignments of `[Service]`.
fn service_section(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut is_service = false;
    for line in logical_lines(text) {
        let line = line.trim();
        if let Some(section) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            is_service = section == "Service";
        } else if let (true, Some((key, value))) = (is_service, line.split_once('=')) {
            let key = key.trim_end();
            let today = OLD_NAMES.iter().find(|(old, _)| *old == key).map_or(key, |(_, new)| new);
            found.push((today.to_owned(), value.trim_start().to_owned()));
        }
    }
    found
}

/// Lines without comments; those that end with a backslash have the next one behind a blank.
fn logical_lines(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut open: Option<String> = None;
    for line in text.lines() {
        // A comment within a continued line does not end it.
        if line.trim_start().starts_with(['#', ';']) {
            continue;
        }
        let mut whole = open.take().unwrap_or_default();
        match line.strip_suffix('\\') {
            Some(start) => {
                whole.push_str(start);
                whole.push(' ');
                open = Some(whole);
            }
            None => lines.push(whole + line),
        }
    }
    lines.extend(open);
    lines
}

/// Words with quotes and the usual escapes, as systemd splits lists.
pub fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, quote) {
            (c, Some(open)) if c == open => quote = None,
            ('"' | '\'', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            ('\\', _) => word.get_or_insert_default().push(match chars.next() {
                Some('n') => '\n',
                Some('t') => '\t',
                Some('s') => ' ',
                Some(other) => other,
                None => '\\',
            }),
            (c, None) if c.is_whitespace() => words.extend(word.take()),
            (c, _) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// The directories that specifiers of a system's unit stand for; other specifiers stay, and match nothing.
fn expanded(path: &str) -> PathBuf {
    let places = [
        ("%t", "/run"),
        ("%S", "/var/lib"),
        ("%C", "/var/cache"),
        ("%L", "/var/log"),
        ("%h", "/root"),
    ];
    let text = places.iter().fold(path.to_owned(), |text, (name, dir)| text.replace(name, dir));
    PathBuf::from(text.replace("%%", "%"))
}

/// The longest of these paths that `path` is, or is below of: the number of its parts.
pub fn depth_of(path: &Path, paths: &[PathBuf]) -> Option<usize> {
    let around = paths.iter().filter(|outer| path.starts_with(outer));
    around
        .map(|outer| outer.components().filter(|c| matches!(c, Component::Normal(_))).count())
        .max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_collected_and_begun_anew() {
        let unit = "[Unit]\nDescription=a\n[Service]\nA=1 2\n# B=x\nA = 3\n B=\\\n# no\n  4 \\\n 5\nC=yes\n[Install]\nA=9\n";
        let settings = Settings::of([unit]);
        assert_eq!(settings.words("A"), ["1", "2", "3"]);
        assert_eq!(settings.words("B"), ["4", "5"]);
        assert!(settings.is_on("C") && !settings.is_on("A"));
        let settings = Settings::of([unit, "[Service]\nA=\nA=7\nC=\n", "B=lost\n[Service]\nA=8"]);
        assert_eq!(settings.words("A"), ["7", "8"]);
        assert_eq!((settings.last("C"), settings.last("A")), (None, Some("8")));
        assert_eq!(settings.later("A", 0).map(|a| a.file).collect::<Vec<_>>(), [1, 1, 2]);
    }

    #[test]
    fn words_are_quoted_and_escaped() {
        assert_eq!(words(r#"a "b c" 'd "e'f\sg "" "#), ["a", "b c", "d \"ef g", ""]);
        assert_eq!(words(r#""open \" end"#), ["open \" end"]);
        assert_eq!(words("  "), Vec::<String>::new());
    }

    #[test]
    fn the_last_assignment_of_a_variable_counts() {
        let settings = Settings::of([
            "[Service]\nEnvironment=A=1 \"LD_PRELOAD=/x.so /y.so\"\nEnvironment=A=2 AB=3\n",
        ]);
        assert_eq!(settings.variable("A").as_deref(), Some("2"));
        assert_eq!(settings.variable("LD_PRELOAD").as_deref(), Some("/x.so /y.so"));
        assert_eq!(settings.variable("B"), None);
        let reset = Settings::of(["[Service]\nEnvironment=A=1\nEnvironment=\n"]);
        assert_eq!(reset.variable("A"), None);
    }

    #[test]
    fn paths_lose_their_marks_and_old_keys_their_names() {
        let settings = Settings::of([
            "[Service]\nReadWriteDirectories=-/a +/b:rbind %t/c\nExecStart=-!/usr/bin/x --y\n",
        ]);
        let paths = settings.paths("ReadWritePaths");
        assert_eq!(paths, ["/a", "/b", "/run/c"].map(PathBuf::from));
        assert_eq!(settings.program(), Some("/usr/bin/x".into()));
        assert_eq!(depth_of(Path::new("/a/b"), &paths), Some(1));
        assert_eq!(depth_of(Path::new("/ab"), &paths), None);
        assert_eq!(depth_of(Path::new("/a"), &["/".into()]), Some(0));
    }
}
