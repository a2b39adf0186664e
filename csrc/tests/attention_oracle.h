// 3D-DSA and its gradients from the definition, in double: every tap of every query by its corners.
//
// Shapes are those of megaslide.h. Offsets are multiples of a small power of two, so that
// coordinates are exact in fp32 and in double, and both take the same cell.
#pragma once

#include <algorithm>

#include "check.h"

namespace oracle {

using check::Array;

struct Shape {
  int64_t batch, size[3], heads, head_dim, window[3], groups, extra;

  int64_t voxels() const { return size[0] * size[1] * size[2]; }
  int64_t taps() const { return window[0] * window[1] * window[2]; }
  int64_t channels(int kind) const {
    return kind == MEGASLIDE_OFFSETS_TAP ? 3 * taps() : int64_t{kind == 1 ? 3 : kind == 2 ? 12 : 0};
  }
  int64_t numbers() const { return batch * voxels() * heads * head_dim; }
  int64_t extra_numbers() const { return batch * extra * heads * head_dim; }
  int64_t offsets(int kind) const { return batch * voxels() * groups * channels(kind); }
  std::string name() const {
    std::string text = std::to_string(batch);
    for (const int64_t n : {size[0], size[1], size[2], heads, head_dim, window[0], window[1],
                            window[2], groups, extra}) {
      text.append(" ").append(std::to_string(n));
    }
    return text;
  }
};

typedef std::vector<double> Numbers;

struct Result {
  Numbers out, lse, q, k, v, offsets, extra_k, extra_v;
};

struct Inputs {
  Numbers q, k, v, offsets, extra_k, extra_v, grad_out;
  double scale;
};

// One tap's sample along one axis.
struct Along {
  int64_t low, high;
  double above;
  bool inside, slides;  // whether the coordinate, and the shift, pass their gradient
};

inline double clamped(double x, double high) { return std::min(std::max(x, 0.0), high); }

inline Along sample_along(const Shape &s, int kind, const double *offset, int axis, int64_t voxel,
                          const int64_t tap[3], int64_t number) {
  const int64_t size = s.size[axis], last = size - s.window[axis];
  double start = static_cast<double>(std::clamp<int64_t>(voxel - s.window[axis] / 2, 0, last));
  Along along = {};
  if ((kind == 1 || kind == 2) && last > 0) {
    const double slid = start + offset[axis];
    along.slides = slid >= 0 && slid <= static_cast<double>(last);
    start = clamped(slid, static_cast<double>(last));
  }
  double x = start + static_cast<double>(tap[axis]);
  if (kind == 2) {
    for (int by = 0; by < 3; ++by) {
      const double centred =
          static_cast<double>(tap[by]) - static_cast<double>(s.window[by] - 1) / 2;
      x += centred * offset[3 + 3 * by + axis];
    }
  }
  if (kind == 3) x += offset[3 * number + axis];
  const auto most = static_cast<double>(size - 1);
  along.inside = x >= 0 && x <= most;
  x = clamped(x, most);
  const bool at_end = last > 0 && start == static_cast<double>(last);
  const double cell = at_end ? std::ceil(x) - 1 : std::floor(x);
  along.low = std::clamp<int64_t>(static_cast<int64_t>(cell), 0, std::max<int64_t>(size - 2, 0));
  along.high = std::min(along.low + 1, size - 1);
  along.above = x - static_cast<double>(along.low);
  return along;
}

struct Corner {
  int64_t voxel;
  double weight, slope[3];  // of the trilinear weight, along each axis
};

// Everything of one batch element, query and head.
struct Query {
  const Shape &s;
  int kind;
  int64_t b, n, head;
  const double *offset;  // of its group
  int64_t offset_at;     // where that is

  Query(const Shape &shape, int of_kind, const Inputs &in, int64_t batch, int64_t query, int64_t of)
      : s(shape), kind(of_kind), b(batch), n(query), head(of) {
    const int64_t group = head / (s.heads / s.groups);
    offset_at = ((b * s.voxels() + n) * s.groups + group) * s.channels(kind);
    offset = in.offsets.data() + offset_at;
  }
  int64_t row(int64_t voxel) const {
    return ((b * s.voxels() + voxel) * s.heads + head) * s.head_dim;
  }
  int64_t extra_row(int64_t e) const { return ((b * s.extra + e) * s.heads + head) * s.head_dim; }

  void tap_at(int64_t number, int64_t tap[3], Along along[3]) const {
    tap[0] = number / (s.window[1] * s.window[2]);
    tap[1] = number / s.window[2] % s.window[1];
    tap[2] = number % s.window[2];
    const int64_t voxel[3] = {n / (s.size[1] * s.size[2]), n / s.size[2] % s.size[1],
                              n % s.size[2]};
    for (int axis = 0; axis < 3; ++axis) {
      along[axis] = sample_along(s, kind, offset, axis, voxel[axis], tap, number);
    }
  }
  void corners(const Along along[3], Corner corner[8]) const {
    for (int c = 0; c < 8; ++c) {
      double part[3], sign[3];
      int64_t voxel = 0;
      for (int axis = 0; axis < 3; ++axis) {
        const bool up = c >> (2 - axis) & 1;
        const Along &a = along[axis];
        part[axis] = up ? a.above : 1 - a.above;
        sign[axis] = s.size[axis] == 1 ? 0 : up ? 1 : -1;
        voxel = voxel * s.size[axis] + (up ? a.high : a.low);
      }
      corner[c] = {voxel, part[0] * part[1] * part[2],
                   {sign[0] * part[1] * part[2], part[0] * sign[1] * part[2],
                    part[0] * part[1] * sign[2]}};
    }
  }
};

inline double dot(const double *x, const double *y, int64_t d) {
  double sum = 0;
  for (int64_t c = 0; c < d; ++c) sum += x[c] * y[c];
  return sum;
}

inline void add(double *to, double weight, const double *x, int64_t d) {
  for (int64_t c = 0; c < d; ++c) to[c] += weight * x[c];
}

// Scores of the taps, then of the extra keys.
inline Numbers scores_of(const Query &query, const Inputs &in) {
  const Shape &s = query.s;
  const double *q = in.q.data() + query.row(query.n);
  Numbers scores;
  for (int64_t j = 0; j < s.taps(); ++j) {
    int64_t tap[3];
    Along along[3];
    Corner corner[8];
    query.tap_at(j, tap, along);
    query.corners(along, corner);
    double score = 0;
    for (const Corner &c : corner) {
      score += c.weight * dot(q, in.k.data() + query.row(c.voxel), s.head_dim);
    }
    scores.push_back(in.scale * score);
  }
  for (int64_t e = 0; e < s.extra; ++e) {
    scores.push_back(in.scale * dot(q, in.extra_k.data() + query.extra_row(e), s.head_dim));
  }
  return scores;
}

// To probabilities; returns the log of the denominator.
inline double softmax(Numbers *scores) {
  const double most = *std::max_element(scores->begin(), scores->end());
  double sum = 0;
  for (double &x : *scores) sum += x = std::exp(x - most);
  for (double &x : *scores) x /= sum;
  return most + std::log(sum);
}

inline void attend(const Query &query, const Inputs &in, Result *r) {
  const Shape &s = query.s;
  Numbers p = scores_of(query, in);
  const int64_t at = (query.b * s.voxels() + query.n) * s.heads + query.head;
  r->lse[static_cast<size_t>(at)] = softmax(&p);
  double *out = r->out.data() + query.row(query.n);
  for (int64_t j = 0; j < s.taps(); ++j) {
    int64_t tap[3];
    Along along[3];
    Corner corner[8];
    query.tap_at(j, tap, along);
    query.corners(along, corner);
    for (const Corner &c : corner) {
      add(out, p[static_cast<size_t>(j)] * c.weight, in.v.data() + query.row(c.voxel), s.head_dim);
    }
  }
  for (int64_t e = 0; e < s.extra; ++e) {
    add(out, p[static_cast<size_t>(s.taps() + e)], in.extra_v.data() + query.extra_row(e),
        s.head_dim);
  }
}

// Adds the pull on one tap's coordinates to the gradient of the query's offsets.
inline void pull(const Query &query, int64_t number, const int64_t tap[3], const Along along[3],
                 const double slope[3], Result *r) {
  double *to = r->offsets.data() + query.offset_at;
  for (int axis = 0; axis < 3; ++axis) {
    const double x = along[axis].inside ? slope[axis] : 0;
    if (query.kind == 3) to[3 * number + axis] += x;
    if (query.kind == 1 || query.kind == 2) to[axis] += along[axis].slides ? x : 0;
    for (int by = 0; query.kind == 2 && by < 3; ++by) {
      const double centred = static_cast<double>(tap[by]) -
                             static_cast<double>(query.s.window[by] - 1) / 2;
      to[3 + 3 * by + axis] += centred * x;
    }
  }
}

inline void differentiate_tap(const Query &query, const Inputs &in, int64_t j, double p,
                              double mean, Result *r) {
  const int64_t d = query.s.head_dim, own = query.row(query.n);
  const double *q = in.q.data() + own, *g = in.grad_out.data() + own;
  int64_t tap[3];
  Along along[3];
  Corner corner[8];
  query.tap_at(j, tap, along);
  query.corners(along, corner);
  double value = 0, slope[3] = {};
  for (const Corner &c : corner) value += c.weight * dot(g, in.v.data() + query.row(c.voxel), d);
  const double ds = in.scale * p * (value - mean);
  for (const Corner &c : corner) {
    const int64_t row = query.row(c.voxel);
    add(r->q.data() + own, ds * c.weight, in.k.data() + row, d);
    add(r->k.data() + row, ds * c.weight, q, d);
    add(r->v.data() + row, p * c.weight, g, d);
    const double by = ds * dot(q, in.k.data() + row, d) + p * dot(g, in.v.data() + row, d);
    for (int axis = 0; axis < 3; ++axis) slope[axis] += c.slope[axis] * by;
  }
  if (query.kind != 0) pull(query, j, tap, along, slope, r);
}

inline void differentiate(const Query &query, const Inputs &in, Result *r) {
  const Shape &s = query.s;
  const int64_t d = s.head_dim, own = query.row(query.n);
  const double *q = in.q.data() + own, *g = in.grad_out.data() + own;
  Numbers p = scores_of(query, in);
  softmax(&p);
  const double mean = dot(g, r->out.data() + own, d);
  for (int64_t j = 0; j < s.taps(); ++j) {
    differentiate_tap(query, in, j, p[static_cast<size_t>(j)], mean, r);
  }
  for (int64_t e = 0; e < s.extra; ++e) {
    const double weight = p[static_cast<size_t>(s.taps() + e)];
    const int64_t row = query.extra_row(e);
    const double ds = in.scale * weight * (dot(g, in.extra_v.data() + row, d) - mean);
    add(r->q.data() + own, ds, in.extra_k.data() + row, d);
    add(r->extra_k.data() + row, ds, q, d);
    add(r->extra_v.data() + row, weight, g, d);
  }
}

inline Result attention(const Shape &s, int kind, const Inputs &in) {
  const auto of = [](int64_t count) { return Numbers(static_cast<size_t>(count)); };
  Result r = {of(s.numbers()), of(s.batch * s.voxels() * s.heads), of(s.numbers()),
              of(s.numbers()), of(s.numbers()), of(s.offsets(kind)), of(s.extra_numbers()),
              of(s.extra_numbers())};
  for (int64_t i = 0; i < s.batch * s.voxels() * s.heads; ++i) {
    const Query query(s, kind, in, i / (s.voxels() * s.heads), i / s.heads % s.voxels(),
                      i % s.heads);
    attend(query, in, &r);
    differentiate(query, in, &r);
  }
  return r;
}

}  // namespace oracle
