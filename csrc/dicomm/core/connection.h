// The protocol with one peer, over its Stream: frames out, frames in. See frame.h.
#pragma once

#include <chrono>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/frame.h"
#include "core/handshake.h"
#include "core/matching.h"
#include "core/request.h"
#include "core/stream.h"

namespace dicomm {

class Connection {
 public:
  Connection(PeerIdentity peer, std::unique_ptr<Stream> stream, Ledger& ledger, Matcher& matcher);

  const PeerIdentity& peer() const { return peer_; }
  Stream& stream() const { return *stream_; }

  // Writes a short message if nothing is queued ahead of it. False: something is, or there is no
  // room.
  bool send_at_once(const RequestState& request);
  // Queues; flush() writes.
  void send_message(RequestState& request);
  void send_join(std::uint32_t context);
  void send_abort(std::uint32_t context, const std::string& reason);
  void send_leave(std::uint32_t context);
  void send_goodbye();
  // A receive was posted for a message that had arrived before.
  void receive_arrival(RequestState& request, const std::shared_ptr<Arrival>& arrival);
  // Nobody will ever want that message.
  void turn_down(const Arrival& arrival);

  // These throw StreamEnd. flush(): everything went out. receive(): something came in. copy():
  // a piece of a long message was moved, either way.
  bool flush();
  bool receive();
  bool copy(bool both_sides);
  bool has_output() const { return writing_ || !frames_.empty() || !streaming_.empty(); }
  // Whether copy() must be called for them to go on.
  bool has_pulls() const { return pulling() && !stream_->pulls_in_background(); }
  bool pulling() const { return !pulls_.empty(); }
  // Whether copy() may have something to do.
  bool copying() const { return pulling() || !offers_.empty() || !chip_copies_.empty(); }
  // Whether a look at it would surely find nothing to do.
  bool idle() const {
    return !header_read_ && !copying() && !has_output() && stream_->has_nothing();
  }
  // Whether it said something that communicators have to hear of.
  bool has_words() const { return !words_.empty() || has_left_; }
  bool copies_by_chip() const { return !chip_copies_.empty(); }
  // Since when the chip copies something; nothing but copy() learns that it is through.
  std::optional<std::chrono::steady_clock::time_point> chip_copies_since() const;
  bool has_chip_copies(std::uint32_t context) const;

  // Lets go of a request's buffer. False: it is still being read or written, finish() will tell.
  bool release(RequestState& request);
  // Lets go of every buffer, as all requests fail.
  void release_all();

  // The stream is over: closes it. Messages that arrived whole can still be received.
  void end();
  bool ended() const { return !stream_; }

  // What the peer said of a communicator: that it joins, aborts or leaves.
  struct Word {
    FrameKind kind;
    std::uint32_t context;
    std::string reason;  // of an abort
  };
  // Since this was asked.
  std::vector<Word> take_words() { return std::exchange(words_, {}); }
  // Whether the peer counts on this side in a communicator.
  bool is_joined(std::uint32_t context) const {
    const auto found = joined_.find(context);
    return found != joined_.end() && found->second;
  }
  // Whether it said goodbye.
  bool has_left() const { return has_left_; }

  // The connection manager's notes.
  bool watching_writable = false;
  int idle_sleeps = 0;  // of this side, since something happened to it
  bool resting = false;

 private:
  struct Outgoing {
    FrameHeader header;
    const std::byte* payload = nullptr;
    std::size_t payload_bytes = 0;
    RequestState* request = nullptr;
    std::unique_ptr<std::byte[]> owned;
  };
  struct Incoming {         // a long message that the peer streams into a posted buffer
    RequestState* request;  // null: nobody wants it any more
    std::uint64_t bytes;
    std::uint64_t moved = 0;
  };
  struct Pulling {
    enum class Given { no, up, back };  // up: by the receiver; back: to the sender, who asked

    RequestState* request;
    Pull pull;
    Given given = Given::no;
  };
  struct ChipCopying {
    // A sender's, to the host, to be streamed then. Null: a receiver's, of what the peer holds; it
    // is delivered, as its receiver waits as its chip's streams do.
    RequestState* to_stream;
    std::uint32_t id;  // the offer's, and the next
    std::uint32_t context;
    std::shared_ptr<ChipWork> copy;
    std::chrono::steady_clock::time_point begun;
  };

  void queue(FrameHeader header, const std::string& payload = {});
  Outgoing& new_frame();
  void enqueue(Outgoing& frame);
  void start_writing();
  bool next_frame();
  void frame_written();
  void streams_on(RequestState* request);  // whose message has not ended
  static void own_payload(Outgoing& frame, const void* payload, std::size_t bytes);
  void own_current_payload();

  bool read_header(bool& progressed);
  void begin_frame();
  bool read_payload();
  void end_frame();
  void begin_eager();
  void end_eager();
  void end_offer();
  void receive_offer(RequestState& request, const Arrival& offer);
  bool pull_by_chip(RequestState& request, const Arrival& offer);
  bool end_chip_copies();
  void accept(RequestState& request, std::uint32_t id, std::uint64_t bytes);
  void stream_accepted(std::uint32_t id);
  bool go_on(Pulling& pulling, bool both_sides, bool& moved);
  RequestState* offer_ended(std::uint32_t id);
  std::uint32_t free_id();
  void said(FrameKind kind);
  bool ended(Pulling& pulling);
  bool fits(RequestState& request, std::uint64_t bytes);
  void deliver(RequestState& request, std::uint64_t bytes, std::int64_t delivered_at_ns);
  void consumed(std::size_t bytes);
  void dropped(std::size_t bytes);
  void taken_back(std::uint32_t id);

  PeerIdentity peer_;
  std::unique_ptr<Stream> stream_;
  Ledger& ledger_;
  Matcher& matcher_;

  // Out.
  std::deque<Outgoing> frames_;
  std::deque<RequestState*> streaming_;                      // accepted by the peer
  std::unordered_map<std::uint32_t, RequestState*> offers_;  // null: taken back, yet to be answered
  Outgoing current_;
  bool writing_ = false;
  std::size_t written_ = 0;  // of current_, header included
  std::uint32_t last_id_ = 0;
  std::size_t eager_outstanding_ = 0;
  bool said_goodbye_ = false;  // nothing is queued any more

  // In.
  FrameHeader header_;
  std::size_t header_got_ = 0;
  bool header_read_ = false;
  std::byte* sink_ = nullptr;  // null: discard
  std::size_t payload_left_ = 0;
  RequestState* sink_request_ = nullptr;
  std::shared_ptr<Arrival> sink_arrival_;
  std::string sink_text_;
  MemoryKeys sink_keys_{};
  MemoryHandle sink_handle_;
  std::unordered_map<std::uint32_t, Incoming> accepted_;
  std::list<Pulling> pulls_;
  std::list<ChipCopying> chip_copies_;
  std::size_t consumed_ = 0;  // eager bytes of which the peer is to be told
  bool credit_queued_ = false;
  std::size_t held_ = 0;     // eager bytes that nobody has received yet
  std::size_t offered_ = 0;  // offers whose answer has not been written yet
  std::vector<Word> words_;
  std::unordered_map<std::uint32_t, bool> joined_;  // false: and left, or aborted
  bool has_left_ = false;
};

}  // namespace dicomm
