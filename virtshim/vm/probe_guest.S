/* The probe guest does what every kernel does first, at which a KVM that cannot run kernels fails.
 *
 * QEMU starts this 64 KiB ROM at 0xf0000 instead of a BIOS, at its reset vector. Real mode -> paging and long mode (an
 * MSR write) -> SSE, CPUID -> 20 million instructions (a KVM that interprets them needs minutes) -> 0x31 to the
 * isa-debug-exit device: QEMU ends with exit code 2 * 0x31 + 1 = 99. On the serial port, "P" says that the guest began,
 * and "L" that it reached long mode.
 *
 * Build:  as --64 probe_guest.S -o p.o && ld -Ttext 0xf0000 --oformat binary p.o -o p.bin
 * kvm_probe.py has the result; a test builds it again and compares.
 */
        .code16
        .globl  _start
_start: cli
        cld
        xor     %ax, %ax
        mov     %ax, %ds
        mov     %ax, %es
        mov     %ax, %ss
        mov     $0x7c00, %sp
        mov     $0x3f8, %dx
        mov     $'P', %al
        out     %al, %dx

        /* One 2 MiB page covers the stack and this ROM: PML4, PDPT, PD at 0x1000, 0x2000, 0x3000. */
        mov     $0x1000, %di
        xor     %eax, %eax
        mov     $0xc00, %cx
        rep stosl
        movw    $0x2003, 0x1000
        movw    $0x3003, 0x2000
        movw    $0x0083, 0x3000

        mov     $0x1000, %eax
        mov     %eax, %cr3
        mov     %cr4, %eax
        or      $0x620, %eax            /* PAE, OSFXSR, OSXMMEXCPT */
        mov     %eax, %cr4
        mov     $0xc0000080, %ecx       /* EFER */
        rdmsr
        or      $0x100, %eax            /* LME */
        wrmsr
        lgdtl   %cs:(gdtr - _start)
        mov     %cr0, %eax
        or      $0x80000003, %eax       /* PG, MP, PE */
        and     $0xfffffffb, %eax       /* not EM */
        mov     %eax, %cr0
        ljmpl   $8, $long

        .code64
long:   mov     $0x10, %eax
        mov     %eax, %ds
        mov     %eax, %ss
        mov     $0x7c00, %esp
        mov     $0x3f8, %edx
        mov     $'L', %al
        out     %al, %dx
        push    %rsp
        movq    (%rsp), %xmm0
        paddq   %xmm0, %xmm0
        xor     %eax, %eax
        cpuid
        mov     $20000000, %ecx
again:  dec     %ecx
        jnz     again
        mov     $0x31, %al
        out     %al, $0xf4
stop:   hlt
        jmp     stop

        .p2align 3
gdt:    .quad   0
        .quad   0x00af9a000000ffff      /* 64-bit code */
        .quad   0x00cf92000000ffff      /* data */
gdtr:   .word   23
        .long   gdt

        .org    0xfff0
        .code16
        ljmp    $0xf000, $0
        .org    0x10000
