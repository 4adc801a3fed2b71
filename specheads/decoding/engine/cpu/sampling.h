// The operators of warps and of drawing tokens, of float32 numbers.
//
// Of most distributions only a few tokens have a probability, and vectors without one are skipped.

#pragma once

#include "kernels.h"
#include "operators.h"

#include <cmath>
#include <limits>
#include <utility>

namespace specheads_kernels __attribute__((visibility("hidden"))) {

// The k-th largest of each row. A bound from the largest of many groups leaves few numbers to be
// ordered.
inline float kth_largest_of(const float* row, int64_t size, int64_t k) {
  constexpr int64_t lanes = kLanes;
  const int64_t num_vectors = std::max<int64_t>(4, 2 * k / lanes);
  const int64_t groups = num_vectors * lanes;
  float* most = scratch<float, 7>(groups);
  float* kept = scratch<float, 8>(size);
  const auto kth = [k](float* first, float* last) {
    std::nth_element(first, first + k - 1, last, std::greater<float>());
    return first[k - 1];
  };
  std::fill(most, most + groups, -std::numeric_limits<float>::infinity());
  const int64_t whole = size / lanes * lanes;
  for (int64_t start = 0; start < whole; start += groups) {
    const int64_t end = std::min(groups, whole - start);
    for (int64_t i = 0; i < end; i += lanes) {
      at::vec::maximum(Vector::loadu(most + i), Vector::loadu(row + start + i))
          .store(most + i);  // a NaN stays
    }
  }
  bool has_nan = false;
  for (int64_t i = 0; i < groups; i++) has_nan |= std::isnan(most[i]);
  for (int64_t i = whole; i < size; i++) has_nan |= std::isnan(row[i]);
  if (has_nan) return std::numeric_limits<float>::quiet_NaN();
  const float bound =
      size > 2 * groups ? kth(most, most + groups) : -std::numeric_limits<float>::infinity();
  int64_t count = 0;
  for (int64_t start = 0; start < whole; start += lanes) {
    if ((Vector::loadu(row + start) >= Vector(bound)).zero_mask() == (1 << lanes) - 1) continue;
    for (int64_t i = start; i < start + lanes; i++) {
      kept[count] = row[i];
      count += row[i] >= bound;
    }
  }
  for (int64_t i = whole; i < size; i++) {
    kept[count] = row[i];
    count += row[i] >= bound;
  }
  return kth(kept, kept + count);
}

// The softmax of the logits that are at least `least`; the others have probability 0. A NaN makes
// the whole row NaN.
inline void kept_softmax_of(const float* row, float least, int64_t size, float* probs) {
  constexpr int64_t lanes = kLanes;
  const Vector hidden(-std::numeric_limits<float>::infinity());
  int64_t* starts = scratch<int64_t, 9>(size / lanes + 1);
  int64_t count = 0;
  Vector most = hidden;
  const auto hide = [&](const Vector& logits) {
    return Vector::blendv(logits, hidden, logits < Vector(least));
  };
  const auto load = [&](int64_t start) {
    if (start + lanes <= size) return Vector::loadu(row + start);
    return Vector::set(hidden, Vector::loadu(row + start, size - start), size - start);
  };
  for (int64_t start = 0; start < size; start += lanes) {
    const Vector kept = hide(load(start));
    Vector(0).store(probs + start, std::min(lanes, size - start));
    if ((kept == hidden).zero_mask() == 0) continue;
    starts[count++] = start;
    most = at::vec::maximum(most, kept);
  }
  const auto larger = [](const Vector& x, const Vector& y) { return at::vec::maximum(x, y); };
  const Vector largest(at::vec::vec_reduce_all<float>(larger, most, lanes));
  Vector sums(0);
  for (int64_t i = 0; i < count; i++) {
    const Vector weights = (hide(load(starts[i])) - largest).exp();
    weights.store(probs + starts[i], std::min(lanes, size - starts[i]));
    sums = sums + weights;
  }
  const float total = total_of(sums);
  // Without a kept logit, with an infinite one or with a NaN there is no distribution.
  if (!(total > 0))
    return std::fill(probs, probs + size, std::numeric_limits<float>::quiet_NaN());
  for (int64_t i = 0; i < count; i++) {
    const int64_t number = std::min(lanes, size - starts[i]);
    (Vector::loadu(probs + starts[i], number) / Vector(total)).store(probs + starts[i], number);
  }
}

// The fewest of the most likely tokens that have probability `top_p` together, renormalised; a
// row of NaN stays one.
inline void nucleus_of(const float* row, double top_p, int64_t size, float* result) {
  using Entry = std::pair<float, int64_t>;
  constexpr int64_t lanes = kLanes;
  Entry* entries = scratch<Entry, 11>(size);
  int64_t count = 0;
  int64_t kept = 0;
  double total = 0;
  const auto collect = [&](float least) {
    count = 0;
    for (int64_t start = 0; start < size; start += lanes) {
      if (start + lanes <= size &&
          (Vector::loadu(row + start) >= Vector(least)).zero_mask() == (1 << lanes) - 1)
        continue;
      for (int64_t i = start; i < std::min(start + lanes, size); i++) {
        if (row[i] >= least) entries[count++] = {row[i], i};
      }
    }
  };
  const auto before = [](const Entry& x, const Entry& y) {
    return x.first > y.first || (x.first == y.first && x.second < y.second);
  };
  // Whether the entries reach top_p. Most of the mass is in a few, so they are sorted in pieces,
  // each longer than all before it.
  const auto reach = [&] {
    kept = 0, total = 0;
    for (int64_t sorted = 0, end; sorted < count; sorted = end) {
      end = std::min(4 * sorted + 256, count);
      if (end < count) std::nth_element(entries + sorted, entries + end, entries + count, before);
      std::sort(entries + sorted, entries + end, before);
      for (; kept < end; kept++) {
        const double sum = total + entries[kept].first;
        if (static_cast<float>(sum) - entries[kept].first >= static_cast<float>(top_p)) return true;
        total = sum;
      }
    }
    return false;
  };
  // Tokens below this have at most half of what top_p leaves over; only rounding can make them
  // needed.
  collect(std::max<float>((1 - top_p) / (2 * size), std::numeric_limits<float>::denorm_min()));
  if (!reach()) {
    collect(std::numeric_limits<float>::denorm_min());
    reach();
  }
  std::fill(result, result + size, kept ? float(0) : std::numeric_limits<float>::quiet_NaN());
  for (int64_t i = 0; i < kept; i++)
    result[entries[i].second] = entries[i].first / static_cast<float>(total);
}

// The largest of a row's logits, the sum of exp(logit - largest), and the sum of these times
// logit - largest; see `softmax_sums` in sampling.py.
inline void softmax_sums_of(const float* row, int64_t size, float* result) {
  const Vector least(std::numeric_limits<float>::lowest());
  const auto load = [&](int64_t start) {
    if (start + kLanes <= size) return Vector::loadu(row + start);
    const Vector hidden(-std::numeric_limits<float>::infinity());
    return Vector::set(hidden, Vector::loadu(row + start, size - start), size - start);
  };
  Vector most = load(0);
  for (int64_t start = kLanes; start < size; start += kLanes) {
    most = at::vec::maximum(most, load(start));  // a NaN stays
  }
  const auto larger = [](const Vector& x, const Vector& y) { return at::vec::maximum(x, y); };
  const float largest = at::vec::vec_reduce_all<float>(larger, most, kLanes);
  Vector total(0), moment(0);
  for (int64_t start = 0; start < size; start += kLanes) {
    const Vector below = at::vec::maximum(load(start) - Vector(largest), least);
    const Vector weight = below.exp_u20();
    total = total + weight;
    moment = at::vec::fmadd(weight, below, moment);
  }
  result[0] = largest;
  result[1] = total_of(total) + 0 * largest;  // that exponential loses a NaN
  result[2] = total_of(moment);
}

// The first of the largest numbers, or the first NaN.
inline int64_t most_likely_of(const float* row, int64_t size) {
  const int64_t whole = size / kLanes * kLanes;
  Vector most(-std::numeric_limits<float>::infinity());
  for (int64_t start = 0; start < whole; start += kLanes) {
    most = at::vec::maximum(most, Vector::loadu(row + start));  // a NaN stays
  }
  float each[kLanes];
  most.store(each);
  float largest = -std::numeric_limits<float>::infinity();
  bool has_nan = false;
  const auto add = [&](float value) {
    has_nan |= std::isnan(value);
    largest = std::max(largest, value);
  };
  for (const float value : each) add(value);
  for (int64_t i = whole; i < size; i++) add(row[i]);
  const auto is_found = [&](float value) { return has_nan ? std::isnan(value) : value == largest; };
  const auto is_in = [&](int64_t start) {
    return (Vector::loadu(row + start) == Vector(largest)).zero_mask() != (1 << kLanes) - 1;
  };
  int64_t i = 0;
  while (!has_nan && i < whole && !is_in(i)) i += kLanes;
  while (!is_found(row[i])) i++;
  return i;
}

// The first token at which the sum of the probabilities exceeds `uniform` times their total; see
// `token_at` in sampling.py.
inline int64_t token_at_of(const float* probs, int64_t size, double uniform) {
  constexpr int64_t lanes = kLanes;
  constexpr int64_t block = 32 * lanes;
  // Added one after the other, as cumsum does; a probability of 0 changes no sum.
  const auto sum = [&](double before, int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += lanes) {
      if (start + lanes <= end && Vector::loadu(probs + start).zero_mask() == (1 << lanes) - 1)
        continue;
      for (int64_t i = start; i < std::min(start + lanes, end); i++) before += probs[i];
    }
    return before;
  };
  const int64_t blocks = (size + block - 1) / block;
  double* sums = scratch<double, 10>(blocks + 1);
  sums[0] = 0;
  for (int64_t i = 0; i < blocks; i++)
    sums[i + 1] = sum(sums[i], i * block, std::min(size, (i + 1) * block));
  const double total = sums[blocks];
  const double point = std::min(uniform * total, std::nextafter(total, 0.0));
  const int64_t chosen = std::upper_bound(sums + 1, sums + blocks + 1, point) - (sums + 1);
  if (chosen == blocks) return size - 1;
  double cumulative = sums[chosen];
  for (int64_t i = chosen * block; i < size; i++) {
    cumulative += probs[i];
    if (cumulative > point) return i;
  }
  return size - 1;
}

// A tensor of these sizes whose part for every row of x (..., V) compute(row, its number, part)
// fills.
template <typename Result, typename Compute>
AtenTensorHandle of_rows(const at::TensorBase& x, at::IntArrayRef sizes, const Compute& compute) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "no operator for ", x.scalar_type());
  const at::TensorBase rows = x.contiguous();
  at::TensorBase result = empty(sizes, c10::CppTypeToScalarType<Result>::value);
  const int64_t size = x.size(-1);
  const int64_t count = size ? x.numel() / size : 0;
  const int64_t part = count ? result.numel() / count : 0;
  const int64_t bytes = size * sizeof(float);
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes));
  const float* from = rows.const_data_ptr<float>();
  Result* to = result.mutable_data_ptr<Result>();
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) compute(from + row * size, row, to + row * part);
  });
  return handle_of(result);
}

// The k-th largest (..., 1) of x (..., V); NaN where a row has a NaN.
AtenTensorHandle kth_largest(const at::TensorBase& x, int64_t k) {
  const int64_t size = x.size(-1);
  TORCH_CHECK(0 < k && k <= size, "k is ", k, " of ", size);
  auto shape = x.sizes().vec();
  shape.back() = 1;
  return of_rows<float>(
      x, shape, [&](const float* row, int64_t, float* to) { *to = kth_largest_of(row, size, k); });
}

// The probabilities (..., V) of logits (..., V) of which those below `least` (..., 1) are hidden.
AtenTensorHandle kept_softmax(const at::TensorBase& logits, const at::TensorBase& least) {
  const int64_t size = logits.size(-1);
  TORCH_CHECK(
      least.scalar_type() == logits.scalar_type() && least.numel() * size == logits.numel(),
      "logits are ", logits.sizes(), ", bounds are ", least.scalar_type(), " ", least.sizes());
  const at::TensorBase bounds = least.contiguous();
  const float* bound = bounds.const_data_ptr<float>();
  return of_rows<float>(logits, logits.sizes(), [&](const float* row, int64_t number, float* to) {
    kept_softmax_of(row, bound[number], size, to);
  });
}

// The probabilities (..., V) of the nucleus of probs (..., V).
AtenTensorHandle nucleus(const at::TensorBase& probs, double top_p) {
  TORCH_CHECK(0 < top_p && top_p <= 1, "top_p is ", top_p);
  const int64_t size = probs.size(-1);
  return of_rows<float>(probs, probs.sizes(), [&](const float* row, int64_t, float* to) {
    nucleus_of(row, top_p, size, to);
  });
}

// The three sums (..., 3) of each row of logits (..., V).
AtenTensorHandle softmax_sums(const at::TensorBase& logits) {
  const int64_t size = logits.size(-1);
  TORCH_CHECK(size > 0, "there is no number in ", logits.sizes());
  std::vector<int64_t> sizes = logits.sizes().vec();
  sizes.back() = 3;
  return of_rows<float>(logits, sizes, [&](const float* row, int64_t, float* to) {
    softmax_sums_of(row, size, to);
  });
}

// The index (...) of the largest number of each row of x (..., V), the first of several.
AtenTensorHandle most_likely(const at::TensorBase& x) {
  const int64_t size = x.size(-1);
  TORCH_CHECK(size > 0, "there is no number in ", x.sizes());
  const auto sizes = x.sizes().slice(0, x.dim() - 1);
  return of_rows<int64_t>(
      x, sizes, [&](const float* row, int64_t, int64_t* to) { *to = most_likely_of(row, size); });
}

// Token ids (...) drawn from probs (..., V) at uniform (...), float64.
AtenTensorHandle token_at(const at::TensorBase& probs, const at::TensorBase& uniform) {
  const int64_t size = probs.size(-1);
  TORCH_CHECK(uniform.scalar_type() == at::kDouble && uniform.numel() * size == probs.numel(),
              "probabilities are ", probs.sizes(), ", uniform numbers are ", uniform.scalar_type(),
              " ", uniform.sizes());
  const at::TensorBase points = uniform.contiguous();
  const double* point = points.const_data_ptr<double>();
  return of_rows<int64_t>(probs, uniform.sizes(),
                          [&](const float* row, int64_t number, int64_t* to) {
                            *to = token_at_of(row, size, point[number]);
                          });
}

}  // namespace specheads_kernels

SPECHEADS_OPERATOR(kth_largest, "(Tensor x, int k) -> Tensor")
SPECHEADS_OPERATOR(kept_softmax, "(Tensor logits, Tensor least) -> Tensor")
SPECHEADS_OPERATOR(softmax_sums, "(Tensor logits) -> Tensor")
SPECHEADS_OPERATOR(nucleus, "(Tensor probs, float top_p) -> Tensor")
SPECHEADS_OPERATOR(most_likely, "(Tensor x) -> Tensor")
SPECHEADS_OPERATOR(token_at, "(Tensor probs, Tensor uniform) -> Tensor")
