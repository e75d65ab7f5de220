// RDMA devices that exist only in this process, behind the same table of functions as libibverbs:
// what a device was asked can be looked at, and it can be made to fail. For one thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/verbs/device.h"

namespace dicomm::testing {

enum class Post { send, read, receive };

struct FakeNic {
  explicit FakeNic(std::string name);

  std::string name;
  ibv::Context* context = nullptr;  // once it is opened
  ibv::DeviceAttributes attributes{};
  ibv::PortAttributes port{};
  // Registering succeeds where it must; reaching the memory may still fail.
  std::function<bool(std::uint64_t address)> registers = [](std::uint64_t) { return true; };
  std::function<bool(std::uint64_t address)> reaches = [](std::uint64_t) { return true; };
  // Or it may seem to work, and return what is not there.
  std::function<bool(std::uint64_t address)> garbles = [](std::uint64_t) { return false; };

  // As real devices have; some have none: max_srq is 0 then.
  void has_shared_queues(bool has) { attributes.max_srq = attributes.max_srq_wr = has ? 4096 : 0; }

  // Up to so many bytes it takes along with the request to send them.
  std::uint32_t inline_bytes = 256;

  // Whether it takes the work at all.
  std::function<bool(Post)> takes = [](Post) { return true; };
  // Whether it registers what a descriptor stands for.
  bool registers_dmabuf = true;

  // Reads begin, and end only with finish_reads(), or flushed where their queue pair is closed.
  bool holds_reads = false;
  // The same of sends, and finish_sends(): a peer without a receive buffer keeps them so.
  bool holds_sends = false;

  struct Dmabuf {
    std::uint64_t file;  // which the descriptor stood for, by its inode
    std::uint64_t offset, bytes, address;
  };
  std::vector<Dmabuf> dmabufs;  // that it registered
  int registrations = 0;        // that are live
  std::size_t registered_bytes = 0;
  std::size_t shared_receives = 0;           // buffers in its shared queues
  std::vector<ibv::QpAttributes> connected;  // what queue pairs were told, each state change
  std::vector<std::uint32_t> reads;          // lengths of the RDMA READs it did
  std::vector<std::uint32_t> sends;          // and of the SENDs
};

std::shared_ptr<const ibv::Library> fake_library();

// Does the reads that are held, of all NICs. How many there were.
int finish_reads();
// Does the sends that a NIC holds.
void finish_sends(FakeNic& nic);

// Puts bytes into the next receive buffer of a queue pair, as a peer's SEND does. False: it has
// none.
bool deliver(std::uint32_t qp_number, const void* bytes, std::uint32_t count,
             std::optional<std::uint32_t> immediate = std::nullopt);

// A RoCE v2 address.
verbs::GidEntry ipv4_gid(int index, int a, int b, int c, int d, int prefix_bits = 24);

// One rail a NIC, with 10.RAIL.0.HOST as its only address.
std::shared_ptr<verbs::Rails> fake_rails(const std::vector<FakeNic*>& nics, int host,
                                         const verbs::Settings& settings = {});

}  // namespace dicomm::testing
