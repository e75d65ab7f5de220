#include "map_text.h"

#include <algorithm>
#include <optional>

#include "sources.h"
#include "tensor.h"

namespace opencl {
namespace {

std::string stack_type(ditorch_dtype compute) {
  return compute == DITORCH_FLOAT64 ? "double" : compute == DITORCH_INT64 ? "long" : "float";
}

// Puts values in place of $0, $1 and $2.
std::string filled(std::string text, const std::vector<std::string>& values) {
  for (size_t at = 0; (at = text.find('$', at)) != std::string::npos;) {
    const std::string& value = values[static_cast<size_t>(text[at + 1] - '0')];
    text.replace(at, 2, value);
    at += value.size();
  }
  return text;
}

struct Step {
  int32_t taken;  // values off the stack
  const char* text;
};

std::optional<Step> step_of_integers(int32_t opcode) {
  switch (opcode) {
    case DITORCH_FLOOR_DIVIDE:  // the lowest integer divided by -1 would trap
      return Step{2, "$1 == -1 ? -$0 : $0 / $1 - ($0 % $1 != 0 && ($0 < 0) != ($1 < 0))"};
    case DITORCH_BIT_AND:
      return Step{2, "$0 & $1"};
    case DITORCH_BIT_OR:
      return Step{2, "$0 | $1"};
    case DITORCH_BIT_XOR:
      return Step{2, "$0 ^ $1"};
    case DITORCH_SHIFT_LEFT:
      return Step{2, "$0 << $1"};
    case DITORCH_SHIFT_RIGHT:
      return Step{2, "$0 >> $1"};
    default:
      return std::nullopt;
  }
}

std::optional<Step> step_of_floats(int32_t opcode) {
  switch (opcode) {
    case DITORCH_SQRT:
      return Step{1, "sqrt($0)"};
    case DITORCH_RSQRT:
      return Step{1, "1 / sqrt($0)"};
    case DITORCH_RECIPROCAL:
      return Step{1, "1 / $0"};
    case DITORCH_EXP:
      return Step{1, "exp($0)"};
    case DITORCH_LOG:
      return Step{1, "log($0)"};
    case DITORCH_SIN:
      return Step{1, "sin($0)"};
    case DITORCH_COS:
      return Step{1, "cos($0)"};
    case DITORCH_TANH:
      return Step{1, "tanh($0)"};
    case DITORCH_ERF:
      return Step{1, "erf($0)"};
    case DITORCH_SIGMOID:
      return Step{1, "1 / (1 + exp(-$0))"};
    case DITORCH_FLOOR:
      return Step{1, "floor($0)"};
    case DITORCH_TRUNCATE:
      return Step{1, "trunc($0)"};
    case DITORCH_DIVIDE:
      return Step{2, "$0 / $1"};
    case DITORCH_POWER:
      return Step{2, "pow($0, $1)"};
    default:
      return std::nullopt;
  }
}

std::optional<Step> step_of(int32_t opcode, bool in_integers) {
  switch (opcode) {
    case DITORCH_NEGATE:
      return Step{1, "-$0"};
    case DITORCH_ABS:
      return Step{1, in_integers ? "($0 < 0 ? -$0 : $0)" : "fabs($0)"};
    case DITORCH_NOT:
      return Step{1, "$0 == 0"};
    case DITORCH_ADD:
      return Step{2, "$0 + $1"};
    case DITORCH_SUBTRACT:
      return Step{2, "$0 - $1"};
    case DITORCH_MULTIPLY:
      return Step{2, "$0 * $1"};
    case DITORCH_MINIMUM:  // NaN if either is
      return Step{2, "($0 != $0 || $0 < $1) ? $0 : $1"};
    case DITORCH_MAXIMUM:
      return Step{2, "($0 != $0 || $0 > $1) ? $0 : $1"};
    case DITORCH_LESS:
      return Step{2, "$0 < $1"};
    case DITORCH_LESS_EQUAL:
      return Step{2, "$0 <= $1"};
    case DITORCH_EQUAL:
      return Step{2, "$0 == $1"};
    case DITORCH_AND:
      return Step{2, "$0 != 0 && $1 != 0"};
    case DITORCH_OR:
      return Step{2, "$0 != 0 || $1 != 0"};
    case DITORCH_SELECT:
      return Step{3, "$0 != 0 ? $1 : $2"};
    default:
      return in_integers ? step_of_integers(opcode) : step_of_floats(opcode);
  }
}

std::string operand_name(size_t operand) { return "operand" + std::to_string(operand); }

// Where the operand's element `i` of a run lies.
std::string place_of(const MapShape& shape, size_t operand) {
  const std::string begin = "begin" + std::to_string(operand);
  if (shape.last_strides[operand] == 0) return begin;
  if (shape.last_strides[operand] == 1) return begin + " + i";
  return begin + " + i * walk.strides[" + std::to_string(operand) + "][" +
         std::to_string(shape.dimensions - 1) + "]";
}

std::string loaded(const Device& device, const MapShape& shape, size_t operand) {
  return "get_" + element_of(device, shape.dtypes[operand]) + "(" + operand_name(operand) + ", " +
         place_of(shape, operand) + ")";
}

std::string stored(const Device& device, const MapShape& shape, size_t operand,
                   const std::string& value) {
  const ditorch_dtype dtype = shape.dtypes[operand];
  return "put_" + element_of(device, dtype) + "(" + operand_name(operand) + ", " +
         place_of(shape, operand) + ", " + value + (dtype == DITORCH_BOOL ? " != 0" : "") + ");";
}

// Whether the device has a form of every step, and room for every constant.
bool has_every_step(const MapShape& shape) {
  const bool in_integers = shape.compute == DITORCH_INT64;
  int32_t constants = 0, depth = 0;
  for (int32_t i = 0; i < shape.count; ++i) {
    const int32_t opcode = shape.instructions[i].opcode;
    constants += opcode == DITORCH_CONSTANT;
    if (opcode == DITORCH_RANDOM && in_integers) return false;
    if (opcode == DITORCH_LOAD || opcode == DITORCH_CONSTANT || opcode == DITORCH_PLACE ||
        opcode == DITORCH_RANDOM) {
      ++depth;
    } else if (opcode == DITORCH_STORE) {
      --depth;
    } else {
      const auto step = step_of(opcode, in_integers);
      if (!step || depth < step->taken) return false;
      depth += 1 - step->taken;
    }
    if (depth < 0) return false;
  }
  return depth == 0 && constants <= kMostConstants;
}

// The statements for one element.
std::string statements(const Device& device, const MapShape& shape) {
  const std::string type = stack_type(shape.compute);
  const bool in_integers = shape.compute == DITORCH_INT64;
  std::vector<std::string> stack;
  std::string text;
  int32_t constants = 0;
  for (int32_t i = 0; i < shape.count; ++i) {
    const ditorch_instruction& instruction = shape.instructions[i];
    const auto operand = static_cast<size_t>(instruction.operand);
    std::string value;
    switch (instruction.opcode) {
      case DITORCH_LOAD:
        value = loaded(device, shape, operand);
        break;
      case DITORCH_STORE:
        text += "    " + stored(device, shape, operand, stack.back()) + "\n";
        stack.pop_back();
        continue;
      case DITORCH_CONSTANT:
        value = "constants.values[" + std::to_string(constants++) + "]";
        break;
      case DITORCH_PLACE:
        value = "i";
        break;
      case DITORCH_RANDOM:
        value = "random_number(constants.key, row * walk.sizes[" +
                std::to_string(shape.dimensions - 1) + "] + i)";
        break;
      default:
        const auto step = step_of(instruction.opcode, in_integers);
        const std::vector<std::string> taken(stack.end() - step->taken, stack.end());
        stack.resize(stack.size() - taken.size());
        value = filled(step->text, taken);
    }
    const std::string name = "v" + std::to_string(i);
    text += "    const " + type + " " + name + " = " + value + ";\n";
    stack.push_back(name);
  }
  return text;
}

}  // namespace

bool has_map(const Device& device, const MapShape& shape) {
  const bool has_stack = device.has_double || shape.compute != DITORCH_FLOAT64;
  return has_stack && shape.dimensions <= kMostDimensions && has_every_step(shape) &&
         std::none_of(shape.dtypes.begin(), shape.dtypes.end(),
                      [&](ditorch_dtype dtype) { return element_of(device, dtype).empty(); });
}

std::string map_key(const MapShape& shape) {
  std::string key = "map " + std::to_string(shape.compute) + " " + std::to_string(shape.dimensions);
  for (size_t operand = 0; operand < shape.dtypes.size(); ++operand) {
    const int64_t stride = shape.last_strides[operand];
    key += " " + std::to_string(shape.dtypes[operand]) +
           (stride == 0   ? "="
            : stride == 1 ? "+"
                          : "*");
  }
  for (int32_t i = 0; i < shape.count; ++i) {
    const ditorch_instruction& instruction = shape.instructions[i];
    const bool has_operand =
        instruction.opcode == DITORCH_LOAD || instruction.opcode == DITORCH_STORE;
    key += " " + std::to_string(instruction.opcode);
    if (has_operand) key += "@" + std::to_string(instruction.operand);
  }
  return key;
}

std::string map_text(const Device& device, const MapShape& shape, int64_t run) {
  const std::string dimensions = std::to_string(kMostDimensions);
  const bool has_random =
      std::any_of(shape.instructions, shape.instructions + shape.count,
                  [](const ditorch_instruction& step) { return step.opcode == DITORCH_RANDOM; });
  std::string text = has_random ? source_of("philox") : "";
  text += "struct walk { long sizes[" + dimensions + "]; long strides[" +
          std::to_string(DITORCH_MAP_OPERANDS) + "][" + dimensions + "]; };\n";
  text += "struct constants { " + stack_type(shape.compute) + " values[" +
          std::to_string(kMostConstants) + "]; ulong key; };\nkernel void map(";
  for (size_t operand = 0; operand < shape.dtypes.size(); ++operand) {
    text += "global storage_" + element_of(device, shape.dtypes[operand]) + "* " +
            operand_name(operand) + ", ";
  }
  text += "const struct walk walk, const struct constants constants) {\n";
  const std::string last = std::to_string(shape.dimensions - 1);
  text += "  const long first = get_global_id(0) * (long)" + std::to_string(run) + ";\n";
  text +=
      "  const long end = min(first + " + std::to_string(run) + ", walk.sizes[" + last + "]);\n";
  text += "  const long row = get_global_id(1);\n  long place = row;\n";
  for (size_t operand = 0; operand < shape.dtypes.size(); ++operand) {
    text += "  long begin" + std::to_string(operand) + " = 0;\n";
  }
  text += "  for (int d = " + last +
          " - 1; d >= 0; --d) {\n    const long at = place % walk.sizes[d];\n";
  text += "    place /= walk.sizes[d];\n";
  for (size_t operand = 0; operand < shape.dtypes.size(); ++operand) {
    const std::string number = std::to_string(operand);
    text += "    begin" + number + " += at * walk.strides[" + number + "][d];\n";
  }
  return text + "  }\n  for (long i = first; i < end; ++i) {\n" + statements(device, shape) +
         "  }\n}\n";
}

}  // namespace opencl
