// torch's two views of a device: the guard (streams, events) and the hooks (generators, memory).
#pragma once

namespace ditorch {

void register_guard();
void register_hooks();

}  // namespace ditorch
