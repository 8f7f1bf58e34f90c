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

/// A site of two pages, the first of which has all faults that a link can have.
const FAULTY: [(&str, &str); 2] = [
    (
        "index.html",
        "<h1 id=\"top\">.</h1><img src=\"no.svg\"><img src=\"data:,\"><a href=\"#top\">.</a><a href=\"#no\">.</a>\
         <a href=\"sub/page.html#here\">.</a><a href=\"sub/page.html#there\">.</a><a href=\"no.html\">.</a>\
         <a href=\"../outside.html\">.</a><a href=\"https://elsewhere.example/\">.</a>\
         <script src=\"https://elsewhere.example/script.js\"></script>",
    ),
    ("sub/page.html", "<h1 id=\"here\">.</h1><a href=\"../index.html\">.</a><a href=\"./\">.</a>"),
];

#[test]
fn a_link_of_the_site_that_leads_nowhere_is_found() {
    let dir = TempDir::new();
    let site = dir.path().join("site");
    fs::create_dir_all(site.join("sub")).expect("directories");
    fs::write(dir.path().join("outside.html"), "").expect("a file");
    for (name, text) in FAULTY {
        fs::write(site.join(name), text).expect("a page");
    }
    let check = man().join("../site/check");
    let checked = output(Command::new(check).arg(&site));
    assert_eq!(checked.status.code(), Some(1), "{}", stderr(&checked));
    let said = stdout(&checked);
    let faults: Vec<&str> =
        said.lines().filter(|line| !line.contains("is not in the site")).collect();
    let expected = [
        "index.html: no.svg: there is no such file",
        "index.html: #no: there is no such place in that page",
        "index.html: sub/page.html#there: there is no such place in that page",
        "index.html: no.html: there is no such file",
        "index.html: ../outside.html: it leads out of the site",
        "index.html: https://elsewhere.example/script.js: it is loaded from elsewhere",
        "sub/page.html: ./: there is no such file",
    ];
    assert_eq!(faults, expected);
    for page in ["docs/security.html", "docs/man/usmc-run.1.html"] {
        assert!(said.contains(&format!("{page} is not in the site")), "{said}");
    }
}

#[test]
fn the_configurations_page_has_every_key_of_the_manual() {
    let page = fs::read_to_string(man().join("../configuration.md")).expect("the page");
    let manual = fs::read_to_string(man().join("usmc.toml.5")).expect("the manual");
    let keys = manual.lines().filter_map(|line| line.strip_prefix(".It Ic "));
    let keys: Vec<&str> = keys.filter_map(|line| line.split([' ', ',']).next()).collect();
    assert!(keys.len() > 20, "{keys:?}");
    for key in keys {
        assert!(
            ["", "[", "[["].iter().any(|open| page.contains(&format!("`{open}{key}"))),
            "{key}"
        );
    }
}

#[test]
fn what_the_security_page_was_checked_against_is_there() {
    let page = fs::read_to_string(man().join("../security.md")).expect("the page");
    let words = page.split('`').skip(1).step_by(2);
    let is_source = |word: &&str| {
        let named = [".rs", ".c", ".service", ".socket", ".conf", "/"]
            .iter()
            .any(|end| word.ends_with(end));
        named && word.contains('/') && !word.starts_with('/') && !word.contains(' ')
    };
    let sources: Vec<&str> = words.filter(is_source).collect();
    assert!(sources.len() > 20, "{sources:?}");
    let root = man().join("../..");
    for source in sources {
        let places = ["", "crates", "crates/usmc/src"].map(|place| root.join(place).join(source));
        assert!(places.iter().any(|place| place.exists()), "docs/security.md names {source}");
    }
}
