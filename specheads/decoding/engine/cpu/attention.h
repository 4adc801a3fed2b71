// Attention of few tokens. Rows are the queries of one group of heads, which share keys and values.

#pragma once

#include "products.h"

#include <array>
#include <limits>
#include <utility>

namespace specheads_kernels __attribute__((visibility("hidden"))) {

// A head's keys or values as rows of `width` numbers, a multiple of kPair: where they lie, or converted and padded with zeros.
template <typename Value, int number>
std::pair<const SumOf<Value>*, int64_t> rows_of(
    const at::TensorBase& memory, int64_t batch, int64_t head, int64_t count, int64_t width) {
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

// A mask as (B, heads, T, S), to which it is broadcast: bools, or numbers of the type of sums, which are added to scores.
class Mask {
 public:
  Mask(const at::TensorBase& mask, at::ScalarType type, std::array<int64_t, 4> sizes) : sizes_(sizes) {
    const auto sum_type = type == at::kDouble ? at::kDouble : at::kFloat;
    const bool is_right = mask.scalar_type() == at::kBool || mask.scalar_type() == sum_type;
    numbers_ = is_right ? mask : mask.to(mask.options().dtype(sum_type));
    const int64_t added = 4 - mask.dim();
    for (int64_t i = 0; i < 4; i++) {
      const int64_t size = i < added ? 1 : mask.size(i - added);
      const bool fits = added >= 0 && (size == 1 || size == sizes[i]);
      TORCH_CHECK(fits, "a mask ", mask.sizes(), " does not fit ", at::IntArrayRef(sizes));
      strides_[i] = i < added || size != sizes[i] ? 0 : numbers_.stride(i - added);
    }
  }

  int64_t size(int64_t i) const { return sizes_[i]; }
  int64_t stride(int64_t i) const { return strides_[i]; }
  bool is_bool() const { return numbers_.scalar_type() == at::kBool; }
  template <typename Number>
  const Number* data() const { return numbers_.const_data_ptr<Number>(); }

 private:
  at::TensorBase numbers_;
  std::array<int64_t, 4> sizes_, strides_;
};

// What a token's mask adds to the first scores of one head, (count,).
template <typename Sum>
const Sum* mask_row(const Mask& mask, int64_t batch, int64_t head, int64_t token, int64_t count, Sum* memory) {
  const int64_t from = batch * mask.stride(0) + head * mask.stride(1) + token * mask.stride(2), stride = mask.stride(3);
  if (!mask.is_bool()) {
    const Sum* added = mask.data<Sum>() + from;
    if (stride == 1) return added;
    for (int64_t s = 0; s < count; s++) memory[s] = added[s * stride];
    return memory;
  }
  const bool* seen = mask.data<bool>() + from;
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
    panel_product(several, panel, stride, rows + first * size, size, block);
    for (int64_t r = 0; r < several; r++) std::copy_n(block + r * kPair<Sum>, exist, result + (first + r) * width);
  }
}

// Where the tokens of each batch item are: its row of the memory and its first position, as long as there are numbers, or else
// the row of its number and the same position for all.
class Places {
 public:
  Places(const at::TensorBase* rows, const at::TensorBase* positions, int64_t batch) {
    for (const at::TensorBase* numbers : {rows, positions}) {
      const bool fits = !numbers || numbers->dim() == 0 || (numbers->numel() == batch && numbers->is_contiguous());
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

// Attention of tokens (B, heads, T) to the first positions of keys and values (R, shared, S', D), as many as the mask
// (B, heads, T, S) has. query(b, head, t, to) writes a scaled query, store(b, head, t, from) takes a result.
template <typename Value, typename Query, typename Store>
void attend(
    Team& team, const at::TensorBase& key, const at::TensorBase& value, const Mask& mask, const Places& places, const Query& query,
    const Store& store) {
  using Sum = SumOf<Value>;
  const int64_t heads = mask.size(1), tokens = mask.size(2), size = key.size(3), value_size = value.size(3);
  const int64_t shared = key.size(1), group = heads / shared, rows = group * tokens;
  const int64_t value_width = (value_size + kPair<Sum> - 1) / kPair<Sum> * kPair<Sum>;
  const int64_t items = mask.size(0) * shared, pieces = std::min<int64_t>(rows, (at::get_num_threads() + items - 1) / items);
  const int64_t item_bytes = mask.size(3) * (size + value_width) * sizeof(Sum) * ((rows + pieces - 1) / std::max<int64_t>(1, pieces));
  team.each(items * pieces, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, item_bytes)), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) {
      const int64_t batch = item / pieces / shared, kv_head = item / pieces % shared, piece = item % pieces;
      const int64_t first = rows * piece / pieces, next = rows * (piece + 1) / pieces;
      const int64_t memory_row = places.row(batch), count = places.seen(batch, tokens, mask.size(3));
      const auto [keys, key_stride] = rows_of<Value, 1>(key, memory_row, kv_head, count, size);
      const auto [values, value_stride] = rows_of<Value, 2>(value, memory_row, kv_head, count, value_width);
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
        const Sum* added_to = mask_row<Sum>(mask, batch, kv_head * group + row / tokens, row % tokens, count, added);
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

}  // namespace specheads_kernels
