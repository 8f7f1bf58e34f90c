//! Commands that change the system do it in steps: each is said, and `--dry-run` does none.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// Does each step, or says what it would do.
pub struct Steps {
    /// Nothing is changed.
    pub is_dry: bool,
}

impl Steps {
    /// One step, which `what` names as an order: "write FILE".
    ///
    /// # Errors
    /// What the step says, behind its name.
    pub fn step(&self, what: &str, act: impl FnOnce() -> Result<()>) -> Result<()> {
        if self.is_dry {
            println!("would {what}");
            return Ok(());
        }
        act().with_context(|| format!("cannot {what}"))?;
        println!("{what}: done");
        Ok(())
    }

    /// Makes `path` a file with this text, mode 0644. A file that says so already is left alone.
    ///
    /// # Errors
    /// As the system says; then the file is as it was.
    pub fn write(&self, path: &Path, text: &str) -> Result<()> {
        if fs::read(path).is_ok_and(|old| old == text.as_bytes()) {
            println!("{} is as it should be", path.display());
            return Ok(());
        }
        self.step(&format!("write {}", path.display()), || replace(path, text))?;
        if self.is_dry {
            text.lines().for_each(|line| println!("    {line}"));
        }
        Ok(())
    }

    /// Removes a file, if it is there.
    ///
    /// # Errors
    /// As the system says.
    pub fn remove(&self, path: &Path) -> Result<()> {
        if fs::symlink_metadata(path).is_err() {
            return Ok(());
        }
        self.step(&format!("remove {}", path.display()), || match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        })
    }

    /// Runs a program that changes something.
    ///
    /// # Errors
    /// When it is not there, or fails; with what it printed.
    pub fn run(&self, program: &str, args: &[&str]) -> Result<()> {
        self.step(&format!("run `{program} {}`", args.join(" ")), || call(program, args).map(drop))
    }
}

/// Runs a program, and returns what it printed.
///
/// # Errors
/// When it is not there, or fails; with what it printed to standard error.
pub fn call(program: &str, args: &[&str]) -> Result<String> {
    let done = match Command::new(program).args(args).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("there is no {program} here; install it")
        }
        done => done.with_context(|| program.to_owned())?,
    };
    let errors = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{program}: {} ({})", errors.trim(), done.status);
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Puts a complete file in the place of another, or of none. Its directory is made.
fn replace(path: &Path, text: &str) -> Result<()> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(dir)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // systemd reads no file whose name begins with a dot.
    let new = dir.join(format!(".{name}.{}", std::process::id()));
    let written = write_new(&new, text).and_then(|()| fs::rename(&new, path).map_err(Into::into));
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

fn write_new(path: &Path, text: &str) -> Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?;
    file.write_all(text.as_bytes())?;
    // Whatever the umask.
    file.set_permissions(Permissions::from_mode(0o644))?;
    file.sync_all().map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_or_not_at_all() {
        let dir = std::env::temp_dir().join(format!("usmc-steps-{}", std::process::id()));
        let file = dir.join("a.d/50-usmc.conf");
        Steps { is_dry: true }.write(&file, "one\n").unwrap();
        assert!(!dir.exists());
        let steps = Steps { is_dry: false };
        for text in ["one\n", "two\n"] {
            steps.write(&file, text).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
        }
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
        let in_the_way = dir.join("b");
        fs::create_dir_all(in_the_way.join("c")).unwrap();
        assert!(steps.write(&in_the_way, "text").is_err());
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 2, "nothing half-made is left");
        steps.remove(&file).unwrap();
        steps.remove(&file).unwrap();
        assert!(!file.exists());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_program_that_fails_is_an_error() {
        assert_eq!(call("echo", &["a"]).unwrap(), "a\n");
        assert!(call("false", &[]).is_err());
        assert!(call("/nonexistent/x", &[]).unwrap_err().to_string().contains("install"));
    }
}
