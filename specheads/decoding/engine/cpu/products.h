// Products of few tokens with the panels of a packed weight, which is read once.
//
// A weight lies in panels of kPair rows, each stored column by column; see `pack` in packed.py. Each number of a result is
// summed in the same order whatever the number of tokens, so that a verification computes the same logits as steps of one token.

#pragma once

#include "kernels.h"

namespace specheads_kernels __attribute__((visibility("hidden"))) {

// block[t][j] = sum_i x[t][i] panel[i][j] for `tokens` rows t, at most kMostTokens, where columns i of the panel are `stride`
// apart. Compiled in maps.cpp.
template <typename Value>
void panel_product(
    int64_t tokens, const Value* panel, int64_t stride, const InputOf<Value>* x, int64_t size, SumOf<Value>* block);

// Panels of one packed weight.
template <typename Value>
struct Panels {
  const Value* values;
  int64_t number, size;  // of panels, and of columns in each
};

// Multiply rows (tokens, size) with all panels, `together` at a time. For each product it calls
// finish(number of the panel, first token, number of tokens, blocks), a block being (tokens, kPair).
template <typename Value, typename Finish>
void for_panels(
    Team& team, const Panels<Value>& panels, int64_t together, const InputOf<Value>* rows, int64_t tokens, const Finish& finish) {
  using Sum = SumOf<Value>;
  const int64_t size = panels.size, pieces = (tokens + kMostTokens<Value> - 1) / kMostTokens<Value>;
  const Value* weight = panels.values;
  const int64_t bytes = together * size * kPair<Value> * sizeof(Value) * std::max<int64_t>(1, pieces);
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes));
  team.each(panels.number / together, grain, [&](int64_t begin, int64_t end) {
    Sum blocks[2 * kMostTokens<Value> * kPair<Value>];
    for (int64_t number = begin * together; number < end * together; number += together) {
      for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t first = tokens * piece / pieces, several = tokens * (piece + 1) / pieces - first;
        for (int64_t i = 0; i < together; i++) {
          const Value* panel = weight + (number + i) * kPair<Value> * size;
          panel_product(several, panel, kPair<Value>, rows + first * size, size, blocks + i * several * kPair<Value>);
        }
        finish(number, first, several, blocks);
      }
    }
  });
}

template <typename Value, typename Finish>
void for_panels(
    Team& team, const at::TensorBase& panels, int64_t together, const InputOf<Value>* rows, int64_t tokens, const Finish& finish) {
  for_panels<Value>(team, Panels<Value>{panels.const_data_ptr<Value>(), panels.size(0), panels.size(1)}, together, rows, tokens, finish);
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

}  // namespace specheads_kernels
