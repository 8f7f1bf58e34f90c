//! Every message with every field set, byte for byte where the standard has it: RFC 7609 appendix A
//! (option, CLC, LLC and CDC of version 1), the kernel's headers for version 2 and SMC-D. What stands
//! nowhere in these tables is reserved and zero.

use smc_proto::cursor::Cursor;
use smc_proto::decline::DeclineCode;
use smc_proto::ids::{BufferSize, Chid, Eid, MacAddr, MtuCode, PeerId, RoceGid, SmcdGid, U24};
use smc_proto::list::List;
use smc_proto::wire::cdc::{ProducerFlags, SmcdRepr, SmcrRepr, StateFlags};
use smc_proto::wire::clc::{
    self, Answer, Decline, FeatureMask, FirstContact, Hostname, Ipv6Prefix, Ism, Local, Modes, Os,
    Prefix, Proposal, Release, Smcd, SmcdV2, SmcdVersion, Smcr, SmcrVersion, V1, V2,
    V2FirstContact, V2Modes, V2Offer, Versions,
};
use smc_proto::wire::llc::{
    self, AddLink, AddLinkCont, AddLinkExt, Body, ConfirmLink, ConfirmRkey, ConfirmRkeyCont,
    DeleteLink, DeleteReason, DeleteRkey, Gids, LinkRkey, ReqAddLink, RkeyUpdate, RkeyUpdates,
    Rkeys, Version,
};

/// Where bytes stand.
type Field<'f> = (usize, &'f [u8]);

/// A message of `length` bytes with these bytes at these offsets.
fn layout(length: usize, fields: &[Field<'_>]) -> Vec<u8> {
    let mut message = vec![0; length];
    let mut taken = vec![false; length];
    for (offset, bytes) in fields {
        for (n, byte) in bytes.iter().enumerate() {
            assert!(!std::mem::replace(&mut taken[offset + n], true), "offset {offset} twice");
            message[offset + n] = *byte;
        }
    }
    message
}

/// `length` bytes that tell where they are from.
fn run<const N: usize>(first: u8) -> [u8; N] {
    std::array::from_fn(|n| first.wrapping_add(n as u8))
}

#[track_caller]
fn is_clc(message: clc::Message, expected: &[u8]) {
    let mut buffer = [0xaa; clc::MAX_LEN];
    assert_eq!(message.emit(&mut buffer).unwrap(), expected);
    assert_eq!(clc::Message::parse(expected), Ok(message));
}

#[track_caller]
fn is_llc(message: llc::Message<'_>, expected: &[u8]) {
    let mut buffer = [0xaa; llc::MAX_LEN];
    assert_eq!(message.emit(&mut buffer).unwrap(), expected);
    assert_eq!(llc::Message::parse(expected), Ok(message));
}

/// "SMCR" and "SMCD" in EBCDIC.
const SMCR: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xd9];
const SMCD: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xc4];

fn local() -> Local {
    Local { peer_id: PeerId(run(0x10)), gid: RoceGid(run(0x20)), mac: MacAddr(run(0x38)) }
}

fn prefix() -> Prefix {
    let mut prefix = Prefix { subnet: [10, 9, 8, 0], prefix_len: 24, ..Prefix::default() };
    for n in [0, 1] {
        prefix.ipv6.push(Ipv6Prefix { prefix: run(0x90 + 16 * n), len: 48 + n }).unwrap();
    }
    prefix
}

#[test]
fn proposals_of_version_1() {
    let v1 = V1 { modes: Modes::R, prefix: Prefix { ipv6: List::new(), ..prefix() } };
    let versions = Versions::V1 { v1, ism: None };
    let expected = layout(
        52,
        &[
            (0, &SMCR),
            (4, &[1, 0, 52, 0x10]),
            (8, &run::<8>(0x10)),
            (16, &run::<16>(0x20)),
            (32, &run::<6>(0x38)),
            (40, &[10, 9, 8, 0, 24]),
            (48, &SMCR),
        ],
    );
    is_clc(clc::Message::Proposal(Proposal { local: local(), versions }), &expected);

    let ism = Ism {
        gid: u64::from_be_bytes(run(0x40)),
        chid: Chid(0x0102),
        vendor_oui: [0xa1, 0xa2, 0xa3],
        vendor_options: run(0xb1),
    };
    let versions = Versions::V1 { v1: V1 { modes: Modes::Both, prefix: prefix() }, ism: Some(ism) };
    let expected = layout(
        126,
        &[
            (0, &SMCR),
            (4, &[1, 0, 126, 0x13]),
            (8, &run::<8>(0x10)),
            (16, &run::<16>(0x20)),
            (32, &run::<6>(0x38)),
            (38, &[0, 40]),
            (40, &run::<8>(0x40)),
            (48, &[1, 2]),
            (52, &[0xa1, 0xa2, 0xa3]),
            (55, &run::<5>(0xb1)),
            (80, &[10, 9, 8, 0, 24]),
            (87, &[2]),
            (88, &run::<16>(0x90)),
            (104, &[48]),
            (105, &run::<16>(0xa0)),
            (121, &[49]),
            (122, &SMCR),
        ],
    );
    is_clc(clc::Message::Proposal(Proposal { local: local(), versions }), &expected);
}

/// With everything in it that there may be: the longest CLC message is 652 bytes.
#[test]
fn the_longest_proposal() {
    let mut smcd =
        SmcdV2 { seid: Eid::user("IBM-SYSZ-ISMSEID000000001234567").unwrap(), ..SmcdV2::default() };
    assert!(smcd.push_device(SmcdGid { gid: 0x0101, ext: 0 }, Chid(0x0303)));
    for n in 0..3 {
        let gid = SmcdGid { gid: 0x1000 + n, ext: 0x2000 + n };
        assert!(smcd.push_device(gid, Chid(0xff00 + n as u16)));
    }
    assert!(!smcd.push_device(SmcdGid { gid: 1, ext: 2 }, Chid::LOOPBACK), "room for one entry");
    assert!(smcd.push_device(SmcdGid { gid: 0x0202, ext: 0 }, Chid(0x0404)));
    let mut eids = List::new();
    let mut ipv6 = List::new();
    for n in 0..8_u8 {
        eids.push(Eid::from_bytes([b'A' + n; 32])).unwrap();
        ipv6.push(Ipv6Prefix { prefix: [n; 16], len: 64 + n }).unwrap();
    }
    let v2 = V2 {
        modes: V2Modes::Both(Some(smcd)),
        seid: true,
        release: Release::V2_1,
        gid: RoceGid(run(0xc0)),
        max_conns: 200,
        max_links: 2,
        features: FeatureMask(0x8001),
        eids,
    };
    let v1 = V1 { modes: Modes::Both, prefix: Prefix { ipv6, ..prefix() } };
    let versions = Versions::V2 {
        ism: Ism { gid: 7, ..Ism::default() },
        v1: Some(v1),
        v2: V2Offer::Whole(v2),
    };
    let message = clc::Message::Proposal(Proposal { local: local(), versions });
    let mut fields: Vec<(usize, Vec<u8>)> = vec![
        (0, SMCR.to_vec()),
        (4, vec![1, 0x02, 0x8c, 0x2f]),
        (8, run::<8>(0x10).to_vec()),
        (16, run::<16>(0x20).to_vec()),
        (32, run::<6>(0x38).to_vec()),
        (38, vec![0, 40]),
        (47, vec![7]),
        // From byte 52 to 224: the extension behind 8 prefixes.
        (50, vec![0, 172]),
        (80, vec![10, 9, 8, 0, 24, 0, 0, 8]),
        (224, vec![8, 8]),
        (227, vec![0x11]),
        // From byte 232 to 520: behind 8 EIDs.
        (230, vec![0x01, 0x20]),
        (232, run::<16>(0xc0).to_vec()),
        (248, vec![200, 2, 0x80, 0x01]),
        (520, b"IBM-SYSZ-ISMSEID000000001234567 ".to_vec()),
        (648, SMCR.to_vec()),
    ];
    for n in 0..8 {
        fields.push((88 + 17 * n, [[n as u8; 16].as_slice(), &[64 + n as u8]].concat()));
        fields.push((264 + 32 * n, vec![b'A' + n as u8; 32]));
    }
    let entries: [(u64, u16); 8] = [
        (0x0101, 0x0303),
        (0x1000, 0xff00),
        (0x2000, 0xff00),
        (0x1001, 0xff01),
        (0x2001, 0xff01),
        (0x1002, 0xff02),
        (0x2002, 0xff02),
        (0x0202, 0x0404),
    ];
    for (n, (gid, chid)) in entries.into_iter().enumerate() {
        let entry = [gid.to_be_bytes().as_slice(), &chid.to_be_bytes()].concat();
        fields.push((568 + 10 * n, entry));
    }
    let fields: Vec<Field<'_>> = fields.iter().map(|(at, bytes)| (*at, &bytes[..])).collect();
    assert_eq!(clc::MAX_LEN, 652);
    is_clc(message, &layout(652, &fields));
}

fn smcr(version: SmcrVersion) -> Smcr {
    Smcr {
        local: local(),
        qpn: U24::new(0x41_42_43).unwrap(),
        rkey: 0x5152_5354,
        rmbe_idx: 1,
        alert_token: 0x6162_6364,
        size: BufferSize::from_code(9).unwrap(),
        mtu: MtuCode::from_code(4).unwrap(),
        rmb_addr: u64::from_be_bytes(run(0x70)),
        psn: U24::new(0x81_82_83).unwrap(),
        version,
    }
}

/// What all Accepts and Confirms of SMC-R have.
const SMCR_PART: [Field<'_>; 10] = [
    (0, &SMCR),
    (8, &[0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17]),
    (
        16,
        &[
            0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x2b, 0x2c, 0x2d,
            0x2e, 0x2f,
        ],
    ),
    (32, &[0x38, 0x39, 0x3a, 0x3b, 0x3c, 0x3d]),
    (38, &[0x41, 0x42, 0x43]),
    (41, &[0x51, 0x52, 0x53, 0x54]),
    (45, &[1, 0x61, 0x62, 0x63, 0x64]),
    (50, &[0x94]),
    (52, &[0x70, 0x71, 0x72, 0x73, 0x74, 0x75, 0x76, 0x77]),
    (61, &[0x81, 0x82, 0x83]),
];

fn extension(release: Release) -> FirstContact {
    FirstContact {
        direct: true,
        os: Os::AIX,
        release,
        hostname: Hostname::new("a-host"),
        max_conns: 100,
        max_links: 2,
        features: FeatureMask(0x4001),
        vendor_options: 0xd1d2_d3d4,
    }
}

/// A first contact extension that begins at `at`.
fn extension_at(at: usize, short: bool) -> Vec<Field<'static>> {
    const HOSTNAME: &[u8; 32] = b"a-host                          ";
    let release: &[u8] = if short { &[0x30] } else { &[0x31] };
    let mut fields: Vec<Field<'_>> = vec![(at + 1, release), (at + 4, HOSTNAME)];
    if !short {
        fields.push((at + 36, &[100, 2, 0x40, 0x01, 0xd1, 0xd2, 0xd3, 0xd4]));
    }
    fields
}

#[test]
fn accepts_and_confirms_of_smcr() {
    for (first_contact, flags) in [(false, 0x10), (true, 0x18)] {
        let answer = Answer::R(smcr(SmcrVersion::V1 { first_contact }));
        for (kind, message) in
            [(2, clc::Message::Accept(answer.clone())), (3, clc::Message::Confirm(answer.clone()))]
        {
            let header = [kind, 0, 68, flags];
            let own: [Field<'_>; 2] = [(4, &header), (64, &SMCR)];
            is_clc(message, &layout(68, &[&SMCR_PART[..], &own].concat()));
        }
    }

    let eid = Eid::user("AN.EID").unwrap();
    let text = *b"AN.EID                          ";
    let answer = Answer::R(smcr(SmcrVersion::V2 { eid, first_contact: None }));
    let own: [Field<'_>; 3] = [(4, &[2, 0, 108, 0x20]), (64, &text), (104, &SMCR)];
    is_clc(clc::Message::Accept(answer), &layout(108, &[&SMCR_PART[..], &own].concat()));

    for release in [Release::V2_0, Release::V2_1] {
        // Of SMC-R it is always 52 bytes long.
        let extension = extension(release);
        let first = |gids| Some(V2FirstContact { extension, gids });
        let version = SmcrVersion::V2 { eid, first_contact: first(List::new()) };
        let release = [0x30 | release.number()];
        let mut own: Vec<Field<'_>> = vec![(4, &[2, 0, 160, 0x28]), (64, &text)];
        own.extend([(104, &[0x80][..]), (105, &release), (156, &SMCR)]);
        own.extend(extension_at(104, false).into_iter().filter(|(at, _)| *at != 105));
        let expected = layout(160, &[&SMCR_PART[..], &own].concat());
        is_clc(clc::Message::Accept(Answer::R(smcr(version))), &expected);

        let gids = List::from_slice(&[RoceGid(run(0xa0)), RoceGid(run(0xb0))]).unwrap();
        let version = SmcrVersion::V2 { eid, first_contact: first(gids) };
        let gids = [run::<16>(0xa0), run::<16>(0xb0)].concat();
        own.retain(|(at, _)| ![4, 156].contains(at));
        own.extend([(4, &[3, 0, 196, 0x28][..]), (156, &[2]), (160, &gids), (192, &SMCR)]);
        let expected = layout(196, &[&SMCR_PART[..], &own].concat());
        is_clc(clc::Message::Confirm(Answer::R(smcr(version))), &expected);
    }
}

fn smcd(version: SmcdVersion) -> Answer {
    Answer::D(Smcd {
        gid: u64::from_be_bytes(run(0x10)),
        token: u64::from_be_bytes(run(0x20)),
        dmbe_idx: 0x30,
        size: BufferSize::from_code(6).unwrap(),
        link_id: u32::from_ne_bytes(run(0x40)),
        version,
    })
}

#[test]
fn accepts_and_confirms_of_smcd() {
    let part: [Field<'_>; 5] = [
        (0, &SMCD),
        (8, &run::<8>(0x10)),
        (16, &run::<8>(0x20)),
        (24, &[0x30, 0x60]),
        // In the byte order of the host.
        (28, &run::<4>(0x40)),
    ];
    for (first_contact, flags) in [(false, 0x11), (true, 0x19)] {
        let answer = smcd(SmcdVersion::V1 { first_contact });
        for (kind, message) in
            [(2, clc::Message::Accept(answer.clone())), (3, clc::Message::Confirm(answer.clone()))]
        {
            let header = [kind, 0, 48, flags];
            let own: [Field<'_>; 2] = [(4, &header), (44, &SMCD)];
            is_clc(message, &layout(48, &[&part[..], &own].concat()));
        }
    }

    let v2 = |first_contact| SmcdVersion::V2 {
        chid: Chid(0xff12),
        eid: Eid::user("AN.EID").unwrap(),
        gid_ext: u64::from_be_bytes(run(0xe0)),
        first_contact,
    };
    let common: [Field<'_>; 3] =
        [(32, &[0xff, 0x12]), (34, b"AN.EID                          "), (66, &run::<8>(0xe0))];
    let own: [Field<'_>; 2] = [(4, &[2, 0, 78, 0x21]), (74, &SMCD)];
    let expected = layout(78, &[&part[..], &common, &own].concat());
    is_clc(clc::Message::Accept(smcd(v2(None))), &expected);

    // Release 0 has no tail.
    let old = FirstContact {
        max_conns: 0,
        max_links: 0,
        features: FeatureMask(0),
        vendor_options: 0,
        ..extension(Release::V2_0)
    };
    for (extension, length) in [(old, 114_usize), (extension(Release::V2_1), 130)] {
        let header = [3, 0, length as u8, 0x29];
        let own: [Field<'_>; 3] = [(4, &header), (74, &[0x80]), (length - 4, &SMCD)];
        let tail = extension_at(74, length == 114);
        let expected = layout(length, &[&part[..], &common, &own, &tail].concat());
        is_clc(clc::Message::Confirm(smcd(v2(Some(extension)))), &expected);
    }
}

#[test]
fn declines() {
    let decline = Decline {
        peer_id: PeerId(run(0x10)),
        code: DeclineCode::SYNCERR,
        os: Os::ZOS,
        out_of_sync: true,
        v2: None,
    };
    let part: [Field<'_>; 4] =
        [(0, &SMCR), (8, &run::<8>(0x10)), (16, &[4, 0, 0, 0]), (20, &[0x10])];
    let own: [Field<'_>; 2] = [(4, &[4, 0, 28, 0x18]), (24, &SMCR)];
    is_clc(clc::Message::Decline(decline), &layout(28, &[&part[..], &own].concat()));
    let v2 = Decline { out_of_sync: false, v2: Some([1, 2, 3, 0x0102_0304]), ..decline };
    let codes = [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4];
    let own: [Field<'_>; 3] = [(4, &[4, 0, 44, 0x20]), (24, &codes), (40, &SMCR)];
    is_clc(clc::Message::Decline(v2), &layout(44, &[&part[..], &own].concat()));
}

/// The header of an LLC message: type, length, flags.
fn llc_header(version: Version, kind: u8, length: u16, flags: u8) -> [u8; 4] {
    match version {
        Version::V1 => [kind, length as u8, 0, flags],
        Version::V2 => {
            let [a, b] = length.to_ne_bytes();
            [0x20 | kind, a, b, flags]
        }
    }
}

const VERSIONS: [Version; 2] = [Version::V1, Version::V2];

#[test]
fn llc_of_both_versions() {
    let confirm_link = ConfirmLink {
        mac: MacAddr(run(0x10)),
        gid: RoceGid(run(0x20)),
        qpn: U24::new(0x31_32_33).unwrap(),
        link_id: 0x40,
        link_uid: run(0x50),
        max_links: 2,
        max_conns: 200,
        no_rmbe_eyecatcher: true,
    };
    let delete_link =
        DeleteLink { link_id: 0x44, reason: DeleteReason::OPERATOR, all: true, orderly: true };
    let confirm_rkey = ConfirmRkey {
        rkey: 0x1112_1314,
        addr: u64::from_be_bytes(run(0x20)),
        others: List::from_slice(&[link_rkey(0x30), link_rkey(0x50)]).unwrap(),
        negative: true,
        retry: true,
    };
    let rkeys = [run(0x10), run(0x20), run(0x30)];
    let delete_rkey = DeleteRkey { rkeys: Rkeys::from_wire(&rkeys), invalid: 0x60, negative: true };
    // Body, type, flags, fields.
    let cases: [(Body<'_>, u8, u8, &[Field<'_>]); 5] = [
        (
            Body::ConfirmLink(confirm_link),
            1,
            0x03,
            &[
                (4, &run::<6>(0x10)),
                (10, &run::<16>(0x20)),
                (26, &[0x31, 0x32, 0x33]),
                (29, &[0x40]),
                (30, &run::<4>(0x50)),
                (34, &[2, 200]),
            ],
        ),
        (Body::DeleteLink(delete_link), 4, 0x60, &[(4, &[0x44, 0x00, 0x02, 0x00, 0x00])]),
        (
            Body::ConfirmRkey(confirm_rkey),
            6,
            0x30,
            &[
                (4, &[2]),
                (5, &[0x11, 0x12, 0x13, 0x14]),
                (9, &run::<8>(0x20)),
                (17, &run::<13>(0x30)),
                (30, &run::<13>(0x50)),
            ],
        ),
        (Body::TestLink(run(0x70)), 7, 0x00, &[(4, &run::<16>(0x70))]),
        (
            Body::DeleteRkey(delete_rkey),
            9,
            0x20,
            &[(4, &[3, 0x60]), (8, &run::<4>(0x10)), (12, &run::<4>(0x20)), (16, &run::<4>(0x30))],
        ),
    ];
    for version in VERSIONS {
        for (body, kind, flags, fields) in &cases {
            for (response, bit) in [(false, 0), (true, 0x80)] {
                let header = llc_header(version, *kind, 44, flags | bit);
                let expected = layout(44, &[&[(0, &header[..])], *fields].concat());
                let message = match response {
                    false => llc::Message::request(version, *body),
                    true => llc::Message::response(version, *body),
                };
                is_llc(message, &expected);
            }
        }
    }
}

/// 13 bytes that count up from `first`.
fn link_rkey(first: u8) -> LinkRkey {
    let [link_id, rkey @ .., _, _, _, _, _, _, _, _] = run::<13>(first);
    let [_, _, _, _, _, addr @ ..] = run::<13>(first);
    LinkRkey { link_id, rkey: u32::from_be_bytes(rkey), addr: u64::from_be_bytes(addr) }
}

#[test]
fn llc_of_one_version() {
    let add = AddLink {
        mac: MacAddr(run(0x10)),
        gid: RoceGid(run(0x20)),
        qpn: U24::new(0x31_32_33).unwrap(),
        link_id: 0x40,
        mtu: MtuCode::from_code(5).unwrap(),
        psn: U24::new(0x51_52_53).unwrap(),
        rejected: None,
        extension: None,
    };
    let part: [Field<'_>; 5] = [
        (4, &run::<6>(0x10)),
        (12, &run::<16>(0x20)),
        (28, &[0x31, 0x32, 0x33]),
        (31, &[0x40, 5]),
        (33, &[0x51, 0x52, 0x53]),
    ];
    let with = |header: &[u8], own: &[Field<'_>], length| {
        layout(length, &[&[(0, header)], &part[..], own].concat())
    };
    let request = llc::Message::request(Version::V1, Body::AddLink(add));
    is_llc(request, &with(&[2, 44, 0, 0], &[], 44));
    let rejection = AddLink { rejected: Some(1), ..add };
    let response = llc::Message::response(Version::V1, Body::AddLink(rejection));
    is_llc(response, &with(&[2, 44, 1, 0xc0], &[], 44));

    let update = |first| RkeyUpdate {
        old: u32::from_be_bytes(run(first)),
        new: u32::from_be_bytes(run(first + 4)),
        addr: u64::from_be_bytes(run(first + 8)),
    };
    let wire = [run(0x60), run(0x70)];
    let extension = AddLinkExt {
        direct: true,
        target_gid: RoceGid(run(0xa0)),
        rkeys: RkeyUpdates::from_wire(&wire),
    };
    let v2 = AddLink { extension: Some(extension), ..add };
    // The count is in the byte order of the host, as the length is.
    let own: [Field<'_>; 5] = [
        (44, &[0x80]),
        (46, &run::<16>(0xa0)),
        (70, &2_u16.to_ne_bytes()),
        (72, &run::<16>(0x60)),
        (88, &run::<16>(0x70)),
    ];
    let header = llc_header(Version::V2, 2, 104, 0);
    let request = llc::Message::request(Version::V2, Body::AddLink(v2));
    is_llc(request, &with(&header, &own, 104));
    let rejection = AddLink { rejected: Some(0), ..add };
    let header = llc_header(Version::V2, 2, 44, 0xc0);
    let response = llc::Message::response(Version::V2, Body::AddLink(rejection));
    is_llc(response, &with(&header, &[], 44));

    let rkeys = List::from_slice(&[update(0x60), update(0x70)]).unwrap();
    let cont = AddLinkCont { link_id: 0x40, rkeys, more: 3 };
    let fields: [Field<'_>; 4] =
        [(0, &[3, 44, 0, 0x80]), (4, &[0x40, 5]), (8, &run::<16>(0x60)), (24, &run::<16>(0x70))];
    let response = llc::Message::response(Version::V1, Body::AddLinkCont(cont));
    is_llc(response, &layout(44, &fields));

    let others = List::from_slice(&[link_rkey(0x10), link_rkey(0x30), link_rkey(0x50)]).unwrap();
    let cont = ConfirmRkeyCont { others, more: 1, negative: false, retry: false };
    let fields: [Field<'_>; 5] = [
        (0, &[8, 44, 0, 0]),
        (4, &[4]),
        (5, &run::<13>(0x10)),
        (18, &run::<13>(0x30)),
        (31, &run::<13>(0x50)),
    ];
    let request = llc::Message::request(Version::V1, Body::ConfirmRkeyCont(cont));
    is_llc(request, &layout(44, &fields));

    for count in [1_u8, 2] {
        let gids: Vec<[u8; 16]> = (0..count).map(|n| run(0x10 * n)).collect();
        let length = 28 + 16 * usize::from(count);
        let header = llc_header(Version::V2, 5, length as u16, 0);
        let fields: [Field<'_>; 3] = [(0, &header), (24, &[count]), (28, gids.as_flattened())];
        let body = Body::ReqAddLink(ReqAddLink { gids: Gids::from_wire(&gids) });
        is_llc(llc::Message::request(Version::V2, body), &layout(length, &fields));
    }

    // More keys than version 1 has room for.
    let rkeys: Vec<[u8; 4]> = (0..10).map(|n| run(0x10 * n)).collect();
    let rkeys = Rkeys::from_wire(&rkeys);
    let body = Body::DeleteRkey(DeleteRkey { rkeys, invalid: 2, negative: false });
    let header = llc_header(Version::V2, 9, 48, 0);
    let fields: [Field<'_>; 3] = [(0, &header), (4, &[10, 2]), (8, rkeys.as_wire().as_flattened())];
    is_llc(llc::Message::request(Version::V2, body), &layout(48, &fields));
}

#[test]
fn cdc_of_smcr_and_smcd() {
    let (producer, consumer) =
        (Cursor { wrap: 0x1112, count: 0x1314_1516 }, Cursor { wrap: 0x2122, count: 0x2324_2526 });
    let flags = [
        (0x80, ProducerFlags { write_blocked: true, ..ProducerFlags::default() }),
        (0x40, ProducerFlags { urgent_pending: true, ..ProducerFlags::default() }),
        (0x20, ProducerFlags { urgent_present: true, ..ProducerFlags::default() }),
        (0x10, ProducerFlags { update_requested: true, ..ProducerFlags::default() }),
        (0x08, ProducerFlags { failover_validation: true, ..ProducerFlags::default() }),
    ];
    let states = [
        (0x80, StateFlags { done_writing: true, ..StateFlags::default() }),
        (0x40, StateFlags { closed: true, ..StateFlags::default() }),
        (0x20, StateFlags { aborted: true, ..StateFlags::default() }),
    ];
    for (flag_bits, flags) in flags {
        for (state_bits, state) in states {
            let (seqno, token) = (0x0102, 0x0304_0506);
            let smcr = SmcrRepr { seqno, token, producer, consumer, flags, state };
            let expected = layout(
                44,
                &[
                    (0, &[0xfe, 44]),
                    (2, &[1, 2]),
                    (4, &[3, 4, 5, 6]),
                    (10, &run::<6>(0x11)),
                    (18, &run::<6>(0x21)),
                    (24, &[flag_bits, state_bits]),
                ],
            );
            assert_eq!(smcr.emit(), expected[..]);
            assert_eq!(SmcrRepr::parse(&expected), Ok(smcr));

            // In the byte order of the host, flags beside the consumer cursor only.
            let smcd = SmcdRepr { producer, consumer, flags, state };
            let expected = layout(
                32,
                &[
                    (0, &[0xfe]),
                    (8, &0x1112_u16.to_ne_bytes()),
                    (10, &0x1314_1516_u32.to_ne_bytes()),
                    (16, &0x2122_u16.to_ne_bytes()),
                    (18, &0x2324_2526_u32.to_ne_bytes()),
                    (22, &[flag_bits, state_bits]),
                ],
            );
            let mut dmb = [0xaa; 32];
            smcd.emit(&mut dmb).unwrap();
            assert_eq!(dmb, expected[..]);
            assert_eq!(SmcdRepr::parse(&expected), Ok(smcd));
        }
    }
}

/// What a kernel (6.12.117) said to an end in user space and said in no other capture
/// (captures s4, coexist, dellink, latertr and mutex2 of m0).
#[test]
fn what_the_kernel_said_to_an_end_in_user_space() {
    let hex = |text: &str| -> Vec<u8> {
        let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
        (0..text.len()).step_by(2).map(byte).collect()
    };
    let padded = |text: &str| {
        let mut bytes = hex(text);
        bytes.resize(44, 0);
        bytes
    };
    // The abort of a connection whose handshake it had not finished: it names nobody.
    let cdc = padded("fe2c000100000000000000000000000000000000000000000020");
    let read = SmcrRepr::parse(&cdc).unwrap();
    assert_eq!((read.token, read.seqno, read.state.aborted), (SmcrRepr::NOBODY, 1, true));
    assert_eq!(read.emit(), cdc.as_slice());
    // It ends a group, and sends back what the end in user space had said.
    for (text, reason, orderly) in [
        ("242c00400000030000", DeleteReason::PROGRAM, false),
        ("242c00600000030000", DeleteReason::PROGRAM, true),
        ("242c00600000020000", DeleteReason::OPERATOR, true),
    ] {
        let delete = DeleteLink { link_id: 0, reason, all: true, orderly };
        let message = llc::Message::request(Version::V2, Body::DeleteLink(delete));
        is_llc(message, &padded(text));
    }
    // No answer to its CONFIRM_LINK, and to its CONFIRM_RKEY.
    for (text, code) in [
        ("e2d4c3d904002c208eef52540000000202010000", DeclineCode::TIMEOUT_CL),
        ("e2d4c3d904002c20264752540000000209990003", DeclineCode::ERR_REGBUF),
    ] {
        let mut bytes = padded(text);
        bytes[20] = 0x20;
        bytes[40..].copy_from_slice(&[0xe2, 0xd4, 0xc3, 0xd9]);
        let peer_id = PeerId(bytes[8..16].try_into().unwrap());
        is_clc(clc::Message::Decline(Decline::new(false, peer_id, code)), &bytes);
    }
    // Its offer of a second link.
    let add = "22580000525400000102000000000000000000000000ffff0a09000c0000110203bce9c1\
               0000000000000000800000000000000000000000ffff0a09000c0000000000000000\
               0100000003eb000003bdff423fb784620000";
    let add = hex(add);
    let message = llc::Message::parse(&add).unwrap();
    let Body::AddLink(link) = message.body() else { panic!("{message:?}") };
    let keys = link.extension.unwrap().rkeys;
    let key = RkeyUpdate { old: 0x3eb, new: 0x3bd, addr: 0xff42_3fb7_8462_0000 };
    assert!(keys.iter().eq([key]));
    is_llc(message, &add);
}
