// Compiles a function once for every generation of x86; the loader picks the machine's.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define EMUCHIP_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define EMUCHIP_CLONES
#endif
