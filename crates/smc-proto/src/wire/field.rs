//! Reading and writing a field at its range. The callers have checked the length of the message
//! before, once; a range outside it would be a mistake in this crate, so it may panic.

use core::ops::Range;

/// The bytes that a field occupies, counted from the start of its message or section.
pub(crate) type Field = Range<usize>;

pub(crate) fn bytes<const N: usize>(message: &[u8], field: Field) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&message[field]);
    value
}

pub(crate) fn u16_be(message: &[u8], field: Field) -> u16 {
    u16::from_be_bytes(bytes(message, field))
}

pub(crate) fn u32_be(message: &[u8], field: Field) -> u32 {
    u32::from_be_bytes(bytes(message, field))
}

pub(crate) fn u64_be(message: &[u8], field: Field) -> u64 {
    u64::from_be_bytes(bytes(message, field))
}

pub(crate) fn put<const N: usize>(message: &mut [u8], field: Field, value: [u8; N]) {
    message[field].copy_from_slice(&value);
}
