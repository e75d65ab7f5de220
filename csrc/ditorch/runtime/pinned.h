// Host memory that torch calls pinned.
#pragma once

#include <c10/core/Allocator.h>

namespace ditorch {

void register_pinned_allocator();
c10::Allocator* pinned_allocator();

// Whether `data` lies in memory that the allocator above handed out.
bool is_pinned(const void* data);

}  // namespace ditorch
