/* What libvirt's QEMU is on the node of these tests: the real one, with the library that was named at compilation loaded into it. */
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **words)
{
    (void)count;
    setenv("LD_PRELOAD", LIBRARY, 1);
    execv(QEMU, words);
    return 127;
}
