/* "I speak SMC": TCP option kind 254 with the magic number E2D4C3D9 (RFC 7609, section 3; ExID of RFC 6994) on the SYN
 * of sockets that ask for it, and on the SYN-ACK where the SYN carried it and the listener asks for it.
 *
 * A process arms a socket by setsockopt(2) and reads what the peer said by getsockopt(2), both at SOL_SMC, and both seen
 * by nobody but the programs below, which `usmc ebpf load` attaches to a cgroup. What is known of a socket lies with the
 * socket. The numbers are also in usmc/src/socket/syn_option.rs.
 */
#include "kernel.h"

#define SOL_SMC 286
/* The option's name: 254, and above it the version of what is said here. */
#define USMC_SYN_OPTION (1 << 8 | 254)

/* What getsockopt(2) answers. */
enum outcome {
	UNARMED = 0,
	/* The connection is not established, or it is a listener. */
	UNDECIDED = 1,
	/* The peer's SYN or SYN-ACK says SMC. To a SYN we answered that we do, too. */
	SPEAKS = 2,
	SILENT = 3,
	/* The SYN-ACK says all that our SYN said, whatever it means: nobody answered, somebody copied. */
	ECHOED = 4,
};

struct state {
	__u8 armed;
	__u8 outcome;
	/* Another program wants to write options, too, and goes on with it. */
	__u8 shared_flag;
	/* The listener saves SYNs for us, not for its application. */
	__u8 saves_for_us;
};

struct {
	MAP_NUMBER(type, BPF_MAP_TYPE_SK_STORAGE);
	/* CLONE: accepted sockets begin with what is known of their listener. */
	MAP_NUMBER(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	MAP_TYPE(key, int);
	MAP_TYPE(value, struct state);
} usmc_sockets SECTION(".maps");

#define SMC_OPTION 254, 6, 0xe2, 0xd4, 0xc3, 0xd9
/* A probe for echoes: kind 253 (RFC 4727), which nobody answers, with "US" in EBCDIC. On SYNs only. */
#define PROBE_OPTION 253, 4, 0xe4, 0xe2
#define SMC_LEN 6
#define PROBE_LEN 4
/* All options of a header. */
#define OPTIONS_MAX 40

INLINE struct state *state_of(struct bpf_sock *sk, __u64 flags)
{
	return sk ? bpf_sk_storage_get(&usmc_sockets, sk, 0, flags) : 0;
}

/* As the kernel's own SMC reads it (net/ipv4/tcp_input.c): any even length. */
INLINE int says_smc(struct bpf_sock_ops *ops, __u64 where)
{
	__u8 option[OPTIONS_MAX] = {SMC_OPTION};
	long len = bpf_load_hdr_opt(ops, option, sizeof(option), where);

	return len >= SMC_LEN && len % 2 == 0;
}

INLINE int has_probe(struct bpf_sock_ops *ops)
{
	__u8 option[OPTIONS_MAX] = {PROBE_OPTION};

	return bpf_load_hdr_opt(ops, option, sizeof(option), 0) > 0;
}

/* From now on we are asked what to write into headers. */
INLINE void begin_writing(struct bpf_sock_ops *ops, struct state *state)
{
	state->shared_flag = !!(ops->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
	bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
}

/* Every segment would ask otherwise. */
INLINE void end_writing(struct bpf_sock_ops *ops, struct state *state)
{
	if (!state->shared_flag)
		bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
}

INLINE void connecting(struct bpf_sock_ops *ops)
{
	struct state *state = state_of(ops->sk, 0);

	if (!state || !state->armed)
		return;
	state->outcome = UNDECIDED;
	begin_writing(ops, state);
}

/* By the saved SYN the accepted socket is told what it said, and so is a SYN-ACK that is sent again. */
INLINE long save_syns(void *at, struct state *state)
{
	int save = 0;

	if (!bpf_getsockopt(at, IPPROTO_TCP, TCP_SAVE_SYN, &save, sizeof(save)) && save)
		return 0;
	save = 1;
	state->saves_for_us = 1;
	return bpf_setsockopt(at, IPPROTO_TCP, TCP_SAVE_SYN, &save, sizeof(save));
}

INLINE void listening(struct bpf_sock_ops *ops)
{
	struct state *state = state_of(ops->sk, 0);

	if (state && state->armed && !save_syns(ops, state))
		begin_writing(ops, state);
}

/* Whether this header is to say SMC, and is a SYN of ours. */
enum header { OTHER, OUR_SYN, OUR_ANSWER };

INLINE enum header header(struct bpf_sock_ops *ops)
{
	struct state *state;

	switch (ops->skb_tcp_flags & (TCPHDR_SYN | TCPHDR_ACK)) {
	case TCPHDR_SYN:
		state = state_of(ops->sk, 0);
		if (!state || !state->armed)
			return OTHER;
		/* What drops a SYN for an option that it does not know lets the next one pass. */
		return ops->total_retrans > 0 ? OTHER : OUR_SYN;
	case TCPHDR_SYN | TCPHDR_ACK:
		/* Only listeners that are armed ask. There is a full socket where two SYNs crossed: no answer then.
		 * A cookie remembers nothing of the SYN. */
		if (ops->sk || (ops->op == BPF_SOCK_OPS_HDR_OPT_LEN_CB && ops->args[0] == BPF_WRITE_HDR_TCP_SYNACK_COOKIE))
			return OTHER;
		return says_smc(ops, BPF_LOAD_HDR_OPT_TCP_SYN) ? OUR_ANSWER : OTHER;
	}
	return OTHER;
}

INLINE void reserve(struct bpf_sock_ops *ops)
{
	enum header kind = header(ops);
	struct state *state;

	if (kind == OUR_SYN && !bpf_reserve_hdr_opt(ops, SMC_LEN + PROBE_LEN, 0))
		return;
	/* Beside a cookie of Fast Open there is no room for the probe. */
	if (kind != OTHER)
		bpf_reserve_hdr_opt(ops, SMC_LEN, 0);
	/* The SYN-ACK of a connection that Fast Open has accepted is out. */
	else if (!(ops->skb_tcp_flags & TCPHDR_SYN) && (state = state_of(ops->sk, 0)) && state->armed)
		end_writing(ops, state);
}

INLINE void write(struct bpf_sock_ops *ops)
{
	enum header kind = header(ops);
	__u8 smc[] = {SMC_OPTION};
	__u8 probe[] = {PROBE_OPTION};

	if (kind != OTHER)
		bpf_store_hdr_opt(ops, smc, sizeof(smc), 0);
	if (kind == OUR_SYN)
		bpf_store_hdr_opt(ops, probe, sizeof(probe), 0);
}

INLINE void answered(struct bpf_sock_ops *ops)
{
	struct state *state = state_of(ops->sk, 0);

	if (!state || !state->armed)
		return;
	if (!says_smc(ops, 0))
		state->outcome = SILENT;
	else
		state->outcome = has_probe(ops) ? ECHOED : SPEAKS;
	end_writing(ops, state);
}

INLINE void accepted(struct bpf_sock_ops *ops)
{
	struct state *state = state_of(ops->sk, 0);
	int speaks;

	if (!(ops->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG))
		return;
	speaks = says_smc(ops, BPF_LOAD_HDR_OPT_TCP_SYN);
	/* A listener that was armed before these programs were loaded has kept its flag, and we have answered. */
	if (!state && speaks)
		state = state_of(ops->sk, BPF_SK_STORAGE_GET_F_CREATE);
	if (!state || !(speaks || state->armed))
		return;
	state->armed = 1;
	state->outcome = speaks ? SPEAKS : SILENT;
	/* Fast Open accepts with the SYN: the SYN-ACK, which says SMC, is made after this. */
	if (!(ops->skb_tcp_flags & TCPHDR_SYN))
		end_writing(ops, state);
}

SECTION("sockops") int usmc_tcp_option(struct bpf_sock_ops *ops)
{
	switch (ops->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		connecting(ops);
		break;
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		listening(ops);
		break;
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
		reserve(ops);
		break;
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		write(ops);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		answered(ops);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		accepted(ops);
		break;
	}
	return 1;
}

INLINE int is_ours(struct bpf_sockopt *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	return ctx->level == SOL_SMC && ctx->optname == USMC_SYN_OPTION && sk && sk->protocol == IPPROTO_TCP &&
	       (sk->family == AF_INET || sk->family == AF_INET6);
}

/* Values that are longer than what the kernel copied for us are left as they are. */
INLINE int not_ours(struct bpf_sockopt *ctx)
{
	if (ctx->optlen > ctx->optval_end - ctx->optval)
		ctx->optlen = 0;
	return 1;
}

INLINE int is_listening(struct bpf_sock *sk)
{
	return sk->state == BPF_TCP_LISTEN;
}

/* After listen(2): possible since Linux 6.12. */
INLINE int change_listener(struct bpf_sock *sk, struct state *state)
{
	int flags = 0, save = 0;

	if (bpf_getsockopt(sk, IPPROTO_TCP, SOCK_OPS_CB_FLAGS, &flags, sizeof(flags)))
		return -1;
	if (state->armed) {
		if (save_syns(sk, state))
			return -1;
		flags |= BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
	} else {
		if (!state->shared_flag)
			flags &= ~BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
		if (state->saves_for_us)
			bpf_setsockopt(sk, IPPROTO_TCP, TCP_SAVE_SYN, &save, sizeof(save));
		state->saves_for_us = 0;
	}
	return bpf_setsockopt(sk, IPPROTO_TCP, SOCK_OPS_CB_FLAGS, &flags, sizeof(flags));
}

INLINE int arm(struct bpf_sockopt *ctx)
{
	__u32 *value = ctx->optval;
	struct bpf_sock *sk = ctx->sk;
	struct state *state;
	__u8 was;

	if ((void *)(value + 1) > ctx->optval_end || !sk)
		return 0;
	/* A listener may have been armed before these programs were loaded. */
	state = state_of(sk, *value || is_listening(sk) ? BPF_SK_STORAGE_GET_F_CREATE : 0);
	if (state) {
		was = state->armed;
		state->armed = !!*value;
		if (is_listening(sk) && change_listener(sk, state)) {
			state->armed = was;
			return 0;
		}
		if (state->armed && state->outcome == UNARMED)
			state->outcome = UNDECIDED;
	} else if (*value) {
		return 0;
	}
	/* Done: the kernel is not asked. */
	ctx->optlen = -1;
	return 1;
}

/* The application's wish about saved SYNs: it may not take away what we go by. */
INLINE int save_syn(struct bpf_sockopt *ctx)
{
	__u32 *value = ctx->optval;
	struct bpf_sock *sk = ctx->sk;
	struct state *state;

	if ((void *)(value + 1) > ctx->optval_end || !sk || sk->protocol != IPPROTO_TCP)
		return 1;
	state = state_of(sk, 0);
	if (!state || !state->armed || !is_listening(sk))
		return 1;
	state->saves_for_us = !*value;
	if (!*value)
		ctx->optlen = -1;
	return 1;
}

SECTION("cgroup/setsockopt") int usmc_setsockopt(struct bpf_sockopt *ctx)
{
	if (is_ours(ctx))
		return arm(ctx);
	if (ctx->level == IPPROTO_TCP && ctx->optname == TCP_SAVE_SYN)
		return save_syn(ctx);
	return not_ours(ctx);
}

SECTION("cgroup/getsockopt") int usmc_getsockopt(struct bpf_sockopt *ctx)
{
	struct state *state;
	__u32 *value = ctx->optval;
	struct bpf_sock *sk = ctx->sk;

	if (!is_ours(ctx))
		return not_ours(ctx);
	if ((void *)(value + 1) > ctx->optval_end || !sk)
		return 1;
	state = state_of(sk, 0);
	*value = state && state->armed ? state->outcome : UNARMED;
	/* Each for itself: the verifier knows the fields, not their neighbourhood. */
	*(volatile __s32 *)&ctx->optlen = sizeof(*value);
	*(volatile __s32 *)&ctx->retval = 0;
	return 1;
}

char usmc_license[] SECTION("license") = "Dual MIT/GPL";
