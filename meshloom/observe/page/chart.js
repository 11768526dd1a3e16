// Curves over steps: one chart a metric, all charts of a stage under one crosshair.

/** The step that all charts of a stage point at; null when none. */
class Crosshair {
  constructor() { this.step = null; this.listeners = []; }
  move(step) {
    if (step === this.step) return;
    this.step = step;
    for (const listener of this.listeners) listener(step);
  }
}

/** Ticks at round numbers: about `count` of them inside [low, high]. */
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** The y range of a chart: round, from zero where that costs little, a share within 0 and 1. */
function range(values, unit) {
  let low = Math.min(...values), high = Math.max(...values);
  if (low >= 0 && low < 0.6 * high) low = 0;
  if (high <= 0 && high > 0.6 * low) high = 0;
  if (high - low < 1e-12 * Math.max(1, Math.abs(high)) || high === low) {
    const pad = Math.abs(high) * 0.5 || 1;
    return low >= 0 && low < pad ? [0, high + pad] : [low - pad, high + pad];
  }
  const pad = (high - low) * 0.06;
  const bottom = low === 0 ? 0 : low - pad, top = high === 0 ? 0 : high + pad;
  return unit === "share" ? [Math.max(0, bottom), Math.min(1, top)] : [bottom, top];
}

function loopBounds(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) if (value !== null && value !== undefined) { low = Math.min(low, value); high = Math.max(high, value); }
  return low > high ? [] : [low, high];
}

/** Index of the last step that is at most `step`, or the first one. */
function at(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) { const middle = (low + high + 1) >> 1; if (steps[middle] <= step) low = middle; else high = middle - 1; }
  return low;
}

function nearest(steps, step) {
  const i = at(steps, step);
  return i + 1 < steps.length && steps[i + 1] - step < step - steps[i] ? i + 1 : i;
}

/** A path through the points; a missing value interrupts it. */
function linePath(steps, values, x, y) {
  let path = "", pen = false;
  values.forEach((value, i) => {
    if (value === null || value === undefined) { pen = false; return; }
    path += `${pen ? "L" : "M"}${x(steps[i]).toFixed(1)},${y(value).toFixed(1)}`;
    pen = true;
  });
  return path;
}

function bandPath(series, x, y) {
  const whole = series.steps.map((step, i) => i).filter((i) => series.low[i] !== null && series.high[i] !== null && series.low[i] !== undefined);
  if (whole.length < 2) return "";
  const upper = whole.map((i) => `${x(series.steps[i]).toFixed(1)},${y(series.high[i]).toFixed(1)}`);
  const lower = whole.map((i) => `${x(series.steps[i]).toFixed(1)},${y(series.low[i]).toFixed(1)}`).reverse();
  return `M${upper.join("L")}L${lower.join("L")}Z`;
}

/**
 * A card with one chart.
 * spec: {title, unit, meaning, better, series: [{label, color, steps, values, low?, high?, bandLabel?}]}
 * domain: first and last step of the stage, the same for all its charts.
 */
function chartCard(spec, domain, crosshair, onPick) {
  const readout = el("p", { class: "readout" }), where = el("span", { class: "at" });
  const plot = el("div", { class: "plot" });
  const direction = { up: "higher is better", down: "lower is better" }[spec.better];
  const card = el("figure", { class: "card chart" },
    el("figcaption", null,
      el("div", { class: "chart-head" }, el("h3", null, spec.title, explain(spec.meaning + (direction ? ` ${direction[0].toUpperCase()}${direction.slice(1)}.` : ""))), where),
      readout),
    plot);
  const say = (step) => {
    where.textContent = `step ${(step === null ? domain[1] : step).toLocaleString("en-US")}`;
    readout.replaceChildren(...readoutParts(spec, step));
  };
  say(null);
  let point = null;
  crosshair.listeners.push((step) => { say(step); if (point) point(step); });
  onWidth(plot, (width) => { point = drawChart(plot, width, spec, domain, crosshair, onPick); point(crosshair.step); });
  return card;
}

function readoutParts(spec, step) {
  const parts = [];
  for (const series of spec.series) {
    const i = step === null ? series.steps.length - 1 : at(series.steps, step);
    const label = spec.series.length > 1 ? `${series.label} ` : "";
    const value = numberText(series.values[i], spec.unit);
    let band = "";
    if (series.low && series.low[i] !== null && series.low[i] !== undefined && series.values[i] !== null) {
      band = series.bandLabel === "±" ? ` ± ${numberText(series.high[i] - series.values[i], spec.unit)}`
        : ` (${numberText(series.low[i], spec.unit).replace(" %", "")} – ${numberText(series.high[i], spec.unit)})`;
    }
    parts.push(el("span", { class: `dot ${series.color}` }), el("span", { class: "label" }, label),
      el("strong", null, value), el("span", { class: "band" }, band));
  }
  return parts;
}

const MARGIN = { top: 10, right: 12, bottom: 22, left: 50 };
const HEIGHT = 190;

/** Axis lines, y labels left, step labels below; returns the two scales. */
function axes(picture, width, domain, bounds, unit) {
  const [first, last] = domain, [low, high] = bounds;
  const inner = width - MARGIN.left - MARGIN.right, tall = HEIGHT - MARGIN.top - MARGIN.bottom;
  const x = (step) => MARGIN.left + (last === first ? inner / 2 : (step - first) / (last - first) * inner);
  const y = (value) => MARGIN.top + (1 - (value - low) / (high - low)) * tall;
  for (const tick of ticks(low, high, 5.5)) {
    picture.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: MARGIN.left - 8, y: y(tick) + 3.5, "text-anchor": "end" }, numberText(tick, unit, true)));
  }
  const steps = last === first ? [first] : ticks(first, last, Math.max(2, Math.floor(inner / 80))).filter(Number.isInteger);
  for (const tick of steps) {
    picture.append(svg("text", { class: "tick", x: x(tick), y: HEIGHT - 5, "text-anchor": "middle" }, tick.toLocaleString("en-US")));
  }
  return { x, y };
}

/** Draws the chart; returns a function that points at a step. */
function drawChart(plot, width, spec, domain, crosshair, onPick) {
  const bounds = range(loopBounds(spec.series.flatMap((s) => [s.values, s.low || [], s.high || []])), spec.unit);
  const picture = svg("svg", { width, height: HEIGHT, role: "img", tabindex: "0", "aria-label": summary(spec, domain) });
  const { x, y } = axes(picture, width, domain, bounds, spec.unit);
  for (const series of spec.series) {
    if (series.low) picture.append(svg("path", { class: `area ${series.color}`, d: bandPath(series, x, y) }));
  }
  for (const series of spec.series) {
    picture.append(svg("path", { class: `line ${series.color}`, d: linePath(series.steps, series.values, x, y) }));
    if (series.steps.length <= 30 && spec.series.length > 1 || series.steps.length <= 12 || series.points) {
      series.values.forEach((value, i) => {
        if (value !== null && series.steps.length <= 150) picture.append(svg("circle", { class: `point ${series.color}`, cx: x(series.steps[i]), cy: y(value), r: 2.5 }));
      });
    }
  }
  const mark = svg("g", { class: "mark", visibility: "hidden" });
  picture.append(mark);
  follow(picture, spec.series.flatMap((s) => s.steps), domain, x, crosshair, onPick);
  plot.replaceChildren(picture);
  return (step) => pointAt(mark, step, spec.series, x, y);
}

function pointAt(mark, step, series, x, y) {
  if (step === null) { mark.setAttribute("visibility", "hidden"); return; }
  mark.setAttribute("visibility", "visible");
  mark.replaceChildren(svg("line", { class: "cross", x1: x(step), x2: x(step), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }),
    ...series.flatMap((s) => {
      const i = at(s.steps, step), value = s.values[i];
      return value === null || value === undefined ? [] : [svg("circle", { class: `hit ${s.color}`, cx: x(s.steps[i]), cy: y(value), r: 4 })];
    }));
}

/** Pointer and arrow keys move the crosshair; a click, or Enter, shows the step's samples. */
function follow(picture, steps, domain, x, crosshair, onPick) {
  const sorted = [...new Set(steps)].sort((a, b) => a - b);
  const stepAt = (event) => {
    const box = picture.getBoundingClientRect();
    const left = x(domain[0]), right = x(domain[1]);
    const share = right === left ? 0 : (event.clientX - box.left - left) / (right - left);
    return sorted[nearest(sorted, domain[0] + share * (domain[1] - domain[0]))];
  };
  picture.addEventListener("pointermove", (event) => crosshair.move(stepAt(event)));
  picture.addEventListener("pointerleave", () => crosshair.move(null));
  picture.addEventListener("blur", () => crosshair.move(null));
  picture.addEventListener("click", (event) => onPick && onPick(stepAt(event)));
  picture.addEventListener("keydown", (event) => {
    const i = crosshair.step === null ? sorted.length - 1 : nearest(sorted, crosshair.step);
    const to = { ArrowLeft: Math.max(0, i - 1), ArrowRight: Math.min(sorted.length - 1, i + 1), Home: 0, End: sorted.length - 1 }[event.key];
    if (to !== undefined) { event.preventDefault(); crosshair.move(sorted[to]); }
    if (event.key === "Escape") crosshair.move(null);
    if (event.key === "Enter" && onPick) onPick(sorted[i]);
  });
}

function summary(spec, domain) {
  const parts = spec.series.map((s) => {
    const values = s.values.filter((v) => v !== null && v !== undefined);
    return `${s.label}: from ${numberText(values[0], spec.unit)} to ${numberText(values[values.length - 1], spec.unit)}`;
  });
  return `${spec.title} over steps ${domain[0]} to ${domain[1]}. ${parts.join("; ")}. Arrow keys read single steps.`;
}
