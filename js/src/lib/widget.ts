import { type ComponentType, h, render } from "preact";

/** The part of anywidget's model that views rely on. */
export interface WidgetModel {
  get(name: string): unknown;
  on(event: string, callback: (content: unknown) => void): void;
  off(event: string, callback: (content: unknown) => void): void;
  send(content: unknown): void;
}

export interface RenderProps {
  model: WidgetModel;
  el: HTMLElement;
  signal?: AbortSignal;
}

/**
 * Show `View` in `el` for as long as the view lives and draw it again whenever the trait changes.
 * Returns the cleanup; cleaning up twice is harmless.
 */
export function mount<T>(
  { model, el }: RenderProps,
  trait: string,
  View: ComponentType<{ snapshot: T }>,
): () => void {
  const draw = () => render(h(View, { snapshot: model.get(trait) as T }), el);
  const cleanup = () => {
    model.off(`change:${trait}`, draw);
    render(null, el);
  };
  model.on(`change:${trait}`, draw);
  draw();
  return cleanup;
}
