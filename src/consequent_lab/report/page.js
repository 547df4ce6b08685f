"use strict";

// What is shown of a figure is what its inputs say: the checked columns, scales and curves. Whatever changes one has the
// panels drawn again.
class Figure {
  constructor(element, data) {
    Object.assign(this, { element, data, switched: {} }); // scales that were switched, by direction
    const plots = [...element.querySelectorAll(".plot")];
    this.charts = data.panels.map((panel, number) => (plots[number]?.hidden ?? true ? null : new Chart(plots[number], panel, data.styles)));
    this.charts.find(Boolean)?.svg.setAttribute("id", `chart-${data.name}`); // the list of figures shows it small
    this.curves = [...element.querySelectorAll("[data-group]")];
    this.all = element.querySelector("[data-all]");
    element.addEventListener("change", ({ target: { checked, dataset: { direction, log } } }) => {
      if (log) this.switched[log] = checked;
      if (direction) delete this.switched[direction];
      this.draw();
    });
    this.all?.addEventListener("click", () => this.show(() => true));
    for (const curve of this.curves) curve.addEventListener("dblclick", () => this.show((other) => other === curve));
  }

  show(isShown) {
    for (const curve of this.curves) curve.checked = isShown(curve);
    this.draw();
  }

  draw() {
    const chosen = [...this.element.querySelectorAll("[data-direction]:checked")];
    const hidden = new Set(this.curves.filter((curve) => !curve.checked).map((curve) => Number(curve.dataset.group)));
    const views = this.data.panels.map((panel) => {
      const [axes, log] = [{}, {}];
      for (const direction of ["x", "y"]) {
        const isChosen = ({ column }) => chosen.some(({ value, dataset }) => dataset.direction === direction && value === column);
        axes[direction] = panel[direction].find(isChosen) ?? panel[direction][0];
        log[direction] = panel.equalScales ? axes[direction].log : this.switched[direction] ?? axes[direction].log;
      }
      return { axes, log, hidden };
    });
    for (const scale of this.element.querySelectorAll("[data-log]")) {
      const some = views.filter((view, number) => !this.data.panels[number].equalScales);
      scale.checked = some.some(({ log }) => log[scale.dataset.log]);
      scale.disabled = !some.every(({ axes }) => axes[scale.dataset.log].hasLog);
    }
    if (this.all) this.all.hidden = hidden.size === 0;
    views.forEach((view, number) => this.charts[number]?.draw(view));
  }
}

const data = new Map(JSON.parse(document.getElementById("figures").textContent).map((figure) => [figure.name, figure]));
const figures = new Map([...document.querySelectorAll(".figure")].map((element) => [element, new Figure(element, data.get(element.dataset.figure))]));

// They are drawn when they get their size, and again when it changes.
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) figures.get(target).draw();
});
for (const element of figures.keys()) resized.observe(element);

addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details.runs")) details.open = true;
});

document.querySelector(".contents details").open = matchMedia("(min-width: 80rem)").matches;

// ---- tables -----------------------------------------------------------------------------------------------------

function sortTable(head) {
  const descending = head.getAttribute("aria-sort") === "ascending";
  const body = head.closest("table").tBodies[0];
  const numeric = head.classList.contains("numeric");
  const value = (row) => {
    const cell = row.cells[head.cellIndex];
    if (!numeric) return cell.textContent;
    return "value" in cell.dataset ? Number(cell.dataset.value) : null;
  };
  const compare = (one, other) => (numeric ? one - other : one.localeCompare(other, "en", { numeric: true }));
  const rows = [...body.rows].sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    if (one === null || other === null) return (one === null) - (other === null); // what is missing comes last
    return descending ? compare(other, one) : compare(one, other);
  });
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  body.append(...rows);
}

for (const head of document.querySelectorAll(".table-box th")) {
  head.querySelector("button").addEventListener("click", () => sortTable(head));
}
