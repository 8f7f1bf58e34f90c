//! `usmc ss` against record files that are correct, changing, huge and hostile.

mod support;

use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::Value;
use support::*;
use usmc::observe::{RECORDS_OFFSET, Record};
use usmc::reason::Reason;

const RECORD: usize = size_of::<Record>();

/// The rows of `usmc ss --json ARGS`, and what it said besides.
fn ss(args: &[&str]) -> (Vec<Value>, String) {
    let output = output(usmc(&["ss", "--json"]).args(args));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let rows: Value = serde_json::from_slice(&output.stdout).expect("valid JSON");
    (rows.as_array().expect("an array").clone(), stderr(&output))
}

fn rows_of(pid: u32, args: &[&str]) -> Vec<Value> {
    ss(args).0.into_iter().filter(|row| row["pid"] == pid).collect()
}

/// What ss said on standard error about one process.
fn remarks_on(pid: u32, said: &str) -> String {
    let about = format!("process {pid} ");
    said.lines().filter(|line| line.contains(&about)).collect()
}

#[test]
fn a_connection_shows_both_ends_and_the_fill_of_both_rings() {
    let client =
        Rec { tx_bytes: 1000, rx_bytes: 70, ..Rec::smcd("127.0.0.1:40001", "127.0.0.1:6379") };
    let server = Rec {
        fd: 9,
        tx_bytes: 100,
        rx_bytes: 400,
        ring_size: 131_072,
        ..Rec::smcd("127.0.0.1:6379", "127.0.0.1:40001")
    };
    let (client, server) =
        (Holder::new(&record_file(&[client])), Holder::new(&record_file(&[server])));
    let (rows, _) = ss(&[]);
    let of = |pid: u32| rows.iter().find(|row| row["pid"] == pid).expect("a row").clone();
    assert_eq!(
        of(client.pid()),
        serde_json::json!({
            "pid": client.pid(), "comm": "cat", "fd": 5, "state": "ACTIVE",
            "local": "127.0.0.1:40001", "peer": "127.0.0.1:6379", "mode": "SMCD",
            "device": "loopback", "host": null, "fallback_reason": null, "remedy": null,
            "tcp_option": null, "tx_bytes": 1000, "rx_bytes": 70, "ring_size": 262_144,
            "window": 65536, "tx_queued": 600, "rx_queued": 30,
        })
    );
    assert_eq!(of(server.pid())["tx_queued"], 30);
    assert_eq!(of(server.pid())["rx_queued"], 600);
    assert_eq!(of(server.pid())["ring_size"], 131_072);
}

#[test]
fn more_than_the_ring_may_be_unread() {
    let sender = Rec { tx_bytes: 5_000_000, ..Rec::smcd("127.0.0.1:40005", "127.0.0.1:5") };
    let reader = Rec { rx_bytes: 1_000_000, ..Rec::smcd("127.0.0.1:5", "127.0.0.1:40005") };
    let [sender, reader] = [sender, reader].map(|record| Holder::new(&record_file(&[record])));
    assert_eq!(rows_of(sender.pid(), &[])[0]["tx_queued"], 4_000_000);
    assert_eq!(rows_of(reader.pid(), &[])[0]["rx_queued"], 4_000_000);
}

#[test]
fn without_the_other_end_the_fill_is_unknown() {
    let alone = Rec::smcd("127.0.0.1:40002", "127.0.0.1:2");
    let alone = Holder::new(&record_file(&[alone]));
    let row = &rows_of(alone.pid(), &[])[0];
    assert!(row["tx_queued"].is_null() && row["rx_queued"].is_null(), "{row}");
}

#[test]
fn an_end_shared_through_fork_counts_what_any_of_its_processes_did() {
    let end = |tx| Rec { tx_bytes: tx, ..Rec::smcd("127.0.0.1:40003", "127.0.0.1:3") };
    let other = Rec { rx_bytes: 500, ..Rec::smcd("127.0.0.1:3", "127.0.0.1:40003") };
    let [parent, child, other] =
        [end(200), end(700), other].map(|record| Holder::new(&record_file(&[record])));
    assert_eq!(rows_of(other.pid(), &[])[0]["rx_queued"], 200);
    assert!(parent.pid() != child.pid());
}

#[test]
fn ipv6_and_mapped_addresses_are_written_as_people_do() {
    let v6 = Rec::smcd("[::1]:40004", "[fe80::1]:4");
    let mapped = Rec::smcd("[::ffff:10.0.0.1]:40004", "[::ffff:10.0.0.2]:4");
    let holder = Holder::new(&record_file(&[v6, mapped]));
    let rows = rows_of(holder.pid(), &[]);
    let names: Vec<_> = rows.iter().map(|r| (r["local"].clone(), r["peer"].clone())).collect();
    assert_eq!(names[0], ("10.0.0.1:40004".into(), "10.0.0.2:4".into()));
    assert_eq!(names[1], ("[::1]:40004".into(), "[fe80::1]:4".into()));
}

#[test]
fn listening_and_unconnected_sockets_show_on_demand() {
    let none = "0.0.0.0:0";
    let records = [
        Rec { state: 1, ..Rec::tcp("0.0.0.0:0", none, 0) },
        Rec { state: 2, ..Rec::tcp("0.0.0.0:8080", none, 0) },
        Rec { state: 3, ..Rec::tcp("127.0.0.1:40005", "127.0.0.1:5", 0) },
        Rec { state: 4, ..Rec::smcd("127.0.0.1:40006", "127.0.0.1:5") },
        Rec { state: 5, ..Rec::smcd("127.0.0.1:40007", "127.0.0.1:5") },
        Rec { seq: 0, ..Rec::smcd("127.0.0.1:40008", "127.0.0.1:5") },
    ];
    let holder = Holder::new(&record_file(&records));
    let states = |args: &[&str]| {
        let rows = rows_of(holder.pid(), args);
        rows.iter().map(|r| r["state"].as_str().expect("text").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(states(&[]), ["ACTIVE", "APPLCLW1", "PEERCLW1"]);
    assert_eq!(states(&["-l"]), ["LISTEN"]);
    assert_eq!(states(&["--all"]), ["INIT", "LISTEN", "ACTIVE", "APPLCLW1", "PEERCLW1"]);
    assert_eq!(rows_of(holder.pid(), &["-l"])[0]["peer"], "0.0.0.0:*");
}

#[test]
fn every_row_has_the_documented_fields_and_every_tcp_connection_a_reason() {
    let codes = [0u8, 1, 5, 15, 200];
    let records = codes.map(|code| Rec::tcp("127.0.0.1:40009", "127.0.0.1:9", code));
    let holder = Holder::new(&record_file(&records));
    let rows = rows_of(holder.pid(), &["-a"]);
    assert_eq!(rows.len(), codes.len());
    for row in rows {
        for (name, fits) in [
            ("pid", Value::is_u64 as fn(&Value) -> bool),
            ("comm", Value::is_string),
            ("fd", Value::is_u64),
            ("state", Value::is_string),
            ("local", Value::is_string),
            ("peer", Value::is_string),
            ("mode", |v| v == "TCP" || v == "SMCD"),
            ("device", Value::is_null),
            ("host", Value::is_null),
            ("remedy", |v| v.is_null() || v.as_str().is_some_and(|text| !text.is_empty())),
            ("fallback_reason", |v| v.as_str().is_some_and(|text| !text.is_empty())),
            ("tcp_option", Value::is_null),
            // Nothing here is a real socket, so the kernel knows no counters.
            ("tx_bytes", Value::is_null),
            ("rx_bytes", Value::is_null),
            ("ring_size", Value::is_null),
            ("window", Value::is_null),
            ("tx_queued", Value::is_null),
            ("rx_queued", Value::is_null),
        ] {
            assert!(row.get(name).is_some_and(fits), "{name} of {row}");
        }
        assert_eq!(row.as_object().map(|o| o.len()), Some(18));
    }
}

#[test]
fn bytes_on_tcp_are_counted_by_the_kernel() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let mut client = TcpStream::connect(listener.local_addr().expect("name")).expect("connect");
    let (server, _) = listener.accept().expect("accept");
    client.write_all(&[1; 321]).expect("send");
    let name = |s: &TcpStream| s.local_addr().expect("name").to_string();
    let record = Rec::tcp(&name(&client), &name(&server), 1);
    let holder = Holder::with_socket(&client, &record_file(&[Rec { fd: 2, ..record }]));
    let row = &rows_of(holder.pid(), &[])[0];
    assert_eq!((&row["tx_bytes"], &row["rx_bytes"]), (&321.into(), &0.into()), "{row}");
    assert_eq!(row["fallback_reason"], "peer is not under uSMC on this device");
}

#[test]
fn ten_thousand_records_are_all_there() {
    let record = |i: u32| {
        let local = format!("10.{}.{}.1:{}", i >> 12, (i >> 4) & 0xff, 1000 + (i & 15));
        Rec { fd: i, tx_bytes: u64::from(i), ..Rec::smcd(&local, "10.255.0.1:80") }
    };
    let records: Vec<Rec> = (0..10_000).map(record).collect();
    let holder = Holder::new(&record_file(&records));
    let rows = rows_of(holder.pid(), &[]);
    assert_eq!(rows.len(), 10_000);
    assert!(rows.iter().all(|row| row["fd"] == row["tx_bytes"]));
}

#[test]
fn a_file_that_two_processes_hold_belongs_to_the_one_it_names() {
    let record = Rec::smcd("10.254.0.1:40010", "10.254.0.2:10");
    let file = record_file(&[record]);
    let holders = [Holder::new(&file), Holder::new(&file)];
    for owner in &holders {
        file.write_all_at(&header(1, owner.pid()), 0).expect("header");
        let (rows, _) = ss(&[]);
        let pids: Vec<_> =
            rows.iter().filter(|r| r["local"] == "10.254.0.1:40010").map(|r| &r["pid"]).collect();
        assert_eq!(pids, [&Value::from(owner.pid())]);
    }
}

#[test]
fn a_record_in_the_middle_of_a_change_is_left_out_and_mentioned() {
    let records = [
        Rec { seq: 7, ..Rec::smcd("127.0.0.1:40011", "127.0.0.1:11") },
        Rec::smcd("127.0.0.1:40012", "127.0.0.1:11"),
    ];
    let holder = Holder::new(&record_file(&records));
    let (rows, said) = ss(&[]);
    let locals: Vec<_> =
        rows.iter().filter(|r| r["pid"] == holder.pid()).map(|r| &r["local"]).collect();
    assert_eq!(locals, ["127.0.0.1:40012"]);
    assert!(remarks_on(holder.pid(), &said).contains("1 records kept changing"), "{said}");
}

#[test]
fn a_record_is_never_a_mixture_of_two() {
    let states =
        [Rec::smcd("127.0.0.1:41000", "127.0.0.1:11000"), Rec::smcd("[::2]:42000", "[::2]:12000")];
    let file = record_file(&[states[0]]);
    let holder = Holder::new(&file);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut seq = 2u32;
            while !stop.load(Ordering::Relaxed) {
                let record = states[(seq as usize / 2) % 2];
                let put = |seq: u32| {
                    file.write_all_at(&seq.to_ne_bytes(), RECORDS_OFFSET as u64).expect("seq");
                };
                put(seq + 1);
                let body = RECORDS_OFFSET as u64 + 4;
                file.write_all_at(&record.bytes()[4..], body).expect("record");
                seq = (seq + 2) & 0xffff | 2;
                put(seq);
            }
        });
        for _ in 0..20 {
            for row in rows_of(holder.pid(), &[]) {
                let ends = (row["local"].as_str(), row["peer"].as_str());
                let whole = [
                    (Some("127.0.0.1:41000"), Some("127.0.0.1:11000")),
                    (Some("[::2]:42000"), Some("[::2]:12000")),
                ];
                assert!(whole.contains(&ends), "{row}");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn nonsense_in_a_file_harms_nobody() {
    let good = Rec::smcd("127.0.0.1:40013", "127.0.0.1:13");
    let neighbour = Holder::new(&record_file(&[good]));
    for seed in 1..=8u64 {
        let mut noise = vec![0; 4096 * RECORD];
        Noise(seed).fill(&mut noise);
        let head = header(if seed % 2 == 0 { u32::MAX } else { 4096 }, seed as u32);
        let all_noise = seed > 6;
        let file = memfd(&[(if all_noise { 24 } else { RECORDS_OFFSET }, &noise), (0, &head)]);
        let hostile = Holder::new(&file);
        let (rows, said) = ss(&["-a"]);
        assert!(rows.iter().any(|r| r["pid"] == neighbour.pid()), "the neighbour is still seen");
        assert!(remarks_on(hostile.pid(), &said).contains("made no sense"), "{said}");
    }
}

#[test]
fn files_that_are_not_what_they_say_are_refused_in_words() {
    let whole = header(1, 0);
    let changed = |at: usize, byte: u8| {
        let mut header = whole.clone();
        header[at] = byte;
        header
    };
    let record = Rec::smcd("127.0.0.1:40014", "127.0.0.1:14").bytes();
    for (header, remark) in [
        (&[][..], "shows no readable records"),
        (&whole[..9], "shows no readable records"),
        (&changed(0, b'X'), "shows no readable records"),
        (&changed(8, 9), "runs another version of the library (layout 9)"),
        (&changed(12, 64), "runs another version"),
        (&vec![0; whole.len()][..], ""),
    ] {
        let is_empty = header.len() < whole.len();
        let records: &[u8] = if is_empty { &[] } else { &record };
        let at = if is_empty { 0 } else { RECORDS_OFFSET };
        let holder = Holder::new(&memfd(&[(0, header), (at, records)]));
        let (rows, said) = ss(&["-a"]);
        assert!(rows.iter().all(|row| row["pid"] != holder.pid()));
        let said = remarks_on(holder.pid(), &said);
        assert!(said.contains(remark) && said.is_empty() == remark.is_empty(), "{remark}: {said}");
    }
}

#[test]
fn whoever_only_reads_a_file_does_not_own_it() {
    let file = memfd(&[(0, b"too short")]);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let reader = Holder::new(&File::open(path).expect("the file, for reading"));
    let owner = Holder::new(&file);
    drop(file);
    let (_, said) = ss(&[]);
    assert_eq!(remarks_on(reader.pid(), &said), "");
    assert!(remarks_on(owner.pid(), &said).contains("shows no readable records"), "{said}");
}

#[test]
fn a_file_that_ends_early_shows_the_records_it_has() {
    let record = Rec::smcd("127.0.0.1:40015", "127.0.0.1:15");
    let file = record_file(&[record; 3]);
    let cut = |len: usize| file.set_len(len as u64).expect("truncation");
    let holder = Holder::new(&file);
    file.write_all_at(&header(u32::MAX, holder.pid()), 0).expect("header");
    for (len, rows) in
        [(RECORDS_OFFSET + 3 * RECORD, 3), (RECORDS_OFFSET + 2 * RECORD - 1, 1), (100, 0)]
    {
        cut(len);
        assert_eq!(rows_of(holder.pid(), &[]).len(), rows, "{len}");
    }
    // Sparse and absurdly large: bounded by what we are willing to look at.
    cut(1 << 40);
    assert_eq!(rows_of(holder.pid(), &[]).len(), 0);
}

#[test]
fn a_file_that_shrinks_while_it_is_read_harms_nobody() {
    let record = Rec::smcd("127.0.0.1:40016", "127.0.0.1:16");
    let file = record_file(&vec![record; 20_000]);
    let holder = Holder::new(&file);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut noise = Noise(7);
            while !stop.load(Ordering::Relaxed) {
                let mut len = [0; 3];
                noise.fill(&mut len);
                let len = u32::from_le_bytes([len[0], len[1], len[2], 0]);
                file.set_len(u64::from(len % 2_500_000)).expect("truncation");
            }
        });
        for _ in 0..10 {
            assert!(rows_of(holder.pid(), &["-a"]).len() <= 20_000);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn the_table_is_aligned_and_free_of_control_characters() {
    let dir = TempDir::new();
    let cat = output(std::process::Command::new("sh").args(["-c", "command -v cat"]));
    let evil = dir.path().join("a\u{1b}[31mb\n");
    std::os::unix::fs::symlink(stdout(&cat).trim(), &evil).expect("a link");
    let records = [
        Rec { tx_bytes: 123_456, ..Rec::smcd("127.0.0.1:40017", "127.0.0.1:17") },
        Rec::tcp("[2001:db8::1]:40018", "127.0.0.1:17", 5),
    ];
    let file: File = record_file(&records);
    let holder = Holder::named(evil.to_str().expect("UTF-8"), &file);
    let output = output(&mut usmc(&["ss"]));
    let text = stdout(&output);
    let pid = holder.pid().to_string();
    let lines: Vec<&str> =
        text.lines().filter(|l| l.split_whitespace().nth(1) == Some(&pid)).collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines.iter().all(|line| line.contains("a?[31mb?")), "{text}");
    let title = text.lines().next().expect("a title");
    for column in ["Local Address", "Peer Address", "Mode", "Fallback-Reason"] {
        let at = title.find(column).expect(column);
        for line in &lines {
            let before: Vec<char> = line.chars().skip(at - 1).take(2).collect();
            assert!(before[0] == ' ' && before[1] != ' ', "{column}:\n{text}");
        }
    }
    assert!(
        lines[1].ends_with("excluded by configuration")
            || lines[0].ends_with("excluded by configuration")
    );
}

/// One end is in the ring before the other has noticed it, and one offers before the other has looked.
#[test]
fn a_pending_handshake_is_shown_by_both_ends() {
    let [short, no_offer, pending] =
        [Reason::Short, Reason::NoOffer, Reason::Pending].map(|why| why as u8);
    let far = Rec { tx_bytes: 18, rx_bytes: 21, ..Rec::smcd("127.0.0.1:40020", "127.0.0.1:20") };
    let rows = |one: Rec, other: &[Rec]| {
        let (one, other) = (Holder::new(&record_file(&[one])), Holder::new(&record_file(other)));
        let (rows, _) = ss(&[]);
        let of =
            |pid: u32| rows.iter().filter(|row| row["pid"] == pid).cloned().collect::<Vec<_>>();
        (of(one.pid())[0].clone(), of(other.pid()))
    };
    let near = |reason| Rec::tcp("127.0.0.1:20", "127.0.0.1:40020", reason);
    let is_pending =
        |row: &Value| row["mode"] == "TCP" && row["fallback_reason"] == Reason::Pending.text();
    let (one, other) = rows(far, &[near(pending)]);
    assert!(is_pending(&one) && is_pending(&other[0]) && one["ring_size"].is_null(), "{one}");
    for reason in [short, no_offer] {
        let offers = Rec::tcp("127.0.0.1:40020", "127.0.0.1:20", pending);
        let (one, other) = rows(offers, &[near(reason)]);
        assert!(is_pending(&one) && is_pending(&other[0]), "{reason}: {one} {other:?}");
    }
    // What has failed has.
    let (one, other) = rows(far, &[near(Reason::NoSegment as u8)]);
    assert!(one["mode"] == "SMCD" && !is_pending(&other[0]), "{one}");
    // Another process has the same end and uses it.
    let shared = Rec::smcd("127.0.0.1:20", "127.0.0.1:40020");
    let (one, _) = rows(far, &[near(pending), shared]);
    assert_eq!(one["mode"], "SMCD");
}

/// A person is told where to read on; a script is not.
#[test]
fn who_reads_it_at_a_terminal_is_told_what_helps() {
    let rec = Rec::tcp("10.1.2.3:40000", "10.1.2.4:80", usmc::reason::Reason::NotRegistered as u8);
    let _holder = Holder::new(&record_file(&[rec]));
    let said = "TCP for a reason that something can be done about: see usmc check --reasons";
    let piped = output(&mut usmc(&["ss"]));
    assert!(
        stdout(&piped).contains("10.1.2.3:40000") && !stderr(&piped).contains(said),
        "{}",
        stderr(&piped)
    );
    let command = format!("{} ss; {0} ss --json >&2", env!("CARGO_BIN_EXE_usmc"));
    let shown = output(clean("script").args(["-qec", &command, "/dev/null"]));
    let shown = stdout(&shown);
    assert_eq!(shown.matches(said).count(), 1, "{shown}");
}

#[test]
fn a_capture_is_not_written_to_a_terminal() {
    let command = format!("{} dump :1", env!("CARGO_BIN_EXE_usmc"));
    let refused = output(clean("script").args(["-qec", &command, "/dev/null"]));
    assert_eq!(refused.status.code(), Some(1));
    assert!(stdout(&refused).contains("use -w FILE, or a pipe to tshark"), "{}", stdout(&refused));
}
