/* What the kernels share: the structures that library.py mirrors, and each kernel as a share of work.
 *
 * A share is called by all threads of a parallel region at once; they split its loop among them and leave it together.
 * So a kernel can run alone, in a region of its own, or as one of several in one region (layer.c). */
#ifndef KERNELS_H
#define KERNELS_H

#include "vector.h"
#include <omp.h>

#define HIDDEN __attribute__((visibility("hidden")))

/* -- products.c */

enum ending { STORE, ADD, GATE, WIDE };

/* A linear layer. */
typedef struct {
    int64_t storage, ending, threads, amx;
    int64_t outputs, words; /* real outputs; words of a row of weights */
    const void *bias;       /* [outputs] or NULL */
    const uint32_t *weight;
} Product;

/* One call. Strides in values. */
typedef struct {
    const char *x;
    char *out;
    int64_t rows, x_stride, out_stride;
} Operands;

HIDDEN void product_share(const Product *p, const Operands *o);

/* -- rows.c; rows are `stride` values apart, results without gaps */

HIDDEN void norm_share(int storage, const char *x, long stride, const char *weight, char *out, long rows, long width, float eps, int one_plus);
HIDDEN void head_norm_share(int storage, char *x, long stride, const char *weight, long rows, long heads, long dim, float eps, int one_plus);
HIDDEN void rotate_share(int storage, char *x, long stride, const char *cosine, const char *sine, long rows, long heads, long dim, long rotary);

/* -- attention.c */

/* The attention of one step. */
typedef struct {
    int64_t storage, heads, kv_heads, key_dim, value_dim;
    int64_t threads, scratch_bytes; /* for each thread */
    void *scratch;
    int64_t tiles;
    const int64_t *tile;  /* [tiles][4]: where the row's table begins, position, packed index and count of the tokens */
    const int64_t *table; /* the tables of all rows, one after the other */
} Step;

/* One call of it. Strides in values, from head to head and from token to token. */
typedef struct {
    const char *query, *key, *value;
    char *out; /* [tokens][heads][value_dim] */
    int64_t query_head, query_token, key_head, key_token, value_head, value_token;
    uint32_t *keys, *values; /* this layer's blocks */
    float scaling, softcap;  /* softcap 0: none */
    int64_t window;          /* 0: all */
    const void *sinks;       /* [heads] or NULL */
} Attention;

HIDDEN void attend_share(const Step *s, const Attention *a);

#endif
