//! What names a device in CLC messages: its GID and its CHID. Messages are about the device whose memory the host's mailboxes
//! hand over.

use smc_proto::ids::{Chid, SmcdGid};

use super::{at, by_mailbox};

/// The device's GID, the same in all processes that share it. `None`: there is no device.
pub fn gid() -> Option<SmcdGid> {
    let [gid, ext] = at(by_mailbox()).gid()?;
    Some(SmcdGid { gid, ext })
}

/// The device's CHID.
pub fn chid() -> Chid {
    Chid(at(by_mailbox()).chid())
}

/// Whether a peer's device is this one, or one that reaches it.
pub fn reaches(gid: SmcdGid, chid: Chid) -> bool {
    chid == self::chid() && Some(gid) == self::gid()
}
