// The operators that attend: attention alone, and a whole decoder layer as Llama has it, in one parallel region.
//
// A layer reads all its weights here; of other models' layers the maps are operators of their own, and this one attends for them.
//
// These functions are in no anonymous namespace: in one, g++ 12 inlines others, and attention took a quarter to a half longer where
// that was measured, once.

#include "attention.h"
#include "operators.h"

#include <cmath>

namespace specheads_kernels __attribute__((visibility("hidden"))) {

template <typename Value>
void attention_into(
    const at::TensorBase& query, const at::TensorBase& key, const at::TensorBase& value, const Mask& mask,
    const Places& places, double scale, at::TensorBase& result) {
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
  Team::run([&](Team& team) { attend<Value>(team, key, value, mask, places, read, store); });
}

// The attention (B, T, heads, D) of query (B, heads, T, D) to key and value (R, shared, S, D), to rows (B) of them if there are some;
// those see no position after their tokens, which begin at `positions` (B). The mask broadcasts to (B, heads, T, S).
AtenTensorHandle masked_attention(
    const at::TensorBase& query, const at::TensorBase& key, const at::TensorBase& value, const at::TensorBase& mask,
    const at::TensorBase* rows, const at::TensorBase* positions, double scale) {
  auto contiguous = [](const at::TensorBase& x) { return x.stride(3) == 1 ? x : x.contiguous(); };
  const at::TensorBase queries = contiguous(query), keys = contiguous(key), values = contiguous(value);
  const Places places(rows, positions, query.size(0));
  for (int64_t b = 0; b < query.size(0); b++) {
    const int64_t row = places.row(b);
    TORCH_CHECK(row >= 0 && row < key.size(0), "there is no row ", row, " of ", key.size(0));
  }
  const int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2);
  const Mask expanded(mask, query.scalar_type(), {batch, heads, tokens, key.size(2)});
  at::TensorBase result = empty({batch, tokens, heads, value.size(3)}, query.scalar_type());
  with_type(query.scalar_type(), [&](auto type) { 
    attention_into<decltype(type)>(queries, keys, values, expanded, places, scale, result);
  });
  return handle_of(result);
}

// Decoder layers.

// The tensors of a layer as Llama has them. Maps are packed; panels of gate and up alternate.
struct Layer {
  const at::TensorBase &norm, &queries_keys_values;
  const at::TensorBase* bias;  // of queries, keys and values
  const at::TensorBase &output, &mlp_norm, &gate_up, &down;
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
void decoder_layer_into(
    const at::TensorBase& hidden, const at::TensorBase& cosine, const at::TensorBase& sine, const Mask& mask,
    const Places& places, const at::TensorBase& keys, const at::TensorBase& values, const Layer& layer, at::TensorBase& result) {
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
  const auto memory_of = [&](Value* memory, const at::TensorBase& shape, int64_t b, int64_t head, int64_t t) {
    return memory + places.row(b) * shape.stride(0) + head * shape.stride(1) + (places.position(b) + t) * shape.stride(2);
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
    attend<Value>(team, keys, values, mask, places, query, store);
    for_panels<Value>(team, layer.output, 1, attended, tokens, adding(residual, middle));
    team.once([&] { norm_into<Value>(middle, mlp_norm, tokens, size, layer.epsilon, normed); });
    for_panels<Value>(team, layer.gate_up, 2, normed, tokens, activate);
    for_panels<Value>(team, layer.down, 1, activated, tokens, adding(middle, results));
  });
}

// A decoder layer as Llama has it, of hidden (B, T, H) at positions `start`, () or (B), and following, whose keys and values it
// writes to memory (R, shared, S', D), in rows (B) if there are some. The mask (B, 1, T, S) or one that broadcasts to it tells what
// of the first S positions is seen.
// cosine, sine: (1, T, D) or (B, T, D). Weights: see Layer.
AtenTensorHandle decoder_layer(
    const at::TensorBase& hidden, const at::TensorBase& cosine, const at::TensorBase& sine, const at::TensorBase& mask,
    const at::TensorBase& start, const at::TensorBase* rows, const at::TensorBase& keys, const at::TensorBase& values, const at::TensorBase& norm,
    const at::TensorBase& queries_keys_values, const at::TensorBase* bias, const at::TensorBase& output,
    const at::TensorBase& mlp_norm, const at::TensorBase& gate_up, const at::TensorBase& down, double epsilon, double scale) {
  const at::TensorBase x = hidden.contiguous(), cosines = cosine.contiguous(), sines = sine.contiguous();
  const int64_t heads = output.size(1) / keys.size(3);
  const Places places(rows, &start, x.size(0));
  for (int64_t b = 0; b < x.size(0); b++) {
    const int64_t row = places.row(b), first = places.position(b);
    const bool fits = row >= 0 && row < keys.size(0) && first >= 0 && first + x.size(1) <= std::min(mask.size(3), keys.size(2));
    TORCH_CHECK(fits, x.size(1), " tokens at ", first, " of row ", row, " do not fit into memory");
  }
  const Mask expanded(mask, x.scalar_type(), {x.size(0), heads, x.size(1), mask.size(3)});
  at::TensorBase result = empty(x.sizes(), x.scalar_type());
  const Layer layer{norm, queries_keys_values, bias, output, mlp_norm, gate_up, down, epsilon, scale};
  with_type(x.scalar_type(), [&](auto type) {
    decoder_layer_into<decltype(type)>(x, cosines, sines, expanded, places, keys, values, layer, result);
  });
  return handle_of(result);
}

}  // namespace specheads_kernels
