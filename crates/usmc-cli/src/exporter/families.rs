//! The names of all metrics, after Prometheus' rules: base units, `_total` where something is counted, and a prefix.

use std::collections::BTreeMap;

use super::counts::Counter;

/// A family of metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct About {
    /// Its name without prefix, unit and `_total`.
    pub name: &'static str,
    /// Its unit in the plural, if it has one.
    pub unit: Option<&'static str>,
    /// What it says, as text that needs no escapes.
    pub help: &'static str,
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// Whether it counts and never falls.
    pub is_counter: bool,
}

/// Begins all names.
pub const PREFIX: &str = "usmc";

const fn counter(
    name: &'static str,
    unit: Option<&'static str>,
    labels: &'static [&'static str],
    help: &'static str,
) -> About {
    About { name, unit, help, labels, is_counter: true }
}

const fn gauge(
    name: &'static str,
    unit: Option<&'static str>,
    labels: &'static [&'static str],
    help: &'static str,
) -> About {
    About { name, unit, help, labels, is_counter: false }
}

const BYTES: Option<&str> = Some("bytes");
const PROGRAM: &[&str] = &["ism_dir", "program"];
const CARRIER: &[&str] = &["ism_dir", "program", "mode", "device"];
const ADAPTER: &[&str] = &["agent", "device"];

/// The counters of processes, in the order of [`Counter`].
pub const OF_PROCESSES: [Counter; 16] = [
    Counter::TransmitBytes,
    Counter::ReceiveBytes,
    Counter::ChangedOver,
    Counter::Fallbacks,
    Counter::HandshakeErrors,
    Counter::TransmitCalls,
    Counter::ReceiveCalls,
    Counter::RingFull,
    Counter::Sleeps,
    Counter::SpinsPaid,
    Counter::DoorbellsSent,
    Counter::DoorbellsReceived,
    Counter::Rings,
    Counter::SlotsReused,
    Counter::SpecialCalls,
    Counter::ProcessesEnded,
];

impl Counter {
    /// Its family.
    pub fn about(self) -> About {
        let by_program = |name, help| counter(name, None, PROGRAM, help);
        match self {
            Counter::TransmitBytes => {
                let help = "Bytes that programs under uSMC sent. Of mode TCP: as last seen of each connection.";
                counter("transmit", BYTES, CARRIER, help)
            }
            Counter::ReceiveBytes => {
                let help = "Bytes that programs under uSMC received. Of mode TCP: as last seen of each connection.";
                counter("receive", BYTES, CARRIER, help)
            }
            Counter::ChangedOver => {
                let labels = &["ism_dir", "program", "mode", "device", "role"];
                counter("changed_over", None, labels, "Ends of connections that left TCP.")
            }
            Counter::Fallbacks => {
                let labels = &["ism_dir", "program", "role", "reason"];
                let help =
                    "Ends of connections that stayed on TCP until they were closed, by reason.";
                counter("fallbacks", None, labels, help)
            }
            Counter::HandshakeErrors => {
                let labels = &["ism_dir", "program", "role"];
                let help =
                    "Of the fallbacks, those whose change to shared memory was begun and failed.";
                counter("handshake_errors", None, labels, help)
            }
            Counter::Rings => {
                let labels = &["ism_dir", "program", "ring_size"];
                let help =
                    "Ends of connections that left TCP, by the bytes of each of their two rings.";
                counter("rings", None, labels, help)
            }
            Counter::SpecialCalls => {
                let labels = &["ism_dir", "program", "call"];
                let help = "Special calls on connections in shared memory.";
                counter("special_calls", None, labels, help)
            }
            Counter::TransmitCalls => {
                by_program("transmit_calls", "Times something was put into a ring.")
            }
            Counter::ReceiveCalls => {
                by_program("receive_calls", "Times something was taken out of a ring.")
            }
            Counter::RingFull => by_program(
                "ring_full",
                "Sends that found too little room in the ring for all their bytes.",
            ),
            Counter::Sleeps => by_program(
                "sleeps",
                "Times a call slept in the kernel for connections in shared memory.",
            ),
            Counter::SpinsPaid => by_program(
                "spins_paid",
                "Times a call did not have to sleep, because what it waited for came while it looked.",
            ),
            Counter::DoorbellsSent => {
                by_program("doorbells_sent", "Bytes of TCP that were sent to wake a sleeping peer.")
            }
            Counter::DoorbellsReceived => {
                by_program("doorbells_received", "Bytes of TCP that came to wake a sleeper.")
            }
            Counter::SlotsReused => by_program(
                "slots_reused",
                "Connections, at their clients, in memory that an earlier one has used.",
            ),
            Counter::ProcessesEnded => by_program(
                "processes_ended",
                "Processes under uSMC that have ended, and whose counts are kept.",
            ),
        }
    }
}

/// Processes under uSMC.
pub const PROCESSES: About =
    gauge("processes", None, PROGRAM, "Processes under uSMC that have sockets.");
/// Processes that could not be looked at.
pub const HIDDEN: About =
    gauge("hidden_processes", None, &[], "Processes of other users that could not be inspected.");
/// Open connections.
pub const CONNECTIONS: About = gauge(
    "connections",
    None,
    &["ism_dir", "program", "mode", "device", "port"],
    "Ends of open connections of programs under uSMC, by the port of the accepting end.",
);
/// Open connections on TCP.
pub const ON_TCP: About = gauge(
    "fallback_connections",
    None,
    &["ism_dir", "program", "reason"],
    "Ends of open connections that are on TCP now, by reason.",
);
/// Listening sockets.
pub const LISTENERS: About = gauge(
    "listeners",
    None,
    &["ism_dir", "program", "port"],
    "Listening sockets of programs under uSMC.",
);
/// Room of send rings.
pub const RING_SIZE: About = gauge(
    "ring_size",
    BYTES,
    CARRIER,
    "Sizes of the rings for sending of open connections, summed up.",
);
/// What is in them.
pub const RING_QUEUED: About = gauge(
    "ring_queued",
    BYTES,
    CARRIER,
    "Bytes sent and not yet read, of open connections both ends of which can be seen.",
);
/// Segments.
pub const SEGMENTS: About = gauge(
    "segments",
    None,
    &["ism_dir"],
    "Segments of memory for connections through an ISM directory.",
);
/// Their sizes.
pub const SEGMENT_SIZE: About =
    gauge("segment_size", BYTES, &["ism_dir"], "Sizes of these segments, summed up.");
/// What they take.
pub const SEGMENT_RESIDENT: About =
    gauge("segment_resident", BYTES, &["ism_dir"], "Bytes of these segments that take memory.");
/// Slots with connections.
pub const SLOTS: About = gauge(
    "slots_used",
    None,
    &["ism_dir", "device"],
    "Slots of segments that open connections lie in.",
);
/// A region's memory.
pub const REGION_SIZE: About =
    gauge("region_size", BYTES, &["device"], "Sizes of regions that programs use.");
/// Of that, what is free.
pub const REGION_FREE: About =
    gauge("region_free", BYTES, &["device"], "Bytes of regions that nobody has.");
/// A region's peers.
pub const REGION_PEERS: About =
    gauge("region_peers", None, &["device"], "Peers of regions that are alive.");
/// Agents.
pub const AGENTS: About = gauge("agents", None, &[], "Agents of RDMA that have answered.");
/// What has become of an agent's connections.
pub const AGENT_CONNECTIONS: About = counter(
    "agent_connections",
    None,
    &["agent", "outcome"],
    "Connections that agents were handed, by what has become of them.",
);
/// Chains.
pub const RDMA_POSTS: About = counter(
    "rdma_posts",
    None,
    ADAPTER,
    "Chains of RDMA WRITEs with the message behind them that were posted.",
);
/// Requests.
pub const RDMA_REQUESTS: About =
    counter("rdma_requests", None, ADAPTER, "Requests (WRs) in these chains.");
/// Bytes.
pub const RDMA_BYTES: About = counter(
    "rdma_transmit",
    BYTES,
    ADAPTER,
    "Bytes that RDMA WRITEs took from send buffers, those that were written again included.",
);
/// Completions.
pub const RDMA_COMPLETIONS: About =
    counter("rdma_completions", None, ADAPTER, "Chains that are complete.");
/// Messages.
pub const RDMA_MESSAGES: About =
    counter("rdma_messages_received", None, ADAPTER, "Messages (CDC and LLC) that have come.");
/// Errors.
pub const RDMA_ERRORS: About =
    counter("rdma_errors", None, ADAPTER, "Requests and receives that have failed.");
/// Link groups.
pub const RDMA_GROUPS: About = gauge(
    "rdma_link_groups",
    None,
    &["role"],
    "Link groups with other hosts, by the role of this host.",
);
/// Links.
pub const RDMA_LINKS: About =
    gauge("rdma_links", None, &["device", "state"], "Links of link groups.");
/// Connections by link.
pub const RDMA_CONNECTIONS: About =
    gauge("rdma_connections", None, &["device"], "Connections that go by links of a device.");
/// Ports.
pub const RDMA_UP: About = gauge(
    "rdma_port_up",
    None,
    &["device", "port"],
    "Whether a port of a device that an agent has is active.",
);
/// Processes beyond those that are held.
pub const UNTRACKED: About = gauge(
    "exporter_untracked_processes",
    None,
    &[],
    "Processes under uSMC that are not counted, as the exporter has too few descriptors.",
);
/// Files that cannot be read.
pub const REFUSED: About = gauge(
    "exporter_refused_processes",
    None,
    &[],
    "Processes whose records make no sense or are of another version of the library.",
);
/// How long a look takes.
pub const LOOK: About =
    gauge("exporter_look", Some("seconds"), &[], "How long the last look at all processes took.");
/// How often.
pub const LOOKS: About = counter("exporter_looks", None, &[], "Looks at all processes.");
/// Failures of the state.
pub const STATE_ERRORS: About =
    counter("exporter_state_errors", None, &[], "Times the state file could not be written.");
/// The version.
pub const BUILD: About =
    gauge("build_info", None, &["version"], "The version of uSMC that the exporter is of.");

/// All gauges of open connections and memory, in the order in which they are shown.
pub const GAUGES: [About; 15] = [
    PROCESSES,
    HIDDEN,
    CONNECTIONS,
    ON_TCP,
    LISTENERS,
    RING_SIZE,
    RING_QUEUED,
    SEGMENTS,
    SEGMENT_SIZE,
    SEGMENT_RESIDENT,
    SLOTS,
    REGION_SIZE,
    REGION_FREE,
    REGION_PEERS,
    AGENTS,
];

/// A value.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Value {
    /// A number of things.
    Count(u64),
    /// A measure.
    Measure(f64),
}

/// Values of one family by the values of its labels.
pub type Samples = BTreeMap<Vec<String>, Value>;

/// What is shown at one time.
#[derive(Clone, Default, Debug)]
pub struct Metrics(pub Vec<(About, Samples)>);

impl Metrics {
    /// The family, which is shown even without values.
    pub fn family(&mut self, about: About) -> &mut Samples {
        let at = self.0.iter().position(|(known, _)| known.name == about.name);
        let at = at.unwrap_or_else(|| {
            self.0.push((about, Samples::new()));
            self.0.len() - 1
        });
        &mut self.0[at].1
    }

    /// So many more with these labels.
    pub fn more<const N: usize>(&mut self, about: About, labels: [&str; N], n: u64) {
        debug_assert_eq!(labels.len(), about.labels.len(), "{}", about.name);
        let labels = labels.map(str::to_owned).to_vec();
        let value = self.family(about).entry(labels).or_insert(Value::Count(0));
        if let Value::Count(sum) = value {
            *sum = sum.saturating_add(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_rules() {
        let own = [UNTRACKED, REFUSED, LOOK, LOOKS, STATE_ERRORS, BUILD];
        let adapters = [AGENT_CONNECTIONS, RDMA_POSTS, RDMA_BYTES, RDMA_ERRORS, RDMA_UP];
        let all = OF_PROCESSES.map(Counter::about).into_iter().chain(GAUGES).chain(own);
        let mut names = Vec::new();
        for about in all.chain(adapters) {
            let is_plain = |text: &str| text.chars().all(|c| c.is_ascii_lowercase() || c == '_');
            assert!(is_plain(about.name) && about.labels.iter().all(|l| is_plain(l)), "{about:?}");
            assert!(!about.name.ends_with("_total") && about.help.ends_with('.'), "{about:?}");
            assert!(!about.help.contains(['\\', '"', '\n']), "{about:?}");
            names.push(about.name);
        }
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count, "each name once");
    }

    #[test]
    fn counters_are_shown_in_their_order() {
        assert!(OF_PROCESSES.is_sorted());
    }
}
