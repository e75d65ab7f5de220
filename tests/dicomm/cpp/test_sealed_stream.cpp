// Records over a wire that delivers in pieces, and that somebody may change.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "transport/tcp/sealed_stream.h"

using namespace dicomm;

namespace {

// One end of two wires, which hold what is on its way. It takes and gives at most so many bytes at
// once, drawn anew each time.
class PipedStream final : public Stream {
 public:
  PipedStream(std::string& out, std::string& in, std::size_t most)
      : out_(out), in_(in), most_(most) {}

  std::size_t write(const iovec* parts, int count) override {
    std::size_t room = draw(), sent = 0;
    for (int i = 0; i < count; ++i) {
      const std::size_t bytes = std::min(room, parts[i].iov_len);
      out_.append(static_cast<const char*>(parts[i].iov_base), bytes);
      room -= bytes;
      sent += bytes;
    }
    return sent;
  }
  std::size_t read(void* data, std::size_t bytes) override {
    const std::size_t got = std::min({draw(), bytes, in_.size()});
    std::memcpy(data, in_.data(), got);
    in_.erase(0, got);
    return got;
  }
  std::size_t eager_bytes() const override { return 1000; }
  int fd() const override { return -1; }
  LinkDescription describe() const override { return {}; }
  void finish_writing() override {}

 private:
  std::size_t draw() { return std::uniform_int_distribution<std::size_t>(0, most_)(random_); }

  std::string &out_, &in_;
  const std::size_t most_;
  std::mt19937 random_{7};
};

struct Way {
  bool encrypted;
  Cipher cipher = Cipher::aes_128_gcm;
};

constexpr Way kWays[] = {
    {false}, {true}, {false, Cipher::chacha20_poly1305}, {true, Cipher::chacha20_poly1305}};

struct Ends {
  std::string there, back;  // from the dialler to the acceptor, and back
  std::unique_ptr<Stream> dialler, acceptor;

  explicit Ends(const Way& way, std::size_t most = 1 << 20) {
    const Digest session = sha256("a session");
    dialler = sealed_stream(std::make_unique<PipedStream>(there, back, most),
                            {session, true, way.encrypted, way.cipher});
    acceptor = sealed_stream(std::make_unique<PipedStream>(back, there, most),
                             {session, false, way.encrypted, way.cipher});
  }
};

std::string random_text(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::string text(bytes, '\0');
  for (char& each : text) each = static_cast<char>(random());
  return text;
}

// All of a text, in two parts as a frame has them.
void write_all(Stream& stream, const std::string& text, std::size_t first) {
  for (std::size_t at = 0; at < text.size();) {
    char* const data = const_cast<char*>(text.data());
    const std::size_t middle = std::max(at, std::min(first, text.size()));
    const iovec parts[2] = {{data + at, middle - at}, {data + middle, text.size() - middle}};
    at += stream.write(parts, 2);
  }
}

std::string read_all(Stream& stream, std::size_t bytes, std::size_t most) {
  constexpr int kPatience = 300'000;  // calls that bring nothing: a record arrives in many pieces
  std::string text(bytes, '\0');
  std::size_t got = 0;
  for (int idle = 0; got < bytes && idle < kPatience; ++idle) {
    const std::size_t more = stream.read(text.data() + got, std::min(most, bytes - got));
    got += more;
    if (more > 0) idle = 0;
  }
  text.resize(got);
  return text;
}

std::string sealed(Ends& ends, const std::string& text) {
  write_all(*ends.dialler, text, 32);
  return std::exchange(ends.there, {});
}

}  // namespace

TEST_CASE("what is written is read, in pieces of any size") {
  for (const Way& way : kWays)
    for (const std::size_t most : {3, 5'000, 1 << 20}) {
      CAPTURE(way.encrypted);
      CAPTURE(name_of(way.cipher));
      CAPTURE(most);
      Ends ends(way, most);
      for (const std::size_t bytes :
           {1, 32, 1'000, 65'535, 65'536, 65'537, 262'144, 262'145, 900'000}) {
        if (bytes > 30'000 * most) continue;  // it would take long
        const std::string text = random_text(bytes, bytes);
        write_all(*ends.dialler, text, 32);
        CHECK((read_all(*ends.acceptor, bytes, 100'000) == text));  // not for people to read
        write_all(*ends.acceptor, text, 1);
        CHECK((read_all(*ends.dialler, bytes, 999) == text));
      }
    }
}

TEST_CASE("a bit that changes on the way ends the stream, wherever it is") {
  for (const Way& way : kWays) {
    const std::size_t length = sealed(*std::make_unique<Ends>(way), "a text").size();
    for (std::size_t bit = 0; bit < 8 * length; ++bit) {
      CAPTURE(bit);
      Ends ends(way);
      ends.there = sealed(ends, "a text");
      ends.there[bit / 8] ^= static_cast<char>(1 << bit % 8);
      std::string got;
      try {
        got = read_all(*ends.acceptor, 6, 6);
      } catch (const StreamEnd& end) {
        CHECK(end.reason.find("somebody on the way changed it") != end.reason.npos);
        continue;
      }
      CHECK(got.empty());  // a longer record is waited for
      CHECK(bit < 32);
    }
  }
}

TEST_CASE("a record that is left out, repeated, put first or sent back ends the stream") {
  for (const Way& way : kWays) {
    CAPTURE(way.encrypted);
    const auto ends_with = [&](auto change) {
      Ends ends(way);
      const std::string first = sealed(ends, "first"), second = sealed(ends, "other");
      ends.there = change(first, second);
      ends.back = first;
      CHECK_THROWS_AS(read_all(*ends.acceptor, 15, 15), StreamEnd);
      CHECK_THROWS_AS(read_all(*ends.dialler, 5, 5), StreamEnd);
    };
    ends_with([](const std::string&, const std::string& second) { return second; });
    ends_with([](const std::string& first, const std::string&) { return first + first; });
    ends_with([](const std::string& first, const std::string& second) { return second + first; });
  }
}

TEST_CASE("only what is encrypted cannot be read on the way") {
  Ends plain(kWays[0]), hidden(kWays[1]);
  const std::string text(1'000, 'x');
  CHECK(sealed(plain, text).find(text) != text.npos);
  const std::string once = sealed(hidden, text);
  CHECK(once.find("xxxx") == text.npos);
  CHECK(once != sealed(hidden, text));  // every record has a nonce of its own
}

TEST_CASE("streams of unlike ciphers understand nothing of each other") {
  Ends ends(kWays[1]), others(kWays[3]);
  ends.there = sealed(others, "a text");
  CHECK_THROWS_AS(read_all(*ends.acceptor, 6, 6), StreamEnd);
}
