/* A virtual function of Intel's 82576: it asks its card for a MAC address, sends a frame to all, and says what it was answered.
 *
 * Registers, mailbox and descriptors: Intel 82576EB datasheet, chapters 7 (transmit and receive functionality) and 8
 * (programming interface, virtual function registers). The messages in the mailbox are what Linux' igb answers to.
 */
#include "guest.h"

enum {
	CONTROL = 0x0,
	STATUS = 0x8,
	MESSAGE = 0x800,
	MAILBOX = 0xc40,
	RECEIVE = 0x2800,
	TRANSMIT = 0x3800,
};
/* Of a queue: offsets from RECEIVE and TRANSMIT. */
enum { BASE = 0x0, BASE_HIGH = 0x4, LENGTH = 0x8, SPLIT = 0xc, HEAD = 0x10, TAIL = 0x18, QUEUE = 0x28 };

#define RESET (1u << 26) /* of CONTROL */
#define ENABLE (1u << 25) /* of QUEUE */
#define LINK_UP 2u /* of STATUS */
/* Of MAILBOX: a message is there for the card, was taken by us, is being written; then the card's side; the card is being reset. */
#define REQUEST 1u
#define TAKEN 2u
#define OURS 4u
#define ANSWERED 0x10u
#define HEARD 0x20u
#define NOT_YET 0xc0u
/* Of messages. */
#define RESET_MESSAGE 1u
#define ACKNOWLEDGED 0x80000000u

#define ENTRIES 8
#define BUFFERS 4
#define DONE 1u
#define ETHERTYPE 0x88b5 /* IEEE 802: for local experiments */
#define FRAME 60

static volatile u32 *r;
/* Bits of MAILBOX are cleared by reading. */
static u32 seen;

static int mailbox(u32 bits)
{
	for (u32 tries = 0; tries < 2000000; tries++) {
		seen |= r[MAILBOX / 4];
		if (seen & bits) {
			seen &= ~bits;
			return 1;
		}
	}
	return 0;
}

/* Tells the card that the function begins anew. The function's MAC address in `mac`; what went wrong, or 0. */
static const char *begin(u8 *mac)
{
	r[CONTROL / 4] = RESET;
	if (!wait_for(r + MAILBOX / 4, NOT_YET, 0))
		return "reset";
	seen = 0;
	r[MAILBOX / 4] = OURS;
	if (!mailbox(OURS))
		return "mailbox";
	seen = 0;
	r[MESSAGE / 4] = RESET_MESSAGE;
	r[MAILBOX / 4] = REQUEST;
	if (!mailbox(HEARD))
		return "deaf";
	if (!mailbox(ANSWERED))
		return "silent";
	if (r[MESSAGE / 4] != (RESET_MESSAGE | ACKNOWLEDGED))
		return "no-mac";
	for (int i = 0; i < 6; i++)
		mac[i] = r[MESSAGE / 4 + 1 + i / 4] >> 8 * (i % 4);
	r[MAILBOX / 4] = TAKEN;
	return 0;
}

static int queue(u32 at, volatile u32 *ring)
{
	for (int i = 0; i < 4 * ENTRIES; i++)
		ring[i] = 0;
	r[(at + BASE) / 4] = (u32)ring;
	r[(at + BASE_HIGH) / 4] = 0;
	r[(at + LENGTH) / 4] = 16 * ENTRIES;
	r[(at + HEAD) / 4] = 0;
	r[(at + TAIL) / 4] = 0;
	r[(at + QUEUE) / 4] = ENABLE;
	return wait_for(r + (at + QUEUE) / 4, ENABLE, 1);
}

void nic(u32 function)
{
	volatile u32 *send = (u32 *)(MEMORY + 0x10000), *receive = (u32 *)(MEMORY + 0x11000);
	u8 *frame = MEMORY + 0x12000, *answers = MEMORY + 0x13000, *answer = 0, mac[6];
	const char *words = "device guest", *wrong;

	r = registers(function);
	name("nic", function);
	wrong = begin(mac);
	if (wrong) {
		text("error=");
		text(wrong);
		text("\n");
		return;
	}
	text("mac=");
	for (int i = 0; i < 6; i++) {
		text(i ? ":" : "");
		hex(mac[i], 2);
	}
	if (!wait_for(r + STATUS / 4, LINK_UP, 1)) {
		text(" error=link\n");
		return;
	}
	r[(RECEIVE + SPLIT) / 4] = 1u << 25 | 2; /* advanced descriptors, each with one buffer of 2 KiB */
	if (!queue(TRANSMIT, send) || !queue(RECEIVE, receive)) {
		text(" error=queue\n");
		return;
	}
	for (int i = 0; i < BUFFERS; i++)
		receive[4 * i] = (u32)answers + 0x800 * i;
	r[(RECEIVE + TAIL) / 4] = BUFFERS;

	for (int i = 0; i < FRAME; i++)
		frame[i] = i < 6 ? 0xff : i < 12 ? mac[i - 6] : 0;
	frame[12] = ETHERTYPE >> 8;
	frame[13] = ETHERTYPE & 255;
	for (int i = 0; words[i]; i++)
		frame[14 + i] = words[i];
	send[0] = (u32)frame;
	send[2] = 1u << 29 | 1u << 27 | 3u << 24 | 3u << 20 | FRAME; /* advanced data; tell when done; whole frame, with checksum */
	send[3] = FRAME << 14;
	r[(TRANSMIT + TAIL) / 4] = 1;
	if (!wait_for(send + 3, DONE, 1)) {
		text(" error=send\n");
		return;
	}
	text(" sent=1");
	/* A card may give a frame to all also to who sent it. */
	for (int i = 0; i < BUFFERS && (!answer || answer[11] == mac[5]); i++) {
		if (!wait_for(receive + 4 * i + 2, DONE, 1)) {
			text(" error=receive\n");
			return;
		}
		answer = answers + 0x800 * i;
	}
	text(" heard=\"");
	answer[FRAME] = 0;
	text((char *)answer + 14);
	text("\"\n");
}
