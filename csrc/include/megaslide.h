/* The C interface of megaslide's native kernels.
 *
 * Raw pointers and sizes only: no torch, no Python, so one library serves every version of both.
 * Arrays are contiguous, row-major, fp32 where no other type is given, and never overlap an output;
 * empty ones may be NULL. Every function may be called from several threads at once. Functions that
 * can fail return a megaslide_status.
 */
#ifndef MEGASLIDE_H
#define MEGASLIDE_H

#include <stdint.h>

#if defined(_WIN32)
#define MEGASLIDE_API __declspec(dllexport)
#else
#define MEGASLIDE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised by every change that an older caller would misread. */
#define MEGASLIDE_ABI_VERSION 4

typedef enum megaslide_status {
  MEGASLIDE_OK = 0,
  MEGASLIDE_INVALID_ARGUMENT = 1,
  MEGASLIDE_OUT_OF_MEMORY = 2,
  MEGASLIDE_UNSUPPORTED = 3
} megaslide_status;

MEGASLIDE_API int32_t megaslide_abi_version(void);
MEGASLIDE_API const char *megaslide_status_string(int32_t status);

/* Kernels exist once per instruction set ("x86-64-v4-amx", which is "x86-64-v4-bf16" with matrix
 * tiles, "x86-64-v4-bf16", which is "x86-64-v4" with products of bf16, "x86-64-v4", "x86-64-v3",
 * "baseline"); the best that the processor has is taken. `use` makes the whole process take another
 * one (to test it on a newer machine), or answers MEGASLIDE_UNSUPPORTED. */
MEGASLIDE_API const char *megaslide_instruction_set(void);
MEGASLIDE_API int32_t megaslide_use_instruction_set(const char *name);

/* ---- 3D deformable slide attention ----------------------------------------------------------
 *
 * Every query of a volume T x H x W attends to the K = kt*kh*kw taps of its window, sampled
 * trilinearly, and to E extra keys, in one softmax. The definition is in the docstring of
 * megaslide.ops.deformable_attention and, in torch, in its reference.py.
 *
 *   q, k, v, out and their gradients  [batch, T, H, W, heads, head_dim]
 *   offsets, in voxels, (t, h, w)     [batch, T, H, W, groups, C], C = 3 (shift), 12 (affine: the
 *                                     shift, then a 3x3 matrix row-major), 3K (tap: K triples)
 *   extra_k, extra_v                  [batch, extra, heads, head_dim]
 *   lse                               [batch, T, H, W, heads] log of the softmax's denominator
 */
typedef enum megaslide_offset_kind {
  MEGASLIDE_OFFSETS_NONE = 0,
  MEGASLIDE_OFFSETS_SHIFT = 1,
  MEGASLIDE_OFFSETS_AFFINE = 2,
  MEGASLIDE_OFFSETS_TAP = 3
} megaslide_offset_kind;

/* Of q, k, v, the extra keys, out and the gradients of these; sums are fp32 whatever it is, and
 * rounded once. */
typedef enum megaslide_dtype { MEGASLIDE_FLOAT32 = 0, MEGASLIDE_BFLOAT16 = 1 } megaslide_dtype;

typedef struct megaslide_attention_shape {
  int64_t batch;
  int64_t size[3];   /* T, H, W */
  int64_t heads;
  int64_t head_dim;
  int64_t window[3]; /* taps per axis, at most size */
  int64_t groups;    /* of offsets; divides heads; head h uses group h / (heads / groups) */
  int64_t extra;     /* 0: extra_k and extra_v are not read */
  int32_t kind;      /* megaslide_offset_kind */
  int32_t dtype;     /* megaslide_dtype */
  int32_t threads;   /* at most this many, the calling one included; results do not depend on it */
  float scale;       /* factor on q.k */
} megaslide_attention_shape;

typedef struct megaslide_attention_inputs {
  const void *q, *k, *v;
  const float *offsets;            /* not read with MEGASLIDE_OFFSETS_NONE */
  const void *extra_k, *extra_v;
} megaslide_attention_inputs;

/* Of the inputs' type. */
typedef struct megaslide_attention_gradients {
  void *q, *k, *v;
  float *offsets;                  /* NULL: not wanted */
  void *extra_k, *extra_v;
} megaslide_attention_gradients;

/* Writes out, and lse in fp32. */
MEGASLIDE_API int32_t megaslide_attention_forward(const megaslide_attention_shape *shape,
                                                  const megaslide_attention_inputs *inputs,
                                                  void *out, float *lse);

/* Writes (does not add to) the gradients, from what the forward wrote and the gradient of out. */
MEGASLIDE_API int32_t megaslide_attention_backward(const megaslide_attention_shape *shape,
                                                   const megaslide_attention_inputs *inputs,
                                                   const void *out, const float *lse,
                                                   const void *grad_out,
                                                   const megaslide_attention_gradients *gradients);

/* ---- depthwise convolution ------------------------------------------------------------------
 *
 * 3x3x3 over a volume T x H x W, zero-padded, every channel by itself, channels last. The
 * definition, in torch, is megaslide.ops.depthwise_conv's reference.py.
 *
 *   x, out and their gradients  [batch, T, H, W, channels], fp32, or bf16 as its bits
 *   weight                      [27, channels], taps in the order (t, h, w)
 *   bias                        [channels] or NULL
 *
 * The gradient of x is the convolution of out's gradient with the taps in reverse order.
 */
#define MEGASLIDE_DEPTHWISE_SUMS 28

typedef struct megaslide_depthwise_shape {
  int64_t batch;
  int64_t size[3]; /* T, H, W */
  int64_t channels;
  int32_t x_is_bf16, out_is_bf16; /* gradients are of the same type */
  int32_t threads; /* at most this many, the calling one included; results do not depend on it */
} megaslide_depthwise_shape;

/* Writes out; sums in fp32, rounded once. */
MEGASLIDE_API int32_t megaslide_depthwise_conv(const megaslide_depthwise_shape *shape,
                                               const void *x, const float *weight,
                                               const float *bias, void *out);

/* Writes sums [MEGASLIDE_DEPTHWISE_SUMS, channels]: the weight's gradient, then the bias's. */
MEGASLIDE_API int32_t megaslide_depthwise_conv_sums(const megaslide_depthwise_shape *shape,
                                                    const void *x, const void *grad_out,
                                                    float *sums);

/* ---- AdamW ----------------------------------------------------------------------------------
 *
 * One update in place of a region of `count` elements, in torch.optim.AdamW's order of operations
 * and with its roundings, but for the square root, which is the nearest float here on every
 * processor; torch's own is not the same function everywhere. The definition, in torch, is
 * megaslide.ops.adamw's reference.py.
 *
 * The fp32 master is, by what is given:
 *   master                    itself
 *   master and weight         itself, with the bf16 weight rounded from it
 *   weight and residual       (weight << 16) + residual as bits
 * Moments are fp32, or 8-bit codes where both scales are given; codes come with one scale per
 * MEGASLIDE_ADAMW_BLOCK elements, and the scale of exp_avg_sq is that of its square root.
 * bf16 numbers are given as their bits.
 */
#define MEGASLIDE_ADAMW_BLOCK 128

typedef struct megaslide_adamw_state {
  int64_t count;
  float *master;              /* [count] or NULL */
  uint16_t *weight;           /* [count] bf16 or NULL */
  int16_t *residual;          /* [count] or NULL */
  void *exp_avg, *exp_avg_sq; /* [count] fp32, or uint8 codes */
  float *exp_avg_scale;       /* [ceil(count / MEGASLIDE_ADAMW_BLOCK)] or NULL */
  float *exp_avg_sq_scale;    /* the same */
  float *ema;                 /* [count] moving average of the master, or NULL */
} megaslide_adamw_state;

/* What is the same for all elements, computed in double and rounded once. */
typedef struct megaslide_adamw_coefficients {
  float grad_scale;       /* factor on the gradient */
  float decay;            /* 1 - lr * weight_decay */
  float exp_avg_weight;   /* 1 - beta1 */
  float beta2;
  float exp_avg_sq_weight;  /* 1 - beta2 */
  float root_correction;  /* sqrt(1 - beta2^step), a divisor */
  float eps;
  float step_size;        /* -lr / (1 - beta1^step) */
  float ema_weight;       /* 1 - ema_decay */
  uint32_t step;          /* keys the stochastic rounding of 8-bit moments */
} megaslide_adamw_coefficients;

/* `grad` is [count], bf16 where `grad_is_bf16` is not 0. At most `threads` threads, the calling one
 * included; fewer for a short region; results do not depend on it. */
MEGASLIDE_API int32_t megaslide_adamw(const megaslide_adamw_state *state, const void *grad,
                                      int32_t grad_is_bf16,
                                      const megaslide_adamw_coefficients *coefficients,
                                      int32_t threads);

/* ---- memory bandwidth -----------------------------------------------------------------------
 *
 * a = b + scalar * c over `count` floats: STREAM's triad, the yardstick of what memory can do. `a`
 * is written past the caches where the processor can, so 12 bytes move per element. */
MEGASLIDE_API int32_t megaslide_triad(float *a, const float *b, const float *c, float scalar,
                                      int64_t count, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif
