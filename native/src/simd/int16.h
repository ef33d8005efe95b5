// Vectors of 16 integer sums, and of 16 pairs of 16-bit integers whose products they add up.
//
//   no_ints         sums of nothing
//   load_codes      32 codes of 8 bits as 16 pairs
//   fill_pairs      one pair 16 times
//   add_products    sums + a.first * b.first + a.second * b.second
//   store_int16/8   floats rounded to the nearest, ties to even; what is no number becomes any
//
// Included after one simd/*.h.
#pragma once

#include <cmath>
#include <cstring>

namespace ost {
namespace {

#if defined(__AVX512F__)

// Of 32 bits each: GCC moves sums that are declared as __m512i, of 64 bits, to memory and back in loops.
typedef int32_t SixteenInts __attribute__((vector_size(64)));
struct Ints {
  SixteenInts v;
};
struct Pairs {
  __m512i v;
};

inline Ints no_ints() { return {SixteenInts{}}; }
inline Pairs load_codes(const int8_t *p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
inline Pairs fill_pairs(const int16_t *p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return {_mm512_set1_epi32(pair)};
}
inline Ints add_products(Ints sum, Pairs a, Pairs b) {
#if defined(__AVX512VNNI__)
  const __m512i bits = reinterpret_cast<__m512i>(sum.v);
  return {reinterpret_cast<SixteenInts>(_mm512_dpwssd_epi32(bits, a.v, b.v))};
#else
  return {sum.v + reinterpret_cast<SixteenInts>(_mm512_madd_epi16(a.v, b.v))};
#endif
}
#if !defined(__AVX512VNNI__)
// Sums of 16 bits of products of bytes, two of them for each sum of 32 bits: bytes of a are below 16 and
// those of b, four that all outputs meet, have a sign, so that 8 additions fit.
#define OST_SMALL_SUMS
struct SmallSums {
  __m512i v;
};
inline SmallSums no_small_sums() { return {_mm512_setzero_si512()}; }
inline void add_small(SmallSums &sum, Pairs a, const int8_t *b) {
  const Pairs inputs = fill_pairs(reinterpret_cast<const int16_t *>(b));
  sum.v = _mm512_add_epi16(sum.v, _mm512_maddubs_epi16(a.v, inputs.v));
}
inline Ints add_sums(Ints sum, SmallSums small) {
  const __m512i wide = _mm512_madd_epi16(small.v, _mm512_set1_epi16(1));
  return {sum.v + reinterpret_cast<SixteenInts>(wide)};
}
#endif
inline Vec float_of_ints(Ints x) { return {_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(x.v))}; }
inline void store_int16(int16_t *p, Vec x) {
  const __m256i words = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), words);
}
inline void store_int8(int8_t *p, Vec x) {
  const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), bytes);
}

#elif defined(__AVX2__)

typedef int32_t EightInts __attribute__((vector_size(32)));  // see above
struct Ints {
  EightInts a, b;
};
struct Pairs {
  __m256i a, b;
};

inline Ints no_ints() { return {EightInts{}, EightInts{}}; }
inline Pairs load_codes(const int8_t *p) {
  const __m128i *halves = reinterpret_cast<const __m128i *>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(halves)),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(halves + 1))};
}
inline Pairs fill_pairs(const int16_t *p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
// GCC would put off the additions of unrolled steps, and keep their products in memory until then.
inline EightInts added_now(EightInts sum, __m256i products) {
  sum += reinterpret_cast<EightInts>(products);
  asm("" : "+x"(sum));
  return sum;
}
inline Ints add_products(Ints sum, Pairs x, Pairs y) {
  return {added_now(sum.a, _mm256_madd_epi16(x.a, y.a)), added_now(sum.b, _mm256_madd_epi16(x.b, y.b))};
}
#define OST_SMALL_SUMS  // see above
struct SmallSums {
  __m256i a, b;
};
inline SmallSums no_small_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
// Sums of six rows, codes and what is on the way take all registers, which GCC does not see.
inline void add_small(SmallSums &sum, Pairs a, const int8_t *b) {
  __m256i inputs, products;
  asm("vpbroadcastd %[b], %[inputs]\n\t"
      "vpmaddubsw %[inputs], %[low], %[products]\n\t"
      "vpmaddubsw %[inputs], %[high], %[inputs]\n\t"
      "vpaddw %[products], %[first], %[first]\n\t"
      "vpaddw %[inputs], %[second], %[second]"
      : [first] "+x"(sum.a), [second] "+x"(sum.b), [inputs] "=&x"(inputs), [products] "=&x"(products)
      : [low] "x"(a.a), [high] "x"(a.b), [b] "m"(*reinterpret_cast<const int32_t *>(b)));
}
inline Ints add_sums(Ints sum, SmallSums small) {
  const __m256i one = _mm256_set1_epi16(1);
  return {added_now(sum.a, _mm256_madd_epi16(small.a, one)),
          added_now(sum.b, _mm256_madd_epi16(small.b, one))};
}
inline Vec float_of_ints(Ints x) {
  return {_mm256_cvtepi32_ps(reinterpret_cast<__m256i>(x.a)),
          _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(x.b))};
}
inline __m256i int16_words(Vec x) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
inline void store_int16(int16_t *p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), int16_words(x));
}
inline void store_int8(int8_t *p, Vec x) {
  const __m256i words = int16_words(x);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), bytes);
}

#elif defined(OST_WITH_NEON)

struct Ints {
  int32x4_t v[4];
};
struct Pairs {
  int16x8_t v[4];
};

// function(k) for each register k.
template <class Numbers, class Function>
inline Numbers each_of_four(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}

inline Ints no_ints() {
  return each_of_four<Ints>([](int) { return vdupq_n_s32(0); });
}
inline Pairs load_codes(const int8_t *p) {
  return each_of_four<Pairs>([=](int k) { return vmovl_s8(vld1_s8(p + 8 * k)); });
}
inline Pairs fill_pairs(const int16_t *p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return each_of_four<Pairs>([=](int) { return vreinterpretq_s16_s32(vdupq_n_s32(pair)); });
}
inline Ints add_products(const Ints &sum, const Pairs &x, const Pairs &y) {
  return each_of_four<Ints>([&](int k) {
    const int32x4_t low = vmull_s16(vget_low_s16(x.v[k]), vget_low_s16(y.v[k]));
    return vaddq_s32(sum.v[k], vpaddq_s32(low, vmull_high_s16(x.v[k], y.v[k])));
  });
}
inline Vec float_of_ints(const Ints &x) {
  return each_register([&](int k) { return vcvtq_f32_s32(x.v[k]); });
}
inline int16x8_t int16_words(const Vec &x, int half) {
  return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.v[2 * half])),
                      vqmovn_s32(vcvtnq_s32_f32(x.v[2 * half + 1])));
}
inline void store_int16(int16_t *p, const Vec &x) {
  for (int half = 0; half < 2; ++half) vst1q_s16(p + 8 * half, int16_words(x, half));
}
inline void store_int8(int8_t *p, const Vec &x) {
  for (int half = 0; half < 2; ++half) vst1_s8(p + 8 * half, vqmovn_s16(int16_words(x, half)));
}

#else

struct Ints {
  int32_t v[16];
};
struct Pairs {
  int16_t v[32];
};

inline Ints no_ints() { return {}; }
inline Pairs load_codes(const int8_t *p) {
  Pairs out;
  for (int i = 0; i < 32; ++i) out.v[i] = p[i];
  return out;
}
inline Pairs fill_pairs(const int16_t *p) {
  Pairs out;
  for (int i = 0; i < 32; ++i) out.v[i] = p[i % 2];
  return out;
}
inline Ints add_products(const Ints &sum, const Pairs &a, const Pairs &b) {
  Ints out;
  for (int i = 0; i < 16; ++i)
    out.v[i] = sum.v[i] + a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1];
  return out;
}
inline Vec float_of_ints(const Ints &x) {
  return each([&](int i) { return static_cast<float>(x.v[i]); });
}
template <class Int>
inline void store_rounded(Int *p, const Vec &a) {
  constexpr float kMin = sizeof(Int) == 1 ? -128 : -32768, kMax = -1 - kMin;
  for (int i = 0; i < 16; ++i) {
    const float within = a.v[i] < kMin ? kMin : a.v[i] < kMax ? a.v[i] : kMax;
    p[i] = static_cast<Int>(std::nearbyint(within));
  }
}
inline void store_int16(int16_t *p, const Vec &a) { store_rounded(p, a); }
inline void store_int8(int8_t *p, const Vec &a) { store_rounded(p, a); }

#endif

}  // namespace
}  // namespace ost
