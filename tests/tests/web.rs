//! nginx with several workers, wrk and curl.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use usmc_tests::fixture::slowness;
use usmc_tests::{Fixture, Process, procfs};

const CONFIG: &str = "
worker_processes 2;
pid nginx.pid;
# Or else a new binary starts without them.
env LD_PRELOAD; env USMC_ISM_DIR; env USMC_TESTS_ID;
events { worker_connections 2000; }
http {
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    keepalive_requests 1000000;
    client_max_body_size 100m;
    upstream inner { server 127.0.0.1:INNER; keepalive 16; }
    server {
        listen 127.0.0.1:PORT REUSEPORT;
        root www;
        location / { sendfile SENDFILE; }
        location /proxied/ { proxy_http_version 1.1; proxy_set_header Connection ''; proxy_pass http://inner/; }
    }
    server { listen 127.0.0.1:INNER; root www; }
}
";

/// A server that becomes a daemon, as Debian starts it, and a proxy in front of it that keeps one connection.
const BACK: &str = "
USER worker_processes 1; pid back.pid; daemon on; error_log back.log warn;
events {}
http {
    access_log off;
    client_body_temp_path b1; proxy_temp_path b2; fastcgi_temp_path b3; uwsgi_temp_path b4; scgi_temp_path b5;
    server { listen 127.0.0.1:BACK; root www; }
}
";
const FRONT: &str = "
USER worker_processes 1; pid front.pid; daemon off; error_log stderr warn;
events {}
http {
    access_log off;
    client_body_temp_path f1; proxy_temp_path f2; fastcgi_temp_path f3; uwsgi_temp_path f4; scgi_temp_path f5;
    upstream back { server 127.0.0.1:BACK; keepalive 1; }
    server {
        listen 127.0.0.1:PORT;
        location / { proxy_http_version 1.1; proxy_set_header Connection ''; proxy_pass http://back; }
    }
}
";

struct Web {
    nginx: Process,
    port: u16,
    large: Vec<u8>,
}

/// Starts nginx with a page of 1 KiB and one of 8 MB.
fn serve(fixture: &Fixture, reuseport: bool, sendfile: bool) -> Web {
    let (mut command, port, large) = configured(fixture, reuseport, sendfile);
    command.args(["-g", "daemon off; error_log stderr warn;"]);
    let nginx = fixture.spawn(command);
    fixture.wait_for_port(port);
    fixture.wait_until("a worker", || takes_signals(nginx.pid()));
    Web { nginx, port, large }
}

/// Whether a master acts upon signals. Before it has workers it takes one down and sleeps until the next, over TCP as well:
/// the wait for a pid file or a port alone failed in CI.
fn takes_signals(master: i32) -> bool {
    !procfs::children(master).is_empty()
}

/// nginx with its configuration, its port and its large page.
fn configured(fixture: &Fixture, reuseport: bool, sendfile: bool) -> (Command, u16, Vec<u8>) {
    let (port, inner) = (fixture.port(), fixture.port());
    let dir = fixture.scratch();
    fs::create_dir(dir.join("www")).expect("our own directory");
    let large: Vec<u8> = (0..1_000_000u64).flat_map(|i| (i * i).to_le_bytes()).collect();
    fs::write(dir.join("www/index.html"), [b'x'; 1024]).expect("our own file");
    fs::write(dir.join("www/large"), &large).expect("our own file");
    let config = CONFIG
        .replace("PORT REUSEPORT", if reuseport { "PORT reuseport" } else { "PORT" })
        .replace("PORT", &port.to_string())
        .replace("INNER", &inner.to_string())
        .replace("SENDFILE", if sendfile { "on" } else { "off" });
    let path = dir.join("nginx.conf");
    fs::write(&path, config).expect("our own file");
    let mut command = fixture.command(usmc_tests::build::system_program("nginx"));
    command.arg("-p").arg(dir).arg("-c").arg(&path);
    (command, port, large)
}

fn wrk(fixture: &Fixture, port: u16, args: &[&str], path: &str) -> Process {
    let mut command = fixture.command("wrk");
    command.args(args).arg(format!("http://127.0.0.1:{port}{path}"));
    fixture.spawn(command)
}

/// Lets a load go on for a while once it was seen in shared memory, and ends it; what it says. One that ends by itself may be over before a slow
/// machine has looked.
fn end_of_seen(fixture: &Fixture, port: u16, mut load: Process) -> String {
    fixture.assert_serves_smcd(port);
    thread::sleep(Duration::from_secs(1) * slowness());
    load.signal(libc::SIGINT);
    load.succeed()
}

/// Every answer was right and no connection failed.
fn assert_all_well(output: &str) {
    assert!(!output.contains("Socket errors") && !output.contains("Non-2xx"), "{output}");
    let requests = output.lines().find_map(|l| l.trim().split_once(" requests in"));
    let count: u64 = requests.and_then(|(n, _)| n.parse().ok()).unwrap_or(0);
    assert!(count > 100, "{output}");
}

fn end(fixture: Fixture, mut web: Web) {
    let status = web.nginx.terminate();
    assert!(status.success(), "nginx ended with {status}: {}", web.nginx.errors());
    let errors = web.nginx.errors();
    assert!(!errors.contains("[alert]") && !errors.contains("[crit]"), "{errors}");
    drop(web);
    fixture.finish();
}

#[test]
fn keep_alive_with_two_workers() {
    let fixture = Fixture::new("nginx keep-alive");
    let web = serve(&fixture, false, true);
    let load = wrk(&fixture, web.port, &["-t2", "-c64", "-d60s"], "/");
    assert_all_well(&end_of_seen(&fixture, web.port, load));
    end(fixture, web);
}

/// The only connection of a proxy to a server that has become a daemon, which nobody has connected to before.
#[test]
fn first_connection_to_a_daemon() {
    for as_root in [true, false] {
        let fixture = Fixture::new("nginx as a daemon");
        let (port, back) = (fixture.port(), fixture.port());
        let dir = fixture.scratch();
        fs::create_dir(dir.join("www")).expect("our own directory");
        fs::write(dir.join("www/index.html"), [b'x'; 1024]).expect("our own file");
        if !as_root {
            fixture.give_to("www-data");
        }
        let nginx = |name: &str, config: &str| {
            let config = config
                .replace("USER", if as_root { "user root;" } else { "" })
                .replace("PORT", &port.to_string())
                .replace("BACK", &back.to_string());
            let path = dir.join(name);
            fs::write(&path, config).expect("our own file");
            let program = usmc_tests::build::system_program("nginx");
            let mut command = match as_root {
                true => fixture.command(program),
                false => {
                    let mut command = fixture.command("setpriv");
                    command.args(["--reuid=www-data", "--regid=www-data", "--clear-groups"]);
                    command.arg(program);
                    command
                }
            };
            command.arg("-p").arg(dir).arg("-c").arg(&path);
            command
        };
        // Listens when this has ended, and was not asked by a connection.
        fixture.run(nginx("back.conf", BACK));
        let mut front = fixture.spawn(nginx("front.conf", FRONT));
        fixture.wait_for_port(port);
        fixture.wait_until("a worker", || takes_signals(front.pid()));
        let mut curl = fixture.command("curl");
        curl.args(["-sSf", "--output", "/dev/null", "--write-out", "%{size_download}\n"]);
        curl.arg(format!("http://127.0.0.1:{port}/?[1-24]"));
        assert_eq!(fixture.run(curl).lines().filter(|line| *line == "1024").count(), 24);
        if !usmc_tests::is_plain() {
            let ends = fixture.connections(back);
            let ends: Vec<_> = ends.iter().filter(|end| end.comm == "nginx").collect();
            assert!(ends.len() == 2 && ends.iter().all(|end| end.is_smcd()), "{ends:#?}");
        }
        assert!(front.terminate().success(), "{}", front.errors());
        let pid = fs::read_to_string(dir.join("back.pid")).expect("nginx's own file");
        usmc_tests::fixture::tool("kill", &["-TERM", pid.trim()]);
        fixture.wait_until("the daemon's end", || !dir.join("back.pid").exists());
        drop(front);
        fixture.finish();
    }
}

#[test]
fn connection_close() {
    let fixture = Fixture::new("nginx close");
    let web = serve(&fixture, true, true);
    let args = ["-t1", "-c10", "-d2s", "-H", "Connection: close"];
    assert_all_well(&wrk(&fixture, web.port, &args, "/").succeed());
    // And the next one that stays is accelerated.
    let load = wrk(&fixture, web.port, &["-t1", "-c10", "-d60s"], "/");
    assert_all_well(&end_of_seen(&fixture, web.port, load));
    end(fixture, web);
}

#[test]
fn proxy_with_kept_upstream_connections() {
    let fixture = Fixture::new("nginx proxy");
    let web = serve(&fixture, false, false);
    let load = wrk(&fixture, web.port, &["-t1", "-c32", "-d60s"], "/proxied/");
    assert_all_well(&end_of_seen(&fixture, web.port, load));
    end(fixture, web);
}

#[test]
fn large_files_arrive_whole() {
    for sendfile in [true, false] {
        let fixture = Fixture::new("curl");
        let web = serve(&fixture, false, sendfile);
        for path in ["/large", "/proxied/large"] {
            let out = fixture.scratch().join("out");
            let url = format!("http://127.0.0.1:{}{path}", web.port);
            let mut curl = fixture.command("curl");
            curl.args(["-sS", "--fail", "-o"]).arg(&out).arg(&url);
            fixture.run(curl);
            let got = fs::read(&out).expect("curl's file");
            assert!(got == web.large, "{path} arrived changed ({} bytes)", got.len());
            // A reader that is slow fills the connection.
            let mut slow = fixture.command("curl");
            slow.args(["-sS", "--fail", "--limit-rate", "16M", "-o"]).arg(&out).arg(&url);
            let mut slow = fixture.spawn(slow);
            slow.succeed();
            assert!(fs::read(&out).expect("curl's file") == web.large, "{path}, slowly");
        }
        end(fixture, web);
    }
}

#[test]
fn reload_under_load_goes_on_serving() {
    let fixture = Fixture::new("nginx reload");
    let web = serve(&fixture, false, true);
    let mut old = Vec::new();
    for _ in 0..5 {
        old = procfs::children(web.nginx.pid());
        web.nginx.signal(libc::SIGHUP);
        let url = format!("http://127.0.0.1:{}/[1-50]", web.port);
        let mut curl = fixture.command("curl");
        curl.args(["-sS", "-o", "/dev/null", "-w", "%{http_code}\\n"]).arg(url);
        let codes = fixture.run(curl);
        assert_eq!(codes.lines().filter(|c| *c == "404").count(), 50, "{codes}");
    }
    // The old workers close their idle connections, whoever has just written to them.
    fixture.wait_until("the old workers to end", || {
        let workers = procfs::children(web.nginx.pid());
        !workers.is_empty() && !workers.iter().any(|w| old.contains(w))
    });
    let load = wrk(&fixture, web.port, &["-t1", "-c20", "-d60s"], "/");
    assert_all_well(&end_of_seen(&fixture, web.port, load));
    end(fixture, web);
}

/// The new binary gets the listening sockets by exec; it has nothing else in common with the old one.
#[test]
fn upgraded_binary_goes_on_with_the_listeners() {
    let fixture = Fixture::new("nginx upgrade");
    let (mut command, port, _) = configured(&fixture, false, true);
    // Without a parent that waits for it, or it refuses.
    command.args(["-g", "error_log error.log warn;"]);
    fixture.run(command);
    let master = || -> Option<i32> {
        fs::read_to_string(fixture.scratch().join("nginx.pid")).ok()?.trim().parse().ok()
    };
    // SAFETY: a signal to a process that the test started.
    let signal = |pid, number| assert_eq!(unsafe { libc::kill(pid, number) }, 0);
    fixture.wait_until("the pid file", || master().is_some());
    let old = master().expect("its number");
    fixture.wait_until("a worker of the old binary", || takes_signals(old));
    signal(old, libc::SIGUSR2);
    fixture.wait_until("the new binary", || master().is_some_and(|pid| pid != old));
    let new = master().expect("its number");
    fixture.wait_until("a worker of the new binary", || takes_signals(new));
    signal(old, libc::SIGQUIT);
    fixture.wait_until("the old binary to end", || procfs::has_ended(old));
    let load = wrk(&fixture, port, &["-t1", "-c20", "-d60s"], "/");
    assert_all_well(&end_of_seen(&fixture, port, load));
    signal(new, libc::SIGQUIT);
    fixture.wait_until("the new binary to end", || procfs::has_ended(new));
    fixture.finish();
}
