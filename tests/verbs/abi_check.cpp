// Compiles only where transport/verbs/abi.h and cm_abi.h agree with the real headers.
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <cstddef>

#include "transport/verbs/cm_abi.h"

namespace ours = dicomm::ibv;

// The same place and the same width.
#define SAME(our_type, our_member, their_type, their_member)                                  \
  static_assert(offsetof(ours::our_type, our_member) == offsetof(their_type, their_member) && \
                sizeof(ours::our_type::our_member) == sizeof(their_type::their_member))
#define SAME_SIZE(our_type, their_type) static_assert(sizeof(ours::our_type) == sizeof(their_type))
#define SAME_VALUE(our_value, their_value) \
  static_assert(static_cast<long>(ours::our_value) == static_cast<long>(their_value))

SAME(Context, device, ibv_context, device);
SAME(Context, operations, ibv_context, ops);
SAME(Context, operations.poll_cq, ibv_context, ops.poll_cq);
SAME(Context, operations.req_notify_cq, ibv_context, ops.req_notify_cq);
SAME(Context, operations.post_srq_recv, ibv_context, ops.post_srq_recv);
SAME(Context, operations.post_send, ibv_context, ops.post_send);
SAME(Context, operations.post_recv, ibv_context, ops.post_recv);
SAME(Context, async_fd, ibv_context, async_fd);
SAME_SIZE(Context, ibv_context);

SAME(DeviceAttributes, max_qp_wr, ibv_device_attr, max_qp_wr);
SAME(DeviceAttributes, max_sge, ibv_device_attr, max_sge);
SAME(DeviceAttributes, max_cqe, ibv_device_attr, max_cqe);
SAME(DeviceAttributes, max_qp_rd_atom, ibv_device_attr, max_qp_rd_atom);
SAME(DeviceAttributes, max_qp_init_rd_atom, ibv_device_attr, max_qp_init_rd_atom);
SAME(DeviceAttributes, max_srq, ibv_device_attr, max_srq);
SAME(DeviceAttributes, max_srq_wr, ibv_device_attr, max_srq_wr);
SAME(DeviceAttributes, max_srq_sge, ibv_device_attr, max_srq_sge);
SAME(DeviceAttributes, ports, ibv_device_attr, phys_port_cnt);
SAME_SIZE(DeviceAttributes, ibv_device_attr);

SAME(PortAttributes, state, ibv_port_attr, state);
SAME(PortAttributes, active_mtu, ibv_port_attr, active_mtu);
SAME(PortAttributes, max_msg_bytes, ibv_port_attr, max_msg_sz);
SAME(PortAttributes, lid, ibv_port_attr, lid);
SAME(PortAttributes, link_layer, ibv_port_attr, link_layer);
SAME_SIZE(PortAttributes, ibv_port_attr);

SAME(MemoryRegion, lkey, ibv_mr, lkey);
SAME(MemoryRegion, rkey, ibv_mr, rkey);
SAME_SIZE(MemoryRegion, ibv_mr);
SAME(Channel, fd, ibv_comp_channel, fd);
SAME(Cq, context, ibv_cq, context);
SAME(Srq, context, ibv_srq, context);
SAME(SrqInit, max_wr, ibv_srq_init_attr, attr.max_wr);
SAME(SrqInit, max_sge, ibv_srq_init_attr, attr.max_sge);
SAME(SrqInit, limit, ibv_srq_init_attr, attr.srq_limit);
SAME_SIZE(SrqInit, ibv_srq_init_attr);
SAME(Qp, context, ibv_qp, context);
SAME(Qp, srq, ibv_qp, srq);
SAME(Qp, number, ibv_qp, qp_num);

SAME(QpInit, send_cq, ibv_qp_init_attr, send_cq);
SAME(QpInit, receive_cq, ibv_qp_init_attr, recv_cq);
SAME(QpInit, srq, ibv_qp_init_attr, srq);
SAME(QpInit, capacity, ibv_qp_init_attr, cap);
SAME(QpInit, capacity.max_inline_bytes, ibv_qp_init_attr, cap.max_inline_data);
SAME(QpInit, type, ibv_qp_init_attr, qp_type);
SAME(QpInit, signal_all, ibv_qp_init_attr, sq_sig_all);
SAME_SIZE(QpInit, ibv_qp_init_attr);

SAME(QpAttributes, path_mtu, ibv_qp_attr, path_mtu);
SAME(QpAttributes, receive_psn, ibv_qp_attr, rq_psn);
SAME(QpAttributes, send_psn, ibv_qp_attr, sq_psn);
SAME(QpAttributes, destination_qp, ibv_qp_attr, dest_qp_num);
SAME(QpAttributes, access, ibv_qp_attr, qp_access_flags);
SAME(QpAttributes, address, ibv_qp_attr, ah_attr);
SAME(QpAttributes, address.lid, ibv_qp_attr, ah_attr.dlid);
SAME(QpAttributes, address.is_global, ibv_qp_attr, ah_attr.is_global);
SAME(QpAttributes, address.port, ibv_qp_attr, ah_attr.port_num);
SAME(QpAttributes, address.route.gid_index, ibv_qp_attr, ah_attr.grh.sgid_index);
SAME(QpAttributes, address.route.hop_limit, ibv_qp_attr, ah_attr.grh.hop_limit);
SAME(QpAttributes, address.route.traffic_class, ibv_qp_attr, ah_attr.grh.traffic_class);
SAME(QpAttributes, pkey_index, ibv_qp_attr, pkey_index);
SAME(QpAttributes, max_reads_out, ibv_qp_attr, max_rd_atomic);
SAME(QpAttributes, max_reads_in, ibv_qp_attr, max_dest_rd_atomic);
SAME(QpAttributes, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME(QpAttributes, port, ibv_qp_attr, port_num);
SAME(QpAttributes, timeout, ibv_qp_attr, timeout);
SAME(QpAttributes, retry_count, ibv_qp_attr, retry_cnt);
SAME(QpAttributes, rnr_retry, ibv_qp_attr, rnr_retry);
SAME_SIZE(QpAttributes, ibv_qp_attr);

SAME(Piece, lkey, ibv_sge, lkey);
SAME_SIZE(Piece, ibv_sge);
SAME(SendRequest, pieces, ibv_send_wr, sg_list);
SAME(SendRequest, opcode, ibv_send_wr, opcode);
SAME(SendRequest, flags, ibv_send_wr, send_flags);
SAME(SendRequest, immediate, ibv_send_wr, imm_data);
SAME(SendRequest, remote_address, ibv_send_wr, wr.rdma.remote_addr);
SAME(SendRequest, rkey, ibv_send_wr, wr.rdma.rkey);
static_assert(sizeof(ours::SendRequest) >= sizeof(ibv_send_wr));
SAME(ReceiveRequest, pieces, ibv_recv_wr, sg_list);
SAME_SIZE(ReceiveRequest, ibv_recv_wr);
SAME(Completion, status, ibv_wc, status);
SAME(Completion, opcode, ibv_wc, opcode);
SAME(Completion, bytes, ibv_wc, byte_len);
SAME(Completion, immediate, ibv_wc, imm_data);
SAME(Completion, flags, ibv_wc, wc_flags);
SAME_SIZE(Completion, ibv_wc);

SAME_VALUE(PortState::active, IBV_PORT_ACTIVE);
SAME_VALUE(kInfiniband, IBV_LINK_LAYER_INFINIBAND);
SAME_VALUE(kEthernet, IBV_LINK_LAYER_ETHERNET);
SAME_VALUE(QpType::rc, IBV_QPT_RC);
SAME_VALUE(QpState::init, IBV_QPS_INIT);
SAME_VALUE(QpState::rtr, IBV_QPS_RTR);
SAME_VALUE(QpState::rts, IBV_QPS_RTS);
SAME_VALUE(QpState::error, IBV_QPS_ERR);
SAME_VALUE(kLocalWrite, IBV_ACCESS_LOCAL_WRITE);
SAME_VALUE(kRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
SAME_VALUE(kRemoteRead, IBV_ACCESS_REMOTE_READ);
SAME_VALUE(SendOpcode::rdma_write, IBV_WR_RDMA_WRITE);
SAME_VALUE(SendOpcode::send, IBV_WR_SEND);
SAME_VALUE(SendOpcode::send_imm, IBV_WR_SEND_WITH_IMM);
SAME_VALUE(SendOpcode::rdma_read, IBV_WR_RDMA_READ);
SAME_VALUE(kSignaled, IBV_SEND_SIGNALED);
SAME_VALUE(kInline, IBV_SEND_INLINE);
SAME_VALUE(kWithImmediate, IBV_WC_WITH_IMM);
SAME_VALUE(kFlushed, IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(kRnrRetryExceeded, IBV_WC_RNR_RETRY_EXC_ERR);
SAME_VALUE(CompletionOpcode::send, IBV_WC_SEND);
SAME_VALUE(CompletionOpcode::rdma_write, IBV_WC_RDMA_WRITE);
SAME_VALUE(CompletionOpcode::rdma_read, IBV_WC_RDMA_READ);
SAME_VALUE(CompletionOpcode::receive, IBV_WC_RECV);
SAME_VALUE(kState, IBV_QP_STATE);
SAME_VALUE(kAccessFlags, IBV_QP_ACCESS_FLAGS);
SAME_VALUE(kPkeyIndex, IBV_QP_PKEY_INDEX);
SAME_VALUE(kPort, IBV_QP_PORT);
SAME_VALUE(kAddressVector, IBV_QP_AV);
SAME_VALUE(kPathMtu, IBV_QP_PATH_MTU);
SAME_VALUE(kTimeout, IBV_QP_TIMEOUT);
SAME_VALUE(kRetryCount, IBV_QP_RETRY_CNT);
SAME_VALUE(kRnrRetry, IBV_QP_RNR_RETRY);
SAME_VALUE(kReceivePsn, IBV_QP_RQ_PSN);
SAME_VALUE(kMaxReadsOut, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(kMinRnrTimer, IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(kSendPsn, IBV_QP_SQ_PSN);
SAME_VALUE(kMaxReadsIn, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(kDestinationQp, IBV_QP_DEST_QPN);

#undef SAME
#undef SAME_VALUE
#define SAME(our_type, our_member, their_type, their_member)                                \
  static_assert(offsetof(cm::our_type, our_member) == offsetof(their_type, their_member) && \
                sizeof(cm::our_type::our_member) == sizeof(their_type::their_member))
#define SAME_VALUE(our_value, their_value) \
  static_assert(static_cast<long>(cm::our_value) == static_cast<long>(their_value))

namespace cm = dicomm::cm;

SAME(Channel, fd, rdma_event_channel, fd);
SAME(Id, verbs, rdma_cm_id, verbs);
SAME(Id, channel, rdma_cm_id, channel);
SAME(Id, route, rdma_cm_id, route);
SAME(Id, route.source, rdma_cm_id, route.addr.src_storage);
SAME(Id, route.destination, rdma_cm_id, route.addr.dst_storage);
SAME(Id, port, rdma_cm_id, port_num);

SAME(Parameters, private_data, rdma_conn_param, private_data);
SAME(Parameters, private_bytes, rdma_conn_param, private_data_len);
SAME(Parameters, reads_in, rdma_conn_param, responder_resources);
SAME(Parameters, reads_out, rdma_conn_param, initiator_depth);
SAME(Parameters, flow_control, rdma_conn_param, flow_control);
SAME(Parameters, retry_count, rdma_conn_param, retry_count);
SAME(Parameters, rnr_retry, rdma_conn_param, rnr_retry_count);
SAME(Parameters, srq, rdma_conn_param, srq);
SAME(Parameters, qp_number, rdma_conn_param, qp_num);
static_assert(sizeof(cm::Parameters) == sizeof(rdma_conn_param));

SAME(Event, id, rdma_cm_event, id);
SAME(Event, listener, rdma_cm_event, listen_id);
SAME(Event, type, rdma_cm_event, event);
SAME(Event, status, rdma_cm_event, status);
SAME(Event, parameters, rdma_cm_event, param.conn);

SAME_VALUE(PortSpace::tcp, RDMA_PS_TCP);
SAME_VALUE(EventType::address_resolved, RDMA_CM_EVENT_ADDR_RESOLVED);
SAME_VALUE(EventType::route_resolved, RDMA_CM_EVENT_ROUTE_RESOLVED);
SAME_VALUE(EventType::connect_request, RDMA_CM_EVENT_CONNECT_REQUEST);
SAME_VALUE(EventType::connect_response, RDMA_CM_EVENT_CONNECT_RESPONSE);
SAME_VALUE(EventType::rejected, RDMA_CM_EVENT_REJECTED);
SAME_VALUE(EventType::established, RDMA_CM_EVENT_ESTABLISHED);
SAME_VALUE(EventType::disconnected, RDMA_CM_EVENT_DISCONNECTED);
SAME_VALUE(kIdLevel, RDMA_OPTION_ID);
SAME_VALUE(kTypeOfService, RDMA_OPTION_ID_TOS);
