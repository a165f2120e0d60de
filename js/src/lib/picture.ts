/**
 * While a live widget is on screen it stands in for its own static picture, which the kernel put
 * into the output before it for saved notebooks. The picture is known by its alternative text and
 * looked for only among the outputs of the same cell; elsewhere than in JupyterLab and Notebook 7
 * nothing is found and both are shown.
 */
export function standInFor(el: HTMLElement, alt: string): () => void {
  let restore = () => {};
  let frame = 0;
  let tries = 120; // the host attaches the element some frames after it asked for the view
  const attached = () => {
    if (el.isConnected) restore = hidePicture(el, alt);
    else if (tries--) frame = requestAnimationFrame(attached);
  };
  attached();
  return () => {
    cancelAnimationFrame(frame);
    restore();
  };
}

function hidePicture(el: HTMLElement, alt: string): () => void {
  const output = el.closest<HTMLElement>(".jp-OutputArea-child");
  const area = output?.parentElement;
  if (!output || !area || !alt) return () => {};
  let hidden: HTMLElement | null = null;
  const look = () => {
    for (const image of area.querySelectorAll<HTMLImageElement>("img[alt]")) {
      const found = image.closest<HTMLElement>(".jp-OutputArea-child");
      if (image.alt !== alt || !found || found === output || found.style.display) continue;
      hidden = found;
      hidden.style.display = "none";
      observer.disconnect();
      return;
    }
  };
  const observer = new MutationObserver(look);
  observer.observe(area, { childList: true, subtree: true });
  look();
  return () => {
    observer.disconnect();
    hidden?.style.removeProperty("display");
    hidden = null;
  };
}
