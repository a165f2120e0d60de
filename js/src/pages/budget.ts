// The budget's slider: it first shows what would go, then applies. Positions are on a logarithmic
// scale from a fraction of what is cached to all that the process may use.

import { useEffect, useRef, useState } from "preact/hooks";
import { bytes, count, counted } from "../lib/format";
import { html } from "../lib/html";
import type { Json } from "../lib/live";
import type { Residence } from "../lib/model";
import { cut, type Pages, type Preview } from "./model";

export const STEPS = 240;
const SETTLES = 120; // milliseconds without a movement before the kernel is asked
const PATIENCE = 400; // milliseconds before it is said that the answer takes a while

export interface Range {
  readonly low: number;
  readonly high: number;
}

/** From a hundredth of what is cached to what the process may use besides the weights. */
export function range({ cached, budget, memory }: Pages): Range {
  const low = Math.max(1000, Math.min(cached || budget, budget || cached) / 100);
  return { low, high: Math.max(low * 10, budget, cached, memory.limit - memory.weights) };
}

export function position(budget: number, { low, high }: Range): number {
  const share = Math.log(Math.max(low, budget) / low) / Math.log(high / low);
  return Math.round(Math.min(1, Math.max(0, share)) * STEPS);
}

/** Bytes at a position, with two digits that say something. */
export function bytesAt(at: number, { low, high }: Range): number {
  const exact = low * (high / low) ** (at / STEPS);
  const digit = 10 ** Math.max(0, Math.floor(Math.log10(exact)) - 1);
  return Math.round(exact / digit) * digit;
}

/** What a budget would do, in words. */
export function told(preview: Preview, size: number): string {
  const { leaving, budget, after } = preview;
  const beyond =
    after > budget ? ` ${bytes(after)} would stay: what is pinned isn't given up.` : "";
  if (!leaving.length) return `Nothing would go.${beyond}`;
  const pages: Record<Residence, number> = { live: 0, device: 0, host: 0, disk: 0, gone: 0 };
  let [all, strips, marks] = [0, 0, 0];
  for (const [edge, kind, start, end, nbytes, to] of leaving) {
    const n = cut(`${edge}`, kind, [start, end, to, nbytes], size).length;
    if (kind === "state") marks += 1;
    else if (kind === "window") strips += n;
    else {
      pages[to] += n;
      all += n;
    }
  }
  const parts = [
    all && counted(all, "page", "pages"),
    strips && counted(strips, "strip of window rows", "strips of window rows"),
    marks && counted(marks, "snapshot", "snapshots"),
  ].filter(Boolean) as string[];
  const freed = bytes(Math.max(0, preview.before - after));
  const fates = (Object.keys(FATES) as Residence[])
    .filter((where) => pages[where])
    .map((where) => `${count(pages[where])} ${FATES[where]}`);
  const fate = fates.length ? ` Pages: ${joined(fates)}.` : "";
  return `${joined(parts)} would go, ${freed} would be free.${fate}${beyond}`;
}

const FATES: Partial<Record<Residence, string>> = {
  device: "pinned, out of the live cache only",
  host: "still in host memory",
  disk: "still on disk",
  gone: "to be computed again",
};

function joined(parts: readonly string[]): string {
  return [parts.slice(0, -1).join(", "), parts.at(-1)].filter(Boolean).join(" and ");
}

interface Props {
  pages: Pages;
  /** The last answer of the kernel. */
  answer: Json | null;
  ask: (content: Json) => void;
  /** What would go, to be shown in the grid. */
  onPreview: (preview: Preview | null) => void;
}

let asks = 0;

export function Budget({ pages, answer, ask, onPreview }: Props) {
  const [wanted, want] = useState<number | null>(null);
  const [said, say] = useState("");
  const [slow, setSlow] = useState(false);
  const waiting = useRef(0);
  const applying = useRef(false);
  const scale = range(pages);
  const value = wanted ?? pages.budget;

  const drop = (text: string) => {
    want(null);
    say(text);
    setSlow(false);
    waiting.current = 0;
    applying.current = false;
    onPreview(null);
  };

  // Asked again when the cache changes meanwhile: an old preview would be wrong.
  useEffect(() => {
    if (wanted === null || applying.current) return;
    const timer = setTimeout(() => {
      waiting.current = ++asks;
      ask({ type: "preview", budget: wanted, ask: waiting.current });
    }, SETTLES);
    const late = setTimeout(() => setSlow(waiting.current > 0), SETTLES + PATIENCE);
    return () => {
      clearTimeout(timer);
      clearTimeout(late);
    };
  }, [wanted, pages.edges]);

  useEffect(() => {
    if (!answer || answer.ask !== waiting.current) return;
    waiting.current = 0;
    setSlow(false);
    if (typeof answer.fault === "string") drop(answer.fault);
    else if (answer.type === "apply") {
      drop(
        `The budget is ${bytes(answer.budget as number)} now; ${bytes(answer.freed as number)} was freed.`,
      );
    } else {
      const preview = answer as unknown as Preview;
      onPreview(preview);
      say(told(preview, pages.page));
    }
  }, [answer]);

  const apply = () => {
    if (wanted === null || applying.current) return;
    applying.current = true;
    waiting.current = ++asks;
    ask({ type: "apply", budget: wanted, ask: waiting.current });
    setTimeout(() => setSlow(waiting.current > 0), PATIENCE);
  };

  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Enter") apply();
    else if (event.key === "Escape" && wanted !== null) drop("");
    else return;
    event.preventDefault();
    event.stopPropagation();
  };

  const text = bytes(value);
  return html`
    <div class="mj-budget" role="group" aria-label="Budget of the cache">
      <label>Budget
        <input type="range" min="0" max=${STEPS} step="1" value=${position(value, scale)}
          data-testid="pages-budget" data-lm-suppress-shortcuts="true" aria-valuetext=${text}
          title="Move to see what would go; Enter applies, Escape leaves it"
          onInput=${(event: Event) => want(bytesAt(Number((event.target as HTMLInputElement).value), scale))}
          onKeyDown=${onKeyDown} />
      </label>
      <output data-testid="pages-budget-value">${text}</output>
      <button class="mj-button" data-lm-suppress-shortcuts="true" data-testid="pages-apply" disabled=${wanted === null} onClick=${apply}>Apply</button>
      <button class="mj-button" data-lm-suppress-shortcuts="true" data-testid="pages-keep" disabled=${wanted === null}
        onClick=${() => drop("")}>Keep ${bytes(pages.budget)}</button>
      <span class="mj-told" role="status" data-testid="pages-told">${
        slow ? "Waiting for the running request to end…" : said
      }</span>
    </div>
  `;
}
