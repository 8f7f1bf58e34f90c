//! Values of the protocol's types out of random bytes, so that one harness serves `cargo test` and
//! a fuzzer. When the bytes run out, the rest is zero.

use smc_proto::cursor::Cursor;
use smc_proto::decline::DeclineCode;
use smc_proto::ids::{BufferSize, Chid, Eid, MacAddr, MtuCode, PeerId, RoceGid, U24};
use smc_proto::list::List;
use smc_proto::wire::cdc::{ProducerFlags, SmcdRepr, SmcrRepr, StateFlags};
use smc_proto::wire::{clc, llc};

/// Draws values from bytes.
pub struct Draw<'a>(pub &'a [u8]);

impl Draw<'_> {
    pub fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut value = [0; N];
        let n = N.min(self.0.len());
        let (taken, rest) = self.0.split_at(n);
        value[..n].copy_from_slice(taken);
        self.0 = rest;
        value
    }

    pub fn u8(&mut self) -> u8 {
        self.bytes::<1>()[0]
    }

    /// 0 to `limit - 1`.
    pub fn below(&mut self, limit: u8) -> u8 {
        self.u8() % limit
    }

    pub fn flag(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.bytes())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes())
    }

    fn u24(&mut self) -> U24 {
        U24::truncate(self.u32())
    }

    fn size(&mut self) -> BufferSize {
        BufferSize::from_code(self.below(16)).unwrap()
    }

    fn mtu(&mut self) -> MtuCode {
        MtuCode::from_code(self.below(16)).unwrap()
    }

    fn eid(&mut self) -> Eid {
        Eid::from_bytes(self.bytes())
    }

    fn gid(&mut self) -> RoceGid {
        RoceGid(self.bytes())
    }

    fn mac(&mut self) -> MacAddr {
        MacAddr(self.bytes())
    }

    fn some<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.flag().then(|| value(self))
    }

    fn list<T: Copy + Default, const N: usize>(
        &mut self,
        mut value: impl FnMut(&mut Self) -> T,
    ) -> List<T, N> {
        let mut list = List::new();
        for _ in 0..self.below(N as u8 + 1) {
            list.push(value(self)).unwrap();
        }
        list
    }

    fn local(&mut self) -> clc::Local {
        clc::Local { peer_id: PeerId(self.bytes()), gid: self.gid(), mac: self.mac() }
    }

    fn modes(&mut self) -> clc::Modes {
        [clc::Modes::R, clc::Modes::D, clc::Modes::Both][usize::from(self.below(3))]
    }

    fn release(&mut self) -> clc::Release {
        clc::Release::new(self.below(16)).unwrap()
    }

    pub fn clc(&mut self) -> clc::Message {
        match self.below(4) {
            0 => clc::Message::Proposal(self.proposal()),
            1 => clc::Message::Accept(self.answer(clc::Kind::Accept)),
            2 => clc::Message::Confirm(self.answer(clc::Kind::Confirm)),
            _ => clc::Message::Decline(self.decline()),
        }
    }

    fn decline(&mut self) -> clc::Decline {
        clc::Decline {
            peer_id: PeerId(self.bytes()),
            code: DeclineCode(self.u32()),
            os: self.os(),
            out_of_sync: self.flag(),
            v2: self.some(|d| [d.u32(), d.u32(), d.u32(), d.u32()]),
        }
    }

    fn os(&mut self) -> clc::Os {
        [clc::Os::UNSPECIFIED, clc::Os::ZOS, clc::Os::LINUX, clc::Os::AIX]
            [usize::from(self.below(4))]
    }

    pub fn proposal(&mut self) -> clc::Proposal {
        let versions = if self.flag() {
            clc::Versions::V1 { v1: self.v1(), ism: self.some(Self::ism) }
        } else {
            clc::Versions::V2 { ism: self.ism(), v1: self.some(Self::v1), v2: self.v2_offer() }
        };
        clc::Proposal { local: self.local(), versions }
    }

    fn ism(&mut self) -> clc::Ism {
        clc::Ism {
            gid: self.u64(),
            chid: Chid(self.u16()),
            vendor_oui: self.bytes(),
            vendor_options: self.bytes(),
        }
    }

    fn v1(&mut self) -> clc::V1 {
        clc::V1 {
            modes: self.modes(),
            prefix: clc::Prefix {
                subnet: self.bytes(),
                prefix_len: self.u8(),
                ipv6: self.list(|d| clc::Ipv6Prefix { prefix: d.bytes(), len: d.u8() }),
            },
        }
    }

    fn v2_offer(&mut self) -> clc::V2Offer {
        match self.below(3) {
            0 => clc::V2Offer::None,
            1 => clc::V2Offer::Bare(self.modes()),
            _ => clc::V2Offer::Whole(self.v2()),
        }
    }

    fn v2(&mut self) -> clc::V2 {
        clc::V2 {
            modes: match self.modes() {
                clc::Modes::R => clc::V2Modes::R,
                clc::Modes::D => clc::V2Modes::D(self.some(Self::smcd_v2)),
                clc::Modes::Both => clc::V2Modes::Both(self.some(Self::smcd_v2)),
            },
            seid: self.flag(),
            release: self.release(),
            gid: self.gid(),
            max_conns: self.u8(),
            max_links: self.u8(),
            features: clc::FeatureMask(self.u16()),
            eids: self.list(Self::eid),
        }
    }

    fn smcd_v2(&mut self) -> clc::SmcdV2 {
        clc::SmcdV2 {
            seid: self.eid(),
            gids: self.list(|d| clc::GidChid { gid: d.u64(), chid: Chid(d.u16()) }),
        }
    }

    fn answer(&mut self, kind: clc::Kind) -> clc::Answer {
        if self.flag() {
            clc::Answer::R(clc::Smcr {
                local: self.local(),
                qpn: self.u24(),
                rkey: self.u32(),
                rmbe_idx: self.u8(),
                alert_token: self.u32(),
                size: self.size(),
                mtu: self.mtu(),
                rmb_addr: self.u64(),
                psn: self.u24(),
                version: if self.flag() {
                    clc::SmcrVersion::V1 { first_contact: self.flag() }
                } else {
                    clc::SmcrVersion::V2 {
                        eid: self.eid(),
                        first_contact: self.some(|d| clc::V2FirstContact {
                            extension: d.first_contact(),
                            gids: match kind {
                                clc::Kind::Confirm => d.list(Self::gid),
                                _ => List::new(),
                            },
                        }),
                    }
                },
            })
        } else {
            clc::Answer::D(clc::Smcd {
                gid: self.u64(),
                token: self.u64(),
                dmbe_idx: self.u8(),
                size: self.size(),
                link_id: self.u32(),
                version: if self.flag() {
                    clc::SmcdVersion::V1 { first_contact: self.flag() }
                } else {
                    clc::SmcdVersion::V2 {
                        chid: Chid(self.u16()),
                        eid: self.eid(),
                        gid_ext: self.u64(),
                        first_contact: self.some(|d| d.smcd_first_contact()),
                    }
                },
            })
        }
    }

    fn first_contact(&mut self) -> clc::FirstContact {
        clc::FirstContact {
            direct: self.flag(),
            os: self.os(),
            release: self.release(),
            hostname: clc::Hostname(self.bytes()),
            max_conns: self.u8(),
            max_links: self.u8(),
            features: clc::FeatureMask(self.u16()),
            vendor_options: self.u32(),
        }
    }

    /// Release 0 of SMC-D has no field for limits and features.
    fn smcd_first_contact(&mut self) -> clc::FirstContact {
        let first = self.first_contact();
        if first.release >= clc::Release::V2_1 {
            return first;
        }
        clc::FirstContact {
            max_conns: 0,
            max_links: 0,
            features: clc::FeatureMask(0),
            vendor_options: 0,
            ..first
        }
    }

    fn cursor(&mut self) -> Cursor {
        Cursor { wrap: self.u16(), count: self.u32() }
    }

    pub fn cdc_smcr(&mut self) -> SmcrRepr {
        SmcrRepr {
            seqno: self.u16(),
            token: self.u32(),
            producer: self.cursor(),
            consumer: self.cursor(),
            flags: ProducerFlags::from_bits(self.u8()),
            state: StateFlags::from_bits(self.u8()),
        }
    }

    pub fn cdc_smcd(&mut self) -> SmcdRepr {
        SmcdRepr {
            producer: self.cursor(),
            consumer: self.cursor(),
            flags: ProducerFlags::from_bits(self.u8()),
            state: StateFlags::from_bits(self.u8()),
        }
    }

    /// Entries in wire form, for the lists that are views.
    pub fn entries<const N: usize>(&mut self) -> Vec<[u8; N]> {
        (0..self.u8()).map(|_| self.bytes()).collect()
    }

    pub fn llc<'m>(&mut self, updates: &'m [[u8; 16]], rkeys: &'m [[u8; 4]]) -> llc::Message<'m> {
        let version = if self.flag() { llc::Version::V1 } else { llc::Version::V2 };
        let response = self.flag();
        let body = self.llc_body(updates, rkeys);
        if response {
            llc::Message::response(version, body)
        } else {
            llc::Message::request(version, body)
        }
    }

    fn llc_body<'m>(&mut self, updates: &'m [[u8; 16]], rkeys: &'m [[u8; 4]]) -> llc::Body<'m> {
        match self.below(9) {
            0 => llc::Body::ConfirmLink(llc::ConfirmLink {
                mac: self.mac(),
                gid: self.gid(),
                qpn: self.u24(),
                link_id: self.u8(),
                link_uid: self.bytes(),
                max_links: self.u8(),
                max_conns: self.u8(),
                no_rmbe_eyecatcher: self.flag(),
            }),
            1 => llc::Body::AddLink(llc::AddLink {
                mac: self.mac(),
                gid: self.gid(),
                qpn: self.u24(),
                link_id: self.u8(),
                mtu: self.mtu(),
                psn: self.u24(),
                rejected: self.some(|d| d.below(16)),
                extension: self.some(|d| llc::AddLinkExt {
                    direct: d.flag(),
                    target_gid: d.gid(),
                    rkeys: llc::RkeyUpdates::from_wire(updates),
                }),
            }),
            2 => {
                let rkeys =
                    self.list(|d| llc::RkeyUpdate { old: d.u32(), new: d.u32(), addr: d.u64() });
                let more = if rkeys.len() == 2 { self.below(254) } else { 0 };
                llc::Body::AddLinkCont(llc::AddLinkCont { link_id: self.u8(), rkeys, more })
            }
            3 => llc::Body::DeleteLink(llc::DeleteLink {
                link_id: self.u8(),
                reason: llc::DeleteReason(self.u32()),
                all: self.flag(),
                orderly: self.flag(),
            }),
            4 => llc::Body::ReqAddLink(llc::ReqAddLink { gids: llc::Gids::from_wire(updates) }),
            5 => llc::Body::ConfirmRkey(llc::ConfirmRkey {
                rkey: self.u32(),
                addr: self.u64(),
                others: self.list(Self::link_rkey),
                negative: self.flag(),
                retry: self.flag(),
            }),
            6 => llc::Body::TestLink(self.bytes()),
            7 => {
                let others = self.list(Self::link_rkey);
                let more = if others.len() == 3 { self.below(253) } else { 0 };
                llc::Body::ConfirmRkeyCont(llc::ConfirmRkeyCont {
                    others,
                    more,
                    negative: self.flag(),
                    retry: self.flag(),
                })
            }
            _ => llc::Body::DeleteRkey(llc::DeleteRkey {
                rkeys: llc::Rkeys::from_wire(rkeys),
                invalid: self.u8(),
                negative: self.flag(),
            }),
        }
    }

    fn link_rkey(&mut self) -> llc::LinkRkey {
        llc::LinkRkey { link_id: self.u8(), rkey: self.u32(), addr: self.u64() }
    }
}
