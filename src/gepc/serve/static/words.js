// Numbers as people say them. Pure functions.

const plain = new Intl.NumberFormat("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });

export function percent(rate) {
  const digits = rate < 0.1 ? 2 : 3;
  return `${new Intl.NumberFormat("en", { maximumSignificantDigits: digits }).format(100 * rate)} %`;
}

export function number(value) {
  return Number.isFinite(value) ? plain.format(value) : "";
}

// p = (1 + reference images at least this unusual)/(n + 1), in words.
export function inWords(p, n) {
  if (Math.round(p * (n + 1)) === 1) {
    return `None of the ${n.toLocaleString("en")} reference images looks this unusual.`;
  }
  const base = p >= 0.095 ? 100 : p >= 0.0015 ? 1000 : 10000;
  const count = Math.max(1, Math.round(p * base));
  return `${count.toLocaleString("en")} in ${base.toLocaleString("en")} normal images look${count === 1 ? "s" : ""} this unusual.`;
}

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

// A slider position in [0, 1] to a false-alarm rate: logarithmic, from the smallest possible one to one half.
export const LARGEST_ALPHA = 0.5;

export function alphaAt(position, smallest) {
  if (position <= 0) return smallest;
  const alpha = smallest * (LARGEST_ALPHA / smallest) ** position;
  return Math.max(smallest, Number(alpha.toPrecision(2)));
}

export function positionOf(alpha, smallest) {
  return Math.log(alpha / smallest) / Math.log(LARGEST_ALPHA / smallest);
}

// The factor forgives rounding, as in the library: 1 - 0.9 is a tenth.
export function isAlarm(p, alpha) {
  return p <= alpha * (1 + 1e-12);
}

// One line of CSV; a text that a spreadsheet would take for a formula is quoted off.
export function csvLine(cells) {
  return cells.map((cell) => {
    let text = String(cell ?? "");
    if (typeof cell === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }).join(",");
}
