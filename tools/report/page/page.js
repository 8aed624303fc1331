"use strict";
// Shows the values of a chart at the pointer, and opens folded tables for printing. The page works without it.
const hover = document.getElementById("hover");
const SVG = "http://www.w3.org/2000/svg";

function nearest(at, x) {
  let best = 0;
  for (let i = 1; i < at.length; i++) if (Math.abs(at[i] - x) < Math.abs(at[best] - x)) best = i;
  return best;
}

function show(event, chart, data, pointer) {
  const box = chart.getBoundingClientRect();
  const i = nearest(data.at, ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width);
  const rows = data.rows.filter(([, texts]) => texts[i]).map(([name, texts]) => `${name}: ${texts[i]}`);
  hover.textContent = [`${data.label} ${data.x[i]}`, ...rows].join("\n");
  hover.hidden = false;
  const left = Math.min(event.pageX + 14, document.documentElement.clientWidth - hover.offsetWidth - 6);
  hover.style.left = `${Math.max(left, 4)}px`;
  hover.style.top = `${event.pageY + 16}px`;
  pointer.setAttribute("d", `M${data.at[i]} 10V144`);
}

for (const chart of document.querySelectorAll("svg[data-hover]")) {
  const data = JSON.parse(chart.dataset.hover);
  const pointer = document.createElementNS(SVG, "path");
  pointer.setAttribute("class", "pointer");
  chart.append(pointer);
  chart.addEventListener("pointermove", (event) => show(event, chart, data, pointer));
  chart.addEventListener("pointerleave", () => {
    hover.hidden = true;
    pointer.removeAttribute("d");
  });
}

addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
});
