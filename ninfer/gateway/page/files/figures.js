// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function count(number) {
  return Math.round(number).toLocaleString("en");
}

export function rate(perSecond) {
  const digits = perSecond > 0 && perSecond < 10 ? 1 : 0;
  return `${perSecond.toLocaleString("en", { maximumFractionDigits: digits })} tokens/s`;
}

export function percent(part, whole) {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";
}

export function bytes(number) {
  let unit = 0;
  let value = number;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = value < 10 && unit > 0 ? 1 : 0;
  return `${value.toLocaleString("en", { maximumFractionDigits: digits })} ${UNITS[unit]}`;
}
