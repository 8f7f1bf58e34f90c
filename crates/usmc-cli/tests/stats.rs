//! `usmc stats`, `usmc linkgroup`, `usmc device` and `usmc dump` on files that are made for the purpose.

mod support;

use std::os::unix::fs::FileExt;

use serde_json::Value;
use support::*;
use usmc::observe::{
    CLIENT_END, DEVICE_SHIFT, Fallback, Header, InRegion, PARTS, REASONS, RECORDS_OFFSET, Record,
    TOTALS_OFFSET, Totals, WAS_SMCD,
};
use usmc::reason::Reason;

fn json(args: &[&str]) -> Value {
    let output = output(&mut usmc(args));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Writes a word of record `index`.
fn put_u32(file: &std::fs::File, index: usize, at: usize, value: u32) {
    let at = RECORDS_OFFSET + index * size_of::<Record>() + at;
    file.write_all_at(&value.to_ne_bytes(), at as u64).expect("a word");
}

fn put_u64(file: &std::fs::File, at: usize, value: u64) {
    file.write_all_at(&value.to_ne_bytes(), at as u64).expect("a word");
}

fn record_at(index: usize) -> usize {
    RECORDS_OFFSET + index * size_of::<Record>()
}

#[test]
fn records_and_totals_are_summed_up() {
    use std::mem::offset_of;
    let live = Rec { tx_bytes: 1000, rx_bytes: 70, ..Rec::smcd("127.0.0.1:50001", "127.0.0.1:6") };
    let tcp = Rec::tcp("127.0.0.1:50002", "127.0.0.1:6", 17);
    let file = record_file(&[live, tcp]);
    put_u32(&file, 0, offset_of!(Record, slot), CLIENT_END | WAS_SMCD | 3);
    put_u64(&file, record_at(0) + offset_of!(Record, tx_calls), 10);
    put_u32(&file, 0, offset_of!(Record, tx_full), 4);
    put_u32(&file, 0, offset_of!(Record, bells_sent), 5);
    let total = |at: usize, value| put_u64(&file, TOTALS_OFFSET + at, value);
    total(offset_of!(Totals, closed), 234);
    total(offset_of!(Totals, closed) + 16, 30);
    total(offset_of!(Totals, smcd) + 8, 7);
    // Of the accepting end: peer is not under uSMC.
    total(offset_of!(Totals, fallback) + 8, 2);
    // Of the connecting end: peer withdrew. Threads count apart.
    total(offset_of!(Totals, fallback) + 8 * (REASONS + 11), 1);
    total(
        offset_of!(Totals, fallback) + (PARTS - 1) * size_of::<Fallback>() + 8 * (REASONS + 11),
        2,
    );
    total(offset_of!(Totals, set_sleeps), 6);
    total(offset_of!(Totals, cork), 8);
    let holder = Holder::new(&file);
    let pid = holder.pid().to_string();
    let stats = &json(&["stats", "--json", "-p", &pid])["devices"][0];
    for (path, value) in [
        ("/tx/bytes", 1234),
        ("/tx/requests", 40),
        ("/tx/buffer_full", 4),
        ("/rx/bytes", 70),
        ("/smc_connections/client", 8),
        ("/smc_connections/server", 0),
        ("/tcp_fallback/server", 3),
        ("/handshake_errors/client", 3),
        ("/doorbells_sent", 5),
        ("/sleeps", 6),
        ("/cork", 8),
    ] {
        assert_eq!(stats.pointer(path), Some(&value.into()), "{path} of {stats}");
    }
    let text = stdout(&output(&mut usmc(&["stats", "-d", "-p", &pid])));
    for line in [
        "SMC Connections Summary",
        "  Total connections handled            14",
        "  SMC connections                       8 (client 8, server 0)",
        "  TCP fallback                          3 (client 0, server 3)",
        "    peer is not under uSMC on this device: 2 (client 0, server 2)",
        "  Data transmitted (Bytes)           1234 (1.234K)",
        "  Buffer full                           4 (10.00%)",
        "  Special socket calls                  8",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
}

#[test]
fn what_is_of_a_region_is_counted_apart() {
    use std::mem::offset_of;
    let live = Rec { tx_bytes: 1000, rx_bytes: 70, ..Rec::smcd("127.0.0.1:50011", "127.0.0.1:6") };
    let other = Rec { tx_bytes: 5, ..Rec::smcd("127.0.0.1:50012", "127.0.0.1:6") };
    let full = Rec::tcp("127.0.0.1:50013", "127.0.0.1:6", 36);
    let file = record_file(&[live, other, full]);
    let second = 2 << DEVICE_SHIFT;
    for (index, slot) in
        [(0, CLIENT_END | WAS_SMCD | second), (1, CLIENT_END | WAS_SMCD), (2, CLIENT_END | second)]
    {
        put_u32(&file, index, offset_of!(Record, slot), slot);
    }
    let id = offset_of!(Header, regions) + 16;
    put_u64(&file, id, 0x11);
    put_u64(&file, id + 8, 0x22);
    let total = |at: usize, value| put_u64(&file, TOTALS_OFFSET + at, value);
    total(offset_of!(Totals, closed), 300);
    total(offset_of!(Totals, smcd) + 8, 9);
    total(offset_of!(Totals, fallback) + 8 * (REASONS + 36), 4);
    let of_region = offset_of!(Totals, regions) + size_of::<InRegion>();
    total(of_region + offset_of!(InRegion, bytes), 200);
    total(of_region + offset_of!(InRegion, smcd) + 8, 7);
    total(of_region + offset_of!(InRegion, fallback) + 8 * (REASONS + 36), 3);
    let holder = Holder::new(&file);
    let pid = holder.pid().to_string();
    let stats = &json(&["stats", "--json", "-p", &pid])["devices"][0];
    for (path, value) in [
        ("/tx/bytes", 1305),
        ("/smc_connections/client", 11),
        ("/tcp_fallback/client", 5),
        ("/by_memory/0/tx_bytes", 105),
        ("/by_memory/0/smc_connections/client", 3),
        ("/by_memory/0/tcp_fallback/client", 1),
        ("/by_memory/1/tx_bytes", 1200),
        ("/by_memory/1/rx_bytes", 70),
        ("/by_memory/1/smc_connections/client", 8),
        ("/by_memory/1/tcp_fallback/client", 4),
        ("/by_memory/1/fallback_reasons/0/client", 4),
    ] {
        assert_eq!(stats.pointer(path), Some(&value.into()), "{path} of {stats}");
    }
    assert_eq!(stats["by_memory"][0]["device"], "loopback");
    assert_eq!(stats["by_memory"][1]["device"], "00000000000000110000000000000022");
    assert_eq!(stats["by_memory"][1]["fallback_reasons"][0]["reason"], "region full");
    let text = stdout(&output(&mut usmc(&["stats", "-d", "-p", &pid])));
    for line in [
        "By Device      Connections  TCP fallback        RX Bytes        TX Bytes",
        "  loopback               3             1               0             105",
        "  00000000               8             4              70            1200",
        "    region full: 4 (client 4, server 0)",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
}

#[test]
fn regions_of_the_configuration_are_listed_with_what_is_in_the_way() {
    let dir = TempDir::new();
    let path = dir.path().join("region");
    let path = path.to_str().expect("UTF-8");
    let made = output(&mut usmc(&["region", "init", path, "--size", "2M"]));
    assert!(made.status.success(), "{}", stderr(&made));
    let empty = dir.file("empty", &[0; 1 << 12]);
    let both = format!("{path},{empty}");
    let found = json(&["device", "--json", "--regions", &both]);
    let [region, other] = &found["regions"].as_array().expect("an array")[..] else {
        panic!("{found}")
    };
    assert_eq!((&region["provider"], &region["path"]), (&"file".into(), &path.into()));
    assert_eq!((&region["state"], &region["remedy"]), (&"usable".into(), &Value::Null));
    assert_eq!((&region["units"], &region["free"]), (&21.into(), &21.into()), "{region}");
    assert_eq!((&region["peers"], &region["in_use"]), (&0.into(), &false.into()));
    assert_eq!(region["gid"].as_str().map(str::len), Some(32));
    assert_eq!(other["state"], "file or device has no region in it");
    assert!(other["gid"].is_null() && other["remedy"].as_str().is_some(), "{other}");
    let text = stdout(&output(&mut usmc(&["device", "--regions", &both])));
    let remedy = format!("{empty}: {}", other["remedy"].as_str().expect("text"));
    assert!(text.contains(path) && text.lines().any(|line| line == remedy), "{text}");
}

#[test]
fn both_ends_of_a_segment_are_one_link_group() {
    use std::mem::offset_of;
    let client = record_file(&[
        Rec::smcd("127.0.0.1:50003", "127.0.0.1:7"),
        Rec::smcd("127.0.0.1:50004", "127.0.0.1:7"),
    ]);
    let server = record_file(&[Rec::smcd("127.0.0.1:7", "127.0.0.1:50003")]);
    // The second was declined, and has a code where others have a segment.
    let alone = record_file(&[
        Rec::smcd("127.0.0.1:8", "127.0.0.1:50005"),
        Rec::tcp("127.0.0.1:8", "127.0.0.1:50006", Reason::Declined as u8),
    ]);
    for (file, index, slot, segment) in [
        (&client, 0, CLIENT_END, 0xabcd_0000_0042),
        (&client, 1, CLIENT_END | 1, 0xabcd_0000_0042),
        (&server, 0, 0, 0xabcd_0000_0042),
        (&alone, 0, 0, 0x77u64),
        (&alone, 1, 0, 0x0303_0001),
    ] {
        put_u32(file, index, offset_of!(Record, slot), slot | WAS_SMCD);
        put_u64(file, record_at(index) + offset_of!(Record, segment), segment);
    }
    let [client, server, alone] = [client, server, alone].map(|file| Holder::new(&file));
    let group = |id: &str| json(&["linkgroup", "show", id, "--json"])[0].clone();
    let pair = group("00000042");
    assert_eq!(pair["client"]["pid"], client.pid());
    assert_eq!(pair["server"]["pid"], server.pid());
    assert_eq!((&pair["conns"], &pair["segments"]), (&2.into(), &1.into()));
    let single = group("00000077");
    assert!(single["client"].is_null() && single["server"]["pid"] == alone.pid(), "{single}");
    let text = stdout(&output(&mut usmc(&["linkgroup"])));
    assert!(text.starts_with("LG-ID") && text.contains("00000042"), "{text}");
    assert_eq!(json(&["linkgroup", "00000042", "--json"])[0], pair, "show may be left out");
    for all in [&["linkgroup", "all"][..], &["linkgroup", "show", "all"]] {
        assert!(stdout(&output(&mut usmc(all))).contains("00000077"));
    }
    assert!(!output(&mut usmc(&["linkgroup", "03030001"])).status.success());
    for none in [&["linkgroup", "show", "12345678"][..], &["linkgroup", "12345678"]] {
        assert!(stderr(&output(&mut usmc(none))).contains("there is no link group 12345678"));
    }
    assert_eq!(output(&mut usmc(&["linkgroup", "00000042", "all"])).status.code(), Some(1));
}

#[test]
fn devices_are_those_in_use_and_the_configured_one() {
    let dir = TempDir::new();
    let mut command = usmc(&["check", "--ism-dir", dir.str()]);
    // Makes the device.
    assert!(output(command.env("USMC_LIBRARY", real_library())).status.success());
    let found = json(&["device", "--json", "--ism-dir", dir.str()]);
    let smcd = found["smcd"].as_array().expect("an array");
    let ours = smcd.iter().find(|d| d["dir"] == dir.str()).expect("ours");
    assert_eq!((&ours["type"], &ours["chid"]), (&"loopback".into(), &"ffff".into()));
    assert_eq!(ours["in_use"], false);
    let gid = ours["gid"].as_str().expect("a GID");
    assert!(gid.len() == 32 && gid != "0".repeat(32), "{gid}");

    // Its name in the pnet table is that of its directory; the user's ids are marked, as by smcd.
    let file = dir.path().join("usmc.toml");
    let name = dir.path().file_name().and_then(|name| name.to_str()).expect("a name");
    let table = format!("[[pnet]]\nid = \"NET1\"\nibdevice = \"{name}\"\n");
    std::fs::write(&file, table).expect("a file");
    let options = ["--ism-dir", dir.str(), "--config", file.to_str().expect("a name")];
    for words in [&[][..], &["show"], &["all"], &["show", "all"]] {
        let args = [&["device"], words, &options].concat();
        let text = stdout(&output(&mut usmc(&args)));
        let line = text.lines().find(|line| line.ends_with(dir.str())).expect("ours");
        assert!(line.contains(" *NET1 "), "{text}");
    }
    let only = json(&[&["device", "show", "ibdev", "none0", "--json"], &options[..]].concat());
    assert_eq!(only, serde_json::json!({ "smcd": [], "regions": [], "smcr": [] }));
    for (words, why) in [
        (&["device", "none"][..], "is none of show, all, netdev and ibdev"),
        (&["device", "show", "netdev"], "netdev of which name?"),
        (&["device", "all", "ibdev", "rxe0"], "all devices, or those of a name?"),
    ] {
        let refused = output(&mut usmc(words));
        assert!(!refused.status.success() && stderr(&refused).contains(why), "{words:?}");
    }
}

#[test]
fn hostile_files_are_refused_by_dump_and_harm_no_statistics() {
    use std::mem::offset_of;
    for (offset, size) in [
        (0u64, 0u64),
        (u64::MAX, 4096),
        (RECORDS_OFFSET as u64, 4097),
        (RECORDS_OFFSET as u64, 1 << 40),
        (u64::MAX - 4095, 4096),
    ] {
        let file = record_file(&[Rec::smcd("127.0.0.1:50006", "127.0.0.1:9")]);
        put_u64(&file, offset_of!(Header, ring_offset), offset);
        put_u64(&file, offset_of!(Header, ring_size), size);
        for i in 0..size_of::<Totals>() / 8 {
            put_u64(&file, TOTALS_OFFSET + 8 * i, u64::MAX / 3);
        }
        let holder = Holder::new(&file);
        let pid = holder.pid().to_string();
        let dump = output(&mut usmc(&["dump", "-p", &pid]));
        assert_eq!(dump.status.code(), Some(1));
        assert!(stderr(&dump).contains("has no ring to capture by"), "{}", stderr(&dump));
        let stats = output(&mut usmc(&["stats", "-d", "-p", &pid]));
        assert!(stats.status.success(), "{}", stderr(&stats));
    }
}

/// A ring behind the records, and what its process has written there.
#[test]
fn a_ring_full_of_nonsense_ends_the_capture_of_its_process() {
    use std::mem::offset_of;
    use usmc::observe::{CAPTURE_OFFSET, Capture, Event};
    use usmc::tap::TapControl;
    const RING: u64 = 1 << 16;
    const SIZE: u64 = 1 << 16;
    let tap = CAPTURE_OFFSET + offset_of!(Capture, tap);
    let header = size_of::<Event>() as u32;
    // Bytes of the message, bytes of the stream in it, the writer's cursor.
    for (len, bytes, head) in [
        (0, 0, 4096),
        (header - 8, 0, 4096),
        (header + 1, 0, 4096),
        (header, 1, 4096),
        (header + 8, u32::MAX, 4096),
        (!7, 8, 4096),
        (header, 0, SIZE + 1),
        (header, 0, u64::MAX),
    ] {
        let file = record_file(&[Rec::smcd("127.0.0.1:50007", "127.0.0.1:9")]);
        file.set_len(RING + SIZE).expect("room");
        put_u64(&file, offset_of!(Header, ring_offset), RING);
        put_u64(&file, offset_of!(Header, ring_size), SIZE);
        // Somebody else's session, as a process inherits it: what is there is taken.
        file.write_all_at(&1u32.to_ne_bytes(), CAPTURE_OFFSET as u64).expect("a word");
        file.write_all_at(&len.to_ne_bytes(), RING).expect("a word");
        let at = RING + offset_of!(Event, bytes) as u64;
        file.write_all_at(&bytes.to_ne_bytes(), at).expect("a word");
        put_u64(&file, tap + offset_of!(TapControl, head), head);
        let holder = Holder::new(&file);
        let dump = output(&mut usmc(&["dump", "-p", &holder.pid().to_string()]));
        let said = stderr(&dump);
        assert!(dump.status.success(), "{said}");
        assert!(said.contains("wrote nonsense into its capture ring"), "{len} {bytes}: {said}");
    }
}

#[test]
fn dump_says_what_it_cannot_do() {
    // A process with no records.
    let holder = Holder::new(&std::fs::File::open("/dev/null").expect("a file"));
    let own = holder.pid().to_string();
    for (args, why) in [
        (&["dump"][..], "LISTENER"),
        (&["dump", "nowhere"], "is no address with a port"),
        (&["dump", ":0"], "is no address with a port"),
        (&["dump", "-p", &own], "has no sockets under uSMC"),
        (&["dump", "-p", "4194305"], "there is no process"),
        (&["dump", "-w", "/nonexistent/file", ":1"], "cannot write /nonexistent/file"),
    ] {
        let output = output(&mut usmc(args));
        assert!(
            !output.status.success() && stderr(&output).contains(why),
            "{args:?}: {}",
            stderr(&output)
        );
    }
}
