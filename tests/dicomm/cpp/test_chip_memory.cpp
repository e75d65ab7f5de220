// A chip's memory, which its driver exports for NICs: how it is registered, and that what a NIC
// wrote there is there. Without a chip: its memory is the host's, and a NIC's writes are late.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "fake_verbs.h"
#include "support.h"
#include "wire.h"

using namespace dicomm;
using namespace dicomm::testing;

namespace {

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd"), end;
  return static_cast<std::size_t>(std::distance(all, end));
}

// Memory that the chip's driver exports out of the middle of a larger buffer.
struct Chip {
  static constexpr std::uint64_t kOffsetBytes = 1 << 16;

  explicit Chip(std::size_t bytes) : memory(bytes), file(::memfd_create("chip", MFD_CLOEXEC)) {
    struct stat status{};
    ::fstat(file.get(), &status);
    inode = status.st_ino;
  }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory.data()); }
  MemoryRegion region() {
    return {address(), memory.size(),
            [this](std::uint64_t first, std::uint64_t) -> std::optional<Dmabuf> {
              ++exports;
              if (!can_export) return std::nullopt;
              return Dmabuf{Fd(::fcntl(file.get(), F_DUPFD_CLOEXEC, 0)),
                            kOffsetBytes + first - address()};
            }};
  }

  Bytes memory;
  Fd file;
  std::uint64_t inode = 0;
  bool can_export = true;
  int exports = 0;
};

}  // namespace

TEST_CASE("a chip's memory is registered by a descriptor, which is closed at once") {
  FakeNic first("first"), second("second");
  const auto rails = fake_rails({&first, &second}, 1);
  Chip chip(1 << 20);
  const std::size_t before = open_descriptors();
  rails->memory->declare(chip.region());
  const auto registration = rails->memory->acquire(chip.memory.data() + 5, 100);
  CHECK(open_descriptors() == before);
  CHECK(chip.exports == 2);
  for (const FakeNic* nic : {&first, &second}) {
    REQUIRE(nic->dmabufs.size() == 1);
    const auto& [file, offset, bytes, address] = nic->dmabufs[0];
    CHECK(file == chip.inode);
    CHECK(offset == Chip::kOffsetBytes);
    CHECK(bytes == chip.memory.size());
    CHECK(address == chip.address());
  }
  rails->memory->forget(chip.address(), chip.memory.size());
  CHECK(open_descriptors() == before);
}

TEST_CASE("a piece of a chip's memory that is too much at once begins further on in the buffer") {
  FakeNic nic("nic");
  const auto rails = fake_rails({&nic}, 1);
  Chip chip(1 << 20);
  bool whole = false;
  nic.registers = [&](std::uint64_t at) { return whole || at != chip.address(); };
  rails->memory->declare(chip.region());
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  REQUIRE(rails->memory->acquire(chip.memory.data() + 5 * page, 100));
  REQUIRE(nic.dmabufs.size() == 1);
  const auto& piece = nic.dmabufs[0];
  CHECK(piece.address > chip.address());
  CHECK(piece.bytes < chip.memory.size());
  CHECK(piece.offset - Chip::kOffsetBytes == piece.address - chip.address());
}

TEST_CASE("a chip's memory without a descriptor is registered as any other") {
  for (const bool can_export : {false, true}) {
    FakeNic nic("nic");
    nic.registers_dmabuf = false;
    const auto rails = fake_rails({&nic}, 1);
    Chip chip(1 << 20);
    chip.can_export = can_export;
    const std::size_t before = open_descriptors();
    rails->memory->declare(chip.region());
    CHECK(rails->memory->acquire(chip.memory.data(), 100)->on(0).has_value());
    CHECK(nic.dmabufs.empty());
    CHECK(open_descriptors() == before);
  }
}

TEST_CASE("what NICs wrote to a chip's memory is there when the message is") {
  FakeNic left0("left0"), left1("left1"), right0("right0"), right1("right1");
  const auto left_rails = fake_rails({&left0, &left1}, 1);
  Wire wire(left_rails, fake_rails({&right0, &right1}, 2));
  Chip chip(8 << 20);
  left_rails->memory->declare(chip.region());
  for (const std::size_t bytes : {std::size_t{1 << 20}, chip.memory.size()}) {
    const Bytes from = payload(bytes, bytes);
    const auto into = std::span(chip.memory).last(bytes);
    CHECK(pull_over(wire, from, into) == "");
    CHECK(std::equal(from.begin(), from.end(), into.begin()));
  }
}

TEST_CASE("a message into the host's memory costs no read more than its own") {
  FakeNic left("left"), right("right");
  Wire wire(fake_rails({&left}, 1), fake_rails({&right}, 2));
  const Bytes from = payload(3 << 20, 1);
  Bytes into(from.size());
  CHECK(pull_over(wire, from, into) == "");
  std::uint64_t read = 0;
  for (const std::uint32_t bytes : left.reads) read += bytes;
  CHECK(read == from.size());
}

TEST_CASE("a NIC that cannot be asked for a flush gets no memory of a chip") {
  FakeNic left("left"), right("right");
  const auto left_rails = fake_rails({&left}, 1);
  Wire wire(left_rails, fake_rails({&right}, 2));
  Chip chip(1 << 20);
  left.takes = [](Post post) { return post != Post::read; };
  const std::string told = words_on_stderr([&] { left_rails->memory->declare(chip.region()); });
  left.takes = [](Post) { return true; };
  CHECK(contains(told, "cannot be flushed"));
  const Bytes from = payload(chip.memory.size(), 3);
  CHECK(pull_over(wire, from, chip.memory) == "cannot pull");
  Bytes host(from.size());
  CHECK(pull_over(wire, from, host) == "");
  CHECK(host == from);
}

TEST_CASE("what a NIC fails to flush is read again by another one") {
  FakeNic left0("left0"), left1("left1"), right0("right0"), right1("right1");
  const auto left_rails = fake_rails({&left0, &left1}, 1);
  Wire wire(left_rails, fake_rails({&right0, &right1}, 2));
  Chip chip(4 << 20);
  left_rails->memory->declare(chip.region());
  const auto reads_of = [&](int number) {
    const std::size_t before = left0.reads.size();
    const Bytes from = payload(chip.memory.size(), number);
    words_on_stderr([&] { CHECK(pull_over(wire, from, chip.memory) == ""); });
    CHECK(chip.memory == from);
    return static_cast<int>(left0.reads.size() - before);
  };
  const int reads = reads_of(1);  // the last one is the flush
  CHECK(left0.reads.back() == 1);
  int left = reads - 1;
  left0.takes = [&](Post post) { return post != Post::read || left-- > 0; };
  CHECK(reads_of(2) == reads - 1);
  CHECK_FALSE(wire.left->describe().rails[0].up);
  CHECK(wire.left->describe().rails[1].up);
}

TEST_CASE("a rail that fails to flush leaves its device to the others") {
  FakeNic left("left"), right("right");
  const auto rails_of = [](FakeNic& nic, int host) {
    auto rails = fake_rails({&nic}, host);
    verbs::Rail second = rails->rails.front();
    second.port = 2;
    second.gids = {ipv4_gid(3, 10, 1, 0, host)};
    rails->rails.push_back(second);
    return rails;
  };
  const auto left_rails = rails_of(left, 1);
  Wire wire(left_rails, rails_of(right, 2));
  Chip chip(4 << 20);
  left_rails->memory->declare(chip.region());
  const std::size_t before = left.reads.size();
  CHECK(pull_over(wire, payload(chip.memory.size(), 1), chip.memory) == "");
  int left_to_do = static_cast<int>(left.reads.size() - before) - 2;  // without the flushes
  left.takes = [&](Post post) { return post != Post::read || left_to_do-- != 0; };
  const Bytes from = payload(chip.memory.size(), 2);
  words_on_stderr([&] { CHECK(pull_over(wire, from, chip.memory) == ""); });
  CHECK(chip.memory == from);
  CHECK_FALSE(wire.left->describe().rails[0].up);
  CHECK(wire.left->describe().rails[1].up);
}

TEST_CASE("memory that the host cannot read is a chip's, with a descriptor or without") {
  FakeNic nic("nic");
  const auto rails = fake_rails({&nic}, 1);
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  void* const hidden = ::mmap(nullptr, page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(hidden != MAP_FAILED);
  Bytes seen(page);
  const auto is_chips = [&](void* memory) {
    const auto entered =
        rails->devices[0]->enter({reinterpret_cast<std::uint64_t>(memory), page,
                                  [](auto, auto) { return std::optional<Dmabuf>(); }});
    rails->devices[0]->leave(entered->handle);
    return entered->is_chips;
  };
  CHECK(is_chips(hidden));
  CHECK_FALSE(is_chips(seen.data()));
  ::munmap(hidden, page);
}
