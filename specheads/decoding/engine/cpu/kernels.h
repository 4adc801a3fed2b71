// What all kernels need: tensors, threads that share a loop, and pairs of vectors.
//
// Of ATen it is the part without the headers of all its functions, which take longest to compile.
// Vectors are written once with at::vec, which has every instruction set that PyTorch supports.
// Activations are float32 or bfloat16, and sums float32; models of other types are run by torch.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/TensorBase.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace specheads_kernels __attribute__((visibility("hidden"))) {

inline at::TensorBase empty(at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_cpu(sizes, at::TensorOptions().dtype(type));
}

inline void check(AOTITorchError error) {
  TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "there is no handle of a tensor");
}

// Another handle of a tensor, which its receiver deletes.
inline AtenTensorHandle another(AtenTensorHandle tensor) {
  AtenTensorHandle handle;
  check(aoti_torch_new_tensor_handle(tensor, &handle));
  return handle;
}

inline AtenTensorHandle handle_of(at::TensorBase& tensor) {
  return another(reinterpret_cast<AtenTensorHandle>(&tensor));
}

// Call `function(value)` where `value` has the type of a tensor's numbers.
template <typename Function>
void with_type(at::ScalarType type, Function function) {
  switch (type) {
    case at::kFloat: return function(float());
    case at::kBFloat16: return function(at::BFloat16());
    default: TORCH_CHECK(false, "no operator for ", type);
  }
}

// bfloat16 numbers of a weight that are multiplied as float32.
struct Narrow {
  uint16_t upper;  // half of a float32
};

// A byte of weights whose groups of kGroup inputs lie on a lattice, w = d q + m rounded to
// float32, with d and m in float16 and q of few bits, as files of quantized models have them. See
// `_pack` in packed.py. Products are of inputs in float32, or rounded to fewer bits.
template <int bits, int input_bits = 32>
struct Lattice {
  uint8_t byte;
};

// What bfloat16 panels hold for bfloat16 inputs: pairs where the processor multiplies pairs.
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
constexpr bool kMultipliesPairs = true;
using BFloat16Panels = at::BFloat16;
#else
constexpr bool kMultipliesPairs = false;
using BFloat16Panels = Narrow;
#endif

// Call `function(value, weight)` with the types of inputs and of panels: inputs in float32 have
// panels of fewer bits, too. With input_bits = 16 or 8 those of lattices round them.
template <typename Function>
void with_types(at::ScalarType type, at::ScalarType panels, int64_t input_bits, Function function) {
  if (type == at::kBFloat16 && panels == type) return function(at::BFloat16(), BFloat16Panels());
  switch (type == at::kFloat ? panels : at::kDouble) {
    case at::kFloat: return function(float(), float());
    case at::kHalf: return function(float(), at::Half());
    case at::kBFloat16: return function(float(), Narrow());
    case at::kChar:
      return input_bits == 32 ? function(float(), Lattice<8>())
                              : function(float(), Lattice<8, 16>());
    case at::kByte:
      switch (input_bits) {
        case 8: return function(float(), Lattice<4, 8>());
        case 16: return function(float(), Lattice<4, 16>());
        default: return function(float(), Lattice<4>());
      }
    default: TORCH_CHECK(false, "inputs are ", type, ", panels are ", panels);
  }
}

constexpr int64_t kGrainBytes =
    32768;  // a further thread pays from so many bytes on that each reads

// Threads that work on several loops in turn: entering a parallel region twice takes as long as a
// small loop, waiting for each other a fifth of that. Without OpenMP there is one thread.
class Team {
 public:
  // Run work(team) on all threads, or on one where it does not pay because entering a region
  // takes longer.
  template <typename Work>
  static void run(bool pays, const Work& work) {
    std::atomic<int> arrived{0};
#ifdef _OPENMP
    if (pays) {
      const int most = omp_in_parallel() ? 1 : at::get_num_threads();
#pragma omp parallel num_threads(most)
      {
        Team team(omp_get_thread_num(), omp_get_num_threads(), arrived);
        work(team);
      }
      return;
    }
#endif
    Team team(0, 1, arrived);
    work(team);
  }

  // Its number of threads; what torch says of it differs between threads at first.
  int size() const { return size_; }

  // Share the numbers from 0 to count among the threads, at least `grain` for each, and wait
  // until all are done.
  template <typename Loop>
  void each(int64_t count, int64_t grain, const Loop& loop) {
    const int64_t threads = std::min<int64_t>(size_, (count + grain - 1) / grain);
    if (rank_ < threads) loop(count * rank_ / threads, count * (rank_ + 1) / threads);
    wait();
  }

  // Run `work` on one thread while the others wait.
  template <typename Work>
  void once(const Work& work) {
    if (rank_ == 0) work();
    wait();
  }

 private:
  Team(int rank, int size, std::atomic<int>& arrived)
      : rank_(rank), size_(size), arrived_(arrived) {}

  void wait() {
    if (size_ == 1) return;
    target_ += size_;
    arrived_.fetch_add(1, std::memory_order_acq_rel);
    for (int turn = 0; arrived_.load(std::memory_order_acquire) < target_; turn++) {
      if (turn > kTurns) std::this_thread::yield();  // there are more threads than cores
#if defined(__x86_64__)
      __builtin_ia32_pause();  // leaves the core to its other thread
#endif
    }
  }

  static constexpr int kTurns = 10000;
  const int rank_, size_;
  int target_ = 0;
  std::atomic<int>& arrived_;
};

using at::vec::Vectorized;
using Vector = Vectorized<float>;
constexpr int kLanes = Vector::size();
constexpr int kPair = 2 * kLanes;  // numbers in the two vectors that are in work at a time

constexpr int kGroup = 32;
template <typename Value>
constexpr int kColumn = kPair;  // numbers of a panel in memory for each of its columns
// d and m of a row and a group in memory: of 8 bits m is always -128 d.
template <int bits>
constexpr int kScales = bits == 8 ? 1 : 2;
template <int bits, int input_bits>
constexpr int kColumn<Lattice<bits, input_bits>> =
    kPair * bits / 8 + kPair * kScales<bits> * sizeof(at::Half) / kGroup;
template <typename Value>
constexpr bool kIsLattice = false;
template <int bits, int input_bits>
constexpr bool kIsLattice<Lattice<bits, input_bits>> = true;

// What products with panels of a type read.
template <typename Weight>
constexpr bool kIsPaired = std::is_same_v<Weight, at::BFloat16>;
template <typename Weight>
using InputOf = std::conditional_t<kIsPaired<Weight>, at::BFloat16, float>;

// Tokens at a time: as many as leave their sums in registers. x86 without AVX-512 has 16 of them,
// others have 32.
#if defined(CPU_CAPABILITY_AVX2)
constexpr int kMostTokens = 6;
#else
constexpr int kMostTokens = 12;
#endif

constexpr int64_t kPrefetchBytes =
    4096;  // ahead of the column in work; 0, 1024 and 2048 were slower on a Sapphire Rapids

// The numbers of a column as two vectors.
template <typename Value>
inline void load_pair(const Value* from, Vector& first, Vector& second) {
  if constexpr (std::is_same_v<Value, Narrow>) {
    // A bfloat16 is the upper half of a float32; numbers of the two vectors alternate.
    const auto both = Vectorized<int32_t>::loadu(from);
    first = at::vec::cast<float>(both << Vectorized<int32_t>(16));
    second = at::vec::cast<float>(both & Vectorized<int32_t>(static_cast<int32_t>(0xffff0000)));
  } else if constexpr (std::is_same_v<Value, at::Half>) {
    std::tie(first, second) = at::vec::convert_half_float(Vectorized<Value>::loadu(from));
  } else {
    first = Vector::loadu(from);
    second = Vector::loadu(from + kLanes);
  }
}

// What a product fetches for later, with each of its columns.
struct Ahead {
  const char* from;
  int64_t step;  // bytes

  // Fetch what belongs to column i: as much as a column of pairs, at most two cache lines.
  template <typename Value>
  void fetch(int64_t i) const {
    // Whole lines into the second cache, which waits for more of them at a time than the first.
    constexpr int bytes = sizeof(Value) * kPair;
    constexpr int locality = bytes < 64 ? 3 : 2;
    __builtin_prefetch(from + i * step, 0, locality);
    if constexpr (bytes > 64) __builtin_prefetch(from + i * step + 64, 0, locality);
  }
};

using Words = Vectorized<int32_t>;

// Words of `parts` numbers each, and sums of their products: in bytes, of at most kGroup products.
template <int parts>
struct Parts {
  Words words;
  explicit Parts(const Words& words) : words(words) {}
  explicit Parts(int32_t word) : words(word) {}
};
using Halves = Parts<2>;
using Bytes = Parts<4>;

// The sum over `parts` of each word of the products x y.
template <int parts>
Words product_of_parts(const Words& x, const Words& y) {
  constexpr int bits = 32 / parts;
  Words sum(0);
  for (int part = 0; part < parts; part++) {
    const Words above(part * bits);
    const Words rest(32 - bits);
    sum = sum + (((x << above) >> rest) * ((y << above) >> rest));
  }
  return sum;
}

// x y + sums. The numbers of x, which are weights, are at most 15 where they have 8 bits.
inline Vector add_products(const Vector& x, const Vector& y, const Vector& sums) {
  return at::vec::fmadd(x, y, sums);
}
inline Halves add_products(const Halves& x, const Halves& y, const Halves& sums) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
  return Halves(Words(_mm512_dpwssd_epi32(sums.words, x.words, y.words)));
#elif defined(CPU_CAPABILITY_AVX512)
  return Halves(Words(_mm512_add_epi32(sums.words, _mm512_madd_epi16(x.words, y.words))));
#elif defined(CPU_CAPABILITY_AVX2)
  return Halves(Words(_mm256_add_epi32(sums.words, _mm256_madd_epi16(x.words, y.words))));
#else
  return Halves(sums.words + product_of_parts<2>(x.words, y.words));
#endif
}
// Without instructions for sums of four, halves of words have the sums of two: a group's have 8
// additions of at most 2 * 15 * 127, which 16 bits hold.
inline Bytes add_products(const Bytes& x, const Bytes& y, const Bytes& sums) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
  return Bytes(Words(_mm512_dpbusd_epi32(sums.words, x.words, y.words)));
#elif defined(CPU_CAPABILITY_AVX512)
  return Bytes(Words(_mm512_add_epi16(sums.words, _mm512_maddubs_epi16(x.words, y.words))));
#elif defined(CPU_CAPABILITY_AVX2)
  return Bytes(Words(_mm256_add_epi16(sums.words, _mm256_maddubs_epi16(x.words, y.words))));
#else
  return Bytes(sums.words + product_of_parts<4>(x.words, y.words));
#endif
}

inline Vector as_floats(const Vector& x) {
  return x;
}
inline Vector as_floats(const Words& x) {
  return at::vec::convert_to_fp_of_same_size<float>(x);
}
inline Vector as_floats(const Halves& x) {
  return as_floats(x.words);
}
inline Vector as_floats(const Bytes& x) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
  return as_floats(x.words);
#elif defined(CPU_CAPABILITY_AVX512)
  return as_floats(Words(_mm512_madd_epi16(x.words, _mm512_set1_epi16(1))));
#elif defined(CPU_CAPABILITY_AVX2)
  return as_floats(Words(_mm256_madd_epi16(x.words, _mm256_set1_epi16(1))));
#else
  return as_floats(x.words);
#endif
}

// Of a group of inputs: what its sums are multiplied with, and the sum of all its numbers.
struct GroupFactors {
  float scale, sum;
};

// Sums of `count` rows of pairs. A chain in place of an array, which compilers keep in memory
// instead of registers.
template <int count, typename Numbers = Vector>
struct Sums {
  Numbers first{0};
  Numbers second{0};
  Sums<count - 1, Numbers> others;

  // sums[r] += factors[r * stride] * (left, right)
  template <typename Factor>
  C10_ALWAYS_INLINE void add(const Numbers& left,
                             const Numbers& right,
                             const Factor* factors,
                             int64_t stride) {
    const Numbers factor(*factors);
    first = add_products(left, factor, first);
    second = add_products(right, factor, second);
    if constexpr (count > 1) others.add(left, right, factors + stride, stride);
  }

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
  // The same for pairs: sums[r] += factors[r * stride] left[., 0] + factors[r * stride + 1]
  // left[., 1], and so for right.
  C10_ALWAYS_INLINE void add_pairs(__m512i left,
                                   __m512i right,
                                   const at::BFloat16* factors,
                                   int64_t stride) {
    int32_t both;
    std::memcpy(&both, factors, sizeof(both));
    const __m512i factor = _mm512_set1_epi32(both);
    first = _mm512_dpbf16_ps(first, reinterpret_cast<__m512bh>(left),
                             reinterpret_cast<__m512bh>(factor));
    second = _mm512_dpbf16_ps(second, reinterpret_cast<__m512bh>(right),
                              reinterpret_cast<__m512bh>(factor));
    if constexpr (count > 1) others.add_pairs(left, right, factors + stride, stride);
  }
#endif

  // sums[p] += factor * the column of panel p; panels are `apart` numbers from each other.
  template <typename Value>
  C10_ALWAYS_INLINE void add_column(const Value* column, int64_t apart, const Vector& factor) {
    Vector left, right;
    __builtin_prefetch(reinterpret_cast<const char*>(column) + kPrefetchBytes);
    load_pair(column, left, right);
    first = at::vec::fmadd(left, factor, first);
    second = at::vec::fmadd(right, factor, second);
    if constexpr (count > 1) others.add_column(column + apart, apart, factor);
  }

  C10_ALWAYS_INLINE void store(float* to, int64_t stride) const {
    first.store(to);
    second.store(to + kLanes);
    if constexpr (count > 1) others.store(to + stride, stride);
  }

  // to[r] += sums[r] * scale * d + sum * m, d and m being pairs, with the factors[r * stride]
  C10_ALWAYS_INLINE void add_to(float* to,
                                const Vector (&d)[2],
                                const Vector (&m)[2],
                                const GroupFactors* factors,
                                int64_t stride) const {
    const Vector scale(factors->scale);
    const Vector sum(factors->sum);
    const Vector left = at::vec::fmadd(sum, m[0], Vector::loadu(to));
    const Vector right = at::vec::fmadd(sum, m[1], Vector::loadu(to + kLanes));
    at::vec::fmadd(as_floats(first), scale * d[0], left).store(to);
    at::vec::fmadd(as_floats(second), scale * d[1], right).store(to + kLanes);
    if constexpr (count > 1) others.add_to(to + kPair, d, m, factors + stride, stride);
  }
};
template <typename Numbers>
struct Sums<0, Numbers> {};

// Call compute(n) where n is `count`, from 1 to `most`, as a constant.
template <int most, typename Compute>
C10_ALWAYS_INLINE void with_count(int64_t count, const Compute& compute) {
  if constexpr (most > 1) {
    if (count < most) return with_count<most - 1>(count, compute);
  }
  compute(std::integral_constant<int, most>());
}

inline float total_of(const Vector& sums) {
  return at::vec::vec_reduce_all<float>(std::plus<Vector>(), sums);
}

// Memory of this thread that begins with a cache line, valid until the next call with the same
// `number`.
template <typename Value, int number>
Value* scratch(int64_t size) {
  constexpr size_t line = 64;
  static thread_local std::vector<Value> memory;
  const size_t needed = size + line / sizeof(Value);
  if (memory.size() < needed) memory.resize(needed);
  return reinterpret_cast<Value*>((reinterpret_cast<uintptr_t>(memory.data()) + line - 1) / line *
                                  line);
}

}  // namespace specheads_kernels
