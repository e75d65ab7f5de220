// A sealed stream that hears what somebody without the keys says: nothing of it is ever passed on.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "transport/tcp/sealed_stream.h"

namespace {

using namespace dicomm;

class Said final : public Stream {
 public:
  explicit Said(FuzzedDataProvider& input) : input_(input) {}

  std::size_t write(const iovec*, int) override { return 0; }
  std::size_t read(void* data, std::size_t bytes) override {
    if (input_.remaining_bytes() == 0) throw StreamEnd{"over"};
    return input_.ConsumeData(data, std::min<std::size_t>(bytes, 1 + input_.remaining_bytes() / 2));
  }
  std::size_t eager_bytes() const override { return 1000; }
  int fd() const override { return -1; }
  LinkDescription describe() const override { return {}; }
  void finish_writing() override {}

 private:
  FuzzedDataProvider& input_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  FuzzedDataProvider input(data, bytes);
  const bool dialled = input.ConsumeBool(), encrypted = input.ConsumeBool();
  const auto stream =
      sealed_stream(std::make_unique<Said>(input), {sha256("a session"), dialled, encrypted});
  char heard[100];
  try {
    while (true)
      if (stream->read(heard, sizeof heard) > 0) std::abort();
  } catch (const StreamEnd&) {
  }
  return 0;
}
