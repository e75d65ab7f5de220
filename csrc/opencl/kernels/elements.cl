// What every kernel file begins with: elements of any dtype, of which the floating ones are read and
// written as COMPUTE.
//
// Options: -DCOMPUTE=float or double, -DWIDTH=<elements of a vector>, -DHAS_DOUBLE where the device
// has doubles. bf16 and f16 are 16 bits in memory.
#ifdef HAS_DOUBLE
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

typedef COMPUTE scalar;
typedef JOIN(COMPUTE, WIDTH) vector;

typedef float storage_f32;
typedef ushort storage_f16;
typedef ushort storage_bf16;

static inline float get_f32(global const float* from, long i) { return from[i]; }
static inline float get_f16(global const ushort* from, long i) {
  return vload_half(i, (global const half*)from);
}
static inline float get_bf16(global const ushort* from, long i) { return as_float((uint)from[i] << 16); }

static inline void put_f32(global float* to, long i, float value) { to[i] = value; }
static inline void put_f16(global ushort* to, long i, float value) {
  vstore_half_rte(value, i, (global half*)to);
}
// Rounds to nearest, ties to even; a NaN stays one.
static inline void put_bf16(global ushort* to, long i, float value) {
  const uint bits = as_uint(value);
  to[i] = isnan(value) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#ifdef HAS_DOUBLE
typedef double storage_f64;
static inline double get_f64(global const double* from, long i) { return from[i]; }
static inline void put_f64(global double* to, long i, double value) { to[i] = value; }
#endif

// Integers are written modulo their width.
#define INTEGER(name, type)                                                          \
  typedef type storage_##name;                                                       \
  static inline type get_##name(global const type* from, long i) { return from[i]; } \
  static inline void put_##name(global type* to, long i, long value) { to[i] = (type)value; }

INTEGER(i8, char)
INTEGER(i16, short)
INTEGER(i32, int)
INTEGER(i64, long)
INTEGER(u8, uchar)

typedef uchar storage_bool;
static inline uchar get_bool(global const uchar* from, long i) { return from[i] != 0; }
static inline void put_bool(global uchar* to, long i, long value) { to[i] = value != 0; }

// load_x(from, i, left, fill) is a vector of the elements from `i` on, of which `left` are there;
// the rest is `fill`. store_x(to, i, left, value) writes those that are there.
#define TO_VECTOR JOIN(JOIN(convert_, COMPUTE), WIDTH)
#define TO_FLOATS JOIN(convert_float, WIDTH)
#define LOAD JOIN(vload, WIDTH)
#define STORE JOIN(vstore, WIDTH)

static inline vector whole_f32(global const float* from) { return TO_VECTOR(LOAD(0, from)); }
static inline vector whole_f16(global const ushort* from) {
  return TO_VECTOR(JOIN(vload_half, WIDTH)(0, (global const half*)from));
}
static inline vector whole_bf16(global const ushort* from) {
  return TO_VECTOR(JOIN(as_float, WIDTH)(JOIN(convert_uint, WIDTH)(LOAD(0, from)) << 16));
}
static inline void put_whole_f32(global float* to, vector value) { STORE(TO_FLOATS(value), 0, to); }
static inline void put_whole_f16(global ushort* to, vector value) {
  JOIN(JOIN(vstore_half, WIDTH), _rte)(TO_FLOATS(value), 0, (global half*)to);
}
static inline void put_whole_bf16(global ushort* to, vector value) {
  const JOIN(uint, WIDTH) bits = JOIN(as_uint, WIDTH)(TO_FLOATS(value));
  const JOIN(uint, WIDTH) rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const JOIN(int, WIDTH) is_nan = (bits & 0x7fffffff) > 0x7f800000;
  STORE(JOIN(convert_ushort, WIDTH)(select(rounded, (JOIN(uint, WIDTH))0x7fc0, is_nan)), 0, to);
}
#ifdef HAS_DOUBLE
static inline vector whole_f64(global const double* from) { return TO_VECTOR(LOAD(0, from)); }
static inline void put_whole_f64(global double* to, vector value) {
  STORE(JOIN(convert_double, WIDTH)(value), 0, to);
}
#endif

#define VECTORS_OF(name)                                                                      \
  static inline vector load_##name(global const storage_##name* from, long i, long left, scalar fill) { \
    if (left >= WIDTH) return whole_##name(from + i);                                         \
    scalar parts[WIDTH];                                                                      \
    for (int part = 0; part < WIDTH; ++part) {                                                \
      parts[part] = part < left ? (scalar)get_##name(from, i + part) : fill;                  \
    }                                                                                         \
    return LOAD(0, parts);                                                                    \
  }                                                                                           \
  static inline void store_##name(global storage_##name* to, long i, long left, vector value) {      \
    if (left >= WIDTH) return put_whole_##name(to + i, value);                                \
    scalar parts[WIDTH];                                                                      \
    STORE(value, 0, parts);                                                                   \
    for (int part = 0; part < left; ++part) put_##name(to, i + part, parts[part]);            \
  }

VECTORS_OF(f32)
VECTORS_OF(f16)
VECTORS_OF(bf16)
#ifdef HAS_DOUBLE
VECTORS_OF(f64)
#endif

// Over the elements of a vector, and over the ITEMS items of a group, who all get the result.
static inline scalar sum_of(vector value) {
  scalar parts[WIDTH], sum = 0;
  STORE(value, 0, parts);
  for (int part = 0; part < WIDTH; ++part) sum += parts[part];
  return sum;
}
static inline scalar largest_of(vector value) {
  scalar parts[WIDTH], largest = -INFINITY;
  STORE(value, 0, parts);
  for (int part = 0; part < WIDTH; ++part) largest = fmax(largest, parts[part]);
  return largest;
}

#if defined(ITEMS) && ITEMS > 1
#define OVER_GROUP(combine)                                      \
  const int item = get_local_id(0);                              \
  barrier(CLK_LOCAL_MEM_FENCE); /* the last result is read */    \
  shared[item] = own;                                            \
  barrier(CLK_LOCAL_MEM_FENCE);                                  \
  for (int half_way = ITEMS / 2; half_way > 0; half_way /= 2) {  \
    if (item < half_way) {                                       \
      const scalar left = shared[item], right = shared[item + half_way]; \
      shared[item] = combine;                                    \
    }                                                            \
    barrier(CLK_LOCAL_MEM_FENCE);                                \
  }                                                              \
  return shared[0];
#else
#define OVER_GROUP(combine) return own;
#endif

static inline scalar sum_of_group(scalar own, local scalar* shared) { OVER_GROUP(left + right) }
static inline scalar largest_of_group(scalar own, local scalar* shared) {
  OVER_GROUP(fmax(left, right))
}
