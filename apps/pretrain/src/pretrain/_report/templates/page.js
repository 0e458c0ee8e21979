// The values under the pointer, read from the lines of the chart.
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
      path.dataset.label,
      path.getAttribute("d").slice(1).split("L").map((point) => point.split(" ").map(parseFloat)),
    ]);
    const box = chart.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const words = lines.map(([label, points]) => {
      const [, down] = points.reduce((a, b) => (Math.abs(b[0] - 1000 * share) < Math.abs(a[0] - 1000 * share) ? b : a));
      const value = top - (down / 1000) * (top - bottom);
      return `${label}: ${Number((isLog ? 10 ** value : value).toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 })}`;
    });
    const at = Number((left + share * (right - left)).toPrecision(4)).toLocaleString("en");
    output.textContent = [`${chart.dataset.unit} ${at}`, ...words].join(" · ");
    cursor.setAttribute("x1", `${100 * share}%`);
    cursor.setAttribute("x2", `${100 * share}%`);
    chart.append(cursor);
  });
  chart.addEventListener("pointerleave", () => {
    output.textContent = "";
    cursor.remove();
  });
}
