// Host memory that torch calls pinned.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace ditorch {

void register_pinned_allocator();
c10::Allocator* pinned_allocator();

// Whether `data` lies in memory that the allocator above handed out.
bool is_pinned(const void* data);

// Work of `stream` may write to the memory around `data` from now on: once it is freed, it stays as
// it is until that work is done. False if the memory is not pinned.
bool use_pinned(const void* data, c10::Stream stream);

}  // namespace ditorch
