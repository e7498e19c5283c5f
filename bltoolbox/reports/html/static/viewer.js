/* Two states of an image with a divider between them, moved by mouse, finger or arrow keys; zoom and pan. */

class Viewer {
  /** scenes: [{label, width, height, variants: [{key, name, values, uri}]}], metrics: [{name, label, unit, digits}] */
  constructor(parent, scenes, metrics) {
    this.scenes = scenes;
    this.metrics = metrics;
    this.metric = metrics[0];
    for (const variant of scenes.flatMap((scene) => scene.variants)) variant.value = variant.values[this.metric.name] ?? null;
    this.place = 50;
    this.scale = 1;
    this.offset = [0, 0];
    this.root = html("div", { class: "panel viewer" }, parent);
    this.stage = html("div", { class: "stage", id: "stage" }, this.root);
    this.layers = ["left", "right"].map((side) => {
      const layer = html("div", { class: `layer ${side}` }, this.stage);
      return { layer, image: html("img", { draggable: "false" }, layer) };
    });
    this.tags = ["left", "right"].map((side) => html("span", { class: `tag ${side}` }, this.stage));
    this.divider = html("div", {
      class: "divider", role: "slider", tabindex: "0", "aria-orientation": "horizontal",
      "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": "Divider between the two images",
    }, this.stage);
    this.side = html("div", { class: "side" }, this.root);
    this.thumbs = html("div", { class: "thumbs", role: "group", "aria-label": "Image" }, this.side);
    const pickers = html("div", { class: "two" }, this.side);
    this.pickers = ["Left", "Right"].map((name, side) => {
      const label = html("label", {}, pickers, name);
      const select = html("select", {}, label);
      select.onchange = () => { this.chosen[side] = select.value; this.show(); };
      return select;
    });
    const tools = html("div", { class: "tools" }, this.side);
    const button = (text, label, action) => {
      const made = html("button", { type: "button", "aria-label": label }, tools, text);
      made.onclick = action;
      return made;
    };
    button("−", "Zoom out", () => this.zoomBy(1 / 1.5));
    this.level = html("output", { "aria-live": "polite" }, tools);
    button("+", "Zoom in", () => this.zoomBy(1.5));
    this.resetButton = button("Reset", "Reset the zoom of the image", () => this.reset());
    button("⇄", "Swap left and right", () => { this.chosen.reverse(); this.show(); });
    this.table = html("table", { class: "values" }, this.side);
    html("p", { class: "hint" }, this.side, "Drag the divider, or use the arrow keys on it. The wheel zooms once the image has been clicked; then drag to move around.");
    this.makeThumbs();
    this.listen();
    this.choose(0);
    new ResizeObserver(() => this.update()).observe(this.stage);
  }

  makeThumbs() {
    this.buttons = this.scenes.map((scene, number) => {
      const button = html("button", { type: "button", title: scene.label }, this.thumbs);
      const last = scene.variants[scene.variants.length - 1];
      html("img", { src: last.uri, alt: "" }, button);
      button.append(scene.label);
      button.onclick = () => this.choose(number);
      return button;
    });
  }

  choose(number) {
    this.number = number;
    const scene = this.scenes[number];
    this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === number)));
    const ids = scene.variants.map((variant) => variant.id);
    const fallback = [ids.find((id) => id.endsWith("measured")) || ids[0], ids.find((id) => id.endsWith("learned")) || ids[ids.length - 1]];
    this.chosen = (this.chosen || fallback).map((id, side) => (ids.includes(id) ? id : fallback[side]));
    for (const picker of this.pickers) {
      picker.replaceChildren();
      for (const variant of scene.variants) html("option", { value: variant.id }, picker, variant.name);
    }
    this.stage.style.aspectRatio = `${scene.width} / ${scene.height}`;
    this.show();
  }

  show() {
    const scene = this.scenes[this.number];
    this.chosen.forEach((id, side) => {
      const variant = scene.variants.find((one) => one.id === id);
      this.pickers[side].value = id;
      this.layers[side].image.src = variant.uri;
      this.layers[side].image.alt = `${scene.label}, ${variant.name}` + (variant.value === null ? "" : `, ${this.shown(variant)}`);
      this.tags[side].textContent = variant.name + (variant.value === null ? "" : ` ${this.shown(variant)}`);
    });
    this.table.replaceChildren();
    const scored = scene.variants.filter((one) => one.value !== null);
    const measured = this.metrics.filter((metric) => scored.some((one) => metric.name in one.values));
    const title = (metric) => metric.label + (metric.unit ? ` in ${metric.unit}` : "");
    html("caption", {}, this.table, `${measured.map(title).join(", ")} of ${scene.label}`);
    if (measured.length > 1) {
      const head = html("tr", {}, html("thead", {}, this.table));
      html("td", {}, head);
      for (const metric of measured) html("th", { scope: "col", class: "number" }, head, metric.label);
    }
    const body = html("tbody", {}, this.table);
    for (const variant of scored) {
      const row = html("tr", { class: this.chosen.includes(variant.id) ? "on" : "" }, body);
      html("th", { scope: "row" }, row, variant.name);
      for (const metric of measured) {
        const value = variant.values[metric.name];
        html("td", { class: "number" }, row, value === undefined || value === null ? "–" : value.toFixed(metric.digits));
      }
    }
    this.update();
  }

  shown(variant) {
    return `${variant.value.toFixed(this.metric.digits)} ${this.metric.unit}`.trim();
  }

  update() {
    const [left, right] = this.layers;
    left.layer.style.clipPath = `inset(0 ${100 - this.place}% 0 0)`;
    right.layer.style.clipPath = `inset(0 0 0 ${this.place}%)`;
    this.divider.style.left = `${this.place}%`;
    this.divider.setAttribute("aria-valuenow", String(Math.round(this.place)));
    this.divider.setAttribute("aria-valuetext", `${Math.round(this.place)} % ${this.pickers[0].selectedOptions[0].text}, the rest ${this.pickers[1].selectedOptions[0].text}`);
    const size = [this.stage.clientWidth, this.stage.clientHeight];
    this.offset = this.offset.map((value, i) => Math.min(0, Math.max(value, size[i] * (1 - this.scale))));
    for (const { image } of this.layers) {
      image.style.transform = `translate(${this.offset[0]}px, ${this.offset[1]}px) scale(${this.scale})`;
    }
    this.stage.classList.toggle("zoomed", this.scale > 1);
    this.level.textContent = `${Math.round(100 * this.scale)} %`;
    this.resetButton.disabled = this.scale === 1;
  }

  reset() { this.scale = 1; this.offset = [0, 0]; this.update(); }

  zoomBy(factor, at) {
    const [x, y] = at || [this.stage.clientWidth / 2, this.stage.clientHeight / 2];
    const scale = Math.min(12, Math.max(1, this.scale * factor));
    const ratio = scale / this.scale;
    this.offset = [x - (x - this.offset[0]) * ratio, y - (y - this.offset[1]) * ratio];
    this.scale = scale;
    this.update();
  }

  setPlace(percent) { this.place = Math.min(100, Math.max(0, percent)); this.update(); }

  listen() {
    const stage = this.stage;
    const at = (event) => {
      const bounds = stage.getBoundingClientRect();
      return [event.clientX - bounds.left, event.clientY - bounds.top];
    };
    const fingers = new Map();
    let mode = null;
    let last = null;
    stage.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      event.preventDefault();
      stage.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, at(event));
      const divider = event.target === this.divider || this.scale === 1;
      mode = fingers.size > 1 ? "pinch" : divider ? "divide" : "pan";
      last = at(event);
      this.divider.focus({ preventScroll: true });
      if (mode === "divide") this.setPlace((100 * last[0]) / stage.clientWidth);
      stage.classList.toggle("panning", mode === "pan");
    });
    stage.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) return;
      const now = at(event);
      if (mode === "pinch" && fingers.size === 2) {
        const other = [...fingers].find(([id]) => id !== event.pointerId)[1];
        const before = fingers.get(event.pointerId);
        const spread = (one) => Math.hypot(one[0] - other[0], one[1] - other[1]) || 1;
        this.zoomBy(spread(now) / spread(before), [(now[0] + other[0]) / 2, (now[1] + other[1]) / 2]);
      } else if (mode === "divide") this.setPlace((100 * now[0]) / stage.clientWidth);
      else if (mode === "pan") {
        this.offset = [this.offset[0] + now[0] - last[0], this.offset[1] + now[1] - last[1]];
        this.update();
      }
      fingers.set(event.pointerId, now);
      last = now;
    });
    const end = (event) => {
      fingers.delete(event.pointerId);
      if (!fingers.size) mode = null;
      stage.classList.remove("panning");
    };
    stage.addEventListener("pointerup", end);
    stage.addEventListener("pointercancel", end);
    stage.addEventListener("dblclick", (event) => (this.scale > 1 ? this.reset() : this.zoomBy(3, at(event))));
    stage.addEventListener("wheel", (event) => {
      if (!(event.ctrlKey || event.metaKey || stage.contains(document.activeElement))) return;
      event.preventDefault();
      this.zoomBy(event.deltaY > 0 ? 0.8 : 1.25, at(event));
    }, { passive: false });
    this.divider.addEventListener("keydown", (event) => {
      const size = event.shiftKey ? 10 : 2;
      const moves = {
        ArrowLeft: this.place - size, ArrowDown: this.place - size, ArrowRight: this.place + size, ArrowUp: this.place + size,
        PageDown: this.place - 10, PageUp: this.place + 10, Home: 0, End: 100,
      };
      if (event.key in moves) this.setPlace(moves[event.key]);
      else if (event.key === "+" || event.key === "=") this.zoomBy(1.5);
      else if (event.key === "-") this.zoomBy(1 / 1.5);
      else if (event.key === "0") this.reset();
      else return;
      event.preventDefault();
    });
  }
}
