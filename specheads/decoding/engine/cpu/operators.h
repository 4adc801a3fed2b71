// The operators: what each source computes and `torch.cpp` declares. A result is a new handle, which its receiver deletes.

#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace at {
class TensorBase;
}

namespace specheads_kernels __attribute__((visibility("hidden"))) {

AtenTensorHandle packed_linear(
    const at::TensorBase& x, const at::TensorBase& panels, const at::TensorBase* bias, int64_t num_rows);
AtenTensorHandle masked_attention(
    const at::TensorBase& query, const at::TensorBase& key, const at::TensorBase& value, const at::TensorBase& mask,
    const at::TensorBase* rows, const at::TensorBase* positions, double scale);
AtenTensorHandle decoder_layer(
    const at::TensorBase& hidden, const at::TensorBase& cosine, const at::TensorBase& sine, const at::TensorBase& mask,
    const at::TensorBase& start, const at::TensorBase* rows, const at::TensorBase& keys, const at::TensorBase& values, const at::TensorBase& norm,
    const at::TensorBase& queries_keys_values, const at::TensorBase* bias, const at::TensorBase& output,
    const at::TensorBase& mlp_norm, const at::TensorBase& gate_up, const at::TensorBase& down, double epsilon, double scale);
AtenTensorHandle head_network(
    const at::TensorBase& inputs, const at::TensorBase& mean, const at::TensorBase& scale, const at::TensorBase* projection,
    const at::TensorBase* projection_bias, const at::TensorBase* blocks, const at::TensorBase* block_biases,
    const at::TensorBase& readout, const at::TensorBase& readout_bias);
AtenTensorHandle kth_largest(const at::TensorBase& x, int64_t k);
AtenTensorHandle kept_softmax(const at::TensorBase& logits, const at::TensorBase& least);
AtenTensorHandle nucleus(const at::TensorBase& probs, double top_p);
AtenTensorHandle most_likely(const at::TensorBase& x);
AtenTensorHandle token_at(const at::TensorBase& probs, const at::TensorBase& uniform);
int64_t panel_rows(bool wide);
bool multiplies_pairs();

}  // namespace specheads_kernels
