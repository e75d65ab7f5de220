// The kernels of the skeleton for new vendors (tools/new_vendor), run late: a queue calls them on
// copies of what they were called with, as that is good during the call alone.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

#include "chip.h"

extern "C" {
#include "elements.h"
#include "kernels.h"

// What the skeleton's kernels ask of their chip.
void* chip_bytes(const void* device_pointer) { return async_chip::bytes_behind(device_pointer); }

ditorch_status fail(ditorch_status status, const char* format, ...) {
  char sentence[256];
  std::va_list values;
  va_start(values, format);
  std::vsnprintf(sentence, sizeof sentence, format, values);
  va_end(values);
  return async_chip::fail(status, sentence);
}
}

namespace async_chip {

namespace {

template <class T>
std::vector<T> copied(const T* from, std::int64_t count) {
  return {from, from + count};
}

const ditorch_tensor_accessors* given;  // of ditorch's own tensors

struct Tensor {
  explicit Tensor(const ditorch_tensor* tensor)
      : data(given->data(tensor)),
        dtype(given->dtype(tensor)),
        sizes(copied(given->sizes(tensor), given->dimensions(tensor))),
        strides(copied(given->strides(tensor), given->dimensions(tensor))) {}

  static const Tensor& of(const ditorch_tensor* handle) {
    return *reinterpret_cast<const Tensor*>(handle);
  }

  void* data;
  ditorch_dtype dtype;
  std::vector<std::int64_t> sizes, strides;
};

const ditorch_tensor_accessors kOfCopies = {
    sizeof(ditorch_tensor_accessors),
    [](const ditorch_tensor* tensor) { return Tensor::of(tensor).data; },
    [](const ditorch_tensor* tensor) { return Tensor::of(tensor).dtype; },
    [](const ditorch_tensor* tensor) {
      return static_cast<std::int32_t>(Tensor::of(tensor).sizes.size());
    },
    [](const ditorch_tensor* tensor) { return Tensor::of(tensor).sizes.data(); },
    [](const ditorch_tensor* tensor) { return Tensor::of(tensor).strides.data(); },
};

ditorch_status keep_accessors(const ditorch_tensor_accessors* accessors) {
  given = accessors;
  return set_accessors(&kOfCopies);
}

// An argument of a kernel, kept until it runs. What all kernels take is `is_taken`.
template <class T>
struct Kept {  // numbers, and descriptors that point to memory of the chip alone
  using Value = std::remove_const_t<std::remove_pointer_t<T>>;

  explicit Kept(T argument) {
    if constexpr (std::is_pointer_v<T>) {
      value = *argument;
    } else {
      value = argument;
    }
  }
  T argument() const {
    if constexpr (std::is_pointer_v<T>) {
      return &value;
    } else {
      return value;
    }
  }
  bool is_taken() const {
    if constexpr (std::is_pointer_v<T>) return is_known(value.dtype);
    return true;
  }

  Value value;
};

template <>
struct Kept<const ditorch_tensor*> {
  explicit Kept(const ditorch_tensor* argument) : tensor(argument) {}
  const ditorch_tensor* argument() const {
    return reinterpret_cast<const ditorch_tensor*>(&tensor);
  }
  bool is_taken() const { return tensor.dtype == DITORCH_FLOAT32; }

  Tensor tensor;
};

template <>
struct Kept<ditorch_tensor*> : Kept<const ditorch_tensor*> {
  using Kept<const ditorch_tensor*>::Kept;
  ditorch_tensor* argument() const {
    return const_cast<ditorch_tensor*>(Kept<const ditorch_tensor*>::argument());
  }
};

template <>
struct Kept<const ditorch_map*> {
  explicit Kept(const ditorch_map* call)
      : map(*call),
        sizes(copied(call->sizes, call->dimensions)),
        operands(copied(call->operands, call->operand_count)),
        instructions(copied(call->instructions, call->instruction_count)) {
    for (auto& operand : operands) {
      strides.push_back(copied(operand.strides, call->dimensions));
      operand.strides = strides.back().data();
    }
    map.sizes = sizes.data();
    map.operands = operands.data();
    map.instructions = instructions.data();
  }
  const ditorch_map* argument() const { return &map; }
  bool is_taken() const { return true; }

  ditorch_map map;
  std::vector<std::int64_t> sizes;
  std::vector<ditorch_operand> operands;
  std::vector<std::vector<std::int64_t>> strides;
  std::vector<ditorch_instruction> instructions;
};

template <>
struct Kept<const ditorch_map_list*> {
  explicit Kept(const ditorch_map_list* call)
      : list(*call),
        dtypes(copied(call->dtypes, call->operand_count)),
        strides(copied(call->strides, call->operand_count)),
        elements(copied(call->elements, call->call_count)),
        data(copied(call->data, std::int64_t{call->call_count} * call->operand_count)),
        instructions(copied(call->instructions, call->instruction_count)) {
    list.dtypes = dtypes.data();
    list.strides = strides.data();
    list.elements = elements.data();
    list.data = data.data();
    list.instructions = instructions.data();
  }
  const ditorch_map_list* argument() const { return &list; }
  bool is_taken() const { return true; }

  ditorch_map_list list;
  std::vector<ditorch_dtype> dtypes;
  std::vector<std::int64_t> strides, elements;
  std::vector<void*> data;
  std::vector<ditorch_instruction> instructions;
};

// Operands of a descriptor, whose strides are kept beside.
struct KeptOperands {
  KeptOperands(std::initializer_list<ditorch_operand*> operands, std::int64_t dimensions = 4) {
    for (auto* operand : operands) {
      if (!operand->data) continue;
      strides.push_back(
          std::make_unique<std::vector<std::int64_t>>(copied(operand->strides, dimensions)));
      operand->strides = strides.back()->data();
    }
  }

  std::vector<std::unique_ptr<std::vector<std::int64_t>>> strides;
};

template <>
struct Kept<const ditorch_grouped_matmul*> {
  explicit Kept(const ditorch_grouped_matmul* given_call)
      : call(*given_call),
        flat({&call.a, call.along_depth ? &call.b : &call.out}, 2),
        of_groups({call.along_depth ? &call.out : &call.b}, 3) {}
  const ditorch_grouped_matmul* argument() const { return &call; }
  bool is_taken() const { return is_floating(call.dtype); }

  ditorch_grouped_matmul call;
  KeptOperands flat, of_groups;
};

template <>
struct Kept<const ditorch_attention*> {
  explicit Kept(const ditorch_attention* given_call)
      : call(*given_call), operands({&call.query, &call.key, &call.value, &call.bias, &call.out}) {}
  const ditorch_attention* argument() const { return &call; }
  bool is_taken() const { return is_floating(call.dtype); }

  ditorch_attention call;
  KeptOperands operands;
};

template <>
struct Kept<const ditorch_attention_backward*> {
  explicit Kept(const ditorch_attention_backward* given_call)
      : forward(given_call->forward),
        call(*given_call),
        operands({&call.grad_out, &call.grad_query, &call.grad_key, &call.grad_value}) {}
  const ditorch_attention_backward* argument() const {
    call.forward = forward.argument();
    return &call;
  }
  bool is_taken() const { return forward.is_taken(); }

  Kept<const ditorch_attention*> forward;
  mutable ditorch_attention_backward call;
  KeptOperands operands;
};

template <auto kernel>
struct Late;

template <class... Arguments, ditorch_status (*kernel)(const ditorch_context*, Arguments...)>
struct Late<kernel> {
  static ditorch_status entry(const ditorch_context* context, Arguments... arguments) {
    const auto kept = std::make_shared<const std::tuple<Kept<Arguments>...>>(arguments...);
    if (!std::apply([](const auto&... one) { return (one.is_taken() && ...); }, *kept)) {
      return DITORCH_NOT_IMPLEMENTED;
    }
    queue_of(context->stream).submit([kept] {
      const auto run = [](const auto&... one) { return kernel(nullptr, one.argument()...); };
      if (std::apply(run, *kept) != DITORCH_OK) std::abort();  // it was promised
    });
    return DITORCH_OK;
  }
};

// Whether an index is good has to be known before anything is written, so the host waits for it.
template <auto kernel>
ditorch_status after_a_wait(const ditorch_context* context, const ditorch_indexed* call) {
  queue_of(context->stream).synchronize();
  return kernel(context, call);
}

ditorch_operators table() {
  ditorch_operators operators{};
  operators.abi_version = DITORCH_OPERATORS_ABI_VERSION;
  operators.struct_size = sizeof operators;
  if (setting("ASYNC_CHIP_KERNELS", 1) == 0) return operators;
  operators.set_accessors = keep_accessors;
  operators.matmul = Late<matmul>::entry;
  operators.softmax = Late<softmax>::entry;
  operators.softmax_backward = Late<softmax_backward>::entry;
  operators.log_softmax = Late<log_softmax>::entry;
  operators.log_softmax_backward = Late<log_softmax_backward>::entry;
  operators.sum = Late<sum>::entry;
  operators.mean = Late<mean>::entry;
  operators.map = Late<::map>::entry;
  operators.map_list = Late<map_list>::entry;
  operators.gather = after_a_wait<gather>;
  operators.scatter_add = after_a_wait<scatter_add>;
  operators.scatter = after_a_wait<scatter>;
  operators.sort = Late<::sort>::entry;
  operators.scan = Late<scan>::entry;
  operators.attention = Late<attention>::entry;
  operators.attention_backward = Late<attention_backward>::entry;
  operators.grouped_matmul = Late<grouped_matmul>::entry;
  operators.attention_struct_size = sizeof(ditorch_attention);
  return operators;
}

}  // namespace

}  // namespace async_chip

const ditorch_operators* ditorch_vendor_operators(std::uint32_t abi_version) {
  static const ditorch_operators operators = async_chip::table();
  return abi_version == DITORCH_OPERATORS_ABI_VERSION ? &operators : nullptr;
}
