/* A reader for JSON and for the YAML that common emitters write: block and flow collections, plain, quoted, literal
 * and folded scalars, anchors and aliases. Tags other than !!binary are ignored; complex keys are not supported. */
#ifndef YAML_H
#define YAML_H

#include <stddef.h>

enum kind { NONE, SCALAR, MAPPING, SEQUENCE };

struct node {
	enum kind kind;
	int plain;                      /* a scalar without quotes: may be a number or a boolean */
	char *text;                     /* a scalar's bytes, NUL-terminated as well */
	size_t length;
	struct node **keys, **values;   /* a sequence has values only */
	size_t count;
};

/* Never returns NULL. If the document is broken, prints an error and returns what was read so far. */
struct node *yaml_read(const char *name, const char *text);

/* The value under a key, or an empty node. */
const struct node *yaml_get(const struct node *mapping, const char *key);

/* Base64 to bytes; stops at the first invalid character. */
char *base64_decode(const char *text, size_t *length);

#endif
