/* Boot sector of the device guest: loads 32 KiB that follow it on the disk to 0x10000 and runs them in flat 32-bit mode. */
	.code16
	.globl _start
_start:
	cli
	cld
	ljmp $0, $1f
1:	xorw %ax, %ax
	movw %ax, %ds
	movw %ax, %ss
	movw $0x7c00, %sp
	sti
	movw $packet, %si
	movb $0x42, %ah			/* extended read; SeaBIOS left the drive in dl */
	int $0x13
	jc stop
	cli
	lgdtl gdtr
	movl %cr0, %eax
	orb $1, %al
	movl %eax, %cr0
	ljmp $8, $flat
stop:	hlt
	jmp stop

	.code32
flat:	movw $16, %ax
	movw %ax, %ds
	movw %ax, %es
	movw %ax, %ss
	movl $0x7c00, %esp
	movl $0x10000, %eax
	jmp *%eax

	.p2align 3
gdt:	.quad 0
	.quad 0x00cf9a000000ffff	/* code */
	.quad 0x00cf92000000ffff	/* data */
gdtr:	.word 23
	.long gdt
packet:	.byte 16, 0
	.word 64			/* sectors */
	.word 0, 0x1000			/* to 1000:0000 */
	.quad 1				/* from the second sector on */
	.org 510
	.word 0xaa55
