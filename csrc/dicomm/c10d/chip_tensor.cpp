#include "chip_tensor.h"

#include <c10/core/StreamGuard.h>

#include "imported_memory.h"

namespace dicomm {

std::shared_ptr<ChipTensor> ChipTensor::of(const at::Tensor& tensor, Access access) {
  const ChipMemory* memory = chip_memory(tensor.device().type());
  if (!memory || (access != Access::read && !is_plain(tensor))) return nullptr;
  try {
    return std::shared_ptr<ChipTensor>(new ChipTensor(tensor, access, *memory));
  } catch (const c10::Error& error) {
    warn_of_the_longer_way(error);
    return nullptr;
  }
}

ChipTensor::ChipTensor(const at::Tensor& tensor, Access access, const ChipMemory& memory)
    : tensor_(std::make_shared<Staged>(
          Staged::on_demand(access == Access::read ? plain(tensor) : tensor, access))),
      memory_(memory) {
  const at::Tensor& here = tensor_->tensor();
  if (access == Access::read) {
    handle_ = memory.export_from(here.device().index(), here.const_data_ptr());
    return;
  }
  called_ = StreamMark::here(here.device());
  const c10::StreamGuard guard(communication_stream(here.device()));
  keep_for_current_stream(here);
}

std::shared_ptr<ChipWork> ChipTensor::pull(const MemoryHandle& from, std::size_t bytes) {
  const at::Tensor& here = tensor_->tensor();
  const auto device = here.device().index();
  try {
    const c10::StreamGuard guard(communication_stream(here.device()));
    copied_ = use_imported_memory(memory_, device, from, [&](const void* there) {
      called_.hold_current_stream();
      memory_.copy(device, here.mutable_data_ptr(), there, bytes);
      return StreamMark::here(here.device());
    });
  } catch (const c10::Error& error) {
    warn_of_the_longer_way(error);
    return nullptr;
  }
  return copied_->work();
}

ChipBuffer::OnHost ChipTensor::on_host() {
  const c10::StreamGuard guard(communication_stream(tensor_->tensor().device()));
  tensor_->bring_to_host();
  return {static_cast<std::byte*>(tensor_->data()), tensor_->there().work()};
}

}  // namespace dicomm
