// Host memory for chip tensors on their way to and from the wire.
#pragma once

#include <ATen/core/Tensor.h>

#include "streams.h"

namespace dicomm {

// A contiguous host tensor of the same sizes and type, its bytes not set: pinned where the tensor's
// device has pinned memory, and taken from what earlier ones left behind, since fresh memory costs
// about as much as the copy.
at::Tensor host_tensor_like(const at::Tensor& tensor);

// A chip reads or writes such a tensor until then: its memory serves no other one before.
void keep_host_memory_until(const at::Tensor& tensor, StreamMark mark);

}  // namespace dicomm
