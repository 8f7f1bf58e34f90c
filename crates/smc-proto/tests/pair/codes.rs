//! How each decline code comes about.

use super::*;

/// Where a code comes from.
enum Source {
    /// The client declines in this situation.
    Client(fn(&mut Setup, &mut Setup)),
    /// The server does.
    Server(fn(&mut Setup, &mut Setup)),
    /// Nobody sends it, for this reason.
    Nobody(&'static str),
}

use Source::{Client, Nobody, Server};

fn only(setup: &mut Setup, paths: &[Path]) {
    let id = setup.host.peer_id.0[0];
    *setup = if id == 1 { client_with(paths) } else { server_with(paths) };
}

/// How each code comes about. What the client's devices or the server's tell, is handed in as
/// `no_memory` or `no_link`; everything else is found out by the handshake.
fn source(code: DeclineCode) -> Source {
    match code {
        DeclineCode::MEM => Server(|_, server| server.no_memory = Some(DeclineCode::MEM)),
        DeclineCode::TIMEOUT_CL => Nobody("see a_link_that_carries_nothing_is_declined"),
        DeclineCode::TIMEOUT_AL => Nobody("see a_missing_second_link_is_no_reason_to_decline"),
        DeclineCode::CNFERR => Client(|client, _| {
            only(client, &[Path::Rv1]);
            client.devices.prefix = None;
        }),
        DeclineCode::PEERNOSMC => Nobody("such a peer is told nothing"),
        DeclineCode::IPSEC => Client(|client, _| client.circumstances.ipsec = true),
        DeclineCode::NOSMCDEV => Client(|client, _| only(client, &[])),
        DeclineCode::NOSMCDDEV => Server(|client, server| {
            only(client, &[Path::Dv1]);
            only(server, &[Path::Rv1]);
        }),
        DeclineCode::NOSMCRDEV => Server(|client, server| {
            only(client, &[Path::Rv2]);
            only(server, &[Path::Rv1]);
        }),
        DeclineCode::NOISM2SUPP => Server(|client, server| {
            only(client, &[Path::Dv2]);
            server.host.smcd_v2 = false;
        }),
        DeclineCode::NOV2EXT => Nobody("see a_proposal_without_its_v2_extension_is_declined"),
        DeclineCode::NOV2DEXT => Nobody("see a_proposal_without_its_smcd_extension_is_declined"),
        DeclineCode::NOSEID => Server(|client, server| {
            only(client, &[Path::Dv2]);
            server.host.ueids = List::new();
            server.host.seid = Eid::user("SEID").ok();
        }),
        DeclineCode::NOSMCD2DEV => Server(|client, server| {
            only(client, &[Path::Dv2]);
            server.chids = vec![Chid(0x0777)];
        }),
        DeclineCode::NOUEID => Server(|client, _| {
            only(client, &[Path::Dv2]);
            client.host.ueids = List::new();
        }),
        DeclineCode::RELEASEERR => Nobody("see a_confirm_with_other_terms_is_declined"),
        DeclineCode::MAXCONNERR => Server(|client, _| client.host.max_conns = 15),
        DeclineCode::MAXLINKERR => Server(|client, _| client.host.max_links = 0),
        DeclineCode::MODEUNSUPP => Nobody("see an_accept_of_what_was_not_offered_is_declined"),
        DeclineCode::RMBE_EC => Client(|client, server| {
            only(client, &[Path::Rv2]);
            server.wants_eyecatchers = true;
        }),
        DeclineCode::OPTUNSUPP => Nobody("Fast Open is known before a word is said"),
        DeclineCode::DIFFPREFIX => Server(|client, server| {
            only(client, &[Path::Rv1]);
            server.same_subnet = false;
        }),
        DeclineCode::GETVLANERR => Server(|client, server| {
            only(client, &[Path::Rv1]);
            server.vlan_is_known = false;
        }),
        DeclineCode::ISMVLANERR => Client(|client, _| {
            only(client, &[Path::Dv1]);
            client.no_memory = Some(DeclineCode::ISMVLANERR);
        }),
        DeclineCode::NOACTLINK => Server(|client, server| {
            only(client, &[Path::Rv1]);
            server.no_memory = Some(DeclineCode::NOACTLINK);
        }),
        DeclineCode::NOSRVLINK => Client(|client, server| {
            only(client, &[Path::Rv2]);
            (client.has_link_group, server.has_link_group) = (true, true);
            client.no_memory = Some(DeclineCode::NOSRVLINK);
        }),
        DeclineCode::VERSMISMAT => Client(|client, _| {
            client.no_memory = Some(DeclineCode::VERSMISMAT);
        }),
        DeclineCode::MAX_DMB => Server(|client, server| {
            only(client, &[Path::Dv2]);
            server.no_memory = Some(DeclineCode::MAX_DMB);
        }),
        DeclineCode::NOROUTE => Client(|client, _| {
            only(client, &[Path::Rv2]);
            client.no_memory = Some(DeclineCode::NOROUTE);
        }),
        DeclineCode::NOINDIRECT => Client(|client, server| {
            only(client, &[Path::Rv2]);
            server.direct = false;
        }),
        DeclineCode::SYNCERR => Client(|_, server| server.has_link_group = true),
        DeclineCode::PEERDECL => Nobody("what the other side shows; see every test here"),
        DeclineCode::INTERR => Client(|client, _| client.no_memory = Some(DeclineCode::INTERR)),
        DeclineCode::ERR_RTOK => Server(|client, server| {
            only(client, &[Path::Rv1]);
            server.no_link = Some(DeclineCode::ERR_RTOK);
        }),
        DeclineCode::ERR_RDYLNK => Client(|client, _| {
            only(client, &[Path::Rv1]);
            client.no_link = Some(DeclineCode::ERR_RDYLNK);
        }),
        DeclineCode::ERR_REGBUF => Server(|client, server| {
            only(client, &[Path::Rv2]);
            server.no_memory = Some(DeclineCode::ERR_REGBUF);
        }),
        other => panic!("no source for {other:?}"),
    }
}

#[test]
fn every_code_is_sent_and_shown_by_name_and_the_application_loses_no_byte() {
    let mut unsent = BTreeSet::new();
    for known in decline::ALL {
        let (mut client, mut server) = (able(1), able(2));
        let by_client = match source(known.code) {
            Client(arrange) => {
                arrange(&mut client, &mut server);
                true
            }
            Server(arrange) => {
                arrange(&mut client, &mut server);
                false
            }
            Nobody(why) => {
                assert!(!why.is_empty());
                unsent.insert(known.name);
                continue;
            }
        };
        let result = handshake(&client, &server);
        let (mine, theirs) = match by_client {
            true => (fallback(&result.client), fallback(&result.server)),
            false => (fallback(&result.server), fallback(&result.client)),
        };
        assert_eq!(mine.reason, known.code, "{}", known.name);
        assert_eq!(mine.peer_reason, None);
        assert_eq!(theirs.reason, DeclineCode::PEERDECL, "{}", known.name);
        assert_eq!(theirs.peer_reason, Some(known.code));
        let out_of_sync = known.code == DeclineCode::SYNCERR;
        assert_eq!((mine.out_of_sync, theirs.out_of_sync), (out_of_sync, out_of_sync));
        intact(&result);
        assert_eq!(result.took, Duration::ZERO, "{}", known.name);
    }
    let expected = [
        "MODEUNSUPP",
        "NOV2DEXT",
        "NOV2EXT",
        "OPTUNSUPP",
        "PEERDECL",
        "PEERNOSMC",
        "RELEASEERR",
        "TIMEOUT_AL",
        "TIMEOUT_CL",
    ];
    assert_eq!(unsent.into_iter().collect::<Vec<_>>(), expected);
}
