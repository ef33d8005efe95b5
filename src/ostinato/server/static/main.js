// Fetches the state every second and draws all parts of the page.

import { drawBlocks } from "/ui/blocks.js";
import { drawOverTime } from "/ui/charts.js";
import "/ui/chat.js";
import "/ui/explanation.js";
import { $, compact, count, duration, percent } from "/ui/format.js";
import "/ui/playground.js";
import { account } from "/ui/savings.js";
import { ask, dropKey, hasKey, keepKey, NoKey } from "/ui/server.js";
import { drawPrefixes, drawRequests, drawTenants, drawTiers } from "/ui/tables.js";

const EVERY_MS = 1000;
let paused = false;
let newest = null;

function status(kind, text) {
  const pill = $("status");
  if (pill.dataset.kind === kind && pill.textContent === text) return;
  pill.dataset.kind = kind;
  pill.textContent = text;
}

const spread = (percentiles, of) => percentiles
  ? `${of} · 95%: ${duration(percentiles[1])} · 99%: ${duration(percentiles[2])}` : "";

function draw(state) {
  newest = state;
  const { totals, first_token: first, generated, load } = state;
  $("model").textContent = `${state.model} · blocks of ${state.block_size} tokens` +
    (state.administrator ? "" : ` · tenant ${state.tenant}`);
  $("version").textContent = `Ostinato ${state.version}`;
  const busy = state.last_minute.prompt > 0;
  $("hit-ratio").textContent = percent(busy ? state.last_minute.hit_ratio : totals.hit_ratio);
  $("hit-detail").textContent = busy
    ? `last minute · ${percent(totals.hit_ratio)} in all`
    : "of all prompt tokens were not computed";
  $("saved").textContent = compact(totals.saved);
  $("saved-detail").textContent = `of ${compact(totals.prompt)} prompt tokens`;
  $("cold").textContent = duration(first.cold.median_s);
  $("warm").textContent = duration(first.warm.median_s);
  $("cold-count").textContent = count(first.cold.count);
  $("warm-count").textContent = count(first.warm.count);
  $("speedup").textContent = first.cold.count && first.warm.count
    ? `${(first.cold.median_s / first.warm.median_s).toFixed(1)}×` : "–";
  $("first-detail").textContent = spread(first.percentiles, "five minutes");
  $("rate").textContent = `${compact(Math.round(10 * generated.per_second) / 10)}/s`;
  $("rate-detail").textContent = `${compact(totals.output)} in all`;
  $("gap").textContent = duration(generated.percentiles?.[0] ?? null);
  $("gap-detail").textContent = spread(generated.percentiles, "median");
  $("requests").textContent = compact(totals.requests);
  $("load").textContent = load
    ? `${count(load.running)} running, ${count(load.waiting)} waiting · ${compact(load.evicted_blocks)} blocks evicted${load.states
      ? ` · ${count(load.states.num_checkpoints)} of ${count(load.states.num_slots)} states kept` : ""}`
    : "that got a first token";
  const audited = load?.audited_hits
    ? ` · ${count(load.audited_hits)} hits audited, ${count(load.different_hits)} wrong` : "";
  const idle = load?.idle_rebase;
  const prepared = idle?.computed
    ? ` · ${compact(idle.computed)} tokens prepared while idle, ${compact(idle.used)} used, ${compact(idle.wasted)} wasted` : "";
  const sum = (bySource) => Object.values(bySource ?? {}).reduce((a, b) => a + b, 0);
  const drafted = sum(load?.drafts?.drafted);
  const right = Object.entries(load?.drafts?.accepted ?? {}).map(([source, n]) => `${source} ${compact(n)}`);
  const drafts = drafted
    ? ` · ${compact(drafted)} tokens drafted, ${compact(sum(load.drafts.accepted))} right (${right.join(", ")})` : "";
  const times = load?.step_times;
  const steps = times?.num_steps
    ? ` · a step takes ${duration(times.measured_s / times.num_steps)}, predicted ${duration(times.predicted_s / times.num_steps)}` : "";
  $("compute-path").textContent = load
    ? ` · computing in ${load.compute_path}${steps}${audited}${prepared}${drafts}` : "";
  drawOverTime(state);
  drawRequests(state.requests, state.administrator);
  drawBlocks(state.blocks);
  drawPrefixes(state.prefixes, state.administrator);
  drawTenants(state.tenants);
  drawTiers(load?.tiers ?? { rows: [] });
  drawPlugged(state.plugged);
}

function drawPlugged(plugged) {
  $("tile-plugged").hidden = !plugged;
  if (!plugged) return;
  $("plugged-own").textContent = plugged.requests ? percent(plugged.own_ratio) : "–";
  $("plugged-built-in").textContent = plugged.requests ? percent(plugged.built_in_ratio) : "–";
  const faults = plugged.faults ? ` · ${count(plugged.faults)} faults, see the log` : "";
  $("plugged-detail").textContent = plugged.requests
    ? `${plugged.names.join(", ")} · the same ${count(plugged.requests)} requests${faults}`
    : `${plugged.names.join(", ")} · no request has ended yet`;
}

async function look() {
  try {
    draw(await ask("/ui/state"));
    $("key-panel").hidden = true;
    status("live", "live");
  } catch (error) {
    if (error instanceof NoKey) {
      status("lost", "needs a key");
      if ($("key-panel").hidden) {
        $("key-panel").hidden = false;
        $("key-error").textContent = hasKey() ? "The server does not know this key." : "";
        dropKey();
        $("key").focus();
      }
    } else {
      status("lost", error instanceof TypeError ? "not connected" : error.message);
    }
  }
}

async function goOn() {
  if (!paused && !document.hidden && $("key-panel").hidden) await look();
  setTimeout(goOn, EVERY_MS);
}

$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  keepKey($("key").value);
  $("key").value = "";
  $("key-panel").hidden = true;
  await look();
  account();
});

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  if (paused) status("paused", "paused");
  else look();
});

// Private windows may store nothing; then the theme is the system's.
const kept = (() => { try { return localStorage.getItem("ostinato-theme"); } catch { return null; } })();
function dress(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").value = theme;
  if (newest) drawBlocks(newest.blocks, true);
}
$("theme").addEventListener("change", () => {
  dress($("theme").value);
  try { localStorage.setItem("ostinato-theme", $("theme").value); } catch { /* see above */ }
});
dress(["light", "dark"].includes(kept) ? kept : "auto");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dress($("theme").value));
addEventListener("resize", () => { if (newest) draw(newest); });

account();
goOn();
