import { describe, expect, it } from "vitest";
import type { NodeData } from "../src/lib/model";
import { type Box, layout, ruler } from "../src/trie/layout";
import { neighbour } from "../src/trie/navigate";
import { demo, expected } from "./helpers";

/** A pseudo-random tree of about `size` nodes, always the same for the same seed. */
function randomTree(size: number, seed: number): NodeData[] {
  let state = seed;
  const random = (n: number) => {
    state = (state * 1103515245 + 12345) % 2147483648;
    return state % n;
  };
  const nodes: NodeData[] = [];
  const add = (parent: number, start: number, depth: number) => {
    const id = nodes.length + 1;
    const end = start + 1 + random(depth % 3 ? 40 : 4000);
    nodes.push({
      id,
      parent,
      start,
      end,
      text: `n${id}`,
      uses: 1,
      used: 1,
      runs: [[start, end, "device", 10]],
    });
    for (let i = random(4); i > 0 && nodes.length < size && depth < 12; i--) {
      add(id, end, depth + 1);
    }
  };
  while (nodes.length < size) add(0, 0, 1);
  return nodes;
}

function overlaps(a: Box, b: Box): boolean {
  const slack = 1e-6;
  return (
    a.x0 < b.x1 - slack &&
    b.x0 < a.x1 - slack &&
    a.lane < b.lane + b.lanes &&
    b.lane < a.lane + a.lanes
  );
}

describe("layout", () => {
  it("agrees with the Python twin", () => {
    const placed = layout(demo.nodes, expected.width);
    expect(placed.lanes).toBe(expected.lanes);
    const got = placed.boxes.map((b) => [b.node.id, b.x0, b.x1, b.lane, b.lanes, b.depth]);
    expect(got).toHaveLength(expected.boxes.length);
    got.forEach((row, i) => {
      row.forEach((value, j) => {
        expect(value).toBeCloseTo(expected.boxes[i]?.[j] as number, 3);
      });
    });
  });

  it.each([1, 7, 99])("places every node once, without overlap, within the width (%i)", (seed) => {
    const nodes = randomTree(150, seed);
    const placed = layout(nodes, 700);
    expect(placed.boxes.map((b) => b.node.id).sort()).toEqual(nodes.map((n) => n.id).sort());
    for (const box of placed.boxes) {
      expect(box.x1).toBeGreaterThan(box.x0);
      expect(box.x0).toBeGreaterThanOrEqual(0);
      expect(box.x1).toBeLessThanOrEqual(700 + 1e-6);
      if (box.parent) {
        expect(box.x0).toBeCloseTo(box.parent.x1, 6);
        expect(box.lane).toBeGreaterThanOrEqual(box.parent.lane);
      }
    }
    for (const [i, a] of placed.boxes.entries()) {
      for (const b of placed.boxes.slice(i + 1)) expect(overlaps(a, b)).toBe(false);
    }
  });

  it("widens short edges and keeps x monotone from 20 tokens to 100,000", () => {
    const sized = (end: number): NodeData[] => [
      { id: 1, parent: 0, start: 0, end: 4, text: "", uses: 1, used: 1, runs: [] },
      { id: 2, parent: 1, start: 4, end, text: "", uses: 1, used: 1, runs: [] },
    ];
    for (const end of [20, 1000, 100_000]) {
      const { boxes, scale } = layout(sized(end), 800);
      expect((boxes[0]?.x1 ?? 0) - (boxes[0]?.x0 ?? 0)).toBeGreaterThanOrEqual(84 - 1e-6);
      expect(boxes[1]?.x1).toBeCloseTo(800, 6);
      const xs = Array.from({ length: 21 }, (_, i) => scale.at((i * end) / 20));
      expect([...xs].sort((a, b) => a - b)).toEqual(xs);
      expect(scale.invert(scale.at(end / 3))).toBeCloseTo(end / 3, 6);
    }
  });

  it("handles no nodes and 5,000 nodes", () => {
    expect(layout([], 500).boxes).toEqual([]);
    const nodes = randomTree(5000, 3);
    const began = performance.now();
    expect(layout(nodes, 900).boxes).toHaveLength(nodes.length);
    expect(performance.now() - began).toBeLessThan(1000);
  });

  it("has ruler ticks at round positions that don't crowd", () => {
    const ticks = ruler(layout(demo.nodes, 900).scale, 0, 900);
    expect(ticks.length).toBeGreaterThan(3);
    expect(ticks[0]?.position).toBe(0);
    ticks.slice(1).forEach((tick, i) => {
      expect(tick.x - (ticks[i]?.x ?? 0)).toBeGreaterThanOrEqual(64);
    });
  });
});

describe("neighbour", () => {
  const placed = layout(demo.nodes, 900);
  const go = (from: number | null, key: string) =>
    neighbour(placed, from === null ? null : (placed.byId.get(from) ?? null), key)?.node.id ?? null;

  it("starts on the active path", () => {
    expect(go(null, "ArrowDown")).toBe(1);
  });

  it("goes to parent, child and sibling", () => {
    expect(go(1, "ArrowRight")).toBe(2);
    expect(go(2, "ArrowLeft")).toBe(1);
    expect(go(2, "ArrowDown")).toBe(5);
    expect(go(5, "ArrowUp")).toBe(2);
    expect(go(1, "ArrowLeft")).toBeNull();
    expect(go(1, "ArrowUp")).toBeNull();
  });

  it("prefers the active child and passes to cousins", () => {
    expect(go(9, "ArrowRight")).toBe(10);
    expect(go(11, "ArrowDown")).toBe(12);
    expect(go(12, "ArrowDown")).toBe(4);
  });

  it("goes to the ends with Home and End, and nowhere with other keys", () => {
    expect(go(null, "Home")).toBe(1);
    expect(go(1, "End")).toBe(13);
    expect(go(1, "x")).toBeNull();
  });
});
