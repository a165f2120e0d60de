// The browser's half of mlx_jupyter/widgets/live.py: a document that the kernel keeps up to date by
// numbered JSON merge patches (RFC 7386). A number that is missing makes it ask for the whole.

import type { WidgetModel } from "./widget";

/** Milliseconds between two signs of life: the kernel can't see that a page was closed. */
const ALIVE = 30_000;

export type Json = { readonly [key: string]: unknown };

export interface Followed<T> {
  /** The document as it is now. */
  document(): T;
  /** Ask the kernel for something of the widget's own. */
  ask(content: Json): void;
  /** The view is gone. Closing twice is harmless. */
  close(): void;
}

/**
 * Follow a model's document.
 *
 * @param changed called after each change of the document.
 * @param answered called with messages that aren't about the document.
 */
export function follow<T>(
  model: WidgetModel,
  changed: () => void,
  answered: (content: Json) => void,
): Followed<T> {
  const view = crypto.randomUUID?.() ?? `${Math.random()}`;
  let { number, document } = whole(model.get("snapshot"));
  let open = true;
  let asked = false; // for the whole document

  const ask = (content: Json) => {
    try {
      model.send(content);
    } catch {
      // No kernel: the document stays as it is.
    }
  };
  const alive = () => ask({ type: "open", view, number });
  const heard = (content: unknown) => {
    if (!isObject(content)) return;
    if (content.type === "whole") {
      ({ number, document } = whole(content));
      asked = false;
      changed();
    } else if (content.type === "patch") {
      if (content.number === number) return;
      if (content.number !== number + 1) {
        if (!asked) ask({ type: "whole" });
        asked = true;
        return;
      }
      number += 1;
      document = patched(document, content.patch) as Json;
      changed();
    } else answered(content);
  };

  model.on("msg:custom", heard);
  alive();
  const timer = setInterval(alive, ALIVE);
  return {
    document: () => document as T,
    ask,
    close() {
      if (!open) return;
      open = false;
      clearInterval(timer);
      model.off("msg:custom", heard);
      ask({ type: "close", view });
    },
  };
}

function whole(content: unknown): { number: number; document: Json } {
  const { number, document } = (isObject(content) ? content : {}) as Json;
  return {
    number: typeof number === "number" ? number : -1,
    document: isObject(document) ? document : {},
  };
}

function isObject(value: unknown): value is Json {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The value with a merge patch put in; what didn't change stays the same object. */
export function patched(value: unknown, patch: unknown): unknown {
  if (!isObject(patch)) return patch;
  const made: Record<string, unknown> = isObject(value) ? { ...value } : {};
  for (const [key, change] of Object.entries(patch)) {
    if (change === null) delete made[key];
    else made[key] = patched(made[key], change);
  }
  return made;
}
