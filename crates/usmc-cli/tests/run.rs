//! `usmc run`: what the command inherits, what is refused, and with which exit status.

mod support;

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use support::*;

/// `usmc run ARGS` with a library that changes nothing.
fn run(dir: &TempDir, args: &[&str]) -> Command {
    let library = dir.path().join("libusmc_preload.so");
    if !library.exists() {
        harmless_library(dir);
    }
    let mut command = usmc(&["run"]);
    command.args(args).env("USMC_LIBRARY", library);
    command
}

/// The environment that a command gets.
fn environment(command: &mut Command) -> HashMap<String, String> {
    let output = output(command.args(["--", "env"]));
    assert!(output.status.success(), "{}", stderr(&output));
    let pairs = stdout(&output);
    pairs.lines().filter_map(|l| l.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect()
}

fn usmc_variables(environment: &HashMap<String, String>) -> Vec<String> {
    let ours = environment.iter().filter(|(k, _)| k.starts_with("USMC_") && *k != "USMC_LIBRARY");
    let mut ours: Vec<String> = ours.map(|(k, v)| format!("{k}={v}")).collect();
    ours.sort();
    ours
}

#[test]
fn without_configuration_only_the_library_is_added() {
    let dir = TempDir::new();
    let found = environment(&mut run(&dir, &[]));
    assert_eq!(found["LD_PRELOAD"], format!("{}/libusmc_preload.so", dir.str()));
    assert_eq!(usmc_variables(&found), [""; 0]);
}

#[test]
fn options_beat_the_environment_which_beats_files() {
    let dir = TempDir::new();
    let own = "ring_size = '64K'\nbusy_poll_us = 10\ninclude_ports = [1, '5-9']\nlog = 'warn'\n";
    dir.file("usmc.toml", own.as_bytes());
    let named = dir.file("named.toml", b"log = 'info'\nexclude_addrs = '10.1.2.3/8'\n");
    let mut command =
        run(&dir, &["--config", &named, "--include-port", "2", "--include-port", "3,4"]);
    command.env("XDG_CONFIG_HOME", dir.path()).env("USMC_BUSY_POLL_US", "20");
    assert_eq!(
        usmc_variables(&environment(&mut command)),
        [
            "USMC_BUSY_POLL_US=20",
            "USMC_EXCLUDE_ADDRS=10.0.0.0/8",
            "USMC_INCLUDE_PORTS=2,3,4",
            "USMC_LOG=info",
            "USMC_RING_SIZE=65536",
        ]
    );
}

#[test]
fn an_empty_or_false_value_takes_back_what_a_file_said() {
    let dir = TempDir::new();
    dir.file("usmc.toml", b"off = true\nexclude_programs = ['sshd']\nring_size = '32K'\n");
    let mut command = run(&dir, &[]);
    command.env("XDG_CONFIG_HOME", dir.path());
    command.env("USMC_OFF", "0").env("USMC_EXCLUDE_PROGRAMS", "").env("USMC_RING_SIZE", "");
    assert_eq!(usmc_variables(&environment(&mut command)), ["USMC_RING_SIZE=32768"]);
}

#[test]
fn every_option_reaches_its_variable() {
    let dir = TempDir::new();
    for (args, variable) in [
        (["--ism-dir", "/dev/shm/usmc-x/"], "USMC_ISM_DIR=/dev/shm/usmc-x"),
        (["--regions", "/dev/shm/a,/dev/dax0.0"], "USMC_REGIONS=/dev/shm/a,/dev/dax0.0"),
        (["--regions", "none"], "USMC_REGIONS=none"),
        (["--ring-size", "1M"], "USMC_RING_SIZE=1048576"),
        (["--busy-poll-us", "0"], "USMC_BUSY_POLL_US=0"),
        (["--log", "debug:/tmp/l"], "USMC_LOG=debug:/tmp/l"),
        (["--include-port", "80-81"], "USMC_INCLUDE_PORTS=80-81"),
        (["--exclude-port", "22"], "USMC_EXCLUDE_PORTS=22"),
        (["--include-addr", "::1"], "USMC_INCLUDE_ADDRS=::1/128"),
        (["--exclude-addr", "127.0.0.1"], "USMC_EXCLUDE_ADDRS=127.0.0.1/32"),
        (["--include-program", "redis-*"], "USMC_INCLUDE_PROGRAMS=redis-*"),
        (["--exclude-program", "sshd,ssh"], "USMC_EXCLUDE_PROGRAMS=sshd,ssh"),
    ] {
        assert_eq!(usmc_variables(&environment(&mut run(&dir, &args))), [variable]);
    }
    // Paths are seen from where the option is given.
    let mut command = run(&dir, &["--ism-dir", "ism", "--log", "info:log", "--regions", "a,/b"]);
    let found = environment(command.current_dir(dir.path()));
    assert_eq!(found["USMC_ISM_DIR"], format!("{}/ism", dir.str()));
    assert_eq!(found["USMC_LOG"], format!("info:{}/log", dir.str()));
    assert_eq!(found["USMC_REGIONS"], format!("{}/a,/b", dir.str()));
    // And so are those of variables; those of a file from the file.
    let mut command = run(&dir, &[]);
    command.env("USMC_ISM_DIR", "ism").env("USMC_LOG", "info:log").current_dir(dir.path());
    let said =
        [format!("USMC_ISM_DIR={}/ism", dir.str()), format!("USMC_LOG=info:{}/log", dir.str())];
    assert_eq!(usmc_variables(&environment(&mut command)), said);
    let file = dir.file("paths.toml", b"ism_dir = 'ism'\nlog = 'info:log'\n");
    let mut command = run(&dir, &["--config", &file]);
    assert_eq!(usmc_variables(&environment(command.current_dir("/"))), said);
}

#[test]
fn a_directory_that_cannot_be_used_is_said_once_and_the_command_runs() {
    let dir = TempDir::new();
    let absent = format!("{}/a/b", dir.str());
    let warned = output(&mut run(&dir, &["--ism-dir", &absent, "echo", "ran"]));
    assert!(warned.status.success() && stdout(&warned) == "ran\n", "{}", stderr(&warned));
    let said = stderr(&warned);
    assert!(
        said.lines().count() == 1 && said.contains(&absent) && said.contains("mkdir -p"),
        "{said}"
    );
    let ism = format!("{}/ism", dir.str());
    for args in [&["--ism-dir", &ism, "true"][..], &["--off", "--ism-dir", &absent, "true"]] {
        assert_eq!(stderr(&output(&mut run(&dir, args))), "", "{args:?}");
    }
}

#[test]
fn a_variable_that_is_mistyped_is_said() {
    let dir = TempDir::new();
    let ism = format!("{}/ism", dir.str());
    let mut command = run(&dir, &["--ism-dir", &ism, "true"]);
    command.env("USMC_RINGSIZE", "1M").env("USMC_SOMETHING_ELSE", "1");
    let warned = output(&mut command);
    assert!(warned.status.success());
    assert_eq!(
        stderr(&warned),
        "usmc: there is no variable USMC_RINGSIZE; did you mean USMC_RING_SIZE?\n"
    );
}

#[test]
fn what_is_mistyped_is_answered_with_what_was_meant() {
    for (args, said) in [
        (&["rnu", "true"][..], "there is no command rnu; did you mean usmc run?"),
        (&["ls"], "there is no command ls; did you mean usmc ss?"),
        (&["frobnicate"], "there is no command frobnicate; see `usmc --help`"),
        (&["ss", "--foo"], "there is no option --foo; see `usmc ss --help`"),
        (&["ss", "--jsno"], "there is no option --jsno; did you mean --json? see `usmc ss --help`"),
        (
            &["device", "--ring-size", "1"],
            "there is no option --ring-size; see `usmc device --help`",
        ),
    ] {
        let refused = output(&mut usmc(args));
        assert_eq!(refused.status.code(), Some(2), "{args:?}");
        assert_eq!(stderr(&refused), format!("usmc: {said}\n"), "{args:?}");
    }
    let help = stdout(&output(&mut usmc(&["--help"])));
    assert!(help.contains("completions"), "{help}");
}

#[test]
fn what_the_user_preloads_stays_and_nothing_is_added_twice() {
    let dir = TempDir::new();
    let ours = harmless_library(&dir);
    let other = TempDir::new();
    let theirs = harmless_library(&other).replace("libusmc_preload.so", "their.so");
    fs::rename(other.path().join("libusmc_preload.so"), &theirs).expect("a rename");
    let mut command = run(&dir, &[]);
    command.env("LD_PRELOAD", &theirs);
    assert_eq!(environment(&mut command)["LD_PRELOAD"], format!("{ours}:{theirs}"));
    let mut command = run(&dir, &["--", env!("CARGO_BIN_EXE_usmc"), "run"]);
    command.env("LD_PRELOAD", &theirs);
    assert_eq!(environment(&mut command)["LD_PRELOAD"], format!("{ours}:{theirs}"));
    let mut command = run(&dir, &["--", env!("CARGO_BIN_EXE_usmc"), "run", "--off"]);
    command.env("LD_PRELOAD", &theirs);
    let found = environment(&mut command);
    assert_eq!((&found["LD_PRELOAD"], &found["USMC_OFF"]), (&theirs, &"1".to_owned()));
}

#[test]
fn off_needs_no_library() {
    let mut command = usmc(&["run", "--off"]);
    command.env("USMC_LIBRARY", "/nonexistent");
    assert!(!environment(&mut command).contains_key("LD_PRELOAD"));
}

#[test]
fn the_exit_status_is_the_commands_own() {
    let dir = TempDir::new();
    let status = |script: &str| output(&mut run(&dir, &["sh", "-c", script])).status;
    assert_eq!(status("exit 7").code(), Some(7));
    assert_eq!(status("kill -9 $$").signal(), Some(9));
}

#[test]
fn commands_that_cannot_start_end_with_126_or_127() {
    let dir = TempDir::new();
    let plain = dir.file("plain", b"text");
    let orphan = dir.file("orphan", b"#!/nonexistent/interpreter\n");
    fs::set_permissions(&orphan, fs::Permissions::from_mode(0o755)).expect("chmod");
    for (name, code, advice) in [
        ("usmc-no-such-program", 127, "install it, or give its path"),
        ("/nonexistent/program", 127, "install it, or give its path"),
        (orphan.as_str(), 127, "the interpreter it names is missing"),
        (plain.as_str(), 126, "chmod +x"),
        (dir.str(), 126, "name a program in it"),
    ] {
        // A directory that may not be searched would make 126 of 127, as with env(1).
        let output = output(run(&dir, &["--", name]).env("PATH", "/usr/bin:/bin"));
        assert_eq!(output.status.code(), Some(code), "{name}");
        assert!(stderr(&output).contains(advice), "{name}: {}", stderr(&output));
    }
}

#[test]
fn what_usmc_refuses_ends_with_125_and_says_what_to_do() {
    let dir = TempDir::new();
    let bad = dir.file("bad.toml", b"# comment\nringsize = 1\n");
    let absent = format!("{}/absent.toml", dir.str());
    for (args, advice) in [
        (
            &["--ring-size", "300"][..],
            "--ring-size: 300 is not a power of two from 16K to 4M; write 16K",
        ),
        (&["--busy-poll-us", "-5"], "--busy-poll-us: \"-5\" is not a number"),
        (&["--log", "loud"], "--log: \"loud\" is not a level"),
        (&["--include-port", "http"], "--include-port: \"http\" is neither a port nor a range"),
        (&["--exclude-addr", "localhost"], "--exclude-addr: \"localhost\" is not an address"),
        (&["--include-program", "/bin/nc"], "write the file name alone: nc"),
        (&["--config", &bad], "bad.toml:2: there is no key \"ringsize\"; did you mean ring_size?"),
        (&["--config", &absent], "name a readable file"),
        (&["--config"], "a value is required"),
        (&["--bogus"], "there is no option --bogus; see `usmc run --help`"),
    ] {
        let output = output(run(&dir, args).arg("true"));
        let refused = args != ["--config"];
        assert_eq!(output.status.code(), Some(125), "{args:?}: {}", stderr(&output));
        assert!(!refused || stderr(&output).contains(advice), "{args:?}: {}", stderr(&output));
    }
    let output = output(run(&dir, &["true"]).env("USMC_RING_SIZE", "1"));
    assert!(stderr(&output).starts_with("usmc: USMC_RING_SIZE: 1 is not"), "{}", stderr(&output));
}

#[test]
fn a_library_that_cannot_be_preloaded_is_refused() {
    let dir = TempDir::new();
    let spaced = dir.path().join("a b");
    fs::create_dir(&spaced).expect("a directory");
    let spaced = spaced.join("libusmc_preload.so");
    fs::rename(harmless_library(&dir), &spaced).expect("a rename");
    for (library, advice) in [
        (spaced.to_str().expect("UTF-8"), "set USMC_LIBRARY to a symbolic link without it"),
        ("/nonexistent/x.so", "set it to the path of libusmc_preload.so, or unset it"),
    ] {
        let output = output(usmc(&["run", "true"]).env("USMC_LIBRARY", library));
        assert_eq!(output.status.code(), Some(125));
        assert!(stderr(&output).contains(advice), "{}", stderr(&output));
    }
}

#[test]
fn the_library_is_found_beside_the_command_and_in_its_prefix() {
    let dir = TempDir::new();
    let bin = dir.path().join("bin");
    fs::create_dir_all(dir.path().join("lib/usmc")).expect("a directory");
    fs::create_dir(&bin).expect("a directory");
    let installed = dir.usmc_at("bin/usmc");
    let mut command = clean(installed.to_str().expect("UTF-8"));
    let nowhere = output(command.args(["run", "true"]));
    assert_eq!(nowhere.status.code(), Some(125));
    assert!(stderr(&nowhere).contains("make install"), "{}", stderr(&nowhere));
    // Each one comes before those that are there already.
    for place in ["lib", "lib/usmc", "bin"] {
        let library = harmless_library(&dir);
        let there = dir.path().join(place).join("libusmc_preload.so");
        fs::rename(library, &there).expect("a rename");
        let mut command = clean(installed.to_str().expect("UTF-8"));
        let found = environment(command.arg("run"));
        assert_eq!(found["LD_PRELOAD"], there.to_str().expect("UTF-8"));
    }
}

#[test]
fn everything_after_the_command_is_the_commands() {
    let dir = TempDir::new();
    for args in [
        &["sh", "-c", "echo \"$@\"", "sh", "--off", "--", "-v"][..],
        &["--", "sh", "-c", "echo \"$@\"", "sh", "--off", "--", "-v"],
    ] {
        assert_eq!(stdout(&output(&mut run(&dir, args))), "--off -- -v\n");
    }
}

#[test]
fn signal_dispositions_and_closed_descriptors_are_handed_on() {
    let dir = TempDir::new();
    let ignored = |wrapper: &[&str]| {
        let script = "trap '' PIPE USR1; exec \"$@\" grep SigIgn /proc/self/status";
        let mut command = clean("sh");
        command.args(["-c", script, "sh"]).args(wrapper);
        command.env("USMC_LIBRARY", dir.path().join("libusmc_preload.so"));
        stdout(&output(&mut command))
    };
    harmless_library(&dir);
    let plain = ignored(&["env"]);
    assert!(plain.contains("SigIgn"), "{plain}");
    assert_eq!(ignored(&[env!("CARGO_BIN_EXE_usmc"), "run"]), plain);

    let script = "exec \"$0\" run --off -- test -e /proc/self/fd/0 <&-";
    let closed = output(clean("sh").args(["-c", script, env!("CARGO_BIN_EXE_usmc")]));
    assert_eq!(closed.status.code(), Some(1), "descriptor 0 stays closed");
}

#[test]
fn scripts_without_an_interpreter_line_run_as_execvp_runs_them() {
    let dir = TempDir::new();
    let script = dir.file("script", b"echo started\n");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("chmod");
    assert_eq!(stdout(&output(&mut run(&dir, &[&script]))), "started\n");
}

#[test]
fn verbose_says_what_is_used() {
    let dir = TempDir::new();
    dir.file("usmc.toml", b"busy_poll_us = 9\n");
    let mut command = run(&dir, &["-v", "--ring-size", "16K", "true"]);
    let said = stderr(&output(command.env("XDG_CONFIG_HOME", dir.path())));
    for line in [
        "read ",
        "USMC_BUSY_POLL_US=9 (",
        "USMC_RING_SIZE=16384 (--ring-size)",
        "LD_PRELOAD=",
        "usmc: the ISM directory is /",
        "usmc: the library is /",
        "usmc: the library gets into ",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
}
