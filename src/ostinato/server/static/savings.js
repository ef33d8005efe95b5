// The savings of shared prefixes, computed by the server.

import { $, compact, count, drawn, element, percent } from "/ui/format.js";
import { ask } from "/ui/server.js";

// Sliders step by tenths of a decade: a wide range, with fine steps for small values.
const NICE = [1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.4, 8];
const scale = (place) => (place === 0 ? 0 : Math.round(NICE[(place - 1) % 10] * 10 ** Math.floor((place - 1) / 10)));
const SLIDERS = {
  shared: scale, suffix: scale,
  "requests-slider": (place) => Math.max(1, scale(place)),
  "block-size": (place) => 2 ** place,
};
let newest = 0;

export async function account() {
  const values = {};
  for (const [id, value] of Object.entries(SLIDERS)) {
    values[id] = value(Number($(id).value));
    $(id).nextElementSibling.value = count(values[id]);
    $(id).setAttribute("aria-valuetext", count(values[id]));
  }
  const mine = ++newest;
  const query = new URLSearchParams({
    shared: values.shared, suffix: values.suffix,
    requests: values["requests-slider"], block_size: values["block-size"],
  });
  let found;
  try {
    found = await ask(`/ui/savings?${query}`);
  } catch (error) {
    if (mine === newest) {
      $("savings-share").textContent = "–";
      $("savings-text").textContent = error.message || "no key";
      $("savings-bars").replaceChildren();
    }
    return;
  }
  if (mine !== newest) return; // a slider has moved on meanwhile
  const { by_token: token, by_whole_blocks: blocks, without_cache: none } = found;
  $("savings-share").textContent = percent(token.saved_share);
  $("savings-text").textContent =
    `of ${compact(found.all_prompt_tokens)} prompt tokens are saved. Each request after the first finds ` +
    `${count(token.found_per_request_tokens)}, copies ${count(token.copied_per_request_tokens)} ` +
    `and computes ${count(token.computed_per_request_tokens)}.`;
  const rows = [["no cache", none], ["whole blocks", blocks], ["by token", token]];
  $("savings-bars").replaceChildren(
    ...rows.flatMap(([label, reuse]) => {
      const bar = drawn("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", class: "chart-bar", "aria-hidden": "true" });
      bar.append(drawn("rect", { width: reuse.computed_tokens / found.all_prompt_tokens, height: 1 }));
      return [element("span", {}, label), bar, element("span", { class: "number" }, `${compact(reuse.computed_tokens)} computed`)];
    }),
  );
}

for (const id of Object.keys(SLIDERS)) $(id).addEventListener("input", account);
$("savings").addEventListener("submit", (event) => event.preventDefault());
