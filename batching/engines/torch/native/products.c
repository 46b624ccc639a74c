/* Products of activations with packed weights: out[r][n] = sum over k of x[r][k] * weight[n][k].
 *
 * With few rows a step takes as long as it takes to read the weights; so they lie in the order in which they are
 * read, 32 outputs wide, one run of addresses for each thread, asked for ahead of their use:
 *
 *   weights   [outputs/32 panels][words of the inputs][2][16 outputs]     word w: inputs w, or 2w and 2w+1 of an output
 *
 * Outputs are padded to 32, inputs to whole words (to 32 values for AMX), with zeros. A value is one running sum over
 * its words in their order, on AMX in tiles of 16 words: nothing hangs on the rows beside it, or on the threads. */
#include "kernels.h"

#define OUTPUTS 32 /* of a panel */
/* Rows in registers at once, times two vectors of 16 lanes. */
#if defined(__AVX512F__)
#define ROWS 12
#elif defined(__aarch64__)
#define ROWS 3
#else
#define ROWS 2
#endif
#define MOST 12
#define AHEAD 2048 /* bytes: how far before its use a weight is asked for */

/* What becomes of one row's 32 sums: rounded and stored; added to what is there; multiplied, where a panel holds 16 gates
 * and the 16 values that they gate: 16 outputs; or stored in float32 (WIDE). */
INLINE void finish_as(const int storage, const Product *p, const Operands *o, long row, long panel, f16x first, f16x second)
{
    const int stored = p->ending == WIDE ? FLOAT32 : storage;
    const long size = 4 / stored, width = p->ending == GATE ? LANES : OUTPUTS;
    const long at = panel * width, count = p->outputs - at < width ? p->outputs - at : width;
    char *out = o->out + row * o->out_stride * size;
    if (p->ending == GATE) {
        f16x y = gated(storage, rounded(storage, first), rounded(storage, second));
        if (count == LANES) store(storage, out, at, y);
        else store_end(storage, out, at, count, y);
        return;
    }
    f16x y[2] = {first, second};
    for (long v = 0; v * LANES < count; v++) {
        const long begin = at + v * LANES, here = count - v * LANES;
        const int whole = here >= LANES;
        if (p->bias) y[v] += whole ? load(storage, p->bias, begin) : load_end(storage, p->bias, begin, here);
        if (p->ending == ADD) y[v] = rounded(storage, y[v]) + (whole ? load(storage, out, begin) : load_end(storage, out, begin, here));
        if (whole) store(stored, out, begin, y[v]);
        else store_end(stored, out, begin, here, y[v]);
    }
}

static __attribute__((noinline)) void finish(const Product *p, const Operands *o, long row, long panel, f16x first, f16x second)
{
    if (p->storage == FLOAT32) finish_as(FLOAT32, p, o, row, panel, first, second);
    else finish_as(BFLOAT16, p, o, row, panel, first, second);
}

INLINE void ask(const uint32_t *weight, long lines)
{
    for (long i = 0; i < lines; i++) __builtin_prefetch((const char *)weight + AHEAD + i * 64, 0, 3);
}

/* m rows from `row` on, against one panel. */
INLINE void multiply_rows(const int storage, const int m, const Product *p, const Operands *o, long row, long panel)
{
    const long size = 4 / storage;
    const uint32_t *weight = p->weight + panel * p->words * OUTPUTS, *x[MOST];
    f16x sum[MOST][2];
#pragma GCC unroll 12
    for (int r = 0; r < m; r++) {
        x[r] = (const uint32_t *)(o->x + (row + r) * o->x_stride * size);
        sum[r][0] = sum[r][1] = splat(0.0f);
    }
    for (long w = 0; w < p->words; w++, weight += OUTPUTS) {
        const u16x first = *(const u16x *)weight, second = *(const u16x *)(weight + LANES);
        if (row == 0) ask(weight, 2);
#pragma GCC unroll 12
        for (int r = 0; r < m; r++) {
            u16x one = splat_word(x[r][w]);
            sum[r][0] = add_product(storage, sum[r][0], first, one);
            sum[r][1] = add_product(storage, sum[r][1], second, one);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < m; r++) finish(p, o, row + r, panel, sum[r][0], sum[r][1]);
}

#define CASE(m) \
    case m: multiply_rows(storage, m, p, o, row, panel); break;
INLINE void multiply_panel(const int storage, const Product *p, const Operands *o, long panel)
{
    long parts = (o->rows + ROWS - 1) / ROWS, most = (o->rows + parts - 1) / parts; /* parts of about one size */
    for (long row = 0; row < o->rows; row += most) {
        switch (o->rows - row < most ? o->rows - row : most) {
            CASE(1) CASE(2) CASE(3)
#if ROWS > 3
            CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
        }
    }
}
static __attribute__((noinline)) void multiply_float32(const Product *p, const Operands *o, long panel)
{
    multiply_panel(FLOAT32, p, o, panel);
}
static __attribute__((noinline)) void multiply_bfloat16(const Product *p, const Operands *o, long panel)
{
    multiply_panel(BFLOAT16, p, o, panel);
}

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#define TILE 16 /* rows of a tile; a row has 64 bytes */

/* Asks Linux for the tile registers. */
int64_t product_amx(void)
{
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

/* Of so many rows, how many are multiplied at once: up to 32, parts of about one size. */
static long together(long rows)
{
    const long parts = (rows + 2 * TILE - 1) / (2 * TILE);
    return (rows + parts - 1) / parts;
}

/* Tiles 0 to 3: sums of rows 0.. and 16.. by outputs 0.. and 16..; 4 and 5: those rows of x; 6 and 7: weights. */
static void configure(long of_rows)
{
    const long rows = together(of_rows);
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } __attribute__((aligned(64))) c = {0};
    const long high = rows < TILE ? rows : TILE, low = rows - high;
    const long counts[8] = {high, high, low, low, high, low, TILE, TILE};
    c.palette = 1;
    for (int t = 0; t < 8; t++) {
        c.rows[t] = counts[t] ? counts[t] : 1; /* a tile that is not used */
        c.bytes[t] = 64;
    }
    _tile_loadconfig(&c);
}

/* `rows` <= 32 rows from `row` on, as configured, against one panel; the first `done` of them are there already. */
INLINE void multiply_tiles(const int both, const Product *p, const Operands *o, long row, long rows, long done, long panel)
{
    float sum[4][TILE][LANES] __attribute__((aligned(64)));
    const uint32_t *weight = p->weight + panel * p->words * OUTPUTS;
    const char *x = o->x + row * o->x_stride * 2;
    const long stride = o->x_stride * 2;
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long w = 0; w < p->words; w += TILE, weight += TILE * OUTPUTS) {
        if (row == 0) ask(weight, TILE * OUTPUTS / 16);
        _tile_loadd(4, x + w * 4, stride);
        _tile_loadd(6, weight, 128);
        _tile_loadd(7, weight + LANES, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, x + TILE * stride + w * 4, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sum[0], 64);
    _tile_stored(1, sum[1], 64);
    if (both) {
        _tile_stored(2, sum[2], 64);
        _tile_stored(3, sum[3], 64);
    }
    for (long r = done; r < rows; r++) {
        float(*pair)[TILE][LANES] = sum + r / TILE * 2;
        finish(p, o, row + r, panel, *(f16x *)pair[0][r % TILE], *(f16x *)pair[1][r % TILE]);
    }
}

static void multiply_amx(const Product *p, const Operands *o, long panel)
{
    const long most = together(o->rows);
    if (most <= TILE) multiply_tiles(0, p, o, 0, most, 0, panel);
    else
        for (long done = 0; done < o->rows; done += most) { /* the last tiles begin early, to be full */
            long row = done + most <= o->rows ? done : o->rows - most;
            multiply_tiles(1, p, o, row, most, done - row, panel);
        }
}
#else
int64_t product_amx(void) { return 0; }
static void configure(long rows) { (void)rows; }
static void multiply_amx(const Product *p, const Operands *o, long panel) { (void)p, (void)o, (void)panel; }
#define _tile_release()
#endif

/* Whether this build multiplies values of a storage type well: with fewer registers than AVX-512 has oneDNN is faster. */
int64_t product_is_fast(int64_t storage)
{
#if defined(__AVX512F__) && defined(__AVX512BF16__)
    return storage == FLOAT32 || storage == BFLOAT16;
#elif defined(__AVX512F__)
    return storage == FLOAT32;
#else
    return (void)storage, 0;
#endif
}

INLINE long panels_of(const Product *p)
{
    const long width = p->ending == GATE ? LANES : OUTPUTS;
    return (p->outputs + width - 1) / width;
}

void product_share(const Product *p, const Operands *o)
{
    const long panels = panels_of(p);
    if (p->amx) configure(o->rows);
#pragma omp for schedule(static)
    for (long panel = 0; panel < panels; panel++) {
        if (p->amx) multiply_amx(p, o, panel);
        else if (p->storage == FLOAT32) multiply_float32(p, o, panel);
        else multiply_bfloat16(p, o, panel);
    }
    if (p->amx) _tile_release();
}

/* x [rows][inputs], out [rows][outputs]. */
void product(const Product *p, const char *x, char *out, int64_t inputs, int64_t rows)
{
    const Operands o = {x, out, rows, inputs, p->outputs};
    if (rows < 1) return;
#pragma omp parallel num_threads(p->threads) if (p->threads > 1)
    product_share(p, &o);
}

/* Weights [outputs][inputs] of `from` into panels. For GATE the first half of the outputs are gates, the second what they gate. */
void pack(const Product *p, const char *from, int64_t inputs, uint32_t *to)
{
    const long size = 4 / p->storage, width = p->ending == GATE ? LANES : OUTPUTS, panels = panels_of(p);
#pragma omp parallel for schedule(static) num_threads(p->threads)
    for (long n = 0; n < panels * OUTPUTS; n++) {
        const long panel = n / OUTPUTS, lane = n % OUTPUTS;
        const long mine = panel * width + (p->ending == GATE ? lane % LANES : lane), half = p->ending == GATE && lane >= LANES;
        for (long w = 0; w < p->words; w++) {
            uint32_t word = 0;
            const long have = (inputs * size - w * 4) < 4 ? inputs * size - w * 4 : 4;
            if (mine < p->outputs && have > 0) memcpy(&word, from + (mine + half * p->outputs) * inputs * size + w * 4, have);
            to[(panel * p->words + w) * OUTPUTS + lane] = word;
        }
    }
}
