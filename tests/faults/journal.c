/* Keeps a directory as a database does, and tells what is committed: `journal DIRECTORY`.
 *
 * One process holds the lock. A record is in the log and synced, then in a page, past the page cache and synced, before it is told.
 * A file of the last number is replaced by rename now and then. At its start it looks through all of that: 3 the lock is held by
 * another, 4 what was committed is not there, 5 locks do not hold, 1 the system refuses something. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RECORD = 32, ROOM = 64, PAGE = 4096, PAGES = 16, PAUSE = 20000 };

static void need(int well, const char *what)
{
	if (well)
		return;
	fprintf(stderr, "journal: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void lost(const char *what, long number)
{
	printf("lost %s %ld\n", what, number);
	exit(4);
}

static int lock(int file)
{
	struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	return fcntl(file, F_SETLK, &whole) == 0 && flock(file, LOCK_EX | LOCK_NB) == 0;
}

/* Another process, and an open file of its own, is kept out. */
static int holds(void)
{
	int status;
	pid_t child = fork();
	need(child >= 0, "fork");
	if (child == 0)
		_exit(lock(open("lock", O_RDWR)));
	need(waitpid(child, &status, 0) == child, "wait");
	return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void record(char *text, long number)
{
	snprintf(text, ROOM, "%015ld %015ld\n", number, number * 7919 % 1000003);
}

/* The number of the last whole record; a torn one behind it is cut off. */
static long last_in(int log)
{
	char found[RECORD], wanted[ROOM];
	long number = 0;
	while (pread(log, found, RECORD, number * RECORD) == RECORD) {
		record(wanted, number + 1);
		if (memcmp(found, wanted, RECORD) != 0)
			lost("record", number + 1);
		number++;
	}
	need(ftruncate(log, number * RECORD) == 0, "truncate");
	return number;
}

static void fill(long *page, long number)
{
	for (int at = 0; at < PAGE / (int)sizeof *page; at++)
		page[at] = number;
}

static void look_through(int pages, long *page, long last)
{
	long wanted[PAGE / sizeof *page];
	FILE *checkpoint = fopen("checkpoint", "r");
	long number = 0;
	if (checkpoint != NULL) {
		if (fscanf(checkpoint, "%ld", &number) != 1 || number > last)
			lost("checkpoint", number);
		fclose(checkpoint);
	}
	/* The last record's page may not have been written; the one that it takes the place of may be there. */
	for (number = last - 1; number > 0 && number > last - PAGES; number--) {
		need(pread(pages, page, PAGE, number % PAGES * PAGE) == PAGE, "read a page");
		fill(wanted, number);
		if (memcmp(page, wanted, PAGE) != 0)
			lost("page", number);
	}
}

static void commit(int log, int pages, long *page, long number)
{
	char text[ROOM];
	record(text, number);
	need(pwrite(log, text, RECORD, (number - 1) * RECORD) == RECORD && fsync(log) == 0, "log");
	fill(page, number);
	need(pwrite(pages, page, PAGE, number % PAGES * PAGE) == PAGE && fdatasync(pages) == 0, "page");
}

static void checkpoint(int directory, long number)
{
	int file = open("checkpoint.new", O_WRONLY | O_CREAT | O_TRUNC, 0640);
	need(file >= 0 && dprintf(file, "%ld\n", number) > 0 && fsync(file) == 0 && close(file) == 0, "checkpoint");
	need(rename("checkpoint.new", "checkpoint") == 0 && fsync(directory) == 0, "rename");
}

int main(int count, char **words)
{
	long *page, number;
	int directory, file, log, pages;
	need(count == 2 && chdir(words[1]) == 0 && (directory = open(".", O_RDONLY | O_DIRECTORY)) >= 0, "directory");
	need((file = open("lock", O_RDWR | O_CREAT, 0640)) >= 0, "lock");
	if (!lock(file))
		return 3;
	if (!holds())
		return 5;
	need((log = open("log", O_RDWR | O_CREAT, 0640)) >= 0, "log");
	need((pages = open("pages", O_RDWR | O_CREAT | O_DIRECT, 0640)) >= 0, "pages");
	need(posix_memalign((void **)&page, PAGE, PAGE) == 0, "memory");
	number = last_in(log);
	look_through(pages, page, number);
	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("found %ld\n", number);
	for (;;) {
		commit(log, pages, page, ++number);
		if (number % 10 == 0)
			checkpoint(directory, number);
		printf("committed %ld\n", number);
		usleep(PAUSE);
	}
}
