#include "elements.h"

#include "core/communicator.h"

namespace dicomm {

namespace {

constexpr c10::ScalarType kReduced[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                        at::kChar,  at::kShort,  at::kInt,  at::kLong,
                                        at::kByte,  at::kBool};

DataType data_type(c10::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DataType::float32;
    case at::kDouble:
      return DataType::float64;
    case at::kHalf:
      return DataType::float16;
    case at::kBFloat16:
      return DataType::bfloat16;
    case at::kChar:
      return DataType::int8;
    case at::kShort:
      return DataType::int16;
    case at::kInt:
      return DataType::int32;
    case at::kLong:
      return DataType::int64;
    case at::kByte:
      return DataType::uint8;
    case at::kBool:
      return DataType::boolean;
    default:
      TORCH_CHECK_TYPE(false, "dicomm: no reductions over ", type,
                       "; such tensors can be moved, gathered and scattered");
  }
}

ReduceOp reduce_op(const c10d::ReduceOp& op) {
  constexpr ReduceOp known[] = {ReduceOp::sum, ReduceOp::avg,  ReduceOp::product, ReduceOp::min,
                                ReduceOp::max, ReduceOp::band, ReduceOp::bor,     ReduceOp::bxor};
  static_assert(c10d::ReduceOp::BXOR == 7);
  TORCH_CHECK_VALUE(op.op_ <= c10d::ReduceOp::BXOR, "dicomm: this reduction is not supported; ",
                    "SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR are");
  return known[op.op_];
}

}  // namespace

c10::ScalarType scalar_type(DataType type) {
  for (const c10::ScalarType torch_type : kReduced)
    if (data_type(torch_type) == type) return torch_type;
  throw Error("unknown element type");
}

Reduction reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& torch_op) {
  const ReduceOp op = reduce_op(torch_op);
  if (tensor.is_complex()) {
    TORCH_CHECK_VALUE(op == ReduceOp::sum || op == ReduceOp::avg,
                      "dicomm: complex numbers can be reduced by SUM and AVG only");
    return {data_type(c10::toRealValueType(tensor.scalar_type())), op, 2};
  }
  const DataType type = data_type(tensor.scalar_type());
  try {
    check_reduction(type, op);
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(false, "dicomm: ", error.what());
  }
  return {type, op, 1};
}

}  // namespace dicomm
