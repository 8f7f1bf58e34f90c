//! The table that people read.

use comfy_table::presets::{ASCII_MARKDOWN, UTF8_FULL_CONDENSED};
use comfy_table::{CellAlignment, ContentArrangement, Table};

use super::mode::Mode;
use super::record::{CaseRecord, MeasureRecord, Record, ServerRecord};
use super::statistics::short;

/// How it is drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Style {
    /// With lines.
    Text,
    /// For a README.
    Markdown,
}

/// A column's title and what it says of a figure; the last argument: whether it is the first of its case.
type Column = (&'static str, fn(&CaseRecord, &MeasureRecord, bool) -> String);

const WORKLOAD: Column =
    ("workload", |case, measure, _| format!("{}: {}", case.name, measure.name));
const TCP: Column = ("TCP", |_, measure, _| figure(measure, Mode::Tcp));
const UNIX: Column = ("UNIX", |_, measure, _| figure(measure, Mode::Unix));
const USMC: Column = ("uSMC", |_, measure, _| figure(measure, Mode::Usmc));
const RATIO: Column = ("uSMC over TCP", |_, measure, _| ratio(measure));
const TARGET: Column = ("target", |_, measure, _| targets(measure));
const PUBLISHED: Column = ("kernel SMC, published", |_, measure, _| published(measure));
const CPU_WITH_AGENTS: Column = ("CPU per operation, client + server: TCP → uSMC, + agents", CPU.1);
const CPU: Column = ("CPU per operation, client + server: TCP → uSMC", |case, _, first| {
    if first { cpu(case) } else { String::new() }
});
const FRAMES: Column =
    (
        "frames of a run: TCP → uSMC",
        |case, _, first| {
            if first { frames(case) } else { String::new() }
        },
    );

const WAKES: Column = ("sleeps and doorbells of uSMC", |case, _, first| match &case.wakes {
    Some(wakes) if first => {
        let (run, each) = (short(wakes.run.median), short(wakes.each.median));
        format!("{run}, {each} per {}", case.per)
    }
    _ => String::new(),
});

const AGENTS: Column = ("posts, WRs and completions of agents", |case, _, first| match first {
    true => agents(case),
    false => String::new(),
});

const HERE: &[Column] = &[WORKLOAD, TCP, UNIX, USMC, RATIO, TARGET, PUBLISHED, CPU];
const BETWEEN_MACHINES: &[Column] = &[WORKLOAD, TCP, USMC, RATIO, CPU, FRAMES, WAKES];
const BY_RDMA: &[Column] = &[WORKLOAD, TCP, USMC, RATIO, CPU_WITH_AGENTS, FRAMES, WAKES, AGENTS];

fn is_by_rdma(record: &Record) -> bool {
    record.cases.iter().any(|case| !case.agents.is_empty())
}

/// All figures.
pub fn table(record: &Record, style: Style) -> String {
    let columns = match (&record.server, is_by_rdma(record)) {
        (None, _) => HERE,
        (Some(_), false) => BETWEEN_MACHINES,
        (Some(_), true) => BY_RDMA,
    };
    let mut table = Table::new();
    table.load_style(match style {
        Style::Text => UTF8_FULL_CONDENSED,
        Style::Markdown => ASCII_MARKDOWN,
    });
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(columns.iter().map(|(title, _)| *title));
    for case in &record.cases {
        for (i, measure) in case.measures.iter().enumerate() {
            table.add_row(columns.iter().map(|(_, cell)| cell(case, measure, i == 0)));
        }
    }
    let right = columns.iter().position(|(title, _)| *title == RATIO.0).unwrap_or_default();
    for column in table.column_iter_mut().skip(1).take(right) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// What a reader has to know of it.
pub fn note(record: &Record) -> String {
    let text = "Median (lowest–highest) over the rounds; a ratio is within one round, above 1 is better. The library \
                itself said of every run\nwhere its bytes went";
    match &record.server {
        None => format!("{text}. Kernel SMC: as published, on other machines.\n"),
        Some(server) => text.to_owned() + &between_machines(record, server),
    }
}

fn between_machines(record: &Record, server: &ServerRecord) -> String {
    let (client, interface) = (&record.machine, &server.interface);
    let mut text = format!(
        ", at both ends. Frames: what the client's interface {interface} sent and received, whoever's they were.\n\
         The client's machine is {}; the server's is {}.\n",
        client.virtualisation(),
        server.machine.virtualisation()
    );
    if is_by_rdma(record) {
        text += "Agents: those of both hosts, with all that they did meanwhile, for whatever connection. Frames that a device sends by \
                 itself are not\nthe interface's. Each connection of `connect` is by RDMA; by default those of one request stay TCP (usmc.toml(5), \
                 change_over).\n";
    }
    if client.is_emulated() || server.machine.is_emulated() {
        text += "Where machines are emulated TCP's side is, too, and its packets cost far more than on real processors: these \
                 ratios say nothing\nof other machines, and mostly flatter uSMC; frames are counted exactly.\n";
    }
    text
}

fn figure(measure: &MeasureRecord, mode: Mode) -> String {
    match measure.figures.get(&mode) {
        Some(figure) => format!("{} {}", figure.shown(), measure.unit),
        None => "–".to_owned(),
    }
}

fn ratio(measure: &MeasureRecord) -> String {
    match (measure.beyond_tcp, measure.factors.get(&Mode::Usmc)) {
        (Some(more), _) => format!("TCP + {} {}", more.shown(), measure.unit),
        (None, Some(factor)) => format!("{} ×", factor.shown()),
        (None, None) => String::new(),
    }
}

fn targets(measure: &MeasureRecord) -> String {
    let targets = measure.targets.iter().map(|verdict| {
        let met = match verdict.met {
            Some(true) => "met",
            Some(false) => "not met",
            None => "nothing to compare with",
        };
        format!("{}: {met}", verdict.target)
    });
    targets.collect::<Vec<String>>().join("; ")
}

fn published(measure: &MeasureRecord) -> String {
    match (measure.kernel_smc, measure.kernel_unix) {
        (Some(smc), Some(unix)) => format!("{} × (UNIX {} ×)", short(smc), short(unix)),
        (Some(smc), None) => format!("{} ×", short(smc)),
        (None, _) => String::new(),
    }
}

fn frames(case: &CaseRecord) -> String {
    let of = |mode| {
        let frames = case.frames.get(&mode)?;
        Some((short(frames.run.median), short(frames.each.median)))
    };
    match (of(Mode::Tcp), of(Mode::Usmc)) {
        (Some((tcp, tcp_each)), Some((usmc, usmc_each))) => {
            format!("{tcp} → {usmc}, {tcp_each} → {usmc_each} per {}", case.per)
        }
        _ => String::new(),
    }
}

fn agents(case: &CaseRecord) -> String {
    let of = |name| case.agents.get(name).map(|count| short(count.each.median));
    match ["posts", "requests", "completions"].map(of) {
        [Some(posts), Some(requests), Some(completions)] => {
            format!("{posts}, {requests}, {completions} per {}", case.per)
        }
        _ => String::new(),
    }
}

fn cpu(case: &CaseRecord) -> String {
    let of = |mode| {
        let cpu = case.cpu.get(&mode)?;
        let ends = format!("{} + {}", time(cpu.client_ns.median), time(cpu.server_ns.median));
        Some(match cpu.agents_ns {
            Some(agents) => format!("{ends} + {}", time(agents.median)),
            None => ends,
        })
    };
    match (of(Mode::Tcp), of(Mode::Usmc)) {
        (Some(tcp), Some(usmc)) => format!("{tcp} → {usmc} per {}", case.per),
        _ => String::new(),
    }
}

fn time(ns: f64) -> String {
    match ns {
        ns if ns < 1e3 => format!("{} ns", short(ns)),
        ns if ns < 1e6 => format!("{} µs", short(ns / 1e3)),
        ns => format!("{} ms", short(ns / 1e6)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::{sample, sample_by_rdma};
    use super::*;

    #[test]
    fn every_figure_has_a_line_with_all_its_columns() {
        let record = sample();
        for style in [Style::Text, Style::Markdown] {
            let text = table(&record, style);
            let lines: Vec<&str> = text.lines().collect();
            let width = |line: &str| line.chars().count();
            assert!(lines.iter().all(|line| width(line) == width(lines[0])), "{text}");
            for case in &record.cases {
                for measure in &case.measures {
                    let name = format!("{}: {}", case.name, measure.name);
                    assert_eq!(lines.iter().filter(|l| l.contains(&name)).count(), 1, "{text}");
                }
            }
            let ipc = lines.iter().find(|line| line.contains("ipc: messages")).expect("a line");
            for cell in ["20 (10–30) k/s", "20 (10–20) ×", "≥ 15 ×: met", "1.95 × (UNIX 1.36 ×)"]
            {
                assert!(ipc.contains(cell), "{cell} in {ipc}");
            }
            assert!(text.contains("better than UNIX: not met"), "{text}");
            assert!(text.contains("TCP + 2.25 (2–2.5) ns"), "{text}");
            assert!(text.contains("40 ns + 20 ns → 600 ns + 300 ns per message"), "{text}");
        }
        let machine = record.machine.clone();
        let (address, interface) = ([10, 0, 0, 1].into(), "eth0".to_owned());
        let mut apart = record.clone();
        apart.server = Some(ServerRecord { address, interface, machine });
        apart.judge();
        let text = table(&apart, Style::Text);
        assert!(text.contains("20 → 300, 2 → 30 per message"), "{text}");
        assert!(text.contains(" 300, 3 per message"), "{text}");
        apart.server.iter_mut().for_each(|server| server.machine.set_emulated());
        let note = note(&apart);
        assert!(note.contains("interface eth0") && note.contains("flatter uSMC"), "{note}");
        assert!(!text.contains("UNIX") && !text.contains("1.95 ×"), "{text}");
        assert!(table(&record, Style::Markdown).lines().all(|line| line.starts_with('|')));
    }

    #[test]
    fn what_agents_did_has_a_column_of_its_own() {
        let record = sample_by_rdma();
        let text = table(&record, Style::Text);
        for cell in ["0.6, 1.2, 0.59 per message", "→ 22 ns + 11 ns + 400 ns per message"] {
            assert!(text.contains(cell), "{cell} in {text}");
        }
        assert!(note(&record).contains("Agents: those of both hosts"), "{}", note(&record));
        let mut memory = record;
        memory.cases.iter_mut().for_each(|case| case.agents.clear());
        assert!(!table(&memory, Style::Text).contains("completions of agents"));
        assert!(!note(&memory).contains("Agents"));
    }
}
