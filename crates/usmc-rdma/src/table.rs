//! The connections of an engine, by their tokens.

use crate::connection::ConnId;

/// Bits of a token that say where in the table a connection stands; those above say which one of that place.
const PLACE_BITS: u32 = 20;
const PLACES: usize = 1 << PLACE_BITS;

#[derive(Debug)]
pub(crate) struct Table<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
    /// Where the first use of a place begins: the tokens of two engines differ.
    first: u32,
}

#[derive(Debug)]
struct Place<T> {
    uses: u32,
    value: Option<T>,
}

impl<T> Table<T> {
    pub(crate) fn new(first: u32) -> Table<T> {
        Table { places: Vec::new(), free: Vec::new(), first }
    }

    /// A place for one more; `None` where there are a million.
    pub(crate) fn insert(&mut self, make: impl FnOnce(ConnId) -> T) -> Option<ConnId> {
        let place = match self.free.pop() {
            Some(place) => place,
            None if self.places.len() < PLACES => {
                self.places.push(Place { uses: self.first, value: None });
                self.places.len() as u32 - 1
            }
            None => return None,
        };
        let at = self.places.get_mut(place as usize)?;
        at.uses = at.uses.wrapping_add(1);
        // A token is never 0.
        if place == 0 && at.uses << PLACE_BITS == 0 {
            at.uses += 1;
        }
        let id = ConnId(at.uses << PLACE_BITS | place);
        at.value = Some(make(id));
        Some(id)
    }

    fn place(&self, id: ConnId) -> Option<&Place<T>> {
        let place = self.places.get(id.0 as usize & (PLACES - 1))?;
        (place.uses << PLACE_BITS == id.0 & !(PLACES as u32 - 1)).then_some(place)
    }

    pub(crate) fn get(&self, id: ConnId) -> Option<&T> {
        self.place(id)?.value.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: ConnId) -> Option<&mut T> {
        self.place(id)?;
        self.places.get_mut(id.0 as usize & (PLACES - 1))?.value.as_mut()
    }

    pub(crate) fn remove(&mut self, id: ConnId) -> Option<T> {
        self.place(id)?;
        let place = id.0 & (PLACES as u32 - 1);
        let value = self.places.get_mut(place as usize)?.value.take()?;
        self.free.push(place);
        Some(value)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.places.iter().filter_map(|place| place.value.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_one_connection_for_good() {
        let mut table = Table::new(0xfff);
        let ids: Vec<ConnId> = (0..3).map(|n| table.insert(|_| n).unwrap()).collect();
        assert!(ids.iter().all(|id| id.token() != 0));
        assert_eq!(table.remove(ids[1]), Some(1));
        assert_eq!(table.get(ids[1]), None);
        assert_eq!(table.remove(ids[1]), None);
        let again = table.insert(|_| 7).unwrap();
        assert_eq!(again.0 & 0xf_ffff, ids[1].0 & 0xf_ffff, "the same place");
        assert_ne!(again, ids[1]);
        assert_eq!((table.get(ids[1]), table.get(again)), (None, Some(&7)));
        assert_eq!(table.get(ConnId(0)), None);
        assert_eq!(table.iter().count(), 3);
    }
}
