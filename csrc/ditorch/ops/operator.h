// What ditorch knows of an ATen operator, worked out once from its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ops/host_kernels.h"
#include "ops/vendor_kernels.h"

namespace ditorch {

// How a product of matrices keeps its operands; attention's work is its own (attention_work.cpp).
enum class Product { none, matrix, linear, attention };

struct Operator {
  std::string name;           // "add", without namespace and overload; lives as long as the process
  bool is_view = false;       // it makes or changes shapes over memory; nothing is launched
  bool synchronizes = false;  // its result's shape or value needs the data on the host
  bool seeded = false;        // it draws random numbers
  std::vector<bool> writes;   // which arguments it writes to
  std::optional<size_t> generator;  // position of its Generator? argument
  Product product = Product::none;
  size_t left = 0;                       // position of the product's left operand
  VendorKernel vendor_kernel = nullptr;  // null: the host always computes it
  HostKernel host_kernel = nullptr;
  mutable std::atomic<uint8_t> missing_dtypes{0};  // that the host has no kernel for: see wider.cpp
  std::atomic<uint64_t> host_runs{0};              // the host computed it in the chip's stead
  std::atomic<uint64_t> chip_runs{0};              // the vendor's kernel computed it

  static Operator& of(const c10::OperatorHandle& handle);

 private:
  static Operator& find(const c10::OperatorHandle& handle);
};

// How often the host computed each operator since the last reset, by name; no zeros.
std::map<std::string, uint64_t> fallback_counts();
void reset_fallback_counts();

// How many operators the host has computed in the chip's stead for the calling thread, ever.
extern thread_local constinit uint64_t host_runs_here;

// How often the vendor's kernel computed each operator since the library was loaded; no zeros.
std::map<std::string, uint64_t> kernel_counts();

}  // namespace ditorch
