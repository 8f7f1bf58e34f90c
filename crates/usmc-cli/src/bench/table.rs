//! The table that people read.

use comfy_table::presets::{ASCII_MARKDOWN, UTF8_FULL_CONDENSED};
use comfy_table::{CellAlignment, ContentArrangement, Table};

use super::mode::Mode;
use super::record::{CaseRecord, MeasureRecord, Record};
use super::statistics::short;

/// How it is drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Style {
    /// With lines.
    Text,
    /// For a README.
    Markdown,
}

const COLUMNS: [&str; 8] = [
    "workload",
    "TCP",
    "UNIX",
    "uSMC",
    "uSMC over TCP",
    "target",
    "kernel SMC, published",
    "CPU per operation, client + server: TCP → uSMC",
];

/// All figures.
pub fn table(record: &Record, style: Style) -> String {
    let mut table = Table::new();
    table.load_style(match style {
        Style::Text => UTF8_FULL_CONDENSED,
        Style::Markdown => ASCII_MARKDOWN,
    });
    table.set_content_arrangement(ContentArrangement::Disabled).set_header(COLUMNS);
    for case in &record.cases {
        for (i, measure) in case.measures.iter().enumerate() {
            table.add_row(row(case, measure, i == 0));
        }
    }
    for column in table.column_iter_mut().skip(1).take(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

fn row(case: &CaseRecord, measure: &MeasureRecord, first: bool) -> [String; 8] {
    let figure = |mode| match measure.figures.get(&mode) {
        Some(figure) => format!("{} {}", figure.shown(), measure.unit),
        None => "–".to_owned(),
    };
    let ratio = match (measure.beyond_tcp, measure.factors.get(&Mode::Usmc)) {
        (Some(more), _) => format!("TCP + {} {}", more.shown(), measure.unit),
        (None, Some(factor)) => format!("{} ×", factor.shown()),
        (None, None) => String::new(),
    };
    let targets = measure.targets.iter().map(|verdict| {
        let met = match verdict.met {
            Some(true) => "met",
            Some(false) => "not met",
            None => "nothing to compare with",
        };
        format!("{}: {met}", verdict.target)
    });
    let published = match (measure.kernel_smc, measure.kernel_unix) {
        (Some(smc), Some(unix)) => format!("{} × (UNIX {} ×)", short(smc), short(unix)),
        (Some(smc), None) => format!("{} ×", short(smc)),
        (None, _) => String::new(),
    };
    [
        format!("{}: {}", case.name, measure.name),
        figure(Mode::Tcp),
        figure(Mode::Unix),
        figure(Mode::Usmc),
        ratio,
        targets.collect::<Vec<String>>().join("; "),
        published,
        if first { cpu(case) } else { String::new() },
    ]
}

fn cpu(case: &CaseRecord) -> String {
    let of = |mode| {
        let cpu = case.cpu.get(&mode)?;
        Some(format!("{} + {}", time(cpu.client_ns.median), time(cpu.server_ns.median)))
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
    use super::super::record::tests::sample;
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
        assert!(table(&record, Style::Markdown).lines().all(|line| line.starts_with('|')));
    }
}
