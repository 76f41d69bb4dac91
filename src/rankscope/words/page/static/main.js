// The page put together: controls, links, keys.

const SECTIONS = { job: "job", verdict: "verdict", findings: "findings", ranks: "ranks-now", coverage: "coverage", text: "text" };

class Page {
  constructor(store) {
    this.store = store;
    this.view = new View(store);
    this.detail = new Detail({ go: (row, phase) => this.go(row, phase), drawn: () => this.map.draw() });
    for (const id of ["controls", "map", "groups", "keys"]) byId(id).hidden = false;
    this.map = new CellMap(store, this.view, {
      chosen: () => this.chosen(),
      changed: () => this.changed(),
      openedRow: (row, isFocused) => this.openRow(row, isFocused),
    });
    this.controls();
    this.fill();
    window.addEventListener("hashchange", () => this.follow());
    if (location.hash.includes("=")) this.follow();
    else if (this.view.first) this.firstFinding();
    else this.changed({ isLinked: false });
  }

  // Without a click: the first finding, opened.
  firstFinding() {
    const { view, store } = this;
    view.choose(store, view.first.m, view.first.p, ranksOf(view.first.r, store.data.world).slice(0, 1));
    this.changed({ isLinked: false });
    this.map.show(view.row);
    this.chosen({ isLinked: false });
  }

  // What depends on the data alone.
  fill() {
    const { data } = this.store;
    byId("step").max = Math.max(0, data.steps.length - 1);
    byId("left-out").hidden = !data.left_out;
    byId("left-out").textContent = data.left_out;
    byId("next-finding").disabled = !data.findings.length;
    byId("legend").replaceChildren(
      ...data.classes.map((word, number) => {
        const name = data.class_names[number];
        const sample = make("span", { "data-glyph": GLYPHS[name] ?? "" }, word);
        sample.style.setProperty("--swatch", `var(--${name})`);
        return number ? sample : null;
      }).filter(Boolean),
      make("span", { class: "ring", "data-glyph": "" }, "origin (dashed: inside, or a warning); lower half: inside a folded module"),
      make("em", {}, this.store.phases.map((phase) => `${letterOf(phase)} ${phase}`).join(", ")),
    );
    const boxes = this.store.phases.map((phase) => make("label", {}, make("input", { type: "checkbox", value: phase, change: () => this.phases() }), ` ${phase}`));
    byId("phases").replaceChildren(byId("phases").querySelector("legend"), ...boxes);
  }

  controls() {
    const { view } = this;
    const typed = (id, take) => byId(id).addEventListener("input", (event) => {
      take(event.target.value.trim(), event.target);
      this.changed();
    });
    typed("filter", (text) => { view.filter = text; });
    typed("slots", (text) => { view.slots = text; });
    typed("ranks", (text, input) => {
      const found = text ? ranksOf(text, this.store.data.world) : null;
      input.setAttribute("aria-invalid", text !== "" && found === null);
      input.setCustomValidity(text !== "" && (found === null || !found.length) ? "ranks as 0-3,8" : "");
      view.ranks = found && found.length ? found : null;
      this.isOddRanks = text !== "" && view.ranks === null;
    });
    byId("axis").addEventListener("change", (event) => { view.axis = event.target.value; this.changed(); });
    byId("step").addEventListener("input", (event) => this.toStep(Number(event.target.value)));
    byId("step-back").addEventListener("click", () => this.toStep(view.step - 1));
    byId("step-on").addEventListener("click", () => this.toStep(view.step + 1));
    byId("unfold-all").addEventListener("click", () => {
      this.store.tree.order.forEach((row) => view.open.add(row));
      this.changed();
    });
    byId("fold-all").addEventListener("click", () => {
      view.open = new Set(this.store.tree.roots);
      const { tree } = this.store;
      view.row = [view.row, ...tree.around(view.row)].find((row) => tree.depth[row] < 2);
      this.changed();
    });
    byId("next-finding").addEventListener("click", () => this.nextFinding());
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
    document.addEventListener("keydown", (event) => this.key(event));
  }

  phases() {
    const chosen = [...byId("phases").querySelectorAll("input")].filter((box) => box.checked).map((box) => box.value);
    this.view.phases = new Set(chosen);
    this.changed();
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape") {
      byId("tip").hidden = true;
      byId("grid").focus();
      return;
    }
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox") return;
    const keys = { "/": () => byId("filter").focus(), f: () => this.nextFinding(), ",": () => this.toStep(this.view.step - 1), ".": () => this.toStep(this.view.step + 1) };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  toStep(step) {
    const { view, store } = this;
    view.step = Math.max(0, Math.min(store.data.steps.length - 1, step));
    if (view.chosen && view.axis === "ranks") view.chosen = { ...view.chosen, step: view.step };
    this.changed();
    if (view.chosen) this.detail.show(store, view);
  }

  // The view is another one: controls, map and link say so.
  changed({ isLinked = true } = {}) {
    const { view, store } = this;
    const { data } = store;
    byId("step").value = view.step;
    byId("step").setAttribute("aria-valuetext", data.steps[view.step]?.label ?? "");
    byId("step-name").textContent = data.steps[view.step]?.label ?? "no step";
    byId("step").disabled = data.steps.length < 2;
    for (const [id, text] of [["filter", view.filter], ["slots", view.slots], ["ranks", view.ranks ? ranksText(view.ranks) : ""]]) {
      if (document.activeElement !== byId(id)) byId(id).value = text;
    }
    byId("axis").value = view.axis;
    for (const box of byId("phases").querySelectorAll("input")) box.checked = view.phases.has(box.value);
    this.groups();
    if (isLinked) this.map.lacking = "";
    if (this.isOddRanks) this.map.lacking = `No such rank: the ranks are 0-${data.world - 1}, and lists are written 0-3,8.`;
    this.map.layout();
    view.column = view.chosen ? this.map.columnOfChosen() : Math.min(view.column, this.map.table ? this.map.table.columns.length - 1 : -1);
    this.drawSoon();
    if (isLinked) this.link();
  }

  // Groups of ranks as buttons: what a click on their head does on the map.
  groups() {
    const { view, store } = this;
    const { alike } = store.data;
    const several = alike.map((text, group) => [text, group]).filter(([text]) => /[-,]/.test(text));
    const buttons = several.slice(0, 12).map(([text, group]) => make("button", {
      type: "button", "aria-pressed": view.unfolded.has(group), title: ranksNamed(text).slice(0, 500),
      click: () => this.map.unfold({ group, step: view.step }),
    }, `${view.unfolded.has(group) ? "fold" : "unfold"} ${ranksShort(text)}`));
    const all = `${store.data.world} ranks`;
    const words = store.data.world === 1 ? "1 rank" : alike.length === 1 ? `${all}, of which the map says the same:` : several.length ? `${all}; the map says the same of` : `${all}; the map says something else of each`;
    const focused = [...byId("groups").children].indexOf(document.activeElement);
    byId("groups").replaceChildren(words, ...buttons, several.length > 12 ? "and more: click their heads" : "");
    if (focused >= 0) byId("groups").children[focused]?.focus();
  }

  // The address names what is looked at; a cell that was opened is a page to go back to.
  link(isPlace = false) {
    const link = this.view.link(this.store);
    if (link === location.hash) return;
    if (isPlace) history.pushState(null, "", link);
    else history.replaceState(null, "", link);
  }

  follow() {
    if (!location.hash.includes("=")) return;
    this.map.lacking = this.view.follow(location.hash, this.store);
    this.changed({ isLinked: false });
    this.chosen({ isLinked: false });
    if (this.view.chosen) {
      this.map.show(this.view.row);
      byId("map").scrollIntoView({ block: "start" });
    }
  }

  chosen({ isLinked = true } = {}) {
    this.detail.show(this.store, this.view);
    this.map.draw();
    if (isLinked) this.link(true);
    this.drawSoon();
  }

  drawSoon() {
    clearTimeout(this.later);
    this.later = setTimeout(() => drawCharts(this.store, this.view, (row) => this.openRow(row)), 150);
  }

  // Look at a module as a whole: at its first cell that is not in order, else at its first.
  openRow(row, isFocused = false) {
    this.view.choose(this.store, row, null, []);
    this.arrive(isFocused);
  }

  go(row, phase) {
    const ranks = this.view.chosen ? [this.view.chosen.rank] : [];
    this.view.choose(this.store, row, phase, ranks);
    this.arrive(true);
  }

  arrive(isFocused) {
    this.map.lacking = "";
    this.changed({ isLinked: false });
    this.view.column = this.map.columnOfChosen();
    this.map.show(this.view.row);
    this.chosen();
    if (isFocused) byId("detail").focus({ preventScroll: true });
  }

  nextFinding() {
    const { findings } = this.store.data;
    if (!findings.length) return;
    this.finding = ((this.finding ?? -1) + 1) % findings.length;
    const found = findings[this.finding];
    byId("next-finding").textContent = `next finding (${this.finding + 1} of ${findings.length})`;
    this.view.step = found.t;
    this.view.choose(this.store, found.m, found.p, ranksOf(found.r, this.store.data.world).slice(0, 1));
    this.arrive(false);
    byId("grid").focus({ preventScroll: true });
    byId("map").scrollIntoView({ block: "nearest" });
  }

  // Newer data of the same trace: where one looks stays.
  renew(store) {
    const was = this.view.link(this.store);
    const wasLast = this.view.step === this.store.data.steps.length - 1;
    const open = new Set([...this.view.open].map((row) => this.store.tree.paths[row]));
    this.store = store;
    const fresh = new View(store);
    Object.assign(this.view, fresh);
    store.tree.paths.forEach((path, row) => { if (open.has(path)) this.view.open.add(row); });
    this.view.follow(was, store);
    if (wasLast && !this.view.chosen) this.view.step = store.data.steps.length - 1;
    this.map.cells.clear();
    this.fill();
    this.map.reset(store, this.view);
    this.changed({ isLinked: false });
    if (this.view.chosen) this.detail.show(store, this.view);
  }
}

const textOf = (id) => byId(id)?.textContent ?? null;
const page = new Page(new Store(JSON.parse(textOf("data")), (id) => textOf(`packed-${id}`)));

follow((content) => {
  document.title = `rankscope - ${content.title}`;
  for (const [name, id] of Object.entries(SECTIONS)) {
    const opened = [...byId(id).querySelectorAll("details")].map((each) => each.open);
    byId(id).innerHTML = content.sections[name];
    [...byId(id).querySelectorAll("details")].forEach((each, at) => { each.open = opened[at] ?? each.open; });
  }
  page.renew(new Store(content.data, (id) => content.packed[id] ?? null));
});
