/* Hot-unplug as q35's ACPI has it (QEMU: docs/specs/acpi_pci_hotplug): for each bus behind a port that can lose its device, a
 * register says which slots are to be let go of, and writing to another lets go of one.
 */
#include "guest.h"

#define BUSES 64
#define DOWN 0xcc4
#define EJECT 0xcc8
#define BUS 0xcd0

static u32 seen[64];
static int count;

/* A function that is there: it is told of when it goes. */
void remember(u32 function)
{
	if (count < 64)
		seen[count++] = function;
}

static void tell_what_went(void)
{
	for (int i = 0; i < count; i++)
		if (seen[i] != ~0u && config(seen[i], 0) == ~0u) {
			name("unplugged", seen[i]);
			text("\n");
			seen[i] = ~0u;
		}
}

/* Lets go of what is asked for, for good. */
void let_go(void)
{
	for (;;)
		for (u32 bus = 0; bus < BUSES; bus++) {
			u32 down;
			out32(BUS, bus);
			down = in32(DOWN);
			if (!down)
				continue;
			out32(EJECT, down & -down);
			tell_what_went();
		}
}
