//! Physical networks that the user has named (`smc_pnet.c` of net/smc; `usmc pnet`): which network devices and RDMA devices belong together.

/// The table. A device is in one network at most.
#[derive(Clone, Default, Debug)]
pub struct Pnet {
    /// Each with its network's name.
    interfaces: Vec<(String, String)>,
    devices: Vec<(String, String)>,
}

impl Pnet {
    /// A network device belongs to the network `id`.
    pub fn add_interface(&mut self, id: &str, name: &str) {
        self.interfaces.push((name.to_owned(), id.to_owned()));
    }

    /// An RDMA device does.
    pub fn add_device(&mut self, id: &str, name: &str) {
        self.devices.push((name.to_owned(), id.to_owned()));
    }

    /// The network of a network device, if one was named.
    pub fn of_interface(&self, name: &str) -> Option<&str> {
        find(&self.interfaces, name)
    }

    /// The network of an RDMA device, if one was named.
    pub fn of_device(&self, name: &str) -> Option<&str> {
        find(&self.devices, name)
    }

    /// Whether no network device has one.
    pub fn has_no_interface(&self) -> bool {
        self.interfaces.is_empty()
    }
}

fn find<'a>(all: &'a [(String, String)], name: &str) -> Option<&'a str> {
    all.iter().find(|(known, _)| known == name).map(|(_, id)| id.as_str())
}
