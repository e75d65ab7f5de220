#include "transport/verbs/link.h"

#include "core/text.h"

namespace dicomm::verbs {

Link::Link(Rails& rails, std::size_t rail, const GidEntry* gid)
    : receives_(rails.receive_buffers(rails.rails[rail].device_index)),
      pair(rails.rails[rail], rails.settings, {kSendDepth + kReadsAtOnce, kReceives},
           receives_->shared_queue()),
      gid(gid),
      device_index(rails.rails[rail].device_index) {
  receives_->join(pair);
}

// A queue pair takes the completions of what it received along, and the shared buffers with them:
// they are collected before. A few may still come while it closes.
Link::~Link() {
  close();
  pair.destroy();
  drain();
  receives_->leave();
}

void Link::connect(const RailCard& theirs) {
  peer = theirs;
  pair.connect(theirs, pair.route(theirs, gid));
}

void Link::connect(const RailCard& theirs, const ibv::QpAttributes& route,
                   std::shared_ptr<cm::Id> id) {
  peer = theirs;
  cm_id = std::move(id);
  pair.connect(theirs, route);
}

void Link::close() {
  pair.close();
  drain();
}

int Link::drain() {
  int reason = ibv::kFlushed;
  ibv::Completion completion;
  while (pair.poll(&completion, 1) == 1) {
    const int status = drop(completion);
    if (reason == ibv::kFlushed && status != ibv::kSuccess) reason = status;
  }
  return reason;
}

int Link::drop(const ibv::Completion& completion) {
  const std::uint64_t work = completion.id >> kWorkShift;
  if (work == receive_work) receives_->take(static_cast<std::uint32_t>(completion.id));
  if (work == read_work && reads > 0) --reads;
  return completion.status;
}

std::string Link::describe() const {
  return text(pair.rail().describe(), gid ? text(" (", verbs::describe(gid->gid), ")") : "");
}

}  // namespace dicomm::verbs
