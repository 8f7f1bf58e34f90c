//! A project's files, and its services: as docker compose resolves them where it is here, else as the files say.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use saphyr::{LoadableYamlNode, Yaml};

/// What compose looks for in a directory, the first before the others; then beside it.
const NAMES: [&str; 4] =
    ["compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml"];
const OVERRIDES: [&str; 4] = [
    "compose.override.yaml",
    "compose.override.yml",
    "docker-compose.override.yaml",
    "docker-compose.override.yml",
];

/// A compose that is installed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tool {
    /// docker's plugin.
    Plugin,
    /// The program of its own, version 1.
    Standalone,
}

impl Tool {
    fn find() -> Option<Tool> {
        let works =
            |tool: &Tool| tool.command().arg("version").output().is_ok_and(|o| o.status.success());
        [Tool::Plugin, Tool::Standalone].into_iter().find(works)
    }

    /// As it is called.
    pub fn name(self) -> &'static str {
        match self {
            Tool::Plugin => "docker compose",
            Tool::Standalone => "docker-compose",
        }
    }

    fn command(self) -> Command {
        let mut words = self.name().split(' ');
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        command
    }
}

/// A project.
#[derive(Debug)]
pub struct Project {
    /// Its files, absolute, in their order.
    pub files: Vec<PathBuf>,
    /// What starts it.
    pub tool: Option<Tool>,
    services: Vec<Service>,
}

/// One of its services.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Service {
    /// Its name.
    pub name: String,
    /// Its image, unless it is built.
    pub image: Option<String>,
    /// The user that it starts as, unless the image says.
    pub user: Option<String>,
    /// What it preloads itself, as compose writes it: `$$` stands for `$`.
    pub preload: Option<String>,
    /// Variables of ours that it sets itself.
    pub variables: Vec<String>,
}

impl Service {
    /// Whether it sets this variable, which is one of ours.
    pub fn sets(&self, name: &str) -> bool {
        self.variables.iter().any(|own| own == name)
    }
}

impl Project {
    /// The project of a file, or in a directory.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub fn find(at: &Path) -> Result<Project> {
        let files = files(at)?;
        let tool = Tool::find();
        let services = match tool {
            Some(tool) => resolved(tool, &files)?,
            None => of_files(&files)?,
        };
        ensure!(!services.is_empty(), "{} has no services", files[0].display());
        Ok(Project { files, tool, services })
    }

    /// Where its first file is.
    pub fn dir(&self) -> &Path {
        self.files[0].parent().unwrap_or(Path::new("/"))
    }

    /// Whether it has a service of that name.
    pub fn has(&self, name: &str) -> bool {
        self.services.iter().any(|service| service.name == name)
    }

    /// The services of these names; all where none is named.
    ///
    /// # Errors
    /// It has none of that name.
    pub fn chosen(&self, names: &[String]) -> Result<Vec<Service>> {
        if names.is_empty() {
            return Ok(self.services.clone());
        }
        let of_name = |name: &String| {
            let found = self.services.iter().find(|service| service.name == *name);
            found.cloned().with_context(|| {
                let all: Vec<&str> = self.services.iter().map(|service| &*service.name).collect();
                format!(
                    "{} has no service {name:?}, but {}",
                    self.files[0].display(),
                    all.join(" ")
                )
            })
        };
        names.iter().map(of_name).collect()
    }
}

/// The files of a project, by one of them or by its directory.
///
/// # Errors
/// There is none.
pub fn files(at: &Path) -> Result<Vec<PathBuf>> {
    let at = std::path::absolute(at)?;
    if !at.is_dir() {
        ensure!(
            at.is_file(),
            "there is no {}; name a file of compose, or its directory",
            at.display()
        );
        return Ok(vec![at]);
    }
    let first =
        |names: [&str; 4]| names.iter().map(|name| at.join(name)).find(|path| path.is_file());
    let Some(file) = first(NAMES) else { bail!("{} has no {}", at.display(), NAMES.join(", ")) };
    Ok([Some(file), first(OVERRIDES)].into_iter().flatten().collect())
}

/// As compose understands it: with variables, other files and profiles.
fn resolved(tool: Tool, files: &[PathBuf]) -> Result<Vec<Service>> {
    let mut command = tool.command();
    for file in files {
        command.arg("-f").arg(file);
    }
    let done = command.arg("config").output().with_context(|| tool.name())?;
    let problem = String::from_utf8_lossy(&done.stderr).trim().to_owned();
    ensure!(done.status.success(), "{} config: {problem}", tool.name());
    services(&String::from_utf8_lossy(&done.stdout))
}

/// As the files say; what a later one says of a service counts more.
fn of_files(files: &[PathBuf]) -> Result<Vec<Service>> {
    let mut merged: Vec<Service> = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
        for service in services(&text).with_context(|| file.display().to_string())? {
            match merged.iter_mut().find(|known| known.name == service.name) {
                Some(known) => {
                    known.image = service.image.or(known.image.take());
                    known.user = service.user.or(known.user.take());
                    known.preload = service.preload.or(known.preload.take());
                    known.variables.extend(service.variables);
                }
                None => merged.push(service),
            }
        }
    }
    Ok(merged)
}

/// The services in a text.
///
/// # Errors
/// It is no YAML.
pub fn services(text: &str) -> Result<Vec<Service>> {
    let documents = Yaml::load_from_str(text).map_err(|e| anyhow::anyhow!("not YAML: {e}"))?;
    let top = documents.first().and_then(|document| get(document, "services"));
    let entries = top.and_then(Yaml::as_mapping).into_iter().flatten();
    let service = |(name, body): (&Yaml<'_>, &Yaml<'_>)| {
        Some(Service {
            name: scalar(name)?,
            image: get(body, "image").and_then(scalar),
            user: get(body, "user").and_then(scalar),
            preload: get(body, "environment").and_then(preload),
            variables: get(body, "environment").map(variables).unwrap_or_default(),
        })
    };
    Ok(entries.filter_map(service).collect())
}

/// A value of a mapping, or of one that it merges (`<<`).
fn get<'y, 'i>(node: &'y Yaml<'i>, key: &str) -> Option<&'y Yaml<'i>> {
    let mapping = node.as_mapping()?;
    let of =
        |key: &str| mapping.iter().find(|(name, _)| name.as_str() == Some(key)).map(|(_, v)| v);
    of(key).or_else(|| match of("<<")? {
        Yaml::Sequence(all) => all.iter().find_map(|one| get(one, key)),
        one => get(one, key),
    })
}

fn scalar(node: &Yaml<'_>) -> Option<String> {
    let number = || node.as_integer().map(|number| number.to_string());
    node.as_str().map(str::to_owned).or_else(number)
}

/// LD_PRELOAD in an environment, which is a mapping, or a list of `NAME=value`.
fn preload(environment: &Yaml<'_>) -> Option<String> {
    if let Some(list) = environment.as_sequence() {
        let value = |item: &Yaml<'_>| item.as_str()?.strip_prefix("LD_PRELOAD=").map(str::to_owned);
        return list.iter().rev().find_map(value);
    }
    get(environment, "LD_PRELOAD").and_then(scalar)
}

/// The names of ours in an environment.
fn variables(environment: &Yaml<'_>) -> Vec<String> {
    let of_list = environment.as_sequence().into_iter().flatten().filter_map(Yaml::as_str);
    let of_list = of_list.map(|item| item.split_once('=').map_or(item, |(name, _)| name));
    let of_mapping = environment.as_mapping().into_iter().flatten();
    let of_mapping = of_mapping.filter_map(|(name, _)| name.as_str());
    let names = of_list.chain(of_mapping).filter(|name| name.starts_with("USMC_"));
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_read() {
        let text = r#"
x-base: &base
  image: base:1
  environment: {LD_PRELOAD: /a.so, B: "1"}
services:
  api:
    <<: *base
    user: 1000
  cache:
    image: "redis:7"
    environment:
      - A=1
      - LD_PRELOAD=/b.so
      - USMC_RING_SIZE=64K
      - USMC_LOG
  built:
    build: .
    user: "redis"
"#;
        let read = services(text).unwrap();
        let service =
            |name: &str, image: Option<&str>, user: Option<&str>, preload: Option<&str>| Service {
                name: name.to_owned(),
                image: image.map(str::to_owned),
                user: user.map(str::to_owned),
                preload: preload.map(str::to_owned),
                variables: Vec::new(),
            };
        let ours = ["USMC_RING_SIZE", "USMC_LOG"].map(str::to_owned).to_vec();
        let expected = [
            service("api", Some("base:1"), Some("1000"), Some("/a.so")),
            Service { variables: ours, ..service("cache", Some("redis:7"), None, Some("/b.so")) },
            service("built", None, Some("redis"), None),
        ];
        assert_eq!(read, expected);
        for odd in ["", "a: b", "services: []", "services: {a: b, c: }"] {
            assert!(services(odd).unwrap().iter().all(|s| s.image.is_none()), "{odd}");
        }
        assert!(services("services: {a: [").is_err());
        let json = r#"{"services": {"a": {"image": "b", "environment": {"LD_PRELOAD": "/c"}}}}"#;
        assert_eq!(services(json).unwrap(), [service("a", Some("b"), None, Some("/c"))]);
    }

    #[test]
    fn a_directory_has_a_project_by_its_names() {
        let dir = std::env::temp_dir().join(format!("usmc-project-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        assert!(files(&dir).is_err() && files(&dir.join("none.yaml")).is_err());
        let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).unwrap();
        write("docker-compose.yml", "services: {a: {image: x, user: me}}");
        write("docker-compose.override.yml", "services: {a: {image: y}, b: {image: z}}");
        let found = files(&dir).unwrap();
        assert_eq!(
            found,
            ["docker-compose.yml", "docker-compose.override.yml"].map(|n| dir.join(n))
        );
        let read = of_files(&found).unwrap();
        assert_eq!(read[0].image.as_deref(), Some("y"));
        assert_eq!(read[0].user.as_deref(), Some("me"));
        assert_eq!(read.len(), 2);
        let project = Project { files: found, tool: None, services: read };
        assert_eq!(project.chosen(&["b".to_owned()]).unwrap()[0].name, "b");
        assert!(project.chosen(&["c".to_owned()]).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
