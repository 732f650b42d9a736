// The page: reads the stream of figures and fills its parts; the tree is loaded again when something has changed.
import { bar, element, events, ms, number, table, useKey } from "./api.js";
import { setSpeed, startChat } from "./chat.js";
import { loadTree, startTree } from "./tree.js";

const byId = (id) => document.getElementById(id);
const RETRY_MS = 2000;
const TREE_MS = 900;
let stream = null;
let treeAt = 0;
let loading = false;
let drawn = null; // what the frame said when the tree was loaded
let held = {}; // tokens of the last tree, by tenant

function status(text, isLive) {
  if (byId("status").textContent !== text) byId("status").textContent = text;
  byId("status").className = isLive ? "live" : "";
}

function notice(text) {
  byId("notice").hidden = !text;
  if (byId("notice").textContent !== text) byId("notice").textContent = text;
}

function tiles(rows) {
  const shown = rows.filter(([, value]) => value !== undefined);
  byId("tiles").replaceChildren(
    ...shown.map(([name, value]) => element("div", "", "", element("dt", "", name), element("dd", "", value))),
  );
}

const percent = (value) => (value === null || value === undefined ? "-" : `${(100 * value).toFixed(0)} %`);

function showFigures(frame) {
  if (frame.ttft_ms) {
    tiles([
      ["Running", number(frame.running)],
      ["Waiting", number(frame.waiting)],
      ["TTFT p50", ms(frame.ttft_ms.p50)],
      ["TTFT p95", ms(frame.ttft_ms.p95)],
      ["Prompt tok/s", number(frame.prompt_tokens_per_s)],
      ["Output tok/s", number(frame.output_tokens_per_s)],
      ["Hit rate", percent(frame.hit_rate)],
      ["Evicted blocks", number(frame.evicted_blocks)],
    ]);
  } else {
    tiles([["Hit rate", percent(frame.hit_rate)]]);
  }
  showSources(frame.sources, frame.window_seconds);
  if (frame.kv_tokens) showCapacity(frame.kv_tokens);
  showLosses(frame);
  showTenants(frame.tenants ?? []);
}

function showSources(sources, seconds) {
  const parts = Object.entries(sources);
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  const title = element("p", "named", "", element("span", "", "Prompt tokens by source"), element("span", "", span(seconds)));
  byId("sources").replaceChildren(title, bar(parts, total), words(parts));
}

const words = (parts) =>
  element("p", "times", parts.filter(([, value]) => value).map(([name, value]) => `${name} ${number(value)}`).join(", ") || "none");

function showCapacity(kv) {
  const parts = [["in-use", kv.referenced], ["pin", kv.pinned_idle], ["cached", kv.idle], ["free", kv.scratch]];
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  const title = element("p", "named", "", element("span", "", "KV cache"), element("span", "", `${number(total)} tokens`));
  const named = [["in use", kv.referenced], ["pinned", kv.pinned_idle], ["evictable", kv.idle], ["free", kv.scratch]];
  byId("capacity").replaceChildren(title, bar(parts, total), words(named));
}

const span = (seconds) => (seconds < 1 ? "since the start" : seconds < 90 ? `last ${number(seconds)} s` : `last ${number(seconds / 60)} min`);

function showLosses({ losses, sources, tenant, window_seconds: seconds }) {
  const total = Object.values(sources).reduce((sum, value) => sum + value, 0);
  byId("losses-window").textContent = total
    ? `${number(sources.computed)} of ${number(total)} prompt tokens were computed, ${span(seconds)}.`
    : "No prompts yet.";
  byId("causes").replaceChildren(
    ...losses.map((loss) => {
      const part = bar([["computed", loss.tokens]], total);
      const name = element("b", "", loss.cause.replaceAll("_", " "));
      const head = element("p", "named", "", name, element("span", "", `${number(loss.tokens)} tokens`));
      const by = loss.by ? [element("p", "", `Evicted by ${evictors(loss.by, tenant)}.`)] : [];
      return element("li", "", "", head, part, ...by, element("p", "", loss.remedy));
    }),
  );
}

function cause(one) {
  const name = (one.cause ?? "-").replaceAll("_", " ");
  return one.cause === "evicted" ? `evicted by ${evictors(one.evicted_by, one.tenant)}` : name;
}

const evictors = (by, own) => Object.entries(by).map(([name, tokens]) => `${name === own ? "itself" : name} (${number(tokens)})`).join(", ");

function showTenants(tenants) {
  const heads = ["Tenant", "Prompt tokens", "Reused", "Computed", "Evicted earlier", "Main cause", "Cached now"];
  const rows = tenants.map((one) => [
    one.tenant, number(one.prompt_tokens), percent(one.cached_tokens / one.prompt_tokens),
    number(one.prompt_tokens - one.cached_tokens), number(one.evicted_tokens), cause(one),
    number(held[one.tenant] ?? 0),
  ]);
  byId("tenants").hidden = tenants.length < 2;
  byId("shares").replaceChildren(table(heads, rows));
}

function row(name, value) {
  return [element("dt", "", name), element("dd", "", value)];
}

function replica(found) {
  const isUp = found.state === "up" && !found.ejected;
  const rates = Object.entries(found.rates_ms ?? {}).filter(([, value]) => typeof value === "number");
  const cache = found.cache ?? {};
  const list = element(
    "dl", "", "",
    ...row("State", found.ejected ? "ejected" : found.state),
    ...(found.pending === undefined ? [] : [
      ...row("Waiting", number(found.pending)), ...row("Streams", number(found.streams)),
      ...row("Backlog", ms(found.backlog_ms)), ...row("Slowness", `${found.slowness}`),
    ]),
    ...rates.flatMap(([name, value]) => row(`Learned: ms per ${name.replaceAll("_", " ")}`, short(value))),
    ...Object.entries(cache).filter(([, value]) => typeof value !== "object" || value === null)
      .flatMap(([name, value]) => row(`Cache: ${name.replaceAll("_", " ")}`, typeof value === "number" ? number(value) : `${value}`)),
  );
  return element("div", isUp ? "replica" : "replica down", "", element("h3", "", found.url), list);
}

function showFleet(frame) {
  byId("fleet").hidden = false;
  for (const id of ["sources", "capacity", "losses"]) byId(id).hidden = true;
  tiles([
    ["Waiting", number(frame.queued)],
    ["TTFT p50", ms(frame.ttft_ms.p50)],
    ["TTFT p95", ms(frame.ttft_ms.p95)],
    ["Replicas up", `${frame.replicas.filter((one) => one.state === "up").length} of ${frame.replicas.length}`],
    ["Policy", frame.policy],
  ]);
  byId("replicas").replaceChildren(...frame.replicas.map(replica));
  showDecisions(frame.decisions);
  const up = frame.replicas.filter((one) => one.state === "up").map((one) => one.url);
  const chosen = byId("replica").value;
  if (byId("replica").dataset.key !== up.join()) {
    byId("replica").dataset.key = up.join();
    byId("replica").replaceChildren(...up.map((url) => element("option", "", url)));
    if (up.includes(chosen)) byId("replica").value = chosen;
  }
  document.querySelector(".pick").hidden = false;
}

const host = (url) => url.replace(/^https?:\/\//, "");
const short = (value) => (value >= 0.01 || !value ? `${Number(value.toPrecision(3))}` : value.toExponential(1));

function showDecisions(decisions) {
  const heads = ["Prompt", "Sent to", "Why", "Price of each replica"];
  const price = (one) =>
    element("div", "price", `${host(one.endpoint)}: ${ms(one.cost_ms)} (${number(one.cached_tokens)} cached)`);
  const rows = decisions.map((one) => [
    number(one.prompt_tokens), host(one.endpoint), one.reason, element("div", "", "", ...one.candidates.map(price)),
  ]);
  byId("decisions").replaceChildren(rows.length ? table(heads, rows) : element("p", "times", "None yet."));
}

async function refreshTree(frame) {
  const isFleet = frame.object === "fleet.figures";
  const url = byId("replica").value;
  const state = frame.num_steps === undefined ? null : JSON.stringify([frame.num_steps, frame.kv_tokens, frame.evicted_blocks]);
  if (loading || (isFleet && !url) || (state && state === drawn)) return;
  const now = performance.now();
  if (now - treeAt < TREE_MS) return;
  [treeAt, loading, drawn] = [now, true, null];
  try {
    const tree = await loadTree(isFleet ? `&replica=${encodeURIComponent(url)}` : "");
    held = tree.tenants ?? {};
    if (tree.seconds_ago < 0.5) drawn = state; // an older tree may lack what the frame has counted
  } catch (error) {
    byId("tree-summary").textContent = error.message;
  } finally {
    loading = false;
  }
}

async function follow(signal) {
  for await (const frame of events("v1/cache/live", { signal })) {
    if (frame.error) throw new Error(frame.error.message);
    status("live", true);
    notice("");
    byId("model").textContent = frame.model ?? "router";
    setSpeed(frame.ms_per_prompt_token);
    if (frame.object === "fleet.figures") showFleet(frame);
    else showFigures(frame);
    refreshTree(frame);
  }
}

async function run() {
  const own = (stream = new AbortController());
  while (stream === own) {
    try {
      await follow(own.signal);
      status("reconnecting", false);
    } catch (error) {
      if (own.signal.aborted) return;
      status(error.status ? "no figures" : "not reachable", false);
      notice(error.status === 401 || error.status === 403 ? `Figures and tree: ${error.message}` : "");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

byId("keys").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  stream?.abort();
  run();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stream?.abort(); // a page that is not seen costs nothing
  else run();
});
startChat();
startTree();
run();
