// Places of rows put in order, NaN last and equal elements as they come: runs by insertion, then
// neighbouring runs merged until there is one. Only the first `kept` places of a run are written, so
// that a few out of many cost little more than one look at each.
//
// Options: -DDATA=<dtype>, -DIS_FLOATING where that is so, -DRUN=<n>.
typedef JOIN(storage_, DATA) storage;
#define GET JOIN(get_, DATA)

#ifdef IS_FLOATING
typedef scalar compared;
static inline int is_nan(compared a) { return isnan(a); }
#else
typedef long compared;
static inline int is_nan(compared a) { return 0; }
#endif

static inline int is_less(compared a, compared b) { return a < b || (is_nan(b) && !is_nan(a)); }

static inline int comes_first(compared a, compared b, int descending) {
  return descending ? is_less(b, a) : is_less(a, b);
}

// One item for each run of `width` elements of each row. It holds RUN places at most: the run is as
// long, or longer where fewer are kept.
kernel void order_runs(global const storage* input, global uint* order, long rows, long length,
                       long kept, long width, int descending) {
  const long runs = (length + width - 1) / width, item = get_global_id(0);
  if (item >= rows * runs) return;
  const long row = item / runs, first = item % runs * width;
  const long count = min(width, length - first);
  const int room = (int)min((long)RUN, kept);
  input += row * length + first, order += row * length + first;
  compared values[RUN];
  uint places[RUN];
  int held = 0;
  for (long i = 0; i < count; ++i) {
    const compared value = GET(input, i);
    if (held == room && !comes_first(value, values[room - 1], descending)) continue;
    int at = held < room ? held++ : room - 1;
    for (; at > 0 && comes_first(value, values[at - 1], descending); --at) {
      values[at] = values[at - 1];
      places[at] = places[at - 1];
    }
    values[at] = value;
    places[at] = (uint)(first + i);
  }
  for (int i = 0; i < held; ++i) order[i] = places[i];
}

// Runs of `width` to runs of twice that. One item writes RUN places, and finds where they begin in
// both runs by bisection (Green, McColl and Bader, "GPU merge path", 2012).
kernel void merge_runs(global const storage* input, global const uint* from, global uint* to,
                       long rows, long length, long kept, long width, int descending) {
  const long of_pair = (min(2 * width, kept) + RUN - 1) / RUN;
  const long pairs = (length + 2 * width - 1) / (2 * width), item = get_global_id(0);
  if (item >= rows * pairs * of_pair) return;
  const long row = item / (pairs * of_pair), pair = item / of_pair % pairs;
  const long begin = pair * 2 * width, lefts = min(min(width, length - begin), kept);
  const long rights = max(min(min(width, length - begin - width), kept), 0l);
  const long first = item % of_pair * RUN, end = min(min(first + RUN, lefts + rights), kept);
  if (first >= end) return;
  input += row * length;
  global const uint* left = from + row * length + begin;
  global const uint* right = left + width;
  to += row * length + begin;

  long low = max(0l, first - rights), high = min(first, lefts);
  while (low < high) {
    const long middle = (low + high) / 2;
    const compared of_left = GET(input, left[middle]);
    const compared of_right = GET(input, right[first - 1 - middle]);
    if (comes_first(of_right, of_left, descending)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  long i = low, j = first - low;
  for (long at = first; at < end; ++at) {
    const int is_right =
        i >= lefts ||
        (j < rights && comes_first(GET(input, right[j]), GET(input, left[i]), descending));
    to[at] = is_right ? right[j++] : left[i++];
  }
}

// The first `kept` of each row, and where they were.
kernel void write_sorted(global const storage* input, global const uint* order,
                         global storage* values, global long* places, long rows, long length,
                         long kept) {
  const long item = get_global_id(0), first = item / kept * length;
  if (item >= rows * kept) return;
  const uint place = order[first + item % kept];
  values[item] = input[first + place];
  places[item] = place;
}
