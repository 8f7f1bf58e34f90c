//! Whether the library gets into what an image starts: its entry point is copied out of a container that is never started.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use serde::Deserialize;

use crate::fit::{self, Fit};
use crate::program;

use super::docker;

/// What of an image's configuration matters.
#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct Config {
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    env: Option<Vec<String>>,
}

impl Config {
    /// A variable that its programs have.
    fn variable(&self, name: &str) -> Option<&str> {
        let value = |line: &'_ String| line.strip_prefix(name)?.strip_prefix('=').map(str::len);
        let line = self.env.iter().flatten().rev().find(|line| value(line).is_some())?;
        line.get(name.len() + 1..)
    }
}

/// Looks at an image that is on this machine; none is fetched. With what it preloads.
pub fn look(image: Option<&str>) -> (Fit, Option<String>) {
    let Some(image) = image else {
        return (Fit::Unknown("it is built; build it, and name it by `image:`"), None);
    };
    if Command::new("docker").arg("version").output().is_err() {
        return (Fit::Unknown("there is no docker here"), None);
    }
    let Some(text) = docker(&["image", "inspect", "--format", "{{json .Config}}", "--", image])
    else {
        let why = "it is not on this machine, or no daemon answers; pull it first";
        return (Fit::Unknown(why), None);
    };
    let config: Config = serde_json::from_str(&text).unwrap_or_default();
    (fit(image, &config), config.variable("LD_PRELOAD").map(str::to_owned))
}

fn fit(image: &str, config: &Config) -> Fit {
    let Some(id) = docker(&["create", "--entrypoint", "/usmc-looks-at-it", "--", image]) else {
        return Fit::Unknown("docker made no container of it");
    };
    let looked = Looked::new(id.trim()).map(|container| container.fit(config));
    looked.unwrap_or(Fit::Unknown("there is no room for a copy of its entry point"))
}

/// A container that is looked at, and a directory for what is copied out of it.
struct Looked<'a> {
    id: &'a str,
    dir: PathBuf,
}

impl<'a> Looked<'a> {
    fn new(id: &'a str) -> Option<Looked<'a>> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("usmc-image-{}-{number}", std::process::id()));
        let looked = Looked { id, dir };
        fs::DirBuilder::new().mode(0o700).create(&looked.dir).ok()?;
        Some(looked)
    }

    /// What the entry point is, and where that is a script, what it is given to start.
    fn fit(&self, config: &Config) -> Fit {
        let path = config.variable("PATH");
        let path = path.unwrap_or("/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        let command = config.cmd.as_ref().and_then(|words| words.first());
        let entry = config.entrypoint.as_ref().and_then(|words| words.first());
        let Some(first) = entry.or(command) else { return Fit::Unknown("it names no program") };
        let Some(file) = self.copy(first, path) else {
            return Fit::Unknown("its program cannot be copied");
        };
        match fit::interpreter(&file) {
            None => fit::of_file(&file),
            Some(shell) => {
                let shell = self
                    .copy(&shell, path)
                    .map_or(Fit::Unknown("its script's shell cannot be copied"), |f| {
                        fit::of_file(&f)
                    });
                let started = entry.and(command).and_then(|name| self.copy(name, path));
                let obstacle = started.and_then(|file| program::obstacle_of(&file));
                obstacle.map_or(shell, Fit::Unserved)
            }
        }
    }

    /// A program of the container's, by its name, as a file here.
    fn copy(&self, name: &str, path: &str) -> Option<PathBuf> {
        let places: Vec<String> = match name.contains('/') {
            true => vec![name.to_owned()],
            false => path.split(':').map(|dir| format!("{dir}/{name}")).collect(),
        };
        let to = self.dir.join("program");
        places.iter().find_map(|place| {
            let _ = fs::remove_file(&to);
            let from = format!("{}:{place}", self.id);
            docker(&["cp", "--follow-link", &from, &to.to_string_lossy()])?;
            let is_file = fs::symlink_metadata(&to).is_ok_and(|meta| meta.is_file());
            is_file.then(|| to.clone())
        })
    }
}

impl Drop for Looked<'_> {
    fn drop(&mut self) {
        // With the volumes that were made for it.
        let _ = docker(&["rm", "--force", "--volumes", self.id]);
        let _ = fs::remove_dir_all(&self.dir);
    }
}
