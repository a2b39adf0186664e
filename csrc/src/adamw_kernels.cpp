// AdamW for one instruction set: every array read once and written once, group by group.
//
//   w = master * decay                          m = exp_avg + (g - exp_avg) * (1 - beta1)
//   v = exp_avg_sq * beta2 + (1 - beta2) g g    master = w - step_size * m / (sqrt(v) / c + eps)
//
// The bits are those of torch's operators: a product and a sum are one operation (`fused`) exactly
// where theirs are, hence this file is compiled without contraction (CMakeLists.txt).
#include <cstdint>

#include "adamw.h"
#include "adamw_codes.h"
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

struct Fp32Moments {
  using Stored = float;

  template <Master kMaster, bool kEma, typename Grad>
  static MEGASLIDE_INLINE void update_group(const megaslide_adamw_state &at, const Grad *grad,
                                            const megaslide_adamw_coefficients &by, int64_t first,
                                            uint32_t) {
    auto *exp_avgs = static_cast<float *>(at.exp_avg);
    auto *exp_avg_sqs = static_cast<float *>(at.exp_avg_sq);
    for (int64_t i = first; i < first + kGroup; i += kLanes) {
      Floats exp_avg = load<kLanes>(exp_avgs + i), exp_avg_sq = load<kLanes>(exp_avg_sqs + i);
      update_lanes<kMaster, kEma>(at, by, i, load_gradient(grad + i), exp_avg, exp_avg_sq);
      store<kLanes>(exp_avgs + i, exp_avg);
      store<kLanes>(exp_avg_sqs + i, exp_avg_sq);
    }
  }
};

// Two passes over a group, because a code needs the largest number of its block.
struct CodedMoments {
  using Stored = uint8_t;

  template <Master kMaster, bool kEma, typename Grad>
  static MEGASLIDE_INLINE void update_group(const megaslide_adamw_state &at, const Grad *grad,
                                            const megaslide_adamw_coefficients &by, int64_t first,
                                            uint32_t element) {
    auto *exp_avg_codes = static_cast<uint8_t *>(at.exp_avg) + first;
    auto *root_codes = static_cast<uint8_t *>(at.exp_avg_sq) + first;
    float &exp_avg_scale = at.exp_avg_scale[first / kGroup];
    float &root_scale = at.exp_avg_sq_scale[first / kGroup];
    Floats exp_avg[kGroup / kLanes], root[kGroup / kLanes];
    Bits exp_avg_most = {}, root_most = {};
    for (int64_t j = 0; j < kGroup / kLanes; ++j) {
      const int64_t i = j * kLanes;
      const Floats old_root = decoded<kRootCode>(root_codes + i, root_scale);
      Floats exp_avg_sq = old_root * old_root;
      exp_avg[j] = decoded<kExpAvgCode>(exp_avg_codes + i, exp_avg_scale);
      root[j] = update_lanes<kMaster, kEma>(at, by, first + i, load_gradient(grad + first + i),
                                            exp_avg[j], exp_avg_sq);
      exp_avg_most = larger(exp_avg_most, magnitude_bits(exp_avg[j]));
      root_most = larger(root_most, magnitude_bits(root[j]));
    }
    exp_avg_scale = largest_of(exp_avg_most);
    root_scale = largest_of(root_most);
    const float exp_avg_inverse = inverse_of<kExpAvgCode>(exp_avg_scale);
    const float root_inverse = inverse_of<kRootCode>(root_scale);
    const Bits key = mixed(Bits{} + by.step);
    for (int64_t j = 0; j < kGroup / kLanes; ++j) {
      const int64_t i = j * kLanes;
      const Bits noise = noise_of(element + static_cast<uint32_t>(i), key);
      encode<kExpAvgCode>(exp_avg_codes + i, exp_avg[j], exp_avg_inverse, noise & 0xffffu);
      encode<kRootCode>(root_codes + i, root[j], root_inverse, noise >> kNoiseBits);
    }
  }
};

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

template <typename Moments, Master kMaster, bool kEma, typename Grad>
void update_last(const megaslide_adamw_state &at, const Grad *grad,
                 const megaslide_adamw_coefficients &by, int64_t first, int64_t count) {
  using Stored = typename Moments::Stored;
  Completed master(moved(at.master, first), count), ema(moved(at.ema, first), count);
  Completed weight(moved(at.weight, first), count);
  Completed residual(moved(at.residual, first), count);
  Completed exp_avg(static_cast<Stored *>(at.exp_avg) + first, count);
  Completed exp_avg_sq(static_cast<Stored *>(at.exp_avg_sq) + first, count);
  Grad gradient[kGroup] = {};
  __builtin_memcpy(gradient, grad + first, count * sizeof(Grad));
  const megaslide_adamw_state completed{kGroup,
                                        master.given(),
                                        weight.given(),
                                        residual.given(),
                                        exp_avg.data,
                                        exp_avg_sq.data,
                                        moved(at.exp_avg_scale, first / kGroup),
                                        moved(at.exp_avg_sq_scale, first / kGroup),
                                        ema.given()};
  Moments::template update_group<kMaster, kEma>(completed, gradient, by, 0,
                                                static_cast<uint32_t>(first));
  master.write_back();
  weight.write_back();
  residual.write_back();
  exp_avg.write_back();
  exp_avg_sq.write_back();
  ema.write_back();
}

template <typename Moments, Master kMaster, bool kEma, typename Grad>
void update_range(const AdamWArrays &arrays, const megaslide_adamw_coefficients &by, int64_t first,
                  int64_t last) {
  const auto *grad = static_cast<const Grad *>(arrays.grad);
  for (; last - first >= kGroup; first += kGroup) {
    Moments::template update_group<kMaster, kEma>(arrays.state, grad, by, first,
                                                  static_cast<uint32_t>(first));
  }
  if (first < last) {
    update_last<Moments, kMaster, kEma>(arrays.state, grad, by, first, last - first);
  }
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

using Update = void (*)(const AdamWArrays &, const megaslide_adamw_coefficients &, int64_t,
                        int64_t);

template <typename Moments, Master kMaster>
Update chosen_by_rest(const AdamWArrays &arrays) {
  if (arrays.state.ema) {
    return arrays.grad_is_bf16 ? update_range<Moments, kMaster, true, uint16_t>
                               : update_range<Moments, kMaster, true, float>;
  }
  return arrays.grad_is_bf16 ? update_range<Moments, kMaster, false, uint16_t>
                             : update_range<Moments, kMaster, false, float>;
}

template <typename Moments>
Update chosen_by_master(const AdamWArrays &arrays) {
  if (!arrays.state.master) return chosen_by_rest<Moments, Master::split>(arrays);
  return arrays.state.weight ? chosen_by_rest<Moments, Master::rounded>(arrays)
                             : chosen_by_rest<Moments, Master::whole>(arrays);
}

void update(const AdamWArrays &arrays, const megaslide_adamw_coefficients &by, int64_t first,
            int64_t last) {
  const Update chosen = arrays.state.exp_avg_scale ? chosen_by_master<CodedMoments>(arrays)
                                                   : chosen_by_master<Fp32Moments>(arrays);
  chosen(arrays, by, first, last);
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
