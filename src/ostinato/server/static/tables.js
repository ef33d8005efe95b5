// Tables: the latest requests, the heaviest prefixes, tenants and tiers.

import { $, bytes, compact, count, duration, element, oneLine, percent } from "/ui/format.js";

const cell = (text, kind = "number") => element("td", { class: kind }, text);

export function drawPrefixes(prefixes, administrator) {
  $("no-prefixes").hidden = prefixes.length > 0;
  $("prefixes").hidden = prefixes.length === 0;
  for (const head of document.querySelectorAll("#prefixes .tenant")) head.hidden = !administrator;
  $("prefixes").tBodies[0].replaceChildren(
    ...prefixes.map((prefix) => {
      const text = element("td", { class: "text", title: prefix.head });
      const before = prefix.tokens - prefix.own_tokens;
      if (before > 0) text.append(element("span", { class: "before" }, `${count(before)} before … `));
      text.append(oneLine(before > 0 ? prefix.branch : prefix.head));
      const row = element(
        "tr", {}, text, cell(count(prefix.tokens)), cell(`${count(prefix.hits)}×`),
        cell(compact(prefix.saved)), cell(duration(prefix.age_s)),
      );
      if (administrator) row.append(cell(prefix.tenant || "–", "tenant"));
      return row;
    }),
  );
}

export function drawTenants(tenants) {
  $("tenants-card").hidden = tenants.length === 0;
  $("tenants").tBodies[0].replaceChildren(
    ...tenants.map((tenant) => {
      const ratio = element("meter", { min: "0", max: "1", value: String(tenant.hit_ratio) });
      ratio.setAttribute("aria-label", `hit ratio of ${tenant.name || "requests without a tenant"}`);
      return element(
        "tr", {}, element("td", {}, tenant.name || "(no tenant)"), cell(count(tenant.requests)),
        cell(compact(tenant.prompt)), element("td", {}, ratio, percent(tenant.hit_ratio)),
      );
    }),
  );
}

export function drawTiers({ rows, faults, cheaper }) {
  $("tiers-card").hidden = rows.length === 0;
  if (rows.length === 0) return;
  const early = Object.entries(faults).map(([fault, n]) => ` · ${count(n)} ended early: ${fault}`);
  $("tiers-detail").textContent = `${count(cheaper)} times cheaper to compute${early.join("")}`;
  $("tiers").tBodies[0].replaceChildren(
    ...rows.map((tier) => {
      const kind = { on: "live", "read-only": "paused", off: "lost" }[tier.state];
      const state = element("span", { class: "pill", "data-kind": kind });
      state.append(tier.reason ? `${tier.state}: ${tier.reason}` : tier.state);
      const used = element("td");
      if (tier.limit) {  // what a server holds, it alone knows
        const meter = element("meter", { min: "0", max: String(tier.limit), value: String(tier.used) });
        meter.setAttribute("aria-label", `used of ${tier.tier}`);
        used.append(meter, `${bytes(tier.used)} of ${bytes(tier.limit)}`);
      } else used.append("–");
      return element(
        "tr", {}, element("td", {}, tier.tier), element("td", {}, state), used,
        cell(bytes(tier.written)), cell(compact(tier.loaded)),
      );
    }),
  );
}

export function drawRequests(requests, administrator) {
  $("no-requests").hidden = requests.length > 0;
  $("ended").hidden = requests.length === 0;
  for (const head of document.querySelectorAll("#ended .tenant")) head.hidden = !administrator;
  $("ended").tBodies[0].replaceChildren(
    ...requests.map((request) => {
      const rest = request.took_s - request.first_token_s;
      const row = element(
        "tr", {}, cell(duration(request.ago_s)), cell(count(request.prompt)),
        cell(percent(request.prompt ? request.hit / request.prompt : 0)),
        cell(duration(request.first_token_s)), cell(count(request.output)),
        cell(rest > 0 ? (Math.max(0, request.output - 1) / rest).toFixed(0) : "–"), cell(request.ended, ""),
        cell(request.adapter || "–", ""),
      );
      if (administrator) row.append(cell(request.tenant || "–", ""));
      row.append(element("td", {}, element("a", { href: `#explain/${request.id}` }, "explain")));
      return row;
    }),
  );
}
