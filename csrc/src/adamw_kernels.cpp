// AdamW for one instruction set: every array read once and written once, block by block.
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

MEGASLIDE_INLINE void load_gradient(const float *from, Floats *grad) {
  grad[0] = load<kLanes>(from);
  grad[1] = load<kLanes>(from + kLanes);
}

MEGASLIDE_INLINE void load_gradient(const uint16_t *from, Floats *grad) {
  const Pair bits = joined(Halves{}, load<2 * kLanes>(from));
  grad[0] = (Floats)bits.first;
  grad[1] = (Floats)bits.last;
}

template <Master kMaster>
MEGASLIDE_INLINE void load_master(const megaslide_adamw_state &at, int64_t i, Floats *master) {
  if constexpr (kMaster != Master::split) {
    master[0] = load<kLanes>(at.master + i);
    master[1] = load<kLanes>(at.master + i + kLanes);
  } else {
    const auto residual = load<2 * kLanes>(at.residual + i);
    const Halves carried = load<2 * kLanes>(at.weight + i) + (Halves)(residual >> 15);
    const Pair bits = joined((Halves)residual, carried);
    master[0] = (Floats)bits.first;
    master[1] = (Floats)bits.last;
  }
}

template <Master kMaster>
MEGASLIDE_INLINE void store_master(const megaslide_adamw_state &at, int64_t i,
                                   const Floats *master) {
  if constexpr (kMaster != Master::split) {
    store<kLanes>(at.master + i, master[0]);
    store<kLanes>(at.master + i + kLanes, master[1]);
  }
  if constexpr (kMaster != Master::whole) {
    Pair bits = {(Bits)master[0], (Bits)master[1]};
    if (__builtin_expect(any_nan(master[0], master[1]), 0)) {
      // Rounding up could turn a NaN's bits into those of a number.
      const auto bits_of = [](Floats x) { return x == x ? (Bits)x : Bits{} + kNaN; };
      bits = {bits_of(master[0]), bits_of(master[1])};
    }
    store<2 * kLanes>(at.weight + i, upper_halves({bits.first + 0x8000u, bits.last + 0x8000u}));
    // The residual is bits - (high << 16), whose upper half is its sign alone.
    if constexpr (kMaster == Master::split) {
      store<2 * kLanes>(reinterpret_cast<uint16_t *>(at.residual) + i, lower_halves(bits));
    }
  }
}

// ---- two vectors ------------------------------------------------------------------------------

// torch's lerp goes from the nearer end, so that a weight of 1 gives the far end itself.
struct Lerp {
  Floats weight;
  Bits near;  // all ones or none: a choice without a branch
  explicit Lerp(float by)
      : weight(broadcast(by < 0.5f ? by : by - 1.0f)), near(Bits{} - (by < 0.5f ? 1u : 0u)) {}

  MEGASLIDE_INLINE Floats operator()(Floats from, Floats to) const {
    return fused(weight, to - from, (Floats)(((Bits)from & near) | ((Bits)to & ~near)));
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

// Of two vectors of elements: moves the moments on, and sets the root of exp_avg_sq.
template <typename Grad>
MEGASLIDE_INLINE void update_moments(const Grad *grads, const Numbers &by, Floats *exp_avg,
                                     Floats *exp_avg_sq, Floats *root) {
  Floats grad[2];
  load_gradient(grads, grad);
  MEGASLIDE_UNROLL(2)
  for (int j = 0; j < 2; ++j) {
    grad[j] *= by.grad_scale;
    exp_avg[j] = by.exp_avg(exp_avg[j], grad[j]);
    exp_avg_sq[j] = fused(grad[j] * by.exp_avg_sq_weight, grad[j], exp_avg_sq[j] * by.beta2);
    root[j] = square_root(exp_avg_sq[j]);
  }
}

// The same elements, from i on.
template <Master kMaster, bool kEma>
MEGASLIDE_INLINE void update_master(const megaslide_adamw_state &at, const Numbers &by, int64_t i,
                                    const Floats *exp_avg, const Floats *root) {
  Floats master[2];
  load_master<kMaster>(at, i, master);
  MEGASLIDE_UNROLL(2)
  for (int j = 0; j < 2; ++j) {
    master[j] *= by.decay;
    master[j] += exp_avg[j] * by.step_size / (root[j] / by.root_correction + by.eps);
    if constexpr (kEma) {
      float *ema = at.ema + i + j * kLanes;
      store<kLanes>(ema, by.ema(load<kLanes>(ema), master[j]));
    }
  }
  store_master<kMaster>(at, i, master);
}

struct Fp32Moments {
  using Stored = float;

  template <Master kMaster, bool kEma, typename Grad>
  static MEGASLIDE_INLINE void update(const megaslide_adamw_state &at, const Grad *grad,
                                      const Numbers &by, int64_t first, int64_t last, uint32_t) {
    auto *exp_avgs = static_cast<float *>(at.exp_avg);
    auto *exp_avg_sqs = static_cast<float *>(at.exp_avg_sq);
    for (int64_t i = first; i < last; i += 2 * kLanes) {
      Floats exp_avg[2] = {load<kLanes>(exp_avgs + i), load<kLanes>(exp_avgs + i + kLanes)};
      Floats exp_avg_sq[2] = {load<kLanes>(exp_avg_sqs + i),
                              load<kLanes>(exp_avg_sqs + i + kLanes)};
      Floats root[2];
      update_moments(grad + i, by, exp_avg, exp_avg_sq, root);
      update_master<kMaster, kEma>(at, by, i, exp_avg, root);
      for (int j = 0; j < 2; ++j) {
        store<kLanes>(exp_avgs + i + j * kLanes, exp_avg[j]);
        store<kLanes>(exp_avg_sqs + i + j * kLanes, exp_avg_sq[j]);
      }
    }
  }
};

// The new moments of a block, until the largest of them are known.
struct Block {
  Floats exp_avg[kBlock / kLanes], root[kBlock / kLanes];
  float exp_avg_scale, root_scale;
};

// Factors of a block's codes, from its scales.
struct Inverses {
  float exp_avg, root;
  explicit Inverses(const Block &block)
      : exp_avg(inverse_of<kExpAvgCode>(block.exp_avg_scale)),
        root(inverse_of<kRootCode>(block.root_scale)) {}
};

// In two loops, with few enough numbers in each for the registers; both have divisions or roots to
// wait for and enough else to do. The second is a block behind, where its factors are known.
struct CodedMoments {
  using Stored = uint8_t;

  template <Master kMaster, bool kEma, typename Grad>
  static MEGASLIDE_INLINE void update(const megaslide_adamw_state &at, const Grad *grad,
                                      const Numbers &by, int64_t first, int64_t last,
                                      uint32_t element) {
    Block blocks[2];
    Block *block = blocks, *next = blocks + 1;
    update_block(at, grad, by, first, *block);
    for (; first + kBlock < last; first += kBlock, element += kBlock) {
      const Inverses inverses(*block);
      update_block(at, grad, by, first + kBlock, *next);
      store_block<kMaster, kEma>(at, by, first, element, inverses, *block);
      Block *const stored = block;
      block = next;
      next = stored;
    }
    store_block<kMaster, kEma>(at, by, first, element, Inverses(*block), *block);
  }

  template <typename Grad>
  static MEGASLIDE_INLINE void update_block(const megaslide_adamw_state &at, const Grad *grad,
                                            const Numbers &by, int64_t first, Block &block) {
    const auto *exp_avg_codes = static_cast<const uint8_t *>(at.exp_avg) + first;
    const auto *root_codes = static_cast<const uint8_t *>(at.exp_avg_sq) + first;
    const float exp_avg_scale = at.exp_avg_scale[first / kBlock];
    const float root_scale = at.exp_avg_sq_scale[first / kBlock];
    Bits exp_avg_most = {}, root_most = {};
    MEGASLIDE_UNROLL(1)
    for (int64_t i = 0; i < kBlock; i += 2 * kLanes) {
      Floats exp_avg[2], exp_avg_sq[2], root[2];
      MEGASLIDE_UNROLL(2)
      for (int64_t j = 0; j < 2; ++j) {
        const Floats old = decoded<kRootCode>(root_codes + i + j * kLanes, root_scale);
        exp_avg_sq[j] = old * old;
        exp_avg[j] = decoded<kExpAvgCode>(exp_avg_codes + i + j * kLanes, exp_avg_scale);
      }
      update_moments(grad + first + i, by, exp_avg, exp_avg_sq, root);
      MEGASLIDE_UNROLL(2)
      for (int64_t j = 0; j < 2; ++j) {
        exp_avg_most = larger(exp_avg_most, magnitude_bits(exp_avg[j]));
        root_most = larger(root_most, (Bits)root[j]);
        block.exp_avg[i / kLanes + j] = exp_avg[j];
        block.root[i / kLanes + j] = root[j];
      }
    }
    block.exp_avg_scale = largest_of(exp_avg_most);
    block.root_scale = largest_of(root_most);
  }

  // Its masters too.
  template <Master kMaster, bool kEma>
  static MEGASLIDE_INLINE void store_block(const megaslide_adamw_state &at, const Numbers &by,
                                           int64_t first, uint32_t element,
                                           const Inverses &inverses, const Block &block) {
    auto *exp_avg_codes = static_cast<uint8_t *>(at.exp_avg) + first;
    auto *root_codes = static_cast<uint8_t *>(at.exp_avg_sq) + first;
    at.exp_avg_scale[first / kBlock] = block.exp_avg_scale;
    at.exp_avg_sq_scale[first / kBlock] = block.root_scale;
    Bits seeds = seeds_of(element, by.noise_key);
    for (int64_t i = 0; i < kBlock; i += kCoded * kLanes) {
      const Floats *exp_avg = block.exp_avg + i / kLanes, *root = block.root + i / kLanes;
      Bits exp_avg_bits[kCoded], root_bits[kCoded];
      MEGASLIDE_UNROLL(16)
      for (int64_t j = 0; j < kCoded; ++j, seeds += kept(Bits{} + kLanes * kSeedStep)) {
        const Bits noise = noise_of(seeds);
        exp_avg_bits[j] = dithered<kExpAvgCode>(exp_avg[j], inverses.exp_avg,
                                                noise & ((1u << kStepBits) - 1));
        root_bits[j] =
            dithered<kRootCode>(root[j], inverses.root, noise >> (32 - kStepBits));
        if (j % 2 == 0) continue;
        update_master<kMaster, kEma>(at, by, first + i + (j - 1) * kLanes, exp_avg + j - 1,
                                     root + j - 1);
      }
      store_codes<kExpAvgCode>(exp_avg_codes + i, exp_avg, exp_avg_bits);
      store_codes<kRootCode>(root_codes + i, root, root_bits);
    }
  }
};

// ---- a region ---------------------------------------------------------------------------------

// The last, incomplete block of an array (null: not there) as a complete one, zero behind the end.
template <typename T>
struct Completed {
  T data[kBlock] = {};
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
  Grad gradient[kBlock] = {};
  __builtin_memcpy(gradient, grad + first, count * sizeof(Grad));
  const megaslide_adamw_state completed{kBlock,
                                        master.given(),
                                        weight.given(),
                                        residual.given(),
                                        exp_avg.data,
                                        exp_avg_sq.data,
                                        exp_avg_scale.given(),
                                        exp_avg_sq_scale.given(),
                                        ema.given()};
  Moments::template update<kMaster, kEma>(completed, gradient, by, 0, kBlock,
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
  const int64_t end = last - (last - first) % kBlock;
  if (first < end) {
    Moments::template update<kMaster, kEma>(at, grad, by, first, end,
                                            static_cast<uint32_t>(first));
  }
  if (end < last) update_last<Moments, kMaster, kEma>(at, grad, by, end, last - end);
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
