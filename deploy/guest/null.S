/* The null guest: a boot sector that prints one line on the first serial port and sleeps for good.
 * The line begins like a kernel's, so that the guest counts as booted.
 * Interrupts stay off, so the guest costs the host no CPU, and reacts neither to ACPI nor to keys. */
	.code16
	.globl _start
_start:
	cli
	cld
	ljmp $0, $1f
1:	xorw %ax, %ax
	movw %ax, %ds
	/* 115200 baud, 8N1: QEMU does not mind, a terminal on real hardware would */
	movw $0x3fb, %dx
	movb $0x80, %al
	outb %al, %dx
	movw $0x3f8, %dx
	movb $1, %al
	outb %al, %dx
	incw %dx
	movb $0, %al
	outb %al, %dx
	movw $0x3fb, %dx
	movb $3, %al
	outb %al, %dx
	movw $line, %si
next:	lodsb
	testb %al, %al
	jz idle
	movb %al, %bl
	movw $0x3fd, %dx
wait:	inb %dx, %al
	testb $0x20, %al
	jz wait
	movw $0x3f8, %dx
	movb %bl, %al
	outb %al, %dx
	jmp next
idle:	hlt
	jmp idle
line:	.asciz "[    0.000000] null guest\r\n"
	.org 510
	.word 0xaa55
