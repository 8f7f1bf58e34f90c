//! A short list without an allocator: what a CLC message can repeat, it repeats at most eight
//! times.

use core::ops::Deref;

/// Up to `N` (at most 255) values of `T`, in order. It dereferences to the slice of those present.
#[derive(Clone, Copy)]
pub struct List<T, const N: usize> {
    items: [T; N],
    len: u8,
}

/// One more value than a [`List`] holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full {
    /// How many it can hold.
    pub capacity: usize,
}

impl<T: Copy + Default, const N: usize> List<T, N> {
    /// An empty list.
    pub fn new() -> List<T, N> {
        const { assert!(N <= u8::MAX as usize) }
        List { items: [T::default(); N], len: 0 }
    }

    /// The values of `slice`, if they fit.
    pub fn from_slice(slice: &[T]) -> Result<List<T, N>, Full> {
        let mut list = List::new();
        for &item in slice {
            list.push(item)?;
        }
        Ok(list)
    }

    /// Adds a value at the end, if there is room.
    pub fn push(&mut self, item: T) -> Result<(), Full> {
        let slot = self.items.get_mut(usize::from(self.len)).ok_or(Full { capacity: N })?;
        *slot = item;
        self.len += 1;
        Ok(())
    }
}

impl<T: Copy + Default, const N: usize> Default for List<T, N> {
    fn default() -> Self {
        List::new()
    }
}

impl<T, const N: usize> Deref for List<T, N> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.items.get(..usize::from(self.len)).unwrap_or_default()
    }
}

impl<T: PartialEq, const N: usize> PartialEq for List<T, N> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Eq, const N: usize> Eq for List<T, N> {}

impl<T: core::fmt::Debug, const N: usize> core::fmt::Debug for List<T, N> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_list_refuses_and_keeps_what_it_has() {
        let mut list = List::<u8, 2>::from_slice(&[1, 2]).unwrap();
        assert_eq!(list.push(3), Err(Full { capacity: 2 }));
        assert_eq!(&*list, &[1, 2]);
        assert_eq!(List::<u8, 2>::from_slice(&[1, 2, 3]), Err(Full { capacity: 2 }));
    }
}
