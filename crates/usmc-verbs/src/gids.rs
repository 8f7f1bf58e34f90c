//! The table of GIDs: by the library's function where it is there, by sysfs otherwise.

use std::ffi::CString;
use std::fs;
use std::net::Ipv6Addr;
use std::path::Path;

use crate::device::{Device, Gid, GidEntry, GidType, gid_type};
use crate::error::Error;
use crate::sys::ibv_gid_entry;

/// Where the kernel describes RDMA devices.
const SYSFS: &str = "/sys/class/infiniband";

/// More ports than any device has, so that a false count ends.
const MAX_PORTS: u8 = 16;

pub(crate) fn table(device: &Device) -> Result<Vec<GidEntry>, Error> {
    let ports = device.attributes()?.ports.min(MAX_PORTS);
    let Some(query) = device.functions().query_gid_table else {
        return Ok(from_sysfs(&Path::new(SYSFS).join(device.name()), ports));
    };
    let mut len = 0;
    for port in 1..=ports {
        len += device.port(port)?.gid_table_len as usize;
    }
    let mut entries = vec![ibv_gid_entry::default(); len];
    let size = size_of::<ibv_gid_entry>();
    // SAFETY: The context is open; the function writes at most `len` entries of that size. There are no flags yet.
    let found = unsafe { query(device.inner.context, entries.as_mut_ptr(), len, 0, size) };
    let Ok(found) = usize::try_from(found) else {
        let errno = i32::try_from(found.unsigned_abs()).unwrap_or(libc::EIO);
        if errno == libc::EOPNOTSUPP {
            return Ok(from_sysfs(&Path::new(SYSFS).join(device.name()), ports));
        }
        return Err(Error::Call { name: "_ibv_query_gid_table", errno });
    };
    entries.truncate(found);
    let mut gids: Vec<_> = entries.iter().filter_map(entry).collect();
    gids.sort_by_key(|entry| (entry.port, entry.index));
    Ok(gids)
}

/// An entry of the library's. One of a type that is not known here, or of no port, is left out: it cannot be used.
fn entry(raw: &ibv_gid_entry) -> Option<GidEntry> {
    Some(GidEntry {
        gid: Gid(raw.gid.raw),
        index: raw.gid_index,
        port: u8::try_from(raw.port_num).ok()?,
        kind: gid_type(raw.gid_type)?,
        ifindex: raw.ndev_ifindex,
    })
}

/// `gids/N`, `gid_attrs/types/N` and `gid_attrs/ndevs/N` of each port. Reading what is not in use fails with EINVAL.
fn from_sysfs(device: &Path, ports: u8) -> Vec<GidEntry> {
    let mut gids = Vec::new();
    for port in 1..=ports {
        let directory = device.join("ports").join(port.to_string());
        let count = fs::read_dir(directory.join("gids")).map_or(0, Iterator::count);
        for index in 0..count as u32 {
            let read =
                |kind: &str| fs::read_to_string(directory.join(kind).join(index.to_string()));
            let Ok(Ok(gid)) = read("gids").map(|text| text.trim().parse::<Ipv6Addr>()) else {
                continue;
            };
            let Some(kind) =
                read("gid_attrs/types").ok().and_then(|text| kind_by_name(text.trim()))
            else {
                continue;
            };
            if gid.is_unspecified() {
                continue;
            }
            let ifindex = read("gid_attrs/ndevs").map_or(0, |name| index_of(name.trim()));
            gids.push(GidEntry { gid: Gid(gid.octets()), index, port, kind, ifindex });
        }
    }
    gids
}

fn kind_by_name(name: &str) -> Option<GidType> {
    Some(match name {
        "IB/RoCE v1" => GidType::RoceV1,
        "RoCE v2" => GidType::RoceV2,
        _ => return None,
    })
}

fn index_of(name: &str) -> u32 {
    let Ok(name) = CString::new(name) else { return 0 };
    // SAFETY: The name ends in NUL.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What rxe on `lo` shows: an address of each version, and places that are not in use.
    #[test]
    fn sysfs_gives_entries_in_use_only() {
        let root = std::env::temp_dir().join(format!("usmc-verbs-gids-{}", std::process::id()));
        let port = root.join("ports/1");
        for directory in ["gids", "gid_attrs/types", "gid_attrs/ndevs"] {
            fs::create_dir_all(port.join(directory))
                .expect("the temporary directory can be written");
        }
        let file = |name: &str, text: &str| fs::write(port.join(name), text).expect("as above");
        file("gids/0", "fe80:0000:0000:0000:5054:00ff:fe12:3456\n");
        file("gid_attrs/types/0", "IB/RoCE v1\n");
        file("gid_attrs/ndevs/0", "lo\n");
        file("gids/1", "0000:0000:0000:0000:0000:ffff:0a09:0001\n");
        file("gid_attrs/types/1", "RoCE v2\n");
        file("gids/2", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        let found = from_sysfs(&root, 1);
        fs::remove_dir_all(&root).expect("it is ours");
        let shown: Vec<_> =
            found.iter().map(|e| (e.index, e.gid.to_string(), e.kind, e.ifindex)).collect();
        let expected = [
            (0, "fe80::5054:ff:fe12:3456".to_owned(), GidType::RoceV1, 1),
            (1, "::ffff:10.9.0.1".to_owned(), GidType::RoceV2, 0),
        ];
        assert_eq!(shown, expected);
    }
}
