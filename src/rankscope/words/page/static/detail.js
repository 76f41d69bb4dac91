// Under a cell: the calls behind it, their values on all ranks, where they lie, where they came from and went.

const OPEN_CALLS = 3;
const UNBOUNDED = 1e300;
// Findings of values that ranks should share: where they differ, numbers are marked.
const BETWEEN_RANKS = new Set(["replica-mismatch", "placement-mismatch", "gradient-not-reduced", "shape-mismatch", "dtype-mismatch"]);
const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";

const findingsAt = (store, { m, t, p }) => store.data.findings.filter((each) => each.m === m && each.t === t && each.p === p);

class Detail {
  constructor(heard) {
    this.heard = heard; // {go(row, phase), drawn()}
    this.place = byId("detail");
  }

  async show(store, view) {
    const at = view.chosen;
    this.place.hidden = at === null;
    if (!at) return;
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const { data, tree } = store;
    const step = data.steps[at.step];
    const every = await store.calls(at.row);
    const cells = await store.cells(at.step, at.phase, (kind) => view.isKind(kind));
    if (turn !== this.turn) return;
    const worst = cells ? Math.max(...at.ranks.map((rank) => cells.own[at.row * data.world + rank])) : 0;
    const swatch = make("span", { class: "swatch" });
    swatch.style.background = `var(--${data.class_names[worst]})`;
    const parts = [
      make("h3", { class: "mono" }, tree.paths[at.row].slice(0, 2000) || "(root)"),
      make("p", { class: "said" }, swatch, `${data.classes[worst]} - ${tree.classes[at.row].slice(0, 200) || "a container"}, ${phaseOf(at.phase, step)}, ${ranksShort(ranksText(at.ranks))}`),
      ...this.findings(store, at),
    ];
    const calls = (every ?? []).filter((call) => call.t === at.step && call.p === at.phase);
    if (!calls.length) parts.push(make("p", {}, this.whyNone(store, at, every, worst)));
    else if (!calls.some((call) => ranksOf(call.r, data.world).some((rank) => at.ranks.includes(rank)))) {
      parts.push(make("p", { class: "said fault" }, `${ranksShort(ranksText(at.ranks))} did not make this call; others did:`));
    }
    calls.forEach((call, number) => parts.push(this.call(store, view, call, every, number < OPEN_CALLS)));
    parts.push(...this.issued(store, at, every ?? []), this.notKept(store, at, calls));
    this.place.replaceChildren(...parts.filter(Boolean));
    this.heard.drawn();
  }

  findings(store, at) {
    return findingsAt(store, { m: at.row, t: at.step, p: at.phase })
      .slice(0, 12)
      .map((each) => make("p", { class: `said ${each.severity}` },
        make("strong", {}, `${each.origin ? "origin: " : each.severity === "warning" ? "warning: " : "follows: "}${each.kind}`),
        ` ${each.slot} on ${ranksNamed(each.r)}: ${each.text}`));
  }

  whyNone(store, at, every, worst) {
    const { data } = store;
    if (worst === 0) return `Nothing was recorded of ${phaseOf(at.phase, data.steps[at.step])} here on ${ranksShort(ranksText(at.ranks))}.`;
    if (every === null || !every.some((call) => call.t === at.step)) {
      return data.left_out || "The values of this step are not on this page.";
    }
    return "These ranks did not make the call.";
  }

  call(store, view, call, every, isOpen) {
    const words = [ranksNamed(call.r)];
    if (call.b !== undefined) words.push(`micro-batch ${call.b}`);
    if (call.o) words.push(`call ${call.o + 1}`);
    if (call.w) words.push(`in ${call.w}`);
    const [least, most, slowest] = call.us;
    if (most) words.push(least === most ? duration(most) : `${duration(least)} to ${duration(most)}, slowest rank ${slowest}`);
    const inside = [];
    for (const ended of call.end ?? []) inside.push(make("p", { class: "said" }, ended));
    for (const issued of call.co ?? []) inside.push(make("p", { class: "said mono" }, issued));
    const named = new Set(findingsAt(store, call).map((each) => each.slot));
    const slots = (call.s ?? []).filter((slot) => view.isSlot(slot.n)).sort((a, b) => named.has(b.n) - named.has(a.n));
    for (const slot of slots) inside.push(this.slot(store, view, call, slot, every));
    if (!slots.length) inside.push(make("p", {}, call.s ? `No slot of this call matches ${view.slots}.` : "No values were recorded of this call."));
    return make("details", { class: "call", open: isOpen }, make("summary", {}, words.join(", ")), ...inside);
  }

  slot(store, view, call, slot, every) {
    const own = findingsAt(store, call).filter((each) => each.slot === slot.n);
    const found = own.length > 0;
    const isBetween = own.some((each) => BETWEEN_RANKS.has(each.kind));
    const parts = [make("h4", { class: "mono" }, `${slot.n}  ${slot.d}${slot.dev ? ` on ${slot.dev}` : ""}${found ? "  (finding)" : ""}`)];
    if (slot.notes) parts.push(...slot.notes.map((note) => make("p", { class: "mono" }, note)));
    if (slot.sides) parts.push(...this.compared(store, view, slot));
    else if (slot.f) parts.push(...this.values(store, view, slot, isBetween));
    parts.push(this.links(store, slot));
    const trend = slot.f || slot.error !== undefined ? this.trend(store, call, slot, every) : null;
    if (trend) parts.push(trend);
    if (slot.f && slot.kept) parts.push(this.command(store, view, call, slot));
    return make("div", { class: `slot${found ? " found" : ""}` }, ...parts);
  }

  // Of diff: the reference and this run side by side.
  compared(store, view, slot) {
    const parts = [];
    if (slot.summed) parts.push(make("p", {}, "Each rank holds a part; the error is that of their sum."));
    if (slot.error !== undefined) parts.push(make("p", {}, slot.allowed >= UNBOUNDED ? `relative error ${told(slot.error)}; any distance is explained` : `relative error ${slot.error >= UNBOUNDED ? "without bound" : told(slot.error)}; rounding explains ${told(slot.allowed)}: ${told(slot.error / slot.allowed)} times`));
    if (slot.reason) parts.push(make("p", {}, `not compared: ${slot.reason}`));
    for (const [name, side] of slot.sides) parts.push(make("h4", {}, name), ...this.values(store, view, side, false, ""));
    return parts;
  }

  values(store, view, slot, isFound, judged = slot.held ? "; held to what it should equal on other ranks" : "; nothing says what it should equal") {
    const { data } = store;
    const letters = new Map();
    slot.f.forEach((fold, number) => {
      for (const rank of ranksOf(fold.r, data.world)) letters.set(rank, slot.f.length > 1 ? LETTERS[number] ?? "+" : "");
    });
    const names = data.numbers;
    const at = (name) => names.indexOf(name);
    const isOdd = slot.f.some((fold) => fold.v && (fold.v[at("nan")] || fold.v[at("posinf")] || fold.v[at("neginf")]));
    const shown = names.filter((name) => !["nan", "posinf", "neginf", "zero"].includes(name) || (isOdd && name !== "zero"));
    const head = make("tr", {}, ...["ranks", "hash", "shape", ...shown].map((name) => make("th", { scope: "col" }, name)));
    const chosen = view.chosen?.rank;
    // What a rank should hold is what most ranks with the same piece hold.
    const peer = (fold) => slot.f.find((other) => other.k === fold.k);
    const isOther = (fold) => peer(fold) !== fold && peer(fold).v && fold.v;
    const rows = slot.f.map((fold, number) => {
      const ranks = ranksOf(fold.r, data.world);
      const cells = shown.map((name) => {
        const value = fold.v?.[at(name)];
        const isOff = isFound && isOther(fold) && value !== peer(fold).v[at(name)];
        const isBad = ["nan", "posinf"].includes(name) && value > 0;
        return make("td", { class: isOff || isBad ? "off" : null }, told(value));
      });
      const letter = slot.f.length > 1 ? `${LETTERS[number] ?? "+"} ` : "";
      return make("tr", {}, make("td", { title: ranksNamed(fold.r) }, `${letter}${ranksShort(fold.r)}${ranks.includes(chosen) && slot.f.length > 1 ? " (this)" : ""}`), make("td", {}, fold.h ? fold.h.slice(0, 8) : "-"), make("td", {}, `[${fold.s.join(", ")}]`), ...cells);
    });
    const parts = [];
    const how = slot.distinct ? `${slot.distinct} different values; the largest group and the extremes` : slot.f.length === 1 ? "all hold the same" : `${slot.f.length} different values`;
    const caption = make("caption", {}, `${how}${judged}`);
    const table = make("table", {}, caption, make("thead", {}, head), make("tbody", {}, ...rows));
    const layouts = slot.l.map((layout) => this.layout(store, layout, letters)).filter(Boolean);
    parts.push(make("div", { class: "side" }, make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": `numbers of ${slot.n}` }, table), ...layouts));
    if (slot.spread) {
      const told5 = Object.entries(slot.spread).map(([name, [low, lowRank, middle, high, highRank]]) => `${name} ${told(low)} (rank ${lowRank}) to ${told(high)} (rank ${highRank}), median ${told(middle)}`);
      parts.push(make("p", { class: "mono" }, `over the ranks: ${told5.join("; ")}`));
    }
    return parts;
  }

  layout(store, layout, letters) {
    const placed = layout.p ? Object.entries(layout.p).map(([axis, text]) => `${axis}=${text}`).join(" ") : "layout unknown";
    const whole = layout.shape ? `whole [${layout.shape.join(", ")}]` : "";
    const differ = layout.differ ? `${ranksNamed(layout.r)} differ in ${layout.differ.join(", ")}` : "";
    const words = [whole, placed, layout.p ? layout.src : "", differ].filter(Boolean).join(", ");
    const picture = layout.p ? meshPicture(store, layout, letters) : null;
    return make("div", {}, make("div", { class: "mono" }, words), picture);
  }

  links(store, slot) {
    const { tree } = store;
    const link = ([row, phase, name]) => make("button", { type: "button", class: "mono", click: () => this.heard.go(row, phase) }, `${tree.paths[row].slice(0, 120) || "(root)"}:${name}`);
    const parts = [];
    if (slot.from) parts.push(make("span", {}, "from ", link(slot.from)));
    if (slot.to) parts.push(make("span", {}, "to ", ...slot.to.map(link)));
    return parts.length ? make("div", { class: "links" }, ...parts) : null;
  }

  // The norm of this slot over the steps of the page.
  trend(store, call, slot, every) {
    const own = every
      .filter((each) => each.p === call.p && (each.b ?? 0) === (call.b ?? 0) && (each.o ?? 0) === (call.o ?? 0))
      .map((each) => [each.t, (each.s ?? []).find((other) => other.n === slot.n && (other.f || other.sides))])
      .filter(([, other]) => other);
    if (own.length < 2) return null;
    const names = own.map(([step]) => store.data.steps[step].label);
    const at = own.findIndex(([step]) => step === call.t);
    if (slot.sides) {
      const series = [["error", "error"], ["noise", "allowed"]].map(([name, field]) => ({ name, values: own.map(([, other]) => (other[field] < UNBOUNDED ? other[field] : null)) }));
      return lineChart({ title: `error of ${slot.n} over the steps`, series, names, at, isLog: true });
    }
    const norm = store.data.numbers.indexOf("l2");
    const of = (other) => {
      const found = other.spread?.l2 ? [other.spread.l2[0], other.spread.l2[3]] : other.f.map((fold) => fold.v?.[norm] ?? null).filter((value) => value !== null);
      return found.length ? [Math.min(...found), Math.max(...found)] : [null, null];
    };
    const ends = own.map(([, other]) => of(other));
    const isOne = ends.every(([low, high]) => low === high);
    const series = isOne ? [{ name: "norm", values: ends.map(([low]) => low) }] : [{ name: "least norm", values: ends.map(([low]) => low) }, { name: "greatest norm", values: ends.map(([, high]) => high) }];
    const known = ends.flat().filter((value) => value !== null);
    const isLog = known.every((value) => value > 0) && Math.max(...known) > 50 * Math.min(...known);
    return lineChart({ title: `norm of ${slot.n} over the steps`, series, names, at, isLog });
  }

  command(store, view, call, slot) {
    const { data, tree } = store;
    const step = data.steps[call.t];
    const name = quoted(`${tree.paths[call.m]}:${slot.n}`);
    const kept = ranksOf(slot.kept, data.world);
    const rank = kept.includes(view.chosen?.rank) ? view.chosen.rank : kept[0];
    const words = ["rankscope tensor", quoted(data.trace), name, `--rank ${rank}`];
    const named = /^(?:life\d+-)?(?:(\w+)-)?(\d+)$/.exec(step.key);
    if (named) words.push(...(named[1] ? [`--mode ${named[1]}`] : []), `--step ${named[2]}`);
    words.push(`--phase ${call.p}`);
    if (call.b) words.push(`--micro-batch ${call.b}`);
    if (call.o) words.push(`--ordinal ${call.o}`);
    words.push("--print");
    const text = words.join(" ");
    const button = make("button", { type: "button", click: () => navigator.clipboard?.writeText(text).then(() => { button.textContent = "copied"; }) }, "copy");
    return make("p", { class: "copy" }, make("code", {}, text), button);
  }

  // How to have the elements of values that were not kept.
  notKept(store, at, calls) {
    const slots = calls.flatMap((call) => call.s ?? []).filter((slot) => slot.f);
    if (!slots.length || slots.some((slot) => slot.kept)) return null;
    const found = store.data.findings.find((each) => each.m === at.row && each.slot && slots.some((slot) => slot.n === each.slot));
    const name = quoted(`${store.tree.paths[at.row]}:${found ? found.slot : "*"}`);
    return make("p", { class: "copy" }, "The elements of these values were not kept; to have them: ", make("code", {}, `rankscope run --rs-tensors ${name} ...`));
  }

  // Collectives that the module issued in the step, for whoever looks at another phase of it.
  issued(store, at, every) {
    const own = every.filter((call) => call.t === at.step && call.p === "collective" && at.phase !== "collective");
    if (!own.length) return [];
    const lines = own.slice(0, 24).map((call) => make("li", { class: "mono" }, (call.co ?? []).join("; ")));
    const open = make("button", { type: "button", click: () => this.heard.go(at.row, "collective") }, "show their values");
    return [make("h4", {}, `collectives it issued in this step (${own.length})`), make("ul", {}, ...lines), open];
  }
}

// A word as a shell takes it.
const quoted = (text) => `'${text.replace(/'/g, "'\\''")}'`;
