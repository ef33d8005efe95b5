// Random steps: sequences that share runs of blocks as a tree, cut into items and parts at random, as no
// planner would, but as the header allows.
#pragma once

#include <memory>

#include "case.h"

struct Scene {
  explicit Scene(uint32_t seed) : random(seed) {
    choose_sizes();
    plant_tree();
    fill_store();
    order_tokens();
    cut_items();
  }

  Random random;
  int32_t kv_heads, group, key_dim, value_dim, block_size, kv_dtype, query_dtype, out_dtype, window;
  int32_t section_keys;
  float scale, soft_cap;
  bool has_sinks;

  // One sequence: a path from the root, and the rows that are computed in this step.
  struct Sequence {
    std::vector<int64_t> slots;  // by position
    int32_t first_row, num_rows;
  };
  std::vector<Sequence> sequences;
  std::vector<int32_t> tokens, positions, blocks;
  std::vector<ost_segment> tree, segments;  // as planted; cut to items
  std::vector<ost_item> items;
  std::vector<int32_t> merge_rows, merge_starts{0}, merge_partials;
  int32_t num_partials = 0;
  std::unique_ptr<Store> store;
  std::unique_ptr<Tensor> queries;
  std::vector<float> sinks;

  int32_t num_rows() const { return static_cast<int32_t>(positions.size()); }
  int32_t num_heads() const { return kv_heads * group; }
  // Whether products are rounded to bfloat16 where a processor can.
  bool is_brain() const { return kv_dtype == OST_BFLOAT16 && query_dtype == OST_BFLOAT16; }

 private:
  void choose_sizes() {
    kv_heads = random.between(1, 3);
    group = random.pick({1, 2, 3, 4, 7, 8});
    key_dim = random.pick({2, 16, 32, 40, 64, 64, 96, 128});
    value_dim = random.chance(0.6) ? key_dim : random.pick({1, 7, 16, 24, 32, 48, 128});
    block_size = random.pick({16, 16, 32, 48});
    kv_dtype = random.chance(0.4) ? OST_BFLOAT16 : random.between(0, 3);
    const bool as_stored = random.chance(0.6) && kv_dtype != OST_KV_INT8;
    query_dtype = as_stored ? kv_dtype : random.between(0, 2);
    out_dtype = random.chance(0.5) ? OST_FLOAT32 : random.between(0, 2);
    window = random.chance(0.4) ? random.pick({1, 5, 16, 40, 100, 600}) : 0;
    scale = random.pick({1.0f, 0.5f, 2.0f}) / std::sqrt(static_cast<float>(key_dim));
    soft_cap = random.chance(0.25) ? random.pick({1.0f, 5.0f, 50.0f}) : 0.0f;
    has_sinks = random.chance(0.3);
    section_keys = random.pick({32, 96, 128, 1024});
  }

  // Appends a run's block ids to the plan, and its slots to what a sequence sees.
  std::vector<int64_t> plant_run(int32_t num_keys) {
    std::vector<int64_t> slots;
    for (int32_t i = 0; i < num_keys; i += block_size) {
      blocks.push_back(num_blocks++);
      for (int32_t offset = 0; offset < block_size && i + offset < num_keys; ++offset)
        slots.push_back(int64_t{blocks.back()} * block_size + offset);
    }
    return slots;
  }

  void plant_tree() {
    const int32_t root = random.pick({0, 0, 1, 3, 35}) * block_size;
    const int64_t root_entry = 0;
    const std::vector<int64_t> root_slots = plant_run(root);
    std::vector<ost_segment> tails;
    for (int32_t branches = random.between(1, 3); branches > 0; --branches) {
      const int32_t document = random.pick({0, 1, 4}) * block_size, first_row = num_rows();
      const int64_t entry = static_cast<int64_t>(blocks.size());
      const std::vector<int64_t> document_slots = plant_run(document);
      for (int32_t leaves = random.between(1, 4); leaves > 0; --leaves) {
        Sequence s;
        s.slots = root_slots;
        s.slots.insert(s.slots.end(), document_slots.begin(), document_slots.end());
        s.first_row = num_rows();
        const int32_t own = random.chance(0.1) ? random.between(200, 600) : random.between(1, 70);
        s.num_rows = random.chance(0.5) ? 1 : random.between(1, own < 90 ? own : 90);
        const int64_t own_entry = static_cast<int64_t>(blocks.size());
        for (int64_t slot : plant_run(own)) s.slots.push_back(slot);
        const int32_t length = root + document + own;
        for (int32_t i = length - s.num_rows; i < length; ++i) positions.push_back(i);
        tails.push_back({own_entry, s.first_row, num_rows(), root + document, own});
        sequences.push_back(s);
      }
      if (document > 0) tree.push_back({entry, first_row, num_rows(), root, document});
    }
    if (root > 0) tree.insert(tree.begin(), {root_entry, 0, num_rows(), 0, root});
    tree.insert(tree.end(), tails.begin(), tails.end());
  }

  // Blocks get places of their own, and every slot that is seen gets a key and a value.
  void fill_store() {
    const int32_t spare = random.between(0, 3);
    std::vector<int32_t> places(num_blocks + spare);
    for (size_t i = 0; i < places.size(); ++i) places[i] = static_cast<int32_t>(i);
    random.shuffle(places);
    for (int32_t &block : blocks) block = places[block];
    std::vector<int64_t> seen;
    for (Sequence &s : sequences)
      for (int64_t &slot : s.slots) {
        slot = int64_t{places[slot / block_size]} * block_size + slot % block_size;
        seen.push_back(slot);
      }
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    store.reset(new Store(num_blocks + spare, kv_dtype, kv_heads, key_dim, value_dim, block_size));
    const int32_t count = static_cast<int32_t>(seen.size());
    Tensor keys(count, kv_heads, key_dim, OST_FLOAT32, 0);
    Tensor values(count, kv_heads, value_dim, OST_FLOAT32, 0);
    for (int32_t t = 0; t < count; ++t)
      for (int32_t h = 0; h < kv_heads; ++h) {
        for (int32_t d = 0; d < key_dim; ++d) keys.set(t, h, d, 2 * random.normal());
        for (int32_t d = 0; d < value_dim; ++d) values.set(t, h, d, random.normal());
      }
    ost_kv_write(&store->kv, &keys.rows, &values.rows, seen.data(), count, 1);
  }

  void order_tokens() {
    for (int32_t row = 0; row < num_rows(); ++row) tokens.push_back(row);
    if (random.chance(0.7)) random.shuffle(tokens);
    queries.reset(
        new Tensor(num_rows(), num_heads(), key_dim, query_dtype, random.pick({0, 0, 1, 6})));
    for (int32_t t = 0; t < num_rows(); ++t)
      for (int32_t h = 0; h < num_heads(); ++h)
        for (int32_t d = 0; d < key_dim; ++d) queries->set(t, h, d, random.normal());
    for (int32_t h = 0; h < num_heads(); ++h) sinks.push_back(3 * random.normal());
  }

  // The segments that some rows see, cut at random multiples of the block size.
  std::vector<ost_segment> cut_segments(int32_t first_row, int32_t last_row) {
    std::vector<ost_segment> out;
    for (ost_segment s : tree) {
      if (s.first_row >= last_row || s.last_row <= first_row) continue;
      while (random.chance(0.2) && s.num_keys > block_size) {
        ost_segment head = s;
        head.num_keys = random.between(1, (s.num_keys - 1) / block_size) * block_size;
        out.push_back(head);
        s.first_entry += head.num_keys / block_size;
        s.first_position += head.num_keys;
        s.num_keys -= head.num_keys;
      }
      out.push_back(s);
    }
    return out;
  }

  bool sees(int32_t row, int32_t section) const {
    const int32_t begin = section * section_keys, at = positions[row];
    return begin <= at && (window == 0 || begin + section_keys > at - window + 1);
  }

  // Cuts an item into parts at random sections; each leaves a partial of each row and section.
  void cut_parts(const ost_item &item) {
    const int32_t last_position = *std::max_element(positions.begin(), positions.end());
    const int32_t num_sections = last_position / section_keys + 1, num_rows = item.last_row - item.first_row;
    const int32_t first_partial = num_partials;
    for (int32_t from = 0, to; from < num_sections; from = to) {
      to = random.between(from + 1, num_sections);
      ost_item part = item;
      part.first_section = from;
      part.last_section = to;
      part.first_partial = num_partials;
      items.push_back(part);
      num_partials += (to - from) * num_rows;
    }
    for (int32_t row = item.first_row; row < item.last_row; ++row) {
      merge_rows.push_back(row);
      for (int32_t section = 0; section < num_sections; ++section)
        if (sees(row, section))
          merge_partials.push_back(first_partial + section * num_rows + row - item.first_row);
      merge_starts.push_back(static_cast<int32_t>(merge_partials.size()));
    }
  }

  void cut_items() {
    for (int32_t row = 0; row < num_rows();) {
      const int32_t left = num_rows() - row;
      const int32_t take = random.chance(0.4) ? left : random.between(1, left);
      const std::vector<ost_segment> seen = cut_segments(row, row + take);
      const int32_t first = static_cast<int32_t>(segments.size());
      segments.insert(segments.end(), seen.begin(), seen.end());
      const ost_item item{row, row + take, first, static_cast<int32_t>(segments.size()), 0,
                          INT32_MAX, -1};
      random.chance(0.5) ? items.push_back(item) : cut_parts(item);
      row += take;
    }
  }

  int32_t num_blocks = 0;
};
