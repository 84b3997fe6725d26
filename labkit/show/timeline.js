// Goes from block to block of a pipeline's timeline, and from setting to setting. Python made every picture; a block
// that is chosen gets outlines, and so do those it waits for and those that wait for it. No imports, no kernel.
const LIFT = 4; // as in timelineview.py
const STEP = { F: 1, B: -1, W: 0 };
const SVG = "http://www.w3.org/2000/svg";

function make(tag, cls, parent) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  parent.append(node);
  return node;
}

const fill = (words, values) => words.replace(/\{(\w+)\}/g, (_, name) => values[name]);
const key = (kind, microBatch, stage) => `${kind}${microBatch}.${stage}`;

function attach(root, { scenes, dials, words }) {
  const stages = [...root.querySelectorAll(":scope > .lk-stage")];
  const body = document.createElement("div"), rest = document.createElement("div");
  root.querySelector(":scope > .lk-title").before(body);
  body.append(root.querySelector(":scope > .lk-title"), ...stages);
  const player = make("div", "lk-player", root);
  rest.append(...root.querySelectorAll(":scope > .lk-note, :scope > details"));
  root.append(rest);
  const at = dials.map(() => 0);
  if (dials.length) offer();
  const say = make("p", "lk-say", player);
  say.setAttribute("aria-live", "polite");
  make("p", "lk-keys", player).textContent = words.keys;
  let rows, chosen;

  function begin() { // a new picture
    const { variants } = scenes[number()].focus;
    rows = variants.flatMap((variant, v) => variant.rows.map((events, rank) => ({ variant, v, rank, events })));
    for (const variant of variants) {
      variant.found ||= new Map(variant.rows.flatMap((events, rank) =>
        events.map((event, n) => [key(event[0], event[1], event[2]), { rank, n, event }])));
    }
    chosen = null;
    for (const stage of body.querySelectorAll(".lk-stage")) stage.tabIndex = 0;
    for (const node of root.querySelectorAll("input, summary, [tabindex]")) {
      node.setAttribute("data-lm-suppress-shortcuts", "true"); // else JupyterLab takes the keys
    }
  }

  const number = () => dials.reduce((n, dial, d) => n * dial.values.length + at[d], 0);

  function offer() {
    const box = make("div", "lk-dials", player);
    dials.forEach((dial, d) => {
      const label = make("label", "", box), slider = make("input", "", label);
      const told = () => fill(words.dial, { name: dial.name, value: dial.values[at[d]] });
      Object.assign(slider, { type: "range", min: 0, max: dial.values.length - 1, step: 1, value: 0 });
      const text = document.createElement("span");
      label.prepend(text);
      box.append(slider);
      slider.setAttribute("aria-label", dial.name);
      const tell = () => { text.textContent = told(); slider.setAttribute("aria-valuetext", told()); };
      slider.addEventListener("input", () => { at[d] = Number(slider.value); tell(); show(); });
      tell();
    });
  }

  function show() {
    const page = document.createElement("template");
    page.innerHTML = `<div>${scenes[number()].html}</div>`;
    const fresh = page.content.firstChild, open = rest.querySelector("details")?.open;
    body.replaceChildren(...fresh.querySelectorAll(".lk-title, .lk-stage"));
    rest.replaceChildren(...fresh.querySelectorAll(".lk-note, details"));
    if (open) rest.querySelector("details").open = true;
    root.setAttribute("aria-label", body.querySelector(".lk-title").firstChild.textContent);
    say.textContent = body.querySelector(".lk-title").firstChild.textContent;
    begin();
  }

  // What a block waits for, and what waits for it; as `needs` in labkit.pipeline.schedule.
  function around({ variant }, [kind, microBatch, stage]) {
    const name = (k, s) => variant.found.get(key(k, microBatch, s));
    const needs = kind === "F" ? [name("F", stage - 1)]
      : kind === "B" ? [name("F", stage), name("B", stage + 1)] : [name("B", stage)];
    const frees = [kind === "W" ? null : name(kind, stage + STEP[kind]),
      kind === "F" ? name("B", stage) : kind === "B" ? name("W", stage) : null];
    return { needs: needs.filter(Boolean), frees: frees.filter(Boolean) };
  }

  function choose(row, n) {
    chosen = { row, n };
    const { variant, v, rank, events } = rows[row], event = events[n], { needs, frees } = around(rows[row], event);
    const { focus } = scenes[number()];
    for (const layout of ["wide", "narrow"]) {
      const frame = body.querySelector(`.lk-${layout} .lk-frame`), place = focus[layout];
      frame.querySelector(".lk-chosen")?.remove();
      const group = document.createElementNS(SVG, "g");
      group.setAttribute("class", "lk-chosen");
      const box = (cls, where) => group.append(outline(cls, place, v, where));
      needs.forEach((one) => box("lk-needs", one));
      frees.forEach((one) => box("lk-frees", one));
      box("lk-here", { rank, event });
      name(group, word(variant, rank, event));
      frame.append(group);
    }
    const list = (found) => found.map((one) =>
      fill(words.on, { word: word(variant, one.rank, one.event), rank: one.rank })).join(", ") || words.nothing;
    say.textContent = fill(words.said, {
      variant: focus.variants.length > 1 ? `${variant.name}, ` : "", word: word(variant, rank, event), rank,
      start: time(event[3]), end: time(event[4]), needs: list(needs), frees: list(frees),
    });
  }

  function outline(cls, { left, scale, tops, block }, v, { rank, event }) {
    const box = document.createElementNS(SVG, "rect");
    const at = { x: left + event[3] * scale, y: tops[v][rank] + (event[0] === "F" ? 0 : LIFT),
      width: Math.max((event[4] - event[3]) * scale, 1), height: block, class: cls };
    for (const [name, value] of Object.entries(at)) box.setAttribute(name, value);
    return box;
  }

  // The word of the chosen block, above it: many blocks are too narrow for theirs.
  function name(group, words) {
    const box = group.lastChild, text = document.createElementNS(SVG, "text");
    text.textContent = words;
    const x = Number(box.getAttribute("x")) + Number(box.getAttribute("width")) / 2;
    const at = { x: Math.max(x, 16), y: Number(box.getAttribute("y")) - 5, "font-size": 13, "text-anchor": "middle", class: "lk-big" };
    for (const [name, value] of Object.entries(at)) text.setAttribute(name, value);
    group.append(text);
  }

  const word = (variant, rank, [kind, microBatch, stage]) =>
    variant.several[rank] ? key(kind, microBatch, stage) : `${kind}${microBatch}`;
  const time = (value) => `${Number(value.toPrecision(4))} ${words.unit}`.trim();

  // The block of a row that is the nearest in time.
  function nearest(events, middle) {
    const far = (event) => Math.abs((event[3] + event[4]) / 2 - middle);
    return events.reduce((best, event, n) => (far(event) < far(events[best]) ? n : best), 0);
  }

  function move(key) {
    if (chosen === null) return choose(rows.findIndex((row) => row.events.length), 0);
    const { row, n } = chosen, { events } = rows[row], last = events.length - 1;
    if (key === "Home") return choose(row, 0);
    if (key === "End") return choose(row, last);
    if (key === "ArrowLeft") return choose(row, Math.max(0, n - 1));
    if (key === "ArrowRight") return choose(row, Math.min(last, n + 1));
    const other = row + (key === "ArrowUp" ? -1 : 1);
    if (rows[other]?.events.length) choose(other, nearest(rows[other].events, (events[n][3] + events[n][4]) / 2));
  }

  function leave() {
    const cell = root.closest(".jp-Cell");
    if (cell) cell.focus();
    else document.activeElement.blur();
  }

  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const drawn = event.target.closest(".lk-stage");
    if (event.key === "Escape") leave();
    else if (drawn && /^(Arrow.*|Home|End)$/.test(event.key)) move(event.key);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  root.addEventListener("click", (event) => {
    const svg = event.target.closest(".lk-svg");
    if (!svg) return;
    const place = scenes[number()].focus[svg.closest(".lk-wide") ? "wide" : "narrow"];
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const row = rows.findIndex(({ v, rank, events }) => {
      const y = point.y - place.tops[v][rank];
      return events.length && y >= 0 && y <= place.block + LIFT;
    });
    if (row >= 0) choose(row, nearest(rows[row].events, (point.x - place.left) / place.scale));
  });

  begin();
}

function render({ model, el }) {
  const data = model.get("data");
  el.innerHTML = data.html;
  attach(el.querySelector(".lk"), data);
}

export default { render };
