// What happened in the last minutes? Two pictures, drawn anew each second.

import { $, compact, drawn, duration, legend, percent } from "/ui/format.js";

const ORIGINS = ["cached", "copied", "waited", "computed"];
const NAMES = {
  cached: "cached", copied: "copied within a block",
  waited: "waited for another's prefill", computed: "computed",
};
const PLACE = { computed: 1, cached: 2, copied: 3, waited: 4 };
const BARS = 60;
const SPANS = [60, 120, 300]; // seconds that the pictures may show

legend($("origins-legend"), ORIGINS.map((name) => [name, NAMES[name]]));

// The shortest span that shows all there is.
function spanOf(oldest) {
  const span = SPANS.find((seconds) => oldest < seconds) ?? SPANS.at(-1);
  const text = span === 60 ? "1 minute ago" : `${span / 60} minutes ago`;
  for (const label of document.querySelectorAll(".since")) label.textContent = text;
  return span;
}

export function drawOrigins(history) {
  const svg = $("origins");
  const width = spanOf(Math.max(0, ...history.rows.map((row) => row[0]))) / BARS;
  const bars = Array.from({ length: BARS }, () => [0, 0, 0, 0, 0]);
  for (const row of history.rows) {
    const bar = BARS - 1 - Math.floor(row[0] / width);
    if (bar >= 0 && bar < BARS) for (let i = 1; i <= 4; i++) bars[bar][i] += row[i];
  }
  const sums = { cached: 0, copied: 0, waited: 0, computed: 0 };
  const tallest = Math.max(1, ...bars.map((bar) => bar[1] + bar[2] + bar[3] + bar[4]));
  const paths = Object.fromEntries(ORIGINS.map((name) => [name, ""]));
  bars.forEach((bar, x) => {
    let y = 0;
    for (const name of ORIGINS) {
      const height = bar[PLACE[name]] / tallest;
      sums[name] += bar[PLACE[name]];
      if (height) paths[name] += `M${x + 0.08} ${1 - y}h.84v${-height}h-.84z`;
      y += height;
    }
  });
  svg.setAttribute("viewBox", `0 0 ${BARS} 1`);
  svg.replaceChildren(
    ...[0.25, 0.5, 0.75, 1].map((y) => drawn("line", { class: "grid", x1: 0, x2: BARS, y1: y, y2: y })),
    ...ORIGINS.map((name) => drawn("path", { class: name, d: paths[name] })),
  );
  const total = ORIGINS.reduce((sum, name) => sum + sums[name], 0);
  $("origins-text").textContent = total
    ? `Of ${compact(total)} prompt tokens in the last five minutes: ` +
      ORIGINS.map((name) => `${percent(sums[name] / total)} ${NAMES[name]}`).join(", ") + "."
    : "No prompts in the last five minutes.";
}

export function drawFirstTokens(first, history) {
  const svg = $("first");
  const seconds = spanOf(Math.max(0, ...history.rows.map((row) => row[0])));
  const [width, height] = [svg.clientWidth || 600, svg.clientHeight || 170];
  const times = first.dots.map((dot) => dot[1]);
  const halves = (s, round) => round(2 * Math.log10(s)) / 2; // half decades
  const low = halves(Math.max(1e-5, Math.min(...times, 0.05)), Math.floor);
  const high = Math.max(low + 1, halves(Math.max(...times, 0.06), Math.ceil));
  const place = (s) => 6 + (height - 12) * (1 - (Math.log10(s) - low) / (high - low));
  const marks = [];
  for (let power = low; power <= high; power += 0.5) marks.push(10 ** power);
  $("first-scale").replaceChildren(
    ...marks.map((mark) => {
      const label = document.createElement("span");
      label.textContent = duration(Number(mark.toPrecision(1)));
      label.style.top = `${place(mark)}px`;
      return label;
    }),
  );
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(
    ...marks.map((mark) => drawn("line", { class: "grid", x1: 0, x2: width, y1: place(mark), y2: place(mark) })),
    ...first.dots.map(([ago, took, share]) =>
      drawn("circle", {
        class: share < 0.1 ? "computed" : share < 0.5 ? "copied" : "cached",
        cx: (width * (1 - ago / seconds)).toFixed(1), cy: place(took).toFixed(1), r: 3,
      }),
    ),
  );
  $("first-text").textContent =
    `${first.dots.length} requests. Median of ${first.cold.count} cold ones: ` +
    `${duration(first.cold.median_s)}; of ${first.warm.count} warm ones: ${duration(first.warm.median_s)}.`;
}
