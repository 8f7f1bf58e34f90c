//! Where the files of units are.

use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::place::{self, Place};
use crate::steps::Steps;

use super::dropin::{self, Made};
use super::reader::Settings;
use super::{DROP_IN, manager};

/// Where an administrator's changes are.
const ETC: &str = "/etc/systemd/system";
/// Where units of the system are looked for, the first one before the others.
const PLACES: [&str; 5] = [
    ETC,
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];
/// Longest unit name (systemd.unit(5)).
const LONGEST: usize = 255;

/// A service, and what its files say without the drop-in of ours.
#[derive(Debug)]
pub struct Unit {
    /// Its own name, not an alias: `redis-server.service`.
    pub name: String,
    /// What it says.
    pub settings: Settings,
    /// Drop-ins that are read after ours, and their numbers in `settings`.
    pub later: Vec<(usize, PathBuf)>,
}

impl Unit {
    /// Finds a service.
    ///
    /// # Errors
    /// There is none of this name, or it cannot be changed; says what to do.
    pub fn find(name: &str) -> Result<Unit> {
        let name = full_name(name)?;
        let (name, files) = if manager::is_running() {
            told(&name)?
        } else {
            found(&name, &PLACES.map(PathBuf::from))?
        };
        let mut texts = Vec::new();
        let mut later = Vec::new();
        let is_ours = |path: &Path| path.file_name() == Some(OsStr::new(DROP_IN));
        for (at, path) in files.iter().filter(|path| !is_ours(path)).enumerate() {
            // In comments there may be any bytes.
            let text = fs::read(path).with_context(|| {
                format!(
                    "cannot read {}; run it as root, or `systemctl daemon-reload` before it",
                    path.display()
                )
            })?;
            texts.push(String::from_utf8_lossy(&text).into_owned());
            if at > 0 && path.file_name() > Some(OsStr::new(DROP_IN)) {
                later.push((at, path.clone()));
            }
        }
        let settings = Settings::of(texts.iter().map(|text| &**text));
        Ok(Unit { name, settings, later })
    }

    /// The drop-in of ours.
    pub fn drop_in(&self) -> PathBuf {
        drop_in(&self.name)
    }

    /// The drop-in of ours that is there.
    ///
    /// # Errors
    /// It is somebody else's, or cannot be read.
    pub fn made(&self) -> Result<Option<Made>> {
        let path = self.drop_in();
        let text = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            text => {
                text.with_context(|| format!("cannot read {}; run it as root", path.display()))?
            }
        };
        let made = dropin::made(&String::from_utf8_lossy(&text));
        ensure!(made.is_some(), "{} was not made by usmc; give it another name", path.display());
        Ok(made)
    }
}

/// Removes the drop-in of ours, and its directory, unless others are in that.
///
/// # Errors
/// As the system says.
pub fn remove_drop_in(steps: &Steps, unit: &str) -> Result<()> {
    let path = drop_in(unit);
    steps.remove(&path)?;
    let _ = path.parent().filter(|_| !steps.is_dry).map(fs::remove_dir);
    Ok(())
}

/// Whether a unit is a template, of which instances run, and not itself.
pub fn is_template(unit: &str) -> bool {
    unit.contains("@.")
}

/// Whether what a drop-in of `unit` says counts for this service: it is the unit, or its instance.
pub fn is_of(service: &str, unit: &str) -> bool {
    service == unit || template(service).as_deref() == Some(unit)
}

/// The services that run and are of a unit, by name.
pub fn running(unit: &str) -> Vec<String> {
    if !manager::is_running() {
        return Vec::new();
    }
    if !is_template(unit) {
        return [unit.to_owned()].into_iter().filter(|unit| manager::is_active(unit)).collect();
    }
    let mut services: Vec<String> = place::all()
        .into_keys()
        .filter_map(|place| match place {
            Place::Service(name) => Some(name),
            Place::Container(_) | Place::Elsewhere => None,
        })
        .filter(|service| is_of(service, unit))
        .collect();
    services.sort();
    services
}

/// What a value with specifiers (systemd.unit(5)) says in a unit of this name; `None`: that is known of its instances only, or not to us.
pub fn specified(value: &str, unit: &str) -> Option<String> {
    let stem = unit.strip_suffix(".service").unwrap_or(unit);
    let (prefix, instance) = stem.split_once('@').map_or((stem, None), |(p, i)| (p, Some(i)));
    let instance = if is_template(unit) { None } else { Some(instance.unwrap_or("")) };
    let mut text = String::new();
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        match chars.next()? {
            '%' => text.push('%'),
            'i' => text.push_str(instance?),
            'I' => text.push_str(&unescaped(instance?)),
            'n' => instance.map(|_| text.push_str(unit))?,
            'N' => instance.map(|_| text.push_str(stem))?,
            'p' => text.push_str(prefix),
            'P' => text.push_str(&unescaped(prefix)),
            'j' => text.push_str(prefix.rsplit('-').next()?),
            _ => return None,
        }
    }
    Some(text)
}

/// As systemd-escape(1) does: `-` is a slash, and `\xNN` a byte.
fn unescaped(name: &str) -> String {
    let mut parts = name.split("\\x");
    let mut text = parts.next().unwrap_or_default().replace('-', "/");
    for part in parts {
        let code = part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        text.push(code.map_or('\u{fffd}', char::from));
        text.push_str(&part.get(2..).unwrap_or_default().replace('-', "/"));
    }
    text
}

/// The drop-in of ours for a unit.
pub fn drop_in(unit: &str) -> PathBuf {
    Path::new(ETC).join(format!("{unit}.d")).join(DROP_IN)
}

/// A service that has a drop-in of ours.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Enabled {
    /// Its name.
    pub name: String,
    /// What the drop-in says of itself.
    pub made: Made,
}

impl Enabled {
    /// The one of that name, or alias, among these. It may have been uninstalled.
    ///
    /// # Errors
    /// It is none of them; says what to do.
    pub fn of(name: &str, known: &[Enabled]) -> Result<Enabled> {
        let full = full_name(name)?;
        let of_name = |name: &str| known.iter().find(|unit| unit.name == name);
        let by_alias = || of_name(&Unit::find(name).ok()?.name);
        of_name(&full).or_else(by_alias).cloned().with_context(|| {
            format!(
                "{full} is not enabled; `usmc enable {name}` does that, `usmc status` shows which services are"
            )
        })
    }
}

/// All of them, by name.
pub fn enabled() -> Vec<Enabled> {
    let dirs = fs::read_dir(ETC).into_iter().flatten().flatten();
    let names = dirs.filter_map(|dir| dir.file_name().into_string().ok());
    let names = names.filter_map(|name| name.strip_suffix(".d").map(str::to_owned));
    let mut all: Vec<Enabled> = names
        .filter_map(|name| {
            let made = dropin::made(&fs::read_to_string(drop_in(&name)).ok()?)?;
            Some(Enabled { name, made })
        })
        .collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// `redis-server` is `redis-server.service`.
///
/// # Errors
/// It can be the name of no service.
pub fn full_name(name: &str) -> Result<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c);
    ensure!(
        !name.is_empty()
            && name.chars().all(plain)
            && name.len() <= LONGEST
            && !name.starts_with('.'),
        "{name:?} is no name of a unit; `systemctl list-units --type=service` shows them"
    );
    let kinds = [
        "socket",
        "target",
        "timer",
        "mount",
        "path",
        "slice",
        "scope",
        "device",
        "swap",
        "automount",
    ];
    match name.rsplit_once('.') {
        Some((_, "service")) => Ok(name.to_owned()),
        Some((_, kind)) if kinds.contains(&kind) => {
            bail!("{name} is no service; name the service that it is for")
        }
        _ => Ok(format!("{name}.service")),
    }
}

/// The files of a unit that systemd knows.
fn told(name: &str) -> Result<(String, Vec<PathBuf>)> {
    if is_template(name) {
        // It is no unit, and systemctl does not show it.
        return found(name, &PLACES.map(PathBuf::from));
    }
    let shown = manager::show(name, &["Id", "LoadState", "FragmentPath", "DropInPaths"])?;
    let value = |key: &str| shown.get(key).map_or("", String::as_str);
    match value("LoadState") {
        "loaded" => {}
        "masked" => bail!("{}", masked(name)),
        "not-found" => bail!(
            "systemd has no unit {name}; `systemctl list-unit-files --type=service` shows them"
        ),
        state => bail!("systemd cannot load {name} ({state}); see `systemctl status {name}`"),
    }
    if value("FragmentPath").is_empty() {
        // It is as old as its process.
        return found(name, &PLACES.map(PathBuf::from));
    }
    let drop_ins = super::reader::words(value("DropInPaths"));
    let files = [value("FragmentPath").to_owned()].into_iter().chain(drop_ins);
    Ok((value("Id").to_owned(), files.map(PathBuf::from).collect()))
}

fn masked(name: &str) -> String {
    format!("{name} is masked; unmask it first: systemctl unmask {name}")
}

/// The files of a unit, as systemd would find them: the first of its name, through aliases, and its drop-ins in the order of
/// their names, of which each counts once.
fn found(name: &str, places: &[PathBuf]) -> Result<(String, Vec<PathBuf>)> {
    let names = [Some(name.to_owned()), template(name)];
    let file = names
        .iter()
        .flatten()
        .find_map(|name| places.iter().map(|place| place.join(name)).find(|path| path.exists()));
    let Some(file) = file else {
        bail!("there is no unit {name} here; `systemctl list-unit-files --type=service` shows them")
    };
    let real = file.canonicalize()?;
    let real_name = real.file_name().and_then(OsStr::to_str).unwrap_or(name);
    // An alias has a name of its own; an instance's file is its template.
    let name =
        if real_name.contains("@.") || !real_name.ends_with(".service") { name } else { real_name };
    ensure!(fs::metadata(&real).is_ok_and(|meta| meta.is_file()), "{}", masked(name));
    let mut drop_ins: Vec<PathBuf> = Vec::new();
    for dir in drop_in_dirs(name).iter().flat_map(|dir| places.iter().map(move |p| p.join(dir))) {
        for path in configurations(&dir) {
            if drop_ins.iter().all(|known| known.file_name() != path.file_name()) {
                drop_ins.push(path);
            }
        }
    }
    drop_ins.sort_by(|a, b| a.file_name().cmp(&b.file_name()));
    Ok((name.to_owned(), [real].into_iter().chain(drop_ins).collect()))
}

fn configurations(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "conf")).collect();
    files.sort();
    files
}

/// `a@b.service` is an instance of `a@.service`.
fn template(name: &str) -> Option<String> {
    let (start, rest) = name.split_once('@')?;
    let (instance, end) = rest.rsplit_once('.')?;
    (!instance.is_empty()).then(|| format!("{start}@.{end}"))
}

/// The directories of drop-ins, from the most special one: the unit's, its template's, those of its prefixes (`a-.service.d`
/// for `a-b.service`), and that of all services.
fn drop_in_dirs(name: &str) -> Vec<String> {
    let mut names = vec![name.to_owned()];
    names.extend(template(name));
    let stem =
        names.last().and_then(|name| name.strip_suffix(".service")).unwrap_or(name).to_owned();
    for (at, _) in stem.match_indices('-').collect::<Vec<_>>().into_iter().rev() {
        if at + 1 < stem.len() {
            names.push(format!("{}.service", &stem[..=at]));
        }
    }
    names.push("service".to_owned());
    names.into_iter().map(|name| format!("{name}.d")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_found_as_systemd_finds_it() {
        let root = std::env::temp_dir().join(format!("usmc-units-{}", std::process::id()));
        let (etc, lib) = (root.join("etc"), root.join("lib"));
        let write = |path: &Path, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(&lib.join("redis-server.service"), "[Service]\nUser=redis\n");
        write(&lib.join("redis-server.service.d/10-a.conf"), "");
        write(&lib.join("redis-server.service.d/90-b.conf"), "");
        write(&etc.join("redis-server.service.d/10-a.conf"), "[Service]\nUser=b\n");
        write(&etc.join("redis-.service.d/20-c.conf"), "");
        write(&etc.join("redis-.service.d/20-c.txt"), "");
        write(&lib.join("postgresql@.service"), "");
        write(&etc.join("postgresql@.service.d/a.conf"), "");
        std::os::unix::fs::symlink(lib.join("redis-server.service"), etc.join("redis.service"))
            .unwrap();
        std::os::unix::fs::symlink("/dev/null", etc.join("masked.service")).unwrap();
        let places = [etc.clone(), lib.clone()];
        let (name, files) = super::found("redis.service", &places).unwrap();
        assert_eq!(name, "redis-server.service");
        let expected = [
            lib.join("redis-server.service"),
            etc.join("redis-server.service.d/10-a.conf"),
            etc.join("redis-.service.d/20-c.conf"),
            lib.join("redis-server.service.d/90-b.conf"),
        ];
        assert_eq!(files, expected);
        let (name, files) = super::found("postgresql@15-main.service", &places).unwrap();
        assert_eq!(name, "postgresql@15-main.service");
        let expected = [lib.join("postgresql@.service"), etc.join("postgresql@.service.d/a.conf")];
        assert_eq!(files, expected);
        assert!(super::found("masked.service", &places).is_err());
        assert!(super::found("none.service", &places).is_err());
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn specifiers_are_the_names_parts() {
        for (value, unit, text) in [
            ("redis", "a.service", Some("redis")),
            ("%i", "of@redis.service", Some("redis")),
            ("%p-%i", "of@redis.service", Some("of-redis")),
            ("%I", r"of@a\x2db.service", Some("a-b")),
            ("%I", "of@a-b.service", Some("a/b")),
            ("%N", "a-b.service", Some("a-b")),
            ("%j%%", "a-b.service", Some("b%")),
            ("%i", "a.service", Some("")),
            ("%i", "of@.service", None),
            ("%H", "a.service", None),
            ("a%", "a.service", None),
        ] {
            assert_eq!(specified(value, unit).as_deref(), text, "{value} in {unit}");
        }
        assert!(is_of("of@a.service", "of@.service") && is_of("a.service", "a.service"));
        assert!(!is_of("of@a.service", "other@.service") && !is_of("of.service", "of@.service"));
    }

    #[test]
    fn names_are_those_of_services() {
        assert_eq!(full_name("redis-server").unwrap(), "redis-server.service");
        assert_eq!(full_name("a@1.2").unwrap(), "a@1.2.service");
        for bad in ["", "../x", "a/b", "a.socket", "a b", ".x"] {
            assert!(full_name(bad).is_err(), "{bad}");
        }
        assert_eq!(
            drop_in_dirs("a-b-c@d.service"),
            [
                "a-b-c@d.service.d",
                "a-b-c@.service.d",
                "a-b-.service.d",
                "a-.service.d",
                "service.d"
            ]
        );
    }
}
