// The entry of the bundle: the prefix cache as an icicle, for anywidget.

import type { Snapshot } from "./lib/model";
import { standInFor } from "./lib/picture";
import { mount, type RenderProps } from "./lib/widget";
import { Trie } from "./trie/view";

function render(props: RenderProps): () => void {
  const unmount = mount<Snapshot>(props, "snapshot", Trie);
  const first = props.model.get("snapshot") as Partial<Snapshot> | undefined;
  const restore = standInFor(props.el, first?.alt ?? "");
  const cleanup = () => {
    restore();
    unmount();
  };
  props.signal?.addEventListener("abort", cleanup, { once: true });
  return cleanup;
}

export default { render };
