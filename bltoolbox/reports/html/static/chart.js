/* A plot as SVG: lines, axes, values under the pointer, zoom by dragging, wheel and keys. */

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 4", "2 4", "9 4 2 4"];

function svg(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (parent) parent.appendChild(node);
  return node;
}

function html(name, attributes, parent, text) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function say(text) {
  document.getElementById("say").textContent = text;
}

/**
 * options: title, unit, digits (null: as many as it takes), xLabel, logY, logX, named (a single line has a key, too), and lines: [{label, x, y, colour, dash, noisy, dots, hidden}].
 * A line keeps its own places; what is no number is left out.
 */
class Chart {
  constructor(parent, options) {
    this.options = options;
    this.logX = Boolean(options.logX);
    this.logY = Boolean(options.logY);
    this.zoom = null;
    this.cursor = null;
    this.root = html("figure", { class: "chart", "data-chart": options.key || "" }, parent);
    this.root.style.margin = "0";
    const head = html("div", { class: "chart-head" }, this.root);
    html("h3", {}, head, options.title + (options.unit ? ` in ${options.unit}` : ""));
    const tools = html("div", { class: "tools" }, head);
    this.logButton = html("button", { type: "button", "aria-pressed": String(this.logY) }, tools, "log");
    this.logButton.setAttribute("aria-label", `Logarithmic axis for ${options.title}`);
    this.logButton.onclick = () => this.setLogY(!this.logY);
    this.resetButton = html("button", { type: "button" }, tools, "Reset");
    this.resetButton.setAttribute("aria-label", `Reset the zoom of ${options.title}`);
    this.resetButton.onclick = () => this.reset();
    this.plot = html("div", { class: "plot", tabindex: "0", role: "application" }, this.root);
    this.keys = html("div", { class: "keys" }, this.root);
    this.listen();
    this.setLines(options.lines, options.xLabel);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  setLines(lines, xLabel) {
    this.xLabel = xLabel;
    this.lines = lines.map((line) => {
      const points = [];
      line.x.forEach((x, i) => {
        if (x !== null && x !== undefined && line.y[i] !== null && line.y[i] !== undefined) points.push([x, line.y[i]]);
      });
      points.sort((one, other) => one[0] - other[0]);
      const values = points.map((point) => point[1]);
      const mean = line.noisy && points.length > 20 ? runningMean(values, Math.max(1, Math.round(points.length / 20))) : null;
      return { ...line, points, mean };
    });
    this.positive = this.lines.every((line) => line.points.every((point) => point[1] > 0));
    this.logButton.hidden = !this.positive;
    this.zoom = null;
    this.cursor = null;
    this.describe();
    this.makeKeys();
    this.draw();
  }

  describe() {
    const told = this.lines.filter((line) => line.points.length).map((line) => {
      const [first, last] = [line.points[0], line.points[line.points.length - 1]];
      return `${line.label}: ${shown(first[1])} at first, ${shown(last[1])} at the end`;
    });
    this.plot.setAttribute("aria-label", `Plot of ${this.options.title} against ${this.xLabel}. ${told.slice(0, 8).join("; ")}`);
  }

  makeKeys() {
    this.keys.replaceChildren();
    if (this.options.ownKeys === false || this.lines.length < (this.options.named ? 1 : 2)) return;
    for (const line of this.lines) {
      const button = html("button", { type: "button", "aria-pressed": String(!line.hidden) }, this.keys);
      keySample(line, button);
      html("span", {}, button, line.label);
      button.onclick = () => {
        line.hidden = !line.hidden;
        button.setAttribute("aria-pressed", String(!line.hidden));
        this.draw();
      };
    }
  }

  setLogX(on) { this.logX = on; this.zoom = null; this.draw(); }
  setLogY(on) { this.logY = on; this.logButton.setAttribute("aria-pressed", String(on)); this.zoom = null; this.draw(); }
  reset() { this.zoom = null; this.draw(); }

  visible() { return this.lines.filter((line) => !line.hidden && line.points.length); }

  /** The part of the plane that is shown: all data, or what was zoomed to. */
  view() {
    const lines = this.visible();
    const xs = lines.flatMap((line) => line.points.map((point) => point[0]));
    const log = { x: this.logX && xs.some((x) => x > 0), y: this.logY && this.positive };
    const usable = log.x ? xs.filter((x) => x > 0) : xs;
    let [x0, x1] = [Math.min(...usable), Math.max(...usable)];
    if (!lines.length) [x0, x1] = [0, 1];
    if (x0 === x1) [x0, x1] = log.x ? [x0 / 2, x1 * 2] : [x0 - 0.5, x1 + 0.5];
    if (this.zoom) [x0, x1] = this.zoom.x;
    let y = this.zoom && this.zoom.y;
    if (!y) {
      let [low, high] = [Infinity, -Infinity];
      for (const line of lines) for (const [px, py] of line.points) {
        if (px >= x0 && px <= x1) { low = Math.min(low, py); high = Math.max(high, py); }
      }
      if (low > high) [low, high] = log.y ? [0.1, 1] : [0, 1];
      if (log.y) {
        const room = Math.max((high / low) ** 0.06, 1.02);
        y = [low / room, high * room];
      } else {
        const room = 0.07 * (high - low) || 0.05 * Math.abs(high) || 0.5;
        y = [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
      }
    }
    return { x: [x0, x1], y, log };
  }

  draw() {
    const width = this.plot.clientWidth;
    const height = this.plot.clientHeight;
    if (width < 60 || height < 60) return;
    const view = this.view();
    this.shownView = view;
    const yTicks = (view.log.y ? logTicks : linearTicks)(view.y[0], view.y[1], Math.max(2, Math.floor(height / 50)));
    const room = Math.max(34, ...yTicks.map((tick) => 12 + 7 * shown(tick).length));
    const box = { left: room, right: width - 10, top: 8, bottom: height - 38 };
    this.box = box;
    const scale = (value, [low, high], log, from, to) => {
      const share = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
      return from + share * (to - from);
    };
    this.toX = (x) => scale(view.log.x ? Math.max(x, 1e-300) : x, view.x, view.log.x, box.left, box.right);
    this.toY = (y) => scale(y, view.y, view.log.y, box.bottom, box.top);
    const back = (pixel, [low, high], log, from, to) => {
      const share = (pixel - from) / (to - from);
      return log ? low * (high / low) ** share : low + share * (high - low);
    };
    this.fromX = (pixel) => back(pixel, view.x, view.log.x, box.left, box.right);
    this.fromY = (pixel) => back(pixel, view.y, view.log.y, box.bottom, box.top);

    const old = this.plot.querySelector("svg");
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const clip = `clip-${Chart.count = (Chart.count || 0) + 1}`;
    svg("rect", { x: box.left, y: box.top - 2, width: box.right - box.left, height: box.bottom - box.top + 4 }, svg("clipPath", { id: clip }, picture));
    for (const tick of yTicks) {
      const y = this.toY(tick);
      svg("line", { class: "grid-line", x1: box.left, x2: box.right, y1: y, y2: y }, picture);
      svg("text", { x: box.left - 7, y: y + 4, "text-anchor": "end" }, picture).textContent = shown(tick);
    }
    const xTicks = (view.log.x ? logTicks : linearTicks)(view.x[0], view.x[1], Math.max(2, Math.floor((box.right - box.left) / 85)));
    for (const tick of xTicks) {
      const x = this.toX(tick);
      svg("line", { class: "frame", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4 }, picture);
      const anchor = x > box.right - 18 ? "end" : "middle";
      svg("text", { class: "x-tick", x: anchor === "end" ? box.right + 4 : x, y: box.bottom + 17, "text-anchor": anchor }, picture).textContent = shown(tick);
    }
    svg("text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, picture).textContent = this.xLabel;
    svg("path", { class: "frame", d: `M${box.left} ${box.top}V${box.bottom}H${box.right}` }, picture);
    const area = svg("g", { "clip-path": `url(#${clip})` }, picture);
    for (const line of this.visible()) this.drawLine(line, area, box);
    this.overlay = svg("g", {}, picture);
    if (old) old.replaceWith(picture); else this.plot.prepend(picture);
    this.resetButton.disabled = !this.zoom;
    this.plot.dataset.view = JSON.stringify(view);
    this.drawCursor();
  }

  drawLine(line, area, box) {
    const path = (values) => this.pathOf(line.points, values, box);
    const style = { class: `line s${line.colour}`, "stroke-dasharray": line.dash || "none" };
    if (line.mean) {
      svg("path", { class: `line raw s${line.colour}`, d: path(null) }, area);
      svg("path", { ...style, d: path(line.mean) }, area);
      return;
    }
    svg("path", { ...style, d: path(null) }, area);
    if ((line.dots && line.points.length <= 60) || line.points.length === 1) {
      for (const [x, y] of line.points) {
        if (this.shownView.log.x && x <= 0) continue;
        svg("circle", { class: `f${line.colour}`, cx: this.toX(x), cy: this.toY(y), r: 3 }, area);
      }
    }
  }

  /** Of many points in one pixel only the first, lowest, highest and last are drawn. */
  pathOf(points, values, box) {
    let text = "";
    let column = null;
    const flush = () => {
      if (!column) return;
      const ys = [...new Set([column.first, column.low, column.high, column.last])];
      for (const y of ys) text += `${text ? "L" : "M"}${column.x.toFixed(1)} ${y.toFixed(1)}`;
    };
    points.forEach(([x, raw], i) => {
      if (this.shownView.log.x && x <= 0) return;
      const [px, py] = [this.toX(x), this.toY(values ? values[i] : raw)];
      const pixel = Math.round(px * 2) / 2;
      if (column && column.x === pixel) {
        column.low = Math.min(column.low, py); column.high = Math.max(column.high, py); column.last = py;
      } else {
        flush();
        column = { x: pixel, first: py, low: py, high: py, last: py };
      }
    });
    flush();
    return text;
  }

  /** Show the values nearest to a place. */
  drawCursor() {
    if (!this.overlay) return;
    this.overlay.replaceChildren();
    const old = this.plot.querySelector(".tip");
    if (old) old.remove();
    if (this.cursor === null) return;
    const near = this.visible().map((line) => ({ line, i: nearest(line.points, this.cursor, this.shownView.log.x) }));
    if (!near.length) return;
    const gap = (one) => Math.abs(this.toX(one.line.points[one.i][0]) - this.toX(this.cursor));
    const best = near.reduce((one, other) => (gap(other) < gap(one) ? other : one));
    const at = best.line.points[best.i][0];
    const x = this.toX(at);
    if (x < this.box.left - 1 || x > this.box.right + 1) return;
    svg("line", { class: "cross", x1: x, x2: x, y1: this.box.top, y2: this.box.bottom }, this.overlay);
    const tip = html("div", { class: "tip" }, this.plot);
    html("p", { class: "at" }, tip, `${shown(at, 6)} ${this.xLabel}`);
    const told = [];
    for (const { line, i } of near) {
      const [px, raw] = line.points[i];
      const away = Math.abs(this.toX(px) - x);
      if (away > 30 && near.length > 1) continue;
      const value = raw;
      svg("circle", { class: `f${line.colour}`, cx: this.toX(px), cy: Math.max(this.box.top, Math.min(this.box.bottom, this.toY(line.mean ? line.mean[i] : value))), r: 4.5 }, this.overlay);
      const row = html("p", {}, tip);
      const name = html("span", {}, row);
      html("span", { class: `swatch c${line.colour}` }, name);
      name.append(line.label);
      const unit = this.options.unit ? ` ${this.options.unit}` : "";
      const text = (this.options.digits !== null ? value.toFixed(this.options.digits) : shown(value)) + unit;
      html("span", {}, row, line.mean ? `${text} (mean ${shown(line.mean[i])})` : text);
      told.push(`${line.label} ${text}`);
    }
    const left = x + 14 + tip.offsetWidth > this.plot.clientWidth ? x - 14 - tip.offsetWidth : x + 14;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${this.box.top + 4}px`;
    this.told = `${shown(at, 6)} ${this.xLabel}: ${told.join(", ")}`;
  }

  /** Zoom by a factor around a place, in x and, unless the y-axis follows the data, in y. */
  zoomAt(factor, x) {
    const view = this.shownView;
    const [low, high] = view.x;
    const whole = () => { const kept = this.zoom; this.zoom = null; const all = this.view().x; this.zoom = kept; return all; };
    const limit = whole();
    let range;
    if (view.log.x) range = [x * (low / x) ** factor, x * (high / x) ** factor];
    else range = [x - (x - low) * factor, x + (high - x) * factor];
    range = [Math.max(range[0], limit[0]), Math.min(range[1], limit[1])];
    const full = range[0] <= limit[0] && range[1] >= limit[1];
    const tiny = range[1] - range[0] <= 1e-9 * Math.max(Math.abs(range[0]), Math.abs(range[1]));
    if (tiny) return;
    this.zoom = full ? null : { x: range, y: null };
    this.draw();
  }

  listen() {
    const plot = this.plot;
    const place = (event) => {
      const bounds = plot.getBoundingClientRect();
      return [event.clientX - bounds.left, event.clientY - bounds.top];
    };
    const inside = ([x, y]) => this.box && [Math.min(Math.max(x, this.box.left), this.box.right), Math.min(Math.max(y, this.box.top), this.box.bottom)];
    let start = null;
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.box) return;
      start = inside(place(event));
      if (event.pointerType === "mouse") plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointermove", (event) => {
      const at = inside(place(event));
      if (!at) return;
      this.cursor = this.fromX(at[0]);
      this.drawCursor();
      if (!start || Math.hypot(at[0] - start[0], at[1] - start[1]) < 5) return;
      const flat = this.flat(start, at, event);
      svg("rect", {
        class: "box", x: Math.min(start[0], at[0]), width: Math.abs(at[0] - start[0]),
        y: flat ? this.box.top : Math.min(start[1], at[1]),
        height: flat ? this.box.bottom - this.box.top : Math.abs(at[1] - start[1]),
      }, this.overlay);
    });
    const end = (event) => {
      if (!start) return;
      const [from, at] = [start, inside(place(event))];
      start = null;
      if (event.type === "pointercancel" || Math.abs(at[0] - from[0]) < 8) { this.drawCursor(); return; }
      const order = (one, other) => (one < other ? [one, other] : [other, one]);
      const x = order(this.fromX(from[0]), this.fromX(at[0]));
      const y = this.flat(from, at, event) ? null : order(this.fromY(from[1]), this.fromY(at[1]));
      this.zoom = { x, y };
      this.cursor = null;
      this.draw();
    };
    plot.addEventListener("pointerup", end);
    plot.addEventListener("pointercancel", end);
    plot.addEventListener("pointerleave", () => { if (!start) { this.cursor = null; this.drawCursor(); } });
    plot.addEventListener("dblclick", () => this.reset());
    plot.addEventListener("wheel", (event) => {
      const wanted = event.ctrlKey || event.metaKey || document.activeElement === plot;
      if (!wanted || !this.box) return;
      event.preventDefault();
      this.zoomAt(event.deltaY > 0 ? 1.25 : 0.8, this.fromX(inside(place(event))[0]));
    }, { passive: false });
    plot.addEventListener("blur", () => { this.cursor = null; this.drawCursor(); });
    plot.addEventListener("keydown", (event) => this.key(event));
  }

  /** A drag along the x-axis leaves y to the data; so does a finger, which also scrolls. */
  flat(from, to, event) {
    return event.pointerType !== "mouse" || Math.abs(to[1] - from[1]) < 24;
  }

  key(event) {
    const middle = () => (this.shownView.log.x ? Math.sqrt(this.shownView.x[0] * this.shownView.x[1]) : (this.shownView.x[0] + this.shownView.x[1]) / 2);
    const around = () => (this.cursor === null ? middle() : this.cursor);
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const xs = [...new Set(this.visible().flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
      const [low, high] = this.shownView.x;
      const seen = xs.filter((x) => x >= low && x <= high);
      if (!seen.length) return;
      const forward = event.key === "ArrowRight";
      let next = forward ? seen[0] : seen[seen.length - 1];
      if (this.cursor !== null) {
        const beyond = forward ? seen.filter((x) => x > this.cursor) : seen.filter((x) => x < this.cursor).reverse();
        next = beyond.length ? beyond[0] : this.cursor;
      }
      this.cursor = next;
      this.drawCursor();
      say(this.told || "");
    } else if (event.key === "+" || event.key === "=") this.zoomAt(0.7, around());
    else if (event.key === "-" || event.key === "_") this.zoomAt(1 / 0.7, around());
    else if (event.key === "0") this.reset();
    else if (event.key === "Escape") { this.cursor = null; this.drawCursor(); }
    else return;
    event.preventDefault();
  }
}

function nearest(points, x, log) {
  let [low, high] = [0, points.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  const away = (i) => (log ? Math.abs(Math.log(Math.max(points[i][0], 1e-300) / x)) : Math.abs(points[i][0] - x));
  return away(low) <= away(high) ? low : high;
}

function keySample(line, parent) {
  const sample = svg("svg", { width: 26, height: 10, "aria-hidden": "true" }, parent);
  svg("line", { class: `s${line.colour}`, x1: 1, x2: 25, y1: 5, y2: 5, "stroke-width": 2.5, "stroke-dasharray": line.dash || "none" }, sample);
}
