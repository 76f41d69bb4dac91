// The ranks of a mesh drawn where they are, with the piece of a value that each holds.

const BOX = { wide: 58, high: 30 };
const MOST_BOXES = 512;

// Return a picture; null where the layout names no mesh that the page knows.
//   layout: {mesh, p: {axis: placement}}; letters: Map of rank -> letter of the value it holds.
function meshPicture(store, layout, letters) {
  const mesh = store.data.meshes[layout.mesh];
  if (!mesh || !layout.p) return null;
  const groups = mesh.over.filter((ranks) => ranks.some((rank) => letters.has(rank)));
  const count = groups.reduce((sum, ranks) => sum + ranks.length, 0);
  if (!count || count > MOST_BOXES) return null;
  const pieces = new Map();
  const columns = mesh.shape[mesh.shape.length - 1] ?? 1;
  const picture = drawn("svg", { role: "img" });
  let top = 0;
  let wide = 0;
  for (const ranks of groups) {
    ranks.forEach((rank, place) => {
      const at = coordinates(place, mesh.shape);
      const piece = pieceOf(at, mesh, layout.p);
      if (!pieces.has(piece)) pieces.set(piece, pieces.size);
      const x = (place % columns) * BOX.wide;
      const y = top + Math.floor(place / columns) * BOX.high;
      wide = Math.max(wide, x + BOX.wide);
      const hue = (pieces.get(piece) * 137) % 360;
      const box = drawn("rect", { x: x + 1, y: y + 1, width: BOX.wide - 3, height: BOX.high - 3, fill: `hsl(${hue} 45% 50% / .28)`, stroke: "var(--line)" });
      box.append(drawn("title", {}, `rank ${rank}, ${mesh.axes.map((axis, dim) => `${axis} ${at[dim]}`).join(", ")}: ${piece || "the whole"}`));
      picture.append(box);
      picture.append(drawn("text", { x: x + 5, y: y + 12 }, `${rank}${letters.has(rank) ? ` ${letters.get(rank)}` : " -"}`));
      picture.append(drawn("text", { x: x + 5, y: y + 24 }, short(piece)));
    });
    top += Math.ceil(ranks.length / columns) * BOX.high + 6;
  }
  picture.setAttribute("viewBox", `0 0 ${wide} ${top}`);
  picture.setAttribute("width", wide);
  picture.setAttribute("height", top);
  const axes = mesh.axes.map((axis, dim) => `${axis}=${mesh.shape[dim]}`).join(" x ");
  picture.setAttribute("aria-label", `mesh ${axes}: ${pieces.size} different pieces on ${count} ranks`);
  return make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": `layout on the mesh ${axes}` }, picture);
}

function coordinates(place, shape) {
  const found = [];
  let rest = place;
  for (let dim = shape.length - 1; dim >= 0; dim -= 1) {
    found.unshift(rest % shape[dim]);
    rest = Math.floor(rest / shape[dim]);
  }
  return found;
}

// What a rank holds by its coordinates: a place along each axis that cuts the value.
function pieceOf(at, mesh, placements) {
  const parts = [];
  mesh.axes.forEach((axis, dim) => {
    const text = placements[axis] ?? "";
    if (!text || text.startsWith("Replicate")) return;
    const cut = /Shard\((?:dim=)?(-?\d+)/.exec(text);
    if (cut) parts.push(`dim ${cut[1]} ${at[dim] + 1}/${mesh.shape[dim]}`);
    else parts.push(`${text.split("(")[0].replace(/^_/, "").toLowerCase()} ${at[dim] + 1}/${mesh.shape[dim]}`);
  });
  return parts.join(", ");
}

const short = (piece) => (piece ? piece.replace(/dim (-?\d+) /g, "d$1 ").replace(/partial/g, "part").slice(0, 9) : "whole");
