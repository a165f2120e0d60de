// What moved between two moments, for the eye (cells that fade from what they were) and for the
// ear (one sentence for many changes). Pure but for the clock of `Teller`.

import { count, counted } from "../lib/format";
import type { Residence } from "../lib/model";
import { cellsOf, type Edge, type Pages } from "./model";

/** Cells by key with where they were, of the edges that are there in both. */
export function moved(old: Pages, now: Pages): Map<string, { was: Residence; is: Residence }> {
  const found = new Map<string, { was: Residence; is: Residence }>();
  if (old.model !== now.model) return found;
  for (const [key, edge] of Object.entries(now.edges)) {
    const before = old.edges[key];
    if (before && before !== edge) compare(key, before, edge, now.page, found);
  }
  return found;
}

function compare(
  key: string,
  old: Edge,
  now: Edge,
  size: number,
  found: Map<string, { was: Residence; is: Residence }>,
): void {
  const before = new Map(cellsOf(key, old, size).map((cell) => [cell.key, cell.where]));
  for (const cell of cellsOf(key, now, size)) {
    const was = before.get(cell.key);
    if (was && was !== cell.where) found.set(cell.key, { was, is: cell.where });
  }
}

const MOVES: Record<Residence, string> = {
  live: "became live",
  device: "moved to the device",
  host: "moved to host memory",
  disk: "moved to disk",
  gone: "were given up",
};

/** Collects changes and says them together, at most once in `pause` milliseconds. */
export class Teller {
  private readonly counts = new Map<Residence, number>();
  private fresh = 0;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly say: (text: string) => void,
    private readonly pause = 1500,
  ) {}

  /** Note what differs between two moments. */
  note(old: Pages, now: Pages, moves: ReadonlyMap<string, { is: Residence }>): void {
    for (const { is } of moves.values()) this.counts.set(is, (this.counts.get(is) ?? 0) + 1);
    if (old.model === now.model) {
      for (const [key, edge] of Object.entries(now.edges)) {
        if (!(key in old.edges)) this.fresh += edge.end - edge.start;
      }
    }
    if ((this.counts.size || this.fresh) && this.timer === undefined) {
      this.timer = setTimeout(() => this.tell(), this.pause);
    }
  }

  stop(): void {
    clearTimeout(this.timer);
    this.timer = undefined;
  }

  private tell(): void {
    this.timer = undefined;
    const parts = this.fresh ? [`${count(this.fresh)} new tokens`] : [];
    for (const [where, n] of this.counts) {
      parts.push(
        `${counted(n, "page", "pages")} ${n === 1 ? MOVES[where].replace("were", "was") : MOVES[where]}`,
      );
    }
    this.counts.clear();
    this.fresh = 0;
    this.say(`${parts.join(", ")}.`);
  }
}
