// Codes of 4 bits that are places in a table of 16 numbers, the smallest first.
//
// A nibble becomes its number by one look-up in a register (PSHUFB, TBL), after which products go on as with
// other codes. Sources: the Open Compute Project's Microscaling Formats (MX) 1.0 for MXFP4, of which the numbers
// here are twice the values of E2M1, so that a scale is half of what a block has; ggml-common.h of llama.cpp for
// IQ4_NL and IQ4_XS.
#pragma once

#include <cstdint>

namespace ost {

struct Mxfp4 {
  static constexpr int8_t kNumbers[16] = {-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12};
};

struct Iq4 {
  static constexpr int8_t kNumbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};
};

// What numbers are more than the smallest: bytes without a sign, the first of them 0.
template <class Table>
struct Rises {
  constexpr Rises() : of() {
    for (int i = 0; i < 16; ++i) of[i] = static_cast<uint8_t>(Table::kNumbers[i] - Table::kNumbers[0]);
  }
  uint8_t of[16];
};

}  // namespace ost
