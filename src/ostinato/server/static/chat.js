// The chat: a conversation streamed over /v1/chat/completions.

import { $, count, duration, element } from "/ui/format.js";
import { ask, events } from "/ui/server.js";

const MAX_TOKENS = 256;
const turns = [];
let stopping = null;
let model = null;

function bubble(role, text) {
  const said = element("p", { class: "said" }, text);
  const note = element("p", { class: "small note" });
  $("chat-log").append(element("div", { class: `turn ${role}` }, said, note));
  scroll();
  return { said, note };
}

function scroll() {
  $("chat-log").scrollTop = $("chat-log").scrollHeight;
}

const conversation = () => {
  const system = $("chat-system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...turns];
};

// Shows what a turn reused, with a link to its explanation.
function sumUp(note, id, usage, firstMs, tookMs) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const rate = usage.completion_tokens > 1 && tookMs > firstMs
    ? ` · ${((1000 * (usage.completion_tokens - 1)) / (tookMs - firstMs)).toFixed(0)} tokens/s` : "";
  note.append(
    `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached · first token ` +
      `${duration(firstMs / 1000)}${rate} · `,
    element("a", { href: `#explain/${id}` }, "explain"),
  );
}

async function talk(text) {
  turns.push({ role: "user", content: text });
  bubble("user", text);
  const { said, note } = bubble("assistant", "");
  let [id, usage, firstMs] = ["", null, null];
  stopping = new AbortController();
  $("chat-send").textContent = "Stop";
  try {
    model ??= (await ask("/v1/models")).data[0].id;
    const begin = performance.now();
    const body = {
      model, messages: conversation(), max_tokens: MAX_TOKENS, temperature: 0.5,
      stream: true, stream_options: { include_usage: true },
    };
    for await (const event of events("/v1/chat/completions", body, stopping.signal)) {
      if (event.error) throw new Error(event.error.message);
      id = event.id ?? id;
      usage = event.usage ?? usage;
      const piece = event.choices?.[0]?.delta?.content ?? "";
      if (piece) firstMs ??= performance.now() - begin;
      said.append(piece);
      scroll();
    }
    if (usage) sumUp(note, id, usage, firstMs ?? 0, performance.now() - begin);
  } catch (error) {
    note.textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
  if (said.isConnected) { // else a new chat has begun meanwhile
    if (said.textContent) turns.push({ role: "assistant", content: said.textContent });
    else turns.pop();
  }
  stopping = null;
  $("chat-send").textContent = "Send";
  scroll();
}

$("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  if (stopping) return stopping.abort();
  const text = $("chat-text").value.trim();
  if (!text) return;
  $("chat-text").value = "";
  talk(text);
});
$("chat-new").addEventListener("click", () => {
  stopping?.abort();
  turns.length = 0;
  $("chat-log").replaceChildren();
  $("chat-text").focus();
});
