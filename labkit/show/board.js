// The page of a schedule builder: it sends commands, clicks and text, and shows what Python answers. No imports.
function make(tag, cls, parent) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  parent.append(node);
  return node;
}

const COMMANDS = { ArrowUp: "up", ArrowDown: "down", ArrowLeft: "left", ArrowRight: "right", Home: "first", End: "last",
  Backspace: "back", r: "repeat", f: "F", b: "B", w: "W" };

function render({ model, el }) {
  const words = model.get("words");
  make("style", "", el).textContent = `.${model.get("hides")}{display:none}`; // the picture that stays in the notebook
  const board = make("div", "lk-board", el);
  board.tabIndex = 0;
  board.setAttribute("role", "application");
  board.setAttribute("aria-label", words.board);
  const panel = make("div", "lk", el);
  const say = make("p", "lk-say", panel);
  say.setAttribute("aria-live", "polite");
  const controls = make("div", "lk-controls", panel);
  for (const [command, label] of words.buttons) {
    const button = make("button", "", controls);
    Object.assign(button, { type: "button", textContent: label });
    button.addEventListener("click", () => model.send({ command }));
  }
  make("p", "lk-keys", panel).textContent = words.keys;
  const form = make("div", "lk-written", panel), label = make("label", "", form);
  label.textContent = words.text;
  const text = make("textarea", "", label);
  text.spellcheck = false;
  const write = make("button", "", make("div", "lk-controls", form));
  Object.assign(write, { type: "button", textContent: words.write });
  const place = () => model.send({ text: text.value });
  write.addEventListener("click", place);
  for (const node of [board, text, ...panel.querySelectorAll("button")]) {
    node.setAttribute("data-lm-suppress-shortcuts", "true"); // else JupyterLab takes the keys
  }

  function show() {
    const state = model.get("state"), before = board.querySelectorAll(".lk-stage");
    const kept = [...before].map((stage) => stage.scrollLeft);
    const page = document.createElement("template");
    page.innerHTML = state.html;
    const fresh = page.content.firstChild;
    fresh.querySelector("details").remove();
    for (const stage of fresh.querySelectorAll(".lk-stage")) stage.removeAttribute("tabindex"); // the board has the keys
    board.replaceChildren(fresh);
    board.querySelectorAll(".lk-stage").forEach((stage, n) => { stage.scrollLeft = kept[n] ?? 0; follow(stage); });
    say.textContent = state.said;
    if (document.activeElement !== text) text.value = state.text;
    text.rows = state.text.split("\n").length + 1;
  }

  // Scrolls inside the picture only: scrollIntoView would move the page.
  function follow(stage) {
    const cursor = stage.querySelector(".lk-cursor");
    if (!cursor || !stage.clientWidth) return;
    const seen = cursor.getBoundingClientRect(), box = stage.getBoundingClientRect(), names = 70;
    if (seen.left < box.left + names || seen.right > box.right) stage.scrollLeft += seen.left - box.left - box.width / 2;
  }

  board.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const command = COMMANDS[event.key] ?? COMMANDS[event.key.toLowerCase()];
    if (event.key === "Escape") (el.closest(".jp-Cell") ?? { focus: () => board.blur() }).focus();
    else if (command) model.send({ command });
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  text.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { place(); event.preventDefault(); }
    if (event.key === "Escape") board.focus();
  });
  text.addEventListener("blur", () => { text.value = text.value.trim() ? text.value : model.get("state").text; });
  board.addEventListener("click", (event) => {
    const cell = event.target.closest("[data-cell]");
    board.focus();
    if (cell) model.send({ cell: cell.dataset.cell.split(" ").map(Number) });
  });

  model.on("change:state", show);
  show();
  return () => model.off("change:state", show);
}

export default { render };
