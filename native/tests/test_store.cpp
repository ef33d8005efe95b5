// Keys and values are where the layout says, whichever function wrote them, and nowhere else.
#include <algorithm>
#include <memory>
#include <set>

#include "case.h"

namespace {

struct StoreCase {
  explicit StoreCase(uint32_t seed_, Random random)
      : seed(seed_),
        heads(random.between(1, 4)),
        key_dim(random.pick({2, 6, 16, 40, 64, 72, 128})),
        value_dim(random.pick({1, 7, 16, 24, 64, 128})),
        block_size(random.pick({16, 32, 48})),
        num_blocks(random.between(1, 9)),
        dtype(random.between(0, 3)),
        from(random.chance(0.5) && dtype != OST_KV_INT8 ? dtype : random.between(0, 2)),
        store(num_blocks, dtype, heads, key_dim, value_dim, block_size) {
    std::vector<int64_t> all(num_blocks * block_size);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
    if (random.chance(0.3)) random.shuffle(all);
    const int32_t skip = random.between(0, static_cast<int32_t>(all.size()) - 1);
    slots.assign(all.begin() + skip, all.end());
    slots.resize(random.between(1, static_cast<int32_t>(slots.size())));
    keys.reset(new Tensor(count(), heads, key_dim, from, random.between(0, 3)));
    values.reset(new Tensor(count(), heads, value_dim, from, random.between(0, 3)));
    for (int32_t t = 0; t < count(); ++t)
      for (int32_t h = 0; h < heads; ++h) {
        for (int32_t d = 0; d < key_dim; ++d) keys->set(t, h, d, random.normal());
        for (int32_t d = 0; d < value_dim; ++d) values->set(t, h, d, random.normal());
      }
  }
  int32_t count() const { return static_cast<int32_t>(slots.size()); }

  uint32_t seed;
  int32_t heads, key_dim, value_dim, block_size, num_blocks, dtype, from;
  Store store;
  std::vector<int64_t> slots;
  std::unique_ptr<Tensor> keys, values;
};

// An element of a row of so many, as it is to be kept.
double rounded(const Tensor &rows, int32_t token, int32_t head, int32_t d, int32_t dim,
               int32_t dtype) {
  const float value = static_cast<float>(rows.at(token, head, d));
  if (dtype == OST_KV_INT8) {
    float size = 0;
    for (int32_t i = 0; i < dim; ++i)
      size = std::max(size, std::fabs(static_cast<float>(rows.at(token, head, i))));
    return size == 0 ? 0 : std::nearbyint(value * (127 / size)) * double{size / 127};
  }
  uint32_t room = 0;
  ost::store_element(&room, dtype, 0, value);
  return ost::load_element(&room, dtype, 0);
}

void expect_written(const StoreCase &c, const std::vector<int64_t> &slots, const char *what) {
  for (int32_t t = 0; t < c.count(); ++t)
    for (int32_t h = 0; h < c.heads; ++h) {
      for (int32_t d = 0; d < c.key_dim; ++d)
        if (c.store.key(slots[t], h, d) != rounded(*c.keys, t, h, d, c.key_dim, c.dtype))
          fail(c.seed, what);
      for (int32_t d = 0; d < c.value_dim; ++d)
        if (c.store.value(slots[t], h, d) != rounded(*c.values, t, h, d, c.value_dim, c.dtype))
          fail(c.seed, what);
    }
}

void expect_untouched(const StoreCase &c, const std::set<int64_t> &touched, const char *what) {
  for (int64_t slot = 0; slot < int64_t{c.num_blocks} * c.block_size; ++slot) {
    if (touched.count(slot)) continue;
    for (int32_t h = 0; h < c.heads; ++h) {
      for (int32_t d = 0; d < c.key_dim; ++d)
        if (!std::isnan(c.store.key(slot, h, d))) fail(c.seed, what);
      for (int32_t d = 0; d < c.value_dim; ++d)
        if (!std::isnan(c.store.value(slot, h, d))) fail(c.seed, what);
    }
  }
}

// An element of rows that were read: behind codes is their scale.
double read_element(const char *rows, int64_t row, int32_t d, int32_t dim, int32_t dtype) {
  if (dtype != OST_KV_INT8) return ost::load_element(rows, dtype, row * dim + d);
  const char *codes = rows + row * (dim + ost::kScaleBytes);
  float scale;
  std::memcpy(&scale, codes + dim, sizeof scale);
  return static_cast<double>(static_cast<int8_t>(codes[d])) * scale;
}

void expect_read_back(const StoreCase &c) {
  const int64_t bytes = ost::bytes_of(c.dtype), count = c.count();
  const int64_t scale = ost::has_scales(c.store.kv) ? ost::kScaleBytes : 0;
  Guarded<char> keys(count * c.heads * (c.key_dim * bytes + scale));
  Guarded<char> values(count * c.heads * (c.value_dim * bytes + scale));
  ost_kv_read(&c.store.kv, c.slots.data(), count, keys.data(), values.data());
  for (int32_t t = 0; t < count; ++t)
    for (int32_t h = 0; h < c.heads; ++h) {
      const int64_t row = int64_t{t} * c.heads + h, slot = c.slots[t];
      for (int32_t d = 0; d < c.key_dim; ++d)
        if (read_element(keys.data(), row, d, c.key_dim, c.dtype) != c.store.key(slot, h, d))
          fail(c.seed, "keys read back differ");
      for (int32_t d = 0; d < c.value_dim; ++d)
        if (read_element(values.data(), row, d, c.value_dim, c.dtype) != c.store.value(slot, h, d))
          fail(c.seed, "values read back differ");
    }
}

// Copies slots to each other's places, so that a target is another's source.
void expect_copied(const StoreCase &c) {
  std::vector<int64_t> targets(c.slots.begin(), c.slots.end());
  std::rotate(targets.begin(), targets.begin() + targets.size() / 2, targets.end());
  ost_kv_copy(&c.store.kv, c.slots.data(), targets.data(), c.count());
  expect_written(c, targets, "a copied slot differs");
}

void expect_zeroed(const StoreCase &c) {
  ost_kv_zero(&c.store.kv, c.slots.data(), c.count());
  for (int64_t slot : c.slots)
    for (int32_t h = 0; h < c.heads; ++h) {
      for (int32_t d = 0; d < c.key_dim; ++d)
        if (c.store.key(slot, h, d) != 0) fail(c.seed, "a zeroed key is not zero");
      for (int32_t d = 0; d < c.value_dim; ++d)
        if (c.store.value(slot, h, d) != 0) fail(c.seed, "a zeroed value is not zero");
    }
}

void expect_formats_round_trip() {
  for (int32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float brain = ost::float_of_bfloat16(half), small = ost::float_of_float16(half);
    if (!std::isnan(brain) && ost::bfloat16_of_float(brain) != half) fail(bits, "bfloat16");
    if (!std::isnan(small) && ost::float16_of_float(small) != half) fail(bits, "float16");
    if (std::isnan(brain) && !std::isnan(ost::float_of_bfloat16(ost::bfloat16_of_float(brain))))
      fail(bits, "a bfloat16 NaN is lost");
    if (std::isnan(small) && !std::isnan(ost::float_of_float16(ost::float16_of_float(small))))
      fail(bits, "a float16 NaN is lost");
  }
}

}  // namespace

int main(int argc, char **argv) {
  const uint32_t num_cases = argc > 1 ? std::atoi(argv[1]) : 60;
  expect_formats_round_trip();
  for (int32_t isa = 0; isa <= ost_best_isa(); ++isa) {
    if (ost_use_isa(isa) != isa) fail(0, "cannot be used");
    for (uint32_t seed = 0; seed < num_cases; ++seed) {
      const StoreCase c(seed, Random(seed));
      ost_kv_write(&c.store.kv, &c.keys->rows, &c.values->rows, c.slots.data(), c.count(),
                   1 + seed % 3);
      expect_written(c, c.slots, "a written slot differs");
      expect_untouched(c, {c.slots.begin(), c.slots.end()}, "another slot was written");
      expect_read_back(c);
      expect_copied(c);
      expect_zeroed(c);
    }
    std::printf("%s: %u cases\n", name_of_isa(isa), num_cases);
  }
}
