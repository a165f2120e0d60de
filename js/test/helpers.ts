import type { Snapshot } from "../src/lib/model";
import type { WidgetModel } from "../src/lib/widget";
import fixture from "./fixtures/demo.json";

/** What the kernel sends for the demo tree, with the layout that Python computes for it. */
export const demo = fixture.snapshot as unknown as Snapshot;
export const expected = fixture.layout;

/** A stand-in for anywidget's model: one value a trait, listeners that can be counted. */
export class MockModel implements WidgetModel {
  readonly listeners = new Map<string, Set<(content: unknown) => void>>();
  readonly sent: unknown[] = [];

  constructor(private readonly values: Record<string, unknown>) {}

  get(name: string): unknown {
    return this.values[name];
  }

  set(name: string, value: unknown): void {
    this.values[name] = value;
    for (const listener of this.listeners.get(`change:${name}`) ?? []) listener(undefined);
  }

  /** A message from the kernel. */
  say(content: unknown): void {
    for (const listener of this.listeners.get("msg:custom") ?? []) listener(content);
  }

  send(content: unknown): void {
    this.sent.push(content);
  }

  on(event: string, callback: (content: unknown) => void): void {
    const known = this.listeners.get(event) ?? new Set();
    this.listeners.set(event, known.add(callback));
  }

  off(event: string, callback: (content: unknown) => void): void {
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
