// Formats numbers and times.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (n) => whole.format(n);
export const compact = (n) => (n < 10000 ? whole.format(n) : short.format(n));
export const percent = (share) => `${(100 * share).toFixed(1)}%`;

export function bytes(amount) {
  let unit = 0;
  for (; amount >= 1023.5 && unit < 4; unit += 1) amount /= 1024;
  return `${amount.toFixed(unit && amount < 9.95 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.001) return `${(1e6 * seconds).toFixed(0)} µs`;
  // 99.5 with two digits would be written as 1.0e+2.
  if (seconds < 0.9995) return `${(1000 * seconds).toPrecision(seconds < 0.0995 ? 2 : 3)} ms`;
  if (seconds < 120) return `${seconds.toPrecision(seconds < 10 ? 2 : 3)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// Shows line ends as a symbol, so that a text stays on one line.
export const oneLine = (text) => text.replaceAll("\n", "↵");

export const $ = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function drawn(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export const legend = (list, entries) =>
  list.replaceChildren(
    ...entries.map(([kind, text]) => element("li", {}, element("i", { class: `swatch ${kind}` }), text)),
  );
