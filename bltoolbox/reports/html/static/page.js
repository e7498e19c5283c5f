/* The page itself: theme, axes, legends, filters, copying. */

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const several = data.runs.length > 1;

  function theme() {
    const button = byId("theme");
    const dark = matchMedia("(prefers-color-scheme: dark)");
    let chosen = null;
    try { chosen = localStorage.getItem("blt-theme"); } catch { /* not in a page from a file */ }
    const show = () => {
      const isDark = chosen ? chosen === "dark" : dark.matches;
      if (chosen) document.documentElement.dataset.theme = chosen;
      button.textContent = isDark ? "☀" : "☾";
      button.setAttribute("aria-label", isDark ? "Light page" : "Dark page");
    };
    button.hidden = false;
    button.onclick = () => {
      chosen = (chosen ? chosen === "dark" : dark.matches) ? "light" : "dark";
      try { localStorage.setItem("blt-theme", chosen); } catch { /* kept for this visit only */ }
      show();
    };
    dark.addEventListener("change", show);
    show();
  }

  const AXES = { computations: "computations", seconds: "seconds", step: "steps" };
  const dashOf = (run) => (several && run >= 8 ? DASHES[Math.floor(run / 8) % DASHES.length] : "");

  function linesOf(chart, axis) {
    const lines = [];
    data.runs.forEach((run, number) => {
      chart.lines.forEach((line, index) => {
        const source = line.checked ? run.curves.checks : run.curves.steps;
        if (!source[line.key]) return;
        const same = !several && lines.some((other) => String(other.y) === String(source[line.key]));
        lines.push({
          label: several ? run.label + (chart.lines.length > 1 ? `, ${line.label}` : "") : line.label,
          x: source[axis], y: source[line.key], noisy: line.noisy, dots: line.checked,
          colour: several ? run.colour : (index + (chart.lines.length > 1 || chart.key === "loss" ? 0 : 5)) % 8,
          dash: same ? DASHES[1] : several && chart.lines.length > 1 && index ? DASHES[index] : dashOf(number),
          run: number, hidden: hidden.has(number),
        });
      });
    });
    return lines;
  }

  const hidden = new Set();

  function curves() {
    let axis = "computations";
    const wanted = data.charts.filter((chart) => linesOf(chart, axis).some((line) => line.y.some((y) => y !== null)));
    if (!wanted.length) return;
    byId("curves").hidden = false;
    const made = wanted.map((chart) => new Chart(byId("charts"), {
      key: chart.key, title: chart.title, unit: chart.unit, digits: chart.digits, xLabel: AXES[axis],
      logY: chart.log && worthwhile(chart, axis), lines: linesOf(chart, axis), ownKeys: !several,
      named: chart.lines.length > 1,
    }));
    const redraw = () => made.forEach((plot, i) => plot.setLines(linesOf(wanted[i], axis), AXES[axis]));
    const known = Object.keys(AXES).filter((name) => data.runs.some((run) => [run.curves.steps, run.curves.checks].some((part) => (part[name] || []).some((x) => x > 0))));
    for (const name of known) {
      const button = html("button", { type: "button", "aria-pressed": String(name === axis) }, byId("axis"), AXES[name]);
      button.onclick = () => {
        axis = name;
        for (const other of byId("axis").children) other.setAttribute("aria-pressed", String(other === button));
        redraw();
      };
    }
    let logX = false;
    byId("logx").onclick = () => {
      logX = !logX;
      byId("logx").setAttribute("aria-pressed", String(logX));
      made.forEach((plot) => plot.setLogX(logX));
    };
    byId("reset-all").onclick = () => made.forEach((plot) => plot.reset());
    if (several) legend(redraw);
    return made;
  }

  /** A logarithmic axis from the start where the values span a factor. */
  function worthwhile(chart, axis) {
    const values = linesOf(chart, axis).flatMap((line) => line.y).filter((y) => y !== null);
    return values.every((y) => y > 0) && Math.max(...values) / Math.min(...values) > 3;
  }

  function legend(redraw) {
    data.runs.forEach((run, number) => {
      const button = html("button", { type: "button", "aria-pressed": "true" }, byId("legend"));
      keySample({ colour: run.colour, dash: dashOf(number) }, button);
      html("span", {}, button, run.label);
      button.onclick = () => {
        if (!hidden.delete(number)) hidden.add(number);
        button.setAttribute("aria-pressed", String(!hidden.has(number)));
        redraw();
      };
    });
  }

  /** Images of all runs, put together where they are the same image with the same measurement. */
  function scenes() {
    const found = new Map();
    for (const run of data.runs) {
      for (const scene of run.scenes) {
        const asset = (key) => (scene.variants.find((one) => one.key === key) || {}).asset;
        const id = `${scene.label} ${asset("clean")} ${asset("measured")}`;
        if (!found.has(id)) found.set(id, { label: scene.label, width: scene.width, height: scene.height, variants: [] });
        const variants = found.get(id).variants;
        for (const one of scene.variants) {
          if (variants.some((other) => other.asset === one.asset && other.key === one.key)) continue;
          const common = one.key === "measured" || one.key === "clean" || one.key === "baseline";
          const name = several && !common ? `${one.name}: ${run.label}` : one.name;
          variants.push({ ...one, id: common ? one.key : `${data.runs.indexOf(run)}-${one.key}`, name, uri: data.assets[one.asset] });
        }
      }
    }
    const order = ["measured", "baseline", "learned", "clean"];
    const list = [...found.values()];
    for (const scene of list) scene.variants.sort((one, other) => order.indexOf(one.key) - order.indexOf(other.key));
    return list;
  }

  function images() {
    const list = scenes();
    if (!list.length) return null;
    byId("images").hidden = false;
    return new Viewer(byId("viewer"), list, data.metrics);
  }

  function learned() {
    const something = (found) => found.filters.length || found.places.length || found.maps.length;
    const shownRuns = data.runs.map((run, number) => number).filter((number) => something(data.runs[number].learned));
    if (!shownRuns.length) return;
    byId("learned").hidden = false;
    const picker = byId("learned-run");
    byId("learned-pick").hidden = shownRuns.length < 2;
    for (const number of shownRuns) html("option", { value: String(number) }, picker, data.runs[number].label);
    let plot = null;
    let picked = null;
    const lines = (found) => found.potentials.map((row, j) => ({
      label: found.potentials.length > 1 ? `ψ of filter ${j + 1}` : "ψ", x: found.places, y: row,
      colour: picked === null ? j % 8 : j === picked ? 0 : 6, dash: picked === null ? DASHES[Math.floor(j / 8) % 4] : "",
      hidden: picked !== null && j !== picked,
    }));
    const show = () => {
      const found = data.runs[Number(picker.value)].learned;
      picked = null;
      byId("filters-panel").hidden = !found.filters.length;
      byId("filters").replaceChildren();
      const largest = Math.max(...found.weights, 1e-300);
      found.filters.forEach((asset, j) => {
        const item = html("li", {}, byId("filters"));
        const known = j < found.weights.length;
        const told = known ? `, weight ${shown(found.weights[j], 3)}` : "";
        const button = html("button", { type: "button", "aria-pressed": "false", "aria-label": `Filter ${j + 1}${told}: show its potential` }, item);
        html("img", { src: data.assets[asset], alt: "" }, button);
        if (known) {
          const meter = svg("svg", { class: "meter", viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" }, button);
          svg("rect", { width: 100, height: 4 }, meter);
          svg("rect", { width: (100 * found.weights[j]) / largest, height: 4 }, meter);
          html("small", {}, button, shown(found.weights[j], 3));
        }
        if (!found.potentials.length) { button.disabled = true; return; }
        button.onclick = () => {
          picked = picked === j ? null : j;
          [...byId("filters").querySelectorAll("button")].forEach((other, k) => other.setAttribute("aria-pressed", String(k === picked)));
          plot.setLines(lines(found), "response t");
        };
      });
      byId("maps").replaceChildren();
      for (const map of found.maps) {
        const panel = html("div", { class: "panel" }, byId("maps"));
        html("h3", {}, panel, map.caption);
        const row = html("div", { class: "map" }, panel);
        for (const asset of map.assets) html("img", { src: data.assets[asset], alt: map.caption }, row);
        html("p", { class: "remark" }, panel, map.scale);
      }
      byId("potentials").hidden = !found.potentials.length;
      if (!found.potentials.length) return;
      if (plot) plot.setLines(lines(found), "response t");
      else plot = new Chart(byId("potentials"), { key: "potentials", title: found.potentials.length > 1 ? "Potentials ψ, weights included" : "Potential ψ, weight included", unit: "", digits: null, xLabel: "response t", lines: lines(found), ownKeys: false });
    };
    picker.onchange = show;
    show();
  }

  function copying() {
    const done = (button, text) => {
      button.textContent = text;
      say(text);
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    };
    for (const button of document.querySelectorAll("[data-copy]")) {
      button.onclick = async () => {
        const source = byId(button.dataset.copy);
        try {
          await navigator.clipboard.writeText(source.textContent);
          done(button, "Copied");
        } catch {
          getSelection().selectAllChildren(source);
          let copied = false;
          try { copied = document.execCommand("copy"); } catch { copied = false; }
          done(button, copied ? "Copied" : "Selected: press Ctrl+C");
        }
      };
    }
  }

  theme();
  window.report = { viewer: images(), charts: curves() || [] };
  learned();
  copying();
  document.documentElement.dataset.ready = "true";
})();
