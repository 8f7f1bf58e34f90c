//! A setting of the library that is swept: the same case with one value after the other, in each round.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::case::size;
use super::cores::Cores;

/// One value of a setting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    /// The variable of the environment.
    pub name: String,
    /// Its value; nothing where the library is left to itself.
    pub value: Option<String>,
}

/// A variable and what it is set to in turn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sweep(pub Vec<Setting>);

/// Under which circumstances a case runs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Place {
    /// CPUs of all programs together.
    pub cores: Cores,
    /// Programs that compute beside each run.
    pub beside: usize,
}

impl Place {
    /// As it stands behind a case's name; empty where nothing is special.
    pub fn suffix(&self) -> String {
        match *self {
            Place { cores: Cores::All, beside: 0 } => String::new(),
            _ => format!(" ({self})"),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.beside {
            0 => write!(f, "{}", self.cores),
            1 => write!(f, "{}, beside a program that computes", self.cores),
            n => write!(f, "{}, beside {n} programs that compute", self.cores),
        }
    }
}

/// A point of a sweep's plot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Point {
    /// The case's name without setting and place.
    pub case: String,
    /// The setting, without its prefix, in lower case.
    pub setting: String,
    /// Its value; `default` where the library was left to itself.
    pub value: String,
    /// The place in words.
    pub place: String,
}

impl Setting {
    /// Without its prefix, in lower case.
    pub fn short_name(&self) -> String {
        self.name.trim_start_matches("USMC_").to_lowercase()
    }

    /// Whether all connections of the run are to be in a region that is made for it.
    pub fn has_own_region(&self) -> bool {
        self.name == "USMC_REGIONS" && self.value.as_deref() == Some(OWN)
    }

    /// The value as it is shown: sizes by their units.
    pub fn shown(&self) -> String {
        let Some(value) = &self.value else { return "default".to_owned() };
        match value.parse::<usize>() {
            Ok(bytes) if bytes > 0 && bytes % 1024 == 0 => size(bytes),
            _ => value.clone(),
        }
    }
}

/// Sweeps that have a name of their own.
const KNOWN: [(&str, &str); 3] = [
    ("busy", "USMC_BUSY_POLL_US=default,0,20,50,100,200,500,1000"),
    ("window", "USMC_RING_SIZE=default,65536,262144,1048576,2097152,4194304"),
    ("device", "USMC_REGIONS=none,own"),
];

/// The value of `USMC_REGIONS` that stands for a region of the run's own, in place of the memory of one host.
const OWN: &str = "own";

impl FromStr for Sweep {
    type Err = String;

    /// `busy`, `window`, `device`, or `VARIABLE=VALUE,…`, where `default` stands for none.
    fn from_str(text: &str) -> Result<Sweep, String> {
        let known = KNOWN.iter().find(|(word, _)| *word == text);
        let (name, values) = known
            .map_or(text, |(_, sweep)| sweep)
            .split_once('=')
            .ok_or("it is neither busy, window, device, nor VARIABLE=VALUE,VALUE,…")?;
        if !name.starts_with("USMC_") {
            return Err(format!("{name} is no setting of the library: usmc-run(1) names them"));
        }
        let setting = |value: &str| Setting {
            name: name.to_owned(),
            value: (value != "default").then(|| value.to_owned()),
        };
        Ok(Sweep(values.split(',').map(setting).collect()))
    }
}

impl Sweep {
    /// By default, and with each of these profiles.
    ///
    /// # Errors
    /// One is named twice, or without a name.
    pub fn of_profiles(text: &str) -> Result<Sweep, String> {
        let names: Vec<&str> = text.split(',').map(str::trim).collect();
        let is_twice = |at: usize| names[..at].contains(&names[at]);
        if names.contains(&"") || (1..names.len()).any(is_twice) {
            return Err("name each profile once, such as latency,shared".to_owned());
        }
        let setting = |value| Setting { name: "USMC_PROFILE".to_owned(), value };
        let named = names.into_iter().map(|name| setting(Some(name.to_owned())));
        Ok(Sweep([setting(None)].into_iter().chain(named).collect()))
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.short_name(), self.shown())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_is_known_or_spelt_out() {
        let shown = |text: &str| -> Result<Vec<String>, String> {
            Ok(text.parse::<Sweep>()?.0.iter().map(ToString::to_string).collect())
        };
        assert_eq!(
            shown("USMC_BUSY_POLL_US=default,7"),
            Ok(vec!["busy_poll_us=default".to_owned(), "busy_poll_us=7".to_owned()])
        );
        for word in ["busy", "window"] {
            assert!(shown(word).is_ok_and(|all| all.len() > 4 && all[0].ends_with("=default")));
        }
        let devices = "device".parse::<Sweep>().expect("known").0;
        let own: Vec<bool> = devices.iter().map(Setting::has_own_region).collect();
        assert_eq!(own, [false, true]);
        assert_eq!(shown("USMC_RING_SIZE=65536"), Ok(vec!["ring_size=64KB".to_owned()]));
        assert!(shown("PATH=a,b").is_err_and(|why| why.contains("no setting")));
        assert!(shown("nothing").is_err());
        let profiles = Sweep::of_profiles("latency, mine").expect("names").0;
        let profiles: Vec<String> = profiles.iter().map(ToString::to_string).collect();
        assert_eq!(profiles, ["profile=default", "profile=latency", "profile=mine"]);
        assert!(Sweep::of_profiles("a,a").is_err() && Sweep::of_profiles("").is_err());
    }

    #[test]
    fn a_place_is_named_where_it_is_special() {
        let suffix = |cores, beside| Place { cores, beside }.suffix();
        assert_eq!(suffix(Cores::All, 0), "");
        assert_eq!(suffix(Cores::All, 1), " (all CPUs, beside a program that computes)");
        assert_eq!(suffix(Cores::Share(50), 0), " (0.5 CPU)");
    }
}
