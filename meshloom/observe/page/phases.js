// Where the time went: a total for each phase, and a stacked bar for each step.

const MOST_BARS = 120;

/** Seconds of each phase at each step, all kinds of records together, gathered in at most MOST_BARS bars. */
function phaseBars(stage, names) {
  const steps = new Map();
  for (const kind of Object.values(stage.kinds)) {
    kind.step.forEach((step, i) => {
      const row = steps.get(step) || steps.set(step, {}).get(step);
      for (const name of names) row[name] = (row[name] || 0) + ((kind.phases[name] || [])[i] || 0);
    });
  }
  const sorted = [...steps.entries()].sort((a, b) => a[0] - b[0]);
  const each = Math.ceil(sorted.length / MOST_BARS);
  const bars = [];
  for (let start = 0; start < sorted.length; start += each) {
    const part = sorted.slice(start, start + each);
    const seconds = Object.fromEntries(names.map((name) => [name, part.reduce((sum, [, row]) => sum + row[name], 0) / part.length]));
    bars.push({ first: part[0][0], last: part[part.length - 1][0], seconds, total: names.reduce((sum, n) => sum + seconds[n], 0) });
  }
  return { bars, each };
}

function phaseLabel(name) { return (DATA.phases[name] || { label: name }).label; }

const PHASE_COLORS = ["generate", "score", "log_prob", "reference", "values", "critic", "update", "sync", "validate", "save"];
function phaseColor(name) { return PHASE_COLORS.includes(name) ? `phase-${name}` : "phase-other"; }

function phaseCard(stage) {
  const totals = Object.entries(stage.phase_seconds).filter(([, seconds]) => seconds > 0);
  if (!totals.length) return null;
  const sum = totals.reduce((all, [, seconds]) => all + seconds, 0);
  const names = totals.map(([name]) => name);
  const { bars, each } = phaseBars(stage, names);
  const readout = el("p", { class: "readout" });
  const plot = el("div", { class: "plot" });
  const say = (bar) => readout.replaceChildren(...(bar ? barReadout(bar, names) : [el("span", { class: "at" }, each > 1 ? `mean of ${each} steps a bar` : "one bar a step")]));
  say(null);
  onWidth(plot, (width) => drawBars(plot, width, bars, names, say));
  return el("figure", { class: "card time" },
    el("div", { class: "time-total" },
      el("figcaption", null, el("h3", null, "In total"), el("p", { class: "readout" }, el("strong", null, secondsText(sum)))),
      totalBar(totals, sum), totalTable(totals, sum)),
    el("div", { class: "time-steps" },
      el("div", { class: "caption" }, el("h3", null, "By step"), readout), plot));
}

function totalBar(totals, sum) {
  let left = 0;
  const parts = totals.map(([name, seconds]) => {
    const part = svg("rect", { class: phaseColor(name), x: `${100 * left / sum}%`, width: `${100 * seconds / sum}%`, y: 0, height: 14 },
      svg("title", null, `${phaseLabel(name)}: ${secondsText(seconds)}`));
    left += seconds;
    return part;
  });
  return svg("svg", { class: "total-bar", width: "100%", height: 14, role: "img", "aria-label": "Shares of the phases; the table below has the numbers" }, ...parts);
}

function totalTable(totals, sum) {
  return el("table", { class: "totals" }, el("tbody", null, ...totals.map(([name, seconds]) => el("tr", null,
    el("th", { scope: "row" }, el("span", { class: `swatch ${phaseColor(name)}` }), phaseLabel(name),
      DATA.phases[name] ? el("span", { class: "meaning" }, DATA.phases[name].meaning) : null),
    el("td", null, secondsText(seconds)), el("td", null, percentText(seconds / sum))))));
}

function barReadout(bar, names) {
  return [...names.filter((n) => bar.seconds[n] > 0).flatMap((name) => [el("span", { class: `dot ${phaseColor(name)}` }), el("strong", null, secondsText(bar.seconds[name]))]),
    el("span", { class: "at" }, bar.first === bar.last ? `step ${bar.first}` : `steps ${bar.first} – ${bar.last}`)];
}

function drawBars(plot, width, bars, names, say) {
  const top = Math.max(...bars.map((bar) => bar.total)) || 1;
  const picture = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": `Seconds of each phase by step, at most ${secondsText(top)} a step` });
  const inner = width - MARGIN.left - MARGIN.right, slot = inner / bars.length, thick = Math.max(1, Math.min(slot * 0.82, 28));
  const y = (value) => MARGIN.top + (1 - value / (top * 1.04)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  for (const tick of ticks(0, top * 1.04, 5.5)) {
    picture.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: MARGIN.left - 8, y: y(tick) + 3.5, "text-anchor": "end" }, `${shortText(tick)} s`));
  }
  const first = bars[0].first, last = bars[bars.length - 1].last;
  const labels = last === first ? [first] : ticks(first, last, Math.max(2, Math.floor(inner / 80))).filter(Number.isInteger);
  bars.forEach((bar, i) => {
    const left = MARGIN.left + i * slot + (slot - thick) / 2;
    const group = svg("g", { class: "bar", onpointerenter: () => say(bar), onpointerleave: () => say(null) },
      svg("rect", { class: "bar-ground", x: MARGIN.left + i * slot, y: MARGIN.top, width: slot, height: HEIGHT - MARGIN.top - MARGIN.bottom }));
    let sum = 0;
    for (const name of names) {
      const seconds = bar.seconds[name];
      if (seconds > 0) group.append(svg("rect", { class: phaseColor(name), x: left, width: thick, y: y(sum + seconds), height: Math.max(0.3, y(sum) - y(sum + seconds)) }));
      sum += seconds;
    }
    picture.append(group);
    for (const label of labels) {
      if (label >= bar.first && label <= bar.last) picture.append(svg("text", { class: "tick", x: left + thick / 2, y: HEIGHT - 5, "text-anchor": "middle" }, label.toLocaleString("en-US")));
    }
  });
  plot.replaceChildren(picture);
}
