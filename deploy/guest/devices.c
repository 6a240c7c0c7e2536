/* The guest's small replacement for udev, for short boots under emulation.
 *
 *   devices boot     load the modules for the machine's devices, make the links, print the NoCloud seed's device
 *   devices links    make the links again, after a hot-plug
 *   devices address  print the first global address of the network interfaces
 *
 * Modules: those listed in /lib/modules/virtio. Those in /lib/modules/scsi and /lib/modules/ata, which take longer than all others
 * together, only if there is such a controller and no other disk.
 * Links: /dev/virtio-ports/NAME, /dev/disk/by-id/... and /dev/disk/by-path/... with the names udev gives them.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char *text(const char *format, ...)
{
	char *result;
	va_list values;

	va_start(values, format);
	if (vasprintf(&result, format, values) < 0)
		exit(1);
	va_end(values);
	return result;
}

/* Reads at most size-1 bytes of a file at an offset; the result ends in NUL. Returns the count, 0 when unreadable. */
static ssize_t read_at(const char *path, off_t offset, char *buffer, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t count = 0;

	if (fd >= 0) {
		count = pread(fd, buffer, size - 1, offset);
		close(fd);
	}
	if (count < 0)
		count = 0;
	buffer[count] = 0;
	return count;
}

/* One line of a sysfs file, trimmed, with what udev would replace in a link name replaced by '_'. */
static char *attribute(const char *path, size_t skip)
{
	static char buffer[512];
	char *start, *end;

	if ((size_t)read_at(path, 0, buffer, sizeof buffer) <= skip)
		return "";
	start = buffer + skip;
	while (isspace((unsigned char)*start))
		start++;
	for (end = start + strlen(start); end > start && isspace((unsigned char)end[-1]); end--)
		;
	*end = 0;
	for (char *c = start; *c; c++)
		if (!isalnum((unsigned char)*c) && !strchr("#+-.:=@_", *c))
			*c = '_';
	return start;
}

static void link_to(const char *directory, const char *name, const char *target)
{
	char *path = text("%s/%s", directory, name);

	unlink(path);
	if (symlink(target, path) < 0)
		perror(path);
	free(path);
}

static void load_modules(const char *which)
{
	FILE *list = fopen(which, "re");
	char path[PATH_MAX];

	while (list && fgets(path, sizeof path, list)) {
		path[strcspn(path, "\n")] = 0;
		int fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0)
			continue;
		/* Missing hardware is the usual answer, not an error. */
		syscall(SYS_finit_module, fd, "", 0);
		close(fd);
	}
	if (list)
		fclose(list);
}

static int has_disk(void)
{
	DIR *disks = opendir("/sys/class/block");
	struct dirent *entry;
	int found = 0;

	while (disks && !found && (entry = readdir(disks)))
		found = !strncmp(entry->d_name, "vd", 2) || !strncmp(entry->d_name, "sd", 2);
	if (disks)
		closedir(disks);
	return found;
}

/* The type of a virtio device; 8 is a SCSI controller. */
static int has_virtio_scsi(void)
{
	DIR *devices = opendir("/sys/bus/virtio/devices");
	struct dirent *entry;
	int found = 0;

	while (devices && !found && (entry = readdir(devices))) {
		char *path = text("/sys/bus/virtio/devices/%s/device", entry->d_name);
		found = !strcmp(attribute(path, 0), "0x0008");
		free(path);
	}
	if (devices)
		closedir(devices);
	return found;
}

static void load_needed_modules(void)
{
	load_modules("/lib/modules/virtio");
	if (has_virtio_scsi())
		load_modules("/lib/modules/scsi");
	if (!has_disk())
		load_modules("/lib/modules/ata");
}

static void link_ports(void)
{
	DIR *ports = opendir("/sys/class/virtio-ports");
	struct dirent *entry;

	mkdir("/dev/virtio-ports", 0755);
	while (ports && (entry = readdir(ports))) {
		if (entry->d_name[0] == '.')
			continue;
		char *path = text("/sys/class/virtio-ports/%s/name", entry->d_name);
		char *name = attribute(path, 0);
		char *target = text("../%s", entry->d_name);
		if (*name)
			link_to("/dev/virtio-ports", name, target);
		free(path);
		free(target);
	}
	if (ports)
		closedir(ports);
}

static int is_pci_address(const char *name)
{
	unsigned domain, bus, slot, function;
	int used = 0;

	return sscanf(name, "%x:%x:%x.%x%n", &domain, &bus, &slot, &function, &used) == 4 && !name[used];
}

/* Finds the last PCI address and the SCSI address, if any, on the way from the root of the device tree to a disk. */
static void locate(const char *disk, char *pci, char *scsi, size_t size)
{
	char *link = text("/sys/class/block/%s", disk), path[PATH_MAX];
	unsigned channel, target, lun;
	int used;

	pci[0] = scsi[0] = 0;
	if (realpath(link, path))
		for (char *part = strtok(path, "/"); part; part = strtok(NULL, "/")) {
			if (is_pci_address(part))
				snprintf(pci, size, "%s", part);
			used = 0;
			if (sscanf(part, "%*u:%u:%u:%u%n", &channel, &target, &lun, &used) == 3 && used && !part[used])
				snprintf(scsi, size, "-scsi-0:%u:%u:%u", channel, target, lun);
		}
	free(link);
}

static void link_disk(const char *disk)
{
	char pci[64], scsi[64], *name, *path, *target = text("../../%s", disk), *part = text("%s", "");
	char *whole = text("%s", disk), *partition = text("/sys/class/block/%s/partition", disk), *serial;

	if (access(partition, F_OK) == 0) {
		free(part);
		part = text("-part%s", attribute(partition, 0));
		whole[strcspn(whole, "0123456789")] = 0;
	}
	locate(disk, pci, scsi, sizeof pci);
	if (*pci)
		for (int old = 0; old < 2; old++) {
			name = text("%spci-%s%s%s", old ? "virtio-" : "", pci, scsi, part);
			link_to("/dev/disk/by-path", name, target);
			free(name);
		}
	path = text(*scsi ? "/sys/class/block/%s/device/vpd_pg80" : "/sys/class/block/%s/serial", whole);
	serial = text("%s", attribute(path, *scsi ? 4 : 0));
	if (*serial) {
		if (*scsi)
			name = text("scsi-0QEMU_QEMU_%s_%s%s", strncmp(whole, "sr", 2) ? "HARDDISK" : "CD-ROM", serial, part);
		else
			name = text("virtio-%s%s", serial, part);
		link_to("/dev/disk/by-id", name, target);
		free(name);
	}
	free(path);
	free(serial);
	free(partition);
	free(whole);
	free(part);
	free(target);
}

static int is_seed(const char *disk)
{
	char *path = text("/dev/%s", disk), block[64];
	int found = 0;

	if (read_at(path, 32769, block, sizeof block) > 60 && !memcmp(block, "CD001", 5)) {
		found = !strncasecmp(block + 39, "cidata ", 7);
	} else if (read_at(path, 43, block, sizeof block) > 60) {
		if (!memcmp(block + 11, "FAT", 3))
			found = !strncasecmp(block, "cidata ", 7);
		else if (!memcmp(block + 39, "FAT32", 5))
			found = !strncasecmp(block + 28, "cidata ", 7);
	}
	free(path);
	return found;
}

static void scan_disks(int print_seed)
{
	DIR *disks = opendir("/sys/class/block");
	struct dirent *entry;

	mkdir("/dev/disk", 0755);
	mkdir("/dev/disk/by-id", 0755);
	mkdir("/dev/disk/by-path", 0755);
	while (disks && (entry = readdir(disks))) {
		if (entry->d_name[0] == '.' || !strncmp(entry->d_name, "loop", 4) || !strncmp(entry->d_name, "ram", 3))
			continue;
		link_disk(entry->d_name);
		if (print_seed && is_seed(entry->d_name)) {
			printf("/dev/%s\n", entry->d_name);
			print_seed = 0;
		}
	}
	if (disks)
		closedir(disks);
}

/* The address of the interface with the lowest number; IPv4 first. */
static void print_address(void)
{
	struct ifaddrs *all, *one;
	char best[INET6_ADDRSTRLEN] = "";
	unsigned long best_rank = ULONG_MAX;

	if (getifaddrs(&all) < 0)
		return;
	for (one = all; one; one = one->ifa_next) {
		int family = one->ifa_addr ? one->ifa_addr->sa_family : AF_UNSPEC, six = family == AF_INET6;
		const struct in6_addr *address = six ? &((struct sockaddr_in6 *)one->ifa_addr)->sin6_addr : NULL;
		unsigned long rank = if_nametoindex(one->ifa_name) * 2UL + six;

		if ((family != AF_INET && !six) || (one->ifa_flags & IFF_LOOPBACK) || rank >= best_rank ||
		    (six && IN6_IS_ADDR_LINKLOCAL(address)) ||
		    !inet_ntop(family, six ? (void *)address : &((struct sockaddr_in *)one->ifa_addr)->sin_addr, best,
			       sizeof best))
			continue;
		best_rank = rank;
	}
	freeifaddrs(all);
	puts(best);
}

int main(int argc, char **argv)
{
	int boot = argc == 2 && !strcmp(argv[1], "boot");

	if (argc == 2 && !strcmp(argv[1], "address")) {
		print_address();
		return 0;
	}
	if (!boot && !(argc == 2 && !strcmp(argv[1], "links"))) {
		fprintf(stderr, "usage: devices boot|links|address\n");
		return 2;
	}
	if (boot)
		load_needed_modules();
	link_ports();
	scan_disks(boot);
	return 0;
}
