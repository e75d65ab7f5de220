// Reductions on the chips of one vendor in one host: each chip reads what the others hold and adds
// it up. No host copies any of it; the hosts tell each other how far their chips are.
#pragma once

#include <c10/core/StreamGuard.h>

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "chip_memory.h"
#include "collective/exchange.h"
#include "elements.h"
#include "membership.h"
#include "staging.h"
#include "work.h"

namespace dicomm {

// Shorter ones take less time through the hosts, which the chips wait for each other through
// anyhow: on an H200 a reduction by chips takes 0.7 ms from 64 KiB to 1 MiB, and a message through
// the host 0.05 to 0.17 ms.
constexpr std::size_t kFewestBytesOnChips = 1 << 20;

// How far chips reach what their peers give, of several the least.
enum class Reach : std::uint64_t {
  never,    // memory cannot be shared, which does not change
  not_now,  // the tensors are the host's, or overlap; a link is paced; the chip's memory is full
  all
};

// One rank's side. All work of its chip goes to the communication stream, which is the calling
// thread's current one meanwhile.
class ChipReduction {
 public:
  // sources: what this rank gives; every rank gives as many, of the same lengths. targets: where
  // results go that do not replace what is given. All of it must be there.
  ChipReduction(Membership& membership, const Call& call, const std::vector<Staged>& sources,
                const std::vector<Staged>& targets);

  // The same answer on every rank. Unless it is `all`, nothing has been done. reads: which sources
  // of its peers this rank's chip reads.
  Reach begin(const std::vector<std::size_t>& reads);

  int rank() const { return exchange_.rank(); }
  int size() const { return exchange_.size(); }
  // A stretch of a source, as this rank has it, to be reduced to `into` or to what fetch() brings.
  struct Part {
    std::size_t source;
    std::size_t begin_bytes;
    std::size_t bytes;
  };
  Part whole(std::size_t source) const { return {source, 0, sources_[source].nbytes()}; }
  // The rank's share of a source: whole numbers, as even as that allows.
  Part share(std::size_t source, int rank, const Reduction& how) const;

  // Has the chip reduce what the ranks' sources hold there, in the order of the ranks. The result
  // may replace this rank's own: no other rank may read that part.
  void reduce(const Part& part, const Reduction& how, void* into);
  void reduce_in_place(const Part& part, const Reduction& how) { reduce(part, how, own(part)); }
  // Has the chip copy a part of a peer's source over this rank's own.
  void fetch(const Part& part, int peer);
  // Waits until every rank's chip has done what it was told so far.
  void finish_step();

 private:
  // What a rank says of one of its sources.
  struct Card {
    MemoryHandle handle;
    std::uint64_t bytes = 0;
    Reach reach = Reach::not_now;
  };

  Card card_of(const at::Tensor& source) const;
  template <class T>
  std::vector<T> from_all(const std::vector<T>& mine);
  const Card& card(int rank, std::size_t source) const {
    return cards_[rank * sources_.size() + source];
  }
  bool is_paced() const;
  bool take_scratch();
  void check_lengths() const;
  Reach import(const std::vector<std::size_t>& reads) const;
  void* own(const Part& part) const;
  void copy_from(int rank, const Part& part, void* to) const;
  void reduce_piece(const Part& piece, const Reduction& how, void* into);

  Membership& membership_;
  Exchange exchange_;
  const std::chrono::steady_clock::time_point deadline_;
  std::vector<at::Tensor> sources_;
  const std::size_t piece_bytes_;
  const c10::Device device_;
  const ChipMemory* const memory_;  // null: see Reach::not_now
  std::optional<c10::StreamGuard> guard_;
  at::Tensor scratch_;       // bytes
  std::vector<Card> cards_;  // by rank and source
};

// Whether the chips of a group may reach each other's memory. Turns false on every rank with the
// same reduction, which finds that they never do. Null: there is nothing to find.
using MayReach = std::shared_ptr<std::atomic<bool>>;

// What a collective does for a reduction: `on_chips` where the ranks' chips reach each other, else
// `on_host`, whose tensors are the host's then.
struct OnChips {
  std::vector<std::size_t> reads;  // see ChipReduction::begin()
  std::function<void(ChipReduction&)> run;
};
using OnHost = std::function<std::int64_t(const std::vector<Staged>& sources,
                                          const std::vector<Staged>& targets, Group&, const Call&)>;
CollectiveWork::Operation reduction(Membership& membership, std::vector<Staged> sources,
                                    std::vector<Staged> targets, MayReach may_reach,
                                    OnChips on_chips, OnHost on_host);

}  // namespace dicomm
