// What the page does beyond showing: values where a reader points, and lines switched off by name.
"use strict";
const charts = JSON.parse(document.getElementById("data").textContent);

function words(value, percent) {
  if (value === null) return "not measured";
  const shown = percent ? 100 * value : value;
  const size = Math.abs(shown);
  const text = size !== 0 && (size < 1e-4 || size >= 1e7)
    ? shown.toExponential(2)
    : String(Number(shown.toPrecision(size >= 1000 ? 6 : 4)));
  return percent ? text + " %" : text;
}

// The place of the x nearest to a value, in a list that rises.
function nearest(list, value) {
  let best = 0;
  for (let i = 1; i < list.length; i++)
    if (Math.abs(list[i] - value) < Math.abs(list[best] - value)) best = i;
  return best;
}

function row(text, colour) {
  const line = document.createElement("div");
  if (colour) {
    const swatch = document.createElement("i");
    swatch.style.setProperty("--c", colour);
    line.append(swatch);
  }
  line.append(text); // a text node: names are never taken for HTML
  return line;
}

// The rows of a chart at x; y is 0 at the bottom and 1 at the top of the axes.
function rows(chart, x, y) {
  if (chart.layers) {
    const at = nearest(chart.x, x);
    const layer = Math.min(chart.layers.length - 1, Math.max(0, Math.floor(y * chart.layers.length)));
    const value = words(chart.cells[layer][at], chart.percent);
    return [chart.x[at], [row("layer " + chart.layers[layer] + ": " + value)]];
  }
  const shown = chart.lines.filter((line) => !hidden.has(line.group));
  if (!shown.length) return [x, []];
  const all = shown.map((line) => line.x[nearest(line.x, x)]);
  const at = all[nearest(all.map((value) => Math.abs(value - x)), 0)];
  const found = [];
  for (const line of shown) {
    const i = nearest(line.x, at);
    if (Math.abs(line.x[i] - at) > 0.5 && shown.length > 1) continue; // it has no point there
    let text = line.name + ": " + words(line.mean[i], chart.percent);
    if (line.low && line.low[i] !== line.high[i])
      text += " (" + words(line.low[i], chart.percent) + " to " + words(line.high[i], chart.percent) + ")";
    const colour = line.stage === undefined ? "var(--g" + (line.group % 8) + ")" : "var(--s" + line.stage + ")";
    found.push(row(text, colour));
  }
  return [at, found];
}

const hidden = new Set();
for (const box of document.querySelectorAll("nav input")) {
  const show = () => {
    const group = Number(box.dataset.group);
    if (box.checked) hidden.delete(group);
    else hidden.add(group);
    for (const part of document.querySelectorAll("figure .g" + group + ", figure.g" + group))
      part.classList.toggle("off", !box.checked);
  };
  box.addEventListener("change", show);
  show(); // a browser that loads the page again may keep the boxes as they were
}

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const chart = charts[Number(figure.dataset.chart)];
  const svg = figure.querySelector("svg");
  const [left, top, right, bottom] = chart.box;
  const [first, last] = chart.limits;
  let tip = null, cross = null;
  const end = () => { tip?.remove(); cross?.remove(); tip = cross = null; };
  const point = (event) => {
    const area = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / area.width;
    const x = (event.clientX - area.left) * scale, y = (event.clientY - area.top) * scale;
    if (x < left - 4 || x > right + 4 || y < top - 4 || y > bottom + 4) return end();
    const value = first + ((x - left) / (right - left)) * (last - first);
    const [at, found] = rows(chart, value, (bottom - y) / (bottom - top));
    if (!tip) {
      tip = document.createElement("div");
      tip.className = "tip";
      figure.append(tip);
      cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
      cross.setAttribute("class", "cross");
      svg.append(cross);
    }
    const place = left + ((at - first) / (last - first)) * (right - left);
    for (const [name, to] of [["x1", place], ["x2", place], ["y1", top], ["y2", bottom]])
      cross.setAttribute(name, to);
    tip.replaceChildren(row((chart.each > 1 ? "around " : "") + chart.xName + " " + words(at, false)), ...found);
    const inside = figure.getBoundingClientRect();
    const room = figure.clientWidth - tip.offsetWidth - 4;
    const beside = event.clientX - inside.left + 14;
    tip.style.left = Math.max(4, beside > room ? event.clientX - inside.left - tip.offsetWidth - 14 : beside) + "px";
    // above the axes, so that it hides words and no values; but not above the window
    const above = area.top + top / scale - tip.offsetHeight - 4;
    tip.style.top = Math.max(above, 4) - inside.top + "px";
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", end);
}
