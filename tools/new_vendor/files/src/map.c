/* Elementwise programs, which are run step by step for one element after the other. A chip's own
 * kernel is made of the program's text, once for each program, or knows the common ones. */
#include <math.h>

#include "chip.h"
#include "elements.h"
#include "kernels.h"

/* A value on the stack: an integer where the program computes in INT64. */
typedef union value {
  double number;
  int64_t integer;
} value;

/* What one element of an operand is. */
typedef struct element {
  void* data;
  ditorch_dtype dtype;
  int64_t offset;
} element;

/* The result of one step: c is the top of the stack, and a and b are the values below it. */
static double number_step(int32_t opcode, double a, double b, double c) {
  switch (opcode) {
    case DITORCH_NEGATE:
      return -c;
    case DITORCH_ABS:
      return fabs(c);
    case DITORCH_SQRT:
      return sqrt(c);
    case DITORCH_RSQRT:
      return 1 / sqrt(c);
    case DITORCH_RECIPROCAL:
      return 1 / c;
    case DITORCH_EXP:
      return exp(c);
    case DITORCH_LOG:
      return log(c);
    case DITORCH_SIN:
      return sin(c);
    case DITORCH_COS:
      return cos(c);
    case DITORCH_TANH:
      return tanh(c);
    case DITORCH_ERF:
      return erf(c);
    case DITORCH_SIGMOID:
      return 1 / (1 + exp(-c));
    case DITORCH_FLOOR:
      return floor(c);
    case DITORCH_TRUNCATE:
      return trunc(c);
    case DITORCH_NOT:
      return c == 0;
    case DITORCH_ADD:
      return b + c;
    case DITORCH_SUBTRACT:
      return b - c;
    case DITORCH_MULTIPLY:
      return b * c;
    case DITORCH_DIVIDE:
      return b / c;
    case DITORCH_POWER:
      return pow(b, c);
    case DITORCH_MINIMUM:
      return b != b || b < c ? b : c;
    case DITORCH_MAXIMUM:
      return b != b || b > c ? b : c;
    case DITORCH_LESS:
      return b < c;
    case DITORCH_LESS_EQUAL:
      return b <= c;
    case DITORCH_EQUAL:
      return b == c;
    case DITORCH_AND:
      return b != 0 && c != 0;
    case DITORCH_OR:
      return b != 0 || c != 0;
    default:
      return a != 0 ? b : c; /* SELECT */
  }
}

static int64_t floor_divide(int64_t a, int64_t b) {
  if (b == -1) return (int64_t)(0 - (uint64_t)a); /* the lowest integer has no opposite */
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

/* The same of integers, whose sums and products wrap as unsigned ones do. */
static int64_t integer_step(int32_t opcode, int64_t a, int64_t b, int64_t c) {
  const uint64_t x = (uint64_t)b, y = (uint64_t)c;
  switch (opcode) {
    case DITORCH_NEGATE:
      return (int64_t)(0 - y);
    case DITORCH_ABS:
      return c < 0 ? (int64_t)(0 - y) : c;
    case DITORCH_NOT:
      return c == 0;
    case DITORCH_ADD:
      return (int64_t)(x + y);
    case DITORCH_SUBTRACT:
      return (int64_t)(x - y);
    case DITORCH_MULTIPLY:
      return (int64_t)(x * y);
    case DITORCH_MINIMUM:
      return b < c ? b : c;
    case DITORCH_MAXIMUM:
      return b > c ? b : c;
    case DITORCH_LESS:
      return b < c;
    case DITORCH_LESS_EQUAL:
      return b <= c;
    case DITORCH_EQUAL:
      return b == c;
    case DITORCH_AND:
      return b != 0 && c != 0;
    case DITORCH_OR:
      return b != 0 || c != 0;
    case DITORCH_FLOOR_DIVIDE:
      return floor_divide(b, c);
    case DITORCH_BIT_AND:
      return b & c;
    case DITORCH_BIT_OR:
      return b | c;
    case DITORCH_BIT_XOR:
      return b ^ c;
    case DITORCH_SHIFT_LEFT:
      return (int64_t)(x << c);
    case DITORCH_SHIFT_RIGHT:
      return b >> c;
    default:
      return a != 0 ? b : c; /* SELECT */
  }
}

/* Values that a step takes off the stack; 0 if there is no such step. */
static int taken_by(int32_t opcode, int in_integers) {
  switch (opcode) {
    case DITORCH_NEGATE:
    case DITORCH_ABS:
    case DITORCH_NOT:
      return 1;
    case DITORCH_SQRT:
    case DITORCH_RSQRT:
    case DITORCH_RECIPROCAL:
    case DITORCH_EXP:
    case DITORCH_LOG:
    case DITORCH_SIN:
    case DITORCH_COS:
    case DITORCH_TANH:
    case DITORCH_ERF:
    case DITORCH_SIGMOID:
    case DITORCH_FLOOR:
    case DITORCH_TRUNCATE:
      return in_integers ? 0 : 1;
    case DITORCH_ADD:
    case DITORCH_SUBTRACT:
    case DITORCH_MULTIPLY:
    case DITORCH_MINIMUM:
    case DITORCH_MAXIMUM:
    case DITORCH_LESS:
    case DITORCH_LESS_EQUAL:
    case DITORCH_EQUAL:
    case DITORCH_AND:
    case DITORCH_OR:
      return 2;
    case DITORCH_DIVIDE:
    case DITORCH_POWER:
      return in_integers ? 0 : 2;
    case DITORCH_FLOOR_DIVIDE:
    case DITORCH_BIT_AND:
    case DITORCH_BIT_OR:
    case DITORCH_BIT_XOR:
    case DITORCH_SHIFT_LEFT:
    case DITORCH_SHIFT_RIGHT:
      return in_integers ? 2 : 0;
    case DITORCH_SELECT:
      return 3;
    default:
      return 0;
  }
}

/* Whether the step puts a value on the stack, or takes one off, without computing of others. */
static int moves_a_value(int32_t opcode, int in_integers) {
  return opcode <= DITORCH_PLACE || (opcode == DITORCH_RANDOM && !in_integers);
}

/* Whether every step and dtype is known, so that nothing is written of a program that is not. */
static int is_taken(const ditorch_instruction* program, int32_t count, ditorch_dtype compute) {
  const int in_integers = compute == DITORCH_INT64;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t opcode = program[i].opcode;
    if (!moves_a_value(opcode, in_integers) && !taken_by(opcode, in_integers)) return 0;
  }
  return 1;
}

static value load(const element* from, int in_integers) {
  if (in_integers) return (value){.integer = read_integer(from->data, from->dtype, from->offset)};
  return (value){.number = read_number(from->data, from->dtype, from->offset)};
}

static void store(const element* to, int in_integers, value stored) {
  if (in_integers) {
    write_integer(to->data, to->dtype, to->offset, stored.integer);
  } else {
    write_number(to->data, to->dtype, to->offset, stored.number);
  }
}

/* Runs the program on one element of each operand; `in_row` is its place along the last dimension,
 * and `number` that in the whole walk. */
static void run(const ditorch_instruction* program, int32_t count, ditorch_dtype compute,
                const element* elements, int64_t in_row, int64_t number) {
  const int in_integers = compute == DITORCH_INT64;
  value stack[2 + DITORCH_MAP_STACK] = {{0}}; /* two below, which steps of one value do not use */
  value* top = stack + 1;
  for (int32_t i = 0; i < count; ++i) {
    const ditorch_instruction* step = &program[i];
    if (step->opcode == DITORCH_STORE) {
      store(&elements[step->operand], in_integers, *top--);
      continue;
    }
    if (step->opcode == DITORCH_LOAD) {
      *++top = load(&elements[step->operand], in_integers);
    } else if (step->opcode == DITORCH_RANDOM) {
      (++top)->number = random_number((uint64_t)step->integer, number);
    } else if (step->opcode == DITORCH_CONSTANT || step->opcode == DITORCH_PLACE) {
      const int is_place = step->opcode == DITORCH_PLACE;
      ++top;
      if (in_integers) {
        top->integer = is_place ? in_row : step->integer;
      } else {
        top->number = is_place ? (double)in_row : step->value;
      }
    } else {
      const int taken = taken_by(step->opcode, in_integers);
      const value a = taken > 2 ? top[-2] : *top, b = taken > 1 ? top[-1] : *top, c = *top;
      top -= taken - 1;
      if (in_integers) {
        top->integer = integer_step(step->opcode, a.integer, b.integer, c.integer);
      } else {
        top->number = number_step(step->opcode, a.number, b.number, c.number);
      }
    }
    if (compute == DITORCH_FLOAT32) top->number = (float)top->number;
  }
}

/* REPLACE both. */
ditorch_status map(const ditorch_context* context, const ditorch_map* call) {
  (void)context;
  if (!is_taken(call->instructions, call->instruction_count, call->compute)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  place at = {.dimensions = call->dimensions, .sizes = call->sizes};
  int64_t number = 0;
  do {
    element elements[DITORCH_MAP_OPERANDS];
    for (int32_t i = 0; i < call->operand_count; ++i) {
      const ditorch_operand* operand = &call->operands[i];
      elements[i] =
          (element){chip_bytes(operand->data), operand->dtype, offset_of(&at, operand->strides)};
    }
    run(call->instructions, call->instruction_count, call->compute, elements,
        at.index[call->dimensions - 1], number++);
  } while (next_place(&at));
  return DITORCH_OK;
}

ditorch_status map_list(const ditorch_context* context, const ditorch_map_list* call) {
  (void)context;
  if (!is_taken(call->instructions, call->instruction_count, call->compute)) {
    return DITORCH_NOT_IMPLEMENTED;
  }
  for (int32_t one = 0; one < call->call_count; ++one) {
    void* const* data = call->data + (int64_t)one * call->operand_count;
    for (int64_t at = 0; at < call->elements[one]; ++at) {
      element elements[DITORCH_MAP_OPERANDS];
      for (int32_t i = 0; i < call->operand_count; ++i) {
        elements[i] = (element){chip_bytes(data[i]), call->dtypes[i], at * call->strides[i]};
      }
      run(call->instructions, call->instruction_count, call->compute, elements, at, at);
    }
  }
  return DITORCH_OK;
}
