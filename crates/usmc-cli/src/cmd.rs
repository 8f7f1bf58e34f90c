//! The commands, one file each.

pub mod advise;
pub mod agent;
pub mod bench;
pub mod check;
pub mod device;
pub mod disable;
pub mod dump;
pub mod ebpf;
pub mod enable;
pub mod export;
pub mod exporter;
pub mod ivshmem_server;
pub mod linkgroup;
pub mod nri;
pub mod pnet;
pub mod probe;
pub mod region;
pub mod report;
pub mod run;
pub mod seid;
pub mod ss;
pub mod stats;
pub mod status;
pub mod switch;
pub mod top;
pub mod ueid;
