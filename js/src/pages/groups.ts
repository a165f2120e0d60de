// Pages by conversation, the twin of `grouped` in mlx_jupyter/widgets/pages_data.py: an edge belongs
// to all owners at or below it. A fixture that both test suites read keeps the two in agreement.

import type { Cell, Edge, Pages } from "./model";
import { cellsOf } from "./model";

const NAMED = 3;

export interface Group {
  /** Its owners, sorted, as one text. */
  readonly key: string;
  readonly title: string;
  readonly owners: readonly string[];
  readonly pages: Cell[];
  readonly strips: Cell[];
  readonly marks: Cell[];
}

export function grouped(pages: Pages): Group[] {
  const order = preorder(pages.edges);
  const users = new Map<string, readonly string[]>(order.map((key) => [key, []]));
  for (const key of [...order].reverse()) {
    const edge = pages.edges[key] as Edge;
    const own = union(edge.owners ?? [], users.get(key) as readonly string[]);
    users.set(key, own);
    const parent = `${edge.parent}`;
    const above = users.get(parent);
    if (above) users.set(parent, union(own, above));
  }
  const groups = new Map<string, Group>();
  for (const key of order) {
    const owners = users.get(key) as readonly string[];
    const name = [...owners].sort().join("\n");
    let group = groups.get(name);
    if (!group) {
      group = { key: name, title: title(owners), owners, pages: [], strips: [], marks: [] };
      groups.set(name, group);
    }
    for (const cell of cellsOf(key, pages.edges[key] as Edge, pages.page)) {
      const list = { rows: group.pages, window: group.strips, state: group.marks }[cell.kind];
      list.push(cell);
    }
  }
  const found = [...groups.values()];
  return [...found.filter((g) => g.owners.length), ...found.filter((g) => !g.owners.length)];
}

function union(first: readonly string[], second: readonly string[]): readonly string[] {
  if (!second.length) return [...new Set(first)];
  return [...new Set([...first, ...second])];
}

function title(owners: readonly string[]): string {
  if (!owners.length) return "left over";
  if (owners.length === 1) return owners[0] as string;
  const named = owners.slice(0, NAMED).join(", ");
  return owners.length <= NAMED ? `shared by ${named}` : `shared by ${owners.length}: ${named} …`;
}

/** The edges' ids, parents before children, siblings by age. */
function preorder(edges: Readonly<Record<string, Edge>>): string[] {
  const below = new Map<number, number[]>();
  for (const [key, edge] of Object.entries(edges)) {
    const known = below.get(edge.parent) ?? [];
    known.push(Number(key));
    below.set(edge.parent, known);
  }
  const falling = (keys: number[]) => keys.sort((a, b) => b - a);
  const roots = falling([...below.keys()].filter((parent) => !(`${parent}` in edges)));
  const stack = roots.flatMap((root) => falling(below.get(root) as number[]));
  const order: string[] = [];
  while (stack.length) {
    const key = stack.pop() as number;
    order.push(`${key}`);
    stack.push(...falling(below.get(key) ?? []));
  }
  return order;
}
