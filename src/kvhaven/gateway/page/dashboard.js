// SPDX-License-Identifier: Apache-2.0
// The dashboard: reads the HTTP API that served it, and changes things only after a dry run.

const $ = (id) => document.getElementById(id);
const SILENT_S = 3, HOUR_S = 3600, BUCKETS = 90, LIST_S = 3;
const GIB = 2 ** 30;

/** Meaning of each reason of a miss, and what to do about it. */
const REASONS = {
  cold: ["Never stored, as far as the service remembers.", "Nothing: the first request of a prompt computes it. If the prompt was sent before, compare the namespaces of the engines."],
  evicted: ["Was stored, and has left memory and every local tier.", "More memory or a disk tier; the curve of the hit rate says how much memory would bring."],
  late: ["In a tier, but not read when the deadline came.", "A faster tier, or a longer promote_deadline_ms."],
  write_dropped: ["Evicted from memory before it was written to a tier.", "See “dropped” of the tier; a faster tier, or a larger write_queue_size."],
  tier_off: ["In a tier that is off.", "See the tier's state and its last error."],
  quota: ["Evicted or refused for the quota of its tenant.", "A larger quota of the tenant."],
  pin_limit: ["Stored, but no memory could be allocated for it.", "See leased and pinned memory; end pins, or give more memory."],
  damaged: ["Failed verification, or could not be read from its tier.", "See “rejected” of the tier and the service's log; check the disk."],
  slow_tier: ["In a tier, but reading it would take longer than computing it.", "A faster tier; see its p99 below."],
  load_limit: ["Not looked up: the request limits the tokens that it loads.", "Nothing, or a higher kvhaven.max_load_tokens in the request."],
  partial_chunk: ["Behind the last full chunk of the prompt.", "Nothing; a smaller chunk_size makes it less."],
};
const PLACES = { free: "free", idle: "idle (cached)", leased: "leased", pinned: "pinned", promoting: "promoting", reserved: "reserved", quarantined: "quarantined", doomed: "doomed", waste: "waste" };
const MEMORY_COLOURS = { idle: 0, leased: 1, pinned: 2, promoting: 3, reserved: 4, quarantined: 5, doomed: 5 };

const seen = {
  snapshot: null, stats: null, health: null, curve: null, engines: [], traffic: new Map(),
  points: [], service: "", clock: 0, last: "", at: 0, error: "", token: "", log: [],
};

// --- the API --------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

async function ask(path, { method = "GET", body, headers = {}, ok = [] } = {}) {
  const sent = { ...headers };
  if (seen.token) sent.Authorization = `Bearer ${seen.token}`;
  const answer = await fetch(path, {
    method, headers: sent, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok && !ok.includes(answer.status)) {
    const told = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, told.error ?? `status ${answer.status}`);
  }
  return answer;
}
const json = async (path, options) => (await ask(path, options)).json();
const page = async (kind, cursor = "") => json(`v1/${kind}?limit=100&cursor=${encodeURIComponent(cursor)}`);
const now = () => seen.clock + performance.now() / 1000;
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

/** Follow the stream of snapshots for ever; fetch, not EventSource, as that sends no token. */
async function follow() {
  for (;;) {
    try {
      const answer = await ask("events", { headers: seen.last ? { "Last-Event-ID": seen.last } : {} });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ;) {
        const { value, done } = await reader.read();
        if (done) break;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        const event = events.filter((text) => text.includes("data: ")).pop();
        if (event) await take(event);
      }
    } catch (error) {
      seen.error = error.message;
      if (error.status === 401) await signIn();
    }
    await sleep(1000);
  }
}

async function take(event) {
  const fields = Object.fromEntries(event.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
  seen.last = fields.id;
  if (document.hidden) return;
  try {
    const snapshot = JSON.parse(fields.data);
    if (snapshot.service !== seen.service) await restart(snapshot.service);
    const [stats, health] = await Promise.all([json("stats"), json("health", { ok: [503] })]);
    Object.assign(seen, { snapshot, stats, health, at: performance.now(), error: "" });
    keep({ time: now(), asked: stats.tokens.asked, by: stats.tokens.by_source, missed: stats.tokens.missed_by_reason });
    render();
  } catch (error) {
    seen.error = error.message;
  }
}

async function restart(service) {
  const recent = await json("v1/history");
  const named = (names, values) => Object.fromEntries(names.map((name, at) => [name, values[at]]));
  seen.points = recent.rows.map(([time, asked, by, missed]) => ({
    time, asked, by: named(recent.sources, by), missed: named(recent.reasons, missed),
  }));
  seen.clock = seen.points.at(-1).time - performance.now() / 1000;
  seen.service = service;
}

/** Keep a point of each second of the last minutes, and fewer older ones. */
function keep(point) {
  const points = seen.points;
  points.push(point);
  const old = points.findIndex(({ time }) => time > point.time - 300) - 3;
  if (old > 0 && points[old + 2].time - points[old].time < 10) points.splice(old + 1, 1);
  while (points.length && points[0].time < point.time - HOUR_S - 20) points.shift();
}

// --- figures of the window ------------------------------------------------------------------

const mix = (a, b, part) => Object.fromEntries(Object.keys(b).map((name) => [name, (a[name] ?? 0) + part * (b[name] - (a[name] ?? 0))]));
const nothing = (time) => ({ time, asked: 0, by: {}, missed: {} });

/** The counters at a time, between the two points around it; zero before the service started. */
function countersAt(time) {
  const points = seen.points, started = seen.snapshot.started;
  if (time <= started) return nothing(time);
  let after = points.findIndex((point) => point.time >= time);
  if (after < 0) after = points.length - 1;
  const b = points[after], a = after ? points[after - 1] : b.time - started < 30 ? nothing(started) : b;
  const part = b.time > a.time ? Math.min(1, (time - a.time) / (b.time - a.time)) : 1;
  return { time, asked: a.asked + part * (b.asked - a.asked), by: mix(a.by, b.by, part), missed: mix(a.missed, b.missed, part) };
}

function inWindow() {
  const end = seen.points.at(-1), length = Number($("window").value), started = seen.snapshot.started;
  const first = seen.points[0].time;
  const begin = started >= end.time - length ? started : Math.max(end.time - length, first);
  const from = countersAt(begin);
  const asked = end.asked - from.asked;
  const whole = asked <= 0;
  const base = whole ? nothing(started) : from;
  const minus = (a, b) => Object.fromEntries(Object.keys(a).map((name) => [name, Math.max(0, Math.round(a[name] - (b[name] ?? 0)))]));
  return {
    asked: Math.round(end.asked - base.asked), by: minus(end.by, base.by), missed: minus(end.missed, base.missed),
    seconds: end.time - (whole ? started : begin), whole: whole || begin === started,
  };
}

// --- text -----------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
const count = (value) => whole.format(Math.round(value));
const percent = (part) => part === null || !Number.isFinite(part) ? "–" : `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)}%`;
function short(value) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (value >= size) return `${(value / size).toFixed(value < 10 * size ? 1 : 0)} ${unit}`;
  return value < 10 && !Number.isInteger(value) ? value.toFixed(1) : count(value);
}
function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 1024]]) if (value >= size) return `${(value / size).toFixed(value < 10 * size ? 2 : 1)} ${unit}`;
  return `${value} B`;
}
function duration(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) if (seconds >= 2 * size) return `${Number((seconds / size).toFixed(seconds < 10 * size ? 1 : 0))} ${unit}`;
  return `${Math.round(seconds)} s`;
}
const clock = (time) => new Date(1000 * time).toLocaleTimeString("en", { hour12: false });

/** The bound that 99% of a histogram's values are within. */
function p99({ bounds, counts }) {
  const total = counts.reduce((sum, one) => sum + one, 0);
  if (!total) return "–";
  let sum = 0;
  for (const [at, one] of counts.entries()) if ((sum += one) >= 0.99 * total) return at < bounds.length ? `≤ ${duration(bounds[at])}` : `> ${duration(bounds.at(-1))}`;
  return "–";
}

// --- the document ---------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
function draw(tag, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}
function write(node, text, value) {
  if (node.textContent !== text) node.textContent = text;
  if (value !== undefined) node.dataset.value = value;
}

/** Show rows in a table. Rows and their buttons stay the same nodes, so that focus is kept. */
function table(target, columns, rows, key = (row) => row.id, empty = "None.") {
  if (!target.rows.length) {
    const head = columns.map(({ title, number }) => make("th", { scope: "col", class: number ? "number" : undefined }, title));
    target.append(make("thead", {}, make("tr", {}, ...head)), make("tbody"));
    target.known = new Map();
  }
  const body = target.tBodies[0], before = target.known, known = new Map();
  for (const row of rows) {
    const id = String(key(row));
    const line = before.get(id) ?? { node: make("tr", { "data-id": id }) };
    line.row = row;
    if (!line.node.cells.length) {
      for (const { number, buttons } of columns) {
        const cell = make("td", { class: number ? "number" : undefined });
        if (buttons) cell.append(...buttons(() => line.row));
        line.node.append(cell);
      }
    }
    columns.forEach(({ text, name, value, show }, at) => {
      const cell = line.node.cells[at];
      if (name) cell.dataset.name = name;
      if (text) write(cell, text(row), value?.(row));
      if (show) show(cell, row);
    });
    known.set(id, line);
  }
  target.known = known;
  const wanted = [...known.values()].map(({ node }) => node);
  if (!wanted.length) wanted.push(make("tr", {}, make("td", { colspan: columns.length }, empty)));
  const children = body.children;
  if (wanted.length !== children.length || wanted.some((node, at) => node !== children[at])) {
    const focus = document.activeElement;
    body.replaceChildren(...wanted);
    if (focus && body.contains(focus)) focus.focus();
  }
  fit(target.parentElement);
}

/** Let the keyboard reach a box that scrolls. */
function fit(box) {
  if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  else box.removeAttribute("tabindex");
}

function legend(target, entries) {
  const wanted = entries.map(({ name }) => name).join("\n");
  if (target.dataset.names !== wanted) {
    target.dataset.names = wanted;
    target.replaceChildren(...entries.map(({ name, colour }) => {
      const swatch = draw("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
      swatch.append(draw("rect", { width: 10, height: 10, class: colour }));
      return make("li", { "data-name": name }, swatch, make("span"));
    }));
  }
  entries.forEach(({ text, value }, at) => {
    write(target.children[at].lastChild, text);
    if (value !== undefined) target.children[at].dataset.value = value;
  });
}

/** Colour of a source: its place in the order of sources. */
function colourOf(source) {
  const order = Object.keys(seen.stats.tokens.by_source).filter((name) => name !== "none");
  return source === "none" ? "fn" : `f${Math.max(0, order.indexOf(source)) % 6}`;
}

// --- charts ---------------------------------------------------------------------------------

const LEFT = 48, RIGHT = 12, TOP = 10, BOTTOM = 26;

function frame(target) {
  const width = Math.max(200, target.clientWidth), height = target.clientHeight || 230;
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return { width, height, x: (part) => LEFT + part * (width - LEFT - RIGHT), y: (part) => height - BOTTOM - part * (height - TOP - BOTTOM) };
}
function axis({ width, y }, most, label) {
  const parts = [];
  for (const part of [0, 0.5, 1]) {
    parts.push(draw("path", { class: "axis", d: `M${LEFT} ${y(part)}H${width - RIGHT}` }));
    parts.push(draw("text", { x: LEFT - 6, y: y(part) + 4, "text-anchor": "end" }, label(part * most)));
  }
  return parts;
}
function above(value) {
  const size = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 4, 5, 10].map((step) => step * size).find((step) => step >= value) ?? value;
}

function drawTraffic() {
  const end = seen.points.at(-1).time;
  const first = Math.max(seen.points[0].time, seen.snapshot.started);
  const length = Math.min(Number($("window").value), Math.max(60, end - first));
  const sources = Object.keys(seen.stats.tokens.by_source).filter((name) => seen.stats.tokens.by_source[name] || name === "none");
  const edges = Array.from({ length: BUCKETS + 1 }, (_, at) => countersAt(end - length + (at * length) / BUCKETS));
  const rates = edges.slice(1).map((edge, at) => Object.fromEntries(sources.map((name) =>
    [name, edge.time < first ? 0 : Math.max(0, ((edge.by[name] ?? 0) - (edges[at].by[name] ?? 0)) / (edge.time - edges[at].time))])));
  const totals = rates.map((rate) => sources.reduce((sum, name) => sum + rate[name], 0));
  const most = above(Math.max(1, ...totals)), area = frame($("traffic")), parts = axis(area, most, short);
  const base = rates.map(() => 0);
  for (const name of sources) {
    const low = base.map((value, at) => `${area.x(at / (BUCKETS - 1))} ${area.y(value / most)}`);
    rates.forEach((rate, at) => { base[at] += rate[name]; });
    const high = base.map((value, at) => `${area.x(at / (BUCKETS - 1))} ${area.y(value / most)}`);
    parts.push(draw("path", { class: `area ${colourOf(name)}`, "data-name": name, d: `M${high.join("L")}L${low.reverse().join("L")}Z` }));
  }
  for (const part of [0, 0.5, 1]) parts.push(draw("text", { x: area.x(part), y: area.height - 6, "text-anchor": ["start", "middle", "end"][2 * part] }, part === 1 ? "now" : `−${duration(length * (1 - part))}`));
  $("traffic").replaceChildren(draw("desc", {}, `The last ${duration(length)}; now ${short(totals.at(-1))} prompt tokens per second.`), ...parts);
  legend($("traffic-legend"), sources.map((name) => ({ name, colour: colourOf(name), text: name === "none" ? "none (computed)" : name })));
  if (!$("traffic-table").closest("details").open) return;
  const rows = rates.map((rate, at) => ({ time: edges[at + 1].time, ...rate })).filter((_, at) => at % 9 === 8).reverse();
  const names = sources.join();
  if ($("traffic-table").dataset.names !== names) { $("traffic-table").dataset.names = names; $("traffic-table").replaceChildren(); }
  table($("traffic-table"), [{ title: "Time", text: ({ time }) => clock(time) }, ...sources.map((name) => ({ title: name, number: true, text: (row) => short(row[name]) }))], rows.map((row, at) => ({ ...row, id: at })));
}

function drawCurve() {
  const curve = seen.curve;
  const points = (curve?.points ?? []).filter(({ hit_ratio }) => hit_ratio !== null);
  $("curve").toggleAttribute("hidden", points.length < 2);
  if (points.length < 2) return write($("curve-note"), curve ? "No estimate yet: it needs some requests with reuse." : "No estimate yet.");
  const area = frame($("curve")), least = Math.log2(curve.points[0].memory), span = Math.log2(curve.points.at(-1).memory) - least;
  const x = (memory) => area.x((Math.log2(memory) - least) / span), y = (ratio) => area.y(Math.min(1, Math.max(0, ratio)));
  const parts = axis(area, 1, percent), error = curve.error_ratio ?? 0;
  const upper = points.map((p) => `${x(p.memory)} ${y(p.hit_ratio + error)}`), lower = points.map((p) => `${x(p.memory)} ${y(p.hit_ratio - error)}`);
  parts.push(draw("path", { class: "band", d: `M${upper.join("L")}L${lower.reverse().join("L")}Z` }));
  parts.push(draw("path", { class: "line", d: `M${points.map((p) => `${x(p.memory)} ${y(p.hit_ratio)}`).join("L")}` }));
  const ceiling = curve.ceilings.all;
  if (ceiling !== null) {
    parts.push(draw("path", { class: "ceiling", d: `M${LEFT} ${y(ceiling)}H${area.width - RIGHT}` }));
    parts.push(draw("text", { x: LEFT + 6, y: y(ceiling) - 5 }, `ceiling ${percent(ceiling)}`));
  }
  const here = points.find(({ memory }) => memory === 1);
  if (here) {
    parts.push(draw("path", { class: "here", d: `M${x(1)} ${y(0)}V${y(1)}` }));
    parts.push(draw("circle", { class: "mark", cx: x(1), cy: y(here.hit_ratio), r: 5 }));
    parts.push(draw("text", { x: x(1) + 9, y: y(here.hit_ratio) + 16 }, `you are here: ${percent(here.hit_ratio)}`));
  }
  for (const { memory } of curve.points.filter(({ memory }) => Number.isInteger(Math.log2(memory)))) parts.push(draw("text", { x: x(memory), y: area.height - 6, "text-anchor": "middle" }, `${memory}×`));
  const double = points.find(({ memory }) => memory === 2);
  write($("curve-note"), `Estimated from ${count(curve.requests)} requests of the last ${duration(curve.seconds)}; ± ${(100 * error).toFixed(1)} points. ${double && here ? `Twice the memory would bring ${(100 * (double.hit_ratio - here.hit_ratio)).toFixed(1)} points.` : ""}`);
  $("curve").replaceChildren(draw("desc", {}, $("curve-note").textContent), ...parts);
  table($("curve-table"), [
    { title: "Memory", text: ({ memory }) => `${memory}×` },
    { title: "Bytes", number: true, text: (row) => bytes(row.bytes) },
    { title: "Prompt tokens not computed", number: true, name: "hit_ratio", text: (row) => percent(row.hit_ratio), value: (row) => row.hit_ratio },
  ], curve.points, ({ memory }) => memory);
}

// --- the upper part: does it work? ----------------------------------------------------------

function render() {
  const window = inWindow(), { stats, snapshot } = seen;
  write($("facts"), `${count(snapshot.engines)} ${snapshot.engines === 1 ? "engine" : "engines"} | up ${duration(now() - snapshot.started)} | ${snapshot.version} | service ${snapshot.service.slice(0, 8)}`);
  const found = window.asked - (window.by.none ?? 0);
  write($("hit"), window.asked ? percent(found / window.asked) : "–", window.asked ? found / window.asked : "");
  write($("span"), !window.asked ? "No request was looked up yet." : `of ${count(window.asked)} tokens, ${window.whole ? `since the start ${duration(window.seconds)} ago` : `in the last ${duration(window.seconds)}`}`);
  legend($("sources"), Object.entries(window.by).map(([name, tokens]) => ({ name, colour: colourOf(name), value: tokens, text: `${name === "none" ? "none (computed)" : name} ${window.asked ? percent(tokens / window.asked) : "–"}` })));
  const point = (memory) => seen.curve?.points.find((one) => one.memory === memory)?.hit_ratio ?? null;
  const ceiling = seen.curve?.ceilings.all ?? null;
  write($("ceiling"), ceiling === null || point(1) === null ? "" : `Estimate over ${duration(seen.curve.seconds)}, without tiers: ${percent(point(1))}${point(2) === null ? "" : `; with twice the memory ${percent(point(2))}`}; ceiling ${percent(ceiling)}`);
  drawMemory(stats.memory);
  drawAttention(window);
  drawMissed(window);
  drawTraffic();
  drawTiers();
  if (seen.engines.length) drawEngines();
}

function drawMemory({ capacity, ...states }) {
  const used = capacity - states.free - states.waste;
  write($("memory"), `${bytes(used)} of ${bytes(capacity)}`, used);
  const shown = Object.entries(states).filter(([state, size]) => size && state !== "free" && state !== "waste");
  $("memory-bar").setAttribute("viewBox", "0 0 1000 10");
  $("memory-bar").setAttribute("preserveAspectRatio", "none");
  let at = 0;
  $("memory-bar").replaceChildren(...shown.map(([state, size]) => {
    const width = (1000 * size) / Math.max(1, capacity);
    return draw("rect", { x: (at += width) - width, width, height: 10, class: `f${MEMORY_COLOURS[state]}` });
  }));
  legend($("memory-states"), Object.entries(states).filter(([state, size]) => size || state === "free").map(([state, size]) => ({ name: state, colour: state in MEMORY_COLOURS ? `f${MEMORY_COLOURS[state]}` : "fn", value: size, text: `${PLACES[state]} ${bytes(size)}` })));
}

function attention(window) {
  const { health, snapshot, stats } = seen, found = [];
  const share = (reason) => window.missed[reason] && window.asked ? ` ${percent(window.missed[reason] / window.asked)} of tokens were missed for it.` : "";
  for (const { name, ok, detail } of health.checks) if (!ok) found.push(["bad", `${name}: ${detail || "failed"}.${name.startsWith("tier ") ? share("tier_off") : ""}`]);
  if (snapshot.stopping) found.push(["warn", "The service is stopping."]);
  if (snapshot.draining) found.push(["warn", "The service is draining: it accepts no new engine and saves nothing."]);
  if (snapshot.damaged_chunks) found.push(["bad", `${count(snapshot.damaged_chunks)} damaged chunks were found in memory.`]);
  if (snapshot.catalog.oldest_lease_s > 300) found.push(["warn", `The oldest lease is ${duration(snapshot.catalog.oldest_lease_s)} old: a request may hang.`]);
  for (const tier of stats.tiers) {
    if (tier.state !== "on") found.push(["warn", `Tier ${tier.id} is switched to ${tier.state.replace("_", " ")}.${share("tier_off")}`]);
    const writes = tier.written + tier.dropped_writes;
    if (tier.dropped_writes > 0.01 * writes) found.push(["warn", `Tier ${tier.id}: ${percent(tier.dropped_writes / writes)} of writes were dropped.${share("write_dropped")}`]);
    if (tier.rejected) found.push(["warn", `Tier ${tier.id}: ${count(tier.rejected)} shards failed a check.`]);
  }
  if (!snapshot.engines) found.push(["note", "No engine is attached."]);
  else if (window.asked && window.by.none === window.asked) found.push(["note", "Nothing was found for any request. See the reasons below."]);
  return found;
}

function drawAttention(window) {
  const found = attention(window), real = found.filter(([kind]) => kind !== "note").length;
  write($("problems"), `(${real})`, real);
  if (!found.length) found.push(["good", "Nothing."]);
  const signs = { bad: "✕ ", warn: "! ", note: "i ", good: "✓ " };
  const wanted = found.map(([kind, text]) => signs[kind] + text);
  if ($("attention").dataset.text !== wanted.join("\n")) {
    $("attention").dataset.text = wanted.join("\n");
    $("attention").replaceChildren(...found.map(([kind], at) => make("li", { class: kind }, wanted[at])));
  }
}

function drawState() {
  const silent = (performance.now() - seen.at) / 1000, status = seen.health?.status;
  let state = ["good", "● healthy"];
  if (!seen.at) state = seen.error ? ["bad", `✕ no answer: ${seen.error}`] : ["", "… connecting"];
  else if (silent > SILENT_S && !document.hidden) state = ["bad", `✕ no answer for ${duration(silent)}${seen.error ? `: ${seen.error}` : ""}`];
  else if (status === "degraded") state = ["warn", "! degraded"];
  else if (status === "stopping") state = ["warn", "! stopping"];
  $("state").className = state[0];
  write($("state"), state[1]);
  document.title = `${state[1].slice(0, 1)} KVHaven`;
}

function drawMissed(window) {
  const none = window.by.none ?? 0, rows = Object.entries(window.missed).filter(([, tokens]) => tokens).sort((a, b) => b[1] - a[1]);
  write($("missed-note"), none ? `${count(none)} of ${count(window.asked)} prompt tokens were found nowhere.` : "Nothing was missed.");
  $("missed").toggleAttribute("hidden", !rows.length);
  table($("missed"), [
    { title: "Reason", buttons: (row) => [make("button", { type: "button", onclick: () => showRequests(row()[0]) })], show: (cell, [reason]) => write(cell.firstChild, reason.replace("_", " ")) },
    { title: "Tokens", number: true, name: "tokens", text: ([, tokens]) => count(tokens), value: ([, tokens]) => tokens },
    { title: "Share", number: true, text: ([, tokens]) => percent(tokens / none) },
    { title: "Meaning", text: ([reason]) => REASONS[reason]?.[0] ?? "" },
    { title: "What to do", text: ([reason]) => REASONS[reason]?.[1] ?? "" },
  ], rows, ([reason]) => reason);
}

function drawTiers() {
  const traffic = (tier, op) => seen.snapshot.traffic[tier.id]?.[op];
  table($("tiers"), [
    { title: "Tier", text: ({ id }) => id },
    { title: "State", name: "state", text: (tier) => tier.state !== "on" ? `! ${tier.state.replace("_", " ")} (switched)` : !tier.online ? "✕ offline" : tier.writable || tier.id === "peer" ? "✓ on" : "! no writes" },
    { title: "Used", number: true, name: "used", text: (tier) => tier.shared ? "shared" : `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}`, value: (tier) => tier.used_bytes ?? "" },
    { title: "Chunks", number: true, name: "chunks", text: (tier) => tier.chunks === null ? "–" : count(tier.chunks), value: (tier) => tier.chunks ?? "" },
    { title: "Read", number: true, name: "read", text: (tier) => bytes(traffic(tier, "read")?.bytes), value: (tier) => traffic(tier, "read")?.bytes ?? "" },
    { title: "Read p99", number: true, text: (tier) => traffic(tier, "read") ? p99(traffic(tier, "read").seconds) : "–" },
    { title: "Written", number: true, name: "written", text: (tier) => bytes(traffic(tier, "write")?.bytes), value: (tier) => traffic(tier, "write")?.bytes ?? "" },
    { title: "Write p99", number: true, text: (tier) => traffic(tier, "write") ? p99(traffic(tier, "write").seconds) : "–" },
    { title: "Queue", number: true, name: "queue", text: (tier) => bytes(tier.queued_write_bytes), value: (tier) => tier.queued_write_bytes },
    { title: "Dropped", number: true, name: "dropped", text: (tier) => count(tier.dropped_writes), value: (tier) => tier.dropped_writes },
    { title: "Rejected", number: true, name: "rejected", text: (tier) => count(tier.rejected), value: (tier) => tier.rejected },
    { title: "Change", buttons: (row) => [make("button", { type: "button", onclick: () => switchTier(row()) }, "Switch…"), make("button", { type: "button", onclick: () => clear({ tier: row().id }, `tier ${row().id}`) }, "Clear…")], show: (cell, tier) => { cell.lastChild.hidden = tier.shared; } },
  ], seen.stats.tiers, undefined, "No tier is configured: chunks leave with the memory.");
}

async function readEngines() {
  const { rows } = await page("engines"), time = now(), known = seen.traffic;
  seen.traffic = new Map(rows.map((row) => {
    const old = known.get(row.id), points = old?.at(-1).since === row.since ? old : [{ time: row.since }], last = points.length - 1;
    if (last > 0 && points[last].time - points[last - 1].time < 10) points.pop();
    points.push({ ...row, time });
    while (points[1].time < time - HOUR_S - 20) points.shift();
    return [row.id, points];
  }));
  seen.engines = rows;
  drawEngines();
}

/** Growth of an engine's counter in the window, in all and per second; before the page was opened, as on average since the attach. */
function growth(id, name) {
  const points = seen.traffic.get(id), end = points.at(-1), begin = Math.max(points[0].time, end.time - Number($("window").value));
  const after = Math.max(1, points.findIndex(({ time }) => time > begin)), a = points[after - 1], b = points[after], old = a[name] ?? 0;
  const total = end[name] - old - ((b[name] - old) * (begin - a.time)) / Math.max(1e-3, b.time - a.time);
  return { total, rate: total / Math.max(1, end.time - begin) };
}

function drawEngines() {
  const rate = (title, name) => ({ title, number: true, name, text: ({ id }) => `${short(growth(id, name).rate)}B/s`, value: ({ id }) => growth(id, name).rate });
  const hit = ({ id }) => growth(id, "found_tokens").total / growth(id, "asked_tokens").total;
  table($("engines"), [
    { title: "Engine", text: ({ id }) => id },
    { title: "Model", text: ({ model }) => model ?? "–" },
    { title: "Hit", number: true, name: "hit", text: (row) => percent(hit(row)), value: hit },
    rate("Load", "loaded_bytes"), rate("Save", "saved_bytes"),
    { title: "Skipped", number: true, name: "skipped_tokens", text: ({ id }) => `${short(growth(id, "skipped_tokens").total)} tokens`, value: ({ id }) => growth(id, "skipped_tokens").total },
    { title: "Ranks", number: true, name: "ranks", text: (row) => `${row.attached_ranks} of ${row.world_size}`, value: (row) => row.attached_ranks },
    { title: "Scheduler", text: (row) => row.scheduler_attached ? "✓ attached" : "✕ absent" },
    { title: "Attached", text: ({ since }) => `${duration(Math.max(0, now() - since))} ago` },
    { title: "Chunk", number: true, text: (row) => row.chunk_tokens === null ? "–" : `${row.chunk_tokens} tokens` },
    { title: "Block", number: true, text: (row) => row.block_tokens === null ? "–" : `${row.block_tokens} tokens` },
    { title: "Versions", text: ({ engine }) => engine ?? "–" },
    { title: "Device", name: "device", text: ({ device }) => device ?? "–" },
    { title: "Data type", text: ({ dtype }) => dtype ?? "–" },
    { title: "Layout", text: ({ layout }) => layout?.slice(0, 12) ?? "–" },
  ], seen.engines, undefined, "No engine is attached.");
}

// --- the lower part: why did it miss? -------------------------------------------------------

const places = (values, text) => Object.entries(values).map(([place, value]) => `${place.replace("_", " ")} ${text(value)}`).join(", ") || "–";
const button = (text, act) => (row) => make("button", { type: "button", onclick: () => act(row()) }, text);
const cache = { reason: "" };

const TABS = {
  Requests: {
    kind: "requests", head: () => [
      make("label", {}, "Reason ", make("select", { id: "reason", onchange: (event) => { cache.reason = event.target.value; refresh(); } }, make("option", { value: "" }, "all requests"), ...Object.keys(REASONS).map((name) => make("option", { value: name }, name.replace("_", " "))))),
      make("p", { id: "why", class: "note" }),
    ],
    empty: "No request (for this reason).",
    rows: async () => {
      $("reason").value = cache.reason;
      write($("why"), cache.reason ? REASONS[cache.reason].join(" ") : "The last 1,024 requests, newest first. “First gap” is the first token that was found nowhere.");
      return (await json(`v1/requests?limit=100${cache.reason && `&reason=${cache.reason}`}`)).rows;
    },
    columns: [
      { title: "Time", text: ({ time }) => clock(time) },
      { title: "Request", text: ({ request }) => request || "–" },
      { title: "Engine", text: ({ engine }) => engine },
      { title: "Tenant", text: ({ tenant }) => tenant || "–" },
      { title: "Prompt", number: true, name: "prompt", text: (row) => count(row.prompt_tokens), value: (row) => row.prompt_tokens },
      { title: "Tokens by source", text: (row) => places(row.by_source, count) },
      { title: "First gap", number: true, name: "gap", text: (row) => row.first_gap === null ? "–" : count(row.first_gap), value: (row) => row.first_gap ?? "" },
      { title: "Why", name: "why", text: (row) => row.reason ? `${row.reason.replace("_", " ")}${Object.keys(row.missed).length > 1 ? ` (${places(row.missed, count)})` : ""}` : "✓ all found", value: (row) => row.reason ?? "" },
      { title: "Wait", number: true, text: (row) => `${row.wait_ms.toFixed(1)} ms` },
    ],
  },
  Prompt: { kind: "", head: promptForm, columns: [] },
  Namespaces: {
    kind: "namespaces", columns: [
      { title: "Namespace", text: ({ id }) => id.slice(0, 16) },
      { title: "Model", text: ({ model }) => model ?? "–" },
      { title: "Format", text: ({ format }) => format ?? "–" },
      { title: "Chunks", name: "chunks", text: (row) => places(row.chunks, count), value: (row) => row.chunks.memory },
      { title: "Bytes", text: (row) => places(row.bytes, bytes) },
      { title: "Change", buttons: (row) => [button("Clear…", ({ id }) => clear({ namespace: id }, `namespace ${id.slice(0, 16)}`))(row)] },
    ],
  },
  Tenants: {
    kind: "tenants", columns: [
      { title: "Tenant", text: ({ id }) => id },
      { title: "Chunks", text: (row) => places(row.chunks, count) },
      { title: "Memory", name: "memory", show: (cell, row) => quotaBar(cell, row.bytes.memory, row.quotas.memory), value: (row) => row.bytes.memory },
      { title: "Disk", show: (cell, row) => quotaBar(cell, row.bytes.disk ?? 0, row.quotas.disk) },
      { title: "Change", buttons: (row) => [button("Quota…", quota)(row), button("Clear…", ({ id }) => clear({ tenant: id }, `tenant ${id}`))(row)] },
    ],
  },
  Pins: {
    kind: "pins", empty: "No pins. A prompt is pinned in the tab Prompt.", columns: [
      { title: "Pin", text: ({ id }) => id.replace(/^0+/, "") },
      { title: "Namespace", text: ({ namespace }) => namespace.slice(0, 16) },
      { title: "Tokens", number: true, name: "tokens", text: (row) => count(row.tokens), value: (row) => row.tokens },
      { title: "Bytes", number: true, text: (row) => bytes(row.bytes) },
      { title: "Ends", text: ({ expires }) => `in ${duration(Math.max(0, expires - now()))}` },
      { title: "Change", buttons: (row) => [button("Unpin…", unpin)(row)] },
    ],
  },
  Settings: {
    kind: "", rows: async () => (await json("config")).settings, key: ({ name }) => name, columns: [
      { title: "Setting", text: ({ name }) => name },
      { title: "Value", name: "value", text: ({ text }) => text },
      { title: "Origin", text: ({ origin }) => origin ?? "–" },
      { title: "Changes apply", text: ({ changes }) => changes.replace("_", " ") },
      { title: "Engines", text: (row) => places(row.by_engine ?? {}, String) },
      { title: "Change", buttons: (row) => [button("Change…", setting)(row)], show: (cell, row) => { cell.firstChild.hidden = row.changes === "restart"; } },
    ],
  },
  Log: {
    kind: "jobs", empty: "No jobs.", head: () => [
      make("button", { type: "button", onclick: flush }, "Flush…"), make("button", { type: "button", onclick: drain }, "Drain…"),
      make("button", { type: "button", onclick: () => clear({ all: "true" }, "memory and all local tiers") }, "Clear all…"),
      make("ul", { id: "log", class: "plain" }),
    ],
    rows: async () => {
      $("log").replaceChildren(...seen.log.map((line) => make("li", {}, line)));
      return (await page("jobs")).rows;
    },
    columns: [
      { title: "Job", text: ({ id }) => id.replace(/^0+/, "") },
      { title: "Kind", text: ({ kind }) => kind },
      { title: "State", text: ({ state, error }) => error ? `✕ ${state}: ${error}` : state === "done" ? "✓ done" : `… ${state}` },
      { title: "Began", text: ({ started }) => clock(started) },
      { title: "Result", text: ({ result }) => places(result, count) },
    ],
  },
};

function quotaBar(cell, used, limit) {
  if (!cell.firstChild) cell.append(make("span"), draw("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }));
  cell.dataset.value = used;
  write(cell.firstChild, limit === undefined ? bytes(used) : `${bytes(used)} of ${bytes(limit)}`);
  cell.lastChild.toggleAttribute("hidden", limit === undefined);
  cell.lastChild.replaceChildren(draw("rect", { width: limit ? Math.min(100, (100 * used) / limit) : 0, height: 10, class: used > (limit ?? Infinity) ? "f4" : "f0" }));
}

let tab = "Requests";

function open(name, focus = false) {
  tab = name;
  for (const one of $("tabs").children) {
    const own = one.textContent === name;
    one.setAttribute("aria-selected", own);
    one.tabIndex = own ? 0 : -1;
    if (own && focus) one.focus();
  }
  const { head, columns } = TABS[name];
  $("panel").setAttribute("aria-labelledby", `tab-${name}`);
  $("panel").replaceChildren(make("div", { class: "tools" }, ...(head?.() ?? [])), ...(columns.length ? [make("div", { class: "wide" }, make("table", { id: "rows" }))] : []));
  return refresh();
}

/** Show the rows of the open tab as they are now. */
async function refresh() {
  const name = tab, { kind, rows, columns, key, empty } = TABS[name];
  if (!columns.length) return;
  try {
    const found = rows ? await rows() : (await page(kind)).rows;
    if (name === tab) table($("rows"), columns, found, key, empty);
  } catch (error) {
    seen.error = error.message;
  }
}

function showRequests(reason) {
  cache.reason = reason;
  open("Requests", true);
}

function promptForm() {
  const engine = make("select", {}, ...seen.engines.map(({ id }) => make("option", {}, id)));
  const tokens = make("textarea", { rows: 3, class: "mono", placeholder: "1000, 1001, 1002" }), salt = make("input", { type: "text" });
  const chain = () => ({ engine: engine.value, token_ids: tokens.value.split(/[^0-9]+/).filter(Boolean).map(Number), ...(salt.value ? { cache_salt: salt.value } : {}) });
  const lookup = async () => {
    const found = await json("v1/lookup", { method: "POST", body: chain() });
    return `${count(found.cached_tokens)} of ${count(found.tokens)} tokens are cached: ${places(found.by_place, count)}.${found.reason ? `\nThe first gap is token ${count(found.first_gap)}, ${found.reason.replace("_", " ")}: ${(REASONS[found.reason] ?? [""]).join(" ")}` : ""}`;
  };
  const prefetched = (answer, dry) => {
    if (!dry) return `Job ${answer.id} promotes it.`;
    if (answer.error) throw new Error(answer.error);
    const { asked_chunks: asked, resident_chunks: found, promoted_chunks: read } = answer.expected;
    return `${count(found)} of ${count(asked)} chunks would be in memory; ${count(read)} of them would be read from tiers.`;
  };
  const pinned = (answer, dry) => dry ? `${count(answer.tokens)} tokens, ${bytes(answer.bytes)}, would be pinned; ${count(answer.promoted_chunks)} chunks of them would be read from tiers. ${bytes(answer.pinned_bytes)} of at most ${bytes(answer.most_bytes)} are pinned now.` : `${count(answer.tokens)} tokens are pinned.`;
  return [
    make("label", {}, "Engine", engine), make("label", {}, "Token ids of the prompt", tokens), make("label", {}, "Cache salt, if its requests have one", salt),
    make("button", { type: "button", onclick: () => change({ title: "Where is this prompt?", text: "Promotes nothing.", preview: lookup }) }, "Look up…"),
    make("button", { type: "button", onclick: () => request({ title: "Promote this prompt to memory", path: "v1/prefetch", body: chain, told: prefetched }) }, "Prefetch…"),
    make("button", { type: "button", onclick: () => request({ title: "Pin this prompt in memory", path: "v1/pins", fields: [{ name: "ttl_s", label: "For how many seconds", value: 600 }], body: ({ ttl_s }) => ({ ...chain(), ttl_s: Number(ttl_s) }), told: pinned }) }, "Pin…"),
  ];
}

// --- changes: token, dry run, then the change -----------------------------------------------

/**
 * Ask for a change. `preview` returns what would happen, and only then `apply` is possible, with
 * the same values. Without `apply`, there is only the preview.
 */
function change({ title, text = "", fields = [], preview, apply }) {
  const inputs = Object.fromEntries(fields.map(({ name, value, options }) => [name, options
    ? make("select", {}, ...options.map((option) => make("option", { value: option, selected: option === value }, option.replace("_", " "))))
    : make("input", { type: "text", value: value ?? "" })]));
  const values = () => Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value]));
  write($("dialog-title"), title);
  write($("dialog-text"), text);
  write($("outcome"), "");
  $("fields").replaceChildren(...fields.map(({ name, label }) => make("label", {}, label, inputs[name])));
  $("token").value = seen.token;
  $("apply").hidden = !apply;
  write($("try"), apply ? "Dry run" : "Look up");
  const reset = () => { $("apply").disabled = true; };
  const run = async (act, done) => {
    seen.token = $("token").value.trim();
    reset();
    try {
      const told = await act(values());
      write($("outcome"), told);
      done(told);
    } catch (error) {
      write($("outcome"), `✕ ${error.message}`);
      if (error.status === 401) { seen.token = ""; $("token").focus(); }
    }
  };
  reset();
  $("form").oninput = reset;
  $("form").onsubmit = (event) => {
    event.preventDefault();
    run(preview, () => { $("apply").disabled = !apply; });
  };
  $("apply").onclick = () => run(apply, (told) => {
    seen.log.unshift(`${clock(now())} ${title}: ${told}`);
    seen.log.length = Math.min(seen.log.length, 100);
    write($("outcome"), `✓ Done. ${told}`);
    write($("cancel"), "Close");
    $("cancel").focus();
    refresh();
  });
  write($("cancel"), "Cancel");
  $("cancel").onclick = () => $("dialog").close();
  if (!$("dialog").open) $("dialog").showModal();
}

/** Ask for the token that reading needs, beyond loopback. */
function signIn() {
  return new Promise((done) => {
    change({ title: "This API needs its token", preview: async () => { await ask("stats", { ok: [503] }); $("dialog").close(); return ""; } });
    write($("try"), "Read");
    $("dialog").onclose = () => { $("dialog").onclose = null; done(); };
  });
}

/** Ask for a change by one request, whose dry run is the same request. `told` puts both answers into words. */
function request({ path, query = {}, method = "POST", body = () => undefined, told, ...rest }) {
  const send = async (values, dry) => told(await json(`${path}?${new URLSearchParams({ ...query, dry_run: dry })}`, { method, body: body(values) }), dry);
  change({ ...rest, preview: (values) => send(values, true), apply: (values) => send(values, false) });
}

function clear(selector, what) {
  request({
    path: "v1/chunks", query: selector, method: "DELETE",
    title: `Clear ${what}`, text: "Drops the chunks. Engines compute them again; shared tiers are left alone.",
    told: ({ chunks, bytes: size }, dry) => `${count(chunks)} chunks, ${bytes(size)}, ${dry ? "would be" : "were"} dropped.`,
  });
}

function switchTier({ id, state: now_ }) {
  request({
    path: `v1/tiers/${encodeURIComponent(id)}`, body: ({ state }) => ({ state }),
    title: `Switch tier ${id}`, text: "Off: not used at all. Read only: no writes. Until the service ends.",
    fields: [{ name: "state", label: "State", value: now_, options: ["on", "read_only", "off"] }],
    told: ({ was, state, dropped_writes: dropped, unavailable_chunks: chunks }, dry) => {
      const queued = state === "on" ? "" : ` ${count(dropped)} waiting writes ${dry ? "would be" : "were"} dropped.`;
      const hidden = chunks === 0 ? "" : ` Its ${chunks === null ? "" : `${count(chunks)} `}chunks ${dry ? "would not be" : "are not"} found.`;
      return `From ${was.replace("_", " ")} to ${state.replace("_", " ")}.${queued}${hidden}`;
    },
  });
}

function quota({ id, quotas }) {
  const gib = (value) => value === undefined ? "" : value / GIB;
  const wanted = ({ memory, disk }) => Object.fromEntries(Object.entries({ memory, disk }).map(([place, text]) => {
    const value = text.trim() === "" ? null : Number(text);
    if (value !== null && !(value >= 0)) throw new Error(`${place}: expected GiB (got ${text})`);
    return [place, value === null ? null : Math.round(value * GIB)];
  }));
  const limit = (value) => value === null ? "no quota" : bytes(value);
  request({
    path: `v1/tenants/${id}/quota`, method: "PUT", body: wanted,
    title: `Quotas of tenant ${id}`, text: "In GiB; empty: no quota. Until the service ends.",
    fields: [{ name: "memory", label: "Memory, GiB", value: gib(quotas.memory) }, { name: "disk", label: "Disk, GiB", value: gib(quotas.disk) }],
    told: (set, dry) => {
      const over = ["memory", "disk"].filter((place) => set[`${place}_excess`]).map((place) => ` In ${place}, the tenant ${dry ? "is" : "was"} ${bytes(set[`${place}_excess`])} above it: its oldest chunks ${dry ? "would be" : "are"} evicted.`);
      return `${dry ? "Would be" : "Now"} memory: ${limit(set.memory)}, disk: ${limit(set.disk)} (before: ${limit(set.memory_was)}, ${limit(set.disk_was)}).${over.join("")}`;
    },
  });
}

function setting({ name, text: value }) {
  let tag = "";
  const parsed = (text) => { try { return JSON.parse(text); } catch { return text; } };
  const send = (text, dry) => json(`config?dry_run=${dry}`, { method: "POST", body: { [name]: parsed(text) }, headers: tag ? { "If-Match": tag } : {} });
  const told = ({ applied, pending }) => [...applied, ...pending].map((one) => `${one.name}: ${JSON.stringify(one.was)} → ${JSON.stringify(one.value)}, ${one.changes.replace("_", " ")}`).join("; ") || "no change";
  change({
    title: `Change ${name}`, text: "As in a configuration file. Until the service ends.", fields: [{ name: "value", label: name, value }],
    preview: async (values) => {
      tag = (await ask("config")).headers.get("ETag") ?? "";
      return `Would be: ${told(await send(values.value, true))}.`;
    },
    apply: async (values) => `${told(await send(values.value, false))}.`,
  });
}

function unpin({ id }) {
  request({
    path: `v1/pins/${id}`, method: "DELETE", title: `End pin ${id.replace(/^0+/, "")}`,
    told: ({ tokens, bytes: size }, dry) => `${count(tokens)} tokens, ${bytes(size)}, ${dry ? "could" : "can"} be evicted again.`,
  });
}

function flush() {
  request({
    path: "v1/flush", body: ({ wait_s }) => ({ wait_s: Number(wait_s) }),
    title: "Flush: write all chunks in memory to the tiers", fields: [{ name: "wait_s", label: "Wait at most, seconds", value: 60 }],
    told: (answer, dry) => dry ? waiting(answer.expected.waiting_writes) : `Job ${answer.id.replace(/^0+/, "")} began.`,
  });
}
const waiting = (writes) => `${count(writes)} writes are waiting now.`;

function drain() {
  request({
    path: "v1/drain", body: ({ on }) => ({ on: on === "true" }),
    title: "Drain before a restart", text: "Refuses new engines, saves nothing more, and flushes. Lookups go on.",
    fields: [{ name: "on", label: "Draining", value: "true", options: ["true", "false"] }],
    told: ({ draining, engines, reserved_bytes: begun, outstanding_writes: writes }, dry) => {
      if (!dry) return `The service is ${draining ? "" : "not "}draining.`;
      return draining ? `${engines === 1 ? "1 engine stays" : `${count(engines)} engines stay`} attached, and no new one could. They would save only what they have begun, ${bytes(begun)}. ${waiting(writes)}` : "New engines could attach again.";
    },
  });
}

// --- start ----------------------------------------------------------------------------------

for (const name of Object.keys(TABS)) $("tabs").append(make("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel", onclick: () => open(name) }, name));
$("tabs").addEventListener("keydown", ({ key }) => {
  const names = Object.keys(TABS), at = names.indexOf(tab);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1 + names.length, Home: 0, End: names.length - 1 }[key];
  if (next !== undefined) open(names[next % names.length], true);
});
$("window").addEventListener("change", () => seen.snapshot && render());
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => seen.snapshot && render());
new ResizeObserver(() => {
  document.querySelectorAll(".wide").forEach(fit);
  if (seen.snapshot) { drawTraffic(); drawCurve(); }
}).observe($("main"));
setInterval(drawState, 250);

/** Offer the other services of the node; this page's own path may have a proxy's prefix. */
async function drawServices() {
  const { rows } = await json("v1/services"), select = $("service");
  const own = rows.find(({ here }) => here), prefix = location.pathname.slice(0, -own.path.length);
  const named = rows.map(({ id, status }) => [id, status === "ok" ? id : `${id} (${status})`]);
  $("others").hidden = rows.length < 2;
  if (select.dataset.shown === JSON.stringify(named)) return;
  select.dataset.shown = JSON.stringify(named);
  select.replaceChildren(...named.map(([value, text]) => make("option", { value }, text)));
  select.value = own.id;
  select.onchange = () => location.assign(prefix + rows.find(({ id }) => id === select.value).path);
}

/** Lists and the curve change slowly, and are asked for less often. */
async function lists() {
  for (;;) {
    if (seen.snapshot && !document.hidden) {
      await Promise.allSettled([
        readEngines(), refresh(), drawServices(),
        json("v1/curve").then((curve) => { seen.curve = curve; drawCurve(); }),
      ]);
    }
    await sleep(seen.snapshot ? 1000 * LIST_S : 100);
  }
}

open(tab);
lists();
follow();
