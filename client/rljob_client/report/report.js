"use strict";
// Draws the figures in the colors of the page, again when these change, and at the width of the paper when printed.
const PAPER_WIDTH = 680; // pixels, of A4 and Letter without margins
const figures = JSON.parse(document.getElementById("figures").textContent);

function styled(layout, isPrinted) {
  const style = getComputedStyle(document.documentElement);
  const color = (name, printed) => (isPrinted ? printed : style.getPropertyValue(name).trim());
  const ink = color("--ink", "#1f2933"), muted = color("--muted", "#5b6774"), rule = color("--rule", "#dfe3e8");
  const axis = { gridcolor: rule, zeroline: false, linecolor: rule, automargin: true, title: { font: { size: 12 } } };
  const result = {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: muted },
    margin: { l: 52, r: 12, t: 10, b: 40 },
    legend: { traceorder: "normal", orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: ink } },
    width: isPrinted ? PAPER_WIDTH : undefined,
    hoverlabel: { bgcolor: color("--panel", "#f6f8fa"), font: { color: ink } },
  };
  for (const name of ["xaxis", "yaxis", "yaxis2"]) {
    if (name in layout) result[name] = { ...axis, ...layout[name], title: { ...axis.title, ...layout[name].title } };
  }
  return result;
}

function draw(isPrinted) {
  figures.forEach((figure, index) => {
    const options = { responsive: true, displaylogo: false, showSendToCloud: false, displayModeBar: !isPrinted && "hover" };
    Plotly.react(`chart-${index}`, figure.data, styled(figure.layout, isPrinted), options);
  });
}

draw(false);
const paper = matchMedia("print");
paper.addEventListener("change", () => draw(paper.matches));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(paper.matches));
addEventListener("beforeprint", () => draw(true));
addEventListener("afterprint", () => draw(false));
