// How an operator is declared: as torch calls it from Python, and as compiled steps call it.
//
// Only torch's stable interface is included, whose headers compile in a fraction of the time of the
// others. An operator's result is a new handle, which its receiver deletes.

#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdio>
#include <exception>
#include <optional>
#include <type_traits>

namespace at {
class TensorBase;
}

namespace specheads_kernels __attribute__((visibility("hidden"))) {

// What an operator is called with in place of a handle, which points to a tensor, and a tensor is
// its base and nothing else.
inline const at::TensorBase& plain(AtenTensorHandle handle) {
  return *reinterpret_cast<const at::TensorBase*>(handle);
}
inline const at::TensorBase* plain(AtenTensorHandle* handle) {
  return handle ? &plain(*handle) : nullptr;
}
inline const at::TensorBase& plain(const torch::stable::Tensor& tensor) {
  return plain(tensor.get());
}
inline const at::TensorBase* plain(const std::optional<torch::stable::Tensor>& tensor) {
  return tensor ? &plain(*tensor) : nullptr;
}
inline int64_t plain(int64_t number) {
  return number;
}
inline double plain(double number) {
  return number;
}

// What torch and compiled steps call an operator with: a reference is a tensor, a pointer one
// that may be missing.
template <typename Parameter, typename Tensor, typename Missing>
using Argument =
    std::conditional_t<std::is_reference_v<Parameter>,
                       Tensor,
                       std::conditional_t<std::is_pointer_v<Parameter>, Missing, Parameter>>;
template <typename Parameter>
using Stable = Argument<Parameter, torch::stable::Tensor, std::optional<torch::stable::Tensor>>;
template <typename Parameter>
using Handle = Argument<Parameter, AtenTensorHandle, AtenTensorHandle*>;

template <auto compute>
struct Operator;
template <typename... Parameters, AtenTensorHandle (*compute)(Parameters...)>
struct Operator<compute> {
  static torch::stable::Tensor run(Stable<Parameters>... arguments) {
    return torch::stable::Tensor(compute(plain(arguments)...));
  }

  static AOTITorchError call(Handle<Parameters>... arguments, AtenTensorHandle* result) {
    try {
      *result = compute(plain(arguments)...);
      return AOTI_TORCH_SUCCESS;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return AOTI_TORCH_FAILURE;
    }
  }
};

}  // namespace specheads_kernels

// Declare the operator that the function of this name in specheads_kernels computes. Compiled steps
// call it by a pointer: looking one up by its name takes longer than a small one computes. The
// pointer's type follows from the schema; see `declarations` in
// __init__.py.
#define SPECHEADS_OPERATOR(name, schema)                                                        \
  extern "C" {                                                                                  \
  decltype(&specheads_kernels::Operator<specheads_kernels::name>::call) aoti_torch_cpu_##name = \
      &specheads_kernels::Operator<specheads_kernels::name>::call;                              \
  }                                                                                             \
  STABLE_TORCH_LIBRARY_FRAGMENT(specheads, library) {                                           \
    library.def(#name schema);                                                                  \
  }                                                                                             \
  STABLE_TORCH_LIBRARY_IMPL(specheads, CPU, library) {                                          \
    library.impl(#name, TORCH_BOX(&specheads_kernels::Operator<specheads_kernels::name>::run)); \
  }
