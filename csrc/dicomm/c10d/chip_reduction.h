// Reductions on the chips of one vendor in one host: each chip reads what the others hold and adds
// it up. No host copies any of it; the hosts tell each other how far their chips are.
#pragma once

#include <c10/core/StreamGuard.h>

#include <functional>
#include <vector>

#include "chip_memory.h"
#include "collective/exchange.h"
#include "elements.h"
#include "staging.h"
#include "work.h"

namespace dicomm {

// Shorter ones are hardly worth it: the chips have to wait for each other, through their hosts.
constexpr std::size_t kFewestBytesOnChips = 64 << 10;

// One rank's side. All work of its chip goes to the communication stream, which is the calling
// thread's current one meanwhile.
class ChipReduction {
 public:
  // sources: what this rank gives; every rank gives as many, of the same lengths. targets: where
  // results go that do not replace what is given. All of it must be there.
  ChipReduction(Group& group, const Call& call, const std::vector<Staged>& sources,
                const std::vector<Staged>& targets);

  // Whether every chip reaches what all ranks give: the same answer on every rank. If not, nothing
  // has been done.
  bool can_begin();

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
    std::uint64_t is_shared = 0;
  };

  Card card_of(const at::Tensor& source) const;
  template <class T>
  std::vector<T> from_all(const std::vector<T>& mine);
  const Card& card(int rank, std::size_t source) const {
    return cards_[rank * sources_.size() + source];
  }
  void check_lengths() const;
  bool import_all() const;
  void* own(const Part& part) const;
  void copy_from(int rank, const Part& part, void* to) const;
  void reduce_piece(const Part& piece, const Reduction& how, void* into);

  Group& group_;
  Exchange exchange_;
  const std::chrono::steady_clock::time_point deadline_;
  std::vector<at::Tensor> sources_;
  const std::size_t piece_bytes_;
  const c10::Device device_;
  const ChipMemory* const memory_;  // null: the tensors are the host's, or overlap
  std::optional<c10::StreamGuard> guard_;
  at::Tensor scratch_;       // bytes
  std::vector<Card> cards_;  // by rank and source
};

// What a collective does for a reduction: `on_chips` where the ranks' chips may reach each other
// and do, else `on_host`, whose tensors are the host's then.
using OnChips = std::function<void(ChipReduction&)>;
using OnHost = std::function<std::int64_t(const std::vector<Staged>& sources,
                                          const std::vector<Staged>& targets, Group&, const Call&)>;
CollectiveWork::Operation reduction(std::vector<Staged> sources, std::vector<Staged> targets,
                                    bool may_reach, OnChips on_chips, OnHost on_host);

}  // namespace dicomm
