//! "I speak SMC": TCP option 254 (shared experiments, RFC 6994) with the magic number E2D4C3D9, on
//! SYN and SYN-ACK only (RFC 7609, section 3).

/// The option as the kernel writes it: two NOPs, then kind 254, length 6 and "SMCR" in EBCDIC.
pub const SMC_OPTION: [u8; 8] = [NOP, NOP, EXPERIMENT, 6, 0xe2, 0xd4, 0xc3, 0xd9];

const END: u8 = 0;
const NOP: u8 = 1;
const EXPERIMENT: u8 = 254;
const MAGIC: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xd9];

/// Whether the options of a SYN or SYN-ACK (all bytes after the 20 of the header) say SMC.
///
/// As in the kernel (`tcp_input.c`), the length has to be even and at least 6, more bytes after the
/// magic are ignored, and options that do not parse end the search.
pub fn says_smc(options: &[u8]) -> bool {
    let mut rest = options;
    while let [kind, after @ ..] = rest {
        match *kind {
            END => return false,
            NOP => rest = after,
            kind => {
                let Some(&length) = after.first() else { return false };
                let Some((option, next)) = rest.split_at_checked(usize::from(length)) else {
                    return false;
                };
                let [_, _, value @ ..] = option else { return false };
                if kind == EXPERIMENT && length % 2 == 0 && value.starts_with(&MAGIC) {
                    return true;
                }
                rest = next;
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_option_is_found_wherever_it_stands() {
        let cases: &[(&[u8], bool)] = &[
            (&SMC_OPTION, true),
            // As the BPF program writes it, with the padding behind.
            (&[254, 6, 0xe2, 0xd4, 0xc3, 0xd9, 1, 1], true),
            (&[2, 4, 5, 0xb4, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9], true),
            (&[254, 8, 0xe2, 0xd4, 0xc3, 0xd9, 7, 7], true),
            // Fast Open's experiment, then ours.
            (&[254, 4, 0xf9, 0x89, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9], true),
            (&[], false),
            (&[0, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9], false),
            (&[253, 6, 0xe2, 0xd4, 0xc3, 0xd9], false),
            (&[254, 6, 0xe2, 0xd4, 0xc3, 0xc4], false),
            (&[254, 7, 0xe2, 0xd4, 0xc3, 0xd9, 0], false),
            (&[254, 6, 0xe2, 0xd4, 0xc3], false),
            (&[254], false),
            (&[254, 0, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9], false),
            (&[254, 1, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9], false),
        ];
        for (options, expected) in cases {
            assert_eq!(says_smc(options), *expected, "{options:02x?}");
        }
    }
}
