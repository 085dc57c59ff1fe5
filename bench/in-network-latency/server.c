// The switch as a process in C behind a UDP socket: the small form of partita/runtime/switch/protocol.py, and nothing else.
// server WORKERS ADDRESS
#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { DATA, ACK, RESULT = 0x10, FREE, WAIT, SLOTS = 128 };
struct packet { uint32_t cookie, seq; uint8_t kind, worker; uint16_t job, lanes, attempt; uint32_t mask, unused[3]; int32_t v[8]; };
static struct { uint32_t base, mask, acked; int32_t v[8]; } slots[SLOTS];

int main(int argc, char **a)
{
	if (argc < 3) return 2;
	int n = atoi(a[1]), s = socket(AF_INET, SOCK_DGRAM, 0);
	uint32_t full = (1u << n) - 1;
	struct sockaddr_in me = {.sin_family = AF_INET, .sin_port = htons(9999)}, from, at[32];
	struct packet p;
	inet_aton(a[2], &me.sin_addr);
	if (bind(s, (void *)&me, sizeof me)) { perror("bind"); return 1; }
	printf("up\n");
	fflush(stdout);
	for (;;) {
		socklen_t length = sizeof from;
		if (recvfrom(s, &p, sizeof p, 0, (void *)&from, &length) != sizeof p || p.worker >= n || p.kind > ACK) continue;
		uint32_t k = p.seq % SLOTS, bit = 1u << p.worker;
		int32_t age = p.seq - (slots[k].base + k);
		int to_all = 0;
		at[p.worker] = from;
		if (p.kind == DATA) {
			if (age) continue;
			int fresh = !(slots[k].mask & bit);
			if (fresh) for (int i = 0; i < 8; i++) slots[k].v[i] = (slots[k].mask ? slots[k].v[i] : 0) + p.v[i];
			slots[k].mask |= bit;
			if (slots[k].mask != full && fresh) continue;
			p.kind = slots[k].mask == full ? RESULT : WAIT;
			p.mask = slots[k].mask;
			memcpy(p.v, slots[k].v, sizeof p.v);
			to_all = fresh;
		} else {
			if (age > 0 || (!age && slots[k].mask != full)) continue;
			if (!age) {
				slots[k].acked |= bit;
				if (slots[k].acked != full) continue;
				slots[k].base += SLOTS;
				slots[k].mask = slots[k].acked = 0;
				to_all = 1;
			}
			p.kind = FREE;
		}
		for (int w = 0; w < n; w++)
			if (to_all || w == p.worker) sendto(s, &p, sizeof p, 0, (void *)&at[w], sizeof at[w]);
	}
}
