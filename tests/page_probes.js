// SPDX-License-Identifier: Apache-2.0
// What tests of the dashboard ask the page, as functions that run in it.

/** Every visible text with the contrast between its computed colour and what is behind it. */
function contrasts() {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data];
    return parts.map((part, at) => at < 3 ? part : part / 255);
  };
  const over = (top, below) => below.map((part, at) => top[at] * top[3] + part * (1 - top[3]));
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => part / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const line = (node) => node ? [...line(node.parentElement), node] : [];
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement, text = texts.currentNode.data.trim();
    const unseen = node.closest("script, noscript, desc, option, .skip:not(:focus)");
    if (!text || unseen || !node.getBoundingClientRect().width) continue;
    const styles = line(node).map((one) => getComputedStyle(one));
    const below = styles.map((style) => rgba(style.backgroundColor))
      .reduce((under, layer) => over(layer, under), [255, 255, 255]);
    const colour = rgba(node instanceof SVGElement ? styles.at(-1).fill : styles.at(-1).color);
    colour[3] *= styles.reduce((product, style) => product * Number(style.opacity), 1);
    const [a, b] = [light(over(colour, below)), light(below)].sort((x, y) => y - x);
    found.push([text.slice(0, 40), (a + 0.05) / (b + 0.05)]);
  }
  return found;
}

/** A name for each element that the keyboard should reach. */
function focusable() {
  const kinds = "a[href], button, select, input, textarea, summary, [tabindex]";
  return [...document.querySelectorAll(kinds)]
    .filter((node) => node.tabIndex >= 0 && !node.disabled && node.checkVisibility())
    .map((node) => (node.dataset.probe ??= String(Math.random())));
}

/** The name of the element with the focus, and whether that is visible. */
function focused() {
  const node = document.activeElement, style = getComputedStyle(node);
  const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  return [node.dataset.probe ?? "", node === document.body || outlined];
}
