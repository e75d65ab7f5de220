#include "memory_walk.h"

#include <algorithm>
#include <deque>
#include <utility>

namespace planner {

namespace {

constexpr std::int64_t kAbsent = -1;

bool needs_parameters(int kind) {
  return kind == kForward || kind == kRecompute || kind == kBackward || kind == kBackwardInput;
}

bool begins_backward(int kind) { return needs_parameters(kind) && kind != kForward; }

class Sizes {  // by name, and their sum
 public:
  explicit Sizes(std::size_t names) : sizes_(names, kAbsent) {}

  bool has(int name) const { return sizes_[name] != kAbsent; }
  std::int64_t of(int name) const { return std::max<std::int64_t>(0, sizes_[name]); }
  std::int64_t total() const { return total_; }

  void put(int name, std::int64_t size) {
    total_ += size - of(name);
    sizes_[name] = size;
  }

  void take(int name) {
    total_ -= of(name);
    sizes_[name] = kAbsent;
  }

 private:
  std::vector<std::int64_t> sizes_;
  std::int64_t total_ = 0;
};

class Walk {
 public:
  Walk(const WalkedStage& stage, const std::vector<Coded>& table)
      : stage_(stage),
        table_(table),
        count_(static_cast<int>(stage.ministages.size())),
        micro_batches_(1 + most_micro_batch(table)),
        gradients_(kGradientNames * count_),
        kept_(kKeptNames * count_ * micro_batches_),
        boundary_((kBoundaryNames * micro_batches_ + kKinds) * count_),
        between_slices_(kBetweenNames * count_ * micro_batches_),
        previous_(count_, -1),
        ahead_(kKinds * count_, 0),
        coming_(kKinds * count_),
        came_(kKinds * count_, 0),
        outboxes_(kKinds * count_),
        away_(count_ * micro_batches_, kAbsent),
        on_host_(count_ * micro_batches_, 0) {
    for (auto [kind, i, k] : table) coming_[kind * count_ + k].push_back(i);
    for (auto [kind, k, count] : stage.ahead) ahead_[kind * count_ + k] = count;
    for (int k = 0; k < count_; ++k) {
      const MinistageBytes& own = of(k);
      parameters_ += own.flat;
      if (stage.following[k] >= 0) previous_[stage.following[k]] = k;
      if (stage.zero_stage < 2) gradients_.put(gradient(kWhole, k), own.gradient);
    }
    if (stage.offload) {
      if (count_ > 2) host_bytes_ = walked_.host = parameters_;  // a copy of each, in its turn
      plan_residence();
      auto first = std::find_if(table.begin(), table.end(), [](const Coded& each) {
        return needs_parameters(std::get<0>(each));
      });
      hold(first == table.end() ? 0 : std::get<2>(*first), resident_[0]);
    }
  }

  WalkedBytes run() {
    walked_.before = total();
    for (auto [kind, k, count] : stage_.ahead) post(kind, k);
    for (std::size_t n = 0; n < table_.size(); ++n) {
      auto [kind, i, k] = table_[n];
      during_ = 0;
      if (stage_.offload) bring(kind, i, k, resident_[n]);
      act(kind, i, k);
      note();
      walked_.during.push_back(during_);
      walked_.after.push_back(total());
    }
    return std::move(walked_);
  }

 private:
  enum GradientName { kWhole, kReduced, kExchanged, kToSelf, kGradientNames };
  enum KeptName { kItem, kPutOff, kKeptNames };
  enum BetweenName { kValues, kOfValues, kBetweenNames };
  enum BoundaryName { kInput, kOutput, kGradient, kSentActivation, kSentGradient, kBoundaryNames };
  static constexpr int kKinds = kStep + 1;

  static int most_micro_batch(const std::vector<Coded>& table) {
    int most = 0;
    for (const Coded& action : table) most = std::max(most, action[1]);
    return most;
  }

  int gradient(GradientName name, int k) const { return name * count_ + k; }
  int item(int k, int i) const { return k * micro_batches_ + i; }
  int kept(KeptName name, int k, int i) const {
    return name * count_ * micro_batches_ + item(k, i);
  }
  int boundary(BoundaryName name, int k, int i) const {
    return name * count_ * micro_batches_ + item(k, i);
  }
  int posted(int kind, int k) const {
    return kBoundaryNames * count_ * micro_batches_ + kind * count_ + k;
  }

  int between(BetweenName name, int k, int i) const {
    return name * count_ * micro_batches_ + item(k, i / slices());
  }

  int slices() const { return static_cast<int>(stage_.ministages[0].size()); }
  // Returns a ministage's bytes at a micro-batch; without one, for what is alike at all.
  const MinistageBytes& of(int k, int i = 0) const {
    return stage_.ministages[k][i % stage_.ministages[k].size()];
  }

  std::int64_t kept_total() const { return kept_.total() + between_slices_.total(); }
  std::int64_t total() const {
    return stage_.fixed_bytes + parameters_ + gradients_.total() + kept_total() + boundary_.total();
  }

  // Takes the bytes held at this moment into the peaks. `working` contains the kept and boundary
  // tensors that it uses; `own` and `taken` are their bytes, which would be counted twice
  // otherwise. `recomputed` is a part of `working`.
  void note(std::int64_t working = 0, std::int64_t own = 0, std::int64_t taken = 0,
            std::int64_t recomputed = 0) {
    std::int64_t now = total() + working - own - taken;
    during_ = std::max(during_, now);
    if (now > most_bytes_) {
      most_bytes_ = now;
      walked_.most = {parameters_, gradients_.total(), kept_total() - own,
                      working,     recomputed,         boundary_.total() - taken};
    }
  }

  void act(int kind, int i, int k) {
    const MinistageBytes& own = of(k, i);
    switch (kind) {
      case kReceiveActivation:
        receive(kind, k);
        boundary_.put(boundary(kInput, k, i), own.input / stage_.gathers);
        break;
      case kReceiveGradient:
        receive(kind, k);
        boundary_.put(boundary(kGradient, k, i), own.output / stage_.gathers);
        break;
      case kGatherActivation:
        gather(boundary(kInput, k, i), own.input);
        break;
      case kGatherGradient:
        gather(boundary(kGradient, k, i), own.output);
        break;
      case kForward:
        forward(k, i);
        break;
      case kRecompute:
        note(own.forward_peak, kept_.of(kept(kItem, k, i)), 0, own.kept - own.input);
        kept_.put(kept(kItem, k, i), own.kept);
        break;
      case kBackward:
      case kBackwardInput:
        backward(k, i);
        break;
      case kBackwardWeight:
        note(own.backward_weight_peak, kept_.of(kept(kPutOff, k, i)));
        kept_.take(kept(kPutOff, k, i));
        break;
      case kSendActivation:  // the output, unless it is a part of what its forward keeps
        send(kind, k, boundary(kSentActivation, k, i), boundary(kOutput, k, i));
        break;
      case kSendGradient:
        send(kind, k, boundary(kSentGradient, k, i), boundary(kGradient, k, i));
        break;
      case kReduce:
        reduce(k);
        break;
      case kStep:
        step();
        break;
    }
  }

  // what comes and goes between stages

  void post(int kind, int k) {
    int at = kind * count_ + k;
    std::size_t last = std::min(came_[at] + ahead_[at], coming_[at].size());
    std::int64_t size = 0;
    for (std::size_t n = came_[at]; n < last; ++n) {
      const MinistageBytes& own = of(k, coming_[at][n]);
      size += kind == kReceiveActivation ? own.input : own.output;
    }
    boundary_.put(posted(kind, k), size / stage_.gathers);
  }

  // Posts the next receive: the executor does so before it waits for this one.
  void receive(int kind, int k) {
    ++came_[kind * count_ + k];
    post(kind, k);
  }

  void gather(int name, std::int64_t size) {
    if (stage_.gathers > 1) note(size);
    boundary_.put(name, size);
  }

  void send(int kind, int k, int name, int source) {
    std::int64_t size = boundary_.of(source);
    boundary_.take(source);
    std::deque<int>& under_way = outboxes_[kind * count_ + k];
    if (static_cast<int>(under_way.size()) == stage_.under_way) arrive(under_way);
    boundary_.put(name, size);
    under_way.push_back(name);
    if (!stage_.overlap) {
      note();
      arrive(under_way);
    }
  }

  void arrive(std::deque<int>& under_way) {
    boundary_.take(under_way.front());
    under_way.pop_front();
  }

  // what computes

  void forward(int k, int i) {
    const MinistageBytes& own = of(k, i);
    int input = boundary(kInput, k, i);
    between_slices_.put(between(kValues, k, i), own.between_slices);
    std::int64_t shared = shared_input(k);
    note(own.forward_peak - shared, 0, boundary_.of(input));
    boundary_.take(input);
    std::int64_t kept_bytes = stage_.keeps ? own.kept - shared : own.input;
    if (stage_.offload && stage_.keeps) kept_bytes -= own.output;
    if (stage_.offload && item(k, i) != backwards_[begun_])
      send_away(item(k, i), kept_bytes);
    else
      kept_.put(kept(kItem, k, i), kept_bytes);
    std::int64_t apart = stage_.offload || !stage_.keeps ? own.output : 0;
    int next = stage_.following[k];
    boundary_.put(next >= 0 ? boundary(kInput, next, i) : boundary(kOutput, k, i), apart);
  }

  // Returns the bytes of a ministage's input that are counted already, because the ministage of
  // this rank that hands it over keeps it.
  std::int64_t shared_input(int k) const {
    bool shared = previous_[k] >= 0 && stage_.keeps && !stage_.offload;
    return shared ? of(k).input : 0;
  }

  void backward(int k, int i) {
    const MinistageBytes& own = of(k, i);
    between_slices_.put(between(kOfValues, k, i), own.between_slices);
    if (!gradients_.has(gradient(kWhole, k))) {
      // with ZeRO-2 only two ministages' whole gradients stand at once, one at work and one being
      // reduced
      while (unsummed_.size() > 1) sum_next();
      gradients_.put(gradient(kWhole, k), own.gradient);
    }
    std::int64_t peak = own.backward_input_peak - shared_input(k);
    if (stage_.offload && stage_.keeps && stage_.following[k] < 0) peak -= own.output;
    int came = boundary(kGradient, k, i), left = boundary(kOutput, k, i);
    std::int64_t recomputed = stage_.keeps ? 0 : own.kept - own.input;
    int name = kept(kItem, k, i);
    note(peak, kept_.of(name), boundary_.of(came) + boundary_.of(left), recomputed);
    kept_.take(name);
    boundary_.take(came);
    boundary_.take(left);
    int sent = boundary(kSentActivation, k, i);
    if (boundary_.has(sent)) boundary_.put(sent, own.output);  // no longer a part of what is kept
    int before = previous_[k];
    boundary_.put(boundary(kGradient, before >= 0 ? before : k, i), own.input);
    if (before >= 0 && stage_.offload && stage_.keeps)  // it came back with what is kept here
      boundary_.put(boundary(kOutput, before, i), own.input);
    if (!coming_[kBackwardWeight * count_ + k].empty()) kept_.put(kept(kPutOff, k, i), own.put_off);
    if (i % slices() == 0) {  // the last of its micro-batch whose backward runs
      between_slices_.take(between(kValues, k, i));
      between_slices_.take(between(kOfValues, k, i));
    }
  }

  // gradients and the update

  bool cut() const { return stage_.dp > 1 && stage_.zero_stage > 0; }  // over the replicas

  void reduce(int k) {
    const MinistageBytes& own = of(k);
    if (cut() && !stage_.in_place_update) gradients_.put(gradient(kReduced, k), own.reduced);
    note(own.parts);
    unsummed_.push_back(k);
    if (stage_.dp == 1 || stage_.zero_stage < 2) sum_next();
  }

  void sum_next() {
    int k = unsummed_.front();
    unsummed_.pop_front();
    if (cut() && stage_.zero_stage == 2) {
      gradients_.take(gradient(kWhole, k));
      gradients_.put(gradient(kWhole, k), of(k).staying);
    }
    gradients_.put(gradient(kExchanged, k), of(k).exchanged);
    gradients_.put(gradient(kToSelf, k), of(k).to_self);
    note();
  }

  void step() {
    note();
    while (!unsummed_.empty()) sum_next();
    for (int k = 0; k < count_; ++k) {
      gradients_.take(gradient(kExchanged, k));
      gradients_.take(gradient(kToSelf, k));
    }
    for (int k = 0; k < count_; ++k) {
      if (stage_.offload) hold(k, on_chip_.first != k ? on_chip_.first : on_chip_.second);
      note(of(k).update_peak);
    }
    for (int k = 0; k < count_; ++k) {
      gradients_.take(gradient(kReduced, k));
      if (stage_.zero_stage == 2) gradients_.take(gradient(kWhole, k));
    }
    for (std::deque<int>& under_way : outboxes_)
      for (int name : under_way) boundary_.take(name);
  }

  // what comes from the host

  // Notes for each action the next ministage to work after the one at work, whose parameters can
  // be fetched meanwhile (the table begins anew after its end), and in which order backwards begin.
  void plan_residence() {
    resident_.assign(table_.size(), 0);
    int other = 0, current = 0;
    for (int turn = 0; turn < 2; ++turn) {
      for (std::size_t n = table_.size(); n-- > 0;) {
        auto [kind, i, k] = table_[n];
        if (needs_parameters(kind) && k != current) {
          other = current;
          current = k;
        }
        resident_[n] = other;
      }
    }
    std::vector<bool> begun(count_ * micro_batches_, false);
    for (auto [kind, i, k] : table_) {
      if (!begins_backward(kind) || begun[item(k, i)]) continue;
      begun[item(k, i)] = true;
      backwards_.push_back(item(k, i));
    }
    backwards_.push_back(kNobody);
  }

  void bring(int kind, int i, int k, int other) {
    if (needs_parameters(kind)) hold(k, other);
    if (!begins_backward(kind) || item(k, i) != backwards_[begun_]) return;
    host_bytes_ -= std::exchange(on_host_[item(k, i)], 0);
    ++begun_;
    for (int one : {backwards_[begun_ - 1], backwards_[begun_]}) {
      if (one == kNobody || away_[one] == kAbsent) continue;
      kept_.put(one, away_[one]);
      away_[one] = kAbsent;
    }
  }

  // The host's copy stays until the backward begins, though what it is of comes back before.
  void send_away(int item, std::int64_t bytes) {
    away_[item] = on_host_[item] = bytes;
    host_bytes_ += bytes;
    walked_.host = std::max(walked_.host, host_bytes_);
  }

  void hold(int one, int other) {
    on_chip_ = std::minmax(one, other);
    parameters_ = of(one).flat;
    if (other != one) parameters_ += of(other).flat;
  }

  static constexpr int kNobody = -1;

  const WalkedStage& stage_;
  const std::vector<Coded>& table_;
  int count_, micro_batches_;  // ministages; micro-batches of this stage
  Sizes gradients_, kept_, boundary_;
  Sizes between_slices_;                  // of whole micro-batches
  std::vector<int> previous_;             // by ministage: that which hands it its input, or -1
  std::vector<int> ahead_;                // by kind and ministage
  std::vector<std::vector<int>> coming_;  // the same: the micro-batches of its actions
  std::vector<std::size_t> came_;         // the same: how many of these receives have run
  std::vector<std::deque<int>> outboxes_;
  std::deque<int> unsummed_;  // ministages
  std::int64_t parameters_ = 0, during_ = 0, most_bytes_ = 0;
  std::vector<std::int64_t> away_;     // by item: activations that wait on the host
  std::vector<std::int64_t> on_host_;  // the same, and those that have come back
  std::int64_t host_bytes_ = 0;
  std::vector<int> resident_;   // by action
  std::vector<int> backwards_;  // items, in the order in which their backwards begin
  std::size_t begun_ = 0;       // of them
  std::pair<int, int> on_chip_{0, 0};
  WalkedBytes walked_;
};

}  // namespace

WalkedBytes walk_memory(const WalkedStage& stage, const std::vector<Coded>& table) {
  return Walk(stage, table).run();
}

}  // namespace planner
