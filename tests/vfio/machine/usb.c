/* A USB host controller after the xHCI specification, 1.2: which devices are at its ports, and what they say of themselves, by a
 * control transfer each.
 *
 *   usb 07:00.0 port=1 speed=4 46f4:0001 serial="OUTER-STICK"
 */
#include "guest.h"

struct trb {
	u32 low, high, status, control;
};

/* Types of TRBs, in bits 10 to 15. */
#define SETUP (2 << 10)
#define DATA (3 << 10)
#define STATUS (4 << 10)
#define ENABLE_SLOT (9 << 10)
#define ADDRESS_DEVICE (11 << 10)
#define PORT_CHANGED 34

#define ENTRIES 64 /* of each ring; none is filled */
#define COMMANDS ((volatile struct trb *)(MEMORY + 0x10000))
#define EVENTS ((volatile struct trb *)(MEMORY + 0x11000))
#define SEGMENTS ((volatile u32 *)(MEMORY + 0x12000))
#define CONTEXTS ((volatile u32 *)(MEMORY + 0x13000))
#define INPUT ((volatile u32 *)(MEMORY + 0x14000))
#define ANSWER (MEMORY + 0x15000)
/* For each slot a page for its context, and one for its ring. */
#define SLOT(number) (MEMORY + 0x20000 + 0x2000 * (number))
#define SLOTS 8

static volatile u32 *doorbells;
static u32 next_command, next_event;

/* Waits for the next event that is not a port's; 0 if there is none. */
static volatile struct trb *event(void)
{
	while (next_event < ENTRIES && wait_for(&EVENTS[next_event].control, 1, 1)) {
		volatile struct trb *found = &EVENTS[next_event++];
		if ((found->control >> 10 & 63) != PORT_CHANGED)
			return found;
	}
	return 0;
}
static int succeeded(volatile struct trb *event) { return event && event->status >> 24 == 1; }

static volatile struct trb *command(u32 pointer, u32 control)
{
	volatile struct trb *trb = &COMMANDS[next_command++];
	trb->low = pointer;
	trb->control = control | 1;
	doorbells[0] = 0;
	return event();
}

/* A descriptor into ANSWER. The `used`-th and two more entries of the slot's ring. */
static int descriptor(u32 slot, u32 value, u32 index, u32 length, u32 used)
{
	volatile struct trb *ring = (volatile struct trb *)(SLOT(slot) + 0x1000) + used;
	ring[0] = (struct trb){value << 16 | 0x0680, length << 16 | index, 8, SETUP | 3 << 16 | 1 << 6 | 1};
	ring[1] = (struct trb){(u32)ANSWER, 0, length, DATA | 1 << 16 | 1};
	ring[2] = (struct trb){0, 0, 0, STATUS | 1 << 5 | 1};
	doorbells[slot] = 1;
	return succeeded(event());
}

static void device(u32 port, u32 speed, u32 size)
{
	volatile u8 *answer = ANSWER;
	volatile struct trb *enabled = command(0, ENABLE_SLOT);
	u32 slot = enabled ? enabled->control >> 24 : 0;

	if (!succeeded(enabled) || slot > SLOTS) {
		text(" error=slot");
		return;
	}
	CONTEXTS[2 * slot] = (u32)SLOT(slot);
	for (u32 i = 0; i < 0x400; i++)
		INPUT[i] = 0;
	INPUT[1] = 3;
	volatile u32 *context = INPUT + size / 4, *endpoint = context + size / 4;
	context[0] = 1 << 27 | speed << 20;
	context[1] = port << 16;
	endpoint[1] = (speed == 4 ? 512 : speed == 3 ? 64 : 8) << 16 | 4 << 3 | 3 << 1;
	endpoint[2] = (u32)SLOT(slot) + 0x1000 + 1;
	endpoint[4] = 8;
	if (!succeeded(command((u32)INPUT, slot << 24 | ADDRESS_DEVICE))) {
		text(" error=address");
		return;
	}
	if (!descriptor(slot, 0x100, 0, 18, 0)) {
		text(" error=descriptor");
		return;
	}
	u32 serial = answer[16];
	put(' ');
	hex(answer[9] << 8 | answer[8], 4);
	put(':');
	hex(answer[11] << 8 | answer[10], 4);
	if (!serial)
		return;
	text(" serial=\"");
	if (descriptor(slot, 0x300 | serial, 0x409, 255, 3))
		for (u32 i = 2; i + 1 < answer[0]; i += 2)
			put(answer[i]);
	put('"');
}

void usb(u32 function)
{
	volatile u32 *r = registers(function), *operational = r + (r[0] & 0xff) / 4, *runtime = r + (r[6] & ~31u) / 4;
	u32 ports = r[1] >> 24, size = r[4] & 4 ? 64 : 32;

	doorbells = r + (r[5] & ~3u) / 4;
	operational[0] = 0;
	wait_for(operational + 1, 1, 1);
	operational[0] = 2; /* reset */
	if (!wait_for(operational, 2, 0) || !wait_for(operational + 1, 1 << 11, 0)) {
		name("usb", function);
		text("error=reset\n");
		return;
	}
	for (volatile u32 *word = (volatile u32 *)COMMANDS; word < (volatile u32 *)SLOT(SLOTS + 1); word++)
		*word = 0;
	next_command = next_event = 0;
	operational[14] = SLOTS;
	operational[12] = (u32)CONTEXTS;
	operational[13] = 0;
	operational[6] = (u32)COMMANDS | 1;
	operational[7] = 0;
	SEGMENTS[0] = (u32)EVENTS;
	SEGMENTS[2] = ENTRIES;
	volatile u32 *interrupter = runtime + 8;
	interrupter[2] = 1;
	interrupter[6] = (u32)EVENTS;
	interrupter[7] = 0;
	interrupter[4] = (u32)SEGMENTS;
	interrupter[5] = 0;
	operational[0] = 1;
	wait_for(operational + 1, 1, 0);
	for (u32 port = 1; port <= ports; port++) {
		volatile u32 *status = operational + 0x100 + 4 * (port - 1);
		if (!(*status & 1))
			continue;
		*status = 1 << 9 | 1 << 4; /* power stays; reset */
		name("usb", function);
		text("port=");
		decimal(port);
		if (wait_for(status, 1 << 21, 1)) {
			u32 speed = *status >> 10 & 15;
			text(" speed=");
			decimal(speed);
			device(port, speed, size);
		} else
			text(" error=reset");
		put('\n');
	}
	operational[0] = 0;
}
