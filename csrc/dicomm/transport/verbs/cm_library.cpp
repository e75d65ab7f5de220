#include "transport/verbs/cm_library.h"

#include <cerrno>

#include "transport/verbs/loading.h"

namespace dicomm::cm {

std::shared_ptr<const Library> Library::load(const std::string& file) {
  void* library = load_library(file, "librdmacm", "DICOMM_RDMACM_LIBRARY");
  auto functions = std::make_shared<Library>();
  const auto find = [&](const char* name, auto*& function, const char* version = "RDMACM_1.0") {
    find_function(library, file, name, version, function);
  };
  find("rdma_create_event_channel", functions->create_event_channel);
  find("rdma_destroy_event_channel", functions->destroy_event_channel);
  find("rdma_create_id", functions->create_id);
  find("rdma_destroy_id", functions->destroy_id);
  find("rdma_bind_addr", functions->bind_addr);
  find("rdma_listen", functions->listen);
  find("rdma_get_src_port", functions->get_src_port);
  find("rdma_set_option", functions->set_option);
  find("rdma_resolve_addr", functions->resolve_addr);
  find("rdma_resolve_route", functions->resolve_route);
  find("rdma_connect", functions->connect);
  find("rdma_accept", functions->accept);
  find("rdma_reject", functions->reject);
  find("rdma_establish", functions->establish, "RDMACM_1.2");
  find("rdma_init_qp_attr", functions->init_qp_attr, "RDMACM_1.2");
  find("rdma_get_cm_event", functions->get_cm_event);
  find("rdma_ack_cm_event", functions->ack_cm_event);
  find("rdma_event_str", functions->event_str);
  Channel* channel = functions->create_event_channel();
  if (!channel)
    throw Error(text("the kernel's rdma_cm cannot be used: ", system_error(errno),
                     " (is there /dev/infiniband/rdma_cm?)"));
  functions->destroy_event_channel(channel);
  return functions;
}

}  // namespace dicomm::cm
