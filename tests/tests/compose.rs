//! A project of docker compose (Debian's docker-compose) whose services `usmc enable --compose` brings under uSMC: users of their
//! own, one ISM directory by a volume in memory.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use usmc_tests::docker::Docker;
use usmc_tests::{Fixture, build, is_plain};

/// A server and a client that asks it for as long as it lives; and one that the library does not get into.
fn project(port: u16) -> String {
    format!(
        "version: '3'\n\
         services:\n\
        \x20 cache:\n    image: usmc\n    user: '61001:61001'\n    working_dir: /tmp\n    tmpfs: /tmp:mode=1777\n    \
         command: [redis-server, --port, '{port}', --save, '', --protected-mode, 'no']\n\
        \x20 app:\n    image: usmc\n    user: '61002:61002'\n    depends_on: [cache]\n    restart: always\n    \
         command: [redis-benchmark, -h, cache, -p, '{port}', -c, '3', -t, get, -l, -q]\n\
        \x20 other:\n    image: fixed\n    command: ['/program']\n    scale: 0\n"
    )
}

struct Project<'a> {
    fixture: &'a Fixture,
    docker: &'a Docker<'a>,
    dir: &'a Path,
}

impl Project<'_> {
    fn run(&self, program: &Path, args: &[&str]) -> String {
        let mut command = self.fixture.plain(program);
        command.args(args).env("DOCKER_HOST", self.docker.socket()).current_dir(self.dir);
        command.env("COMPOSE_PROJECT_NAME", "tests");
        self.fixture.run(command)
    }

    fn usmc(&self, args: &[&str]) -> String {
        self.run(build::usmc(), args)
    }

    /// What `usmc enable --compose` has told to do.
    fn as_told(&self, said: &str) {
        let line = said.lines().find_map(|line| line.strip_prefix("it takes effect with: "));
        self.run(Path::new("sh"), &["-c", line.unwrap_or_else(|| panic!("no command in {said}"))]);
    }
}

#[test]
fn services_of_a_project_leave_tcp_and_come_back() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::with_limit("compose", Duration::from_secs(180));
    let dir = fixture.scratch().join("project");
    fs::create_dir(&dir).expect("our own directory");
    let port = fixture.port();
    fs::write(dir.join("docker-compose.yml"), project(port)).expect("our own file");
    let docker = Docker::start(&fixture);
    docker.import();
    import_static(&fixture, &docker);
    let project = Project { fixture: &fixture, docker: &docker, dir: &dir };

    let said = project.usmc(&["enable", "--compose", ".", "--dry-run"]);
    assert!(
        said.contains("cache: can be served (glibc)") && said.contains("app: can be served"),
        "{said}"
    );
    assert!(said.contains("other: stays TCP: it is statically linked"), "{said}");
    assert!(!dir.join("compose.usmc.yaml").exists());
    assert_eq!(docker.run(&["ps", "--all", "--quiet"]), "", "nothing is left of the look");
    assert_eq!(docker.run(&["volume", "ls", "--quiet"]), "", "no volume, either");
    let said = project.usmc(&["enable", "--compose", "."]);
    let text = fs::read_to_string(dir.join("compose.usmc.yaml")).expect("an override");
    assert!(!text.contains("other"), "{text}");
    project.as_told(&said);
    fixture.wait_until("SMC-D at both ends", || {
        let seen = fixture.connections(port);
        let smcd = |server: bool| {
            seen.iter().filter(|s| s.is_smcd() && (s.local_port() == port) == server).count()
        };
        smcd(true) >= 3 && smcd(false) >= 3
    });
    let status: Value = serde_json::from_str(&project.usmc(&["status", "--json"])).expect("JSON");
    let rows = status.as_array().expect("a list");
    let row = |service: &str| {
        let is_it = |row: &&Value| row["service"] == service && row["kind"] == "compose";
        rows.iter().find(is_it).unwrap_or_else(|| panic!("no {service} in {status}"))
    };
    for service in ["cache", "app"] {
        assert_eq!(row(service)["library"], true, "{status}");
        assert_eq!(row(service)["group"], "tests", "{status}");
    }
    assert!(row("cache")["smcd"].as_u64() >= Some(3), "{status}");

    let said = project.usmc(&["disable", "--compose", "."]);
    assert!(!dir.join("compose.usmc.yaml").exists());
    project.as_told(&said);
    let told: Value =
        serde_json::from_str(&project.usmc(&["advise", "--seconds", "1", "--json"])).expect("JSON");
    let pairs = told["pairs"].as_array().expect("a list");
    let pair = pairs.iter().find(|pair| pair["port"] == port).unwrap_or_else(|| panic!("{told}"));
    assert_eq!(
        (&pair["server"]["library"], &pair["client"]["library"]),
        (&false.into(), &false.into())
    );
    let file = dir.join("docker-compose.yml");
    let advice = format!("usmc enable --compose {} app cache", file.display());
    assert_eq!(pair["commands"][0], advice.as_str(), "{told}");
    project.run(Path::new("docker-compose"), &["down", "--volumes", "--timeout", "1"]);
    docker.end();
    fixture.finish();
}

/// An image of a program that no dynamic linker loads.
fn import_static(fixture: &Fixture, docker: &Docker<'_>) {
    let root = fixture.scratch().join("static");
    fs::create_dir(&root).expect("our own directory");
    let source = root.join("program.c");
    fs::write(&source, "int main(void) { return 0; }\n").expect("our own file");
    let program = root.join("program");
    let mut compiler = fixture.plain("cc");
    compiler.arg("-static").arg("-o").arg(&program).arg(&source);
    fixture.run(compiler);
    let tar = fixture.scratch().join("static.tar").to_string_lossy().into_owned();
    let mut pack = fixture.plain("tar");
    pack.args(["-C", &root.to_string_lossy(), "-cf", &tar, "program"]);
    fixture.run(pack);
    // Each container of it has a volume of its own.
    let start = ["--change", "ENTRYPOINT [\"/program\"]", "--change", "VOLUME /data"];
    docker.run(&[&["import"], &start[..], &[&tar, "fixed"]].concat());
}
