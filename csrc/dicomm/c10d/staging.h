// Tensors as the transport sees them: contiguous bytes in memory the host can touch.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "streams.h"

namespace dicomm {

// The paper's two ways for data to leave a chip: device-direct, the transport reads and writes
// chip memory; CPU-mediated, it is copied through host memory first.
enum class Strategy { device_direct, cpu_mediated };

Strategy parse_strategy(const std::string& name);
const char* name_of(Strategy strategy);

enum class Access { read, write, read_write };

// Whether a tensor's memory is its elements, one after the other; not a view of their conjugates.
bool is_plain(const at::Tensor& tensor);
// Itself where it is plain, else a copy that is.
at::Tensor plain(const at::Tensor& tensor);

// A tensor in place, or a contiguous copy of it, in host memory where CPU-mediated.
class Staged {
 public:
  // Copies what the access reads, and waits for it.
  Staged(const at::Tensor& tensor, Strategy strategy, Access access);
  // The same without the copy, which copy_in() makes.
  static Staged uncopied(const at::Tensor& tensor, Strategy strategy, Access access);
  // A plain chip tensor that goes through host memory only if someone asks for it, on the
  // current stream; what is read must be there by then. See there().
  static Staged on_demand(const at::Tensor& tensor, Access access);
  void bring_to_host();
  // A tensor where it is, made contiguous there without the copy: what reads and writes it is a
  // chip, or through_host().
  static Staged on_chip(const at::Tensor& tensor, Access access);
  // Of the contiguous bytes of another, for the host. Copies what the access reads, and waits.
  Staged through_host() const { return {bytes_, Strategy::cpu_mediated, access_}; }

  void* data() const { return bytes_.data_ptr(); }
  std::size_t bytes() const { return tensor_.nbytes(); }
  std::size_t count() const { return static_cast<std::size_t>(tensor_.numel()); }
  c10::Device device() const { return bytes_.device(); }  // where the transport finds it
  const at::Tensor& tensor() const { return tensor_; }
  const at::Tensor& contiguous() const { return bytes_; }

  bool must_copy_back() const { return must_copy_back_; }
  // On the current stream: everything, or one piece. A piece of a tensor that is not contiguous
  // waits for the last.
  void copy_back() const;
  void copy_back(std::size_t begin, std::size_t length) const;
  // Brings over what is read, or one piece, behind `given`, which is what the caller's stream was
  // given. The host does not wait, but the transport does, until there() is reached: it then finds
  // what is read, and may write to chip memory. An emulated chip's is there at once.
  void copy_in(const StreamMark& given) { copy_in(0, bytes(), given); }
  void copy_in(std::size_t begin, std::size_t length, const StreamMark& given);
  const StreamMark& there() const { return there_; }

 private:
  Staged() = default;
  struct Later {};
  Staged(const at::Tensor& tensor, bool on_host, Access access, Later);
  void copy_behind_the_host(std::size_t begin, std::size_t length);
  void fill(std::size_t begin, std::size_t length, bool non_blocking) const;

  at::Tensor tensor_;
  at::Tensor bytes_;
  Access access_ = Access::read;
  bool must_copy_in_ = false;
  bool must_copy_back_ = false;
  StreamMark there_;
};

}  // namespace dicomm
