//! A setting of the library that is swept: the same case with one value after the other, in each round.

use std::fmt;
use std::str::FromStr;

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

/// Sweeps that have a name of their own.
const KNOWN: [(&str, &str); 2] = [
    ("busy", "USMC_BUSY_POLL_US=default,0,20,50,100,200,500,1000"),
    ("window", "USMC_RING_SIZE=default,65536,262144,1048576,2097152,4194304"),
];

impl FromStr for Sweep {
    type Err = String;

    /// `busy`, `window`, or `VARIABLE=VALUE,…`, where `default` stands for none.
    fn from_str(text: &str) -> Result<Sweep, String> {
        let known = KNOWN.iter().find(|(word, _)| *word == text);
        let (name, values) = known
            .map_or(text, |(_, sweep)| sweep)
            .split_once('=')
            .ok_or("it is neither busy, window, nor VARIABLE=VALUE,VALUE,…")?;
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

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.trim_start_matches("USMC_").to_lowercase();
        write!(f, "{name}={}", self.value.as_deref().unwrap_or("default"))
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
        for (word, _) in KNOWN {
            assert!(shown(word).is_ok_and(|all| all.len() > 4 && all[0].ends_with("=default")));
        }
        assert!(shown("PATH=a,b").is_err_and(|why| why.contains("no setting")));
        assert!(shown("nothing").is_err());
    }
}
