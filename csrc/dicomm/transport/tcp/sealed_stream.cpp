#include "transport/tcp/sealed_stream.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/tcp/aead.h"

namespace dicomm {

namespace {

using Length = std::uint32_t;

// Large enough that a record's fixed cost is little, small enough to stay in a core's cache.
constexpr std::size_t kBodyBytes = 64 << 10;

Digest key_of(const SealedOptions& options, bool dialler_writes) {
  const std::string_view session(reinterpret_cast<const char*>(options.session.data()),
                                 options.session.size());
  return hmac_sha256(session, dialler_writes ? "the dialler writes" : "the acceptor writes");
}

// The first `bytes` of some parts.
std::vector<iovec> first_of(const iovec* parts, int count, std::size_t bytes) {
  std::vector<iovec> found;
  for (int i = 0; i < count && bytes > 0; ++i) {
    const std::size_t taken = std::min(parts[i].iov_len, bytes);
    if (taken > 0) found.push_back({parts[i].iov_base, taken});
    bytes -= taken;
  }
  return found;
}

// Without the first `bytes` of them.
void leave_out(std::vector<iovec>& parts, std::size_t bytes) {
  auto at = parts.begin();
  while (at != parts.end() && at->iov_len <= bytes) bytes -= (at++)->iov_len;
  parts.erase(parts.begin(), at);
  if (parts.empty()) return;
  parts.front().iov_base = static_cast<char*>(parts.front().iov_base) + bytes;
  parts.front().iov_len -= bytes;
}

class SealedStream final : public Stream {
 public:
  SealedStream(std::unique_ptr<Stream> stream, const SealedOptions& options)
      : stream_(std::move(stream)),
        encrypted_(options.encrypted),
        sealing_(key_of(options, options.dialled), Aead::Use::seal),
        opening_(key_of(options, !options.dialled), Aead::Use::open),
        incoming_(kBodyBytes + sizeof(Tag) + sizeof(Length)) {
    if (encrypted_) sealed_.resize(kBodyBytes), opened_.resize(kBodyBytes);
  }

  // What could not be written is written again by the next call, with the same bytes in front: the
  // record stays sealed meanwhile, and its bytes count once all of it has left.
  std::size_t write(const iovec* parts, int count) override {
    std::size_t bytes = 0;
    for (int i = 0; i < count; ++i) bytes += parts[i].iov_len;
    if (bytes == 0) return 0;
    if (out_length_ == 0) {
      out_length_ = std::min(bytes, kBodyBytes);
      seal(first_of(parts, count, out_length_));
    }
    std::vector<iovec> left{{&out_length_, sizeof out_length_}};
    if (encrypted_)
      left.push_back({sealed_.data(), out_length_});
    else
      for (const iovec& part : first_of(parts, count, out_length_)) left.push_back(part);
    left.push_back({out_tag_.data(), out_tag_.size()});
    leave_out(left, out_sent_);
    while (!left.empty()) {
      const std::size_t sent = stream_->write(left.data(), static_cast<int>(left.size()));
      if (sent == 0) return 0;
      out_sent_ += sent;
      leave_out(left, sent);
    }
    out_sent_ = 0;
    return std::exchange(out_length_, 0);
  }

  std::size_t read(void* data, std::size_t bytes) override {
    if (bytes == 0) return 0;
    if (body_ == body_end_) {
      if (!receive()) return 0;
      if (encrypted_ && in_length_ <= bytes) return open(static_cast<std::byte*>(data));
      body_ = encrypted_ ? opened_.data() : incoming_.data();
      body_end_ = body_ + open(opened_.data());
    }
    const std::size_t taken = std::min<std::size_t>(bytes, body_end_ - body_);
    std::memcpy(data, body_, taken);
    body_ += taken;
    return taken;
  }

  std::size_t eager_bytes(bool crowded) const override { return stream_->eager_bytes(crowded); }
  LinkDescription describe() const override { return stream_->describe(); }
  int fd() const override { return stream_->fd(); }
  bool watch_writable() const override { return stream_->watch_writable(); }
  bool peer_shares_core(int core) override { return stream_->peer_shares_core(core); }
  bool prepare_sleep(bool want_to_write) override {
    return body_ == body_end_ && stream_->prepare_sleep(want_to_write);
  }
  void check_alive() override { stream_->check_alive(); }
  void finish_writing() override { stream_->finish_writing(); }

 private:
  void seal(const std::vector<iovec>& parts) {
    sealing_.begin();
    sealing_.cover(&out_length_, sizeof out_length_);
    std::size_t at = 0;
    for (const iovec& part : parts) {
      if (encrypted_)
        sealing_.convert(part.iov_base, part.iov_len, sealed_.data() + at);
      else
        sealing_.cover(part.iov_base, part.iov_len);
      at += part.iov_len;
    }
    out_tag_ = sealing_.tag();
  }

  // Whether a whole record is there. The next one's length is read along with its tag.
  bool receive() {
    while (length_got_ < sizeof in_length_) {
      auto* const length = reinterpret_cast<std::byte*>(&in_length_);
      const std::size_t got = stream_->read(length + length_got_, sizeof in_length_ - length_got_);
      if (got == 0) return false;
      length_got_ += got;
    }
    if (in_length_ == 0 || in_length_ > kBodyBytes) throw tampered();
    const std::size_t record = in_length_ + sizeof(Tag);
    while (got_ < record) {
      const std::size_t got =
          stream_->read(incoming_.data() + got_, record + sizeof(Length) - got_);
      if (got == 0) return false;
      got_ += got;
    }
    return true;
  }

  // Takes the record that is there: decrypts its body where it is encrypted. Returns its length.
  std::size_t open(std::byte* to) {
    const std::size_t length = in_length_, record = length + sizeof(Tag);
    opening_.begin();
    opening_.cover(&in_length_, sizeof in_length_);
    if (encrypted_)
      opening_.convert(incoming_.data(), length, to);
    else
      opening_.cover(incoming_.data(), length);
    Tag tag;
    std::memcpy(tag.data(), incoming_.data() + length, sizeof tag);
    if (!opening_.genuine(tag)) throw tampered();
    length_got_ = got_ - record;
    std::memcpy(&in_length_, incoming_.data() + record, length_got_);
    got_ = 0;
    return length;
  }

  static StreamEnd tampered() {
    return {"what arrived is not what it sent: somebody on the way changed it", false};
  }

  std::unique_ptr<Stream> stream_;
  const bool encrypted_;
  Aead sealing_, opening_;

  Length out_length_ = 0;          // of the body of the record that is sealed; 0: there is none
  std::vector<std::byte> sealed_;  // that body, where it is encrypted
  Tag out_tag_{};
  std::size_t out_sent_ = 0;  // of the whole record

  Length in_length_ = 0;  // of the body of the record that arrives
  std::size_t length_got_ = 0;
  std::vector<std::byte> incoming_;  // that body, its tag, and the next length
  std::size_t got_ = 0;
  std::vector<std::byte> opened_;                          // a body, where it was encrypted
  const std::byte *body_ = nullptr, *body_end_ = nullptr;  // what has not been read of it yet
};

}  // namespace

std::unique_ptr<Stream> sealed_stream(std::unique_ptr<Stream> stream,
                                      const SealedOptions& options) {
  return std::make_unique<SealedStream>(std::move(stream), options);
}

}  // namespace dicomm
