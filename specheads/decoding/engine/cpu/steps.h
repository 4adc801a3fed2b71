// What the source of a compiled step includes: the headers of its wrapper and of its kernels.
#include <torch/csrc/inductor/cpp_wrapper/cpu.h>
#include <torch/csrc/inductor/cpp_prefix.h>
