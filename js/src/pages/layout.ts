// Where each page is drawn: groups below each other, each group's cells in rows. Pure.

import type { Residence } from "../lib/model";
import type { Group } from "./groups";
import type { Cell, Kind } from "./model";

export const PITCH: Record<Kind, number> = { rows: 16, window: 11, state: 11 };
export const GAP = 2;
const BETWEEN = 8;
const TITLE = 18;
const LEAST = 6;

export interface Sizes {
  /** Pixels of the column of titles; 0: they stand above their rows. */
  readonly names: number;
  /** Pixels of the column of figures; 0: there is none. */
  readonly figures: number;
  /** Pixels of the column of cells. */
  readonly cells: number;
}

/** The columns for a width in pixels. */
export function sizes(width: number): Sizes {
  const names = width >= 1000 ? 220 : width >= 520 ? 150 : 0;
  const figures = width >= 640 ? 165 : 0;
  return { names, figures, cells: Math.max(LEAST * PITCH.rows, width - names - figures) };
}

/** One line of cells. */
export interface Row {
  readonly group: Group;
  readonly kind: Kind;
  readonly cells: readonly Cell[];
  /** The first of its group and kind. */
  readonly first: boolean;
  /** Where its cells are, in pixels from the top. */
  readonly top: number;
  readonly pitch: number;
}

export interface Grid {
  readonly rows: readonly Row[];
  readonly height: number;
  /** Cells in the longest row. */
  readonly columns: number;
}

export function layout(groups: readonly Group[], { names, cells: width }: Sizes): Grid {
  const rows: Row[] = [];
  let [top, columns] = [0, 1];
  for (const group of groups) {
    if (!names) top += TITLE;
    for (const kind of ["rows", "window", "state"] as const) {
      const cells = { rows: group.pages, window: group.strips, state: group.marks }[kind];
      const pitch = PITCH[kind];
      const most = Math.max(1, Math.floor((width + GAP) / pitch));
      for (let at = 0; at < cells.length; at += most) {
        const part = cells.slice(at, at + most);
        rows.push({ group, kind, cells: part, first: at === 0, top, pitch });
        columns = Math.max(columns, part.length);
        top += pitch;
      }
    }
    top += BETWEEN;
  }
  return { rows, height: Math.max(0, top - BETWEEN), columns };
}

/** The rows that touch the pixels between two heights. */
export function inSight(grid: Grid, from: number, to: number): [number, number] {
  const { rows } = grid;
  let [low, high] = [0, rows.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    const row = rows[middle] as Row;
    if (row.top + row.pitch < from) low = middle + 1;
    else high = middle;
  }
  let end = low;
  while (end < rows.length && (rows[end] as Row).top - TITLE <= to) end += 1;
  return [low, end];
}

export interface Stretch<T> {
  readonly at: number;
  readonly count: number;
  readonly value: T;
}

/** Neighbours of one value as one stretch; those without a value are left out. */
export function stretches<T>(
  cells: readonly Cell[],
  value: (cell: Cell) => T | undefined,
): Stretch<T>[] {
  const found: { at: number; count: number; value: T }[] = [];
  cells.forEach((cell, at) => {
    const mine = value(cell);
    if (mine === undefined) return;
    const last = found.at(-1);
    if (last && last.value === mine && last.at + last.count === at) last.count += 1;
    else found.push({ at, count: 1, value: mine });
  });
  return found;
}

export const whereOf = (cell: Cell): Residence => cell.where;

export interface Place {
  readonly row: number;
  readonly column: number;
}

/** Where a key leads from a place; null when it isn't a key of the grid. `page` is rows at a time. */
export function step(
  grid: Grid,
  from: Place | null,
  key: string,
  ctrl: boolean,
  page: number,
): Place | null {
  const { rows } = grid;
  const last = rows.length - 1;
  const lengthOf = (row: number) => (rows[row] as Row).cells.length;
  if (!/^(Arrow(Left|Right|Up|Down)|Home|End|Page(Up|Down))$/.test(key) || last < 0) return null;
  if (!from) return { row: 0, column: 0 };
  const onto = (row: number): Place => {
    const to = Math.min(last, Math.max(0, row));
    const x = from.column * (rows[from.row] as Row).pitch;
    const column = Math.round(x / (rows[to] as Row).pitch);
    return { row: to, column: Math.min(column, lengthOf(to) - 1) };
  };
  switch (key) {
    case "ArrowLeft":
      if (from.column) return { row: from.row, column: from.column - 1 };
      return from.row ? { row: from.row - 1, column: lengthOf(from.row - 1) - 1 } : from;
    case "ArrowRight":
      if (from.column + 1 < lengthOf(from.row)) return { row: from.row, column: from.column + 1 };
      return from.row < last ? { row: from.row + 1, column: 0 } : from;
    case "Home":
      return { row: ctrl ? 0 : from.row, column: 0 };
    case "End": {
      const row = ctrl ? last : from.row;
      return { row, column: lengthOf(row) - 1 };
    }
    case "ArrowUp":
      return from.row ? onto(from.row - 1) : from;
    case "ArrowDown":
      return from.row < last ? onto(from.row + 1) : from;
    default:
      return onto(from.row + (key === "PageUp" ? -page : page));
  }
}
