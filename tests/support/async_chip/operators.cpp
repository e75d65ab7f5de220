// A few kernels, so that training has some that run late; the host computes the rest.
#include <algorithm>
#include <cmath>
#include <vector>

#include "chip.h"

namespace async_chip {

namespace {

const ditorch_tensor_accessors* tensors;

ditorch_status set_accessors(const ditorch_tensor_accessors* accessors) {
  tensors = accessors;
  return DITORCH_OK;
}

float* elements(const ditorch_tensor* tensor) {
  return static_cast<float*>(bytes_behind(tensors->data(tensor)));
}

bool is_float32(std::initializer_list<const ditorch_tensor*> all) {
  return std::all_of(all.begin(), all.end(), [](const ditorch_tensor* tensor) {
    return tensors->dtype(tensor) == DITORCH_FLOAT32;
  });
}

// A float32 tensor of two or three dimensions as a batch of matrices; strides in elements. Read at
// the call, as the tensor is gone when the work runs.
struct Matrices {
  explicit Matrices(const ditorch_tensor* tensor) : data(elements(tensor)) {
    const int dimensions = tensors->dimensions(tensor);
    const auto* sizes = tensors->sizes(tensor) + dimensions - 2;
    const auto* strides = tensors->strides(tensor) + dimensions - 2;
    if (dimensions == 3) count = sizes[-1], stride = strides[-1];
    rows = sizes[0], columns = sizes[1];
    row_stride = strides[0], column_stride = strides[1];
  }
  float& at(std::int64_t i, std::int64_t row, std::int64_t column) const {
    return data[i * stride + row * row_stride + column * column_stride];
  }

  float* data;
  std::int64_t count = 1, rows, columns, stride = 0, row_stride, column_stride;
};

ditorch_status matmul(const ditorch_context* context, ditorch_tensor* out, const ditorch_tensor* a,
                      const ditorch_tensor* b) {
  if (!is_float32({out, a, b})) return DITORCH_NOT_IMPLEMENTED;
  const Matrices z(out), x(a), y(b);
  queue_of(context->stream).submit([=] {
    std::vector<double> sums(static_cast<std::size_t>(z.columns));
    for (std::int64_t i = 0; i < z.count; ++i)
      for (std::int64_t row = 0; row < z.rows; ++row) {
        std::fill(sums.begin(), sums.end(), 0.0);
        for (std::int64_t k = 0; k < x.columns; ++k)
          for (std::int64_t column = 0; column < z.columns; ++column)
            sums[static_cast<std::size_t>(column)] +=
                static_cast<double>(x.at(i, row, k)) * y.at(i, k, column);
        for (std::int64_t column = 0; column < z.columns; ++column)
          z.at(i, row, column) = static_cast<float>(sums[static_cast<std::size_t>(column)]);
      }
  });
  return DITORCH_OK;
}

ditorch_status softmax(const ditorch_context* context, ditorch_tensor* out,
                       const ditorch_tensor* input) {
  if (!is_float32({out, input})) return DITORCH_NOT_IMPLEMENTED;
  const int dimensions = tensors->dimensions(input);
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < dimensions; ++i) rows *= tensors->sizes(input)[i];
  const std::int64_t length = tensors->sizes(input)[dimensions - 1];
  queue_of(context->stream).submit([=, to = elements(out), from = elements(input)] {
    for (std::int64_t row = 0; row < rows; ++row) {
      const float* x = from + row * length;
      float* y = to + row * length;
      const float largest = *std::max_element(x, x + length);
      double sum = 0;
      for (std::int64_t i = 0; i < length; ++i) sum += y[i] = std::exp(x[i] - largest);
      for (std::int64_t i = 0; i < length; ++i) y[i] = static_cast<float>(y[i] / sum);
    }
  });
  return DITORCH_OK;
}

ditorch_status sum(const ditorch_context* context, ditorch_tensor* out, const ditorch_tensor* input,
                   std::int64_t outer, std::int64_t reduced, std::int64_t inner) {
  if (!is_float32({out, input})) return DITORCH_NOT_IMPLEMENTED;
  queue_of(context->stream).submit([=, to = elements(out), from = elements(input)] {
    for (std::int64_t i = 0; i < outer; ++i)
      for (std::int64_t j = 0; j < inner; ++j) {
        double total = 0;
        for (std::int64_t k = 0; k < reduced; ++k) total += from[(i * reduced + k) * inner + j];
        to[i * inner + j] = static_cast<float>(total);
      }
  });
  return DITORCH_OK;
}

ditorch_operators table() {
  ditorch_operators operators{};
  operators.abi_version = DITORCH_OPERATORS_ABI_VERSION;
  operators.struct_size = sizeof operators;
  if (setting("ASYNC_CHIP_KERNELS", 1) == 0) return operators;
  operators.set_accessors = set_accessors;
  operators.matmul = matmul;
  operators.softmax = softmax;
  operators.sum = sum;
  return operators;
}

}  // namespace

}  // namespace async_chip

const ditorch_operators* ditorch_vendor_operators(std::uint32_t abi_version) {
  static const ditorch_operators operators = async_chip::table();
  return abi_version == DITORCH_OPERATORS_ABI_VERSION ? &operators : nullptr;
}
