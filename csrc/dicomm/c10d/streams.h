// What orders the streams of a chip that computes behind the host's back.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <functional>
#include <memory>

#include "core/chip_buffer.h"

namespace dicomm {

// Where a collective's results become visible: a stream of its own, so that a chip's compute
// streams wait only when a work is waited for.
c10::Stream communication_stream(c10::Device device);
// Where bytes are copied to the host's memory, to be sent; another one, as what is received need
// not wait for work that comes before what is sent.
c10::Stream sending_stream(c10::Device device);

// A point in a stream. One that was never set, or is the CPU's, counts as reached.
class StreamMark {
 public:
  // Behind all that the calling thread's current stream has been given.
  static StreamMark here(c10::Device device);
  // The same of a chip that works behind the host's back; else reached.
  static StreamMark here_behind_the_host(c10::Device device);
  // Behind all that the stream has been given.
  static StreamMark of(c10::Stream stream);

  // The calling thread's current stream goes on once the mark is reached; the host is not held.
  void hold_current_stream() const;
  bool is_reached() const;
  // False where the chip fails, too, of which nobody knows what it still does.
  bool is_surely_reached() const noexcept;
  // Holds the host until the mark is reached; or until `gives_up`, and returns false then. Throws
  // TimeoutError after so long, which tells what is not so yet ("not begun").
  bool wait(std::chrono::nanoseconds timeout, const char* what,
            const std::function<bool()>& gives_up) const;
  // What the chip does until then, for the transport. Null: the point counts as reached.
  std::shared_ptr<ChipWork> work() const;

 private:
  std::shared_ptr<c10::Event> event_;
};

// The calling thread's current stream reads or writes the tensor: its memory serves no other
// tensor, should it be dropped, before the stream is done with it.
void keep_for_current_stream(const at::Tensor& tensor);

}  // namespace dicomm
