// Draws the charts in the colours of the page, without the runs whose boxes are not checked.
"use strict";
const figures = JSON.parse(document.getElementById("data").textContent);
const plots = [...document.querySelectorAll(".plot")];
const boxes = [...document.querySelectorAll("nav input")];

const SMALL = { size: 12 };
const AXIS = {
  zeroline: false, gridcolor: "var(--grid)", automargin: true, title: { font: SMALL },
  ticks: "outside", tickcolor: "#0000", // invisible, to keep the labels 0 of both axes apart
};
const X_AXIS = { ...AXIS, showgrid: false, tickformat: "d", spikecolor: "var(--ink)", spikethickness: 1 };
const THEME = {
  height: 240, margin: { l: 44, r: 8, t: 8, b: 36 },
  paper_bgcolor: "var(--card)", plot_bgcolor: "var(--card)",
  font: { ...SMALL, color: "var(--ink)", family: "system-ui, sans-serif" },
  hovermode: "x unified", hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--ink)" },
  showlegend: false, bargap: 0.15,
  legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
  // On a touch screen a finger scrolls the page, and does not zoom the chart.
  dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
  template: { data: { // what all traces of a type have
    bar: [{ marker: { line: { width: 0 } } }],
    heatmap: [{ colorscale: "Viridis", hoverongaps: false, colorbar: { thickness: 12, outlinewidth: 0 } }],
  } },
  uirevision: "kept", // keeps the reader's zoom when the chart is drawn again
};

// The figure's layout, with the theme for all that the layout leaves open.
function themed({ xaxis, yaxis, ...layout }) {
  const titled = (axis) => ({ ...axis, title: { ...axis.title, ...AXIS.title } });
  const y = { ...AXIS, tickformat: yaxis.type === "category" ? "" : "~g", ...yaxis };
  const x = { ...X_AXIS, showspikes: layout.hovermode !== "closest", ...xaxis };
  return { ...THEME, ...layout, xaxis: titled(x), yaxis: titled(y) };
}

// plotly takes fixed colours only. "var(--g1)" becomes the value that report.css gives it now, as
// "#d55e00", and "var(--g1-band)" the same with some transparency, "#d55e0029".
function coloured(figure) {
  const style = getComputedStyle(document.documentElement);
  return JSON.parse(JSON.stringify(figure), (key, value) => {
    const found = typeof value === "string" && /^var\((--\w+?)(-band)?\)$/.exec(value);
    return found ? style.getPropertyValue(found[1]).trim() + (found[2] ? "29" : "") : value;
  });
}

function draw(plot, at) {
  const hidden = new Set(boxes.filter((box) => !box.checked).map((box) => box.value));
  const card = plot.closest("figure");
  card.hidden = hidden.has(card.dataset.group);
  if (card.hidden) return; // a hidden card has no width to draw in
  const { data, layout } = coloured({ ...figures[at], layout: themed(figures[at].layout) });
  for (const trace of data) trace.visible = !hidden.has(trace.legendgroup);
  Plotly.react(plot, data, layout, { responsive: true, displayModeBar: false });
}

// Each chart is a task of its own, so that the first charts show while the others are drawn.
function drawAll() {
  plots.forEach((plot, at) => setTimeout(draw, 0, plot, at));
}

for (const box of boxes) box.addEventListener("change", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll(); // reads the boxes, whose state a browser keeps at a reload
