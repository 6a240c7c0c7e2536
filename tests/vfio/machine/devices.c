/* The device guest: a whole operating system for one question, which devices does this VM have and do they work?
 *
 * Under two emulations, one inside the other, Linux takes minutes to boot and this takes seconds. It says on the serial
 * port what is on the PCI buses, and drives the devices that it knows, over their registers and by their DMA:
 *
 *   pci 05:00.0 1234:11e8
 *   edu 05:00.0 id=010000ed factorial(10)=3628800 dma=equal
 *   nvme 06:00.0 version=1.4.0 serial="..." model="QEMU NVMe Ctrl" controller=1
 *   nic 07:00.0 mac=52:54:00:00:00:01 sent=1 heard="..."
 *   virtio-net 08:00.0 mac=02:00:00:00:00:01 sent=60 heard="..."
 *   usb 09:00.0 port=1 speed=4 46f4:0001 serial="..."
 *   device guest: done
 *
 * What does not answer is said with `error=`. Afterwards it sleeps for good and hears no power button; built with LETS_GO, it
 * lets go of devices when it is asked to (hotplug.c). Each kind of device that
 * needs more than a screenful has a file of its own.
 */
#include "guest.h"

static void report(void);

__attribute__((section(".start"), naked, used)) void start(void) { __asm__("call %P0\n1: hlt\n jmp 1b" ::"i"(report)); }

void out8(u16 port, u8 value) { __asm__ volatile("outb %0, %1" ::"a"(value), "d"(port)); }
void out32(u16 port, u32 value) { __asm__ volatile("outl %0, %1" ::"a"(value), "d"(port)); }
static u8 in8(u16 port)
{
	u8 value;
	__asm__ volatile("inb %1, %0" : "=a"(value) : "d"(port));
	return value;
}
u32 in32(u16 port)
{
	u32 value;
	__asm__ volatile("inl %1, %0" : "=a"(value) : "d"(port));
	return value;
}

/* ---- serial port ---- */

void put(char c)
{
	while (!(in8(0x3fd) & 0x20))
		;
	out8(0x3f8, c);
}
void text(const char *s)
{
	while (*s)
		put(*s++);
}
void hex(u32 value, int digits)
{
	while (digits--)
		put("0123456789abcdef"[value >> 4 * digits & 15]);
}
void decimal(u32 value)
{
	if (value > 9)
		decimal(value / 10);
	put('0' + value % 10);
}
/* A field padded with blanks. */
static void padded(const u8 *field, int size)
{
	while (size && field[size - 1] == ' ')
		size--;
	while (size--)
		put(*field++);
}

/* ---- PCI ---- */

u32 config(u32 function, u32 offset)
{
	out32(0xcf8, 1u << 31 | function << 8 | offset);
	return in32(0xcfc);
}
void set_config(u32 function, u32 offset, u32 value)
{
	out32(0xcf8, 1u << 31 | function << 8 | offset);
	out32(0xcfc, value);
}
void name(const char *kind, u32 function)
{
	text(kind);
	put(' ');
	hex(function >> 8, 2);
	put(':');
	hex(function >> 3 & 31, 2);
	put('.');
	hex(function & 7, 1);
	put(' ');
}
volatile u32 *registers(u32 function)
{
	set_config(function, 4, config(function, 4) | 6);
	return (volatile u32 *)(config(function, 0x10) & ~15u);
}

/* ---- time: the ACPI timer's 3.58 MHz count in QEMU's q35; its port is what SeaBIOS set up ---- */

static u32 ticks(void) { return in32(0x608) & 0xffffff; }
int wait_for(volatile u32 *where, u32 bits, int want)
{
	u32 begun = ticks();
	while (!(*where & bits) == !!want)
		if (((ticks() - begun) & 0xffffff) > 4 * 3579545)
			return 0;
	return 1;
}

/* ---- QEMU's educational device: docs/specs/edu ---- */

static void edu(u32 function)
{
	volatile u32 *r = registers(function);
	u8 *from = MEMORY, *to = MEMORY + 0x1000;
	int equal = 1;

	name("edu", function);
	text("id=");
	hex(r[0], 8);
	r[0x08 / 4] = 10;
	if (!wait_for(r + 0x20 / 4, 1, 0)) {
		text(" error=factorial\n");
		return;
	}
	text(" factorial(10)=");
	decimal(r[0x08 / 4]);
	for (int i = 0; i < 256; i++) {
		from[i] = 7 * i + 3;
		to[i] = 0;
	}
	for (int back = 0; back < 2; back++) {
		r[0x80 / 4] = back ? 0x40000 : (u32)from;
		r[0x88 / 4] = back ? (u32)to : 0x40000;
		r[0x90 / 4] = 256;
		r[0x98 / 4] = 1 | back << 1;
		if (!wait_for(r + 0x98 / 4, 1, 0)) {
			text(" error=dma\n");
			return;
		}
	}
	for (int i = 0; i < 256; i++)
		equal &= ((volatile u8 *)to)[i] == (u8)(7 * i + 3);
	text(equal ? " dma=equal\n" : " dma=different\n");
}

/* ---- NVMe: the base specification's admin queue, one Identify Controller ---- */

static void nvme(u32 function)
{
	volatile u32 *r = registers(function), *submission = (u32 *)(MEMORY + 0x2000), *completion = (u32 *)(MEMORY + 0x3000);
	u8 *answer = MEMORY + 0x4000;

	name("nvme", function);
	text("version=");
	decimal(r[2] >> 16);
	put('.');
	decimal(r[2] >> 8 & 255);
	put('.');
	decimal(r[2] & 255);
	r[5] = 0;
	if (!wait_for(r + 7, 1, 0)) {
		text(" error=reset\n");
		return;
	}
	for (u32 i = 0; i < 0x3000 / 4; i++)
		submission[i] = 0;
	r[9] = 1 << 16 | 1; /* two entries in each queue */
	r[10] = (u32)submission;
	r[11] = 0;
	r[12] = (u32)completion;
	r[13] = 0;
	r[5] = 4 << 20 | 6 << 16 | 1;
	if (!wait_for(r + 7, 3, 1) || r[7] & 2) {
		text(" error=enable\n");
		return;
	}
	submission[0] = 6; /* Identify */
	submission[6] = (u32)answer;
	submission[10] = 1; /* the controller */
	r[0x1000 / 4] = 1;
	if (!wait_for(completion + 3, 1 << 16, 1) || completion[3] >> 17) {
		text(" error=identify\n");
		return;
	}
	text(" serial=\"");
	padded(answer + 4, 20);
	text("\" model=\"");
	padded(answer + 24, 40);
	text("\" controller=");
	decimal(answer[78] | answer[79] << 8);
	put('\n');
	r[5] = 0;
}

static void report(void)
{
	text("device guest: begun\n");
	for (u32 function = 0; function < 1u << 13; function++) {
		u32 id = config(function, 0);
		if (id == ~0u) {
			if (!(function & 7))
				function |= 7; /* no function 0: no device */
			continue;
		}
		remember(function);
		name("pci", function);
		hex(id & 0xffff, 4);
		put(':');
		hex(id >> 16, 4);
		put('\n');
		if (id == 0x11e81234)
			edu(function);
		if (config(function, 8) >> 8 == 0x010802)
			nvme(function);
		if (id == 0x10ca8086)
			nic(function);
		if (id == 0x10411af4)
			virtio_net(function);
		if (config(function, 8) >> 8 == 0x0c0330)
			usb(function);
		if (!(function & 7) && !(config(function, 0xc) >> 16 & 0x80))
			function |= 7; /* one function only */
	}
	text("device guest: done\n");
#ifdef LETS_GO
	let_go();
#endif
}
