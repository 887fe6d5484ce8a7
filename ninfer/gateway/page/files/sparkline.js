// A small curve of the last samples. The figure beside it says the same in words.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 60;
const HEIGHT = 16;

export function sparkline() {
  const svg = shape("svg", {
    class: "spark",
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  const line = shape("polyline", { "vector-effect": "non-scaling-stroke" });
  svg.append(line);
  return {
    element: svg,
    /** Newest at the right edge; the highest sample reaches the top. */
    show(samples) {
      const most = Math.max(1, ...samples);
      const points = samples.map((sample, index) => {
        const x = WIDTH - 1 - (samples.length - 1 - index);
        const y = HEIGHT - 1 - ((HEIGHT - 2) * sample) / most;
        return `${x},${y.toFixed(2)}`;
      });
      line.setAttribute("points", points.join(" "));
    },
  };
}

function shape(tag, attributes) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) {
    element.setAttribute(name, value);
  }
  return element;
}
