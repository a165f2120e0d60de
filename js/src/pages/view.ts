// The widget: figures, memory over time, the budget's slider, the grid of pages, the page that was
// chosen, a legend.

import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { bytes, count, counted, label } from "../lib/format";
import { html } from "../lib/html";
import type { Json } from "../lib/live";
import { MEANING, RESIDENCES, type Residence } from "../lib/model";
import { Budget } from "./budget";
import { moved, Teller } from "./changes";
import { Chart } from "./chart";
import { type Chosen, Grid } from "./grid";
import { sizes } from "./layout";
import { cellsOf, EMPTY, type Pages, type Preview } from "./model";

const PAD = 12;
const FALLBACK_WIDTH = 800;
const FADE = 900; // milliseconds that a moved page shows where it was

let views = 0;

interface Props {
  document: Partial<Pages>;
  answer: Json | null;
  ask: (content: Json) => void;
}

export function PagesWidget({ document, answer, ask }: Props) {
  const pages: Pages = { ...EMPTY, ...document };
  const root = useRef<HTMLElement>(null);
  const [id] = useState(() => `mj-pages-${++views}-`);
  const [width, setWidth] = useState(FALLBACK_WIDTH);
  const [chosen, choose] = useState<Chosen | null>(null);
  const [preview, show] = useState<Preview | null>(null);
  const [said, say] = useState("");
  const moves = useMoves(pages, say);

  useLayoutEffect(() => {
    const el = root.current;
    if (!el) return;
    const measure = () => setWidth(el.clientWidth || FALLBACK_WIDTH);
    measure();
    if (typeof ResizeObserver === "undefined") return;
    const observer = new ResizeObserver(measure);
    observer.observe(el);
    return () => observer.disconnect();
  }, []);

  const some = Object.keys(pages.edges).length > 0;
  const inner = Math.max(200, width - 2 * PAD);
  return html`
    <section class="mj mj-pages" data-testid="pages" ref=${root} aria-label=${pages.alt || "Pages"}>
      <${Header} pages=${pages} />
      ${some && html`<${Chart} pages=${pages} width=${inner} budget=${preview?.budget ?? pages.budget} id=${id} />`}
      ${pages.budget > 0 && html`<${Budget} pages=${pages} answer=${answer} ask=${ask} onPreview=${show} />`}
      ${
        some
          ? html`<${Grid} pages=${pages} sizes=${sizes(inner - 16)} moves=${moves} preview=${preview} id=${id} onChoose=${choose} />
            <${Detail} pages=${pages} chosen=${chosen} />
            <${Legend} pages=${pages} preview=${preview} />`
          : html`<${Nothing} model=${pages.model} />`
      }
      <div class="mj-unseen" role="status" data-testid="pages-said">${said}</div>
    </section>
  `;
}

/** What moved with the last change, for a moment; and it is said. */
function useMoves(pages: Pages, say: (text: string) => void) {
  const before = useRef(pages);
  const teller = useRef<Teller | null>(null);
  const [moves, setMoves] = useState<ReadonlyMap<string, { was: Residence }>>(new Map());
  useEffect(() => () => teller.current?.stop(), []);
  useLayoutEffect(() => {
    const old = before.current;
    before.current = pages;
    if (old === pages || old.edges === pages.edges) return;
    const found = moved(old, pages);
    teller.current ??= new Teller(say);
    teller.current.note(old, pages, found);
    if (!found.size) return;
    setMoves(found);
    const timer = setTimeout(() => setMoves(new Map()), FADE);
    return () => clearTimeout(timer);
  }, [pages.edges]);
  return moves;
}

function Header({ pages }: { pages: Pages }) {
  const cells = allPages(pages);
  const held = cells.reduce((sum, { where, tokens }) => sum + (where === "gone" ? 0 : tokens), 0);
  return html`
    <header class="mj-head" data-testid="pages-summary">
      <strong>${pages.model || "No model"}</strong>
      <span>${counted(
        cells.reduce((sum, each) => sum + each.pages, 0),
        "page",
        "pages",
      )}</span>
      <span>${count(held)} tokens held</span>
      <span>${bytes(pages.cached)}${pages.budget ? ` of ${bytes(pages.budget)}` : ""}</span>
    </header>
  `;
}

/** Pages and tokens by residence, in the order of RESIDENCES, without zeros. */
function allPages(pages: Pages): { where: Residence; pages: number; tokens: number }[] {
  const found = new Map<Residence, { pages: number; tokens: number }>();
  for (const [key, edge] of Object.entries(pages.edges)) {
    for (const cell of cellsOf(key, edge, pages.page)) {
      if (cell.kind !== "rows") continue;
      const sum = found.get(cell.where) ?? { pages: 0, tokens: 0 };
      sum.pages += 1;
      sum.tokens += cell.end - cell.start;
      found.set(cell.where, sum);
    }
  }
  return RESIDENCES.filter((where) => found.has(where)).map((where) => ({
    where,
    ...(found.get(where) as { pages: number; tokens: number }),
  }));
}

function Nothing({ model }: { model: string }) {
  return html`
    <div class="mj-empty" data-testid="pages-empty">
      <strong>Nothing is cached yet${model && ` for ${model}`}.</strong>
      <p>Run a <code>%%llm</code> cell: what it computes appears here, a small square for 256 tokens.</p>
      <pre>%%llm\nWhat is a page?</pre>
    </div>
  `;
}

function Detail({ pages, chosen }: { pages: Pages; chosen: Chosen | null }) {
  const edge = chosen && pages.edges[chosen.cell.edge];
  if (!chosen || !edge) {
    return html`
      <div class="mj-detail" data-testid="pages-detail">
        Click a page, or press an arrow key in the grid, to see what it holds.
        ${" "}<kbd>Ctrl</kbd> + <kbd>Home</kbd> and <kbd>End</kbd> lead to the ends.
      </div>
    `;
  }
  const { cell, group } = chosen;
  const ago = pages.clock - edge.used;
  const now = cellsOf(cell.edge, edge, pages.page).find(
    (each) => each.kind === cell.kind && each.start === cell.start,
  );
  const where = now?.where ?? "gone";
  const facts: [string, string][] = [
    ["Of", group.title],
    [
      cell.kind === "state" ? "Snapshot" : cell.kind === "window" ? "Window rows" : "Tokens",
      cell.kind === "state"
        ? `${cell.mark} at ${count(cell.start)}`
        : `${count(cell.start)} to ${count(cell.end)}`,
    ],
    ["Where", `${where}: ${MEANING[where]}`],
    ["Bytes", now?.nbytes ? bytes(now.nbytes) : "none of its own"],
    ["Last used", ago > 0 ? `${counted(ago, "request", "requests")} ago` : "by the latest request"],
    ["Begins", label(edge.text)],
  ];
  return html`
    <div class="mj-detail" data-testid="pages-detail">
      <dl>
        ${facts.map(
          ([name, value]) =>
            html`<div key=${name}><dt>${name}</dt><dd data-testid=${`pages-detail-${name.toLowerCase().replace(" ", "-")}`}>${value}</dd></div>`,
        )}
      </dl>
    </div>
  `;
}

function Legend({ pages, preview }: { pages: Pages; preview: Preview | null }) {
  return html`
    <ul class="mj-legend" data-testid="pages-legend" aria-label="Legend">
      ${allPages(pages).map(
        ({
          where,
          pages: n,
          tokens,
        }) => html`<li key=${where} data-testid=${`pages-count-${where}`} data-count=${n}>
          <i class=${`mj-tiles mj-key mj-t-${where}`} />${where}
          <span> ${MEANING[where]}: ${counted(n, "page", "pages")}, ${count(tokens)} tokens</span></li>`,
      )}
      ${preview && html`<li key="going"><i class="mj-key mj-tiles mj-t-device" /><i class="mj-tiles mj-key mj-key-going mj-going" />would go</li>`}
    </ul>
  `;
}
