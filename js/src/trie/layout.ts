// Where each node of the tree is drawn: a pure function, the twin of mlx_jupyter/widgets/icicle.py.
//
// x is the token position, the same scale for every lane, monotone and linear between the positions
// where some node starts or ends; short edges are widened to MIN_WIDTH so that they can be seen and
// hit. y is the lane: each leaf has one, an inner node spans those of its children. A fixture that
// both test suites read keeps the two languages in agreement.

import { hierarchy, partition } from "d3-hierarchy";
import type { NodeData } from "../lib/model";

export const MIN_WIDTH = 84;
const MIN_SHARE = 0.7;
const STEPS = 48;

export interface Box {
  readonly node: NodeData;
  readonly x0: number;
  readonly x1: number;
  readonly lane: number;
  readonly lanes: number;
  readonly depth: number;
  /** 1-based place among its siblings, and how many they are. */
  readonly place: number;
  readonly siblings: number;
  readonly parent: Box | null;
  readonly children: Box[];
}

export interface Layout {
  /** Parents before children. */
  readonly boxes: readonly Box[];
  readonly byId: ReadonlyMap<number, Box>;
  readonly lanes: number;
  readonly width: number;
  readonly scale: Scale;
}

/** Token positions to x and back, piecewise linear through (positions[i], xs[i]). */
export class Scale {
  constructor(
    readonly positions: readonly number[],
    readonly xs: readonly number[],
  ) {}

  /** The last token position. */
  get total(): number {
    return this.positions.at(-1) ?? 0;
  }

  at(position: number): number {
    return interpolate(this.positions, this.xs, position);
  }

  invert(x: number): number {
    return interpolate(this.xs, this.positions, x);
  }
}

function interpolate(from: readonly number[], to: readonly number[], value: number): number {
  let low = 0;
  let high = from.length - 1;
  if (value <= (from[low] as number)) return to[low] as number;
  if (value >= (from[high] as number)) return to[high] as number;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if ((from[middle] as number) <= value) low = middle;
    else high = middle;
  }
  const [f0, f1, t0, t1] = [from[low], from[high], to[low], to[high]] as [
    number,
    number,
    number,
    number,
  ];
  return t0 + ((t1 - t0) * (value - f0)) / (f1 - f0);
}

interface Item {
  readonly node: NodeData | null;
  readonly children: Item[];
}

/** Place every node within `width` pixels; boxes don't overlap. */
export function layout(nodes: readonly NodeData[], width: number, minWidth = MIN_WIDTH): Layout {
  const scale = fitScale(nodes, width, minWidth);
  const root: Item = { node: null, children: [] };
  const items = new Map<number, Item>();
  for (const node of nodes) {
    const item: Item = { node, children: [] };
    items.set(node.id, item);
    (items.get(node.parent) ?? root).children.push(item);
  }
  const boxes: Box[] = [];
  const byId = new Map<number, Box>();
  const placed = new Map<number, number>();
  if (!nodes.length) return { boxes, byId, lanes: 0, width, scale };
  const counted = hierarchy(root, (item) => item.children).count();
  const lanes = counted.value ?? 0;
  const divided = partition<Item>().size([lanes, 1])(counted);
  divided.eachBefore((place) => {
    const { node } = place.data;
    if (!node) return;
    const [lane, end] = [Math.round(place.x0), Math.round(place.x1)];
    const parent = byId.get(node.parent) ?? null;
    const before = placed.get(node.parent) ?? 0;
    placed.set(node.parent, before + 1);
    const box: Box = {
      node,
      x0: scale.at(node.start),
      x1: scale.at(node.end),
      lane,
      lanes: end - lane,
      depth: place.depth,
      place: before + 1,
      siblings: place.parent?.data.children.length ?? 1,
      parent,
      children: [],
    };
    parent?.children.push(box);
    boxes.push(box);
    byId.set(node.id, box);
  });
  return { boxes, byId, lanes, width, scale };
}

/**
 * The scale on which every edge is at least `minWidth` wide and the whole fits `width`. The minimum
 * gives way where it alone would fill more than MIN_SHARE of the width.
 */
export function fitScale(nodes: readonly NodeData[], width: number, minWidth: number): Scale {
  const positions = [...new Set([0, ...nodes.flatMap((node) => [node.start, node.end])])].sort(
    (a, b) => a - b,
  );
  if (positions.length === 1) return new Scale([0, 1], [0, width]);
  const index = new Map(positions.map((position, i) => [position, i]));
  const starts: number[][] = positions.map(() => []);
  for (const node of nodes) {
    starts[index.get(node.end) as number]?.push(index.get(node.start) as number);
  }
  const place = (perToken: number, least: number): number[] => {
    const xs = [0];
    for (let i = 1; i < positions.length; i++) {
      const step = (positions[i] as number) - (positions[i - 1] as number);
      let x = (xs[i - 1] as number) + perToken * step;
      for (const start of starts[i] as number[]) x = Math.max(x, (xs[start] as number) + least);
      xs.push(x);
    }
    return xs;
  };
  const end = (xs: number[]) => xs.at(-1) as number;
  const least = Math.min(minWidth, (width * MIN_SHARE) / end(place(0, 1)));
  let low = 0;
  let high = width / (positions.at(-1) as number);
  for (let i = 0; i < STEPS; i++) {
    const middle = (low + high) / 2;
    if (end(place(middle, least)) > width) high = middle;
    else low = middle;
  }
  const xs = place(low, least);
  return new Scale(
    positions,
    xs.map((x) => (x * width) / end(xs)),
  );
}

export interface Tick {
  readonly position: number;
  readonly x: number;
}

/** Round token positions for an axis, at least `gap` pixels apart, between two x. */
export function ruler(scale: Scale, from: number, to: number, gap = 64): Tick[] {
  const [first, last] = [scale.invert(from), scale.invert(to)];
  let step = 1;
  for (let i = 0; ((last - first) / step) * gap > to - from && step < scale.total; i++) {
    step = ([2, 5, 10][i % 3] as number) * 10 ** Math.floor(i / 3);
  }
  const ticks: Tick[] = [];
  for (let position = Math.floor(first / step) * step; position <= last; position += step) {
    const x = scale.at(position);
    const before = ticks.at(-1);
    if (!before || x - before.x >= gap) ticks.push({ position, x });
  }
  return ticks;
}
