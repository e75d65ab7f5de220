#include "transport/verbs/library.h"

#include <cstdio>

#include "transport/verbs/loading.h"

namespace dicomm::ibv {

std::shared_ptr<const Library> Library::load(const std::string& file) {
  void* library = load_library(file, "libibverbs", "DICOMM_IBVERBS_LIBRARY");
  auto functions = std::make_shared<Library>();
  const auto find = [&](const char* name, auto*& function, const char* version = "IBVERBS_1.1") {
    find_function(library, file, name, version, function);
  };
  find("ibv_fork_init", functions->fork_init);
  find("ibv_get_device_list", functions->get_device_list);
  find("ibv_free_device_list", functions->free_device_list);
  find("ibv_get_device_name", functions->get_device_name);
  find("ibv_open_device", functions->open_device);
  find("ibv_close_device", functions->close_device);
  find("ibv_query_device", functions->query_device);
  find("ibv_query_port", functions->query_port);
  find("ibv_alloc_pd", functions->alloc_pd);
  find("ibv_dealloc_pd", functions->dealloc_pd);
  find("ibv_reg_mr", functions->reg_mr);
  find("ibv_dereg_mr", functions->dereg_mr);
  find("ibv_create_comp_channel", functions->create_comp_channel, "IBVERBS_1.0");
  find("ibv_destroy_comp_channel", functions->destroy_comp_channel, "IBVERBS_1.0");
  find("ibv_create_cq", functions->create_cq);
  find("ibv_destroy_cq", functions->destroy_cq);
  find("ibv_get_cq_event", functions->get_cq_event);
  find("ibv_ack_cq_events", functions->ack_cq_events);
  find("ibv_create_srq", functions->create_srq);
  find("ibv_destroy_srq", functions->destroy_srq);
  find("ibv_create_qp", functions->create_qp);
  find("ibv_modify_qp", functions->modify_qp);
  find("ibv_destroy_qp", functions->destroy_qp);
  find("ibv_wc_status_str", functions->wc_status_str);
  functions->reg_dmabuf_mr = reinterpret_cast<decltype(functions->reg_dmabuf_mr)>(
      ::dlvsym(library, "ibv_reg_dmabuf_mr", "IBVERBS_1.12"));
  // Before anything is registered: else, with older kernels, a fork takes registered pages from
  // under the device. Newer ones need nothing, and say so by 0.
  if (const int error = functions->fork_init())
    std::fprintf(stderr, "dicomm: a rank that forks may lose what RDMA receives: %s\n",
                 system_error(error).c_str());
  return functions;
}

}  // namespace dicomm::ibv
