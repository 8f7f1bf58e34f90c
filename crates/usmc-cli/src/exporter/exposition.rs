//! Metrics as text: OpenMetrics, and Prometheus' older format.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use super::families::{Metrics, PREFIX, Value};

/// How metrics are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// OpenMetrics 1.0.0.
    OpenMetrics,
    /// The text format 0.0.4.
    Classic,
}

impl Format {
    /// Its media type.
    pub fn media_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Classic => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// What a client would like best, by its `Accept` header: the older format where it does not say.
    pub fn accepted(header: &str) -> Format {
        let (mut open, mut classic) = (0.0_f32, 0.0_f32);
        for range in header.split(',') {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
            let mut weight = 1.0;
            let mut version = None;
            for (name, value) in parts.filter_map(|part| part.split_once('=')) {
                match name.trim().to_ascii_lowercase().as_str() {
                    "q" => weight = value.trim().parse().unwrap_or(0.0_f32).clamp(0.0, 1.0),
                    "version" => version = Some(value.trim().trim_matches('"')),
                    _ => {}
                }
            }
            match kind.as_str() {
                "application/openmetrics-text" if matches!(version, None | Some("1.0.0")) => {
                    open = open.max(weight);
                }
                "text/plain" | "text/*" | "*/*" => classic = classic.max(weight),
                _ => {}
            }
        }
        if open > 0.0 && open >= classic { Format::OpenMetrics } else { Format::Classic }
    }
}

/// The metrics of one look.
#[derive(Debug)]
struct Collected(Arc<Metrics>);

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (about, samples) in &self.0.0 {
            let unit = about.unit.map(unit);
            let kind = if about.is_counter { MetricType::Counter } else { MetricType::Gauge };
            let mut family =
                encoder.encode_descriptor(about.name, about.help, unit.as_ref(), kind)?;
            for (values, value) in samples {
                let labels: Vec<(&str, &str)> =
                    about.labels.iter().copied().zip(values.iter().map(String::as_str)).collect();
                let sample = family.encode_family(&labels)?;
                match (about.is_counter, *value) {
                    (true, Value::Count(n)) => ConstCounter::new(n).encode(sample)?,
                    (true, Value::Measure(x)) => ConstCounter::new(x).encode(sample)?,
                    (false, Value::Count(n)) => ConstGauge::new(n).encode(sample)?,
                    (false, Value::Measure(x)) => ConstGauge::new(x).encode(sample)?,
                }
            }
        }
        Ok(())
    }
}

fn unit(name: &str) -> Unit {
    match name {
        "bytes" => Unit::Bytes,
        "seconds" => Unit::Seconds,
        other => Unit::Other(other.to_owned()),
    }
}

/// Writes metrics.
pub fn write(metrics: Arc<Metrics>, format: Format) -> String {
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(Collected(metrics)));
    let mut text = String::new();
    // A string takes whatever is written.
    let _ = text::encode(&mut text, &registry);
    match format {
        Format::OpenMetrics => text,
        Format::Classic => classic(&text),
    }
}

/// The older format of the same: a counter's family has the name of its values, and there are neither units nor an end.
fn classic(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut held: Option<(&str, &str)> = None;
    for line in text.lines() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        if let Some(help) = line.strip_prefix("# HELP ") {
            held = help.split_once(' ');
            continue;
        }
        if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|about| about.split_once(' '))
        {
            let total = if kind == "counter" { "_total" } else { "" };
            if let Some((_, help)) = held.take() {
                out.push_str(&format!("# HELP {name}{total} {help}\n"));
            }
            out.push_str(&format!("# TYPE {name}{total} {kind}\n"));
            continue;
        }
        out.push_str(line);
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::counts::Counter;
    use super::super::families::{LOOK, PROCESSES};
    use super::*;

    fn metrics() -> Arc<Metrics> {
        let mut metrics = Metrics::default();
        metrics.more(Counter::TransmitBytes.about(), ["/a", "b", "SMCD", "loopback"], 7);
        metrics.more(PROCESSES, ["/dev/shm/x", "we\"ird\\\nname"], 2);
        metrics.family(LOOK).insert(Vec::new(), Value::Measure(0.5));
        Arc::new(metrics)
    }

    #[test]
    fn both_formats_say_the_same() {
        let open = write(metrics(), Format::OpenMetrics);
        assert!(open.ends_with("# EOF\n"), "{open}");
        for line in [
            "# TYPE usmc_transmit_bytes counter",
            "# UNIT usmc_transmit_bytes bytes",
            r#"usmc_transmit_bytes_total{ism_dir="/a",program="b",mode="SMCD",device="loopback"} 7"#,
            r#"usmc_processes{ism_dir="/dev/shm/x",program="we\"ird\\\nname"} 2"#,
            "usmc_exporter_look_seconds 0.5",
        ] {
            assert!(open.lines().any(|l| l == line), "{line}\n{open}");
        }
        let classic = write(metrics(), Format::Classic);
        assert!(!classic.contains("# UNIT") && !classic.contains("# EOF"), "{classic}");
        let about = "# TYPE usmc_transmit_bytes_total counter\nusmc_transmit_bytes_total{";
        assert!(classic.contains(about), "{classic}");
        assert!(classic.contains("# HELP usmc_transmit_bytes_total Bytes"), "{classic}");
        let values = |text: &str| -> Vec<String> {
            text.lines().filter(|l| !l.starts_with('#')).map(str::to_owned).collect()
        };
        assert_eq!(values(&open), values(&classic));
    }

    #[test]
    fn clients_get_what_they_ask_for() {
        // Prometheus 2.42's and 3's.
        let old = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                   text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let new = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                   application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,*/*;q=0.2";
        for (header, format) in [
            ("", Format::Classic),
            ("*/*", Format::Classic),
            ("text/plain", Format::Classic),
            ("text/html, application/xhtml+xml;q=0.9", Format::Classic),
            ("application/openmetrics-text", Format::OpenMetrics),
            ("application/openmetrics-text; version=\"1.0.0\"", Format::OpenMetrics),
            ("application/openmetrics-text; version=2.0.0", Format::Classic),
            ("application/openmetrics-text;q=0, text/plain;q=0.1", Format::Classic),
            ("application/openmetrics-text;q=0.3, text/plain", Format::Classic),
            (old, Format::OpenMetrics),
            (new, Format::OpenMetrics),
        ] {
            assert_eq!(Format::accepted(header), format, "{header}");
        }
    }
}
