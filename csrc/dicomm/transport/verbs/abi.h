// The part of libibverbs' binary interface that dicomm uses.
//
// Declared here so that building needs no header of it, and running no library: library.h loads
// it. Layouts and values are those of symbol version IBVERBS_1.1, which have not changed since
// 2007; tests/verbs compiles abi_check.cpp against the real header. Handles that only the library
// looks into stay incomplete.
#pragma once

#include <pthread.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace dicomm::ibv {

using Gid = std::array<std::uint8_t, 16>;

struct Device;  // ibv_device
struct Pd;      // ibv_pd
struct Qp;
struct Cq;
struct Srq;
struct SendRequest;
struct ReceiveRequest;
struct Completion;

enum class PortState : int { down = 1, init, armed, active };
enum LinkLayer : std::uint8_t { kUnspecified, kInfiniband, kEthernet };
enum class QpType : int { rc = 2 };
enum class QpState : int { reset, init, rtr, rts, sqd, sqe, error };

enum AccessFlags : unsigned { kLocalWrite = 1, kRemoteWrite = 2, kRemoteRead = 4 };

enum class SendOpcode : int { rdma_write, rdma_write_imm, send, send_imm, rdma_read };
enum SendFlags : unsigned { kFence = 1, kSignaled = 2, kSolicited = 4, kInline = 8 };

enum CompletionFlags : unsigned { kWithImmediate = 2 };
enum CompletionStatus : int { kSuccess = 0, kFlushed = 5, kRnrRetryExceeded = 13 };
enum class CompletionOpcode : int { send, rdma_write, rdma_read, receive = 128 };

enum QpAttributeMask : int {
  kState = 1 << 0,
  kAccessFlags = 1 << 3,
  kPkeyIndex = 1 << 4,
  kPort = 1 << 5,
  kAddressVector = 1 << 7,
  kPathMtu = 1 << 8,
  kTimeout = 1 << 9,
  kRetryCount = 1 << 10,
  kRnrRetry = 1 << 11,
  kReceivePsn = 1 << 12,
  kMaxReadsOut = 1 << 13,
  kMinRnrTimer = 1 << 15,
  kSendPsn = 1 << 16,
  kMaxReadsIn = 1 << 17,
  kDestinationQp = 1 << 20,
};

struct Context {  // ibv_context
  Device* device;
  struct Operations {
    void* unused_1[11];
    int (*poll_cq)(Cq*, int, Completion*);
    int (*req_notify_cq)(Cq*, int solicited_only);
    void* unused_2[7];
    int (*post_srq_recv)(Srq*, ReceiveRequest*, ReceiveRequest** bad);
    void* unused_3[4];
    int (*post_send)(Qp*, SendRequest*, SendRequest** bad);
    int (*post_recv)(Qp*, ReceiveRequest*, ReceiveRequest** bad);
    void* unused_4[5];
  } operations;
  int command_fd;
  int async_fd;
  int completion_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

struct DeviceAttributes {  // ibv_device_attr
  char firmware[64];
  std::uint64_t node_guid, system_guid, max_mr_size, page_sizes;
  std::uint32_t vendor_id, vendor_part_id, hardware_version;
  int max_qp, max_qp_wr;
  unsigned capabilities;
  int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd;
  int max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom;
  int atomics;
  int unused[11];
  int max_srq, max_srq_wr, max_srq_sge;
  std::uint16_t max_pkeys;
  std::uint8_t local_ack_delay, ports;
};

struct PortAttributes {  // ibv_port_attr
  PortState state;
  int max_mtu, active_mtu;
  int gids;
  std::uint32_t capabilities, max_msg_bytes, bad_pkeys, qkey_violations;
  std::uint16_t pkeys, lid, sm_lid;
  std::uint8_t lmc, max_vl, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed;
  std::uint8_t physical_state, link_layer, flags;
  std::uint16_t capabilities_2;
};

struct MemoryRegion {  // ibv_mr
  Context* context;
  Pd* pd;
  void* address;
  std::size_t bytes;
  std::uint32_t handle, lkey, rkey;
};

struct Channel {  // ibv_comp_channel
  Context* context;
  int fd;
  int references;
};

struct Cq {  // ibv_cq; its first member is all we read
  Context* context;
};

struct Srq {  // ibv_srq, a shared receive queue; its first member is all we read
  Context* context;
};

struct SrqInit {  // ibv_srq_init_attr
  void* srq_context;
  std::uint32_t max_wr, max_sge, limit;
};

struct QpCapacity {  // ibv_qp_cap
  std::uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_bytes;
};

struct QpInit {  // ibv_qp_init_attr
  void* qp_context;
  Cq *send_cq, *receive_cq;
  Srq* srq;
  QpCapacity capacity;
  QpType type;
  int signal_all;
};

struct Qp {  // ibv_qp; up to what we read
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq *send_cq, *receive_cq;
  Srq* srq;
  std::uint32_t handle, number;
};

struct GlobalRoute {  // ibv_global_route
  alignas(8) Gid destination;
  std::uint32_t flow_label;
  std::uint8_t gid_index, hop_limit, traffic_class;
};

struct Address {  // ibv_ah_attr
  GlobalRoute route;
  std::uint16_t lid;
  std::uint8_t sl, path_bits, static_rate, is_global, port;
};

struct QpAttributes {  // ibv_qp_attr
  QpState state, current_state;
  int path_mtu;
  int migration_state;
  std::uint32_t qkey, receive_psn, send_psn, destination_qp;
  unsigned access;
  QpCapacity capacity;
  Address address, alternate_address;
  std::uint16_t pkey_index, alternate_pkey_index;
  std::uint8_t notify_drained, draining, max_reads_out, max_reads_in, min_rnr_timer, port;
  std::uint8_t timeout, retry_count, rnr_retry, alternate_port, alternate_timeout;
  std::uint32_t rate_limit;
};

struct Piece {  // ibv_sge
  std::uint64_t address;
  std::uint32_t bytes;
  std::uint32_t lkey;
};

struct SendRequest {  // ibv_send_wr
  std::uint64_t id;
  SendRequest* next;
  Piece* pieces;
  int piece_count;
  SendOpcode opcode;
  unsigned flags;
  std::uint32_t immediate;
  std::uint64_t remote_address;
  std::uint32_t rkey;
  std::uint64_t unused[9];
};

struct ReceiveRequest {  // ibv_recv_wr
  std::uint64_t id;
  ReceiveRequest* next;
  Piece* pieces;
  int piece_count;
};

struct Completion {  // ibv_wc
  std::uint64_t id;
  int status;
  CompletionOpcode opcode;
  std::uint32_t vendor_error, bytes, immediate, qp_number, source_qp;
  unsigned flags;
  std::uint16_t pkey_index, source_lid;
  std::uint8_t sl, path_bits;
};

inline int poll(Cq* cq, int count, Completion* completions) {
  return cq->context->operations.poll_cq(cq, count, completions);
}
inline int request_event(Cq* cq) { return cq->context->operations.req_notify_cq(cq, 0); }
inline int post(Qp* qp, SendRequest* first) {
  SendRequest* bad;
  return qp->context->operations.post_send(qp, first, &bad);
}
inline int post(Qp* qp, ReceiveRequest* first) {
  ReceiveRequest* bad;
  return qp->context->operations.post_recv(qp, first, &bad);
}
inline int post(Srq* srq, ReceiveRequest* first) {
  ReceiveRequest* bad;
  return srq->context->operations.post_srq_recv(srq, first, &bad);
}

}  // namespace dicomm::ibv
