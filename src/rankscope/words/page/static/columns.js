// The columns of the map: a cell wide for each phase, together for each group of ranks or for each step.

const GAP = 6;
const WIDEST = 18;
const NARROWEST = 4;
const READABLE = 10;
const MANY = 500;
const LEAST_STEP = 42;
const letterOf = (phase) => phase[0].toUpperCase();

// Return {columns: [{x, step, phase, ranks, block}], blocks: [{x, width, label, ranks, group, isWhole}], width, cell}.
// `ranks` of a column are those its cell stands for; `probe` has one of each group, because all of a group are alike.
function columnsOf(store, view, room) {
  const { data } = store;
  const chosen = view.ranks === null ? null : new Set(view.ranks);
  const blocks = [];
  const taken = view.axis === "both" ? data.steps.map((_, number) => number) : [view.step];
  const groups = data.alike.map((text) => ranksOf(text, data.world));
  if (view.axis === "steps") {
    const kept = groups.map((ranks) => (chosen ? ranks.filter((rank) => chosen.has(rank)) : ranks)).filter((ranks) => ranks.length);
    const every = kept.flat().sort((a, b) => a - b);
    const probe = kept.map((ranks) => ranks[0]);
    data.steps.forEach((step, number) => {
      blocks.push({ label: step.label, step: number, ranks: every, probe, group: -1, isWhole: true });
    });
  } else {
    for (const step of taken) {
      groups.forEach((all, group) => {
        const ranks = chosen ? all.filter((rank) => chosen.has(rank)) : all;
        if (!ranks.length) return;
        if (view.unfolded.has(group) && ranks.length > 1) {
          for (const rank of ranks) blocks.push({ label: `${rank}`, step, ranks: [rank], probe: [rank], group, isWhole: false });
        } else {
          blocks.push({ label: ranksText(ranks), step, ranks, probe: [ranks[0]], group, isWhole: ranks.length > 1 });
        }
      });
    }
  }
  const phases = (step) => store.phases.filter((phase) => view.phases.has(phase) && store.planes.has(`${step} ${phase}`));
  const count = blocks.reduce((sum, block) => sum + Math.max(phases(block.step).length, 1), 0);
  const cell = Math.max(count > MANY ? NARROWEST : READABLE, Math.min(WIDEST, Math.floor((room - blocks.length * GAP) / Math.max(count, 1))));
  const gap = cell > NARROWEST + 2 ? GAP : 2;
  const columns = [];
  let x = gap;
  let start = -Infinity;
  blocks.forEach((block, at) => {
    if (at && blocks[at - 1].step !== block.step) {
      x = Math.max(x, start + LEAST_STEP);
      start = x;
    } else if (!at) start = x;
    block.x = x;
    for (const phase of phases(block.step)) {
      columns.push({ x, phase, step: block.step, ranks: block.ranks, probe: block.probe, block });
      x += cell;
    }
    x = Math.max(x, block.x + cell);
    block.width = x - block.x;
    x += gap;
  });
  return { columns, blocks, width: x, cell };
}
