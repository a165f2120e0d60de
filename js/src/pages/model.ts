// What the kernel says of pages and memory, as mlx_jupyter/widgets/pages_data.py makes it.

import { type Mark, RESIDENCES, type Residence, type Run } from "../lib/model";

export interface Edge {
  readonly parent: number;
  readonly start: number;
  readonly end: number;
  readonly used: number;
  readonly text: string;
  readonly runs: readonly Run[];
  readonly owners?: readonly string[];
  readonly strips?: readonly Run[];
  readonly marks?: readonly Mark[];
}

export interface Memory {
  readonly weights: number;
  readonly live: number;
  readonly stored: number;
  readonly free: number;
  readonly budget: number;
  readonly limit: number;
  readonly disk: number;
  readonly files: number;
}

/** seconds, weights, live, stored, free, budget, limit */
export type Sample = readonly [number, number, number, number, number, number, number];

export interface Pages {
  readonly model: string;
  readonly alt: string;
  readonly page: number;
  readonly clock: number;
  readonly budget: number;
  readonly cached: number;
  readonly memory: Memory;
  readonly edges: Readonly<Record<string, Edge>>;
  readonly samples: Readonly<Record<string, Sample>>;
}

export const EMPTY: Pages = {
  model: "",
  alt: "",
  page: 256,
  clock: 0,
  budget: 0,
  cached: 0,
  memory: { weights: 0, live: 0, stored: 0, free: 0, budget: 0, limit: 0, disk: 0, files: 0 },
  edges: {},
  samples: {},
};

export type Kind = "rows" | "window" | "state";

/** One page, strip of window rows, or snapshot (then `start` is `end`, and `mark` says why). */
export interface Cell {
  /** Names it for as long as it is there. */
  readonly key: string;
  readonly edge: string;
  readonly kind: Kind;
  readonly start: number;
  readonly end: number;
  readonly where: Residence;
  readonly nbytes: number;
  readonly mark?: string;
}

/** edge, kind, start, end, bytes now, residence then */
export type Leaving = readonly [number, Kind, number, number, number, Residence];

/** What a budget would do. */
export interface Preview {
  readonly budget: number;
  readonly before: number;
  readonly after: number;
  readonly leaving: readonly Leaving[];
}

/** The pages or strips of a run: they end at multiples of the page size. */
export function cut(edge: string, kind: Kind, run: Run, size: number): Cell[] {
  const [start, end, where, nbytes] = run;
  const cells: Cell[] = [];
  for (let a = start; a < end; ) {
    const b = Math.min(end, (Math.floor(a / size) + 1) * size);
    const share = Math.round((nbytes * (b - a)) / (end - start));
    cells.push({ key: `${edge}${kind}${a}`, edge, kind, start: a, end: b, where, nbytes: share });
    a = b;
  }
  return cells;
}

const known = new WeakMap<Edge, readonly Cell[]>();

/** Everything that an edge holds: pages, strips, snapshots. Edges that don't change stay objects. */
export function cellsOf(key: string, edge: Edge, size: number): readonly Cell[] {
  const before = known.get(edge);
  if (before) return before;
  const made = cutUp(key, edge, size);
  known.set(edge, made);
  return made;
}

function cutUp(key: string, edge: Edge, size: number): Cell[] {
  return [
    ...edge.runs.flatMap((run) => cut(key, "rows", run, size)),
    ...(edge.strips ?? []).flatMap((run) => cut(key, "window", run, size)),
    ...(edge.marks ?? []).map(
      ([at, mark, where, nbytes]): Cell => ({
        key: `${key}state${at}`,
        edge: key,
        kind: "state",
        start: at,
        end: at,
        where,
        nbytes,
        mark,
      }),
    ),
  ];
}

/** Tokens of pages by where they are, in the order of RESIDENCES, without zeros. */
export function tokensOf(cells: readonly Cell[]): [Residence, number][] {
  return RESIDENCES.map((name): [Residence, number] => [
    name,
    cells.reduce((sum, cell) => sum + (cell.where === name ? cell.end - cell.start : 0), 0),
  ]).filter(([, tokens]) => tokens > 0);
}
