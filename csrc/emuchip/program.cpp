#include "program.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>

#include "elements.h"
#include "isa.h"
#include "philox.h"
#include "special.h"
#include "steps.h"

namespace emuchip {
namespace {

constexpr int64_t kBufferBytes = 24 * 1024;  // of all values: they stay in the first cache
constexpr int64_t kMostElements = 1024;      // of a block
constexpr int64_t kVectorElements = 16;

template <class T, class S>
T loaded(S element) {
  if constexpr (std::is_same_v<S, Half> || std::is_same_v<S, Bfloat16>) {
    return static_cast<T>(from_storage<float>(element));
  } else {
    return static_cast<T>(element);
  }
}

template <class S, class T>
S stored(T value) {
  if constexpr (std::is_same_v<S, Half>) {
    return to_half(static_cast<float>(value));
  } else if constexpr (std::is_same_v<S, Bfloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else if constexpr (std::is_same_v<S, bool>) {
    return value != T(0);
  } else if constexpr (std::is_integral_v<S>) {
    return static_cast<S>(static_cast<int64_t>(value));  // modulo the width
  } else {
    return static_cast<S>(value);
  }
}

EMUCHIP_CLONES void to_bfloat16s(Bfloat16* out, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_bfloat16(values[i]);
}

EMUCHIP_CLONES void to_halves(Half* out, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = to_half(values[i]);
}

EMUCHIP_CLONES void from_bfloat16s(float* values, const Bfloat16* elements, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = from_storage<float>(elements[i]);
}

EMUCHIP_CLONES void from_halves(float* values, const Half* elements, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] = from_storage<float>(elements[i]);
}

template <class T, class S>
void load_row(T* values, const S* elements, int64_t stride, int64_t count) {
  if (stride == 0) {
    std::fill_n(values, count, loaded<T>(elements[0]));
  } else if (stride != 1) {
    for (int64_t i = 0; i < count; ++i) values[i] = loaded<T>(elements[i * stride]);
  } else if constexpr (std::is_same_v<T, S>) {
    std::copy_n(elements, count, values);
  } else if constexpr (std::is_same_v<T, float> && std::is_same_v<S, Bfloat16>) {
    from_bfloat16s(values, elements, count);
  } else if constexpr (std::is_same_v<T, float> && std::is_same_v<S, Half>) {
    from_halves(values, elements, count);
  } else {
    for (int64_t i = 0; i < count; ++i) values[i] = loaded<T>(elements[i]);
  }
}

template <class S, class T>
void store_row(S* elements, int64_t stride, const T* values, int64_t count) {
  if (stride != 1) {
    for (int64_t i = 0; i < count; ++i) elements[i * stride] = stored<S>(values[i]);
  } else if constexpr (std::is_same_v<T, S>) {
    std::copy_n(values, count, elements);
  } else if constexpr (std::is_same_v<T, float> && std::is_same_v<S, Bfloat16>) {
    to_bfloat16s(elements, values, count);
  } else if constexpr (std::is_same_v<T, float> && std::is_same_v<S, Half>) {
    to_halves(elements, values, count);
  } else {
    for (int64_t i = 0; i < count; ++i) elements[i] = stored<S>(values[i]);
  }
}

// What lies where the rows follow each other as the columns do is one row.
bool is_one_row(const Rectangle& operand, int64_t rows, int64_t columns) {
  return rows == 1 || operand.row_stride == operand.stride * columns;
}

}  // namespace

bool is_storage(ditorch_dtype dtype) { return dtype >= DITORCH_FLOAT32 && dtype <= DITORCH_BOOL; }

bool is_runnable(ditorch_dtype compute, const ditorch_instruction* instructions, int32_t count,
                 int32_t operand_count) {
  const bool in_integers = compute == DITORCH_INT64;
  if (!in_integers && compute != DITORCH_FLOAT32 && compute != DITORCH_FLOAT64) return false;
  int32_t depth = 0;
  for (int32_t i = 0; i < count; ++i) {
    const auto& [opcode, operand, value, integer] = instructions[i];
    const int32_t taken = values_taken(opcode, in_integers);
    const bool has_operand = opcode == DITORCH_LOAD || opcode == DITORCH_STORE;
    if (taken < 0 || taken > depth) return false;
    if (has_operand && (operand < 0 || operand >= operand_count)) return false;
    depth += (opcode == DITORCH_STORE ? 0 : 1) - taken;
    if (depth > static_cast<int32_t>(DITORCH_MAP_STACK)) return false;
  }
  return depth == 0;
}

template <class T>
bool Program<T>::Step::operator==(const Step& other) const {
  return opcode == other.opcode && operand == other.operand && key == other.key &&
         std::equal(taken, taken + 3, other.taken) &&
         std::memcmp(&constant, &other.constant, sizeof constant) == 0;
}

// Instructions work on a stack. Each becomes a step that names the values it takes; what an earlier
// step computes already, such as the sigmoid that SiLU's gradient needs twice, is not computed
// again.
template <class T>
Program<T>::Program(const ditorch_instruction* instructions, int32_t count,
                    const Numerics& numerics)
    : numerics_(numerics) {
  int32_t stack[DITORCH_MAP_STACK], depth = 0;
  for (int32_t i = 0; i < count; ++i) {
    const auto& [opcode, operand, value, integer] = instructions[i];
    Step step{opcode, 0, {-1, -1, -1}, 0, T(0), 0};
    if (opcode == DITORCH_LOAD || opcode == DITORCH_STORE) step.operand = operand;
    if (opcode == DITORCH_RANDOM) step.key = static_cast<uint64_t>(integer);
    if (opcode == DITORCH_CONSTANT) {
      step.constant = std::is_integral_v<T> ? static_cast<T>(integer) : static_cast<T>(value);
    }
    const int32_t taken = values_taken(opcode, std::is_integral_v<T>);
    depth -= taken;
    std::copy_n(stack + depth, taken, step.taken);
    const int32_t found = step_of(step);
    if (opcode != DITORCH_STORE) stack[depth++] = found;
  }
  place_values();
}

// The place of the step, which is added unless it is there. A STORE may change what LOAD finds.
template <class T>
int32_t Program<T>::step_of(const Step& step) {
  if (step.opcode != DITORCH_STORE) {
    const int32_t first = step.opcode == DITORCH_LOAD ? after_store_ : 0;
    const Step* found = std::find(steps_ + first, steps_ + count_, step);
    if (found != steps_ + count_) return static_cast<int32_t>(found - steps_);
  }
  steps_[count_] = step;
  if (step.opcode == DITORCH_STORE) after_store_ = count_ + 1;
  return count_++;
}

// Gives each value a buffer, which is free again after the last step that takes the value.
// Constants keep theirs, as they are filled in once for all blocks.
template <class T>
void Program<T>::place_values() {
  int32_t last_use[DITORCH_MAP_INSTRUCTIONS] = {};
  uint64_t is_free = ~uint64_t{0};
  int32_t buffers = 1;
  const auto take = [&](Step& step) {
    step.buffer = std::countr_zero(is_free);
    is_free &= is_free - 1;
    buffers = std::max(buffers, step.buffer + 1);
  };
  for (int32_t i = 0; i < count_; ++i) {
    for (int32_t taken : steps_[i].taken) {
      if (taken >= 0) last_use[taken] = i;
    }
    if (steps_[i].opcode == DITORCH_CONSTANT) take(steps_[i]);
  }
  for (int32_t i = 0; i < count_; ++i) {
    for (int32_t taken : steps_[i].taken) {
      if (taken >= 0 && last_use[taken] == i && steps_[taken].opcode != DITORCH_CONSTANT) {
        is_free |= uint64_t{1} << steps_[taken].buffer;
      }
    }
    if (steps_[i].opcode != DITORCH_STORE && steps_[i].opcode != DITORCH_CONSTANT) take(steps_[i]);
  }
  const int64_t fitting = kBufferBytes / static_cast<int64_t>(sizeof(T)) / buffers;
  block_elements_ = std::min(kMostElements, fitting / kVectorElements * kVectorElements);
}

template <class T>
T* Program<T>::buffer(int32_t number) const {
  alignas(64) thread_local T buffers[kBufferBytes / sizeof(T)];
  return buffers + number * block_elements_;
}

template <class T>
void Program<T>::fill_constants(int64_t count) const {
  for (const Step* step = steps_; step < steps_ + count_; ++step) {
    if (step->opcode == DITORCH_CONSTANT) std::fill_n(buffer(step->buffer), count, step->constant);
  }
}

// The operand's own memory where it already is what a value has, else null.
template <class T>
T* Program<T>::in_place(const Rectangle& operand, const Block& block) const {
  const bool same = (std::is_same_v<T, float> && operand.dtype == DITORCH_FLOAT32) ||
                    (std::is_same_v<T, double> && operand.dtype == DITORCH_FLOAT64) ||
                    (std::is_same_v<T, int64_t> && operand.dtype == DITORCH_INT64);
  if (!same || operand.stride != 1 || numerics_.flush_to_zero ||
      !is_one_row(operand, block.rows, block.columns)) {
    return nullptr;
  }
  return reinterpret_cast<T*>(operand.data);
}

template <class T>
void Program<T>::load(const Rectangle& from, const Block& block, T* values) const {
  const bool one = is_one_row(from, block.rows, block.columns);
  const int64_t rows = one ? 1 : block.rows, columns = one ? block.elements() : block.columns;
  visit_any_storage(from.dtype, [&]<class S>(S*) {
    const S* elements = reinterpret_cast<const S*>(from.data);
    for (int64_t row = 0; row < rows; ++row) {
      if (row > 0 && from.row_stride == 0) {
        std::copy_n(values, columns, values + row * columns);
      } else {
        load_row(values + row * columns, elements + row * from.row_stride, from.stride, columns);
      }
    }
  });
  if constexpr (std::is_floating_point_v<T>) {
    if (numerics_.flush_to_zero && is_floating(from.dtype)) {
      flush_subnormals(values, block.elements(), from.dtype);
    }
  }
}

template <class T>
void Program<T>::store(const Rectangle& to, const Block& block, const T* values) const {
  T flushed[kMostElements];
  if constexpr (std::is_floating_point_v<T>) {
    if (numerics_.flush_to_zero && is_floating(to.dtype)) {
      std::copy_n(values, block.elements(), flushed);
      flush_subnormals(flushed, block.elements(), to.dtype);
      values = flushed;
    }
  }
  const bool one = is_one_row(to, block.rows, block.columns);
  const int64_t rows = one ? 1 : block.rows, columns = one ? block.elements() : block.columns;
  visit_any_storage(to.dtype, [&]<class S>(S*) {
    S* elements = reinterpret_cast<S*>(to.data);
    for (int64_t row = 0; row < rows; ++row) {
      store_row(elements + row * to.row_stride, to.stride, values + row * columns, columns);
    }
  });
}

template <class T>
void Program<T>::compute(const Step& step, const Block& block, const T* const* values,
                         T* out) const {
  const auto taken = [&](int32_t i) { return values[step.taken[i]]; };
  if (step.opcode == DITORCH_PLACE) {
    for (int64_t i = 0; i < block.elements(); ++i) {
      out[i] = static_cast<T>(block.place + i % block.columns);
    }
  } else if (step.opcode == DITORCH_RANDOM) {
    if constexpr (std::is_floating_point_v<T>) {
      random_numbers(step.key, block.number, out, block.elements());
    }
  } else if (step.opcode == DITORCH_SELECT) {
    select(out, taken(0), taken(1), taken(2), block.elements());
  } else if (step.opcode >= DITORCH_ADD) {
    binary(step.opcode, out, taken(0), taken(1), block.elements());
  } else {
    unary(step.opcode, out, taken(0), block.elements());
  }
}

template <class T>
void Program<T>::run(const Rectangle* operands, const Block& block) const {
  const T* values[DITORCH_MAP_INSTRUCTIONS];  // each in its buffer, or in an operand's memory
  for (int32_t i = 0; i < count_; ++i) {
    const Step& step = steps_[i];
    const Rectangle& operand = operands[step.operand];
    if (step.opcode == DITORCH_CONSTANT) {
      values[i] = buffer(step.buffer);
    } else if (step.opcode == DITORCH_STORE) {
      const T* value = values[step.taken[0]];
      T* memory = in_place(operand, block);
      if (!memory) {
        store(operand, block, value);
      } else if (memory != value) {
        std::copy_n(value, block.elements(), memory);
      }
    } else {
      // The last value goes straight to where it is kept.
      const bool is_last = i + 2 == count_ && steps_[i + 1].taken[0] == i;
      T* kept = is_last ? in_place(operands[steps_[i + 1].operand], block) : nullptr;
      T* out = kept ? kept : buffer(step.buffer);
      const T* lying = step.opcode == DITORCH_LOAD ? in_place(operand, block) : nullptr;
      values[i] = lying ? lying : out;
      if (lying) continue;
      step.opcode == DITORCH_LOAD ? load(operand, block, out) : compute(step, block, values, out);
    }
  }
}

template <class T>
void Program<T>::operator()(const Rectangle* operands, int64_t rows, int64_t columns,
                            int64_t number) const {
  const int64_t width = std::min(columns, block_elements_);  // of a block
  const int64_t height = std::min(rows, block_elements_ / width);
  fill_constants(width * height);
  std::array<Rectangle, DITORCH_MAP_OPERANDS> corners;
  std::copy_n(operands, corners.size(), corners.begin());
  for (int64_t row = 0; row < rows; row += height) {
    for (int64_t column = 0; column < columns; column += width) {
      for (size_t i = 0; i < corners.size(); ++i) {
        const auto& [data, dtype, row_stride, stride] = operands[i];
        corners[i].data = data + (row * row_stride + column * stride) * bytes_of(dtype);
      }
      run(corners.data(), {std::min(height, rows - row), std::min(width, columns - column), column,
                           number + row * columns + column});
    }
  }
}

template class Program<float>;
template class Program<double>;
template class Program<int64_t>;

}  // namespace emuchip
