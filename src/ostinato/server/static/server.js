// Requests to the server, with the key of this tab if there is one.

const KEY = "ostinato-key";

export class NoKey extends Error {}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const keepKey = (key) => sessionStorage.setItem(KEY, key);
export const dropKey = () => sessionStorage.removeItem(KEY);

async function send(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    signal,
  });
  if (answer.status === 401) throw new NoKey("A key is needed: see above.");
  if (answer.ok) return answer;
  const content = await answer.json().catch(() => ({}));
  throw new Error(content.error?.message ?? `the server answered ${answer.status}`);
}

export const ask = async (path, body) => (await send(path, body)).json().catch(() => ({}));

// The events of a stream, each parsed, up to its [DONE].
export async function* events(path, body, signal) {
  const answer = await send(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
