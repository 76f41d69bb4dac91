// The map: names as rows of a tree, cells on a canvas; only what is in sight is made.

const ROW = 20;
const HEAD = 58;
const GLYPHS = { differs: "\u2260", "not-finite": "N", missing: "\u2013", raised: "!", "not-left": "\u2026", above: "\u00b7", "far-above": "\u2260", beyond: "\u2260" };

class CellMap {
  constructor(store, view, heard) {
    this.heard = heard; // {chosen(), opened(), moved()}
    this.grid = byId("grid");
    this.canvas = byId("cells");
    this.scroller = byId("scroller");
    this.tip = byId("tip");
    this.pool = [];
    this.cells = new Map();
    this.lacking = ""; // what the link that was followed names and the page has not
    this.reset(store, view);
    this.scroller.addEventListener("scroll", () => {
      this.tip.hidden = true;
      this.draw();
    }, { passive: true });
    new ResizeObserver(() => this.layout()).observe(this.scroller);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolor());
    matchMedia("print").addEventListener("change", () => this.recolor());
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("click", (event) => {
      this.grid.focus({ preventScroll: true });
      this.click(event);
    });
    this.grid.addEventListener("keydown", (event) => this.key(event));
    this.grid.addEventListener("focus", () => this.draw());
  }

  reset(store, view) {
    this.store = store;
    this.view = view;
    this.marks = new Map();
    for (const finding of store.data.findings) {
      const ranks = new Set(ranksOf(finding.r, store.data.world));
      const mark = { finding, ranks };
      for (const row of [finding.m, ...store.tree.around(finding.m)]) {
        const key = `${row} ${finding.t} ${finding.p}`;
        if (!this.marks.has(key)) this.marks.set(key, []);
        this.marks.get(key).push(mark);
      }
    }
    this.recolor();
  }

  recolor() {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colors = this.store.data.class_names.map(value);
    this.ink = { mark: value("mark"), glyph: value("glyph"), soft: value("soft"), chosen: value("chosen"), text: value("text"), line: value("line") };
    this.layout();
  }

  // Everything that depends on which rows and columns there are.
  layout() {
    const { view, store } = this;
    if (!this.scroller.clientWidth) return;
    const pattern = view.filter ? globOf(view.filter.includes("*") ? view.filter : `*${view.filter}*`) : null;
    this.rows = store.tree.visible((row) => view.open.has(row), pattern);
    this.place = new Map(this.rows.map(({ row }, at) => [row, at]));
    const wide = this.scroller.clientWidth;
    this.names = Math.max(120, Math.min(360, Math.floor(wide * 0.42)));
    this.table = columnsOf(store, view, wide - this.names - 4);
    const isPrinted = matchMedia("print").matches;
    const high = isPrinted ? HEAD + Math.min(this.rows.length, 200) * ROW : this.scroller.clientHeight;
    const spacer = byId("spacer").style;
    spacer.height = `${Math.max(HEAD + this.rows.length * ROW, isPrinted ? high : 0)}px`;
    spacer.width = `${this.names + this.table.width}px`;
    const layer = byId("layer").style;
    layer.width = `${wide}px`;
    layer.height = `${high}px`;
    this.high = high;
    this.grid.style.width = `${this.names}px`;
    this.canvas.style.left = `${this.names}px`;
    this.grid.setAttribute("aria-rowcount", this.rows.length);
    byId("no-match").textContent = !view.phases.size ? "No phase is chosen." : this.rows.length ? this.lacking : `No module matches ${view.filter}: * stands for anything, also for dots.`;
    this.want();
    this.draw();
  }

  // Ask for the cells that are shown; they are drawn when they have come.
  want() {
    const { view, store } = this;
    const isKind = (kind) => view.isKind(kind);
    const wanted = new Set(this.table.columns.map(({ step, phase }) => `${step} ${phase}`));
    const turn = (this.turn = (this.turn ?? 0) + 1);
    for (const key of wanted) {
      const [step, phase] = key.split(" ");
      store.cells(Number(step), phase, isKind).then((cells) => {
        if (turn !== this.turn) return;
        if (this.cells.get(key) === cells && this.slots === view.slots) return;
        this.cells.set(key, cells);
        this.draw();
      });
    }
    for (const key of this.cells.keys()) if (!wanted.has(key)) this.cells.delete(key);
    this.slots = view.slots;
  }

  draw() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.paint();
    });
  }

  // The class of one cell, and what is behind it if the row is folded.
  classOf(row, column) {
    const cells = this.cells.get(`${column.step} ${column.phase}`);
    if (!cells) return null;
    let own = 0;
    let below = 0;
    for (const rank of column.probe) {
      const at = row * this.store.data.world + rank;
      if (cells.own[at] > own) own = cells.own[at];
      if (cells.below[at] > below) below = cells.below[at];
    }
    return { own, below };
  }

  marksOf(row, column) {
    const marks = this.marks.get(`${row} ${column.step} ${column.phase}`);
    if (!marks) return [];
    const isShown = (mark) => this.view.isKind(mark.finding.sort) && column.ranks.some((rank) => mark.ranks.has(rank));
    return marks.filter((mark) => (mark.finding.m === row || !this.isUnfolded(row)) && isShown(mark));
  }

  isUnfolded(row) {
    const at = this.place.get(row);
    const next = this.rows[at + 1];
    return next !== undefined && this.store.tree.depth[next.row] > this.store.tree.depth[row];
  }

  paint() {
    const { canvas, table, scroller, view } = this;
    const wide = Math.max(1, scroller.clientWidth - this.names);
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(wide * scale) || canvas.height !== Math.round(this.high * scale)) {
      canvas.width = Math.round(wide * scale);
      canvas.height = Math.round(this.high * scale);
      canvas.style.width = `${wide}px`;
      canvas.style.height = `${this.high}px`;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, wide, this.high);
    const { scrollLeft, scrollTop } = scroller;
    const first = Math.floor(scrollTop / ROW);
    const last = Math.min(this.rows.length, first + Math.ceil((this.high - HEAD) / ROW) + 1);
    const seen = table.columns.filter((column) => column.x + table.cell > scrollLeft && column.x < scrollLeft + wide);
    const y = (at) => HEAD + at * ROW - scrollTop;
    pen.save();
    pen.beginPath();
    pen.rect(0, HEAD, wide, this.high - HEAD);
    pen.clip();
    for (let at = first; at < last; at += 1) this.paintRow(pen, at, y(at), seen, scrollLeft);
    pen.restore();
    this.paintHead(pen, seen, scrollLeft, wide);
    this.drawNames(first, last, scrollTop);
    if (view.column >= 0 && table.columns[view.column]) this.said(view.row, table.columns[view.column]);
  }

  paintRow(pen, at, top, seen, left) {
    const { row } = this.rows[at];
    const { cell } = this.table;
    const hasInside = this.store.tree.children[row].length && !this.isUnfolded(row);
    const high = ROW - 3;
    const width = cell - (cell > 6 ? 2 : 1);
    for (const column of seen) {
      const found = this.classOf(row, column);
      if (!found) continue;
      const x = column.x - left;
      if (found.own) {
        pen.fillStyle = this.colors[found.own];
        pen.fillRect(x, top + 1, width, high);
      }
      if (hasInside && found.below > found.own) {
        pen.fillStyle = this.colors[found.below];
        pen.fillRect(x, top + 1 + high / 2, width, high / 2);
      }
      const shown = hasInside ? found.below : found.own;
      const glyph = GLYPHS[this.store.data.class_names[shown]];
      if (glyph && cell >= 12) {
        pen.fillStyle = this.ink.glyph;
        pen.font = "bold 11px sans-serif";
        pen.textAlign = "center";
        pen.textBaseline = "middle";
        pen.fillText(glyph, x + width / 2, top + 1 + (hasInside && found.below > found.own ? (3 * high) / 4 : high / 2));
      }
      const marks = this.marksOf(row, column);
      if (marks.length) {
        const isOrigin = marks.some((mark) => mark.finding.origin && mark.finding.m === row);
        const isInside = marks.some((mark) => mark.finding.origin);
        const isWarning = marks.some((mark) => mark.finding.severity === "warning");
        if (isInside || isWarning) {
          pen.strokeStyle = this.ink.mark;
          pen.lineWidth = 2;
          pen.setLineDash(isOrigin ? [] : [2, 2]);
          pen.strokeRect(x + 1, top + 2, width - 2, high - 2);
          pen.setLineDash([]);
        }
      }
      if (this.isChosen(row, column)) {
        pen.strokeStyle = this.ink.chosen;
        pen.lineWidth = 2;
        pen.strokeRect(x - 1, top, width + 2, high + 2);
      }
    }
  }

  isChosen(row, column) {
    const { view } = this;
    if (document.activeElement === this.grid && view.row === row && this.table.columns[view.column] === column) return true;
    const at = view.chosen;
    return at !== null && at.row === row && at.step === column.step && at.phase === column.phase && column.ranks.includes(at.rank);
  }

  paintHead(pen, seen, left, wide) {
    const { table } = this;
    pen.font = "11px sans-serif";
    pen.textBaseline = "middle";
    const next = table.blocks.map((block, at) => table.blocks[at + 1]?.x ?? Infinity);
    let free = -Infinity; // where the label before ends
    table.blocks.forEach((block, at) => {
      const x = block.x - left;
      if (block.group < 0 || x + block.width < -60 || x > wide || x < free) return;
      const room = next[at] - left - x - 3;
      const wideness = (text) => pen.measureText(text).width;
      const isAlone = !block.isWhole && room < 44;
      const label = [ranksNamed(block.label), block.label, block.label.replace(/,.*/, ",\u2026")].find((each) => wideness(each) <= room)
        ?? (isAlone ? block.label : "");
      pen.fillStyle = this.ink.text;
      pen.textAlign = "left";
      pen.fillText(label, x, 30);
      if (isAlone) free = x + wideness(label) + 8;
    });
    this.paintSteps(pen, left, wide);
    if (table.cell < 8) return;
    pen.fillStyle = this.ink.soft;
    pen.textAlign = "center";
    for (const column of seen) pen.fillText(letterOf(column.phase), column.x - left + table.cell / 2 - 1, 48);
  }

  // The steps above their columns; a line where another one begins.
  paintSteps(pen, left, wide) {
    const { blocks } = this.table;
    const starts = blocks.filter((block, at) => at === 0 || blocks[at - 1].step !== block.step);
    const labels = starts.map((block) => this.store.data.steps[block.step].label);
    const isShort = starts.some((block, at) => at + 1 < starts.length && starts[at + 1].x - block.x < labels[at].length * 6);
    starts.forEach((block, number) => {
      const x = block.x - left;
      const end = number + 1 < starts.length ? starts[number + 1].x - left - 4 : Math.max(wide, x + 200);
      if (end < 0 || x > wide) return;
      pen.save();
      pen.beginPath();
      pen.rect(x, 0, end - x, 20);
      pen.clip();
      const isNow = block.step === this.view.step && starts.length > 1;
      pen.fillStyle = isNow ? this.ink.chosen : this.ink.text;
      pen.font = isNow ? "bold 11px sans-serif" : "11px sans-serif";
      pen.textAlign = "left";
      const { label } = this.store.data.steps[block.step];
      const shown = isShort ? label.replace(/^\w+ step /, "") : label;
      const room = number + 1 < starts.length ? end - Math.max(x, 2) : Infinity;
      if (pen.measureText(shown).width <= room) pen.fillText(shown, Math.max(x, 2), 11);
      pen.restore();
      if (number && this.view.axis === "both") {
        pen.strokeStyle = this.ink.line;
        pen.lineWidth = 1;
        pen.beginPath();
        pen.moveTo(x - 3.5, 2);
        pen.lineTo(x - 3.5, this.high);
        pen.stroke();
      }
    });
  }

  drawNames(first, last, scrollTop) {
    const { tree } = this.store;
    while (this.pool.length < last - first) this.pool.push(this.newRow());
    this.pool.forEach((line, number) => {
      const at = first + number;
      line.element.hidden = at >= last;
      if (at >= last) return;
      const { row, isContext } = this.rows[at];
      const hasInside = tree.children[row].length > 0;
      const isOpen = this.isUnfolded(row);
      const { element } = line;
      const known = `${row} ${isOpen} ${isContext} ${this.view.row === row} ${at}`;
      element.style.top = `${HEAD + at * ROW - scrollTop}px`;
      if (line.known !== known || line.turn !== this.turn) {
        line.known = known;
        line.turn = this.turn;
        line.row = row;
        element.id = `row-${row}`;
        element.className = `row${this.view.row === row ? " at" : ""}${isContext ? " context" : ""}`;
        element.setAttribute("aria-level", tree.depth[row] + 1);
        element.setAttribute("aria-rowindex", at + 1);
        element.setAttribute("aria-selected", this.view.row === row);
        if (hasInside) element.setAttribute("aria-expanded", isOpen);
        else element.removeAttribute("aria-expanded");
        line.fold.textContent = isOpen ? "\u25be" : "\u25b8";
        line.fold.classList.toggle("leaf", !hasInside);
        line.fold.style.marginLeft = `${Math.min(tree.depth[row], 12) * 10}px`;
        line.name.replaceChildren(tree.name(row).slice(0, 200), make("span", { class: "class" }, tree.classes[row].slice(0, 80)));
        line.name.title = `${tree.paths[row].slice(0, 500) || "(root)"}  ${tree.classes[row].slice(0, 200)}`;
      }
      if (this.view.row === row || first + 3 > at) line.unseen.textContent = this.rowText(row);
    });
    const at = document.getElementById(`row-${this.view.row}`);
    if (at && !at.hidden) this.grid.setAttribute("aria-activedescendant", at.id);
    else this.grid.removeAttribute("aria-activedescendant");
  }

  newRow() {
    const fold = make("span", { class: "fold", "aria-hidden": "true" });
    const name = make("span", { class: "name", role: "gridcell" });
    const unseen = make("span", { class: "unseen", role: "gridcell" });
    const element = make("div", { role: "row", class: "row" }, fold, name, unseen);
    const line = { element, fold, name, unseen, row: -1, known: "", turn: -1 };
    fold.addEventListener("click", (event) => {
      event.stopPropagation();
      this.fold(line.row);
    });
    element.addEventListener("click", () => {
      this.view.row = line.row;
      this.view.column = -1;
      this.heard.openedRow(line.row);
    });
    element.addEventListener("dblclick", () => this.fold(line.row));
    this.grid.append(element);
    return line;
  }

  // What the cells of a row say, those that say the same together.
  rowText(row) {
    const told = new Map();
    for (const column of this.table.columns) {
      const found = this.classOf(row, column);
      if (!found || !found.own) continue;
      const word = this.store.data.classes[found.own];
      const where = this.view.axis === "steps" ? this.store.data.steps[column.step].label : ranksNamed(ranksText(column.ranks));
      const key = `${column.phase}: ${word}`;
      if (!told.has(key)) told.set(key, []);
      told.get(key).push(where);
    }
    const parts = [...told].map(([key, where]) => `${key} on ${where.slice(0, 8).join(", ")}${where.length > 8 ? " and more" : ""}`);
    return parts.join("; ") || "no call";
  }

  fold(row) {
    const { open } = this.view;
    if (!this.store.tree.children[row].length) return;
    if (this.isUnfolded(row)) open.delete(row);
    else open.add(row);
    this.layout();
  }

  columnAt(x) {
    const { columns, cell } = this.table;
    return columns.findIndex((column) => x >= column.x && x < column.x + cell);
  }

  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const y = event.clientY - box.top;
    const x = event.clientX - box.left + this.scroller.scrollLeft;
    const block = this.table.blocks.find((each) => x >= each.x && x < each.x + each.width);
    if (y < HEAD) return { block, isHead: true };
    const at = Math.floor((y - HEAD + this.scroller.scrollTop) / ROW);
    const column = this.columnAt(x);
    if (!this.rows[at] || column < 0) return null;
    return { row: this.rows[at].row, number: column, column: this.table.columns[column] };
  }

  point(event) {
    const found = this.under(event);
    this.canvas.style.cursor = found && (found.column || found.block) ? "pointer" : "default";
    this.tip.hidden = !found || (found.isHead && !found.block);
    if (this.tip.hidden) return;
    if (found.isHead) this.tip.textContent = found.block.group >= 0 ? `${ranksNamed(ranksText(found.block.ranks))}: ${found.block.isWhole ? "alike everywhere; click to unfold" : "click to fold"}` : found.block.label;
    else this.tip.textContent = this.cellText(found.row, found.column);
    const box = byId("map").getBoundingClientRect();
    const x = Math.min(event.clientX - box.left + 14, Math.max(0, box.width - this.tip.offsetWidth - 4));
    this.tip.style.left = `${Math.max(0, x)}px`;
    const y = event.clientY - box.top + 22;
    this.tip.style.top = `${y + this.tip.offsetHeight > box.height ? Math.max(0, y - 30 - this.tip.offsetHeight) : y}px`;
  }

  cellText(row, column) {
    const { data, tree } = this.store;
    const found = this.classOf(row, column) ?? { own: 0, below: 0 };
    const path = tree.paths[row].slice(0, 200) || "(root)";
    let said = `${path}, ${phaseOf(column.phase, data.steps[column.step])}, ${ranksNamed(ranksText(column.ranks))}: ${data.classes[found.own]}`;
    if (found.below > found.own && !this.isUnfolded(row)) said += `; inside: ${data.classes[found.below]}`;
    const mark = this.marksOf(row, column).sort((a, b) => b.finding.origin - a.finding.origin)[0];
    if (mark) said += `. ${mark.finding.origin ? "Origin" : mark.finding.severity === "warning" ? "Warning" : "Follows"}: ${mark.finding.kind}: ${mark.finding.text}`;
    return said;
  }

  said(row, column) {
    const text = this.cellText(row, column);
    if (byId("said").textContent !== text) byId("said").textContent = text;
  }

  click(event) {
    const found = this.under(event);
    if (!found) return;
    if (found.isHead) {
      if (found.block) this.unfold(found.block);
      return;
    }
    this.view.row = found.row;
    this.view.column = found.number;
    this.openCell(found.row, found.column);
  }

  unfold(block) {
    const { view } = this;
    if (block.group < 0) {
      view.axis = "ranks";
      view.step = block.step;
      this.heard.changed();
      return;
    }
    if (view.unfolded.has(block.group)) view.unfolded.delete(block.group);
    else view.unfolded.add(block.group);
    if (view.axis === "both" && !fitsBeside(this.store, view.unfolded)) view.axis = "ranks";
    this.heard.changed();
  }

  // The first row inside a folded one that says the worst that is inside.
  worstInside(row, column) {
    const { own, below } = this.classOf(row, column) ?? { own: 0, below: 0 };
    if (own || !below || this.isUnfolded(row)) return row;
    const { tree } = this.store;
    const from = tree.order.indexOf(row);
    for (let at = from + 1; at < tree.order.length && tree.depth[tree.order[at]] > tree.depth[row]; at += 1) {
      if ((this.classOf(tree.order[at], column)?.own ?? 0) === below) return tree.order[at];
    }
    return row;
  }

  openCell(folded, column) {
    const row = this.worstInside(folded, column);
    if (row !== folded) {
      this.view.reveal(this.store.tree, row);
      this.view.row = row;
      this.layout();
      this.show(row);
    }
    this.view.chosen = { row, step: column.step, phase: column.phase, ranks: column.ranks, rank: column.ranks[0] };
    this.draw();
    this.heard.chosen();
  }

  // Bring a row, and the chosen column, into sight.
  show(row) {
    const at = this.place.get(row);
    if (at === undefined) return;
    const top = at * ROW;
    const room = this.high - HEAD - ROW;
    if (top < this.scroller.scrollTop || top > this.scroller.scrollTop + room - 2 * ROW) this.scroller.scrollTop = Math.max(0, top - room / 2);
    const column = this.table.columns[this.view.column];
    if (column) {
      const wide = this.scroller.clientWidth - this.names - this.table.cell;
      const left = this.scroller.scrollLeft;
      if (column.x < left || column.x > left + wide) this.scroller.scrollLeft = Math.max(0, column.x - wide / 2);
    }
    this.draw();
  }

  // The column that the chosen cell is in, -1 for none.
  columnOfChosen() {
    const at = this.view.chosen;
    if (!at) return -1;
    return this.table.columns.findIndex((c) => c.step === at.step && c.phase === at.phase && c.ranks.includes(at.rank));
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const { view, table } = this;
    const { tree } = this.store;
    const at = this.place.get(view.row) ?? 0;
    const isOpen = this.isUnfolded(view.row);
    const move = (to) => {
      view.row = this.rows[Math.max(0, Math.min(this.rows.length - 1, to))].row;
    };
    const page = Math.max(1, Math.floor((this.high - HEAD) / ROW) - 1);
    switch (event.key) {
      case "ArrowDown": move(at + 1); break;
      case "ArrowUp": move(at - 1); break;
      case "PageDown": move(at + page); break;
      case "PageUp": move(at - page); break;
      case "Home": if (event.shiftKey) move(0); else view.column = -1; break;
      case "End": if (event.shiftKey) move(this.rows.length - 1); else view.column = table.columns.length - 1; break;
      case "ArrowRight":
        if (view.column < 0 && tree.children[view.row].length && !isOpen) this.fold(view.row);
        else view.column = Math.min(table.columns.length - 1, view.column + 1);
        break;
      case "ArrowLeft":
        if (view.column >= 0) view.column -= 1;
        else if (isOpen) this.fold(view.row);
        else if (tree.parents[view.row] >= 0) view.row = tree.parents[view.row];
        break;
      case " ": this.fold(view.row); break;
      case "Enter":
        if (view.column >= 0 && table.columns[view.column]) {
          this.openCell(view.row, table.columns[view.column]);
          byId("detail").focus({ preventScroll: false });
        } else this.heard.openedRow(view.row, true);
        break;
      case "u": {
        const block = table.columns[view.column]?.block ?? table.blocks[0];
        if (block) this.unfold(block);
        break;
      }
      default: return;
    }
    event.preventDefault();
    if (view.column < 0) byId("said").textContent = "";
    this.show(view.row);
  }
}
