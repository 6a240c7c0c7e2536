/* Sets the guest's clock, gives the kernel random bytes, and makes it use them at once. Reads seconds and nanoseconds
 * (64 bits each) and then the random bytes from standard input. A whole ELF program in a few hundred bytes, because shells
 * cannot call ioctl:
 *
 *   as -o reseed.o reseed.S && ld -Ttext 0x10000 --oformat binary -o reseed reseed.o
 *
 * Exit codes: 0, or the number of the error. guest_identity.py has the program as text.
 */
	.set base, 0x10000
	.set bytes, 64
	.globl _start
	.code64
header:
	.ascii "\177ELF"
	.byte 2, 1, 1, 0
	.quad 0
	.word 2, 62			/* executable, x86-64 */
	.long 1
	.quad _start			/* entry */
	.quad segment - header		/* where the program header is */
	.quad 0
	.long 0
	.word 64, 56, 1, 0, 0, 0
segment:
	.long 1, 7			/* loaded, with all rights */
	.quad 0
	.quad base, base
	.quad end - header, end - header + 128
	.quad 4096
_start:
	mov	$2, %eax		/* open */
	mov	$device, %edi
	mov	$2, %esi
	syscall
	test	%eax, %eax
	js	failed
	mov	%eax, %ebx
	xor	%edi, %edi
	mov	$time, %esi
	mov	$16, %edx
	xor	%eax, %eax		/* read */
	syscall
	cmp	$16, %eax
	jne	short_input
	mov	$pool + 8, %esi
	mov	$bytes, %edx
	xor	%eax, %eax
	syscall
	cmp	$bytes, %eax
	jne	short_input
	mov	$time, %esi
	mov	$227, %eax		/* clock_settime, of the clock 0 */
	syscall
	test	%eax, %eax
	js	failed
	movl	$bytes * 8, pool
	movl	$bytes, pool + 4
	mov	$0x40085203, %esi	/* RNDADDENTROPY */
	call	control
	mov	$0x5207, %esi		/* RNDRESEEDCRNG */
	call	control
	xor	%edi, %edi
	jmp	leave
control:
	mov	$16, %eax		/* ioctl */
	mov	%ebx, %edi
	mov	$pool, %edx
	syscall
	test	%eax, %eax
	js	failed
	ret
short_input:
	mov	$-5, %eax
failed:
	neg	%eax
	mov	%eax, %edi
leave:
	mov	$60, %eax		/* exit */
	syscall
device:
	.asciz "/dev/random"
	.balign 8
end:
	.set time, end
	.set pool, end + 16
