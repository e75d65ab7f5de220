// Who still reads or writes memory that its owner gives up: streams other than the owner's.
#pragma once

#include <c10/core/Stream.h>

#include <vector>

#include "runtime/vendor.h"

namespace ditorch {

// Notes streams while memory is held, and once it is freed waits for the work they were given.
class StreamUses {
 public:
  StreamUses() = default;
  ~StreamUses() { finished(/*wait=*/true); }
  StreamUses(StreamUses&&) = default;
  StreamUses& operator=(StreamUses&&) = default;

  // `stream` has been given work on the memory. However often it is said, it counts once.
  void add(c10::Stream stream);

  // The memory is freed: marks the last work of the streams. False if there is nothing to wait for.
  bool freed();

  // Whether the marked work is done; `wait` holds the host until it is.
  bool finished(bool wait);

 private:
  struct Mark {
    c10::DeviceIndex device;
    ditorch_event* event;
  };

  std::vector<c10::Stream> streams_;
  std::vector<Mark> marks_;
};

}  // namespace ditorch
