/* What the device guest's drivers share: devices.c has it. */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

/* Memory that is nobody's, for DMA: from here to the end of the first 16 MiB. */
#define MEMORY ((u8 *)0x200000)

/* To the serial port. */
void put(char c);
void text(const char *s);
void hex(u32 value, int digits);
void decimal(u32 value);
/* The beginning of a line about a PCI function: its kind and address. A function is bus << 8 | device << 3 | function. */
void name(const char *kind, u32 function);

void out8(u16 port, u8 value);
void out32(u16 port, u32 value);
u32 in32(u16 port);

u32 config(u32 function, u32 offset);
void set_config(u32 function, u32 offset, u32 value);
/* Its first BAR, with memory and DMA turned on. */
volatile u32 *registers(u32 function);
/* Waits until `where` has one of `bits` set (or, with `want` 0, none); 0 after four seconds, most of what the timer holds. */
int wait_for(volatile u32 *where, u32 bits, int want);

void nic(u32 function);
void usb(u32 function);
void virtio_net(u32 function);

/* hotplug.c */
void remember(u32 function);
void let_go(void);
