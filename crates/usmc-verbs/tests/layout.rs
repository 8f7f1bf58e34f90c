//! The layouts and constants of `sys`, beside those of the header that is installed: a C program prints the header's.

use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::{Command, Stdio};

use usmc_verbs::sys;

/// What C calls it, and what it is here.
type Row = (String, u64);

/// Rows of a structure: its size, and each field's offset. `as` gives a field's name in C where it has another.
macro_rules! layout {
    ($rows:ident, $kind:literal $type:ident { $($field:ident $(as $name:literal)?),* $(,)? }) => {
        $rows.push((format!("sizeof({} {})", $kind, stringify!($type)), size_of::<sys::$type>() as u64));
        $({
            let name = [$($name,)? stringify!($field)][0];
            let text = format!("offsetof({} {}, {name})", $kind, stringify!($type));
            $rows.push((text, offset_of!(sys::$type, $field) as u64));
        })*
    };
}

#[test]
fn layouts_and_constants_are_the_headers() {
    if !has_header() {
        println!("skipped: install libibverbs-dev");
        return;
    }
    let mut rows = layouts();
    rows.extend(sys::CONSTANTS.iter().map(|(name, value)| ((*name).to_owned(), *value)));
    let printed = values_in_c(&rows);
    assert_eq!(printed.len(), rows.len(), "the C program printed another number of rows");
    let differ: Vec<_> = rows
        .iter()
        .zip(&printed)
        .filter(|((_, here), there)| here != *there)
        .map(|((name, here), there)| format!("{name}: {here} here, {there} in the header"))
        .collect();
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}

fn layouts() -> Vec<Row> {
    let mut rows = Vec::new();
    layout!(rows, "union" ibv_gid { raw });
    layout!(rows, "struct" ibv_device { node_type, transport_type, name, dev_name, dev_path, ibdev_path });
    layout!(rows, "struct" ibv_context_ops {
        _memory_windows as "alloc_mw", _compat_create_cq, poll_cq, req_notify_cq, _compat_cq as "_compat_cq_event",
        _compat_srq as "_compat_create_srq", post_srq_recv, _compat_qp as "_compat_create_qp", post_send, post_recv,
        _compat_ah as "_compat_create_ah",
    });
    layout!(rows, "struct" ibv_context {
        device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat,
    });
    layout!(rows, "struct" ibv_device_attr {
        fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id, vendor_part_id, hw_ver, max_qp, max_qp_wr,
        device_cap_flags, max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom,
        max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw, max_raw_ipv6_qp,
        max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr,
        max_srq, max_srq_wr, max_srq_sge, max_pkeys, local_ca_ack_delay, phys_port_cnt,
    });
    layout!(rows, "struct" ibv_port_attr {
        state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr, pkey_tbl_len,
        lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state,
        link_layer, flags, port_cap_flags2,
    });
    layout!(rows, "struct" ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex });
    layout!(rows, "struct" ibv_async_event { element, event_type });
    layout!(rows, "struct" ibv_wc {
        wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits,
    });
    layout!(rows, "struct" ibv_pd { context, handle });
    layout!(rows, "struct" ibv_mr { context, pd, addr, length, handle, lkey, rkey });
    layout!(rows, "struct" ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class });
    layout!(rows, "struct" ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num });
    layout!(rows, "struct" ibv_qp_cap {
        max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data,
    });
    layout!(rows, "struct" ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all });
    layout!(rows, "struct" ibv_qp_attr {
        qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr,
        alt_ah_attr, pkey_index, alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic,
        min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit,
    });
    layout!(rows, "struct" ibv_sge { addr, length, lkey });
    layout!(rows, "struct" ibv_send_wr {
        wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, remote_addr as "wr.rdma.remote_addr",
        rkey as "wr.rdma.rkey",
    });
    layout!(rows, "struct" ibv_recv_wr { wr_id, next, sg_list, num_sge });
    layout!(rows, "struct" ibv_qp {
        context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond, events_completed,
    });
    layout!(rows, "struct" ibv_comp_channel { context, fd, refcnt });
    layout!(rows, "struct" ibv_cq {
        context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed, async_events_completed,
    });
    rows
}

fn has_header() -> bool {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = directory.join("header.c");
    std::fs::write(&source, "#include <infiniband/verbs.h>\n")
        .expect("the target directory can be written");
    let found = Command::new("cc")
        .arg("-E")
        .arg(&source)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    found.is_ok_and(|status| status.success())
}

fn values_in_c(rows: &[Row]) -> Vec<u64> {
    let mut text = "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n".to_owned();
    for (expression, _) in rows {
        text += &format!("printf(\"%llu\\n\", (unsigned long long)({expression}));\n");
    }
    text += "}\n";
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, program) = (directory.join("layout.c"), directory.join("layout"));
    std::fs::write(&source, text).expect("the target directory can be written");
    let compiled = Command::new("cc").arg("-o").arg(&program).arg(&source).status();
    assert!(
        compiled.is_ok_and(|status| status.success()),
        "cc does not compile {}",
        source.display()
    );
    let output = Command::new(&program).output().expect("the compiled program runs");
    let text = String::from_utf8(output.stdout).expect("it prints numbers");
    text.lines().map(|line| line.parse().expect("a number a line")).collect()
}
