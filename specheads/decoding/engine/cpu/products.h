// Products of few tokens with the panels of a packed weight, which is read once.
//
// A weight lies in panels of kPair rows, each stored column by column; see `_pack` in packed.py. Each number of a result is
// summed in the same order whatever the number of tokens, so that a verification computes the same logits as steps of one token.

#pragma once

#include "kernels.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace specheads_kernels __attribute__((visibility("hidden"))) {

// block[t][j] += sum_i x[t][i] panel[i][j] for kTokens rows t, which are `apart` numbers from each other; columns i of the panel are
// `stride` apart. Not inlined: there is code for every number of tokens.
template <typename Value, int kTokens>
__attribute__((noinline)) void product_of(
    const Value* panel, int64_t stride, Ahead ahead, const InputOf<Value>* x, int64_t apart, int64_t size, SumOf<Value>* block) {
  Sums<Value, kTokens> sums;
  sums.load(block, kPair<Value>);
  for (int64_t i = 0; i < size; i++) {
    const Value* column = panel + i * stride;
    ahead.fetch<Value>(i);
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
    if constexpr (kMultipliesPairs<Value>) {
      ahead.fetch<Value>(i + 1);
      sums.add_pairs(_mm512_loadu_si512(column), _mm512_loadu_si512(column + kPair<Value>), x + i++, apart);
    }
#endif
    if constexpr (!kMultipliesPairs<Value>) {
      Vectorized<SumOf<Value>> first, second;
      load_pair(column, first, second);
      sums.add(first, second, x + i, apart);
    }
  }
  sums.store(block, kPair<Value>);
}

// The same for `tokens` rows, at most kMostTokens.
template <typename Value>
void panel_product(
    int64_t tokens, const Value* panel, int64_t stride, Ahead ahead, const InputOf<Value>* x, int64_t apart, int64_t size,
    SumOf<Value>* block) {
  with_count<kMostTokens<Value>>(tokens, [&](auto count) {
    product_of<Value, decltype(count)::value>(panel, stride, ahead, x, apart, size, block);
  });
}

// Rows of numbers as products with weights of few bits read them. Such a weight is d q + m, so that a group of columns adds
// d sum_i x_i q_i + m sum_i x_i. The q of several columns stay where they are in a word, times a power of two by which `x` is divided:
// shifts and conversions to float32 are what takes time. These divisions are exact.
template <int bits>
struct LatticeInputs {
  static constexpr int kColumns = 16 / bits;  // of half a word
  int64_t size;
  float *x, *sums;  // (tokens, size), and (tokens, groups)

  LatticeInputs(const float* rows, int64_t tokens, int64_t size)
      : size(size), x(scratch<float, 17>(tokens * (size + size / kGroup))), sums(x + tokens * size) {
    for (int64_t begin = 0; begin < tokens * size; begin += kGroup) {
      sums[begin / kGroup] = std::accumulate(rows + begin, rows + begin + kGroup, 0.0f);
      for (int64_t i = begin; i < begin + kGroup; i++) x[i] = rows[i] * (1.0f / (1 << (i % kColumns * bits)));
    }
  }
};

// block[t][j] = sum_i x[first + t][i] panel[i][j] for `count` rows t. In memory a group of columns is its rows' d, their m, and words
// of 32 bits, each with the q of a row and several columns.
template <int bits, int count>
__attribute__((noinline)) void lattice_product(const Lattice<bits>* panel, const LatticeInputs<bits>& inputs, int64_t first_row, float* block) {
  using Vector = Vectorized<float>;
  using Words = Vectorized<int32_t>;
  const int64_t size = inputs.size, groups = size / kGroup;
  const float* x = inputs.x + first_row * size;
  std::fill_n(block, count * kPair<float>, 0.0f);
  for (int64_t group = 0; group < groups; group++, panel += kGroup * kColumn<Lattice<bits>>) {
    const auto* scales = reinterpret_cast<const at::Half*>(panel);
    const auto* words = reinterpret_cast<const int32_t*>(scales + 2 * kPair<float>);
    Sums<float, count> sums;
    for (int64_t i = 0; i < kGroup; words += kPair<float>) {
      __builtin_prefetch(reinterpret_cast<const char*>(words) + kPrefetchBytes);
      if constexpr (kPair<float> > 16) __builtin_prefetch(reinterpret_cast<const char*>(words) + kPrefetchBytes + 64);
      Words first = Words::loadu(words), second = Words::loadu(words + kLanes<float>);
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++, first = first >> Words(16), second = second >> Words(16)) {
#pragma GCC unroll 4
        for (int c = 0; c < LatticeInputs<bits>::kColumns; c++, i++, x++) {
          const Words mask(((1 << bits) - 1) << c * bits);
          const Vector left = at::vec::convert_to_fp_of_same_size<float>(first & mask);
          sums.add(left, at::vec::convert_to_fp_of_same_size<float>(second & mask), x, size);
        }
      }
    }
    Vector d[2], m[2];
    load_pair(scales, d[0], d[1]);
    load_pair(scales + kPair<float>, m[0], m[1]);
    sums.add_to(block, d, m, inputs.sums + first_row * groups + group, groups);
  }
}

// blocks[p][j] = sum_i x[i] panels[p][i][j] for `count` panels that follow each other: a sum waits for its last addition, so that a
// panel alone leaves the processor idle.
template <typename Value, int count>
__attribute__((noinline)) void row_product(const Value* panels, const SumOf<Value>* x, int64_t size, SumOf<Value>* blocks) {
  Sums<Value, count> sums;
  for (int64_t i = 0; i < size; i++) {
    sums.add_column(panels + i * kPair<Value>, size * kPair<Value>, Vectorized<SumOf<Value>>(x[i]));
  }
  sums.store(blocks, kPair<Value>);
}

// What a product fetches that reads its panel for the first time.
template <typename Value>
Ahead columns_ahead(const Value* panel, int64_t stride) {
  return {reinterpret_cast<const char*>(panel) + kPrefetchBytes, static_cast<int64_t>(stride * sizeof(Value))};
}

// Products of rows, in pieces of at most kMostTokens, with panels of one type.
template <typename Value>
struct Multiplier {
  const InputOf<Value>* rows;
  int64_t size, pieces, share;

  Multiplier(const InputOf<Value>* rows, int64_t tokens, int64_t size, int64_t pieces)
      : rows(rows), size(size), pieces(pieces), share(kPair<Value> * sizeof(Value) / std::max<int64_t>(1, pieces)) {}

  // block[t][j] = sum_i rows[first + t][i] panel[i][j] for `several` rows t, which are a piece; `next` is what is read after all pieces.
  void multiply(const Value* panel, const Value* next, int64_t piece, int64_t first, int64_t several, SumOf<Value>* block) const {
    // One piece fetches what it reads itself a little later. Several share the next panel, so that memory is never idle.
    const Ahead later{reinterpret_cast<const char*>(next) + piece * size * share, share};
    const Ahead ahead = pieces == 1 ? columns_ahead(panel, kPair<Value>) : later;
    std::fill_n(block, several * kPair<Value>, SumOf<Value>(0));
    panel_product(several, panel, kPair<Value>, ahead, rows + first * size, size, size, block);
  }
};

template <int bits>
struct Multiplier<Lattice<bits>> {
  LatticeInputs<bits> inputs;

  Multiplier(const float* rows, int64_t tokens, int64_t size, int64_t) : inputs(rows, tokens, size) {}

  void multiply(
      const Lattice<bits>* panel, const Lattice<bits>*, int64_t, int64_t first, int64_t several, float* block) const {
    with_count<kMostTokens<float>>(several, [&](auto count) {
      lattice_product<bits, decltype(count)::value>(panel, inputs, first, block);
    });
  }
};

// Panels of one packed weight.
template <typename Value>
struct Panels {
  const Value* values;
  int64_t number, size;  // of panels, and of columns in each

  Panels(const Value* values, int64_t number, int64_t size) : values(values), number(number), size(size) {}
  Panels(const at::TensorBase& panels)
      : Panels(static_cast<const Value*>(panels.const_data_ptr()), panels.size(0), panels.size(1)) {}
};

constexpr int kPanels = 4;  // that are in work at a time for one token; an even number, as gate and up are multiplied together

// Multiply rows (tokens, size) with all panels, `together` at a time. For each product it calls
// finish(number of the panel, first token, number of tokens, blocks), a block being (tokens, kPair).
template <typename Value, typename Finish>
void for_panels(
    Team& team, const Panels<Value>& panels, int64_t together, const InputOf<Value>* rows, int64_t tokens, const Finish& finish) {
  using Sum = SumOf<Value>;
  const int64_t size = panels.size, pieces = (tokens + kMostTokens<Value> - 1) / kMostTokens<Value>;
  constexpr int column = kColumn<Value>;
  const int64_t bytes = together * size * column * sizeof(Value) * std::max<int64_t>(1, pieces);
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes));
  team.each(panels.number / together, grain, [&](int64_t begin, int64_t end) {
    Sum* sums = scratch<Sum, 18>(std::max<int64_t>(kPanels, together * tokens) * kPair<Value>);
    if constexpr (!kMultipliesPairs<Value> && !kIsLattice<Value>) {
      while (tokens == 1 && begin * together + kPanels <= end * together) {
        const int64_t number = begin * together;
        row_product<Value, kPanels>(panels.values + number * column * size, rows, size, sums);
        for (int64_t i = 0; i < kPanels; i += together) finish(number + i, 0, 1, sums + i * kPair<Value>);
        begin += kPanels / together;
      }
    }
    const Multiplier<Value> multiplier(rows, tokens, size, pieces);
    for (int64_t number = begin * together; number < end * together; number += together) {
      for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t first = tokens * piece / pieces, several = tokens * (piece + 1) / pieces - first;
        Sum* blocks = sums + first * together * kPair<Value>;
        for (int64_t i = 0; i < together; i++) {
          const Value* panel = panels.values + (number + i) * column * size;
          multiplier.multiply(panel, panel + together * column * size, piece, first, several, blocks + i * several * kPair<Value>);
        }
        finish(number, first, several, blocks);
      }
    }
  });
}

// What `for_panels` calls to put products into rows of `width` numbers: to[t][j] = sum + added[t][j], or the sum alone. Rows of
// `added` are `apart` numbers from each other, 0 where it is one row for all.
template <typename Sum, typename Added, typename To>
auto putting(To* to, int64_t width, const Added* added, int64_t apart) {
  return [=](int64_t number, int64_t first, int64_t several, const Sum* block) {
    const int64_t row = number * kPair<Sum>, exist = std::min<int64_t>(kPair<Sum>, width - row);
    for (int64_t t = first; t < first + several; t++, block += kPair<Sum>) {
      To* into = to + t * width + row;
      const Added* more = added ? added + t * apart + row : nullptr;
      if (more) {
        for (int64_t j = 0; j < exist; j++) into[j] = static_cast<To>(block[j] + static_cast<Sum>(more[j]));
      } else {
        for (int64_t j = 0; j < exist; j++) into[j] = static_cast<To>(block[j]);
      }
    }
  };
}

// to = x / (1 + exp(-x))
template <typename Sum>
Vectorized<Sum> silu(const Sum* from) {
  const auto x = Vectorized<Sum>::loadu(from);
  return x / (Vectorized<Sum>(1) + x.neg().exp());
}

// Rows of `size` numbers, `stride` apart, as rows of `width` numbers of another type, and how far apart those are: where they lie,
// or converted and padded with zeros.
template <typename To, int number, typename From>
std::pair<const To*, int64_t> converted(const From* from, int64_t stride, int64_t count, int64_t size, int64_t width) {
  if constexpr (std::is_same_v<To, From>) {
    if (size == width) return {from, stride};
  }
  To* to = scratch<To, number>(count * width);
  for (int64_t row = 0; row < count; row++) {
    for (int64_t i = 0; i < size; i++) to[row * width + i] = static_cast<To>(from[row * stride + i]);
    std::fill(to + row * width + size, to + (row + 1) * width, To(0));
  }
  return {to, width};
}

}  // namespace specheads_kernels
