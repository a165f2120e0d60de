// Memory over time as stacked bands with the budget and the limit as lines. The samples stand side by
// side, one for each change, since between two changes nothing happens.

import { bytes } from "../lib/format";
import { html } from "../lib/html";
import type { Pages, Sample } from "./model";

const HEIGHT = 104;
const CUT = 0.6; // of the scale that weights may take
const TOP = 16;
const LEFT = 64;

/** What is stacked, from below: a name for people, and one for the fill. */
export const BANDS = [
  ["weights", "weights"],
  ["live", "live"],
  ["stored", "device"],
  ["free buffers", "free"],
] as const;

export interface Line {
  readonly name: "budget" | "limit";
  readonly nbytes: number;
  /** Where it is on the scale: the budget counts from the weights on. */
  readonly at: number;
  readonly inside: boolean;
}

export interface Scale {
  /** Bytes at the lower end: weights that would leave the rest no room are cut off. */
  readonly base: number;
  readonly most: number;
  readonly lines: readonly Line[];
}

/** The upper edges of the bands at one moment, from below. */
export function stacked(sample: Sample): number[] {
  let total = 0;
  return sample.slice(1, 5).map((value) => {
    total += value;
    return total;
  });
}

/** A scale that shows the bands well, and the lines where they aren't too far above them. */
export function fitted(samples: readonly Sample[], budget: number): Scale {
  const top = Math.max(1, ...samples.map((sample) => stacked(sample).at(-1) as number));
  const last = samples.at(-1);
  const least = samples.length ? Math.min(...samples.map((sample) => sample[1])) : 0;
  const base = top > least && least > CUT * top ? Math.max(0, least - (top - least) / 2) : 0;
  const lines: Line[] = [];
  const add = (name: Line["name"], nbytes: number, at: number) => {
    if (nbytes > 0) lines.push({ name, nbytes, at, inside: at - base <= 3 * (top - base) });
  };
  add("budget", budget, (last?.[1] ?? 0) + budget);
  add("limit", last?.[6] ?? 0, last?.[6] ?? 0);
  return { base, most: Math.max(top, ...lines.filter((l) => l.inside).map((l) => l.at)), lines };
}

/** A flight of steps through the heights, from the left, or as the way back. */
function steps(heights: readonly number[], x: (i: number) => number, back = false): string {
  const points = heights.flatMap((y, i) => [`${x(i)} ${y}`, `${x(i + 1)} ${y}`]);
  if (!points.length) return "";
  return back ? `L${points.reverse().join("L")}Z` : `M${points.join("L")}`;
}

export function Chart({
  pages,
  width,
  budget,
  id,
}: {
  pages: Pages;
  width: number;
  budget: number;
  id: string;
}) {
  const samples = Object.entries(pages.samples)
    .sort(([a], [b]) => Number(a) - Number(b))
    .map(([, sample]) => sample);
  const { memory } = pages;
  const now: [string, string, number][] = BANDS.map(([name, fill], i) => [
    name,
    fill,
    [memory.weights, memory.live, memory.stored, memory.free][i] as number,
  ]);
  const scale = fitted(samples, budget);
  const right = Math.max(LEFT + 40, width);
  const y = (value: number) =>
    HEIGHT - ((HEIGHT - TOP) * Math.max(0, value - scale.base)) / (scale.most - scale.base);
  const x = (i: number) => LEFT + ((right - LEFT) * i) / Math.max(1, samples.length);
  const edges = samples.map(stacked);
  const label = [
    ...now.map(([name, , value]) => `${name} ${bytes(value)}`),
    ...scale.lines.map((line) => `${line.name} ${bytes(line.nbytes)}`),
    ...(memory.files ? [`on disk ${bytes(memory.disk)}`] : []),
  ].join(", ");
  return html`
    <figure class="mj-memory" data-testid="pages-memory">
      <svg role="img" aria-label=${`Memory over time, now: ${label}`} width=${right} height=${HEIGHT + 1}>
        <defs>
          <pattern id=${`${id}weights`} width="6" height="6" patternUnits="userSpaceOnUse">
            <path d="M0 0L6 6M-1 5L1 7M5 -1L7 1" style="stroke: var(--mj-muted); stroke-width: 1.5" /></pattern>
          <pattern id=${`${id}live`} width="6" height="6" patternUnits="userSpaceOnUse">
            <path d="M0 0H6V6H0Z" style="fill: var(--mj-live)" /></pattern>
          <pattern id=${`${id}device`} width="6" height="6" patternUnits="userSpaceOnUse">
            <path d="M0 0H6V6H0Z" style="fill: var(--mj-device-tint)" />
            <path d="M0 0H4V6H0Z" style="fill: var(--mj-device)" /></pattern>
          <pattern id=${`${id}free`} width="6" height="6" patternUnits="userSpaceOnUse">
            <path d="M0 0H6V1H0Z" style="fill: var(--mj-muted)" /></pattern>
        </defs>
        ${BANDS.map(([name, fill], band) => {
          const d =
            steps(
              edges.map((edge) => y(edge[band] as number)),
              x,
            ) +
            steps(
              edges.map((edge) => y(band ? (edge[band - 1] as number) : 0)),
              x,
              true,
            );
          return html`<path key=${name} d=${d} fill=${`url(#${id}${fill})`}
            style="stroke: var(--mj-page); stroke-width: 0.5" />`;
        })}
        <path d=${`M${LEFT} ${HEIGHT + 0.5}H${right}`} style="stroke: var(--mj-line)" />
        <text x=${LEFT - 6} y=${y(scale.most) + 4} class="mj-axis">${bytes(scale.most)}</text>
        <text x=${LEFT - 6} y=${HEIGHT} class="mj-axis">${bytes(scale.base)}</text>
        ${scale.lines
          .filter((line) => line.inside)
          .map(
            (
              line,
            ) => html`<g key=${line.name} class=${`mj-line-${line.name}`} data-testid=${`pages-line-${line.name}`}>
              <path d=${`M${LEFT} ${y(line.at)}H${right}`} />
              <text x=${right - 2} y=${y(line.at) - 4}>${line.name} ${bytes(line.nbytes)}</text></g>`,
          )}
      </svg>
      <ul class="mj-figures" aria-hidden="true">
        ${now.map(
          ([name, fill, value]) => html`<li key=${name}>
            <svg width="14" height="12"><rect width="14" height="12" fill=${`url(#${id}${fill})`} /></svg>
            ${name} <b>${bytes(value)}</b></li>`,
        )}
        ${memory.files > 0 && html`<li data-testid="pages-disk">on disk <b>${bytes(memory.disk)}</b></li>`}
        ${scale.lines
          .filter((line) => !line.inside)
          .map(
            (line) =>
              html`<li key=${line.name}>${line.name} <b>${bytes(line.nbytes)}</b> (above the chart)</li>`,
          )}
      </ul>
    </figure>
  `;
}
