// Tensors: the part of ATen that the operators need, without the headers of all its functions, which take longest to compile.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBase.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace specheads_kernels __attribute__((visibility("hidden"))) {

inline at::TensorBase empty(at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_cpu(sizes, at::TensorOptions().dtype(type));
}

// A new handle of a tensor, which its receiver deletes.
inline AtenTensorHandle handle_of(at::TensorBase& tensor) {
  AtenTensorHandle handle;
  const auto error = aoti_torch_new_tensor_handle(reinterpret_cast<AtenTensorHandle>(&tensor), &handle);
  TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "no handle for a result");
  return handle;
}

// Call `function(value)` where `value` has the type of a tensor's numbers.
template <typename Function>
void with_type(at::ScalarType type, Function function) {
  switch (type) {
    case at::kDouble: return function(double());
    case at::kFloat: return function(float());
    case at::kBFloat16: return function(at::BFloat16());
    case at::kHalf: return function(at::Half());
    default: TORCH_CHECK(false, "no operator for ", type);
  }
}

}  // namespace specheads_kernels
