//! `usmc check`: every obstacle is named with what to do about it, and a good machine passes.

mod support;

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::process::Command;

use support::*;

/// `usmc check` on a directory, with the real library.
fn check(ism_dir: &str) -> Command {
    let mut command = usmc(&["check", "--ism-dir", ism_dir]);
    command.env("USMC_LIBRARY", real_library());
    command
}

/// Runs it and returns its report; `healthy` is what it must find.
fn report(command: &mut Command, healthy: bool) -> String {
    let output = output(command);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(i32::from(!healthy)), "{text}{}", stderr(&output));
    let verdict = if healthy { "SMC-D works here" } else { "SMC-D does not work here" };
    assert!(text.lines().last().is_some_and(|line| line.starts_with(verdict)), "{text}");
    text
}

#[test]
fn a_good_directory_passes_with_a_live_connection() {
    let dir = TempDir::new();
    let text = report(&mut check(&format!("{}/ism", dir.str())), true);
    assert!(text.contains("does not exist yet"), "{text}");
    assert!(text.contains("moved their bytes through shared memory"), "{text}");
}

#[test]
fn bad_directories_fail_with_a_remedy() {
    let dir = TempDir::new();
    let at = |name: &str| format!("{}/{name}", dir.str());
    dir.file("file", b"");
    fs::create_dir(at("open")).expect("a directory");
    fs::set_permissions(at("open"), fs::Permissions::from_mode(0o777)).expect("chmod");
    symlink(dir.path(), at("link")).expect("a link");
    for (name, fact, remedy) in [
        ("file", "is not a directory", "choose another with --ism-dir"),
        ("file/below", "a part of the path", "choose another with --ism-dir"),
        ("open", "is writable for everybody (mode 0777)", "chmod o-w"),
        ("link", "is a symbolic link", "name its target instead"),
        ("absent/ism", "cannot be created", "mkdir -p"),
    ] {
        let text = report(&mut check(&at(name)), false);
        let failure = text.lines().skip_while(|line| !line.starts_with("  FAIL"));
        let failure: Vec<&str> = failure.take(2).collect();
        assert!(failure[0].contains(fact) && failure[1].contains(remedy), "{name}: {text}");
        assert!(!text.contains("Two processes"), "{name}: nothing is tried in a bad directory");
    }
}

#[test]
fn who_can_truncate_the_devices_file_is_named() {
    let dir = TempDir::new();
    let ism = format!("{}/ism", dir.str());
    let text = report(&mut check(&ism), true);
    assert!(!text.contains("SIGBUS"), "{text}");
    fs::set_permissions(&ism, fs::Permissions::from_mode(0o3770)).expect("chmod");
    let text = report(&mut check(&ism), true);
    assert!(text.contains("can end the programs that use it (SIGBUS)"), "{text}");
    let entries = fs::read_dir(&ism).expect("the directory").flatten();
    let device = entries.map(|e| e.path()).find(|p| p.to_string_lossy().ends_with(".device"));
    let device = device.expect("a device file");
    fs::set_permissions(&device, fs::Permissions::from_mode(0o666)).expect("chmod");
    let text = report(&mut check(&ism), false);
    assert!(text.contains(&format!("chmod o-w {}", device.display())), "{text}");
}

#[test]
fn what_other_versions_left_is_named_and_no_obstacle() {
    let dir = TempDir::new();
    let files = ["device", "m.17", "v2.device", "v2.m.0"];
    files.iter().chain(&["notes", "v2.txt", "m.x"]).for_each(|name| drop(dir.file(name, b"")));
    let text = report(&mut check(dir.str()), true);
    assert!(text.contains("&& rm device m.17 v2.device v2.m.0\n"), "{text}");
}

#[test]
fn another_users_directory_is_judged_by_what_we_may_do_there() {
    let dir = TempDir::new();
    let ism = format!("{}/ism", dir.str());
    fs::create_dir(&ism).expect("a directory");
    if rustix::process::geteuid().is_root() {
        chown(&ism, Some(65534), Some(65534)).expect("chown");
        let text = report(&mut check(&ism), true);
        assert!(text.contains("note  it belongs to user 65534, not to 0"), "{text}");
    } else {
        // Root's, and closed to us.
        let text = report(&mut check("/root"), false);
        assert!(text.contains("cannot use /root"), "{text}");
    }
}

#[test]
fn a_refused_configuration_is_a_failure_with_its_line() {
    let dir = TempDir::new();
    let file = dir.file("bad.toml", b"\nism-dir = '/x'\n");
    let text = report(&mut usmc(&["check", "--config", &file]), false);
    assert!(
        text.contains("bad.toml:2: there is no key \"ism-dir\"; did you mean ism_dir?"),
        "{text}"
    );
}

#[test]
fn effective_values_are_shown_with_their_source() {
    let dir = TempDir::new();
    let file = dir.file("good.toml", b"ring_size = '64K'\nexclude_ports = [22]\n");
    let mut command = check(&format!("{}/ism", dir.str()));
    command.args(["--config", &file]).env("USMC_EXCLUDE_PORTS", "23");
    let text = report(&mut command, true);
    assert!(text.contains(&format!("ring_size = 65536 ({file})")), "{text}");
    assert!(text.contains("exclude_ports = 23 (USMC_EXCLUDE_PORTS)"), "{text}");
}

#[test]
fn the_off_switch_is_a_failure() {
    let dir = TempDir::new();
    let mut command = check(&format!("{}/ism", dir.str()));
    let text = report(command.env("USMC_OFF", "1"), false);
    assert!(text.contains("FAIL  uSMC is switched off"), "{text}");
}

#[test]
fn a_missing_or_unloadable_library_is_a_failure() {
    let dir = TempDir::new();
    let ism = format!("{}/ism", dir.str());
    let text = report(check(&ism).env("USMC_LIBRARY", "/nonexistent.so"), false);
    assert!(text.contains("FAIL  USMC_LIBRARY: there is no file"), "{text}");
    let junk = dir.file("libusmc_preload.so", b"not a library");
    let text = report(check(&ism).env("USMC_LIBRARY", junk), false);
    assert!(text.contains("does not load"), "{text}");
    assert!(!text.contains("Two processes"), "{text}");
}

/// A program that does nothing but call `function`.
fn program(dir: &TempDir, name: &str, call: &str) -> String {
    let source =
        format!("#include <stdio.h>\nint main(int n, char **v) {{ (void)n; return !{call}; }}\n");
    let (source, program) =
        (dir.file("program.c", source.as_bytes()), format!("{}/{name}", dir.str()));
    let built = Command::new("cc").args(["-w", "-o", &program, &source]).status().expect("cc");
    assert!(built.success(), "{call}");
    program
}

#[test]
fn a_program_is_told_its_differences() {
    let dir = TempDir::new();
    let ism = format!("{}/ism", dir.str());
    let fetches = program(&dir, "fetches", "pidfd_getfd(n, n, n)");
    let brief = judged(check(&ism).arg(&fetches), "can leave TCP here.", 0);
    assert!(
        brief.starts_with(&format!("Program {fetches}\n  ok    the library gets into")),
        "{brief}"
    );
    assert!(brief.contains("rare difference") && !brief.contains("pidfd_getfd(2)"), "{brief}");
    assert!(!brief.contains("Linux") && !brief.contains("note  this looks"), "{brief}");
    let all = judged(check(&ism).args(["-v", &fetches]), "can leave TCP here.", 0);
    assert!(all.contains("ok    Linux"), "{all}");
    let text = judged(check(&ism).args(["--differences", &fetches]), "can leave TCP here.", 0);
    let note =
        text.lines().skip_while(|line| !line.starts_with("  note  pidfd_getfd(2) of another"));
    let note: Vec<&str> = note.take(2).collect();
    assert!(note.len() == 2 && note[1].contains("for it has pidfd_getfd"), "{text}");
    let prints = program(&dir, "prints", "puts(v[0])");
    let text = judged(check(&ism).arg(prints), "can leave TCP here.", 0);
    assert!(text.contains("no difference from TCP is known by what it calls"), "{text}");
    let script = dir.file("script", format!("#!{fetches}\n").as_bytes());
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("chmod");
    let text = judged(check(&ism).args(["-v", &script]), "can leave TCP here.", 0);
    assert!(text.contains("for it has pidfd_getfd"), "{text}");
    // What a wrapper becomes is looked at; what it finds out by itself is not.
    let wrapper = |name: &str, line: &str| {
        let path = dir.file(name, format!("#!/bin/sh\n{line}\n").as_bytes());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("chmod");
        path
    };
    let text = judged(
        check(&ism).arg(wrapper("wraps", &format!("exec {fetches}"))),
        "can leave TCP here.",
        0,
    );
    assert!(
        text.contains(&format!("is a script that becomes {fetches}"))
            && text.contains("rare difference"),
        "{text}"
    );
    let text = judged(check(&ism).arg(wrapper("finds", "exec \"$REAL\"")), "was not looked at.", 0);
    assert!(text.contains("note") && !text.contains("gets into"), "{text}");
}

/// Runs it and returns its report, whose last line ends so.
fn judged(command: &mut Command, verdict: &str, code: i32) -> String {
    let output = output(command);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(code), "{text}{}", stderr(&output));
    assert!(text.lines().last().is_some_and(|line| line.ends_with(verdict)), "{verdict}: {text}");
    text
}

#[test]
fn the_verdict_is_on_the_program_and_not_on_the_machine() {
    let dir = TempDir::new();
    let ism = format!("{}/ism", dir.str());
    let plain = dir.file("plain", b"text");
    for (name, fact) in [
        ("usmc-no-such-program", "there is no program usmc-no-such-program"),
        (plain.as_str(), "plain is not executable"),
        (dir.str(), "is a directory"),
    ] {
        let text =
            judged(check(&ism).arg(name), &format!("{name} stays TCP: see its failure above."), 1);
        assert!(
            text.contains(fact) && !text.contains("SMC-D does not work here"),
            "{name}: {text}"
        );
    }
    // Where the machine is in the way, that is said of it.
    let text = judged(check(&plain).arg("true"), "Programs run on TCP.", 1);
    assert!(
        text.contains("the library gets into") && text.contains("is not a directory"),
        "{text}"
    );
}

#[test]
fn a_program_that_rules_leave_alone_is_said_to_be_first() {
    let dir = TempDir::new();
    let ism = format!("{}/ism", dir.str());
    let program = program(&dir, "some-server", "puts(v[0])");
    let file = dir.file("c.toml", b"exclude_programs = ['some-*']\n");
    let text = judged(check(&ism).args(["--config", &file, &program]), "see its failure above.", 1);
    let first = format!("  FAIL  some-server is excluded by exclude_programs = some-* ({file})");
    assert_eq!(text.lines().nth(1), Some(&*first), "{text}");
    let text = judged(
        check(&ism).args(["--include-program", "other", &program]),
        "see its failure above.",
        1,
    );
    assert!(
        text.contains(
            "FAIL  some-server is not among include_programs = other (--include-program)"
        ),
        "{text}"
    );
    // Rules go by the name of the file.
    let link = format!("{}/link", dir.str());
    symlink(&program, &link).expect("a link");
    let text =
        judged(check(&ism).args(["--exclude-program", "link", &link]), "can leave TCP here.", 0);
    assert!(text.contains("names link, but the file is some-server"), "{text}");
}

#[test]
fn programs_and_scripts_can_read_the_report() {
    let dir = TempDir::new();
    let ism = format!("{}/ism", dir.str());
    let good = output(check(&ism).args(["--json", "true"]));
    assert!(good.status.success(), "{}", stderr(&good));
    let json: serde_json::Value = serde_json::from_slice(&good.stdout).expect("JSON");
    assert_eq!(
        (&json["works"], &json["verdict"][0]),
        (&true.into(), &"true can leave TCP here.".into())
    );
    let weights = json["sections"].as_array().expect("sections").iter().flat_map(|section| {
        section["findings"].as_array().expect("findings").iter().map(|finding| &finding["weight"])
    });
    assert!(weights.clone().count() > 5 && !weights.clone().any(|weight| weight == "fail"));
    let quiet = output(check(&ism).arg("-q"));
    assert_eq!((quiet.status.code(), &*stdout(&quiet)), (Some(0), ""), "{}", stderr(&quiet));
    let file = dir.file("file", b"");
    let quiet = output(check(&file).arg("-q"));
    let text = stdout(&quiet);
    assert!(
        quiet.status.code() == Some(1) && text.contains("FAIL") && !text.contains("ok  "),
        "{text}"
    );
    let failed = output(check(&file).arg("--json"));
    let json: serde_json::Value = serde_json::from_slice(&failed.stdout).expect("JSON");
    assert_eq!((failed.status.code(), &json["works"]), (Some(1), &false.into()));
}

/// A program under the library that waits, as it is seen from outside.
#[test]
fn a_process_is_looked_at() {
    let dir = TempDir::new();
    let ism = format!("{}/ism", dir.str());
    let mut under = usmc(&["run", "--ism-dir", &ism, "--", "cat"]);
    under.env("USMC_LIBRARY", real_library()).stdin(std::process::Stdio::piped());
    let mut under = under.stdout(std::process::Stdio::piped()).spawn().expect("cat");
    // It has begun once it copies.
    let line = b"x\n";
    std::io::Write::write_all(under.stdin.as_mut().expect("a pipe"), line).expect("room");
    let mut copied = [0; 2];
    std::io::Read::read_exact(under.stdout.as_mut().expect("a pipe"), &mut copied).expect("a copy");
    let pid = under.id().to_string();
    let text = judged(
        &mut usmc(&["check", "--pid", &pid]),
        &format!("Process {pid} (cat) can leave TCP."),
        0,
    );
    for fact in ["the library is in it: ", "its C library is ", "TCP socket so far"] {
        assert!(text.contains(fact), "{fact}: {text}");
    }
    drop(under.stdin.take());
    assert!(under.wait().expect("its end").success());
    let text = judged(&mut usmc(&["check", "--pid", &pid]), "stays TCP.", 1);
    assert!(text.contains("is not there"), "{text}");
    let text =
        judged(&mut usmc(&["check", "--pid", &std::process::id().to_string()]), "stays TCP.", 1);
    assert!(text.contains("FAIL  the library is not in it"), "{text}");
}

#[test]
fn what_is_not_meant_for_it_is_no_option() {
    for args in [
        &["--off"][..],
        &["--once"],
        &["--pid", "1", "true"],
        &["--serve", "1", "--connect", "h:1"],
        &["--serve", "x"],
        &["--connect", "h"],
    ] {
        let refused = output(usmc(&["check"]).args(args));
        assert_eq!(refused.status.code(), Some(2), "{args:?}: {}", stdout(&refused));
    }
}

#[test]
fn a_program_that_the_library_does_not_get_into_is_a_failure() {
    let dir = TempDir::new();
    let ism = format!("{}/ism", dir.str());
    let text = judged(check(&ism).arg("/nonexistent/program"), "see its failure above.", 1);
    assert!(text.contains("FAIL  there is no program /nonexistent/program"), "{text}");
    let file = dir.file("static.c", b"int main(void) { return 0; }\n");
    let program = format!("{}/static", dir.str());
    let built = Command::new("cc").args(["-static", "-o", &program, &file]).status().expect("cc");
    assert!(built.success());
    let text = judged(check(&ism).arg(&program), "see its failure above.", 1);
    assert!(
        text.contains(&format!("FAIL  {program} runs on TCP: it is statically linked")),
        "{text}"
    );
}

#[test]
fn every_code_of_a_decline_is_explained() {
    let output = output(&mut usmc(&["check", "--declines"]));
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for known in smc_proto::decline::ALL {
        let line = format!("{:08x} {:<12} {}\n", known.code.0, known.name, known.text);
        assert!(text.contains(&line), "{line} in {text}");
    }
    assert!(text.contains("-> let both ends share one ISM directory"), "{text}");
    // Nothing else is done with it.
    assert!(!usmc(&["check", "--declines", "true"]).output().expect("run").status.success());
}

#[test]
fn every_reason_is_listed_with_what_can_be_done() {
    let output = output(&mut usmc(&["check", "--reasons"]));
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for reason in (1..=u8::MAX).filter_map(usmc::reason::Reason::from_code) {
        assert!(text.lines().any(|line| line == reason.text()), "{reason:?} in {text}");
    }
    assert!(text.contains("region full\n    -> see whose its units are"), "{text}");
    assert!(!usmc(&["check", "--reasons", "true"]).output().expect("run").status.success());
}

#[test]
fn the_differences_are_those_of_the_document() {
    let output = output(&mut usmc(&["check", "--differences"]));
    assert!(output.status.success(), "{}", stderr(&output));
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/differences.md");
    let document = fs::read_to_string(document).expect("the document");
    let rows: Vec<&str> = document.lines().filter(|line| line.starts_with('|')).skip(2).collect();
    let text = stdout(&output);
    let told: Vec<&str> = text.split_terminator("\n\n").collect();
    assert_eq!(told.len(), rows.len());
    for (told, row) in told.iter().zip(rows) {
        let cells: Vec<String> = row.split('|').map(|cell| cell.trim().replace('`', "")).collect();
        let why = if cells[3].is_empty() {
            String::new()
        } else {
            format!("\n    because: {}", cells[3])
        };
        assert_eq!(*told, format!("{}\n    {}{why}", cells[1], cells[2]));
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_missing_32_bit_library_is_worth_a_note_and_one_that_is_there_loads() {
    let dir = TempDir::new();
    let ism = format!("{}/ism", dir.str());
    let text = report(&mut check(&ism), true);
    assert_eq!(text.contains("note  32-bit programs stay TCP"), has_narrow_linker(), "{text}");
    if !has_narrow_linker() {
        return;
    }
    // A 32-bit C library in place of ours: it loads likewise.
    let narrow = fs::canonicalize("/lib/ld-linux.so.2").expect("a dynamic linker");
    let wide = fs::canonicalize("/lib64/ld-linux-x86-64.so.2").expect("a dynamic linker");
    let libc = narrow.with_file_name("libc.so.6");
    for (linker, library) in [(&narrow, libc), (&wide, real_library())] {
        let lib = linker.parent().expect("a directory");
        let lib = lib.strip_prefix("/usr").or_else(|_| lib.strip_prefix("/")).expect("a prefix");
        let place = dir.path().join(lib);
        fs::create_dir_all(&place).expect("a directory");
        symlink(library, place.join("libusmc_preload.so")).expect("a link");
    }
    let preload = format!("{}/$LIB/libusmc_preload.so", dir.str());
    let text = report(check(&ism).env("USMC_LIBRARY", &preload), true);
    assert!(text.contains("loads into 32-bit programs"), "{text}");
    let mut run = usmc(&["run", "env"]);
    let output = output(run.env("USMC_LIBRARY", &preload));
    assert!(stdout(&output).contains(&format!("LD_PRELOAD={preload}\n")), "{}", stderr(&output));
    assert_eq!(stderr(&output), "");
}

#[cfg(target_arch = "x86_64")]
fn has_narrow_linker() -> bool {
    fs::exists("/lib/ld-linux.so.2").expect("looking for it")
}
