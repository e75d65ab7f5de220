// Compiles a function once for every generation of x86; the loader picks the machine's.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define EMUCHIP_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define EMUCHIP_CLONES
#endif

// Before a loop whose result may lie where an argument lies, element by element: no other memory is
// shared, so that vectors are safe without looking.
#if defined(__GNUC__) && !defined(__clang__)
#define EMUCHIP_IN_PLACE _Pragma("GCC ivdep")
#else
#define EMUCHIP_IN_PLACE
#endif
