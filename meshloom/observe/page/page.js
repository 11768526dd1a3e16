// The page: its head, its charts by section, samples, settings.

const DATA = JSON.parse(document.getElementById("data").textContent);

const STATES = { finished: "Finished", stopped: "Stopped", failed: "Failed", running: "Running", lost: "Ended without notice" };

/** Charts with a design of their own, in order; each other metric gets a plain chart under "More curves". */
const MAIN = {
  rl: [
    { name: "reward_mean", spread: "reward_std", kinds: ["train", "validation"] },
    { name: "accuracy", low: "accuracy_low", high: "accuracy_high", kinds: ["validation"] },
    { name: "response_tokens_mean", kinds: ["train", "validation"] },
    { name: "entropy", kinds: ["train"] },
    { name: "kl_reference", kinds: ["train"] },
    { name: "sampler_gap", kinds: ["train"] },
    { name: "grad_norm", kinds: ["train"] },
    { name: "learning_rate", kinds: ["train"] },
    { name: "response_tokens_per_second", kinds: ["train"] },
  ],
  sft: [
    { name: "loss", kinds: ["sft", "validation"] },
    { name: "perplexity", kinds: ["validation"] },
    ...["grad_norm", "learning_rate", "tokens_per_second"].map((name) => ({ name, kinds: ["sft"] })),
  ],
};
const COMPANIONS = ["reward_std", "accuracy_low", "accuracy_high"];
const KIND_LABELS = { train: "training", validation: "held-out", sft: "training" };

function has(column) { return column !== undefined && column.some((value) => value !== null); }

function seriesOf(stage, kind, chart) {
  const records = stage.kinds[kind];
  if (!records || !has(records.metrics[chart.name])) return null;
  const values = records.metrics[chart.name];
  const series = { label: KIND_LABELS[kind] || kind, color: kind === "validation" ? "held-out" : "training", steps: records.step, values, points: kind === "validation" };
  if (chart.spread && has(records.metrics[chart.spread])) {
    const spread = records.metrics[chart.spread];
    const shift = (sign) => values.map((value, i) => value === null || spread[i] === null || spread[i] === undefined ? null : value + sign * spread[i]);
    Object.assign(series, { low: shift(-1), high: shift(1), bandLabel: "±" });
  }
  if (chart.low && has(records.metrics[chart.low]) && has(records.metrics[chart.high])) {
    Object.assign(series, { low: records.metrics[chart.low], high: records.metrics[chart.high] });
  }
  return series;
}

function specOf(stage, chart) {
  const series = chart.kinds.map((kind) => seriesOf(stage, kind, chart)).filter(Boolean);
  if (!series.length) return null;
  const known = DATA.names[chart.name] || { label: chart.name, unit: "", better: "", meaning: "A metric of this run's own." };
  const spread = series.some((s) => s.bandLabel === "±") ? " The band is one standard deviation of the samples' rewards." : "";
  return { title: known.label, unit: known.unit, better: known.better, meaning: known.meaning + spread, series };
}

/** All further metrics of a stage, canonical ones first. */
function restOf(stage, main) {
  const shown = new Set([...main.map((chart) => chart.name), ...COMPANIONS]);
  const names = new Map();
  for (const [kind, records] of Object.entries(stage.kinds)) {
    for (const name of Object.keys(records.metrics)) {
      if (!shown.has(name) && has(records.metrics[name])) names.set(name, [...(names.get(name) || []), kind]);
    }
  }
  const order = Object.keys(DATA.names);
  const all = [...names].map(([name, kinds]) => ({ name, kinds }));
  return {
    known: all.filter((c) => c.name in DATA.names).sort((a, b) => order.indexOf(a.name) - order.indexOf(b.name)),
    other: all.filter((c) => !(c.name in DATA.names)).sort((a, b) => a.name.localeCompare(b.name)),
  };
}

function curves(stage, index, onPick) {
  const kinds = Object.keys(stage.kinds);
  const main = [...(kinds.includes("train") || !kinds.includes("sft") ? MAIN.rl : []), ...(kinds.includes("sft") ? MAIN.sft : [])];
  const domain = loopBounds(Object.values(stage.kinds).map((records) => records.step));
  const crosshair = new Crosshair();
  const grid = (charts) => el("div", { class: "grid-charts" }, ...charts.map((chart) => specOf(stage, chart)).filter(Boolean).map((spec) => chartCard(spec, domain, crosshair, onPick)));
  const rest = restOf(stage, main);
  const fold = (title, charts) => charts.length ? el("details", { class: "fold" }, el("summary", null, title, el("span", null, String(charts.length))), grid(charts)) : null;
  const many = DATA.stages.length > 1;
  const thinned = Object.values(stage.kinds).some((records) => records.records > records.step.length);
  const note = thinned ? `Curves show ${Math.max(...Object.values(stage.kinds).map((r) => r.step.length)).toLocaleString("en-US")} evenly spaced steps of ${Math.max(...Object.values(stage.kinds).map((r) => r.records)).toLocaleString("en-US")}.` : "";
  return section(`curves-${index}`, many ? `Curves: ${stage.name}` : "Curves", note, grid(main), fold("More curves", rest.known), fold("Other", rest.other));
}

function pill(stage) {
  const where = stage.state === "finished" ? countText(stage.step, "step") : `at step ${stage.step}${stage.steps ? ` of ${stage.steps}` : ""}`;
  return el("span", { class: `pill ${stage.state}` }, `${STATES[stage.state] || stage.state} · ${where}`);
}

function head() {
  const last = DATA.stages[DATA.stages.length - 1];
  const facts = Object.entries(last.facts);
  facts.push(["Began", DATA.stages[0].began], ["Took", secondsText(DATA.stages.reduce((sum, stage) => sum + stage.seconds, 0))]);
  return el("header", null,
    el("div", { class: "brand" }, el("span", null, "meshloom"), el("nav", { "aria-label": "Parts of the page" }, ...links())),
    el("h1", null, DATA.title),
    el("p", { class: "pills" }, pill(last), last.reason ? el("span", { class: "reason" }, last.reason) : null),
    invalidNote(),
    el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value)))));
}

/** How many rewards were invalid, and why; nothing if there were none. */
function invalidNote() {
  const found = DATA.stages.flatMap((stage) => Object.entries(stage.invalid).map(([kind, of]) => {
    const reasons = Object.entries(of.reasons).map(([reason, count]) => `${reason} ${count.toLocaleString("en-US")}`).join(", ");
    return `${of.count.toLocaleString("en-US")} in ${KIND_LABELS[kind] || kind}${reasons ? ` (${reasons})` : ""}`;
  }));
  if (!found.length) return null;
  return el("p", { class: "invalid-note", role: "note" }, el("b", null, "Invalid rewards: "), `${found.join("; ")}. The reward function gave no number for these samples; they are in no mean and taught nothing.`);
}

function links() {
  const to = (id, text) => el("a", { href: `#${id}` }, text);
  return [to("curves-0", "Curves"), DATA.stages.some((s) => Object.keys(s.phase_seconds).length) ? to("time", "Time") : null, DATA.samples.length ? to("samples", "Samples") : null, to("settings", "Settings")].filter(Boolean);
}

function interval(milestone) {
  return milestone.low === null ? "" : `95 % interval ${(100 * milestone.low).toFixed(1)} – ${percentText(milestone.high)}`;
}

/** Before and after, as large numbers over one axis from 0 to 100 %. */
function result() {
  const marks = DATA.milestones;
  if (!marks.length) return null;
  const last = marks[marks.length - 1];
  const gain = 100 * (last.accuracy - marks[0].accuracy);
  const figures = marks.flatMap((mark, i) => [
    i ? el("span", { class: "to", "aria-hidden": "true" }, "→") : null,
    el("div", { class: `figure ${i === marks.length - 1 && marks.length > 1 ? "final" : ""}` },
      el("span", { class: "figure-label" }, `${mark.label} · step ${mark.step}`),
      el("span", { class: "figure-value" }, (100 * mark.accuracy).toFixed(1), el("small", null, "%")),
      el("span", { class: "figure-note" }, interval(mark)))]);
  const strip = el("div", { class: "strip" });
  onWidth(strip, (width) => drawStrip(strip, width, marks));
  return el("section", { class: "card result", "aria-label": "Accuracy on held-out problems" },
    el("div", { class: "result-head" }, el("h2", null, "Accuracy on held-out problems"),
      marks.length > 1 ? el("span", { class: `gain ${gain >= 0 ? "good" : "bad"}` }, `${gain >= 0 ? "+" : "−"}${Math.abs(gain).toFixed(1)} points`) : null),
    el("div", { class: "result-body" }, el("div", { class: "figures" }, ...figures), keyFigures()), strip);
}

/** A few numbers of the last stage that say what the result took. */
function keyFigures() {
  const stage = DATA.stages[DATA.stages.length - 1];
  const records = stage.kinds.train || stage.kinds.sft || stage.kinds.validation;
  const given = (name) => (records.metrics[name] || []).filter((value) => value !== null);
  const rate = given("response_tokens_per_second").length ? "response_tokens_per_second" : "tokens_per_second";
  const found = [["Samples", DATA.samples_total ? DATA.samples_total.toLocaleString("en-US") : null],
    ["Updates", given("updates").length ? Math.max(...loopBounds([given("updates")])).toLocaleString("en-US") : null],
    [rate === "tokens_per_second" ? "Tokens a second" : "Response tokens a second", given(rate).length ? shortText(given(rate).reduce((a, b) => a + b) / given(rate).length) : null],
    ["Peak memory", given("peak_memory_bytes").length ? bytesText(loopBounds([given("peak_memory_bytes")])[1]) : null]];
  return el("dl", { class: "key-figures" }, ...found.filter(([, value]) => value !== null).map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));
}

function drawStrip(strip, width, marks) {
  const height = 46, left = 20, right = width - 20, x = (share) => left + share * (right - left), middle = 14;
  const picture = svg("svg", { width, height, "aria-hidden": "true" }, svg("line", { class: "grid", x1: left, x2: right, y1: middle, y2: middle }));
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    picture.append(svg("line", { class: "grid", x1: x(share), x2: x(share), y1: middle - 4, y2: middle + 4 }), svg("text", { class: "tick", x: x(share), y: height - 8, "text-anchor": "middle" }, `${100 * share} %`));
  }
  marks.forEach((mark, i) => {
    const kind = i === marks.length - 1 ? "final" : "earlier";
    if (mark.low !== null) picture.append(svg("rect", { class: `whisker ${kind}`, x: x(mark.low), width: Math.max(1, x(mark.high) - x(mark.low)), y: middle - 6, height: 12, rx: 6 }));
    picture.append(svg("circle", { class: `mark-dot ${kind}`, cx: x(mark.accuracy), cy: middle, r: 4 }));
  });
  strip.replaceChildren(picture);
}

function samplesSection() {
  if (!DATA.samples.length) return { node: null, table: null };
  const table = new SampleTable(DATA.samples, DATA.stages);
  const note = DATA.samples_total > DATA.samples.length
    ? `${DATA.samples.length.toLocaleString("en-US")} of the run's ${countText(DATA.samples_total, "sample")}, spread evenly over its steps; the rest is in samples.jsonl.` : "All samples the run wrote down.";
  return { node: section("samples", "Samples", note, table.node), table };
}

function settingsSection() {
  const many = DATA.stages.length > 1;
  const fold = (title, text, paint) => text ? el("details", { class: "fold" }, el("summary", null, title), el("pre", { class: "source", tabindex: "0" }, ...(paint ? paint(text) : [text]))) : null;
  const parts = DATA.stages.flatMap((stage) => [fold(many ? `Settings: ${stage.name}` : "Settings", stage.settings, yamlParts), fold(many ? `Plan: ${stage.name}` : "Plan", stage.plan)]).filter(Boolean);
  return section("settings", "Settings and plan", parts.length ? "" : "This folder has none.", ...parts);
}

/** YAML with its keys set off. */
function yamlParts(text) {
  return text.split("\n").flatMap((line) => {
    const found = /^(\s*(?:- )?)([\w.-]+)(:.*)$/.exec(line);
    return found ? [found[1], el("span", { class: "key" }, found[2]), found[3] + "\n"] : [line + "\n"];
  });
}

function timeSection() {
  const cards = DATA.stages.flatMap((stage) => {
    const card = phaseCard(stage);
    return card ? [DATA.stages.length > 1 ? el("h3", { class: "stage-name" }, stage.name) : null, card] : [];
  }).filter(Boolean);
  return cards.length ? section("time", "Where the time went", "", ...cards) : null;
}

function build() {
  const { node: samples, table } = samplesSection();
  const pick = table ? (step) => { table.showStep(step); document.getElementById("samples").scrollIntoView(); } : null;
  document.getElementById("main").append(...[head(), result(), ...DATA.stages.map((stage, i) => curves(stage, i, pick)), timeSection(), samples, settingsSection(),
    el("footer", null, `Written by meshloom on ${DATA.written}. This file is complete in itself: it loads nothing.`)].filter(Boolean));
}

build();
