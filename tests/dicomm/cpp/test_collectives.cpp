// Collectives among threads; tests/dicomm/test_collectives*.py look at every type and operation.
#include <cmath>

#include "collective/collectives.h"
#include "oracle/rank.h"
#include "transports.h"

using namespace dicomm;
using namespace dicomm::testing;

TRANSPORT_TEST_CASE("random collectives give exact results in worlds of 2 to 5 ranks") {
  for (int world_size = 2; world_size <= 5; ++world_size)
    run_ranks(world_size, transport, [&](const std::shared_ptr<Communicator>& ranks) {
      Group group(ranks);
      for (std::uint64_t i = 0; i < 40; ++i) oracle::run_collective(group, mix(world_size, i));
    });
}

TRANSPORT_TEST_CASE("every rank ends an allreduce of floats with the same bits") {
  for (const std::size_t count : {1, 1000, 100'000}) {
    std::vector<std::vector<float>> results(4);
    run_ranks(4, transport, [&](const std::shared_ptr<Communicator>& ranks) {
      auto& data = results[ranks->rank()];
      data.resize(count);
      for (std::size_t i = 0; i < count; ++i)
        data[i] = static_cast<float>(std::sin(i * 4.0 + ranks->rank()) * 1e3);
      Group group(ranks);
      allreduce(group, data.data(), count, DataType::float32, ReduceOp::sum, {group.next_tag()});
    });
    for (int rank = 1; rank < 4; ++rank)
      CHECK(std::memcmp(results[0].data(), results[rank].data(), 4 * count) == 0);
  }
}

TRANSPORT_TEST_CASE("a collective ends at its deadline where a rank does not take part") {
  run_ranks(3, transport, [](const std::shared_ptr<Communicator>& ranks) {
    Group group(ranks);
    if (ranks->rank() == 2) return;
    float value = 1;
    const Call call{group.next_tag(), 0, std::chrono::milliseconds(50)};
    CHECK_THROWS_AS(allreduce(group, &value, 1, DataType::float32, ReduceOp::sum, call),
                    TimeoutError);
  });
}
