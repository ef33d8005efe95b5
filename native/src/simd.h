// The vectors of the instruction set that a file is compiled for.
#pragma once

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(OST_WITH_NEON)
#include "simd_neon.h"
#else
#include "simd_generic.h"
#endif
