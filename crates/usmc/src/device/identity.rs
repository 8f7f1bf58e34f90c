//! What names a device in CLC messages: its GID and its CHID.

use smc_proto::ids::{Chid, SmcdGid};

use super::{Index, at};

/// The device's GID, the same in all processes that share it. `None`: there is no such device.
pub fn gid(device: Index) -> Option<SmcdGid> {
    let [gid, ext] = at(device).gid()?;
    Some(SmcdGid { gid, ext })
}

/// The device's CHID.
pub fn chid(device: Index) -> Chid {
    Chid(at(device).chid())
}

/// Whether a peer's device is this one, or one that reaches it.
pub fn reaches(device: Index, gid: SmcdGid, chid: Chid) -> bool {
    chid == self::chid(device) && Some(gid) == self::gid(device)
}
