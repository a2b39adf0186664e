// AdamW for one instruction set: every array read once and written once, group by group.
//
//   w = master * decay                          m = exp_avg + (g - exp_avg) * (1 - beta1)
//   v = exp_avg_sq * beta2 + (1 - beta2) g g    master = w - step_size * m / (sqrt(v) / c + eps)
//
// The bits are those of torch's operators: a product and a sum are one operation (`fused`) exactly
// where theirs are, hence this file is compiled without contraction (CMakeLists.txt).
#include <cstdint>

#include "adamw.h"
#include "vectors.h"

namespace megaslide {
namespace {

enum class Master { whole, rounded, split };  // megaslide.h: what the fp32 master is made of

typedef Vec<kLanes, uint16_t> Halves;

constexpr uint32_t kNaN = 0x7fc00000;

// ---- master and gradient ----------------------------------------------------------------------

MEGASLIDE_INLINE Bits widened(const uint16_t *from) {
  return __builtin_convertvector(load<kLanes>(from), Bits) << 16;
}

MEGASLIDE_INLINE Floats load_gradient(const float *from) { return load<kLanes>(from); }

MEGASLIDE_INLINE Floats load_gradient(const uint16_t *from) { return (Floats)widened(from); }

template <Master kMaster>
MEGASLIDE_INLINE Floats load_master(const megaslide_adamw_state &at, int64_t i) {
  if constexpr (kMaster != Master::split) {
    return load<kLanes>(at.master + i);
  } else {
    typedef Vec<kLanes, int32_t> Signed;
    const Signed low = __builtin_convertvector(load<kLanes>(at.residual + i), Signed);
    return (Floats)(widened(at.weight + i) + (Bits)low);
  }
}

template <Master kMaster>
MEGASLIDE_INLINE void store_master(const megaslide_adamw_state &at, int64_t i, Floats master) {
  if constexpr (kMaster != Master::split) store<kLanes>(at.master + i, master);
  if constexpr (kMaster != Master::whole) {
    // Rounding up could turn a NaN's bits into those of a number.
    const Bits bits = master == master ? (Bits)master : Bits{} + kNaN;
    const Halves high = __builtin_convertvector((bits + 0x8000u) >> 16, Halves);
    store<kLanes>(at.weight + i, high);
    if constexpr (kMaster == Master::split) {
      // bits - (high << 16), whose upper half is the sign alone.
      store<kLanes>(reinterpret_cast<uint16_t *>(at.residual) + i,
                    __builtin_convertvector(bits, Halves));
    }
  }
}

// ---- one group --------------------------------------------------------------------------------

// torch's lerp: from the nearer end, so that a weight of 1 gives `to` itself.
MEGASLIDE_INLINE Floats lerp(Floats from, Floats to, float weight) {
  const bool near = weight < 0.5f;
  return fused(broadcast(near ? weight : weight - 1.0f), to - from, near ? from : to);
}

MEGASLIDE_INLINE Floats root_of(Floats x, [[maybe_unused]] int32_t root) {
#if defined(MEGASLIDE_NEWTON_ROOT)
  if (root == MEGASLIDE_ROOT_NEWTON) return newton_root(x);
#endif
  return square_root(x);
}

// Moments go in and out by reference; the result is the root of exp_avg_sq.
template <Master kMaster, bool kEma>
MEGASLIDE_INLINE Floats update_lanes(const megaslide_adamw_state &at,
                                     const megaslide_adamw_coefficients &by, int64_t i,
                                     Floats grad, Floats &exp_avg, Floats &exp_avg_sq) {
  grad *= by.grad_scale;
  Floats master = load_master<kMaster>(at, i) * by.decay;
  exp_avg = lerp(exp_avg, grad, by.exp_avg_weight);
  exp_avg_sq = fused(grad * by.exp_avg_sq_weight, grad, exp_avg_sq * by.beta2);
  const Floats root = root_of(exp_avg_sq, by.root);
  master += exp_avg * by.step_size / (root / by.root_correction + by.eps);
  store_master<kMaster>(at, i, master);
  if constexpr (kEma) {
    store<kLanes>(at.ema + i, lerp(load<kLanes>(at.ema + i), master, by.ema_weight));
  }
  return root;
}

template <Master kMaster, bool kEma, typename Grad>
MEGASLIDE_INLINE void update_group(const megaslide_adamw_state &at, const Grad *grad,
                                   const megaslide_adamw_coefficients &by, int64_t first) {
  auto *exp_avgs = static_cast<float *>(at.exp_avg);
  auto *exp_avg_sqs = static_cast<float *>(at.exp_avg_sq);
  for (int64_t i = first; i < first + kGroup; i += kLanes) {
    Floats exp_avg = load<kLanes>(exp_avgs + i), exp_avg_sq = load<kLanes>(exp_avg_sqs + i);
    update_lanes<kMaster, kEma>(at, by, i, load_gradient(grad + i), exp_avg, exp_avg_sq);
    store<kLanes>(exp_avgs + i, exp_avg);
    store<kLanes>(exp_avg_sqs + i, exp_avg_sq);
  }
}

// ---- a region ---------------------------------------------------------------------------------

// The last, incomplete group of an array (null: not there) as a complete one, zero behind the end.
template <typename T>
struct Completed {
  T data[kGroup] = {};
  T *origin;
  int64_t count;

  Completed(T *from, int64_t elements) : origin(from), count(elements) {
    if (origin) __builtin_memcpy(data, origin, count * sizeof(T));
  }
  void write_back() const {
    if (origin) __builtin_memcpy(origin, data, count * sizeof(T));
  }
  T *given() { return origin ? data : nullptr; }
};

template <typename T>
T *moved(T *pointer, int64_t by) {
  return pointer ? pointer + by : nullptr;
}

template <Master kMaster, bool kEma, typename Grad>
void update_last(const megaslide_adamw_state &at, const Grad *grad,
                 const megaslide_adamw_coefficients &by, int64_t first, int64_t count) {
  Completed master(moved(at.master, first), count), ema(moved(at.ema, first), count);
  Completed weight(moved(at.weight, first), count);
  Completed residual(moved(at.residual, first), count);
  Completed exp_avg(static_cast<float *>(at.exp_avg) + first, count);
  Completed exp_avg_sq(static_cast<float *>(at.exp_avg_sq) + first, count);
  Grad gradient[kGroup] = {};
  __builtin_memcpy(gradient, grad + first, count * sizeof(Grad));
  const megaslide_adamw_state completed{
      kGroup,       master.given(), weight.given(), residual.given(), exp_avg.data,
      exp_avg_sq.data, nullptr,        nullptr,        ema.given()};
  update_group<kMaster, kEma>(completed, gradient, by, 0);
  master.write_back();
  weight.write_back();
  residual.write_back();
  exp_avg.write_back();
  exp_avg_sq.write_back();
  ema.write_back();
}

template <Master kMaster, bool kEma, typename Grad>
void update_range(const AdamWArrays &arrays, const megaslide_adamw_coefficients &by, int64_t first,
                  int64_t last) {
  const auto *grad = static_cast<const Grad *>(arrays.grad);
  for (; last - first >= kGroup; first += kGroup) {
    update_group<kMaster, kEma>(arrays.state, grad, by, first);
  }
  if (first < last) update_last<kMaster, kEma>(arrays.state, grad, by, first, last - first);
}

void square_root_of_all(int32_t root, const float *from, float *to, int64_t count) {
  for (int64_t i = 0; i < count; i += kGroup) {
    const int64_t some = count - i < kGroup ? count - i : kGroup;
    float x[kGroup] = {};
    __builtin_memcpy(x, from + i, some * sizeof(float));
    for (int64_t j = 0; j < kGroup; j += kLanes) {
      store<kLanes>(x + j, root_of(load<kLanes>(x + j), root));
    }
    __builtin_memcpy(to + i, x, some * sizeof(float));
  }
}

// ---- which of them ----------------------------------------------------------------------------

template <Master kMaster, bool kEma>
void update_by_grad(const AdamWArrays &arrays, const megaslide_adamw_coefficients &by,
                    int64_t first, int64_t last) {
  const auto update = arrays.grad_is_bf16 ? update_range<kMaster, kEma, uint16_t>
                                          : update_range<kMaster, kEma, float>;
  update(arrays, by, first, last);
}

template <Master kMaster>
void update_by_ema(const AdamWArrays &arrays, const megaslide_adamw_coefficients &by,
                   int64_t first, int64_t last) {
  const auto update =
      arrays.state.ema ? update_by_grad<kMaster, true> : update_by_grad<kMaster, false>;
  update(arrays, by, first, last);
}

void update(const AdamWArrays &arrays, const megaslide_adamw_coefficients &by, int64_t first,
            int64_t last) {
  const megaslide_adamw_state &at = arrays.state;
  const auto update = !at.master  ? update_by_ema<Master::split>
                      : at.weight ? update_by_ema<Master::rounded>
                                  : update_by_ema<Master::whole>;
  update(arrays, by, first, last);
}

}  // namespace

namespace MEGASLIDE_ISA {
extern const AdamWKernels adamw_kernels;
#if defined(MEGASLIDE_NEWTON_ROOT)
const AdamWKernels adamw_kernels = {update, true, square_root_of_all};
#else
const AdamWKernels adamw_kernels = {update, false, square_root_of_all};
#endif
}  // namespace MEGASLIDE_ISA

}  // namespace megaslide
