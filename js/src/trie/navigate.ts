// Which node an arrow key leads to: pure functions of the layout.

import type { Box, Layout } from "./layout";

/**
 * Right goes to the child (the active one first), Left to the parent, Up and Down to the sibling or,
 * past the last one, to what is drawn in the neighbouring lane. Home and End are the first root and
 * the last leaf. Null means that the key isn't one of these or leads nowhere.
 */
export function neighbour(layout: Layout, from: Box | null, key: string): Box | null {
  const first = layout.boxes[0] ?? null;
  if (key === "Home") return first;
  if (key === "End") return layout.boxes.at(-1) ?? null;
  if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(key)) return null;
  if (!from) return layout.boxes.find((box) => box.node.active) ?? first;
  if (key === "ArrowLeft") return from.parent;
  if (key === "ArrowRight") {
    return from.children.find((box) => box.node.active) ?? from.children[0] ?? null;
  }
  const lane = key === "ArrowUp" ? from.lane - 1 : from.lane + from.lanes;
  return inLane(layout, lane, from);
}

/** What is drawn in a lane where `from` starts; the lane's last node if that ends before it. */
function inLane(layout: Layout, lane: number, from: Box): Box | null {
  let found: Box | null = null;
  for (const box of layout.boxes) {
    if (lane < box.lane || lane >= box.lane + box.lanes) continue;
    if (box.node.start <= from.node.start || !found) found = box;
  }
  return found;
}
