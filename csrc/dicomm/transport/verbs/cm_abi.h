// The part of librdmacm's binary interface that dicomm uses: as abi.h, for <rdma/rdma_cma.h>.
#pragma once

#include <sys/socket.h>

#include <cstdint>

#include "transport/verbs/abi.h"

namespace dicomm::cm {

enum class PortSpace : int { tcp = 0x0106 };

enum class EventType : int {
  address_resolved,
  address_error,
  route_resolved,
  route_error,
  connect_request,
  connect_response,
  connect_error,
  unreachable,
  rejected,
  established,
  disconnected,
};

enum Option : int { kIdLevel = 0, kTypeOfService = 0 };

struct Channel {  // rdma_event_channel
  int fd;
};

struct Id {  // rdma_cm_id; up to what we read
  ibv::Context* verbs;
  Channel* channel;
  void* context;
  ibv::Qp* qp;
  struct Route {  // rdma_route
    sockaddr_storage source, destination;
    alignas(8) std::uint8_t infiniband[40];
    void* paths;
    int path_count;
  } route;
  PortSpace port_space;
  std::uint8_t port;
};

struct Parameters {  // rdma_conn_param
  const void* private_data;
  std::uint8_t private_bytes, reads_in, reads_out, flow_control, retry_count, rnr_retry, srq;
  std::uint32_t qp_number;
};

struct Event {  // rdma_cm_event, as far as a connection goes
  Id* id;
  Id* listener;
  EventType type;
  int status;
  Parameters parameters;
};

}  // namespace dicomm::cm
