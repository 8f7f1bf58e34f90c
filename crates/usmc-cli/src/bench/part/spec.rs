//! What the driver tells a part to be, and what a part tells of its run.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where the server listens.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Address {
    /// A port of an address; 0: any.
    Tcp(SocketAddrV4),
    /// A path.
    Unix(PathBuf),
}

impl Address {
    /// Any port of 127.0.0.1.
    pub const LOCAL: Address = Address::Tcp(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));
}

/// How a part waits for its connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Wait {
    /// In recv(2) and send(2).
    Blocking,
    /// In poll(2), before each recv.
    Poll,
    /// In epoll_wait(2), before each recv.
    Epoll,
    /// Nowhere: it calls recv(2) until there is something.
    Busy,
}

impl Wait {
    /// Its name in a case's.
    pub const fn name(self) -> &'static str {
        match self {
            Wait::Blocking => "blocking",
            Wait::Poll => "poll",
            Wait::Epoll => "epoll",
            Wait::Busy => "busy",
        }
    }
}

/// One part.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Spec {
    /// Where the server listens.
    pub at: Address,
    /// Bytes of a request.
    pub request: usize,
    /// Bytes of its answer.
    pub answer: usize,
    /// Bytes of one send and one receive.
    pub chunk: usize,
    /// How both ends wait.
    pub wait: Wait,
    /// CPUs it may use; none: all that the driver may.
    pub cpus: Vec<usize>,
    /// What it is.
    pub role: Role,
}

/// What a part is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Role {
    /// A server with a thread for each connection.
    ServeLines {
        /// So many are accepted.
        connections: usize,
    },
    /// Its client.
    Exchange(Exchange),
    /// A server of one thread and an epoll set.
    ServeEvents,
    /// Its client with short connections.
    Brief(Brief),
    /// Its client with many connections of which few are active.
    Hold(Hold),
    /// Calls on descriptors that are no sockets.
    Foreign {
        /// Length of the run.
        seconds: f64,
    },
    /// A program that computes until it is killed, beside the measured ones.
    Compute,
    /// The ring by itself, between two threads.
    Ring {
        /// Length of the run.
        seconds: f64,
    },
    /// Streams through rings by themselves, between two threads.
    Flow {
        /// So many.
        streams: u32,
        /// Length of the run.
        seconds: f64,
    },
}

/// Requests and answers, as fast as they go.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Exchange {
    /// A thread for each.
    pub connections: usize,
    /// Length of the run.
    pub seconds: f64,
    /// The run ends earlier after so many exchanges on each connection.
    pub most: u64,
    /// The client computes for so many microseconds between two of them.
    #[serde(default)]
    pub pause_us: u64,
}

/// Connect, one request, its answer, close.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Brief {
    /// Connections at a time.
    pub concurrency: usize,
    /// Threads that share them.
    pub threads: usize,
    /// Length of the run.
    pub seconds: f64,
}

/// Connections that stay.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hold {
    /// All.
    pub connections: usize,
    /// Those with requests during the run; the others were used before.
    pub active: usize,
    /// Exchanges on each connection before the run.
    pub before: usize,
    /// Length of the run.
    pub seconds: f64,
}

/// What a client measured.
#[derive(Clone, Default, Debug, Serialize, Deserialize)]
pub struct Done {
    /// Exchanges, connections or calls.
    pub operations: u64,
    /// Of wall time.
    pub seconds: f64,
    /// Of CPU time of the client's process.
    pub cpu_seconds: f64,
    /// Half the median time of an exchange, in microseconds, where single exchanges were timed.
    pub one_way_us: f64,
    /// Further figures; the workload knows their meaning.
    pub further: Vec<f64>,
}
