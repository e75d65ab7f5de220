// Tensors as the transport sees them: contiguous bytes in memory the host can touch.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace dicomm {

// The paper's two ways for data to leave a chip: device-direct, the transport reads and writes
// chip memory; CPU-mediated, it is copied through host memory first.
enum class Strategy { device_direct, cpu_mediated };

Strategy parse_strategy(const std::string& name);

enum class Access { read, write, read_write };

// A tensor in place, or a contiguous copy of it.
class Staged {
 public:
  Staged(const at::Tensor& tensor, Strategy strategy, Access access);

  void* data() const { return bytes_.data_ptr(); }
  std::size_t bytes() const { return bytes_.nbytes(); }
  std::size_t count() const { return static_cast<std::size_t>(bytes_.numel()); }
  c10::Device device() const { return bytes_.device(); }  // where the transport finds it

  bool must_copy_back() const { return must_copy_back_; }
  void copy_back() const;  // on the current stream

 private:
  at::Tensor tensor_;
  at::Tensor bytes_;
  bool must_copy_back_;
};

}  // namespace dicomm
