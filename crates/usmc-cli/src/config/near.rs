//! What a person meant who has mistyped the name of a key or of a variable.

use std::env;
use std::fmt;

use super::{KEYS, profiles};

/// A variable of the environment whose name is nearly one of ours.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mistyped {
    /// The name.
    pub name: String,
    /// What was probably meant.
    pub meant: &'static str,
}

impl fmt::Display for Mistyped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no variable {}; did you mean {}?", self.name, self.meant)
    }
}

/// Variables that are no keys: where the library is found, and what `usmc run` says to itself.
const OTHERS: [&str; 2] = ["USMC_LIBRARY", profiles::HANDED];

/// Variables of the environment that nobody reads, and that are nearly one that is read.
pub fn mistyped_variables() -> Vec<Mistyped> {
    let names = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let mut mistyped: Vec<Mistyped> = names.filter_map(|name| mistyped(&name)).collect();
    mistyped.sort_by(|a, b| a.name.cmp(&b.name));
    mistyped
}

/// Other programs have variables of this prefix, too: only names that are near to one of ours are told.
fn mistyped(name: &str) -> Option<Mistyped> {
    let known = || KEYS.iter().map(|key| key.env).chain(OTHERS);
    let is_ours = name.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("usmc_"));
    if !is_ours || known().any(|env| env == name) {
        return None;
    }
    let upper = name.to_ascii_uppercase().replace('-', "_");
    let is_near = |env: &&str| distance(&upper, env) <= (env.len() - 5) / 3;
    let meant = known().filter(is_near).min_by_key(|env| distance(&upper, env))?;
    Some(Mistyped { name: name.to_owned(), meant })
}

/// The key a person meant by `unknown`.
pub fn nearest(unknown: &str) -> &'static str {
    let unknown = unknown.to_lowercase().replace('-', "_");
    let unknown = unknown.strip_prefix("usmc_").unwrap_or(&unknown);
    KEYS.iter().map(|k| k.name).min_by_key(|name| distance(unknown, name)).unwrap_or("off")
}

/// The name that a person meant, if one is near.
pub fn nearest_of<'a>(typed: &str, names: &[&'a str]) -> Option<&'a str> {
    let limit = (typed.len() / 3).max(2);
    let all = names.iter().map(|name| (distance(typed, name), *name));
    all.filter(|(far, _)| *far <= limit).min().map(|(_, name)| name)
}

/// Levenshtein distance in bytes.
pub fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistyped_variables_find_their_neighbour_and_others_are_let_alone() {
        for (name, meant) in [
            ("USMC_RINGSIZE", Some("USMC_RING_SIZE")),
            ("USMC_ISMDIR", Some("USMC_ISM_DIR")),
            ("usmc_log", Some("USMC_LOG")),
            ("USMC_PEER", Some("USMC_PEERS")),
            ("USMC_LIBARY", Some("USMC_LIBRARY")),
            ("USMC_RING_SIZE", None),
            ("USMC_LIBRARY", None),
            ("USMC_PROFILE", None),
            ("USMC_PROFILE_VALUES", None),
            ("USMC_PROFIL", Some("USMC_PROFILE")),
            ("USMC_TESTS_ID", None),
            ("USMC_BIN", None),
            ("USMC_IBVERBS", None),
            ("OTHER_RING_SIZE", None),
        ] {
            assert_eq!(mistyped(name).map(|found| found.meant), meant, "{name}");
        }
    }

    #[test]
    fn mistyped_keys_find_their_neighbour() {
        assert_eq!(nearest("ring-size"), "ring_size");
        assert_eq!(nearest("USMC_RINGSIZE"), "ring_size");
        assert_eq!(nearest("include_port"), "include_ports");
        assert_eq!(nearest("busy_poll"), "busy_poll_us");
        assert_eq!(nearest("ism_directory"), "ism_dir");
    }
}
