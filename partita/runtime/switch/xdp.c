// The switch in the kernel: the rules of protocol.py as an XDP program on every port of a testbed's switch.
//
// A frame is handled where it enters, before the bridge sees it: values are added to a slot under its lock, and an answer is the
// same frame rewritten in place: out of all ports, or out of the port it came from. What is not ours goes on to the bridge.
// Built with the kernel's own headers alone. The verifier wants one bounds check and loops with fixed bounds.
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

#define SEC(n) __attribute__((section(n), used))
#define __uint(name, val) int(*name)[val]
#define __type(name, val) __typeof__(val) *name
#define FN static __attribute__((unused))
#define ALWAYS static __attribute__((always_inline))
FN void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
FN long (*bpf_spin_lock)(struct bpf_spin_lock *l) = (void *)BPF_FUNC_spin_lock;
FN long (*bpf_spin_unlock)(struct bpf_spin_lock *l) = (void *)BPF_FUNC_spin_unlock;
FN long (*bpf_redirect_map)(void *map, __u64 key, __u64 flags) = (void *)BPF_FUNC_redirect_map;
#define SWAP16(x) ((__u16)__builtin_bswap16(x))

#define PORT 9999
#define SMALL_LANES 8
#define SMALL_SLOTS 128
#define POOL_LANES 256
#define POOL_SLOTS 256
#define MOST_JOBS 64
enum { DATA, ACK, SUM, MAX };                      // from workers
enum { RESULT = 0x10, FREE, WAIT };                // to workers
enum { SUMS, COPIES, LATE, STALE, STRANGERS, COUNTS };
enum { NOTHING, ASKER, ALL };                      // whom to answer

struct header {                                    // 32 bytes, little-endian
	__u32 cookie, seq;
	__u8 kind, worker;
	__u16 job, lanes, attempt;
	__u32 mask, unused[3];
};
struct small { struct bpf_spin_lock lock; __u32 base, mask, acked; __s32 v[SMALL_LANES]; };   // number under way = base + index
struct pool { struct bpf_spin_lock lock; __u32 seq, mask, unused; __s32 v[POOL_LANES]; };
struct config { __u32 cookie, workers, jobs, everyone; };                                     // everyone: broadcast address

struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, SMALL_SLOTS * MOST_JOBS); __type(key, __u32); __type(value, struct small); } smalls SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, POOL_SLOTS * MOST_JOBS); __type(key, __u32); __type(value, struct pool); } pools SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, 1); __type(key, __u32); __type(value, struct config); } conf SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_ARRAY); __uint(max_entries, COUNTS); __type(key, __u32); __type(value, __u64); } counts SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_DEVMAP_HASH); __uint(max_entries, 64); __type(key, __u32); __type(value, __u32); } ports SEC(".maps");

ALWAYS void count(__u32 what)
{
	__u64 *n = bpf_map_lookup_elem(&counts, &what);
	if (n)
		__sync_fetch_and_add(n, 1);
}

ALWAYS int small_data(struct small *s, struct header *h, __s32 *v, __u32 bit, __u32 full, __s32 age, int *what)
{
	if (age) {
		*what = STALE;
		return NOTHING;
	}
	int fresh = !(s->mask & bit);
	if (fresh) {
		__u32 keep = s->mask ? ~0u : 0;            // the first to come overwrites what was there
		for (int i = 0; i < SMALL_LANES; i++)
			s->v[i] = (s->v[i] & keep) + v[i];
		s->mask |= bit;
	}
	if (s->mask != full) {
		h->kind = WAIT;
		h->mask = s->mask;
		*what = fresh ? COUNTS : COPIES;
		return fresh ? NOTHING : ASKER;
	}
	for (int i = 0; i < SMALL_LANES; i++)
		v[i] = s->v[i];
	h->kind = RESULT;
	*what = fresh ? SUMS : COPIES;
	return fresh ? ALL : ASKER;
}

ALWAYS int small_ack(struct small *s, struct header *h, __u32 bit, __u32 full, __s32 age, int *what)
{
	h->kind = FREE;
	if (age < 0) {                                     // that round is over: say so again
		*what = LATE;
		return ASKER;
	}
	if (age > 0 || s->mask != full) {
		*what = STALE;
		return NOTHING;
	}
	int again = s->acked & bit;
	s->acked |= bit;
	if (s->acked == full) {
		s->base += SMALL_SLOTS;
		s->mask = s->acked = 0;
		return ALL;
	}
	h->kind = WAIT;
	h->mask = s->acked;
	return again ? ASKER : NOTHING;
}

ALWAYS int small_form(struct header *h, __s32 *v, __u32 bit, __u32 full)
{
	__u32 index = h->seq % SMALL_SLOTS, k = h->job * SMALL_SLOTS + index;
	struct small *s = bpf_map_lookup_elem(&smalls, &k);
	int whom, what = COUNTS;
	if (!s)
		return NOTHING;
	bpf_spin_lock(&s->lock);
	__s32 age = h->seq - (s->base + index);
	if (h->kind == ACK)
		whom = small_ack(s, h, bit, full, age, &what);
	else
		whom = small_data(s, h, v, bit, full, age, &what);
	bpf_spin_unlock(&s->lock);
	if (what != COUNTS)
		count(what);
	return whom;
}

ALWAYS int pool_form(struct header *h, __s32 *v, __u32 bit, __u32 full)
{
	__u32 k = h->job * POOL_SLOTS + h->seq % POOL_SLOTS;
	struct pool *s = bpf_map_lookup_elem(&pools, &k);
	int whom = NOTHING, what = STALE;
	if (!s)
		return NOTHING;
	bpf_spin_lock(&s->lock);
	__s32 age = h->seq - s->seq;
	if (age > 0) {                                     // only a newer number takes the slot over
		s->seq = h->seq;
		s->mask = 0;
		age = 0;
	}
	if (!age) {
		int fresh = !(s->mask & bit);
		if (fresh && !s->mask) {
			for (int i = 0; i < POOL_LANES; i++)
				s->v[i] = v[i];
		} else if (fresh && h->kind == MAX) {
			for (int i = 0; i < POOL_LANES; i++)
				s->v[i] = s->v[i] > v[i] ? s->v[i] : v[i];
		} else if (fresh) {
			for (int i = 0; i < POOL_LANES; i++)
				s->v[i] += v[i];
		}
		s->mask |= bit;
		what = fresh ? COUNTS : COPIES;
		whom = fresh ? NOTHING : ASKER;
		h->kind = WAIT;
		h->mask = s->mask;
		if (s->mask == full) {
			h->kind = RESULT;
			whom = fresh ? ALL : ASKER;
			what = fresh ? SUMS : COPIES;
			for (int i = 0; i < POOL_LANES; i++)
				v[i] = s->v[i];
		}
	}
	bpf_spin_unlock(&s->lock);
	if (what != COUNTS)
		count(what);
	return whom;
}

ALWAYS void turn_around(struct ethhdr *eth, struct iphdr *ip, struct udphdr *udp, __u32 everyone)
{
	__u32 sum = 0;
	__u16 *w = (void *)ip;
	udp->source = udp->dest = SWAP16(PORT);
	udp->check = 0;                                    // none, which IPv4 allows
	ip->saddr = ip->daddr;
	ip->daddr = everyone;
	ip->check = 0;
#pragma unroll
	for (int i = 0; i < 10; i++)
		sum += w[i];
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	ip->check = ~sum;
	__builtin_memcpy(eth->h_source, eth->h_dest, 6);
	__builtin_memset(eth->h_dest, 0xff, 6);
}

SEC("xdp") int add(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct iphdr *ip = (void *)(eth + 1);
	struct udphdr *udp = (void *)(ip + 1);
	struct header *h = (void *)(udp + 1);
	__s32 *v = (void *)(h + 1);
	__u32 zero = 0;
	if ((void *)h > end || eth->h_proto != SWAP16(ETH_P_IP) || ip->ihl != 5 || ip->protocol != IPPROTO_UDP ||
	    udp->dest != SWAP16(PORT))
		return XDP_PASS;
	struct config *c = bpf_map_lookup_elem(&conf, &zero);
	if (!c)
		return XDP_ABORTED;
	if ((void *)(v + SMALL_LANES) > end || h->cookie != c->cookie || h->worker >= c->workers || h->worker >= 32 ||
	    h->job >= c->jobs || h->kind > MAX) {
		count(STRANGERS);
		return XDP_DROP;
	}
	__u32 bit = 1u << (h->worker & 31), full = c->workers >= 32 ? ~0u : (1u << (c->workers & 31)) - 1;
	int whom = NOTHING;
	if (h->kind <= ACK)
		whom = small_form(h, v, bit, full);
	else if ((void *)(v + POOL_LANES) <= end)
		whom = pool_form(h, v, bit, full);
	else
		count(STRANGERS);
	if (whom == NOTHING)
		return XDP_DROP;
	turn_around(eth, ip, udp, c->everyone);
	return whom == ASKER ? XDP_TX : bpf_redirect_map(&ports, 0, BPF_F_BROADCAST);
}

SEC("xdp") int pass(struct xdp_md *ctx)                    // on the host's end: without a program there, redirected frames vanish
{
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "GPL";
