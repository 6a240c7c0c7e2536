/* Reads cloud-init's NoCloud documents and prints the shell commands that carry them out.
 *
 *   nocloud PART FILE ...  for each part whose file exists, a shell function on_PART:
 *     meta      instance id, host name, SSH keys
 *     network   addresses, routes and name servers; network-config versions 1 and 2
 *     user      the "#cloud-config" subset below; the files of write_files are written at once
 *     commands  mounts and runcmd, for when the network is up
 *   nocloud dump FILE      the parsed document as JSON
 *
 * The functions that the commands call (host_name, key, dhcp ...) are in the guest's init.
 * cloud-config: hostname, fqdn, bootcmd, users, ssh_authorized_keys, write_files, mounts, runcmd, resolv_conf.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "yaml.h"

static void quoted(const char *text)
{
	putchar('\'');
	for (; *text; text++)
		if (*text == '\'')
			fputs("'\\''", stdout);
		else
			putchar(*text);
	putchar('\'');
}

/* Prints a command: words up to NULL, each quoted. */
static void command(const char *name, ...)
{
	__builtin_va_list words;
	const char *word;

	fputs(name, stdout);
	__builtin_va_start(words, name);
	while ((word = __builtin_va_arg(words, const char *))) {
		putchar(' ');
		quoted(word);
	}
	__builtin_va_end(words);
	putchar('\n');
}

static int is_true(const struct node *node)
{
	return !strcasecmp(node->text, "true") || !strcasecmp(node->text, "yes") || !strcasecmp(node->text, "on");
}

static const char *first_of(const struct node *mapping, const char *const *names)
{
	for (; *names; names++)
		if (*yaml_get(mapping, *names)->text)
			return yaml_get(mapping, *names)->text;
	return "";
}

/* Calls a function for a scalar, or for every scalar below a list or a map. */
static void each(const struct node *node, void (*call)(const char *, void *), void *extra)
{
	if (node->kind == SCALAR)
		call(node->text, extra);
	for (size_t n = 0; n < node->count; n++)
		each(node->values[n], call, extra);
}

static void print_call(const char *text, void *name)
{
	command(name, text, NULL);
}

static void print_key(const char *text, void *user)
{
	command("key", user, text, NULL);
}

/* ---- addresses ---- */

static int prefix_of(const char *mask)
{
	struct in_addr four;
	struct in6_addr six;
	int bits = 0;

	if (inet_pton(AF_INET, mask, &four) == 1)
		return __builtin_popcount(four.s_addr);
	if (inet_pton(AF_INET6, mask, &six) == 1) {
		for (int n = 0; n < 16; n++)
			bits += __builtin_popcount(six.s6_addr[n]);
		return bits;
	}
	return atoi(mask);
}

/* ADDRESS, ADDRESS/PREFIX or ADDRESS with a mask, as ADDRESS/PREFIX. */
static char *with_prefix(const char *address, const char *mask)
{
	static char result[128];

	if (strchr(address, '/'))
		snprintf(result, sizeof result, "%s", address);
	else
		snprintf(result, sizeof result, "%s/%d", address, *mask ? prefix_of(mask) : strchr(address, ':') ? 128 : 32);
	return result;
}

static void print_route(const char *device, const struct node *route)
{
	const char *to = first_of(route, (const char *[]){"to", "network", "destination", NULL});
	const char *via = first_of(route, (const char *[]){"via", "gateway", NULL});
	const char *mask = yaml_get(route, "netmask")->text, *metric = yaml_get(route, "metric")->text;
	const char *prefix = yaml_get(route, "prefix")->text;

	if (!strcmp(to, "default") || !*to)
		to = strchr(via, ':') ? "::/0" : "0.0.0.0/0";
	command("route", device, with_prefix(to, *mask ? mask : prefix), via, metric, NULL);
}

static void print_routes(const char *device, const struct node *routes)
{
	/* Routes without a gateway first, because the others may need them to reach their gateways. */
	for (int direct = 1; direct >= 0; direct--)
		for (size_t n = 0; n < routes->count; n++)
			if ((*first_of(routes->values[n], (const char *[]){"via", "gateway", NULL}) == 0) == direct)
				print_route(device, routes->values[n]);
}

static void print_gateway(const char *device, const char *gateway)
{
	if (*gateway)
		command("route", device, strchr(gateway, ':') ? "::/0" : "0.0.0.0/0", gateway, "", NULL);
}

/* The device with a hardware address, or with a name when no address is asked for; "" if there is none. */
static const char *find_device(const char *mac, const char *name)
{
	static char found[NAME_MAX + 1];
	char path[PATH_MAX], address[64];
	DIR *devices = opendir("/sys/class/net");
	struct dirent *entry;

	found[0] = 0;
	while (devices && !found[0] && (entry = readdir(devices))) {
		if (entry->d_name[0] == '.')
			continue;
		snprintf(path, sizeof path, "/sys/class/net/%s/address", entry->d_name);
		FILE *file = fopen(path, "re");
		int ours = file && fscanf(file, "%63s", address) == 1 && !strcasecmp(address, mac);
		if (file)
			fclose(file);
		if (*mac ? ours : !strcmp(entry->d_name, name))
			snprintf(found, sizeof found, "%s", entry->d_name);
	}
	if (devices)
		closedir(devices);
	if (!found[0])
		fprintf(stderr, "network-config: no device %s %s\n", name, mac);
	return found;
}

/* ---- network-config, version 1 ---- */

static void print_subnet(const char *device, const struct node *subnet)
{
	const char *type = yaml_get(subnet, "type")->text, *address = yaml_get(subnet, "address")->text;

	if (!strcmp(type, "dhcp") || !strcmp(type, "dhcp4"))
		command("dhcp", device, NULL);
	if (*address) {
		const char *mask = yaml_get(subnet, "netmask")->text;
		if (!*mask)
			mask = yaml_get(subnet, "prefix")->text;
		command("address", device, with_prefix(address, mask), NULL);
	}
	print_routes(device, yaml_get(subnet, "routes"));
	print_gateway(device, yaml_get(subnet, "gateway")->text);
	each(yaml_get(subnet, "dns_nameservers"), print_call, "name_server");
	each(yaml_get(subnet, "dns_search"), print_call, "search");
}

static void network_1(const struct node *config)
{
	for (size_t n = 0; n < config->count; n++) {
		const struct node *item = config->values[n], *subnets = yaml_get(item, "subnets");
		const char *type = yaml_get(item, "type")->text, *device;

		if (!strcmp(type, "nameserver")) {
			each(yaml_get(item, "address"), print_call, "name_server");
			each(yaml_get(item, "search"), print_call, "search");
		} else if (!strcmp(type, "route")) {
			print_route("", item);
		} else if (!strcmp(type, "physical")) {
			device = find_device(yaml_get(item, "mac_address")->text, yaml_get(item, "name")->text);
			if (!*device)
				continue;
			command("link_up", device, yaml_get(item, "mtu")->text, NULL);
			for (size_t m = 0; m < subnets->count; m++)
				print_subnet(device, subnets->values[m]);
		} else {
			fprintf(stderr, "network-config: type %s is not known here\n", type);
		}
	}
}

/* ---- network-config, version 2 ---- */

static void network_2(const struct node *ethernets)
{
	for (size_t n = 0; n < ethernets->count; n++) {
		const struct node *item = ethernets->values[n], *list = yaml_get(item, "addresses");
		const char *mac = yaml_get(yaml_get(item, "match"), "macaddress")->text;
		const char *name = yaml_get(yaml_get(item, "match"), "name")->text;
		const char *device = find_device(mac, *name ? name : ethernets->keys[n]->text);

		if (!*device)
			continue;
		command("link_up", device, yaml_get(item, "mtu")->text, NULL);
		for (size_t m = 0; m < list->count; m++) {
			/* An address may be a map from it to its options. */
			const struct node *address = list->values[m];
			if (address->kind == MAPPING && address->count)
				address = address->keys[0];
			command("address", device, with_prefix(address->text, ""), NULL);
		}
		print_routes(device, yaml_get(item, "routes"));
		print_gateway(device, yaml_get(item, "gateway4")->text);
		print_gateway(device, yaml_get(item, "gateway6")->text);
		each(yaml_get(yaml_get(item, "nameservers"), "addresses"), print_call, "name_server");
		each(yaml_get(yaml_get(item, "nameservers"), "search"), print_call, "search");
		if (is_true(yaml_get(item, "dhcp4")))
			command("dhcp", device, NULL);
	}
}

static void network(const struct node *document)
{
	if (yaml_get(document, "network")->kind == MAPPING)
		document = yaml_get(document, "network");
	if (!strcmp(yaml_get(document, "version")->text, "2"))
		network_2(yaml_get(document, "ethernets"));
	else
		network_1(yaml_get(document, "config"));
}

/* ---- meta-data and user-data ---- */

static void meta(const struct node *document)
{
	const char *name = first_of(document, (const char *[]){"local-hostname", "hostname", NULL});

	command("instance", yaml_get(document, "instance-id")->text, NULL);
	if (*name)
		command("host_name", name, NULL);
	each(yaml_get(document, "public-keys"), print_key, "root");
	each(yaml_get(document, "public_keys"), print_key, "root");
}

static void make_parents(const char *path)
{
	char *copy = strdup(path);

	for (char *slash = strchr(copy + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = 0;
		mkdir(copy, 0755);
		*slash = '/';
	}
	free(copy);
}

/* Quoted permissions are octal digits; a bare number is read as in YAML 1.1. */
static mode_t permissions(const struct node *node)
{
	if (node->kind != SCALAR)
		return 0644;
	const char *digits = node->text;
	if (!strncmp(digits, "0o", 2))
		return (mode_t)strtoul(digits + 2, NULL, 8);
	return (mode_t)strtoul(digits, NULL, node->plain && *digits != '0' ? 10 : 8);
}

static void write_file(const struct node *item)
{
	const struct node *content = yaml_get(item, "content");
	const char *path = yaml_get(item, "path")->text, *encoding = yaml_get(item, "encoding")->text;
	const char *owner = yaml_get(item, "owner")->text;
	char *bytes = content->text, *target = strdup(path);
	size_t length = content->length;
	int packed = strstr(encoding, "gz") != NULL, append = is_true(yaml_get(item, "append"));

	if (*path != '/') {
		fprintf(stderr, "write_files: '%s' is no absolute path\n", path);
		return;
	}
	if (strstr(encoding, "b64") || strstr(encoding, "base64"))
		bytes = base64_decode(bytes, &length);
	if (packed && asprintf(&target, "%s.packed", path) < 0)
		exit(1);
	make_parents(path);
	int fd = open(target, O_WRONLY | O_CREAT | O_CLOEXEC | (append && !packed ? O_APPEND : O_TRUNC), 0600);
	if (fd < 0 || write(fd, bytes, length) != (ssize_t)length)
		perror(target);
	if (fd >= 0) {
		fchmod(fd, permissions(yaml_get(item, "permissions")));
		close(fd);
	}
	if (packed)
		command(append ? "unpack append" : "unpack", target, path, NULL);
	if (*owner)
		command("chown", owner, path, NULL);
}

static void print_run(const struct node *list)
{
	for (size_t n = 0; n < list->count; n++) {
		const struct node *item = list->values[n];
		if (item->kind == SCALAR)
			command("run sh -c", item->text, NULL);
		else if (item->count) {
			fputs("run", stdout);
			for (size_t m = 0; m < item->count; m++) {
				putchar(' ');
				quoted(item->values[m]->text);
			}
			putchar('\n');
		}
	}
}

static void print_user(const struct node *item)
{
	const char *name = yaml_get(item, "name")->text;

	if (!*name)
		return;
	command("user", name, NULL);
	each(yaml_get(item, "ssh_authorized_keys"), print_key, (void *)name);
	each(yaml_get(item, "ssh-authorized-keys"), print_key, (void *)name);
}

/* Options of the resolver: true makes a flag, other values NAME:VALUE. */
static void resolver(const struct node *document)
{
	const struct node *settings = yaml_get(document, "resolv_conf"), *options = yaml_get(settings, "options");

	if (!is_true(yaml_get(document, "manage_resolv_conf")))
		return;
	each(yaml_get(settings, "nameservers"), print_call, "name_server");
	for (size_t n = 0; options->kind == MAPPING && n < options->count; n++) {
		const char *value = options->values[n]->text;
		if (!strcasecmp(value, "false"))
			continue;
		command("resolver_option", options->keys[n]->text, strcasecmp(value, "true") ? value : "", NULL);
	}
}

static void user(const struct node *document)
{
	const struct node *list;
	const char *name = first_of(document, (const char *[]){"hostname", "fqdn", NULL});

	if (*name)
		command("host_name", name, NULL);
	print_run(yaml_get(document, "bootcmd"));
	resolver(document);
	list = yaml_get(document, "users");
	for (size_t n = 0; n < list->count; n++)
		print_user(list->values[n]);
	each(yaml_get(document, "ssh_authorized_keys"), print_key, "root");
	list = yaml_get(document, "write_files");
	for (size_t n = 0; n < list->count; n++)
		write_file(list->values[n]);
}

static void commands(const struct node *document)
{
	const struct node *mounts = yaml_get(document, "mounts");

	for (size_t n = 0; n < mounts->count; n++) {
		const struct node *item = mounts->values[n];
		const char *field[4] = {"", "", "", ""};
		for (size_t m = 0; m < item->count && m < 4; m++)
			field[m] = item->values[m]->text;
		if (*field[0] && *field[1])
			command("mount_at", field[0], field[1], field[2], field[3], NULL);
	}
	print_run(yaml_get(document, "runcmd"));
}

/* ---- dump ---- */

static void dump_text(const struct node *node)
{
	putchar('"');
	for (size_t n = 0; n < node->length; n++) {
		unsigned char c = (unsigned char)node->text[n];
		if (c < ' ' || c == '"' || c == '\\')
			printf("\\u%04x", c);
		else
			putchar(c);
	}
	putchar('"');
}

static void dump(const struct node *node)
{
	if (node->kind == NONE) {
		fputs("null", stdout);
	} else if (node->kind == SCALAR) {
		dump_text(node);
	} else {
		putchar(node->kind == MAPPING ? '{' : '[');
		for (size_t n = 0; n < node->count; n++) {
			if (n)
				putchar(',');
			if (node->kind == MAPPING) {
				dump_text(node->keys[n]);
				putchar(':');
			}
			dump(node->values[n]);
		}
		putchar(node->kind == MAPPING ? '}' : ']');
	}
}

static char *contents(const char *path)
{
	FILE *file = strcmp(path, "-") ? fopen(path, "re") : stdin;
	size_t length = 0, room = 65536, count;
	char *text = malloc(room);

	if (!file || !text) {
		perror(path);
		exit(1);
	}
	while ((count = fread(text + length, 1, room - length - 1, file)) > 0) {
		length += count;
		if (room - length < 2 && !(text = realloc(text, room *= 2)))
			exit(1);
	}
	text[length] = 0;
	return text;
}

static const struct part { const char *name; void (*call)(const struct node *); } parts[] = {
	{"meta", meta}, {"network", network}, {"user", user}, {"commands", commands},
};

static const struct part *part_named(const char *name)
{
	for (size_t n = 0; n < sizeof parts / sizeof *parts; n++)
		if (!strcmp(name, parts[n].name))
			return &parts[n];
	fprintf(stderr, "usage: nocloud meta|network|user|commands FILE ... | dump FILE\n");
	exit(2);
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "dump")) {
		dump(yaml_read(argv[2], contents(argv[2])));
		return 0;
	}
	for (int n = 1; n + 1 < argc; n += 2) {
		const struct part *part = part_named(argv[n]);
		if (access(argv[n + 1], F_OK) != 0)
			continue;
		printf("on_%s() {\n", part->name);
		part->call(yaml_read(argv[n + 1], contents(argv[n + 1])));
		puts(":\n}");
	}
	return 0;
}
