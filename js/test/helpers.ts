import type { Snapshot } from "../src/lib/model";
import type { WidgetModel } from "../src/lib/widget";
import fixture from "./fixtures/demo.json";

/** What the kernel sends for the demo tree, with the layout that Python computes for it. */
export const demo = fixture.snapshot as unknown as Snapshot;
export const expected = fixture.layout;

/** A stand-in for anywidget's model: one value a trait, listeners that can be counted. */
export class MockModel implements WidgetModel {
  readonly listeners = new Map<string, Set<() => void>>();

  constructor(private readonly values: Record<string, unknown>) {}

  get(name: string): unknown {
    return this.values[name];
  }

  set(name: string, value: unknown): void {
    this.values[name] = value;
    for (const listener of this.listeners.get(`change:${name}`) ?? []) listener();
  }

  on(event: string, callback: () => void): void {
    const known = this.listeners.get(event) ?? new Set();
    this.listeners.set(event, known.add(callback));
  }

  off(event: string, callback: () => void): void {
    this.listeners.get(event)?.delete(callback);
  }
}

/** Let preact's scheduled renders and effects run. */
export async function settle(): Promise<void> {
  for (let i = 0; i < 3; i++) await new Promise((done) => setTimeout(done, 20));
}

export function byTestId(root: ParentNode, id: string): HTMLElement[] {
  return [...root.querySelectorAll<HTMLElement>(`[data-testid="${id}"]`)];
}
