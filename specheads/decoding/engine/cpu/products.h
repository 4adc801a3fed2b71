// Products of few tokens with the panels of a packed weight, which is read once; the operator of
// linear maps, and that of an acceptance head's network: small maps, in which operators of their
// own would spend most of the time between them.
//
// A weight lies in panels of kPair rows, each stored column by column; see `_pack` in packed.py.
// Each number of a result is summed in the same order whatever the number of tokens, so that a
// verification computes the same logits as steps of one token.

#pragma once

#include "kernels.h"
#include "operators.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace specheads_kernels __attribute__((visibility("hidden"))) {

// block[t][j] = sum_i x[t][i] panel[i][j] for kTokens rows t, at most kMostTokens; columns i of
// the panel are `stride` numbers apart. Not inlined: there is code for every number of tokens.
template <typename Weight, int kTokens>
__attribute__((noinline)) void product_of(const Weight* panel,
                                          int64_t stride,
                                          Ahead ahead,
                                          const InputOf<Weight>* x,
                                          int64_t size,
                                          float* block) {
  Sums<kTokens> sums;
  for (int64_t i = 0; i < size; i++) {
    const Weight* column = panel + i * stride;
    ahead.fetch<Weight>(i);
    if constexpr (kIsPaired<Weight>) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
      ahead.fetch<Weight>(i + 1);
      sums.add_pairs(_mm512_loadu_si512(column), _mm512_loadu_si512(column + kPair), x + i++,
                     size);
#endif
    } else {
      Vector first;
      Vector second;
      load_pair(column, first, second);
      sums.add(first, second, x + i, size);
    }
  }
  sums.store(block, kPair);
}

// Rows of numbers as products with weights of few bits read them. Such a weight is d q + m, so
// that a group of columns adds d sum_i x_i q_i + m sum_i x_i.
template <int bits, int input_bits>
struct LatticeInputs {
  static constexpr bool kRounds = input_bits < 32;
  using Numbers =
      std::conditional_t<input_bits == 8, Bytes, std::conditional_t<kRounds, Halves, Vector>>;
  using Number = std::conditional_t<kRounds, int32_t, float>;
  // Words of weights are multiplied in parts of as many bits as inputs have, or of half a word.
  static constexpr int kPartBits = kRounds ? input_bits : 16;
  static constexpr int kParts = 32 / kPartBits;
  static constexpr int kColumns = kPartBits / bits;  // of a part
  static constexpr int kNumbers = kRounds ? kGroup / kParts : kGroup;  // of a group
  int64_t groups, size;  // of a row, and its numbers
  Number* x;             // (tokens, size)
  GroupFactors* factors;  // (tokens, groups)

  LatticeInputs(const float* rows, int64_t tokens, int64_t num_columns)
      : groups(num_columns / kGroup),
        size(groups * kNumbers),
        x(scratch<Number, 17>(tokens * size)),
        factors(scratch<GroupFactors, 17>(tokens * groups)) {
    for (int64_t group = 0; group < tokens * groups; group++) {
      const float* from = rows + group * kGroup;
      Number* to = x + group * kNumbers;
      if constexpr (kRounds) {
        factors[group] = round(from, to);
      } else {
        factors[group] = divide(from, to);
      }
    }
  }

  // The q of several columns stay where they are in a word, times a power of two by which inputs
  // are divided: shifts and conversions to float32 are what takes time. These divisions are exact.
  static GroupFactors divide(const float* from, float* to) {
    for (int64_t i = 0; i < kGroup; i++) to[i] = from[i] * (1.0f / (1 << (i % kColumns * bits)));
    return {1.0f, std::accumulate(from, from + kGroup, 0.0f)};
  }

  // `input_bits` of each number, as words of several: columns that lie in the same bits of the
  // parts of a word of weights.
  static GroupFactors round(const float* from, int32_t* to) {
    constexpr int64_t mask = (int64_t{1} << kPartBits) - 1;
    constexpr float most = mask / 2;
    constexpr float least = 1e-30f;  // of what is larger the inverse is finite
    const auto larger = [](const Vector& x, const Vector& y) { return at::vec::maximum(x, y); };
    Vector largest(least);
    for (int64_t i = 0; i < kGroup; i += kLanes)
      largest = larger(largest, Vector::loadu(from + i).abs());  // a NaN stays
    const float scale = at::vec::vec_reduce_all<float>(larger, largest) / most;
    const Vector inverse(1 / scale);
    int32_t numbers[kGroup];
    Words sums(0);
    for (int64_t i = 0; i < kGroup; i += kLanes) {
      const Words rounded =
          at::vec::convert_to_int_of_same_size((Vector::loadu(from + i) * inverse).round());
      sums = sums + rounded;
      rounded.store(numbers + i);
    }
    for (const int32_t* x = numbers; x < numbers + kGroup; x += kParts * kColumns) {
      for (int c = 0; c < kColumns; c++) {
        uint32_t word = 0;
        for (int part = 0; part < kParts; part++)
          word |= (x[part * kColumns + c] & mask) << part * kPartBits;
        *to++ = word;
      }
    }
    return {scale, total_of(as_floats(sums)) * scale};
  }
};

// block[t][j] = sum_i x[first + t][i] panel[i][j] for `count` rows t. In memory a group of
// columns is its rows' d, their m unless it follows from d, and words of 32 bits, each with the q
// of a row and several columns.
template <int count, int bits, int input_bits>
__attribute__((noinline)) void lattice_product(const Lattice<bits, input_bits>* panel,
                                               const LatticeInputs<bits, input_bits>& inputs,
                                               int64_t first_row,
                                               float* block) {
  using Inputs = LatticeInputs<bits, input_bits>;
  using Numbers = typename Inputs::Numbers;
  constexpr uint32_t levels = (1 << bits) - 1;
  const int64_t size = inputs.size;
  const auto* x = inputs.x + first_row * size;
  const GroupFactors* factors = inputs.factors + first_row * inputs.groups;
  std::fill_n(block, count * kPair, 0.0f);
  for (int64_t group = 0; group < inputs.groups; group++) {
    const auto* scales = reinterpret_cast<const at::Half*>(panel);
    const auto* words = reinterpret_cast<const int32_t*>(scales + kScales<bits> * kPair);
    panel += kGroup * kColumn<Lattice<bits, input_bits>>;
    Sums<count, Numbers> sums;
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; i += Inputs::kParts * Inputs::kColumns, words += kPair) {
      __builtin_prefetch(reinterpret_cast<const char*>(words) + kPrefetchBytes);
      if constexpr (kPair > 16)
        __builtin_prefetch(reinterpret_cast<const char*>(words) + kPrefetchBytes + 64);
      Words first = Words::loadu(words);
      Words second = Words::loadu(words + kLanes);
      if constexpr (Inputs::kRounds) {
        // The levels of the first column in each part
        const Words mask(static_cast<int32_t>(levels * (~0u / ((1u << Inputs::kPartBits) - 1))));
#pragma GCC unroll 4
        for (int c = 0; c < Inputs::kColumns; c++, x++) {
          sums.add(Numbers(first & mask), Numbers(second & mask), x, size);
          first = first >> Words(bits);
          second = second >> Words(bits);
        }
      } else {
#pragma GCC unroll 2
        for (int part = 0; part < 2;
             part++, first = first >> Words(16), second = second >> Words(16)) {
#pragma GCC unroll 4
          for (int c = 0; c < Inputs::kColumns; c++, x++) {
            const Words mask(levels << c * bits);
            sums.add(as_floats(first & mask), as_floats(second & mask), x, size);
          }
        }
      }
    }
    Vector d[2], m[2];
    load_pair(scales, d[0], d[1]);
    if constexpr (kScales<bits> == 2) {
      load_pair(scales + kPair, m[0], m[1]);
    } else {
      const Vector zero(-128.0f);  // the level of weights that are 0
      m[0] = d[0] * zero;
      m[1] = d[1] * zero;
    }
    sums.add_to(block, d, m, factors + group, inputs.groups);
  }
}

// blocks[p][j] = sum_i x[i] panels[p][i][j] for `count` panels that follow each other: a sum
// waits for its last addition, so that a panel alone leaves the processor idle.
template <typename Value, int count>
__attribute__((noinline)) void row_product(const Value* panels,
                                           const float* x,
                                           int64_t size,
                                           float* blocks) {
  Sums<count> sums;
  for (int64_t i = 0; i < size; i++) {
    sums.add_column(panels + i * kPair, size * kPair, Vector(x[i]));
  }
  sums.store(blocks, kPair);
}

// What a product fetches that reads its panel for the first time.
template <typename Value>
Ahead columns_ahead(const Value* panel, int64_t stride) {
  return {reinterpret_cast<const char*>(panel) + kPrefetchBytes,
          static_cast<int64_t>(stride * sizeof(Value))};
}

// Products of rows, in pieces of at most kMostTokens, with panels of one type.
template <typename Value>
struct Multiplier {
  const InputOf<Value>* rows;
  int64_t size, pieces, share;

  Multiplier(const InputOf<Value>* rows, int64_t tokens, int64_t size, int64_t pieces)
      : rows(rows),
        size(size),
        pieces(pieces),
        share(kPair * sizeof(Value) / std::max<int64_t>(1, pieces)) {}

  // block[t][j] = sum_i rows[first + t][i] panel[i][j] for `several` rows t, which are a piece;
  // `next` is what is read after all pieces.
  void multiply(const Value* panel,
                const Value* next,
                int64_t piece,
                int64_t first,
                int64_t several,
                float* block) const {
    // One piece fetches what it reads itself a little later. Several share the next panel, so
    // that memory is never idle.
    const Ahead later{reinterpret_cast<const char*>(next) + piece * size * share, share};
    const Ahead ahead = pieces == 1 ? columns_ahead(panel, kPair) : later;
    with_count<kMostTokens>(several, [&](auto count) {
      product_of<Value, decltype(count)::value>(panel, kPair, ahead, rows + first * size, size,
                                                block);
    });
  }
};

template <int bits, int input_bits>
struct Multiplier<Lattice<bits, input_bits>> {
  using Weight = Lattice<bits, input_bits>;
  LatticeInputs<bits, input_bits> inputs;

  Multiplier(const float* rows, int64_t tokens, int64_t size, int64_t)
      : inputs(rows, tokens, size) {}

  void multiply(const Weight* panel,
                const Weight*,
                int64_t,
                int64_t first,
                int64_t several,
                float* block) const {
    with_count<kMostTokens>(several, [&](auto count) {
      lattice_product<decltype(count)::value>(panel, inputs, first, block);
    });
  }
};

// Panels of one packed weight.
template <typename Value>
struct Panels {
  const Value* values;
  int64_t number, size;  // of panels, and of columns in each

  Panels(const Value* values, int64_t number, int64_t size)
      : values(values), number(number), size(size) {}
  Panels(const at::TensorBase& panels)
      : Panels(static_cast<const Value*>(panels.const_data_ptr()), panels.size(0), panels.size(1)) {
  }
};

constexpr int kPanels = 4;  // that are in work at a time for one token; an even number, as gate
                            // and up are multiplied together

// Multiply rows (tokens, size) with all panels, `together` at a time. For each product it calls
// finish(number of the panel, first token, number of tokens, blocks), a block being (tokens,
// kPair).
template <typename Value, typename Finish>
void for_panels(Team& team,
                const Panels<Value>& panels,
                int64_t together,
                const InputOf<Value>* rows,
                int64_t tokens,
                const Finish& finish) {
  const int64_t size = panels.size;
  const int64_t pieces = (tokens + kMostTokens - 1) / kMostTokens;
  constexpr int column = kColumn<Value>;
  const int64_t bytes = together * size * column * sizeof(Value) * std::max<int64_t>(1, pieces);
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes));
  team.each(panels.number / together, grain, [&](int64_t begin, int64_t end) {
    float* sums = scratch<float, 18>(std::max<int64_t>(kPanels, together * tokens) * kPair);
    if constexpr (!kIsPaired<Value> && !kIsLattice<Value>) {
      while (tokens == 1 && begin * together + kPanels <= end * together) {
        const int64_t number = begin * together;
        row_product<Value, kPanels>(panels.values + number * column * size, rows, size, sums);
        for (int64_t i = 0; i < kPanels; i += together) finish(number + i, 0, 1, sums + i * kPair);
        begin += kPanels / together;
      }
    }
    const Multiplier<Value> multiplier(rows, tokens, size, pieces);
    for (int64_t number = begin * together; number < end * together; number += together) {
      for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t first = tokens * piece / pieces;
        const int64_t several = tokens * (piece + 1) / pieces - first;
        float* blocks = sums + first * together * kPair;
        for (int64_t i = 0; i < together; i++) {
          const Value* panel = panels.values + (number + i) * column * size;
          multiplier.multiply(panel, panel + together * column * size, piece, first, several,
                              blocks + i * several * kPair);
        }
        finish(number, first, several, blocks);
      }
    }
  });
}

// What `for_panels` calls to put products into rows of `width` numbers: to[t][j] = sum +
// added[t][j], or the sum alone. Rows of `added` are `apart` numbers from each other, 0 where it
// is one row for all.
template <typename Added, typename To>
auto putting(To* to, int64_t width, const Added* added, int64_t apart) {
  return [=](int64_t number, int64_t first, int64_t several, const float* block) {
    const int64_t row = number * kPair;
    const int64_t exist = std::min<int64_t>(kPair, width - row);
    for (int64_t t = first; t < first + several; t++, block += kPair) {
      To* into = to + t * width + row;
      const Added* more = added ? added + t * apart + row : nullptr;
      if (more) {
        for (int64_t j = 0; j < exist; j++)
          into[j] = static_cast<To>(block[j] + static_cast<float>(more[j]));
      } else {
        for (int64_t j = 0; j < exist; j++) into[j] = static_cast<To>(block[j]);
      }
    }
  };
}

// to = x / (1 + exp(-x))
inline Vector silu(const float* from) {
  const auto x = Vector::loadu(from);
  return x / (Vector(1.0f) + x.neg().exp());
}

// Rows of `size` numbers, `stride` apart, as rows of `width` numbers of another type, and how far
// apart those are: where they lie, or converted and padded with zeros.
template <typename To, int number, typename From>
std::pair<const To*, int64_t> converted(
    const From* from, int64_t stride, int64_t count, int64_t size, int64_t width) {
  if constexpr (std::is_same_v<To, From>) {
    if (size == width) return {from, stride};
  }
  To* to = scratch<To, number>(count * width);
  for (int64_t row = 0; row < count; row++) {
    for (int64_t i = 0; i < size; i++)
      to[row * width + i] = static_cast<To>(from[row * stride + i]);
    std::fill(to + row * width + size, to + (row + 1) * width, To(0));
  }
  return {to, width};
}

// x W^T + b (..., O) of x (..., I), W in panels (ceil(O / P), I, P), b (O); an odd I is padded in
// panels of pairs. Panels may have 16 bits where x has 32; those of a lattice are multiplied with
// `input_bits` of x: 32, 16, or 8, in place of which a lattice of 8 bits takes 16.
AtenTensorHandle packed_linear(const at::TensorBase& x,
                               const at::TensorBase& panels,
                               const at::TensorBase* bias,
                               int64_t num_rows,
                               int64_t input_bits) {
  const bool in_pairs = kMultipliesPairs && x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(
      x.size(-1) + (in_pairs ? x.size(-1) % 2 : 0) == panels.size(1) && panels.is_contiguous(),
      "x is ", x.scalar_type(), " ", x.sizes(), ", panels are ", panels.scalar_type(), " ",
      panels.sizes());
  auto shape = x.sizes().vec();
  shape.back() = num_rows;
  at::TensorBase result = empty(shape, x.scalar_type());
  at::TensorBase rows = x.contiguous();
  with_types(x.scalar_type(), panels.scalar_type(), input_bits, [&](auto value, auto weight) {
    using Value = decltype(value);
    using Weight = decltype(weight);
    const int64_t size = x.size(-1);
    const int64_t tokens = x.numel() / std::max<int64_t>(1, size);
    const auto inputs = converted<InputOf<Weight>, 0>(rows.const_data_ptr<Value>(), size, tokens,
                                                      size, panels.size(1))
                            .first;
    const Value* added = bias ? bias->const_data_ptr<Value>() : nullptr;
    const auto put = putting(result.mutable_data_ptr<Value>(), num_rows, added, 0);
    const int64_t bytes =
        panels.numel() * sizeof(Weight) * ((tokens + kMostTokens - 1) / kMostTokens);
    Team::run(bytes > 2 * kGrainBytes,
              [&](Team& team) { for_panels<Weight>(team, panels, 1, inputs, tokens, put); });
  });
  return handle_of(result);
}

int64_t panel_rows() {
  return kPair;
}

bool multiplies_pairs() {
  return kMultipliesPairs;
}

// The tensors of a network. Maps are packed; panels of the blocks follow each other.
struct Network {
  const at::TensorBase &mean, &scale;
  const at::TensorBase *projection, *projection_bias, *blocks, *block_biases;
  const at::TensorBase &readout, &readout_bias;
};

// to[j] = from[j] + silu(block[j] + bias[j]), for the numbers j < exist; `block` is overwritten.
inline void residual_into(
    float* block, const float* bias, const float* from, int64_t exist, float* to) {
  for (int64_t j = 0; j < exist; j++) block[j] += bias[j];
  for (int64_t j = 0; j < kPair; j += kLanes) silu(block + j).store(block + j);
  for (int64_t j = 0; j < exist; j++) to[j] = from[j] + block[j];
}

inline void network_into(const at::TensorBase& inputs,
                         const Network& network,
                         at::TensorBase& result) {
  const int64_t size = inputs.size(-1);
  const int64_t tokens = result.numel();
  const int64_t width = network.readout.numel();
  const int64_t depth = network.blocks ? network.block_biases->size(0) : 0;
  const int64_t panels = (width + kPair - 1) / kPair;
  const int64_t pieces = (tokens + kMostTokens - 1) / kMostTokens;
  float* scaled = scratch<float, 14>(tokens * size);
  float* state = scratch<float, 15>(tokens * width);
  float* other = scratch<float, 16>(tokens * width);
  const float* x = inputs.const_data_ptr<float>();
  const float* mean = network.mean.const_data_ptr<float>();
  const float* scale = network.scale.const_data_ptr<float>();
  const float* readout = network.readout.const_data_ptr<float>();
  const float* biases =
      network.block_biases ? network.block_biases->const_data_ptr<float>() : nullptr;
  const float* first_bias =
      network.projection_bias ? network.projection_bias->const_data_ptr<float>() : nullptr;
  const float* block_panels = network.blocks ? network.blocks->const_data_ptr<float>() : nullptr;
  const float* last_bias = network.readout_bias.const_data_ptr<float>();
  float* logits = result.mutable_data_ptr<float>();

  const auto standardise = [&] {
    float* to = network.projection ? scaled : state;
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t i = 0; i < size; i++) to[t * size + i] = (x[t * size + i] - mean[i]) * scale[i];
    }
  };
  const auto project = putting(state, width, first_bias, 0);
  const auto read_out = [&](const float* from) {
    for (int64_t t = 0; t < tokens; t++)
      logits[t] = std::inner_product(readout, readout + width, from + t * width, *last_bias);
  };

  const int64_t bytes = (size + depth * width) * panels * kPair * sizeof(float) * pieces;
  Team::run(panels > 1 && bytes > 2 * kGrainBytes, [&](Team& team) {
    float* from = state;
    float* to = other;
    team.once(standardise);
    if (network.projection)
      for_panels<float>(team, *network.projection, 1, scaled, tokens, project);
    for (int64_t d = 0; d < depth; d++, std::swap(from, to)) {
      const Panels<float> block{block_panels + d * panels * width * kPair, panels, width};
      const float* bias = biases + d * width;
      for_panels<float>(team, block, 1, from, tokens,
                        [&](int64_t number, int64_t first, int64_t several, float* sums) {
                          const int64_t row = number * kPair;
                          const int64_t exist = std::min<int64_t>(kPair, width - row);
                          for (int64_t t = first; t < first + several; t++, sums += kPair) {
                            residual_into(sums, bias + row, from + t * width + row, exist,
                                          to + t * width + row);
                          }
                        });
    }
    team.once([&] { read_out(from); });
  });
}

// The logits (...) of a head's network for inputs (..., I) in float32: standardised by mean and
// scale (I), projected to
// (..., W) unless there is no projection, D blocks x + silu(W x + b), and the inner product with
// the read-out (W). projection: panels (ceil(W / P), I, P); blocks: panels (D ceil(W / P), W, P),
// biases (D, W).
AtenTensorHandle head_network(const at::TensorBase& inputs,
                              const at::TensorBase& mean,
                              const at::TensorBase& scale,
                              const at::TensorBase* projection,
                              const at::TensorBase* projection_bias,
                              const at::TensorBase* blocks,
                              const at::TensorBase* block_biases,
                              const at::TensorBase& readout,
                              const at::TensorBase& readout_bias) {
  TORCH_CHECK(inputs.scalar_type() == at::kFloat, "heads compute in float32, not in ",
              inputs.scalar_type());
  const at::TensorBase x = inputs.contiguous();
  at::TensorBase result = empty(inputs.sizes().slice(0, inputs.dim() - 1), inputs.scalar_type());
  const Network network{mean,   scale,        projection, projection_bias,
                        blocks, block_biases, readout,    readout_bias};
  network_into(x, network, result);
  return handle_of(result);
}

}  // namespace specheads_kernels

SPECHEADS_OPERATOR(packed_linear,
                   "(Tensor x, Tensor panels, Tensor? bias, int num_rows, int input_bits) -> "
                   "Tensor")
SPECHEADS_OPERATOR(head_network,
                   "(Tensor inputs, Tensor mean, Tensor scale, Tensor? projection, Tensor? "
                   "projection_bias, Tensor? blocks, "
                   "Tensor? block_biases, Tensor readout, Tensor readout_bias) -> Tensor")

STABLE_TORCH_LIBRARY_FRAGMENT(specheads, library) {
  library.def("panel_rows() -> int");
  library.def("multiplies_pairs() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(specheads, CompositeImplicitAutograd, library) {
  library.impl("panel_rows", TORCH_BOX(&specheads_kernels::panel_rows));
  library.impl("multiplies_pairs", TORCH_BOX(&specheads_kernels::multiplies_pairs));
}
