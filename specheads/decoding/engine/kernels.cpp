// Operators for forward passes over few tokens on a CPU, where reading weights and keys takes the time.
//
// Written once with at::vec, which has every instruction set that PyTorch supports. Sums are float32, or float64 for float64
// tensors. Each number of a result is summed in the same order whatever the number of tokens, so that a verification computes the
// same logits as steps of one token.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

namespace {

using at::vec::Vectorized;

template <typename Value>
using SumOf = std::conditional_t<std::is_same_v<Value, double>, double, float>;
template <typename Value>
constexpr int kLanes = Vectorized<SumOf<Value>>::size();
template <typename Value>
constexpr int kPair = 2 * kLanes<Value>;  // numbers in the two vectors that are in work at a time

// Tokens at a time: as many as leave their sums in registers. x86 without AVX-512 has 16 of them, others have 32. Fewer in types
// that models are seldom run in, because each number is compiled.
#if defined(CPU_CAPABILITY_AVX2)
constexpr int kRegisterTokens = 6;
#else
constexpr int kRegisterTokens = 12;
#endif
template <typename Value>
constexpr int kMostTokens = std::is_same_v<Value, float> || std::is_same_v<Value, at::BFloat16> ? kRegisterTokens : 4;
constexpr int kMostRows = 4;  // of attention, at a time

constexpr int64_t kPrefetchBytes = 4096;  // ahead of the column in work; 0, 1024 and 2048 were slower on a Sapphire Rapids
constexpr int64_t kPrefetchRows = 16;     // of keys and values
constexpr int64_t kGrainBytes = 32768;    // a further thread pays from so many bytes on that each reads

template <typename Value, typename Vector>
inline void load_pair(const Value* from, Vector& first, Vector& second) {
  if constexpr (std::is_same_v<Value, at::BFloat16>) {
    // A bfloat16 is the upper half of a float32; numbers of the two vectors alternate.
    const auto both = Vectorized<int32_t>::loadu(from);
    first = at::vec::cast<float>(both << Vectorized<int32_t>(16));
    second = at::vec::cast<float>(both & Vectorized<int32_t>(static_cast<int32_t>(0xffff0000)));
  } else if constexpr (std::is_same_v<Value, at::Half>) {
    std::tie(first, second) = at::vec::convert_half_float(Vectorized<Value>::loadu(from));
  } else {
    first = Vector::loadu(from);
    second = Vector::loadu(from + kLanes<Value>);
  }
}

// Fetch a pair that is read soon, at most two cache lines.
template <typename Value>
inline void prefetch(const Value* from) {
  __builtin_prefetch(from);
  if constexpr (sizeof(Value) * kPair<Value> > 64) __builtin_prefetch(reinterpret_cast<const char*>(from) + 64);
}

// Sums of `count` rows of pairs. A chain in place of an array, which compilers keep in memory instead of registers.
template <typename Value, int count>
struct Sums {
  using Vector = Vectorized<SumOf<Value>>;
  Vector first{SumOf<Value>(0)}, second{SumOf<Value>(0)};
  Sums<Value, count - 1> others;

  // sums[r] += factors[r * stride] * (left, right)
  C10_ALWAYS_INLINE void add(const Vector& left, const Vector& right, const SumOf<Value>* factors, int64_t stride) {
    const Vector factor(*factors);
    first = at::vec::fmadd(left, factor, first);
    second = at::vec::fmadd(right, factor, second);
    if constexpr (count > 1) others.add(left, right, factors + stride, stride);
  }

  C10_ALWAYS_INLINE void store(SumOf<Value>* to, int64_t stride) const {
    first.store(to);
    second.store(to + kLanes<Value>);
    if constexpr (count > 1) others.store(to + stride, stride);
  }
};
template <typename Value>
struct Sums<Value, 0> {};

template <typename Sum>
inline Sum total_of(const Vectorized<Sum>& sums) {
  if constexpr (std::is_same_v<Sum, float>) {
    return at::vec::vec_reduce_all<float>(std::plus<Vectorized<float>>(), sums);
  } else {
    return at::vec::vec_reduce_all<Sum>(std::plus<Vectorized<Sum>>(), sums, Vectorized<Sum>::size());
  }
}

// Memory of this thread, valid until the next call with the same `number`.
template <typename Sum, int number>
Sum* scratch(int64_t size) {
  static thread_local std::vector<Sum> memory;
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
  return memory.data();
}

// Linear maps. A weight lies in panels of kPair rows, each stored column by column; see `pack` in operators.py.

// result[t][j] = sum_i x[t][i] panel[i][j] + bias[j], for a panel's first `num_rows` rows j.
template <typename Value, int kTokens>
void panel_product(
    const Value* panel, const SumOf<Value>* x, const Value* bias, Value* result, int64_t size, int64_t stride, int64_t num_rows) {
  using Sum = SumOf<Value>;
  using Vector = Vectorized<Sum>;
  Sums<Value, kTokens> sums;
  for (int64_t i = 0; i < size; i++) {
    const Value* column = panel + i * kPair<Value>;
    prefetch(column + kPrefetchBytes / sizeof(Value));
    Vector first, second;
    load_pair(column, first, second);
    sums.add(first, second, x + i, size);
  }
  Sum rows[kTokens * kPair<Value>];
  sums.store(rows, kPair<Value>);
  for (int t = 0; t < kTokens; t++) {
    const Sum* row = rows + t * kPair<Value>;
    Value* to = result + t * stride;
    if (bias) {
      for (int64_t j = 0; j < num_rows; j++) to[j] = static_cast<Value>(row[j] + static_cast<Sum>(bias[j]));
    } else {
      for (int64_t j = 0; j < num_rows; j++) to[j] = static_cast<Value>(row[j]);
    }
  }
}

template <typename Value, int kTokens = kMostTokens<Value>, typename... Arguments>
void panel_product_of(int64_t tokens, Arguments... arguments) {
  if constexpr (kTokens > 1) {
    if (tokens < kTokens) return panel_product_of<Value, kTokens - 1>(tokens, arguments...);
  }
  panel_product<Value, kTokens>(arguments...);
}

template <typename Value>
void linear_into(const at::Tensor& x, const at::Tensor& panels, const Value* bias, at::Tensor& result) {
  using Sum = SumOf<Value>;
  const int64_t size = panels.size(1), num_rows = result.size(-1), num_panels = panels.size(0);
  const int64_t tokens = x.numel() / std::max<int64_t>(1, size), pieces = (tokens + kMostTokens<Value> - 1) / kMostTokens<Value>;
  const Value *from = x.const_data_ptr<Value>(), *weight = panels.const_data_ptr<Value>();
  Value* to = result.mutable_data_ptr<Value>();
  const Sum* rows;
  if constexpr (std::is_same_v<Sum, Value>) {
    rows = from;
  } else {
    Sum* converted = scratch<Sum, 0>(x.numel());
    for (int64_t i = 0; i < x.numel(); i++) converted[i] = static_cast<Sum>(from[i]);
    rows = converted;
  }
  const int64_t panel_bytes = size * kPair<Value> * sizeof(Value) * std::max<int64_t>(1, pieces);
  at::parallel_for(0, num_panels, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, panel_bytes)), [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; number++) {
      const int64_t row = number * kPair<Value>;
      for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t first = tokens * piece / pieces, next = tokens * (piece + 1) / pieces;
        panel_product_of<Value>(
            next - first, weight + row * size, rows + first * size, bias ? bias + row : nullptr, to + first * num_rows + row, size,
            num_rows, std::min<int64_t>(kPair<Value>, num_rows - row));
      }
    }
  });
}

// Attention. Rows are the queries of one group of heads, which share keys and values.

// A head's keys or values as rows of `width` numbers, a multiple of kPair: where they lie, or converted and padded with zeros.
template <typename Value, int number>
std::pair<const SumOf<Value>*, int64_t> rows_of(const at::Tensor& memory, int64_t batch, int64_t head, int64_t width) {
  using Sum = SumOf<Value>;
  const int64_t size = memory.size(3), count = memory.size(2), stride = memory.stride(2);
  const Value* from = memory.const_data_ptr<Value>() + batch * memory.stride(0) + head * memory.stride(1);
  if constexpr (std::is_same_v<Sum, Value>) {
    if (size == width) return {from, stride};
  }
  Sum* to = scratch<Sum, number>(count * width);
  for (int64_t place = 0; place < count; place++) {
    for (int64_t i = 0; i < size; i++) to[place * width + i] = static_cast<Sum>(from[place * stride + i]);
    std::fill(to + place * width + size, to + (place + 1) * width, Sum(0));
  }
  return {to, width};
}

// scores[r][s] = sum_i queries[r][i] keys[s][i]
template <typename Value, int kRows>
void score(
    const SumOf<Value>* queries, const SumOf<Value>* keys, int64_t stride, int64_t count, int64_t width, SumOf<Value>* scores) {
  using Vector = Vectorized<SumOf<Value>>;
  for (int64_t place = 0; place < count; place++) {
    Vector sums[kRows];
    for (int64_t i = 0; i < width; i += kPair<Value>) {
      prefetch(keys + (place + kPrefetchRows) * stride + i);
      const Vector first = Vector::loadu(keys + place * stride + i);
      const Vector second = Vector::loadu(keys + place * stride + i + kLanes<Value>);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        sums[r] = at::vec::fmadd(Vector::loadu(queries + r * width + i), first, sums[r]);
        sums[r] = at::vec::fmadd(Vector::loadu(queries + r * width + i + kLanes<Value>), second, sums[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) scores[r * count + place] = total_of(sums[r]);
  }
}

// Scores plus a mask become probabilities.
template <typename Sum>
void softmax(Sum* scores, const Sum* mask, int64_t count) {
  using Vector = Vectorized<Sum>;
  constexpr int64_t lanes = Vector::size();
  const int64_t whole = count / lanes * lanes;
  Vector most(-std::numeric_limits<Sum>::infinity()), sums(0);
  for (int64_t s = 0; s < whole; s += lanes) {
    const Vector value = Vector::loadu(scores + s) + Vector::loadu(mask + s);
    value.store(scores + s);
    most = at::vec::maximum(most, value);
  }
  Sum each[lanes], largest = -std::numeric_limits<Sum>::infinity();
  most.store(each);
  for (const Sum value : each) largest = std::max(largest, value);
  for (int64_t s = whole; s < count; s++) largest = std::max(largest, scores[s] += mask[s]);
  for (int64_t s = 0; s < whole; s += lanes) {
    const Vector value = (Vector::loadu(scores + s) - Vector(largest)).exp();
    value.store(scores + s);
    sums = sums + value;
  }
  Sum total = total_of(sums);
  for (int64_t s = whole; s < count; s++) total += scores[s] = std::exp(scores[s] - largest);
  for (int64_t s = 0; s < whole; s += lanes) (Vector::loadu(scores + s) / Vector(total)).store(scores + s);
  for (int64_t s = whole; s < count; s++) scores[s] /= total;
}

// What a token's mask adds to the scores of one head, (S,).
template <typename Sum>
const Sum* mask_row(const at::Tensor& mask, int64_t batch, int64_t head, int64_t token, Sum* memory) {
  const int64_t from = batch * mask.stride(0) + head * mask.stride(1) + token * mask.stride(2), stride = mask.stride(3);
  const int64_t count = mask.size(3);
  if (mask.scalar_type() != at::kBool) {
    const Sum* added = mask.const_data_ptr<Sum>() + from;
    if (stride == 1) return added;
    for (int64_t s = 0; s < count; s++) memory[s] = added[s * stride];
    return memory;
  }
  const bool* seen = mask.const_data_ptr<bool>() + from;
  constexpr Sum hidden = -std::numeric_limits<Sum>::infinity();
  if (stride == 1) {
    for (int64_t s = 0; s < count; s++) memory[s] = seen[s] ? Sum(0) : hidden;
  } else {
    for (int64_t s = 0; s < count; s++) memory[s] = seen[s * stride] ? Sum(0) : hidden;
  }
  return memory;
}

// result[r] = sum_s probs[r][s] values[s], all in float32 or wider.
template <typename Value, int kRows>
void weigh(
    const SumOf<Value>* probs, const SumOf<Value>* values, int64_t stride, int64_t count, int64_t width, SumOf<Value>* result) {
  using Vector = Vectorized<SumOf<Value>>;
  for (int64_t i = 0; i < width; i += kPair<Value>) {
    Sums<Value, kRows> sums;
    for (int64_t place = 0; place < count; place++) {
      const SumOf<Value>* from = values + place * stride + i;
      prefetch(from + kPrefetchRows * stride);
      sums.add(Vector::loadu(from), Vector::loadu(from + kLanes<Value>), probs + place, count);
    }
    sums.store(result + i, width);
  }
}

template <typename Value, int kRows = kMostRows, typename... Arguments>
void score_of(int64_t rows, Arguments... arguments) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return score_of<Value, kRows - 1>(rows, arguments...);
  }
  score<Value, kRows>(arguments...);
}

template <typename Value, int kRows = kMostRows, typename... Arguments>
void weigh_of(int64_t rows, Arguments... arguments) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return weigh_of<Value, kRows - 1>(rows, arguments...);
  }
  weigh<Value, kRows>(arguments...);
}

template <typename Value>
void attention_into(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask, double scale, at::Tensor& result) {
  using Sum = SumOf<Value>;
  const int64_t heads = query.size(1), tokens = query.size(2), size = query.size(3), value_size = value.size(3);
  const int64_t shared = key.size(1), group = heads / shared, rows = group * tokens, count = key.size(2);
  const int64_t width = (size + kPair<Value> - 1) / kPair<Value> * kPair<Value>;
  const int64_t value_width = (value_size + kPair<Value> - 1) / kPair<Value> * kPair<Value>;
  const int64_t items = query.size(0) * shared, pieces = std::min<int64_t>(rows, (at::get_num_threads() + items - 1) / items);
  const int64_t item_bytes = count * (width + value_width) * sizeof(Sum) * ((rows + pieces - 1) / std::max<int64_t>(1, pieces));
  const Value* queries = query.const_data_ptr<Value>();
  Value* to = result.mutable_data_ptr<Value>();
  at::parallel_for(0, items * pieces, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, item_bytes)), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) {
      const int64_t batch = item / pieces / shared, kv_head = item / pieces % shared, piece = item % pieces;
      const int64_t first = rows * piece / pieces, next = rows * (piece + 1) / pieces;
      const auto [keys, key_stride] = rows_of<Value, 1>(key, batch, kv_head, width);
      const auto [values, value_stride] = rows_of<Value, 2>(value, batch, kv_head, value_width);
      Sum *scaled = scratch<Sum, 3>(kMostRows * width), *scores = scratch<Sum, 4>(kMostRows * count);
      Sum *sums = scratch<Sum, 5>(kMostRows * value_width), *added = scratch<Sum, 6>(count);
      for (int64_t row = first; row < next; row += kMostRows) {
        const int64_t several = std::min<int64_t>(kMostRows, next - row);
        for (int64_t r = 0; r < several; r++) {
          const int64_t head = kv_head * group + (row + r) / tokens, token = (row + r) % tokens;
          const Value* from = queries + batch * query.stride(0) + head * query.stride(1) + token * query.stride(2);
          for (int64_t i = 0; i < size; i++) scaled[r * width + i] = static_cast<Sum>(from[i]) * static_cast<Sum>(scale);
          std::fill(scaled + r * width + size, scaled + (r + 1) * width, Sum(0));
        }
        score_of<Value>(several, scaled, keys, key_stride, count, width, scores);
        for (int64_t r = 0; r < several; r++) {
          const int64_t head = kv_head * group + (row + r) / tokens, token = (row + r) % tokens;
          softmax<Sum>(scores + r * count, mask_row<Sum>(mask, batch, head, token, added), count);
        }
        weigh_of<Value>(several, scores, values, value_stride, count, value_width, sums);
        for (int64_t r = 0; r < several; r++) {
          const int64_t head = kv_head * group + (row + r) / tokens, token = (row + r) % tokens;
          Value* into = to + ((batch * tokens + token) * heads + head) * value_size;
          for (int64_t i = 0; i < value_size; i++) into[i] = static_cast<Value>(sums[r * value_width + i]);
        }
      }
    }
  });
}

// The k-th largest of each row. A bound from the largest of many groups leaves few numbers to be ordered.
template <typename Value>
Value kth_largest_of(const Value* row, int64_t size, int64_t k) {
  using Vector = Vectorized<Value>;
  constexpr int64_t lanes = Vector::size();
  const int64_t num_vectors = std::max<int64_t>(4, 2 * k / lanes), groups = num_vectors * lanes;
  Value *most = scratch<Value, 7>(groups), *kept = scratch<Value, 8>(size);
  const auto kth = [k](Value* first, Value* last) {
    std::nth_element(first, first + k - 1, last, std::greater<Value>());
    return first[k - 1];
  };
  std::fill(most, most + groups, -std::numeric_limits<Value>::infinity());
  const int64_t whole = size / lanes * lanes;
  for (int64_t start = 0; start < whole; start += groups) {
    const int64_t end = std::min(groups, whole - start);
    for (int64_t i = 0; i < end; i += lanes) {
      at::vec::maximum(Vector::loadu(most + i), Vector::loadu(row + start + i)).store(most + i);  // a NaN stays
    }
  }
  bool has_nan = false;
  for (int64_t i = 0; i < groups; i++) has_nan |= std::isnan(most[i]);
  for (int64_t i = whole; i < size; i++) has_nan |= std::isnan(row[i]);
  if (has_nan) return std::numeric_limits<Value>::quiet_NaN();
  const Value bound = size > 2 * groups ? kth(most, most + groups) : -std::numeric_limits<Value>::infinity();
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

template <typename Function>
void with_type(at::ScalarType type, Function function) {
  switch (type) {
    case at::kDouble: return function(double());
    case at::kFloat: return function(float());
    case at::kBFloat16: return function(at::BFloat16());
    case at::kHalf: return function(at::Half());
    default: TORCH_CHECK(false, "no operator for ", type);
  }
}

// x W^T + b (..., O) of x (..., I), W in panels (ceil(O / P), I, P), b (O).
at::Tensor linear(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& bias, int64_t num_rows) {
  TORCH_CHECK(
      x.size(-1) == panels.size(1) && x.scalar_type() == panels.scalar_type() && panels.is_contiguous(), "x is ", x.scalar_type(), " ",
      x.sizes(), ", panels are ", panels.scalar_type(), " ", panels.sizes());
  auto shape = x.sizes().vec();
  shape.back() = num_rows;
  at::Tensor result = at::empty(shape, x.options()), rows = x.contiguous();
  with_type(x.scalar_type(), [&](auto value) {
    using Value = decltype(value);
    linear_into<Value>(rows, panels, bias ? bias->const_data_ptr<Value>() : nullptr, result);
  });
  return result;
}

// The attention (B, T, heads, D) of query (B, heads, T, D) to key and value (B, shared, S, D); mask broadcasts to (B, heads, T, S).
at::Tensor attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask, double scale) {
  auto contiguous = [](const at::Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); };
  const at::Tensor rows = contiguous(query), keys = contiguous(key), values = contiguous(value);
  const int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2);
  const auto sum_type = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor wide = mask.scalar_type() == at::kBool ? mask : mask.to(sum_type);
  const at::Tensor expanded = wide.expand({batch, heads, tokens, key.size(2)});
  at::Tensor result = at::empty({batch, tokens, heads, value.size(3)}, query.options());
  with_type(query.scalar_type(), [&](auto type) { attention_into<decltype(type)>(rows, keys, values, expanded, scale, result); });
  return result;
}

// The k-th largest (..., 1) of x (..., V), float32 or float64; NaN where a row has a NaN.
at::Tensor kth_largest(const at::Tensor& x, int64_t k) {
  const int64_t size = x.size(-1);
  TORCH_CHECK(0 < k && k <= size, "k is ", k, " of ", size);
  auto shape = x.sizes().vec();
  shape.back() = 1;
  at::Tensor result = at::empty(shape, x.options()), rows = x.contiguous();
  const auto into = [&](auto value) {
    using Value = decltype(value);
    const Value* from = rows.const_data_ptr<Value>();
    Value* to = result.mutable_data_ptr<Value>();
    const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, size * sizeof(Value)));
    at::parallel_for(0, result.numel(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) to[row] = kth_largest_of<Value>(from + row * size, size, k);
    });
  };
  x.scalar_type() == at::kDouble ? into(double()) : into(float());
  return result;
}

int64_t panel_rows(bool wide) {
  return wide ? kPair<double> : kPair<float>;
}

}  // namespace

TORCH_LIBRARY(specheads, library) {
  library.def("linear(Tensor x, Tensor panels, Tensor? bias, int num_rows) -> Tensor");
  library.def("attention(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor");
  library.def("kth_largest(Tensor x, int k) -> Tensor");
  library.def("panel_rows(bool wide) -> int", &panel_rows);
}

TORCH_LIBRARY_IMPL(specheads, CPU, library) {
  library.impl("linear", &linear);
  library.impl("attention", &attention);
  library.impl("kth_largest", &kth_largest);
}

namespace {

// Sampling: of most distributions only a few tokens have a probability, and vectors without one are skipped.

// The softmax of the logits that are at least `least`; the others have probability 0. A NaN makes the whole row NaN.
template <typename Value>
void kept_softmax_of(const Value* row, Value least, int64_t size, Value* probs) {
  using Vector = Vectorized<Value>;
  constexpr int64_t lanes = Vector::size();
  const Vector hidden(-std::numeric_limits<Value>::infinity());
  int64_t *starts = scratch<int64_t, 9>(size / lanes + 1), count = 0;
  Vector most = hidden;
  const auto hide = [&](const Vector& logits) { return Vector::blendv(logits, hidden, logits < Vector(least)); };
  const auto load = [&](int64_t start) {
    return start + lanes <= size ? Vector::loadu(row + start) : Vector::set(hidden, Vector::loadu(row + start, size - start), size - start);
  };
  for (int64_t start = 0; start < size; start += lanes) {
    const Vector kept = hide(load(start));
    Vector(0).store(probs + start, std::min(lanes, size - start));
    if ((kept == hidden).zero_mask() == 0) continue;
    starts[count++] = start;
    most = at::vec::maximum(most, kept);
  }
  const Vector largest(at::vec::vec_reduce_all<Value>([](const Vector& x, const Vector& y) { return at::vec::maximum(x, y); }, most, lanes));
  Vector sums(0);
  for (int64_t i = 0; i < count; i++) {
    const Vector weights = (hide(load(starts[i])) - largest).exp();
    weights.store(probs + starts[i], std::min(lanes, size - starts[i]));
    sums = sums + weights;
  }
  const Value total = total_of(sums);
  // Without a kept logit, with an infinite one or with a NaN there is no distribution.
  if (!(total > 0)) return std::fill(probs, probs + size, std::numeric_limits<Value>::quiet_NaN());
  for (int64_t i = 0; i < count; i++) {
    const int64_t number = std::min(lanes, size - starts[i]);
    (Vector::loadu(probs + starts[i], number) / Vector(total)).store(probs + starts[i], number);
  }
}

// The fewest of the most likely tokens that have probability `top_p` together, renormalised; a row of NaN stays one.
template <typename Value>
void nucleus_of(const Value* row, double top_p, int64_t size, Value* result) {
  using Vector = Vectorized<Value>;
  using Entry = std::pair<Value, int64_t>;
  constexpr int64_t lanes = Vector::size();
  Entry* entries = scratch<Entry, 11>(size);
  int64_t count = 0, kept = 0;
  double total = 0;
  const auto collect = [&](Value least) {
    count = 0;
    for (int64_t start = 0; start < size; start += lanes) {
      if (start + lanes <= size && (Vector::loadu(row + start) >= Vector(least)).zero_mask() == (1 << lanes) - 1) continue;
      for (int64_t i = start; i < std::min(start + lanes, size); i++) {
        if (row[i] >= least) entries[count++] = {row[i], i};
      }
    }
  };
  const auto before = [](const Entry& x, const Entry& y) { return x.first > y.first || (x.first == y.first && x.second < y.second); };
  // Whether the entries reach top_p. Most of the mass is in a few, so they are sorted in pieces, each longer than all before it.
  const auto reach = [&] {
    kept = 0, total = 0;
    for (int64_t sorted = 0, end; sorted < count; sorted = end) {
      end = std::min(4 * sorted + 256, count);
      if (end < count) std::nth_element(entries + sorted, entries + end, entries + count, before);
      std::sort(entries + sorted, entries + end, before);
      for (; kept < end; kept++) {
        const double sum = total + entries[kept].first;
        if (static_cast<Value>(sum) - entries[kept].first >= static_cast<Value>(top_p)) return true;
        total = sum;
      }
    }
    return false;
  };
  // Tokens below this have at most half of what top_p leaves over; only rounding can make them needed.
  collect(std::max<Value>((1 - top_p) / (2 * size), std::numeric_limits<Value>::denorm_min()));
  if (!reach()) {
    collect(std::numeric_limits<Value>::denorm_min());
    reach();
  }
  std::fill(result, result + size, kept ? Value(0) : std::numeric_limits<Value>::quiet_NaN());
  for (int64_t i = 0; i < kept; i++) result[entries[i].second] = entries[i].first / static_cast<Value>(total);
}

// The first of the largest numbers, or the first NaN.
template <typename Value>
int64_t most_likely_of(const Value* row, int64_t size) {
  using Vector = Vectorized<Value>;
  constexpr int64_t lanes = Vector::size();
  const int64_t whole = size / lanes * lanes;
  Vector most(-std::numeric_limits<Value>::infinity());
  for (int64_t start = 0; start < whole; start += lanes) most = at::vec::maximum(most, Vector::loadu(row + start));
  Value each[lanes], largest = -std::numeric_limits<Value>::infinity();
  most.store(each);
  bool has_nan = false;
  const auto add = [&](Value value) {
    has_nan |= std::isnan(value);
    largest = std::max(largest, value);
  };
  for (const Value value : each) add(value);  // the maximum of vectors keeps a NaN
  for (int64_t i = whole; i < size; i++) add(row[i]);
  const auto found = [&](Value value) { return has_nan ? std::isnan(value) : value == largest; };
  int64_t i = 0;
  while (!has_nan && i < whole && (Vector::loadu(row + i) == Vector(largest)).zero_mask() == (1 << lanes) - 1) i += lanes;
  while (!found(row[i])) i++;
  return i;
}

// The first token at which the sum of the probabilities exceeds `uniform` times their total; see `token_at` in sampling.py.
template <typename Value>
int64_t token_at_of(const Value* probs, int64_t size, double uniform) {
  using Vector = Vectorized<Value>;
  constexpr int64_t lanes = Vector::size(), block = 32 * lanes;
  // Added one after the other, as cumsum does; a probability of 0 changes no sum.
  const auto sum = [&](double before, int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += lanes) {
      if (start + lanes <= end && Vector::loadu(probs + start).zero_mask() == (1 << lanes) - 1) continue;
      for (int64_t i = start; i < std::min(start + lanes, end); i++) before += probs[i];
    }
    return before;
  };
  const int64_t blocks = (size + block - 1) / block;
  double* sums = scratch<double, 10>(blocks + 1);
  sums[0] = 0;
  for (int64_t i = 0; i < blocks; i++) sums[i + 1] = sum(sums[i], i * block, std::min(size, (i + 1) * block));
  const double total = sums[blocks], point = std::min(uniform * total, std::nextafter(total, 0.0));
  const int64_t chosen = std::upper_bound(sums + 1, sums + blocks + 1, point) - (sums + 1);
  if (chosen == blocks) return size - 1;
  double cumulative = sums[chosen];
  for (int64_t i = chosen * block; i < size; i++) {
    cumulative += probs[i];
    if (cumulative > point) return i;
  }
  return size - 1;
}

// Call `function(row, value)` for every row of x (..., V), float32 or float64; `value` has the type of its numbers.
template <typename Function>
void for_each_row(const at::Tensor& x, Function function) {
  const int64_t size = x.size(-1), rows = size ? x.numel() / size : 0;
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, size * x.element_size()));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) x.scalar_type() == at::kDouble ? function(row, double()) : function(row, float());
  });
}

void check_wide(const at::Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble, "no operator for ", x.scalar_type());
}

// The probabilities (..., V) of logits (..., V) of which those below `least` (..., 1) are hidden.
at::Tensor kept_softmax(const at::Tensor& logits, const at::Tensor& least) {
  check_wide(logits);
  const int64_t size = logits.size(-1);
  TORCH_CHECK(
      least.scalar_type() == logits.scalar_type() && least.numel() * size == logits.numel(), "logits are ", logits.sizes(),
      ", bounds are ", least.scalar_type(), " ", least.sizes());
  const at::Tensor rows = logits.contiguous(), bounds = least.contiguous();
  at::Tensor result = at::empty(logits.sizes(), logits.options());
  for_each_row(rows, [&](int64_t row, auto value) {
    using Value = decltype(value);
    kept_softmax_of<Value>(
        rows.const_data_ptr<Value>() + row * size, bounds.const_data_ptr<Value>()[row], size,
        result.mutable_data_ptr<Value>() + row * size);
  });
  return result;
}

// The probabilities (..., V) of the nucleus of probs (..., V).
at::Tensor nucleus(const at::Tensor& probs, double top_p) {
  check_wide(probs);
  TORCH_CHECK(0 < top_p && top_p <= 1, "top_p is ", top_p);
  const int64_t size = probs.size(-1);
  const at::Tensor rows = probs.contiguous();
  at::Tensor result = at::empty(probs.sizes(), probs.options());
  for_each_row(rows, [&](int64_t row, auto value) {
    using Value = decltype(value);
    nucleus_of<Value>(rows.const_data_ptr<Value>() + row * size, top_p, size, result.mutable_data_ptr<Value>() + row * size);
  });
  return result;
}

// The index (...) of the largest number of each row of x (..., V), the first of several.
at::Tensor most_likely(const at::Tensor& x) {
  check_wide(x);
  const int64_t size = x.size(-1);
  TORCH_CHECK(size > 0, "there is no number in ", x.sizes());
  const at::Tensor rows = x.contiguous();
  at::Tensor result = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kLong));
  for_each_row(rows, [&](int64_t row, auto value) {
    using Value = decltype(value);
    result.mutable_data_ptr<int64_t>()[row] = most_likely_of<Value>(rows.const_data_ptr<Value>() + row * size, size);
  });
  return result;
}

// Token ids (...) drawn from probs (..., V) at uniform (...), float64.
at::Tensor token_at(const at::Tensor& probs, const at::Tensor& uniform) {
  check_wide(probs);
  const int64_t size = probs.size(-1);
  TORCH_CHECK(
      uniform.scalar_type() == at::kDouble && uniform.numel() * size == probs.numel(), "probabilities are ", probs.sizes(),
      ", uniform numbers are ", uniform.scalar_type(), " ", uniform.sizes());
  const at::Tensor rows = probs.contiguous(), points = uniform.contiguous();
  at::Tensor result = at::empty(uniform.sizes(), probs.options().dtype(at::kLong));
  for_each_row(rows, [&](int64_t row, auto value) {
    using Value = decltype(value);
    result.mutable_data_ptr<int64_t>()[row] =
        token_at_of<Value>(rows.const_data_ptr<Value>() + row * size, size, points.const_data_ptr<double>()[row]);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specheads, library) {
  library.def("kept_softmax(Tensor logits, Tensor least) -> Tensor");
  library.def("nucleus(Tensor probs, float top_p) -> Tensor");
  library.def("most_likely(Tensor x) -> Tensor");
  library.def("token_at(Tensor probs, Tensor uniform) -> Tensor");
}

TORCH_LIBRARY_IMPL(specheads, CPU, library) {
  library.impl("kept_softmax", &kept_softmax);
  library.impl("nucleus", &nucleus);
  library.impl("most_likely", &most_likely);
  library.impl("token_at", &token_at);
}
