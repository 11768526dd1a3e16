// Elements made from data. Text only ever becomes a text node: nothing in the page parses a string as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

let explanations = 0;

/** A small button that explains: on hover, on focus, on a tap; Escape closes it. */
function explain(text) {
  const id = `explanation-${explanations++}`;
  const button = el("button", {
    class: "info", type: "button", "aria-describedby": id, "aria-label": "What is this?",
    onkeydown: (event) => { if (event.key === "Escape") button.blur(); },
  }, "?");
  return el("span", { class: "explain" }, button, el("span", { class: "bubble", role: "tooltip", id }, text));
}

function section(id, title, note, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` },
    el("div", { class: "section-head" }, el("h2", { id: `${id}-title` }, title), note ? el("p", { class: "note" }, note) : null),
    ...children);
}

/** Calls `draw(width)` whenever the element's width changes. */
function onWidth(node, draw) {
  let last = 0;
  new ResizeObserver((entries) => {
    const width = Math.floor(entries[0].contentRect.width);
    if (width && width !== last) { last = width; draw(width); }
  }).observe(node);
}
