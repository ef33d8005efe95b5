// What a mixture computes beside its products, compiled once for each instruction set; OST_EXPERTS is
// the function that hands the kernels out.
//
// Gates round where the modules of transformers round; shares are added in float.
#include "experts/kernels.h"

#include "simd/formats.h"
#include "ops/vector.h"

namespace {

// Converted one by one: few models compute in float16.
struct Float16 {
  using Stored = uint16_t;
  using StoredVector = Halves;
  static Floats widen(const Halves &stored) {
    Floats value;
    for (int i = 0; i < kLanes; ++i) value[i] = ost::float_of_float16(stored[i]);
    return value;
  }
  static Halves narrow(const Floats &value) {
    Halves stored;
    for (int i = 0; i < kLanes; ++i) stored[i] = ost::float16_of_float(value[i]);
    return stored;
  }
  static Floats round(const Floats &value) { return widen(narrow(value)); }
};

// Calls visit with the format of a dtype.
template <class Visit>
inline void with_format(int32_t dtype, Visit visit) {
  if (dtype == OST_FLOAT32) return visit(Float32{});
  if (dtype == OST_BFLOAT16) return visit(BFloat16{});
  visit(Float16{});
}

template <class Format>
inline Floats clamped_gate(const Floats &given_gate, const Floats &given_up, float alpha, float limit) {
  constexpr float kLowest = -3.4028234e38f;
  const Floats gate = clamped(given_gate, kLowest, limit), up = clamped(given_up, -limit, limit);
  const Floats turned = Format::round(gate * alpha);
  const Floats open = Format::round(quotient(all(1.f), 1.f + exponential(-turned)));
  return Format::round(up + 1.f) * Format::round(gate * open);
}

template <class Format>
void open_row(const ost::Gating &g, int64_t row) {
  const auto *gates = static_cast<const typename Format::Stored *>(g.gate_up) + row * g.inner;
  auto *output = static_cast<typename Format::Stored *>(g.output) + row * g.inner;
  for (int64_t i = 0; i < g.inner; i += kLanes) {
    const Floats gate = load<Format>(gates + i);
    store<Format>(output + i, gate > 0.f ? gate * gate : gate * 0.f);
  }
}

template <class Format>
void gate_row(const ost::Gating &g, int64_t row) {
  if (g.has_up == 0) return open_row<Format>(g, row);
  const auto *gates = static_cast<const typename Format::Stored *>(g.gate_up) + row * 2 * g.inner;
  const auto *ups = gates + g.inner;
  auto *output = static_cast<typename Format::Stored *>(g.output) + row * g.inner;
  for (int64_t i = 0; i < g.inner; i += kLanes) {
    const Floats gate = load<Format>(gates + i), up = load<Format>(ups + i);
    const Floats value = g.activation == OST_SILU        ? Format::round(silu(gate)) * up
                         : g.activation == OST_GELU_TANH ? Format::round(gelu_by_tanh(gate)) * up
                                                         : clamped_gate<Format>(gate, up, g.alpha, g.limit);
    store<Format>(output + i, value);
  }
}

void gate(const ost::Gating &g, int64_t first, int64_t last) {
  with_format(g.dtype, [&](auto format) {
    for (int64_t row = first; row < last; ++row) gate_row<decltype(format)>(g, row);
  });
}

template <class Format>
void add_share(float *sums, const typename Format::Stored *numbers, float weight, int64_t count) {
  each_vector(static_cast<int>(count), [&](int i, auto lanes) {
    const Floats sum = load<Float32>(sums + i, lanes);
    store<Float32>(sums + i, multiply_add(load<Format>(numbers + i, lanes), all(weight), sum), lanes);
  });
}

void add_shares(const ost::Share *shares, int64_t num_shares, const void *numbers, int64_t stride,
                int32_t dtype, float *sums, int64_t width, int64_t first, int64_t last) {
  with_format(dtype, [&](auto format) {
    using Format = decltype(format);
    const auto *from = static_cast<const typename Format::Stored *>(numbers) + first;
    for (int64_t i = 0; i < num_shares; ++i, from += stride)
      add_share<Format>(sums + shares[i].row * width + first, from, shares[i].weight, last - first);
  });
}

void round_sums(const float *sums, void *outputs, int32_t dtype, int64_t count) {
  with_format(dtype, [&](auto format) {
    using Format = decltype(format);
    auto *to = static_cast<typename Format::Stored *>(outputs);
    each_vector(static_cast<int>(count), [&](int i, auto lanes) {
      store<Format>(to + i, load<Float32>(sums + i, lanes), lanes);
    });
  });
}

}  // namespace

namespace ost {

const ExpertsKernels &OST_EXPERTS() {
  static constexpr ExpertsKernels kernels = {gate, add_shares, round_sums};
  return kernels;
}

}  // namespace ost
