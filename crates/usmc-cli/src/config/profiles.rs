//! Profiles: defaults with a name. A key that anybody has said, wherever, comes before what the profile says of it.
//!
//! `usmc run` hands a profile on by its name and its values. So that a `usmc run` in there can tell these from values that somebody has
//! said, it names them once more ([`Handed`]).

use std::env;
use std::ffi::OsStr;

use anyhow::{Result, anyhow};

use super::{KEYS, Key, near};

/// The table of a file that has them: `[profiles.NAME]`. (`profile` is the key that chooses one.)
pub const TABLE: &str = "profiles";
/// The name that chooses none.
pub const NONE: &str = "none";
/// The variable that says which values of the environment are a profile's: its name, and an assignment in each further line. No value
/// has a line break.
pub const HANDED: &str = "USMC_PROFILE_VALUES";
/// Where those come from that are in no file.
const BUILT_IN_SOURCE: &str = "built in";

/// Those that are there without a file. docs/profiles.md has the reason for each value, and what it was measured to do.
const BUILT_IN: [(&str, &[(&str, &str)]); 3] = [
    ("latency", &[("busy_poll_us", "1000")]),
    ("throughput", &[("ring_size", "4194304")]),
    ("shared", &[("busy_poll_us", "0")]),
];

/// A profile.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Profile {
    /// Its name.
    pub name: String,
    /// The file that has it, or that it is built in.
    pub source: String,
    /// What it says, in flat form.
    pub values: Vec<(&'static Key, String)>,
}

impl Profile {
    /// What it says of a key.
    pub fn text(&self, key: &Key) -> Option<&str> {
        let (_, text) = self.values.iter().find(|(known, _)| known.name == key.name)?;
        Some(text)
    }

    /// What `usmc run` would put into the environment: the profile's name, and its values.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let name = (KEYS[0].env, self.name.clone());
        let values = self.values.iter().map(|(key, text)| (key.env, text.clone()));
        [name].into_iter().chain(values.filter(|(_, text)| !text.is_empty())).collect()
    }
}

/// A profile's name, as a file or an option has it.
///
/// # Errors
/// What a name looks like.
pub fn name(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    match text.chars().all(is_plain) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "{text:?} is no name of a profile; write letters, digits, - and _, such as {}",
            BUILT_IN[0].0
        )),
    }
}

/// The profile of that name: of a file, a later one before an earlier one, or a built-in one. `source`: who says the name.
///
/// # Errors
/// There is none; the name that was probably meant.
pub fn find(of_files: &[Profile], name: &str, source: &str) -> Result<Profile> {
    let of_file = of_files.iter().rev().find(|profile| profile.name == name).cloned();
    of_file.or_else(|| built_in(name)).ok_or_else(|| {
        let names = of_files.iter().map(|profile| &*profile.name);
        let names: Vec<&str> = names.chain(BUILT_IN.map(|(name, _)| name)).collect();
        match near::nearest_of(name, &names) {
            Some(meant) => {
                anyhow!("{source}: there is no profile {name:?}; did you mean {meant}?")
            }
            None => {
                let names = names.join(", ");
                anyhow!("{source}: there is no profile {name:?}; there are {names}, and {NONE}")
            }
        }
    })
}

fn built_in(name: &str) -> Option<Profile> {
    let (_, values) = BUILT_IN.iter().find(|(known, _)| *known == name)?;
    let values = values.iter().filter_map(|(name, text)| {
        let key = KEYS.iter().find(|key| key.name == *name)?;
        Some((key, (*text).to_owned()))
    });
    let (name, source) = (name.to_owned(), BUILT_IN_SOURCE.to_owned());
    Some(Profile { name, source, values: values.collect() })
}

/// A profile that an outer `usmc run` has handed on.
#[derive(Default, Debug)]
pub struct Handed {
    name: String,
    values: Vec<(&'static Key, String)>,
}

impl Handed {
    /// What this process was handed; nothing where there was none.
    pub fn from_env() -> Handed {
        env::var(HANDED).map(|text| Handed::parse(&text)).unwrap_or_default()
    }

    fn parse(text: &str) -> Handed {
        let mut lines = text.lines();
        let name = lines.next().unwrap_or_default().to_owned();
        let values = lines.filter_map(|line| {
            let (variable, text) = line.split_once('=')?;
            let key = KEYS.iter().find(|key| key.env == variable)?;
            Some((key, key.kind.normalise(text).ok()?))
        });
        Handed { name, values: values.collect() }
    }

    /// The variable's text for values that a profile has given.
    pub fn text<'a>(name: &str, values: impl Iterator<Item = (&'static Key, &'a str)>) -> String {
        let lines = values.map(|(key, text)| format!("\n{}={text}", key.env));
        format!("{name}{}", lines.collect::<String>())
    }

    /// Whether this value of a variable is the profile's, and nobody's own word.
    pub fn has(&self, key: &Key, text: &OsStr) -> bool {
        self.values.iter().any(|(of, own)| *of == key && text == OsStr::new(own))
    }

    /// The profile as it was handed on, if it has that name: its file may be out of reach here.
    pub fn profile(self, name: &str, source: &str) -> Option<Profile> {
        let Handed { name: own, values } = self;
        (own == name).then(|| Profile { name: own, source: source.to_owned(), values })
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A profile for a test.
    pub fn made(name: &str, values: &[(&str, &str)]) -> Profile {
        let value = |(name, text): &(&str, &str)| {
            let key = KEYS.iter().find(|key| key.name == *name).expect("a key");
            (key, (*text).to_owned())
        };
        let values = values.iter().map(value).collect();
        Profile { name: name.to_owned(), source: "a test".to_owned(), values }
    }

    #[test]
    fn built_in_values_are_flat_and_documented() {
        let page = include_str!("../../../../docs/profiles.md");
        let manual = include_str!("../../../../docs/man/usmc.toml.5");
        for (name, values) in BUILT_IN {
            let profile = built_in(name).expect("one of ours");
            assert_eq!(profile.values.len(), values.len(), "{name}: its keys are there");
            assert!(manual.contains(&format!(".It Cm {name}\n")), "{name} in usmc.toml(5)");
            for (key, text) in &profile.values {
                assert_eq!(key.kind.normalise(text).as_ref(), Ok(text), "{name}: {}", key.name);
                let row = format!("| `{name}` | `{} = {text}`", key.name);
                assert!(page.contains(&row), "{row} in docs/profiles.md");
            }
        }
    }

    #[test]
    fn a_files_profile_comes_before_a_built_in_one_and_a_later_file_before_both() {
        let of = |source: &str| Profile {
            name: "latency".to_owned(),
            source: source.to_owned(),
            values: Vec::new(),
        };
        let source = |files: &[Profile]| find(files, "latency", "--profile").expect("one").source;
        assert_eq!(source(&[]), BUILT_IN_SOURCE);
        assert_eq!(source(&[of("one"), of("two")]), "two");
        let refusal = |name| find(&[of("one")], name, "x").expect_err("none").to_string();
        assert!(refusal("latencey").contains("did you mean latency?"), "{}", refusal("latencey"));
        assert!(refusal("gaming").contains("there are latency, "), "{}", refusal("gaming"));
        assert!(name("a b").is_err() && name("a-b_c.1") == Ok("a-b_c.1".to_owned()));
    }

    #[test]
    fn what_is_handed_on_is_known_again() {
        let latency = built_in("latency").expect("one of ours");
        let text = Handed::text("mine", latency.values.iter().map(|(key, text)| (*key, &**text)));
        let handed = Handed::parse(&text);
        let (key, text) = &latency.values[0];
        assert!(handed.has(key, OsStr::new(text)) && !handed.has(key, OsStr::new("7")));
        assert!(!handed.has(&KEYS[0], OsStr::new(text)));
        assert_eq!(handed.profile("mine", "x").map(|own| own.values), Some(latency.values));
        assert_eq!(Handed::parse("other").profile("mine", "x"), None);
        assert_eq!(Handed::parse("mine\nUSMC_X=1\nUSMC_RING_SIZE=7\nno").values, []);
    }
}
