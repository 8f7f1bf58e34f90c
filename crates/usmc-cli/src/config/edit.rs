//! Changing the configuration file: only what is to be changed, comments and order stay, and nobody ever reads half of
//! a file.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use rustix::fs::{FlockOperation, flock};
use toml_edit::DocumentMut;

use super::{ConfigArgs, file, sources};

/// A configuration file being changed. Who changes one keeps others waiting.
pub struct Edit {
    path: PathBuf,
    /// Empty where there is no file yet.
    pub document: DocumentMut,
    _lock: File,
}

/// Which file a command changes, in every command that does.
#[derive(clap::Args, Debug)]
pub struct Target {
    /// Change FILE; shown is what FILE says last
    #[arg(long, global = true, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    config: Option<PathBuf>,
}

impl Target {
    /// The configuration that it is a part of.
    pub fn config(&self) -> ConfigArgs {
        ConfigArgs { config: self.config.clone(), makes_file: true, ..ConfigArgs::default() }
    }
}

/// The file that is changed: what `--config` names, root's /etc/usmc.toml, or the user's own.
///
/// # Errors
/// When the user has no place for one.
pub fn target(args: &ConfigArgs) -> Result<PathBuf> {
    if let Some(path) = &args.config {
        return Ok(path.clone());
    }
    if rustix::process::geteuid().is_root() {
        return Ok(sources::SYSTEM.into());
    }
    sources::user_file().ok_or_else(|| anyhow!("HOME is not set; name a file by --config"))
}

impl Edit {
    /// Reads the file and checks it.
    ///
    /// # Errors
    /// When it cannot be read, or would be refused by `usmc run`.
    pub fn begin(path: &Path) -> Result<Edit> {
        // What a link means is changed, not the link.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let dir = parent(&path);
        let name = path.display();
        if !dir.exists() {
            fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        }
        let lock = File::open(dir).with_context(|| format!("cannot open {}", dir.display()))?;
        flock(&lock, FlockOperation::LockExclusive)
            .with_context(|| format!("cannot lock {}", dir.display()))?;
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e).context(format!("cannot read {name}")),
        };
        file::parse(&name.to_string(), &text)?;
        let document = text.parse().map_err(|e| anyhow!("{name}: {e}"))?;
        Ok(Edit { path, document, _lock: lock })
    }

    /// Replaces the file. What would be refused by `usmc run` is not written.
    ///
    /// # Errors
    /// When the new text is refused, or cannot be written.
    pub fn save(self) -> Result<()> {
        let name = self.path.display().to_string();
        let text = self.document.to_string();
        file::parse(&name, &text)?;
        let before = fs::metadata(&self.path).ok();
        let temporary = self.path.with_extension(format!("toml.{}", std::process::id()));
        let written = write(&temporary, &text, before.as_ref())
            .and_then(|()| fs::rename(&temporary, &self.path));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written.with_context(|| format!("cannot write {name}"))?;
        // The new name is kept, too, or the old file is.
        let dir = File::open(parent(&self.path)).and_then(|dir| dir.sync_all());
        dir.with_context(|| format!("cannot write {name}"))
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn write(path: &Path, text: &str, before: Option<&fs::Metadata>) -> std::io::Result<()> {
    let mode = before.map_or(0o644, |facts| facts.permissions().mode() & 0o7777);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    if let Some(facts) = before {
        // Where that is refused it becomes the writer's.
        let _ = fchown(&file, Some(facts.uid()), Some(facts.gid()));
    }
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// Says that a variable of the environment has the last word.
pub fn warn_of_environment(name: &str) {
    if env::var_os(name).is_some() {
        eprintln!("usmc: {name} in the environment overrides the file");
    }
}
