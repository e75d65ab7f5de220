// librdmacm, loaded when it is first needed.
#pragma once

#include <memory>
#include <string>

#include "transport/verbs/cm_abi.h"

namespace dicomm::cm {

struct Library {
  // Throws Error saying what is missing: the library, or the kernel's side of it.
  static std::shared_ptr<const Library> load(const std::string& file);

  Channel* (*create_event_channel)();
  void (*destroy_event_channel)(Channel*);
  int (*create_id)(Channel*, Id**, void* context, PortSpace);
  int (*destroy_id)(Id*);
  int (*bind_addr)(Id*, sockaddr*);
  int (*listen)(Id*, int backlog);
  std::uint16_t (*get_src_port)(Id*);  // in network order
  int (*set_option)(Id*, int level, int option, void* value, std::size_t bytes);
  int (*resolve_addr)(Id*, sockaddr* source, sockaddr* destination, int timeout_ms);
  int (*resolve_route)(Id*, int timeout_ms);
  int (*connect)(Id*, Parameters*);
  int (*accept)(Id*, Parameters*);
  int (*reject)(Id*, const void* private_data, std::uint8_t bytes);
  int (*establish)(Id*);
  int (*init_qp_attr)(Id*, ibv::QpAttributes*, int* mask);
  int (*get_cm_event)(Channel*, Event**);
  int (*ack_cm_event)(Event*);
  const char* (*event_str)(EventType);
};

}  // namespace dicomm::cm
