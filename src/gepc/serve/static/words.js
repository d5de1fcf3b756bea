// Numbers as text. Pure functions.

const plain = new Intl.NumberFormat("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });

export function percent(rate) {
  const digits = rate < 0.1 ? 2 : 3;
  return `${new Intl.NumberFormat("en", { maximumSignificantDigits: digits }).format(100 * rate)} %`;
}

export function number(value) {
  return Number.isFinite(value) ? plain.format(value) : "";
}

// p = (1 + number of calibration images at least this unusual)/(n + 1), in words.
export function inWords(p, n) {
  if (Math.round(p * (n + 1)) === 1) {
    return `None of the ${n.toLocaleString("en")} calibration images is this unusual.`;
  }
  const base = p >= 0.095 ? 100 : p >= 0.0015 ? 1000 : 10000;
  const count = Math.max(1, Math.round(p * base));
  return `${count.toLocaleString("en")} in ${base.toLocaleString("en")} normal images ${count === 1 ? "is" : "are"} this unusual.`;
}

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

// One line of CSV; text that a spreadsheet would evaluate as a formula is escaped.
export function csvLine(cells) {
  return cells.map((cell) => {
    let text = String(cell ?? "");
    if (typeof cell === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }).join(",");
}
