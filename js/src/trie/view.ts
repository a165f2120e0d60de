// The icicle: a header with figures and zoom, the scrolling drawing, details of the selection, a
// legend. Only what is in sight is in the DOM, so 5,000 nodes cost no more than fifty. The drawing
// is one tab stop (role tree, aria-activedescendant); scrolling is the browser's own.

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { bytes, count, counted, label } from "../lib/format";
import { html } from "../lib/html";
import {
  EMPTY,
  heldTokens,
  MARK_KINDS,
  MEANING,
  type NodeData,
  nodeBytes,
  RESIDENCES,
  type Snapshot,
  tokensByResidence,
} from "../lib/model";
import { type Box, type Layout, layout, ruler } from "./layout";
import { neighbour } from "./navigate";

const ROOMY_LANE = 44; // text and owners below each other
const TIGHT_LANE = 30;
const ROOMY_LANES = 20;
const GAP = 2;
const PAD = 12;
const LINE = 15;
const BAND = 6;
const NARROW = 48; // where a tall box has its text upright
const OVERSCAN = 200;
const SMALLEST = 1.5;
const FALLBACK_WIDTH = 800;
const TOKEN_PIXELS = 16;

interface View {
  left: number;
  top: number;
  width: number;
  height: number;
}

/** Keep this token position at this distance from the left edge after a zoom. */
interface Anchor {
  position: number;
  offset: number;
}

let views = 0;

export function Trie({ snapshot }: { snapshot: Snapshot }) {
  const tree = { ...EMPTY, ...snapshot };
  return html`
    <section class="mj mj-trie" data-testid="trie" aria-label=${tree.alt || "Prefix cache"}>
      ${
        tree.nodes.length
          ? html`<${Icicle} tree=${tree} />`
          : html`<${Nothing} model=${tree.model} />`
      }
    </section>
  `;
}

function Nothing({ model }: { model: string }) {
  return html`
    <div class="mj-empty" data-testid="trie-empty">
      <strong>Nothing is cached yet${model && ` for ${model}`}.</strong>
      <p>Run a <code>%%llm</code> cell, then <code>%llm tree</code> again: prompts that begin alike
      share a box here, and what they share is computed once.</p>
      <pre>%%llm\nWhat is a prefix cache?</pre>
    </div>
  `;
}

function Icicle({ tree }: { tree: Snapshot }) {
  const scroller = useRef<HTMLDivElement>(null);
  const focusable = useRef<HTMLDivElement>(null);
  const anchor = useRef<Anchor | null>(null);
  const [prefix] = useState(() => `mj-trie-${++views}-`);
  const [selectedId, select] = useState<number | null>(null);
  const [zoom, setZoom] = useState(1);
  const [view, setView] = useState<View>({ left: 0, top: 0, width: FALLBACK_WIDTH, height: 480 });

  const fit = Math.max(160, view.width - 2 * PAD);
  const placed = useMemo(() => layout(tree.nodes, fit * zoom), [tree.nodes, fit, zoom]);
  const lane = placed.lanes > ROOMY_LANES ? TIGHT_LANE : ROOMY_LANE;
  const selected = placed.byId.get(selectedId ?? -1) ?? null;
  const most = Math.max(4, (TOKEN_PIXELS * placed.scale.total) / fit);

  const measure = () => {
    const el = scroller.current;
    if (!el) return;
    const width = el.clientWidth || FALLBACK_WIDTH;
    const height = el.clientHeight || 480;
    setView((old) =>
      old.left === el.scrollLeft &&
      old.top === el.scrollTop &&
      old.width === width &&
      old.height === height
        ? old
        : { left: el.scrollLeft, top: el.scrollTop, width, height },
    );
  };

  useLayoutEffect(() => {
    const el = scroller.current;
    if (!el) return;
    measure();
    if (typeof ResizeObserver === "undefined") return;
    const observer = new ResizeObserver(measure);
    observer.observe(el);
    return () => observer.disconnect();
  }, []);

  useLayoutEffect(() => {
    const el = scroller.current;
    if (!el || !anchor.current) return;
    el.scrollLeft = PAD + placed.scale.at(anchor.current.position) - anchor.current.offset;
    anchor.current = null;
    measure();
  }, [placed]);

  useEffect(() => {
    if (scroller.current && selected) reveal(scroller.current, selected, lane);
  }, [selectedId]);

  /** Zoom about a point of the viewport: by default the selection if it is in sight, else the middle. */
  const zoomTo = (wanted: number, about?: number) => {
    const begins = selected ? PAD + selected.x0 - view.left : -1;
    const offset = about ?? (begins >= 0 && begins < view.width ? begins : view.width / 2);
    const next = Math.min(most, Math.max(1, wanted));
    const left = scroller.current?.scrollLeft ?? 0;
    anchor.current = { position: placed.scale.invert(left + offset - PAD), offset };
    setZoom(next < 1.02 ? 1 : next);
  };

  /** Zoom so that a node fills most of the viewport. */
  const zoomOn = (box: Box) => {
    const next = Math.min(most, Math.max(1, (zoom * view.width * 0.8) / (box.x1 - box.x0)));
    anchor.current = { position: box.node.start, offset: view.width * 0.1 };
    setZoom(next);
  };

  const onKeyDown = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { key } = event;
    if (event.shiftKey && (key === "ArrowLeft" || key === "ArrowRight")) {
      scroller.current?.scrollBy({ left: (key === "ArrowLeft" ? -0.25 : 0.25) * view.width });
    } else if (key === "+" || key === "=") zoomTo(zoom * 1.5);
    else if (key === "-" || key === "_") zoomTo(zoom / 1.5);
    else if (key === "0") zoomTo(1);
    else if (key === "Escape" && selected) select(null);
    else if ((key === "Enter" || key === " ") && selected) zoomOn(selected);
    else if (key.startsWith("Arrow") || key === "Home" || key === "End") {
      const next = neighbour(placed, selected, key);
      if (next) select(next.node.id);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };

  const onWheel = (event: WheelEvent) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const left = scroller.current?.getBoundingClientRect().left ?? 0;
    zoomTo(zoom * Math.exp(-event.deltaY / 300), event.clientX - left);
  };

  const shown = inSight(placed, lane, view, selected);
  return html`
    <${Header} tree=${tree}>
      <div class="mj-zoom" role="group" aria-label="Zoom">
        <button class="mj-button" data-testid="trie-zoom-out" aria-label="Zoom out" title="Zoom out (−)"
          disabled=${zoom <= 1} onClick=${() => zoomTo(zoom / 1.5)}>−</button>
        <button class="mj-button" data-testid="trie-zoom-in" aria-label="Zoom in" title="Zoom in (+)"
          disabled=${zoom >= most} onClick=${() => zoomTo(zoom * 1.5)}>+</button>
        <button class="mj-button" data-testid="trie-zoom-fit" title="Show everything (0)"
          disabled=${zoom === 1} onClick=${() => zoomTo(1)}>Fit</button>
      </div>
    <//>
    <div class="mj-stage"><div class="mj-scroll" data-testid="trie-viewport" ref=${scroller} onScroll=${measure}
      onWheel=${onWheel} style=${{ "--mj-view": `${view.width}px` }}>
      <div class="mj-ruler" data-testid="trie-ruler" aria-hidden="true"
        style=${{ width: `${placed.width + 2 * PAD}px` }}>
        ${ruler(placed.scale, view.left, view.left + view.width).map(
          (tick) =>
            html`<span key=${tick.position} style=${{ left: `${PAD + tick.x}px` }}
              >${count(tick.position)}</span>`,
        )}
      </div>
      <div class="mj-tree" role="tree" tabindex="0" ref=${focusable} data-testid="trie-tree"
        data-lm-suppress-shortcuts="true" aria-label="Branches by token position"
        aria-activedescendant=${selected ? prefix + selected.node.id : undefined}
        onKeyDown=${onKeyDown}
        style=${{ width: `${placed.width + 2 * PAD}px`, height: `${placed.lanes * lane + GAP}px` }}>
        ${shown.map(
          (box) => html`<${Node} key=${box.node.id} box=${box} placed=${placed} lane=${lane}
            id=${prefix + box.node.id} selected=${box === selected}
            onSelect=${() => {
              select(box.node.id);
              focusable.current?.focus({ preventScroll: true });
            }}
            onZoom=${() => zoomOn(box)} />`,
        )}
      </div>
    </div></div>
    <${Detail} tree=${tree} box=${selected} />
    <${Legend} tree=${tree} />
  `;
}

/** Boxes that touch the viewport and are wide enough to see; always the selected one. */
function inSight(placed: Layout, lane: number, view: View, selected: Box | null): Box[] {
  const [left, right] = [view.left - PAD - OVERSCAN, view.left + view.width + OVERSCAN];
  const first = Math.floor((view.top - OVERSCAN) / lane);
  const last = Math.ceil((view.top + view.height + OVERSCAN) / lane);
  return placed.boxes.filter(
    (box) =>
      box === selected ||
      (box.x1 >= left &&
        box.x0 <= right &&
        box.lane + box.lanes >= first &&
        box.lane <= last &&
        box.x1 - box.x0 >= SMALLEST),
  );
}

/** Scroll the least that brings the box's beginning, and all of it if it fits, into sight. */
function reveal(el: HTMLElement, box: Box, lane: number): void {
  const margin = 24;
  const [x0, x1] = [PAD + box.x0, PAD + box.x1];
  if (x0 < el.scrollLeft || x1 - x0 > el.clientWidth) el.scrollLeft = Math.max(0, x0 - margin);
  else if (x1 > el.scrollLeft + el.clientWidth) el.scrollLeft = x1 - el.clientWidth + margin;
  const [y0, y1] = [box.lane * lane, (box.lane + box.lanes) * lane + margin];
  if (y0 < el.scrollTop) el.scrollTop = y0;
  else if (y1 > el.scrollTop + el.clientHeight) {
    el.scrollTop = Math.min(y0, y1 - el.clientHeight + margin);
  }
}

interface NodeProps {
  box: Box;
  placed: Layout;
  lane: number;
  id: string;
  selected: boolean;
  onSelect: () => void;
  onZoom: () => void;
}

function Node({ box, placed, lane, id, selected, onSelect, onZoom }: NodeProps) {
  const { node } = box;
  const width = Math.max(1, box.x1 - box.x0 - GAP);
  const height = box.lanes * lane - GAP;
  const owners = (node.owners ?? []).join(", ");
  const lost = heldTokens(node) === 0;
  const lines = Math.max(1, Math.floor((height - BAND - 4) / LINE));
  const below = lines > 1;
  const upright = width < NARROW && height > 2 * NARROW;
  const named = owners !== "" && width >= (below ? NARROW : 140);
  const rows = named && below ? lines - 1 : lines;
  const x = (position: number) => Math.min(width, placed.scale.at(position) - box.x0);
  const classes = [
    "mj-node",
    node.active && "mj-is-active",
    lost && "mj-is-lost",
    below && "mj-is-tall",
    upright && "mj-is-narrow",
  ];
  return html`
    <div role="treeitem" id=${id} class=${classes.filter(Boolean).join(" ")} data-testid="trie-node"
      data-node-id=${node.id} data-active=${node.active ? "true" : undefined}
      aria-selected=${selected ? "true" : "false"} aria-level=${box.depth}
      aria-posinset=${box.place} aria-setsize=${box.siblings}
      aria-expanded=${box.children.length ? "true" : undefined}
      aria-label=${spoken(node)} title=${tooltip(node)} onClick=${onSelect} onDblClick=${onZoom}
      style=${{
        left: `${PAD + box.x0}px`,
        top: `${box.lane * lane}px`,
        width: `${width}px`,
        height: `${height}px`,
      }}>
      ${node.runs.map(
        ([start, end, residence]) =>
          html`<span key=${start} class=${`mj-run mj-fill mj-${residence}`}
            style=${{ left: `${x(start)}px`, width: `${Math.max(0.5, x(end) - x(start))}px` }} />`,
      )}
      ${
        width >= 20 &&
        html`<span class="mj-label" style=${{ "--rows": upright ? 1 : rows, "--reach": `${height - BAND}px` }}>
          <span class="mj-text">${label(node.text)}</span>
          ${named && html`<span class="mj-owner" data-testid="trie-owner">${owners}</span>`}
        </span>`
      }
      ${(node.marks ?? []).map(
        ([at, kind, , size], i) =>
          html`<span key=${`m${i}`} class="mj-mark" data-testid="trie-mark" data-kind=${kind}
            title=${`${kind} snapshot at ${count(at)}, ${bytes(size)}`}
            style=${{ left: `${x(at)}px` }}><b>${MARK_KINDS[kind] ?? "?"}</b></span>`,
      )}
      <span class="mj-edge" />
    </div>
  `;
}

function spoken(node: NodeData): string {
  const tokens = node.end - node.start;
  const where = tokensByResidence(node).map(([name, n]) => `${count(n)} ${name}`);
  return [
    label(node.text),
    `${counted(tokens, "token", "tokens")} from ${count(node.start)}`,
    where.join(", "),
    node.owners?.length ? `used by ${node.owners.join(", ")}` : "",
    node.active ? "active path" : "",
  ]
    .filter(Boolean)
    .join("; ");
}

function tooltip(node: NodeData): string {
  const tokens = `${count(node.start)}–${count(node.end)}`;
  const where = tokensByResidence(node).map(([name, n]) => `${count(n)} ${name}`);
  return `${node.text}\n${tokens} · ${where.join(", ")}`;
}

function Header({ tree, children }: { tree: Snapshot; children?: unknown }) {
  const total = tree.nodes.reduce((sum, node) => sum + node.end - node.start, 0);
  const held = tree.nodes.reduce((sum, node) => sum + heldTokens(node), 0);
  const used = tree.live_bytes + tree.stored_bytes;
  const share = (part: number) => `${Math.min(100, (100 * part) / (tree.budget || used || 1))}%`;
  return html`
    <header class="mj-head" data-testid="trie-summary">
      <strong>${tree.model || "No model"}</strong>
      <span>${held === total ? count(total) : `${count(held)} of ${count(total)}`} tokens held</span>
      <span class="mj-meter" role="img" title=${`live ${bytes(tree.live_bytes)}, stored ${bytes(tree.stored_bytes)}`}
        aria-label=${`Memory: live ${bytes(tree.live_bytes)}, stored ${bytes(tree.stored_bytes)}`}>
        <i class="mj-meter-live" style=${{ width: share(tree.live_bytes) }} />
        <i class="mj-meter-stored" style=${{ width: share(tree.stored_bytes) }} />
      </span>
      <span>${bytes(used)}${tree.budget ? ` of ${bytes(tree.budget)}` : ""}</span>
      ${children}
    </header>
  `;
}

function Detail({ tree, box }: { tree: Snapshot; box: Box | null }) {
  if (!box) {
    return html`
      <div class="mj-detail mj-hint" data-testid="trie-detail" role="status">
        Click a box, or press an arrow key in the drawing, to see what it holds.
        ${" "}<kbd>+</kbd> <kbd>−</kbd> and Ctrl + wheel zoom, <kbd>Enter</kbd> zooms on the selection,
        ${" "}<kbd>0</kbd> shows everything.
      </div>
    `;
  }
  const { node } = box;
  const tokens = node.end - node.start;
  const where = tokensByResidence(node).map(([name, n]) => `${count(n)} ${name}`);
  const ago = tree.clock - node.used;
  const marks = (node.marks ?? []).map(
    ([at, kind, residence, size]) => `${kind} at ${count(at)} (${residence}, ${bytes(size)})`,
  );
  const facts: [string, string][] = [
    ["Tokens", `[${count(node.start)}, ${count(node.end)}) · ${count(tokens)}`],
    ["Held", `${count(heldTokens(node))} of ${count(tokens)}: ${where.join(", ") || "none"}`],
    [
      "Bytes",
      nodeBytes(node) || !heldTokens(node) ? bytes(nodeBytes(node)) : "none of its own (live)",
    ],
    [
      "Uses",
      `${count(node.uses)}, last ${ago > 0 ? `${counted(ago, "request", "requests")} ago` : "by the latest request"}`,
    ],
    ["Used by", node.owners?.join(", ") ?? ""],
    ["Snapshots", marks.join(", ")],
    ["Branches", box.children.length ? count(box.lanes) : ""],
  ];
  return html`
    <div class="mj-detail" data-testid="trie-detail" role="status">
      <p class="mj-full">${node.text || "(no text)"}${node.tail && html`<span class="mj-tail">${node.tail}</span>`}</p>
      <dl>
        ${facts
          .filter(([, value]) => value)
          .map(
            ([name, value]) =>
              html`<div key=${name}><dt>${name}</dt><dd data-testid=${`trie-detail-${name.toLowerCase().replace(" ", "-")}`}>${value}</dd></div>`,
          )}
      </dl>
    </div>
  `;
}

function Legend({ tree }: { tree: Snapshot }) {
  const present = new Set(tree.nodes.flatMap((node) => node.runs.map((run) => run[2])));
  const kinds = new Set(tree.nodes.flatMap((node) => (node.marks ?? []).map((mark) => mark[1])));
  return html`
    <ul class="mj-legend" data-testid="trie-legend" aria-label="Legend">
      ${RESIDENCES.filter((name) => present.has(name)).map(
        (name) =>
          html`<li key=${name}><i class=${`mj-swatch mj-fill mj-${name}`} />${name}
            <span> ${MEANING[name]}</span></li>`,
      )}
      ${
        tree.nodes.some((node) => node.active) &&
        html`<li key="active"><i class="mj-swatch mj-swatch-active" />active path</li>`
      }
      ${[...kinds].map(
        (kind) =>
          html`<li key=${kind}><b class="mj-flag">${MARK_KINDS[kind] ?? "?"}</b>${kind} snapshot</li>`,
      )}
    </ul>
  `;
}
