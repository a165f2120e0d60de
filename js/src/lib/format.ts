/** Decimal units, three significant digits; the same as Python's `human_bytes`. */
export function bytes(number: number): string {
  if (number < 1000) return `${number} B`;
  let value = number;
  let unit = "";
  for (unit of ["kB", "MB", "GB", "TB"]) {
    value /= 1000;
    if (value < 999.5) break;
  }
  return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`;
}

export function count(number: number): string {
  return number.toLocaleString("en-US");
}

export function counted(number: number, one: string, many: string): string {
  return `${count(number)} ${number === 1 ? one : many}`;
}

const CONTROL = /(?:(?:<\|[^|<>]{1,32}\|>|<(?:start|end)_of_turn>|<\/?s>)[↵ ]*)+/gu;
const ROLE = /▪(system|user|assistant|model|tool)↵+/gu;

/**
 * A text for a narrow place: each run of a template's control tokens becomes one small square, and
 * a role after it is written as in a play.
 */
export function label(text: string): string {
  return text.replace(CONTROL, "▪").replace(ROLE, " ▪$1: ").trim() || "(no text)";
}
