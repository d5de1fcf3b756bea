/* draw the formulas of a page, which arrive as TeX; a full stop or bracket after a formula stays on its line */
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".math")) {
    katex.render(element.textContent, element, { displayMode: element.tagName === "DIV", throwOnError: false });
    const next = element.nextSibling;
    const last = [...element.querySelectorAll(".base")].pop();
    const mark = next && next.nodeType === Node.TEXT_NODE && next.data.match(/^[.,;:)?]+/);
    if (mark && last) {
      const text = document.createElement("span");
      text.className = "after";
      text.textContent = mark[0];
      last.append(text);
      next.data = next.data.slice(mark[0].length);
    }
  }
  // a line would otherwise end with the two hyphens of an option
  for (const word of document.querySelectorAll("code.literal span.pre")) {
    word.classList.toggle("option", word.textContent.startsWith("-") && word.textContent.length < 30);
  }
  for (const block of document.querySelectorAll(".highlight-console pre")) {
    const texts = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    const nodes = [];
    while (texts.nextNode()) nodes.push(texts.currentNode);
    for (const node of nodes) {
      node.replaceWith(...node.data.split(/((?<=^|\s)--?\w[\w-]*|(?<=,)(?=\w))/).map((piece, place) => {
        if (place % 2 === 0) return piece;
        const option = document.createElement(piece ? "span" : "wbr");
        option.className = "option";
        option.textContent = piece;
        return option;
      }));
    }
  }
  // a long name breaks after a separator, but not inside a number; otherwise it would widen its column and cut the table
  for (const cell of document.querySelectorAll("article td, article code.literal, .sig-prename")) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    const long = [];
    while (texts.nextNode()) {
      const node = texts.currentNode;
      if (/\S{14}/.test(node.data) && !node.parentElement.closest(".katex")) long.push(node);
    }
    for (const node of long) {
      const pieces = node.data.split(/(?<=[./:_=+,\]])(?<!\d[.,]|^\/)(?=[\w[])/);
      node.replaceWith(...pieces.flatMap((piece, place) => (place ? [document.createElement("wbr"), piece] : [piece])));
    }
  }
  for (const bracket of document.querySelectorAll(".sig-name + .sig-paren")) bracket.after(document.createElement("wbr"));
  // a figure that is shown smaller than it is opens at its own size
  for (const image of document.querySelectorAll("article img")) {
    image.decode().then(() => {
      if (image.naturalWidth < 1.2 * image.clientWidth || image.closest("a")) return;
      const link = document.createElement("a");
      link.href = image.src;
      link.title = "open at full size";
      image.replaceWith(link);
      link.append(image);
    }, () => {});
  }
});
