/* A decoder layer built as llama's, in one parallel region: x += out(attention(norm(x))), x += down(gate(norm(x))).
 * It is the kernels of the other files one after the other, on the same values as when each is called alone. */
#include "kernels.h"

#define ALIGNED 64

/* Mirrored in library.py. */
typedef struct {
    Product qkv, out, gate, down; /* out and down add to x */
    const char *input_norm, *post_norm, *query_norm, *key_norm; /* weights; the last two of heads, or NULL */
    float input_eps, post_eps, query_eps, key_eps;
    int64_t one_plus; /* of the norms, gemma's way */
    int64_t width, heads, kv_heads, head_dim, rotary;
    float scaling, softcap;
    int64_t window;
} DecoderLayer;

INLINE int64_t up(int64_t bytes) { return (bytes + ALIGNED - 1) / ALIGNED * ALIGNED; }

/* Bytes of room that a layer needs for `rows` rows. */
int64_t decoder_layer_bytes(const DecoderLayer *l, int64_t rows)
{
    const long size = 4 / l->qkv.storage;
    return up(rows * l->width * size) + up(rows * l->qkv.outputs * size) + up(rows * l->heads * l->head_dim * size) +
           up(rows * l->gate.outputs * size);
}

void decoder_layer(const DecoderLayer *l, const Step *s, uint32_t *keys, uint32_t *values, char *x, int64_t rows, const char *cosine,
                   const char *sine, char *room)
{
    const int storage = l->qkv.storage;
    const long size = 4 / storage, dim = l->head_dim, qkv_width = l->qkv.outputs, attended_width = l->heads * dim;
    char *normed = room, *qkv = normed + up(rows * l->width * size), *attended = qkv + up(rows * qkv_width * size);
    char *gated = attended + up(rows * attended_width * size);
    char *key = qkv + attended_width * size, *value = key + l->kv_heads * dim * size;
    const Operands to_qkv = {normed, qkv, rows, l->width, qkv_width}, from_attention = {attended, x, rows, attended_width, l->width};
    const Operands to_gate = {normed, gated, rows, l->width, l->gate.outputs}, from_gate = {gated, x, rows, l->gate.outputs, l->width};
    const Attention attention = {qkv, key,  value,     attended, dim,        qkv_width,  dim,       qkv_width,
                                 dim, qkv_width, keys, values,   l->scaling, l->softcap, l->window, NULL};
#pragma omp parallel num_threads(s->threads) if (s->threads > 1)
    {
        norm_share(storage, x, l->width, l->input_norm, normed, rows, l->width, l->input_eps, l->one_plus);
        product_share(&l->qkv, &to_qkv);
        if (l->query_norm) {
            head_norm_share(storage, qkv, qkv_width, l->query_norm, rows, l->heads, dim, l->query_eps, l->one_plus);
            head_norm_share(storage, key, qkv_width, l->key_norm, rows, l->kv_heads, dim, l->key_eps, l->one_plus);
        }
        rotate_share(storage, qkv, qkv_width, cosine, sine, rows, l->heads + l->kv_heads, dim, l->rotary);
        attend_share(s, &attention);
        product_share(&l->out, &from_attention);
        norm_share(storage, x, l->width, l->post_norm, normed, rows, l->width, l->post_eps, l->one_plus);
        product_share(&l->gate, &to_gate);
        product_share(&l->down, &from_gate);
    }
}
