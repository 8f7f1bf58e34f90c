//! What to type instead of a command or an option that there is not.

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::config::distance;

/// What people type who know other tools, and the command that they want.
const OTHER_WORDS: [(&str, &str); 18] = [
    ("ls", "ss"),
    ("ps", "ss"),
    ("list", "ss"),
    ("show", "ss"),
    ("sockets", "ss"),
    ("smcss", "ss"),
    ("netstat", "ss"),
    ("exec", "run"),
    ("start", "run"),
    ("smc_run", "run"),
    ("stop", "off"),
    ("smc_chk", "check"),
    ("doctor", "check"),
    ("test", "check"),
    ("info", "check"),
    ("smcd", "stats"),
    ("smcr", "stats"),
    ("capture", "dump"),
];

/// The error in our own words, where something was mistyped.
pub fn instead(error: &clap::Error, usmc: &Command) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let typed = text(ContextKind::InvalidSubcommand)?;
            Some(match command(typed, usmc) {
                Some(meant) => format!("there is no command {typed}; did you mean usmc {meant}?"),
                None => format!("there is no command {typed}; see `usmc --help`"),
            })
        }
        ErrorKind::UnknownArgument => {
            let typed = text(ContextKind::InvalidArg).filter(|typed| typed.starts_with('-'))?;
            let (name, of) = whose(usmc);
            let bare = typed.split('=').next().unwrap_or(typed);
            Some(match option(bare, of) {
                Some(meant) => {
                    format!("there is no option {bare}; did you mean {meant}? see `{name} --help`")
                }
                None => format!("there is no option {bare}; see `{name} --help`"),
            })
        }
        _ => None,
    }
}

fn command(typed: &str, usmc: &Command) -> Option<String> {
    if let Some((_, meant)) = OTHER_WORDS.iter().find(|(word, _)| *word == typed) {
        return Some((*meant).to_owned());
    }
    let names = usmc.get_subcommands().filter(|command| !command.is_hide_set());
    nearest(typed, names.map(|command| command.get_name().to_owned()))
}

fn option(typed: &str, of: &Command) -> Option<String> {
    let names = of.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(clap::Arg::get_long);
    nearest(typed, names.chain(["help"]).map(|name| format!("--{name}")))
}

/// The command that the words of the command line name, and how it is called.
fn whose(usmc: &Command) -> (String, &Command) {
    let (mut name, mut of) = ("usmc".to_owned(), usmc);
    for word in std::env::args().skip(1) {
        let Some(next) = of.find_subcommand(&word) else { break };
        name = format!("{name} {word}");
        of = next;
    }
    (name, of)
}

/// The nearest, if it is near: two letters that have changed places are one mistake.
fn nearest(typed: &str, names: impl Iterator<Item = String>) -> Option<String> {
    let far = |name: &String| if is_swapped(typed, name) { 1 } else { distance(typed, name) };
    let letters = typed.trim_start_matches('-').len();
    let limit = (letters / 3).max(1);
    names
        .map(|name| (far(&name), name))
        .filter(|(far, _)| *far <= limit)
        .min()
        .map(|(_, name)| name)
}

fn is_swapped(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let Some(at) = a.iter().zip(b).position(|(x, y)| x != y) else { return false };
    let mut swapped = a.to_vec();
    if at + 1 >= a.len() || a.len() != b.len() {
        return false;
    }
    swapped.swap(at, at + 1);
    swapped == b
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn what_is_near_is_suggested() {
        let usmc = crate::Usmc::command();
        for (typed, meant) in [
            ("rnu", Some("run")),
            ("ls", Some("ss")),
            ("ps", Some("ss")),
            ("chek", Some("check")),
            ("linkgroups", Some("linkgroup")),
            ("bpf", Some("ebpf")),
            ("frobnicate", None),
        ] {
            assert_eq!(command(typed, &usmc).as_deref(), meant, "{typed}");
        }
        let of = |name| usmc.find_subcommand(name).expect("a command");
        assert_eq!(option("--jsno", of("ss")).as_deref(), Some("--json"));
        assert_eq!(option("--ismdir", of("check")).as_deref(), Some("--ism-dir"));
        assert_eq!(option("--foo", of("ss")), None);
    }

    #[test]
    fn other_words_lead_to_commands_and_are_none() {
        let usmc = crate::Usmc::command();
        for (word, meant) in OTHER_WORDS {
            assert!(usmc.find_subcommand(word).is_none(), "{word} is a command itself");
            assert!(usmc.find_subcommand(meant).is_some(), "{meant}");
        }
    }
}
