// Lines and their numbers. SVG: they scale, print, follow light and dark, and their points are text.

const HIGH = 170;

// Return a figure with lines over places 0..n-1.
//   series: [{name, values: [number or null]}]; names: what a place is called; at: a place to mark;
//   pick(place): called for a click.
function lineChart({ title, note, series, names, isLog = false, unit = "", at = -1, pick = null, isBars = false, odd = [] }) {
  const WIDE = Math.max(300, Math.min(560, document.body.clientWidth - 30));
  const isShown = (value) => value !== null && Number.isFinite(value) && (!isLog || value > 0);
  const every = series.flatMap(({ values }) => values).filter(isShown);
  if (!every.length && !odd.length) return null;
  if (!every.length) every.push(1);
  const scaled = isLog ? Math.log10 : (value) => value;
  let low = every.reduce((least, value) => Math.min(least, scaled(value)), Infinity);
  let high = every.reduce((most, value) => Math.max(most, scaled(value)), -Infinity);
  if (!isLog && low > 0 && (isBars || low < 0.5 * high)) low = 0;
  if (isLog) {
    low = Math.floor(low);
    high = Math.max(Math.ceil(high), low + 1);
  } else if (high === low) {
    high += Math.abs(high) || 1;
    low -= isBars ? 0 : Math.abs(low) * 0.1;
  }
  const count = Math.max(...series.map(({ values }) => values.length));
  const box = { left: 62, right: WIDE - 8, top: 8, bottom: HIGH - 22 };
  const inset = isBars ? (box.right - box.left) / (2 * count) : 0;
  const x = (place) => box.left + inset + ((box.right - box.left - 2 * inset) * (count < 2 ? 0.5 : place / (count - 1)));
  const y = (value) => box.bottom - ((box.bottom - box.top) * (scaled(value) - low)) / (high - low);
  const picture = drawn("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, width: "100%", role: "img", "aria-label": `${title}: ${summary(series, names, unit)}` });
  const digits = [3, 4, 5, 6, 7].find((count) => new Set([0, 1, 2, 3].map((tick) => (low + ((high - low) * tick) / 3).toPrecision(count))).size === 4) ?? 8;
  const ticks = isLog ? Math.min(high - low, 4) : 3;
  for (let tick = 0; tick <= ticks; tick += 1) {
    const value = isLog ? Math.round(low + ((high - low) * tick) / ticks) : low + ((high - low) * tick) / ticks;
    const height = box.bottom - ((box.bottom - box.top) * (value - low)) / (high - low);
    picture.append(drawn("line", { class: "axis", x1: box.left, x2: box.right, y1: height, y2: height }));
    picture.append(drawn("text", { x: box.left - 4, y: height + 4, "text-anchor": "end" }, onAxis(isLog ? 10 ** value : value, digits)));
  }
  const ends = [[0, "start"], [count - 1, "end"]];
  for (const [place, anchor] of count > 1 ? ends : [[0, "middle"]]) {
    picture.append(drawn("text", { x: x(place), y: HIGH - 6, "text-anchor": anchor }, (names[place] ?? "").slice(-28)));
  }
  if (at >= 0 && at < count) picture.append(drawn("line", { x1: x(at), x2: x(at), y1: box.top, y2: box.bottom, stroke: "var(--chosen)", "stroke-dasharray": "3 3" }));
  for (const place of odd) picture.append(drawn("text", { x: x(place), y: box.top + 10, "text-anchor": "middle", class: "odd" }, "\u00d7"));
  series.forEach(({ values }, number) => {
    const ink = `var(--series-${number % 3})`;
    if (isBars) {
      const thick = Math.max(1, Math.min(18, (0.7 * (box.right - box.left)) / count));
      let bars = "";
      values.forEach((value, place) => {
        if (isShown(value)) bars += `M${x(place).toFixed(1)} ${box.bottom}V${Math.min(y(value), box.bottom - 1).toFixed(1)}`;
      });
      picture.append(drawn("path", { class: "bars", d: bars, stroke: ink, "stroke-width": thick }));
      return;
    }
    let path = "";
    let isDown = false;
    for (let place = 0; place < values.length; place += 1) {
      const value = values[place];
      if (!isShown(value)) { isDown = false; continue; }
      path += `${isDown ? "L" : "M"}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
      if (!isDown && (place + 1 >= values.length || values[place + 1] === null)) path += "h0.01";
      isDown = true;
    }
    picture.append(drawn("path", { class: "line", d: path, stroke: ink, "stroke-linecap": "round" }));
    if (count <= 60) {
      values.forEach((value, place) => {
        if (isShown(value)) picture.append(drawn("circle", { cx: x(place), cy: y(value), r: 2.2, fill: ink }));
      });
    }
  });
  const readout = make("div", { class: "mono readout" });
  const placeOf = (event) => {
    const frame = picture.getBoundingClientRect();
    const inside = ((event.clientX - frame.left) / frame.width) * WIDE;
    return Math.max(0, Math.min(count - 1, Math.round(((inside - box.left - inset) / (box.right - box.left - 2 * inset)) * (count - 1))));
  };
  const say = (place) => {
    readout.textContent = ` ${(names[place] ?? "").slice(0, 90)}: ${odd.includes(place) ? "not finite" : series.map(({ name, values }) => `${name} ${told(values[place])}${unit}`).join(", ")}`;
  };
  picture.addEventListener("pointermove", (event) => say(placeOf(event)));
  if (pick) {
    picture.style.cursor = "pointer";
    picture.addEventListener("click", (event) => pick(placeOf(event)));
  }
  const legend = series.length > 1 ? series.map(({ name }, number) => {
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = `var(--series-${number % 3})`;
    return make("span", {}, swatch, `${name} `);
  }) : [];
  const caption = make("figcaption", {}, make("strong", {}, title), note ? ` ${note} ` : " ", ...legend, readout);
  return make("figure", {}, caption, picture);
}

function onAxis(value, digits) {
  const size = Math.abs(value);
  return size >= 1e5 || (size && size < 1e-3) ? value.toExponential(digits > 3 ? digits - 1 : Number(value.toPrecision(1)) === value ? 0 : 1) : String(Number(value.toPrecision(digits)));
}

// The largest values in words: what somebody who does not see the lines is told.
function summary(series, names, unit) {
  return series.map(({ name, values }) => {
    const known = values.map((value, place) => [value, place]).filter(([value]) => value !== null && Number.isFinite(value));
    known.sort(([a], [b]) => b - a);
    const told3 = known.slice(0, 3).map(([value, place]) => `${names[place] ?? place} ${told(value)}${unit}`);
    return `${name}: largest ${told3.join(", ")}`;
  }).join("; ");
}

// Without distances that have no bound: nothing can be drawn of them.
const bounded = (values) => Object.fromEntries(Object.entries(values).filter(([, value]) => value < UNBOUNDED));

// The charts below the map, for one step.
async function drawCharts(store, view, open) {
  const steps = await store.json("charts");
  const list = byId("chart-list");
  byId("charts").hidden = true;
  if (!steps) return;
  const { data, tree } = store;
  const figures = [];
  const label = data.steps[view.step]?.label ?? "";
  const own = steps[view.step] ?? {};
  const byModule = (title, note, values, options = {}) => {
    const odd = new Set(options.odd ?? []);
    const rows = (options.isDeep ? tree.inner : tree.order).filter((row) => odd.has(row) || Object.values(values).some((each) => row in each));
    if (!rows.length) return;
    figures.push(lineChart({
      title: `${title}, ${label}`, note, names: rows.map((row) => tree.paths[row] || "(root)"),
      series: Object.entries(values).map(([name, each]) => ({ name, values: rows.map((row) => each[row] ?? null) })),
      at: rows.indexOf(view.row), pick: (place) => open(rows[place]), ...options, odd: rows.map((row, place) => (odd.has(row) ? place : -1)).filter((place) => place >= 0),
    }));
  };
  const losses = steps.map((_, at) => at).filter((at) => steps[at].loss);
  if (losses.length) {
    const values = (number) => losses.map((at) => steps[at].loss[number]);
    const isAlike = losses.every((at) => steps[at].loss[1] === steps[at].loss[2]);
    figures.push(lineChart({
      title: "Loss by step", note: isAlike ? "" : "mean of the ranks, the least and the greatest", names: losses.map((at) => data.steps[at].label),
      series: isAlike ? [{ name: "loss", values: values(0) }] : ["mean", "least", "greatest"].map((name, number) => ({ name, values: values(number) })),
      at: losses.indexOf(view.step), odd: losses.flatMap((at, place) => (steps[at].loss[0] === null ? [place] : [])),
    }));
  }
  if (own.error) {
    for (const [phase, values] of Object.entries(own.error)) byModule(`Error by depth: ${phase}`, "relative L2 distance, and what rounding explains", { error: bounded(values.error), noise: bounded(values.noise) }, { isLog: true, isDeep: true });
  }
  const odd = own.odd ?? [];
  const note = odd.length ? `; \u00d7: not finite, in ${odd.length} modules` : "";
  if (own.grad) byModule("Gradient norm by module", `of its own parameters${note}`, { norm: own.grad }, { isLog: true, isBars: true, odd });
  if (own.update) byModule("Update by module", `how far its parameters went, over their norm${note}`, { ratio: own.update }, { isLog: true, isBars: true, odd });
  if (own.ms) {
    const names = Array.from({ length: data.world }, (_, rank) => `rank ${rank}`);
    for (const [phase, values] of Object.entries(own.ms)) {
      const sorted = [...values].filter((each) => each > 0).sort((a, b) => a - b);
      const slowest = values.indexOf(Math.max(...values));
      const note = sorted.length ? `slowest rank ${slowest}, ${told(values[slowest])} ms; fastest ${told(sorted[0])} ms; median ${told((sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2)} ms` : "";
      if (data.world > 1) figures.push(lineChart({ title: `Time of ${phase} by rank, ${label}`, note, names, unit: " ms", isBars: true, series: [{ name: "time", values: values.map((each) => (each > 0 ? each : null)) }] }));
    }
  }
  const shown = figures.filter(Boolean);
  const isAny = steps.some((each) => Object.keys(each).length);
  list.replaceChildren(...(shown.length ? shown : [make("p", {}, `Nothing of ${label} is drawn.`)]));
  byId("charts").hidden = !isAny;
}
