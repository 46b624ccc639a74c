/* Kernels over the rows of a matrix. A row's bits depend on the row alone. Strides in values; a row is contiguous. */
#include "kernels.h"

/* out = x / sqrt(mean(x^2) + eps), times weight, as the families of transformers do it:
 * llama: the quotient is rounded to the storage type, then multiplied; gemma (one_plus): float32 times 1 + weight. */
INLINE void norm_row(const int storage, const void *x, const void *weight, void *out, long width, float eps, int one_plus)
{
    f16x squares = splat(0.0f);
    long whole = width / LANES * LANES, rest = width - whole;
    for (long i = 0; i < width; i += LANES) {
        f16x v = i < whole ? load(storage, x, i) : load_end(storage, x, i, rest);
        squares = fma16(v, v, squares);
    }
    f16x scale = splat(1.0f / sqrtf(sum_of(squares) / (float)width + eps));
    for (long i = 0; i < width; i += LANES) {
        f16x v = i < whole ? load(storage, x, i) : load_end(storage, x, i, rest);
        f16x w = i < whole ? load(storage, weight, i) : load_end(storage, weight, i, rest);
        f16x y = one_plus ? v * scale * (splat(1.0f) + w) : rounded(storage, v * scale) * w;
        if (i < whole) store(storage, out, i, y);
        else store_end(storage, out, i, rest, y);
    }
}

void norm_share(int storage, const char *x, long stride, const char *weight, char *out, long rows, long width, float eps, int one_plus)
{
    const long size = 4 / storage;
#pragma omp for schedule(static)
    for (long r = 0; r < rows; r++) {
        const char *row = x + r * stride * size;
        char *to = out + r * width * size;
        if (storage == FLOAT32) norm_row(FLOAT32, row, weight, to, width, eps, one_plus);
        else norm_row(BFLOAT16, row, weight, to, width, eps, one_plus);
    }
}

/* The first `heads` heads of `dim` values of each row, each for itself, in place. */
void head_norm_share(int storage, char *x, long stride, const char *weight, long rows, long heads, long dim, float eps, int one_plus)
{
    const long size = 4 / storage;
#pragma omp for schedule(static)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            char *head = x + (r * stride + h * dim) * size;
            if (storage == FLOAT32) norm_row(FLOAT32, head, weight, head, dim, eps, one_plus);
            else norm_row(BFLOAT16, head, weight, head, dim, eps, one_plus);
        }
}

void rms_norm(int64_t storage, const char *x, int64_t stride, const char *weight, char *out, int64_t rows, int64_t width, float eps,
              int64_t one_plus, int64_t threads)
{
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * width > 8192)
    norm_share(storage, x, stride, weight, out, rows, width, eps, one_plus);
}

/* Rotary positions as transformers' apply_rotary_pos_emb: x * cos + rotate_half(x) * sin, each product rounded. */
INLINE void rotate_head(const int storage, void *x, const void *cosine, const void *sine, long half)
{
    long whole = half / LANES * LANES;
    for (long i = 0; i < half; i += LANES) {
        long rest = half - i;
#define PART(array, at) (i < whole ? load(storage, array, at) : load_end(storage, array, at, rest))
        f16x low = PART(x, i), high = PART(x, i + half);
        f16x first = rounded(storage, low * PART(cosine, i)) - rounded(storage, high * PART(sine, i));
        f16x second = rounded(storage, high * PART(cosine, i + half)) + rounded(storage, low * PART(sine, i + half));
#undef PART
        if (i < whole) store(storage, x, i, first), store(storage, x, i + half, second);
        else store_end(storage, x, i, rest, first), store_end(storage, x, i + half, rest, second);
    }
}

/* x: rows of `heads` heads of `dim` values, of which the first `rotary` turn; cosine, sine [rows][rotary]. */
void rotate_share(int storage, char *x, long stride, const char *cosine, const char *sine, long rows, long heads, long dim, long rotary)
{
    const long size = 4 / storage;
#pragma omp for schedule(static)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            char *head = x + (r * stride + h * dim) * size;
            const char *c = cosine + r * rotary * size, *s = sine + r * rotary * size;
            if (storage == FLOAT32) rotate_head(FLOAT32, head, c, s, rotary / 2);
            else rotate_head(BFLOAT16, head, c, s, rotary / 2);
        }
}

void rotate(int64_t storage, char *x, int64_t stride, const char *cosine, const char *sine, int64_t rows, int64_t heads, int64_t dim,
            int64_t rotary, int64_t threads)
{
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * heads * dim > 8192)
    rotate_share(storage, x, stride, cosine, sine, rows, heads, dim, rotary);
}

INLINE void silu_mul_row(const int storage, const void *gate, const void *up, void *out, long width)
{
    long whole = width / LANES * LANES, rest = width - whole;
    for (long i = 0; i < whole; i += LANES) store(storage, out, i, gated(storage, load(storage, gate, i), load(storage, up, i)));
    if (rest)
        store_end(storage, out, whole, rest, gated(storage, load_end(storage, gate, whole, rest), load_end(storage, up, whole, rest)));
}

void silu_mul(int64_t storage, const char *gate, int64_t gate_stride, const char *up, int64_t up_stride, char *out, int64_t rows,
              int64_t width, int64_t threads)
{
    const long size = 4 / storage;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * width > 8192)
    for (long r = 0; r < rows; r++) {
        const char *g = gate + r * gate_stride * size, *u = up + r * up_stride * size;
        if (storage == FLOAT32) silu_mul_row(FLOAT32, g, u, out + r * width * size, width);
        else silu_mul_row(BFLOAT16, g, u, out + r * width * size, width);
    }
}

/* The first place of the greatest value; -1 for a row that holds NaN or +inf. Each lane keeps the first place of its own. */
INLINE int64_t argmax_row(const int storage, const void *x, long width)
{
    const i16x lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f16x best = splat(-INFINITY);
    i16x place = lanes, bad = {0};
    long whole = width / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
        f16x v = load(storage, x, i);
        i16x more = v > best;
        best = choose(more, v, best);
        place = (more & (lanes + (i16x)splat_word(i))) | (~more & place);
        bad |= ~(v < splat(INFINITY)); /* neither NaN nor +inf is below it */
    }
    float greatest = whole ? greatest_of(best) : -INFINITY;
    int64_t first = whole ? width : 0;
    int32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) {
        any |= bad[lane];
        if (whole && best[lane] == greatest && place[lane] < first) first = place[lane];
    }
    for (long i = whole; i < width; i++) {
        float v = load_end(storage, x, i, 1)[0];
        any |= !(v < INFINITY);
        if (v > greatest) greatest = v, first = i;
    }
    return any ? -1 : first;
}

void argmax(int64_t storage, const char *x, int64_t stride, int64_t *out, int64_t rows, int64_t width, int64_t threads)
{
    const long size = 4 / storage;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
    for (long r = 0; r < rows; r++)
        out[r] = storage == FLOAT32 ? argmax_row(FLOAT32, x + r * stride * size, width) : argmax_row(BFLOAT16, x + r * stride * size, width);
}
