/* Attention of a packed step over the block pool.
 *
 * A row's bits depend on the row's tokens alone: not on the batch, the chunks it was prefilled in, the threads
 * or the blocks it lies in. For each query there is one order of operations: its keys in blocks of 64 from the
 * first it sees on, a running softmax (best score, sum of weights, weighted sum of values) brought up to date
 * after each block. Queries that stand together in registers never meet in an operation.
 *
 * Everything is made of 32-bit words: one float32, or a pair of bfloat16. So one body serves both.
 *
 *   keys of a block    [kv head][64/16 panels][key words][16 keys]     word w of a key: its dims w, or 2w and 2w+1
 *   values of a block  [kv head][64 keys, or 32 pairs][value lanes]    a word: one dim of a key, or of keys 2j and 2j+1
 *
 * Key words are padded with zeros to whole pairs, value lanes to a multiple of 16 with anything (never read out).
 * Keys past a row's length may be what an earlier owner left, NaN included. A lane of a panel is one key, so such
 * scores are chosen away; values enter sums by their words, so the half of a pair that is not seen is cut to 0. */
#include "kernels.h"

#define BLOCK 64
#define PANELS (BLOCK / LANES)
#define TOGETHER 4 /* queries in registers at once */

typedef struct {
    uint32_t *words; /* the query vector */
    float *sum;      /* of values by weight, [value lanes] */
    float best, total;
    long from, to; /* the positions it sees */
} Query;

INLINE long key_words(const int storage, const Step *s) { return (s->key_dim + storage - 1) / storage; }
INLINE long value_lanes(const Step *s) { return (s->value_dim + LANES - 1) / LANES * LANES; }
INLINE long at_least(long a, long b) { return a > b ? a : b; }
INLINE long at_most(long a, long b) { return a < b ? a : b; }

/* The one product of this file. For m queries and w <= 2 vectors: sum[q][v] += factor[q][i] * (vector v of row i of
 * matrix), rows from .. to - 1 in order. The vectors of a row are `apart` words apart, the rows `stride` words. */
INLINE void multiply(const int storage, const int m, const int w, f16x sum[TOGETHER][2], const uint32_t *const factor[TOGETHER],
                     const uint32_t *matrix, long apart, long stride, long from, long to)
{
    for (long i = from; i < to; i++) {
        u16x row[2];
#pragma GCC unroll 2
        for (int v = 0; v < w; v++) row[v] = *(const u16x *)(matrix + i * stride + v * apart);
#pragma GCC unroll 4
        for (int q = 0; q < m; q++) {
            u16x one = splat_word(factor[q][i]);
#pragma GCC unroll 2
            for (int v = 0; v < w; v++) sum[q][v] = add_product(storage, sum[q][v], row[v], one);
        }
    }
}

/* Turns a query's scores of one block into weights, and brings its softmax up to date. */
INLINE void weigh(const int storage, const Step *s, const Attention *l, Query *q, f16x score[PANELS], long from, long to, uint32_t *weight)
{
    const i16x lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f16x best = splat(-INFINITY), sum = splat(0.0f);
    for (long p = from / LANES; p * LANES < to; p++) {
        f16x x = score[p] * splat(l->scaling);
        if (l->softcap > 0) x = tanh16(x / splat(l->softcap)) * splat(l->softcap);
        i16x position = lane + (i16x)splat_word(p * LANES);
        i16x seen = (position >= (i16x)splat_word(from)) & (position < (i16x)splat_word(to));
        score[p] = choose(seen, x, splat(-INFINITY));
        best = greater(score[p], best);
    }
    float top = GREATER(greatest_of(best), q->best);
    float base = top == -INFINITY ? 0.0f : top; /* all scores so far are -inf: their weights are 0, not NaN */
    if (top != q->best) {
        f16x shrink = exp16(splat(q->best - base));
        q->best = top;
        q->total *= shrink[0];
        for (long e = 0; e < value_lanes(s); e += LANES) *(f16x *)(q->sum + e) *= shrink;
    }
    for (long p = from / LANES; p * LANES < to; p++) {
        f16x x = rounded(storage, exp16(score[p] - splat(base)));
        store(storage, weight, p * LANES, x);
        sum += x;
    }
    q->total += sum_of(sum);
}

/* One query's share of words from .. to - 1 that it does not have in common with its neighbours. */
INLINE void multiply_alone(const int storage, const int w, f16x sum[2], const uint32_t *weight, const uint32_t *values, long lanes,
                           long from, long to)
{
    f16x own[TOGETHER][2] = {{sum[0], sum[1]}};
    const uint32_t *const factor[TOGETHER] = {weight};
    multiply(storage, 1, w, own, factor, values, LANES, lanes, from, to);
    for (int v = 0; v < w; v++) sum[v] = own[0][v];
}

/* A pair of keys of which only one is seen: `keep` is its half of the word. */
INLINE void multiply_half(const int w, f16x sum[2], const uint32_t *weight, const uint32_t *values, long lanes, long i, uint32_t keep)
{
    for (int v = 0; v < w; v++) {
        u16x row = *(const u16x *)(values + i * lanes + v * LANES) & splat_word(keep);
        sum[v] = add_product(BFLOAT16, sum[v], row, splat_word(weight[i] & keep));
    }
}

/* Adds to w vectors of m queries' sums their keys from[q] .. to[q] - 1 of a block, in order: each its own first words,
 * then the words that all see, then each its own last. */
INLINE void add_values(const int storage, const int m, const int w, Query *query, const uint32_t *const weight[TOGETHER],
                       const uint32_t *values, long lanes, long e, const long from[TOGETHER], const long to[TOGETHER])
{
    f16x sum[TOGETHER][2];
    long first[TOGETHER], end[TOGETHER], common = 0, common_end = BLOCK;
    values += e;
    for (int q = 0; q < m; q++) {
        first[q] = (from[q] + storage - 1) / storage;
        end[q] = to[q] / storage;
        common = at_least(common, first[q]);
        common_end = at_most(common_end, end[q]);
    }
    common_end = at_least(common, common_end);
#pragma GCC unroll 4
    for (int q = 0; q < m; q++) {
#pragma GCC unroll 2
        for (int v = 0; v < w; v++) sum[q][v] = *(const f16x *)(query[q].sum + e + v * LANES);
        if (from[q] % storage) multiply_half(w, sum[q], weight[q], values, lanes, from[q] / 2, 0xffff0000);
        multiply_alone(storage, w, sum[q], weight[q], values, lanes, first[q], at_most(common, end[q]));
    }
    multiply(storage, m, w, sum, weight, values, LANES, lanes, common, common_end);
#pragma GCC unroll 4
    for (int q = 0; q < m; q++) {
        multiply_alone(storage, w, sum[q], weight[q], values, lanes, at_least(common_end, first[q]), end[q]);
        if (to[q] % storage) multiply_half(w, sum[q], weight[q], values, lanes, to[q] / 2, 0x0000ffff);
#pragma GCC unroll 2
        for (int v = 0; v < w; v++) *(f16x *)(query[q].sum + e + v * LANES) = sum[q][v];
    }
}

/* Asks for memory that is read soon. Blocks lie anywhere, so the processor cannot guess where the next begins. */
INLINE void ask(const void *from, long bytes)
{
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + i, 0, 2);
}

/* m queries against one block that begins at position `start`. */
INLINE void attend_block(const int storage, const int m, const Step *s, const Attention *l, Query *query, const uint32_t *keys,
                         const uint32_t *values, long start)
{
    const long depth = key_words(storage, s), lanes = value_lanes(s);
    const uint32_t *words[TOGETHER], *weights[TOGETHER];
    f16x score[TOGETHER][PANELS], weight[TOGETHER][PANELS];
    long from[TOGETHER], to[TOGETHER], first = BLOCK, end = 0;
    for (int q = 0; q < m; q++) {
        from[q] = at_least(query[q].from - start, 0);
        to[q] = at_most(query[q].to - start, BLOCK);
        if (to[q] <= from[q]) from[q] = to[q] = 0; /* its window begins in a later block */
        else first = at_most(first, from[q]);
        end = at_least(end, to[q]);
        words[q] = query[q].words;
        weights[q] = (const uint32_t *)weight[q];
    }
    for (long p = first / (2 * LANES) * 2; p * LANES < end; p += 2) {
        f16x sum[TOGETHER][2] = {{splat(0.0f)}};
        multiply(storage, m, 2, sum, words, keys + p * depth * LANES, depth * LANES, LANES, 0, depth);
#pragma GCC unroll 4
        for (int q = 0; q < m; q++) score[q][p] = sum[q][0], score[q][p + 1] = sum[q][1];
    }
    for (int q = 0; q < m; q++)
        if (to[q] > from[q]) weigh(storage, s, l, query + q, score[q], from[q], to[q], (uint32_t *)weight[q]);
    long e = 0;
    for (; e + LANES < lanes; e += 2 * LANES) add_values(storage, m, 2, query, weights, values, lanes, e, from, to);
    if (e < lanes) add_values(storage, m, 1, query, weights, values, lanes, e, from, to);
}

/* A tile of tokens of one row against one kv head: its group of query heads for each token. */
INLINE void attend_tile(const int storage, const Step *s, const Attention *l, const int64_t *tile, long kv_head, char *scratch)
{
    const long group = s->heads / s->kv_heads, size = 4 / storage, depth = key_words(storage, s), lanes = value_lanes(s);
    const long count = tile[3] * group, position = tile[1];
    const int64_t *table = s->table + tile[0];
    float *sums = (float *)scratch;
    uint32_t *words = (uint32_t *)(sums + count * lanes);
    Query *query = (Query *)(words + count * ((depth + 1) & ~1L));
    for (long n = 0; n < count; n++) {
        long token = n / group, head = kv_head * group + n % group;
        Query *q = query + n;
        *q = (Query){words + n * depth, sums + n * lanes, -INFINITY, 0.0f, 0, position + token + 1};
        if (l->window > 0) q->from = at_least(0, q->to - l->window);
        q->words[depth - 1] = 0; /* pads an odd dimension */
        memcpy(q->words, l->query + (head * l->query_head + (tile[2] + token) * l->query_token) * size, s->key_dim * size);
        memset(q->sum, 0, lanes * sizeof(float));
        if (l->sinks) {
            q->best = load_end(storage, l->sinks, head, 1)[0];
            q->total = q->best == -INFINITY ? 0.0f : 1.0f;
        }
    }
    for (long block = query[0].from / BLOCK; block * BLOCK < query[count - 1].to; block++) {
        long place = table[block] * s->kv_heads + kv_head;
        const uint32_t *keys = l->keys + place * BLOCK * depth, *values = l->values + place * (BLOCK / storage) * lanes;
        const long left = at_most(query[count - 1].to - block * BLOCK, BLOCK);
        ask(values, (left + storage - 1) / storage * lanes * 4);
        if ((block + 1) * BLOCK < query[count - 1].to)
            ask(l->keys + (table[block + 1] * s->kv_heads + kv_head) * BLOCK * depth, BLOCK * depth * 4);
        for (long n = 0; n < count; n += TOGETHER) {
            switch (at_most(count - n, TOGETHER)) {
            case 1: attend_block(storage, 1, s, l, query + n, keys, values, block * BLOCK); break;
            case 2: attend_block(storage, 2, s, l, query + n, keys, values, block * BLOCK); break;
            case 3: attend_block(storage, 3, s, l, query + n, keys, values, block * BLOCK); break;
            default: attend_block(storage, 4, s, l, query + n, keys, values, block * BLOCK);
            }
        }
    }
    for (long n = 0; n < count; n++) {
        long token = tile[2] + n / group, head = kv_head * group + n % group;
        long at = (token * s->heads + head) * s->value_dim;
        f16x share = splat(1.0f / query[n].total);
        for (long e = 0; e < s->value_dim; e += LANES) {
            f16x x = *(f16x *)(query[n].sum + e) * share;
            if (e + LANES <= s->value_dim) store(storage, l->out, at + e, x);
            else store_end(storage, l->out, at + e, s->value_dim - e, x);
        }
    }
}

/* Puts the new keys and values of a tile's tokens into their blocks. */
INLINE void write_tile(const int storage, const Step *s, const Attention *l, const int64_t *tile, long kv_head)
{
    const long size = 4 / storage, depth = key_words(storage, s), lanes = value_lanes(s);
    for (long t = 0; t < tile[3]; t++) {
        long position = tile[1] + t, token = tile[2] + t, slot = position % BLOCK;
        long place = s->table[tile[0] + position / BLOCK] * s->kv_heads + kv_head;
        const char *key = l->key + (kv_head * l->key_head + token * l->key_token) * size;
        const char *value = l->value + (kv_head * l->value_head + token * l->value_token) * size;
        uint32_t *keys = l->keys + place * BLOCK * depth + slot / LANES * LANES * depth + slot % LANES;
        uint32_t *values = l->values + (place * BLOCK + slot) / storage * lanes;
        for (long i = 0; i < depth; i++) {
            uint32_t word = 0;
            memcpy(&word, key + i * 4, at_most(4, s->key_dim * size - i * 4));
            keys[i * LANES] = word;
        }
        if (storage == FLOAT32) memcpy(values, value, s->value_dim * size);
        else for (long e = 0; e < s->value_dim; e++) ((uint16_t *)values)[2 * e + slot % 2] = ((const uint16_t *)value)[e];
    }
}

static __attribute__((noinline)) void attend_float32(const Step *s, const Attention *l, const int64_t *tile, long kv_head, char *scratch)
{
    attend_tile(FLOAT32, s, l, tile, kv_head, scratch);
}
static __attribute__((noinline)) void attend_bfloat16(const Step *s, const Attention *l, const int64_t *tile, long kv_head, char *scratch)
{
    attend_tile(BFLOAT16, s, l, tile, kv_head, scratch);
}

/* Bytes that a thread needs for a tile of `queries` query vectors: their sums, their words, their states. */
int64_t attend_scratch_bytes(const Step *s, int64_t queries)
{
    int64_t each = value_lanes(s) * 4 + ((key_words(s->storage, s) + 1) & ~1L) * 4 + (int64_t)sizeof(Query);
    return (queries * each + 63) / 64 * 64;
}

void attend_share(const Step *s, const Attention *a)
{
    const long work = s->tiles * s->kv_heads;
    char *scratch = (char *)s->scratch + omp_get_thread_num() * s->scratch_bytes;
#pragma omp for schedule(static)
    for (long n = 0; n < work; n++) {
        const int64_t *tile = s->tile + n / s->kv_heads * 4;
        if (s->storage == FLOAT32) write_tile(FLOAT32, s, a, tile, n % s->kv_heads);
        else write_tile(BFLOAT16, s, a, tile, n % s->kv_heads);
    }
    /* The barrier between the loops: a tile reads what other tiles of its row have written. */
#pragma omp for schedule(dynamic, 1)
    for (long n = 0; n < work; n++) {
        const int64_t *tile = s->tile + n / s->kv_heads * 4;
        if (s->storage == FLOAT32) attend_float32(s, a, tile, n % s->kv_heads, scratch);
        else attend_bfloat16(s, a, tile, n % s->kv_heads, scratch);
    }
}

void attend(const Step *s, uint32_t *keys, uint32_t *values, const char *query, int64_t query_head, int64_t query_token, const char *key,
            int64_t key_head, int64_t key_token, const char *value, int64_t value_head, int64_t value_token, char *out, float scaling,
            float softcap, int64_t window, const void *sinks)
{
    const Attention a = {query,      key,        value,       out,  query_head, query_token, key_head, key_token,
                         value_head, value_token, keys, values, scaling, softcap, window, sinks};
#pragma omp parallel num_threads(s->threads) if (s->threads > 1 && s->tiles * s->kv_heads > 1)
    attend_share(s, &a);
}
