// The dialog that explains a request's hits and misses, opened by #explain/ID.

import { $, count, element, legend } from "/ui/format.js";
import { ask } from "/ui/server.js";

const FATES = { hit: "cached", loaded: "cached", waited: "waited", copied: "copied", computed: "computed" };

async function show() {
  const [, id] = location.hash.match(/^#explain\/(.+)$/) ?? [];
  if (!id) return $("explanation").close();
  $("explanation-title").textContent = decodeURIComponent(id);
  $("explanation-bar").replaceChildren();
  $("explanation-list").replaceChildren();
  $("explanation-more").textContent = "";
  drawOwn(null);
  if (!$("explanation").open) $("explanation").showModal();
  try {
    draw(await ask(`/v1/explain/${id}`));
  } catch (error) {
    $("explanation-more").textContent = error.message;
  }
}

function draw(found) {
  $("explanation-title").textContent =
    `${count(found.num_cached_tokens)} of ${count(found.num_tokens)} prompt tokens were cached`;
  legend($("explanation-legend"), [...new Set(found.spans.map((part) => part.outcome))]
    .map((fate) => [FATES[fate], fate]));
  $("explanation-bar").replaceChildren(...found.spans.map((part) => {
    const piece = element("i", { class: `swatch ${FATES[part.outcome]}`, title: part.sentence });
    piece.style.flexGrow = part.stop - part.start;
    return piece;
  }));
  $("explanation-list").replaceChildren(...found.spans.map((part) => element(
    "li", {}, element("i", { class: `swatch ${FATES[part.outcome]}` }),
    element("b", {}, part.stop - part.start > 1 ? `Tokens ${count(part.start)}–${count(part.stop - 1)} ` : `Token ${count(part.start)} `),
    part.sentence,
  )));
  drawOwn(found.own);
  // After the title and the list: both sides of a difference, and advice.
  $("explanation-more").textContent = found.text.split("\n\n").slice(2).join("\n\n");
}

// Of a function of one's own: a hit is cached, all else was computed.
function drawOwn(own) {
  $("explanation-own").hidden = !own;
  if (!own) return;
  $("explanation-own-title").textContent = own.error ? `${own.name}: ${own.error}` : own.name;
  const kind = (part) => `swatch ${part.reason === "hit" ? "cached" : "computed"}`;
  $("explanation-own-bar").replaceChildren(...own.spans.map((part) => {
    const piece = element("i", { class: kind(part), title: part.reason });
    piece.style.flexGrow = part.stop - part.start;
    return piece;
  }));
  $("explanation-own-list").replaceChildren(...own.spans.map((part) => element(
    "li", {}, element("i", { class: kind(part) }),
    element("b", {}, part.stop - part.start > 1
      ? `Tokens ${count(part.start)}–${count(part.stop - 1)} ` : `Token ${count(part.start)} `),
    part.other ? `${part.reason}: ${part.other}` : part.reason,
  )));
}

addEventListener("hashchange", show);
$("explanation").addEventListener("close", () => {
  if (location.hash) history.replaceState(null, "", location.pathname);
});
show();
