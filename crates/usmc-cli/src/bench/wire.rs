//! Frames between two machines, as the client's network interface counts them.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use anyhow::{Context, Result};
use procfs::net;

/// The interface of this machine through which the other one is reached.
#[derive(Debug)]
pub struct Wire {
    /// Its name.
    pub interface: String,
}

/// A route that is in use (route.h).
const UP: u16 = 1;

impl Wire {
    /// To this address.
    ///
    /// # Errors
    /// When there is no route to it.
    pub fn to(address: Ipv4Addr) -> Result<Wire> {
        // Nothing is sent: the kernel says which address of ours it would send from.
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("cannot make a socket")?;
        let local = socket.connect((address, 9)).and_then(|()| socket.local_addr());
        let local = local.with_context(|| format!("there is no route to {address}"))?.ip();
        if local == IpAddr::V4(address) || address.is_loopback() {
            return Ok(Wire { interface: "lo".to_owned() });
        }
        let fits = |route: &net::RouteEntry| {
            let network = u32::from(address) & u32::from(route.mask);
            route.flags & UP != 0 && network == u32::from(route.destination)
        };
        let routes = net::route().context("/proc/net/route")?.into_iter().filter(fits);
        let nearest = routes.max_by_key(|route| (u32::from(route.mask), u32::MAX - route.metrics));
        let route = nearest.with_context(|| format!("no interface leads to {address}"))?;
        Ok(Wire { interface: route.iface })
    }

    /// Frames that it has sent and received so far, whoever's they were.
    ///
    /// # Errors
    /// When it is gone.
    pub fn frames(&self) -> Result<u64> {
        let all = net::dev_status().context("/proc/net/dev")?;
        let own = all.get(&self.interface);
        let own = own.with_context(|| format!("the interface {} is gone", self.interface))?;
        Ok(own.sent_packets + own.recv_packets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_reached_without_a_wire_and_its_frames_are_counted() {
        let wire = Wire::to(Ipv4Addr::LOCALHOST).expect("a route");
        assert_eq!(wire.interface, "lo");
        let before = wire.frames().expect("a count");
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
        let own = socket.local_addr().expect("its address");
        socket.send_to(b"x", own).expect("a datagram");
        assert!(wire.frames().expect("a count") >= before + 2, "sent and received");
    }
}
