//! A node of Kubernetes, as far as it takes no kubelet: a real containerd with pods of its own, in namespaces of a test's own
//! (`kubernetes/node.sh`). Its programs are built by `kubernetes.sh`.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::fixture::tool;
use crate::{Fixture, Process, build, flag, is_plain, procfs};

/// Programs of the image.
const PROGRAMS: [&str; 6] = [
    "/usr/bin/redis-server",
    "/usr/bin/redis-cli",
    "/usr/bin/redis-benchmark",
    "/usr/bin/setpriv",
    "/usr/bin/env",
    "/bin/sleep",
];
/// The image's name.
const IMAGE: &str = "usmc.test/redis:1";

/// Whether tests with a node are wanted.
pub fn is_wanted() -> bool {
    !is_plain() && flag("USMC_TESTS_KUBERNETES")
}

/// The directory of the node's programs.
pub fn programs() -> PathBuf {
    build::target().join("kubernetes")
}

/// A node.
pub struct Node<'a> {
    fixture: &'a Fixture,
    init: Process,
    /// The first process, by its number here.
    first: i32,
    containerd: Option<Process>,
    /// Of all its containers.
    cgroup: String,
}

/// What a pod is asked for.
#[derive(Clone, Default)]
pub struct Pod<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name, which is its container's, too.
    pub name: &'a str,
    /// Its labels.
    pub labels: &'a [(&'a str, &'a str)],
    /// What its container starts.
    pub command: &'a [&'a str],
    /// What is set in it.
    pub env: &'a [(&'a str, &'a str)],
    /// Whom it is started as; root otherwise.
    pub user: Option<u32>,
}

/// A pod that runs.
pub struct Running {
    pod: String,
    /// Its container's id.
    pub container: String,
    /// Its address.
    pub address: String,
}

impl<'a> Node<'a> {
    /// Starts it, with containerd and its images.
    pub fn start(fixture: &'a Fixture) -> Node<'a> {
        let dir = fixture.scratch();
        let programs = programs();
        assert!(
            programs.join("loopback").exists(),
            "sh tests/kubernetes.sh {}",
            programs.display()
        );
        let mut init = fixture.plain("unshare");
        init.args([
            "--mount",
            "--net",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
        ]);
        init.arg(build::tests_dir().join("kubernetes/node.sh")).arg(dir).arg(&programs);
        let mut init = fixture.spawn(init);
        init.line_after("ready");
        let first = child(init.pid()).expect("a first process");
        let cgroup = dir.file_name().expect("a name").to_string_lossy().into_owned();
        let mut node = Node { fixture, init, first, containerd: None, cgroup };
        node.start_containerd();
        node.import();
        node
    }

    /// Starts containerd, and waits for it.
    pub fn start_containerd(&mut self) {
        assert!(self.containerd.is_none());
        let config = self.fixture.scratch().join("containerd.toml");
        let mut command = self.command("containerd");
        command.arg("--config").arg(config);
        let daemon = self.fixture.spawn(command);
        self.fixture.wait_until("containerd", || daemon.errors().contains("successfully booted"));
        self.containerd = Some(daemon);
    }

    /// Kills it. Its containers go on.
    pub fn kill_containerd(&mut self) {
        kill(&mut self.containerd.take().expect("a containerd"));
    }

    /// A command in the node.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = self.fixture.plain("nsenter");
        command.args(["--target", &self.first.to_string(), "--mount", "--pid", "--net", "--uts"]);
        command.arg(program.as_ref());
        let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", programs().display());
        command.env("PATH", path).env_remove("USMC_ISM_DIR");
        command
    }

    /// Runs one to its end.
    pub fn run(&self, program: impl AsRef<Path>, args: &[&str]) -> String {
        let mut command = self.command(program);
        command.args(args);
        self.fixture.run(command)
    }

    /// Its first process, by which its file systems are seen: `/proc/FIRST/root`.
    pub fn root(&self) -> PathBuf {
        format!("/proc/{}/root", self.first).into()
    }

    /// The client of containerd that speaks Kubernetes' language.
    pub fn crictl(&self, args: &[&str]) -> String {
        let config = self.fixture.scratch().join("crictl.yaml").to_string_lossy().into_owned();
        self.run("crictl", &[&["--config", &config], args].concat())
    }

    /// Starts a pod with one container.
    pub fn start_pod(&self, pod: &Pod<'_>) -> Running {
        let labels: serde_json::Map<String, Value> =
            pod.labels.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        let sandbox = json!({
            "metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.name, "attempt": 1},
            "labels": labels,
            "linux": {"cgroup_parent": format!("/{}", self.cgroup)},
        });
        let env: Vec<Value> =
            pod.env.iter().map(|(name, value)| json!({"key": name, "value": value})).collect();
        let user = pod.user.map(|user| json!({"run_as_user": {"value": user}}));
        let container = json!({
            "metadata": {"name": pod.name},
            "image": {"image": IMAGE},
            "command": pod.command,
            "envs": env,
            "linux": {"security_context": user.unwrap_or_else(|| json!({}))},
        });
        let sandbox = self.write(&format!("{}.pod", pod.name), &sandbox);
        let container = self.write(pod.name, &container);
        let pod = self.crictl(&["runp", &sandbox]).trim().to_owned();
        let container = self.crictl(&["create", &pod, &container, &sandbox]).trim().to_owned();
        self.crictl(&["start", &container]);
        let address = self.address(&pod);
        Running { pod, container, address }
    }

    /// What containerd says of a container.
    pub fn inspect(&self, running: &Running) -> Value {
        self.inspect_id(&running.container)
    }

    /// Makes the control group of all that runs in it, where there is none yet, and returns its name.
    pub fn make_cgroup(&self) -> String {
        for root in cgroup_roots().filter(|root| root.join("cgroup.procs").exists()) {
            fs::create_dir_all(root.join(&self.cgroup)).expect("we are root");
        }
        format!("/{}", self.cgroup)
    }

    /// Ends a pod.
    pub fn end_pod(&self, running: Running) {
        self.crictl(&["rmp", "--force", &running.pod]);
    }

    /// Imports a directory as an image.
    fn import_image(&self, name: &str, root: &Path, program: &str) {
        let file = root.with_extension("tar");
        let mut pack = self.fixture.plain("sh");
        pack.arg(build::tests_dir().join("kubernetes/image.sh")).arg(name).arg(root);
        pack.arg(&file).arg(program);
        self.fixture.run(pack);
        let file = file.to_string_lossy().into_owned();
        self.run("ctr", &["--namespace", "k8s.io", "image", "import", "--local", &file]);
    }

    /// Makes an image of uSMC under the name that `make image` gives it, and imports it. Linked dynamically, as what is tested is.
    pub fn import_usmc(&self, version: &str) {
        let root = self.fixture.scratch().join("usmc");
        let (usmc, library) = (build::usmc(), build::usmc().with_file_name("libusmc_preload.so"));
        copy_with_libraries(&[usmc], &root);
        fs::create_dir(root.join("usmc")).expect("our own directory");
        for file in [usmc, &library] {
            let name = file.file_name().expect("a name");
            fs::copy(file, root.join("usmc").join(name)).expect("our own file");
        }
        self.import_image(&format!("docker.io/library/usmc:{version}"), &root, "/usmc/usmc");
    }

    /// Runs what a pod's template says, as a kubelet would: containers with their arguments, mounts and rights. Returns the
    /// pod's address, and the ids of its containers by name.
    ///
    /// # Panics
    /// When one of them cannot be started, or an init container fails.
    pub fn start_template(
        &self,
        name: &str,
        template: &Value,
    ) -> (String, HashMap<String, String>) {
        let spec = &template["spec"];
        let pid = if spec["hostPID"] == true { 2 } else { 0 };
        let sandbox = json!({
            "metadata": {"name": name, "namespace": "usmc-system", "uid": name, "attempt": 1},
            "log_directory": self.fixture.scratch(),
            "linux": {"cgroup_parent": format!("/{}", self.cgroup),
                      "security_context": {"namespace_options": {"pid": pid}}},
        });
        let sandbox_file = self.write(&format!("{name}.pod"), &sandbox);
        let pod = self.crictl(&["runp", &sandbox_file]).trim().to_owned();
        let mut ids = HashMap::new();
        for (list, is_init) in [("initContainers", true), ("containers", false)] {
            for container in spec[list].as_array().expect("containers") {
                let name = container["name"].as_str().expect("a name");
                let config = self.write(name, &self.container(container, &spec["volumes"], pid));
                let id = self.crictl(&["create", &pod, &config, &sandbox_file]).trim().to_owned();
                self.crictl(&["start", &id]);
                if is_init {
                    self.fixture.wait_until(name, || self.state(&id) == "CONTAINER_EXITED");
                    let status = self.inspect_id(&id)["status"]["exitCode"].clone();
                    assert_eq!(status, 0, "{name}: {}", self.crictl(&["logs", &id]));
                }
                ids.insert(name.to_owned(), id);
            }
        }
        (self.address(&pod), ids)
    }

    /// A container of a template in the runtime's words.
    fn container(&self, container: &Value, volumes: &Value, pid: i32) -> Value {
        let security = &container["securityContext"];
        let mounts = container["volumeMounts"].as_array().expect("mounts").iter().map(|mount| {
            let volumes = volumes.as_array().expect("volumes").iter();
            let volume = volumes.clone().find(|volume| volume["name"] == mount["name"]);
            let volume = volume.expect("a volume");
            // The ConfigMap's files are written by the test.
            let path = volume["hostPath"]["path"].as_str().unwrap_or("/run/configmap");
            self.run("mkdir", &["-p", path]);
            json!({"host_path": path, "container_path": mount["mountPath"],
                   "readonly": mount["readOnly"] == true})
        });
        let capabilities = &security["capabilities"];
        let list = |kind: &str| capabilities.get(kind).cloned().unwrap_or_else(|| json!([]));
        json!({
            "metadata": {"name": container["name"]},
            "image": {"image": container["image"]},
            "args": container["args"],
            "mounts": mounts.collect::<Vec<Value>>(),
            "log_path": format!("{}.log", container["name"].as_str().expect("a name")),
            "linux": {"security_context": {
                "run_as_user": {"value": security["runAsUser"]},
                "readonly_rootfs": security["readOnlyRootFilesystem"] == true,
                "no_new_privs": security["allowPrivilegeEscalation"] == false,
                "capabilities": {"add_capabilities": list("add"), "drop_capabilities": list("drop")},
                "namespace_options": {"pid": pid},
                "seccomp": {"profile_type": 0},
            }},
        })
    }

    fn write(&self, name: &str, value: &Value) -> String {
        let path = self.fixture.scratch().join(format!("{name}.json"));
        fs::write(&path, value.to_string()).expect("our own file");
        path.to_string_lossy().into_owned()
    }

    fn state(&self, id: &str) -> String {
        self.inspect_id(id)["status"]["state"].as_str().unwrap_or_default().to_owned()
    }

    fn inspect_id(&self, id: &str) -> Value {
        serde_json::from_str(&self.crictl(&["inspect", id])).expect("JSON of crictl")
    }

    fn address(&self, pod: &str) -> String {
        let told: Value =
            serde_json::from_str(&self.crictl(&["inspectp", pod])).expect("JSON of crictl");
        told["status"]["network"]["ip"].as_str().expect("an address").to_owned()
    }

    /// Makes both images of the tests and imports them.
    fn import(&self) {
        let scratch = self.fixture.scratch();
        let (pause, redis) = (scratch.join("pause"), scratch.join("redis"));
        for dir in ["tmp", "etc", "proc", "dev", "sys"] {
            fs::create_dir_all(redis.join(dir)).expect("our own directory");
        }
        fs::create_dir(&pause).expect("our own directory");
        let mut compiler = self.fixture.plain("cc");
        compiler.args(["-static", "-o"]).arg(pause.join("pause"));
        compiler.arg(build::tests_dir().join("kubernetes/pause.c"));
        self.fixture.run(compiler);
        copy_with_libraries(&PROGRAMS.map(Path::new), &redis);
        let users = "root:x:0:0::/:/bin/sh\nredis:x:999:999::/:/bin/sh\n";
        fs::write(redis.join("etc/passwd"), users).expect("our own file");
        self.import_image("usmc.test/pause:1", &pause, "/pause");
        self.import_image(IMAGE, &redis, "/usr/bin/env");
    }

    /// Ends it: asserts that its pods can be removed.
    pub fn end(mut self) {
        self.crictl(&["rmp", "--all", "--force"]);
        self.kill_containerd();
    }
}

impl Drop for Node<'_> {
    fn drop(&mut self) {
        // All others in its namespace of processes end with it.
        // SAFETY: kill(2) touches no memory of ours; the process is ours.
        unsafe { libc::kill(self.first, libc::SIGKILL) };
        let until = Instant::now() + Duration::from_secs(5);
        while !procfs::has_ended(self.init.pid()) && Instant::now() < until {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        for path in cgroup_roots().map(|root| root.join(&self.cgroup)).filter(|path| path.is_dir())
        {
            remove_cgroup(&path);
        }
    }
}

/// Copies programs to where they are in a root of their own, with the libraries that they are linked with.
fn copy_with_libraries(programs: &[&Path], root: &Path) {
    let mut files: BTreeSet<PathBuf> = BTreeSet::new();
    for program in programs {
        let out = tool("ldd", &[&program.to_string_lossy()]);
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let paths = text.split_whitespace().filter(|word| word.starts_with('/'));
        files.extend(paths.map(PathBuf::from));
        // Those of the system.
        files.extend(program.starts_with("/usr").then(|| program.to_path_buf()));
        files.extend(program.starts_with("/bin").then(|| program.to_path_buf()));
    }
    for file in files {
        let to = root.join(file.strip_prefix("/").expect("absolute"));
        fs::create_dir_all(to.parent().expect("a directory")).expect("our own directory");
        fs::copy(&file, &to).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    }
}

/// That of the unified hierarchy, or of each controller's.
fn cgroup_roots() -> impl Iterator<Item = PathBuf> {
    let unified = Path::new("/sys/fs/cgroup");
    let is_unified = unified.join("cgroup.procs").exists();
    let controllers = fs::read_dir(unified).into_iter().flatten().flatten();
    let controllers = controllers.map(|entry| entry.path()).filter(move |_| !is_unified);
    controllers.chain(is_unified.then(|| unified.to_owned()))
}

fn remove_cgroup(path: &Path) {
    for below in fs::read_dir(path).into_iter().flatten().flatten() {
        if below.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroup(&below.path());
        }
    }
    let _ = fs::remove_dir(path);
}

/// The one process that another one has started.
pub fn child(pid: i32) -> Option<i32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// Kills what nsenter has started, by which nsenter ends, too.
pub fn kill(process: &mut Process) {
    signal(process, libc::SIGKILL);
    process.wait();
}

/// Sends a signal to what nsenter has started. nsenter stops when that stops, and goes on by itself alone.
pub fn signal(process: &Process, signal: i32) {
    if signal == libc::SIGCONT {
        process.signal(signal);
    }
    let inner = child(process.pid()).expect("a program in the node");
    // SAFETY: kill(2) touches no memory of ours; the process is ours.
    unsafe { libc::kill(inner, signal) };
}
