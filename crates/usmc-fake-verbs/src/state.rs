//! What a process has read of the fabric's file: devices, and the faults that hold.

use std::fs::File;
use std::net::Ipv6Addr;
use std::os::unix::fs::FileExt;

use usmc_verbs::sys::*;

use crate::fabric::Call;

/// A device of the fabric. Its index in [`State::devices`] stays.
pub(crate) struct Device {
    pub(crate) name: String,
    /// The number of the wire, 1 to 5.
    pub(crate) mtu: u32,
    pub(crate) is_up: bool,
    pub(crate) gids: Vec<(u32, Gid)>,
}

#[derive(Clone)]
pub(crate) struct Gid {
    pub(crate) kind: u32,
    pub(crate) address: [u8; 16],
    pub(crate) netdev: String,
}

/// What a line causes beside what it says: asynchronous events of the device.
pub(crate) struct Effect {
    pub(crate) device: usize,
    pub(crate) kind: u32,
    /// 0 for the port's and the device's.
    pub(crate) qp_num: u32,
}

/// What becomes of a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Delivered,
    Lost,
    Held,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) devices: Vec<Device>,
    cuts: Vec<[String; 2]>,
    holds: Vec<[String; 2]>,
    delays: Vec<([String; 2], u64)>,
    refusals: Vec<(String, String, u32, i32)>,
    failures: Vec<(String, Option<u32>, u32)>,
    offset: u64,
    /// Posts move data themselves, to queue pairs of the same process.
    pub(crate) is_direct: bool,
}

impl State {
    /// Reads the lines that are new. A line without its end is left for the next time.
    pub(crate) fn catch_up(&mut self, file: &File) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Ok(len) = file.metadata().map(|facts| facts.len()) else { return effects };
        if len <= self.offset {
            return effects;
        }
        let mut bytes = vec![0; (len - self.offset) as usize];
        if file.read_exact_at(&mut bytes, self.offset).is_err() {
            return effects;
        }
        let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') else { return effects };
        self.offset += end as u64 + 1;
        for line in String::from_utf8_lossy(&bytes[..end]).lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            if !words.is_empty() && self.take(&words, &mut effects).is_none() {
                eprintln!(
                    "usmc-fake-verbs: the line `{line}` of the fabric says nothing; see fabric.rs"
                );
            }
        }
        effects
    }

    fn take(&mut self, words: &[&str], effects: &mut Vec<Effect>) -> Option<()> {
        match words {
            ["device", name, mtu] => {
                let mtu = mtu.parse::<u32>().ok()?.checked_ilog2()?.checked_sub(7)?;
                let device = Device { name: (*name).into(), mtu, is_up: true, gids: Vec::new() };
                self.devices.push(device);
            }
            ["gid", name, index, rest @ ..] => {
                let (device, index) = (self.device(name)?, index.parse().ok()?);
                let gids = &mut self.devices[device].gids;
                gids.retain(|(present, _)| *present != index);
                if let [kind, address, netdev] = rest {
                    let kind = match *kind {
                        "v1" => IBV_GID_TYPE_ROCE_V1,
                        "v2" => IBV_GID_TYPE_ROCE_V2,
                        _ => return None,
                    };
                    let address = address.parse::<Ipv6Addr>().ok()?.octets();
                    gids.push((index, Gid { kind, address, netdev: (*netdev).into() }));
                }
                effects.push(Effect { device, kind: IBV_EVENT_GID_CHANGE, qp_num: 0 });
            }
            ["port", name, state] => {
                let device = self.device(name)?;
                let is_up = *state == "up";
                if self.devices[device].is_up != is_up {
                    self.devices[device].is_up = is_up;
                    let kind = if is_up { IBV_EVENT_PORT_ACTIVE } else { IBV_EVENT_PORT_ERR };
                    effects.push(Effect { device, kind, qp_num: 0 });
                }
            }
            ["direct"] => self.is_direct = true,
            ["cut", from, to] => self.cuts.push([(*from).into(), (*to).into()]),
            ["heal", from, to] => self.cuts.retain(|[a, b]| a != from || b != to),
            ["hold", from, to] => self.holds.push([(*from).into(), (*to).into()]),
            ["release", from, to] => self.holds.retain(|[a, b]| a != from || b != to),
            ["delay", from, to, time] => {
                self.delays.retain(|([a, b], _)| a != from || b != to);
                self.delays.push(([(*from).into(), (*to).into()], time.parse().ok()?));
            }
            ["refuse", name, call, count, errno] => {
                Call::ALL.iter().find(|(_, known)| known == call)?;
                let fault =
                    ((*name).into(), (*call).into(), count.parse().ok()?, errno.parse().ok()?);
                self.refusals.push(fault);
            }
            ["fail", name, qp_num, status] => {
                let qp_num = if *qp_num == "*" { None } else { Some(qp_num.parse().ok()?) };
                self.failures.push(((*name).into(), qp_num, status.parse().ok()?));
            }
            ["event", name, kind, qp_num] => {
                let (device, kind) = (self.device(name)?, kind.parse().ok()?);
                effects.push(Effect { device, kind, qp_num: qp_num.parse().ok()? });
            }
            _ => return None,
        }
        Some(())
    }

    fn device(&self, name: &str) -> Option<usize> {
        self.devices.iter().position(|device| device.name == name)
    }

    /// The device that has the address.
    pub(crate) fn owner(&self, address: &[u8; 16]) -> Option<usize> {
        self.devices
            .iter()
            .position(|device| device.gids.iter().any(|(_, gid)| gid.address == *address))
    }

    /// What becomes of a packet to that address now.
    pub(crate) fn fate(&self, from: usize, to: &[u8; 16]) -> Fate {
        let Some(to) = self.owner(to) else { return Fate::Lost };
        if !self.devices[from].is_up || !self.devices[to].is_up || self.names(&self.cuts, from, to)
        {
            Fate::Lost
        } else if self.names(&self.holds, from, to) {
            Fate::Held
        } else {
            Fate::Delivered
        }
    }

    /// Whether packets, or acknowledgements of them, are kept back, so that no timeout counts.
    pub(crate) fn is_held(&self, from: usize, to: &[u8; 16]) -> bool {
        let Some(to) = self.owner(to) else { return false };
        self.names(&self.holds, from, to) || self.names(&self.holds, to, from)
    }

    /// How long a packet takes, in microseconds.
    pub(crate) fn delay(&self, from: usize, to: &[u8; 16]) -> u64 {
        let Some(to) = self.owner(to) else { return 0 };
        let found = self.delays.iter().rev().find(|(pair, _)| self.is_named(pair, from, to));
        found.map_or(0, |(_, time)| *time)
    }

    fn names(&self, faults: &[[String; 2]], from: usize, to: usize) -> bool {
        faults.iter().any(|pair| self.is_named(pair, from, to))
    }

    fn is_named(&self, [a, b]: &[String; 2], from: usize, to: usize) -> bool {
        let is = |name: &String, device: usize| name == "*" || *name == self.devices[device].name;
        is(a, from) && is(b, to)
    }

    /// The error number, if the call is to be refused. The refusal counts.
    pub(crate) fn refusal(&mut self, device: usize, call: Call) -> Option<i32> {
        let name = &self.devices[device].name;
        let call = Call::ALL.iter().find(|(known, _)| *known == call)?.1;
        let fault = self
            .refusals
            .iter_mut()
            .find(|(of, kind, left, _)| of == name && kind == call && *left > 0)?;
        fault.2 -= 1;
        Some(fault.3)
    }

    /// The status, if a queue pair's next request is to fail, and which failure that is.
    pub(crate) fn failure(&self, device: usize, qp_num: u32) -> Option<(usize, u32)> {
        let name = &self.devices[device].name;
        let is_it = |(of, number, _): &(String, Option<u32>, u32)| {
            of == name && number.is_none_or(|n| n == qp_num)
        };
        let at = self.failures.iter().position(is_it)?;
        Some((at, self.failures[at].2))
    }

    /// A failure has been caused.
    pub(crate) fn use_up_failure(&mut self, at: usize) {
        self.failures.remove(at);
    }
}
