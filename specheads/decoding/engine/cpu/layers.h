// The operators that attend: attention alone, and a whole decoder layer as Llama has it, in one
// parallel region.
//
// A layer reads all its weights here; of other models' layers each linear map is an operator,
// and this one attends for them.

#pragma once

#include "operators.h"
#include "products.h"

#include <array>
#include <cmath>
#include <limits>
#include <utility>

namespace specheads_kernels __attribute__((visibility("hidden"))) {

// Attention of few tokens. Rows are the queries of one group of heads, which share keys and
// values.

// A head's keys or values as rows of `width` numbers, a multiple of kPair, and how far apart they
// are.
template <typename Value, int number>
std::pair<const float*, int64_t> rows_of(
    const at::TensorBase& memory, int64_t batch, int64_t head, int64_t count, int64_t width) {
  const Value* from =
      memory.const_data_ptr<Value>() + batch * memory.stride(0) + head * memory.stride(1);
  return converted<float, number>(from, memory.stride(2), count, memory.size(3), width);
}

constexpr int kKeys = 4;
constexpr int kQueries =
    3;  // whose inner products are in work at a time: their sums fill the registers

// to[k] = the sum of sums[k], k < kKeys.
inline void store_totals(const Vector* sums, float* to) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto folded = [](__m512 x) {
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  };
#elif defined(CPU_CAPABILITY_AVX2)
  const auto folded = [](__m256 x) { return x; };
#endif
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  const __m256 first = _mm256_hadd_ps(folded(sums[0]), folded(sums[1]));
  const __m256 second = _mm256_hadd_ps(folded(sums[2]), folded(sums[3]));
  const __m256 both = _mm256_hadd_ps(first, second);
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
#else
  for (int k = 0; k < kKeys; k++) to[k] = total_of(sums[k]);
#endif
}

// scores[q * kKeys + k] = the inner product of a query and a key, for `number` <= kQueries
// queries (number, size) and kKeys keys, as rows that are key_stride apart. Not by the panels of
// products: keys would have to be transposed, which takes longer for few queries. Each is summed
// in the same order, however many queries there are.
template <int number>
inline void inner_products(const float* queries,
                           const float* keys,
                           int64_t key_stride,
                           int64_t size,
                           float* scores) {
  Vector sums[number][kKeys];
#pragma GCC unroll 4
  for (int q = 0; q < number; q++) {
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; k++) sums[q][k] = Vector(0.0f);
  }
  const int64_t whole = size / Vector::size() * Vector::size();
  for (int64_t i = 0; i < whole; i += Vector::size()) {
    Vector query[number];
#pragma GCC unroll 4
    for (int q = 0; q < number; q++) query[q] = Vector::loadu(queries + q * size + i);
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; k++) {
      const Vector key = Vector::loadu(keys + k * key_stride + i);
#pragma GCC unroll 4
      for (int q = 0; q < number; q++) sums[q][k] = at::vec::fmadd(query[q], key, sums[q][k]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < number; q++) {
    store_totals(sums[q], scores + q * kKeys);
    // Fused explicitly, as in vectors: a compiler flag keeps scalar code from fusing.
    for (int64_t i = whole; i < size; i++) {
      for (int k = 0; k < kKeys; k++) {
        float& score = scores[q * kKeys + k];
        score = std::fma(queries[q * size + i], keys[k * key_stride + i], score);
      }
    }
  }
}

// The scores (rows, count) of queries (rows, size) and keys, whose rows are key_stride apart.
inline void scores_of(const float* queries,
                      int64_t rows,
                      const float* keys,
                      int64_t key_stride,
                      int64_t count,
                      int64_t size,
                      float* padded_keys,
                      float* scores) {
  for (int64_t place = 0; place < count; place += kKeys) {
    const int64_t exist = std::min<int64_t>(kKeys, count - place);
    const float* from = keys + place * key_stride;
    int64_t stride = key_stride;
    if (exist < kKeys) {  // the last ones: what lies behind them is not read
      for (int64_t k = 0; k < kKeys; k++)
        std::copy_n(from + std::min(k, exist - 1) * key_stride, size, padded_keys + k * size);
      from = padded_keys, stride = size;
    }
    for (int64_t row = 0; row < rows; row += kQueries) {
      const int64_t number = std::min<int64_t>(kQueries, rows - row);
      float block[kQueries * kKeys];
      with_count<kQueries>(number, [&](auto several) {
        inner_products<decltype(several)::value>(queries + row * size, from, stride, size, block);
      });
      for (int64_t q = 0; q < number; q++)
        std::copy_n(block + q * kKeys, exist, scores + (row + q) * count + place);
    }
  }
}

// Scores plus a mask become probabilities.
inline void softmax(float* scores, const float* mask, int64_t count) {
  constexpr int64_t lanes = Vector::size();
  const int64_t whole = count / lanes * lanes;
  Vector most(-std::numeric_limits<float>::infinity()), sums(0.0f);
  for (int64_t s = 0; s < whole; s += lanes) {
    const Vector value = Vector::loadu(scores + s) + Vector::loadu(mask + s);
    value.store(scores + s);
    most = at::vec::maximum(most, value);
  }
  float each[lanes], largest = -std::numeric_limits<float>::infinity();
  most.store(each);
  for (const float value : each) largest = std::max(largest, value);
  for (int64_t s = whole; s < count; s++) largest = std::max(largest, scores[s] += mask[s]);
  for (int64_t s = 0; s < whole; s += lanes) {
    const Vector value = (Vector::loadu(scores + s) - Vector(largest)).exp();
    value.store(scores + s);
    sums = sums + value;
  }
  float total = total_of(sums);
  for (int64_t s = whole; s < count; s++) total += scores[s] = std::exp(scores[s] - largest);
  for (int64_t s = 0; s < whole; s += lanes)
    (Vector::loadu(scores + s) / Vector(total)).store(scores + s);
  for (int64_t s = whole; s < count; s++) scores[s] /= total;
}

// A mask as (B, heads, T, S), to which it is broadcast: bools, or numbers, which are added to
// scores.
class Mask {
 public:
  Mask(const at::TensorBase& mask, std::array<int64_t, 4> sizes) : sizes_(sizes) {
    const bool is_right = mask.scalar_type() == at::kBool || mask.scalar_type() == at::kFloat;
    numbers_ = is_right ? mask : mask.to(mask.options().dtype(at::kFloat));
    const int64_t added = 4 - mask.dim();
    for (int64_t i = 0; i < 4; i++) {
      const int64_t size = i < added ? 1 : mask.size(i - added);
      const bool fits = added >= 0 && (size == 1 || size == sizes[i]);
      TORCH_CHECK(fits, "a mask ", mask.sizes(), " does not fit ", at::IntArrayRef(sizes));
      strides_[i] = i < added || size != sizes[i] ? 0 : numbers_.stride(i - added);
    }
  }

  int64_t size(int64_t i) const { return sizes_[i]; }

  // What a token's mask adds to the first scores of one head, (count,).
  const float* row(int64_t batch, int64_t head, int64_t token, int64_t count, float* memory) const {
    const int64_t from = batch * strides_[0] + head * strides_[1] + token * strides_[2];
    const int64_t stride = strides_[3];
    if (numbers_.scalar_type() != at::kBool) {
      const float* added = numbers_.const_data_ptr<float>() + from;
      if (stride == 1) return added;
      for (int64_t s = 0; s < count; s++) memory[s] = added[s * stride];
      return memory;
    }
    const bool* seen = numbers_.const_data_ptr<bool>() + from;
    constexpr float hidden = -std::numeric_limits<float>::infinity();
    for (int64_t s = 0; s < count; s++) memory[s] = seen[s * stride] ? 0.0f : hidden;
    return memory;
  }

 private:
  at::TensorBase numbers_;
  std::array<int64_t, 4> sizes_, strides_;
};

// Multiply rows (R, size) with a panel, and put the product to result[r * width + j].
inline void rows_product(const float* panel,
                         int64_t stride,
                         const float* rows,
                         int64_t num_rows,
                         int64_t size,
                         float* result,
                         int64_t width) {
  float block[kMostTokens * kPair];
  for (int64_t first = 0; first < num_rows; first += kMostTokens) {
    const int64_t several = std::min<int64_t>(kMostTokens, num_rows - first);
    with_count<kMostTokens>(several, [&](auto count) {
      product_of<float, decltype(count)::value>(panel, stride, columns_ahead(panel, stride),
                                                rows + first * size, size, block);
    });
    for (int64_t r = 0; r < several; r++)
      std::copy_n(block + r * kPair, kPair, result + (first + r) * width);
  }
}

// Where the tokens of each batch item are: its row of the memory and its first position, as long
// as there are numbers, or else the row of its number and the same position for all.
class Places {
 public:
  Places(const at::TensorBase* rows, const at::TensorBase* positions, int64_t batch) {
    for (const at::TensorBase* numbers : {rows, positions}) {
      const bool fits = !numbers || numbers->dim() == 0 ||
                        (numbers->numel() == batch && numbers->is_contiguous());
      TORCH_CHECK(fits, "places ", numbers->sizes(), " do not fit ", batch, " rows");
    }
    rows_ = rows ? rows->const_data_ptr<int64_t>() : nullptr;
    positions_ = positions ? positions->const_data_ptr<int64_t>() : nullptr;
    stride_ = positions && positions->dim() ? 1 : 0;
  }

  int64_t row(int64_t item) const { return rows_ ? rows_[item] : item; }
  int64_t position(int64_t item) const { return positions_ ? positions_[item * stride_] : 0; }
  // How many of `count` positions an item's `tokens` can see.
  int64_t seen(int64_t item, int64_t tokens, int64_t count) const {
    return rows_ && positions_ ? std::min(count, position(item) + tokens) : count;
  }

 private:
  const int64_t *rows_, *positions_;
  int64_t stride_;
};

// Attention of tokens (B, heads, T) to the first positions of keys and values (R, shared, S', D),
// as many as the mask (B, heads, T, S) has. query(b, head, t, to) writes a scaled query, store(b,
// head, t, from) takes a result.
template <typename Value, typename Query, typename Store>
void attend(Team& team,
            const at::TensorBase& key,
            const at::TensorBase& value,
            const Mask& mask,
            const Places& places,
            const Query& query,
            const Store& store) {
  const int64_t heads = mask.size(1);
  const int64_t tokens = mask.size(2);
  const int64_t size = key.size(3);
  const int64_t value_size = value.size(3);
  const int64_t shared = key.size(1);
  const int64_t group = heads / shared;
  const int64_t rows = group * tokens;
  const int64_t value_width = (value_size + kPair - 1) / kPair * kPair;
  const int64_t items = mask.size(0) * shared;
  // As many as the threads can share evenly
  const int64_t pieces =
      std::min<int64_t>(rows, team.size() / std::gcd<int64_t>(items, team.size()));
  const int64_t item_bytes = mask.size(3) * (size + value_width) * sizeof(float) *
                             ((rows + pieces - 1) / std::max<int64_t>(1, pieces));
  team.each(items * pieces, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, item_bytes)),
            [&](int64_t begin, int64_t end) {
              for (int64_t item = begin; item < end; item++) {
                const int64_t batch = item / pieces / shared;
                const int64_t kv_head = item / pieces % shared;
                const int64_t piece = item % pieces;
                const int64_t first = rows * piece / pieces;
                const int64_t next = rows * (piece + 1) / pieces;
                const int64_t memory_row = places.row(batch);
                const int64_t count = places.seen(batch, tokens, mask.size(3));
                const auto [keys, key_stride] =
                    rows_of<Value, 1>(key, memory_row, kv_head, count, size);
                const auto [values, value_stride] =
                    rows_of<Value, 2>(value, memory_row, kv_head, count, value_width);
                float* scaled = scratch<float, 3>((next - first) * size);
                float* scores = scratch<float, 4>((next - first) * count);
                float* padded_keys = scratch<float, 5>(size * kKeys);
                float* added = scratch<float, 6>(count);
                float* sums = scratch<float, 14>((next - first) * value_width);
                for (int64_t row = first; row < next; row++) {
                  query(batch, kv_head * group + row / tokens, row % tokens,
                        scaled + (row - first) * size);
                }
                scores_of(scaled, next - first, keys, key_stride, count, size, padded_keys, scores);
                for (int64_t row = first; row < next; row++) {
                  const float* added_to =
                      mask.row(batch, kv_head * group + row / tokens, row % tokens, count, added);
                  softmax(scores + (row - first) * count, added_to, count);
                }
                for (int64_t i = 0; i < value_width; i += kPair) {
                  rows_product(values + i, value_stride, scores, next - first, count, sums + i,
                               value_width);
                }
                for (int64_t row = first; row < next; row++) {
                  store(batch, kv_head * group + row / tokens, row % tokens,
                        sums + (row - first) * value_width);
                }
              }
            });
}

// The attention (B, T, heads, D) of query (B, heads, T, D) to key and value (R, shared, S, D), to
// rows (B) of them if there are some; those see no position after their tokens, which begin at
// `positions` (B). The mask broadcasts to (B, heads, T, S).
AtenTensorHandle masked_attention(const at::TensorBase& query,
                                  const at::TensorBase& key,
                                  const at::TensorBase& value,
                                  const at::TensorBase& mask,
                                  const at::TensorBase* rows,
                                  const at::TensorBase* positions,
                                  double scale) {
  auto contiguous = [](const at::TensorBase& x) { return x.stride(3) == 1 ? x : x.contiguous(); };
  const at::TensorBase queries = contiguous(query);
  const at::TensorBase keys = contiguous(key);
  const at::TensorBase values = contiguous(value);
  const Places places(rows, positions, query.size(0));
  for (int64_t b = 0; b < query.size(0); b++) {
    const int64_t row = places.row(b);
    TORCH_CHECK(row >= 0 && row < key.size(0), "there is no row ", row, " of ", key.size(0));
  }
  const int64_t batch = query.size(0);
  const int64_t heads = query.size(1);
  const int64_t tokens = query.size(2);
  const Mask expanded(mask, {batch, heads, tokens, key.size(2)});
  at::TensorBase result = empty({batch, tokens, heads, value.size(3)}, query.scalar_type());
  with_type(query.scalar_type(), [&](auto type) {
    using Value = decltype(type);
    const int64_t size = query.size(3);
    const int64_t value_size = value.size(3);
    Value* results = result.mutable_data_ptr<Value>();
    const auto read = [&](int64_t b, int64_t head, int64_t token, float* to) {
      const Value* from = queries.const_data_ptr<Value>() + b * queries.stride(0) +
                          head * queries.stride(1) + token * queries.stride(2);
      for (int64_t i = 0; i < size; i++)
        to[i] = static_cast<float>(from[i]) * static_cast<float>(scale);
    };
    const auto store = [&](int64_t b, int64_t head, int64_t token, const float* from) {
      Value* to = results + ((b * tokens + token) * heads + head) * value_size;
      for (int64_t i = 0; i < value_size; i++) to[i] = static_cast<Value>(from[i]);
    };
    Team::run(true, [&](Team& team) {
      attend<Value>(team, keys, values, expanded, places, read, store);
    });
  });
  return handle_of(result);
}

// Decoder layers.

constexpr int64_t kTokenGrain = 4;  // tokens whose norms or rotations a further thread takes

// The tensors of a layer as Llama has them. Maps are packed; panels of gate and up alternate.
struct Layer {
  const at::TensorBase &norm, &queries_keys_values;
  const at::TensorBase* bias;  // of queries, keys and values
  const at::TensorBase &output, &mlp_norm, &gate_up, &down;
  double epsilon, scale;
};

// RMS norm of float32 numbers, as transformers computes it, with the rounding of its steps; only
// the sum is as wide as others.
template <typename Value, typename From, typename To>
void norm_into(
    const From* x, const Value* weight, int64_t tokens, int64_t size, double epsilon, To* to) {
  for (int64_t t = 0; t < tokens; t++, x += size, to += size) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++)
      squares += static_cast<float>(x[i]) * static_cast<float>(x[i]);
    const float factor = 1 / std::sqrt(squares / size + static_cast<float>(epsilon));
    for (int64_t i = 0; i < size; i++) {
      to[i] = static_cast<To>(
          static_cast<Value>(weight[i] * static_cast<Value>(static_cast<float>(x[i]) * factor)));
    }
  }
}

// Rotate one head's numbers by its position's angles, and scale them.
template <typename Value, typename To>
void rotate(
    const float* from, const Value* cosine, const Value* sine, int64_t size, float scale, To* to) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i++) {
    const float low = from[i];
    const float high = from[i + half];
    to[i] = static_cast<To>(
        (low * static_cast<float>(cosine[i]) - high * static_cast<float>(sine[i])) * scale);
    to[i + half] = static_cast<To>(
        (high * static_cast<float>(cosine[i + half]) + low * static_cast<float>(sine[i + half])) *
        scale);
  }
}

template <typename Value, typename Weight>
void decoder_layer_into(const at::TensorBase& hidden,
                        const at::TensorBase& cosine,
                        const at::TensorBase& sine,
                        const Mask& mask,
                        const Places& places,
                        const at::TensorBase& keys,
                        const at::TensorBase& values,
                        const Layer& layer,
                        at::TensorBase& result) {
  using Input = InputOf<Weight>;
  const int64_t batch = hidden.size(0);
  const int64_t count = hidden.size(1);
  const int64_t size = hidden.size(2);
  const int64_t tokens = batch * count;
  const int64_t head_size = keys.size(3);
  const int64_t heads = mask.size(1);
  const int64_t shared = keys.size(1);
  const int64_t width = (heads + 2 * shared) * head_size;
  const int64_t inner = layer.down.size(1);
  const Value* residual = hidden.const_data_ptr<Value>();
  float* projected = scratch<float, 9>(tokens * width);
  float* middle = scratch<float, 10>(tokens * size);
  Input* normed = scratch<Input, 11>(tokens * size);
  Input* attended = scratch<Input, 12>(tokens * heads * head_size);
  Input* activated = scratch<Input, 13>(tokens * inner);

  const Value* bias = layer.bias ? layer.bias->const_data_ptr<Value>() : nullptr;
  const Value* norm = layer.norm.const_data_ptr<Value>();
  const Value* mlp_norm = layer.mlp_norm.const_data_ptr<Value>();
  const Value* cosines = cosine.const_data_ptr<Value>();
  const Value* sines = sine.const_data_ptr<Value>();
  Value* to_keys = keys.mutable_data_ptr<Value>();
  Value* to_values = values.mutable_data_ptr<Value>();
  Value* results = result.mutable_data_ptr<Value>();
  const auto memory_of = [&](Value* memory, const at::TensorBase& shape, int64_t b, int64_t head,
                             int64_t t) {
    return memory + places.row(b) * shape.stride(0) + head * shape.stride(1) +
           (places.position(b) + t) * shape.stride(2);
  };

  const auto rotate_and_keep = [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; token++) {
      const int64_t b = token / count;
      const int64_t t = token % count;
      float* from = projected + token * width;
      const int64_t angle = (b % cosine.size(0) * count + t) * head_size;
      for (int64_t head = 0; head < heads; head++, from += head_size) {
        rotate<Value>(from, cosines + angle, sines + angle, head_size,
                      static_cast<float>(layer.scale), from);
      }
      for (int64_t head = 0; head < shared; head++, from += head_size) {
        rotate<Value>(from, cosines + angle, sines + angle, head_size, 1.0f,
                      memory_of(to_keys, keys, b, head, t));
      }
      for (int64_t head = 0; head < shared; head++, from += head_size) {
        Value* value = memory_of(to_values, values, b, head, t);
        for (int64_t i = 0; i < head_size; i++) value[i] = static_cast<Value>(from[i]);
      }
    }
  };
  // Norms and rotations of one token are too short to share.
  const auto normed_by = [&](const auto* from, const Value* weight) {
    return [=](int64_t begin, int64_t end) {
      norm_into<Value>(from + begin * size, weight, end - begin, size, layer.epsilon,
                       normed + begin * size);
    };
  };
  const auto query = [&](int64_t b, int64_t head, int64_t t, float* to) {
    std::copy_n(projected + (b * count + t) * width + head * head_size, head_size, to);
  };
  const auto store = [&](int64_t b, int64_t head, int64_t t, const float* from) {
    Input* to = attended + ((b * count + t) * heads + head) * head_size;
    for (int64_t i = 0; i < head_size; i++) to[i] = static_cast<Input>(static_cast<Value>(from[i]));
  };
  const auto activate = [&](int64_t number, int64_t first, int64_t several, float* blocks) {
    const int64_t row = number / 2 * kPair;
    const int64_t exist = std::min<int64_t>(kPair, inner - row);
    const float* up = blocks + several * kPair;
    for (int64_t i = 0; i < several * kPair; i += kLanes) {
      (silu(blocks + i) * Vector::loadu(up + i)).store(blocks + i);
    }
    for (int64_t t = 0; t < several; t++) {
      Input* to = activated + (first + t) * inner + row;
      for (int64_t j = 0; j < exist; j++)
        to[j] = static_cast<Input>(static_cast<Value>(blocks[t * kPair + j]));
    }
  };
  Team::run(true, [&](Team& team) {
    team.each(tokens, kTokenGrain, normed_by(residual, norm));
    for_panels<Weight>(team, layer.queries_keys_values, 1, normed, tokens,
                       putting(projected, width, bias, 0));
    team.each(tokens, kTokenGrain, rotate_and_keep);
    attend<Value>(team, keys, values, mask, places, query, store);
    for_panels<Weight>(team, layer.output, 1, attended, tokens,
                       putting(middle, size, residual, size));
    team.each(tokens, kTokenGrain, normed_by(middle, mlp_norm));
    for_panels<Weight>(team, layer.gate_up, 2, normed, tokens, activate);
    for_panels<Weight>(team, layer.down, 1, activated, tokens,
                       putting(results, size, middle, size));
  });
}

// A decoder layer as Llama has it, of hidden (B, T, H) at positions `start`, () or (B), and
// following, whose keys and values it writes to memory (R, shared, S', D), in rows (B) if there
// are some. The mask (B, 1, T, S) or one that broadcasts to it tells what of the first S
// positions is seen. cosine, sine: (1, T, D) or (B, T, D). Weights: see Layer;
// input_bits: see packed_linear.
AtenTensorHandle decoder_layer(const at::TensorBase& hidden,
                               const at::TensorBase& cosine,
                               const at::TensorBase& sine,
                               const at::TensorBase& mask,
                               const at::TensorBase& start,
                               const at::TensorBase* rows,
                               const at::TensorBase& keys,
                               const at::TensorBase& values,
                               const at::TensorBase& norm,
                               const at::TensorBase& queries_keys_values,
                               const at::TensorBase* bias,
                               const at::TensorBase& output,
                               const at::TensorBase& mlp_norm,
                               const at::TensorBase& gate_up,
                               const at::TensorBase& down,
                               double epsilon,
                               double scale,
                               int64_t input_bits) {
  const at::TensorBase x = hidden.contiguous();
  const at::TensorBase cosines = cosine.contiguous();
  const at::TensorBase sines = sine.contiguous();
  const int64_t heads = output.size(1) / keys.size(3);
  const Places places(rows, &start, x.size(0));
  for (int64_t b = 0; b < x.size(0); b++) {
    const int64_t row = places.row(b);
    const int64_t first = places.position(b);
    const bool fits = row >= 0 && row < keys.size(0) && first >= 0 &&
                      first + x.size(1) <= std::min(mask.size(3), keys.size(2));
    TORCH_CHECK(fits, x.size(1), " tokens at ", first, " of row ", row, " do not fit into memory");
  }
  const Mask expanded(mask, {x.size(0), heads, x.size(1), mask.size(3)});
  at::TensorBase result = empty(x.sizes(), x.scalar_type());
  const Layer layer{norm, queries_keys_values, bias, output, mlp_norm, gate_up, down, epsilon,
                    scale};
  for (const at::TensorBase* each : {&queries_keys_values, &output, &gate_up}) {
    TORCH_CHECK(each->scalar_type() == down.scalar_type(), "panels are ", each->scalar_type(),
                " and ", down.scalar_type());
  }
  with_types(x.scalar_type(), down.scalar_type(), input_bits, [&](auto value, auto weight) {
    decoder_layer_into<decltype(value), decltype(weight)>(x, cosines, sines, expanded, places, keys,
                                                          values, layer, result);
  });
  return handle_of(result);
}

}  // namespace specheads_kernels

SPECHEADS_OPERATOR(masked_attention,
                   "(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor? rows, Tensor? "
                   "positions, float scale) -> Tensor")
SPECHEADS_OPERATOR(decoder_layer,
                   "(Tensor hidden, Tensor cosine, Tensor sine, Tensor mask, Tensor start, Tensor? "
                   "rows, Tensor(a!) keys, Tensor(b!) values, "
                   "Tensor norm, Tensor queries_keys_values, Tensor? bias, Tensor output, Tensor "
                   "mlp_norm, Tensor gate_up, Tensor down, "
                   "float epsilon, float scale, int input_bits) -> Tensor")
