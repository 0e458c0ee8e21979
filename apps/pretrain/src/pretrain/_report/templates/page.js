// The values under the pointer, read from the lines of the chart. Of many lines, those nearest to the pointer.
const MOST = 12, NEAREST = 6;
const written = (value) =>
  value !== 0 && Math.abs(value) < 0.01
    ? value.toExponential(2).replace(/\.?0*e/, "e").replace("e+", "e")
    : value.toLocaleString("en", { maximumSignificantDigits: 4 });
for (const chart of document.querySelectorAll(".chart")) {
  const output = chart.closest("figure").querySelector("output");
  const [left, right] = chart.dataset.x.split(",").map(Number);
  const isLog = chart.dataset.log === "1";
  const [bottom, top] = chart.dataset.y.split(",").map((value) => (isLog ? Math.log10(value) : Number(value)));
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y2", "100%");
  let lines = null;
  chart.addEventListener("pointermove", (event) => {
    lines ??= [...chart.querySelectorAll("path[data-label]")].map((path) => [
      path,
      path.getAttribute("d").slice(1).split("L").map((point) => point.split(" ").map(parseFloat)),
    ]);
    const box = chart.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const height = (1000 * (event.clientY - box.top)) / box.height;
    let found = lines
      .filter(([path]) => getComputedStyle(path).display !== "none")
      .map(([path, points]) => {
        const [across, down] = points.reduce((a, b) =>
          Math.abs(b[0] - 1000 * share) < Math.abs(a[0] - 1000 * share) ? b : a,
        );
        const value = top - (down / 1000) * (top - bottom);
        const isBeside = 1000 * share < points[0][0] - 20 || 1000 * share > points.at(-1)[0] + 20;
        return { isBeside, distance: Math.abs(down - height), words: `${path.dataset.label}: ${written(isLog ? 10 ** value : value)}` };
      })
      .filter(({ isBeside }) => !isBeside);
    const rest = found.length > MOST ? found.length - NEAREST : 0;
    if (rest) found = found.sort((a, b) => a.distance - b.distance).slice(0, NEAREST);
    const at = Number((left + share * (right - left)).toPrecision(4)).toLocaleString("en");
    const words = found.map((line) => line.words);
    output.textContent = [`${chart.dataset.unit} ${at}`, ...words, ...(rest ? [`and ${rest} more`] : [])].join(" · ");
    cursor.setAttribute("x1", `${100 * share}%`);
    cursor.setAttribute("x2", `${100 * share}%`);
    chart.append(cursor);
  });
  chart.addEventListener("pointerleave", () => {
    output.textContent = "";
    cursor.remove();
  });
}
const hide = document.querySelector("#hide");
if (hide) {
  hide.hidden = false;
  hide.addEventListener("click", () => {
    for (const box of hide.form.querySelectorAll("input")) box.checked = false;
  });
}
