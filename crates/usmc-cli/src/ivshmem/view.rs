//! What a client has been told, and what it is told next.
//!
//! No message waits in a queue. The next one is the first difference between what the client knows and what is so. A client that
//! does not read costs no memory, and whoever takes over from a server needs nothing but the views.

use serde::{Deserialize, Serialize};

/// One of the clients, to those that are told of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Present {
    /// Its id.
    pub id: u16,
    /// Its place in the order of arrival, which no other client ever has.
    pub serial: u64,
    /// Its vectors.
    pub vectors: u8,
}

/// What goes with a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Carries {
    /// Nothing.
    Nothing,
    /// The memory.
    Memory,
    /// A doorbell of the client with this serial number.
    Doorbell {
        /// Whose.
        serial: u64,
        /// Which of its vectors.
        vector: u8,
    },
}

/// One message: a number, and what goes with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message {
    /// Eight bytes on the wire, little-endian.
    pub value: i64,
    /// The descriptor.
    pub carries: Carries,
}

/// The protocol's version.
const PROTOCOL: i64 = 0;
/// Stands for the memory where an id would be.
const MEMORY: i64 = -1;
/// Messages before those about clients: the version, the id, the memory.
const GREETING: u8 = 3;

/// A client that another one has been told of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Told(u16, u64, u8);

/// What a client has been told.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct View {
    greeting: u8,
    told: Vec<Told>,
}

impl View {
    /// What the client with this id is told next. `None`: it knows all. `present` is in the order of arrival.
    pub fn next(&self, id: u16, present: &[Present]) -> Option<Message> {
        let plain = |value| Message { value, carries: Carries::Nothing };
        match self.greeting {
            0 => return Some(plain(PROTOCOL)),
            1 => return Some(plain(id.into())),
            2 => return Some(Message { value: MEMORY, carries: Carries::Memory }),
            _ => {}
        }
        let is_there = |told: &Told| present.iter().any(|client| client.serial == told.1);
        if let Some(gone) = self.told.iter().find(|told| !is_there(told)) {
            return Some(plain(gone.0.into()));
        }
        present.iter().find_map(|client| {
            let vector = self.vectors_of(client.serial);
            let carries = Carries::Doorbell { serial: client.serial, vector };
            (vector < client.vectors).then_some(Message { value: client.id.into(), carries })
        })
    }

    fn vectors_of(&self, serial: u64) -> u8 {
        self.told.iter().find(|told| told.1 == serial).map_or(0, |told| told.2)
    }

    /// The client has been sent this, which was the next.
    pub fn sent(&mut self, message: Message) {
        match message.carries {
            _ if self.greeting < GREETING => self.greeting += 1,
            Carries::Doorbell { serial, .. } => {
                match self.told.iter_mut().find(|told| told.1 == serial) {
                    Some(told) => told.2 += 1,
                    None => self.told.push(Told(message.value as u16, serial, 1)),
                }
            }
            Carries::Nothing | Carries::Memory => {
                self.told.retain(|told| i64::from(told.0) != message.value);
            }
        }
    }

    /// Whether the client takes this id for a client's.
    pub fn names(&self, id: u16) -> bool {
        self.told.iter().any(|told| told.0 == id)
    }

    /// How many messages it has not been sent.
    pub fn behind(&self, present: &[Present]) -> usize {
        let greeting = usize::from(GREETING.saturating_sub(self.greeting));
        let is_gone = |told: &&Told| present.iter().all(|client| client.serial != told.1);
        let gone = self.told.iter().filter(is_gone).count();
        let left = |client: &Present| client.vectors.saturating_sub(self.vectors_of(client.serial));
        greeting + gone + present.iter().map(|client| usize::from(left(client))).sum::<usize>()
    }
}

/// The next id at or after `from` that is free. An id comes back after all others have, so that a late doorbell of a client
/// that is gone does not ring at a new one.
pub fn free_id(from: u16, is_taken: impl Fn(u16) -> bool) -> Option<u16> {
    (0..=u16::MAX).map(|step| from.wrapping_add(step)).find(|id| !is_taken(*id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(id: u16, serial: u64, vectors: u8) -> Present {
        Present { id, serial, vectors }
    }

    /// Everything that a client is told, as the ids of messages and the vectors that come with them.
    fn told(view: &mut View, id: u16, present: &[Present]) -> Vec<(i64, Option<u8>)> {
        let mut all = Vec::new();
        while let Some(message) = view.next(id, present) {
            assert_eq!(view.behind(present) - 1, {
                let mut later = view.clone();
                later.sent(message);
                later.behind(present)
            });
            view.sent(message);
            let vector = match message.carries {
                Carries::Doorbell { vector, .. } => Some(vector),
                Carries::Nothing => None,
                Carries::Memory => Some(u8::MAX),
            };
            all.push((message.value, vector));
        }
        all
    }

    #[test]
    fn a_client_is_told_itself_last() {
        let present = [client(7, 1, 2), client(9, 2, 1)];
        let mut view = View::default();
        let memory = (-1, Some(u8::MAX));
        let first = [(0, None), (9, None), memory, (7, Some(0)), (7, Some(1)), (9, Some(0))];
        assert_eq!(told(&mut view, 9, &present), first);
        assert_eq!((view.behind(&present), view.next(9, &present)), (0, None));
    }

    #[test]
    fn a_client_that_reads_late_is_told_what_is_so_then() {
        let mut view = View::default();
        let (me, other) = (client(1, 1, 1), client(2, 2, 2));
        told(&mut view, 1, &[me]);
        // Half told of, and gone.
        view.sent(view.next(1, &[me, other]).expect("its first doorbell"));
        let (late, brief) = (client(4, 4, 1), client(3, 3, 1));
        assert_eq!(view.behind(&[me, other, brief, late]), 3);
        assert_eq!(told(&mut view, 1, &[me, late]), [(2, None), (4, Some(0))]);
        assert!(view.names(4) && !view.names(3) && !view.names(2));
    }

    #[test]
    fn a_departure_comes_before_the_arrival_with_the_same_id() {
        let mut view = View::default();
        let me = client(1, 1, 1);
        told(&mut view, 1, &[me, client(5, 2, 1)]);
        assert_eq!(told(&mut view, 1, &[me, client(5, 3, 1)]), [(5, None), (5, Some(0))]);
    }

    #[test]
    fn ids_wrap_and_skip_those_in_use() {
        assert_eq!(free_id(3, |id| id < 5), Some(5));
        assert_eq!(free_id(u16::MAX, |id| id == u16::MAX || id == 0), Some(1));
        assert_eq!(free_id(0, |_| true), None);
    }
}
