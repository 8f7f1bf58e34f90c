//! One TOML file: from its text to flat values. Line numbers in every refusal.

use std::path::Path;

use anyhow::{Result, anyhow};
use toml::de::{DeTable, DeValue};

use super::agent::{self, Agent};
use super::profiles::{self, Profile};
use super::{KEYS, Key, nearest, sources};
use crate::pnet::{self, Entry};

/// What a file says.
pub struct Said {
    /// Keys with their flat values.
    pub values: Vec<(&'static Key, String)>,
    /// Its profiles.
    pub profiles: Vec<Profile>,
    /// The pnet table, if it has one.
    pub pnet: Option<Vec<Entry>>,
    /// The agent's settings, if it has any.
    pub agent: Option<Agent>,
}

/// Parses `text`; `name` is the file, for messages.
///
/// # Errors
/// The first thing wrong, with its line and what to write instead.
pub fn parse(name: &str, text: &str) -> Result<Said> {
    let table = DeTable::parse(text).map_err(|e| {
        let line = e.span().map_or(1, |span| line_of(text, span.start));
        anyhow!("{name}:{line}: {}; see usmc.toml(5) for examples", e.message())
    })?;
    let (mut values, mut profiles, mut pnet, mut agent) = (Vec::new(), Vec::new(), None, None);
    for (found, value) in table.get_ref() {
        let line = line_of(text, found.span().start);
        match (&**found.get_ref(), value.get_ref()) {
            ("pnet", value) => {
                let entries = entries(value);
                pnet = Some(entries.map_err(|problem| anyhow!("{name}:{line}: pnet: {problem}"))?);
            }
            ("agent", value) => {
                let settings = match value {
                    DeValue::Table(table) => agent::parse(table),
                    _ => Err("is written as [agent]".to_owned()),
                };
                agent =
                    Some(settings.map_err(|problem| anyhow!("{name}:{line}: agent: {problem}"))?);
            }
            (profiles::TABLE, DeValue::Table(tables)) => {
                profiles = profiles_of((name, text), tables)?;
            }
            (profiles::TABLE, _) | ("profile", DeValue::Table(_)) => {
                let remedy =
                    "write [profiles.NAME] for a profile, and profile = \"NAME\" to use it";
                return Err(anyhow!("{name}:{line}: {remedy}"));
            }
            (key, value) => {
                let said = value_of(name, key, value);
                values.push(said.map_err(|problem| anyhow!("{name}:{line}: {problem}"))?);
            }
        }
    }
    Ok(Said { values, profiles, pnet, agent })
}

/// A key with its flat value. `name`: the file's.
fn value_of(
    name: &str,
    found: &str,
    value: &DeValue<'_>,
) -> Result<(&'static Key, String), String> {
    let Some(key) = KEYS.iter().find(|key| key.name == found) else {
        let meant = nearest(found);
        return Err(format!("there is no key {found:?}; did you mean {meant}?"));
    };
    let dir = Path::new(name).parent().unwrap_or(Path::new("."));
    let flat = flat_text(key, value)
        .map(|text| sources::seen_from(dir, key.kind, &text))
        .and_then(|text| key.kind.normalise(&text));
    flat.map(|flat| (key, flat)).map_err(|problem| format!("{}: {problem}", key.name))
}

/// The tables `[profiles.NAME]` of a file, which has this name and this text.
fn profiles_of((file, text): (&str, &str), tables: &DeTable<'_>) -> Result<Vec<Profile>> {
    let mut profiles = Vec::new();
    for (found, table) in tables {
        let line = line_of(text, found.span().start);
        let name = profiles::name(found.get_ref());
        let name = name.map_err(|problem| anyhow!("{file}:{line}: {problem}"))?;
        let DeValue::Table(table) = table.get_ref() else {
            return Err(anyhow!("{file}:{line}: a profile is written as [profiles.{name}]"));
        };
        if name == profiles::NONE {
            return Err(anyhow!("{file}:{line}: {name} means no profile; choose another name"));
        }
        let mut values = Vec::new();
        for (found, value) in table {
            let line = line_of(text, found.span().start);
            let wrong = |problem| anyhow!("{file}:{line}: profile {name}: {problem}");
            if found.get_ref() == "profile" {
                return Err(wrong("a profile names no other one; write its keys".to_owned()));
            }
            values.push(value_of(file, found.get_ref(), value.get_ref()).map_err(wrong)?);
        }
        profiles.push(Profile { name, source: file.to_owned(), values });
    }
    Ok(profiles)
}

/// The tables `[[pnet]]`, no two of which may speak of the same device.
fn entries(value: &DeValue<'_>) -> Result<Vec<Entry>, String> {
    let DeValue::Array(tables) = value else { return Err("is written as [[pnet]]".to_owned()) };
    let mut entries = Vec::new();
    for (number, table) in tables.iter().enumerate() {
        let DeValue::Table(table) = table.get_ref() else {
            return Err("is written as [[pnet]]".to_owned());
        };
        let entry = pnet::parse(table).map_err(|e| format!("entry {} {e}", number + 1))?;
        if let Some(device) = entries.iter().find_map(|other| pnet::clash(&entry, other)) {
            return Err(format!("{device} is there twice; write it once"));
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|&b| b == b'\n').count() + 1
}

fn flat_text(key: &Key, value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::Array(items) if key.kind.is_list() => {
            let items = items.iter().map(|item| scalar(item.get_ref()));
            let items = items.collect::<Option<Vec<_>>>();
            Ok(items.ok_or("its items must be strings or whole numbers")?.join(","))
        }
        DeValue::Array(_) => Err("takes one value; write it without brackets".to_owned()),
        value => scalar(value).ok_or_else(|| {
            "is neither a string, a whole number nor a truth value; write one of these".to_owned()
        }),
    }
}

/// A value as text, if it is one.
pub(super) fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Boolean(truth) => Some(u8::from(*truth).to_string()),
        DeValue::Integer(number) => {
            Some(i64::from_str_radix(number.as_str(), number.radix()).ok()?.to_string())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(text: &str) -> Result<Vec<(&'static str, String)>, String> {
        parse("f", text)
            .map(|said| said.values.into_iter().map(|(k, v)| (k.name, v)).collect())
            .map_err(|e| e.to_string())
    }

    #[test]
    fn strings_numbers_truths_and_arrays_are_understood() {
        for (text, name, value) in [
            ("off = true", "off", "1"),
            ("ring_size = '64K'", "ring_size", "65536"),
            ("ring_size = 0x1_0000", "ring_size", "65536"),
            ("busy_poll_us = 20", "busy_poll_us", "20"),
            ("include_ports = [80, '6000-7000']", "include_ports", "80,6000-7000"),
            ("include_ports = 80", "include_ports", "80"),
            ("exclude_programs = 'sshd,postgres'", "exclude_programs", "sshd,postgres"),
            ("exclude_addrs = []", "exclude_addrs", ""),
        ] {
            assert_eq!(flat(text), Ok(vec![(name, value.to_owned())]), "{text}");
        }
        assert_eq!(flat("# only a comment\n"), Ok(vec![]));
    }

    #[test]
    fn paths_are_seen_from_the_files_directory() {
        let flat = |text: &str| {
            let said = parse("/etc/dir/f", text).expect("good values");
            said.values.into_iter().map(|(_, text)| text).collect::<Vec<_>>()
        };
        assert_eq!(
            flat("ism_dir = 'shm'\nlog = 'warn:x/l'"),
            ["/etc/dir/shm", "warn:/etc/dir/x/l"]
        );
        assert_eq!(flat("ism_dir = '/a'\nlog = 'warn:/l'"), ["/a", "warn:/l"]);
        assert_eq!(flat("ism_dir = ''\nlog = 'warn'"), ["", "warn"]);
    }

    #[test]
    fn profiles_are_read() {
        let text = "profile = 'x'\n[profiles.x]\nring_size = '64K'\nlog = 'warn:l'\n[profiles.y]\n";
        let said = parse("/etc/f", text).expect("good values");
        assert_eq!(said.values.len(), 1);
        let [x, y] = &said.profiles[..] else { panic!("{:?}", said.profiles) };
        let of = |name| KEYS.iter().find(|key| key.name == name).and_then(|key| x.text(key));
        assert_eq!((of("ring_size"), of("log")), (Some("65536"), Some("warn:/etc/l")));
        assert_eq!((of("off"), &*x.name, &*x.source), (None, "x", "/etc/f"));
        assert_eq!((&*y.name, &y.values[..]), ("y", &[][..]));
    }

    #[test]
    fn refusals_name_file_line_and_remedy() {
        for (text, refusal) in [
            ("\nring-size = 1", "f:2: there is no key \"ring-size\"; did you mean ring_size?"),
            ("[run]\noff = true", "f:1: there is no key \"run\"; did you mean"),
            ("off = true\nring_size = 300", "f:2: ring_size: 300 is not a power of two"),
            ("ring_size = [1]", "f:1: ring_size: takes one value"),
            ("include_ports = [[1]]", "f:1: include_ports: its items must be"),
            ("include_ports = [1.5]", "f:1: include_ports: its items must be"),
            ("busy_poll_us = 1.5", "f:1: busy_poll_us: is neither"),
            ("busy_poll_us = -1", "f:1: busy_poll_us: \"-1\" is not a number"),
            ("off = true\noff = false", "f:2: "),
            ("off = \n", "f:1: "),
            ("[profile.x]\noff = true", "f:1: write [profiles.NAME] for a profile"),
            ("profiles = 'x'", "f:1: write [profiles.NAME] for a profile"),
            ("[profiles]\nx = 1", "f:2: a profile is written as [profiles.x]"),
            ("[profiles.none]\n", "f:1: none means no profile"),
            ("[profiles.'a b']\n", "f:1: \"a b\" is no name"),
            ("[profiles.x]\nprofile = 'y'", "f:2: profile x: a profile names no other one"),
            (
                "[profiles.x]\noff = true\nringsize = 1",
                "f:3: profile x: there is no key \"ringsize\"; did you mean ring_size?",
            ),
            ("[profiles.x]\nring_size = 300", "f:2: profile x: ring_size: 300 is not a power of"),
        ] {
            let found = flat(text).expect_err(text);
            assert!(found.starts_with(refusal), "{text:?}: {found}");
        }
    }

    #[test]
    fn the_example_and_the_manual_have_every_key() {
        let example = include_str!("../../../../docs/config/usmc.toml");
        assert_eq!(flat(example), Ok(vec![]), "the example changes nothing by itself");
        let is_value = |line: &&str| line.starts_with('#') && line.contains(" = ");
        let is_table = |line: &str| line.starts_with("#[") || line.starts_with("[");
        let said = |line: &&str| is_value(line) || is_table(line);
        let values: Vec<_> = example.lines().filter(said).map(|line| &line[1..]).collect();
        let said = parse("f", &values.join("\n")).expect("the example's values");
        assert_eq!(said.pnet.map(|entries| entries.len()), Some(1));
        assert_eq!(said.profiles.len(), 1);
        let values: Vec<_> = said.values.into_iter().map(|(key, text)| (key.name, text)).collect();
        let manual = include_str!("../../../../docs/man/usmc.toml.5");
        for key in &KEYS {
            assert!(
                values.iter().any(|(name, _)| *name == key.name),
                "{} in the example",
                key.name
            );
            let title = format!(".It Ic {} , Ev {} , Fl {}", key.name, key.env, &key.option[1..]);
            assert!(manual.lines().any(|line| line == title), "{title}");
        }
    }
}
