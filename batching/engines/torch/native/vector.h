/* Sixteen 32-bit lanes in the vector extensions of gcc and clang: one register of AVX-512, two of AVX2, four of NEON.
 *
 * Nothing here lets the bits of a lane depend on its place or its neighbours. Products are fused only where the
 * code says so (fma16), never as the compiler likes: it is called with -ffp-contract=off. */
#ifndef VECTOR_H
#define VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

typedef float f16x __attribute__((vector_size(64), may_alias));
typedef int32_t i16x __attribute__((vector_size(64), may_alias));
typedef uint32_t u16x __attribute__((vector_size(64), may_alias));
typedef uint16_t h16x __attribute__((vector_size(32), may_alias));

/* How values are stored. The number is also how many of them make a 32-bit word. */
enum storage { FLOAT32 = 1, BFLOAT16 = 2 };

INLINE f16x splat(float x) { return (f16x){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE u16x splat_word(uint32_t x) { return (u16x){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE f16x choose(i16x which, f16x yes, f16x no) { return (f16x)((which & (i16x)yes) | (~which & (i16x)no)); }
INLINE f16x greater(f16x a, f16x b) { return choose(a > b, a, b); }
#define GREATER(a, b) ((a) > (b) ? (a) : (b))

/* a * b + c, rounded once where the CPU can. */
INLINE f16x fma16(f16x a, f16x b, f16x c)
{
#if defined(__AVX512F__)
    return (f16x)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    union { f16x all; __m256 half[2]; } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; i++) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
    return z.all;
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
    union { f16x all; float32x4_t part[4]; } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 4; i++) z.part[i] = vfmaq_f32(z.part[i], x.part[i], y.part[i]);
    return z.all;
#else
    return a * b + c;
#endif
}

/* Lane i becomes lane i ^ n. */
#if defined(__clang__)
#define SWAP(x, n) __builtin_shufflevector(x, x, LANES_XOR(n))
#else
#define SWAP(x, n) __builtin_shuffle(x, (i16x){LANES_XOR(n)})
#endif
#define LANES_XOR(n) \
    0 ^ n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n, 8 ^ n, 9 ^ n, 10 ^ n, 11 ^ n, 12 ^ n, 13 ^ n, 14 ^ n, 15 ^ n

/* Over all lanes, always by the same tree: lanes 8 apart, then 4, 2, 1. */
INLINE float sum_of(f16x x)
{
    x += SWAP(x, 8);
    x += SWAP(x, 4);
    x += SWAP(x, 2);
    x += SWAP(x, 1);
    return x[0];
}
INLINE float greatest_of(f16x x)
{
    x = greater(x, SWAP(x, 8));
    x = greater(x, SWAP(x, 4));
    x = greater(x, SWAP(x, 2));
    x = greater(x, SWAP(x, 1));
    return x[0];
}

/* e^x within 2 units in the last place. 0 below -87, e^88 above 88; NaN stays NaN.
 * Cephes' polynomial on x - n ln 2, |.| <= ln 2 / 2, times 2^n put into the exponent bits. */
INLINE f16x exp16(f16x x)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: a sum with it holds the nearest integer in its low bits */
    i16x small = x < splat(-87.0f);
    x = choose(x > splat(88.0f), splat(88.0f), x);
    f16x shifted = fma16(x, splat(1.44269504f), splat(round));
    f16x n = shifted - splat(round);
    f16x r = fma16(n, splat(-0.693359375f), x);
    r = fma16(n, splat(2.12194440e-4f), r);
    f16x p = splat(1.9875691500e-4f);
    p = fma16(p, r, splat(1.3981999507e-3f));
    p = fma16(p, r, splat(8.3334519073e-3f));
    p = fma16(p, r, splat(4.1665795894e-2f));
    p = fma16(p, r, splat(1.6666665459e-1f));
    p = fma16(p, r, splat(5.0000001201e-1f));
    p = fma16(p, r * r, r + splat(1.0f));
    u16x power = ((u16x)shifted - (u16x)splat(round) + splat_word(127)) << 23;
    return choose(small, splat(0.0f), p * (f16x)power);
}

/* tanh x: its series near 0, where the closed form would lose digits. */
INLINE f16x tanh16(f16x x)
{
    f16x square = x * x;
    f16x near = fma16(square, splat(62.0f / 2835), splat(-17.0f / 315));
    near = fma16(near, square, splat(2.0f / 15));
    near = fma16(near, square, splat(-1.0f / 3));
    near = fma16(near * square, x, x);
    f16x far = splat(1.0f) - splat(2.0f) / (exp16(x + x) + splat(1.0f));
    return choose(square < splat(0.0625f), near, far);
}

/* Sixteen bfloat16 values: the upper halves of float32. Rounded to nearest, ties to even, as torch does. */
INLINE f16x widen(h16x x) { return (f16x)(__builtin_convertvector(x, u16x) << 16); }
INLINE h16x narrow(f16x x)
{
    u16x bits = (u16x)x;
    bits = (bits + splat_word(0x7fff) + ((bits >> 16) & splat_word(1))) >> 16;
    u16x nan = (u16x)(x != x);
    return __builtin_convertvector((nan & splat_word(0x7fc0)) | (~nan & bits), h16x);
}

/* Values i .. i + 15 of an array, as float32 and back. */
INLINE f16x load(const int storage, const void *array, long i)
{
    f16x x;
    h16x h;
    if (storage == FLOAT32) {
        memcpy(&x, (const float *)array + i, sizeof x);
        return x;
    }
    memcpy(&h, (const uint16_t *)array + i, sizeof h);
    return widen(h);
}
INLINE void store(const int storage, void *array, long i, f16x x)
{
    if (storage == FLOAT32) {
        memcpy((float *)array + i, &x, sizeof x);
    } else {
        h16x h = narrow(x);
        memcpy((uint16_t *)array + i, &h, sizeof h);
    }
}
/* The same for the last count < 16 values; the other lanes are zero, so an end is computed as the middle is. */
INLINE f16x load_end(const int storage, const void *array, long i, long count)
{
    uint32_t end[LANES] = {0};
    long size = storage == FLOAT32 ? 4 : 2;
    memcpy(end, (const char *)array + i * size, count * size);
    return load(storage, end, 0);
}
INLINE void store_end(const int storage, void *array, long i, long count, f16x x)
{
    uint32_t end[LANES];
    long size = storage == FLOAT32 ? 4 : 2;
    store(storage, end, 0, x);
    memcpy((char *)array + i * size, end, count * size);
}
/* What is left of x once it has been stored. */
INLINE f16x rounded(const int storage, f16x x) { return storage == FLOAT32 ? x : widen(narrow(x)); }


/* sum + a * b, word by word. A pair is added low half first; AVX512-BF16 does it in one instruction, in its own order. */
INLINE f16x add_product(const int storage, f16x sum, u16x a, u16x b)
{
    if (storage == FLOAT32) return fma16((f16x)a, (f16x)b, sum);
#if defined(__AVX512BF16__)
    return (f16x)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    const u16x high = splat_word(0xffff0000);
    sum = fma16((f16x)(a << 16), (f16x)(b << 16), sum);
    return fma16((f16x)(a & high), (f16x)(b & high), sum);
#endif
}

/* silu(gate) rounded, times up. */
INLINE f16x gated(const int storage, f16x gate, f16x up)
{
    return rounded(storage, gate / (splat(1.0f) + exp16(-gate))) * up;
}

#endif
