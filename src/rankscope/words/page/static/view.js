// What is looked at, and the same as a link: #path=layers.0&step=3&phase=forward&rank=5

const OPEN_ROWS = 60;
const MOST_BESIDE = 48;
const AXES = ["both", "ranks", "steps"];

// True where all steps of all groups of ranks fit beside each other.
function fitsBeside(store, unfolded) {
  const ranks = store.data.alike.reduce((sum, text, group) => sum + (unfolded.has(group) ? ranksOf(text, store.data.world).length : 1), 0);
  return store.planes.size * ranks <= (unfolded.size ? 2 * MOST_BESIDE : MOST_BESIDE);
}

class View {
  constructor(store) {
    this.open = new Set();
    this.unfolded = new Set();
    this.phases = new Set(store.phases);
    this.filter = "";
    this.slots = "";
    this.ranks = null;
    this.axis = fitsBeside(store, this.unfolded) ? "both" : "ranks";
    this.step = 0;
    this.row = store.tree.roots[0] ?? 0;
    this.column = -1; // -1: the name of the row
    this.chosen = null; // {row, step, phase, ranks}
    this.begin(store);
  }

  // Open what fits and what leads to findings; begin at the step of the first finding.
  begin(store) {
    const { tree, data } = store;
    let level = tree.roots;
    let count = level.length;
    while (level.length) {
      const inside = level.flatMap((row) => tree.children[row]);
      count += inside.length;
      if (!inside.length || count > OPEN_ROWS) break;
      for (const row of level) this.open.add(row);
      level = inside;
    }
    const origins = data.findings.filter((finding) => finding.origin);
    for (const finding of origins.slice(0, 20)) this.reveal(tree, finding.m);
    const first = origins[0] ?? data.findings[0];
    const plain = data.steps.findIndex((step) => !/setup$/.test(step.key));
    this.step = first ? first.t : Math.max(plain, 0);
    this.first = first ?? null;
    if (first) this.row = first.m;
  }

  reveal(tree, row) {
    for (const outer of tree.around(row)) this.open.add(outer);
  }

  isKind(kind) {
    if (!this.slots) return true;
    const head = this.slots.split(/[:.]/)[0];
    const pattern = globOf(head);
    return pattern !== null && pattern.test(kind);
  }

  isSlot(name) {
    const pattern = this.slots ? globOf(this.slots) : null;
    return pattern === null || pattern.test(name) || pattern.test(name.split(/[:.]/)[0]);
  }

  link(store) {
    const parts = new URLSearchParams();
    const at = this.chosen;
    if (at) parts.set("path", store.tree.paths[at.row]);
    parts.set("step", store.data.steps[this.step]?.key ?? "");
    if (at) {
      parts.set("phase", at.phase);
      parts.set("rank", ranksText(at.ranks));
    }
    parts.set("columns", this.axis);
    if (this.filter) parts.set("filter", this.filter);
    if (this.slots) parts.set("slots", this.slots);
    if (this.ranks) parts.set("ranks", ranksText(this.ranks));
    if (this.phases.size && this.phases.size < store.phases.length) parts.set("phases", [...this.phases].join(","));
    return `#${parts}`;
  }

  // Take a link; return what of it this page does not have, in words.
  follow(text, store) {
    const parts = new URLSearchParams(text.replace(/^#/, ""));
    const { tree, data } = store;
    if (![...parts.keys()].length || !text.includes("=")) return "";
    const lacking = [];
    if (parts.has("step")) {
      const step = data.steps.findIndex((each) => each.key === parts.get("step"));
      if (step >= 0) this.step = step;
      else lacking.push(`step ${parts.get("step")}`);
    }
    this.filter = parts.get("filter") ?? "";
    this.slots = parts.get("slots") ?? "";
    this.ranks = parts.has("ranks") ? ranksOf(parts.get("ranks"), data.world) : null;
    if (AXES.includes(parts.get("columns"))) this.axis = parts.get("columns");
    const phases = (parts.get("phases") ?? "").split(",").filter((phase) => store.phases.includes(phase));
    this.phases = new Set(phases.length ? phases : store.phases);
    this.chosen = null;
    if (parts.has("path")) {
      const row = tree.paths.indexOf(parts.get("path"));
      if (row < 0) lacking.push(`module ${parts.get("path") || "(root)"}`);
      else this.choose(store, row, parts.get("phase"), ranksOf(parts.get("rank") ?? "", data.world) ?? []);
    }
    return lacking.length ? `This page has no ${lacking.join(" and no ")}.` : "";
  }

  choose(store, row, phase, ranks) {
    const { data, tree } = store;
    const here = store.phases.filter((each) => store.planes.has(`${this.step} ${each}`));
    this.row = row;
    this.reveal(tree, row);
    const finding = data.findings.find((each) => each.m === row && each.t === this.step);
    const wanted = here.includes(phase) ? phase : finding?.p ?? here[0];
    if (!wanted) return;
    if (!this.phases.has(wanted)) this.phases.add(wanted);
    let found = ranks;
    if (!found.length) found = finding ? ranksOf(finding.r, data.world) : ranksOf(data.alike[0], data.world);
    if (this.ranks && !found.some((rank) => this.ranks.includes(rank))) this.ranks = null;
    if (found.length === 1) {
      const groups = data.alike.map((text) => ranksOf(text, data.world));
      found = groups.find((group) => group.includes(found[0])) ?? found;
    }
    this.chosen = { row, step: this.step, phase: wanted, ranks: found, rank: ranks[0] ?? found[0] };
  }
}
