// The prefix tree as an icicle: a run of blocks is as wide as the tokens of all prompts that begin so.
import { element, json, number, table } from "./api.js";

const canvas = document.getElementById("icicle");
const context = canvas.getContext("2d");
const MIN_WIDTH = 0.5; // pixels; narrower runs are not drawn
const MAX_ROWS = 60;
const COLUMNS = ["id", "parent", "tokens", "subtree_tokens", "users", "state", "pinned", "tenant", "text"];
let runs = []; // in preorder, each with its place: x0 and x1 in 0..1, depth, children
let block = 16;
let selected = null; // ids survive a new tree
let zoomed = null;
let shown = []; // rectangles drawn last, for clicks
let due = false;
let painted = 0;

export async function loadTree(query = "") {
  const answer = await json(`v1/cache/tree?max_runs=10000${query}`);
  performance.mark("load");
  block = answer.block_size;
  const [id, parent, tokens, below, users, state, pinned, tenant, text] = COLUMNS.map((name) => answer.columns.indexOf(name));
  runs = answer.runs.map((row) => ({
    id: row[id], parent: row[parent], tokens: row[tokens], subtree_tokens: row[below], users: row[users], state: row[state],
    pinned: row[pinned], tenant: row[tenant], text: row[text],
  }));
  place(answer.tokens);
  const more = answer.num_runs > runs.length ? `, the ${number(runs.length)} largest of ${number(answer.num_runs)} runs` : "";
  document.getElementById("tree-summary").textContent = runs.length
    ? `${number(answer.tokens)} of ${number(answer.capacity_tokens)} tokens are cached${more}.`
    : "Nothing is cached yet.";
  if (!find(selected)) selected = null;
  if (!find(zoomed)) zoomed = null;
  draw();
  describe();
  if (document.getElementById("table").open) list();
  performance.measure("tree-load", "load");
  return answer;
}

function place(total) {
  const free = [0]; // where the next child of each run begins; the first is the root's
  for (const [index, run] of runs.entries()) {
    const above = run.parent < 0 ? null : runs[run.parent];
    run.index = index;
    run.children = [];
    above?.children.push(run);
    run.above = above;
    run.depth = above ? above.depth + 1 : 0;
    run.x0 = free[run.parent + 1];
    run.x1 = run.x0 + run.subtree_tokens / (total || 1);
    free[run.parent + 1] = run.x1;
    free[index + 1] = run.x0;
  }
}

const find = (id) => (id === null ? undefined : runs.find((run) => run.id === id));

export function draw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    paint();
  });
}

function paint() {
  performance.mark("paint");
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const colours = { in_use: colour("in-use"), reused: colour("reused"), cached: colour("cached") };
  const [paper, ink, pin, accent] = [colour("card"), colour("run-ink"), colour("pinned-edge"), colour("accent")];
  const unit = parseFloat(style.fontSize);
  const row = Math.round(unit * 1.6);
  const width = canvas.parentElement.clientWidth;
  const focus = find(zoomed);
  const [from, to, top] = focus ? [focus.x0, focus.x1, focus.depth] : [0, 1, 0];
  const scale = width / (to - from || 1);
  shown = [];
  let rows = 3;
  for (const run of runs) {
    const [x, wide, level] = [(run.x0 - from) * scale, (run.x1 - run.x0) * scale, run.depth - top];
    if (wide < MIN_WIDTH || x + wide < 0 || x > width || level < 0 || level >= MAX_ROWS) continue;
    if (focus && level === 0 && run !== focus) continue;
    rows = Math.max(rows, level + 1);
    shown.push([Math.max(x, 0), level * row, Math.min(x + wide, width) - Math.max(x, 0), run]);
  }
  const ratio = window.devicePixelRatio || 1;
  const height = rows * row;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.fillStyle = paper;
  context.fillRect(0, 0, width, height);
  context.font = `${Math.round(unit * 0.75)}px system-ui, "DejaVu Sans", sans-serif`;
  context.textBaseline = "middle";
  for (const [x, y, wide, run] of shown) {
    const inner = wide > 3 ? wide - 1 : wide;
    context.fillStyle = colours[run.state];
    context.fillRect(x, y, inner, row - 1);
    if (run.pinned) {
      context.fillStyle = pin;
      context.fillRect(x, y, inner, Math.max(3, row / 7));
    }
    if (wide > unit * 4) label(run, x, y + row / 2, inner - 8, ink);
  }
  const marked = shown.find(([, , , run]) => run.id === selected);
  if (marked) {
    context.strokeStyle = accent;
    context.lineWidth = 3;
    context.strokeRect(marked[0] + 1.5, marked[1] + 1.5, Math.max(marked[2] - 4, 2), row - 4);
  }
  if (painted++ % 100 === 0) performance.clearMeasures(); // a page may be open for weeks
  performance.measure("tree-paint", "paint");
  performance.clearMarks();
}

function label(run, x, y, room, ink) {
  const name = run.text.replace(/\s+/g, " ").trim() || `${number(run.tokens)} tokens`;
  const chars = Math.floor(room / (context.measureText("n").width || 1));
  context.fillStyle = ink;
  context.fillText(name.length > chars ? `${name.slice(0, Math.max(chars - 1, 1))}\u2026` : name, x + 4, y + 1, room);
}

const STATE = { in_use: "in use", reused: "reused", cached: "cached once" };

function describe() {
  const run = find(selected);
  const list = document.getElementById("run");
  const rows = run
    ? [
        ["Text", run.text.trim() || "-", "text"],
        ["Tokens", `${number(run.tokens)} (${number(run.tokens / block)} block${run.tokens === block ? "" : "s"}), with all below ${number(run.subtree_tokens)}`],
        ["Users now", number(run.users)],
        ["State", STATE[run.state] + (run.pinned ? ", pinned" : "")],
        ["Evictable", run.pinned || run.users ? "no" : "yes"],
        ...(run.tenant ? [["Tenant", run.tenant]] : []),
      ]
    : [];
  const key = JSON.stringify(rows);
  if (list.dataset.key === key) return; // a screen reader says what is replaced
  list.dataset.key = key;
  list.replaceChildren(...rows.flatMap(([name, value, kind]) => [element("dt", "", name), element("dd", kind ?? "", value)]));
}

function list() {
  const largest = [...runs].sort((one, other) => other.subtree_tokens - one.subtree_tokens).slice(0, 50);
  const withTenants = runs.some((run) => run.tenant);
  const heads = ["Begins with", "Depth", "Tokens", "With all below", "Users", "State", "Pinned"];
  const rows = largest.map((run) => [
    run.text.slice(0, 60), `${run.depth}`, number(run.tokens), number(run.subtree_tokens), `${run.users}`, STATE[run.state],
    run.pinned ? "yes" : "no", ...(withTenants ? [run.tenant] : []),
  ]);
  document.getElementById("runs").replaceChildren(table([...heads, ...(withTenants ? ["Tenant"] : [])], rows));
}

function select(run) {
  if (!run) return;
  selected = run.id;
  draw();
  describe();
}

function at(event) {
  const box = canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const row = Math.round(parseFloat(getComputedStyle(document.documentElement).fontSize) * 1.6);
  return shown.find(([left, top, wide]) => x >= left && x < left + wide && y >= top && y < top + row)?.[3];
}

function move(key) {
  const run = find(selected);
  const roots = runs.filter((other) => other.parent < 0);
  if (!run) return roots[0];
  const beside = run.above ? run.above.children : roots;
  const position = beside.indexOf(run);
  if (key === "ArrowDown") return run.children[0];
  if (key === "ArrowUp") return run.above;
  return beside[position + (key === "ArrowRight" ? 1 : -1)];
}

export function startTree() {
  canvas.addEventListener("click", (event) => select(at(event)));
  canvas.addEventListener("dblclick", (event) => {
    zoomed = at(event)?.id ?? zoomed;
    draw();
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.key.startsWith("Arrow")) select(move(event.key));
    else if (event.key === "Enter") zoomed = selected;
    else if (event.key === "Escape") zoomed = null;
    else return;
    event.preventDefault();
    draw();
  });
  document.getElementById("table").addEventListener("toggle", list);
  new ResizeObserver(draw).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
