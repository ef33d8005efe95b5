// The map of blocks: the state and the owner of each.

import { $, count, element, legend, percent } from "/ui/format.js";

const STATES = ["unused", "private", "held", "evictable"];
const MEANINGS = {
  unused: "free, without content", private: "being filled by one request",
  held: "cached and in use", evictable: "cached, not in use",
};
const HUES = [268, 160, 28, 205, 338, 95, 48, 235, 180, 300, 10, 130];

let by = "state";
let shown = null;
let cursor = null;
let columns = 1;
let size = 10;

for (const [id, what] of [["by-state", "state"], ["by-tenant", "tenant"]]) {
  $(id).addEventListener("click", () => {
    by = what;
    $("by-state").setAttribute("aria-pressed", String(by === "state"));
    $("by-tenant").setAttribute("aria-pressed", String(by === "tenant"));
    if (shown) drawBlocks(shown, true);
  });
}

// Returns a colour of the style sheet in the current theme.
function styled(name) {
  const probe = element("i", { class: `swatch ${name}` });
  $("blocks-legend").append(probe);
  const colour = getComputedStyle(probe).backgroundColor;
  probe.remove();
  return colour;
}

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches
  ? document.documentElement.dataset.theme !== "light"
  : document.documentElement.dataset.theme === "dark";
const name = (tenant) => tenant || "(no tenant)";

// A tenant keeps its colour while the page is open, in whatever order the server lists tenants.
const places = new Map();
function hue(tenant) {
  if (!places.has(tenant)) places.set(tenant, places.size);
  return `hsl(${HUES[places.get(tenant) % HUES.length]} 62% ${isDark() ? 66 : 46}%)`;
}

// A cell of several blocks is filled from below: private, in use, evictable; the rest is unused.
function pile(pen, mix, left, top, side, hue, colours) {
  const total = mix.reduce((a, b) => a + b);
  let from = 0;
  for (const state of [1, 2, 3, 0]) {
    const height = (side * mix[state]) / total;
    pen.globalAlpha = hue && state === 3 ? 0.5 : 1;
    pen.fillStyle = hue && state ? hue : colours[state];
    pen.fillRect(left, top + side - from - height, side, height);
    from += height;
  }
}

export function drawBlocks(blocks, anew = false) {
  const map = $("map");
  const changed = anew || shown === null || shown.states.length !== blocks.states.length;
  shown = blocks;
  const cells = blocks.states.length;
  const width = map.clientWidth || 600;
  columns = Math.max(1, Math.ceil(Math.sqrt((cells * width) / 250)));
  size = width / columns;
  if (size > 20) { columns = Math.floor(width / 20); size = width / columns; }
  const rows = Math.max(1, Math.ceil(cells / columns));
  const scale = window.devicePixelRatio || 1;
  map.style.height = `${Math.ceil(rows * size)}px`;
  map.width = Math.round(width * scale);
  map.height = Math.round(rows * size * scale);
  const pen = map.getContext("2d");
  pen.scale(scale, scale);
  const colours = STATES.map(styled);
  const hues = blocks.tenants.map(hue);
  const gap = size > 5 ? 1.5 : 0.5;
  for (let cell = 0; cell < cells; cell++) {
    const [left, top] = [(cell % columns) * size, Math.floor(cell / columns) * size];
    if (blocks.mixes.length) {
      pile(pen, blocks.mixes[cell], left, top, size - gap, by === "tenant" ? hues[blocks.owners[cell]] : null, colours);
      continue;
    }
    const state = Number(blocks.states[cell]);
    pen.globalAlpha = by === "tenant" && state === 3 ? 0.5 : 1;
    pen.fillStyle = by === "tenant" && state ? hues[blocks.owners[cell]] : colours[state];
    const inset = state === 1 ? size / 5 : 0; // private blocks are smaller, for those who see no hues
    const side = size - gap - 2 * inset;
    pen.fillRect(left + inset, top + inset, side, side);
  }
  pen.globalAlpha = 1;
  if (cursor !== null && cursor < cells) {
    pen.strokeStyle = getComputedStyle(document.body).color;
    pen.lineWidth = 2;
    pen.strokeRect((cursor % columns) * size, Math.floor(cursor / columns) * size, size - gap, size - gap);
    describe();
  }
  describeAll(changed);
}

function describeAll(changed) {
  const { counts, count: total, per_cell: perCell, tenants } = shown;
  const cached = counts.held + counts.evictable;
  $("blocks-text").textContent =
    STATES.map((state) => `${count(counts[state])} ${state}`).join(", ") +
    (perCell > 1 ? `; a cell stands for ${perCell} blocks and fills from below` : "") + ".";
  if (by === "state") {
    legend($("blocks-legend"), STATES.map((state) => [state, `${state} ${count(counts[state])}`]));
    if (total) $("blocks-legend").append(element("li", {}, `${percent(cached / total)} of ${count(total)} hold cached prefixes` +
      (perCell > 1 ? `; a cell stands for ${count(perCell)} and fills from below` : "")));
  } else {
    const present = [...new Set(shown.owners)].filter((owner) => owner >= 0).slice(0, 12);
    $("blocks-legend").replaceChildren(
      ...present.map((owner) => {
        const mark = element("i", { class: "swatch" });
        mark.style.background = hue(tenants[owner]);
        return element("li", {}, mark, name(tenants[owner]));
      }),
      element("li", {}, `pale: evictable, full: in use${perCell > 1 ? "" : ", small: private"}`),
    );
  }
  if (changed && cursor === null) $("cell").textContent = "Point at a cell, or move with the arrow keys.";
}

function describe() {
  const state = STATES[Number(shown.states[cursor])];
  const owner = shown.owners[cursor];
  const whose = owner >= 0 ? `of ${name(shown.tenants[owner])}` : "";
  const first = cursor * shown.per_cell;
  const text = shown.mixes.length
    ? `Blocks ${count(first)}–${count(Math.min(first + shown.per_cell, shown.count) - 1)}: ` +
      [1, 2, 3, 0].filter((at) => shown.mixes[cursor][at])
        .map((at) => `${count(shown.mixes[cursor][at])} ${STATES[at]}`).join(", ") +
      (whose && `; most ${whose}`)
    : `Block ${first}: ${state} (${MEANINGS[state]})${whose && `, ${whose}`}`;
  if ($("cell").textContent !== text) $("cell").textContent = text;
}

function move(to) {
  if (!shown || !shown.states.length) return;
  cursor = Math.min(Math.max(0, to), shown.states.length - 1);
  drawBlocks(shown);
}

$("map").addEventListener("keydown", (event) => {
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
  if (event.key in steps) move((cursor ?? -1) + steps[event.key]);
  else if (event.key === "Home") move(0);
  else if (event.key === "End") move(Infinity);
  else if (event.key === "Escape") { cursor = null; if (shown) drawBlocks(shown, true); }
  else return;
  event.preventDefault();
});
$("map").addEventListener("pointermove", (event) => {
  move(Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size));
});
$("map").addEventListener("pointerleave", () => { cursor = null; if (shown) drawBlocks(shown, true); });
