#include "ops/operator.h"

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

namespace ditorch {
namespace {

struct Registry {
  std::shared_mutex mutex;
  std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Operator>> operators;
};

Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

// Products of matrices, and the position of their left operand; the right one follows it.
void find_product(Operator& op) {
  static const std::map<std::string_view, size_t> left_operands = {
      {"mm", 0},    {"bmm", 0},   {"mv", 0},      {"dot", 0},    {"vdot", 0},       {"linear", 0},
      {"addmm", 1}, {"addmv", 1}, {"baddbmm", 1}, {"addbmm", 1}, {"_grouped_mm", 0}};
  std::string_view name = op.name;
  if (name.ends_with('_')) name.remove_suffix(1);
  if (auto found = left_operands.find(name); found != left_operands.end()) {
    op.product = name == "linear" ? Product::linear : Product::matrix;
    op.left = found->second;
  } else if (name.starts_with("_scaled_dot_product_fused_attention_overrideable") ||
             name == "_flash_attention_forward" || name == "_flash_attention_backward") {
    op.product = Product::attention;
  }
}

// Which arguments the operator writes to: what its schema says, and the running statistics that
// batch norm's schema is silent about.
std::vector<bool> find_writes(const c10::FunctionSchema& schema, std::string_view name) {
  const bool is_batch_norm = name == "native_batch_norm" || name == "batch_norm_update_stats" ||
                             name.starts_with("batch_norm_gather_stats");
  std::vector<bool> writes;
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    writes.push_back((alias && alias->isWrite()) ||
                     (is_batch_norm && argument.name().starts_with("running_")));
  }
  return writes;
}

// Whether it only shows memory in another shape, as a new tensor or in place.
bool is_view(const c10::OperatorHandle& handle) {
  if (handle.hasTag(at::Tag::inplace_view)) return true;
  const auto& results = handle.schema().returns();
  return !results.empty() && std::all_of(results.begin(), results.end(), [](const auto& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

// Whether the host's kernel is of no use in narrow dtypes, without saying so as others do: MKL has
// its own words for it, and a picture is sampled pixels away where its grid is worked out in them.
bool misses_narrow_dtypes(std::string_view name) {
  return name.starts_with("_fft_") || name.starts_with("grid_sampler_");
}

std::unique_ptr<Operator> describe(const c10::OperatorHandle& handle) {
  const auto& schema = handle.schema();
  auto op = std::make_unique<Operator>();
  const auto& qualified = schema.name();
  auto colon = qualified.rfind(':');
  op->name = colon == std::string::npos ? qualified : qualified.substr(colon + 1);
  // A structured operator is one computation in all its forms, so add_ counts as add.
  if (handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) &&
      op->name.ends_with('_')) {
    op->name.pop_back();
  }

  op->is_view = is_view(handle);
  op->writes = find_writes(schema, op->name);
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto type = schema.arguments()[i].type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) op->generator = i;
  }
  op->seeded = handle.hasTag(at::Tag::nondeterministic_seeded);
  op->synchronizes =
      handle.hasTag(at::Tag::data_dependent_output) || handle.hasTag(at::Tag::dynamic_output_shape);
  find_product(*op);
  op->host_kernel = find_host_kernel(qualified);
  if (misses_narrow_dtypes(op->name)) op->missing_dtypes = UINT8_MAX;
  op->vendor_kernel = find_vendor_kernel(qualified, schema.overload_name());
  return op;
}

std::map<std::string, uint64_t> count(std::atomic<uint64_t> Operator::* runs) {
  std::map<std::string, uint64_t> counts;
  std::shared_lock lock(registry().mutex);
  for (const auto& [schema, op] : registry().operators) {
    if (auto found = ((*op).*runs).load()) counts[op->name] += found;
  }
  return counts;
}

}  // namespace

thread_local constinit uint64_t host_runs_here = 0;

Operator& Operator::of(const c10::OperatorHandle& handle) {
  // Programs launch the same few operators again and again: those need no lock.
  struct Recent {
    const c10::FunctionSchema* schema;
    Operator* op;
  };
  constexpr size_t kRecent = 256;
  thread_local constinit std::array<Recent, kRecent> recent{};
  const auto* key = &handle.schema();
  auto& slot = recent[std::hash<const void*>{}(key) / alignof(c10::FunctionSchema) % kRecent];
  if (slot.schema != key) slot = {key, &find(handle)};
  return *slot.op;
}

Operator& Operator::find(const c10::OperatorHandle& handle) {
  auto& all = registry();
  const auto* key = &handle.schema();
  {
    std::shared_lock lock(all.mutex);
    if (auto found = all.operators.find(key); found != all.operators.end()) return *found->second;
  }
  auto described = describe(handle);
  std::unique_lock lock(all.mutex);
  return *all.operators.try_emplace(key, std::move(described)).first->second;
}

std::map<std::string, uint64_t> fallback_counts() { return count(&Operator::host_runs); }

std::map<std::string, uint64_t> kernel_counts() { return count(&Operator::chip_runs); }

void reset_fallback_counts() {
  std::shared_lock lock(registry().mutex);
  for (const auto& [schema, op] : registry().operators) op->host_runs = 0;
}

}  // namespace ditorch
