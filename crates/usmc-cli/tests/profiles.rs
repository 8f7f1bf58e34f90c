//! Profiles: which name counts, which values hold beside one, and what the commands say of it.

mod support;

use std::process::Command;

use support::*;

/// A file with a profile of its own, and another one of a built-in name.
const FILE: &str = "ring_size = '16K'\n[profiles.mine]\nring_size = '1M'\nbusy_poll_us = 7\n\
                    exclude_ports = [22]\n[profiles.throughput]\nbusy_poll_us = 8\n";

struct Place {
    dir: TempDir,
}

impl Place {
    fn new(file: &str) -> Place {
        let dir = TempDir::new();
        harmless_library(&dir);
        dir.file("usmc.toml", file.as_bytes());
        Place { dir }
    }

    /// `usmc` with these words, whose user has the file.
    fn usmc(&self, words: &[&str]) -> Command {
        let mut command = usmc(words);
        command.env("USMC_LIBRARY", self.dir.path().join("libusmc_preload.so"));
        command.env("XDG_CONFIG_HOME", self.dir.path());
        command
    }

    /// `usmc run` with these options.
    fn run(&self, options: &[&str]) -> Command {
        self.usmc(&[&["run"], options].concat())
    }

    fn says(&self, command: &mut Command) -> String {
        let output = output(command);
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output)
    }

    /// The variables of ours that a program gets, but for what `usmc run` says to itself.
    fn variables(&self, command: &mut Command) -> Vec<String> {
        let text = self.says(command.args(["--", "env", "-0"]));
        let ours = text.split('\0').filter(|line| line.starts_with("USMC_"));
        let is_told = |line: &&str| !line.starts_with("USMC_LIBRARY=") && !line.contains('\n');
        let mut ours: Vec<String> = ours.filter(is_told).map(str::to_owned).collect();
        ours.sort();
        ours
    }
}

#[test]
fn a_profile_says_what_nobody_else_does() {
    let place = Place::new(FILE);
    let of = |options: &[&str]| place.variables(&mut place.run(options));
    assert_eq!(of(&[]), ["USMC_RING_SIZE=16384"]);
    let mine = [
        "USMC_BUSY_POLL_US=7",
        "USMC_EXCLUDE_PORTS=22",
        "USMC_PROFILE=mine",
        "USMC_RING_SIZE=16384",
    ];
    assert_eq!(of(&["--profile", "mine"]), mine, "a file's key comes before a profile's");
    assert_eq!(of(&["--profile", "mine", "--busy-poll-us", "9"])[0], "USMC_BUSY_POLL_US=9");
    let without = of(&["--profile", "mine", "--exclude-port", ""]);
    assert!(!without.iter().any(|line| line.contains("PORTS")), "taken back: {without:?}");
    let mut command = place.run(&["--profile", "mine"]);
    command.env("USMC_BUSY_POLL_US", "10");
    assert_eq!(place.variables(&mut command)[0], "USMC_BUSY_POLL_US=10");
    // A file's profile of a built-in name is that one.
    assert_eq!(
        of(&["--profile", "throughput"]),
        ["USMC_BUSY_POLL_US=8", "USMC_PROFILE=throughput", "USMC_RING_SIZE=16384"]
    );
}

#[test]
fn an_options_profile_comes_before_a_variables_before_a_files() {
    let place = Place::new(&format!("profile = 'mine'\n{FILE}"));
    let of = |options: &[&str], variable: Option<&str>| {
        let mut command = place.run(options);
        variable.map(|name| command.env("USMC_PROFILE", name));
        let all = place.variables(&mut command);
        all.iter().find_map(|line| line.strip_prefix("USMC_PROFILE=")).map(str::to_owned)
    };
    assert_eq!(of(&[], None).as_deref(), Some("mine"));
    assert_eq!(of(&[], Some("latency")).as_deref(), Some("latency"));
    assert_eq!(of(&["--profile", "shared"], Some("latency")).as_deref(), Some("shared"));
    assert_eq!(of(&["--profile", "none"], Some("latency")).as_deref(), Some("none"));
    let none = place.variables(&mut place.run(&["--profile", "none"]));
    assert_eq!(none, ["USMC_PROFILE=none", "USMC_RING_SIZE=16384"]);
}

/// What a profile has given is nobody's own word: in a program that is under it another profile has its place.
#[test]
fn inside_a_profile_another_one_can_be_chosen() {
    let place = Place::new(FILE);
    let usmc = place.usmc(&[]).get_program().to_owned();
    let usmc = usmc.to_str().expect("UTF-8");
    let inside = |outer: &[&str], inner: &[&str]| {
        let mut command = place.run(outer);
        command.args([&["--", usmc, "run"], inner].concat());
        place.variables(&mut command)
    };
    let shared = place.variables(&mut place.run(&["--profile", "shared"]));
    assert_eq!(inside(&["--profile", "mine"], &["--profile", "shared"]), shared);
    let mine = place.variables(&mut place.run(&["--profile", "mine"]));
    assert_eq!(inside(&["--profile", "mine"], &[]), mine, "it is handed on");
    let own = inside(&["--profile", "mine", "--busy-poll-us", "9"], &["--profile", "shared"]);
    assert_eq!(own[0], "USMC_BUSY_POLL_US=9", "an option's word stays");
    // A profile of a file that is not read inside is handed on, too.
    let file = place.dir.file("other.toml", b"[profiles.other]\nbusy_poll_us = 3\n");
    let outer = ["--config", &file, "--profile", "other"];
    assert_eq!(inside(&outer, &[])[0], "USMC_BUSY_POLL_US=3");
}

#[test]
fn a_name_that_is_none_is_refused_with_what_was_meant() {
    let place = Place::new(FILE);
    for (options, variable, said) in [
        (
            &["--profile", "latncy"][..],
            None,
            "--profile: there is no profile \"latncy\"; did you mean latency?",
        ),
        (&["--profile", "mien"], None, "did you mean mine?"),
        (
            &["--profile", "gaming"],
            None,
            "there are mine, throughput, latency, throughput, shared, and none",
        ),
        (&[], Some("sharde"), "USMC_PROFILE: there is no profile \"sharde\"; did you mean shared?"),
        (&["--profile", "a b"], None, "no name of a profile"),
    ] {
        let mut command = place.run(options);
        variable.map(|name| command.env("USMC_PROFILE", name));
        let refused = output(command.arg("true"));
        assert_eq!(refused.status.code(), Some(125), "{options:?}");
        assert!(stderr(&refused).contains(said), "{said}: {}", stderr(&refused));
    }
    let place = Place::new("[profiles.mine]\nring-size = 1\n");
    let refused = stderr(&output(place.run(&[]).arg("true")));
    let said = "usmc.toml:2: profile mine: there is no key \"ring-size\"; did you mean ring_size?";
    assert!(refused.contains(said), "{refused}");
}

#[test]
fn commands_say_which_profile_and_which_values_hold() {
    let place = Place::new(FILE);
    let output =
        output(place.run(&["-v", "--profile", "mine", "true"]).stdin(std::process::Stdio::null()));
    let said = stderr(&output);
    for line in [
        "usmc: the profile is mine (",
        "usmc: USMC_BUSY_POLL_US=7 (profile mine)",
        "usmc.toml); the profile says 1048576",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
    let check = stdout(&support::output(&mut place.usmc(&["check", "--profile", "mine"])));
    for line in [
        "busy_poll_us = 7 (profile mine)",
        "the profile mine is used (",
        "; the profile says 1048576",
    ] {
        assert!(check.contains(line), "{line}: {check}");
    }
}
