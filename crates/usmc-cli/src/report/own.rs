//! What this program's own commands say, and its configuration.

use std::env;
use std::fs;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Item, MOST};
use crate::config::{Config, ConfigArgs};
use crate::library;

/// How long a command may take.
const TIME: Duration = Duration::from_secs(30);

/// The commands, each with the name of its file.
const COMMANDS: [(&str, &[&str]); 9] = [
    ("usmc/check.txt", &["check"]),
    ("usmc/ss.json", &["ss", "--all", "--json"]),
    ("usmc/stats.json", &["stats", "--json"]),
    ("usmc/fallback-reasons.txt", &["stats", "--details", "--processes"]),
    ("usmc/device.json", &["device", "--json"]),
    ("usmc/linkgroup.json", &["linkgroup", "--json"]),
    ("usmc/links.json", &["linkgroup", "link-show", "--json"]),
    ("usmc/pnet.txt", &["pnet"]),
    ("usmc/ebpf.txt", &["ebpf", "status"]),
];

/// What is told of uSMC itself.
pub fn items() -> Vec<Item> {
    let command = |(member, args): (&'static str, &'static [&'static str])| {
        Item::new(member, format!("usmc {}", args.join(" ")), move || run(args))
    };
    let mut items: Vec<Item> = COMMANDS.into_iter().map(command).collect();
    items.push(Item::new("usmc/regions.txt", "usmc region show, of each region", regions));
    items.push(Item::new("usmc/configuration.txt", "values in effect", configuration));
    items.push(Item::new("usmc/environment.txt", "USMC_* of this command", || Ok(environment())));
    items.push(Item::new("usmc/versions.txt", "usmc, its library, the C library", versions));
    items
}

/// What a command of this program prints, with its errors behind.
///
/// # Errors
/// It cannot be started, or has not ended in time.
pub fn run(args: &[&str]) -> Result<String, String> {
    let exe = env::current_exe().map_err(|error| format!("cannot tell where usmc is: {error}"))?;
    let mut command = Command::new(exe);
    command.args(args);
    output(&mut command)
}

fn output(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.env_remove("LD_PRELOAD").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = command.spawn();
    let mut child = started.map_err(|error| format!("cannot start {name}: {error}"))?;
    let (out, errors) = (collect(child.stdout.take()), collect(child.stderr.take()));
    let status = wait(&mut child).ok_or_else(|| format!("{name} did not end in {TIME:?}"))?;
    let text = |collected: JoinHandle<Vec<u8>>| {
        String::from_utf8_lossy(&collected.join().unwrap_or_default()).into_owned()
    };
    let (mut text, errors) = (text(out), text(errors));
    if !errors.is_empty() {
        text.push_str(&format!("\n--- on standard error\n{errors}"));
    }
    if status != 0 {
        text.push_str(&format!("\n--- exit status {status}\n"));
    }
    Ok(text)
}

fn collect(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = (&mut pipe).take(MOST).read_to_end(&mut bytes);
            // The rest, so that the command ends.
            let _ = std::io::copy(&mut pipe, &mut std::io::sink());
        }
        bytes
    })
}

/// Its exit status; `None`: it was killed, as it takes too long.
fn wait(child: &mut Child) -> Option<i32> {
    let until = Instant::now() + TIME;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status.code().unwrap_or(-1)),
            Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(5)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    }
}

fn regions() -> Result<String, String> {
    let devices = run(&["device", "--json"])?;
    let devices: Value = serde_json::Deserializer::from_str(&devices)
        .into_iter()
        .next()
        .and_then(Result::ok)
        .ok_or("usmc device does not say which regions there are")?;
    let regions = devices["regions"].as_array().into_iter().flatten();
    let paths = regions.filter_map(|region| region["path"].as_str());
    let mut text = String::new();
    for path in paths {
        let shown = run(&["region", "show", path]).unwrap_or_else(|problem| problem);
        text.push_str(&format!("=== {path}\n{shown}\n"));
    }
    Ok(if text.is_empty() { "no region is used or configured\n".to_owned() } else { text })
}

fn configuration() -> Result<String, String> {
    let config = Config::load(&ConfigArgs::default()).map_err(|refusal| format!("{refusal:#}"))?;
    let mut text = String::new();
    for path in &config.files {
        text.push_str(&format!("read {}\n", path.display()));
    }
    if let Some(path) = &config.skipped {
        text.push_str(&format!("skipped {}: may not be read\n", path.display()));
    }
    if let Some(profile) = &config.profile {
        text.push_str(&format!("the profile is {} ({})\n", profile.name, profile.source));
    }
    for (key, value) in config.iter() {
        let instead = config.overridden(key).map(|text| format!("; the profile says {text:?}"));
        let instead = instead.unwrap_or_default();
        text.push_str(&match value {
            Some(value) => {
                format!("{} = {:?} ({}){instead}\n", key.name, value.text, value.source)
            }
            None => format!("{} is as by default\n", key.name),
        });
    }
    text.push_str(&format!("the ISM directory is {}\n", config.ism_dir().display()));
    Ok(text)
}

fn environment() -> String {
    let of_ours = env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("USMC_"));
    let mut lines: Vec<String> =
        of_ours.map(|(name, value)| format!("{}={}", name.display(), value.display())).collect();
    // What is handed on of a profile has several lines.
    lines.iter_mut().for_each(|line| *line = line.replace('\n', " ") + "\n");
    lines.sort();
    if lines.is_empty() { "none is set\n".to_owned() } else { lines.concat() }
}

fn versions() -> Result<String, String> {
    let mut text = format!(
        "usmc {}\nlayout of records {}, of devices {}\n",
        env!("CARGO_PKG_VERSION"),
        usmc::observe::VERSION,
        usmc::observe::DEVICE_VERSION
    );
    if let Ok(exe) = env::current_exe() {
        text.push_str(&facts("command", &exe));
    }
    match library::find() {
        Ok(library) => {
            text.push_str(&facts("library", &library.path));
            text.push_str(&format!("preloaded as {}\n", library.preload.display()));
            if let Ok(narrow) = &library.narrow {
                text.push_str(&facts("32-bit library", narrow));
            }
        }
        Err(problem) => text.push_str(&format!("no library: {problem:#}\n")),
    }
    let libc = output(Command::new("ldd").arg("--version")).unwrap_or_else(|problem| problem);
    // musl's says it on standard error.
    let named = libc.lines().find(|line| !line.is_empty() && !line.starts_with("---"));
    let version = libc.lines().find(|line| line.starts_with("Version"));
    let named = named.into_iter().chain(version).collect::<Vec<_>>().join(", ");
    text.push_str(&format!("C library: {named}\n"));
    Ok(text)
}

fn facts(what: &str, path: &std::path::Path) -> String {
    match fs::metadata(path) {
        Ok(facts) => {
            let changed = facts.modified().ok();
            let since = changed.and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
            let since = since.map_or(0, |since| since.as_secs());
            let bytes = facts.len();
            format!("{what} {}: {bytes} bytes, changed at {since} (UNIX time)\n", path.display())
        }
        Err(error) => format!("{what} {}: {error}\n", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_told_with_its_errors_and_its_status() {
        let told = output(Command::new("sh").args(["-c", "echo out; echo bad >&2; exit 3"]));
        assert_eq!(told.as_deref(), Ok("out\n\n--- on standard error\nbad\n\n--- exit status 3\n"));
        let told = output(&mut Command::new("/nonexistent/usmc")).expect_err("no such program");
        assert!(told.starts_with("cannot start /nonexistent/usmc"), "{told}");
    }

    #[test]
    fn versions_are_told() {
        let text = versions().expect("text");
        let first = format!("usmc {}\n", env!("CARGO_PKG_VERSION"));
        assert!(text.starts_with(&first) && text.contains("C library: "), "{text}");
    }
}
