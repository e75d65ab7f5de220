// libibverbs, loaded when it is first needed.
#pragma once

#include <memory>
#include <string>

#include "transport/verbs/abi.h"

namespace dicomm::ibv {

struct Library {
  // Throws Error saying what is missing. The library stays loaded for good: its providers keep
  // threads and handlers.
  static std::shared_ptr<const Library> load(const std::string& file);

  int (*fork_init)();
  Device** (*get_device_list)(int* count);
  void (*free_device_list)(Device**);
  const char* (*get_device_name)(Device*);
  Context* (*open_device)(Device*);
  int (*close_device)(Context*);
  int (*query_device)(Context*, DeviceAttributes*);
  int (*query_port)(Context*, std::uint8_t port, PortAttributes*);
  Pd* (*alloc_pd)(Context*);
  int (*dealloc_pd)(Pd*);
  MemoryRegion* (*reg_mr)(Pd*, void*, std::size_t, int access);
  int (*dereg_mr)(MemoryRegion*);
  Channel* (*create_comp_channel)(Context*);
  int (*destroy_comp_channel)(Channel*);
  Cq* (*create_cq)(Context*, int entries, void* cq_context, Channel*, int vector);
  int (*destroy_cq)(Cq*);
  int (*get_cq_event)(Channel*, Cq**, void** cq_context);
  void (*ack_cq_events)(Cq*, unsigned count);
  Srq* (*create_srq)(Pd*, SrqInit*);
  int (*destroy_srq)(Srq*);
  Qp* (*create_qp)(Pd*, QpInit*);
  int (*modify_qp)(Qp*, QpAttributes*, int mask);
  int (*destroy_qp)(Qp*);
  const char* (*wc_status_str)(int status);
  // Null before rdma-core 34.
  MemoryRegion* (*reg_dmabuf_mr)(Pd*, std::uint64_t offset, std::size_t, std::uint64_t iova, int fd,
                                 int access);
};

}  // namespace dicomm::ibv
