// The data of the page. Packed data is inflated when it is first asked for, and kept while there is room.

const MOST_MERGED = 48;

class Store {
  constructor(data, packed) {
    this.data = data;
    this.packed = packed; // id -> base64 text, or null
    this.inflated = new Map();
    this.merged = new Map();
    this.planes = new Map();
    for (const [step, phase, kind, id] of data.planes) {
      const key = `${step} ${phase}`;
      if (!this.planes.has(key)) this.planes.set(key, []);
      this.planes.get(key).push([kind, id]);
    }
    this.phases = [...new Set(data.planes.map(([, phase]) => phase))];
    this.tree = new ModuleTree(data.modules);
  }

  async bytes(id) {
    if (!this.inflated.has(id)) {
      const text = this.packed(id);
      this.inflated.set(id, text === null ? Promise.resolve(null) : inflate(text));
    }
    return this.inflated.get(id);
  }

  async json(id) {
    const bytes = await this.bytes(id);
    return bytes === null ? null : JSON.parse(new TextDecoder().decode(bytes));
  }

  // {own, below}: the class of every module and rank in a phase of a step, and the greatest of a module
  // and all inside it; null where the phase has no call.
  async cells(step, phase, isKind) {
    const kinds = (this.planes.get(`${step} ${phase}`) ?? []).filter(([kind]) => isKind(kind));
    if (!kinds.length) return null;
    const key = kinds.map(([, id]) => id).join(" ");
    if (!this.merged.has(key)) {
      const planes = await Promise.all(kinds.map(([, id]) => this.bytes(id)));
      const own = planes.length === 1 ? planes[0] : new Uint8Array(planes[0]);
      for (const plane of planes.slice(1)) {
        for (let at = 0; at < own.length; at += 1) if (plane[at] > own[at]) own[at] = plane[at];
      }
      if (this.merged.size >= MOST_MERGED) this.merged.delete(this.merged.keys().next().value);
      this.merged.set(key, { own, below: this.tree.greatest(own, this.data.world) });
      for (const [, id] of kinds) this.inflated.delete(id);
    }
    return this.merged.get(key);
  }

  // The calls behind the cells of a module, of all steps that are here; null where none are.
  async calls(row) {
    const block = Math.floor(row / this.data.rows_per_block);
    if (!this.data.blocks.includes(block)) return null;
    const calls = await this.json(`d${block}`);
    return calls.filter((call) => call.m === row);
  }
}

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
