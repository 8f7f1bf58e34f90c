//! The file in which sums outlive the exporter.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use usmc::provider;

use super::counts::Counts;
use super::ledger::Owner;
use super::rdma::Agents;

/// The layout.
const VERSION: u32 = 1;
/// Bytes of a file at most.
const MOST: u64 = 256 << 20;

/// A process that ran when the file was written.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Live {
    /// Its number.
    pub pid: u32,
    /// When it began, in ticks since the machine did.
    pub start: u64,
    /// Its record file.
    pub file: (u64, u64),
    /// Whose it is.
    pub owner: Owner,
    /// What was known of it, as of the last look at its file.
    pub counts: Counts,
    /// What its file did not say.
    pub extra: Counts,
}

/// All that is kept.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Kept {
    version: u32,
    /// Of the machine's start: numbers of processes mean nothing after another one.
    boot: String,
    /// Sums of processes that had ended.
    pub ended: Vec<(Owner, Counts)>,
    /// Those that had not.
    pub live: Vec<Live>,
    /// What agents have counted.
    pub agents: Agents,
}

/// The file, which no other exporter writes as long as this lives.
#[derive(Debug)]
pub struct State {
    path: PathBuf,
    boot: String,
    written: String,
    _lock: File,
}

impl State {
    /// Takes the file, and what is in it.
    ///
    /// # Errors
    /// It is another exporter's, or cannot be read or understood; says what to do.
    pub fn open(path: &Path) -> Result<(State, Kept)> {
        let lock = beside(path, ".lock");
        let mut options = OpenOptions::new();
        // The directory may be another user's.
        options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let open = options.open(&lock);
        let what = || format!("cannot make {}; make its directory writable", lock.display());
        let file = open.with_context(what)?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            bail!("{} is another exporter's; end that, or name another --state", path.display());
        }
        let boot = provider::boot_id().map(crate::regions::hex).unwrap_or_default();
        let kept = read(path, &boot)?;
        let state = State { path: path.to_owned(), boot, written: String::new(), _lock: file };
        Ok((state, kept))
    }

    /// Writes all of it, if it is not what was written last. After a loss of power either the old file or the new one is there.
    ///
    /// # Errors
    /// The directory cannot be written, or is full.
    pub fn write(&mut self, kept: Kept) -> Result<()> {
        let kept = Kept { version: VERSION, boot: self.boot.clone(), ..kept };
        let text = serde_json::to_string(&kept).context("cannot write sums as text")?;
        if text == self.written {
            return Ok(());
        }
        let new = beside(&self.path, ".new");
        let what = || format!("cannot write {}", new.display());
        // One that an exporter has left, which was killed; or a link of somebody else's to anywhere.
        let _ = fs::remove_file(&new);
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new);
        let mut file = made.with_context(what)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_data()).with_context(what)?;
        fs::rename(&new, &self.path).with_context(what)?;
        self.written = text;
        Ok(())
    }
}

fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    name.into()
}

fn read(path: &Path, boot: &str) -> Result<Kept> {
    let what = || format!("cannot read {}; move it away to begin anew", path.display());
    let mut text = String::new();
    match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Kept::default()),
        opened => {
            opened.and_then(|file| file.take(MOST).read_to_string(&mut text)).with_context(what)?
        }
    };
    let mut kept: Kept = serde_json::from_str(&text).with_context(what)?;
    if kept.version != VERSION {
        bail!(
            "{} has layout {}, and this usmc writes layout {VERSION}; move it away to begin anew",
            path.display(),
            kept.version
        );
    }
    if kept.boot != boot {
        for live in &mut kept.live {
            // No process has this number.
            live.pid = 0;
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::super::counts::{Counter, Device, Key};
    use super::*;

    fn kept() -> Kept {
        let owner = Owner { ism_dir: "/dev/shm/x".to_owned(), program: "p\"q".to_owned() };
        let key = Key {
            device: Device::Region([u64::MAX, 1]),
            is_client: true,
            ..Key::of(Counter::ChangedOver)
        };
        let counts = Counts::from(vec![(key, u64::MAX >> 1)]);
        let live = Live {
            pid: 7,
            start: 8,
            file: (9, 10),
            owner: owner.clone(),
            counts: counts.clone(),
            extra: Counts::default(),
        };
        Kept { ended: vec![(owner, counts)], live: vec![live], ..Kept::default() }
    }

    /// The file, once no child of another test has the lock: each has all descriptors between fork(2) and execve(2).
    fn open(path: &Path) -> Result<(State, Kept)> {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(5);
        loop {
            match State::open(path) {
                Err(refusal)
                    if refusal.to_string().contains("another exporter's")
                        && std::time::Instant::now() < until =>
                {
                    std::thread::yield_now();
                }
                opened => return opened,
            }
        }
    }

    #[test]
    fn sums_come_back() {
        let dir = std::env::temp_dir().join(format!("usmc-state-{}", std::process::id()));
        fs::create_dir(&dir).expect("a directory");
        let path = dir.join("exporter.json");
        let (mut state, empty) = open(&path).expect("a new file");
        assert_eq!(empty, Kept::default());
        assert!(State::open(&path).is_err(), "it has an exporter");
        state.write(kept()).expect("a file");
        drop(state);
        // Who may write to the directory has none of our files changed.
        let (other, new) = (dir.join("other"), dir.join("exporter.json.new"));
        fs::write(&other, "theirs").expect("a file");
        std::os::unix::fs::symlink(&other, &new).expect("a link");
        let (mut state, _) = open(&path).expect("the file");
        state.write(kept()).expect("a file");
        assert_eq!(fs::read_to_string(&other).expect("it"), "theirs");
        drop(state);
        let lock = dir.join("exporter.json.lock");
        fs::remove_file(&lock).expect("it");
        std::os::unix::fs::symlink(&other, &lock).expect("a link");
        assert!(State::open(&path).is_err(), "a link");
        fs::remove_file(&lock).expect("it");
        let (state, back) = open(&path).expect("the file");
        assert_eq!((&back.ended, &back.live), (&kept().ended, &kept().live));
        drop(state);
        // The machine began anew.
        let text = fs::read_to_string(&path).expect("the file");
        fs::write(&path, text.replace(&back.boot, "0")).expect("the file");
        let (state, back) = open(&path).expect("the file");
        assert_eq!((back.live[0].pid, back.ended.len()), (0, 1));
        drop(state);
        for nonsense in ["", "{}", &text.replace("\"version\":1", "\"version\":2")] {
            fs::write(&path, nonsense).expect("the file");
            let refusal = open(&path).expect_err(nonsense);
            assert!(format!("{refusal:#}").contains("move it away"), "{refusal:#}");
        }
        fs::remove_dir_all(&dir).expect("our own directory");
    }
}
