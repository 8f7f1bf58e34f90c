//! What is told of programs under uSMC: no command line, no payload, and of the environment what is ours.

use std::rc::Rc;

use serde_json::Value;

use super::{Item, bytes, own, read, system};
use crate::proc;

/// How the names of files begin whose mappings are told: the libraries of ours, of C, and dynamic linkers.
const LIBRARIES: [&str; 7] =
    ["libusmc_preload", "libc.so", "libc-", "libc.musl", "libpthread", "ld-linux", "ld-musl"];
/// Processes told at most.
const MOST: usize = 1000;

/// What is told of each process under uSMC.
pub fn items() -> Vec<Item> {
    let scan = match proc::scan() {
        Ok(scan) => scan,
        Err(problem) => {
            let problem = format!("{problem:#}");
            return vec![Item::new("processes/README", "/proc", move || Err(problem))];
        }
    };
    let (count, hidden) = (scan.processes.len(), scan.hidden);
    let told = format!(
        "{count} processes under uSMC have sockets, of which {} are told;\n\
         {hidden} processes of other users could not be inspected\n",
        count.min(MOST)
    );
    let mut items = vec![Item::new("processes/README", "/proc", move || Ok(told))];
    // Once for all of them, when the first is asked for.
    let sockets = Rc::new(std::cell::OnceCell::new());
    for process in scan.processes.iter().take(MOST) {
        let (pid, comm) = (process.pid, process.comm.clone());
        let dir = format!("processes/{pid}-{}", plain(&comm));
        let of = |name: &str| (format!("{dir}/{name}"), format!("/proc/{pid}/{name}"));
        items.push(Item::new(format!("{dir}/name"), of("comm").1, move || Ok(comm + "\n")));
        for name in ["status", "limits"] {
            let (member, path) = of(name);
            items.push(Item::file(member, path));
        }
        let (member, path) = of("maps");
        items.push(Item::new(member, format!("{path}: libraries"), move || {
            Ok(of_libraries(&read(path.as_ref())?))
        }));
        let (member, path) = of("cgroup");
        items.push(Item::new(member, format!("{path}, with limits"), move || {
            Ok(system::cgroup(&read(path.as_ref())?))
        }));
        let (member, path) = (format!("{dir}/environment"), format!("/proc/{pid}/environ"));
        items.push(Item::new(member, format!("{path}: USMC_* alone"), move || {
            Ok(ours(&bytes(path.as_ref())?))
        }));
        let sockets = sockets.clone();
        let from = format!("usmc ss --all --json, of process {pid}");
        items.push(Item::new(format!("{dir}/sockets.json"), from, move || {
            of_process(sockets.get_or_init(table), pid)
        }));
    }
    items
}

/// A name for a file.
fn plain(name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    name.chars().map(|c| if is_plain(c) { c } else { '_' }).collect()
}

/// Those lines of a process' maps that are of libraries which say what became of the preload.
fn of_libraries(maps: &str) -> String {
    let is_one = |line: &&str| {
        let name = line.rsplit('/').next().filter(|_| line.contains('/')).unwrap_or_default();
        LIBRARIES.iter().any(|start| name.starts_with(start))
    };
    maps.lines().filter(is_one).map(|line| format!("{line}\n")).collect()
}

/// Those variables of an environment that are ours.
fn ours(environ: &[u8]) -> String {
    let all = environ.split(|byte| *byte == 0);
    let of_ours = all.filter(|variable| variable.starts_with(b"USMC_"));
    let lines = of_ours.map(|variable| {
        let text = String::from_utf8_lossy(variable);
        text.chars().map(|c| if c.is_control() { '?' } else { c }).chain(['\n']).collect::<String>()
    });
    lines.collect()
}

fn table() -> Result<Vec<Value>, String> {
    let text = own::run(&["ss", "--all", "--json"])?;
    // What stands behind it is of standard error.
    let table = serde_json::Deserializer::from_str(&text).into_iter::<Vec<Value>>().next();
    table.and_then(Result::ok).ok_or_else(|| format!("usmc ss says: {text}"))
}

fn of_process(table: &Result<Vec<Value>, String>, pid: u32) -> Result<String, String> {
    let rows = table.as_ref().map_err(String::clone)?;
    let own: Vec<&Value> = rows.iter().filter(|row| row["pid"] == pid).collect();
    let text = serde_json::to_string_pretty(&own).map_err(|error| error.to_string())?;
    Ok(text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_libraries_are_told_of_maps() {
        let maps = "7f00-7f01 r-xp 0 00:1 7 /usr/lib/libusmc_preload.so\n\
                    7f02-7f03 r-xp 0 00:1 8 /usr/lib/x86_64-linux-gnu/libc.so.6\n\
                    7f04-7f05 rw-s 0 00:1 9 /home/alice/secret-libc.so\n\
                    7f06-7f07 rw-p 0 00:0 0 [heap]\n\
                    7f08-7f09 rw-s 0 00:1 3 /tmp/data\n";
        let told = of_libraries(maps);
        assert_eq!(told.lines().count(), 2, "{told}");
        assert!(!told.contains("secret") && !told.contains("data"), "{told}");
    }

    #[test]
    fn only_our_variables_are_told() {
        let environ = b"HOME=/root\0USMC_LOG=info\0PASSWORD=USMC_x\0USMC_A=b\nc\0";
        assert_eq!(ours(environ), "USMC_LOG=info\nUSMC_A=b?c\n");
        assert_eq!(ours(b""), "");
    }

    #[test]
    fn a_process_has_its_own_sockets_and_a_plain_name() {
        let rows = vec![serde_json::json!({"pid": 7, "fd": 3}), serde_json::json!({"pid": 8})];
        let told = of_process(&Ok(rows), 7).expect("text");
        assert!(told.contains("\"fd\": 3") && !told.contains('8'), "{told}");
        assert!(of_process(&Err("no".to_owned()), 7).is_err());
        assert_eq!(plain("../a b\n"), "___a_b_");
    }
}
