//! `usmc dump` but for its command line: [`attached`] takes events out of processes, [`streams`] makes TCP segments of
//! them, [`packet`] writes those as IP packets, and [`capture`] as a pcapng file.

pub mod attached;
pub mod capture;
mod packet;
mod streams;
