// AdamW for one instruction set: every array read once and written once, group by group.
//
//   w = master * decay                          m = exp_avg + (g - exp_avg) * (1 - beta1)
//   v = exp_avg_sq * beta2 + (1 - beta2) g g    master = w + step_size * m / (sqrt(v) / c + eps)
//
// The bits are those of torch's operators: a product and a sum are one operation (`fused`) exactly
// where theirs are, hence this file is compiled without contraction (CMakeLists.txt).
//
// Plain loads and stores: what is stored has just been loaded, so that stores past the caches only
// throw lines out (6 % slower), and the processor sees these streams coming without being told.
#include <cstdint>

#include "adamw.h"
#include "adamw_codes.h"
#include "vectors.h"

namespace megaslide {
namespace {

enum class Master { whole, rounded, split };  // megaslide.h: what the fp32 master is made of

constexpr uint32_t kNaN = 0x7fc00000;

// ---- master and gradient ----------------------------------------------------------------------

MEGASLIDE_INLINE Floats load_gradient(const float *from) { return load<kLanes>(from); }

MEGASLIDE_INLINE Floats load_gradient(const uint16_t *from) {
  return (Floats)(widened(from) << 16);
}

template <Master kMaster>
MEGASLIDE_INLINE Floats load_master(const megaslide_adamw_state &at, int64_t i) {
  if constexpr (kMaster != Master::split) {
    return load<kLanes>(at.master + i);
  } else {
    return (Floats)((widened(at.weight + i) << 16) + widened(at.residual + i));
  }
}

template <Master kMaster>
MEGASLIDE_INLINE void store_master(const megaslide_adamw_state &at, int64_t i, Floats master) {
  if constexpr (kMaster != Master::split) store<kLanes>(at.master + i, master);
  if constexpr (kMaster != Master::whole) {
    // Rounding up could turn a NaN's bits into those of a number.
    const Bits bits = master == master ? (Bits)master : Bits{} + kNaN;
    store_narrow(at.weight + i, (bits + 0x8000u) >> 16);
    // The residual is bits - (high << 16), whose upper half is its sign alone.
    if constexpr (kMaster == Master::split) {
      store_narrow(reinterpret_cast<uint16_t *>(at.residual) + i, bits);
    }
  }
}

// ---- one group --------------------------------------------------------------------------------

// torch's lerp goes from the nearer end, so that a weight of 1 gives the far end itself.
struct Lerp {
  Floats weight;
  bool near;
  explicit Lerp(float by) : weight(broadcast(by < 0.5f ? by : by - 1.0f)), near(by < 0.5f) {}

  MEGASLIDE_INLINE Floats operator()(Floats from, Floats to) const {
    return fused(weight, to - from, near ? from : to);
  }
};

// The coefficients in registers: as locals no store can be taken to change them.
struct Numbers {
  Lerp exp_avg, ema;
  Floats grad_scale, decay, beta2, exp_avg_sq_weight, root_correction, eps, step_size;
  uint32_t noise_key;

  explicit Numbers(const megaslide_adamw_coefficients &by)
      : exp_avg(by.exp_avg_weight),
        ema(by.ema_weight),
        grad_scale(broadcast(by.grad_scale)),
        decay(broadcast(by.decay)),
        beta2(broadcast(by.beta2)),
        exp_avg_sq_weight(broadcast(by.exp_avg_sq_weight)),
        root_correction(broadcast(by.root_correction)),
        eps(broadcast(by.eps)),
        step_size(broadcast(by.step_size)),
        noise_key(noise_key_of(by.step)) {}
};

// Moments go in and out by reference; the result is the root of exp_avg_sq.
template <Master kMaster, bool kEma>
MEGASLIDE_INLINE Floats update_lanes(const megaslide_adamw_state &at, const Numbers &by, int64_t i,
                                     Floats grad, Floats &exp_avg, Floats &exp_avg_sq) {
  grad *= by.grad_scale;
  Floats master = load_master<kMaster>(at, i) * by.decay;
  exp_avg = by.exp_avg(exp_avg, grad);
  exp_avg_sq = fused(grad * by.exp_avg_sq_weight, grad, exp_avg_sq * by.beta2);
  const Floats root = square_root(exp_avg_sq);
  master += exp_avg * by.step_size / (root / by.root_correction + by.eps);
  store_master<kMaster>(at, i, master);
  if constexpr (kEma) store<kLanes>(at.ema + i, by.ema(load<kLanes>(at.ema + i), master));
  return root;
}

struct Fp32Moments {
  using Stored = float;

  template <Master kMaster, bool kEma, typename Grad>
  static MEGASLIDE_INLINE void update_group(const megaslide_adamw_state &at, const Grad *grad,
                                            const Numbers &by, int64_t first, uint32_t) {
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

// The new moments of a block, until the largest of them are known.
struct Block {
  Floats exp_avg[kBlock / kLanes], root[kBlock / kLanes];
  float exp_avg_scale, root_scale;
};

struct CodedMoments {
  using Stored = uint8_t;

  template <Master kMaster, bool kEma, typename Grad>
  static MEGASLIDE_INLINE void update_group(const megaslide_adamw_state &at, const Grad *grad,
                                            const Numbers &by, int64_t first, uint32_t element) {
    Block blocks[kGroup / kBlock];
    for (int64_t b = 0; b < kGroup / kBlock; ++b) {
      update_block<kMaster, kEma>(at, grad, by, first + b * kBlock, blocks[b]);
    }
    for (int64_t b = 0; b < kGroup / kBlock; ++b) {
      const int64_t offset = b * kBlock;
      store_block(at, by, first + offset, element + static_cast<uint32_t>(offset), blocks[b]);
    }
  }

  template <Master kMaster, bool kEma, typename Grad>
  static MEGASLIDE_INLINE void update_block(const megaslide_adamw_state &at, const Grad *grad,
                                            const Numbers &by, int64_t first, Block &block) {
    const auto *exp_avg_codes = static_cast<const uint8_t *>(at.exp_avg);
    const auto *root_codes = static_cast<const uint8_t *>(at.exp_avg_sq);
    const float exp_avg_scale = at.exp_avg_scale[first / kBlock];
    const float root_scale = at.exp_avg_sq_scale[first / kBlock];
    Bits exp_avg_most = {}, root_most = {};
    for (int64_t j = 0; j < kBlock / kLanes; ++j) {
      const int64_t i = first + j * kLanes;
      const Floats old_root = decoded<kRootCode>(root_codes + i, root_scale);
      Floats exp_avg = decoded<kExpAvgCode>(exp_avg_codes + i, exp_avg_scale);
      Floats exp_avg_sq = old_root * old_root;
      const Floats root =
          update_lanes<kMaster, kEma>(at, by, i, load_gradient(grad + i), exp_avg, exp_avg_sq);
      exp_avg_most = larger(exp_avg_most, magnitude_bits(exp_avg));
      root_most = larger(root_most, (Bits)root);
      block.exp_avg[j] = exp_avg;
      block.root[j] = root;
    }
    block.exp_avg_scale = largest_of(exp_avg_most);
    block.root_scale = largest_of(root_most);
  }

  static MEGASLIDE_INLINE void store_block(const megaslide_adamw_state &at, const Numbers &by,
                                           int64_t first, uint32_t element, const Block &block) {
    auto *exp_avg_codes = static_cast<uint8_t *>(at.exp_avg) + first;
    auto *root_codes = static_cast<uint8_t *>(at.exp_avg_sq) + first;
    at.exp_avg_scale[first / kBlock] = block.exp_avg_scale;
    at.exp_avg_sq_scale[first / kBlock] = block.root_scale;
    const float exp_avg_inverse = inverse_of<kExpAvgCode>(block.exp_avg_scale);
    const float root_inverse = inverse_of<kRootCode>(block.root_scale);
    Bits seeds = seeds_of(element, by.noise_key);
    for (int64_t j = 0; j < kBlock / kLanes; ++j, seeds += kLanes * kSeedStep) {
      const int64_t i = j * kLanes;
      const Bits noise = noise_of(seeds);
      encode<kExpAvgCode>(exp_avg_codes + i, block.exp_avg[j], exp_avg_inverse,
                          noise & ((1u << kStepBits) - 1));
      encode<kRootCode>(root_codes + i, block.root[j], root_inverse, noise >> (32 - kStepBits));
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
                 const Numbers &by, int64_t first, int64_t count) {
  using Stored = typename Moments::Stored;
  Completed master(moved(at.master, first), count), ema(moved(at.ema, first), count);
  Completed weight(moved(at.weight, first), count);
  Completed residual(moved(at.residual, first), count);
  Completed exp_avg(static_cast<Stored *>(at.exp_avg) + first, count);
  Completed exp_avg_sq(static_cast<Stored *>(at.exp_avg_sq) + first, count);
  const int64_t block = first / kBlock, blocks = (count + kBlock - 1) / kBlock;
  Completed exp_avg_scale(moved(at.exp_avg_scale, block), blocks);
  Completed exp_avg_sq_scale(moved(at.exp_avg_sq_scale, block), blocks);
  Grad gradient[kGroup] = {};
  __builtin_memcpy(gradient, grad + first, count * sizeof(Grad));
  const megaslide_adamw_state completed{kGroup,
                                        master.given(),
                                        weight.given(),
                                        residual.given(),
                                        exp_avg.data,
                                        exp_avg_sq.data,
                                        exp_avg_scale.given(),
                                        exp_avg_sq_scale.given(),
                                        ema.given()};
  Moments::template update_group<kMaster, kEma>(completed, gradient, by, 0,
                                                static_cast<uint32_t>(first));
  master.write_back();
  weight.write_back();
  residual.write_back();
  exp_avg.write_back();
  exp_avg_sq.write_back();
  exp_avg_scale.write_back();
  exp_avg_sq_scale.write_back();
  ema.write_back();
}

template <typename Moments, Master kMaster, bool kEma, typename Grad>
void update_range(const AdamWArrays &arrays, const megaslide_adamw_coefficients &coefficients,
                  int64_t first, int64_t last) {
  const megaslide_adamw_state at = arrays.state;
  const Numbers by(coefficients);
  const auto *grad = static_cast<const Grad *>(arrays.grad);
  for (; last - first >= kGroup; first += kGroup) {
    Moments::template update_group<kMaster, kEma>(at, grad, by, first,
                                                  static_cast<uint32_t>(first));
  }
  if (first < last) {
    update_last<Moments, kMaster, kEma>(at, grad, by, first, last - first);
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
const AdamWKernels adamw_kernels = {update};
}  // namespace MEGASLIDE_ISA

}  // namespace megaslide
