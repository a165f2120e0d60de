import htm from "htm";
import { h, type VNode } from "preact";

/** Templates to preact nodes: every value becomes text or a property, never markup. */
export const html = htm.bind(h) as (
  strings: TemplateStringsArray,
  ...values: unknown[]
) => VNode<Record<string, unknown>>;
