//! Access control lists (acl(5)), in the form in which the kernel keeps them as extended attributes
//! (`include/uapi/linux/posix_acl_xattr.h`). Here they let users in by number: containers have no names in common.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use rustix::fs::{XattrFlags, lgetxattr, lsetxattr};
use rustix::io::Errno;

/// Who may come in.
pub const ACCESS: &str = "system.posix_acl_access";
/// Of a directory: what files that are made in it begin with.
pub const DEFAULT: &str = "system.posix_acl_default";
/// `POSIX_ACL_XATTR_VERSION`.
const VERSION: u32 = 2;
const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHERS: u16 = 0x20;
/// An entry that is for no one by number.
const NOBODY: u32 = u32::MAX;
/// Bytes of an entry: what it is, the permissions, the number.
const ENTRY: usize = 8;
/// Users at most; the kernel takes some eight thousand.
pub const USERS: usize = 1000;
/// Bytes of the longest list.
const LONGEST: usize = 4 + (USERS + 4) * ENTRY;

/// A list by which the owner, the group and these users have `permissions` (of `rwx`, as an octal digit), and nobody else has any.
pub fn encode(users: &BTreeSet<u32>, permissions: u16) -> Vec<u8> {
    let mut bytes = VERSION.to_le_bytes().to_vec();
    let mut entry = |what: u16, permissions: u16, number: u32| {
        bytes.extend(what.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(number.to_le_bytes());
    };
    entry(OWNER, permissions, NOBODY);
    users.iter().for_each(|user| entry(USER, permissions, *user));
    entry(GROUP, permissions, NOBODY);
    entry(MASK, permissions, NOBODY);
    entry(OTHERS, 0, NOBODY);
    bytes
}

/// The users in a list.
fn decode(bytes: &[u8]) -> BTreeSet<u32> {
    let Some((version, entries)) = bytes.split_first_chunk() else { return BTreeSet::new() };
    if u32::from_le_bytes(*version) != VERSION {
        return BTreeSet::new();
    }
    let user = |entry: &[u8]| {
        let (what, number) = (entry.first_chunk()?, entry.last_chunk()?);
        (u16::from_le_bytes(*what) == USER).then(|| u32::from_le_bytes(*number))
    };
    entries.chunks_exact(ENTRY).filter_map(user).collect()
}

/// The users whom a directory's list `name` lets in; none where it has no such list.
///
/// # Errors
/// As the system says: [`io::ErrorKind::Unsupported`] where the file system has none.
pub fn users(path: &Path, name: &str) -> io::Result<BTreeSet<u32>> {
    let mut bytes = [0; LONGEST];
    match lgetxattr(path, name, &mut bytes[..]) {
        Ok(length) => Ok(decode(&bytes[..length])),
        Err(Errno::NODATA) => Ok(BTreeSet::new()),
        Err(error) => Err(error.into()),
    }
}

/// Gives a file that list. Does not follow links.
///
/// # Errors
/// As the system says.
pub fn set(path: &Path, name: &str, list: &[u8]) -> io::Result<()> {
    lsetxattr(path, name, list, XattrFlags::empty()).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_as_the_kernel_wants_them() {
        let users = BTreeSet::from([999, 5]);
        let bytes = encode(&users, 7);
        let expected = [
            &[2, 0, 0, 0][..],
            &[1, 0, 7, 0, 255, 255, 255, 255],
            &[2, 0, 7, 0, 5, 0, 0, 0],
            &[2, 0, 7, 0, 231, 3, 0, 0],
            &[4, 0, 7, 0, 255, 255, 255, 255],
            &[16, 0, 7, 0, 255, 255, 255, 255],
            &[32, 0, 0, 0, 255, 255, 255, 255],
        ];
        assert_eq!(bytes, expected.concat());
        assert_eq!(decode(&bytes), users);
        for bad in [&bytes[..3], &[], &[9, 0, 0, 0, 2, 0, 7, 0, 5, 0, 0, 0]] {
            assert_eq!(decode(bad), BTreeSet::new());
        }
    }
}
