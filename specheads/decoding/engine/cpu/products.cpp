// Products with a panel, compiled for every type and number of tokens, and the operator of linear maps.

#include "operators.h"
#include "products.h"

namespace specheads_kernels __attribute__((visibility("hidden"))) {
namespace {

template <typename Value, int kTokens>
void product_of(const Value* panel, int64_t stride, const InputOf<Value>* x, int64_t size, SumOf<Value>* block) {
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
void product_of_several(int64_t tokens, Arguments... arguments) {
  if constexpr (kTokens > 1) {
    if (tokens < kTokens) return product_of_several<Value, kTokens - 1>(tokens, arguments...);
  }
  product_of<Value, kTokens>(arguments...);
}

}  // namespace

template <typename Value>
void panel_product(
    int64_t tokens, const Value* panel, int64_t stride, const InputOf<Value>* x, int64_t size, SumOf<Value>* block) {
  product_of_several<Value>(tokens, panel, stride, x, size, block);
}

template void panel_product<double>(int64_t, const double*, int64_t, const double*, int64_t, double*);
template void panel_product<float>(int64_t, const float*, int64_t, const float*, int64_t, float*);
template void panel_product<at::BFloat16>(int64_t, const at::BFloat16*, int64_t, const InputOf<at::BFloat16>*, int64_t, float*);
template void panel_product<at::Half>(int64_t, const at::Half*, int64_t, const float*, int64_t, float*);

namespace {

template <typename Value>
void linear_into(const at::TensorBase& x, const at::TensorBase& panels, const Value* bias, at::TensorBase& result) {
  using Sum = SumOf<Value>;
  const int64_t num_rows = result.size(-1), size = x.size(-1), tokens = x.numel() / std::max<int64_t>(1, size);
  const InputOf<Value>* rows = inputs_of<Value, 0>(x.const_data_ptr<Value>(), tokens, size, panels.size(1));
  Value* to = result.mutable_data_ptr<Value>();
  const int64_t bytes = panels.numel() * sizeof(Value) * ((tokens + kMostTokens<Value> - 1) / kMostTokens<Value>);
  Team::run_if(bytes > 2 * kGrainBytes, [&](Team& team) {
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

}  // namespace

// x W^T + b (..., O) of x (..., I), W in panels (ceil(O / P), I, P), b (O); an odd I is padded in panels of pairs.
AtenTensorHandle packed_linear(
    const at::TensorBase& x, const at::TensorBase& panels, const at::TensorBase* bias, int64_t num_rows) {
  const bool in_pairs = kMultipliesPairs<at::BFloat16> && x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(
      x.size(-1) + (in_pairs ? x.size(-1) % 2 : 0) == panels.size(1) && x.scalar_type() == panels.scalar_type() &&
          panels.is_contiguous(),
      "x is ", x.scalar_type(), " ", x.sizes(), ", panels are ", panels.scalar_type(), " ", panels.sizes());
  auto shape = x.sizes().vec();
  shape.back() = num_rows;
  at::TensorBase result = empty(shape, x.scalar_type()), rows = x.contiguous();
  with_type(x.scalar_type(), [&](auto value) {
    using Value = decltype(value);
    linear_into<Value>(rows, panels, bias ? bias->const_data_ptr<Value>() : nullptr, result);
  });
  return handle_of(result);
}

int64_t panel_rows(bool wide) {
  return wide ? kPair<double> : kPair<float>;
}

bool multiplies_pairs() {
  return kMultipliesPairs<at::BFloat16>;
}

}  // namespace specheads_kernels
