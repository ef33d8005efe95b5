// Which workers are there, and where did the newest requests go? Asked for once a second.

import { $, compact, count, element, percent } from "/ui/format.js";
import { NoKey, ask, dropKey, keepKey } from "/ui/server.js";

const EVERY_MS = 1000;
const cell = (text, kind = "") => element("td", { class: kind }, String(text));
const number = (n) => cell(n === null ? "–" : compact(n), "number");

function health(worker) {
  const text = worker.is_draining ? "draining" : worker.is_well ? "well" : worker.trouble;
  const kind = worker.is_draining ? "paused" : worker.is_well ? "live" : "lost";
  return element("td", {}, element("span", { class: "pill", "data-kind": kind }, text));
}

function share(worker, most) {
  const total = worker.hit_tokens + worker.computed_tokens;
  const bar = element("span", { class: "bar" });
  for (const [kind, tokens, start] of [
    ["cached", worker.hit_tokens, 0],
    ["computed", worker.computed_tokens, worker.hit_tokens],
  ]) {
    const part = element("i", { class: kind });
    part.style.left = `${(100 * start) / most}%`;
    part.style.width = `${(100 * tokens) / most}%`;
    bar.append(part);
  }
  return element("td", {}, bar, compact(total));
}

function workerRow(worker, most) {
  const total = worker.hit_tokens + worker.computed_tokens;
  const heard = worker.is_well ? worker.state : `${worker.state} when last heard`;
  const known = worker.reason ? `${heard}: ${worker.reason}` : heard;
  return element(
    "tr", {}, cell(worker.name), health(worker), cell(known, "wrap"), share(worker, most),
    cell(total ? percent(worker.hit_tokens / total) : "–", "number"), number(worker.num_requests),
    number(worker.load_tokens), number(worker.cached_tokens), number(worker.assigned),
  );
}

function decisionRow(decision) {
  return element(
    "tr", {}, cell(count(decision.decision), "number"), cell(decision.worker), cell(decision.state),
    number(decision.num_tokens), number(decision.expected_cached_tokens),
    number(decision.cached_tokens), cell(decision.status), cell(decision.reason, "wrap"),
  );
}

function show(state) {
  const most = Math.max(1, ...state.workers.map((w) => w.hit_tokens + w.computed_tokens));
  const both = state.plugged;
  $("policy").textContent = both ? both.names.join(", ") : state.policy;
  $("plugged").hidden = !both;
  $("plugged").textContent = !both ? "" : `${percent(both.own_ratio)} of the prompt tokens of ` +
    `${count(both.requests)} requests were expected to hit; cache_state, asked beside it, would ` +
    `have had ${percent(both.built_in_ratio)}`;
  $("workers").replaceChildren(...state.workers.map((worker) => workerRow(worker, most)));
  $("decisions").replaceChildren(...state.decisions.map(decisionRow));
  $("no-workers").hidden = state.workers.length > 0;
}

function say(kind, text) {
  $("status").dataset.kind = kind;
  $("status").textContent = text;
}

async function refresh() {
  try {
    show(await ask("/ui/state"));
    $("key-panel").hidden = true;
    say("live", "live");
  } catch (error) {
    say("lost", error instanceof NoKey ? "no key" : "no answer");
    $("key-panel").hidden = !(error instanceof NoKey) && !/administer/.test(error.message);
    $("key-error").textContent = error instanceof NoKey ? "" : error.message;
  }
  setTimeout(refresh, EVERY_MS);
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  dropKey();
  keepKey($("key").value);
});

refresh();
