// The declarations for torch: schemas, and the operators as compiled steps and as Python call them.
//
// Only torch's stable interface is included, whose headers compile in a fraction of the time of the others.

#include "operators.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdio>
#include <exception>
#include <optional>

namespace {

using namespace specheads_kernels;

// What an operator is called with in place of a handle, which points to a tensor, and a tensor is its base and nothing else.
const at::TensorBase& plain(AtenTensorHandle handle) {
  return *reinterpret_cast<const at::TensorBase*>(handle);
}
const at::TensorBase* plain(AtenTensorHandle* handle) {
  return handle ? &plain(*handle) : nullptr;
}
const at::TensorBase& plain(const torch::stable::Tensor& tensor) {
  return plain(tensor.get());
}
const at::TensorBase* plain(const std::optional<torch::stable::Tensor>& tensor) {
  return tensor ? &plain(*tensor) : nullptr;
}
int64_t plain(int64_t number) {
  return number;
}
double plain(double number) {
  return number;
}

template <typename Operator, typename... Arguments>
AOTITorchError call(Operator compute, AtenTensorHandle* result, Arguments... arguments) {
  try {
    *result = compute(plain(arguments)...);
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return AOTI_TORCH_FAILURE;
  }
}

// What torch calls an operator's parameters.
template <typename Parameter>
struct StableType {
  using type = Parameter;
};
template <>
struct StableType<const at::TensorBase&> {
  using type = torch::stable::Tensor;
};
template <>
struct StableType<const at::TensorBase*> {
  using type = std::optional<torch::stable::Tensor>;
};

// An operator with torch's types.
template <auto compute>
struct Stable;
template <typename... Parameters, AtenTensorHandle (*compute)(Parameters...)>
struct Stable<compute> {
  static torch::stable::Tensor run(typename StableType<Parameters>::type... arguments) {
    return torch::stable::Tensor(compute(plain(arguments)...));
  }
};

}  // namespace

// The operators as compiled steps call them: looking one up by its name takes longer than a small one computes. The signatures
// follow from the operators' schemas; see `declarations` in library.py.
extern "C" {
AOTITorchError aoti_torch_cpu_packed_linear(
    AtenTensorHandle x, AtenTensorHandle panels, AtenTensorHandle* bias, int64_t num_rows, AtenTensorHandle* result) {
  return call(packed_linear, result, x, panels, bias, num_rows);
}

AOTITorchError aoti_torch_cpu_masked_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle mask, AtenTensorHandle* rows,
    AtenTensorHandle* positions, double scale, AtenTensorHandle* result) {
  return call(masked_attention, result, query, key, value, mask, rows, positions, scale);
}

AOTITorchError aoti_torch_cpu_decoder_layer(
    AtenTensorHandle hidden, AtenTensorHandle cosine, AtenTensorHandle sine, AtenTensorHandle mask, AtenTensorHandle start,
    AtenTensorHandle* rows, AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle norm, AtenTensorHandle queries_keys_values,
    AtenTensorHandle* bias, AtenTensorHandle output, AtenTensorHandle mlp_norm, AtenTensorHandle gate_up, AtenTensorHandle down,
    double epsilon, double scale, AtenTensorHandle* result) {
  return call(
      decoder_layer, result, hidden, cosine, sine, mask, start, rows, keys, values, norm, queries_keys_values, bias, output, mlp_norm,
      gate_up, down, epsilon, scale);
}

AOTITorchError aoti_torch_cpu_head_network(
    AtenTensorHandle inputs, AtenTensorHandle mean, AtenTensorHandle scale, AtenTensorHandle* projection,
    AtenTensorHandle* projection_bias, AtenTensorHandle* blocks, AtenTensorHandle* block_biases, AtenTensorHandle readout,
    AtenTensorHandle readout_bias, AtenTensorHandle* result) {
  return call(
      head_network, result, inputs, mean, scale, projection, projection_bias, blocks, block_biases, readout, readout_bias);
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

STABLE_TORCH_LIBRARY(specheads, library) {
  library.def("packed_linear(Tensor x, Tensor panels, Tensor? bias, int num_rows) -> Tensor");
  library.def(
      "masked_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor? rows, Tensor? positions, float scale) -> Tensor");
  library.def(
      "decoder_layer(Tensor hidden, Tensor cosine, Tensor sine, Tensor mask, Tensor start, Tensor? rows, Tensor(a!) keys, "
      "Tensor(b!) values, Tensor norm, Tensor queries_keys_values, Tensor? bias, Tensor output, Tensor mlp_norm, Tensor gate_up, Tensor down, "
      "float epsilon, float scale) -> Tensor");
  library.def(
      "head_network(Tensor inputs, Tensor mean, Tensor scale, Tensor? projection, Tensor? projection_bias, Tensor? blocks, "
      "Tensor? block_biases, Tensor readout, Tensor readout_bias) -> Tensor");
  library.def("kth_largest(Tensor x, int k) -> Tensor");
  library.def("kept_softmax(Tensor logits, Tensor least) -> Tensor");
  library.def("nucleus(Tensor probs, float top_p) -> Tensor");
  library.def("most_likely(Tensor x) -> Tensor");
  library.def("token_at(Tensor probs, Tensor uniform) -> Tensor");
  library.def("panel_rows(bool wide) -> int");
  library.def("multiplies_pairs() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(specheads, CPU, library) {
  library.impl("packed_linear", TORCH_BOX(&Stable<packed_linear>::run));
  library.impl("masked_attention", TORCH_BOX(&Stable<masked_attention>::run));
  library.impl("decoder_layer", TORCH_BOX(&Stable<decoder_layer>::run));
  library.impl("head_network", TORCH_BOX(&Stable<head_network>::run));
  library.impl("kth_largest", TORCH_BOX(&Stable<kth_largest>::run));
  library.impl("kept_softmax", TORCH_BOX(&Stable<kept_softmax>::run));
  library.impl("nucleus", TORCH_BOX(&Stable<nucleus>::run));
  library.impl("most_likely", TORCH_BOX(&Stable<most_likely>::run));
  library.impl("token_at", TORCH_BOX(&Stable<token_at>::run));
}

STABLE_TORCH_LIBRARY_IMPL(specheads, CompositeImplicitAutograd, library) {
  library.impl("panel_rows", TORCH_BOX(&panel_rows));
  library.impl("multiplies_pairs", TORCH_BOX(&multiplies_pairs));
}
