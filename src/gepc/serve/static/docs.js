// Shows openapi.json, without a framework and without requests to other sites.

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

// Text with `code` in it.
function prose(tag, text = "") {
  return element(tag, "", ...text.split("`").map((part, place) => (place % 2 ? element("code", part) : part)));
}

function options(operation) {
  return (operation.parameters ?? []).map((parameter) => {
    const item = element("li", "", element("code", parameter.name));
    const text = parameter.description ?? parameter.schema?.description;
    if (text) item.append(prose("span", `: ${text}`));
    return item;
  });
}

function statuses(operation) {
  return Object.entries(operation.responses ?? {}).map(([status, response]) =>
    element("li", "", element("code", status), prose("span", `: ${response.description}`)));
}

function endpoint(path, method, operation) {
  const made = element("section");
  made.className = "endpoint";
  made.append(
    element("h2", "", element("span", method.toUpperCase()), ` ${path}`),
    prose("p", operation.summary),
    prose("p", operation.description),
    element("ul", "", ...options(operation), ...statuses(operation)),
  );
  return made;
}

const examples = document.getElementById("examples");
examples.textContent = examples.textContent.replaceAll("ADDRESS", location.origin);
const schema = await (await fetch("/openapi.json", { credentials: "omit" })).json();
const found = Object.entries(schema.paths).flatMap(([path, operations]) =>
  Object.entries(operations).map(([method, operation]) => endpoint(path, method, operation)));
document.getElementById("endpoints").append(...found);
