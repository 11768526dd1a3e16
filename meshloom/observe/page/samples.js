// The table of samples: filters, sorting, pages, and each sample in full.

const PAGE = 20;
const EXCERPT = 140;
/** The table's first order: what the run made last stands on top. */
const NEWEST = { key: "step", up: false };

const SAMPLE_COLUMNS = [
  { key: "step", label: "Step", number: true, of: (s) => s.step },
  { key: "kind", label: "Kind", of: (s) => s.kind, hide: true },
  { key: "prompt", label: "Prompt", of: (s) => promptOf(s).text, text: true },
  { key: "response", label: "Response", of: (s) => s.response, text: true },
  { key: "answer", label: "Answer", of: (s) => valueText(s.answer), hide: true },
  { key: "reward", label: "Reward", number: true, of: (s) => s.reward },
  { key: "advantage", label: "Adv.", number: true, of: (s) => s.advantage, hide: true },
  { key: "tokens", label: "Tokens", number: true, of: (s) => (s.response_ids || []).length },
  { key: "finish", label: "Finish", of: (s) => s.finish, hide: true },
];

function promptOf(sample) { return DATA.prompts[sample.prompt]; }
function valueText(value) { return value === null || value === undefined ? MISSING : typeof value === "string" ? value : JSON.stringify(value); }

class SampleTable {
  constructor(samples, stages) {
    this.samples = samples;
    this.stages = stages;
    this.sort = { ...NEWEST };
    this.page = 0;
    this.open = new Set();
    this.group = null;
    this.fields = {};
    this.body = el("tbody");
    this.count = el("p", { class: "count", role: "status" });
    this.chip = el("div", { class: "chips" });
    this.pager = el("nav", { class: "pager", "aria-label": "Pages of samples" });
    this.head = el("tr");
    this.node = el("div", { class: "samples" }, this.filters(), el("div", { class: "bar-line" }, this.count, this.chip),
      el("div", { class: "table-frame" }, el("table", { class: "sample-table" }, el("caption", { class: "hidden" }, "Samples with their rewards"), el("thead", null, this.head), this.body)), this.pager);
    this.update();
  }

  filters() {
    const kinds = [...new Set(this.samples.map((s) => s.kind))], finishes = [...new Set(this.samples.map((s) => s.finish))];
    const choose = (name, label, options) => this.field(name, label, el("select", null, ...options.map(([value, text]) => el("option", { value }, text))));
    const number = (name, label, placeholder) => this.field(name, label, el("input", { type: "number", step: "any", placeholder, inputmode: "decimal" }));
    const steps = loopBounds([this.samples.map((s) => s.step)]), rewards = loopBounds([this.samples.map((s) => s.reward)]);
    const all = (label, values) => [["", label], ...values.map((v) => [v, v])];
    return el("form", { class: "filters", role: "search", "aria-label": "Filter the samples", onsubmit: (event) => event.preventDefault() },
      this.field("text", "Search", el("input", { type: "search", placeholder: "in prompt, response, answer" }), "wide"),
      choose("outcome", "Outcome", [["", "all"], ["solved", "solved"], ["unsolved", "unsolved"], ["invalid", "invalid reward"]]),
      choose("kind", "Kind", all("all", kinds)),
      this.stages.length > 1 ? choose("stage", "Stage", [["", "all"], ...this.stages.map((stage, i) => [String(i), stage.name])]) : null,
      choose("finish", "Finish", all("all", finishes)),
      el("div", { class: "pair" }, number("from", "Step from", String(steps[0])), number("to", "to", String(steps[1]))),
      el("div", { class: "pair" }, number("least", "Reward from", rewards.length ? shortText(rewards[0]) : ""), number("most", "to", rewards.length ? shortText(rewards[1]) : "")),
      el("button", { type: "button", class: "quiet", onclick: () => this.reset() }, "Reset"));
  }

  field(name, label, input, extra = "") {
    input.addEventListener("input", () => { this.page = 0; this.update(); });
    this.fields[name] = input;
    return el("label", { class: `field ${extra}` }, el("span", null, label), input);
  }

  reset() {
    for (const input of Object.values(this.fields)) input.value = "";
    this.group = null;
    this.page = 0;
    this.sort = { ...NEWEST };
    this.update();
  }

  /** Show the samples of one step, nothing else. */
  showStep(step) {
    this.reset();
    this.fields.from.value = this.fields.to.value = String(step);
    this.update();
  }

  matches(sample) {
    const get = (name) => this.fields[name] ? this.fields[name].value : "";
    const bound = (name) => get(name) === "" ? null : Number(get(name));
    const outcome = sample.invalid ? "invalid" : sample.solved ? "solved" : "unsolved";
    const text = get("text").toLowerCase();
    return (!get("outcome") || get("outcome") === outcome)
      && (!get("kind") || get("kind") === sample.kind)
      && (!get("stage") || get("stage") === String(sample.stage))
      && (!get("finish") || get("finish") === sample.finish)
      && (bound("from") === null || sample.step >= bound("from")) && (bound("to") === null || sample.step <= bound("to"))
      && (bound("least") === null || sample.reward !== null && sample.reward >= bound("least"))
      && (bound("most") === null || sample.reward !== null && sample.reward <= bound("most"))
      && (!this.group || sameGroup(sample, this.group))
      && (!text || [promptOf(sample).text, sample.response, valueText(sample.answer)].some((part) => String(part).toLowerCase().includes(text)));
  }

  sorted(samples) {
    const column = SAMPLE_COLUMNS.find((c) => c.key === this.sort.key);
    const sign = this.sort.up ? 1 : -1;
    const compare = (a, b) => column.number ? a - b : String(a).localeCompare(String(b));
    // Missing values stay at the end in both directions.
    return [...samples].sort((a, b) => {
      const x = column.of(a), y = column.of(b);
      if (x === null || x === undefined || y === null || y === undefined) return (x === null || x === undefined) - (y === null || y === undefined);
      return sign * compare(x, y);
    });
  }

  update() {
    const found = this.sorted(this.samples.filter((sample) => this.matches(sample)));
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    this.page = Math.min(this.page, pages - 1);
    const shown = found.slice(this.page * PAGE, (this.page + 1) * PAGE);
    this.count.replaceChildren(el("strong", null, found.length.toLocaleString("en-US")), found.length === this.samples.length ? " samples" : ` of ${countText(this.samples.length, "sample")}`);
    this.chip.replaceChildren(...(this.group ? [el("button", { type: "button", class: "chip", onclick: () => { this.group = null; this.update(); } }, `group ${this.group.group} of step ${this.group.step} ✕`)] : []));
    this.head.replaceChildren(...SAMPLE_COLUMNS.map((column) => this.headCell(column)));
    this.body.replaceChildren(...(shown.length ? shown.flatMap((sample) => this.rows(sample)) : [el("tr", null, el("td", { class: "empty", colspan: SAMPLE_COLUMNS.length }, "No sample fits these filters."))]));
    this.drawPager(pages, found.length);
  }

  headCell(column) {
    const mine = this.sort.key === column.key;
    const turn = () => {
      this.sort = { key: column.key, up: !mine || !this.sort.up };
      this.page = 0;
      this.update();
      [...this.head.children][SAMPLE_COLUMNS.indexOf(column)].firstChild.focus();
    };
    return el("th", { scope: "col", class: cellClass(column), "aria-sort": mine ? (this.sort.up ? "ascending" : "descending") : "none" },
      el("button", { type: "button", onclick: turn }, column.label, el("span", { class: "arrow", "aria-hidden": "true" }, mine ? (this.sort.up ? " ↑" : " ↓") : "")));
  }

  rows(sample) {
    const open = this.open.has(sample);
    const toggle = () => {
      if (this.open.has(sample)) this.open.delete(sample); else this.open.add(sample);
      const i = [...this.body.children].findIndex((row) => row.sample === sample);
      this.update();
      this.body.children[i].querySelector("button").focus({ preventScroll: true });
    };
    const row = el("tr", { class: `sample ${open ? "open" : ""}`, onclick: (event) => { if (!event.target.closest("button") && !String(getSelection())) toggle(); } },
      ...SAMPLE_COLUMNS.map((column, i) => el("td", { class: cellClass(column) }, i === 0
        ? el("button", { type: "button", class: "expand", "aria-expanded": String(open), "aria-label": `Sample of step ${sample.step} in full`, onclick: toggle }, el("span", { class: "arrow", "aria-hidden": "true" }, "›"), String(sample.step))
        : cell(column, sample))));
    row.sample = sample;
    return open ? [row, el("tr", { class: "detail" }, el("td", { colspan: SAMPLE_COLUMNS.length }, this.detail(sample)))] : [row];
  }

  detail(sample) {
    const siblings = this.samples.filter((other) => sameGroup(other, sample)).length;
    const facts = [["Answer", valueText(sample.answer)], ["Reward", rewardText(sample)], ["Advantage", sample.advantage === null ? MISSING : shortText(sample.advantage)],
      ["Finish", sample.finish], ["Row", `${sample.row}${sample.data_source ? ` of ${sample.data_source}` : ""}`], ["Weights", versionText(sample.versions)],
      ...(sample.messages ? [["Turns", sample.turns], ["Tool calls", sample.tool_errors ? `${sample.tool_calls}, ${sample.tool_errors} with an error` : sample.tool_calls]] : []),
      ...Object.entries(sample.parts || {}).map(([name, value]) => [name, typeof value === "number" ? shortText(value) : valueText(value)])];
    return el("div", { class: "full" },
      el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, String(value))))),
      el("div", { class: "texts" }, textBlock("Prompt", promptOf(sample).text, promptOf(sample).ids), textBlock(sample.messages ? "Last turn" : "Response", sample.response, lastTurn(sample)),
        ...[["Remark of the reward", sample.remark], ["Printed by the reward function", sample.printed]].filter(([, text]) => text).map(([label, text]) => textBlock(label, text))),
      sample.messages ? el("ol", { class: "turns", "aria-label": "Conversation" }, ...sample.messages.map(message)) : null,
      siblings > 1 ? el("button", { type: "button", class: "quiet", onclick: () => { this.reset(); this.group = sample; this.update(); } }, `Show the group's ${siblings} samples`) : null);
  }

  drawPager(pages, total) {
    const go = (page) => () => { this.page = page; this.update(); };
    const first = total ? this.page * PAGE + 1 : 0, last = Math.min(total, (this.page + 1) * PAGE);
    this.pager.replaceChildren(
      el("button", { type: "button", class: "quiet", disabled: this.page === 0, onclick: go(this.page - 1) }, "‹ Previous"),
      el("span", null, `${first.toLocaleString("en-US")} – ${last.toLocaleString("en-US")}, page ${this.page + 1} of ${pages}`),
      el("button", { type: "button", class: "quiet", disabled: this.page >= pages - 1, onclick: go(this.page + 1) }, "Next ›"));
  }
}

function sameGroup(a, b) { return a.group === b.group && a.step === b.step && a.kind === b.kind && a.stage === b.stage; }
function cellClass(column) { return [column.number ? "number" : "", column.text ? "text" : "", column.hide ? "roomy" : "", `col-${column.key}`].join(" ").trim(); }
function rewardText(sample) { return sample.invalid ? `invalid: ${sample.invalid}` : sample.reward === null ? MISSING : shortText(sample.reward); }
function versionText(versions) { return !versions || !versions.length ? MISSING : versions[0] === versions[versions.length - 1] ? `version ${versions[0]}` : `versions ${versions[0]} – ${versions[versions.length - 1]}`; }

function cell(column, sample) {
  const value = column.of(sample);
  if (column.key === "reward") return el("span", { class: `reward ${sample.invalid ? "invalid" : sample.solved ? "solved" : "unsolved"}` }, sample.invalid ? "invalid" : rewardText(sample));
  if (column.text || column.key === "answer") return el("span", { class: "excerpt" }, excerpt(value, column.key === "prompt"));
  if (column.number) return value === null || value === undefined ? MISSING : shortText(value);
  return String(value);
}

/** Marks that chat templates put between messages, with the role that follows. */
const TEMPLATE_MARK = /<\|[^|<>]*\|>(?:(?:system|user|assistant)(?=\s))?|<(?:start|end)_of_turn>(?:(?:user|model)(?=\s))?/;

/** One line of a text; of a chat, its last message that says something, where the question usually stands. */
function excerpt(text, isPrompt) {
  const parts = String(text).split(TEMPLATE_MARK).map((part) => part.replace(/\s+/g, " ").trim()).filter((part) => part !== "");
  const line = isPrompt ? parts[parts.length - 1] || "" : parts.join(" ");
  return line.length <= EXCERPT ? line : line.slice(0, EXCERPT) + "…";
}

/** Token ids of a response; of an episode, those of the model's last turn. */
function lastTurn(sample) {
  const ids = sample.response_ids || [], own = sample.messages ? sample.own || [] : [];
  return own.length ? ids.slice(...own[own.length - 1]) : ids;
}

/** A message of an episode: who said it, and what. */
function message(said) {
  const role = said.name ? `${said.role} ${said.name}` : said.role;
  return el("li", { class: said.role === "assistant" ? "own" : "" }, el("h4", null, role), el("pre", { tabindex: "0" }, valueText(said.content)));
}

function textBlock(label, text, ids = null) {
  return el("div", { class: "text-block" }, el("h4", null, label, ids ? el("span", null, countText(ids.length, "token")) : null),
    el("pre", { tabindex: "0" }, text === "" ? "(empty)" : text),
    ids && ids.length ? el("details", null, el("summary", null, "Token ids"), el("pre", { class: "ids" }, ids.join(" "))) : null);
}
