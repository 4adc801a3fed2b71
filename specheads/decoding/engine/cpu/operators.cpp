// All operators, as one source, as reading torch's headers takes longer than compiling what follows
// them; and steps with bound tensors, for which Python takes a fifth of a microsecond each in every
// call otherwise, a hundred in a target's step; and draft steps that follow each other without
// Python.
//
// Python calls these functions itself, with its lock held: a step releases it. Lists hold handles
// as capsules, as torch's own calls of compiled steps pass them.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "layers.h"
#include "products.h"
#include "sampling.h"

#include <exception>
#include <memory>
#include <vector>

namespace specheads_kernels __attribute__((visibility("hidden"))) {

// A compiled step: it deletes the handles of its inputs and returns new ones for its outputs.
using Entry = void (*)(AtenTensorHandle* inputs, AtenTensorHandle* outputs);
using Handles = std::vector<AtenTensorHandle>;

inline void delete_all(const Handles& handles) {
  for (AtenTensorHandle handle : handles) {
    if (handle) aoti_torch_delete_tensor_object(handle);
  }
}

// A view of a contiguous tensor's numbers from `first` on.
inline AtenTensorHandle part_of(AtenTensorHandle tensor,
                                std::vector<int64_t> sizes,
                                int64_t first) {
  const std::vector<int64_t> strides(sizes.size(), 1);  // at most one of the sizes is not 1
  AtenTensorHandle handle;
  check(aoti_torch__reinterpret_tensor(tensor, sizes.size(), sizes.data(), strides.data(), first,
                                       &handle));
  return handle;
}

// The handles in a list of capsules, null for None.
inline Handles handles_in(PyObject* list) {
  Handles handles(PyList_Size(list));
  for (size_t i = 0; i < handles.size(); i++) {
    PyObject* each = PyList_GetItem(list, i);
    handles[i] = each == Py_None
                     ? nullptr
                     : static_cast<AtenTensorHandle>(PyCapsule_GetPointer(each, nullptr));
  }
  return handles;
}

inline PyObject* list_of(const Handles& handles) {
  PyObject* list = PyList_New(handles.size());
  for (size_t i = 0; i < handles.size(); i++)
    PyList_SetItem(list, i, PyCapsule_New(handles[i], nullptr, nullptr));
  return list;
}

struct BoundStep {
  Entry entry;
  Handles inputs;  // those that are bound, and null for those that each call brings
  size_t num_outputs;

  // Run the step; the handles `given` are used up.
  Handles run(const Handles& given) const {
    Handles all = inputs, outputs(num_outputs);
    auto next = given.begin();
    for (AtenTensorHandle& handle : all) handle = handle ? another(handle) : *next++;
    entry(all.data(), outputs.data());
    return outputs;
  }
};

// The result of `compute`, or null with Python's error set.
template <typename Compute>
PyObject* for_python(const Compute& compute) {
  try {
    return compute();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

}  // namespace specheads_kernels

extern "C" {

// A step with inputs bound: `fixed` has a capsule for each input that stays, which is used up, and
// None for the others.
void* specheads_bind(void* entry, PyObject* fixed, int64_t num_outputs) {
  using namespace specheads_kernels;
  return new BoundStep{reinterpret_cast<Entry>(entry), handles_in(fixed),
                   static_cast<size_t>(num_outputs)};
}

void specheads_unbind(void* bound) {
  using namespace specheads_kernels;
  const std::unique_ptr<BoundStep> owned(static_cast<BoundStep*>(bound));
  delete_all(owned->inputs);
}

// Run a step once; return its outputs. `given`, the inputs that are not bound, is used up.
PyObject* specheads_run(void* bound, PyObject* given) {
  using namespace specheads_kernels;
  return for_python([&] {
    return list_of(static_cast<const BoundStep*>(bound)->run(handles_in(given)));
  });
}

// Run a step over one token after another until its first output is true, `least` to `most` times;
// return the number of runs and the last outputs. `given`, which is used up, is: tokens (1, n), the
// position () that is written to, places (size of memory), then `num_columns` tensors (n,) of which
// each run gets one number, other inputs, and a state, which each run gets from the one before.
PyObject* specheads_repeat(void* bound,
                           PyObject* given,
                           int64_t num_columns,
                           int64_t start,
                           int64_t bucket,
                           int64_t least,
                           int64_t most) {
  using namespace specheads_kernels;
  return for_python([&] {
    const BoundStep& step = *static_cast<BoundStep*>(bound);
    const Handles whole = handles_in(given);
    const size_t first_state = whole.size() - step.num_outputs;
    int64_t* position = reinterpret_cast<at::TensorBase*>(whole[1])->mutable_data_ptr<int64_t>();
    Handles state(whole.begin() + first_state, whole.end());
    int64_t count = 0;
    for (bool stopped = false; count < most && (count < least || !stopped); count++) {
      *position = start + count;
      const int64_t size = (start + count + bucket) / bucket * bucket;
      Handles inputs = {part_of(whole[0], {1, 1}, count), another(whole[1]),
                     part_of(whole[2], {size}, 0)};
      for (size_t i = 3; i < first_state; i++) {
        inputs.push_back(static_cast<int64_t>(i) < 3 + num_columns ? part_of(whole[i], {1}, count)
                                                                : another(whole[i]));
      }
      inputs.insert(inputs.end(), state.begin(), state.end());
      state = step.run(inputs);
      stopped = *reinterpret_cast<at::TensorBase*>(state[0])->const_data_ptr<bool>();
    }
    delete_all(Handles(whole.begin(), whole.begin() + first_state));
    return Py_BuildValue("LN", static_cast<long long>(count), list_of(state));
  });
}

}  // extern "C"
