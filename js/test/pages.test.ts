import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { Json } from "../src/lib/live";
import widget from "../src/pages";
import { bytesAt, position, range, STEPS, told } from "../src/pages/budget";
import { moved, Teller } from "../src/pages/changes";
import { fitted, stacked } from "../src/pages/chart";
import { grouped } from "../src/pages/groups";
import { inSight, layout, sizes, step, stretches, whereOf } from "../src/pages/layout";
import { type Edge, EMPTY, type Pages, type Preview, type Sample } from "../src/pages/model";
import fixture from "./fixtures/pages.json";
import { byTestId, MockModel, settle } from "./helpers";

const demo = fixture.document as unknown as Pages;

let el: HTMLElement;
let cleanup: (() => void) | undefined;

beforeEach(() => {
  el = document.body.appendChild(document.createElement("div"));
});

afterEach(() => {
  cleanup?.();
  cleanup = undefined;
  document.body.replaceChildren();
});

async function show(document: unknown = demo): Promise<MockModel> {
  const model = new MockModel({ snapshot: { number: 1, document }, picture: "" });
  cleanup = widget.render({ model, el });
  await settle();
  return model;
}

const one = (id: string) => byTestId(el, id)[0] as HTMLElement;
const grid = () => one("pages-grid");
const asked = (model: MockModel, type: string) =>
  model.sent.filter((m) => (m as Json).type === type) as Json[];

async function press(target: HTMLElement, key: string, init: KeyboardEventInit = {}) {
  const event = new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...init });
  target.dispatchEvent(event);
  await settle();
  return event;
}

/** A document of so many pages in a few conversations. */
function many(count: number): Pages {
  const edges: Record<string, Edge> = {};
  for (let i = 0; i < 8; i++) {
    const end = (count / 8) * 256;
    edges[`${i + 1}`] = {
      parent: 0,
      start: 0,
      end,
      used: i,
      text: "x",
      owners: [`@c${i}`],
      runs: [
        [0, end / 2, "device", end * 10],
        [end / 2, end, "disk", 0],
      ],
    };
  }
  return { ...demo, edges };
}

describe("groups", () => {
  it("agree with the Python twin", () => {
    const made = grouped(demo).map((group) => ({
      title: group.title,
      pages: group.pages.map(({ start, end, where, nbytes }) => [start, end, where, nbytes]),
      strips: group.strips.length,
      marks: group.marks.length,
    }));
    expect(made).toEqual(fixture.groups);
  });
});

describe("layout", () => {
  const placed = layout(grouped(demo), sizes(700));

  it("has every page once, in rows that don't overlap", () => {
    const pages = placed.rows.filter((row) => row.kind === "rows").flatMap((row) => row.cells);
    expect(pages).toHaveLength(fixture.groups.reduce((sum, group) => sum + group.pages.length, 0));
    placed.rows.slice(1).forEach((row, i) => {
      const before = placed.rows[i] as (typeof placed.rows)[number];
      expect(row.top).toBeGreaterThanOrEqual(before.top + before.pitch);
    });
  });

  it("wraps at the width and puts titles above where it is narrow", () => {
    for (const width of [320, 700, 1400]) {
      const { names, figures, cells } = sizes(width);
      expect(names + figures + cells).toBeLessThanOrEqual(width);
      const { rows } = layout(grouped(many(800)), sizes(width));
      for (const row of rows) expect(row.cells.length * row.pitch - 2).toBeLessThanOrEqual(cells);
    }
    expect(sizes(320).names).toBe(0);
  });

  it("finds the rows in sight", () => {
    const tall = layout(grouped(many(4000)), sizes(700));
    const [first, end] = inSight(tall, 500, 700);
    expect(end - first).toBeLessThan(20);
    expect((tall.rows[first] as { top: number }).top).toBeLessThan(520);
    expect(inSight(layout([], sizes(700)), 0, 100)).toEqual([0, 0]);
  });

  it("goes by keys from page to page and over rows", () => {
    const at = (row: number, column: number) => ({ row, column });
    expect(step(placed, null, "ArrowDown", false, 5)).toEqual(at(0, 0));
    expect(step(placed, at(0, 0), "ArrowRight", false, 5)).toEqual(at(1, 0));
    expect(step(placed, at(1, 0), "ArrowLeft", false, 5)).toEqual(at(0, 0));
    expect(step(placed, at(0, 0), "ArrowLeft", false, 5)).toEqual(at(0, 0));
    expect(step(placed, at(0, 0), "ArrowUp", false, 5)).toEqual(at(0, 0));
    const last = placed.rows.length - 1;
    const end = step(placed, at(0, 0), "End", true, 5);
    expect(end?.row).toBe(last);
    expect(step(placed, end, "ArrowRight", false, 5)).toEqual(end);
    expect(step(placed, end, "Home", true, 5)).toEqual(at(0, 0));
    expect(step(placed, at(0, 0), "PageDown", false, 5)?.row).toBe(5);
    expect(step(placed, at(0, 0), "x", false, 5)).toBeNull();
    expect(step(layout([], sizes(700)), null, "Home", false, 5)).toBeNull();
  });

  it("joins neighbours of one kind", () => {
    const cells = grouped(demo).find((g) => g.title.startsWith("shared by @contract"))?.pages ?? [];
    const names = stretches(cells, whereOf).map(({ value }) => value);
    expect(names).toEqual(["device", "host", "disk", "gone", "host"]);
  });
});

describe("changes", () => {
  const edge = Object.keys(demo.edges)[0] as string;
  const first = demo.edges[edge] as Edge;
  const evicted: Pages = {
    ...demo,
    edges: { ...demo.edges, [edge]: { ...first, runs: [[0, 212, "disk", 0]] } },
  };

  it("are the pages that are elsewhere than before", () => {
    expect([...moved(demo, evicted).values()]).toEqual([{ was: "live", is: "disk" }]);
    expect(moved(demo, demo).size).toBe(0);
    expect(moved({ ...demo, model: "another" }, evicted).size).toBe(0);
  });

  it("are told together", () => {
    vi.useFakeTimers();
    const said: string[] = [];
    const teller = new Teller((text) => said.push(text));
    const grown = {
      ...evicted,
      edges: { ...evicted.edges, 99: { ...first, end: 1212, runs: [] } },
    };
    teller.note(demo, evicted, moved(demo, evicted));
    teller.note(evicted, grown, moved(evicted, grown));
    expect(said).toEqual([]);
    vi.advanceTimersByTime(2000);
    expect(said).toEqual(["1,212 new tokens, 1 page moved to disk."]);
    teller.note(demo, demo, new Map());
    vi.advanceTimersByTime(2000);
    expect(said).toHaveLength(1);
    vi.useRealTimers();
  });
});

describe("memory over time", () => {
  const sample = (weights: number, live: number): Sample => [0, weights, live, 5, 1, 0, 1000];

  it("is stacked, with lines on the scale only where they are near", () => {
    expect(stacked(sample(10, 20))).toEqual([10, 30, 35, 36]);
    const near = fitted([sample(10, 20)], 50);
    expect(near.lines).toEqual([
      { name: "budget", nbytes: 50, at: 60, inside: true },
      { name: "limit", nbytes: 1000, at: 1000, inside: false },
    ]);
    expect([near.base, near.most]).toEqual([0, 60]);
    expect(fitted([], 0)).toEqual({ base: 0, most: 1, lines: [] });
    expect(fitted([[0, 9, 0, 0, 0, 0, 0]], 0)).toMatchObject({ base: 0, most: 9 });
    const heavy = fitted([sample(1000, 0), sample(1000, 94)], 100);
    expect(heavy.base).toBe(950);
    expect(heavy.lines.map((line) => line.inside)).toEqual([true, true]);
  });

  it("is told as text too", async () => {
    await show();
    const label = one("pages-memory").querySelector("[role=img]")?.getAttribute("aria-label") ?? "";
    for (const word of ["weights 538 MB", "live 59.0 MB", "on disk 47.0 MB", "budget 1.00 GB"]) {
      expect(label).toContain(word);
    }
  });
});

describe("the budget", () => {
  const preview: Preview = {
    budget: 1,
    before: 9_000_000,
    after: 1_000_000,
    leaving: [
      [1, "rows", 0, 512, 100, "disk"],
      [1, "rows", 512, 600, 50, "gone"],
      [2, "window", 0, 256, 9, "gone"],
      [2, "state", 300, 300, 9, "gone"],
    ],
  };

  it("is on a scale from a part of what is cached to what the process may use", () => {
    const scale = range(demo);
    expect(scale.low).toBeLessThan(demo.cached / 50);
    expect(scale.high).toBe(8e9 - 538e6);
    for (const at of [0, 1, 100, STEPS]) {
      expect(Math.abs(position(bytesAt(at, scale), scale) - at)).toBeLessThanOrEqual(1);
    }
    expect(range(EMPTY).high).toBeGreaterThan(range(EMPTY).low);
  });

  it("says what would go", () => {
    expect(told(preview, 256)).toBe(
      "3 pages, 1 strip of window rows and 1 snapshot would go, 8.00 MB would be free. " +
        "Pages: 2 still on disk and 1 to be computed again. " +
        "1.00 MB would stay: what is pinned isn't given up.",
    );
    expect(told({ ...preview, leaving: [], budget: 2e6 }, 256)).toBe("Nothing would go.");
    const gone = { ...preview, budget: 1e7, leaving: preview.leaving.slice(2, 3) };
    expect(told(gone, 256)).toBe("1 strip of window rows would go, 8.00 MB would be free.");
  });

  it("is previewed while it moves and applied with Enter", async () => {
    const model = await show();
    const slider = one("pages-budget") as HTMLInputElement;
    expect(slider.getAttribute("aria-valuetext")).toBe("1.00 GB");
    slider.value = "20";
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await settle();
    await settle();
    await settle();
    const [question] = asked(model, "preview");
    expect(question?.budget).toBe(bytesAt(20, range(demo)));
    model.say({
      ...preview,
      type: "preview",
      ask: question?.ask,
      leaving: [[5, "rows", 212, 768, 9, "gone"]],
    });
    await settle();
    expect(one("pages-told").textContent).toContain("3 pages would go");
    expect(byTestId(el, "pages-going").map((g) => g.dataset.count)).toEqual(["3"]);
    expect(byTestId(el, "pages-going")[0]?.dataset.to).toBe("gone");
    await press(slider, "Enter");
    const [apply] = asked(model, "apply");
    expect(apply?.budget).toBe(question?.budget);
    model.say({ type: "apply", ask: apply?.ask, budget: 5e8, freed: 1e6 });
    await settle();
    expect(one("pages-told").textContent).toBe("The budget is 500 MB now; 1.00 MB was freed.");
    expect(byTestId(el, "pages-going")).toHaveLength(0);
  });

  it("is left with Escape, and a late answer changes nothing", async () => {
    const model = await show();
    const slider = one("pages-budget") as HTMLInputElement;
    slider.value = "20";
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    for (let i = 0; i < 4; i++) await settle();
    await press(slider, "Escape");
    model.say({ ...preview, type: "preview", ask: asked(model, "preview")[0]?.ask });
    await settle();
    expect(byTestId(el, "pages-going")).toHaveLength(0);
    expect(one("pages-told").textContent).toBe("");
    expect((one("pages-apply") as HTMLButtonElement).disabled).toBe(true);
  });

  it("shows why something couldn't be done", async () => {
    const model = await show();
    const slider = one("pages-budget") as HTMLInputElement;
    slider.value = "20";
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    for (let i = 0; i < 4; i++) await settle();
    model.say({
      type: "preview",
      ask: asked(model, "preview")[0]?.ask,
      fault: "The engine has ended.",
    });
    await settle();
    expect(one("pages-told").textContent).toBe("The engine has ended.");
  });
});

describe("the grid", () => {
  it("has rows with headers that say what is in them", async () => {
    await show();
    expect(grid().getAttribute("role")).toBe("grid");
    const rows = byTestId(el, "pages-row");
    expect(rows.length).toBe(Number(grid().getAttribute("aria-rowcount")));
    for (const row of rows) {
      expect(row.querySelector("[role=rowheader]")?.textContent).toMatch(/: \d/);
    }
    const contract = rows.find((row) => row.dataset.group?.startsWith("shared by @contract"));
    expect(contract?.querySelector("[role=rowheader]")?.textContent).toContain(
      "5 device, 6 host, 4 disk, 2 gone, 1 host",
    );
    expect(byTestId(el, "pages-count-live")[0]?.dataset.count).toBe("9");
  });

  it("is gone through by keys, and the page is told", async () => {
    await show();
    expect(grid().tabIndex).toBe(0);
    expect((await press(grid(), "ArrowDown")).defaultPrevented).toBe(true);
    const cell = one("pages-cell");
    expect(grid().getAttribute("aria-activedescendant")).toBe(cell.id);
    expect(cell.getAttribute("aria-label")).toContain("tokens 0 to 212, live");
    expect(one("pages-detail-where").textContent).toBe("live: in the model's cache");
    await press(grid(), "End", { ctrlKey: true });
    expect(one("pages-cell").getAttribute("aria-label")).toContain("left over");
    await press(grid(), "Escape");
    expect(byTestId(el, "pages-cell")).toHaveLength(0);
    expect((await press(grid(), "a")).defaultPrevented).toBe(false);
    expect((await press(grid(), "Tab")).defaultPrevented).toBe(false);
  });

  it("shows for a moment where moved pages were", async () => {
    const model = await show();
    const key = Object.keys(demo.edges)[0] as string;
    model.say({
      type: "patch",
      number: 2,
      patch: { edges: { [key]: { runs: [[0, 212, "disk", 0]] } } },
    });
    await settle();
    expect(byTestId(el, "pages-moved")[0]?.className).toContain("mj-t-live");
    expect(byTestId(el, "pages-run")[0]?.dataset.where).toBe("disk");
    await new Promise((done) => setTimeout(done, 1000));
    expect(byTestId(el, "pages-moved")).toHaveLength(0);
  });

  it("keeps few elements for many pages", async () => {
    await show(many(4000));
    expect(byTestId(el, "pages-count-disk")[0]?.dataset.count).toBe("2000");
    expect(grid().querySelectorAll("*").length).toBeLessThan(600);
  });

  it("says what to do when there is nothing, and survives a document without any field", async () => {
    await show({});
    expect(one("pages-empty").textContent).toContain("%%llm");
    expect(byTestId(el, "pages-grid")).toHaveLength(0);
  });

  it("never turns a text into markup", async () => {
    const text = '<img src=x onerror="window.hacked=1">';
    const edge = { ...(demo.edges["1"] as Edge), text, owners: [text] };
    await show({ ...demo, model: text, edges: { 1: edge } });
    await press(grid(), "Home");
    expect(el.querySelector("img")).toBeNull();
    expect(one("pages-detail-begins").textContent).toBe(text);
  });

  it("cleans up", async () => {
    const model = await show();
    cleanup?.();
    cleanup?.();
    expect(el.childElementCount).toBe(0);
    expect(asked(model, "close")).toHaveLength(1);
    expect(model.listeners.get("msg:custom")?.size).toBe(0);
  });
});
