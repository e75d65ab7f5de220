// The Stream over shared memory.
//
//   segment.cpp      the memory itself
//   stream.cpp       bytes through the ring, and sleeping
//   copying.cpp      long messages, from the sender's memory
#pragma once

#include "core/fd.h"
#include "core/stream.h"
#include "transport/shm/joint_copy.h"
#include "transport/shm/lane.h"
#include "transport/shm/peer_memory.h"
#include "transport/shm/sizes.h"

namespace dicomm {

// Consecutive bytes of several parts.
class Gather;

class ShmStream final : public Stream {
 public:
  ShmStream(Fd socket, Lane* lanes, bool owner);
  ~ShmStream() override;

  std::size_t write(const iovec* parts, int count) override;
  std::size_t read(void* data, std::size_t bytes) override;
  bool write_at_once(const void* header, std::size_t header_bytes, const void* payload,
                     std::size_t payload_bytes) override;
  std::size_t eager_bytes() const override {
    const bool readable = out_.finding.load(std::memory_order_relaxed) == Lane::readable;
    return readable && !crowded_ ? shm::kEagerBytes : shm::kEagerByRingBytes;
  }
  void become_crowded() override { crowded_ = true; }

  bool can_pull(const Pull& pull) override;
  MemoryKeys expose(std::uint64_t id, const void* data, std::size_t bytes) override;
  void conceal(std::uint64_t id) override;
  bool take_back(std::uint64_t id) override;
  Pulled pull(Pull& pull, bool with_sender) override;
  bool push() override;
  bool pulls_in_background() const override { return receiving_.only_sender_at_work(); }
  bool abandon(Pull& pull) override;
  void withdraw() override;

  int fd() const override { return socket_.get(); }
  bool cheap_to_poll() const override { return true; }
  bool has_nothing() const override { return piece_left_ == 0 && !ended_ && !piece_waits(); }
  bool outlives_writer() const override { return true; }
  bool is_within_host() const override { return true; }
  LinkDescription describe() const override;

  void on_event() override;
  bool prepare_sleep(bool want_to_write) override;
  void woke() override;
  bool peer_shares_core(int core) override;
  void finish_writing() override;

 private:
  // stream.cpp
  std::size_t room(std::size_t wanted);
  template <class Copy>
  void write_piece(std::size_t bytes, Copy&& copy_to);
  bool piece_waits() const;
  bool next_piece();
  void all_read();
  void piece_read();
  void publish_consumed();
  void ring_bell(std::atomic<std::uint32_t>& asleep);

  // copying.cpp
  void offer_probe();
  void probe();
  Pulled pull_alone(Pull& pull);
  Pulled pull_jointly(Pull& pull);
  bool copy(const Pull& pull, std::uint64_t offset, std::size_t bytes) const;
  bool is_taken_back(Pull& pull);
  bool hung_up() const;

  Fd socket_;
  int told_core_ = -1;
  Lane* lanes_;
  Lane& out_;
  Lane& in_;
  bool ended_ = false;
  bool crowded_ = false;

  std::uint64_t written_slots_ = 0, written_bytes_ = 0;
  std::uint64_t consumed_slots_seen_ = 0, consumed_bytes_seen_ = 0;

  const std::byte* piece_ = nullptr;
  std::size_t piece_left_ = 0;
  std::uint64_t read_slots_ = 0, read_bytes_ = 0, told_slots_ = 0, told_bytes_ = 0;

  PeerMemory peer_;
  PeerMemory::Probe probe_{};
  bool probed_ = false, reads_ = false, writes_ = false;
  JointSender sending_;
  JointSender::Buffers exposed_;  // those long enough
  JointReceiver receiving_;
  bool refused_ = false;     // part of what is received jointly could not be read
  std::uint64_t alone_ = 0;  // the offer of which the sender could not copy a part
};

}  // namespace dicomm
