#include "yaml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define NAMES 64

struct parser {
	const char *name, *start, *at;
	int failed;
	struct { char *name; struct node *node; } anchors[NAMES];
	int anchored;
};

struct bytes {
	char *text;
	size_t length, room;
};

static struct node nothing = {.kind = NONE, .text = "", .plain = 1};

static struct node *parse_block(struct parser *p, int least, int parent);
static struct node *parse_flow(struct parser *p);

static void *grown(void *memory, size_t size)
{
	memory = realloc(memory, size);
	if (!memory) {
		fprintf(stderr, "out of memory\n");
		exit(1);
	}
	return memory;
}

static void put(struct bytes *b, int c)
{
	if (b->length + 2 > b->room)
		b->text = grown(b->text, b->room = b->room * 2 + 64);
	b->text[b->length++] = (char)c;
	b->text[b->length] = 0;
}

static void put_rune(struct bytes *b, unsigned long rune)
{
	if (rune < 0x80) {
		put(b, (int)rune);
	} else if (rune < 0x800) {
		put(b, (int)(0xc0 | rune >> 6));
		put(b, (int)(0x80 | (rune & 63)));
	} else if (rune < 0x10000) {
		put(b, (int)(0xe0 | rune >> 12));
		put(b, (int)(0x80 | (rune >> 6 & 63)));
		put(b, (int)(0x80 | (rune & 63)));
	} else {
		put(b, (int)(0xf0 | rune >> 18));
		put(b, (int)(0x80 | (rune >> 12 & 63)));
		put(b, (int)(0x80 | (rune >> 6 & 63)));
		put(b, (int)(0x80 | (rune & 63)));
	}
}

static void trim(struct bytes *b, size_t least)
{
	while (b->length > least && (b->text[b->length - 1] == ' ' || b->text[b->length - 1] == '\t'))
		b->text[--b->length] = 0;
}

static struct node *new_node(enum kind kind)
{
	struct node *node = grown(NULL, sizeof *node);

	memset(node, 0, sizeof *node);
	node->kind = kind;
	node->text = "";
	return node;
}

static struct node *new_scalar(struct bytes *b, int plain)
{
	struct node *node = new_node(SCALAR);

	node->plain = plain;
	if (b->text) {
		node->text = b->text;
		node->length = b->length;
	}
	if (plain && (!b->length || !strcmp(b->text, "~") || !strcasecmp(b->text, "null")))
		node->kind = NONE;
	return node;
}

static void add(struct node *node, struct node *key, struct node *value)
{
	node->keys = grown(node->keys, (node->count + 1) * sizeof *node->keys);
	node->values = grown(node->values, (node->count + 1) * sizeof *node->values);
	node->keys[node->count] = key;
	node->values[node->count++] = value;
}

static struct node *fail(struct parser *p, const char *why)
{
	int line = 1;

	if (!p->failed) {
		for (const char *c = p->start; c < p->at; c++)
			line += *c == '\n';
		fprintf(stderr, "%s: line %d: %s\n", p->name, line, why);
	}
	p->failed = 1;
	p->at += strlen(p->at);
	return &nothing;
}

static int column(const struct parser *p)
{
	const char *c = p->at;

	while (c > p->start && c[-1] != '\n')
		c--;
	return (int)(p->at - c);
}

static int is_blank(int c)
{
	return c == ' ' || c == '\t';
}

static int is_break(int c)
{
	return c == '\n' || c == 0;
}

static int ends_document(const char *c)
{
	return (!strncmp(c, "---", 3) || !strncmp(c, "...", 3)) && (is_blank(c[3]) || is_break(c[3]));
}

static void skip_blanks(struct parser *p)
{
	while (is_blank(*p->at))
		p->at++;
}

/* Skips blanks, line ends and comments. */
static void skip_lines(struct parser *p)
{
	for (;;) {
		skip_blanks(p);
		if (*p->at == '#' && (p->at == p->start || is_blank(p->at[-1]) || p->at[-1] == '\n'))
			while (!is_break(*p->at))
				p->at++;
		if (*p->at != '\n')
			return;
		p->at++;
	}
}

/* Line ends inside a quoted or plain scalar: one becomes a blank, n become n-1 line ends. */
static void fold(struct parser *p, struct bytes *b, size_t least)
{
	int breaks = 0;

	trim(b, least);
	while (*p->at == '\n' || is_blank(*p->at))
		breaks += *p->at++ == '\n';
	if (breaks == 1)
		put(b, ' ');
	while (breaks-- > 1)
		put(b, '\n');
}

static unsigned long hex(struct parser *p, int digits)
{
	unsigned long value = 0;

	while (digits-- && strchr("0123456789abcdefABCDEF", *p->at) && *p->at) {
		int c = *p->at++;
		value = value * 16 + (unsigned long)(c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
	}
	return value;
}

static void escape(struct parser *p, struct bytes *b)
{
	static const char from[] = "0abtnvfre", to[] = "\0\a\b\t\n\v\f\r\033";
	int c = *p->at++;
	const char *known = c ? strchr(from, c) : NULL;
	unsigned long rune;

	if (known) {
		put(b, to[known - from]);
	} else if (c == 'x') {
		put_rune(b, hex(p, 2));
	} else if (c == 'u' || c == 'U') {
		rune = hex(p, c == 'u' ? 4 : 8);
		if (rune >= 0xd800 && rune < 0xdc00 && p->at[0] == '\\' && p->at[1] == 'u') {
			p->at += 2;
			rune = 0x10000 + ((rune - 0xd800) << 10) + (hex(p, 4) - 0xdc00);
		}
		put_rune(b, rune);
	} else if (c == '\n') {
		skip_blanks(p);
	} else if (c == 'N') {
		put_rune(b, 0x85);
	} else if (c == '_') {
		put_rune(b, 0xa0);
	} else if (c == 'L' || c == 'P') {
		put_rune(b, c == 'L' ? 0x2028 : 0x2029);
	} else if (c) {
		put(b, c);
	} else {
		p->at--;
	}
}

static struct node *parse_quoted(struct parser *p)
{
	struct bytes b = {0};
	int quote = *p->at++;
	size_t least = 0;       /* characters from escapes are not trimmed at a line's end */

	while (*p->at && (*p->at != quote || (quote == '\'' && p->at[1] == '\''))) {
		if (*p->at == '\n') {
			fold(p, &b, least);
			least = b.length;
		} else if (*p->at == '\\' && quote == '"') {
			p->at++;
			escape(p, &b);
			least = b.length;
		} else {
			p->at += *p->at == '\'' && quote == '\'';
			put(&b, *p->at++);
		}
	}
	if (!*p->at)
		return fail(p, "a quoted text does not end");
	p->at++;
	return new_scalar(&b, 0);
}

static int ends_plain(const struct parser *p, int flow)
{
	const char *c = p->at;

	if (is_break(*c) || (*c == '#' && c > p->start && is_blank(c[-1])))
		return 1;
	if (*c == ':' && (is_blank(c[1]) || is_break(c[1]) || (flow && strchr(",]}", c[1]))))
		return 1;
	return flow && strchr(",[]{}", *c);
}

/* parent: the column that a further line must exceed; NOFOLD keeps to one line (a key). */
#define NOFOLD 100000
static struct node *parse_plain(struct parser *p, int parent, int flow)
{
	struct bytes b = {0};

	for (;;) {
		while (!ends_plain(p, flow))
			put(&b, *p->at++);
		trim(&b, 0);
		if (*p->at != '\n' || parent == NOFOLD)
			break;
		const char *back = p->at;
		while (*p->at == '\n' || *p->at == ' ')
			p->at++;
		int more = *p->at && *p->at != '#' && column(p) > parent && !(column(p) == 0 && ends_document(p->at)) &&
			   !ends_plain(p, flow);
		p->at = back;
		if (!more)
			break;
		fold(p, &b, 0);
	}
	return new_scalar(&b, 1);
}

/* A literal (|) or folded (>) scalar. */
static struct node *parse_literal(struct parser *p, int parent)
{
	struct bytes b = {0};
	int folded = *p->at++ == '>', chomp = 0, indent = 0, blanks = 0, deep = 1;

	for (; !is_break(*p->at) && !is_blank(*p->at); p->at++) {
		if (*p->at == '+' || *p->at == '-')
			chomp = *p->at;
		else if (*p->at > '0' && *p->at <= '9')
			indent = (parent < 0 ? 0 : parent) + *p->at - '0';
	}
	while (!is_break(*p->at))
		p->at++;
	p->at += *p->at == '\n';
	while (*p->at) {
		int width = (int)strspn(p->at, " ");
		if (p->at[width] == '\n' && (!indent || width <= indent)) {
			blanks++;
			p->at += width + 1;
			continue;
		}
		if (!p->at[width])
			break;
		if (!indent) {
			if (width <= parent)
				break;
			indent = width;
		}
		if (width < indent || (width == 0 && ends_document(p->at)))
			break;
		p->at += indent;
		int deeper = is_blank(*p->at);
		if (folded && b.length && !deep && !deeper) {
			b.length--;             /* the last line's end */
			if (!blanks)
				put(&b, ' ');
		}
		while (blanks-- > 0)
			put(&b, '\n');
		blanks = 0;
		while (!is_break(*p->at))
			put(&b, *p->at++);
		put(&b, '\n');
		deep = deeper;
		p->at += *p->at == '\n';
	}
	if (chomp == '-' && b.length)
		b.text[--b.length] = 0;
	while (chomp == '+' && blanks-- > 0)
		put(&b, '\n');
	return new_scalar(&b, 0);
}

/* Does a mapping key begin here? Looks no further than this line. */
static int is_key(struct parser *p)
{
	struct parser look = *p;

	if (*p->at == '"' || *p->at == '\'') {
		look.failed = 1;
		free(parse_quoted(&look));
		skip_blanks(&look);
	} else if (strchr("[{|>&*!%@`", *p->at)) {
		return 0;
	} else {
		while (!ends_plain(&look, 0))
			look.at++;
	}
	return *look.at == ':' && (is_blank(look.at[1]) || is_break(look.at[1]));
}

static struct node *parse_key(struct parser *p, int flow)
{
	if (*p->at == '"' || *p->at == '\'')
		return parse_quoted(p);
	return parse_plain(p, NOFOLD, flow);
}

static char *word(struct parser *p)
{
	struct bytes b = {0};

	put(&b, *p->at++);
	while (!is_break(*p->at) && !is_blank(*p->at) && !strchr(",[]{}", *p->at))
		put(&b, *p->at++);
	return b.text;
}

static struct node *alias(struct parser *p)
{
	char *name = word(p);

	for (int n = 0; n < p->anchored; n++)
		if (!strcmp(p->anchors[n].name + 1, name + 1))
			return p->anchors[n].node;
	return fail(p, "an alias names no anchor");
}

/* Reads tags and anchors before a value. Returns the index for the anchor, or -1. */
static int properties(struct parser *p, int *binary)
{
	int slot = -1;

	*binary = 0;
	for (skip_blanks(p); *p->at == '!' || *p->at == '&'; skip_blanks(p)) {
		char *name = word(p);
		if (*name == '!')
			*binary = !strcmp(name, "!!binary");
		else if (p->anchored < NAMES)
			p->anchors[slot = p->anchored++].name = name;
	}
	if (slot >= 0)
		p->anchors[slot].node = &nothing;
	return slot;
}

static struct node *finished(struct parser *p, struct node *node, int slot, int binary)
{
	if (binary && node->kind == SCALAR) {
		node->text = base64_decode(node->text, &node->length);
		node->plain = 0;
	}
	if (slot >= 0)
		p->anchors[slot].node = node;
	return node;
}

/* What follows "key:" or "- ". parent: the column of that key or dash. */
static struct node *parse_value(struct parser *p, int parent, int after_dash)
{
	int binary, slot = properties(p, &binary), dash;
	struct node *node;

	if (*p->at == '*') {
		node = alias(p);
	} else if (*p->at == '|' || *p->at == '>') {
		node = parse_literal(p, parent);
	} else if (is_break(*p->at) || *p->at == '#') {
		skip_lines(p);
		/* A mapping's sequence may begin at the column of its key. */
		dash = *p->at == '-' && (is_blank(p->at[1]) || is_break(p->at[1]));
		node = parse_block(p, !after_dash && dash ? parent : parent + 1, parent);
	} else if (after_dash) {
		node = parse_block(p, 0, parent);
	} else if (*p->at == '"' || *p->at == '\'') {
		node = parse_quoted(p);
	} else if (*p->at == '[' || *p->at == '{') {
		node = parse_flow(p);
	} else {
		node = parse_plain(p, parent, 0);
	}
	return finished(p, node, slot, binary);
}

static struct node *parse_sequence(struct parser *p, int at)
{
	struct node *node = new_node(SEQUENCE);

	do {
		p->at++;
		add(node, &nothing, parse_value(p, at, 1));
		skip_lines(p);
	} while (*p->at == '-' && (is_blank(p->at[1]) || is_break(p->at[1])) && column(p) == at);
	return node;
}

static struct node *parse_mapping(struct parser *p, int at)
{
	struct node *node = new_node(MAPPING), *key;

	do {
		key = parse_key(p, 0);
		skip_blanks(p);
		p->at++;
		add(node, key, parse_value(p, at, 0));
		skip_lines(p);
	} while (*p->at && column(p) == at && !ends_document(p->at) && is_key(p));
	return node;
}

static struct node *parse_block(struct parser *p, int least, int parent)
{
	int at = column(p), binary, slot;

	if (!*p->at || at < least || (at == 0 && ends_document(p->at)))
		return &nothing;
	if (*p->at == '-' && (is_blank(p->at[1]) || is_break(p->at[1])))
		return parse_sequence(p, at);
	if (strchr("!&*", *p->at)) {
		slot = properties(p, &binary);
		if (*p->at == '*')
			return alias(p);
		if (*p->at == '|' || *p->at == '>')
			return finished(p, parse_literal(p, parent), slot, binary);
		skip_lines(p);
		return finished(p, parse_block(p, least, parent), slot, binary);
	}
	if (*p->at == '[' || *p->at == '{')
		return parse_flow(p);
	if (is_key(p))
		return parse_mapping(p, at);
	if (*p->at == '|' || *p->at == '>')
		return parse_literal(p, parent);
	if (*p->at == '"' || *p->at == '\'')
		return parse_quoted(p);
	return parse_plain(p, parent, 0);
}

static struct node *parse_flow_value(struct parser *p)
{
	int binary, slot;
	struct node *node;

	skip_lines(p);
	slot = properties(p, &binary);
	skip_lines(p);
	if (*p->at == '*')
		node = alias(p);
	else if (*p->at == '[' || *p->at == '{')
		node = parse_flow(p);
	else if (*p->at == '"' || *p->at == '\'')
		node = parse_quoted(p);
	else
		node = parse_plain(p, -1, 1);
	return finished(p, node, slot, binary);
}

static struct node *parse_flow(struct parser *p)
{
	int mapping = *p->at++ == '{', end = mapping ? '}' : ']';
	struct node *node = new_node(mapping ? MAPPING : SEQUENCE), *key, *value;

	for (skip_lines(p); *p->at && *p->at != end; skip_lines(p)) {
		const char *before = p->at;
		key = parse_flow_value(p);
		value = &nothing;
		skip_lines(p);
		if (mapping && *p->at == ':') {
			p->at++;
			value = parse_flow_value(p);
			skip_lines(p);
		}
		if (mapping)
			add(node, key, value);
		else
			add(node, &nothing, key);
		if (*p->at == ',')
			p->at++;
		else if (*p->at != end || p->at == before)
			return fail(p, "a list or a map in brackets goes wrong here"), node;
	}
	if (!*p->at)
		return fail(p, "a bracket is not closed"), node;
	p->at++;
	return node;
}

struct node *yaml_read(const char *name, const char *text)
{
	struct parser p = {.name = name, .start = text, .at = text};
	struct node *node;

	if (!strncmp(text, "\xef\xbb\xbf", 3))
		p.start = p.at = text + 3;
	skip_lines(&p);
	if (ends_document(p.at) && *p.at == '-')
		p.at += 3;
	skip_lines(&p);
	node = parse_block(&p, 0, -1);
	skip_lines(&p);
	if (*p.at && !ends_document(p.at))
		fail(&p, "this does not belong to what stands before it");
	return node;
}

const struct node *yaml_get(const struct node *mapping, const char *key)
{
	if (mapping->kind == MAPPING)
		for (size_t n = 0; n < mapping->count; n++)
			if (!strcmp(mapping->keys[n]->text, key))
				return mapping->values[n];
	return &nothing;
}

char *base64_decode(const char *text, size_t *length)
{
	static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
	struct bytes b = {0};
	unsigned long bits = 0;
	int have = 0;

	put(&b, 0);
	b.length = 0;
	for (; *text && *text != '='; text++) {
		const char *digit = strchr(digits, *text);
		if (!digit) {
			if (strchr(" \t\r\n", *text))
				continue;
			break;
		}
		bits = bits << 6 | (unsigned long)(digit - digits);
		have += 6;
		if (have >= 8)
			put(&b, (int)(bits >> (have -= 8) & 255));
	}
	*length = b.length;
	return b.text;
}
