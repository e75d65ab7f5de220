// The Stream over RC queue pairs. wire.h says what travels.
//
//   stream.cpp    bytes out and in, and sleeping
//   reading.cpp   long messages: RDMA READs over all rails
//   failover.cpp  rails that fail, and the socket
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>

#include "core/fd.h"
#include "core/stream.h"
#include "transport/verbs/link.h"
#include "transport/verbs/slot_pool.h"

namespace dicomm::verbs {

class VerbsStream final : public Stream {
 public:
  using Links = std::vector<std::unique_ptr<Link>>;  // null: not a rail of both sides

  VerbsStream(std::shared_ptr<Rails> rails, Links links, Fd socket, const Card& theirs,
              bool dialler);
  ~VerbsStream() override;

  std::size_t write(const iovec* parts, int count) override;
  std::size_t read(void* data, std::size_t bytes) override;
  std::size_t eager_bytes() const override { return 16 << 10; }

  bool can_pull(const Pull& pull) override;
  std::size_t concurrent_pulls() const override { return kMaxPulls; }
  MemoryKeys expose(std::uint64_t id, const void* data, std::size_t bytes) override;
  void conceal(std::uint64_t id) override { exposed_.erase(id); }
  bool take_back(std::uint64_t id) override { return on_socket_ || !exposed_.contains(id); }
  Pulled pull(Pull& pull, bool with_sender) override;
  bool pulls_in_background() const override;
  bool abandon(Pull& pull) override;
  void withdraw() override;

  int fd() const override { return epoll_.get(); }
  void on_event() override;
  bool cheap_to_poll() const override { return true; }
  bool prepare_sleep(bool want_to_write) override;
  void finish_writing() override;
  LinkDescription describe() const override;

 private:
  static constexpr std::size_t kMaxPulls = 64;
  static constexpr int kNone = -1;

  struct Arrived {    // a slot that was not read to its end
    int rail;         // kNone: it came over the socket
    Received buffer;  // null then
    const std::byte* data;
    std::size_t bytes;
    std::unique_ptr<std::byte[]> owned;
  };
  struct Chunk {
    std::uint64_t offset;
    std::uint32_t bytes;
  };
  struct Reading {
    Pull pull;
    std::shared_ptr<Registration> into;
    std::uint64_t step_bytes;
    std::deque<Chunk> to_do;
    std::uint32_t under_way = 0;
    std::set<int> rails;  // that read some of it
    bool given_up = false;

    void begin();
  };
  struct Read {  // one RDMA READ under way
    std::uint64_t id;
    Chunk chunk;
    int rail;
  };

  // stream.cpp
  void progress();
  void poll_rail(int rail);
  void failed(int rail, const ibv::Completion& first, std::span<const ibv::Completion> others);
  void completed(int rail, const ibv::Completion& completion);
  void arrive(int rail, Received buffer, const std::byte* slot, std::size_t bytes,
              std::unique_ptr<std::byte[]> owned = nullptr);
  void heard(int rail, const SlotHeader& header);
  bool can_write() const;
  void post_slots(std::uint32_t first, std::uint32_t count);
  void send_empty(int rail, bool signaled = false);
  SlotHeader header(std::uint32_t sequence);
  Slot take_slot();
  void release_slots();
  void choose_rail();
  void finish();

  // reading.cpp
  bool reaches(const Pull& pull, const Registration& into, std::size_t rail) const;
  int rail_for(const Reading& reading) const;
  bool start_read(std::uint64_t id, Reading& reading, int rail);
  void read_done(std::uint64_t slot);
  bool flush(Reading& reading);
  void await_reads(int rail);
  void reissue_reads(int rail);

  // failover.cpp
  void fail(int rail, const std::string& reason);
  void close_rails();
  void give_up_rails();
  void all_failed();
  void send_again();
  void send_on_socket(SocketMessage::Kind kind, const void* data, std::size_t bytes);
  void flush_socket();
  void read_socket();
  void socket_ended(int error);
  void socket_messages();
  void socket_message(const SocketMessage& message, const std::byte* data);

  const std::shared_ptr<Rails> rails_;
  Links links_;
  Fd socket_;
  Fd epoll_;
  const std::uint32_t window_;      // slots
  const std::uint32_t slot_bytes_;  // at most, with the header

  // Out: slots in (consumed_by_peer_, next_) are kept, those in (released_, next_) are in slots_.
  int rail_ = kNone;  // which carries our slots
  std::uint32_t next_ = 1;
  std::uint32_t consumed_by_peer_ = 0;
  std::uint32_t released_ = 0;
  Slot slots_[kSlots] = {};  // by number, modulo
  std::uint32_t slot_lengths_[kSlots] = {};
  Slot empties_;  // headers, where a device does not take them along with the request
  std::uint32_t empties_sent_ = 0;
  std::uint8_t rails_up_there_ = 0xff;
  bool announce_ = false;  // an empty slot is due: a rail failed, or a double came
  bool finishing_ = false, last_sent_ = false, shut_ = false;

  // In.
  std::deque<Arrived> arrived_;
  std::uint32_t expected_ = 1;
  std::uint32_t consumed_ = 0, consumed_told_ = 0;
  int rail_in_ = 0;

  // Memory.
  std::unordered_map<std::uint64_t, std::shared_ptr<Registration>> exposed_;  // by offer
  std::map<std::uint64_t, Reading> readings_;  // the oldest offer first
  std::unordered_map<std::uint64_t, Read> reads_;
  std::uint64_t next_read_ = 0;

  // The end of rails, of the socket, of all.
  std::string failures_;
  bool on_socket_ = false;
  bool socket_speaks_ = false;  // slots come over it
  std::string socket_out_, socket_in_;
  std::optional<StreamEnd> peer_gone_;  // as the socket told
  std::optional<StreamEnd> end_;
};

}  // namespace dicomm::verbs
