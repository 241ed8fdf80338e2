// Draws the figures of a page (`#figures`: Plotly's own dictionaries) into the elements f0, f1, ..., each once it comes into view.
"use strict";
const figures = (() => {
  let all = [];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const seen = new IntersectionObserver(
    (entries) => entries.filter((one) => one.isIntersecting).forEach((one) => draw(one.target)), { rootMargin: "300px" });

  // Charts take the colours of the page's style, light or dark.
  function draw(place) {
    seen.unobserve(place);
    const { data, layout } = all[Number(place.id.slice(1))];
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const axis = (one) => ({ ...one, gridcolor: colour("--grid"), linecolor: colour("--edge") });
    const hoverlabel = { bgcolor: colour("--card"), bordercolor: colour("--edge"), font: { color: colour("--ink") } };
    const dress = { font: { ...layout.font, color: colour("--ink") }, hoverlabel, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis) };
    place.drawn = true;
    Plotly.react(place, data, { ...layout, ...dress }, { displayModeBar: false, responsive: true });
  }

  // Takes the figures that the page has now. What is drawn is drawn anew, in its place.
  function show() {
    all = JSON.parse(document.getElementById("figures").textContent);
    all.forEach((_, index) => {
      const place = document.getElementById(`f${index}`);
      place.drawn ? draw(place) : seen.observe(place);
    });
  }

  dark.addEventListener("change", show);
  addEventListener("beforeprint", () => all.forEach((_, index) => draw(document.getElementById(`f${index}`))));
  show();
  return { show };
})();
