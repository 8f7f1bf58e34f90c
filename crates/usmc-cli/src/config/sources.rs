//! Where values come from, and which one counts: files, then the environment, then options.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};

use super::agent::Agent;
use super::profiles::{self, Handed, Profile};
use super::{KEYS, Key, Kind, file};
use crate::pnet::Entry;

/// The options that set keys of the configuration; the same for every command that needs one.
#[derive(clap::Args, Clone, Default, Debug)]
#[command(next_help_heading = "Configuration (see usmc.toml(5))")]
pub struct ConfigArgs {
    /// Read FILE after /etc/usmc.toml and the user's own file
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// That file need not be there yet.
    #[arg(skip)]
    pub makes_file: bool,
    /// Defaults by a name: latency, throughput, shared, one of a file, or none; see usmc.toml(5)
    #[arg(long, value_name = "NAME")]
    pub profile: Option<String>,
    /// Directory that is the ISM device: who shares it shares memory [default: /dev/shm/usmc-UID]
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub ism_dir: Option<String>,
    /// Memory shared with other machines: auto, none, or files and devices; comma list, repeatable, at most four; see
    /// usmc-region(1) [default: auto]
    #[arg(long = "regions", alias = "region", value_name = "PATHS")]
    pub regions: Vec<String>,
    /// Bytes of each ring, a power of two from 16K to 4M [default: 256K]
    #[arg(long, value_name = "SIZE")]
    pub ring_size: Option<String>,
    /// Longest time a waiting thread spins before it sleeps; 0 never spins [default: 50]
    #[arg(long, value_name = "MICROSECONDS", allow_hyphen_values = true)]
    pub busy_poll_us: Option<String>,
    /// Say "I speak SMC" when TCP connections are made: auto, on or off; see usmc-ebpf(8) [default: auto]
    #[arg(long, value_name = "WHEN")]
    pub tcp_option: Option<String>,
    /// io_uring as the program asks for it, or none: auto or deny [default: auto]
    #[arg(long, value_name = "WHETHER")]
    pub io_uring: Option<String>,
    /// When a connection leaves TCP: once it is seen to last, or as soon as it is made: lasting or at-once [default: lasting]
    #[arg(long, value_name = "WHEN")]
    pub change_over: Option<String>,
    /// Memory that programs of one host hand each other: auto, or off, which leaves regions [default: auto]
    #[arg(long, value_name = "WHETHER")]
    pub loopback: Option<String>,
    /// Look for listeners in these networks in regions, though a gateway is before them: ADDRESS[/LENGTH], comma list, repeatable
    #[arg(long = "region-net", alias = "region-nets", value_name = "NETWORKS")]
    pub region_nets: Vec<String>,
    /// Log to standard error or FILE; LEVEL is error, warn, info or debug
    #[arg(long, value_name = "LEVEL[:FILE]")]
    pub log: Option<String>,
    /// Leave TCP only for these listeners' ports: N or N-M, comma list, repeatable
    #[arg(long = "include-port", alias = "include-ports", value_name = "PORTS")]
    pub include_ports: Vec<String>,
    /// Keep these listeners' ports on TCP
    #[arg(long = "exclude-port", alias = "exclude-ports", value_name = "PORTS")]
    pub exclude_ports: Vec<String>,
    /// Leave TCP only for listeners in these networks: ADDRESS[/LENGTH], comma list, repeatable
    #[arg(long = "include-addr", alias = "include-addrs", value_name = "NETWORKS")]
    pub include_addrs: Vec<String>,
    /// Keep listeners in these networks on TCP
    #[arg(long = "exclude-addr", alias = "exclude-addrs", value_name = "NETWORKS")]
    pub exclude_addrs: Vec<String>,
    /// Send SMC's first message to listeners in these networks unasked, and expect it of clients:
    /// ADDRESS[/LENGTH][:PORT], comma list, repeatable
    #[arg(long = "peer", alias = "peers", value_name = "PEERS")]
    pub peers: Vec<String>,
    /// Put SMC's first message into the SYN of connections to listeners in these networks, all of which speak SMC, and accept such SYNs:
    /// ADDRESS[/LENGTH][:PORT], comma list, repeatable
    #[arg(long, value_name = "PEERS")]
    pub fast_open: Vec<String>,
    /// Serve only these programs: executable's file name, * matches anything, comma list, repeatable
    #[arg(long = "include-program", alias = "include-programs", value_name = "NAMES")]
    pub include_programs: Vec<String>,
    /// Leave these programs alone
    #[arg(long = "exclude-program", alias = "exclude-programs", value_name = "NAMES")]
    pub exclude_programs: Vec<String>,
    /// User-defined enterprise IDs: comma list, repeatable, at most four
    #[arg(long = "ueid", alias = "ueids", value_name = "UEIDS")]
    pub ueids: Vec<String>,
    /// Whether the system's own enterprise ID may be used: on or off
    #[arg(long, value_name = "WHETHER")]
    pub seid: Option<String>,
    /// Start the command without uSMC: an option of `usmc run` alone.
    #[arg(skip)]
    pub off: bool,
}

/// The options of commands that are about a directory alone.
#[derive(clap::Args, Clone, Default, Debug)]
pub struct DirArgs {
    /// Read FILE after /etc/usmc.toml and the user's own file
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    config: Option<PathBuf>,
    /// Directory that is the ISM device [default: /dev/shm/usmc-UID]
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    ism_dir: Option<String>,
}

impl DirArgs {
    /// The configuration with these options and no others.
    pub fn config(&self) -> ConfigArgs {
        let (config, ism_dir) = (self.config.clone(), self.ism_dir.clone());
        ConfigArgs { config, ism_dir, ..ConfigArgs::default() }
    }
}

impl ConfigArgs {
    /// What the options say about `key`, in the key's own grammar.
    fn value_of(&self, key: &Key) -> Option<String> {
        let joined = |items: &Vec<String>| (!items.is_empty()).then(|| items.join(","));
        match key.name {
            "profile" => self.profile.clone(),
            "off" => self.off.then(|| "1".to_owned()),
            "ism_dir" => self.ism_dir.clone(),
            "regions" => joined(&self.regions.iter().map(|text| regions_from_here(text)).collect()),
            "log" => self.log.clone(),
            "ring_size" => self.ring_size.clone(),
            "busy_poll_us" => self.busy_poll_us.clone(),
            "tcp_option" => self.tcp_option.clone(),
            "io_uring" => self.io_uring.clone(),
            "change_over" => self.change_over.clone(),
            "loopback" => self.loopback.clone(),
            "region_nets" => joined(&self.region_nets),
            "include_ports" => joined(&self.include_ports),
            "exclude_ports" => joined(&self.exclude_ports),
            "include_addrs" => joined(&self.include_addrs),
            "exclude_addrs" => joined(&self.exclude_addrs),
            "ueids" => joined(&self.ueids),
            "seid" => self.seid.clone(),
            "peers" => joined(&self.peers),
            "fast_open" => joined(&self.fast_open),
            "include_programs" => joined(&self.include_programs),
            _ => joined(&self.exclude_programs),
        }
    }
}

/// A directory, or a log's file, that is not absolute is seen from where it is said: in an option or a variable from the current
/// directory, in a file from that file's.
pub fn seen_from(place: &Path, kind: Kind, text: &str) -> String {
    let seen = |path: &str| match path {
        "" => String::new(),
        path => from_here(&place.join(path).to_string_lossy()),
    };
    match (kind, text.split_once(':')) {
        _ if text.chars().any(char::is_control) => text.to_owned(),
        (Kind::Dir, _) => seen(text.trim()),
        (Kind::Log, Some((level, path))) => format!("{level}:{}", seen(path)),
        _ => text.to_owned(),
    }
}

/// A path, seen from the current directory.
fn from_here(path: &str) -> String {
    std::path::absolute(path)
        .ok()
        .and_then(|p| p.into_os_string().into_string().ok())
        .unwrap_or_else(|| path.to_owned())
}

/// An option's list of paths, likewise, or its word.
fn regions_from_here(text: &str) -> String {
    match text.to_ascii_lowercase().as_str() {
        "" | "auto" | "none" => text.to_owned(),
        _ => text.split(',').map(|path| from_here(path.trim())).collect::<Vec<_>>().join(","),
    }
}

/// A value and who said it.
#[derive(Clone, Debug)]
pub struct Value {
    /// The flat form; empty = the library's default.
    pub text: String,
    /// A file, an environment variable, an option or a profile.
    pub source: String,
}

/// The effective configuration.
#[derive(Debug)]
pub struct Config {
    values: [Option<Value>; KEYS.len()],
    /// The files that were read, in that order.
    pub files: Vec<PathBuf>,
    /// Those that are not there.
    pub absent: Vec<PathBuf>,
    /// The user's own file, if this process may not read it.
    pub skipped: Option<PathBuf>,
    /// The pnet table, of the last file that has one.
    pub pnet: Vec<Entry>,
    /// The agent's settings, of the last file that has a table of them.
    pub agent: Agent,
    /// The profile in effect.
    pub profile: Option<Profile>,
    /// Profiles of the files, in that order.
    profiles: Vec<Profile>,
    /// What a `usmc run` in there is told of the profile's values ([`profiles::HANDED`]).
    handed_on: String,
}

/// The file for all users.
pub const SYSTEM: &str = "/etc/usmc.toml";

/// Who names a file.
#[derive(Clone, Copy)]
enum Origin {
    /// Nobody: /etc/usmc.toml.
    System,
    /// HOME or XDG_CONFIG_HOME.
    User,
    /// `--config`.
    Option,
}

impl Config {
    /// Reads files, environment and options.
    ///
    /// # Errors
    /// The first value that is refused, with its source and what to write instead.
    pub fn load(args: &ConfigArgs) -> Result<Config> {
        let mut config = Config::load_files(args)?;
        let handed = Handed::from_env();
        for key in &KEYS {
            if let Some(text) = env::var_os(key.env).filter(|text| !handed.has(key, text)) {
                config.say(key, text, key.env)?;
            }
        }
        for key in &KEYS {
            if let Some(text) = args.value_of(key) {
                config.say(key, text.into(), key.option)?;
            }
        }
        config.take_profile(handed)?;
        Ok(config)
    }

    /// Where nobody has said a key, the profile does.
    fn take_profile(&mut self, handed: Handed) -> Result<()> {
        let key = &KEYS[0];
        let chosen = self.values[0].clone().filter(|value| !value.text.is_empty());
        let Some(Value { text: name, source }) =
            chosen.filter(|value| value.text != profiles::NONE)
        else {
            return Ok(());
        };
        let profile = Some(handed).filter(|_| source == key.env);
        let profile = match profile.and_then(|handed| handed.profile(&name, profiles::HANDED)) {
            Some(profile) => profile,
            None => self.profile_named(&name, &source)?,
        };
        let source = format!("profile {name}");
        let mut given = Vec::new();
        for (key, text) in &profile.values {
            if let Some(at) = KEYS.iter().position(|k| k == *key)
                && self.values[at].is_none()
            {
                self.values[at] = Some(Value { text: text.clone(), source: source.clone() });
                given.push((*key, &**text));
            }
        }
        self.handed_on = Handed::text(&name, given.into_iter());
        self.profile = Some(profile);
        Ok(())
    }

    /// The profile of that name, of a file or a built-in one. `source`: who says the name.
    ///
    /// # Errors
    /// There is none; the name that was probably meant.
    pub fn profile_named(&self, name: &str, source: &str) -> Result<Profile> {
        profiles::find(&self.profiles, name, source)
    }

    /// What the profile says of a key, where somebody else has said it and so comes first.
    pub fn overridden(&self, key: &Key) -> Option<&str> {
        let profile = self.profile.as_ref()?;
        let said = profile.text(key)?;
        let (_, value) = self.iter().find(|(of, _)| *of == key)?;
        value.filter(|value| value.source != format!("profile {}", profile.name)).map(|_| said)
    }

    /// Reads files alone, for whoever changes one.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn load_files(args: &ConfigArgs) -> Result<Config> {
        let values = [const { None }; KEYS.len()];
        let (pnet, agent) = (Vec::new(), Agent::new());
        let (files, absent) = (Vec::new(), Vec::new());
        let (profile, profiles, handed_on) = (None, Vec::new(), String::new());
        let mut config = Config {
            values,
            files,
            absent,
            skipped: None,
            pnet,
            agent,
            profile,
            profiles,
            handed_on,
        };
        config.read(Path::new(SYSTEM), Origin::System)?;
        if let Some(path) = user_file() {
            config.read(&path, Origin::User)?;
        }
        if let Some(path) = &args.config {
            match path.try_exists() {
                // About to be made.
                Ok(false) if args.makes_file => {}
                _ => config.read(path, Origin::Option)?,
            }
        }
        Ok(config)
    }

    /// Takes a file's values.
    fn read(&mut self, path: &Path, origin: Origin) -> Result<()> {
        let name = path.display().to_string();
        let text = match (fs::read_to_string(path).map_err(|e| (e.kind(), e)), origin) {
            (Ok(text), _) => text,
            (
                Err((ErrorKind::NotFound | ErrorKind::NotADirectory, _)),
                Origin::System | Origin::User,
            ) => {
                self.absent.push(path.to_owned());
                return Ok(());
            }
            // HOME may still be another user's, after su(1) or setpriv(1).
            (Err((ErrorKind::PermissionDenied, _)), Origin::User) => {
                self.skipped = Some(path.to_owned());
                return Ok(());
            }
            (Err((ErrorKind::InvalidData, _)), _) => bail!("{name} is not UTF-8; save it as UTF-8"),
            (Err((_, e)), _) => {
                let remedy = match origin {
                    Origin::Option => "name a readable file",
                    _ => "make it readable or remove it",
                };
                let fact = format!("cannot read the configuration {name}; {remedy}");
                return Err(e).context(fact);
            }
        };
        let said = file::parse(&name, &text)?;
        if let Some(pnet) = said.pnet {
            self.pnet = pnet;
        }
        if let Some(agent) = said.agent {
            self.agent = agent;
        }
        self.profiles.extend(said.profiles);
        for (key, text) in said.values {
            self.set(key, Value { text, source: name.clone() });
        }
        self.files.push(path.to_owned());
        Ok(())
    }

    /// Takes a value from the environment or an option.
    fn say(&mut self, key: &'static Key, text: OsString, source: &str) -> Result<()> {
        let text = text
            .into_string()
            .map_err(|raw| anyhow!("{source}: {raw:?} is not UTF-8; write it in UTF-8"))?;
        // An empty variable is an unset one, except that it takes a list's rules back.
        if text.is_empty() && !key.kind.is_list() && key.kind != Kind::Switch {
            return Ok(());
        }
        let text = seen_from(Path::new("."), key.kind, &text);
        let text = key.kind.normalise(&text).map_err(|problem| anyhow!("{source}: {problem}"))?;
        self.set(key, Value { text, source: source.to_owned() });
        Ok(())
    }

    fn set(&mut self, key: &'static Key, value: Value) {
        if let Some(at) = KEYS.iter().position(|k| k.name == key.name) {
            self.values[at] = Some(value);
        }
    }

    /// Every key with its value, if anybody said one.
    pub fn iter(&self) -> impl Iterator<Item = (&'static Key, Option<&Value>)> {
        KEYS.iter().zip(self.values.iter().map(Option::as_ref))
    }

    /// The flat text of the key called `name`; `None` where the default holds.
    pub fn text(&self, name: &str) -> Option<&str> {
        let (_, value) = self.iter().find(|(key, _)| key.name == name)?;
        value.map(|v| v.text.as_str()).filter(|text| !text.is_empty())
    }

    /// The user-defined enterprise IDs.
    pub fn ueids(&self) -> impl Iterator<Item = &str> {
        self.text("ueids").unwrap_or_default().split(',').filter(|eid| !eid.is_empty())
    }

    /// Whether uSMC is switched off altogether.
    pub fn is_off(&self) -> bool {
        self.text("off").is_some()
    }

    /// The ISM directory in effect for this user.
    pub fn ism_dir(&self) -> PathBuf {
        match self.text("ism_dir") {
            Some(dir) => dir.into(),
            None => format!("/dev/shm/usmc-{}", rustix::process::geteuid().as_raw()).into(),
        }
    }

    /// The environment for the library: what to set, and what to remove (`None`).
    pub fn environment(&self) -> impl Iterator<Item = (&'static str, Option<&str>)> {
        let keys = self.iter().map(|(key, value)| (key.env, value.map(|v| v.text.as_str())));
        let all = keys.chain([(profiles::HANDED, Some(&*self.handed_on))]);
        all.map(|(name, text)| (name, text.filter(|text| !text.is_empty())))
    }
}

/// The user's own file: `$XDG_CONFIG_HOME/usmc.toml`, else `~/.config/usmc.toml`.
pub fn user_file() -> Option<PathBuf> {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let dir = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")))?;
    Some(dir.join("usmc.toml"))
}
