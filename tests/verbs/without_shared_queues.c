// libibverbs, of devices that have no shared receive queues. What it does not define is found in
// libibverbs, with which it is linked.
#include <dlfcn.h>
#include <infiniband/verbs.h>

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes) {
  int (*real)(struct ibv_context *, struct ibv_device_attr *) =
      dlvsym(dlopen("libibverbs.so.1", RTLD_NOW), "ibv_query_device", "IBVERBS_1.1");
  const int error = real(context, attributes);
  attributes->max_srq = attributes->max_srq_wr = attributes->max_srq_sge = 0;
  return error;
}
