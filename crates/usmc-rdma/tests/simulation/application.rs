//! An application at one end of a connection: it writes and reads its rings, and sees the end.

#![allow(dead_code, reason = "the agent's tests, which share it, need a part of it")]

use smc_proto::close::Direction;
use usmc_shm::segment::Segment;

/// A byte of a stream, by the stream's number and where it is.
pub(crate) fn byte_at(stream: u64, at: u64) -> u8 {
    let word = (at ^ stream << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word >> 56) as u8
}

/// What an application does with its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Manner {
    /// It writes all, shuts, reads until the end, and closes.
    Orderly,
    /// The same, byte by byte.
    Bytewise,
    /// It closes once it has read so much, whatever is there and whatever it wanted to write.
    Leaves(u64),
    /// It closes right after its last write.
    ClosesAtOnce,
    /// It never reads, and closes when nothing else happens any more.
    NeverReads,
}

/// One end.
pub(crate) struct Application {
    segment: Segment,
    slot: u32,
    /// Its end of the slot.
    end: usize,
    /// The stream that it sends, and the peer's.
    streams: [u64; 2],
    pub(crate) manner: Manner,
    pub(crate) wants: u64,
    pub(crate) written: u64,
    pub(crate) read: u64,
    pub(crate) is_shut: bool,
    pub(crate) is_closed: bool,
    pub(crate) reading: Direction,
    pub(crate) writing: Direction,
}

impl Application {
    pub(crate) fn new(
        segment: Segment,
        slot: u32,
        end: usize,
        streams: [u64; 2],
        wants: u64,
    ) -> Application {
        Application {
            segment,
            slot,
            end,
            streams,
            manner: Manner::Orderly,
            wants,
            written: 0,
            read: 0,
            is_shut: false,
            is_closed: false,
            reading: Direction::Open,
            writing: Direction::Open,
        }
    }

    /// Writes up to so many bytes. Whether any found room.
    pub(crate) fn write(&mut self, most: u64) -> bool {
        let ring = self.segment.ring(self.slot, self.end).expect("a slot");
        let want = most.min(self.wants - self.written) as usize;
        if want == 0 || self.writing != Direction::Open {
            return false;
        }
        let room = ring.room(want).expect("a ring in order");
        let n = want.min(room.free);
        let bytes: Vec<u8> =
            (0..n as u64).map(|i| byte_at(self.streams[0], self.written + i)).collect();
        // SAFETY: `n` bytes within the room.
        unsafe { ring.copy_in(room.prod, room.place, bytes.as_ptr(), n) };
        ring.publish(room.prod + n as u64);
        self.written += n as u64;
        n > 0
    }

    /// Reads up to so many bytes, and checks each. Whether there were any.
    pub(crate) fn read(&mut self, most: usize) -> bool {
        let ring = self.segment.ring(self.slot, 1 - self.end).expect("a slot");
        let data = ring.data().expect("a ring in order");
        let mut bytes = vec![0; data.len.min(most)];
        // SAFETY: as many bytes as are there, or fewer.
        unsafe { ring.copy_out(data.cons, data.place, bytes.as_mut_ptr(), bytes.len()) };
        for (at, byte) in (self.read..).zip(&bytes) {
            assert_eq!(
                *byte,
                byte_at(self.streams[1], at),
                "byte {at} of stream {}",
                self.streams[1]
            );
        }
        ring.consume(data.cons + bytes.len() as u64);
        self.read += bytes.len() as u64;
        !bytes.is_empty()
    }

    /// Whether bytes are there.
    pub(crate) fn has_data(&self) -> bool {
        self.segment.ring(self.slot, 1 - self.end).expect("a slot").has_data()
    }

    /// Whether it closes now.
    pub(crate) fn closes(&self) -> bool {
        let is_done = self.is_shut || self.is_aborted();
        match self.manner {
            Manner::Orderly | Manner::Bytewise => self.is_at_end() && is_done,
            Manner::Leaves(after) => self.read >= after || (self.is_at_end() && is_done),
            Manner::ClosesAtOnce => self.written == self.wants || self.is_aborted(),
            Manner::NeverReads => self.is_aborted(),
        }
    }

    /// Whether all that came is read, and no more comes.
    pub(crate) fn is_at_end(&self) -> bool {
        let ring = self.segment.ring(self.slot, 1 - self.end).expect("a slot");
        self.reading != Direction::Open && !ring.has_data()
    }

    /// Whether it was ended before its time.
    pub(crate) fn is_aborted(&self) -> bool {
        let ends = [self.reading, self.writing];
        ends.iter().any(|end| matches!(end, Direction::Reset | Direction::Aborted))
    }
}
