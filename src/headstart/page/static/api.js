// Requests to the server that sent this page. The key stays in this variable: in no URL, no cookie and no storage.
let key = "";

export function useKey(value) {
  key = value.trim();
}

export async function send(path, options = {}) {
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}) };
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  if (answer.ok) return answer;
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // not one of our errors
  }
  throw Object.assign(new Error(message), { status: answer.status });
}

export async function json(path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  return (await send(path, options)).json();
}

// Yields the JSON of each server-sent event; [DONE] ends it.
export async function* events(path, options = {}) {
  const reader = (await send(path, options)).body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

export const number = (value) => Math.round(value).toLocaleString("en");

export function ms(value) {
  if (value === null || value === undefined) return "-";
  if (value >= 10000) return `${(value / 1000).toFixed(0)} s`;
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

export function element(tag, className = "", text = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  made.append(...children);
  return made;
}

// A table of texts or elements.
export function table(heads, rows) {
  const cells = (tag, values) => element("tr", "", "", ...values.map((value) => element(tag, "", "", value)));
  const body = element("tbody", "", "", ...rows.map((values) => cells("td", values)));
  return element("table", "", "", element("thead", "", "", cells("th", heads)), body);
}

// A stacked bar of [class, value] with its parts named for screen readers.
export function bar(parts, total) {
  const made = element("div", "bar");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", parts.map(([name, value]) => `${name} ${number(value)}`).join(", "));
  for (const [name, value] of parts) {
    if (!value) continue;
    const part = element("span", name);
    part.style.width = `${(100 * value) / (total || 1)}%`;
    part.title = `${name}: ${number(value)}`;
    made.append(part);
  }
  return made;
}
