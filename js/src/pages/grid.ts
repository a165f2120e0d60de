// The grid of pages. A row's neighbours of one residence are one element whose background repeats
// once a page, so that 4,000 pages are some hundred elements, drawn in the theme's colours; only rows
// in sight are in the document. For assistive technology it is a grid: every row has a header that
// says what is in it, and the page that the arrow keys have reached is a cell of its own.

import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { bytes, count } from "../lib/format";
import { html } from "../lib/html";
import type { Residence } from "../lib/model";
import { type Group, grouped } from "./groups";
import {
  GAP,
  inSight,
  type Grid as Laid,
  layout,
  type Place,
  type Row,
  step,
  stretches,
  whereOf,
} from "./layout";
import { type Cell, type Kind, type Pages, type Preview, tokensOf } from "./model";

const OVERSCAN = 240;
const COARSE = 120; // pixels scrolled until rows are looked for again
const KINDS: Record<Kind, string> = { rows: "pages", window: "window rows", state: "snapshots" };

export interface Chosen {
  readonly cell: Cell;
  readonly group: Group;
}

interface Props {
  pages: Pages;
  sizes: { names: number; figures: number; cells: number };
  /** Cells that just moved, with where they were. */
  moves: ReadonlyMap<string, { was: Residence }>;
  preview: Preview | null;
  id: string;
  onChoose: (chosen: Chosen | null) => void;
}

export function Grid({ pages, sizes, moves, preview, id, onChoose }: Props) {
  const scroller = useRef<HTMLDivElement>(null);
  const focusable = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 480 });
  const [chosen, choose] = useState<string | null>(null);
  const groups = useMemo(() => grouped(pages), [pages.edges, pages.page]);
  const { names, cells: width } = sizes;
  const grid = useMemo(() => layout(groups, sizes), [groups, names, width]);
  const going = useMemo(() => leavingCells(preview), [preview]);
  const place = chosen === null ? null : find(grid, chosen);

  const measure = () => {
    const el = scroller.current;
    if (!el) return;
    const height = el.clientHeight || 480;
    const top = Math.floor(el.scrollTop / COARSE) * COARSE;
    setView((old) => (old.top === top && old.height === height ? old : { top, height }));
  };
  useLayoutEffect(measure, [grid]);

  const pick = (to: Place | null) => {
    const row = to && grid.rows[to.row];
    const cell = row?.cells[to?.column ?? -1];
    choose(cell ? cell.key : null);
    onChoose(row && cell ? { cell, group: row.group } : null);
    if (row && scroller.current) reveal(scroller.current, row);
  };

  const onKeyDown = (event: KeyboardEvent) => {
    if (event.metaKey || event.altKey) return;
    const { key } = event;
    if (key === "Escape" && place) pick(null);
    else {
      const page = Math.max(1, Math.floor(view.height / 24));
      const to = step(grid, place, key, event.ctrlKey, page);
      if (!to) return;
      pick(to);
    }
    event.preventDefault();
    event.stopPropagation();
  };

  /** The cell under the pointer. */
  const under = (event: MouseEvent): Place | null => {
    const area = (event.target as HTMLElement).closest<HTMLElement>("[data-row]");
    if (!area) return null;
    const row = Number(area.dataset.row);
    const x = event.clientX - area.getBoundingClientRect().left;
    const column = Math.floor(x / (grid.rows[row] as Row).pitch);
    return (grid.rows[row] as Row).cells[column] ? { row, column } : null;
  };
  const onClick = (event: MouseEvent) => {
    const to = under(event);
    if (to) pick(to);
    focusable.current?.focus({ preventScroll: true });
  };
  const onMove = (event: MouseEvent) => {
    const to = under(event);
    const area = (event.target as HTMLElement).closest<HTMLElement>("[data-row]");
    const row = to && grid.rows[to.row];
    if (area) area.title = row ? told(row.cells[to.column] as Cell, row.group) : "";
  };

  // Rows that are drawn already are given to preact as they are: then it doesn't look into them.
  const drawn = useMemo(() => new Map<number, unknown>(), [grid, moves, going, sizes.figures]);
  const line = ({ row, at }: { row: Row; at: number }) => {
    const column = place?.row === at ? place.column : null;
    const before = column === null ? drawn.get(at) : undefined;
    if (before) return before;
    const made = html`<${Line} key=${(row.cells[0] as Cell).key} row=${row} at=${at} names=${names}
      width=${width} figures=${sizes.figures} moves=${moves} going=${going} id=${id} column=${column} />`;
    if (column === null) drawn.set(at, made);
    return made;
  };

  const [first, end] = inSight(grid, view.top - OVERSCAN, view.top + view.height + OVERSCAN);
  const shown = grid.rows.slice(first, end).map((row, i) => ({ row, at: first + i }));
  if (place && (place.row < first || place.row >= end)) {
    shown.push({ row: grid.rows[place.row] as Row, at: place.row });
  }
  return html`
    <div class="mj-pages-scroll" ref=${scroller} onScroll=${measure} data-testid="pages-viewport">
      <div class="mj-grid" role="grid" tabindex="0" ref=${focusable} data-testid="pages-grid"
        data-lm-suppress-shortcuts="true" aria-label="Pages by conversation"
        aria-rowcount=${grid.rows.length} aria-colcount=${grid.columns + 1}
        aria-activedescendant=${place ? `${id}at` : undefined}
        onKeyDown=${onKeyDown} onClick=${onClick} onMouseMove=${onMove}
        style=${{ height: `${grid.height}px` }}>
        ${shown.map(line)}
      </div>
    </div>
  `;
}

interface LineProps {
  row: Row;
  at: number;
  names: number;
  width: number;
  figures: number;
  moves: ReadonlyMap<string, { was: Residence }>;
  going: (cell: Cell) => string | undefined;
  id: string;
  column: number | null;
}

function Line({ row, at, names, width, figures, moves, going, id, column }: LineProps) {
  const { pitch, cells, group, kind, first, top } = row;
  const size = pitch - GAP;
  const box = (from: number, n: number) => ({
    left: `${from * pitch}px`,
    width: `${n * pitch - GAP}px`,
  });
  const main = kind === "rows";
  const title = main ? group.title : KINDS[kind];
  const current = column === null ? undefined : cells[column];
  return html`
    <div role="row" aria-rowindex=${at + 1} class=${`mj-row mj-row-${kind}`} data-testid="pages-row"
      data-kind=${kind} data-group=${group.title}
      style=${{ top: `${top}px`, height: `${pitch}px`, "--cell": `${size}px`, "--pitch": `${pitch}px` }}>
      <div role="rowheader" aria-colindex="1" class=${first ? `mj-name${names ? "" : " mj-above"}` : "mj-name mj-unseen"}
        title=${main ? group.owners.join(", ") || title : undefined} style=${names && first ? { width: `${names - 12}px` } : {}}
        ><span class="mj-unseen">${main ? "" : `${group.title}, `}</span>${title}<span class="mj-unseen">: ${inWords(cells)}</span></div>
      <div class="mj-cells" data-row=${at} style=${{ left: `${names}px`, width: `${width}px` }}>
        ${stretches(cells, whereOf).map(
          ({
            at: from,
            count: n,
            value,
          }) => html`<i key=${`w${from}`} class=${`mj-tiles mj-t-${value}`}
            data-testid="pages-run" data-where=${value} data-count=${n} style=${box(from, n)} />`,
        )}
        ${stretches(cells, (cell) => moves.get(cell.key)?.was).map(
          ({
            at: from,
            count: n,
            value,
          }) => html`<i key=${`m${from}${value}`} class=${`mj-tiles mj-moved mj-t-${value}`}
            data-testid="pages-moved" style=${box(from, n)} />`,
        )}
        ${stretches(cells, going).map(
          ({ at: from, count: n, value }) => html`<i key=${`g${from}`} class="mj-tiles mj-going"
            data-testid="pages-going" data-to=${value} data-count=${n} style=${box(from, n)} />`,
        )}
      </div>
      ${
        current &&
        html`<div role="gridcell" id=${`${id}at`} aria-colindex=${(column as number) + 2} aria-selected="true"
          class="mj-at" data-testid="pages-cell" aria-label=${told(current, group) + (going(current) ? `; would be ${going(current)}` : "")}
          style=${{ left: `${names + (column as number) * pitch - 2}px` }} />`
      }
      ${
        figures > 0 &&
        first &&
        html`<div role="gridcell" class="mj-row-figures" style=${{ width: `${figures - 12}px` }}>${figured(group, kind)}</div>`
      }
    </div>
  `;
}

function figured(group: Group, kind: Kind): string {
  const cells = { rows: group.pages, window: group.strips, state: group.marks }[kind];
  const held = cells.reduce((sum, cell) => sum + cell.nbytes, 0);
  const size = held ? bytes(held) : "";
  if (kind !== "rows") return size;
  const tokens = tokensOf(cells).reduce((sum, [where, n]) => sum + (where === "gone" ? 0 : n), 0);
  return [tokens ? `${count(tokens)} tokens` : "nothing held", size].filter(Boolean).join(" · ");
}

function inWords(cells: readonly Cell[]): string {
  return stretches(cells, whereOf)
    .map(({ count: n, value }) => `${count(n)} ${value}`)
    .join(", ");
}

/** One cell in words. */
export function told(cell: Cell, group: Group): string {
  const { kind, start, end, where, nbytes } = cell;
  const what =
    kind === "state"
      ? `${cell.mark} snapshot at token ${count(start)}`
      : `${kind === "window" ? "window rows of " : ""}tokens ${count(start)} to ${count(end)}`;
  const size = nbytes ? bytes(nbytes) : "";
  return [`${group.title}: ${what}`, where, size].filter(Boolean).join(", ");
}

/** Says where a cell would be then, for those that would go. */
function leavingCells(preview: Preview | null): (cell: Cell) => string | undefined {
  const by = new Map<string, [number, number, string][]>();
  for (const [edge, kind, start, end, , to] of preview?.leaving ?? []) {
    const key = `${edge}${kind}`;
    by.set(key, [...(by.get(key) ?? []), [start, end, to]]);
  }
  return ({ edge, kind, start, end }) =>
    by
      .get(`${edge}${kind}`)
      ?.find(([a, b]) => (kind === "state" ? a === start : a < end && start < b))?.[2];
}

function find(grid: Laid, key: string): Place | null {
  for (const [row, { cells }] of grid.rows.entries()) {
    const column = cells.findIndex((cell) => cell.key === key);
    if (column >= 0) return { row, column };
  }
  return null;
}

/** Scroll the least that brings the row into sight. */
function reveal(el: HTMLElement, row: Row): void {
  const margin = 24;
  if (row.top - margin < el.scrollTop) el.scrollTop = Math.max(0, row.top - margin);
  else if (row.top + row.pitch + margin > el.scrollTop + el.clientHeight) {
    el.scrollTop = row.top + row.pitch + margin - el.clientHeight;
  }
}
