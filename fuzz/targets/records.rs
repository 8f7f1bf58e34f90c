//! The record file that `usmc ss` reads: any bytes, changed while they are read, with short reads and errors.
#![no_main]

use std::cell::{Cell, RefCell};
use std::io;

use libfuzzer_sys::fuzz_target;
use observed::{Refusal, Source};
use usmc_fuzz::input::Input;

#[allow(dead_code, reason = "the command uses the rest")]
#[path = "../../crates/usmc-cli/src/observed.rs"]
mod observed;

/// Pauses between reads in which the writer may act, at most: an unsteady record is read again 64 times.
const MOST_READS: usize = 3 * 4096 + 64;

/// A file whose writer goes on writing.
struct Hostile<'a> {
    bytes: RefCell<Vec<u8>>,
    size: u64,
    /// What happens at the reads to come.
    changes: RefCell<Input<'a>>,
    reads: Cell<usize>,
}

impl Source for Hostile<'_> {
    fn size(&self) -> io::Result<u64> {
        Ok(self.size)
    }

    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        self.reads.set(self.reads.get() + 1);
        assert!(self.reads.get() < MOST_READS, "reads without end");
        let (mut changes, mut bytes) = (self.changes.borrow_mut(), self.bytes.borrow_mut());
        let mut most = buf.len();
        if !changes.is_over() {
            match changes.below(8) {
                0 => return Err(io::ErrorKind::Interrupted.into()),
                1 => return Err(io::ErrorKind::Other.into()),
                2 => most = most.min(usize::from(changes.u16())),
                3 => {
                    let len = usize::from(changes.u16());
                    bytes.truncate(len);
                }
                4 | 5 => {
                    let (at, value) = (usize::from(changes.u16()), changes.u8());
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte = value;
                    }
                }
                _ => {}
            }
        }
        let from = usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
        let n = most.min(bytes.len() - from);
        buf[..n].copy_from_slice(&bytes[from..from + n]);
        Ok(n)
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let records = input.below(8);
    let changes = usize::from(input.u8());
    let claims_more = input.u16();
    let changes = Input(input.bytes(changes));
    // A header and then records, for the page between is not read.
    let mut file = input.bytes(64).to_vec();
    if !file.is_empty() {
        file.resize(4096, 0);
    }
    file.extend_from_slice(input.bytes(records * 128 + 64));
    let size = file.len() as u64 + u64::from(claims_more) * 64;
    let hostile = Hostile {
        bytes: RefCell::new(file),
        size,
        changes: RefCell::new(changes),
        reads: Cell::new(0),
    };
    match observed::read(&hostile) {
        Ok(reading) => {
            let told = reading.sockets.len() + reading.unsteady + reading.senseless;
            assert!(told <= records + 1, "{told} records");
            for socket in &reading.sockets {
                // As the list shows them.
                let _ = (socket.local.to_string(), socket.peer.to_string());
            }
        }
        Err(Refusal::Version(_) | Refusal::Foreign | Refusal::Unfinished) => {}
        Err(Refusal::Unreadable(kind)) => assert_eq!(kind, io::ErrorKind::Other),
    }
});
