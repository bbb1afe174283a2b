// The page of `tessera page`: @DATA@ becomes what page.cpp has read. It asks for nothing outside of itself.
#pragma once

namespace tessera::commands {

inline constexpr const char* kPageHtml = R"page(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>Tessera: runs</title>
<style>
:root {
  color-scheme: light dark;
  --back: #ffffff; --card: #f6f7f9; --line: #d5d9e0; --text: #1c2330; --soft: #5a6475;
  --c0: #1f6fb4; --c1: #c8560b; --c2: #1d7f4c; --c3: #8b3fa8; --c4: #a3760a; --c5: #c02f5d; --c6: #14808c; --c7: #6b6f76;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #12151b; --card: #1a1f28; --line: #343c4a; --text: #e6e9ef; --soft: #a2acbc;
    --c0: #6fb1ee; --c1: #f2975a; --c2: #63c793; --c3: #cb92e4; --c4: #dcb552; --c5: #f0819f; --c6: #62c4cf; --c7: #b4b9c2;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 16px; }
h1 { font-size: 22px; margin: 0 0 4px; }
h2 { font-size: 16px; margin: 0 0 6px; }
p { margin: 0 0 10px; }
.soft { color: var(--soft); }
.cards { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); margin-top: 14px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; min-width: 0; }
.wide { grid-column: 1 / -1; }
.scroll { overflow-x: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; }
.legend span { overflow-wrap: anywhere; }
.mark { display: inline-block; width: 22px; height: 0; border-top: 3px solid; margin-right: 6px; vertical-align: middle; }
.box { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px; vertical-align: -1px; }
.read { min-height: 19px; font-size: 13px; color: var(--soft); overflow-wrap: anywhere; }
svg { display: block; width: 100%; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .on { fill: var(--back); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .cursor { stroke: var(--soft); stroke-dasharray: 3 3; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.name { white-space: normal; overflow-wrap: anywhere; min-width: 96px; }
.warnings th, .warnings td { text-align: left; vertical-align: top; }
.warnings td:last-child { white-space: normal; overflow-wrap: anywhere; width: 100%; }
details { margin-top: 14px; }
details summary { cursor: pointer; }
@media (max-width: 640px) {
  main { padding: 10px; }
  thead { display: none; }
  tr { display: block; border-bottom: 1px solid var(--line); padding: 4px 0; }
  tbody tr:last-child { border-bottom: 0; }
  td, .warnings td { display: flex; justify-content: space-between; gap: 16px; border: 0; padding: 1px 0; white-space: normal; text-align: right; }
  td::before { content: attr(data-head); color: var(--soft); text-align: left; flex: none; }
  td.name, .warnings td:last-child { display: block; font-weight: 600; text-align: left; }
  .warnings td:last-child { font-weight: 400; }
  td.name::before, .warnings td:last-child::before { content: none; }
}
</style>
</head>
<body>
<main>
<h1 id="title"></h1>
<p class="soft" id="about"></p>
<div class="legend" id="runs"></div>
<div class="cards" id="cards"></div>
<details id="more"><summary>Further numbers</summary><div class="cards" id="others"></div></details>
</main>
<script>
"use strict";
const DATA = @DATA@;
const SVG = "http://www.w3.org/2000/svg";
const runs = DATA.runs, prefix = "Train/Samples/";
const color = (i) => `var(--c${i % 8})`, dash = (i) => (i < 8 ? "" : "7 4");
const of = (run, name) => run.series[prefix + name];
const last = (points) => points && points.filter((p) => p[1] !== null).at(-1)?.[1];
const mean = (points) => {
  const values = (points ?? []).map((p) => p[1]).filter((v) => v !== null);
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : undefined;
};

function add(parent, tag, attributes = {}, text = "") {
  const svg = tag === "svg" || parent.namespaceURI === SVG;
  const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== "") made.textContent = text;
  parent.append(made);
  return made;
}

// ---- numbers as text
function short(value) {
  if (value === undefined || value === null) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e15) return value.toExponential(2).replace(/\.?0+e/, "e");
  for (const [factor, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= factor) return `${+(value / (unit === "k" ? 1e3 : factor)).toPrecision(3)}${unit}`;
  return `${+value.toPrecision(4)}`;
}
function bytes(value) {
  if (value === undefined) return "–";
  for (const [factor, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (value >= factor) return `${+(value / factor).toPrecision(3)} ${unit}`;
  return `${Math.round(value)} B`;
}
const percent = (value) => (value === undefined || value === null ? "–" : `${(100 * value).toFixed(1)} %`);
const ms = (value) => (value === undefined ? "–" : `${+value.toPrecision(3)} ms`);

// Steps of 1, 2 or 5 times a power of ten: the ticks of an axis.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((k) => k * power >= raw);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) found.push(+tick.toPrecision(12));
  return found;
}

function legend(parent, entries) {
  const line = add(parent, "div", { class: "legend" });
  for (const [name, paint, kind, pattern] of entries) {
    const entry = add(line, "span");
    if (kind === "box") add(entry, "i", { class: "box", style: `background:${paint}` });
    else add(entry, "i", { class: "mark", style: `border-color:${paint};border-top-style:${pattern ? "dashed" : "solid"}` });
    entry.append(name);
  }
}

function card(parent, title, wide = false) {
  const made = add(parent, "section", { class: wide ? "card wide" : "card" });
  add(made, "h2", {}, title);
  return made;
}

// ---- lines over steps
const drawn = [];
function lineChart(parent, title, name, format = short, unit = "") {
  const lines = runs.map((run, i) => [run, i, (run.series[name] ?? [])]).filter((line) => line[2].length > 0);
  if (lines.length === 0) return false;
  const box = card(parent, unit ? `${title} (${unit})` : title);
  const place = add(box, "div"), read = add(box, "div", { class: "read" });
  if (runs.length > 1) legend(box, lines.map(([run, i]) => [run.name, color(i), "line", dash(i)]));
  drawn.push(() => drawLines(place, read, lines, title, format));
  return true;
}

function drawLines(place, read, lines, title, format) {
  const width = Math.max(240, place.clientWidth), height = 230, left = 58, right = 10, top = 8, bottom = 38;
  place.replaceChildren();
  read.textContent = "";
  const all = lines.flatMap((line) => line[2]), values = all.map((p) => p[1]).filter((v) => v !== null);
  if (values.length === 0) { place.textContent = "no finite value"; return; }
  let [x0, x1] = [Infinity, -Infinity], [y0, y1] = [Infinity, -Infinity];
  for (const p of all) { x0 = Math.min(x0, p[0]); x1 = Math.max(x1, p[0]); }
  for (const v of values) { y0 = Math.min(y0, v); y1 = Math.max(y1, v); }
  if (x0 >= 0 && x0 < x1 / 10) x0 = 0;
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  if (y1 - y0 < 1e-9 * Math.abs(y1)) { const around = Math.abs(y1) / 10 || 1; y0 -= around; y1 += around; }
  const pad = (y1 - y0) * 0.05;
  if (y0 >= 0 && y0 - pad < 0) y0 = 0; else y0 -= pad;
  y1 += pad;
  const X = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const Y = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  const svg = add(place, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${title} over ${DATA.x}` });
  for (const tick of ticks(y0, y1, 5)) {
    add(svg, "line", { class: "grid", x1: left, x2: width - right, y1: Y(tick), y2: Y(tick) });
    add(svg, "text", { x: left - 6, y: Y(tick) + 4, "text-anchor": "end" }, format(tick));
  }
  for (const tick of ticks(x0, x1, width / 110)) {
    const anchor = X(tick) > width - 24 ? "end" : "middle";
    add(svg, "line", { class: "grid", x1: X(tick), x2: X(tick), y1: height - bottom, y2: height - bottom + 4 });
    add(svg, "text", { x: X(tick), y: height - bottom + 17, "text-anchor": anchor }, short(tick));
  }
  add(svg, "text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, DATA.x);
  for (const [run, i, points] of lines) {
    let path = "", pen = "M";
    for (const [x, y] of points) {
      if (y === null) { pen = "M"; continue; }
      path += `${pen}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`;
      pen = "L";
    }
    add(svg, "path", { d: path, fill: "none", style: `stroke:${color(i)}`, "stroke-width": 1.6, "stroke-dasharray": dash(i), "data-run": run.name });
    if (points.length === 1 && points[0][1] !== null)
      add(svg, "circle", { cx: X(points[0][0]), cy: Y(points[0][1]), r: 3, style: `fill:${color(i)}` });
  }
  const cursor = add(svg, "line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * width;
    const x = x0 + ((at - left) / (width - left - right)) * (x1 - x0);
    const near = lines.map(([run, , points]) => [run, points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a))]);
    cursor.setAttribute("x1", X(near[0][1][0]));
    cursor.setAttribute("x2", X(near[0][1][0]));
    cursor.setAttribute("visibility", "visible");
    read.textContent = near.map(([run, p]) => `${runs.length > 1 ? run.name + ": " : ""}${format(p[1])} at ${p[0]}`).join(", ");
  };
  svg.onpointerleave = () => { cursor.setAttribute("visibility", "hidden"); read.textContent = ""; };
}

// ---- bars of parts, one below the other
function barChart(parent, title, kinds, bars, format, note) {
  if (bars.length === 0) return;
  const box = card(parent, title), place = add(box, "div");
  const used = kinds.filter((kind) => bars.some((bar) => bar.parts[kind] > 0));
  legend(box, used.map((kind) => [kind, color(kinds.indexOf(kind)), "box"]));
  if (note) add(box, "p", { class: "soft" }, note).style.margin = "6px 0 0";
  drawn.push(() => {
    const width = Math.max(240, place.clientWidth), row = 44, height = bars.length * row + 22;
    place.replaceChildren();
    const most = Math.max(...bars.map((bar) => used.reduce((sum, kind) => sum + (bar.parts[kind] ?? 0), 0)));
    const svg = add(place, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title });
    const scale = (value) => (value / most) * (width - 2);
    bars.forEach((bar, n) => {
      const total = used.reduce((sum, kind) => sum + (bar.parts[kind] ?? 0), 0);
      const room = Math.floor((width - 90) / 7), name = bar.name.length > room ? bar.name.slice(0, room - 1) + "…" : bar.name;
      add(svg, "text", { x: 0, y: n * row + 13 }, name);
      add(svg, "text", { x: width - 2, y: n * row + 13, "text-anchor": "end" }, format(total));
      let x = 1;
      for (const kind of used) {
        const part = scale(bar.parts[kind] ?? 0);
        if (!(part > 0)) continue;
        const rect = add(svg, "rect", { x, y: n * row + 18, width: part, height: 18, style: `fill:${color(kinds.indexOf(kind))}` });
        add(rect, "title", {}, `${bar.name}, ${kind}: ${format(bar.parts[kind])}`);
        const label = format(bar.parts[kind]);
        if (part > 8 * label.length) add(svg, "text", { class: "on", x: x + part / 2, y: n * row + 31, "text-anchor": "middle" }, label);
        x += part;
      }
    });
    const ground = bars.length * row + 2;
    add(svg, "line", { class: "grid", x1: 1, x2: width - 1, y1: ground, y2: ground });
    add(svg, "text", { x: 1, y: ground + 16 }, "0");
    add(svg, "text", { x: width - 2, y: ground + 16, "text-anchor": "end" }, format(most));
  });
}

function table(parent, title, head, rows, style = "") {
  const box = card(parent, title, true), made = add(add(box, "div", { class: "scroll" }), "table", { class: style });
  const line = add(add(made, "thead"), "tr"), body = add(made, "tbody");
  for (const cell of head) add(line, "th", {}, cell);
  for (const row of rows) {
    const tr = add(body, "tr");
    row.forEach((cell, n) => add(tr, "td", { class: n === 0 ? "name" : "", "data-head": head[n] }, `${cell}`));
  }
}

// ---- the page
const cards = document.getElementById("cards"), others = document.getElementById("others"), shown = new Set();
document.getElementById("title").textContent = runs.length === 1 ? runs[0].name : `${runs.length} runs`;
document.title = `Tessera: ${runs.map((run) => run.name).join(", ")}`;
document.getElementById("about").textContent = DATA.about;
if (runs.length > 1) legend(document.getElementById("runs"), runs.map((run, i) => [run.name, color(i), "line", dash(i)]));

function summary() {
  const speed = runs.some((run) => of(run, "tokens_per_second")) ? "tokens_per_second" : "samples_per_second";
  const row = (run) => [
    run.name, short(last(of(run, "global_steps"))), short(run.samples), short(last(of(run, "train_loss"))), short(last(of(run, "grad_norm"))),
    short(last(of(run, "lr"))), short(last(of(run, "skipped_steps"))), short(mean(of(run, speed))), percent(mean(of(run, "mfu"))),
  ];
  const head = ["run", "steps", "samples", "last loss", "last norm", "last rate", "skipped", speed === "tokens_per_second" ? "tokens/s" : "samples/s", "MFU"];
  table(cards, "Runs", head, runs.map(row));
}
function line(title, name, format, unit, parent = cards) {
  shown.add(name);
  return lineChart(parent, title, prefix + name, format, unit);
}
summary();
line("Loss", "train_loss");
line("Gradient norm, before clipping", "grad_norm");
line("Rate", "lr");
line("Throughput", "tokens_per_second", short, "tokens/s") || line("Throughput", "samples_per_second", short, "samples/s");
line("Work of each rank", "tflops", short, "TFLOP/s");
line("Model FLOPs utilization", "mfu", percent);
line("Loss scale", "loss_scale");

const PHASES = ["forward", "backward", "step", "other"];
const steps = runs.filter((run) => of(run, "phase_ms_forward")).map((run) => ({
  name: run.name, parts: Object.fromEntries(PHASES.map((phase) => [phase, mean(of(run, `phase_ms_${phase}`)) ?? 0])),
}));
const inside = runs.filter((run) => of(run, "phase_ms_gather")).map((run) =>
  `${runs.length > 1 ? run.name + ": " : ""}gather ${ms(mean(of(run, "phase_ms_gather")))}, reduce ${ms(mean(of(run, "phase_ms_reduce")))}`);
barChart(cards, "Where a step goes (mean)", PHASES, steps, ms, inside.length ? `Of these ${inside.join("; ")}. Host time.` : "");

const HELD = ["params", "grads", "masters and states", "buckets, gathered units"];
const most = (run, name) => Math.max(0, ...(of(run, name) ?? []).map((p) => p[1] ?? 0));
const memory = runs.filter((run) => of(run, "memory_bytes_params")).flatMap((run) => [
  { name: `held, ${run.name}`, parts: { [HELD[0]]: most(run, "memory_bytes_params"), [HELD[1]]: most(run, "memory_bytes_grads"),
    [HELD[2]]: most(run, "memory_bytes_master") + most(run, "memory_bytes_states"), [HELD[3]]: most(run, "memory_bytes_peak_buckets") } },
  { name: `formula, ${run.name}`, parts: { [HELD[0]]: most(run, "memory_formula_params"), [HELD[1]]: most(run, "memory_formula_grads"),
    [HELD[2]]: most(run, "memory_formula_states"), [HELD[3]]: most(run, "memory_formula_gathered") } },
]);
barChart(cards, "Memory of the first rank, by kind", HELD, memory, bytes,
  "Held: the most between steps, when gradients are gone but those that accumulate. Formula: gradients after a backward.");

const calls = runs.flatMap((run) => Object.keys(run.series).filter((name) => name.startsWith(prefix + "comm_bytes_")).map((name) => {
  const op = name.slice((prefix + "comm_bytes_").length);
  return [run.name, op, bytes(mean(run.series[name])), ms(mean(of(run, `comm_ms_${op}`)))];
}));
if (calls.length) table(cards, "Collectives of a step (mean)", ["run", "operation", "bytes", "time"], calls);

const warnings = runs.flatMap((run) => run.warnings.map((w) => [run.name, w[0], w[1]]));
if (warnings.length) table(cards, "Warnings", ["run", DATA.x, "warning"], warnings, "warnings");
else add(card(cards, "Warnings", true), "p", { class: "soft" }, "none");

const known = /^(global_steps|tokens_per_second|samples_per_second|phase_ms_.*|memory_.*|comm_.*|elapsed_time_.*)$/;
const names = new Set(runs.flatMap((run) => Object.keys(run.series)));
for (const name of [...names].sort()) {
  const tail = name.startsWith(prefix) ? name.slice(prefix.length) : "";
  if (!(tail && (shown.has(tail) || known.test(tail)))) lineChart(others, name, name);
}
const more = document.getElementById("more");
if (others.children.length === 0) more.remove();

const draw = () => drawn.forEach((each) => each());
more.ontoggle = draw;
let width = 0;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
draw();
</script>
</body>
</html>
)page";

}  // namespace tessera::commands
