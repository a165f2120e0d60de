// The kernel's description of the prefix cache, as mlx_jupyter/widgets/tree_data.py sends it.

export const RESIDENCES = ["live", "device", "host", "disk", "gone"] as const;
export type Residence = (typeof RESIDENCES)[number];

/** What a residence means, in a few words. */
export const MEANING: Record<string, string> = {
  live: "in the model's cache",
  device: "stored on the device",
  host: "stored in host memory",
  disk: "stored on disk",
  gone: "to be recomputed",
};

export const MARK_KINDS = {
  system: "S",
  turn: "U",
  prompt: "P",
  answer: "A",
  branch: "B",
  periodic: "·",
  interrupt: "!",
  tip: "T",
} as const;
export type MarkKind = keyof typeof MARK_KINDS;

/** start, end, residence, bytes */
export type Run = readonly [number, number, Residence, number];
/** offset, kind, residence, bytes */
export type Mark = readonly [number, MarkKind, Residence, number];

export interface NodeData {
  readonly id: number;
  readonly parent: number;
  readonly start: number;
  readonly end: number;
  readonly text: string;
  readonly tail?: string;
  readonly runs: readonly Run[];
  readonly marks?: readonly Mark[];
  readonly uses: number;
  readonly used: number;
  readonly owners?: readonly string[];
  readonly active?: boolean;
}

export interface Snapshot {
  readonly version: number;
  readonly model: string;
  readonly alt: string;
  readonly live: number;
  readonly live_bytes: number;
  readonly stored_bytes: number;
  readonly budget: number;
  readonly page_size: number;
  readonly clock: number;
  readonly layers: readonly (readonly [string, number])[];
  readonly nodes: readonly NodeData[];
}

export const EMPTY: Snapshot = {
  version: 0,
  model: "",
  alt: "",
  live: 0,
  live_bytes: 0,
  stored_bytes: 0,
  budget: 0,
  page_size: 256,
  clock: 0,
  layers: [],
  nodes: [],
};

/** Tokens of a node by where their rows are, in the order of RESIDENCES, without zeros. */
export function tokensByResidence(node: NodeData): [Residence, number][] {
  return RESIDENCES.map((name): [Residence, number] => [
    name,
    node.runs.reduce((sum, run) => sum + (run[2] === name ? run[1] - run[0] : 0), 0),
  ]).filter(([, tokens]) => tokens > 0);
}

export function heldTokens(node: NodeData): number {
  return node.runs.reduce((sum, run) => sum + (run[2] === "gone" ? 0 : run[1] - run[0]), 0);
}

/** Bytes of its own: live rows count 0. */
export function nodeBytes(node: NodeData): number {
  const pages = node.runs.reduce((sum, run) => sum + run[3], 0);
  return (node.marks ?? []).reduce((sum, mark) => sum + mark[3], pages);
}
