//! `usmc report`: a bundle of what is needed to look for a fault, and of nothing that is not.

use std::ffi::c_int;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

use crate::report::{bundle, items};

/// Collect what is needed to look for a fault
///
/// Writes a .tar.gz with what usmc's commands say, the configuration, and facts of the machine and of programs under uSMC. It holds no
/// bytes of connections, no arguments of commands, and no environment but USMC_*. As root it tells of the programs of all users.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Write to FILE, which is not there yet; - is standard output [default: usmc-report-TIME.tar.gz]
    #[arg(short, long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    output: Option<PathBuf>,
    /// Print what would be collected, and collect nothing
    #[arg(long, conflicts_with = "output")]
    list: bool,
}

/// Collects, or lists.
///
/// # Errors
/// The output cannot be written.
pub fn run(args: &Args) -> Result<c_int> {
    let items = items();
    if args.list {
        let mut out = BufWriter::new(io::stdout().lock());
        for item in &items {
            writeln!(out, "{}: {}", item.member, item.from).context("cannot write the list")?;
        }
        out.flush().context("cannot write the list")?;
        return Ok(0);
    }
    let path = args.output.clone().unwrap_or_else(default_name);
    if path.as_os_str() == "-" {
        let out = io::stdout();
        if out.is_terminal() {
            bail!("a terminal cannot show the bundle; name a file, or a pipe behind");
        }
        bundle::write(items, out.lock()).context("cannot write to standard output")?;
        return Ok(0);
    }
    let file = create(&path)?;
    let written = bundle::write(items, BufWriter::new(file));
    if written.is_err() {
        let _ = fs::remove_file(&path);
    }
    let failures = written.with_context(|| format!("cannot write {}", path.display()))?;
    println(&format!("{}", path.display()))?;
    if failures > 0 {
        eprintln!("usmc: {failures} parts could not be had; its README says which, and why");
    }
    Ok(0)
}

fn println(text: &str) -> Result<()> {
    writeln!(io::stdout(), "{text}").context("cannot write the file's name")
}

fn default_name() -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    format!("usmc-report-{now}.tar.gz").into()
}

/// A new file that its owner alone may read.
fn create(path: &std::path::Path) -> Result<File> {
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    made.with_context(|| format!("cannot make {}; name another file by -o", path.display()))
}
