/* A vendor as another version of the ABI would have compiled it: another library's tables, with
 * what the macros say cut off or taken out. INNER is that library's path. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "operators.h"

/* Copies the first `bytes` of a table; what lies beyond is unmapped memory's stand-in: noise. */
static void* cut(const void* table, size_t bytes) {
  char* copy = malloc(4096);
  memset(copy, 0x5A, 4096);
  memcpy(copy, table, bytes);
  return copy;
}

static void* symbol(const char* name) { return dlsym(dlopen(INNER, RTLD_NOW), name); }

__attribute__((visibility("default"))) const ditorch_runtime* ditorch_vendor_runtime(
    uint32_t abi_version) {
  ditorch_vendor_runtime_fn inner = (ditorch_vendor_runtime_fn)symbol("ditorch_vendor_runtime");
  if (!inner(abi_version)) return NULL;
  ditorch_runtime* table = cut(inner(abi_version), RUNTIME_BYTES);
  table->struct_size = RUNTIME_BYTES;
  table->abi_version += VERSION_MORE;
#ifdef WITHOUT
  table->WITHOUT = NULL;
#endif
  return table;
}

__attribute__((visibility("default"))) const ditorch_operators* ditorch_vendor_operators(
    uint32_t abi_version) {
  ditorch_vendor_operators_fn inner =
      (ditorch_vendor_operators_fn)symbol("ditorch_vendor_operators");
  ditorch_operators* table = cut(inner(abi_version), OPERATORS_BYTES);
  table->struct_size = OPERATORS_BYTES;
#ifdef ATTENTION_BYTES
  if (OPERATORS_BYTES > offsetof(ditorch_operators, attention_struct_size)) {
    table->attention_struct_size = ATTENTION_BYTES;
  }
#endif
  return table;
}
