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

/* The timer's interrupt, as SeaBIOS set it up: the first of the master controller, which has vectors from 8 on, 18 times a second. */
#define TICK 8
static u32 gates[2 * (TICK + 1)];

__attribute__((naked)) static void on_tick(void)
{
	__asm__("pushl %eax\n movb $0x20, %al\n outb %al, $0x20\n popl %eax\n iret");
}

static void take_ticks(void)
{
	struct {
		u16 limit;
		u32 base;
	} __attribute__((packed)) table = {sizeof(gates) - 1, (u32)gates};

	gates[2 * TICK] = 8u << 16 | ((u32)on_tick & 0xffff);
	gates[2 * TICK + 1] = ((u32)on_tick & 0xffff0000) | 0x8e00;
	out8(0x21, 0xfe);
	out8(0xa1, 0xff);
	__asm__ volatile("lidt %0" ::"m"(table));
}

/* Lets go of what is asked for, for good. Between two looks it sleeps: a guest that spins takes the processor from the node. */
void let_go(void)
{
	take_ticks();
	for (;;) {
		__asm__ volatile("sti\n hlt\n cli" ::: "memory");
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
}
