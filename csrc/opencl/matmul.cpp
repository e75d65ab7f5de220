#include <algorithm>

#include "kernels.h"
#include "product.h"
#include "program.h"

namespace opencl {
namespace {

constexpr int kLocalSide = 16;               // of a GPU's group: 256 items
constexpr size_t kCachedBytes = 384 * 1024;  // of a's panels: part of a second-level cache
constexpr int64_t kSmall = 16 * 1024;        // multiplications below which a launch costs more

struct Tile {
  int rows, vectors;
};

// On a processor what fits its registers, on a GPU what fits a group's.
Tile tile_of(const Device& device) { return device.is_cpu ? Tile{12, 2} : Tile{64, 16}; }

int64_t panels(int64_t length, int64_t size) { return (length + size - 1) / size; }

// Of a panel that one item packs: neighbouring items of a GPU write neighbouring memory.
int64_t depth_of_item(const Device& device) { return device.is_cpu ? 256 : 1; }

cl_kernel kernel_of(Device& device, const Product& product, const char* name) {
  const Tile tile = tile_of(device);
  std::string options =
      compute_options(device, product.dtype) + " -DDATA=" + name_of(device, product.dtype) +
      " -DROWS=" + std::to_string(tile.rows) + " -DVECTORS=" + std::to_string(tile.vectors) +
      " -DDEPTH_OF_ITEM=" + std::to_string(depth_of_item(device));
  if (!device.is_cpu) options += " -DLOCAL_SIDE=" + std::to_string(kLocalSide);
  return device.programs->kernel("matmul", options, name);
}

void compute_directly(Submission& submission, const Product& product) {
  Device& device = submission.device();
  const auto width = static_cast<int64_t>(vector_width(device, product.dtype));
  submission.launch_items(kernel_of(device, product, "multiply_directly"),
                          {static_cast<size_t>(panels(product.columns, width)),
                           static_cast<size_t>(product.rows), static_cast<size_t>(product.batches)},
                          product.a.data, product.a.at, product.b.data, product.b.at,
                          product.out.data, product.out.at, cl_long{product.columns},
                          cl_long{product.depth});
}

void compute_packed(Submission& submission, const Product& product) {
  Device& device = submission.device();
  const Tile tile = tile_of(device);
  const int64_t width = vector_width(device, product.dtype);
  const int64_t tile_columns = tile.vectors * width;
  const auto of_a = static_cast<size_t>(panels(product.rows, tile.rows));
  const auto of_b = static_cast<size_t>(panels(product.columns, tile_columns));
  const auto batches = static_cast<size_t>(product.batches);
  const auto depths = static_cast<size_t>(panels(product.depth, depth_of_item(device)));
  const size_t element_bytes = product.dtype == DITORCH_FLOAT64 ? 8 : 4;
  const auto depth = static_cast<size_t>(product.depth);
  const size_t a_bytes =
      (batches * of_a * static_cast<size_t>(tile.rows) * depth * element_bytes + 127) / 128 * 128;
  const size_t b_bytes = batches * of_b * static_cast<size_t>(tile_columns) * depth * element_bytes;
  char* a = static_cast<char*>(submission.scratch(a_bytes + b_bytes));
  char* b = a + a_bytes;

  const Strides transposed = {product.b.at.batch, product.b.at.column, product.b.at.row};
  submission.launch_items(kernel_of(device, product, "pack_both"), {depths, of_a + of_b, batches},
                          product.a.data, product.a.at, cl_long{product.rows}, a, product.b.data,
                          transposed, cl_long{product.columns}, b, cl_long{product.depth},
                          static_cast<cl_long>(of_a));
  const size_t panel_bytes = static_cast<size_t>(tile.rows) * depth * element_bytes;
  const size_t together = std::clamp(kCachedBytes / panel_bytes, size_t{1}, of_a);
  submission.launch(kernel_of(device, product, "multiply"),
                    {together, of_b, batches * ((of_a + together - 1) / together)},
                    device.is_cpu ? 1 : kLocalSide * kLocalSide, a, b, product.out.data,
                    product.out.at, cl_long{product.rows}, cl_long{product.columns},
                    cl_long{product.depth}, static_cast<cl_long>(of_a));
}

Matrices matrices_of(const Tensor& tensor) {
  const int32_t last = tensor.dimensions - 1;
  return {tensor.data,
          {last == 2 ? tensor.strides[0] : 0, tensor.strides[last - 1], tensor.strides[last]}};
}

bool is_small(const Product& product) {
  return product.rows * product.columns * product.depth <= kSmall;
}

}  // namespace

const char* name_of(Way way) {
  return way == Way::packed ? "packed" : way == Way::direct ? "direct" : "clblast";
}

std::vector<Way> ways_of(const Device& device, const Product& product) {
  if (is_small(product)) return {Way::direct};
  std::vector<Way> ways = {Way::packed, Way::direct};
  if (clblast_takes(device, product)) ways.push_back(Way::clblast);
  return ways;
}

void compute(Submission& submission, const Product& product, Way way) {
  if (way == Way::packed) return compute_packed(submission, product);
  if (way == Way::direct) return compute_directly(submission, product);
  compute_by_clblast(submission, product);
}

ditorch_status matmul(const ditorch_context* context, ditorch_tensor* out_handle,
                      const ditorch_tensor* a_handle, const ditorch_tensor* b_handle) {
  return guarded([&] {
    Device& device = device_at(context->device);
    const Tensor out = read_tensor(out_handle), a = read_tensor(a_handle),
                 b = read_tensor(b_handle);
    if (name_of(device, a.dtype).empty()) return DITORCH_NOT_IMPLEMENTED;
    const Matrices of_out = matrices_of(out);
    const int32_t last = out.dimensions - 1;
    const Product product = {.dtype = a.dtype,
                             .batches = last == 2 ? out.sizes[0] : 1,
                             .rows = out.sizes[last - 1],
                             .columns = out.sizes[last],
                             .depth = a.sizes[last],
                             .out = of_out,
                             .a = matrices_of(a),
                             .b = matrices_of(b)};
    Submission submission(device.streams->of(context->stream));
    compute(submission, product, choose_way(submission, product));
    return DITORCH_OK;
  });
}

}  // namespace opencl
