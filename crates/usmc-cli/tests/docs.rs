//! The manual pages: complete, and without a fault that groff(1) knows.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::*;

fn man() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/man")
}

#[test]
fn every_option_is_in_the_manual() {
    for (command, page) in [
        (&["--help"][..], "usmc.1"),
        (&["run", "--help"], "usmc-run.1"),
        (&["ss", "--help"], "usmc-ss.1"),
        (&["check", "--help"], "usmc-check.1"),
        (&["ebpf", "load", "--help"], "usmc-ebpf.8"),
        (&["ebpf", "unload", "--help"], "usmc-ebpf.8"),
        (&["ebpf", "status", "--help"], "usmc-ebpf.8"),
        (&["dump", "--help"], "usmc-dump.1"),
        (&["stats", "--help"], "usmc-stats.1"),
        (&["exporter", "--help"], "usmc-exporter.8"),
        (&["report", "--help"], "usmc-report.1"),
        (&["top", "--help"], "usmc-top.1"),
        (&["device", "--help"], "usmc-device.1"),
        (&["linkgroup", "--help"], "usmc-device.1"),
        (&["pnet", "--help"], "usmc-pnet.1"),
        (&["region", "init", "--help"], "usmc-region.1"),
        (&["region", "show", "--help"], "usmc-region.1"),
        (&["region", "evict", "--help"], "usmc-region.1"),
        (&["ivshmem-server", "--help"], "usmc-ivshmem-server.8"),
        (&["ivshmem-server", "status", "--help"], "usmc-ivshmem-server.8"),
        (&["region", "setup", "--help"], "usmc-region.1"),
        (&["ueid", "--help"], "usmc-ueid.1"),
        (&["ueid", "show", "--help"], "usmc-ueid.1"),
        (&["seid", "--help"], "usmc-ueid.1"),
        (&["export", "--help"], "usmc-export.1"),
        (&["agent", "--help"], "usmc-agent.8"),
        (&["advise", "--help"], "usmc-advise.1"),
        (&["enable", "--help"], "usmc-enable.8"),
        (&["disable", "--help"], "usmc-enable.8"),
        (&["status", "--help"], "usmc-enable.8"),
        (&["nri", "--help"], "usmc-nri.8"),
        (&["bench", "--help"], "usmc-bench.1"),
    ] {
        let help = stdout(&output(&mut usmc(command)));
        let manual = fs::read_to_string(man().join(page)).expect(page);
        let lines = help.lines().map(str::trim).filter(|line| line.starts_with('-'));
        let words =
            lines.flat_map(|line| line.split(|c: char| !c.is_ascii_alphanumeric() && c != '-'));
        let options: Vec<&str> = words.filter(|w| w.len() > 2 && w.starts_with("--")).collect();
        assert!(options.contains(&"--help"), "{help}");
        for option in options {
            let macros = [format!("Fl {}", &option[1..]), format!(", {}", &option[1..])];
            assert!(macros.iter().any(|m| manual.contains(m)), "{option} in {page}");
        }
    }
}

#[test]
fn groff_has_nothing_to_say() {
    let mut pages = 0;
    for page in fs::read_dir(man()).expect("docs/man") {
        let path = page.expect("an entry").path();
        let groff =
            Command::new("groff").args(["-ww", "-mandoc", "-Tutf8", "-z"]).arg(&path).output();
        // Not installed everywhere; the pages are the same wherever it is.
        let Ok(groff) = groff else { return };
        assert!(groff.status.success() && groff.stderr.is_empty(), "{}", stderr(&groff));
        pages += 1;
    }
    assert!(pages > 15, "{pages} pages");
}

#[test]
fn every_shell_gets_its_completions() {
    for (shell, word) in
        [("bash", "complete -F"), ("zsh", "#compdef usmc"), ("fish", "complete -c usmc")]
    {
        let output = output(&mut usmc(&["completions", shell]));
        assert!(output.status.success());
        let script = stdout(&output);
        assert!(script.contains(word) && script.contains("ring-size"), "{shell}");
        assert!(
            !script.contains("probe") && !script.contains("bench-part"),
            "{shell} offers what is not for users"
        );
    }
}
