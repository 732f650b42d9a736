// The chat: each prompt as the model reads it, coloured by where the KV of its tokens came from.
import { bar, element, events, json, ms, number } from "./api.js";

const SOURCES = ["pinned", "shared", "store", "followed", "computed"]; // in the order in which a prompt has them
const byId = (id) => document.getElementById(id);
const MAX_TOKENS = 1024; // of an answer
let messages = [];
let model;
let running = null;
let speed = null; // milliseconds per prompt token

export function setSpeed(value) {
  speed = value ?? speed;
}

export function startChat() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) ask(byId("prompt").value);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("ask").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("fresh").addEventListener("click", () => {
    running?.abort();
    messages = [];
    byId("turns").replaceChildren();
    byId("prompt").focus();
  });
}

async function ask(text) {
  const system = byId("system").value.trim();
  if (!messages.length && system) messages.push({ role: "system", content: system });
  const sent = [...messages, { role: "user", content: text }];
  const asked = turn("user", text);
  const answered = turn("assistant", "");
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  byId("prompt").value = "";
  const said = answered.querySelector(".said");
  try {
    model ??= (await json("v1/models")).data[0]?.id;
    const rendered = await render(sent);
    const room = rendered ? Math.max(rendered.max_model_len - rendered.count, 1) : MAX_TOKENS;
    const begun = performance.now();
    let first = null;
    let usage = null;
    const limit = Math.min(room, MAX_TOKENS);
    const body = { model, messages: sent, max_tokens: limit, stream: true, stream_options: { include_usage: true } };
    for await (const chunk of events("v1/chat/completions", {
      method: "POST",
      body: JSON.stringify(body),
      signal: running.signal,
    })) {
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices?.[0]?.delta ?? {};
      const piece = (delta.reasoning_content ?? "") + (delta.content ?? "");
      if (piece) {
        first ??= performance.now() - begun;
        said.textContent += piece;
        scroll();
      }
      usage = chunk.usage ?? usage;
    }
    messages = [...sent, { role: "assistant", content: said.textContent }];
    if (usage) showPrompt(asked, rendered, usage, first, performance.now() - begun);
  } catch (error) {
    answered.classList.add("failed");
    said.textContent += error.name === "AbortError" ? " (stopped)" : error.message;
    byId("prompt").value ||= text;
  } finally {
    running = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
    scroll();
  }
}

function turn(role, text) {
  const made = element("li", role, "", element("p", "who", role), element("p", "said", text));
  byId("turns").append(made);
  scroll();
  return made;
}

function scroll() {
  byId("turns").scrollTop = byId("turns").scrollHeight;
}

function counts(usage) {
  const details = usage.prompt_tokens_details ?? {};
  const found = SOURCES.slice(0, 4).map((name) => [name, details[`${name}_tokens`] ?? 0]);
  const named = found.reduce((sum, [, value]) => sum + value, 0);
  found[1][1] += Math.max((details.cached_tokens ?? 0) - named, 0); // of an engine that does not tell them apart
  const cached = found.reduce((sum, [, value]) => sum + value, 0);
  return [...found, ["computed", Math.max(usage.prompt_tokens - cached, 0)]];
}

// The prompt in tokens; null at an engine that cannot say.
async function render(sent) {
  try {
    return await json("tokenize", { model, messages: sent, return_token_strs: true });
  } catch {
    return null;
  }
}

function showPrompt(asked, rendered, usage, first, whole) {
  const parts = counts(usage);
  const cached = usage.prompt_tokens - parts[4][1];
  const saved = speed === null || !cached ? "" : `, ${ms(cached * speed)} saved`;
  const shown = element("details", "prompt");
  shown.open = true;
  shown.append(
    element("summary", "", `${number(cached)} of ${number(usage.prompt_tokens)} prompt tokens reused${saved}`),
    bar(parts, usage.prompt_tokens),
    element("p", "times", `first token ${ms(first)}, whole answer ${ms(whole)}, ${number(usage.completion_tokens)} tokens`),
  );
  for (const old of document.querySelectorAll("#turns details.prompt")) old.open = false;
  asked.append(shown);
  if (!rendered?.token_strs) return;
  const text = element("div", "rendered");
  text.tabIndex = 0;
  text.setAttribute("role", "region");
  text.setAttribute("aria-label", "The prompt by source");
  let start = 0;
  for (const [name, value] of parts) {
    if (!value) continue;
    const words = rendered.token_strs.slice(start, name === "computed" ? undefined : start + value).join("");
    start += value;
    const span = element("span", name, words);
    span.title = `${name}: ${number(value)} tokens${speed && name !== "computed" ? `, ${ms(value * speed)} saved` : ""}`;
    text.append(element("b", "unseen", `${name}: `), span);
  }
  shown.append(text);
}
