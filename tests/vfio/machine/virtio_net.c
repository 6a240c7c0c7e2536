/* A modern virtio network card: virtio 1.2, sections 4.1 (PCI) and 5.1. Sends one frame and waits for the answer to it.
 *
 *   virtio-net 01:00.0 mac=02:00:00:00:00:01 sent=60 heard="hello, card"
 */
#include "guest.h"

#define COMMON 1
#define NOTIFY 2
#define DEVICE 4
#define QUEUE_SIZE 8
#define LONGEST 256
#define HEADER 12

struct descriptor {
	u32 address, high, length;
	u16 flags, next;
};
struct ring { /* in a page of its own */
	struct descriptor descriptors[QUEUE_SIZE];
	struct {
		u16 flags, index, heads[QUEUE_SIZE];
	} available;
	u8 gap[0x800 - QUEUE_SIZE * 16 - 4 - 2 * QUEUE_SIZE];
	volatile struct {
		u16 flags, index;
		struct {
			u32 head, length;
		} done[QUEUE_SIZE];
	} used;
};

/* Where the vendor's capability of this kind says; `more`: the word behind the usual ones. */
static volatile u8 *part(u32 function, u32 kind, u32 *more)
{
	for (u32 at = config(function, 0x34) & 0xfc; at; at = config(function, at) >> 8 & 0xfc) {
		u32 head = config(function, at);
		if ((head & 0xff) != 9 || head >> 24 != kind)
			continue;
		u32 bar = config(function, 0x10 + 4 * (config(function, at + 4) & 7)) & ~15u;
		*more = config(function, at + 16);
		return (volatile u8 *)(bar + config(function, at + 8));
	}
	return 0;
}

static void offer(volatile u8 *common, u16 queue, struct ring *ring, u8 *buffer, u16 flags, u32 length)
{
	for (u32 i = 0; i < sizeof *ring / 4; i++)
		((volatile u32 *)ring)[i] = 0;
	ring->descriptors[0] = (struct descriptor){(u32)buffer, 0, length, flags, 0};
	*(volatile u16 *)(common + 0x16) = queue;
	*(volatile u16 *)(common + 0x18) = QUEUE_SIZE;
	volatile u32 *places = (volatile u32 *)(common + 0x20);
	places[0] = (u32)ring->descriptors;
	places[1] = 0;
	places[2] = (u32)&ring->available;
	places[3] = 0;
	places[4] = (u32)&ring->used;
	places[5] = 0;
	*(volatile u16 *)(common + 0x1c) = 1;
}

static void tell(volatile u8 *common, volatile u8 *notify, u32 multiplier, u16 queue)
{
	*(volatile u16 *)(common + 0x16) = queue;
	*(volatile u16 *)(notify + *(volatile u16 *)(common + 0x1e) * multiplier) = queue;
}

void virtio_net(u32 function)
{
	static const char words[] = "hello, card";
	struct ring *receive = (struct ring *)(MEMORY + 0x6000), *transmit = (struct ring *)(MEMORY + 0x7000);
	u8 *in = MEMORY + 0x8000, *out = MEMORY + 0x9000;
	u32 multiplier, unused;

	set_config(function, 4, config(function, 4) | 6);
	volatile u8 *common = part(function, COMMON, &unused), *mac = part(function, DEVICE, &unused);
	volatile u8 *notify = part(function, NOTIFY, &multiplier);
	volatile u32 *features = (volatile u32 *)common;

	name("virtio-net", function);
	if (!common || !mac || !notify) {
		text("error=capabilities\n");
		return;
	}
	common[0x14] = 0;
	common[0x14] = 3; /* there is a driver */
	for (u32 half = 0; half < 2; half++) {
		features[0] = features[2] = half;
		features[3] = features[1] & (half ? 3 : 1 << 5); /* version 1, platform's addresses; a MAC */
	}
	common[0x14] = 11;
	text("mac=");
	for (int i = 0; i < 6; i++) {
		if (i)
			put(':');
		hex(mac[i], 2);
	}
	if (!(common[0x14] & 8)) {
		text(" error=features\n");
		return;
	}

	for (u32 i = 0; i < LONGEST; i++)
		in[i] = out[i] = 0;
	u8 *frame = out + HEADER;
	for (int i = 0; i < 6; i++) {
		frame[i] = 0xff;
		frame[6 + i] = mac[i];
	}
	frame[12] = 0x88; /* for experiments: IEEE 802, local 1 */
	frame[13] = 0xb5;
	for (u32 i = 0; i < sizeof words; i++)
		frame[14 + i] = words[i];
	offer(common, 0, receive, in, 2, LONGEST);
	offer(common, 1, transmit, out, 0, HEADER + 60);
	common[0x14] = 15;
	receive->available.index = transmit->available.index = 1;
	for (u16 queue = 0; queue < 2; queue++)
		tell(common, notify, multiplier, queue);
	text(" sent=");
	if (!wait_for((volatile u32 *)&transmit->used, 0xffff0000, 1)) {
		text("0 error=transmit\n");
		return;
	}
	text("60 heard=\"");
	/* Others may speak first, as a bridge does. A count that becomes n sets the lowest bit of n. */
	for (u16 n = 1; wait_for((volatile u32 *)&receive->used, (u32)(n & -n) << 16, 1); n++) {
		volatile u8 *kind = in + HEADER + 12;
		if (kind[0] == 0x88 && kind[1] == 0xb5) {
			text((char *)in + HEADER + 14);
			break;
		}
		receive->available.index = n + 1;
		tell(common, notify, multiplier, 0);
	}
	text("\"\n");
	common[0x14] = 0;
}
