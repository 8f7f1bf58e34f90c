//! `usmc pnet`, `usmc ueid` and `usmc seid`: what they write is what they show, and nothing else in the file changes.

mod support;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Output;

use serde_json::{Value, json};
use support::*;

/// A user's file with comments of all kinds.
const COMMENTED: &str = "# at the top\nring_size = \"64K\" # beside\n\n# of its own\n#busy_poll_us = 1\n\
                         exclude_ports = [\n  22, # ssh\n]\n";

struct Place {
    _dir: TempDir,
    file: String,
}

impl Place {
    fn new(content: Option<&str>) -> Place {
        let dir = TempDir::new();
        let file = dir.path().join("usmc.toml").to_str().expect("UTF-8").to_owned();
        if let Some(content) = content {
            fs::write(&file, content).expect("our own file");
        }
        Place { _dir: dir, file }
    }

    fn text(&self) -> String {
        fs::read_to_string(&self.file).expect("the file")
    }

    fn run(&self, args: &[&str]) -> Output {
        output(usmc(args).args(["--config", &self.file]))
    }

    /// Succeeds, and prints this.
    fn prints(&self, args: &[&str], text: &str) {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), text, "{args:?}");
    }

    /// Fails, says why, and changes nothing.
    fn refuses(&self, args: &[&str], why: &str) {
        let before = fs::read(&self.file).ok();
        let output = self.run(args);
        assert!(!output.status.success(), "{args:?}");
        assert!(stderr(&output).contains(why), "{args:?}: {}", stderr(&output));
        assert_eq!(fs::read(&self.file).ok(), before, "{args:?}");
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_slice(&self.run(args).stdout).expect("JSON")
    }
}

#[test]
fn the_pnet_table_has_smc_pnets_options_and_output() {
    let place = Place::new(None);
    place.prints(&["pnet"], "");
    place.prints(&["pnet", "-a", "net1", "-I", "eth0"], "");
    place.prints(&["pnet", "--add", "NET1", "--ibdevice", "mlx5_0"], "");
    place.prints(&["pnet", "-a", "NET2", "-I", "eth1", "-D", "mlx5_0", "-P", "2"], "");
    let all = "NET1 eth0 n/a 255\nNET1 n/a mlx5_0 1\nNET2 eth1 n/a 255\nNET2 n/a mlx5_0 2\n";
    place.prints(&["pnet"], all);
    place.prints(&["pnet", "-s", "net2"], "NET2 eth1 n/a 255\nNET2 n/a mlx5_0 2\n");
    assert_eq!(
        place.json(&["pnet", "NET2", "--json"]),
        json!([{ "pnetid": "NET2", "interface": "eth1", "ibdevice": "mlx5_0", "ibport": 2 }])
    );
    for (args, why) in [
        (&["pnet", "-a", "NET3"][..], "interface or device missing"),
        (&["pnet", "-a", "NET3", "-I", "eth1"], "eth1 has a pnet id already, NET2"),
        (&["pnet", "-a", "NET3", "-D", "mlx5_0"], "mlx5_0 port 1 has a pnet id already, NET1"),
        (&["pnet", "-a", "NET3", "-D", "rxe0", "-P", "3"], "3 is no port of an RDMA device"),
        (&["pnet", "-a", "NET_3", "-I", "eth2"], "is no pnet id"),
        (&["pnet", "-a", "ABCDEFGHIJKLMNOPQ", "-I", "eth2"], "is no pnet id"),
        (&["pnet", "-a", "NET3", "-I", "a/b"], "is no name of a network device"),
        (&["pnet", "-d", "NET3"], "has no pnet id NET3"),
        (&["pnet", "-s", "NET3"], "there is no pnet id NET3"),
        (&["pnet", "-a"], "PNETID"),
        (&["pnet", "-d", "-f"], "cannot be used with"),
    ] {
        place.refuses(args, why);
    }
    place.prints(&["pnet", "-d", "NET1"], "");
    place.prints(&["pnet"], "NET2 eth1 n/a 255\nNET2 n/a mlx5_0 2\n");
    place.prints(&["pnet", "--flush"], "");
    place.prints(&["pnet"], "");
    assert_eq!(place.text(), "");
}

#[test]
fn ueids_are_checked_as_the_kernel_does_and_at_most_four() {
    let place = Place::new(None);
    for ueid in ["A", "LOCATION-WEST.1", "0123456789ABCDEFGHIJKLMNOPQRSTUV", "B"] {
        place.prints(&["ueid", "add", ueid], "");
    }
    let all = "A\nLOCATION-WEST.1\n0123456789ABCDEFGHIJKLMNOPQRSTUV\nB\n";
    place.prints(&["ueid"], all);
    place.prints(&["ueid", "show"], all);
    assert_eq!(place.json(&["ueid", "--json"]).as_array().map(Vec::len), Some(4));
    for (ueid, why) in [
        ("C", "there are 4 UEIDs, which is the most"),
        ("A", "is defined already"),
        ("", "is not empty"),
        (".A", "does not begin with a letter or digit"),
        ("-A", "there is no option -A"),
        ("A..B", "two dots in a row"),
        ("A_B", "characters that no UEID has"),
        ("0123456789ABCDEFGHIJKLMNOPQRSTUVW", "has 33 characters"),
    ] {
        place.refuses(&["ueid", "add", ueid], why);
    }
    place.refuses(&["ueid", "del", "C"], "is not defined");
    place.prints(&["ueid", "del", "A"], "");
    place.prints(&["ueid", "flush"], "");
    place.prints(&["ueid"], "");
}

#[test]
fn the_seid_is_enabled_unless_a_ueid_is_there() {
    let place = Place::new(None);
    place.prints(&["seid"], "n/a [enabled]\n");
    place.refuses(&["seid", "disable"], "without a UEID the SEID stays enabled");
    place.prints(&["ueid", "add", "A"], "");
    place.prints(&["seid", "disable"], "");
    place.prints(&["seid", "show"], "n/a [disabled]\n");
    assert_eq!(place.json(&["seid", "--json"]), json!({ "seid": null, "enabled": false }));
    let deleted = place.run(&["ueid", "del", "A"]);
    assert!(stderr(&deleted).contains("the SEID is enabled again"), "{}", stderr(&deleted));
    place.prints(&["seid"], "n/a [enabled]\n");
}

#[test]
fn comments_order_mode_and_links_survive() {
    let place = Place::new(Some(COMMENTED));
    fs::set_permissions(&place.file, fs::Permissions::from_mode(0o640)).expect("chmod");
    let link = format!("{}.link", place.file);
    symlink(&place.file, &link).expect("a link");
    let change = |args: &[&str]| {
        let output = output(usmc(args).args(["--config", &link]));
        assert!(output.status.success(), "{}", stderr(&output));
    };
    change(&["ueid", "add", "A"]);
    change(&["pnet", "-a", "NET1", "-I", "eth0"]);
    change(&["seid", "disable"]);
    let text = place.text();
    assert!(text.starts_with(COMMENTED), "{text}");
    assert!(text[COMMENTED.len()..].contains("[[pnet]]\nid = \"NET1\"\ninterface = \"eth0\"\n"));
    let mode = fs::metadata(&place.file).expect("the file").permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    assert!(fs::symlink_metadata(&link).expect("the link").is_symlink());
    change(&["pnet", "-f"]);
    change(&["ueid", "flush"]);
    assert!(place.text().starts_with(COMMENTED));
    let dir = fs::read_dir(place._dir.path()).expect("the directory");
    assert_eq!(dir.count(), 2, "no temporary file is left");
}

#[test]
fn comments_inside_what_is_changed_stay_with_what_stays() {
    let before = "ueids = [\n  \"A\", # ours\n  \"B\", # theirs\n]\n\n# the first\n[[pnet]]\nid = \"N1\"\n\
                  interface = \"eth0\" # inside\n\n# the second\n[[pnet]]\nid = \"N2\"\ninterface = \"eth1\"\n";
    let place = Place::new(Some(before));
    place.prints(&["pnet", "-d", "N2"], "");
    place.prints(&["ueid", "add", "C"], "");
    let text = place.text();
    for kept in ["\"A\", # ours", "# theirs", "# the first\n[[pnet]]", "# inside"] {
        assert!(text.contains(kept), "{kept}: {text}");
    }
    assert!(!text.contains("N2"), "{text}");
    place.prints(&["ueid"], "A\nB\nC\n");
}

#[test]
fn a_file_that_would_be_refused_is_neither_changed_nor_written() {
    for (content, why) in [
        ("ring_size = 3\n", "is not a power of two"),
        ("[[pnet]]\nid = 'N1'\n", "usmc.toml:1: pnet: entry 1 names no device"),
        ("[[pnet]]\nid='N'\ninterface='e'\n[[pnet]]\nid='M'\ninterface='e'\n", "e is there twice"),
        ("pnet = 1\n", "is written as [[pnet]]"),
        ("ueids = ['A', 'A']\n", "A is there twice"),
        ("ueids = ['A', 'B', 'C', 'D', 'E']\n", "5 UEIDs are more than the 4"),
        ("seid = 'perhaps'\n", "is neither yes nor no"),
        ("not toml", ""),
    ] {
        let place = Place::new(Some(content));
        place.refuses(&["ueid", "add", "Z"], why);
        place.refuses(&["pnet", "-a", "Z", "-I", "z"], why);
    }
}

#[test]
fn small_letters_become_capital_ones_and_nothing_is_said_to_be_nothing() {
    let place = Place::new(None);
    for (args, said) in [(&["ueid"][..], "there is no UEID"), (&["pnet"], "there is no pnet id")] {
        let output = place.run(args);
        assert!(output.status.success() && stdout(&output).is_empty(), "{args:?}");
        assert!(stderr(&output).contains(said), "{args:?}: {}", stderr(&output));
        assert_eq!(stderr(&place.run(&[args, &["--json"]].concat())), "", "{args:?}");
    }
    place.prints(&["ueid", "add", "small.1"], "");
    place.prints(&["ueid"], "SMALL.1\n");
    place.refuses(&["ueid", "add", "Small.1"], "is defined already");
    place.prints(&["ueid", "del", "small.1"], "");
    place.prints(&["pnet", "-a", "net1", "-I", "eth0"], "");
    place.prints(&["pnet"], "NET1 eth0 n/a 255\n");
    assert_eq!(stderr(&place.run(&["pnet"])), "");
    // As somebody has written them.
    let place = Place::new(Some("ueids = ['a', 'B']\n"));
    place.prints(&["ueid"], "A\nB\n");
    place.prints(&["ueid", "add", "c"], "");
    place.prints(&["ueid"], "A\nB\nC\n");
    place.prints(&["ueid", "del", "a"], "");
    place.prints(&["ueid"], "B\nC\n");
}

/// Everybody's change is in the file, whoever else changes it at the same time.
#[test]
fn changes_at_once_lose_nothing() {
    let place = Place::new(Some(COMMENTED));
    std::thread::scope(|scope| {
        for i in 0..8 {
            let place = &place;
            scope.spawn(move || {
                let id = format!("NET{i}");
                place.prints(&["pnet", "-a", &id, "-I", &format!("eth{i}")], "");
            });
        }
    });
    let entries = place.json(&["pnet", "--json"]);
    assert_eq!(entries.as_array().map(Vec::len), Some(8), "{entries}");
    assert!(place.text().starts_with(COMMENTED));
}

#[test]
fn programs_get_the_ids_in_their_environment() {
    let place =
        Place::new(Some("ueids = ['A', 'B.1']\nseid = false\n[[pnet]]\nid='N'\ninterface='e'\n"));
    let dir = TempDir::new();
    let library = harmless_library(&dir);
    let mut command = usmc(&["run", "--config", &place.file, "--", "env"]);
    let output = output(command.env("USMC_LIBRARY", library));
    let text = stdout(&output);
    for line in ["USMC_UEIDS=A,B.1", "USMC_SEID=off"] {
        assert!(text.lines().any(|l| l == line), "{text}{}", stderr(&output));
    }
}
