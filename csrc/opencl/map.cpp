// Elementwise programs: each is a kernel of its own, whose text is made of its instructions.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "kernels.h"
#include "map_text.h"
#include "rows.h"

namespace opencl {
namespace {

// How a kernel walks over its operands: `struct walk` of its text.
struct Walk {
  cl_long sizes[kMostDimensions];
  cl_long strides[DITORCH_MAP_OPERANDS][kMostDimensions];
};

// `struct constants` of a kernel's text.
template <class T>
struct Constants {
  T values[kMostConstants];
  cl_ulong key;  // of random numbers
};

template <class T>
Constants<T> constants_of(const MapShape& shape) {
  Constants<T> found{};
  int32_t count = 0;
  for (int32_t i = 0; i < shape.count; ++i) {
    const ditorch_instruction& instruction = shape.instructions[i];
    if (instruction.opcode == DITORCH_RANDOM)
      found.key = static_cast<cl_ulong>(instruction.integer);
    if (instruction.opcode != DITORCH_CONSTANT) continue;
    found.values[count++] = std::is_integral_v<T> ? static_cast<T>(instruction.integer)
                                                  : static_cast<T>(instruction.value);
  }
  return found;
}

// A program for operands of a shape, ready to be launched over their memory.
class Map {
 public:
  // Holds nothing where the device has no kernel for it.
  Map(Device& device, const MapShape& shape) : shape_(shape), run_(run_of_item(device)) {
    if (!has_map(device, shape)) return;
    const ditorch_dtype floats = shape.compute == DITORCH_INT64 ? DITORCH_FLOAT32 : shape.compute;
    kernel_ = device.programs->kernel_of_text(
        map_key(shape), [&] { return map_text(device, shape, run_); },
        compute_options(device, floats), "map");
  }

  explicit operator bool() const { return kernel_ != nullptr; }

  void launch(Submission& submission, const Walk& walk, void* const* data) const {
    size_t outer = 1;
    for (int32_t d = 0; d + 1 < shape_.dimensions; ++d) outer *= static_cast<size_t>(walk.sizes[d]);
    const auto last = walk.sizes[shape_.dimensions - 1];
    const Submission::Sizes items = {static_cast<size_t>((last + run_ - 1) / run_), outer, 1};
    const std::vector<void*> operands(data, data + shape_.dtypes.size());
    if (shape_.compute == DITORCH_FLOAT64) {
      submission.launch_items_over(kernel_, items, operands, walk, constants_of<cl_double>(shape_));
    } else if (shape_.compute == DITORCH_INT64) {
      submission.launch_items_over(kernel_, items, operands, walk, constants_of<cl_long>(shape_));
    } else {
      submission.launch_items_over(kernel_, items, operands, walk, constants_of<cl_float>(shape_));
    }
  }

 private:
  const MapShape& shape_;
  int64_t run_;
  cl_kernel kernel_ = nullptr;
};

}  // namespace

ditorch_status map(const ditorch_context* context, const ditorch_map* call) {
  return guarded([&] {
    Device& device = device_at(context->device);
    MapShape shape{call->compute,      call->dimensions,       {}, {},
                   call->instructions, call->instruction_count};
    if (call->dimensions > kMostDimensions) return DITORCH_NOT_IMPLEMENTED;
    Walk walk{};
    std::copy_n(call->sizes, call->dimensions, walk.sizes);
    std::array<void*, DITORCH_MAP_OPERANDS> data{};
    for (int32_t i = 0; i < call->operand_count; ++i) {
      const ditorch_operand& operand = call->operands[i];
      shape.dtypes.push_back(operand.dtype);
      shape.last_strides.push_back(operand.strides[call->dimensions - 1]);
      std::copy_n(operand.strides, call->dimensions, walk.strides[i]);
      data[i] = operand.data;
    }
    const Map found(device, shape);
    if (!found) return DITORCH_NOT_IMPLEMENTED;
    Submission submission(device.streams->of(context->stream));
    found.launch(submission, walk, data.data());
    return DITORCH_OK;
  });
}

ditorch_status map_list(const ditorch_context* context, const ditorch_map_list* call) {
  return guarded([&] {
    Device& device = device_at(context->device);
    const MapShape shape{call->compute,
                         1,
                         {call->dtypes, call->dtypes + call->operand_count},
                         {call->strides, call->strides + call->operand_count},
                         call->instructions,
                         call->instruction_count};
    const Map found(device, shape);
    if (!found) return DITORCH_NOT_IMPLEMENTED;
    Submission submission(device.streams->of(context->stream));
    Walk walk{};
    for (int32_t i = 0; i < call->operand_count; ++i) walk.strides[i][0] = call->strides[i];
    for (int32_t i = 0; i < call->call_count; ++i) {
      walk.sizes[0] = call->elements[i];
      found.launch(submission, walk, call->data + static_cast<int64_t>(i) * call->operand_count);
    }
    return DITORCH_OK;
  });
}

}  // namespace opencl
