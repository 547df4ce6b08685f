"use strict";

// The figures are drawn from the data in the page. A figure has one state: the chosen columns, the scales and the
// hidden groups. Whatever changes it has all panels drawn again.

const root = document.documentElement;
const INTERFACE_FONT = getComputedStyle(root).getPropertyValue("--interface");
const coarsePointer = matchMedia("(pointer: coarse)");
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

// ---- theme ------------------------------------------------------------------------------------------------------

const themeButton = document.getElementById("theme");

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : systemIsDark.matches;
}

// A colour of the style sheet, as it is in the present theme.
function colour(name) {
  const probe = document.body.appendChild(document.createElement("span"));
  probe.style.color = `var(--${name})`;
  const resolved = getComputedStyle(probe).color;
  probe.remove();
  return resolved;
}

function remembered() {
  try { return localStorage.getItem("theme"); } catch { return null; } // some browsers forbid it for files
}

function setTheme(theme) {
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  themeButton.setAttribute("aria-pressed", String(isDark()));
  redrawAll();
}

themeButton.addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("theme", theme); } catch { /* it holds until the page is closed */ }
  setTheme(theme);
});
systemIsDark.addEventListener("change", () => setTheme(null));

// ---- figures ----------------------------------------------------------------------------------------------------

// Plotly reads some HTML in its texts, fields in its templates and formulas between dollars; names are text alone.
function asText(text) {
  return text.replace(/[&<>%$]/g, (character) => `&#${character.charCodeAt(0)};`);
}

class Figure {
  constructor(element, data) {
    this.element = element;
    this.data = data;
    this.plots = [...element.querySelectorAll(".plot")];
    this.columns = data.panels.map((panel) => ({ x: panel.x[0].column, y: panel.y[0].column })); // shown, by panel
    this.logs = new Map(); // of columns that were switched; the others are as their axis says
    this.hidden = new Set();
    this.drawn = false;
    for (const button of element.querySelectorAll("[data-column]")) {
      button.addEventListener("click", () => {
        this.choose(button.dataset.direction, button.dataset.column);
        this.update();
      });
    }
    for (const button of element.querySelectorAll("[data-log]")) {
      button.addEventListener("click", () => {
        const direction = button.dataset.log;
        const log = !this.isLog(direction);
        for (const axis of this.axesShown(direction)) this.logs.set(axis.column, log);
        this.update();
      });
    }
    for (const button of element.querySelectorAll("[data-group]")) {
      const group = Number(button.dataset.group);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(group)) this.hidden.add(group);
        this.update();
      });
      button.addEventListener("dblclick", () => {
        this.hidden = new Set(data.looks.keys());
        this.hidden.delete(group);
        this.update();
      });
    }
    element.querySelector("[data-all]")?.addEventListener("click", () => {
      this.hidden.clear();
      this.update();
    });
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
    return this.data.panels.filter((panel) => !panel.equalScales && !panel.contours).map((panel) => this.axisOf(panel, direction));
  }

  axisIsLog(axis) {
    return this.logs.get(axis.column) ?? axis.log;
  }

  isLog(direction) {
    return this.axesShown(direction).some((axis) => this.axisIsLog(axis));
  }

  update() {
    this.updateControls();
    if (this.drawn) this.draw();
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
    this.drawn = true;
    this.data.panels.forEach((panel, number) => {
      if (!this.plots[number] || this.plots[number].hidden) return; // nothing was measured
      Plotly.react(this.plots[number], this.traces(panel), this.layout(panel), {
        responsive: true,
        displaylogo: false,
        displayModeBar: coarsePointer.matches ? true : "hover",
        modeBarButtons: [
          ...(coarsePointer.matches ? [] : [["toImage"], ["zoom2d", "pan2d"]]),
          ["zoomIn2d", "zoomOut2d", "resetScale2d"],
        ],
        toImageButtonOptions: { filename: this.data.name },
      });
    });
  }

  traces(panel) {
    const x = this.axisOf(panel, "x");
    const y = this.axisOf(panel, "y");
    const traces = panel.contours ? [contourTrace(panel.contours)] : [];
    for (const curve of panel.curves) {
      const look = this.data.looks[curve.group];
      const stroke = isDark() ? look.colour.dark : look.colour.light;
      const faint = curve.role === "one of several";
      const mode = { markers: "markers", "line+markers": "lines+markers" }[curve.style] ?? "lines";
      traces.push({
        type: "scatter",
        mode: faint && mode !== "markers" ? "lines" : mode,
        x: curve.columns[x.column],
        y: curve.columns[y.column],
        name: asText(curve.label),
        meta: asText(curve.label),
        legendgroup: String(curve.group),
        visible: !this.hidden.has(curve.group),
        opacity: faint ? 0.38 : 1,
        line: {
          color: stroke,
          width: faint ? 1 : look.width,
          dash: curve.dash,
        },
        marker: {
          color: stroke,
          size: curve.style === "markers" ? 10 : 5.5,
          symbol: look.symbol === "x" ? "x-thin" : look.symbol,
          line: { color: stroke, width: look.symbol === "x" ? 2.6 : 0 },
        },
        hovertemplate: `<b>%{meta}</b><br>${asText(x.title)} %{x:,.6~g}<br>${asText(y.title)} %{y:,.4~g}<extra></extra>`,
      });
    }
    return traces;
  }

  layout(panel) {
    const [ink, quiet, line, card] = ["ink", "quiet", "line", "card"].map(colour);
    const fixed = panel.equalScales || panel.contours;
    const axis = (direction) => {
      const shown = this.axisOf(panel, direction);
      const log = fixed ? shown.log : this.axisIsLog(shown);
      return {
        title: { text: asText(shown.title), standoff: 8, font: { size: 13, color: quiet } },
        type: log ? "log" : "linear",
        uirevision: `${shown.column} ${log}`, // a zoom lasts until its axis changes
        tickformat: ",.6~g",
        gridcolor: line,
        linecolor: line,
        zeroline: false,
        ticks: "outside",
        ticklen: 4,
        tickcolor: line,
        tickfont: { size: 12, color: quiet },
        automargin: true,
        nticks: log ? Math.min(8, Math.max(3, Math.floor(shown.decades / 0.7))) : 7, // powers of ten, or 1, 2, 5 if they are few
        ...(panel.contours && { range: [panel.contours[direction][0], panel.contours[direction].at(-1)] }),
      };
    };
    // Contours keep their rectangle; elsewhere the shorter direction shows more than the curves need.
    const equal = panel.equalScales ? { constrain: panel.contours ? "domain" : "range" } : {};
    return {
      xaxis: { ...axis("x"), ...equal },
      yaxis: { ...axis("y"), ...equal, ...(panel.equalScales && { scaleanchor: "x", scaleratio: 1 }) },
      autosize: true,
      margin: { l: 12, r: 14, t: coarsePointer.matches ? 48 : 12, b: 12 }, // fingers have the buttons always there
      showlegend: false, // the buttons above are the legend of all panels
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: INTERFACE_FONT, color: ink },
      hovermode: "closest",
      hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink, size: 13 }, align: "left" },
      dragmode: coarsePointer.matches ? false : "zoom", // a finger on a figure scrolls the page
      modebar: { bgcolor: "rgba(0,0,0,0)", color: quiet, activecolor: ink },
      uirevision: "kept",
    };
  }
}

// Square roots of the heights: for a parabola the lines then lie at equal distances.
function contourTrace({ x, y, heights }) {
  const lowest = Math.min(...heights.flat());
  return {
    type: "contour",
    x,
    y,
    z: heights.map((row) => row.map((height) => Math.sqrt(height - lowest))),
    colorscale: [[0, colour("valley")], [1, colour("card")]],
    ncontours: 16,
    line: { width: 0.8, color: colour("contour") },
    showscale: false,
    hoverinfo: "skip",
  };
}

const data = JSON.parse(document.getElementById("figures").textContent);
const figures = [...document.querySelectorAll(".figure")].map((element) => new Figure(element, data[Number(element.dataset.figure)]));

function redrawAll() {
  for (const figure of figures) if (figure.drawn) figure.draw();
}

// Figures are drawn when they come near: a phone has the first one at once.
const nearby = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    nearby.unobserve(entry.target);
    figures.find((figure) => figure.element === entry.target).draw();
  }
}, { rootMargin: "800px" });
for (const figure of figures) nearby.observe(figure.element);

// Paper is light, narrow, and shows everything at once.
let themeOnScreen;
function drawForPrint(starts) {
  if (starts) themeOnScreen = root.dataset.theme;
  root.classList.toggle("printing", starts);
  if (starts) root.dataset.theme = "light";
  else if (themeOnScreen) root.dataset.theme = themeOnScreen;
  else delete root.dataset.theme;
  for (const figure of figures) {
    figure.draw();
    for (const plot of figure.plots) if (!plot.hidden) Plotly.Plots.resize(plot);
  }
}
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details.runs")) details.open = true;
  drawForPrint(true);
});
addEventListener("afterprint", () => drawForPrint(false));

setTheme(remembered());

// ---- overview ---------------------------------------------------------------------------------------------------

const counts = [...document.querySelectorAll(".count")];
for (const button of counts) {
  button.addEventListener("click", () => {
    const only = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.mark;
    for (const other of counts) other.setAttribute("aria-pressed", String(other.dataset.mark === only));
    for (const item of document.querySelectorAll(".summary-list > li")) {
      const statements = [...item.querySelectorAll("li")];
      for (const statement of statements) statement.hidden = only !== null && statement.dataset.mark !== only;
      item.hidden = statements.every((statement) => statement.hidden);
    }
  });
}

// ---- contents: the section that is being read ------------------------------------------------------------------

const contents = document.querySelector(".contents details");
contents.open = matchMedia("(min-width: 80rem)").matches;
const links = new Map([...contents.querySelectorAll("a")].map((link) => [link.hash.slice(1), link]));
const reading = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    for (const [id, link] of links) {
      if (id === entry.target.id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }
}, { rootMargin: "-20% 0px -75% 0px" });
for (const id of links.keys()) reading.observe(document.getElementById(id));

// ---- commands ---------------------------------------------------------------------------------------------------

const announcement = document.getElementById("announcement");

async function copy(text, source) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not every browser allows it for a file: leave the text selected, to be copied by hand
    getSelection().selectAllChildren(source);
    return document.execCommand("copy");
  }
  return true;
}

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const source = button.parentElement.querySelector("code");
    const told = (await copy(source.textContent, source)) ? "Copied" : "Selected";
    button.textContent = announcement.textContent = told;
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  });
}

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

for (const head of document.querySelectorAll("th")) {
  head.querySelector("button").addEventListener("click", () => sortTable(head));
}
