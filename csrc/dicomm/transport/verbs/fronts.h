// Slots without their front: see wire.h. One direction of one rail.
#pragma once

#include <cstring>
#include <optional>

#include "core/frame.h"
#include "transport/verbs/wire.h"

namespace dicomm::verbs {

class Fronts {
 public:
  // What a slot begins with, where its bytes are a frame.
  struct Front {
    SlotHeader words;
    std::byte frame[FrameHeader::kShortBytes];
  };

  // The sender's side, of each numbered slot in turn: the immediate that can stand for its front.
  std::optional<std::uint32_t> abridge(const std::byte* slot, std::size_t bytes) {
    const std::optional<Front> before = last_;
    remember(slot, bytes);
    if (!before || !last_ || bytes == sizeof(Front)) return std::nullopt;
    const SlotHeader& words = last_->words;
    const std::uint32_t immediate = (words.consumed & 0xff) | (words.consumed_here & 0xff) << 8;
    const Front understood = next(*before, immediate);
    if (std::memcmp(&understood, &*last_, sizeof(Front)) != 0) return std::nullopt;
    return immediate;
  }

  // The receiver's side: of each slot that came whole, and of one without, into the place before
  // its bytes. False: there is none to repeat.
  void remember(const std::byte* slot, std::size_t bytes) {
    if (bytes <= sizeof(SlotHeader)) return;  // an empty one
    if (bytes < sizeof(Front))
      last_.reset();
    else
      std::memcpy(&last_.emplace(), slot, sizeof(Front));
  }
  bool restore(std::byte* place, std::uint32_t immediate) {
    if (!last_) return false;
    last_ = next(*last_, immediate);
    std::memcpy(place, &*last_, sizeof(Front));
    return true;
  }

 private:
  static Front next(Front front, std::uint32_t immediate) {
    SlotHeader& words = front.words;
    words.sequence += 1;
    words.consumed += static_cast<std::uint8_t>(immediate - words.consumed);
    words.consumed_here += static_cast<std::uint8_t>((immediate >> 8) - words.consumed_here);
    return front;
  }

  std::optional<Front> last_;
};

}  // namespace dicomm::verbs
