// Plays frames that Python made. No imports, no network, no kernel: a key swaps the content of one <g>.
const ICONS = {
  first: "M2 2h2v12H2zM14 2v12L5 8z",
  back: "M10.5 2 12 3.5 7.5 8l4.5 4.5-1.5 1.5L4.5 8z",
  play: "M4 2v12l10-6z",
  pause: "M3 2h4v12H3zM9 2h4v12H9z",
  next: "M5.5 2 4 3.5 8.5 8 4 12.5 5.5 14 11.5 8z",
  last: "M2 2v12l9-6zM12 2h2v12h-2z",
};

function icon(button, name, label) {
  button.innerHTML = `<svg viewBox="0 0 16 16" aria-hidden="true"><path d="${ICONS[name]}"/></svg>`;
  button.setAttribute("aria-label", label);
  button.title = label;
}

function make(tag, cls, parent) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  parent.append(node);
  return node;
}

function attach(root, { wide, narrow, says, start, follow: chunks, pace, words }) {
  const last = says.length - 1;
  let at = start;
  let followed = null;
  let timer = null;

  const layouts = [[".lk-wide", wide], [".lk-narrow", narrow]].map(([selector, data]) => {
    const stage = root.querySelector(selector);
    return { stage, frame: stage.querySelector(".lk-frame"), data };
  });
  const controls = make("div", "lk-controls", root.querySelector(".lk-player"));
  controls.setAttribute("role", "group");
  controls.setAttribute("aria-label", words.controls);
  const buttons = {};
  const actions = { first: () => go(0), back: () => go(at - 1), play: toggle, next: () => go(at + 1), last: () => go(last) };
  for (const name of Object.keys(actions)) {
    buttons[name] = make("button", "", controls);
    buttons[name].type = "button";
    icon(buttons[name], name, words[name]);
    buttons[name].addEventListener("click", () => {
      if (name !== "play") stop();
      actions[name]();
    });
  }
  const slider = make("input", "", controls);
  Object.assign(slider, { type: "range", min: 1, max: last + 1, step: 1 });
  slider.setAttribute("aria-label", words.slider);
  slider.addEventListener("input", () => { stop(); go(slider.value - 1); });
  const say = make("p", "lk-say", root.querySelector(".lk-player"));
  say.setAttribute("aria-live", "polite");
  const marks = chunks.length ? offer() : {};
  make("p", "lk-keys", root.querySelector(".lk-player")).textContent = words.keys + (chunks.length ? words.follow_keys : "");

  // JupyterLab looks at the focused element itself: without this its own shortcuts take the keys.
  for (const { stage } of layouts) stage.tabIndex = 0;
  for (const node of root.querySelectorAll("button, input, summary, [tabindex]")) {
    node.setAttribute("data-lm-suppress-shortcuts", "true");
  }

  function go(to) {
    at = Math.max(0, Math.min(last, to));
    for (const { stage, frame, data } of layouts) {
      frame.innerHTML = data.frames[at].map((part) => data.parts[part]).join("");
      scroll(stage, frame.querySelector(".lk-band"));
    }
    mark();
    slider.value = at + 1;
    slider.setAttribute("aria-valuetext", says[at]);
    say.textContent = says[at];
  }

  // A chunk to follow through all frames: a button each, its number's key, or a click on what belongs to it.
  function offer() {
    const row = make("div", "lk-controls lk-follow", root.querySelector(".lk-player"));
    row.setAttribute("role", "group");
    row.setAttribute("aria-label", words.follow);
    make("span", "", row).textContent = words.follow;
    for (const { stage } of layouts) {
      stage.addEventListener("click", (event) => {
        const node = event.target.closest("[data-chunk]");
        if (node) follow(node.dataset.chunk.split(" ")[0]);
      });
    }
    return Object.fromEntries(chunks.map((chunk) => {
      const button = make("button", "", row);
      Object.assign(button, { type: "button", textContent: chunk });
      button.addEventListener("click", () => follow(chunk));
      return [chunk, button];
    }));
  }

  function follow(chunk) {
    followed = chunk === followed ? null : chunk;
    mark();
  }

  function mark() {
    root.classList.toggle("lk-following", followed !== null);
    for (const chunk of chunks) marks[chunk].setAttribute("aria-pressed", String(chunk === followed));
    for (const { frame } of layouts) {
      for (const node of frame.querySelectorAll("[data-chunk]")) {
        node.classList.toggle("lk-followed", node.dataset.chunk.split(" ").includes(followed));
      }
    }
  }

  // Scrolls inside the figure only: scrollIntoView would move the page.
  function scroll(stage, band) {
    if (!band || !stage.classList.contains("lk-scroll") || !stage.clientWidth) return;
    const box = stage.getBoundingClientRect(), seen = band.getBoundingClientRect(), strip = 90;
    if (seen.width < seen.height) {
      if (seen.right > box.right || seen.left < box.left + strip) stage.scrollLeft += seen.left - box.left - box.width / 2;
    } else if (seen.bottom > box.bottom || seen.top < box.top + strip) {
      stage.scrollTop += seen.top - box.top - box.height / 2;
    }
  }

  function toggle() {
    if (timer !== null) return stop();
    if (at === last) go(0);
    say.setAttribute("aria-live", "off"); // silent while playing
    icon(buttons.play, "pause", words.pause);
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    timer = setInterval(() => (at < last ? go(at + 1) : stop()), pace[calm ? 1 : 0]);
  }

  function stop() {
    if (timer === null) return;
    clearInterval(timer);
    timer = null;
    icon(buttons.play, "play", words.play);
    say.setAttribute("aria-live", "polite");
    say.textContent = "";
    requestAnimationFrame(() => { say.textContent = says[at]; }); // said once, now that it stands still
  }

  function leave() {
    stop();
    const cell = root.closest(".jp-Cell");
    if (cell) cell.focus();
    else document.activeElement.blur();
  }

  const keys = { ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last" };
  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("details")) return;
    const space = event.key === " " && event.target.tagName !== "BUTTON"; // a button's own space presses it
    if (keys[event.key]) { stop(); actions[keys[event.key]](); }
    else if (space) toggle();
    else if (chunks.includes(event.key)) follow(event.key);
    else if (event.key === "Escape") leave();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  go(start);
  return stop;
}

function render({ model, el }) {
  const data = model.get("data");
  el.innerHTML = data.html;
  return attach(el.querySelector(".lk"), data);
}

export default { render };
