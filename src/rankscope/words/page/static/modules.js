// The modules as a tree that folds.

class ModuleTree {
  constructor({ paths, classes, parents, turns }) {
    this.paths = paths;
    this.classes = classes;
    this.parents = parents;
    this.children = paths.map(() => []);
    this.roots = [];
    parents.forEach((parent, row) => (parent < 0 ? this.roots : this.children[parent]).push(row));
    for (const rows of [this.roots, ...this.children]) rows.sort((a, b) => turns[a] - turns[b]);
    this.order = [];
    this.depth = new Int32Array(paths.length);
    const waiting = [...this.roots].reverse();
    while (waiting.length) {
      const row = waiting.pop();
      this.order.push(row);
      const parent = parents[row];
      this.depth[row] = parent < 0 ? 0 : this.depth[parent] + 1;
      for (let at = this.children[row].length - 1; at >= 0; at -= 1) waiting.push(this.children[row][at]);
    }
  }

  // The rows, each behind those inside it: as their outputs come about.
  get inner() {
    const found = [];
    const walk = (rows) => rows.forEach((row) => {
      walk(this.children[row]);
      found.push(row);
    });
    walk(this.roots);
    return found;
  }

  // For every row and rank the greatest class of the row and of all rows inside it.
  greatest(own, world) {
    const below = new Uint8Array(own);
    for (let at = this.order.length - 1; at >= 0; at -= 1) {
      const row = this.order[at];
      const parent = this.parents[row];
      if (parent < 0) continue;
      const from = row * world;
      const to = parent * world;
      for (let rank = 0; rank < world; rank += 1) {
        if (below[from + rank] > below[to + rank]) below[to + rank] = below[from + rank];
      }
    }
    return below;
  }

  around(row) {
    const found = [];
    for (let at = this.parents[row]; at >= 0; at = this.parents[at]) found.push(at);
    return found;
  }

  // The last part of a path: the tree shows where it is.
  name(row) {
    const path = this.paths[row];
    const parent = this.parents[row];
    if (path === "") return "(root)";
    const around = parent < 0 ? "" : this.paths[parent];
    return around && path.startsWith(`${around}.`) ? path.slice(around.length + 1) : path;
  }

  // Rows that are seen, in order: of a filter those that match and those around them.
  visible(isOpen, pattern) {
    let wanted = null;
    if (pattern) {
      wanted = new Map();
      for (const row of this.order) {
        if (!pattern.test(this.paths[row])) continue;
        wanted.set(row, true);
        for (const outer of this.around(row)) if (!wanted.has(outer)) wanted.set(outer, false);
      }
    }
    const found = [];
    const walk = (rows) => {
      for (const row of rows) {
        if (wanted && !wanted.has(row)) continue;
        found.push({ row, isContext: wanted !== null && !wanted.get(row) });
        if (this.children[row].length && (isOpen(row) || (wanted && this.children[row].some((each) => wanted.has(each))))) {
          walk(this.children[row]);
        }
      }
    };
    walk(this.roots);
    return found;
  }
}
