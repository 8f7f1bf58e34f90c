//! Projects of docker compose: the override that gives their services the library, and one ISM directory to all of them.

mod image;
mod project;

use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::config::profiles::Profile;
use crate::fit::Fit;
use crate::library;
use crate::steps::Steps;
use project::{Project, Service};

/// The override's name.
const FILE: &str = "compose.usmc.yaml";
/// Its first line.
const MARK: &str =
    "# Made by `usmc enable --compose`, which writes it anew; `usmc disable --compose` removes it.";
/// A group that the containers' users are given; it need not be in the images. Below what systemd gives to services.
const GROUP: u32 = 61_000;
/// Where a container has the library, and the ISM directory.
const LIBRARY: &str = "/usmc/libusmc_preload.so";
const ISM_DIR: &str = "/run/usmc";
/// Containers with the override have it.
const LABEL: &str = "usmc.enabled";
/// Tells the project's name, and the service's.
const PROJECT: &str = "com.docker.compose.project";
const SERVICE: &str = "com.docker.compose.service";
/// The files that it was started with.
const FILES: &str = "com.docker.compose.project.config_files";

/// Writes the override for these services beside those that have it, or for all of the project. `profile`: what is said where a service says
/// nothing.
///
/// # Errors
/// The project cannot be read, or no service of it fits; says what to do.
pub fn enable(
    at: &Path,
    services: &[String],
    profile: Option<&Profile>,
    is_dry: bool,
) -> Result<()> {
    let project = Project::find(at)?;
    let library = library::find()?.path;
    let path = project.dir().join(FILE);
    own(&path)?;
    let mut chosen = Vec::new();
    for mut service in project.chosen(&with_enabled(&path, &project, services)?)? {
        let (fit, preload) = image::look(service.image.as_deref());
        // An image's is as it is, and a service's as compose writes it.
        service.preload = service.preload.or(preload.map(|list| escaped(&list)));
        println!("{}: {fit}", service.name);
        if matches!(fit, Fit::Unserved(_)) {
            continue;
        }
        if service.user.is_none() {
            println!(
                "    no `user:`: if its entry point changes to another user, that loses the group, and the service stays TCP; \
                 give it `user:`"
            );
        }
        chosen.push(service);
    }
    ensure!(!chosen.is_empty(), "no service of {} can be served", project.files[0].display());
    Steps { is_dry }.write(&path, &text(&chosen, &library, profile))?;
    println!("it takes effect with: {}", up(&project, &path));
    Ok(())
}

/// These services behind those that the override has; all where none is named.
fn with_enabled(path: &Path, project: &Project, services: &[String]) -> Result<Vec<String>> {
    if services.is_empty() || !path.exists() {
        return Ok(services.to_vec());
    }
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let mut names = Vec::new();
    for enabled in project::services(&text).with_context(|| path.display().to_string())? {
        match project.has(&enabled.name) {
            true => names.push(enabled.name),
            false => println!("{}: the project has it no more", enabled.name),
        }
    }
    let others: Vec<String> =
        services.iter().filter(|name| !names.contains(name)).cloned().collect();
    Ok([names, others].concat())
}

/// Removes it.
///
/// # Errors
/// There is none, or it is somebody else's.
pub fn disable(at: &Path, steps: &Steps) -> Result<()> {
    let project = Project::find(at)?;
    let path = project.dir().join(FILE);
    ensure!(path.exists(), "{} is not there: nothing is enabled", path.display());
    own(&path)?;
    steps.remove(&path)?;
    println!("it takes effect with: {}", command(&project, None));
    Ok(())
}

/// Refuses what somebody else has written.
fn own(path: &Path) -> Result<()> {
    match fs::read_to_string(path) {
        Ok(text) if !text.starts_with(MARK) => {
            bail!("{} was not made by usmc; give it another name", path.display())
        }
        Err(error) if error.kind() != ErrorKind::NotFound => {
            bail!("cannot read {}: {error}", path.display())
        }
        _ => Ok(()),
    }
}

/// The override. Strings are JSON's, which are YAML's.
fn text(services: &[Service], library: &Path, profile: Option<&Profile>) -> String {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let literal = |text: &str| quoted(&escaped(text));
    let variables = profile.map(Profile::variables).unwrap_or_default();
    let mut text = format!("{MARK}\nservices:\n");
    for service in services {
        let own = service.preload.as_deref().and_then(|list| library::strip(list.as_ref()));
        let preload = library::prepend(Path::new(LIBRARY), own.as_deref());
        // An override's word counts more than the service's, and a profile's less.
        let is_said = |name: &str| name == "USMC_ISM_DIR" || service.sets(name);
        let unsaid = variables.iter().filter(|(name, _)| !is_said(name));
        let unsaid = unsaid.map(|(name, text)| format!("      {name}: {}\n", literal(text)));
        let _ = writeln!(
            text,
            "  {}:\n    environment:\n      LD_PRELOAD: {}\n      USMC_ISM_DIR: {}\n{}    group_add: [\"{GROUP}\"]\n    \
             labels: {{{LABEL}: \"true\"}}\n    volumes:\n    \
             - {{type: bind, source: {}, target: {}, read_only: true}}\n    \
             - {{type: volume, source: usmc-ism, target: {}}}",
            quoted(&service.name),
            quoted(&preload.to_string_lossy()),
            quoted(ISM_DIR),
            unsaid.collect::<String>(),
            literal(&library.to_string_lossy()),
            quoted(LIBRARY),
            quoted(ISM_DIR),
        );
    }
    let _ = writeln!(
        text,
        "volumes:\n  usmc-ism:\n    driver_opts: {{type: tmpfs, device: tmpfs, o: \"mode=3770,gid={GROUP},size=64m\"}}"
    );
    text
}

/// To compose, `$` begins a variable.
fn escaped(text: &str) -> String {
    text.replace('$', "$$")
}

fn up(project: &Project, path: &Path) -> String {
    command(project, Some(path))
}

fn command(project: &Project, path: Option<&Path>) -> String {
    let tool = project.tool.map_or("docker compose", project::Tool::name);
    let files = project.files.iter().map(PathBuf::as_path).chain(path);
    let files = files.map(|file| format!("-f {} ", shell(&file.to_string_lossy())));
    format!("{tool} {}up -d", files.collect::<String>())
}

/// A word for a shell.
pub fn shell(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:+=@,".contains(c);
    if word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// Words for a shell.
pub fn shell_words(words: &[impl AsRef<str>]) -> String {
    words.iter().map(|word| shell(word.as_ref())).collect::<Vec<_>>().join(" ")
}

/// What to call a project by whose containers were started with these files, and those files that this leaves out: its directory, where they
/// are what compose looks for there.
pub fn place(files: &[String]) -> (String, Vec<String>) {
    let files: Vec<&String> = files.iter().filter(|file| !file.ends_with(FILE)).collect();
    let Some((first, others)) = files.split_first() else { return (".".to_owned(), Vec::new()) };
    let dir = Path::new(first).parent().filter(|_| !others.is_empty());
    let is_all = |dir: &Path| {
        let found = project::files(dir).unwrap_or_default();
        found.iter().map(PathBuf::as_path).eq(files.iter().map(Path::new))
    };
    match dir.filter(|dir| is_all(dir)) {
        Some(dir) => (dir.to_string_lossy().into_owned(), Vec::new()),
        None => ((*first).clone(), others.iter().map(|file| (*file).clone()).collect()),
    }
}

/// A container of a project, as the daemon knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Container {
    /// Its id.
    pub id: String,
    /// Its first process.
    pub pid: u32,
    /// The project's name.
    pub project: String,
    /// The service's.
    pub service: String,
    /// The project's files, as they were named to compose.
    pub files: Vec<String>,
}

/// What `docker inspect` prints of a container.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Inspected {
    id: String,
    state: InspectedState,
    config: InspectedConfig,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct InspectedState {
    pid: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct InspectedConfig {
    #[serde(default)]
    labels: Option<std::collections::HashMap<String, String>>,
}

/// Running containers that have the library by an override; none where no docker answers.
pub fn running() -> Vec<Container> {
    let filter = format!("label={LABEL}");
    let ids = docker(&["ps", "--quiet", "--no-trunc", "--filter", &filter]).unwrap_or_default();
    let ids: Vec<&str> = ids.split_whitespace().collect();
    if ids.is_empty() { Vec::new() } else { inspect(&ids) }
}

/// Those of these containers that belong to a project of compose.
pub fn inspect(ids: &[&str]) -> Vec<Container> {
    let Some(text) = docker(&[&["inspect", "--type", "container"], ids].concat()) else {
        return Vec::new();
    };
    let found: Vec<Inspected> = serde_json::from_str(&text).unwrap_or_default();
    let clean = |text: &String| text.chars().filter(|c| !c.is_control()).collect::<String>();
    let container = |one: Inspected| {
        let labels = one.config.labels?;
        let files = labels.get(FILES).map(clean).unwrap_or_default();
        Some(Container {
            id: one.id,
            pid: one.state.pid,
            project: labels.get(PROJECT).map(clean)?,
            service: labels.get(SERVICE).map(clean)?,
            files: files.split(',').filter(|file| !file.is_empty()).map(str::to_owned).collect(),
        })
    };
    found.into_iter().filter_map(container).collect()
}

/// What docker's client prints; `None` where there is none, or no daemon.
fn docker(args: &[&str]) -> Option<String> {
    let done = Command::new("docker").args(args).output().ok()?;
    done.status.success().then(|| String::from_utf8_lossy(&done.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::profiles;

    #[test]
    fn the_override_says_what_a_service_gets() {
        let plain = Service { name: "api".to_owned(), ..Service::default() };
        let preloading = Service {
            name: "cache \"x\"".to_owned(),
            preload: Some("/lib/$$LIB/libjemalloc.so.2".to_owned()),
            ..Service::default()
        };
        let library = Path::new("/usr/lib/us$mc/libusmc_preload.so");
        let text = text(&[plain, preloading], library, None);
        let read = project::services(&text).expect("YAML");
        assert_eq!(read.len(), 2);
        assert_eq!(read[0].preload.as_deref(), Some("/usmc/libusmc_preload.so"));
        assert_eq!(read[1].name, "cache \"x\"");
        assert_eq!(
            read[1].preload.as_deref(),
            Some("/usmc/libusmc_preload.so:/lib/$$LIB/libjemalloc.so.2")
        );
        assert!(text.contains("source: \"/usr/lib/us$$mc/libusmc_preload.so\""), "{text}");
        // Written for it, it is the same again.
        let again = super::text(&read, library, None);
        assert_eq!(again, text);
    }

    #[test]
    fn services_that_are_enabled_stay_so() {
        let dir = std::env::temp_dir().join(format!("usmc-compose-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let services = "services: {api: {image: a}, db: {image: b}, cache: {image: c}}";
        fs::write(dir.join("compose.yaml"), services).unwrap();
        let project = Project::find(&dir).unwrap();
        let path = dir.join(FILE);
        let named = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            with_enabled(&path, &project, &names).unwrap()
        };
        assert_eq!(named(&["api", "db"]), ["api", "db"], "there is no override");
        let before = project.chosen(&["db".to_owned(), "api".to_owned()]).unwrap();
        let gone = Service { name: "gone".to_owned(), ..Service::default() };
        fs::write(&path, text(&[before, vec![gone]].concat(), Path::new("/l"), None)).unwrap();
        assert_eq!(named(&["cache", "api"]), ["db", "api", "cache"]);
        assert!(named(&[]).is_empty(), "all of them");
        let [file, more] = ["compose.yaml", "compose.override.yaml"].map(|name| {
            let path = dir.join(name);
            fs::write(&path, services).unwrap();
            path.to_string_lossy().into_owned()
        });
        let ours = path.to_string_lossy().into_owned();
        let at = dir.to_string_lossy().into_owned();
        assert_eq!(place(&[file.clone(), more.clone(), ours]), (at, vec![]));
        assert_eq!(
            place(&[file.clone(), "/b.yaml".to_owned()]),
            (file.clone(), vec!["/b.yaml".to_owned()])
        );
        assert_eq!(place(std::slice::from_ref(&file)), (file, vec![]));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_profile_says_what_a_service_does_not() {
        let keys = [("busy_poll_us", "5"), ("ring_size", "65536"), ("ism_dir", "/a")];
        let profile = profiles::tests::made("mine", &keys);
        let plain = Service { name: "api".to_owned(), ..Service::default() };
        let own = Service { variables: vec!["USMC_RING_SIZE".to_owned()], ..plain.clone() };
        let text = |service: &Service| {
            super::text(std::slice::from_ref(service), Path::new("/l"), Some(&profile))
        };
        let said = |service: &Service| {
            let read = project::services(&text(service)).expect("YAML");
            read.into_iter().flat_map(|service| service.variables).collect::<Vec<_>>()
        };
        let ours = ["USMC_ISM_DIR", "USMC_PROFILE", "USMC_BUSY_POLL_US"];
        assert_eq!(said(&own), ours);
        assert_eq!(said(&plain), [&ours[..], &["USMC_RING_SIZE"]].concat());
        assert!(text(&plain).contains("USMC_PROFILE: \"mine\"\n"), "{}", text(&plain));
    }

    #[test]
    fn words_of_a_command_are_quoted() {
        assert_eq!(shell("/a/b-c.yaml"), "/a/b-c.yaml");
        assert_eq!(shell("a b's"), "'a b'\\''s'");
    }
}
