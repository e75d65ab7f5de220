#include "collective/reduction.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "collective/half.h"
#include "core/communicator.h"

namespace dicomm {

namespace {

template <class T>
struct Element {
  using Accumulator = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};
template <>
struct Element<Float16> {
  using Accumulator = float;
  static float load(Float16 value) { return to_float(value); }
  static Float16 store(float value) { return to_float16(value); }
};
template <>
struct Element<BFloat16> {
  using Accumulator = float;
  static float load(BFloat16 value) { return to_float(value); }
  static BFloat16 store(float value) { return to_bfloat16(value); }
};

// Integer arithmetic goes through an unsigned type that does not promote: it wraps, defined.
template <class T>
using Wrapping = std::common_type_t<std::make_unsigned_t<T>, unsigned>;

struct Sum {
  template <class A>
  A operator()(A a, A b) const {
    if constexpr (std::is_integral_v<A>)
      return static_cast<A>(static_cast<Wrapping<A>>(a) + static_cast<Wrapping<A>>(b));
    else
      return a + b;
  }
};
struct Product {
  template <class A>
  A operator()(A a, A b) const {
    if constexpr (std::is_integral_v<A>)
      return static_cast<A>(static_cast<Wrapping<A>>(a) * static_cast<Wrapping<A>>(b));
    else
      return a * b;
  }
};
struct Min {
  template <class A>
  A operator()(A a, A b) const {
    return b < a || b != b ? b : a;
  }
};
struct Max {
  template <class A>
  A operator()(A a, A b) const {
    return b > a || b != b ? b : a;
  }
};
struct BitAnd {
  template <class A>
  A operator()(A a, A b) const {
    return a & b;
  }
};
struct BitOr {
  template <class A>
  A operator()(A a, A b) const {
    return a | b;
  }
};
struct BitXor {
  template <class A>
  A operator()(A a, A b) const {
    return a ^ b;
  }
};

const char* name(ReduceOp op) {
  constexpr const char* names[] = {"sum", "avg", "min", "max", "product", "band", "bor", "bxor"};
  return names[static_cast<int>(op)];
}

bool is_floating(DataType type) {
  return type == DataType::float32 || type == DataType::float64 || type == DataType::float16 ||
         type == DataType::bfloat16;
}

ReduceOp logical(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
      return ReduceOp::bor;
    case ReduceOp::product:
    case ReduceOp::min:
      return ReduceOp::band;
    default:
      return op;
  }
}

template <class F>
auto with_type(DataType type, F&& function) {
  switch (type) {
    case DataType::float32:
      return function(float{});
    case DataType::float64:
      return function(double{});
    case DataType::float16:
      return function(Float16{});
    case DataType::bfloat16:
      return function(BFloat16{});
    case DataType::int8:
      return function(std::int8_t{});
    case DataType::int16:
      return function(std::int16_t{});
    case DataType::int32:
      return function(std::int32_t{});
    case DataType::int64:
      return function(std::int64_t{});
    case DataType::uint8:
    case DataType::boolean:
      return function(std::uint8_t{});
  }
  throw Error("unknown element type");
}

template <class F>
void with_op(ReduceOp op, F&& function) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      return function(Sum{});
    case ReduceOp::min:
      return function(Min{});
    case ReduceOp::max:
      return function(Max{});
    case ReduceOp::product:
      return function(Product{});
    case ReduceOp::band:
      return function(BitAnd{});
    case ReduceOp::bor:
      return function(BitOr{});
    case ReduceOp::bxor:
      return function(BitXor{});
  }
}

// In one pass. `out` may be either source: what an element becomes depends on no other.
template <class T, class Op>
void reduce_two(const T* first, const T* second, T* out, std::size_t count, Op op) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i] = op(first[i], second[i]);
}

template <class T, class Op>
void reduce_typed(std::span<const void* const> sources, T* out, std::size_t count, int divisor,
                  Op op) {
  using A = typename Element<T>::Accumulator;
  if constexpr (std::is_same_v<T, A>)
    if (sources.size() == 2 && divisor == 1)
      return reduce_two(static_cast<const T*>(sources[0]), static_cast<const T*>(sources[1]), out,
                        count, op);
  constexpr std::size_t block = 2048;  // stays in the first-level cache
  A accumulated[block];
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t n = std::min(block, count - begin);
    const T* first = static_cast<const T*>(sources[0]) + begin;
    for (std::size_t i = 0; i < n; ++i) accumulated[i] = Element<T>::load(first[i]);
    for (const void* source : sources.subspan(1)) {
      const T* next = static_cast<const T*>(source) + begin;
      for (std::size_t i = 0; i < n; ++i)
        accumulated[i] = op(accumulated[i], Element<T>::load(next[i]));
    }
    if constexpr (std::is_floating_point_v<A>)
      if (divisor > 1)
        for (std::size_t i = 0; i < n; ++i) accumulated[i] /= static_cast<A>(divisor);
    for (std::size_t i = 0; i < n; ++i) out[begin + i] = Element<T>::store(accumulated[i]);
  }
}

}  // namespace

std::size_t element_bytes(DataType type) {
  return with_type(type, [](auto value) { return sizeof(value); });
}

DataType accumulator(DataType type) {
  return type == DataType::float16 || type == DataType::bfloat16 ? DataType::float32 : type;
}

void check_reduction(DataType type, ReduceOp op) {
  const bool bitwise = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
  if (is_floating(type) ? bitwise : op == ReduceOp::avg)
    throw Error(std::string("reduction ") + name(op) + " is not defined for " +
                (is_floating(type) ? "floating-point" : "integer and boolean") + " elements");
}

void reduce(std::span<const void* const> sources, void* out, std::size_t count, DataType type,
            ReduceOp op) {
  const int divisor = op == ReduceOp::avg ? static_cast<int>(sources.size()) : 1;
  check_reduction(type, op);
  reduce_divided(sources, out, count, type, op, divisor);
}

void reduce_divided(std::span<const void* const> sources, void* out, std::size_t count,
                    DataType type, ReduceOp op, int divisor) {
  check_reduction(type, op);
  if (type == DataType::boolean) op = logical(op);
  with_type(type, [&](auto element) {
    using T = decltype(element);
    with_op(op, [&](auto combine) {
      using Op = decltype(combine);
      constexpr bool bitwise =
          std::is_same_v<Op, BitAnd> || std::is_same_v<Op, BitOr> || std::is_same_v<Op, BitXor>;
      if constexpr (std::is_integral_v<T> || !bitwise)
        reduce_typed(sources, static_cast<T*>(out), count, divisor, combine);
    });
  });
}

void widen(const void* in, void* out, std::size_t count, DataType type) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    auto* wide = static_cast<typename Element<T>::Accumulator*>(out);
    for (std::size_t i = 0; i < count; ++i)
      wide[i] = Element<T>::load(static_cast<const T*>(in)[i]);
  });
}

void narrow(const void* in, void* out, std::size_t count, DataType type, int divisor) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    using A = typename Element<T>::Accumulator;
    for (std::size_t i = 0; i < count; ++i) {
      A value = static_cast<const A*>(in)[i];
      if constexpr (std::is_floating_point_v<A>) value /= static_cast<A>(divisor);
      static_cast<T*>(out)[i] = Element<T>::store(value);
    }
  });
}

}  // namespace dicomm
