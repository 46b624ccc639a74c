/* The best tokens of each row in exact order, (logit descending, id ascending), without sorting the vocabulary. */
#include "kernels.h"
#include <stdlib.h>

#define GROUP 64 /* values of which the greatest is kept */

/* Greater first, of equal ones the lower id: ascending as integers. */
INLINE uint64_t key_of(float value, long id)
{
    int32_t bits;
    value += 0.0f; /* -0 is 0 */
    memcpy(&bits, &value, 4);
    bits ^= (bits >> 31) & 0x7fffffff; /* orders as integers do */
    return (uint64_t)(uint32_t)(~bits ^ INT32_MIN) << 32 | (uint64_t)id;
}

static int compare_keys(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static int compare_floats(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

INLINE f16x load_some(const int storage, const void *x, long i, long width)
{
    f16x v = i + LANES <= width ? load(storage, x, i) : load_end(storage, x, i, width - i);
    const i16x lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return i + LANES <= width ? v : choose(lane < (i16x)splat_word(width - i), v, splat(-INFINITY));
}

/* The `count` best of a row: values and ids; of rows with fewer finite values, the first of the rest behind them. Gives
 * the sum of exp((x - greatest) / temperature) over the row; 0 for a temperature of 0. */
INLINE double shortlist_row(const int storage, const void *x, long width, long count, float temperature, float *value, int64_t *id,
                            float *greatest, uint64_t *key)
{
    const long groups = (width + GROUP - 1) / GROUP;
    f16x top = splat(-INFINITY);
    for (long g = 0; g < groups; g++) {
        f16x best = splat(-INFINITY);
        for (long i = g * GROUP; i < width && i < (g + 1) * GROUP; i += LANES) best = greater(load_some(storage, x, i, width), best);
        greatest[g] = greatest_of(best);
        top = greater(best, top);
    }
    const float most = greatest_of(top);
    double mass = 0.0;
    if (temperature > 0.0f && most > -INFINITY && most < INFINITY) {
        for (long g = 0; g < groups; g++) {
            f16x sum = splat(0.0f);
            for (long i = g * GROUP; i < width && i < (g + 1) * GROUP; i += LANES)
                sum += exp16((load_some(storage, x, i, width) - splat(most)) / splat(temperature));
            mass += sum_of(sum);
        }
    }
    /* The count best groups have a value each that is no less than the least of their greatest: so have the count best values. */
    float least = -INFINITY;
    if (count < groups) {
        float *sorted = (float *)(key + width);
        memcpy(sorted, greatest, groups * sizeof(float));
        qsort(sorted, groups, sizeof(float), compare_floats);
        least = sorted[count - 1];
    }
    long found = 0;
    for (long g = 0; g < groups; g++) {
        if (!(greatest[g] >= least) || greatest[g] == -INFINITY) continue;
        for (long i = g * GROUP; i < width && i < (g + 1) * GROUP; i += LANES) {
            f16x v = load_some(storage, x, i, width);
            i16x in = (v >= splat(least)) & (v > splat(-INFINITY));
            for (long lane = 0; lane < LANES; lane++)
                if (in[lane]) key[found++] = key_of(v[lane], i + lane);
        }
    }
    qsort(key, found, sizeof *key, compare_keys);
    for (long n = 0; n < count && n < found; n++) {
        id[n] = key[n] & 0xffffffff;
        value[n] = load_end(storage, x, id[n], 1)[0];
    }
    for (long n = found, i = 0; n < count; i++) {
        float v = i < width ? load_end(storage, x, i, 1)[0] : -INFINITY;
        if (v > -INFINITY) continue;
        id[n] = i < width ? i : 0;
        value[n++] = -INFINITY;
    }
    return mass;
}

/* Bytes of scratch for each thread. */
int64_t shortlist_bytes(int64_t width)
{
    return ((width + GROUP - 1) / GROUP * 2 * (int64_t)sizeof(float) + width * (int64_t)sizeof(uint64_t) + 63) / 64 * 64;
}

void shortlist(int64_t storage, const char *x, int64_t stride, int64_t rows, int64_t width, int64_t count, const float *temperature,
               float *value, int64_t *id, double *mass, char *scratch, int64_t threads)
{
    const long size = 4 / storage, groups = (width + GROUP - 1) / GROUP;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && rows > 1)
    for (long r = 0; r < rows; r++) {
        uint64_t *key = (uint64_t *)(scratch + omp_get_thread_num() * shortlist_bytes(width));
        float *greatest = (float *)(key + width) + groups;
        const char *row = x + r * stride * size;
        if (storage == FLOAT32)
            mass[r] = shortlist_row(FLOAT32, row, width, count, temperature[r], value + r * count, id + r * count, greatest, key);
        else mass[r] = shortlist_row(BFLOAT16, row, width, count, temperature[r], value + r * count, id + r * count, greatest, key);
    }
}
