//! What a server leaves to the next one besides descriptors: which clients there are, what each has been told, and which ids are
//! not free yet.
//!
//! It lies in a memfd, which systemd keeps. A server that is killed while it writes leaves what it had written before: there are
//! two halves, and the first bytes say which of them counts.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::view::View;

/// Bytes of a half. A client has 64 others in view at most, of some thirty bytes each.
const HALF: u64 = 1 << 20;
/// Offset of the first half.
const HALVES: u64 = 4096;

/// A client.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeptClient {
    /// Its id.
    pub id: u16,
    /// Its place in the order of arrival.
    pub serial: u64,
    /// Its vectors.
    pub vectors: u8,
    /// What it has been told.
    pub view: View,
}

/// All that the next server has to know.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Kept {
    /// Where the next free id is looked for.
    pub next_id: u16,
    /// The next client's place in the order of arrival.
    pub next_serial: u64,
    /// The clients, in the order of arrival.
    pub clients: Vec<KeptClient>,
    /// Ids of closed clients that may still live.
    pub unproven: Vec<u16>,
    /// The memory's file, where it has a name.
    pub file: Option<PathBuf>,
}

/// Where it lies.
pub struct Place {
    file: File,
    /// What counts: which half, and how long.
    now: (u8, u32),
}

impl Place {
    /// A new one, which says nothing.
    ///
    /// # Errors
    /// Without memory.
    pub fn make() -> Result<Place> {
        let file: File =
            memfd_create("usmc-state", MemfdFlags::CLOEXEC).context("memfd_create")?.into();
        Ok(Place { file, now: (0, 0) })
    }

    /// An earlier server's, and what it says.
    ///
    /// # Errors
    /// It is not readable.
    pub fn take_over(file: File) -> Result<(Place, Kept)> {
        let mut head = [0; 8];
        file.read_exact_at(&mut head, 0)?;
        let head = u64::from_le_bytes(head);
        let now = ((head >> 32) as u8 & 1, head as u32);
        ensure!(u64::from(now.1) <= HALF, "nonsense");
        let mut bytes = vec![0; now.1 as usize];
        file.read_exact_at(&mut bytes, HALVES + u64::from(now.0) * HALF)?;
        let kept = serde_json::from_slice(&bytes)?;
        Ok((Place { file, now }, kept))
    }

    /// The descriptor to be stored.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Writes it into the half that does not count, which then does.
    ///
    /// # Errors
    /// Without memory.
    pub fn write(&mut self, kept: &Kept) -> Result<()> {
        let bytes = serde_json::to_vec(kept)?;
        ensure!(bytes.len() as u64 <= HALF, "too much to keep");
        let half = self.now.0 ^ 1;
        self.file.write_all_at(&bytes, HALVES + u64::from(half) * HALF)?;
        let head = u64::from(half) << 32 | bytes.len() as u64;
        self.file.write_all_at(&head.to_le_bytes(), 0)?;
        self.now = (half, bytes.len() as u32);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_what_was_written_last() {
        let mut place = Place::make().unwrap();
        assert!(Place::take_over(place.file().try_clone().unwrap()).is_err());
        let mut kept = Kept::default();
        for next_id in [1, 2, 3] {
            kept.next_id = next_id;
            kept.unproven.push(next_id);
            let client = KeptClient { id: 5, serial: 9, vectors: 2, view: View::default() };
            kept.clients.push(client);
            place.write(&kept).unwrap();
            let (_, read) = Place::take_over(place.file().try_clone().unwrap()).unwrap();
            assert_eq!(read, kept);
        }
        // Killed in the middle of a write.
        let half = HALVES + u64::from(place.now.0 ^ 1) * HALF;
        place.file.write_all_at(b"{{{{", half).unwrap();
        let (_, read) = Place::take_over(place.file().try_clone().unwrap()).unwrap();
        assert_eq!(read, kept);
    }
}
