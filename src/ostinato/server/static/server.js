// How is the server asked? With the key of this tab, if there is one.

const KEY = "ostinato-key";

export class NoKey extends Error {}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const keepKey = (key) => sessionStorage.setItem(KEY, key);
export const dropKey = () => sessionStorage.removeItem(KEY);

export async function ask(path, body) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
  });
  if (answer.status === 401) throw new NoKey();
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.error?.message ?? `the server answered ${answer.status}`);
  return content;
}
