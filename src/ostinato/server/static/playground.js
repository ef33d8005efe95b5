// The playground: where each token of a prompt came from.

import { $, count, duration, element, legend, percent } from "/ui/format.js";
import { ask } from "/ui/server.js";

const ORIGINS = ["cached", "copied", "computed"];

legend($("play-legend"), ORIGINS.map((origin) => [origin, origin]));

async function run() {
  $("run").disabled = true;
  $("play-summary").textContent = "Running …";
  try {
    show(await ask("/ui/play", {
      prompt: $("prompt").value, max_tokens: Number($("max-tokens").value), write: $("write").checked,
    }));
  } catch (error) {
    $("tokens").hidden = true;
    $("play-summary").textContent = error.message;
  } finally {
    $("run").disabled = false;
  }
}

function show(found) {
  const sums = { cached: 0, copied: 0, computed: 0 };
  const pieces = [];
  found.tokens.forEach(([text, origin], place) => {
    sums[origin]++;
    const first = place > 0 && place % found.block_size === 0 ? " first-of-block" : "";
    const piece = element("span", { class: origin + first, title: `token ${place}: ${origin}` });
    piece.textContent = text;
    pieces.push(piece);
  });
  const total = found.tokens.length;
  const parts = ORIGINS.map((origin) => `${count(sums[origin])} ${origin}`).join(", ");
  const saved = percent((sums.cached + sums.copied) / total);
  $("play-summary").textContent =
    `${count(total)} tokens: ${parts}. ${saved} saved; first token after ${duration(found.first_token_s)}. `;
  $("play-summary").append(element("a", { href: `#explain/${found.id}` }, "explain"));
  $("tokens").hidden = false;
  $("tokens").replaceChildren(...pieces, element("span", { class: "answer" }, found.text));
}

$("play").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    $("play").requestSubmit();
  }
});
