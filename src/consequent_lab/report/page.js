"use strict";

// A figure has one state: the chosen columns, the scales and the hidden groups. Whatever changes it has its panels drawn
// again.

// ---- figures ----------------------------------------------------------------------------------------------------

class Figure {
  constructor(element, data) {
    this.element = element;
    this.data = data;
    const plots = [...element.querySelectorAll(".plot")];
    this.charts = data.panels.map((panel, number) => (plots[number]?.hidden ?? true ? null : new Chart(plots[number], panel, data.styles)));
    this.columns = data.panels.map((panel) => ({ x: panel.x[0].column, y: panel.y[0].column })); // shown, by panel
    this.logs = new Map(); // of columns that were switched; the others are as their axis says
    this.hidden = new Set();
    const on = (selector, type, action) => {
      for (const button of element.querySelectorAll(selector)) {
        button.addEventListener(type, () => { action(button.dataset); this.update(); });
      }
    };
    on("[data-column]", "click", ({ direction, column }) => this.choose(direction, column));
    on("[data-log]", "click", ({ log: direction }) => {
      const log = !this.isLog(direction);
      for (const axis of this.axesShown(direction)) this.logs.set(axis.column, log);
    });
    on("[data-group]", "click", ({ group }) => { if (!this.hidden.delete(Number(group))) this.hidden.add(Number(group)); });
    on("[data-group]", "dblclick", ({ group }) => {
      this.hidden = new Set(data.styles.keys());
      this.hidden.delete(Number(group));
    });
    on("[data-all]", "click", () => this.hidden.clear());
    this.updateControls();
  }

  choose(direction, column) {
    this.data.panels.forEach((panel, number) => {
      if (panel[direction].some((axis) => axis.column === column)) this.columns[number][direction] = column;
    });
  }

  axisOf(panel, direction) {
    const column = this.columns[this.data.panels.indexOf(panel)][direction];
    return panel[direction].find((axis) => axis.column === column);
  }

  axesShown(direction) {
    return this.data.panels.filter((panel) => !panel.equalScales).map((panel) => this.axisOf(panel, direction));
  }

  axisIsLog(axis) {
    return this.logs.get(axis.column) ?? axis.log;
  }

  isLog(direction) {
    return this.axesShown(direction).some((axis) => this.axisIsLog(axis));
  }

  update() {
    this.updateControls();
    this.draw();
  }

  updateControls() {
    const press = (button, pressed) => button.setAttribute("aria-pressed", String(pressed));
    for (const button of this.element.querySelectorAll("[data-column]")) {
      const { direction, column } = button.dataset;
      const offering = this.data.panels.filter((panel) => panel[direction].length > 1);
      press(button, offering.some((panel) => this.axisOf(panel, direction).column === column));
    }
    for (const button of this.element.querySelectorAll("[data-log]")) {
      press(button, this.isLog(button.dataset.log));
      button.disabled = !this.axesShown(button.dataset.log).every((axis) => axis.hasLog);
    }
    for (const button of this.element.querySelectorAll("[data-group]")) press(button, !this.hidden.has(Number(button.dataset.group)));
    const all = this.element.querySelector("[data-all]");
    if (all) all.hidden = this.hidden.size === 0;
  }

  draw() {
    this.data.panels.forEach((panel, number) => this.charts[number]?.draw(this.view(panel)));
  }

  view(panel) {
    const axes = { x: this.axisOf(panel, "x"), y: this.axisOf(panel, "y") };
    return { axes, log: { x: this.axisIsLog(axes.x), y: this.axisIsLog(axes.y) }, hidden: this.hidden };
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

// ---- verdicts: those of one kind alone ---------------------------------------------------------------------------

const counts = [...document.querySelectorAll(".count")];
for (const button of counts) {
  button.addEventListener("click", () => {
    const only = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.mark;
    for (const other of counts) other.setAttribute("aria-pressed", String(other.dataset.mark === only));
    for (const group of document.querySelectorAll(".statement-group")) {
      const statements = [...group.querySelectorAll(".statement")];
      for (const statement of statements) statement.hidden = only !== null && statement.dataset.mark !== only;
      group.hidden = statements.every((statement) => statement.hidden);
    }
  });
}

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
