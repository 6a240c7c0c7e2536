/* Reads and writes a file of 64 MiB past the guest's page cache: `share_io FILE` prints the microseconds of both passes over all of
 * it by the MiB, and of both over 2000 places of 4 KiB. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 1 << 20, PIECES = 64, PAGE = 4096, PLACES = 2000 };

static void need(int well, const char *what)
{
	if (!well) {
		perror(what);
		exit(1);
	}
}

static long now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000 + time.tv_nsec / 1000;
}

static void pass(int file, char *buffer, int count, long size, long stride, int writes)
{
	long all = (long)PIECE * PIECES;
	for (long at = 0; at < count; at++) {
		long offset = at * stride % (all / size) * size;
		need((writes ? pwrite(file, buffer, size, offset) : pread(file, buffer, size, offset)) == size, "transfer");
	}
	need(!writes || fsync(file) == 0, "fsync");
}

int main(int count, char **words)
{
	char *buffer;
	long begun, middle;
	int file = count == 2 ? open(words[1], O_RDWR | O_CREAT | O_DIRECT, 0600) : -1;
	need(file >= 0, "open");
	need(posix_memalign((void **)&buffer, PAGE, PIECE) == 0, "memory");
	memset(buffer, 1, PIECE);
	pass(file, buffer, PIECES, PIECE, 1, 1); /* makes the file */
	begun = now();
	pass(file, buffer, PIECES, PIECE, 1, 1);
	pass(file, buffer, PIECES, PIECE, 1, 0);
	middle = now();
	pass(file, buffer, PLACES, PAGE, 7919, 1);
	pass(file, buffer, PLACES, PAGE, 7919, 0);
	printf("%ld %ld\n", middle - begun, now() - middle);
	return 0;
}
