//! `usmc bench` from end to end: figures with their proof, no figure without, and nothing left behind.

mod support;

use std::fs;
use std::process::{Child, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::*;

/// A run of `usmc bench`, and the directory that it may use for its files.
struct Bench {
    child: Child,
    dir: TempDir,
}

impl Bench {
    fn start(args: &[&str], library: &str) -> Bench {
        Bench::start_with(args, library, "")
    }

    /// The same, with what programs are to log.
    fn start_with(args: &[&str], library: &str, log: &str) -> Bench {
        let dir = TempDir::new();
        fs::create_dir(dir.path().join("temporary")).expect("a directory");
        let mut command = usmc(&["bench"]);
        command.args(args).arg("--json").arg(dir.path().join("json"));
        command.env("TMPDIR", dir.path().join("temporary")).env("USMC_LIBRARY", library);
        command.env("USMC_LOG", log);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().expect("usmc");
        Bench { child, dir }
    }

    /// Its output and its JSON; by then nothing of it is left.
    fn finish(self) -> (Output, Value) {
        let pid = self.child.id();
        let output = self.child.wait_with_output().expect("its output");
        let text = fs::read_to_string(self.dir.path().join("json")).expect("JSON");
        let json = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{}", stderr(&output)));
        let mut left = fs::read_dir(self.dir.path().join("temporary")).expect("the directory");
        assert!(left.next().is_none(), "files");
        assert_eq!(devices_of(pid), [""; 0], "directories");
        assert_eq!(processes_of(pid), [0; 0], "processes");
        (output, json)
    }
}

/// ISM directories of a run.
fn devices_of(pid: u32) -> Vec<String> {
    let names = fs::read_dir("/dev/shm").expect("/dev/shm").flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(&format!("usmc-bench-{pid}-"))).collect()
}

/// Processes that a run started, by the directory that all of them are given.
fn processes_of(pid: u32) -> Vec<u32> {
    let word = format!("/usmc-bench-{pid}-");
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        if String::from_utf8_lossy(&environment).contains(&word) {
            found.extend(entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
        }
    }
    found
}

fn library() -> String {
    real_library().display().to_string()
}

#[test]
fn figures_come_with_their_proof() {
    let options = ["--quick", "--rounds", "2", "--duration", "0.05", "pingpong", "connect"];
    let (output, json) = Bench::start(&options, &library()).finish();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(json["format"], 1);
    assert_eq!((&json["rounds"], &json["interrupted"]), (&2.into(), &false.into()));
    assert!(json["machine"]["processor"].is_string() && json["machine"]["kernel"].is_string());
    assert_eq!((&json["failed"], &json["skipped"]), (&Value::from([""; 0]), &Value::from([""; 0])));
    let cases = json["cases"].as_array().expect("cases");
    let workloads: Vec<_> = cases.iter().map(|case| case["workload"].as_str()).collect();
    assert!(workloads.contains(&Some("pingpong")) && workloads.contains(&Some("connect")));
    for case in cases {
        let is_ping_pong = case["workload"] == "pingpong";
        let modes: &[&str] = if is_ping_pong { &["tcp", "unix", "usmc"] } else { &["tcp", "usmc"] };
        for mode in modes {
            for measure in case["measures"].as_array().expect("measures") {
                let samples = measure["samples"][mode].as_array().expect("samples");
                assert!(samples.len() == 2 && samples.iter().all(|s| s.as_f64() > Some(0.0)));
                assert!(measure["figures"][mode]["median"].as_f64() > Some(0.0), "{measure}");
            }
            for side in ["client_ns", "server_ns"] {
                assert!(case["cpu"][mode][side]["median"].as_f64() > Some(0.0), "{case}");
            }
        }
        let proof = &case["proof"];
        assert_eq!(proof["tcp"]["smcd_ends"], 0, "{proof}");
        assert!(proof["tcp"]["how"].as_str().is_some_and(|how| how.contains("none")), "{proof}");
        assert_eq!(proof["usmc"]["smcd_ends"], 2, "{proof}");
        if is_ping_pong {
            let [ring, moved] = ["ring_bytes", "moved_bytes"].map(|n| proof["usmc"][n].as_u64());
            assert!(ring > Some(0) && ring == moved, "each byte of the run: {proof}");
        }
    }
    let text = stdout(&output);
    for word in ["pingpong/14B/blocking/one-core: one way, median", "connect/c1-t1: connections"] {
        assert!(text.contains(word), "{text}");
    }
}

/// More than a pipe holds, which nobody reads meanwhile.
#[test]
fn programs_may_log_each_of_many_connections() {
    let options = ["--rounds", "1", "--duration", "0.5", "connect/c1-t1"];
    let (output, json) = Bench::start_with(&options, &library(), "debug").finish();
    assert!(output.status.success(), "{}", stderr(&output));
    let rate = &json["cases"][0]["measures"][0]["figures"]["usmc"]["median"];
    assert!(rate.as_f64() > Some(0.0), "{json}");
}

#[test]
fn a_picture_of_highlights_is_made_of_a_run_and_of_its_record() {
    let options = ["--highlights", "--rounds", "1", "--duration", "0.05", "ipc"];
    let dir = TempDir::new();
    let [first, again, record] = ["a.svg", "b.svg", "json"].map(|name| dir.path().join(name));
    let mut command = usmc(&["bench"]);
    command.args(options).env("USMC_LIBRARY", library());
    let run = output(command.arg("--plot").arg(&first).arg("--json").arg(&record));
    assert!(run.status.success(), "{}", stderr(&run));
    let mut command = usmc(&["bench", "--highlights", "--plot"]);
    let shown = output(command.arg(&again).arg("--from").arg(&record));
    assert!(shown.status.success(), "{}", stderr(&shown));
    assert_eq!(stdout(&shown), stdout(&run));
    let [first, again] = [first, again].map(|file| fs::read_to_string(file).expect("a picture"));
    assert_eq!(first, again);
    assert!(first.starts_with("<svg") && first.contains("100 bytes there and back"), "{first}");

    let listed = output(&mut usmc(&["bench", "--highlights", "--list"]));
    assert_eq!(stdout(&listed).lines().count(), 10, "{}", stdout(&listed));
    let refuses = |what: &str| {
        fs::write(&record, what).expect("a file");
        let output = output(usmc(&["bench", "--from"]).arg(&record));
        assert!(!output.status.success() && stdout(&output).is_empty());
        stderr(&output)
    };
    assert!(refuses("{}").contains("is nothing that `usmc bench --json` wrote"));
    let value = fs::read_to_string(dir.path().join("b.svg")).expect("a picture");
    assert!(refuses(&value).contains("is nothing that"));
}

#[test]
fn a_region_is_compared_with_the_memory_of_one_host() {
    let options = ["--sweep", "device", "--rounds", "1", "--duration", "0.05"];
    let cases = ["pingpong/14B/blocking/one-core", "idle/1000"];
    let (output, json) = Bench::start(&[&options[..], &cases].concat(), &library()).finish();
    assert!(output.status.success(), "{}", stderr(&output));
    let ends = |case: &serde_json::Value| {
        let ends = |name: &str| case["proof"]["usmc"][name].as_u64().expect("a number");
        (case["point"]["value"].as_str().map(str::to_owned), ends("smcd_ends"), ends("region_ends"))
    };
    let seen: Vec<_> = json["cases"].as_array().expect("cases").iter().map(ends).collect();
    assert_eq!(seen.len(), 4, "{json}");
    for (value, all, inside) in seen {
        assert!(all > 0, "{json}");
        assert_eq!(inside, if value.as_deref() == Some("own") { all } else { 0 }, "{json}");
    }
}

#[test]
fn a_setting_is_swept_beside_one_tcp() {
    let sweep = ["--sweep", "USMC_BUSY_POLL_US=default,0"];
    let places = ["--beside", "1", "--cores", "all,1"];
    let options = ["--rounds", "2", "--duration", "0.05", "pingpong/14B/blocking/one-core"];
    let (output, json) =
        Bench::start(&[&options[..], &sweep, &places].concat(), &library()).finish();
    assert!(output.status.success(), "{}", stderr(&output));
    let cases = json["cases"].as_array().expect("cases");
    let point = |case: &serde_json::Value| {
        let word = |member: &str| case["point"][member].as_str().unwrap_or_default().to_owned();
        (word("value"), word("place"))
    };
    let beside = ", beside a program that computes";
    let expected = ["all CPUs", "1 CPU"].into_iter().flat_map(|cores| {
        ["default", "0"].map(|value| (value.to_owned(), format!("{cores}{beside}")))
    });
    assert!(cases.iter().map(point).eq(expected), "{json}");
    let name =
        "pingpong/14B/blocking/one-core busy_poll_us=0 (1 CPU, beside a program that computes)";
    assert_eq!(cases[3]["name"], name);
    let samples = |case: usize, mode: &str| &cases[case]["measures"][0]["samples"][mode];
    assert_eq!(samples(0, "tcp"), samples(1, "tcp"), "measured once");
    assert_ne!(samples(0, "usmc"), samples(1, "usmc"));
    for case in cases {
        assert_eq!(case["proof"]["usmc"]["smcd_ends"], 2, "{case}");
    }
}

#[test]
fn a_library_that_does_not_work_gives_no_figure() {
    let elsewhere = TempDir::new();
    let harmless = harmless_library(&elsewhere);
    let cases = ["pingpong/14B/blocking/one-core", "connect/c1-t1", "foreign", "idle"];
    let options = ["--rounds", "1", "--duration", "0.02"];
    let (output, json) = Bench::start(&[&options[..], &cases].concat(), &harmless).finish();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(json["cases"], Value::from([""; 0]), "no figure");
    let failed = json["failed"].as_array().expect("failures");
    assert_eq!(failed.len(), cases.len(), "{failed:?}");
    for failure in failed {
        let why = failure["why"].as_str().expect("words");
        let words =
            "uSMC: the run was not over shared memory: the library is in none of the processes";
        assert!(why.starts_with(words), "{why}");
    }
    assert!(!stdout(&output).contains("µs"), "{}", stdout(&output));
}

#[test]
fn an_interrupted_run_shows_what_it_has_and_leaves_nothing() {
    let options =
        ["--rounds", "1", "--duration", "60", "foreign", "pingpong/14B/blocking/one-core"];
    let bench = Bench::start(&options, &library());
    let pid = bench.child.id();
    let deadline = Instant::now() + Duration::from_secs(30);
    while processes_of(pid).is_empty() {
        assert!(Instant::now() < deadline, "it starts something");
        thread::sleep(Duration::from_millis(10));
    }
    let pid = Pid::from_raw(pid as i32).expect("a pid");
    kill_process(pid, Signal::INT).expect("kill");
    let (output, json) = bench.finish();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert_eq!((&json["interrupted"], &json["failed"]), (&true.into(), &Value::from([""; 0])));
    assert!(stderr(&output).contains("interrupted"), "{}", stderr(&output));
}

#[test]
fn what_cannot_be_measured_is_said_before_anything_is() {
    for (args, words) in [
        (&["nonsense"][..], "there is no workload nonsense"),
        (&["--quick", "qperf"], "nothing of that is run by --quick"),
        (&["--duration", "0", "ipc"], "not between"),
        (&["--sweep", "PATH=a", "ipc"], "PATH is no setting of the library"),
        (&["--json", "/nonexistent/file", "ipc"], "cannot write /nonexistent/file"),
    ] {
        let output = output(usmc(&["bench"]).args(args).env("USMC_LIBRARY", library()));
        assert!(!output.status.success(), "{args:?}");
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
    }
    let list = stdout(&output(usmc(&["bench", "--list", "--all"]).env("PATH", "/nonexistent")));
    for word in ["pingpong/1MB/busy/one-core", "connect/c2000-t8", "fanin/10000 ", "redis/c1 "] {
        assert!(list.contains(word), "{word} in {list}");
    }
    let line = list.lines().find(|line| line.starts_with("sockperf/tp-64000B")).expect("a line");
    assert!(line.contains("sockperf") && line.contains("bandwidth"), "{line}");
}

#[test]
fn a_plot_is_drawn_with_every_case() {
    let dir = TempDir::new();
    let plot = dir.path().join("plot.svg");
    let mut command =
        usmc(&["bench", "--rounds", "1", "--duration", "0.02", "foreign", "ring", "--plot"]);
    let output = output(command.arg(&plot).env("USMC_LIBRARY", library()));
    assert!(output.status.success(), "{}", stderr(&output));
    let text = fs::read_to_string(&plot).expect("a plot");
    let document = roxmltree::Document::parse(&text).expect("XML");
    let said: String = document.descendants().filter_map(|node| node.text()).collect();
    assert!(said.contains("foreign: read(2) of /dev/null"), "{said}");
}
