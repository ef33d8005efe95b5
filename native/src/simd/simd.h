// The vectors of the instruction set that a file is compiled for.
#pragma once

#if defined(__AVX512F__)
#include "simd/avx512.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#elif defined(OST_WITH_NEON)
#include "simd/neon.h"
#else
#include "simd/generic.h"
#endif
