// Making elements, and numbers and ranks in words. Text is always set as text, never as HTML.

const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name.startsWith("aria-") && typeof value === "boolean") element.setAttribute(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// Four digits of a number, as people compare them.
function told(value) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(6)));
}

function duration(us) {
  if (us === null || us === undefined) return "-";
  if (us < 1e3) return `${us.toFixed(0)} us`;
  return us < 1e6 ? `${(us / 1e3).toFixed(1)} ms` : `${(us / 1e6).toFixed(2)} s`;
}

const phaseOf = (phase, step) => (phase === "setup" ? step.label : `${phase} of ${step.label}`);

const MOST_RANKS = 1 << 24;

// [0, 1, 2, 8] of "0-2,8"; null where the text is no list of ranks below `world`.
function ranksOf(text, world = MOST_RANKS) {
  const found = [];
  for (const part of text.split(",").map((each) => each.trim()).filter(Boolean)) {
    const run = /^(\d+)(?:-(\d+))?$/.exec(part);
    if (!run) return null;
    const last = Math.min(Number(run[2] ?? run[1]), world - 1);
    for (let rank = Number(run[1]); rank <= last; rank += 1) found.push(rank);
  }
  return found;
}

function ranksText(ranks) {
  const runs = [];
  for (const rank of ranks) {
    const last = runs[runs.length - 1];
    if (last && last[1] + 1 === rank) last[1] = rank;
    else runs.push([rank, rank]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(",");
}

// "ranks 0,8,16, ... (32 ranks)": a list that fits a line.
function ranksShort(text) {
  if (text.length <= 28) return ranksNamed(text);
  return `ranks ${text.slice(0, 22).replace(/[^,]*$/, "")}... (${ranksOf(text).length})`;
}

const ranksNamed = (text) => (/^\d+$/.test(text) ? `rank ${text}` : `ranks ${text}`);

// What fnmatch does with *, ? and [...] over a whole name. A part between two stars is taken where it is found first and
// not looked for again: no pattern takes longer than its length times that of the name.
function globOf(pattern) {
  const parts = [""];
  for (let at = 0; at < pattern.length; at += 1) {
    const char = pattern[at];
    if (char === "*") {
      if (parts.length < 2 || parts[parts.length - 1]) parts.push("");
      continue;
    }
    const end = char === "[" ? pattern.indexOf("]", at + 2) : -1;
    if (end > 0) {
      parts[parts.length - 1] += `[${pattern.slice(at + 1, end).replace(/[\\\]^[]/g, "\\$&").replace(/^!/, "^")}]`;
      at = end;
    } else parts[parts.length - 1] += char === "?" ? "." : char.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
  }
  const last = parts.length > 1 ? `.*${parts.pop()}` : "";
  const middle = parts.slice(1).map((part, number) => `(?=(.*?${part}))\\${number + 1}`);
  try {
    return new RegExp(`^${parts[0]}${middle.join("")}${last}$`, "su");
  } catch {
    return null;
  }
}
