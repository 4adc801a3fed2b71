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
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

using at::vec::Vectorized;

template <typename Value>
using SumOf = std::conditional_t<std::is_same_v<Value, double>, double, float>;
template <typename Value>
constexpr int kLanes = Vectorized<SumOf<Value>>::size();
template <typename Value>
constexpr int kPair = 2 * kLanes<Value>;  // numbers in the two vectors that are in work at a time

// What products read: bfloat16 numbers as they are where the processor multiplies them in pairs, else the type of sums.
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
template <typename Value>
constexpr bool kMultipliesPairs = std::is_same_v<Value, at::BFloat16>;
#else
template <typename Value>
constexpr bool kMultipliesPairs = false;
#endif
template <typename Value>
using InputOf = std::conditional_t<kMultipliesPairs<Value>, Value, SumOf<Value>>;

// Tokens at a time: as many as leave their sums in registers. x86 without AVX-512 has 16 of them, others have 32. Fewer in types
// that models are seldom run in, because each number is compiled.
#if defined(CPU_CAPABILITY_AVX2)
constexpr int kRegisterTokens = 6;
#else
constexpr int kRegisterTokens = 12;
#endif
template <typename Value>
constexpr int kMostTokens = std::is_same_v<Value, float> || std::is_same_v<Value, at::BFloat16> ? kRegisterTokens : 4;

constexpr int64_t kPrefetchBytes = 4096;  // ahead of the column in work; 0, 1024 and 2048 were slower on a Sapphire Rapids
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

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
// The same for numbers of bfloat16, two columns at a time.
template <int count>
struct PairSums {
  __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
  PairSums<count - 1> others;

  // sums[r] += factors[r * stride] left[., 0] + factors[r * stride + 1] left[., 1], and the same for right
  C10_ALWAYS_INLINE void add(__m512i left, __m512i right, const at::BFloat16* factors, int64_t stride) {
    int32_t both;
    std::memcpy(&both, factors, sizeof(both));
    const __m512i factor = _mm512_set1_epi32(both);
    first = _mm512_dpbf16_ps(first, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(factor));
    second = _mm512_dpbf16_ps(second, reinterpret_cast<__m512bh>(right), reinterpret_cast<__m512bh>(factor));
    if constexpr (count > 1) others.add(left, right, factors + stride, stride);
  }

  C10_ALWAYS_INLINE void store(float* to, int64_t stride) const {
    _mm512_storeu_ps(to, first);
    _mm512_storeu_ps(to + 16, second);
    if constexpr (count > 1) others.store(to + stride, stride);
  }
};
template <>
struct PairSums<0> {};
#endif

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

// Threads that work on several loops in turn: entering a parallel region twice takes as long as a small loop, waiting for each other
// a fifth of that. Without OpenMP each loop is a region.
class Team {
 public:
  // Run work(team) on all threads.
  template <typename Work>
  static void run(const Work& work) {
#ifdef _OPENMP
    const int most = omp_in_parallel() ? 1 : at::get_num_threads();
    std::atomic<int> arrived{0};
#pragma omp parallel num_threads(most)
    {
      Team team(omp_get_thread_num(), omp_get_num_threads(), arrived);
      work(team);
    }
#else
    std::atomic<int> arrived{0};
    Team team(0, 1, arrived);
    work(team);
#endif
  }

  // Share the numbers from 0 to count among the threads, at least `grain` for each, and wait until all are done.
  template <typename Loop>
  void each(int64_t count, int64_t grain, const Loop& loop) {
#ifdef _OPENMP
    const int64_t threads = std::min<int64_t>(size_, (count + grain - 1) / grain);
    if (rank_ < threads) loop(count * rank_ / threads, count * (rank_ + 1) / threads);
    wait();
#else
    at::parallel_for(0, count, grain, loop);
#endif
  }

  // Run `work` on one thread while the others wait.
  template <typename Work>
  void once(const Work& work) {
    if (rank_ == 0) work();
    wait();
  }

 private:
  Team(int rank, int size, std::atomic<int>& arrived) : rank_(rank), size_(size), arrived_(arrived) {}

  void wait() {
    if (size_ == 1) return;
    target_ += size_;
    arrived_.fetch_add(1, std::memory_order_acq_rel);
    for (int turn = 0; arrived_.load(std::memory_order_acquire) < target_; turn++) {
      if (turn > kTurns) std::this_thread::yield();  // there are more threads than cores
    }
  }

  static constexpr int kTurns = 100000;
  const int rank_, size_;
  int target_ = 0;
  std::atomic<int>& arrived_;
};

// Linear maps. A weight lies in panels of kPair rows, each stored column by column; see `pack` in operators.py.

// block[t][j] = sum_i x[t][i] panel[i][j], where columns i of the panel are `stride` apart
template <typename Value, int kTokens>
void panel_product(const Value* panel, int64_t stride, const InputOf<Value>* x, int64_t size, SumOf<Value>* block) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
  if constexpr (kMultipliesPairs<Value>) {
    PairSums<kTokens> sums;
    for (int64_t i = 0; i < size; i += 2) {
      const Value* columns = panel + i * stride;
      prefetch(columns + kPrefetchBytes / sizeof(Value));
      prefetch(columns + kPair<Value> + kPrefetchBytes / sizeof(Value));
      sums.add(_mm512_loadu_si512(columns), _mm512_loadu_si512(columns + kPair<Value>), x + i, size);
    }
    sums.store(block, kPair<Value>);
    return;
  }
#endif
  using Vector = Vectorized<SumOf<Value>>;
  Sums<Value, kTokens> sums;
  for (int64_t i = 0; i < size; i++) {
    const Value* column = panel + i * stride;
    prefetch(column + kPrefetchBytes / sizeof(Value));
    Vector first, second;
    load_pair(column, first, second);
    if constexpr (!kMultipliesPairs<Value>) sums.add(first, second, x + i, size);
  }
  sums.store(block, kPair<Value>);
}

template <typename Value, int kTokens = kMostTokens<Value>, typename... Arguments>
void panel_product_of(int64_t tokens, Arguments... arguments) {
  if constexpr (kTokens > 1) {
    if (tokens < kTokens) return panel_product_of<Value, kTokens - 1>(tokens, arguments...);
  }
  panel_product<Value, kTokens>(arguments...);
}

// Multiply rows (tokens, size) with all panels, `together` at a time. For each product it calls
// finish(number of the panel, first token, number of tokens, blocks), a block being (tokens, kPair).
template <typename Value, typename Finish>
void for_panels(
    Team& team, const at::Tensor& panels, int64_t together, const InputOf<Value>* rows, int64_t tokens, const Finish& finish) {
  using Sum = SumOf<Value>;
  const int64_t size = panels.size(1), pieces = (tokens + kMostTokens<Value> - 1) / kMostTokens<Value>;
  const Value* weight = panels.const_data_ptr<Value>();
  const int64_t bytes = together * size * kPair<Value> * sizeof(Value) * std::max<int64_t>(1, pieces);
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes));
  team.each(panels.size(0) / together, grain, [&](int64_t begin, int64_t end) {
    Sum blocks[2 * kMostTokens<Value> * kPair<Value>];
    for (int64_t number = begin * together; number < end * together; number += together) {
      for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t first = tokens * piece / pieces, several = tokens * (piece + 1) / pieces - first;
        for (int64_t i = 0; i < together; i++) {
          const Value* panel = weight + (number + i) * kPair<Value> * size;
          panel_product_of<Value>(several, panel, kPair<Value>, rows + first * size, size, blocks + i * several * kPair<Value>);
        }
        finish(number, first, several, blocks);
      }
    }
  });
}

// Rows (tokens, size) as products read them, (tokens, columns): where they lie, or converted and padded with zeros.
template <typename Value, int number>
const InputOf<Value>* inputs_of(const Value* from, int64_t tokens, int64_t size, int64_t columns) {
  using Input = InputOf<Value>;
  if constexpr (std::is_same_v<Input, Value>) {
    if (size == columns) return from;
  }
  Input* to = scratch<Input, number>(tokens * columns);
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t i = 0; i < size; i++) to[t * columns + i] = static_cast<Input>(from[t * size + i]);
    std::fill(to + t * columns + size, to + (t + 1) * columns, Input(0));
  }
  return to;
}

// to[t][j] = blocks[t][j] + added[t][j], for those of a panel's numbers j that exist; `stride`: of to and added.
template <typename Sum, typename Added, typename To>
void add_block(const Sum* block, int64_t width, int64_t tokens, const Added* added, To* to, int64_t stride, int64_t exist) {
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t j = 0; j < exist; j++) {
      to[t * stride + j] = static_cast<To>(block[t * width + j] + static_cast<Sum>(added[t * stride + j]));
    }
  }
}

template <typename Value>
void linear_into(const at::Tensor& x, const at::Tensor& panels, const Value* bias, at::Tensor& result) {
  using Sum = SumOf<Value>;
  const int64_t num_rows = result.size(-1), size = x.size(-1), tokens = x.numel() / std::max<int64_t>(1, size);
  const InputOf<Value>* rows = inputs_of<Value, 0>(x.const_data_ptr<Value>(), tokens, size, panels.size(1));
  Value* to = result.mutable_data_ptr<Value>();
  Team::run([&](Team& team) {
    for_panels<Value>(team, panels, 1, rows, tokens, [&](int64_t number, int64_t first, int64_t several, const Sum* block) {
      const int64_t row = number * kPair<Value>, exist = std::min<int64_t>(kPair<Value>, num_rows - row);
      for (int64_t t = 0; t < several; t++, block += kPair<Value>) {
        Value* into = to + (first + t) * num_rows + row;
        if (bias) {
          for (int64_t j = 0; j < exist; j++) into[j] = static_cast<Value>(block[j] + static_cast<Sum>(bias[row + j]));
        } else {
          for (int64_t j = 0; j < exist; j++) into[j] = static_cast<Value>(block[j]);
        }
      }
    });
  });
}

// Attention. Rows are the queries of one group of heads, which share keys and values.

// A head's keys or values as rows of `width` numbers, a multiple of kPair: where they lie, or converted and padded with zeros.
template <typename Value, int number>
std::pair<const SumOf<Value>*, int64_t> rows_of(
    const at::Tensor& memory, int64_t batch, int64_t head, int64_t count, int64_t width) {
  using Sum = SumOf<Value>;
  const int64_t size = memory.size(3), stride = memory.stride(2);
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

// Multiply rows (R, size) with a panel, and put what exists of the product to result[r * width + j].
template <typename Sum>
void rows_product(
    const Sum* panel, int64_t stride, const Sum* rows, int64_t num_rows, int64_t size, Sum* result, int64_t width, int64_t exist) {
  Sum block[kMostTokens<Sum> * kPair<Sum>];
  for (int64_t first = 0; first < num_rows; first += kMostTokens<Sum>) {
    const int64_t several = std::min<int64_t>(kMostTokens<Sum>, num_rows - first);
    panel_product_of<Sum>(several, panel, stride, rows + first * size, size, block);
    for (int64_t r = 0; r < several; r++) std::copy_n(block + r * kPair<Sum>, exist, result + (first + r) * width);
  }
}

// Attention of tokens (B, heads, T) to the first positions of keys and values (B, shared, S', D), as many as the mask
// (B, heads, T, S) has. query(b, head, t, to) writes a scaled query, store(b, head, t, from) takes a result.
template <typename Value, typename Query, typename Store>
void attend(
    Team& team, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask, const Query& query, const Store& store) {
  using Sum = SumOf<Value>;
  const int64_t heads = mask.size(1), tokens = mask.size(2), count = mask.size(3), size = key.size(3), value_size = value.size(3);
  const int64_t shared = key.size(1), group = heads / shared, rows = group * tokens;
  const int64_t value_width = (value_size + kPair<Sum> - 1) / kPair<Sum> * kPair<Sum>;
  const int64_t items = mask.size(0) * shared, pieces = std::min<int64_t>(rows, (at::get_num_threads() + items - 1) / items);
  const int64_t item_bytes = count * (size + value_width) * sizeof(Sum) * ((rows + pieces - 1) / std::max<int64_t>(1, pieces));
  team.each(items * pieces, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, item_bytes)), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) {
      const int64_t batch = item / pieces / shared, kv_head = item / pieces % shared, piece = item % pieces;
      const int64_t first = rows * piece / pieces, next = rows * (piece + 1) / pieces;
      const auto [keys, key_stride] = rows_of<Value, 1>(key, batch, kv_head, count, size);
      const auto [values, value_stride] = rows_of<Value, 2>(value, batch, kv_head, count, value_width);
      Sum *scaled = scratch<Sum, 3>((next - first) * size), *scores = scratch<Sum, 4>((next - first) * count);
      Sum *panel = scratch<Sum, 5>(size * kPair<Sum>), *added = scratch<Sum, 6>(count);
      Sum* sums = scratch<Sum, 14>((next - first) * value_width);
      for (int64_t row = first; row < next; row++) {
        query(batch, kv_head * group + row / tokens, row % tokens, scaled + (row - first) * size);
      }
      for (int64_t place = 0; place < count; place += kPair<Sum>) {
        const int64_t exist = std::min<int64_t>(kPair<Sum>, count - place);
        at::vec::transpose_mxn<Sum>(keys + place * key_stride, key_stride, panel, kPair<Sum>, exist, size);
        rows_product(panel, kPair<Sum>, scaled, next - first, size, scores + place, count, exist);
      }
      for (int64_t row = first; row < next; row++) {
        const Sum* added_to = mask_row<Sum>(mask, batch, kv_head * group + row / tokens, row % tokens, added);
        softmax<Sum>(scores + (row - first) * count, added_to, count);
      }
      for (int64_t i = 0; i < value_width; i += kPair<Sum>) {
        rows_product(values + i, value_stride, scores, next - first, count, sums + i, value_width, kPair<Sum>);
      }
      for (int64_t row = first; row < next; row++) {
        store(batch, kv_head * group + row / tokens, row % tokens, sums + (row - first) * value_width);
      }
    }
  });
}

template <typename Value>
void attention_into(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask, double scale, at::Tensor& result) {
  using Sum = SumOf<Value>;
  const int64_t heads = query.size(1), tokens = query.size(2), size = query.size(3), value_size = value.size(3);
  const Value* queries = query.const_data_ptr<Value>();
  Value* results = result.mutable_data_ptr<Value>();
  const auto read = [&](int64_t batch, int64_t head, int64_t token, Sum* to) {
    const Value* from = queries + batch * query.stride(0) + head * query.stride(1) + token * query.stride(2);
    for (int64_t i = 0; i < size; i++) to[i] = static_cast<Sum>(from[i]) * static_cast<Sum>(scale);
  };
  const auto store = [&](int64_t batch, int64_t head, int64_t token, const Sum* from) {
    Value* to = results + ((batch * tokens + token) * heads + head) * value_size;
    for (int64_t i = 0; i < value_size; i++) to[i] = static_cast<Value>(from[i]);
  };
  Team::run([&](Team& team) { attend<Value>(team, key, value, mask, read, store); });
}

// Decoder layers.

// The tensors of a layer as Llama has them. Maps are packed; panels of gate and up alternate.
struct Layer {
  const at::Tensor &norm, &queries_keys_values;
  const std::optional<at::Tensor>& bias;  // of queries, keys and values
  const at::Tensor &output, &mlp_norm, &gate_up, &down;
  double epsilon, scale;
};

// RMS norm of float32 numbers, as transformers computes it, with the rounding of its steps; only the sum is as wide as others.
template <typename Value, typename From>
void norm_into(const From* x, const Value* weight, int64_t tokens, int64_t size, double epsilon, InputOf<Value>* to) {
  for (int64_t t = 0; t < tokens; t++, x += size, to += size) {
    using Sum = SumOf<Value>;
    Sum squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++) squares += static_cast<Sum>(static_cast<float>(x[i])) * static_cast<float>(x[i]);
    const float factor = 1 / std::sqrt(static_cast<float>(squares / size) + static_cast<float>(epsilon));
    for (int64_t i = 0; i < size; i++) {
      to[i] = static_cast<InputOf<Value>>(static_cast<Value>(weight[i] * static_cast<Value>(static_cast<float>(x[i]) * factor)));
    }
  }
}

// Rotate one head's numbers by its position's angles, and scale them.
template <typename Value, typename To>
void rotate(const SumOf<Value>* from, const Value* cosine, const Value* sine, int64_t size, SumOf<Value> scale, To* to) {
  using Sum = SumOf<Value>;
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i++) {
    const Sum low = from[i], high = from[i + half];
    to[i] = static_cast<To>((low * static_cast<Sum>(cosine[i]) - high * static_cast<Sum>(sine[i])) * scale);
    to[i + half] = static_cast<To>((high * static_cast<Sum>(cosine[i + half]) + low * static_cast<Sum>(sine[i + half])) * scale);
  }
}

// to = silu(gate) * up, for blocks of `size` numbers, a multiple of the lanes.
template <typename Sum>
void gated(const Sum* gate, const Sum* up, int64_t size, Sum* to) {
  using Vector = Vectorized<Sum>;
  for (int64_t i = 0; i < size; i += Vector::size()) {
    const Vector x = Vector::loadu(gate + i);
    (x / (Vector(1) + x.neg().exp()) * Vector::loadu(up + i)).store(to + i);
  }
}

template <typename Value>
void decoder_layer_into(
    const at::Tensor& hidden, const at::Tensor& cosine, const at::Tensor& sine, const at::Tensor& mask, int64_t start,
    const at::Tensor& keys, const at::Tensor& values, const Layer& layer, at::Tensor& result) {
  using Sum = SumOf<Value>;
  using Input = InputOf<Value>;
  const int64_t batch = hidden.size(0), count = hidden.size(1), size = hidden.size(2), tokens = batch * count;
  const int64_t head_size = keys.size(3), heads = mask.size(1), shared = keys.size(1), width = (heads + 2 * shared) * head_size;
  const int64_t inner = layer.down.size(1);
  const Value* residual = hidden.const_data_ptr<Value>();
  Sum *projected = scratch<Sum, 9>(tokens * width), *middle = scratch<Sum, 10>(tokens * size);
  Input *normed = scratch<Input, 11>(tokens * size), *attended = scratch<Input, 12>(tokens * heads * head_size);
  Input* activated = scratch<Input, 13>(tokens * inner);

  const Value* bias = layer.bias ? layer.bias->const_data_ptr<Value>() : nullptr;
  const Value *norm = layer.norm.const_data_ptr<Value>(), *mlp_norm = layer.mlp_norm.const_data_ptr<Value>();
  const Value *cosines = cosine.const_data_ptr<Value>(), *sines = sine.const_data_ptr<Value>();
  Value *to_keys = keys.mutable_data_ptr<Value>(), *to_values = values.mutable_data_ptr<Value>();
  Value* results = result.mutable_data_ptr<Value>();
  const auto memory_of = [&](Value* memory, const at::Tensor& shape, int64_t b, int64_t head, int64_t t) {
    return memory + b * shape.stride(0) + head * shape.stride(1) + (start + t) * shape.stride(2);
  };

  const auto project = [&](int64_t number, int64_t first, int64_t several, const Sum* block) {
    const int64_t row = number * kPair<Value>, exist = std::min<int64_t>(kPair<Value>, width - row);
    for (int64_t t = 0; t < several; t++, block += kPair<Value>) {
      Sum* to = projected + (first + t) * width + row;
      for (int64_t j = 0; j < exist; j++) to[j] = bias ? block[j] + static_cast<Sum>(bias[row + j]) : block[j];
    }
  };
  const auto rotate_and_keep = [&] {
    for (int64_t b = 0; b < batch; b++) {
      for (int64_t t = 0; t < count; t++) {
        Sum* from = projected + (b * count + t) * width;
        const int64_t angle = (b % cosine.size(0) * count + t) * head_size;
        for (int64_t head = 0; head < heads; head++, from += head_size) {
          rotate<Value>(from, cosines + angle, sines + angle, head_size, static_cast<Sum>(layer.scale), from);
        }
        for (int64_t head = 0; head < shared; head++, from += head_size) {
          rotate<Value>(from, cosines + angle, sines + angle, head_size, Sum(1), memory_of(to_keys, keys, b, head, t));
        }
        for (int64_t head = 0; head < shared; head++, from += head_size) {
          Value* value = memory_of(to_values, values, b, head, t);
          for (int64_t i = 0; i < head_size; i++) value[i] = static_cast<Value>(from[i]);
        }
      }
    }
  };
  const auto query = [&](int64_t b, int64_t head, int64_t t, Sum* to) {
    std::copy_n(projected + (b * count + t) * width + head * head_size, head_size, to);
  };
  const auto store = [&](int64_t b, int64_t head, int64_t t, const Sum* from) {
    Input* to = attended + ((b * count + t) * heads + head) * head_size;
    for (int64_t i = 0; i < head_size; i++) to[i] = static_cast<Input>(static_cast<Value>(from[i]));
  };
  const auto activate = [&](int64_t number, int64_t first, int64_t several, Sum* blocks) {
    const int64_t row = number / 2 * kPair<Value>, exist = std::min<int64_t>(kPair<Value>, inner - row);
    gated(blocks, blocks + several * kPair<Value>, several * kPair<Value>, blocks);
    for (int64_t t = 0; t < several; t++) {
      Input* to = activated + (first + t) * inner + row;
      for (int64_t j = 0; j < exist; j++) to[j] = static_cast<Input>(static_cast<Value>(blocks[t * kPair<Value> + j]));
    }
  };
  const auto adding = [&](const auto* added, auto* to) {
    return [=](int64_t number, int64_t first, int64_t several, const Sum* block) {
      const int64_t row = number * kPair<Value>, place = first * size + row;
      add_block(block, kPair<Value>, several, added + place, to + place, size, std::min<int64_t>(kPair<Value>, size - row));
    };
  };
  Team::run([&](Team& team) {
    team.once([&] { norm_into<Value>(residual, norm, tokens, size, layer.epsilon, normed); });
    for_panels<Value>(team, layer.queries_keys_values, 1, normed, tokens, project);
    team.once(rotate_and_keep);
    attend<Value>(team, keys, values, mask, query, store);
    for_panels<Value>(team, layer.output, 1, attended, tokens, adding(residual, middle));
    team.once([&] { norm_into<Value>(middle, mlp_norm, tokens, size, layer.epsilon, normed); });
    for_panels<Value>(team, layer.gate_up, 2, normed, tokens, activate);
    for_panels<Value>(team, layer.down, 1, activated, tokens, adding(middle, results));
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

// x W^T + b (..., O) of x (..., I), W in panels (ceil(O / P), I, P), b (O); an odd I is padded in panels of pairs.
at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& panels, const std::optional<at::Tensor>& bias, int64_t num_rows) {
  const bool in_pairs = kMultipliesPairs<at::BFloat16> && x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(
      x.size(-1) + (in_pairs ? x.size(-1) % 2 : 0) == panels.size(1) && x.scalar_type() == panels.scalar_type() && panels.is_contiguous(), "x is ", x.scalar_type(), " ",
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
at::Tensor masked_attention(
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

// A decoder layer as Llama has it, of hidden (B, T, H) at positions `start` (0-d) and following, whose keys and values it writes to
// memory (B, shared, S', D). The mask (B, 1, T, S) or one that broadcasts to it tells what of the first S positions is seen.
// cosine, sine: (1, T, D) or (B, T, D). Weights: see Layer.
at::Tensor decoder_layer(
    const at::Tensor& hidden, const at::Tensor& cosine, const at::Tensor& sine, const at::Tensor& mask, const at::Tensor& start,
    const at::Tensor& keys, const at::Tensor& values, const at::Tensor& norm, const at::Tensor& queries_keys_values,
    const std::optional<at::Tensor>& bias, const at::Tensor& output, const at::Tensor& mlp_norm, const at::Tensor& gate_up,
    const at::Tensor& down, double epsilon, double scale) {
  const at::Tensor x = hidden.contiguous(), cosines = cosine.contiguous(), sines = sine.contiguous();
  const int64_t heads = output.size(1) / keys.size(3), first = *start.const_data_ptr<int64_t>();
  TORCH_CHECK(first + x.size(1) <= std::min(mask.size(3), keys.size(2)), x.size(1), " tokens at ", first, " do not fit into memory");
  const auto sum_type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor wide = mask.scalar_type() == at::kBool ? mask : mask.to(sum_type);
  const at::Tensor expanded = wide.expand({x.size(0), heads, x.size(1), mask.size(3)});
  at::Tensor result = at::empty(x.sizes(), x.options());
  const Layer layer{norm, queries_keys_values, bias, output, mlp_norm, gate_up, down, epsilon, scale};
  with_type(x.scalar_type(), [&](auto type) {
    decoder_layer_into<decltype(type)>(x, cosines, sines, expanded, first, keys, values, layer, result);
  });
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

bool multiplies_pairs() {
  return kMultipliesPairs<at::BFloat16>;
}

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

// What a C function calls an operator with, with handles in place of tensors.
const at::Tensor& plain(AtenTensorHandle handle) {
  return *torch::aot_inductor::tensor_handle_to_tensor_pointer(handle);
}
std::optional<at::Tensor> plain(AtenTensorHandle* handle) {
  return handle ? std::optional<at::Tensor>(plain(*handle)) : std::nullopt;
}
int64_t plain(int64_t number) {
  return number;
}
double plain(double number) {
  return number;
}

template <typename Operator, typename... Arguments>
AOTITorchError call(Operator compute, AtenTensorHandle* result, Arguments... arguments) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({ *result = torch::aot_inductor::new_tensor_handle(compute(plain(arguments)...)); });
}

}  // namespace

// The operators as compiled steps call them: looking one up by its name takes longer than a small one computes. The signatures
// follow from the operators' schemas; see `declarations` in operators.py.
extern "C" {
AOTITorchError aoti_torch_cpu_packed_linear(
    AtenTensorHandle x, AtenTensorHandle panels, AtenTensorHandle* bias, int64_t num_rows, AtenTensorHandle* result) {
  return call(packed_linear, result, x, panels, bias, num_rows);
}

AOTITorchError aoti_torch_cpu_masked_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle mask, double scale,
    AtenTensorHandle* result) {
  return call(masked_attention, result, query, key, value, mask, scale);
}

AOTITorchError aoti_torch_cpu_decoder_layer(
    AtenTensorHandle hidden, AtenTensorHandle cosine, AtenTensorHandle sine, AtenTensorHandle mask, AtenTensorHandle start,
    AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle norm, AtenTensorHandle queries_keys_values,
    AtenTensorHandle* bias, AtenTensorHandle output, AtenTensorHandle mlp_norm, AtenTensorHandle gate_up, AtenTensorHandle down,
    double epsilon, double scale, AtenTensorHandle* result) {
  return call(
      decoder_layer, result, hidden, cosine, sine, mask, start, keys, values, norm, queries_keys_values, bias, output, mlp_norm,
      gate_up, down, epsilon, scale);
}

AOTITorchError aoti_torch_cpu_kth_largest(AtenTensorHandle x, int64_t k, AtenTensorHandle* result) {
  return call(kth_largest, result, x, k);
}

AOTITorchError aoti_torch_cpu_kept_softmax(AtenTensorHandle logits, AtenTensorHandle least, AtenTensorHandle* result) {
  return call(kept_softmax, result, logits, least);
}

AOTITorchError aoti_torch_cpu_nucleus(AtenTensorHandle probs, double top_p, AtenTensorHandle* result) {
  return call(nucleus, result, probs, top_p);
}

AOTITorchError aoti_torch_cpu_most_likely(AtenTensorHandle x, AtenTensorHandle* result) {
  return call(most_likely, result, x);
}

AOTITorchError aoti_torch_cpu_token_at(AtenTensorHandle probs, AtenTensorHandle uniform, AtenTensorHandle* result) {
  return call(token_at, result, probs, uniform);
}
}

TORCH_LIBRARY(specheads, library) {
  library.def("packed_linear(Tensor x, Tensor panels, Tensor? bias, int num_rows) -> Tensor");
  library.def("masked_attention(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor");
  library.def(
      "decoder_layer(Tensor hidden, Tensor cosine, Tensor sine, Tensor mask, Tensor start, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor norm, Tensor queries_keys_values, Tensor? bias, Tensor output, Tensor mlp_norm, Tensor gate_up, Tensor down, "
      "float epsilon, float scale) -> Tensor");
  library.def("kth_largest(Tensor x, int k) -> Tensor");
  library.def("kept_softmax(Tensor logits, Tensor least) -> Tensor");
  library.def("nucleus(Tensor probs, float top_p) -> Tensor");
  library.def("most_likely(Tensor x) -> Tensor");
  library.def("token_at(Tensor probs, Tensor uniform) -> Tensor");
  library.def("panel_rows(bool wide) -> int", &panel_rows);
  library.def("multiplies_pairs() -> bool", &multiplies_pairs);
}

TORCH_LIBRARY_IMPL(specheads, CPU, library) {
  library.impl("packed_linear", &packed_linear);
  library.impl("masked_attention", &masked_attention);
  library.impl("decoder_layer", &decoder_layer);
  library.impl("kth_largest", &kth_largest);
  library.impl("kept_softmax", &kept_softmax);
  library.impl("nucleus", &nucleus);
  library.impl("most_likely", &most_likely);
  library.impl("token_at", &token_at);
}

