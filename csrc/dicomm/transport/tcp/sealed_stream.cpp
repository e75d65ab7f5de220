#include "transport/tcp/sealed_stream.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "core/text.h"
#include "transport/tcp/security.h"

namespace dicomm {

namespace {

using Length = std::uint32_t;

constexpr std::size_t kBodyBytes = 256 << 10;
// A body is sealed and sent in pieces: they stay in a core's cache, and the peer opens one while
// the next is sealed.
constexpr std::size_t kPieceBytes = 64 << 10;
// A header has a record of its own before a payload as long as this: the peer then knows where the
// payload goes, and need not copy it once more.
constexpr std::size_t kLongBytes = 16 << 10;

Digest key_of(const SealedOptions& options, bool dialler_writes) {
  const std::string_view session(reinterpret_cast<const char*>(options.session.data()),
                                 options.session.size());
  return hmac_sha256(session, dialler_writes ? "the dialler writes" : "the acceptor writes");
}

// Some parts between two places, counted from the first byte of the first.
std::vector<iovec> between(const iovec* parts, int count, std::size_t from, std::size_t to) {
  std::vector<iovec> found;
  for (std::size_t at = 0; count > 0 && at < to; at += (parts++)->iov_len, --count) {
    const std::size_t begin = std::max(at, from), end = std::min(at + parts->iov_len, to);
    if (begin < end)
      found.push_back({static_cast<char*>(parts->iov_base) + begin - at, end - begin});
  }
  return found;
}

class SealedStream final : public Stream {
 public:
  SealedStream(std::unique_ptr<Stream> stream, const SealedOptions& options)
      : stream_(std::move(stream)),
        encrypted_(options.encrypted),
        cipher_(options.cipher),
        sealing_(cipher_, key_of(options, options.dialled), Aead::Use::seal),
        opening_(cipher_, key_of(options, !options.dialled), Aead::Use::open),
        incoming_(kBodyBytes) {
    if (encrypted_) sealed_.resize(kPieceBytes);
  }

  // What could not be written is written again by the next call, with the same bytes in front: a
  // record that is begun stays as it is meanwhile, and its bytes count once all of it has left.
  std::size_t write(const iovec* parts, int count) override {
    if (out_length_ == 0) {
      std::size_t bytes = 0;
      for (int i = 0; i < count; ++i) bytes += parts[i].iov_len;
      if (bytes == 0) return 0;
      const bool is_long = bytes > kLongBytes && parts[0].iov_len > 0;
      begin_record(std::min(is_long ? parts[0].iov_len : bytes, kBodyBytes));
    }
    while (out_sent_ < sizeof out_length_ + out_length_ + sizeof out_tag_) {
      const bool all_sent = out_sealed_ == 0 || out_sent_ == sizeof out_length_ + out_sealed_;
      if (all_sent && out_sealed_ < out_length_) seal_piece(parts, count);
      const std::vector<iovec> left = sealed_but_unsent(parts, count);
      const std::size_t sent = stream_->write(left.data(), static_cast<int>(left.size()));
      if (sent == 0) return 0;
      out_sent_ += sent;
    }
    return std::exchange(out_length_, 0);
  }

  // A body goes to where the caller wants it, if there is room for all of it, before it has proven
  // genuine; it counts only then. Until then the caller comes back with the same place, or does
  // not care any more what comes.
  std::size_t read(void* data, std::size_t bytes) override {
    if (bytes == 0) return 0;
    if (body_ == body_end_) {
      if (!receive_length()) return 0;
      if (got_ == 0) in_place_ = bytes >= in_length_;
      const bool in_place = in_place_ && bytes >= in_length_;
      if (!receive_body(in_place ? static_cast<std::byte*>(data) : incoming_.data())) return 0;
      if (in_place) return end_record();
      body_ = incoming_.data();
      body_end_ = body_ + end_record();
    }
    const std::size_t taken = std::min<std::size_t>(bytes, body_end_ - body_);
    std::memcpy(data, body_, taken);
    body_ += taken;
    return taken;
  }

  std::size_t eager_bytes() const override { return stream_->eager_bytes(); }
  LinkDescription describe() const override {
    LinkDescription description = stream_->describe();
    description.protection =
        text(encrypted_ ? "encryption" : "integrity", " by ", name_of(cipher_));
    return description;
  }
  int fd() const override { return stream_->fd(); }
  bool watch_writable() const override { return stream_->watch_writable(); }
  bool peer_shares_core(int core) override { return stream_->peer_shares_core(core); }
  bool prepare_sleep(bool want_to_write) override {
    return body_ == body_end_ && stream_->prepare_sleep(want_to_write);
  }
  void check_alive() override { stream_->check_alive(); }
  void finish_writing() override { stream_->finish_writing(); }

 private:
  void begin_record(std::size_t length) {
    out_length_ = static_cast<Length>(length);
    out_sealed_ = out_sent_ = 0;
    sealing_.begin();
    sealing_.cover(&out_length_, sizeof out_length_);
  }

  void seal_piece(const iovec* parts, int count) {
    const std::size_t end = std::min<std::size_t>(out_sealed_ + kPieceBytes, out_length_);
    std::size_t at = 0;
    for (const iovec& part : between(parts, count, out_sealed_, end)) {
      if (encrypted_)
        sealing_.convert(part.iov_base, part.iov_len, sealed_.data() + at);
      else
        sealing_.cover(part.iov_base, part.iov_len);
      at += part.iov_len;
    }
    out_piece_ = std::exchange(out_sealed_, end);
    if (end == out_length_) out_tag_ = sealing_.tag();
  }

  std::vector<iovec> sealed_but_unsent(const iovec* parts, int count) {
    std::vector<iovec> left;
    const std::size_t body_at = sizeof out_length_, tag_at = body_at + out_length_;
    const auto add = [&](std::size_t at, void* data, std::size_t bytes) {  // at: in the record
      const std::size_t gone = std::min(bytes, out_sent_ - std::min(out_sent_, at));
      if (gone < bytes) left.push_back({static_cast<char*>(data) + gone, bytes - gone});
    };
    add(0, &out_length_, body_at);
    if (encrypted_) {
      add(body_at + out_piece_, sealed_.data(), out_sealed_ - out_piece_);
    } else {
      const std::size_t unsent = out_sent_ - std::min(out_sent_, body_at);
      for (const iovec& part : between(parts, count, unsent, out_sealed_)) left.push_back(part);
    }
    if (out_sealed_ == out_length_) add(tag_at, out_tag_.data(), out_tag_.size());
    return left;
  }

  bool receive_length() {
    while (length_got_ < sizeof in_length_) {
      auto* const length = reinterpret_cast<std::byte*>(&in_length_);
      const std::size_t got = stream_->read(length + length_got_, sizeof in_length_ - length_got_);
      if (got == 0) return false;
      length_got_ += got;
    }
    return true;
  }

  // Whether a body and its tag are there. The next record's length is read along with the tag.
  bool receive_body(std::byte* to) {
    if (!opening_begun_) {
      if (in_length_ == 0 || in_length_ > kBodyBytes) throw tampered();
      opening_.begin();
      opening_.cover(&in_length_, sizeof in_length_);
      opening_begun_ = true;
    }
    while (got_ < in_length_) {
      const std::size_t got = stream_->read(to + got_, in_length_ - got_);
      if (got == 0) return false;
      if (encrypted_)
        opening_.convert(to + got_, got, to + got_);
      else
        opening_.cover(to + got_, got);
      got_ += got;
    }
    while (tail_got_ < sizeof(Tag)) {
      const std::size_t got = stream_->read(tail_.data() + tail_got_, tail_.size() - tail_got_);
      if (got == 0) return false;
      tail_got_ += got;
    }
    return true;
  }

  // Returns the length of the body that is there.
  std::size_t end_record() {
    Tag tag;
    std::memcpy(tag.data(), tail_.data(), sizeof tag);
    if (!opening_.genuine(tag)) throw tampered();
    const std::size_t length = in_length_;
    length_got_ = tail_got_ - sizeof tag;
    std::memcpy(&in_length_, tail_.data() + sizeof tag, length_got_);
    got_ = tail_got_ = 0;
    opening_begun_ = false;
    return length;
  }

  std::unique_ptr<Stream> stream_;
  const bool encrypted_;
  const Cipher cipher_;
  Aead sealing_, opening_;

  Length out_length_ = 0;  // of the body of the record that is sent; 0: there is none
  Tag out_tag_{};
  std::size_t out_sealed_ = 0;     // of its body
  std::size_t out_sent_ = 0;       // of the whole record
  std::size_t out_piece_ = 0;      // where in the body the piece begins that was sealed last
  std::vector<std::byte> sealed_;  // that piece, where it is encrypted

  Length in_length_ = 0;  // of the body of the record that arrives
  std::size_t length_got_ = 0;
  bool opening_begun_ = false;
  bool in_place_ = false;  // its body goes to where the caller wants it, else to:
  std::vector<std::byte> incoming_;
  std::size_t got_ = 0;                                         // of its body
  std::array<std::byte, sizeof(Tag) + sizeof(Length)> tail_{};  // its tag, and the next length
  std::size_t tail_got_ = 0;
  const std::byte *body_ = nullptr, *body_end_ = nullptr;  // what has not been read of incoming_
};

}  // namespace

std::unique_ptr<Stream> sealed_stream(std::unique_ptr<Stream> stream,
                                      const SealedOptions& options) {
  return std::make_unique<SealedStream>(std::move(stream), options);
}

}  // namespace dicomm
