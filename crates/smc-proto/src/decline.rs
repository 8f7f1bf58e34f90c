//! Every reason to decline: the code of the wire, its name in the kernel, and a phrase for people.

use core::fmt;

/// Why one side does not use SMC for a connection (CLC Decline, "peer diagnosis information").
///
/// The high half is RFC 7609's class (appendix A.2), the low half the kernel's detail
/// (`smc_clc.h`). A peer may send any number: those without a name here keep it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DeclineCode(pub u32);

impl DeclineCode {
    /// The name that the kernel gives this code, if it is one of those known.
    pub fn name(self) -> Option<&'static str> {
        ALL.iter().find(|known| known.code == self).map(|known| known.name)
    }

    /// What it means, in a short phrase.
    pub fn text(self) -> &'static str {
        ALL.iter().find(|known| known.code == self).map_or("unknown reason", |known| known.text)
    }
}

impl fmt::Display for DeclineCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x} ({})", self.0, self.text())
    }
}

impl fmt::Debug for DeclineCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeclineCode({:08x} {})", self.0, self.name().unwrap_or("?"))
    }
}

/// A code with its name and its text: one row of [`ALL`].
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// The number of the wire.
    pub code: DeclineCode,
    /// The kernel's name without its `SMC_CLC_DECL_` (`smc_clc.h`).
    pub name: &'static str,
    /// A short phrase for people.
    pub text: &'static str,
}

macro_rules! codes {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        impl DeclineCode {
            $(#[doc = concat!($text, ".")] pub const $name: DeclineCode = DeclineCode($code);)*
        }

        /// Every code that has a name, in the order of the numbers.
        pub const ALL: &[Known] = &[
            $(Known { code: DeclineCode($code), name: stringify!($name), text: $text },)*
        ];
    };
}

codes! {
    MEM = 0x0101_0000, "not enough memory";
    TIMEOUT_CL = 0x0201_0000, "no answer to CONFIRM_LINK in time";
    TIMEOUT_AL = 0x0202_0000, "no answer to ADD_LINK in time";
    CNFERR = 0x0300_0000, "configuration error";
    PEERNOSMC = 0x0301_0000, "peer did not say that it speaks SMC";
    IPSEC = 0x0302_0000, "connection is protected by IPsec";
    NOSMCDEV = 0x0303_0000, "no usable SMC-D or SMC-R device";
    NOSMCDDEV = 0x0303_0001, "no usable SMC-D device";
    NOSMCRDEV = 0x0303_0002, "no usable SMC-R device";
    NOISM2SUPP = 0x0303_0003, "SMC-Dv2 is not supported here";
    NOV2EXT = 0x0303_0004, "peer sent no SMC v2 extension";
    NOV2DEXT = 0x0303_0005, "peer sent no SMC-Dv2 extension";
    NOSEID = 0x0303_0006, "peer sent no SEID";
    NOSMCD2DEV = 0x0303_0007, "no SMC-Dv2 device reaches the peer";
    NOUEID = 0x0303_0008, "peer sent no UEID";
    RELEASEERR = 0x0303_0009, "SMC releases do not match";
    MAXCONNERR = 0x0303_000a, "connections per link group do not match";
    MAXLINKERR = 0x0303_000b, "links per link group do not match";
    MODEUNSUPP = 0x0304_0000, "peer chose a mode that was not offered";
    RMBE_EC = 0x0305_0000, "peer expects eyecatchers in RMB elements";
    OPTUNSUPP = 0x0306_0000, "TCP Fast Open in use";
    DIFFPREFIX = 0x0307_0000, "peers are not in the same IP subnet";
    GETVLANERR = 0x0308_0000, "VLAN of the interface is not known";
    ISMVLANERR = 0x0309_0000, "VLAN could not be registered with the ISM device";
    NOACTLINK = 0x030a_0000, "no active link in the link group";
    NOSRVLINK = 0x030b_0000, "server chose a link that does not exist here";
    VERSMISMAT = 0x030c_0000, "SMC versions do not match";
    MAX_DMB = 0x030d_0000, "no DMB left on the device";
    NOROUTE = 0x030e_0000, "no route to the peer's RoCE port";
    NOINDIRECT = 0x030f_0000, "peer is reached directly, not through a gateway";
    SYNCERR = 0x0400_0000, "link group out of sync with the peer";
    PEERDECL = 0x0500_0000, "peer declined";
    INTERR = 0x0999_0000, "internal error";
    ERR_RTOK = 0x0999_0001, "peer's RMB could not be recorded";
    ERR_RDYLNK = 0x0999_0002, "link could not be made ready";
    ERR_REGBUF = 0x0999_0003, "buffer could not be registered";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_sorted_unique_and_named() {
        assert_eq!(ALL.len(), 36);
        assert!(ALL.windows(2).all(|pair| pair[0].code.0 < pair[1].code.0));
        assert!(ALL.iter().all(|known| known.code.name() == Some(known.name)));
        assert_eq!(DeclineCode(0x1234_5678).name(), None);
        assert_eq!(DeclineCode(0x1234_5678).text(), "unknown reason");
        for known in ALL {
            let shown = std::format!("{}", known.code);
            assert_eq!(shown, std::format!("{:08x} ({})", known.code.0, known.text));
        }
        assert_eq!(
            std::format!("{}", DeclineCode::SYNCERR),
            "04000000 (link group out of sync with the peer)"
        );
    }
}
