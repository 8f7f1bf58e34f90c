//! The pnet table: which network devices and RDMA ports belong to one physical network. Kept in the configuration, as
//! one table `[[pnet]]` for each entry.

use serde::Serialize;
use toml::de::DeTable;

/// One entry. At least one of interface and device is there.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Entry {
    /// The physical network's name: up to 16 of A-Z and 0-9.
    pub pnetid: String,
    /// A network device.
    pub interface: Option<String>,
    /// An RDMA or ISM device.
    pub ibdevice: Option<String>,
    /// Its port, from 1.
    pub ibport: Option<u8>,
}

/// Longest pnet id (SMC_MAX_PNETID_LEN of the kernel's uapi/linux/smc.h).
const MAX_ID: usize = 16;
/// Longest name of a network device (IFNAMSIZ with its NUL).
const MAX_INTERFACE: usize = 15;
/// Longest name of an RDMA device (IB_DEVICE_NAME_MAX with its NUL).
const MAX_DEVICE: usize = 63;
/// Most ports of an RDMA device (SMC_MAX_PORTS of net/smc).
pub const MAX_PORT: u8 = 2;

/// A pnet id in its one spelling: the kernel takes small letters for capital ones.
///
/// # Errors
/// What is wrong with it.
pub fn id(text: &str) -> Result<String, String> {
    let fits = (1..=MAX_ID).contains(&text.len());
    if !fits || !text.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err(format!(
            "{text:?} is no pnet id; write up to {MAX_ID} letters and digits, such as NET1"
        ));
    }
    Ok(text.to_ascii_uppercase())
}

/// # Errors
/// What is wrong with it.
pub fn interface(text: &str) -> Result<String, String> {
    device_name(text, MAX_INTERFACE, "network device", "eth0")
}

/// # Errors
/// What is wrong with it.
pub fn ibdevice(text: &str) -> Result<String, String> {
    device_name(text, MAX_DEVICE, "RDMA or ISM device", "mlx5_0")
}

fn device_name(text: &str, most: usize, what: &str, such: &str) -> Result<String, String> {
    let is_odd = |c: char| c.is_whitespace() || c.is_control() || c == '/';
    if text.is_empty() || text.len() > most || text.contains(is_odd) {
        return Err(format!("{text:?} is no name of a {what}; write one such as {such}"));
    }
    Ok(text.to_owned())
}

/// # Errors
/// What is wrong with it.
pub fn ibport(number: i64) -> Result<u8, String> {
    u8::try_from(number)
        .ok()
        .filter(|port| (1..=MAX_PORT).contains(port))
        .ok_or_else(|| format!("{number} is no port of an RDMA device; write 1 or {MAX_PORT}"))
}

/// Whether both say something about the same device.
pub fn clash(one: &Entry, other: &Entry) -> Option<String> {
    if one.interface.is_some() && one.interface == other.interface {
        return one.interface.clone();
    }
    let same =
        one.ibdevice.is_some() && (&one.ibdevice, one.ibport) == (&other.ibdevice, other.ibport);
    if !same {
        return None;
    }
    let port = one.ibport.map_or(String::new(), |port| format!(" port {port}"));
    Some(format!("{}{port}", one.ibdevice.as_deref().unwrap_or_default()))
}

/// Reads one table of the file.
///
/// # Errors
/// What is wrong with it.
pub fn parse(table: &DeTable<'_>) -> Result<Entry, String> {
    let mut entry = Entry { pnetid: String::new(), interface: None, ibdevice: None, ibport: None };
    for (key, value) in table {
        let text = value.get_ref().as_str();
        let number = value.get_ref().as_integer().and_then(|n| n.as_str().parse().ok());
        let no_text = || format!("{} takes a string", key.get_ref());
        match key.get_ref().as_ref() {
            "id" => entry.pnetid = id(text.ok_or_else(no_text)?)?,
            "interface" => entry.interface = Some(interface(text.ok_or_else(no_text)?)?),
            "ibdevice" => entry.ibdevice = Some(ibdevice(text.ok_or_else(no_text)?)?),
            "ibport" => entry.ibport = Some(ibport(number.ok_or("ibport takes a whole number")?)?),
            other => {
                return Err(format!(
                    "there is no {other:?}; write id, interface, ibdevice and ibport"
                ));
            }
        }
    }
    if entry.pnetid.is_empty() {
        return Err("has no id; write one such as id = \"NET1\"".to_owned());
    }
    if entry.interface.is_none() && entry.ibdevice.is_none() {
        return Err("names no device; write interface or ibdevice".to_owned());
    }
    match (&entry.ibdevice, entry.ibport) {
        (None, Some(_)) => return Err("has an ibport of no ibdevice".to_owned()),
        (Some(_), None) => entry.ibport = Some(1),
        _ => {}
    }
    Ok(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> Result<Entry, String> {
        parse(DeTable::parse(text).expect("TOML").get_ref())
    }

    #[test]
    fn entries_are_checked_as_the_kernel_does() {
        let entry = table("id = 'net1'\ninterface = 'eth0'\nibdevice = 'mlx5_0'").expect("good");
        assert_eq!((&entry.pnetid[..], entry.ibport), ("NET1", Some(1)));
        assert!(table("id = 'ABCDEFGHIJKLMNOP'\nibdevice = 'rxe0'\nibport = 2").is_ok());
        for (text, refusal) in [
            ("interface = 'eth0'", "has no id"),
            ("id = 'A'", "names no device"),
            ("id = 'ABCDEFGHIJKLMNOPQ'\ninterface = 'eth0'", "is no pnet id"),
            ("id = 'A B'\ninterface = 'eth0'", "is no pnet id"),
            ("id = 'A'\ninterface = 'a-name-of-17-bytes'", "is no name of a network device"),
            ("id = 'A'\ninterface = 'a/b'", "is no name of a network device"),
            ("id = 'A'\nibdevice = 'x'\nibport = 3", "is no port"),
            ("id = 'A'\nibdevice = 'x'\nibport = '1'", "takes a whole number"),
            ("id = 'A'\ninterface = 'eth0'\nibport = 1", "ibport of no ibdevice"),
            ("id = 'A'\nnetdev = 'eth0'", "there is no \"netdev\""),
            ("id = 7", "id takes a string"),
        ] {
            let refused = table(text).expect_err(text);
            assert!(refused.contains(refusal), "{text:?}: {refused}");
        }
    }

    #[test]
    fn a_device_belongs_to_one_network() {
        let entry = |text: &str| table(text).expect(text);
        let eth = entry("id = 'A'\ninterface = 'eth0'");
        let port = entry("id = 'A'\nibdevice = 'mlx5_0'\nibport = 1");
        let both = entry("id = 'B'\ninterface = 'eth0'\nibdevice = 'mlx5_0'\nibport = 2");
        assert_eq!(clash(&eth, &both).as_deref(), Some("eth0"));
        assert_eq!(clash(&port, &both), None);
        assert_eq!(clash(&port, &port).as_deref(), Some("mlx5_0 port 1"));
        assert_eq!(clash(&eth, &port), None);
    }
}
