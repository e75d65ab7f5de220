#include "transport/verbs/library.h"

#include <dlfcn.h>

#include "core/communicator.h"
#include "core/text.h"

namespace dicomm::ibv {

namespace {

template <class F>
void find(void* library, const std::string& file, const char* name, const char* version,
          F*& function) {
  function = reinterpret_cast<F*>(::dlvsym(library, name, version));
  if (!function)
    throw Error(text("'", file, "' has no ", name, " of version ", version,
                     ": is it the libibverbs of rdma-core?"));
}

}  // namespace

std::shared_ptr<const Library> Library::load(const std::string& file) {
  void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library)
    throw Error(text("cannot load libibverbs (", ::dlerror(),
                     "): install rdma-core, or name the file in DICOMM_IBVERBS_LIBRARY"));
  auto functions = std::make_shared<Library>();
  const auto find_base = [&](const char* name, auto*& function) {
    find(library, file, name, "IBVERBS_1.1", function);
  };
  find_base("ibv_get_device_list", functions->get_device_list);
  find_base("ibv_free_device_list", functions->free_device_list);
  find_base("ibv_get_device_name", functions->get_device_name);
  find_base("ibv_open_device", functions->open_device);
  find_base("ibv_close_device", functions->close_device);
  find_base("ibv_query_device", functions->query_device);
  find_base("ibv_query_port", functions->query_port);
  find_base("ibv_alloc_pd", functions->alloc_pd);
  find_base("ibv_dealloc_pd", functions->dealloc_pd);
  find_base("ibv_reg_mr", functions->reg_mr);
  find_base("ibv_dereg_mr", functions->dereg_mr);
  find(library, file, "ibv_create_comp_channel", "IBVERBS_1.0", functions->create_comp_channel);
  find(library, file, "ibv_destroy_comp_channel", "IBVERBS_1.0", functions->destroy_comp_channel);
  find_base("ibv_create_cq", functions->create_cq);
  find_base("ibv_destroy_cq", functions->destroy_cq);
  find_base("ibv_get_cq_event", functions->get_cq_event);
  find_base("ibv_ack_cq_events", functions->ack_cq_events);
  find_base("ibv_create_qp", functions->create_qp);
  find_base("ibv_modify_qp", functions->modify_qp);
  find_base("ibv_destroy_qp", functions->destroy_qp);
  find_base("ibv_wc_status_str", functions->wc_status_str);
  functions->reg_dmabuf_mr = reinterpret_cast<decltype(functions->reg_dmabuf_mr)>(
      ::dlvsym(library, "ibv_reg_dmabuf_mr", "IBVERBS_1.12"));
  return functions;
}

}  // namespace dicomm::ibv
