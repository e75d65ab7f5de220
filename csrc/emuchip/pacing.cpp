// What work costs on the chip (the roofline), and how well the host keeps up with it.
#include <algorithm>
#include <cmath>
#include <string_view>

#include "clock.h"
#include "device.h"
#include "error.h"
#include "runtime_entries.h"

namespace emuchip {
namespace {

constexpr double kLongestWork_s = 3600;  // longer is a mistake, and would look like a hang

thread_local int64_t work_began_ns = 0;

struct Span {
  int64_t begin_ns = 0, end_ns = 0;
};
thread_local Span last_work;

// The share of the peak called efficiency is what products of matrices reach; everything else is
// bound by the memory's bandwidth and needs no such share.
bool is_matrix_product(std::string_view name) {
  if (name.starts_with("aten::")) name.remove_prefix(6);
  name = name.substr(0, name.find('.'));
  if (name.ends_with('_')) name.remove_suffix(1);
  for (const std::string_view product :
       {"mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear", "mv", "addmv"}) {
    if (name == product) return true;
  }
  return false;
}

double roofline_s(const ChipFile& chip, const ditorch_work& work) {
  const double share = work.name && is_matrix_product(work.name) ? chip.efficiency : 1.0;
  return chip.launch_s + std::max(work.flops / (chip.peak_flops(work.dtype) * share),
                                  work.bytes / chip.bandwidth_bytes_per_s);
}

}  // namespace

ditorch_status work_begin(int32_t device, ditorch_stream* /*stream*/) {
  if (!find_device(device)) return DITORCH_INVALID;
  work_began_ns = now_ns();
  return DITORCH_OK;
}

ditorch_status work_end(int32_t device, ditorch_stream* stream, const ditorch_work* work) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  const char* name = work->name ? work->name : "unnamed";
  if (work->struct_size < sizeof *work) {
    return fail(DITORCH_INVALID, "work_end: struct_size is %zu, expected at least %zu",
                work->struct_size, sizeof *work);
  }
  if (work_began_ns == 0) {
    return fail(DITORCH_INVALID, "work_end of %s without work_begin on this thread", name);
  }
  const double duration_s = roofline_s(found->chip, *work);
  if (!(work->flops >= 0 && work->bytes >= 0 && duration_s <= kLongestWork_s)) {
    return fail(DITORCH_INVALID,
                "work_end: %s with %g flops and %g bytes: expected amounts of at least 0 that chip "
                "%s does within %g s",
                name, work->flops, work->bytes, found->chip.chip_type.c_str(), kLongestWork_s);
  }
  const std::lock_guard lock(found->mutex);
  // A host that is late delays the chip's end of the work; the work itself takes no longer for it.
  const int64_t end_ns = found->submit(found->stream(stream), work_began_ns, duration_s);
  last_work = {end_ns - std::llround(duration_s * 1e9), end_ns};
  return DITORCH_OK;
}

ditorch_status work_span_ns(int32_t device, int64_t* begin_ns, int64_t* end_ns) {
  if (!find_device(device)) return DITORCH_INVALID;
  if (last_work.end_ns == 0) {
    return fail(DITORCH_INVALID, "work_span_ns: this thread has ended no work");
  }
  *begin_ns = last_work.begin_ns;
  *end_ns = last_work.end_ns;
  return DITORCH_OK;
}

ditorch_status pacing(int32_t device, ditorch_pacing* pacing) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  if (pacing->struct_size < sizeof *pacing) {
    return fail(DITORCH_INVALID, "pacing: struct_size is %zu, expected at least %zu",
                pacing->struct_size, sizeof *pacing);
  }
  const std::lock_guard lock(found->mutex);
  // By the streams' clocks alone, so elapsed = busy + lost + waiting (on one stream).
  const int64_t elapsed_ns = found->latest_ready_at_ns - found->reset_at_ns;
  pacing->elapsed_s = 1e-9 * static_cast<double>(std::max<int64_t>(0, elapsed_ns));
  pacing->busy_s = 1e-9 * static_cast<double>(found->busy_ns);
  pacing->lost_s = 1e-9 * static_cast<double>(found->lost_ns);
  return DITORCH_OK;
}

ditorch_status pacing_reset(int32_t device) {
  Device* found = find_device(device);
  if (!found) return DITORCH_INVALID;
  const std::lock_guard lock(found->mutex);
  const int64_t reset_ns = now_ns();
  found->reset_at_ns = std::max(reset_ns, found->latest_ready_at_ns);
  found->release_host(reset_ns);
  found->busy_ns = 0;
  found->lost_ns = 0;
  return DITORCH_OK;
}

}  // namespace emuchip
