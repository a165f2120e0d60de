// The entry of the bundle: pages by conversation and residence, live, for anywidget.

import { render as draw, h } from "preact";
import { follow, type Json } from "./lib/live";
import { standInFor } from "./lib/picture";
import type { RenderProps } from "./lib/widget";
import type { Pages } from "./pages/model";
import { PagesWidget } from "./pages/view";

function render({ model, el, signal }: RenderProps): () => void {
  let answer: Json | null = null;
  let frame = 0;
  const show = () => {
    frame = 0;
    draw(h(PagesWidget, { document: followed.document(), answer, ask: followed.ask }), el);
  };
  // One drawing for what comes within a frame.
  const soon = () => {
    frame ||= requestAnimationFrame(show);
  };
  const followed = follow<Partial<Pages>>(model, soon, (content) => {
    answer = content;
    soon();
  });
  show();
  const restore = standInFor(el, (model.get("picture") as string | undefined) ?? "");
  const cleanup = () => {
    cancelAnimationFrame(frame);
    restore();
    followed.close();
    draw(null, el);
  };
  signal?.addEventListener("abort", cleanup, { once: true });
  return cleanup;
}

export default { render };
