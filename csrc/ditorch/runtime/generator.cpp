#include "runtime/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

#include <vector>

#include "runtime/stream.h"
#include "runtime/vendor.h"

namespace ditorch {
namespace {

class ChipGenerator final : public c10::GeneratorImpl {
 public:
  ChipGenerator(c10::DeviceIndex device, at::Generator host)
      : c10::GeneratorImpl(chip_device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host_(std::move(host)) {}

  void set_current_seed(uint64_t seed) override { host_.set_current_seed(seed); }
  // torch keeps an offset with every generator that is not the CPU's, and sets it before the state.
  // The host's Mersenne twister, which is used here, has none.
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset == 0, "a generator of the device ", vendor().devices.front().library,
                " has no offset, so it cannot be set to ", offset, "; keep and set its state");
  }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host_.current_seed(); }
  uint64_t seed() override { return host_.unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host_.unsafeGetGeneratorImpl()->get_state();
  }

  const at::Generator& host() const { return host_; }

 private:
  ChipGenerator* clone_impl() const override {
    return new ChipGenerator(device().index(), host_.clone());
  }

  at::Generator host_;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  if (device < 0) device = current_device();
  return at::make_generator<ChipGenerator>(device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (size_t i = 0; i < vendor().devices.size(); ++i) {
      all->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    }
    return all;
  }();
  return generators->at(device < 0 ? current_device() : device);
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kChip, "expected a generator of this device type but ",
              "found one of ", generator.device(), "; make it with torch.Generator(device=...)");
  return static_cast<ChipGenerator*>(generator.unsafeGetGeneratorImpl())->host();
}

}  // namespace ditorch
