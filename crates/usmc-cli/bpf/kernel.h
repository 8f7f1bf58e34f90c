/* What the programs need of the kernel beside linux/bpf.h: section and map declarations as loaders read them
 * (Documentation/bpf/btf.rst), the helpers, and constants that older headers lack.
 */
#pragma once

#include <linux/bpf.h>

#define SECTION(name) __attribute__((section(name), used))
#define INLINE static __attribute__((always_inline))
#define MAP_NUMBER(field, value) int (*field)[value]
#define MAP_TYPE(field, type) type *field

static void *(*bpf_sk_storage_get)(void *map, void *sk, void *value, __u64 flags) =
	(void *)BPF_FUNC_sk_storage_get;
static long (*bpf_sock_ops_cb_flags_set)(struct bpf_sock_ops *ops, int flags) =
	(void *)BPF_FUNC_sock_ops_cb_flags_set;
static long (*bpf_load_hdr_opt)(struct bpf_sock_ops *ops, void *option, __u32 len, __u64 flags) =
	(void *)BPF_FUNC_load_hdr_opt;
static long (*bpf_store_hdr_opt)(struct bpf_sock_ops *ops, const void *option, __u32 len, __u64 flags) =
	(void *)BPF_FUNC_store_hdr_opt;
static long (*bpf_reserve_hdr_opt)(struct bpf_sock_ops *ops, __u32 len, __u64 flags) =
	(void *)BPF_FUNC_reserve_hdr_opt;
static long (*bpf_setsockopt)(void *at, int level, int name, void *value, int len) =
	(void *)BPF_FUNC_setsockopt;
static long (*bpf_getsockopt)(void *at, int level, int name, void *value, int len) =
	(void *)BPF_FUNC_getsockopt;

/* linux/socket.h, linux/in.h, linux/tcp.h: not included, for they do not go together with this target. */
#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6
#define TCP_SAVE_SYN 27
#define TCPHDR_SYN 0x02
#define TCPHDR_ACK 0x10

/* linux/bpf.h since Linux 6.12. */
#define SOCK_OPS_CB_FLAGS 1008
