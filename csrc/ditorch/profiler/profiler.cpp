// The device as a source of activities for kineto, which is what torch.profiler is made of:
// profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) lists the chip's kernels
// with the chip's own times, each linked to the operator that launched it.
#if __has_include(<kineto/libkineto.h>) && __has_include(<fmt/format.h>)
#define FMT_HEADER_ONLY
#include <kineto/libkineto.h>
#include <kineto/output_base.h>
#include <time.h>

#include <string>

#include "profiler/kernels.h"
#include "runtime/vendor.h"

namespace ditorch {
namespace {

using libkineto::ActivityType;

int64_t now_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

class Session final : public libkineto::IActivityProfilerSession {
 public:
  void start() override {
    take_kernels();
    to_unix_ns_ = now_ns(CLOCK_REALTIME) - now_ns(CLOCK_MONOTONIC);
    buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
    buffer_->span = libkineto::TraceSpan(now_ns(CLOCK_REALTIME), 0, "chip");
    buffer_->gpuOpCount = 0;
    status_ = libkineto::TraceStatus::RECORDING;
    profiler_listens = true;
  }

  void stop() override {
    profiler_listens = false;
    kernels_ = take_kernels();
    if (buffer_) buffer_->span.endTime = now_ns(CLOCK_REALTIME);
    status_ = libkineto::TraceStatus::PROCESSING;
  }

  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](int32_t) { return nullptr; }, 0, 0);
  }

  void processTrace(libkineto::ActivityLogger& logger,
                    libkineto::getLinkedActivityCallback find_operator, int64_t /*start*/,
                    int64_t /*end*/) override {
    if (!buffer_) return;
    for (const auto& kernel : kernels_) {
      const std::string name = std::string(kernel.name) + (kernel.on_host ? " (on the host)" : "");
      buffer_->emplace_activity(buffer_->span, ActivityType::CONCURRENT_KERNEL, name);
      auto& activity = *buffer_->activities.back();
      activity.startTime = kernel.begin_ns + to_unix_ns_;
      activity.endTime = kernel.end_ns + to_unix_ns_;
      activity.device = kernel.device;
      activity.resource = static_cast<int32_t>(kernel.stream);
      activity.id = static_cast<int32_t>(kernel.correlation);
      activity.linked = find_operator(activity.id);
      logger.handleGenericActivity(activity);
    }
    buffer_->gpuOpCount = static_cast<int>(kernels_.size());
  }

  std::vector<std::string> errors() override { return {}; }

  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override {
    return std::make_unique<libkineto::DeviceInfo>(libkineto::DeviceInfo{
        0, libkineto::kExceedMaxPid, vendor().devices.front().library, describe_chip(0)});
  }

  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }

  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override {
    return std::move(buffer_);
  }

  void pushCorrelationId(uint64_t id) override { enter_operator(id); }
  void popCorrelationId() override { leave_operator(); }

 private:
  int64_t to_unix_ns_ = 0;  // what turns the chip's clock into the trace's
  std::vector<Kernel> kernels_;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override {
    static const auto* name = new std::string("ditorch");
    return *name;
  }

  const std::set<ActivityType>& availableActivities() const override {
    static const auto* types = new std::set<ActivityType>{ActivityType::CONCURRENT_KERNEL};
    return *types;
  }

  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& wanted, const libkineto::Config&) override {
    if (!wanted.count(ActivityType::CONCURRENT_KERNEL)) return nullptr;
    return std::make_unique<Session>();
  }

  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t /*begin_ms*/, int64_t /*duration_ms*/, const std::set<ActivityType>& wanted,
      const libkineto::Config& config) override {
    return configure(wanted, config);
  }
};

}  // namespace

void register_profiler() {
  libkineto::api().registerProfilerFactory([] { return std::make_unique<Profiler>(); });
}

}  // namespace ditorch

#else  // a torch without kineto's headers: its profiler then shows the host's side only

#include "profiler/kernels.h"

void ditorch::register_profiler() {}

#endif
