//! The bundle: a compressed tape archive, with a README that says what is in it.

use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};

use super::Item;

/// The directory that all is in.
const TOP: &str = "usmc-report";

/// What the bundle says about itself.
const README: &str = "\
This is what `usmc report` has collected, to be sent to those who look for a fault.

It holds, of uSMC: what its commands say about this machine, about sockets of programs under uSMC (their addresses, ports,
and numbers of bytes), and about their reasons for TCP; the configuration in effect, and versions.
Of the system: release, kernel, settings, limits, processors, mounts of ISM directories, and names in these.
Of each program under uSMC: its name, status, limits, cgroup, and which libraries it has loaded.

It does not hold: any byte that connections carry, arguments of commands, contents of memory, and variables of environments but those
that begin with USMC_.

Look through it before you send it: addresses, names of programs and of directories are yours.

";

/// Collects all of it, and writes it. Says how many files could not be made, which stand in the README.
///
/// # Errors
/// `out` cannot be written.
pub fn write(items: Vec<Item>, out: impl Write) -> io::Result<usize> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut archive = Builder::new(GzEncoder::new(out, Compression::default()));
    let mut readme =
        format!("{README}Made at {now} (UNIX time). Its files, and where they are from:\n\n");
    let mut failures = 0;
    for item in items {
        let content = match (item.content)() {
            Ok(text) => {
                readme.push_str(&format!("{}: {}\n", item.member, item.from));
                text
            }
            Err(problem) => {
                failures += 1;
                readme.push_str(&format!("{}: {}: FAILED: {problem}\n", item.member, item.from));
                format!("{problem}\n")
            }
        };
        append(&mut archive, &item.member, now, content.as_bytes())?;
    }
    append(&mut archive, "README", now, readme.as_bytes())?;
    archive.into_inner()?.finish()?.flush()?;
    Ok(failures)
}

fn append(out: &mut Builder<impl Write>, name: &str, now: u64, content: &[u8]) -> io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_size(content.len() as u64);
    header.set_mode(0o600);
    header.set_mtime(now);
    out.append_data(&mut header, format!("{TOP}/{name}"), content)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn all_is_in_it_and_failures_are_told() {
        let items = vec![
            Item::new("usmc/a.txt", "here", || Ok("content".to_owned())),
            Item::new("system/b.txt", "there", || Err("cannot read it: no".to_owned())),
        ];
        let mut bytes = Vec::new();
        assert_eq!(write(items, &mut bytes).expect("memory"), 1);
        let mut archive = tar::Archive::new(GzDecoder::new(&bytes[..]));
        let mut found = BTreeMap::new();
        for entry in archive.entries().expect("entries") {
            let mut entry = entry.expect("an entry");
            let name = entry.path().expect("a path").display().to_string();
            assert_eq!(entry.header().mode().expect("a mode"), 0o600, "{name}");
            let mut text = String::new();
            entry.read_to_string(&mut text).expect("text");
            found.insert(name, text);
        }
        assert_eq!(found["usmc-report/usmc/a.txt"], "content");
        assert_eq!(found["usmc-report/system/b.txt"], "cannot read it: no\n");
        let readme = &found["usmc-report/README"];
        assert!(readme.contains("usmc/a.txt: here\n"), "{readme}");
        assert!(readme.contains("system/b.txt: there: FAILED: cannot read it: no\n"), "{readme}");
    }
}
