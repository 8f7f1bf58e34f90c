//! A region in a plain file, as processes of several kernels would share it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use usmc_shm::region::{Region, UNIT, len_for, units_in};

/// Makes one of so many bytes, most of which are not in memory.
///
/// # Panics
/// Without room.
pub fn create(dir: &Path, len: usize) -> PathBuf {
    let path = dir.join("region");
    let file = File::options().read(true).write(true).create_new(true).open(&path);
    let file = file.expect("our own file");
    file.set_len(len as u64).expect("a sparse file");
    // Tests run side by side, and commands tell regions apart by their ids.
    let inode = file.metadata().expect("the region").ino();
    // SAFETY: a fresh mapping of the whole file, which nobody else has, and which ends here.
    unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let base =
            libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(base, libc::MAP_FAILED, "a mapping");
        Region::format(base.cast(), len, [0x7265_6769, inode]).expect("room for a unit");
        libc::munmap(base, len);
    }
    path
}

/// Whether anybody has ever had memory of it: there is something in the first unit, whosever that is by now.
///
/// # Panics
/// Without the file.
pub fn was_used(path: &Path) -> bool {
    let mut word = [0; 8];
    let file = File::open(path).expect("the region");
    let units = units_in(file.metadata().expect("the region").len() as usize);
    file.read_exact_at(&mut word, (len_for(units) - units * UNIT) as u64).expect("a unit");
    u64::from_ne_bytes(word) != 0
}
