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

// What torch and compiled steps call an operator's parameters.
template <typename Parameter>
struct TypesOf {
  using Stable = Parameter;
  using Handle = Parameter;
};
template <>
struct TypesOf<const at::TensorBase&> {
  using Stable = torch::stable::Tensor;
  using Handle = AtenTensorHandle;
};
template <>
struct TypesOf<const at::TensorBase*> {
  using Stable = std::optional<torch::stable::Tensor>;
  using Handle = AtenTensorHandle*;
};

template <auto compute>
struct Operator;
template <typename... Parameters, AtenTensorHandle (*compute)(Parameters...)>
struct Operator<compute> {
  static torch::stable::Tensor run(typename TypesOf<Parameters>::Stable... arguments) {
    return torch::stable::Tensor(compute(plain(arguments)...));
  }

  static AOTITorchError call(typename TypesOf<Parameters>::Handle... arguments, AtenTensorHandle* result) {
    try {
      *result = compute(plain(arguments)...);
      return AOTI_TORCH_SUCCESS;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return AOTI_TORCH_FAILURE;
    }
  }
};

}  // namespace

// The operators as compiled steps call them: looking one up by its name takes longer than a small one computes. The types of these
// pointers follow from the operators' schemas; see `declarations` in library.py.
#define CALLED_BY_STEPS(name) decltype(&Operator<name>::call) aoti_torch_cpu_##name = &Operator<name>::call;
extern "C" {
CALLED_BY_STEPS(packed_linear)
CALLED_BY_STEPS(masked_attention)
CALLED_BY_STEPS(decoder_layer)
CALLED_BY_STEPS(head_network)
CALLED_BY_STEPS(kth_largest)
CALLED_BY_STEPS(kept_softmax)
CALLED_BY_STEPS(nucleus)
CALLED_BY_STEPS(most_likely)
CALLED_BY_STEPS(token_at)
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
  library.impl("packed_linear", TORCH_BOX(&Operator<packed_linear>::run));
  library.impl("masked_attention", TORCH_BOX(&Operator<masked_attention>::run));
  library.impl("decoder_layer", TORCH_BOX(&Operator<decoder_layer>::run));
  library.impl("head_network", TORCH_BOX(&Operator<head_network>::run));
  library.impl("kth_largest", TORCH_BOX(&Operator<kth_largest>::run));
  library.impl("kept_softmax", TORCH_BOX(&Operator<kept_softmax>::run));
  library.impl("nucleus", TORCH_BOX(&Operator<nucleus>::run));
  library.impl("most_likely", TORCH_BOX(&Operator<most_likely>::run));
  library.impl("token_at", TORCH_BOX(&Operator<token_at>::run));
}

STABLE_TORCH_LIBRARY_IMPL(specheads, CompositeImplicitAutograd, library) {
  library.impl("panel_rows", TORCH_BOX(&panel_rows));
  library.impl("multiplies_pairs", TORCH_BOX(&multiplies_pairs));
}
