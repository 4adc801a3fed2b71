// Products of few tokens with the panels of a packed weight, which is read once.
//
// A weight lies in panels of kPair rows, each stored column by column; see `_pack` in packed.py. Each number of a result is
// summed in the same order whatever the number of tokens, so that a verification computes the same logits as steps of one token.

#pragma once

#include "kernels.h"

#include <utility>

namespace specheads_kernels __attribute__((visibility("hidden"))) {

template <typename Value, int kTokens>
void product_of(
    const Value* panel, int64_t stride, Ahead ahead, const InputOf<Value>* x, int64_t apart, int64_t size, SumOf<Value>* block) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
  if constexpr (kMultipliesPairs<Value>) {
    PairSums<kTokens> sums;
    sums.load(block, kPair<Value>);
    for (int64_t i = 0; i < size; i += 2) {
      const Value* columns = panel + i * stride;
      ahead.fetch<Value>(i);
      ahead.fetch<Value>(i + 1);
      sums.add(_mm512_loadu_si512(columns), _mm512_loadu_si512(columns + kPair<Value>), x + i, apart);
    }
    sums.store(block, kPair<Value>);
    return;
  }
#endif
  using Vector = Vectorized<SumOf<Value>>;
  Sums<Value, kTokens> sums;
  sums.load(block, kPair<Value>);
  for (int64_t i = 0; i < size; i++) {
    const Value* column = panel + i * stride;
    ahead.fetch<Value>(i);
    Vector first, second;
    load_pair(column, first, second);
    if constexpr (!kMultipliesPairs<Value>) sums.add(first, second, x + i, apart);
  }
  sums.store(block, kPair<Value>);
}

template <typename Value, int kTokens = kMostTokens<Value>, typename... Arguments>
void product_of_several(int64_t tokens, Arguments... arguments) {
  if constexpr (kTokens > 1) {
    if (tokens < kTokens) return product_of_several<Value, kTokens - 1>(tokens, arguments...);
  }
  product_of<Value, kTokens>(arguments...);
}

// block[t][j] += sum_i x[t][i] panel[i][j] for `tokens` rows t, at most kMostTokens, which are `apart` numbers from each other; columns
// i of the panel are `stride` apart. Not inlined: there is code for every number of tokens.
template <typename Value>
__attribute__((noinline)) void panel_product(
    int64_t tokens, const Value* panel, int64_t stride, Ahead ahead, const InputOf<Value>* x, int64_t apart, int64_t size,
    SumOf<Value>* block) {
  product_of_several<Value>(tokens, panel, stride, ahead, x, apart, size, block);
}

// Sums of one row with `count` panels at a time: a sum waits for its last addition, so that a panel alone leaves the processor idle.
template <typename Value, int count>
struct PanelSums {
  using Vector = Vectorized<SumOf<Value>>;
  Vector first{SumOf<Value>(0)}, second{SumOf<Value>(0)};
  PanelSums<Value, count - 1> others;

  // Add the product of a number and a column of each panel; panels are `apart` numbers from each other.
  C10_ALWAYS_INLINE void add(const Value* column, int64_t apart, const Vector& factor) {
    Vector left, right;
    __builtin_prefetch(reinterpret_cast<const char*>(column) + kPrefetchBytes);
    load_pair(column, left, right);
    first = at::vec::fmadd(left, factor, first);
    second = at::vec::fmadd(right, factor, second);
    if constexpr (count > 1) others.add(column + apart, apart, factor);
  }

  C10_ALWAYS_INLINE void store(SumOf<Value>* to) const {
    first.store(to);
    second.store(to + kLanes<Value>);
    if constexpr (count > 1) others.store(to + kPair<Value>);
  }
};
template <typename Value>
struct PanelSums<Value, 0> {};

// Call use(i, first, second) with the weights of each column i of a panel, in turn. In memory a group of columns is its rows' d, their
// m, and words of 32 bits, each with the q of a row and several columns. A column's q stay where they are in a word, times a power of
// two by which d is divided: shifts and conversions to float32 are what takes time. All products d q are exact.
template <int bits, typename Use>
C10_ALWAYS_INLINE void for_columns(const Lattice<bits>* panel, int64_t size, const Use& use) {
  using Vector = Vectorized<float>;
  using Words = Vectorized<int32_t>;
  constexpr int columns = 16 / bits;  // of half a word
  const Words half(16);
  for (int64_t begin = 0; begin < size; begin += kGroup, panel += kGroup * kColumn<Lattice<bits>>) {
    const auto* scales = reinterpret_cast<const at::Half*>(panel);
    const auto* words = reinterpret_cast<const int32_t*>(scales + 2 * kPair<float>);
    Vector factors[columns], other_factors[columns], offset, other_offset;
    load_pair(scales, factors[0], other_factors[0]);
    load_pair(scales + kPair<float>, offset, other_offset);
#pragma GCC unroll 4
    for (int c = 1; c < columns; c++) {
      factors[c] = factors[c - 1] * Vector(1.0f / (1 << bits));
      other_factors[c] = other_factors[c - 1] * Vector(1.0f / (1 << bits));
    }
    for (int64_t i = begin; i < begin + kGroup; words += kPair<float>) {
      __builtin_prefetch(reinterpret_cast<const char*>(words) + kPrefetchBytes);
      if constexpr (kPair<float> > 16) __builtin_prefetch(reinterpret_cast<const char*>(words) + kPrefetchBytes + 64);
      Words first = Words::loadu(words), second = Words::loadu(words + kLanes<float>);
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++, first = first >> half, second = second >> half) {
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++, i++) {
          const auto weight = [&](const Words& word, const Vector& d, const Vector& m) {
            return at::vec::fmadd(at::vec::convert_to_fp_of_same_size<float>(word & Words(((1 << bits) - 1) << c * bits)), d, m);
          };
          use(i, weight(first, factors[c], offset), weight(second, other_factors[c], other_offset));
        }
      }
    }
  }
}

// blocks[p][j] = sum_i x[i] panels[p][i][j] for `count` panels that follow each other.
template <typename Value, int count>
__attribute__((noinline)) void row_product(const Value* panels, const SumOf<Value>* x, int64_t size, SumOf<Value>* blocks) {
  if constexpr (kIsLattice<Value>) {  // making weights keeps the processor busy
    for (int p = 0; p < count; p++) {
      Sums<float, 1> sums;
      for_columns(panels + p * size * kColumn<Value>, size, [&](int64_t i, auto first, auto second) { sums.add(first, second, x + i, 0); });
      sums.store(blocks + p * kPair<Value>, 0);
    }
  } else {
    PanelSums<Value, count> sums;
    for (int64_t i = 0; i < size; i++) sums.add(panels + i * kPair<Value>, size * kPair<Value>, Vectorized<SumOf<Value>>(x[i]));
    sums.store(blocks);
  }
}

constexpr int64_t kColumnsAtATime = 4 * kGroup;

// Columns of a panel as products of several tokens read them: those of few bits become float32 once for all tokens, as many at a
// time as the first cache holds.
template <typename Value>
const auto* multiplied(const Value* columns, int64_t count) {
  if constexpr (kIsLattice<Value>) {
    float* to = scratch<float, 17>(kColumnsAtATime * kPair<float>);
    for_columns(columns, count, [&](int64_t i, auto first, auto second) {
      first.store(to + i * kPair<float>);
      second.store(to + i * kPair<float> + kLanes<float>);
    });
    return static_cast<const float*>(to);
  } else {
    return columns;
  }
}

// What a product fetches that reads its panel for the first time.
template <typename Value>
Ahead columns_ahead(const Value* panel, int64_t stride) {
  return {reinterpret_cast<const char*>(panel) + kPrefetchBytes, static_cast<int64_t>(stride * sizeof(Value))};
}

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
  const Value* weight = panels.values;
  constexpr int column = kColumn<Value>;
  const int64_t bytes = together * size * column * sizeof(Value) * std::max<int64_t>(1, pieces);
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes));
  team.each(panels.number / together, grain, [&](int64_t begin, int64_t end) {
    Sum* sums = scratch<Sum, 18>(std::max<int64_t>(kPanels, together * tokens) * kPair<Value>);
    if constexpr (!kMultipliesPairs<Value>) {
      while (tokens == 1 && begin * together + kPanels <= end * together) {
        const int64_t number = begin * together;
        row_product<Value, kPanels>(weight + number * column * size, rows, size, sums);
        for (int64_t i = 0; i < kPanels; i += together) finish(number + i, 0, 1, sums + i * kPair<Value>);
        begin += kPanels / together;
      }
    }
    const auto first_of = [&](int64_t piece) { return tokens * piece / pieces; };
    const int64_t most = kIsLattice<Value> ? kColumnsAtATime : size;
    const int64_t share = column * sizeof(Value) / std::max<int64_t>(1, pieces);  // no tokens are no pieces
    for (int64_t number = begin * together; number < end * together; number += together) {
      std::fill_n(sums, together * tokens * kPair<Value>, Sum(0));
      for (int64_t i = 0; i < together; i++) {
        // One piece fetches what it reads itself a little later. Several share the next panel, so that memory is never idle.
        const char* next = reinterpret_cast<const char*>(weight + (number + i + together) * column * size);
        for (int64_t start = 0; start < size; start += most) {
          const int64_t count = std::min(most, size - start);
          const auto* columns = multiplied(weight + (number + i) * column * size + start * column, count);
          for (int64_t piece = 0; piece < pieces; piece++) {
            const int64_t first = first_of(piece), several = first_of(piece + 1) - first;
            const bool reads = pieces == 1 && !kIsLattice<Value>;
            const Ahead ahead =
                reads ? columns_ahead(columns, kPair<Value>) : Ahead{next + (start * pieces + piece * count) * share, share};
            Sum* block = sums + (first * together + i * several) * kPair<Value>;
            panel_product(several, columns, kPair<Value>, ahead, rows + first * size + start, size, count, block);
          }
        }
      }
      for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t first = first_of(piece);
        finish(number, first, first_of(piece + 1) - first, sums + first * together * kPair<Value>);
      }
    }
  });
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
