//! Where the files of units are.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};

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
            texts.push(fs::read_to_string(path).unwrap_or_default());
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
    let shown = manager::show(name, &["Id", "LoadState", "FragmentPath", "DropInPaths"])?;
    let value = |key: &str| shown.get(key).map_or("", String::as_str);
    let is_template = name.contains("@.");
    if value("LoadState") != "loaded" && !is_template {
        bail!(
            "systemd has no unit {name} ({}); `systemctl list-unit-files --type=service` shows them",
            value("LoadState")
        );
    }
    if is_template || value("FragmentPath").is_empty() {
        // A template is no unit, and one without a file is as old as its process.
        return found(name, &PLACES.map(PathBuf::from));
    }
    let drop_ins = super::reader::words(value("DropInPaths"));
    let files = [value("FragmentPath").to_owned()].into_iter().chain(drop_ins);
    Ok((value("Id").to_owned(), files.map(PathBuf::from).collect()))
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
    ensure!(
        fs::metadata(&real).is_ok_and(|meta| meta.is_file()),
        "{name} is masked; unmask it first"
    );
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
