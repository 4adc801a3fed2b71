// The operator of linear maps, and that of an acceptance head's network: small maps, in which operators of their own would spend
// most of the time between them.

#pragma once

#include "operators.h"
#include "products.h"

#include <numeric>

namespace specheads_kernels __attribute__((visibility("hidden"))) {
// x W^T + b (..., O) of x (..., I), W in panels (ceil(O / P), I, P), b (O); an odd I is padded in panels of pairs. Panels may have
// 16 bits where x has 32.
AtenTensorHandle packed_linear(
    const at::TensorBase& x, const at::TensorBase& panels, const at::TensorBase* bias, int64_t num_rows) {
  const bool in_pairs = kMultipliesPairs<at::BFloat16> && x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(
      x.size(-1) + (in_pairs ? x.size(-1) % 2 : 0) == panels.size(1) && panels.is_contiguous(), "x is ", x.scalar_type(), " ",
      x.sizes(), ", panels are ", panels.scalar_type(), " ", panels.sizes());
  auto shape = x.sizes().vec();
  shape.back() = num_rows;
  at::TensorBase result = empty(shape, x.scalar_type()), rows = x.contiguous();
  with_types(x.scalar_type(), panels.scalar_type(), [&](auto value, auto weight) {
    using Value = decltype(value);
    using Weight = decltype(weight);
    const int64_t size = x.size(-1), tokens = x.numel() / std::max<int64_t>(1, size);
    const auto inputs = converted<InputOf<Weight>, 0>(rows.const_data_ptr<Value>(), size, tokens, size, panels.size(1)).first;
    const Value* added = bias ? bias->const_data_ptr<Value>() : nullptr;
    const auto put = putting<SumOf<Value>>(result.mutable_data_ptr<Value>(), num_rows, added, 0);
    const int64_t bytes = panels.numel() * sizeof(Weight) * ((tokens + kMostTokens<Weight> - 1) / kMostTokens<Weight>);
    Team::run(bytes > 2 * kGrainBytes, [&](Team& team) { for_panels<Weight>(team, panels, 1, inputs, tokens, put); });
  });
  return handle_of(result);
}

int64_t panel_rows(bool wide) {
  return wide ? kPair<double> : kPair<float>;
}

bool multiplies_pairs() {
  return kMultipliesPairs<at::BFloat16>;
}

// The tensors of a network. Maps are packed; panels of the blocks follow each other.
struct Network {
  const at::TensorBase &mean, &scale;
  const at::TensorBase *projection, *projection_bias, *blocks, *block_biases;
  const at::TensorBase &readout, &readout_bias;
};

// to[j] = from[j] + silu(block[j] + bias[j]), for the numbers j < exist; `block` is overwritten.
template <typename Sum>
void residual_into(Sum* block, const Sum* bias, const Sum* from, int64_t exist, Sum* to) {
  for (int64_t j = 0; j < exist; j++) block[j] += bias[j];
  for (int64_t j = 0; j < kPair<Sum>; j += kLanes<Sum>) silu(block + j).store(block + j);
  for (int64_t j = 0; j < exist; j++) to[j] = from[j] + block[j];
}

template <typename Value>
void network_into(const at::TensorBase& inputs, const Network& network, at::TensorBase& result) {
  const int64_t size = inputs.size(-1), tokens = result.numel(), width = network.readout.numel();
  const int64_t depth = network.blocks ? network.block_biases->size(0) : 0;
  const int64_t panels = (width + kPair<Value> - 1) / kPair<Value>, pieces = (tokens + kMostTokens<Value> - 1) / kMostTokens<Value>;
  Value *scaled = scratch<Value, 14>(tokens * size), *state = scratch<Value, 15>(tokens * width);
  Value* other = scratch<Value, 16>(tokens * width);
  const Value *x = inputs.const_data_ptr<Value>(), *mean = network.mean.const_data_ptr<Value>();
  const Value *scale = network.scale.const_data_ptr<Value>(), *readout = network.readout.const_data_ptr<Value>();
  const Value* biases = network.block_biases ? network.block_biases->const_data_ptr<Value>() : nullptr;
  const Value* first_bias = network.projection_bias ? network.projection_bias->const_data_ptr<Value>() : nullptr;
  const Value *block_panels = network.blocks ? network.blocks->const_data_ptr<Value>() : nullptr;
  const Value* last_bias = network.readout_bias.const_data_ptr<Value>();
  Value* logits = result.mutable_data_ptr<Value>();

  const auto standardise = [&] {
    Value* to = network.projection ? scaled : state;
    for (int64_t t = 0; t < tokens; t++) {
      for (int64_t i = 0; i < size; i++) to[t * size + i] = (x[t * size + i] - mean[i]) * scale[i];
    }
  };
  const auto project = putting<Value>(state, width, first_bias, 0);
  const auto read_out = [&](const Value* from) {
    for (int64_t t = 0; t < tokens; t++) logits[t] = std::inner_product(readout, readout + width, from + t * width, *last_bias);
  };

  const int64_t bytes = (size + depth * width) * panels * kPair<Value> * sizeof(Value) * pieces;
  Team::run(panels > 1 && bytes > 2 * kGrainBytes, [&](Team& team) {
    Value *from = state, *to = other;
    team.once(standardise);
    if (network.projection) for_panels<Value>(team, *network.projection, 1, scaled, tokens, project);
    for (int64_t d = 0; d < depth; d++, std::swap(from, to)) {
      const Panels<Value> block{block_panels + d * panels * width * kPair<Value>, panels, width};
      const Value* bias = biases + d * width;
      for_panels<Value>(team, block, 1, from, tokens, [&](int64_t number, int64_t first, int64_t several, Value* sums) {
        const int64_t row = number * kPair<Value>, exist = std::min<int64_t>(kPair<Value>, width - row);
        for (int64_t t = first; t < first + several; t++, sums += kPair<Value>) {
          residual_into(sums, bias + row, from + t * width + row, exist, to + t * width + row);
        }
      });
    }
    team.once([&] { read_out(from); });
  });
}

// The logits (...) of a head's network for inputs (..., I) in float32 or float64: standardised by mean and scale (I), projected to
// (..., W) unless there is no projection, D blocks x + silu(W x + b), and the inner product with the read-out (W).
// projection: panels (ceil(W / P), I, P); blocks: panels (D ceil(W / P), W, P), biases (D, W).
AtenTensorHandle head_network(
    const at::TensorBase& inputs, const at::TensorBase& mean, const at::TensorBase& scale, const at::TensorBase* projection,
    const at::TensorBase* projection_bias, const at::TensorBase* blocks, const at::TensorBase* block_biases,
    const at::TensorBase& readout, const at::TensorBase& readout_bias) {
  const at::TensorBase x = inputs.contiguous();
  at::TensorBase result = empty(inputs.sizes().slice(0, inputs.dim() - 1), inputs.scalar_type());
  const Network network{mean, scale, projection, projection_bias, blocks, block_biases, readout, readout_bias};
  if (inputs.scalar_type() == at::kDouble) {
    network_into<double>(x, network, result);
  } else {
    TORCH_CHECK(inputs.scalar_type() == at::kFloat, "heads compute in float32 or float64, not in ", inputs.scalar_type());
    network_into<float>(x, network, result);
  }
  return handle_of(result);
}

}  // namespace specheads_kernels

SPECHEADS_OPERATOR(packed_linear, "(Tensor x, Tensor panels, Tensor? bias, int num_rows) -> Tensor")
SPECHEADS_OPERATOR(
    head_network,
    "(Tensor inputs, Tensor mean, Tensor scale, Tensor? projection, Tensor? projection_bias, Tensor? blocks, "
    "Tensor? block_biases, Tensor readout, Tensor readout_bias) -> Tensor")

STABLE_TORCH_LIBRARY_FRAGMENT(specheads, library) {
  library.def("panel_rows(bool wide) -> int");
  library.def("multiplies_pairs() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(specheads, CompositeImplicitAutograd, library) {
  library.impl("panel_rows", TORCH_BOX(&specheads_kernels::panel_rows));
  library.impl("multiplies_pairs", TORCH_BOX(&specheads_kernels::multiplies_pairs));
}
