#include "ops/fused_adam.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>

#include "ops/formula.h"
#include "ops/optional_tensor.h"
#include "ops/tensors.h"

namespace ditorch::fused_adam {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Results = std::vector<c10::IValue>;
using Tensors = std::vector<at::Tensor>;

// A formula over operands, and the operand that takes its value.
struct Store {
  Formula value;
  int32_t operand;
};

// Programs over lists: the i-th call sees the i-th tensor of each operand, or its only one.
class Lists {
 public:
  explicit Lists(const ditorch_context& context, ditorch_dtype compute)
      : context_(context), compute_(compute) {}

  // The operand of tensors that are alike element by element; the first decides how many there are.
  int32_t add(const Tensors& tensors) { return add(tensors, 1); }
  // That of scalars, one for a tensor; and of one for all.
  int32_t add_scalars(const Tensors& tensors) { return add(tensors, 0); }
  int32_t add_scalar(const at::Tensor& tensor) { return add({tensor}, 0); }

  // Whether one program may be so long.
  static bool fits(const std::vector<Store>& stores) {
    size_t instructions = 0;
    for (const auto& [value, operand] : stores) instructions += value.size() + 1;
    return instructions <= DITORCH_MAP_INSTRUCTIONS;
  }

  // All values are there before the first is stored, so that all are of what was.
  ditorch_status run(const std::vector<Store>& stores) const {
    Program program;
    for (const auto& store : stores) {
      for (const Step& step : store.value) {
        if (step.kind == Step::opcode) {
          program.step(static_cast<ditorch_opcode>(step.index));
        } else if (step.kind == Step::constant) {
          program.constant(step.value, 0);
        } else {
          program.load(step.index);
        }
      }
    }
    for (auto store = stores.rbegin(); store != stores.rend(); ++store) {
      program.store(store->operand);
    }
    return launch(program);
  }

 private:
  struct Operand {
    Tensors tensors;
    int64_t stride;
  };

  // It is taken in once.
  int32_t add(const Tensors& tensors, int64_t stride) {
    for (size_t i = 0; i < operands_.size(); ++i) {
      if (operands_[i].tensors[0].is_same(tensors[0])) return static_cast<int32_t>(i);
    }
    operands_.push_back({tensors, stride});
    return static_cast<int32_t>(operands_.size()) - 1;
  }

  ditorch_status launch(const Program& program) const {
    std::vector<ditorch_dtype> dtypes;
    std::vector<int64_t> strides, elements;
    std::vector<void*> data;
    for (const auto& operand : operands_) {
      dtypes.push_back(abi_dtype(operand.tensors.front().scalar_type()));
      strides.push_back(operand.stride);
    }
    const auto& walked = operands_.front().tensors;
    for (size_t i = 0; i < walked.size(); ++i) {
      elements.push_back(walked[i].numel());
      for (const auto& [tensors, stride] : operands_) {
        data.push_back(tensors[tensors.size() == 1 ? 0 : i].mutable_data_ptr());
      }
    }
    const ditorch_map_list call{sizeof(call),
                                compute_,
                                static_cast<int32_t>(operands_.size()),
                                program.size(),
                                static_cast<int32_t>(walked.size()),
                                dtypes.data(),
                                strides.data(),
                                elements.data(),
                                data.data(),
                                program.data()};
    return vendor().operators->map_list(&context_, &call);
  }

  const ditorch_context& context_;
  ditorch_dtype compute_;
  std::vector<Operand> operands_;
};

// What the operators are given: parameters that have elements, and what belongs to each.
struct Call {
  Tensors parameters, gradients, averages, squares, largest, steps;
  double rate, beta1, beta2, decay, epsilon;
  at::Tensor rate_on_chip;  // undefined: it is a number
  bool maximizes;
  at::Tensor grad_scale, found_inf;  // undefined: there is none

  // Nothing where programs cannot have it.
  static std::optional<Call> of(Arguments arguments) {
    Call call;
    Tensors* lists[] = {&call.parameters, &call.gradients, &call.averages,
                        &call.squares,    &call.largest,   &call.steps};
    const auto given = arguments[0].toTensorVector();
    for (size_t list = 0; list < std::size(lists); ++list) {
      const auto tensors = arguments[list].toTensorVector();
      if (tensors.empty() && lists[list] == &call.largest) continue;
      if (tensors.size() != given.size()) return std::nullopt;
      for (size_t i = 0; i < given.size(); ++i) {
        if (given[i].numel() > 0) lists[list]->push_back(tensors[i]);
      }
    }
    if (!arguments[11].toBool()) call.largest.clear();
    const auto rate = number(arguments[6]);
    call.rate = rate ? rate->toDouble() : 0;
    if (!rate) call.rate_on_chip = arguments[6].toTensor();
    call.beta1 = arguments[7].toDouble();
    call.beta2 = arguments[8].toDouble();
    call.decay = arguments[9].toDouble();
    call.epsilon = arguments[10].toDouble();
    call.maximizes = arguments[12].toBool();
    call.grad_scale = optional_tensor(arguments[13]);
    call.found_inf = optional_tensor(arguments[14]);
    if (!call.parameters.empty() && !call.is_describable()) return std::nullopt;
    return call;
  }

 private:
  bool is_describable() const {
    for (const Tensors* list : {&parameters, &gradients, &averages, &squares, &largest}) {
      for (size_t i = 0; i < list->size(); ++i) {
        const auto &tensor = (*list)[i], &first = list->front();
        if (!are_plain({first, tensor}) || tensor.scalar_type() != first.scalar_type() ||
            !are_alike(tensor, parameters[i])) {
          return false;
        }
      }
    }
    return std::all_of(steps.begin(), steps.end(),
                       [this](const at::Tensor& step) {
                         return is_scalar(step) && step.scalar_type() == steps[0].scalar_type();
                       }) &&
           is_scalar(rate_on_chip) && is_scalar(grad_scale) && is_scalar(found_inf);
  }

  bool is_scalar(const at::Tensor& tensor) const {
    return !tensor.defined() || (tensor.numel() == 1 && are_plain({parameters[0], tensor}));
  }
};

// Adam (Kingma and Ba, algorithm 1), or AdamW, which decays parameters beside their gradients.
class Adam {
 public:
  Adam(const ditorch_context& context, Call call, bool is_decoupled)
      : context_(context),
        call_(std::move(call)),
        is_decoupled_(is_decoupled),
        options_(call_.parameters[0].options().dtype(wide_dtype(call_.parameters[0]))),
        compute_(abi_dtype(wide_dtype(call_.parameters[0]))) {}

  // Whether a program has so many operands: for hardly any call it has not.
  bool fits() const {
    const size_t operands = 6 + !call_.largest.empty() + (is_scaled() || may_be_left_out()) +
                            (decays_apart() && call_.rate_on_chip.defined());
    return operands <= DITORCH_MAP_OPERANDS;
  }

  ditorch_status step() {
    auto status = correct();
    if (status == DITORCH_OK && decays_gradients()) status = decay_gradients();
    if (status == DITORCH_OK) status = update();
    return status == DITORCH_OK && is_scaled() && decays_gradients() ? unscale() : status;
  }

 private:
  // What the steps so far say: the rate over 1 - beta1^t, and the root of 1 / (1 - beta2^t). What
  // gradients are to be multiplied by: 0 where the step is left out, as they are not finite.
  ditorch_status correct() {
    const auto count = static_cast<int64_t>(call_.steps.size());
    Lists lists(context_, compute_);
    const auto add_scratch = [&](Tensors& kept) {
      kept = at::empty({count}, options_).unbind();
      return lists.add(kept);
    };
    const int32_t rate = add_scratch(rates_), root = add_scratch(roots_);
    const Step taken = argument(lists.add(call_.steps));
    std::vector<Store> stores = {
        {over_bias(call_.beta1, taken) + Formula{rate_in(lists), DITORCH_MULTIPLY}, rate},
        {over_bias(call_.beta2, taken) + Formula{DITORCH_SQRT}, root}};
    if (is_scaled() || may_be_left_out()) {
      Formula factor = {1.0};
      if (is_scaled()) {
        factor = {argument(lists.add_scalar(call_.grad_scale)), DITORCH_RECIPROCAL};
      }
      if (may_be_left_out()) {
        factor = Formula{argument(lists.add_scalar(call_.found_inf)), 0.0} + factor +
                 Formula{DITORCH_SELECT};
      }
      stores.push_back({factor, add_scratch(factors_)});
    }
    return lists.run(stores);
  }

  // Gradients of a loss that is larger by the decay's share of half the parameters' squares.
  ditorch_status decay_gradients() {
    decayed_.clear();
    for (const auto& gradient : call_.gradients) decayed_.push_back(at::empty_like(gradient));
    Lists lists(context_, compute_);
    const int32_t written = lists.add(decayed_);
    const Step parameter = argument(lists.add(call_.parameters));
    return lists.run(
        {{gradient_in(lists) + Formula{parameter, call_.decay, DITORCH_MULTIPLY, DITORCH_ADD},
          written}});
  }

  // All of a tensor in one pass, if a program may be that long: else parameters come first.
  ditorch_status update() {
    Lists lists(context_, compute_);
    const Step parameter = argument(lists.add(call_.parameters));
    const Step average = argument(lists.add(call_.averages));
    const Step square = argument(lists.add(call_.squares));
    const Step rate = argument(lists.add_scalars(rates_)),
               root = argument(lists.add_scalars(roots_));
    const Formula gradient =
        decayed_.empty() ? gradient_in(lists) : Formula{argument(lists.add(decayed_))};
    const Formula averaged = gradient + Formula{average,          DITORCH_SUBTRACT, 1 - call_.beta1,
                                                DITORCH_MULTIPLY, average,          DITORCH_ADD};
    const Formula squared =
        gradient + gradient + Formula{DITORCH_MULTIPLY, 1 - call_.beta2,  DITORCH_MULTIPLY, square,
                                      call_.beta2,      DITORCH_MULTIPLY, DITORCH_ADD};
    Formula spread = squared;
    std::vector<Store> stores = {{averaged, average.index}, {squared, square.index}};
    if (!call_.largest.empty()) {
      const Step largest = argument(lists.add(call_.largest));
      spread = Formula{largest} + squared + Formula{DITORCH_MAXIMUM};
      stores.push_back({spread, largest.index});
    }
    if (is_scaled() && !decays_gradients()) stores.push_back(unscaled_in(lists));
    Formula decayed = {parameter};
    if (decays_apart() && call_.rate_on_chip.defined()) {
      decayed = {
          parameter,       1.0, rate_in(lists), call_.decay, DITORCH_MULTIPLY, DITORCH_SUBTRACT,
          DITORCH_MULTIPLY};
    } else if (decays_apart()) {
      decayed = {parameter, 1 - call_.rate * call_.decay, DITORCH_MULTIPLY};
    }
    const Formula moved = decayed + Formula{rate} + averaged + Formula{DITORCH_MULTIPLY} + spread +
                          Formula{DITORCH_SQRT, root,           DITORCH_MULTIPLY, call_.epsilon,
                                  DITORCH_ADD,  DITORCH_DIVIDE, DITORCH_SUBTRACT};
    stores.insert(stores.begin(), {moved, parameter.index});
    for (auto& store : stores) store = left_out(lists, store);
    if (Lists::fits(stores)) return lists.run(stores);
    const auto status = lists.run({stores[0]});
    return status == DITORCH_OK ? lists.run({stores.begin() + 1, stores.end()}) : status;
  }

  // Gradients of the update's own are none of the caller's, who is still to find his unscaled.
  ditorch_status unscale() {
    Lists lists(context_, compute_);
    return lists.run({left_out(lists, unscaled_in(lists))});
  }

  Store unscaled_in(Lists& lists) const {
    const int32_t given = lists.add(call_.gradients);
    return {Formula{argument(given), factor_in(lists), DITORCH_MULTIPLY}, given};
  }

  // What was there stays, where the step is left out.
  Store left_out(Lists& lists, const Store& store) const {
    if (!may_be_left_out()) return store;
    const auto& [value, operand] = store;
    return {Formula{factor_in(lists)} + value + Formula{argument(operand), DITORCH_SELECT},
            operand};
  }

  bool decays_apart() const { return is_decoupled_ && call_.decay != 0; }
  bool decays_gradients() const { return !is_decoupled_ && call_.decay != 0; }
  bool is_scaled() const { return call_.grad_scale.defined(); }
  bool may_be_left_out() const { return call_.found_inf.defined(); }

  // What the loss falls along, or rises if it is to be as large as can be.
  Formula gradient_in(Lists& lists) const {
    Formula gradient = {argument(lists.add(call_.gradients))};
    if (is_scaled()) gradient = gradient + Formula{factor_in(lists), DITORCH_MULTIPLY};
    return call_.maximizes ? gradient + Formula{DITORCH_NEGATE} : gradient;
  }

  Step factor_in(Lists& lists) const { return argument(lists.add_scalars(factors_)); }

  // 1 / (1 - beta^t), which is (1 / tanh(-t * log(beta) / 2) + 1) / 2: the difference itself would
  // be left with few digits.
  static Formula over_bias(double beta, const Step& taken) {
    constexpr double kAtOnce = 64;  // of which the hyperbolic tangent is 1
    const double halved = beta > 0 ? -std::log(beta) / 2 : kAtOnce;
    return {taken,       halved, DITORCH_MULTIPLY, DITORCH_TANH, DITORCH_RECIPROCAL, 1.0,
            DITORCH_ADD, 0.5,    DITORCH_MULTIPLY};
  }

  Step rate_in(Lists& lists) const {
    if (!call_.rate_on_chip.defined()) return Step(call_.rate);
    return argument(lists.add_scalar(call_.rate_on_chip));
  }

  const ditorch_context& context_;
  Call call_;
  bool is_decoupled_;
  at::TensorOptions options_;
  ditorch_dtype compute_;
  Tensors rates_, roots_, factors_;  // what correct() found, of every tensor
  Tensors decayed_;                  // gradients with weight decay, if it is not decoupled
};

// _fused_adam_(parameters, gradients, averages, squares, largest squares, steps, lr, beta1, beta2,
// weight_decay, eps, amsgrad, maximize, grad_scale, found_inf), _fused_adamw_ alike
template <bool is_decoupled>
ditorch_status step(const ditorch_context& context, Arguments arguments, Results&) {
  auto call = Call::of(arguments);
  if (!call || !vendor().operators->map_list) return DITORCH_NOT_IMPLEMENTED;
  if (call->parameters.empty()) return DITORCH_OK;
  Adam adam(context, std::move(*call), is_decoupled);
  return adam.fits() ? adam.step() : DITORCH_NOT_IMPLEMENTED;
}

}  // namespace

VendorKernels all_kernels() {
  return {
      {"aten::_fused_adam_", step<false>},
      {"aten::_fused_adam_.tensor_lr", step<false>},
      {"aten::_fused_adamw_", step<true>},
      {"aten::_fused_adamw_.tensor_lr", step<true>},
  };
}

}  // namespace ditorch::fused_adam
