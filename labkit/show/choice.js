// Several players, of which one is looked at; the page shows the one that is chosen without any of this.
function choose(root, players) {
  const stops = [...root.querySelectorAll(":scope > .lk-panel > .lk")].map((panel, n) => attach(panel, players[n]));
  const form = root.querySelector(":scope > form");
  form.addEventListener("change", () => stops.forEach((stop) => stop()));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      const cell = root.closest(".jp-Cell");
      if (cell) cell.focus();
      else document.activeElement.blur();
    } else if (!event.key.startsWith("Arrow")) return;
    event.stopPropagation();
  });
  return () => stops.forEach((stop) => stop());
}

function render({ model, el }) {
  const data = model.get("data");
  el.innerHTML = data.html;
  return choose(el.querySelector(".lk-choice"), data.players);
}

export default { render };
