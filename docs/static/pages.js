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
});
