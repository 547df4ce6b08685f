"use strict";

// One coordinate system as an SVG picture: axes, curves, contours; the point under the mouse is told, dragging zooms.
// Colours are variables of the style sheet, so that a change of theme needs no new picture.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, parent = null, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  parent?.append(made);
  return made;
}

function shown(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(size < 1e-3 ? 1 : 2).replace(".0e", "e").replace("-", "−");
  return Number(value.toPrecision(4)).toLocaleString("en-GB", { maximumFractionDigits: 6 }).replace("-", "−");
}

// Numbers to write along an axis: 1, 2 or 5 times powers of ten; on a logarithmic axis powers alone, if there are enough.
function ticks(low, high, log, most) {
  const found = [];
  if (log) {
    const decades = Math.log10(high / low);
    const every = Math.max(1, Math.ceil(decades / most));
    const steps = decades < 2.2 ? [1, 2, 5] : [1];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
      if (((power % every) + every) % every) continue;
      for (const step of steps) found.push(step * 10 ** power);
    }
    return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  }
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + 1e-9 * step; number += 1) found.push(number * step);
  return found;
}

// From data to pixels along one direction.
class Scale {
  constructor([low, high], [from, to], log) {
    Object.assign(this, { low, high, from, to, log });
    [this.a, this.b] = log ? [Math.log(low), Math.log(high)] : [low, high];
  }

  pixel(value) {
    return this.from + (((this.log ? Math.log(value) : value) - this.a) / (this.b - this.a)) * (this.to - this.from);
  }

  value(pixel) {
    const at = this.a + ((pixel - this.from) / (this.to - this.from)) * (this.b - this.a);
    return this.log ? Math.exp(at) : at;
  }
}

class Chart {
  // host: an empty element of some size; panel: its data.
  constructor(host, panel, styles) {
    Object.assign(this, { host, panel, styles });
    this.zoom = { x: null, y: null };
    this.svg = element("svg", { class: "chart" }, null);
    host.append(this.svg);
    this.tip = host.appendChild(document.createElement("div"));
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.reset = host.appendChild(document.createElement("button"));
    Object.assign(this.reset, { type: "button", className: "reset", textContent: "Reset zoom", hidden: true });
    this.reset.addEventListener("click", () => this.unzoom());
    this.svg.addEventListener("pointermove", (event) => this.moved(event));
    this.svg.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.svg.addEventListener("pointerdown", (event) => this.pressed(event));
    this.svg.addEventListener("pointerup", (event) => this.released(event));
    this.svg.addEventListener("dblclick", () => this.unzoom());
  }

  unzoom() {
    this.zoom = { x: null, y: null };
    this.draw(this.view);
  }

  // view: the axes {x, y}, whether each is logarithmic {x, y}, and the groups that are hidden.
  draw(view) {
    const moved = (direction) => !this.view || this.view.axes[direction].column !== view.axes[direction].column || this.view.log[direction] !== view.log[direction];
    for (const direction of ["x", "y"]) if (moved(direction)) this.zoom[direction] = null;
    this.view = { ...view, hidden: new Set(view.hidden) };
    this.svg.replaceChildren();
    const { width, height } = this.host.getBoundingClientRect();
    if (width < 20 || height < 20) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.curves = this.panel.curves.filter((curve) => !view.hidden.has(curve.group));
    const ranges = { x: this.range("x"), y: this.range("y") };
    const marks = ticks(...ranges.y, view.log.y, 6).map(shown);
    const left = 30 + 6.6 * Math.max(2, ...marks.map((mark) => mark.length));
    const box = { left, right: width - 12, top: 8, bottom: height - 42 };
    if (this.panel.equalScales) this.widen(ranges, box);
    this.x = new Scale(ranges.x, [box.left, box.right], view.log.x);
    this.y = new Scale(ranges.y, [box.bottom, box.top], view.log.y);
    this.box = box;
    this.drawAxes();
    const clip = `clip-${Chart.count = (Chart.count ?? 0) + 1}`;
    const frame = element("clipPath", { id: clip }, this.svg);
    element("rect", { x: box.left - 2, y: box.top - 4, width: box.right - box.left + 4, height: box.bottom - box.top + 8 }, frame);
    this.inside = element("g", { "clip-path": `url(#${clip})` }, this.svg);
    for (const [xs, ys] of this.panel.contours ?? []) element("path", { class: "contour", d: this.line(xs, ys) }, this.inside);
    for (const curve of this.curves) this.drawCurve(curve);
    this.reset.hidden = !this.zoom.x && !this.zoom.y;
  }

  // What is shown along a direction: the zoom, the contours' extent, or all that the curves have, with a little room.
  range(direction) {
    if (this.zoom[direction]) return this.zoom[direction];
    const column = this.view.axes[direction].column;
    const log = this.view.log[direction];
    if (this.panel.extent) return this.panel.extent[direction];
    let [low, high] = [Infinity, -Infinity];
    const curves = this.curves.length ? this.curves : this.panel.curves;
    for (const curve of curves) {
      for (const value of curve.columns[column]) {
        if (value === null || (log && value <= 0)) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (low > high) return log ? [0.1, 1] : [0, 1];
    if (low === high) return log ? [low / 2, low * 2] : [low - 0.5, low + 0.5];
    const isLength = direction === "x" && !this.panel.equalScales; // a panel is as long as its curves
    const room = isLength ? (this.panel.pointsAlone ? 0.05 : 0) : 0.04;
    if (log) return [low / (high / low) ** room, high * (high / low) ** room];
    return [low - room * (high - low), high + room * (high - low)];
  }

  // A unit of x becomes as long as one of y: the shorter direction shows more.
  widen(ranges, box) {
    const unit = { x: (box.right - box.left) / (ranges.x[1] - ranges.x[0]), y: (box.bottom - box.top) / (ranges.y[1] - ranges.y[0]) };
    const [direction, ratio] = unit.x > unit.y ? ["x", unit.x / unit.y] : ["y", unit.y / unit.x];
    const [low, high] = ranges[direction];
    const more = ((high - low) * (ratio - 1)) / 2;
    ranges[direction] = [low - more, high + more];
  }

  drawAxes() {
    const { left, right, top, bottom } = this.box;
    const axes = element("g", { class: "axes" }, this.svg);
    for (const value of ticks(this.x.low, this.x.high, this.x.log, Math.max(2, (right - left) / 48))) {
      const at = this.x.pixel(value);
      element("line", { class: "grid", x1: at, x2: at, y1: top, y2: bottom }, axes);
      element("text", { x: at, y: bottom + 16, "text-anchor": "middle" }, axes, shown(value));
    }
    for (const value of ticks(this.y.low, this.y.high, this.y.log, 6)) {
      const at = this.y.pixel(value);
      element("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }, axes);
      element("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, axes, shown(value));
    }
    element("path", { class: "frame", d: `M${left} ${top}V${bottom}H${right}` }, axes);
    element("text", { class: "xtitle", x: (left + right) / 2, y: bottom + 36, "text-anchor": "middle" }, axes, this.view.axes.x.title);
    const middle = (top + bottom) / 2;
    element("text", { class: "ytitle", x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` }, axes, this.view.axes.y.title);
  }

  // The path of a line; it has a gap where nothing was measured, or nothing that a logarithm can show.
  line(xs, ys) {
    let [path, pen] = ["", "M"];
    xs.forEach((x, place) => {
      const y = ys[place];
      if (x === null || y === null || (this.x.log && x <= 0) || (this.y.log && y <= 0)) { pen = "M"; return; }
      path += `${pen}${this.x.pixel(x).toFixed(1)} ${this.y.pixel(y).toFixed(1)}`;
      pen = "L";
    });
    return path;
  }

  columns(curve) {
    return [curve.columns[this.view.axes.x.column], curve.columns[this.view.axes.y.column]];
  }

  drawCurve(curve) {
    const style = this.styles[curve.group];
    const faint = curve.role === "one of several";
    const group = element("g", { class: faint ? "curve faint" : "curve", style: `--light:${style.colour.light};--dark:${style.colour.dark}` }, this.inside);
    const [xs, ys] = this.columns(curve);
    const path = this.line(xs, ys);
    if (curve.style !== "markers") {
      const width = faint ? 1 : style.width;
      element("path", { class: "line", d: path, "stroke-width": width, "stroke-dasharray": faint ? "none" : style.dashes }, group);
    }
    if (curve.style === "line" || (faint && curve.style !== "markers")) return;
    for (const [, x, y] of path.matchAll(/[ML]([-\d.]+) ([-\d.]+)/g)) {
      if (curve.style === "markers") element("use", { href: `#symbol-${style.symbol}`, x: x - 17, y: y - 6, width: 34, height: 12 }, group);
      else element("circle", { class: "dot", cx: x, cy: y, r: 2.6 }, group);
    }
  }

  // ---- the mouse ------------------------------------------------------------------------------------------------

  place(event) {
    const { left, top } = this.host.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  }

  moved(event) {
    const at = this.place(event);
    if (this.start) { this.drawFrame(at); return; }
    let nearest = { distance: 40 };
    for (const curve of this.curves ?? []) {
      const [xs, ys] = this.columns(curve);
      xs.forEach((x, number) => {
        const y = ys[number];
        if (x === null || y === null) return;
        const distance = Math.hypot(this.x.pixel(x) - at.x, this.y.pixel(y) - at.y);
        if (distance < nearest.distance) nearest = { distance, x, y, curve };
      });
    }
    this.tip.hidden = !nearest.curve;
    if (!nearest.curve) return;
    const { axes } = this.view;
    this.tip.replaceChildren();
    this.tip.append(Object.assign(document.createElement("b"), { textContent: nearest.curve.label }), `${axes.x.title}: ${shown(nearest.x)}`, document.createElement("br"), `${axes.y.title}: ${shown(nearest.y)}`);
    const [x, y] = [this.x.pixel(nearest.x), this.y.pixel(nearest.y)];
    this.tip.style.left = `${Math.min(x + 12, this.host.clientWidth - this.tip.offsetWidth)}px`;
    this.tip.style.top = `${y > 70 ? y - this.tip.offsetHeight - 8 : y + 14}px`;
  }

  pressed(event) {
    if (event.pointerType !== "mouse" || event.button !== 0) return; // a finger scrolls the page
    this.start = this.place(event);
    this.svg.setPointerCapture(event.pointerId);
    this.tip.hidden = true;
  }

  drawFrame(at) {
    this.frame ??= element("rect", { class: "zoom" }, this.svg);
    const [x, y] = [Math.min(at.x, this.start.x), Math.min(at.y, this.start.y)];
    for (const [key, value] of Object.entries({ x, y, width: Math.abs(at.x - this.start.x), height: Math.abs(at.y - this.start.y) })) this.frame.setAttribute(key, value);
  }

  released(event) {
    const { start } = this;
    this.start = this.frame = null;
    if (!start) return;
    const end = this.place(event);
    if (Math.abs(end.x - start.x) > 8 && Math.abs(end.y - start.y) > 8) {
      const ends = (scale, one, other) => [scale.value(one), scale.value(other)].sort((a, b) => a - b);
      this.zoom = { x: ends(this.x, start.x, end.x), y: ends(this.y, start.y, end.y) };
    }
    this.draw(this.view);
  }
}
