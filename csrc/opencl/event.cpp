#include "event.h"

#include "stream.h"

struct ditorch_event {
  bool timed;
  std::mutex mutex;
  opencl::Mark mark;  // none: never recorded, which counts as done

  opencl::Mark recorded() {
    std::lock_guard lock(mutex);
    return mark;
  }
};

namespace opencl {

ditorch_status event_create(int32_t, int32_t timed, ditorch_event** event) {
  *event = new ditorch_event{.timed = timed != 0, .mutex = {}, .mark = {}};
  return DITORCH_OK;
}

ditorch_status event_destroy(int32_t, ditorch_event* event) {
  delete event;
  return DITORCH_OK;
}

ditorch_status event_record(int32_t index, ditorch_event* event, ditorch_stream* stream) {
  return guarded([&] {
    Mark mark = Submission(device_at(index).streams->of(stream)).mark();
    std::lock_guard lock(event->mutex);
    event->mark = std::move(mark);
    return DITORCH_OK;
  });
}

ditorch_status event_query(int32_t index, ditorch_event* event) {
  return guarded([&] {
    const Mark mark = event->recorded();
    return !mark || mark.has_happened(device_at(index)) ? DITORCH_OK : DITORCH_NOT_READY;
  });
}

ditorch_status event_synchronize(int32_t index, ditorch_event* event) {
  return guarded([&] {
    if (const Mark mark = event->recorded()) mark.wait(device_at(index));
    return DITORCH_OK;
  });
}

ditorch_status stream_wait_event(int32_t index, ditorch_stream* stream, ditorch_event* event) {
  return guarded([&] {
    if (const Mark mark = event->recorded()) {
      Submission(device_at(index).streams->of(stream)).wait_for(mark);
    }
    return DITORCH_OK;
  });
}

ditorch_status event_elapsed_ns(int32_t index, ditorch_event* start, ditorch_event* end,
                                int64_t* elapsed_ns) {
  return guarded([&] {
    const Device& device = device_at(index);
    const Mark first = start->recorded(), last = end->recorded();
    if (!start->timed || !end->timed || !first || !last) {
      fail(DITORCH_INVALID, "the time between two events takes events that are timed and recorded");
    }
    if (!first.has_happened(device) || !last.has_happened(device)) return DITORCH_NOT_READY;
    *elapsed_ns = last.time_ns(device, CL_PROFILING_COMMAND_END) -
                  first.time_ns(device, CL_PROFILING_COMMAND_END);
    return DITORCH_OK;
  });
}

}  // namespace opencl
