// One worker in C: a small sum, its acknowledgement, and again. Prints microseconds of the sums: median, least, 99th percentile.
// Speaks the packets of partita/runtime/switch/packets.py.      worker ID WORKERS ROUNDS SWITCH PORT COOKIE
#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>

enum { DATA, ACK, RESULT = 0x10, FREE, WAIT };
struct packet { uint32_t cookie, seq; uint8_t kind, worker; uint16_t job, lanes, attempt; uint32_t mask, unused[3]; int32_t v[8]; };

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e6 + t.tv_nsec / 1e3; }
static int order(const void *a, const void *b) { double x = *(double *)a, y = *(double *)b; return (x > y) - (x < y); }

int main(int argc, char **a)
{
	if (argc < 7) return 2;
	int id = atoi(a[1]), n = atoi(a[2]), rounds = atoi(a[3]), one = 1, s = socket(AF_INET, SOCK_DGRAM, 0);
	struct sockaddr_in me = {.sin_family = AF_INET, .sin_port = htons(9999)}, to = me;
	struct timeval wait = {0, 20000};
	long again = 0, wrong = 0;
	double *took = malloc(rounds * sizeof *took);
	char *freed = calloc(rounds, 1);
	inet_aton(a[4], &to.sin_addr);
	to.sin_port = htons(atoi(a[5]));
	setsockopt(s, SOL_SOCKET, SO_BROADCAST, &one, sizeof one);
	setsockopt(s, SOL_SOCKET, SO_NO_CHECK, &one, sizeof one);
	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
	if (bind(s, (void *)&me, sizeof me)) { perror("bind"); return 1; }
	for (int i = 0; i < rounds; i++) {
		struct packet out = {.cookie = strtoul(a[6], 0, 10), .seq = i, .worker = id, .lanes = 8}, ack = out, in;
		ack.kind = ACK;
		for (int k = 0; k < 8; k++) out.v[k] = (id + 1) * (k + 1) + i;
		if (i >= 128 && !freed[i - 128]) {                    // its slot is still taken: say once more that we have the sum
			struct packet late = ack;
			late.seq = i - 128;
			while (!freed[i - 128]) {
				if (recv(s, &in, sizeof in, 0) == sizeof in && in.kind == FREE) freed[in.seq] = 1;
				else { again++; sendto(s, &late, sizeof late, 0, (void *)&to, sizeof to); }
			}
		}
		double began = now();
		sendto(s, &out, sizeof out, 0, (void *)&to, sizeof to);
		for (;;) {
			if (recv(s, &in, sizeof in, 0) != sizeof in) {
				if (now() - began > 30e6) return 1;
				again++;
				sendto(s, &out, sizeof out, 0, (void *)&to, sizeof to);
				continue;
			}
			if (in.kind == FREE && in.seq < (uint32_t)rounds) freed[in.seq] = 1;
			if (in.kind == RESULT && in.seq == out.seq) break;
		}
		took[i] = now() - began;
		for (int k = 0; k < 8; k++) wrong += in.v[k] != (int32_t)((long)n * (n + 1) / 2 * (k + 1) + (long)n * i);
		sendto(s, &ack, sizeof ack, 0, (void *)&to, sizeof to);
	}
	qsort(took, rounds, sizeof *took, order);
	printf("%.3f %.3f %.3f %ld %ld\n", took[rounds / 2], took[0], took[(int)(rounds * .99)], again, wrong);
	return wrong != 0;
}
