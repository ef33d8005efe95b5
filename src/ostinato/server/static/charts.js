// Six charts of the last minutes, redrawn each second.

import { $, compact, drawn, duration, element, legend, percent } from "/ui/format.js";

const ORIGINS = ["cached", "copied", "waited", "computed"];
const NAMES = {
  cached: "cached", copied: "copied within a block",
  waited: "waited for another's prefill", computed: "computed",
};
const PLACE = { computed: 1, cached: 2, copied: 3, waited: 4 };
const BARS = 60;
const SPANS = [60, 120, 300]; // seconds that the pictures may show
const QUANTILES = { p50: "median", p95: "95%", p99: "99%" };

for (const card of document.querySelectorAll("[data-chart]")) {
  const id = card.dataset.chart;
  card.insertAdjacentHTML("beforeend", `
    <div class="with-scale">
      <div class="scale" id="${id}-scale" aria-hidden="true"></div>
      <svg id="${id}" class="chart" role="img" aria-labelledby="${id}-title ${id}-text"></svg>
    </div>
    <p class="hidden" id="${id}-text"></p>
    <div class="axis"><span class="since">1 minute ago</span><span>now</span></div>`);
}

legend($("origins-legend"), ORIGINS.map((name) => [name, NAMES[name]]));
legend($("gaps-legend"), Object.entries(QUANTILES));
legend($("queue-legend"), [["running", "running"], ["waiting", "waiting"]]);
legend($("kv-legend"), [["private", "being filled"], ["held", "cached, in use"], ["evictable", "cached, idle"]]);

let span = 60;

// All charts have the same time span: the shortest that covers all data.
function setSpan(oldest) {
  span = SPANS.find((seconds) => oldest < seconds) ?? SPANS.at(-1);
  const text = span === 60 ? "1 minute ago" : `${span / 60} minutes ago`;
  for (const label of document.querySelectorAll(".since")) label.textContent = text;
}

// Clears a chart, labels its y axis, and returns its size.
function frame(id, marks, placed, write) {
  const svg = $(id);
  const [width, height] = [svg.clientWidth || 600, svg.clientHeight || 150];
  const place = (value) => 6 + (height - 12) * (1 - placed(value));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  $(`${id}-scale`).replaceChildren(...marks.map((mark) => {
    const label = element("span", {}, write(mark));
    label.style.top = `${place(mark)}px`;
    return label;
  }));
  svg.replaceChildren(...marks.map((mark) =>
    drawn("line", { class: "grid", x1: 0, x2: width, y1: place(mark), y2: place(mark) })));
  return { svg, width, place, x: (ago) => width * (1 - Math.min(ago, span) / span) };
}

// A linear axis from 0 with two to five round marks.
function linear(id, highest, write = compact) {
  const top = Math.max(highest, 1);
  const rough = top / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, power * [1, 2, 5, 10].find((factor) => factor * power >= rough));
  const marks = [0];
  while (marks.at(-1) < top) marks.push(marks.at(-1) + step);
  return frame(id, marks, (value) => value / marks.at(-1), write);
}

// A logarithmic axis of times, in half decades.
function logarithmic(id, times) {
  const halves = (s, round) => round(2 * Math.log10(s)) / 2;
  const low = halves(Math.max(1e-5, Math.min(...times, 0.05)), Math.floor);
  const high = Math.max(low + 1, halves(Math.max(...times, 0.06), Math.ceil));
  const marks = [];
  for (let power = low; power <= high; power += high - low > 2.5 ? 1 : 0.5) marks.push(10 ** power);
  const placed = (s) => (Math.log10(s) - low) / (high - low);
  return frame(id, marks, placed, (mark) => duration(Number(mark.toPrecision(1))));
}

// Rows of [seconds ago, count, ...] as stacked bars per second; returns the sums by column.
function bars(id, rows, columns) {
  const seconds = span / BARS;
  const heights = Array.from({ length: BARS }, () => columns.map(() => 0));
  const sums = columns.map(() => 0);
  for (const row of rows) {
    const bar = BARS - 1 - Math.floor(row[0] / seconds);
    if (bar < 0 || bar >= BARS) continue;
    columns.forEach(([, place], i) => {
      heights[bar][i] += row[place] / seconds;
      sums[i] += row[place];
    });
  }
  const { svg, width, place } = linear(id, Math.max(...heights.map((bar) => bar.reduce((a, b) => a + b))));
  const wide = width / BARS;
  const paths = columns.map(() => "");
  heights.forEach((bar, number) => {
    let from = 0;
    bar.forEach((height, i) => {
      if (height) {
        const [top, bottom] = [place(from + height), place(from)];
        paths[i] += `M${(number * wide + 0.08 * wide).toFixed(1)} ${bottom.toFixed(1)}h${(0.84 * wide).toFixed(1)}V${top.toFixed(1)}h${(-0.84 * wide).toFixed(1)}z`;
      }
      from += height;
    });
  });
  svg.append(...columns.map(([kind], i) => drawn("path", { class: kind, d: paths[i] })));
  return sums;
}

// Rows of [seconds ago, ...] as stacked areas; each value holds until the next.
function areas(id, rows, columns, { svg, place, x }) {
  columns.forEach(([kind], i) => {
    const upTo = (row, last) => columns.slice(0, last).reduce((sum, [, at]) => sum + row[at], 0);
    let [top, bottom] = ["", ""];
    rows.forEach((row, number) => {
      const [from, to] = [x(row[0]), x(rows[number + 1]?.[0] ?? 0)].map((at) => at.toFixed(1));
      top += `${top ? "L" : "M"}${from} ${place(upTo(row, i + 1)).toFixed(1)}H${to}`;
      bottom = `L${to} ${place(upTo(row, i)).toFixed(1)}H${from}` + bottom;
    });
    svg.append(drawn("path", { class: kind, d: top && `${top}${bottom}z` }));
  });
}

export function drawOverTime(state) {
  const { history, generated, load_history: load } = state;
  setSpan(Math.max(0, ...history.rows.map((row) => row[0]), ...generated.tokens.map((row) => row[0])));
  drawOrigins(history);
  drawFirstTokens(state.first_token);
  bars("generated", generated.tokens, [["held", 1]]);
  drawGaps(generated);
  for (const card of ["queue-card", "kv-card"]) $(card).hidden = !state.load;
  if (state.load) drawLoad(load);
}

function drawOrigins(history) {
  const sums = bars("origins", history.rows, ORIGINS.map((name) => [name, PLACE[name]]));
  const total = sums.reduce((a, b) => a + b, 0);
  $("origins-text").textContent = total
    ? `Of ${compact(total)} prompt tokens in the last five minutes: ` +
      ORIGINS.map((name, i) => `${percent(sums[i] / total)} ${NAMES[name]}`).join(", ") + "."
    : "No prompts in the last five minutes.";
}

function drawFirstTokens(first) {
  const { svg, place, x } = logarithmic("first", first.dots.map((dot) => dot[1]));
  svg.append(...first.dots.map(([ago, took, share, id]) => {
    const link = drawn("a", { href: `#explain/${id}`, tabindex: -1 });
    const dot = drawn("circle", {
      class: share < 0.1 ? "computed" : share < 0.5 ? "copied" : "cached",
      cx: x(ago).toFixed(1), cy: place(took).toFixed(1), r: 3.5,
    });
    const title = drawn("title", {});
    title.textContent = `${duration(took)}, ${percent(share)} cached: explain`;
    dot.append(title);
    link.append(dot);
    return link;
  }));
  $("first-text").textContent =
    `${first.dots.length} requests. Median of ${first.cold.count} cold ones: ` +
    `${duration(first.cold.median_s)}; of ${first.warm.count} warm ones: ${duration(first.warm.median_s)}.`;
}

function drawGaps({ gaps, percentiles }) {
  const { svg, place, x } = logarithmic("gaps", gaps.flatMap((row) => row.slice(1)).filter(Boolean));
  const rows = [...gaps].sort((a, b) => b[0] - a[0]);
  Object.keys(QUANTILES).forEach((kind, i) => {
    const points = rows.map((row) => [x(row[0]).toFixed(1), place(Math.max(row[i + 1], 1e-5)).toFixed(1)]);
    const path = points.map((point, n) =>
      `${n && rows[n - 1][0] - rows[n][0] <= 10 ? "L" : "M"}${point.join(" ")}h.1`).join("");
    svg.append(drawn("path", { class: `line ${kind}`, d: path }));
  });
  $("gaps-text").textContent = percentiles
    ? `In the last minute the median was ${duration(percentiles[0])}, 95% took at most ` +
      `${duration(percentiles[1])} and 99% at most ${duration(percentiles[2])}.`
    : "No tokens followed others in the last minute.";
}

// Rows: seconds ago, running, waiting, and blocks private, held, evictable, unused.
function drawLoad(load) {
  const rows = load.filter((row) => row[0] < span);
  const busiest = Math.max(1, ...rows.map((row) => row[1] + row[2]));
  areas("queue", rows, [["running", 1], ["waiting", 2]], linear("queue", busiest));
  const shares = rows.map((row) => {
    const total = row[3] + row[4] + row[5] + row[6] || 1;
    return [row[0], ...[3, 4, 5].map((at) => (100 * row[at]) / total)];
  });
  const halves = frame("kv", [0, 25, 50, 75, 100], (value) => value / 100, (mark) => `${mark}%`);
  areas("kv", shares, [["private", 1], ["held", 2], ["evictable", 3]], halves);
  const last = shares.at(-1) ?? [0, 0, 0, 0];
  $("queue-text").textContent = `Now ${rows.at(-1)?.[1] ?? 0} running and ${rows.at(-1)?.[2] ?? 0} waiting.`;
  $("kv-text").textContent = `Now ${(last[1] + last[2]).toFixed(0)}% in use and ${last[3].toFixed(0)}% cached and idle.`;
}
